"""Try a failed message again, a few times, after growing delays."""

from dataclasses import dataclass

from nsparq.client import Config, Message, Subscriptions

app = Subscriptions(nsqd=["127.0.0.1:4150"], config=Config(backoff_multiplier=0.1))


@dataclass
class Charge:
    cents: int


@app.subscribe(
    "charges",
    "bank",
    retries=3,  # after the first attempt
    retry_delay=0.5,  # then 1, then 2 seconds
    retry_on=(ConnectionError, TimeoutError),
    dead_letter="charges.dead",
)
async def charge(request: Charge, message: Message) -> None:
    if request.cents <= 0:
        raise ValueError("nothing to charge")  # not in retry_on: a dead letter at once
    if message.attempts < 3:
        raise ConnectionError("the bank does not answer")
    print(f"charged {request.cents} cents at attempt {message.attempts}", flush=True)


if __name__ == "__main__":
    app.run()
