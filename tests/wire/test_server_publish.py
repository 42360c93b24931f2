"""PUB, DPUB and MPUB: names, numbers, bodies, and the cost of small pieces."""

from __future__ import annotations

import pytest

from nsparq.errors import FatalClientError
from nsparq.wire.commands import Publish
from nsparq.wire.limits import Limits
from nsparq.wire.server import MAGIC
from tests.support import sized
from tests.wire.harness import (
    LIMITS,
    assert_cost_is_linear,
    commands,
    commands_in,
    converse,
    error_at_end,
    feed_slowly,
    fins,
    mpub,
    outcome_of,
    refusal,
    size,
    started,
)

pytestmark = pytest.mark.usefixtures("build")


# 16. PUB and DPUB

SINGLES = [("PUB", b"PUB t\n", 0), ("DPUB", b"DPUB t 1500\n", 1500)]
single = pytest.mark.parametrize(("verb", "line", "defer_ms"), SINGLES, ids=["PUB", "DPUB"])


@single
@pytest.mark.parametrize("body", [b"\n", b"PUB t\n", bytes(range(256)), b"x" * 1000], ids=len)
def test_a_body_is_any_bytes_up_to_the_largest_size(
    verb: str, line: bytes, defer_ms: int, body: bytes
) -> None:
    data = (line + sized(body)) * 3 + b"NOP\n"
    assert commands(data) == [Publish(verb, "t", [body], defer_ms)] * 3


@single
@pytest.mark.parametrize("behind", [b"", bytes(2000)], ids=len)
def test_a_message_size_out_of_range_is_refused_before_the_body_arrives(
    verb: str, line: bytes, defer_ms: int, behind: bytes
) -> None:
    for number in (0, -1, -(2**31)):
        error = f"E_BAD_MESSAGE {verb} invalid message body size {number}"
        assert refusal(line + size(number) + behind) == error
    for number in (1001, 2**31 - 1):
        error = f"E_BAD_MESSAGE {verb} message too big {number} > 1000"
        assert refusal(line + size(number) + behind) == error


