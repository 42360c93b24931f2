"""The protocol between nsqd and nsqlookupd, both sides, without I/O.

nsqd to nsqlookupd: the magic "  V1", then lines; only IDENTIFY has a body (a size and JSON).
nsqlookupd to nsqd, one reply for each command, errors included; there is no frame type:

0        4                 4+size
+--------+------- … -------+
| size   | data            |      size counts the data; big endian
+--------+------- … -------+
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from nsparq.errors import FatalClientError, NsparqError
from nsparq.names import is_valid_name
from nsparq.wire.go_json import INT64, STRING, decode_object

MAGIC: Final = b"  V1"
MAX_LINE: Final = 16_384
"""Bytes of a line with its LF. NSQ has no limit here, and keeps reading a line without an end."""
MAX_IDENTIFY_BODY: Final = 65_536
"""NSQ allocates whatever size the peer names, and crashes on a negative one."""

_SIZE = struct.Struct(">i")
_PEER_FIELDS: Final = {
    "hostname": STRING,
    "broadcast_address": STRING,
    "tcp_port": INT64,
    "http_port": INT64,
    "version": STRING,
    "topology_zone": STRING,
    "topology_region": STRING,
    "cluster": STRING,
    "epoch": INT64,
}


class BadReply(NsparqError):
    """nsqlookupd sent a reply that nsqd cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """Description that either side gives of itself, in IDENTIFY or in the reply to it."""

    remote_address: str = ""
    """Address of the connection, `host:port`. Never taken from the description."""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    cluster: str = ""
    """Cluster of nsqds that keep copies of one data path; NSQ has no such field. nsqlookupd repeats
    it in its reply, and then lists one nsqd of the cluster only: that of the highest epoch."""
    epoch: int = 0
    """Grows whenever another node of the cluster serves."""


class Ping(NamedTuple):
    """Keeps the connection alive. Allowed before IDENTIFY, too."""


class Identify(NamedTuple):
    peer: PeerInfo


class Register(NamedTuple):
    topic: str
    channel: str
    """Empty for the topic alone."""


class Unregister(NamedTuple):
    topic: str
    channel: str


Command = Ping | Identify | Register | Unregister


class LookupServerProtocol:
    """nsqlookupd's side of one conversation: bytes in, commands out, in order.

    An error of the peer is raised from the command iterator as a FatalClientError. It is answered
    with encode_error(), and ends the conversation. Every command gets one answer: OK, or for
    IDENTIFY encode_identify_reply().
    """

    def __init__(self, remote_address: str) -> None:
        self.remote_address = remote_address
        self.identified = False
        self._buffer = bytearray()
        self._greeted = False
        self._in_body = False
        """Whether the line of an IDENTIFY has been read, and its body has not."""
        self._missing = len(MAGIC)
        """Bytes that the buffer must hold before it makes sense to look at it."""

    def receive_data(self, data: bytes) -> Iterator[Command]:
        """Take bytes from the peer and give the commands they complete."""
        self._buffer += data
        if len(self._buffer) < self._missing:
            return
        if not self._greeted:
            if not self._buffer.startswith(MAGIC):
                raise FatalClientError("E_BAD_PROTOCOL")
            del self._buffer[: len(MAGIC)]
            self._greeted = True
            self._missing = 0
        while (command := self._next_command()) is not None:
            yield command

    def receive_eof(self) -> None:
        """The peer sends no more. Raises FatalClientError if it stopped inside a command's body."""
        if self._in_body:
            what = "body size" if len(self._buffer) < _SIZE.size else "body"
            raise _bad_body(f"failed to read {what}")

    def _next_command(self) -> Command | None:
        if self._in_body:
            return self._take_identify_body()
        end = self._buffer.find(b"\n", 0, MAX_LINE)
        if end < 0:
            if len(self._buffer) >= MAX_LINE:
                raise _invalid(f"line longer than {MAX_LINE} bytes")
            return None
        name, *params = bytes(self._buffer[:end]).strip().split(b" ")
        del self._buffer[: end + 1]
        if name == b"PING":
            return Ping()
        if name == b"REGISTER":
            return Register(*self._names("REGISTER", params))
        if name == b"UNREGISTER":
            return Unregister(*self._names("UNREGISTER", params))
        if name != b"IDENTIFY":
            raise _invalid(f"invalid command {_text(name)}")
        if self.identified:
            raise _invalid("cannot IDENTIFY again")
        self._in_body = True
        return self._take_identify_body()

    def _names(self, verb: str, params: list[bytes]) -> tuple[str, str]:
        if not self.identified:
            raise _invalid("client must IDENTIFY")
        if not params:
            raise _invalid(f"{verb} insufficient number of params")
        topic, channel = params[0], params[1] if len(params) > 1 else b""
        if not is_valid_name(topic):
            raise FatalClientError("E_BAD_TOPIC", f"{verb} topic name '{_text(topic)}' is not valid")
        if channel and not is_valid_name(channel):
            raise FatalClientError("E_BAD_CHANNEL", f"{verb} channel name '{_text(channel)}' is not valid")
        return topic.decode(), channel.decode()

    def _take_identify_body(self) -> Identify | None:
        self._missing = _SIZE.size
        if len(self._buffer) < self._missing:
            return None
        (size,) = _SIZE.unpack_from(self._buffer)
        if not 0 <= size <= MAX_IDENTIFY_BODY:
            raise _bad_body(f"invalid body size {size}")
        self._missing += size
        if len(self._buffer) < self._missing:
            return None
        body = bytes(self._buffer[_SIZE.size : self._missing])
        del self._buffer[: self._missing]
        self._missing = 0
        self._in_body = False
        try:
            peer = PeerInfo(remote_address=self.remote_address, **decode_object(body, _PEER_FIELDS))
        except ValueError as error:
            raise _bad_body("failed to decode JSON body") from error
        if not (peer.broadcast_address and peer.tcp_port and peer.http_port and peer.version):
            raise _bad_body("missing fields")
        self.identified = True
        return Identify(peer)


