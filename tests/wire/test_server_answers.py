"""FIN, REQ and TOUCH; runs of FINs, which are decoded together with the same result."""

from __future__ import annotations

import pytest

from nsparq.errors import ClientError
from nsparq.wire.commands import Finish, Publish, Refusal, Requeue, StartClose, Touch
from nsparq.wire.limits import Limits
from nsparq.wire.server import MAGIC
from tests.support import sized
from tests.wire.harness import (
    CLS,
    ID,
    LIMITS,
    NUMBER,
    SUB,
    assert_cost_is_linear,
    commands,
    commands_in,
    converse,
    finished,
    fins,
    outcome_of,
    refusal,
    started,
)

pytestmark = pytest.mark.usefixtures("build")

MALFORMED = "E_INVALID invalid message ID"


# 14. FIN, REQ, TOUCH


def test_answers_carry_the_id_as_a_number() -> None:
    found = commands(SUB + b"FIN %s\nREQ %s 1500\nTOUCH %s\n" % (ID, ID, ID))
    assert found[1:] == [("FIN", NUMBER), Requeue(NUMBER, 1500), Touch(NUMBER)]


@pytest.mark.parametrize(
    ("line", "verb"),
    [(b"FIN", "FIN"), (b"REQ", "REQ"), (b"REQ %s" % ID, "REQ"), (b"REQ x", "REQ"), (b"TOUCH", "TOUCH")],
)
def test_answers_need_their_parameters(line: bytes, verb: str) -> None:
    assert refusal(SUB + line + b"\n") == f"E_INVALID {verb} insufficient number of params"


@pytest.mark.parametrize("line", [b"FIN %s\n", b"REQ %s x\n", b"TOUCH %s\n"])
def test_an_id_must_have_16_bytes(line: bytes) -> None:
    for raw in (b"", ID[:15], ID + b"0", ID + b"\r\r"):
        assert refusal(SUB + line % raw) == MALFORMED


@pytest.mark.parametrize("verb", ["FIN", "REQ", "TOUCH"])
def test_an_id_of_16_bytes_that_are_not_hex_is_not_in_flight(verb: str) -> None:
    # Python's int() would take the signs, the prefix and the underscore.
    for raw in (ID.upper(), b"z" * 16, b"-" + ID[1:], b"0x" + ID[2:], b"0_" + ID[2:], b"\xff" * 16):
        outcome = outcome_of(SUB + b"%s %s 5\nNOP\n" % (verb.encode(), raw))
        assert outcome.error is None
        shown = raw.decode("utf-8", "surrogateescape")
        assert outcome.commands[1:] == [f"E_{verb}_FAILED {verb} {shown} failed ID not in flight"]
        assert outcome.completed == 3


def test_an_answer_with_an_unknown_id_does_not_end_the_connection() -> None:
    (command,) = commands_in(started(LIMITS, SUB), b"FIN " + b"z" * 16 + b"\n")
    assert isinstance(command, Refusal)
    assert isinstance(command.error, ClientError)
    assert not command.error.fatal


def test_a_requeue_timeout_is_clamped_without_an_error() -> None:
    for text, timeout_ms in ((b"", 0), (b"3600001", 3_600_000), (b"%d" % 2**63, 0), (b"%d" % (2**64 + 1), 1)):
        assert commands(SUB + b"REQ %s %s\n" % (ID, text))[1:] == [Requeue(NUMBER, timeout_ms)]
    limits = Limits(max_req_timeout_ms=1000)
    assert commands(SUB + b"REQ %s 1001\n" % ID, limits)[1:] == [Requeue(NUMBER, 1000)]


def test_the_timeout_of_a_requeue_is_checked_even_if_the_id_is_unknown() -> None:
    assert refusal(SUB + b"REQ %s x\n" % (b"z" * 16)) == "E_INVALID REQ could not parse timeout x"


# Runs of FINs: they are decoded together, with the same result

TOP = 2**64 - 1
RUNS = {
    "one": [5],
    "seven": list(range(7)),
    "eight": list(range(8)),
    "many in order": list(range(1000, 3000)),
    "backwards": list(range(50, 0, -1)),
    "all the same": [7] * 20,
    "two by two": [n for i in range(20) for n in (10 * i, 10 * i + 1)],
    "beyond the largest": [*range(TOP - 4, TOP + 1), *range(5)],
    "largest and zero in turn": [TOP, 0] * 8,
    "around the sign": list(range(2**63 - 5, 2**63 + 5)),
}


