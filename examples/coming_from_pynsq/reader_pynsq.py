import nsq


def handle(message):
    print(message.body.decode(), flush=True)
    return True


nsq.Reader(
    topic="events",
    channel="print",
    message_handler=handle,
    nsqd_tcp_addresses=["127.0.0.1:4150"],
    max_in_flight=9,
)
nsq.run()
