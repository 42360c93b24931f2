"""Publishes messages with headers, over HTTP."""

from __future__ import annotations

import struct

from nsparq.headers import encode_headers
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access


def publish_with_headers(nsqd: str, topic: str, *messages: tuple[bytes, dict[str, str]]) -> None:
    """`nsqd` is the address of its HTTP API."""
    packed = struct.pack(">I", len(messages))
    for body, headers in messages:
        block = encode_headers(headers)
        packed += struct.pack(">II", 4 + len(block) + len(body), len(block)) + block + body
    with Client(nsqd, Access()) as client:
        client.post("/mpub", packed, topic=topic, binary="true", headers="true")
