"""docs/how-to/sizing.md: the rule for the disk is exact."""

from __future__ import annotations

from tests.support import BrokerThread


def test_bytes_on_disk_are_those_of_the_rule() -> None:
    """messages × (size + 4) + publishes × 48, whatever the number of channels."""
    with BrokerThread() as broker, broker.connect() as connection:
        broker.control("create", "batches", "one")
        broker.control("create", "batches", "two")
        for _ in range(5):
            connection.mpub("batches", [b"x" * 200] * 200)
        for _ in range(50):
            connection.pub("single", b"x" * 200)
        sizes = {topic["topic_name"]: topic["log_bytes"] for topic in broker.stats()["topics"]}
    assert sizes == {"batches": 1000 * 204 + 5 * 48, "single": 50 * 204 + 50 * 48}
