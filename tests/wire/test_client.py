"""The client's side of a conversation: bytes to frames, and commands to bytes."""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.headers import ORIGIN, without_origin
from nsparq.wire import client as wire
from nsparq.wire import server
from nsparq.wire.client import BadFrame, Error, Frame, FrameDecoder, Received, Response
from nsparq.wire.commands import Auth, Identify, Publish, Ready, Requeue, StartClose, Subscribe, Touch
from tests.support.connection import with_headers
from tests.support.scripted_nsqd import ERROR, MESSAGE, MESSAGE_WITH_HEADERS, RESPONSE, frame, message_frame
from tests.wire.harness import BUILDS, both_builds, commands, finished, using

ID = b"0123456789abcdef"
HTTP_TEXT = "unexpected HTTP response, a nsqd TCP endpoint is required"


def encoded(one: Frame) -> bytes:
    match one:
        case Response(data):
            return frame(RESPONSE, data)
        case Error(text):
            return frame(ERROR, text.encode())
        case [*messages]:
            return b"".join(map(encoded_message, messages))


def encoded_message(message: Received) -> bytes:
    timestamp_ns, attempts, message_id, body, block = message
    head = struct.pack(">qH16s", timestamp_ns, attempts, message_id)
    if block:
        return frame(MESSAGE_WITH_HEADERS, head + struct.pack(">i", len(block)) + block + body)
    return frame(MESSAGE, head + body)


ANSWERS = st.builds(Response, st.binary(max_size=40) | st.just(b"_heartbeat_")) | st.builds(
    Error, st.text(max_size=40)
)
MESSAGES = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 65535),
    st.binary(min_size=16, max_size=16),
    st.binary(max_size=100),
    st.just(b"") | st.binary(max_size=40),
)
FRAMES = ANSWERS | st.lists(MESSAGES, min_size=1, max_size=6)


def joined(frames: list[Frame]) -> list[Frame]:
    """Consecutive messages as one list, as if all bytes had come together."""
    found: list[Frame] = []
    for one in frames:
        if found and isinstance(one, list) and isinstance(found[-1], list):
            found[-1] = found[-1] + one
        else:
            found.append(one)
    return found


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]


# Frames

CUTS = st.lists(st.integers(0, 10_000), max_size=8)


