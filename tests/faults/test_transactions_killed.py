"""nsqd is killed repeatedly while transactions are staged and committed. Each is published once."""

from __future__ import annotations

import json
import random
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nsparq.storage.raw_batch import iter_batches
from tests.support import BrokerProcess, ConnectionClosed, wait_until

TOPICS = ("left", "right")
CHUNKS = 12
CHUNK = 40
KILLS = 6


class Writer:
    """A producer that repeats each request until it gets an answer."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self.committed = 0
        self.attempts = 0

    def _call(self, path: str, body: bytes, **query: Any) -> dict[str, Any]:
        answer = self._broker.request("POST", f"{path}?{urlencode(query)}", body)
        fields: dict[str, Any] = json.loads(answer.body)
        if answer.status != 200 and fields.get("message") != "ALREADY_COMMITTED":
            raise ConnectionError(str(fields))
        return fields

    def publish(self) -> None:
        """Run the next transaction, or the rest of it."""
        self.attempts += 1
        which: dict[str, Any] = {"producer": "writer", "sequence": self.committed}
        parts: dict[str, int] = {}
        for topic in TOPICS:
            part = f"{topic}-{self.attempts}"
            for chunk in range(CHUNKS):
                bodies = [b"%d %d" % (self.committed, chunk * CHUNK + i) for i in range(CHUNK)]
                body = struct.pack(">I", CHUNK) + b"".join(struct.pack(">I", len(b)) + b for b in bodies)
                fields = self._call("/transaction/stage", body, **which, part=part, topic=topic)
                parts[part] = fields.get("messages", 0)
        self._call("/transaction/commit", json.dumps({"parts": parts}).encode(), **which)
        self.committed += 1

    def run(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            try:
                self.publish()
            except (OSError, ValueError, ConnectionClosed, NotImplementedError):
                is_over.wait(0.01)  # it is being killed or started


def stored(broker: BrokerProcess, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    position = broker.request("GET", f"/topic/positions?topic={topic}").expect_json()
    sequence = position["earliest"]
    while sequence < position["latest"]:
        answer = broker.request("GET", f"/topic/read?topic={topic}&from={sequence}")
        for batch in iter_batches(answer.body):
            found.update(batch.between(sequence, 1 << 63).bodies())
        sequence = int(answer.header("X-Nsparq-Next") or 0)
    return found


def test_every_transaction_is_published_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    with BrokerProcess(tmp_path, retention_bytes=1 << 40) as broker:
        writer, is_over = Writer(broker), threading.Event()
        thread = threading.Thread(target=writer.run, args=(is_over,))
        thread.start()
        try:
            for _ in range(KILLS):
                target = writer.committed + 2
                wait_until(lambda target=target: writer.committed >= target)
                is_over.wait(chance.uniform(0, 0.05))
                broker.kill()
                broker.start()
        finally:
            is_over.set()
            thread.join()
        writer.publish()
        numbers = range(CHUNKS * CHUNK)
        expected = Counter(b"%d %d" % (sequence, i) for sequence in range(writer.committed) for i in numbers)
        for topic in TOPICS:
            assert stored(broker, topic) == expected, f"seed {seed}"
        assert writer.attempts > writer.committed, "some were interrupted"
