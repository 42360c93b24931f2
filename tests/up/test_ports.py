"""Which ports are taken by whom, and what is said if they cannot be."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from nsparq.errors import StartError
from nsparq.up import ports as ports_of_up
from nsparq.up.ports import MAX_NSQD, MAX_PIPELINES, FreePorts, Ports, Wanted, check_free, reachable

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


def test_the_defaults_are_those_of_nsq() -> None:
    ports = Ports()
    assert ports.for_nsqd(0) == (4150, 4151)
    assert ports.for_lookupd() == (4160, 4161)
    assert ports.for_admin() == 4171


def test_further_nsqds_are_two_ports_on() -> None:
    assert [Ports().for_nsqd(number) for number in range(3)] == [(4150, 4151), (4152, 4153), (4154, 4155)]
    assert Ports(nsqd_tcp=6000, nsqd_http=7000).for_nsqd(2) == (6004, 7004)


def test_a_base_moves_all_ports() -> None:
    ports = Ports(base=5150)
    assert (ports.for_nsqd(1), ports.for_lookupd(), ports.for_admin()) == ((5152, 5153), (5160, 5161), 5171)
    assert [ports.for_pipeline(number) for number in range(2)] == [5180, 5181]


@pytest.mark.parametrize("base", [4150, 5150])
def test_no_two_members_share_a_port(base: int) -> None:
    ports = Ports(base=base)
    given = [*ports.for_lookupd(), ports.for_admin()]
    given += [port for number in range(MAX_NSQD) for port in ports.for_nsqd(number)]
    given += [ports.for_pipeline(number) for number in range(MAX_PIPELINES)]
    assert len(set(given)) == len(given)


def test_zero_is_any_port_for_all_or_for_one() -> None:
    ports = Ports(base=0)
    assert (ports.for_nsqd(3), ports.for_lookupd(), ports.for_admin()) == ((0, 0), (0, 0), 0)
    assert Ports(nsqd_tcp=0).for_nsqd(1) == (0, 4153)
    assert Ports(base=0, admin=4171).for_admin() == 4171


def test_free_ports_are_no_problem() -> None:
    free = FreePorts(HOST).take()
    check_free(HOST, [Wanted(free, "nsqd, TCP", "--nsqd-tcp-port"), Wanted(0, "x", "--x")])


def test_a_free_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_of_up, "_NOT_FOR_CLIENTS", range(20_000, 20_020))
    with socket.create_server((HOST, FreePorts(HOST).take())) as taken:
        free, given = FreePorts(HOST), []
        with pytest.raises(StartError, match="no port is free"):
            while True:
                given.append(free.take())
        assert given and taken.getsockname()[1] not in given
    assert len(set(given)) == len(given)


def test_a_port_in_use_is_named_with_its_owner_and_the_flag(taken: int) -> None:
    with pytest.raises(StartError) as caught:
        check_free(HOST, [Wanted(taken, "nsqd-2, HTTP", "--nsqd-http-port")])
    first, hint = str(caught.value).splitlines()
    assert first == f"port {taken} for nsqd-2, HTTP is in use: use --nsqd-http-port"
    assert "--port-base" in hint


def test_all_problems_are_reported_at_once(taken: int) -> None:
    free = FreePorts(HOST).take()
    wanted = [
        Wanted(taken, "a", "--a"),
        Wanted(70_000, "b", "--b"),
        Wanted(free, "c", "--c"),
        Wanted(free, "d", "--d"),
    ]
    with pytest.raises(StartError) as caught:
        check_free(HOST, wanted)
    assert str(caught.value).splitlines()[:-1] == [
        f"port {taken} for a is in use: use --a",
        "port 70000 for b is above 65535: use --b",
        f"port {free} is assigned to c and to d: use --d",
    ]


def test_a_port_in_use_on_all_interfaces_is_in_use_here() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} for a is in use"):
            check_free(HOST, [Wanted(port, "a", "--a")])


def test_a_host_of_another_machine_is_named() -> None:
    with pytest.raises(StartError, match=r"--host=192\.0\.2\.1: "):
        check_free("192.0.2.1", [Wanted(FreePorts(HOST).take(), "a", "--a")])


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.1.2.3", "10.1.2.3"), ("localhost", "localhost")],
)
def test_nobody_connects_to_the_unspecified_address(host: str, expected: str) -> None:
    assert reachable(host) == expected