@single
def test_the_error_for_an_unfinished_publish_names_the_missing_part(
    verb: str, line: bytes, defer_ms: int
) -> None:
    for part in (b"", b"\x00", b"\x00\x00\x00"):
        assert error_at_end(line + part) == f"E_BAD_MESSAGE {verb} failed to read message body size"
    for part in (b"", b"x", b"xxxx"):
        assert error_at_end(line + size(5) + part) == f"E_BAD_MESSAGE {verb} failed to read message body"
    assert outcome_of(line + size(5) + b"xxxxx", eof=True).error is None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"PUB", "E_INVALID PUB insufficient number of parameters"),
        (b"PUB t!", 'E_BAD_TOPIC PUB topic name "t!" is not valid'),
        (b"MPUB", "E_INVALID MPUB insufficient number of parameters"),
        (b"MPUB t!", 'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "t!" is not valid'),
        (b"DPUB t!", "E_INVALID DPUB insufficient number of parameters"),
        (b"DPUB t! x", 'E_BAD_TOPIC DPUB topic name "t!" is not valid'),
        (b"DPUB t x", "E_INVALID DPUB could not parse timeout x"),
        (b"DPUB t 3600001", "E_INVALID DPUB timeout 3600001 out of range 0-3600000"),
        (b"DPUB t 9223372036854775808", "E_INVALID DPUB timeout -9223372036854775808 out of range 0-3600000"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_publish_line_is_checked_before_its_body_arrives(line: bytes, error: str) -> None:
    assert refusal(line + b"\n") == error


def test_the_defer_time_may_be_the_maximum() -> None:
    for text, defer_ms in ((b"", 0), (b"3600000", 3_600_000), (b"18446744073709551617", 1)):
        assert commands(b"DPUB t %s\n" % text + sized(b"x")) == [Publish("DPUB", "t", [b"x"], defer_ms)]


def test_many_topics_on_one_connection_are_never_mixed_up() -> None:
    # More than the protocol remembers, and each again.
    names = [f"t{i}" for i in range(150)]
    data = b"".join(b"PUB %s\n" % n.encode() + sized(n.encode()) + mpub(n.encode(), [b"m"]) for n in names)
    expected = [p for n in names for p in (Publish("PUB", n, [n.encode()]), Publish("MPUB", n, [b"m"]))]
    assert converse([MAGIC + data * 2], LIMITS).commands == expected * 2


# 16. MPUB


@pytest.mark.parametrize(
    "bodies",
    [[b"x", b"yy", b"zzz"], [b"x" * 1000] * 4, [b"x"] * 999, [fins(1), b"PUB t\n", bytes(4), size(-1)]],
    ids=["few", "large", "as many as fit", "like commands"],
)
def test_an_mpub_gives_its_messages_in_order(bodies: list[bytes]) -> None:
    data = mpub(b"t", bodies)
    assert commands(data * 2 + b"NOP\n") == [Publish("MPUB", "t", bodies)] * 2


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (size(0), "E_BAD_BODY MPUB invalid body size 0"),
        (size(5001), "E_BAD_BODY MPUB body too big 5001 > 5000"),
        (size(9) + size(0), "E_BAD_BODY MPUB invalid message count 0"),
        (size(9) + size(1000), "E_BAD_BODY MPUB invalid message count 1000"),
        (size(9) + size(1) + size(0), "E_BAD_MESSAGE MPUB invalid message(0) body size 0"),
        (
            size(99) + size(9) + sized(b"x") * 3 + size(-(2**31)),
            "E_BAD_MESSAGE MPUB invalid message(3) body size -2147483648",
        ),
        (size(99) + size(9) + sized(b"x") * 3 + size(1001), "E_BAD_MESSAGE MPUB message too big 1001 > 1000"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_an_mpub_is_refused_at_its_first_wrong_number(data: bytes, error: str) -> None:
    outcome = outcome_of(b"MPUB t\n" + data)
    assert (outcome.error, outcome.commands) == (error, [])


def test_the_number_of_messages_in_an_mpub_is_limited_by_the_largest_body() -> None:
    assert refusal(b"MPUB t\n" + size(9) + size(999)) is None


def test_the_error_for_an_unfinished_mpub_names_the_missing_part() -> None:
    data = b"MPUB t\n"
    for part in (b"", b"\x00\x00\x00"):
        assert error_at_end(data + part) == "E_BAD_BODY MPUB failed to read body size"
    data += size(14)
    for part in (b"", b"\x00\x00\x00"):
        assert error_at_end(data + part) == "E_BAD_BODY MPUB failed to read message count"
    data += size(2)
    for number, whole in enumerate([b"", sized(b"x")]):
        data += whole
        for part in (b"", b"\x00\x00\x00"):
            assert (
                error_at_end(data + part) == f"E_BAD_MESSAGE MPUB failed to read message({number}) body size"
            )
        for part in (b"", b"x", b"xx"):
            assert error_at_end(data + size(3) + part) == "E_BAD_MESSAGE MPUB failed to read message body"


@pytest.mark.parametrize("declared", [1, 15, 5000])
def test_an_mpub_ends_after_its_last_message_not_at_its_declared_size(declared: int) -> None:
    found = commands(mpub(b"t", [b"x", b"yy"], declared) + b"PUB t\n" + sized(b"z"))
    assert found == [Publish("MPUB", "t", [b"x", b"yy"]), Publish("PUB", "t", [b"z"])]


@pytest.mark.parametrize("count", [5, 6])
def test_whether_an_mpub_is_too_big_does_not_depend_on_its_pieces(count: int) -> None:
    data = MAGIC + mpub(b"t", [b"x" * 1000] * count, 9)
    whole = converse([data], LIMITS)
    assert (whole.error is None) == (count == 5)
    for length in (1, 7, 900, 1004, 2008, 4000, len(data) - 1):
        pieces = [data[i : i + length] for i in range(0, len(data), length)]
        assert converse(pieces, LIMITS) == whole


def test_the_memory_of_an_unfinished_mpub_is_limited() -> None:
    protocol = started(LIMITS, b"MPUB t\n" + size(9) + size(999))
    with pytest.raises(FatalClientError, match="^E_BAD_BODY MPUB body too big "):
        for _ in range(7):
            list(commands_in(protocol, sized(b"x" * 1000)))


# Cost


def test_the_cost_of_a_body_in_single_bytes_is_linear() -> None:
    assert_cost_is_linear(lambda n: feed_slowly(b"PUB t\n" + sized(bytes(n)), Limits()), 64 << 10)


def test_the_cost_of_a_large_mpub_message_in_single_bytes_is_linear() -> None:
    assert_cost_is_linear(lambda n: feed_slowly(mpub(b"t", [bytes(n)]), Limits()), 32 << 10)


def test_the_cost_of_an_mpub_of_tiny_messages_in_single_bytes_is_linear() -> None:
    assert_cost_is_linear(lambda n: feed_slowly(mpub(b"t", [b"x"] * n), Limits()), 2000)
