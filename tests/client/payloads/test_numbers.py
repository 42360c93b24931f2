"""The names that an idempotent producer gives its messages."""

from __future__ import annotations

import pytest

from nsparq.client.payloads.numbers import Numbers, name_in_child
from nsparq.headers import decode_headers


def headers_of(message: bytes) -> list[tuple[str, str]]:
    """In the order in which they stand there."""
    size = int.from_bytes(message[:4])
    return [*decode_headers(message[4 : 4 + size]).items()]


def own(numbers: Numbers, number: int) -> list[tuple[str, str]]:
    epoch = str(numbers.epoch)
    return [("nsq-producer", numbers.name), ("nsq-epoch", epoch), ("nsq-number", str(number))]


def test_each_topic_is_counted_by_itself() -> None:
    numbers = Numbers("p")
    assert numbers.message("a", b"x") == numbers.message("b", b"x")
    assert [headers_of(one) for one in numbers.messages("a", [b"x", b"y"])] == [
        own(numbers, 1), own(numbers, 2)
    ]  # fmt: skip
    assert numbers.message("a", b"x").endswith(b"3x")


def test_headers_of_the_user_come_behind_and_those_of_another_producer_go() -> None:
    numbers = Numbers()
    passed_on = {"k": "v", "nsq-number": "7", "nsq-producer": "other", "nsq-epoch": "1"}
    assert headers_of(numbers.message("t", b"x", passed_on)) == [*own(numbers, 0), ("k", "v")]
    several = numbers.messages("t", [b"x", b"y"], [{"a": "1"}, None])
    assert [headers_of(one) for one in several] == [[*own(numbers, 1), ("a", "1")], own(numbers, 2)]


def test_bad_headers_take_no_number() -> None:
    numbers = Numbers()
    for headers in ({"k": "v" * 65_500}, {"no good": ""}):
        with pytest.raises(ValueError):
            numbers.message("t", b"x", headers)
    for bodies, several in (([b"x", b""], None), ([b"x"], [{}, {}])):
        with pytest.raises(ValueError):
            numbers.messages("t", bodies, several)
    assert headers_of(numbers.message("t", b"x")) == own(numbers, 0)


def test_names() -> None:
    assert Numbers().name != Numbers().name
    assert Numbers("p").epoch < Numbers("p").epoch
    assert name_in_child("p") != name_in_child("p")
    Numbers(name_in_child("p" * 200))
    with pytest.raises(ValueError, match="at most 200"):
        Numbers("p" * 201)
