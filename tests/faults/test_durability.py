"""The three durability modes, as far as killing a process can show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import REFERENCE, start_process

from .load import drain, drain_messages

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason="the reference has no --durability")

BODIES = [b"%05d" % i for i in range(600)]


@pytest.mark.parametrize("flags", [{}, {"durability": "fsync"}], ids=["by default", "fsync"])
def test_acknowledged_messages_survive_a_kill(tmp_path: Path, flags: dict[str, str]) -> None:
    with start_process(tmp_path, **flags) as broker:
        with broker.connect() as connection:
            for body in BODIES[:100]:
                connection.pub("t", body)
            connection.mpub("t", BODIES[100:])
        broker.kill()
        broker.start()
        assert drain(broker, "t", "c") == BODIES


@pytest.mark.parametrize("durability", ["os", "fsync", "memory"])
def test_nothing_is_lost_by_a_clean_stop(tmp_path: Path, durability: str) -> None:
    """Waiting, in-flight, requeued and deferred messages all survive."""
    with start_process(tmp_path, durability=durability, mem_queue_size=100) as broker:
        with broker.connect() as connection, broker.connect() as publisher:
            connection.identify()
            connection.sub("t", "c", rdy=50)
            publisher.mpub("t", BODIES)
            publisher.dpub("t", 500, b"deferred")
            held = connection.read_messages(50)
            connection.req(held[0].id, 500)
            connection.barrier()
            broker.restart()
        found = drain(broker, "t", "c", quiet=1.5)
    assert sorted(found) == sorted([*BODIES, b"deferred"])


@pytest.mark.parametrize("durability", ["os", "fsync", "memory"])
def test_no_id_is_used_twice_across_crashes(tmp_path: Path, durability: str) -> None:
    """In memory mode the messages of a killed broker are gone, but a consumer may have acted on
    their ids."""
    bodies: dict[bytes, bytes] = {}
    with start_process(tmp_path, durability=durability) as broker:
        for crash in range(3):
            broker.publish("t", *(b"%d-%b" % (crash, body) for body in BODIES))
            found = drain_messages(broker, "t", "c", quiet=0.3)
            assert len({message.id for message in found}) >= len(BODIES)
            for message in found:
                assert bodies.setdefault(message.id, message.body) == message.body
            broker.kill()
            broker.start()


def test_memory_mode_uses_no_id_twice_even_after_a_quick_restart(tmp_path: Path) -> None:
    seen: set[bytes] = set()
    with start_process(tmp_path, durability="memory") as broker:
        for crash in range(8):
            with broker.connect() as connection:
                connection.identify()
                connection.sub("t", "c", rdy=1)
                connection.pub("t", b"%d" % crash)
                message = connection.read_message()
                assert message.body == b"%d" % crash
                assert message.id not in seen
                seen.add(message.id)
                broker.kill()
            broker.start()