@pytest.mark.parametrize("numbers", RUNS.values(), ids=RUNS)
def test_a_run_of_fins_gives_each_id_in_order(numbers: list[int]) -> None:
    outcome = outcome_of(SUB + fins(*numbers))
    assert outcome.commands[1:] == finished(*numbers)
    assert outcome.completed == 1 + len(numbers)
    if len(numbers) >= 8:
        found = list(commands_in(started(LIMITS, SUB), fins(*numbers)))
        assert len(found) <= 1 + len(numbers) // 100
        assert {type(command) for command in found} == {Finish}


def test_consecutive_ids_of_a_run_are_one_span() -> None:
    (command,) = commands_in(started(LIMITS, SUB), fins(*range(10, 30), *range(5, 10), 99))
    assert isinstance(command, Finish)
    assert command.spans == [(10, 30), (5, 10), (99, 100)]


def test_a_run_of_fins_is_accepted_while_closing() -> None:
    assert commands(SUB + CLS + fins(*range(20)))[2:] == finished(*range(20))


def test_a_run_before_sub_is_refused() -> None:
    assert refusal(fins(*range(20))) == "E_INVALID cannot FIN in current state"


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (b"NOP\n", []),
        (b"REQ %s 0\n" % ID, [Requeue(NUMBER, 0)]),
        (b"PUB t\n" + sized(fins(1, 2)), [Publish("PUB", "t", [fins(1, 2)])]),
        (b"CLS\n", [StartClose()]),
        (b"FIN %s\r\n" % ID, finished(NUMBER)),
        (b"FIN %s\r\n" % ID * 10, finished(*[NUMBER] * 10)),
        (b"FIN %s more\n" % ID, finished(NUMBER)),
        (b"FIN 0123456789ABCDEF\n", ["E_FIN_FAILED FIN 0123456789ABCDEF failed ID not in flight"]),
        (b"FIN 0123456789abcdeg\n", ["E_FIN_FAILED FIN 0123456789abcdeg failed ID not in flight"]),
        (b"FIN  123456789abcdef\n", MALFORMED),
        (b"FIN 0123456789abcde\nX", MALFORMED),
        (b"FIN 0123456789abcde\r\n", MALFORMED),
        (b"FIN 0123456789abcdef0\n", MALFORMED),
        (b"FIN\n", "E_INVALID FIN insufficient number of params"),
        (b"FINISH 123456789abcd\n", "E_INVALID invalid command FINISH"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_any_other_line_ends_a_run_of_fins(middle: bytes, expected: list[object] | str) -> None:
    for before in (0, 1, 8, 30):
        outcome = outcome_of(SUB + fins(*range(before)) + middle + fins(*range(100, 130)))
        if isinstance(expected, list):
            assert outcome.error is None
            assert outcome.commands[1:] == [*finished(*range(before)), *expected, *finished(*range(100, 130))]
        else:
            assert outcome.error == expected
            assert outcome.commands[1:] == finished(*range(before))
            assert outcome.completed == 1 + before


def test_a_run_cut_inside_a_line_continues_with_the_next_piece() -> None:
    data = fins(*range(40))
    for count in (1, 7, 8, 20):
        for at in range(21 * count + 1, 21 * count + 22):
            assert converse([MAGIC + SUB, data[:at], data[at:]], LIMITS).commands[1:] == finished(*range(40))


@pytest.mark.parametrize(
    "block",
    [
        fins(*range(7)) + b"NOP\n",
        b"FIN %s\r\n" % ID * 7,
        fins(1) + b"TOUCH %s\n" % ID,
        fins(1) + b"FIN 0123456789ABCDEF\n",
    ],
    ids=["short runs", "CRLF", "in turn", "upper case in turn"],
)
def test_the_cost_of_many_short_runs_in_one_piece_is_linear(block: bytes) -> None:
    def work(length: int) -> object:
        protocol = started(LIMITS, SUB)
        data = block * (length // len(block))
        return lambda: list(commands_in(protocol, data))

    assert_cost_is_linear(work, 64 << 10)


@pytest.mark.parametrize("last", [b"FIN 0123456789ABCDEF\n", b"FIN 0123456789abcdeg\n"])
def test_the_cost_of_a_long_run_with_a_bad_id_at_its_end_is_linear(last: bytes) -> None:
    def work(count: int) -> object:
        protocol = started(LIMITS, SUB)
        data = fins(*range(count)) + last
        return lambda: list(commands_in(protocol, data))

    assert_cost_is_linear(work, 3000)
