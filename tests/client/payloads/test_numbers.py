"""The names that an idempotent producer gives its messages."""

from __future__ import annotations

import pytest

from nsparq.client.payloads.encode import encode_bodies
from nsparq.client.payloads.numbers import Numbers, name_in_child
from nsparq.headers import Headers, HeadersOfMany, decode_headers
from nsparq.wire.limits import Limits
from nsparq.wire.mpub import decode_multiple
from tests.wire.harness import BUILDS, using


def message(
    numbers: Numbers, topic: str, body: bytes, headers: Headers | None = None
) -> tuple[bytes, list[tuple[str, str]]]:
    """Body and headers of the message in a PUB; the same with and without the kernel."""
    first = numbers._next[topic]
    commands = set()
    for build in BUILDS:
        numbers._next[topic] = first
        with using(build):
            commands.add(numbers.pub(topic, b"PUB t", body, headers))
    (command,) = commands
    line, _, rest = command.partition(b"\n")
    assert line == b"PUB t headers"
    assert int.from_bytes(rest[:4]) == len(rest) - 4
    behind = 8 + int.from_bytes(rest[4:8])
    return rest[behind:], [*decode_headers(rest[8:behind]).items()]


def messages(
    numbers: Numbers, topic: str, bodies: list[bytes], headers: HeadersOfMany | None = None
) -> list[tuple[bytes, list[tuple[str, str]]]]:
    """Bodies and headers of the messages in an MPUB; the same with and without the kernel."""
    first = numbers._next[topic]
    commands = set()
    for build in BUILDS:
        numbers._next[topic] = first
        with using(build):
            commands.add(numbers.mpub(topic, b"MPUB t", bodies, headers, encode_bodies))
    (command,) = commands
    line, _, rest = command.partition(b"\n")
    assert line == b"MPUB t headers"
    found = decode_multiple(rest[4:], Limits(), has_headers=True)
    assert int.from_bytes(rest[:4]) == len(rest) - 4 and found.headers is not None
    blocks = [[*decode_headers(block).items()] for block in found.headers[:]]
    return [*zip(found[:], blocks, strict=True)]


def own(numbers: Numbers, number: int) -> list[tuple[str, str]]:
    epoch = str(numbers.epoch)
    return [("nsq-producer", numbers.name), ("nsq-epoch", epoch), ("nsq-number", str(number))]


def test_each_topic_is_counted_by_itself() -> None:
    numbers = Numbers("p")
    assert message(numbers, "a", b"x") == message(numbers, "b", b"x") == (b"x", own(numbers, 0))
    assert messages(numbers, "a", [b"x", b"y"]) == [(b"x", own(numbers, 1)), (b"y", own(numbers, 2))]
    assert message(numbers, "a", b"x") == (b"x", own(numbers, 3))


def test_headers_of_the_user_come_behind_and_those_of_another_producer_go() -> None:
    numbers = Numbers()
    passed_on = {"k": "v", "nsq-number": "7", "nsq-producer": "other", "nsq-epoch": "1"}
    assert message(numbers, "t", b"x", passed_on) == (b"x", [*own(numbers, 0), ("k", "v")])
    several = messages(numbers, "t", [b"x", b"y"], [{"a": "1"}, None])
    assert several == [(b"x", [*own(numbers, 1), ("a", "1")]), (b"y", own(numbers, 2))]
    assert messages(numbers, "t", [b"x"], passed_on) == [(b"x", [*own(numbers, 3), ("k", "v")])]


def test_a_batch_of_any_length_has_consecutive_numbers() -> None:
    numbers = Numbers()
    for headers in (None, {}, {"k": "ü"}, [{"k": str(number)} for number in range(300)]):
        first = numbers._next["t"] = 9_900
        found = messages(numbers, "t", [b"%d" % number for number in range(300)], headers)
        assert [block[2][1] for _, block in found] == [str(first + place) for place in range(300)]
        expected = headers if isinstance(headers, list) else [headers or {}] * 300
        assert [dict(block[3:]) for _, block in found] == expected


def test_bad_headers_take_no_number() -> None:
    numbers = Numbers()
    for headers in ({"k": "v" * 65_500}, {"no good": ""}):
        for build in BUILDS:
            with using(build), pytest.raises(ValueError):
                numbers.pub("t", b"PUB t", b"x", headers)
    cases = (([b"x", b""], None), ([b"x"], [{}, {}]), ([], None), ([b"x"], {"k": "v" * 65_440}))
    for build in BUILDS:
        for bodies, several in cases:
            with using(build), pytest.raises(ValueError):
                numbers.mpub("t", b"MPUB t", bodies, several, encode_bodies)  # type: ignore[arg-type]
    assert message(numbers, "t", b"x") == (b"x", own(numbers, 0))


def test_names() -> None:
    assert Numbers().name != Numbers().name
    assert Numbers("p").epoch < Numbers("p").epoch
    assert name_in_child("p") != name_in_child("p")
    Numbers(name_in_child("p" * 200))
    with pytest.raises(ValueError, match="at most 200"):
        Numbers("p" * 201)