@both_builds
@given(frames=st.lists(FRAMES, max_size=8), cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_frames_do_not_depend_on_how_the_bytes_are_cut(
    build: str, frames: list[Frame], cuts: list[int]
) -> None:
    decoder = FrameDecoder()
    found: list[Frame] = []
    with using(build):
        for piece in pieces(b"".join(map(encoded, frames)), cuts):
            found += decoder.receive_data(piece)
    assert joined(found) == joined(frames)
    assert decoder.take_rest() == b""


@given(st.lists(ANSWERS, min_size=1, max_size=5), st.lists(st.integers(0, 10_000), max_size=8))
def test_one_frame_at_a_time_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    decoder = FrameDecoder()
    found: list[Frame] = []
    for piece in pieces(b"".join(map(encoded, frames)), cuts):
        more = decoder.receive_data(piece, most=1)
        while more:
            assert len(more) == 1
            found += more
            more = decoder.receive_data(b"", most=1)
    assert found == frames


@given(st.lists(ANSWERS, min_size=1, max_size=4), st.binary(max_size=200), st.lists(st.integers(0, 10_000)))
def test_bytes_after_a_frame_can_be_taken_undecoded(
    frames: list[Frame], rest: bytes, cuts: list[int]
) -> None:
    """A new layer needs the bytes after the last frame, whole frames or not."""
    decoder = FrameDecoder()
    whole = encoded(frames[0])
    found: list[Frame] = []
    behind = []
    for piece in pieces(whole + rest, cuts):
        if found:
            behind.append(piece)
        else:
            found = decoder.receive_data(piece, most=1)
    assert found == frames[:1]
    assert decoder.take_rest() + b"".join(behind) == rest


HEADS = st.builds(
    struct.Struct(">ii").pack,
    st.sampled_from([29, 30, 33, 34, 40, 100, 101, -1, 2**31 - 1]),
    st.sampled_from([RESPONSE, MESSAGE, MESSAGE_WITH_HEADERS, 4, -1]),
)
BLOCK_SIZES = st.sampled_from([0, 1, 60, 66, 67, -1, 2**31 - 1]).map(struct.Struct(">i").pack)
ODD = st.builds(lambda head, size, rest: head + bytes(26) + size + rest, HEADS, BLOCK_SIZES, st.binary())


@given(st.binary(max_size=300) | st.lists(ODD | FRAMES.map(encoded), max_size=4).map(b"".join), CUTS)
def test_any_bytes_are_frames_or_refused_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    def outcome(build: str, parts: list[bytes]) -> tuple[list[Frame], str]:
        decoder = FrameDecoder(max_size=100)
        found: list[Frame] = []
        try:
            with using(build):
                for part in parts:
                    found += decoder.receive_data(part)
        except BadFrame as error:
            return joined(found + error.frames), str(error)
        return joined(found), ""

    whole = [data]
    assert (
        len({repr(outcome(build, parts)) for build in BUILDS for parts in (pieces(data, cuts), whole)}) == 1
    )


OKS = st.lists(st.just(Response(b"OK")), max_size=5)


@given(OKS, st.lists(FRAMES, max_size=2), OKS, st.lists(st.integers(0, 10_000), max_size=6))
def test_only_a_pure_run_of_oks_is_counted(
    before: list[Frame], between: list[Frame], behind: list[Frame], cuts: list[int]
) -> None:
    frames = [*before, *between, *behind]
    decoder = FrameDecoder()
    found: list[Frame] = []
    for piece in pieces(b"".join(map(encoded, frames)), cuts):
        count = decoder.receive_oks(piece)
        found += [Response(b"OK")] * count if count else decoder.receive_data(piece)
    assert joined(found) == joined(frames)
    assert decoder.take_rest() == b""


def test_oks_after_a_part_of_a_frame_are_not_counted() -> None:
    decoder, answer = FrameDecoder(), frame(RESPONSE, b"OK")
    assert (decoder.receive_oks(answer * 3), decoder.receive_data(answer[:3])) == (3, [])
    assert decoder.receive_oks(answer[3:] + answer) == 0
    assert decoder.receive_data(answer[3:] + answer) == [Response(b"OK")] * 2
    assert decoder.receive_oks(answer) == 1


def test_frames_before_a_bad_one_come_with_the_error() -> None:
    good = frame(RESPONSE, b"OK") + message_frame("1")
    with pytest.raises(BadFrame) as caught:
        FrameDecoder().receive_data(good + frame(7, b""))
    assert [type(one) for one in caught.value.frames] == [Response, list]


def test_an_error_need_not_be_utf_8() -> None:
    assert FrameDecoder().receive_data(frame(ERROR, b"E_BAD \xff")) == [Error("E_BAD �")]


@pytest.mark.parametrize("size", [-(2**31), -1, 0, 3])
def test_a_size_that_does_not_hold_the_type_is_refused(size: int) -> None:
    with pytest.raises(BadFrame, match=f"a frame of {size} bytes"):
        FrameDecoder().receive_data(struct.pack(">ii", size, 0))


@pytest.mark.parametrize("kind", [-1, 4, 2**31 - 1])
def test_an_unknown_frame_type_is_refused_before_its_data_arrive(kind: int) -> None:
    with pytest.raises(BadFrame, match=f"a frame of type {kind}"):
        FrameDecoder().receive_data(struct.pack(">ii", 1 << 30, kind))


@both_builds
def test_a_message_too_short_for_its_head_is_refused(build: str) -> None:
    with using(build):
        with pytest.raises(BadFrame, match="a message frame of 29 bytes"):
            FrameDecoder().receive_data(frame(MESSAGE, b"x" * 25))
        assert FrameDecoder().receive_data(frame(MESSAGE, bytes(26))) == [[(0, 0, bytes(16), b"", b"")]]


@both_builds
@pytest.mark.parametrize(
    ("size", "rest"), [(0, b""), (3, b"abc"), (2, b"abc"), (4, b"abc"), (-1, b"abc"), (None, b"abc")]
)
def test_a_header_block_must_be_within_its_frame(build: str, size: int | None, rest: bytes) -> None:
    data = bytes(26) + (struct.pack(">i", size) if size is not None else b"") + rest
    with using(build):
        if size is not None and 0 <= size <= len(rest):
            found = FrameDecoder().receive_data(frame(MESSAGE_WITH_HEADERS, data))
            assert found == [[(0, 0, bytes(16), rest[size:], rest[:size])]]
            return
        with pytest.raises(BadFrame, match="a message frame of .* bytes"):
            FrameDecoder().receive_data(frame(MESSAGE_WITH_HEADERS, data))


@both_builds
def test_max_size_bounds_a_frame_with_its_type(build: str) -> None:
    decoder = FrameDecoder(max_size=34)
    assert decoder.receive_data(frame(RESPONSE, b"x" * 30)) == [Response(b"x" * 30)]
    with pytest.raises(BadFrame, match="a frame of 35 bytes is longer than 34"):
        decoder.receive_data(frame(RESPONSE, b"x" * 31)[:8])
    decoder = FrameDecoder(max_size=34)
    with using(build), pytest.raises(BadFrame, match="a frame of 35 bytes is longer than 34") as caught:
        decoder.receive_data(message_frame("1", b"four") + message_frame("2", b"five!"))
    assert [[body for _, _, _, body, _ in run] for run in caught.value.frames] == [[b"four"]]  # type: ignore[union-attr]


@pytest.mark.parametrize("max_size", [0, 1 << 20])
@pytest.mark.parametrize("split", [0, 3, 8])
def test_an_answer_in_http_is_recognised(max_size: int, split: int) -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    decoder = FrameDecoder(max_size)
    with pytest.raises(BadFrame, match=HTTP_TEXT):
        decoder.receive_data(answer[:split])
        decoder.receive_data(answer[split:])


def test_a_large_frame_in_many_pieces_is_joined_once() -> None:
    """Joining at every piece would take minutes here."""
    body = bytes(1 << 24)
    data = frame(RESPONSE, body)
    decoder = FrameDecoder()
    found: list[Frame] = []
    for start in range(0, len(data), 1000):
        found += decoder.receive_data(data[start : start + 1000])
    assert found == [Response(body)]


# Commands, as the server's side hears them

PUB = wire.pub_line(b"t")
MPUB = wire.mpub_line(PUB)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (wire.rdy(7), Ready(7)),
        (wire.req(ID, 1500), Requeue(int(ID, 16), 1500)),
        (wire.touch(ID), Touch(int(ID, 16))),
        (wire.CLS, StartClose()),
    ],
)
def test_the_server_reads_the_commands_of_a_consumer_as_written(data: bytes, expected: object) -> None:
    assert commands(wire.sub("t", "ch") + data) == [Subscribe("t", "ch"), expected]


