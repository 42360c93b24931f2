"""Messages that cannot be handled become dead letters."""

from dataclasses import dataclass

from nsparq.client import DeadLetter, Reject, Subscriptions

app = Subscriptions(nsqd=["127.0.0.1:4150"])


@dataclass
class Payment:
    account: str
    cents: int


@app.subscribe("payments", "ledger", dead_letter="payments.dead")
async def book(payment: Payment) -> None:
    if payment.cents <= 0:
        raise Reject("nothing to pay")  # a retry would not help
    print("booked", payment.cents, flush=True)


@app.subscribe("payments.dead", "report")
async def report(letter: DeadLetter) -> None:
    print(f"{letter.error} (attempt {letter.attempts}): {letter.body.decode()}", flush=True)


if __name__ == "__main__":
    app.run()
