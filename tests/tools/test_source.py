"""Which daemons a command asks, and what it says about those that do not answer."""

from __future__ import annotations

import json
import re

import pytest

from nsparq.tools import source
from tests.support import TestBroker, start_broker, wait_until
from tests.support.lookupd import start_lookupd

from .conftest import Run
from .processes import free_address, http


def test_a_flag_wins_over_the_environment(
    nsparq: Run, broker: TestBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.publish(topic, b"one")
    monkeypatch.setenv(source.NSQD_VARIABLE, free_address())
    assert nsparq("topics", topic).status == 1
    assert topic.encode() in nsparq("topics", topic, f"--nsqd-http-address={http(broker)}").out


def test_this_machine_is_the_default_with_nsqlookupd_first(
    nsparq: Run, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(source.NSQD_VARIABLE)
    monkeypatch.setattr(source, "LOCAL_LOOKUPD", free_address())
    monkeypatch.setattr(source, "LOCAL_NSQD", free_address())
    done = nsparq("topics")
    assert done.status == 1
    assert "Connection refused\nNothing answers on this machine. Start it with `nsparq up`" in done.err
    monkeypatch.setattr(source, "LOCAL_NSQD", http(broker))
    assert nsparq("nodes").status == 0
    with start_lookupd() as lookupd:
        monkeypatch.setattr(source, "LOCAL_LOOKUPD", http(lookupd))
        assert f"nsqlookupd {http(lookupd)} knows no nsqd" in nsparq("nodes").err


def test_a_wrong_port_is_named(nsparq: Run, broker: TestBroker, topic: str) -> None:
    tcp, nsqd = "{}:{}".format(*broker.address), http(broker)
    said = nsparq("topics", f"--nsqd-http-address={tcp}").err
    reason = "the answer is not HTTP; this is the port of NSQ's TCP protocol"
    assert said == f"nsparq topics: GET http://{tcp}/stats: {reason}\n"
    for arguments in (["topics"], ["channels", topic], ["pause", topic]):
        said = nsparq(*arguments, f"--lookupd-http-address={nsqd}").err
        assert re.search(f": {nsqd} has no /(nodes|lookup): it is not an nsqlookupd\n$", said)


def test_figures_are_summed_over_all_nsqds_and_a_dead_one_is_named(
    nsparq: Run, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_lookupd() as lookupd:
        flags = {"lookupd_tcp_address": ("{}:{}".format(*lookupd.address),), "broadcast_address": "127.0.0.1"}
        with start_broker(**flags) as first, start_broker(**flags) as second:
            for broker in (first, second):
                broker.publish(topic, b"one", b"two")
                broker.control("create", topic, "c")
            wait_until(lambda: len(lookupd.lookup(topic)["producers"]) == 2)
            monkeypatch.setenv(source.LOOKUPD_VARIABLE, http(lookupd))
            done = nsparq("channels", topic, "--json")
            (row,) = json.loads(done.out)["channels"]
            assert (row["depth"], row["nodes"], done.status) == (4, 2, 0)
            assert nsparq("pause", topic, "c").status == 0
            assert all(one.channel_stats(topic, "c")["paused"] for one in (first, second))  # type: ignore[index]
            dead = free_address()
            monkeypatch.delenv(source.LOOKUPD_VARIABLE)
            monkeypatch.setenv(source.NSQD_VARIABLE, f"{http(first)}, {dead}")
            done = nsparq("channels", topic, "--json")
            answer = json.loads(done.out)
            assert (done.status, answer["channels"][0]["depth"]) == (1, 2)
            assert [one["node"] for one in answer["unreachable"]] == [dead]
            assert f"nsparq channels: GET http://{dead}/stats: Connection refused" in done.err
