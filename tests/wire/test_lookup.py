"""The protocol between nsqd and nsqlookupd, both sides."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.errors import FatalClientError
from nsparq.wire.lookup import (
    MAGIC,
    MAX_IDENTIFY_BODY,
    MAX_LINE,
    OK,
    PING,
    BadReply,
    Command,
    Identify,
    LookupServerProtocol,
    PeerInfo,
    Ping,
    Register,
    ReplyDecoder,
    Unregister,
    decode_identify_reply,
    encode_error,
    encode_identify,
    encode_identify_reply,
    encode_register,
    encode_reply,
    encode_unregister,
)

FIELDS: dict[str, Any] = {
    "version": "1.3.0",
    "tcp_port": 4150,
    "http_port": 4151,
    "hostname": "host1",
    "broadcast_address": "nsq.example",
    "topology_zone": "z",
    "topology_region": "r",
}
REMOTE = "127.0.0.1:54188"
PEER = PeerInfo(remote_address=REMOTE, **FIELDS)
HELLO = MAGIC + encode_identify(FIELDS)


def sized(body: bytes) -> bytes:
    return b"IDENTIFY\n" + struct.pack(">i", len(body)) + body


class CommandList(list[Command]):
    """Commands are tuples, and a REGISTER would equal an UNREGISTER."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and [*map(repr, self)] == [*map(repr, other)]

    __hash__ = None


def conversation(*pieces: bytes, end: bool = False) -> tuple[list[Command], str]:
    """The commands in these pieces, and the error that ended them."""
    protocol = LookupServerProtocol(REMOTE)
    commands = CommandList()
    try:
        for piece in pieces:
            for command in protocol.receive_data(piece):
                commands.append(command)  # Commands before an error count too.
        if end:
            protocol.receive_eof()
    except FatalClientError as error:
        return commands, encode_error(error)[4:].decode("utf-8", "backslashreplace")
    return commands, ""


def error_of(*pieces: bytes, end: bool = False) -> str:
    return conversation(*pieces, end=end)[1]


# nsqlookupd's side


def test_a_conversation_gives_its_commands_in_order() -> None:
    sent = [PING, encode_register("t"), encode_register("t", "c"), encode_unregister("t", "c")]
    commands, error = conversation(HELLO + b"".join(sent))
    assert error == ""
    assert commands == [Identify(PEER), Ping(), Register("t", ""), Register("t", "c"), Unregister("t", "c")]


@given(st.lists(st.integers(0, 400)))
def test_commands_do_not_depend_on_how_bytes_are_split(cuts: list[int]) -> None:
    whole = HELLO + PING + encode_register("topic", "channel") + b"UNREGISTER topic\r\n" + b"REGISTER bad!\n"
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert conversation(*pieces) == conversation(whole)
    assert CommandList(conversation(whole)[0][-1:]) == [Unregister("topic", "")]


@pytest.mark.parametrize("magic", [b"  V2", b"GET "])
def test_another_magic_is_a_bad_protocol(magic: bytes) -> None:
    assert conversation(magic + b"PING\n") == ([], "E_BAD_PROTOCOL")


def test_a_magic_may_arrive_in_pieces() -> None:
    assert conversation(b"  V") == ([], "")


def test_ping_is_answered_before_identify() -> None:
    assert conversation(MAGIC, PING) == ([Ping()], "")


@pytest.mark.parametrize("line", [b"PING", b"  PING\t\r", b"PING me now", b"PING\x0b"])
def test_lines_are_trimmed_and_further_words_ignored(line: bytes) -> None:
    assert conversation(MAGIC, line + b"\n") == ([Ping()], "")


@pytest.mark.parametrize(
    ("line", "shown"),
    [(b"FOO bar", "FOO"), (b"", ""), (b"   ", ""), (b"ping", "ping"), (b"A\xff\x00B", "A\\xff\x00B")],
)
def test_the_error_quotes_an_unknown_command(line: bytes, shown: str) -> None:
    assert error_of(HELLO, line + b"\n") == f"E_INVALID invalid command {shown}"


