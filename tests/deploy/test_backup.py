"""docs/how-to/production.md: a copy of a data path is the broker as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import BrokerProcess

BODIES = [b"%03d" % number for number in range(100)]


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "as a snapshot finds it"])
def test_a_copy_has_what_waited_and_where_the_channels_stood(tmp_path: Path, crash: bool) -> None:
    """A snapshot of the file system is, to nsqd, what a killed process leaves."""
    original, restored = tmp_path / "nsqd", tmp_path / "elsewhere"
    original.mkdir()
    with BrokerProcess(original, checkpoint_interval=0.05) as broker:
        broker.control("create", "orders", "billing")
        broker.publish("orders", *BODIES)
        with broker.connect() as consumer:
            consumer.sub("orders", "billing", rdy=40)
            for message in consumer.read_messages(40):
                consumer.fin(message.id)
            consumer.rdy(0)
            consumer.barrier()
        if crash:
            broker.kill()
        else:
            broker.stop()
        shutil.copytree(original, restored)
        broker.start()
        broker.http("POST", "/channel/empty", topic="orders", channel="billing")
    with BrokerProcess(restored) as broker, broker.connect() as consumer:
        stats = broker.channel_stats("orders", "billing")
        assert stats is not None
        # After a crash what was finished in the last moment may be there again.
        assert stats["depth"] == 60 or (crash and 60 <= stats["depth"] <= 100)
        consumer.sub("orders", "billing", rdy=2500)
        messages = consumer.read_messages(stats["depth"], finish=True)
        assert {message.body for message in messages} >= {*BODIES[40:]}
