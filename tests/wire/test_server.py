"""The server's side of a conversation: bytes to commands, and the errors."""

from __future__ import annotations

import json

import pytest

from nsparq.errors import FatalClientError
from nsparq.wire.commands import Auth, Identify, Publish, Ready, Requeue, StartClose, Subscribe, Touch
from nsparq.wire.identify import Identity
from nsparq.wire.limits import Limits
from nsparq.wire.server import CLOSING, INIT, MAGIC, SUBSCRIBED, ServerProtocol
from tests.support import multi, sized
from tests.wire.harness import (
    CLS,
    ID,
    LIMITS,
    NUMBER,
    SUB,
    CommandList,
    Outcome,
    assert_cost_is_linear,
    commands,
    commands_in,
    converse,
    error_at_end,
    feed_slowly,
    finished,
    fins,
    mpub,
    one_by_one,
    outcome_of,
    refusal,
    size,
    started,
)

# Only publishes and FINs have compiled inner loops. The property tests send everything through both
# builds.
both_builds = pytest.mark.usefixtures("build")


# 1. The magic


def test_the_magic_alone_gives_no_command() -> None:
    assert outcome_of(b"") == Outcome()


@pytest.mark.parametrize("magic", [b"  V1", b"GET ", b"  v2"])
def test_another_magic_is_a_bad_protocol_without_description(magic: bytes) -> None:
    for pieces in ([magic], one_by_one(magic), [magic + b"NOP\n"]):
        assert converse(pieces, LIMITS).error == "E_BAD_PROTOCOL"


@pytest.mark.parametrize("part", [b"", b"  V", b"GET"])
def test_a_stream_that_ends_inside_the_magic_gets_no_error(part: bytes) -> None:
    assert converse([part], LIMITS, eof=True) == Outcome()


# 2. Lines


def test_a_carriage_return_before_the_line_feed_is_removed() -> None:
    assert commands(b"SUB t c\r\nRDY 5\r\nPUB t\r\n" + sized(b"x")) == [
        Subscribe("t", "c"),
        Ready(5),
        Publish("PUB", "t", [b"x"]),
    ]


def test_only_one_carriage_return_is_removed() -> None:
    assert refusal(b"NOP\r\r\n") == "E_INVALID invalid command NOP\r"


@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_an_empty_line_is_the_command_with_the_empty_name(line: bytes) -> None:
    assert refusal(b"NOP\n" + line) == "E_INVALID invalid command "


def test_a_carriage_return_of_the_line_before_is_not_removed_again() -> None:
    protocol = started(LIMITS, b"PUB t\n" + sized(b"x\r"))
    with pytest.raises(FatalClientError, match="^E_INVALID invalid command $"):
        list(commands_in(protocol, b"\n"))
    assert refusal(b"PUB t\n" + sized(b"x\r") + b"\n") == "E_INVALID invalid command "


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (b"FOO bar baz", "FOO"),
        (b"pub t", "pub"),
        (b" NOP", ""),
        (b"NOP\t", "NOP\t"),
        (b"NOPE", "NOPE"),
        ("é\x00".encode(), "é\x00"),
    ],
)
def test_an_unknown_command_is_refused_with_its_first_word(line: bytes, name: str) -> None:
    assert refusal(line + b"\n") == f"E_INVALID invalid command {name}"


def test_an_error_text_quotes_the_bytes_of_the_client_unchanged() -> None:
    text = refusal(b"\xff\xfeX\n")
    assert text is not None
    assert text.encode("utf-8", "surrogateescape") == b"E_INVALID invalid command \xff\xfeX"


def test_two_spaces_in_a_row_give_an_empty_parameter() -> None:
    assert commands(SUB + b"RDY  7\n") == [Subscribe("t", "c"), Ready(0)]
    assert refusal(b"SUB  t c\n") == 'E_BAD_TOPIC SUB topic name "" is not valid'
    assert refusal(b"PUB \n") == 'E_BAD_TOPIC PUB topic name "" is not valid'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"SUB t c d e\n", Subscribe("t", "c")),
        (b"PUB t u\n" + sized(b"x"), Publish("PUB", "t", [b"x"])),
        (b"DPUB t 5 u\n" + sized(b"x"), Publish("DPUB", "t", [b"x"], 5)),
        (b"MPUB t u\n" + sized(multi([b"x"])), Publish("MPUB", "t", [b"x"])),
        (b"IDENTIFY a b\n" + sized(b"{}"), Identify(Identity())),
    ],
)
def test_surplus_parameters_are_ignored(line: bytes, expected: object) -> None:
    assert commands(line) == [expected]