def test_a_line_without_an_end_is_refused_at_the_limit() -> None:
    assert error_of(MAGIC, b"x" * (MAX_LINE - 1)) == ""
    assert error_of(MAGIC, b"x" * MAX_LINE) == f"E_INVALID line longer than {MAX_LINE} bytes"
    # A line that ends just within the limit is accepted.
    commands, error = conversation(HELLO, encode_register("t").strip().ljust(MAX_LINE - 1) + b"\n")
    assert (CommandList(commands[1:]), error) == ([Register("t", "")], "")


# IDENTIFY


@pytest.mark.parametrize("missing", ["broadcast_address", "tcp_port", "http_port", "version"])
def test_identify_without_a_required_field_is_refused(missing: str) -> None:
    absent = {name: value for name, value in FIELDS.items() if name != missing}
    for fields in (absent, {**FIELDS, missing: type(FIELDS[missing])()}):
        assert error_of(MAGIC, encode_identify(fields)) == "E_BAD_BODY IDENTIFY missing fields"


def test_identify_without_the_optional_fields_is_taken() -> None:
    fields = {name: FIELDS[name] for name in ("broadcast_address", "tcp_port", "http_port", "version")}
    commands, error = conversation(MAGIC, encode_identify(fields))
    assert (commands, error) == ([Identify(PeerInfo(remote_address=REMOTE, **fields))], "")


def test_the_real_remote_address_replaces_one_in_the_body() -> None:
    commands, _ = conversation(MAGIC, encode_identify({**FIELDS, "remote_address": "1.2.3.4:5"}))
    assert commands == [Identify(PEER)]


@pytest.mark.parametrize("body", [b"[]", b'{"tcp_port":"4150"}', b'{"version":1}'])
def test_a_body_that_does_not_decode_is_refused(body: bytes) -> None:
    assert error_of(MAGIC, sized(body)) == "E_BAD_BODY IDENTIFY failed to decode JSON body"


@pytest.mark.parametrize("size", [-1, MAX_IDENTIFY_BODY + 1])
def test_an_impossible_body_size_is_refused_at_once(size: int) -> None:
    text = f"E_BAD_BODY IDENTIFY invalid body size {size}"
    assert error_of(MAGIC, b"IDENTIFY\n" + struct.pack(">i", size)) == text


def test_the_largest_body_is_taken_however_small_its_pieces() -> None:
    body = json.dumps(FIELDS).encode().ljust(MAX_IDENTIFY_BODY)
    whole = sized(body)
    started = time.process_time()
    commands, error = conversation(MAGIC, *(whole[at : at + 16] for at in range(0, len(whole), 16)))
    assert (commands, error) == ([Identify(PEER)], "")
    assert time.process_time() - started < 5, "the cost must not grow with the square of the size"


def test_identify_is_taken_once_only() -> None:
    commands, error = conversation(HELLO, b"IDENTIFY\n")
    assert (commands, error) == ([Identify(PEER)], "E_INVALID cannot IDENTIFY again")


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (b"IDENTIFY\n", "E_BAD_BODY IDENTIFY failed to read body size"),
        (b"IDENTIFY\n\0\0\0", "E_BAD_BODY IDENTIFY failed to read body size"),
        (b"IDENTIFY\n\0\0\0\5", "E_BAD_BODY IDENTIFY failed to read body"),
        (b"IDENTIFY\n\0\0\0\5{}", "E_BAD_BODY IDENTIFY failed to read body"),
        (b"IDENTI", ""),
        (b"", ""),
    ],
)
def test_a_stream_that_ends_inside_a_body_says_what_was_missing(cut: bytes, text: str) -> None:
    assert error_of(MAGIC, cut, end=True) == text


# REGISTER and UNREGISTER


@pytest.mark.parametrize("verb", ["REGISTER", "UNREGISTER"])
def test_registrations_are_checked_with_nsqs_texts(verb: str) -> None:
    for params, text in (
        ("", "E_INVALID {} insufficient number of params"),
        (" '", "E_BAD_TOPIC {} topic name ''' is not valid"),
        ("  t", "E_BAD_TOPIC {} topic name '' is not valid"),
        (" t c!", "E_BAD_CHANNEL {} channel name 'c!' is not valid"),
        (" t! c!", "E_BAD_TOPIC {} topic name 't!' is not valid"),
    ):
        assert error_of(HELLO, f"{verb}{params}\n".encode()) == text.format(verb)


@pytest.mark.parametrize("line", [b"REGISTER bad!", b"UNREGISTER t"])
def test_registering_needs_identify_first(line: bytes) -> None:
    assert error_of(MAGIC, line + b"\n") == "E_INVALID client must IDENTIFY"