def test_the_server_reads_fin_as_written() -> None:
    assert commands(wire.sub("t", "ch") + wire.fin(ID)) == [Subscribe("t", "ch"), *finished(int(ID, 16))]
    assert wire.fin_all([ID]) == wire.fin(ID)
    assert wire.fin_all([ID, ID[::-1]]) == wire.fin(ID) + wire.fin(ID[::-1])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (wire.pub(PUB, b"body"), Publish("PUB", "t", [b"body"])),
        (wire.pub(wire.dpub_line(PUB, 250), b"body"), Publish("DPUB", "t", [b"body"], 250)),
        (wire.mpub(MPUB, [b"a", b"bc", b"\n"]), Publish("MPUB", "t", [b"a", b"bc", b"\n"])),
    ],
)
def test_the_server_reads_publishes_as_written(data: bytes, expected: object) -> None:
    assert commands(data + wire.NOP) == [expected]


def test_identify_and_auth_carry_their_bodies() -> None:
    assert [type(one) for one in commands(wire.identify(b"{}") + wire.auth(b"secret"))] == [Identify, Auth]


def test_the_magic_is_the_one_that_servers_know() -> None:
    assert wire.MAGIC == server.MAGIC


@both_builds
@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=10))
def test_in_an_mpub_each_message_follows_its_size(build: str, bodies: list[bytes]) -> None:
    content = struct.pack(">i", len(bodies))
    content += b"".join(struct.pack(">i", len(body)) + body for body in bodies)
    expected = b"MPUB t\n" + struct.pack(">i", len(content)) + content
    with using(build):
        for given_as in (bodies, tuple(bodies), [bytearray(body) for body in bodies]):
            assert wire.mpub(MPUB, given_as) == expected