def encode_reply(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


OK: Final = encode_reply(b"OK")


def encode_error(error: FatalClientError) -> bytes:
    """Bytes of the peer that an error text quotes go back as they came."""
    return encode_reply(str(error).encode("utf-8", "surrogateescape"))


def encode_identify_reply(
    *, broadcast_address: str, hostname: str, http_port: int, tcp_port: int, version: str, cluster: str = ""
) -> bytes:
    answer: dict[str, str | int] = {
        "broadcast_address": broadcast_address,
        "hostname": hostname,
        "http_port": http_port,
        "tcp_port": tcp_port,
        "version": version,
    }
    if cluster:
        answer["cluster"] = cluster
    return encode_reply(_encode_json(answer))


# nsqd's side

PING: Final = b"PING\n"


def encode_identify(fields: Mapping[str, str | int]) -> bytes:
    """The whole command. `fields` are those of PeerInfo, without the remote address."""
    body = _encode_json(fields)
    return b"IDENTIFY\n" + _SIZE.pack(len(body)) + body


def encode_register(topic: str, channel: str = "") -> bytes:
    return _line("REGISTER", topic, channel)


def encode_unregister(topic: str, channel: str = "") -> bytes:
    return _line("UNREGISTER", topic, channel)


class ReplyDecoder:
    """Splits the bytes of nsqlookupd into replies."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._buffer = bytearray()

    def receive_data(self, data: bytes) -> list[bytes]:
        """The replies that are complete now. Raises BadReply."""
        self._buffer += data
        buffer = self._buffer
        replies: list[bytes] = []
        position = 0
        while len(buffer) - position >= _SIZE.size:
            (size,) = _SIZE.unpack_from(buffer, position)
            if not 0 <= size <= self._max_size:
                if buffer.startswith(b"HTTP", position):
                    raise BadReply(
                        "unexpected HTTP response, a TCP endpoint of nsqlookupd is required (port 4160)"
                    )
                raise BadReply(f"reply of {size} bytes; at most {self._max_size} are taken")
            end = position + _SIZE.size + size
            if end > len(buffer):
                break
            replies.append(bytes(buffer[position + _SIZE.size : end]))
            position = end
        del buffer[:position]
        return replies


def decode_identify_reply(data: bytes) -> PeerInfo:
    """nsqlookupd's description of itself. Raises BadReply for an error or anything else that is not
    JSON."""
    try:
        return PeerInfo(**decode_object(data, _PEER_FIELDS))
    except ValueError as error:
        raise BadReply(f"answered IDENTIFY with {data[:200]!r}") from error


def _line(verb: str, topic: str, channel: str) -> bytes:
    return f"{verb} {topic} {channel}\n".encode() if channel else f"{verb} {topic}\n".encode()


def _encode_json(fields: Mapping[str, str | int]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _invalid(description: str) -> FatalClientError:
    return FatalClientError("E_INVALID", description)


def _bad_body(description: str) -> FatalClientError:
    return FatalClientError("E_BAD_BODY", f"IDENTIFY {description}")