def test_an_empty_channel_counts_as_absent() -> None:
    commands, error = conversation(HELLO, b"REGISTER t  c\n")
    assert (CommandList(commands[1:]), error) == ([Register("t", "")], "")


# replies


def test_replies_have_a_length_and_no_type() -> None:
    assert OK == b"\0\0\0\x02OK"
    assert encode_reply(b"") == b"\0\0\0\0"
    assert encode_error(FatalClientError("E_BAD_PROTOCOL")) == b"\0\0\0\x0eE_BAD_PROTOCOL"


def test_the_identify_reply_has_nsqs_keys_in_order() -> None:
    reply = encode_identify_reply(
        version="1.3.0", tcp_port=4160, http_port=4161, hostname="host1", broadcast_address="127.0.0.1"
    )
    assert reply[4:] == (
        b'{"broadcast_address":"127.0.0.1","hostname":"host1","http_port":4161,"tcp_port":4160,"version":"1.3.0"}'
    )


# nsqd's side


def test_commands_are_written_as_nsq_writes_them() -> None:
    assert encode_register("t") == b"REGISTER t\n"
    assert encode_register("t", "c") == b"REGISTER t c\n"
    assert encode_unregister("t") == b"UNREGISTER t\n"
    assert encode_unregister("t", "c") == b"UNREGISTER t c\n"
    identify = encode_identify({"tcp_port": 4150})
    assert identify == b'IDENTIFY\n\0\0\0\x11{"tcp_port":4150}'


def decoded(pieces: Iterable[bytes], max_size: int = 100) -> list[bytes]:
    decoder = ReplyDecoder(max_size)
    return [reply for piece in pieces for reply in decoder.receive_data(piece)]


@given(st.lists(st.binary(max_size=20), max_size=20), st.integers(1, 50))
def test_replies_do_not_depend_on_how_bytes_are_split(replies: list[bytes], width: int) -> None:
    whole = b"".join(map(encode_reply, replies))
    assert decoded(whole[at : at + width] for at in range(0, len(whole), width)) == replies


@pytest.mark.parametrize("size", [-1, 101, 2**31 - 1])
def test_a_reply_larger_than_the_limit_is_a_failure(size: int) -> None:
    assert decoded([encode_reply(b"x" * 100)]) == [b"x" * 100]
    with pytest.raises(BadReply, match=str(size)):
        decoded([struct.pack(">i", size)])


def test_the_answer_of_an_http_port_is_named() -> None:
    """Somebody gave nsqd the HTTP address of an nsqlookupd. The size was 1,213,486,160 bytes."""
    with pytest.raises(BadReply, match="unexpected HTTP response, a TCP endpoint of nsqlookupd is required"):
        decoded([b"HTTP/1.1 400 Bad Request\r\n"])


def test_the_identify_reply_tells_where_http_is() -> None:
    fields = {"broadcast_address": "lookup.example", "hostname": "h", "http_port": 4161, "tcp_port": 4160}
    reply = encode_identify_reply(**fields, version="1.3.0")[4:]  # type: ignore[arg-type]  # mixed on purpose
    assert decode_identify_reply(reply) == PeerInfo(**fields, version="1.3.0")  # type: ignore[arg-type]


@pytest.mark.parametrize("reply", [b"E_INVALID", b"E_BAD_BODY IDENTIFY missing fields", b"OK", b"", b"[]"])
def test_an_identify_reply_that_is_not_json_is_a_failure(reply: bytes) -> None:
    with pytest.raises(BadReply, match="IDENTIFY"):
        decode_identify_reply(reply)


@given(st.binary(max_size=300))
def test_any_bytes_give_commands_or_a_documented_error(data: bytes) -> None:
    _, error = conversation(HELLO, data, end=True)
    assert error == "" or error.split(" ")[0] in {"E_INVALID", "E_BAD_TOPIC", "E_BAD_CHANNEL"}


@given(st.binary(max_size=300))
def test_any_identify_body_gives_a_peer_or_a_documented_error(body: bytes) -> None:
    assert error_of(MAGIC, sized(body)) in {
        "E_BAD_BODY IDENTIFY failed to decode JSON body",
        "E_BAD_BODY IDENTIFY missing fields",
    }