NAMES = st.text("ab-.", min_size=1, max_size=3) | st.sampled_from(["nsq-", "nsq-other", *ORIGIN])
HEADERS = st.dictionaries(NAMES, st.text("a\xfc", max_size=3), max_size=3)


@both_builds
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.none() | HEADERS), min_size=1, max_size=5))
def test_in_an_mpub_with_headers_each_message_begins_with_its_block(
    build: str, messages: list[tuple[bytes, dict[str, str] | None]]
) -> None:
    bodies, headers = [body for body, _ in messages], [one for _, one in messages]
    left = [without_origin(one or {}) for one in headers]
    framed = [with_headers(body, one) for body, one in zip(bodies, left, strict=True)]
    same = headers[0] or {}
    with using(build):
        made = wire.mpub_with_headers(MPUB, bodies, headers, list)
        expected = wire.mpub(MPUB + wire.WITH_HEADERS, framed) if any(left) else wire.mpub(MPUB, bodies)
        assert made == (expected, any(left))
        # Iterators take the way of Python.
        assert wire.mpub_with_headers(MPUB, iter(bodies), iter(headers), list) == made
        for_all = wire.mpub_with_headers(MPUB, bodies, same, list)
        assert for_all == wire.mpub_with_headers(MPUB, bodies, [same] * len(bodies), list)


@both_builds
@given(body=st.binary(min_size=1, max_size=9), headers=HEADERS)
def test_a_single_message_begins_with_its_block(build: str, body: bytes, headers: dict[str, str]) -> None:
    left = without_origin(headers)
    expected = wire.pub(PUB + wire.WITH_HEADERS, with_headers(body, left)) if left else wire.pub(PUB, body)
    with using(build):
        assert wire.pub_with_headers(PUB, body, headers) == (expected, bool(left))
        assert wire.pub_with_headers(PUB, body, MappingProxyType(headers)) == (expected, bool(left))


@both_builds
@pytest.mark.parametrize(
    ("bodies", "headers", "text"),
    [
        ([b"x", b"y"], [{"k": "v"}], "2 messages, but 1 headers"),
        ([b"x", b""], {"k": "v"}, "none of them empty"),
        ([], {"k": "v"}, "none of them empty"),
        ([b"x"], [{"no good": "v"}], "not a header name"),
        ([b"x"], [{"k": "\ud800"}], "surrogates"),
        ([b"x"], [{"k": 5}], "not a text"),
        ([b"x"], {"k": "v" * 65536}, "must not exceed"),
    ],
)
def test_bad_headers_of_an_mpub_are_refused(build: str, bodies: Any, headers: Any, text: str) -> None:
    with using(build), pytest.raises((ValueError, TypeError), match=text):
        wire.mpub_with_headers(MPUB, bodies, headers, list)


@both_builds
@pytest.mark.parametrize(
    "headers", [{"no good": "v"}, {"k": "\ud800"}, {"k": 5}, {"k": "v" * 65536}, [{"k": "v"}]]
)
def test_bad_headers_of_a_single_message_are_refused(build: str, headers: Any) -> None:
    with using(build), pytest.raises((ValueError, TypeError, AttributeError)):
        wire.pub_with_headers(PUB, b"x", headers)


@both_builds
@pytest.mark.parametrize("bodies", [[], (), [b""], [b"x", b""], [b"x", bytearray()]])
def test_no_messages_and_empty_ones_are_refused(build: str, bodies: list[bytes]) -> None:
    with using(build), pytest.raises(ValueError, match="there must be messages, and none of them empty"):
        wire.mpub(MPUB, bodies)


@pytest.mark.parametrize("others", [[], [b"x"], [b"four"]])
def test_a_message_whose_length_is_not_its_bytes_is_refused(others: list[bytes]) -> None:
    """It would end the connection, and the publishes of others with it."""
    numbers = memoryview(struct.pack("4i", 1, 2, 3, 4)).cast("i")
    with pytest.raises(TypeError, match="length"):
        wire.mpub(MPUB, [*others, numbers])  # type: ignore[list-item]
