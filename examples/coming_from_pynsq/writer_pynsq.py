import nsq
import tornado.ioloop


def finish(connection, data):
    print("failed" if isinstance(data, nsq.Error) else data.decode(), flush=True)
    tornado.ioloop.IOLoop.current().stop()


def publish():
    writer.pub("events", b"hello", callback=finish)


writer = nsq.Writer(["127.0.0.1:4150"])
tornado.ioloop.IOLoop.current().call_later(0.5, publish)  # it refuses until it is connected
nsq.run()
