"""Publish the lines of standard input."""

import sys

from nsparq.client.sync import Producer

with Producer("127.0.0.1:4150") as producer:
    for line in sys.stdin:
        producer.publish("lines", line.strip().encode())
