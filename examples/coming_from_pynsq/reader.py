from nsparq.client import Message, Subscriptions

app = Subscriptions(nsqd=["127.0.0.1:4150"])


@app.subscribe("events", "print", max_in_flight=9)
async def handle(message: Message) -> None:
    print(message.body.decode(), flush=True)


app.run()