def test_surplus_parameters_are_ignored_after_sub() -> None:
    found = commands(SUB + b"RDY 1 2\nFIN %s x\nREQ %s 5 x\nTOUCH %s x\nNOP x\nCLS x\n" % (ID, ID, ID))
    assert found[1:] == [Ready(1), ("FIN", NUMBER), Requeue(NUMBER, 5), Touch(NUMBER), StartClose()]


def test_a_line_may_have_16384_bytes_with_its_end() -> None:
    for end in (b"\n", b"\r\n"):
        line = b"NOP ".ljust(16_384 - len(end), b"x")
        assert outcome_of(line + end) == Outcome(completed=1)
        assert outcome_of(line + b"x" + end).error == "line too long"


def test_a_line_over_the_limit_is_refused_before_it_ends() -> None:
    assert outcome_of(b"x" * 16_383).error is None
    assert outcome_of(b"x" * 16_384).error == "line too long"


def test_the_limit_counts_from_the_start_of_the_line() -> None:
    assert outcome_of(b"NOP\n" * 10_000).completed == 10_000
    assert outcome_of(b"NOP\n" + b"NOP ".ljust(16_383, b"x") + b"\nNOP\n").completed == 3
    assert outcome_of(b"NOP\n" + b"NOP ".ljust(16_384, b"x") + b"\n") == Outcome(
        error="line too long", completed=1
    )


def test_the_limit_of_lines_does_not_apply_to_bodies() -> None:
    body = b"x" * 100_000
    assert converse([MAGIC + b"PUB t\n" + sized(body)], Limits()).commands == [Publish("PUB", "t", [body])]


def test_an_unfinished_line_at_the_end_of_the_stream_is_dropped() -> None:
    for data in (b"", b"NO", b"NOP", b"PUB t", b"FIN "):
        assert outcome_of(data, eof=True) == Outcome()


# 7. States

IN_STATE = {INIT: b"", SUBSCRIBED: SUB, CLOSING: SUB + CLS}
LINES = {
    "IDENTIFY": b"IDENTIFY\n" + sized(b"{}"),
    "AUTH": b"AUTH\n" + sized(b"secret"),
    "SUB": SUB,
    "RDY": b"RDY 1\n",
    "FIN": b"FIN %s\n" % ID,
    "REQ": b"REQ %s 0\n" % ID,
    "TOUCH": b"TOUCH %s\n" % ID,
    "CLS": CLS,
    "NOP": b"NOP\n",
    "PUB": b"PUB t\n" + sized(b"x"),
    "DPUB": b"DPUB t 0\n" + sized(b"x"),
    "MPUB": b"MPUB t\n" + sized(multi([b"x"])),
}
ALLOWED = {
    "IDENTIFY": {INIT},
    "AUTH": {INIT},
    "SUB": {INIT},
    "RDY": {SUBSCRIBED, CLOSING},
    "FIN": {SUBSCRIBED, CLOSING},
    "REQ": {SUBSCRIBED, CLOSING},
    "TOUCH": {SUBSCRIBED, CLOSING},
    "CLS": {SUBSCRIBED},
}


@pytest.mark.parametrize("name", LINES)
def test_each_command_is_allowed_in_its_states_only(name: str) -> None:
    for state, before in IN_STATE.items():
        outcome = outcome_of(before + LINES[name])
        if state in ALLOWED.get(name, IN_STATE):
            assert outcome.error is None
            assert outcome.state == {"SUB": SUBSCRIBED, "CLS": CLOSING}.get(name, state)
        else:
            assert outcome.error == f"E_INVALID cannot {name} in current state"
            assert outcome.state == state


@pytest.mark.parametrize(
    ("state", "line"), [(INIT, b"REQ x\n"), (SUBSCRIBED, b"IDENTIFY\n"), (CLOSING, b"SUB ! !\n")]
)
def test_the_state_is_checked_before_the_parameters_and_the_body(state: int, line: bytes) -> None:
    name = line.split()[0].decode()
    assert refusal(IN_STATE[state] + line) == f"E_INVALID cannot {name} in current state"


