"""What holds for every stream of bytes, whatever it says and however it is cut into pieces."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from nsparq.errors import FatalClientError
from nsparq.names import is_ephemeral, is_valid_name, quote
from nsparq.wire.commands import Auth, Identify, Publish, Ready, Requeue, StartClose, Subscribe, Touch
from nsparq.wire.frames import encode_frame
from nsparq.wire.identify import decode_identify
from nsparq.wire.limits import Limits
from nsparq.wire.server import MAGIC
from tests.support import multi, sized
from tests.support.examples import examples
from tests.wire.harness import BUILDS, both_builds, converse, one_by_one, using

# Small enough that every limit is met again and again.
SMALL = Limits(max_msg_size=8, max_body_size=40, max_rdy_count=5, max_req_timeout_ms=1000)
TOP = 2**64 - 1
CODES = {"E_INVALID", "E_BAD_BODY", "E_BAD_TOPIC", "E_BAD_CHANNEL", "E_BAD_MESSAGE", "E_BAD_PROTOCOL"}
CODES |= {"E_IDENTIFY_FAILED"}

# Conversations that follow the rules: pairs of the bytes and what they mean

NAMES = st.from_regex(re.compile(r"[.a-zA-Z0-9_-]{1,5}(#ephemeral)?", re.ASCII), fullmatch=True)
BODIES = st.binary(min_size=1, max_size=8) | st.sampled_from([b"\n", b"FIN \n", b"NOP\n", b"\r\n"])
IDS = st.integers(0, TOP) | st.integers(0, 9) | st.integers(TOP - 9, TOP)
ENDS = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b" x\n"])


def publish(topic: str, body: bytes, end: bytes) -> tuple[bytes, list[object]]:
    return b"PUB %s" % topic.encode() + end + sized(body), [Publish("PUB", topic, [body])]


def publish_deferred(topic: str, body: bytes, defer_ms: int, end: bytes) -> tuple[bytes, list[object]]:
    line = b"DPUB %s %d" % (topic.encode(), defer_ms)
    return line + end + sized(body), [Publish("DPUB", topic, [body], defer_ms)]


def publish_many(topic: str, bodies: list[bytes], declared: int, end: bytes) -> tuple[bytes, list[object]]:
    line = b"MPUB %s" % topic.encode() + end + struct.pack(">i", declared)
    return line + multi(bodies), [Publish("MPUB", topic, bodies)]


def finish(numbers: list[int], end: bytes) -> tuple[bytes, list[object]]:
    return b"".join(b"FIN %016x%b" % (n, end) for n in numbers), [("FIN", n) for n in numbers]


PUBLISHES = st.one_of(
    st.builds(publish, NAMES, BODIES, ENDS),
    st.builds(publish_deferred, NAMES, BODIES, st.integers(0, 1000), ENDS),
    st.builds(publish_many, NAMES, st.lists(BODIES, min_size=1, max_size=5), st.integers(1, 40), ENDS),
    st.just((b"NOP\n", [])),
)
ANSWERS = st.one_of(
    st.builds(finish, st.lists(IDS, min_size=1, max_size=20), ENDS),
    st.builds(
        lambda first, count: finish([n & TOP for n in range(first, first + count)], b"\n"),
        IDS,
        st.integers(1, 30),
    ),
    st.builds(
        lambda n, ms: (b"REQ %016x %d\n" % (n, ms), [Requeue(n, min(ms, 1000))]), IDS, st.integers(0, 2000)
    ),
    st.builds(lambda n, end: (b"TOUCH %016x%b" % (n, end), [Touch(n)]), IDS, ENDS),
)
OPENINGS = st.one_of(
    PUBLISHES,
    st.sampled_from(["{}", "null", '{"client_id":"a"}', '{"feature_negotiation":true, "x":[1]}']).map(
        lambda text: (b"IDENTIFY\n" + sized(text.encode()), [Identify(decode_identify(text.encode(), SMALL))])
    ),
    BODIES.map(lambda secret: (b"AUTH\n" + sized(secret), [Auth(secret)])),
)
READY = st.integers(0, 5).map(lambda n: (b"RDY %d\n" % n, [Ready(n)]))
IGNORED_READY = st.binary(max_size=5).map(lambda raw: (b"RDY " + raw.replace(b"\n", b"") + b"\n", []))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[object]]:
    """A whole one: first as a publisher, then perhaps as a consumer, which perhaps closes."""
    parts: list[tuple[bytes, list[object]]] = [(MAGIC, []), *draw(st.lists(OPENINGS, max_size=5))]
    if draw(st.booleans()):
        topic, channel = draw(NAMES), draw(NAMES)
        parts.append((f"SUB {topic} {channel}\n".encode(), [Subscribe(topic, channel)]))
        parts += draw(st.lists(PUBLISHES | ANSWERS | READY, max_size=10))
        if draw(st.booleans()):
            parts.append((b"CLS\n", [StartClose()]))
            parts += draw(st.lists(PUBLISHES | ANSWERS | IGNORED_READY, max_size=5))
    return b"".join(part[0] for part in parts), [command for part in parts for command in part[1]]


# Streams that do not: words of the protocol in any order, and conversations with something wrong

SIZES = [struct.pack(">i", n) for n in (0, 1, 2, 8, 9, 40, 41, -1, 2**31 - 1)]
WORDS = [
    b"IDENTIFY",
    b"AUTH",
    b"SUB",
    b"RDY",
    b"FIN",
    b"REQ",
    b"TOUCH",
    b"CLS",
    b"NOP",
    b"PUB",
    b"MPUB",
    b"DPUB",
]
PHRASES = [
    b" ",
    b"\n",
    b"\r\n",
    b" t c\n",
    b"SUB t c\n",
    b"CLS\n",
    b"PUB t\n",
    b"MPUB t\n",
    b"DPUB t 5\n",
    b"RDY ",
]
PHRASES += [
    b"5\n",
    b"99999999999999999999 ",
    b"0123456789abcdef",
    b"0123456789ABCDEF",
    b"x" * 8,
    b"{}",
    b"null",
]
PHRASES += [
    b"FIN 0123456789abcdef\n" * 10,
    b"FIN ffffffffffffffff\n",
    b"FIN 0000000000000000\n",
    b"IDENTIFY\n",
]
PHRASES += [
    b"AUTH\n",
    b"REQ 0123456789abcdef ",
    b"TOUCH 0123456789abcdef\n",
    sized(b"x"),
    sized(b"x" * 8) * 5,
]
PHRASES += [b"x" * 16_380, b"NOP ".ljust(16_383, b"x") + b"\n", b'{"a":' * 7]
NOISE = st.lists(st.sampled_from(SIZES + WORDS + PHRASES + PHRASES) | st.binary(max_size=6), max_size=20)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A conversation in which a few bytes were replaced, removed or inserted, or which ends
    early."""
    data = draw(conversations())[0]
    for _ in range(draw(st.integers(1, 3))):
        at, removed = draw(st.integers(0, len(data))), draw(st.integers(0, 5))
        inserted = draw(st.binary(max_size=4) | st.sampled_from(SIZES + PHRASES))
        data = data[:at] + inserted + data[at + removed :]
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


