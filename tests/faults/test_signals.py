"""Signals, and a data path that is already in use."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support import start_process, wait_until
from tests.support.polling import DEADLINE

from .load import drain, running_load


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_stops_cleanly_under_load_and_keeps_what_was_acknowledged(tmp_path: Path, number: int) -> None:
    with start_process(tmp_path) as broker, running_load(broker, "t") as load:
        load.await_more(2000)
        load.gate.clear()
        broker.signal(number)
        assert broker.wait(DEADLINE) == 0
        acknowledged = load.acknowledged()
        broker.start()
        load.gate.set()
        load.await_delivery(acknowledged)
        load.stop_publishing()
        acknowledged = load.acknowledged()
        load.await_delivery(acknowledged)
        audited = drain(broker, "t", "audit")
        assert acknowledged <= set(audited)
        assert len(audited) == len(set(audited))


def test_nothing_finished_is_delivered_again_after_a_clean_stop(tmp_path: Path) -> None:
    bodies = [b"%d" % i for i in range(1000)]
    with start_process(tmp_path) as broker:
        broker.publish("t", *bodies)
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c", rdy=300)
            finished = [message.body for message in connection.read_messages(600, finish=True)]
            connection.barrier()
            broker.restart()
        rest = drain(broker, "t", "c")
    assert len(rest) == len(set(rest))
    assert sorted(finished + rest) == sorted(bodies)


def test_more_signals_while_stopping_do_no_harm(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        bodies = [b"%d" % i for i in range(20_000)]
        broker.publish("t", *bodies)
        for _ in range(3):
            broker.signal(signal.SIGTERM)
        assert broker.wait(DEADLINE) == 0
        broker.start()
        assert sorted(drain(broker, "t", "c")) == sorted(bodies)


def test_sighup_does_not_kill(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        if broker.is_reference:
            pytest.skip("SIGHUP kills the reference")
        with broker.connect() as connection:
            for _ in range(3):
                broker.signal(signal.SIGHUP)
                connection.pub("t", b"x")
        assert broker.alive()
        broker.publish("t", b"y")


def test_a_second_daemon_on_the_same_data_path_refuses_to_start(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        second = broker.launch()
        try:
            assert second.wait(DEADLINE) == 1
        finally:
            second.kill()
            second.wait()
        text = broker.stderr_text()
        assert "FATAL" in text
        assert (
            f"failed to lock data-path: cannot flock directory {tmp_path} - resource temporarily unavailable "
            "(possibly in use by another instance of nsqd)"
        ) in text
        broker.publish("t", b"the first goes on")


def test_the_lock_of_a_killed_daemon_is_free(tmp_path: Path) -> None:
    with start_process(tmp_path) as broker:
        broker.kill()
        broker.start()
        wait_until(broker.alive)
        broker.publish("t", b"x")