def test_the_states_have_the_numbers_that_stats_shows() -> None:
    assert [outcome_of(data).state for data in IN_STATE.values()] == [0, 3, 4]


def test_the_state_changes_before_the_command_is_given() -> None:
    protocol = started(LIMITS)
    states = [protocol.state for _ in commands_in(protocol, SUB + CLS)]
    assert states == [SUBSCRIBED, CLOSING]


# 7. TLS policy

TLS = Limits(tls_required=True, tls_available=True)


def test_if_tls_is_required_only_identify_is_allowed_without_it() -> None:
    for name in LINES.keys() - {"IDENTIFY"}:
        assert refusal(LINES[name], TLS) == f"E_INVALID cannot {name} in current state (TLS required)"
    assert refusal(b"FOO x\n", TLS) == "E_INVALID cannot FOO in current state (TLS required)"
    assert commands(LINES["IDENTIFY"], TLS) == [Identify(Identity())]


def test_after_the_upgrade_to_tls_all_commands_are_allowed() -> None:
    protocol = started(TLS, b"IDENTIFY\n" + sized(b"{}"))
    protocol.tls_active = True
    assert CommandList(commands_in(protocol, SUB + LINES["PUB"] * 2)) == [
        Subscribe("t", "c"),
        *[Publish("PUB", "t", [b"x"])] * 2,
    ]
    with pytest.raises(FatalClientError, match="^E_INVALID invalid command FOO$"):
        list(commands_in(protocol, b"FOO\n"))


# 9. IDENTIFY


def test_identify_gives_the_identity_and_keeps_it() -> None:
    protocol = started(LIMITS)
    (command,) = commands_in(protocol, b"IDENTIFY\n" + sized(b'{"client_id":"me","msg_timeout":2000}'))
    assert isinstance(command, Identify)
    assert command.identity == Identity(client_id="me", msg_timeout_ms=2000)
    assert protocol.identity is command.identity


def test_before_identify_the_client_id_is_the_address() -> None:
    identity = ServerProtocol(LIMITS, "10.0.0.1").identity
    assert (identity.client_id, identity.hostname) == ("10.0.0.1", "10.0.0.1")


def test_the_last_identify_counts() -> None:
    protocol = started(LIMITS)
    data = b"".join(b"IDENTIFY\n" + sized(b'{"client_id":"%d"}' % i) for i in range(3))
    assert [c.identity.client_id for c in commands_in(protocol, data)] == ["0", "1", "2"]  # type: ignore[union-attr]
    assert protocol.identity.client_id == "2"


@pytest.mark.parametrize("verb", ["IDENTIFY", "AUTH"])
def test_a_body_size_out_of_range_is_refused_before_the_body_arrives(verb: str) -> None:
    line = verb.encode() + b"\n"
    assert refusal(line + size(5001)) == f"E_BAD_BODY {verb} body too big 5001 > 5000"
    for number in (0, -1, -(2**31)):
        assert refusal(line + size(number)) == f"E_BAD_BODY {verb} invalid body size {number}"


def test_identify_is_limited_whatever_other_bodies_may_have() -> None:
    large = Limits(max_body_size=1 << 30)
    assert not outcome_of(b"IDENTIFY\n" + sized(b"{}".ljust(65_536)), large).error
    error = outcome_of(b"IDENTIFY\n" + size(65_537), large).error
    assert error == "E_BAD_BODY IDENTIFY body too big 65537 > 65536"


@pytest.mark.parametrize("verb", ["IDENTIFY", "AUTH"])
def test_the_error_for_an_unfinished_body_names_the_missing_part(verb: str) -> None:
    line = verb.encode() + b"\n"
    for part in (b"", b"\x00", b"\x00\x00\x00"):
        assert error_at_end(line + part) == f"E_BAD_BODY {verb} failed to read body size"
    for part in (b"", b"{", b"{   "):
        assert error_at_end(line + size(5) + part) == f"E_BAD_BODY {verb} failed to read body"


def test_a_body_of_the_largest_size_is_accepted() -> None:
    assert commands(b"IDENTIFY\n" + sized(b"{}".ljust(5000))) == [Identify(Identity())]
    assert commands(b"AUTH\n" + sized(bytes(5000))) == [Auth(bytes(5000))]


