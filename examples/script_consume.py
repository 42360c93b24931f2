"""Print messages until none has come for a second."""

from nsparq.client.sync import consume

for message in consume("lines", "script", nsqd=["127.0.0.1:4150"], idle_timeout=1):
    print(message.body.decode())
