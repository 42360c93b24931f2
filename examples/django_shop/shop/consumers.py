import django

django.setup()  # before the models are imported

from django.db import close_old_connections  # noqa: E402
from shop.models import Order  # noqa: E402

from nsparq.client import Subscriptions  # noqa: E402

app = Subscriptions(nsqd=["127.0.0.1:4150"])


@app.subscribe("orders", "billing", retries=3, retry_delay=1, dead_letter="orders.dead")
def bill(message: dict[str, int]) -> None:
    """A plain function: it runs in a thread, where the ORM may wait for the database."""
    close_old_connections()
    # The message may come twice: only the first one changes something.
    if Order.objects.filter(pk=message["id"], billed=False).update(billed=True):
        print(f"billed order {message['id']}", flush=True)
