"""What an order by keys costs: messages through the broker, delivered and finished, per second.

    python -m benchmarks.decisions.ordering

    plain         227,017 messages/s of processor time, 1.00 x plain
    /k             99,616 messages/s of processor time, 0.44 x plain
    header:k       91,355 messages/s of processor time, 0.40 x plain
    few keys       66,517 messages/s of processor time, 0.29 x plain

(2 busy cores, Python 3.11. Publishing is part of it, and for headers encoding them.)

The broker runs without a server. Four consumers with RDY 500 finish what they get at once. The keys
of the last row are few, so most messages are parked first and sent when the one before is finished.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nsparq.headers import encode_headers
from tests.broker.rig import FakeClient, Rig, parse_frames

MESSAGES = 200_000
CHUNK = 2000
ROUNDS = 3


class Counting(FakeClient):
    """Keeps the ids of what it got."""

    def _keep(self, data: bytes | memoryview) -> None:
        self.messages += parse_frames(bytes(data))


def rate(ordered_by: str, keys: int) -> float:
    with tempfile.TemporaryDirectory(prefix="ordering-") as directory:
        rig = Rig(Path(directory))
        rig.channel().ordering.change(ordered_by)
        clients = [Counting(str(number)) for number in range(4)]
        for client in clients:
            rig.broker.subscribe(client, "t", "c")
            rig.ready(client, 500)
        start = time.process_time()
        for first in range(0, MESSAGES, CHUNK):
            numbers = range(first, first + CHUNK)
            bodies = [b'{"k":"%d","n":%d,"x":"%s"}' % (n % keys, n, b"x" * 80) for n in numbers]
            blocks: Sequence[bytes] = ()
            if ordered_by.startswith("header:"):
                blocks = [encode_headers({"k": str(number % keys)}) for number in numbers]
            rig.publish("t", *bodies, blocks=blocks)
            while any(client.messages for client in clients):
                for client in clients:
                    taken, client.messages = client.messages, []
                    rig.finish(client, *taken)
        seconds = time.process_time() - start
        rig.close()
    return MESSAGES / seconds


def main() -> None:
    rows = [
        ("plain", "", 10_000),
        ("/k", "/k", 10_000),
        ("header:k", "header:k", 10_000),
        ("few keys", "/k", 100),
    ]
    rates: dict[str, list[float]] = {name: [] for name, _, _ in rows}
    for _ in range(ROUNDS):
        for name, ordered_by, keys in rows:
            rates[name].append(rate(ordered_by, keys))
    plain = statistics.median(rates["plain"])
    for name, found in rates.items():
        middle = statistics.median(found)
        sys.stdout.write(
            f"{name:10} {middle:10,.0f} messages/s of processor time, {middle / plain:.2f} x plain\n"
        )


if __name__ == "__main__":
    main()
