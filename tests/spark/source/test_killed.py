"""Log mode with a broker and a query that are killed repeatedly: every message once."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter

import pytest

from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Refused, Unreachable
from nsparq.spark.source import driver, peers
from nsparq.spark.source.range_reader import close_idle
from tests.spark.source.support import Query
from tests.support import BrokerProcess

KILLS = 6


class Publisher(threading.Thread):
    """Publishes numbered messages as fast as they are taken; knows which were acknowledged."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self.acknowledged: set[bytes] = set()
        self.stopping = threading.Event()

    def run(self) -> None:
        number = 0
        with Client(self.address, Access(timeout=2.0)) as client:
            while not self.stopping.wait(0.002):
                bodies = [b"%08d" % (number + i) for i in range(20)]
                number += 20
                try:
                    client.post("/mpub", b"\n".join(bodies), topic="t")
                    self.acknowledged.update(bodies)
                except (Unreachable, Refused):
                    # Perhaps published, perhaps not; never published again.
                    time.sleep(0.02)


def test_every_message_is_read_once_however_often_broker_and_query_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "IDLE_S", 0.05)
    monkeypatch.setattr(peers, "MAX_AWAY_S", 0.1)
    chance = random.Random(7)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    flags = {"broadcast_address": "127.0.0.1", "http_address": address, "max_bytes_per_file": 20_000}
    with BrokerProcess(**flags) as broker:
        publisher = Publisher(address)
        publisher.start()
        try:
            with Query(
                nsqd=address, maxRowsPerTrigger=300, partitionBytes="2k", requestTimeout="2s", retryFor="20s"
            ) as query:
                for _ in range(KILLS):
                    for _ in range(chance.randrange(2, 6)):
                        query.step()
                    killing = threading.Thread(target=lambda: (broker.kill(), broker.start()))
                    killing.start()
                    # Some batches are planned and not run: the query is killed in between.
                    if query.plan():
                        query.start()
                    query.step()
                    killing.join()
                publisher.stopping.set()
                publisher.join()
                deadline = time.monotonic() + 30
                while publisher.acknowledged - set(query.bodies) and time.monotonic() < deadline:
                    query.step()
                query.drain()
                found = Counter(query.bodies)
        finally:
            publisher.stopping.set()
            publisher.join()
            close_idle()
    assert [body for body, count in found.items() if count > 1] == []
    assert publisher.acknowledged - found.keys() == set()
    assert len(found) > 500