def test_the_fields_of_identify_are_checked_against_the_limits() -> None:
    long = Limits(max_heartbeat_interval_ms=90_000)
    assert not outcome_of(b"IDENTIFY\n" + sized(b'{"heartbeat_interval":90000}'), long).error
    assert (
        refusal(b"IDENTIFY\n" + sized(b'{"heartbeat_interval":90000}'))
        == "E_BAD_BODY IDENTIFY heartbeat interval (90000) is invalid"
    )


def test_a_refused_identify_changes_nothing() -> None:
    protocol = started(LIMITS)
    before = protocol.identity
    with pytest.raises(FatalClientError):
        list(commands_in(protocol, b"IDENTIFY\n" + sized(b'{"client_id":"a","sample_rate":100}')))
    assert protocol.identity is before


# 11. AUTH


def test_auth_gives_the_secret() -> None:
    assert commands(b"AUTH\n" + sized(b"se\ncret\x00")) == [Auth(b"se\ncret\x00")]


def test_the_cost_of_a_body_in_single_bytes_is_linear() -> None:
    assert_cost_is_linear(lambda n: feed_slowly(b"AUTH\n" + sized(bytes(n)), Limits()), 32 << 10)


@pytest.mark.parametrize("line", [b"AUTH x\n", b"AUTH \n"])
def test_auth_takes_no_parameters(line: bytes) -> None:
    assert refusal(line) == "E_INVALID AUTH invalid number of parameters"


# 12. SUB


@pytest.mark.parametrize("line", [b"SUB\n", b"SUB !\n"])
def test_sub_takes_a_topic_and_a_channel(line: bytes) -> None:
    assert refusal(line) == "E_INVALID SUB insufficient number of parameters"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"SUB t! c!\n", 'E_BAD_TOPIC SUB topic name "t!" is not valid'),
        (b"SUB t c!\n", 'E_BAD_CHANNEL SUB channel name "c!" is not valid'),
        (b"SUB t \n", 'E_BAD_CHANNEL SUB channel name "" is not valid'),
        (b"SUB a\tb \xff\n", r'E_BAD_TOPIC SUB topic name "a\tb" is not valid'),
        (b"SUB t \xff\x01\n", r'E_BAD_CHANNEL SUB channel name "\xff\x01" is not valid'),
    ],
)
def test_sub_checks_the_topic_then_the_channel(line: bytes, error: str) -> None:
    assert refusal(line) == error


def test_ephemeral_names_are_accepted() -> None:
    assert commands(b"SUB t#ephemeral c#ephemeral\n") == [Subscribe("t#ephemeral", "c#ephemeral")]


def test_sub_without_heartbeats_is_refused_before_its_parameters_are_checked() -> None:
    silent = b"IDENTIFY\n" + sized(b'{"heartbeat_interval":-1}')
    for line in (b"SUB t c\n", b"SUB\n", b"SUB ! !\n"):
        assert refusal(silent + line) == "E_INVALID cannot SUB with heartbeats disabled"


def test_a_refused_sub_does_not_change_the_state() -> None:
    assert outcome_of(b"SUB t c!\n").state == INIT


# 6 and 13. Numbers, RDY


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b"RDY", 1),
        (b"RDY ", 0),
        (b"RDY 0002500", 2500),
        (b"RDY %d" % (10**30 * 2**64 + 5), 5),
        (b"RDY " + b"0" * 16_000 + b"9", 9),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_rdy_gives_a_count_that_wraps_like_64_bits(line: bytes, count: int) -> None:
    assert commands(SUB + line + b"\n")[1:] == [Ready(count)]


@pytest.mark.parametrize(
    ("text", "count"), [(b"2501", 2501), (b"9223372036854775808", -(2**63)), (b"18446744073709554117", 2501)]
)
def test_rdy_out_of_range_is_refused_with_the_count_as_a_signed_number(text: bytes, count: int) -> None:
    assert refusal(SUB + b"RDY %s\n" % text) == f"E_INVALID RDY count {count} out of range 0-2500"


@pytest.mark.parametrize("text", [b"-1", b"1_000", b"\xff"])
def test_a_number_that_is_not_decimal_is_quoted_in_the_error(text: bytes) -> None:
    shown = text.decode("utf-8", "surrogateescape")
    assert refusal(SUB + b"RDY %s\n" % text) == f"E_INVALID RDY could not parse count {shown}"
    assert refusal(SUB + b"REQ %s %s\n" % (ID, text)) == f"E_INVALID REQ could not parse timeout {shown}"
    assert refusal(b"DPUB t %s\n" % text) == f"E_INVALID DPUB could not parse timeout {shown}"