STREAMS = st.one_of(
    st.binary(max_size=40),
    NOISE.map(lambda noise: MAGIC + b"".join(noise)),
    NOISE.map(lambda noise: MAGIC + b"SUB t c\n" + b"".join(noise)),
    NOISE.map(lambda noise: MAGIC + b"MPUB t\n\x00\x00\x00\x09\x00\x00\x00\x07" + b"".join(noise)),
    damaged(),
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at these places, empty pieces included; in single bytes if there are none."""
    if not cuts:
        return one_by_one(data)
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in zip(places, places[1:], strict=False)]


CUTS = st.lists(st.integers(0, 2**16), max_size=12)


@both_builds
@given(conversation=conversations(), cuts=CUTS)
def test_a_conversation_means_the_same_however_it_is_cut(
    build: str, conversation: tuple[bytes, list[object]], cuts: list[int]
) -> None:
    data, meaning = conversation
    with using(build):
        for outcome in (converse([data], SMALL, eof=True), converse(pieces(data, cuts), SMALL, eof=True)):
            assert outcome.error is None
            assert outcome.commands == meaning


# Few topics and wrong sizes, in pieces about as long as a command: the short cuts are taken, and
# left.
LONE = st.one_of(
    st.builds(
        publish, st.sampled_from(["t", "u", "tt"]), BODIES, st.sampled_from([b"\n", b"\n", b"\r\n"])
    ).map(lambda part: part[0]),
    st.builds(lambda size, body: b"PUB t\n" + size + body, st.sampled_from(SIZES), BODIES),
    st.sampled_from([b"NOP\n", b"PUB t\n", b"PUB t", b"SUB t c\n", b"MPUB t\n" + sized(multi([b"x"]))]),
)


@both_builds
@settings(max_examples=examples(300))
@given(parts=st.lists(LONE, max_size=12))
def test_single_publishes_mean_the_same_one_at_a_time_and_all_at_once(build: str, parts: list[bytes]) -> None:
    with using(build):
        whole = converse([MAGIC + b"".join(parts)], SMALL, eof=True)
        assert converse([MAGIC, *parts], SMALL, eof=True) == whole


@settings(max_examples=examples(300))
@given(data=STREAMS, cuts=CUTS)
@example(data=MAGIC + b"MPUB t\n\x00\x00\x00\x09\x00\x00\x00\x07" + sized(b"x" * 8) * 7, cuts=[])
@example(data=MAGIC + b"MPUB t\n\x00\x00\x00\x09\x00\x00\x00\x07" + sized(b"x" * 8) * 6 + bytes(4), cuts=[])
@example(data=MAGIC + b"SUB t c\n" + b"FIN ffffffffffffffff\nFIN 0000000000000000\n" * 4, cuts=[])
@example(data=MAGIC + b"x" * 16_384, cuts=[16_387])
def test_any_bytes_come_to_the_same_documented_end_in_both_builds_however_they_are_cut(
    data: bytes, cuts: list[int]
) -> None:
    outcomes = []
    for build in ["compiled", "pure"][-len(BUILDS) :]:
        with using(build):
            # converse() lets every exception through that is no error of the protocol's.
            outcomes += [converse([data], SMALL, eof=True), converse(pieces(data, cuts), SMALL, eof=True)]
    assert outcomes == [outcomes[0]] * len(outcomes)
    error = outcomes[0].error
    code = "none" if error is None else error.split(" ")[0]
    event(code)
    assert code in CODES | {"none", "line"}
    if error is not None:
        error.encode("utf-8", "surrogateescape")


# Numbers

WIDE = Limits(max_rdy_count=2**63 - 1, max_req_timeout_ms=2**63 - 1)


@given(st.text("0123456789", max_size=60) | st.integers(0, 2**70).map(str) | st.just("9" * 5000))
@example("")
@example(str(2**63))
@example(str(2**64))
def test_a_number_is_its_value_in_64_bits(digits: str) -> None:
    value = 0
    for digit in digits:
        value = (10 * value + int(digit)) % 2**64
    line = f"RDY {digits}\nREQ {'0' * 16} {digits}\n".encode()
    outcome = converse([MAGIC + b"SUB t c\n" + line], WIDE)
    if value < 2**63:
        assert outcome.commands[1:] == [Ready(value), Requeue(0, value)]
    else:
        assert outcome.error == f"E_INVALID RDY count {value - 2**64} out of range 0-{2**63 - 1}"


@given(st.binary(min_size=1, max_size=20).map(lambda raw: raw.replace(b"\n", b"").replace(b" ", b"")))
@example(b"+1")
@example(b"1_0")
@example("٣".encode())
@example(b"1\r")
def test_only_ascii_digits_make_a_number(raw: bytes) -> None:
    text = raw.removesuffix(b"\r")
    error = converse([MAGIC + b"SUB t c\nRDY " + raw + b"\n"], WIDE).error
    is_number = all(byte in b"0123456789" for byte in text)
    could_not_parse = error is not None and error.startswith("E_INVALID RDY could not parse count ")
    assert could_not_parse != is_number
    if could_not_parse and error is not None:
        assert error.encode("utf-8", "surrogateescape").endswith(b" " + text)


# Names

LETTERS = frozenset(b".-_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


@given(
    st.binary(max_size=70)
    | NAMES.map(str.encode)
    | st.builds(
        lambda length, suffix: b"a" * length + suffix,
        st.integers(0, 66),
        st.sampled_from([b"", b"#ephemeral"]),
    )
)
def test_a_name_is_valid_by_its_letters_and_its_length(name: bytes) -> None:
    stem = name.removesuffix(b"#ephemeral")
    assert is_valid_name(name) == (0 < len(stem) and len(name) <= 64 and LETTERS.issuperset(stem))
    if is_valid_name(name):
        assert is_ephemeral(name.decode()) == (stem != name)


UNESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}


def unquote(quoted: str) -> bytes:
    """The bytes behind a text in Go's quoting."""
    assert quoted[0] == quoted[-1] == '"'

    def value(match: re.Match[str]) -> str:
        escape = match[0]
        if escape[1] == "x":
            return bytes([int(escape[2:], 16)]).decode("utf-8", "surrogateescape")
        return chr(int(escape[2:], 16)) if escape[1] in "uU" else chr(UNESCAPES[escape[1]])

    escapes = r'\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}|\\[abtnvfr"\\]|\\.'
    return re.sub(escapes, value, quoted[1:-1]).encode("utf-8", "surrogateescape")


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_a_quoted_name_is_printable_and_can_be_read_back(raw: bytes) -> None:
    quoted = quote(raw)
    assert quoted.isprintable()
    assert '"' not in quoted[1:-1].replace("\\\\", "").replace('\\"', "")
    assert unquote(quoted) == raw


# IDENTIFY, frames

FIELDS = ["client_id", "hostname", "feature_negotiation", "heartbeat_interval", "output_buffer_size", "x"]
FIELDS += [
    "output_buffer_timeout",
    "sample_rate",
    "msg_timeout",
    "deflate",
    "snappy",
    "tls_v1",
    "deflate_level",
]
NUMBERS = st.integers() | st.sampled_from([-1, 0, 24, 25, 63, 64, 99, 100, 999, 1000, 60_000, 2**31, 2**63])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
OFFERING = Limits(tls_available=True)


@settings(max_examples=examples(200))
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=6) | VALUES)
def test_any_json_gives_an_identity_within_the_limits_or_a_documented_error(body: Any) -> None:
    try:
        identity = decode_identify(json.dumps(body).encode(), OFFERING)
    except FatalClientError as error:
        assert error.code in {"E_BAD_BODY", "E_IDENTIFY_FAILED"}
        return
    assert identity.heartbeat_ms == 0 or 1000 <= identity.heartbeat_ms <= 60_000
    assert identity.output_buffer_size == 1 or 64 <= identity.output_buffer_size <= 65_536
    assert identity.output_buffer_timeout_ms == 0 or 25 <= identity.output_buffer_timeout_ms <= 30_000
    assert 0 <= identity.sample_rate <= 99
    assert 1000 <= identity.msg_timeout_ms <= 900_000
    assert 1 <= identity.deflate_level <= 6
    assert not (identity.deflate and identity.snappy)
    assert (identity.reply(OFFERING) == b"OK") == (not identity.feature_negotiation)
    for text in (identity.client_id, identity.hostname, identity.user_agent):
        text.encode()


@given(st.integers(0, 2), st.binary())
def test_a_frame_can_be_read_back(kind: int, data: bytes) -> None:
    frame = encode_frame(kind, data)
    assert struct.unpack_from(">ii", frame) == (4 + len(data), kind)
    assert frame[8:] == data