@pytest.mark.parametrize("line", [b"RDY\n", b"RDY x\n"])
def test_rdy_while_closing_is_ignored_whatever_its_parameter(line: bytes) -> None:
    outcome = outcome_of(SUB + CLS + line)
    assert outcome.commands == [Subscribe("t", "c"), StartClose()]
    assert outcome.completed == 3


# 15. CLS, NOP


def test_cls_gives_a_command_and_nop_none() -> None:
    outcome = outcome_of(b"NOP\n" + SUB + b"NOP\nCLS\nNOP\n")
    assert outcome.commands == [Subscribe("t", "c"), StartClose()]
    assert outcome.completed == 5


# Pieces


@both_builds
def test_a_command_is_given_as_soon_as_it_is_complete() -> None:
    protocol = started(LIMITS)
    data = SUB + b"RDY 5\n" + b"PUB t\n" + sized(b"x") + mpub(b"t", [b"y"]) + fins(1, 2)
    came = {
        at: found for at, byte in enumerate(one_by_one(data)) if (found := list(commands_in(protocol, byte)))
    }
    ends = [8, 6, 11, 7 + 13, 21, 21]
    assert list(came) == [sum(ends[: i + 1]) - 1 for i in range(len(ends))]


@both_builds
def test_bytes_after_a_command_are_kept_if_the_reader_stops() -> None:
    protocol = started(LIMITS)
    data = SUB + b"RDY 5\nPUB t\n" + sized(b"xy")
    first = next(iter(commands_in(protocol, data[:-1])))
    assert CommandList([first, *commands_in(protocol, data[-1:])]) == [
        Subscribe("t", "c"),
        Ready(5),
        Publish("PUB", "t", [b"xy"]),
    ]


def test_a_command_is_checked_only_when_it_is_asked_for() -> None:
    # The reply to the first must be sent before the error of the second.
    found = commands_in(started(LIMITS), SUB + b"FOO\n")
    assert next(found) == Subscribe("t", "c")
    with pytest.raises(FatalClientError):
        next(found)


def test_commands_before_an_error_are_given_first() -> None:
    outcome = outcome_of(SUB + b"RDY 5\n" + fins(1, 2, 3) + b"RDY x\nRDY 6\n")
    assert outcome.commands == [Subscribe("t", "c"), Ready(5), *finished(1, 2, 3)]
    assert outcome.error == "E_INVALID RDY could not parse count x"
    assert outcome.completed == 5


@both_builds
def test_bodies_are_copies_of_the_received_bytes() -> None:
    # A message of one byte must not keep a megabyte of input alive.
    (command,) = commands_in(started(Limits()), b"PUB t\n" + sized(b"x"))
    assert isinstance(command, Publish)
    assert type(command.bodies[0]) is bytes


@pytest.mark.parametrize("layer", ["tls", "snappy"])
def test_bytes_after_identify_can_be_given_to_a_new_layer(layer: str) -> None:
    protocol = started(Limits(tls_available=True))
    body = json.dumps({"feature_negotiation": True, "tls_v1": layer == "tls", "snappy": layer == "snappy"})
    behind = b"\x16\x03\x01 not a command\n"
    found = commands_in(protocol, b"IDENTIFY\n" + sized(body.encode()) + behind)
    command = next(found)
    assert isinstance(command, Identify)
    assert protocol.take_rest() == behind
    assert protocol.take_rest() == b""
    assert list(found) == []
    assert CommandList(commands_in(protocol, b"SUB t c\n")) == [Subscribe("t", "c")]


def test_the_rest_includes_pieces_that_were_not_looked_at() -> None:
    protocol = started(LIMITS)
    assert CommandList(commands_in(protocol, b"PU")) == []
    assert protocol.take_rest() == b"PU"
    assert CommandList(commands_in(protocol, b"N")) == []
    assert CommandList(commands_in(protocol, b"OP\nSUB t c\n")) == [Subscribe("t", "c")]
    fresh = ServerProtocol(LIMITS)
    assert CommandList(commands_in(fresh, b"  ")) == []
    assert fresh.take_rest() == b"  "
    assert CommandList(commands_in(fresh, MAGIC[:3])) == []
    assert CommandList(commands_in(fresh, MAGIC[3:] + SUB)) == [Subscribe("t", "c")]
