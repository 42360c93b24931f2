"""The server's side of a V2 conversation, without I/O: bytes in, commands out, in order.

Rule 1: every change of state happens through TRANSITIONS. Rule 2: a command is refused in NSQ's order of
checks: state, parameters, names, sizes, body; nothing after the first failed check is looked at.
Rule 3: what the peer did wrong is raised from the command iterator as a FatalClientError, or as
LineTooLong; the conversation is then over.
"""

from __future__ import annotations

import binascii
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final

import numpy as np

from nsparq import kernel
from nsparq.errors import ClientError, FatalClientError, NsparqError
from nsparq.names import is_valid_name, quote
from nsparq.packed import PackedBodies
from nsparq.wire.commands import (
    Auth,
    Command,
    Finish,
    Identify,
    Publish,
    Ready,
    Refusal,
    Requeue,
    StartClose,
    Subscribe,
    Touch,
)
from nsparq.wire.identify import Identity, decode_identify, default_identity
from nsparq.wire.limits import MAX_LINE, UNCOUNTED, Limits, Unfinished

MAGIC: Final = b"  V2"

INIT: Final = 0
SUBSCRIBED: Final = 3
CLOSING: Final = 4

TRANSITIONS: Final = {
    (INIT, "SUB"): SUBSCRIBED,
    (SUBSCRIBED, "CLS"): CLOSING,
}
_ALLOWED: Final = {
    b"IDENTIFY": (INIT,),
    b"AUTH": (INIT,),
    b"SUB": (INIT,),
    b"RDY": (SUBSCRIBED, CLOSING),
    b"FIN": (SUBSCRIBED, CLOSING),
    b"REQ": (SUBSCRIBED, CLOSING),
    b"TOUCH": (SUBSCRIBED, CLOSING),
    b"CLS": (SUBSCRIBED,),
}

_SIZE = struct.Struct(">i")
_FIN_LINE = np.dtype([("word", "<u4"), ("id", "S16"), ("end", "u1")])
_FIN_WORD = int.from_bytes(b"FIN ", "little")
_FIN_WIDTH = _FIN_LINE.itemsize
_FIN_RUN = 8
"""From this many whole FIN lines on, decoding them as one array pays."""
_FIN_WINDOW = 512
"""At most so many lines are looked at together, so that a line that ends a run is not met again and again."""
_MANY_PARTS = 64
"""An MPUB that arrives in dribs and drabs is put together now and then."""
_SHORT_LINE = 128
"""Longer lines are not worth remembering: they carry parameters that nobody reads."""
_LF = 10
_DIGITS = frozenset(b"0123456789")
_HEX_DIGITS = b"0123456789abcdef"
_HEX = frozenset(_HEX_DIGITS)
_NOT_HEX = re.compile(b"[^0-9a-f]")


class LineTooLong(NsparqError):
    """A line beyond MAX_LINE: the connection ends without a word, as in NSQ."""


class _Incomplete(Exception):
    """More bytes are needed: `size` of them from where the command's body begins."""

    def __init__(self, size: int) -> None:
        self.size = size


class ServerProtocol:
    """One client's conversation. Feed it receive_data(); handle each command before taking the next."""

    def __init__(self, limits: Limits, peer: str = "", unfinished: Unfinished | None = None) -> None:
        """`unfinished` is shared with the other connections: together they may hold so much."""
        self.limits = limits
        self.state = INIT
        self.identity: Identity = default_identity(limits, peer)
        self.commands = 0
        """Commands completed so far, the ones without an answer included."""
        self.tls_active = False
        self._buffer = b""
        self._position = 0
        self._chunks: list[bytes] = []
        self._missing = 4
        """Bytes that must arrive before looking at the input again is of use."""
        self._greeted = False
        self._body: Callable[[], Command | None] | None = None
        """Reads the rest of the command whose line has been accepted."""
        self._unread = ""
        """What the peer cut short, should the stream end now."""
        self._unread_code = ""
        self._publish_lines: dict[bytes, tuple[str, str]] = {}
        """Lines that have passed all checks before, with their verb and topic: each is validated once."""
        self.lone_publishes = 0
        """How many PUBs to one topic have come last, each alone: one received piece, one PUB, no other
        command in between, and nothing but the topic in its line."""
        self._lone_topic = ""
        self._unfinished = unfinished
        self._held = 0
        """Bytes received of the command that is not complete."""
        self._counted = 0
        """How many of them count as unfinished."""
        self._packed = 0
        """Bytes of messages among them that have been taken out of the buffer: the first part of an MPUB."""

    def receive_data(self, data: bytes) -> Iterable[Command]:
        """Take bytes from the peer and give the commands that they complete."""
        if not (self._missing or self._body is not None or self._position < len(self._buffer)):
            # Most of what busy clients send: nothing but FINs, or one PUB.
            command = self._only_fins(data) if data.startswith(b"FIN ") else self._only_publish(data)
            if command is not None:
                return (command,)
        self.lone_publishes = 0
        return self._receive(data)

    def _receive(self, data: bytes) -> Iterator[Command]:
        if self._missing > len(data):
            self._missing -= len(data)
            self._chunks.append(data)
            self._hold(self._held + len(data))
            return
        if self._chunks:
            self._chunks.append(data)
            data = b"".join(self._chunks)
            self._chunks.clear()
        self._buffer = self._buffer[self._position :] + data if self._position < len(self._buffer) else data
        self._position = 0
        self._missing = 0
        yield from self._commands()

    def _only_publish(self, data: bytes) -> Publish | None:
        """The bytes as one PUB, if they are nothing else and its line has passed all checks before."""
        end = data.find(b"\n", 0, _SHORT_LINE)
        known = self._publish_lines.get(data[:end])
        if known is None or known[0] != "PUB" or len(data) < end + 5:
            return None
        (size,) = _SIZE.unpack_from(data, end + 1)
        if len(data) != end + 5 + size or not 0 < size <= self.limits.max_msg_size:
            return None
        self.commands += 1
        topic = known[1]
        if topic != self._lone_topic or end != len("PUB ") + len(topic):
            self.lone_publishes, self._lone_topic = 0, topic
        self.lone_publishes += 1
        return Publish("PUB", topic, PackedBodies(array("I", (size,)), data[end + 5 :]))

    def _only_fins(self, data: bytes) -> Finish | None:
        """The bytes as one command, if they are nothing but FIN lines."""
        if kernel.decode_fins is None or self.state == INIT or self._tls_missing:
            return None
        spans, behind = kernel.decode_fins(data, 0)
        if behind != len(data) or not spans:
            return None
        self.commands += behind // _FIN_WIDTH
        self.lone_publishes = 0
        return Finish(spans)

    @property
    def has_more(self) -> bool:
        """Whether bytes have come behind the last command."""
        return self._position < len(self._buffer)

    @property
    def unfinished_command(self) -> int | None:
        """The number of the unfinished command that takes up room shared by all connections, if there is
        one."""
        return self.commands if self._counted else None

    def receive_eof(self) -> None:
        """The peer is done. Raises if it stopped in the middle of a command's body."""
        if self._body is not None:
            raise FatalClientError(self._unread_code, self._unread)

    def discard(self) -> None:
        """Drop what has been received: nothing more will be made of it. An unfinished command refers back to
        this object, and its bytes would stay until the garbage collector runs."""
        self._buffer, self._position = b"", 0
        self._chunks.clear()
        self._body = None
        self._hold(0)

    def _hold(self, size: int) -> None:
        """Note how much of an unfinished command is held. Raises FatalClientError if there is no room for
        more of it."""
        self._held = size
        if size <= UNCOUNTED and not self._counted:
            return
        unfinished, counted = self._unfinished, max(0, size - UNCOUNTED)
        if unfinished is None:
            return
        grows = counted > self._counted
        unfinished.size += counted - self._counted
        self._counted = counted
        if grows and unfinished.size > unfinished.limit:
            verb = self._unread.partition(" ")[0]
            raise FatalClientError(
                f"E_{verb}_FAILED",
                f"{verb} failed unfinished commands of all clients exceed {unfinished.limit} bytes",
            )

    def take_rest(self) -> bytes:
        """Bytes received but not looked at: they belong to the layer that a negotiation switched on."""
        rest = self._buffer[self._position :] + b"".join(self._chunks)
        self._buffer, self._position = b"", 0
        self._chunks.clear()
        return rest

    def _commands(self) -> Iterator[Command]:
        if not self._greeted:
            magic = self._buffer[:4]
            if len(magic) < 4:
                self._missing = 4 - len(magic)
                return
            if magic != MAGIC:
                raise FatalClientError("E_BAD_PROTOCOL")
            self._greeted = True
            self._position = 4
        while True:
            try:
                if self._body is not None:
                    command = self._body()
                    self._body = None
                    self._hold(0)
                elif self._position >= len(self._buffer):
                    # An idle connection keeps nothing.
                    self._buffer, self._position = b"", 0
                    return
                else:
                    command = self._next_line()
            except _Incomplete as incomplete:
                left = len(self._buffer) - self._position
                self._missing = max(1, incomplete.size - left)
                if self._position > left:
                    self._buffer, self._position = self._buffer[self._position :], 0
                self._hold(self._packed + left)
                return
            self.commands += 1
            if command is not None:
                yield command

    def _next_line(self) -> Command | None:
        buffer, start = self._buffer, self._position
        end = buffer.find(b"\n", start, start + MAX_LINE)
        if end < 0:
            if len(buffer) - start >= MAX_LINE:
                raise LineTooLong
            raise _Incomplete(0)
        known = self._publish_lines.get(buffer[start:end])
        if known is not None:
            verb, topic = known
            run = self._take_publishes(verb, topic, end + 1)
            if run is not None:
                return run
            self._position = end + 1
            return self._single("PUB", topic, 0) if verb == "PUB" else self._multiple(topic)
        if buffer.startswith(b"FIN ", start) and self.state != INIT and not self._tls_missing:
            command = self._take_fin_run(start)
            if command is not None:
                return command
        self._position = end + 1
        line = (
            buffer[start : end - 1] if buffer[end - 1 : end] == b"\r" and end > start else buffer[start:end]
        )
        return self._take_line(line)

    @property
    def _tls_missing(self) -> bool:
        return self.limits.tls_required and not self.tls_active

    def _take_line(self, line: bytes) -> Command | None:
        name, *params = line.split(b" ")
        if self._tls_missing and name != b"IDENTIFY":
            raise _invalid(f"cannot {_text(name)} in current state (TLS required)")
        handler = _HANDLERS.get(name)
        if handler is None:
            raise _invalid(f"invalid command {_text(name)}")
        if self.state not in _ALLOWED.get(name, (self.state,)):
            raise _invalid(f"cannot {_text(name)} in current state")
        command = handler(self, line, params)
        self.state = TRANSITIONS.get((self.state, name.decode()), self.state)
        return command

    def _await_body(self, read: Callable[[], Command | None], code: str, unread: str) -> Command | None:
        """Read the rest of a command now, or go on with it when more has arrived."""
        self._unread_code, self._unread = code, unread
        self._body = read
        command = read()
        self._body = None
        return command

    def _read_size(self) -> int:
        """The 32-bit size at the read position, which moves past it."""
        position = self._position
        if len(self._buffer) - position < 4:
            raise _Incomplete(4)
        size: int = _SIZE.unpack_from(self._buffer, position)[0]
        self._position = position + 4
        return size

    def _read_bytes(self, size: int) -> bytes:
        position = self._position
        end = position + size
        if len(self._buffer) < end:
            raise _Incomplete(size)
        self._position = end
        return self._buffer[position:end]

    # IDENTIFY and AUTH

    def _identify(self, line: bytes, params: list[bytes]) -> Command | None:
        def finish(body: bytes) -> Command:
            self.identity = decode_identify(body, self.limits, self.identity)
            return Identify(self.identity)

        return self._sized_body("IDENTIFY", finish)

    def _auth(self, line: bytes, params: list[bytes]) -> Command | None:
        if params:
            raise _invalid("AUTH invalid number of parameters")
        return self._sized_body("AUTH", Auth)

    def _sized_body(self, verb: str, finish: Callable[[bytes], Command]) -> Command | None:
        def read_size() -> Command | None:
            size = self._read_size()
            if size > self.limits.max_body_size:
                raise _bad_body(f"{verb} body too big {size} > {self.limits.max_body_size}")
            if size <= 0:
                raise _bad_body(f"{verb} invalid body size {size}")
            return self._await_body(
                lambda: finish(self._read_bytes(size)), "E_BAD_BODY", f"{verb} failed to read body"
            )

        return self._await_body(read_size, "E_BAD_BODY", f"{verb} failed to read body size")

    # consuming

    def _sub(self, line: bytes, params: list[bytes]) -> Command:
        if self.identity.heartbeat_ms == 0:
            raise _invalid("cannot SUB with heartbeats disabled")
        if len(params) < 2:
            raise _invalid("SUB insufficient number of parameters")
        topic, channel = params[0], params[1]
        if not is_valid_name(topic):
            raise FatalClientError("E_BAD_TOPIC", f"SUB topic name {quote(topic)} is not valid")
        if not is_valid_name(channel):
            raise FatalClientError("E_BAD_CHANNEL", f"SUB channel name {quote(channel)} is not valid")
        return Subscribe(topic.decode(), channel.decode())

    def _rdy(self, line: bytes, params: list[bytes]) -> Command | None:
        if self.state == CLOSING:
            return None
        count = 1
        if params:
            parsed = _parse_number(params[0])
            if parsed is None:
                raise _invalid(f"RDY could not parse count {_text(params[0])}")
            count = parsed
        if not 0 <= count <= self.limits.max_rdy_count:
            raise _invalid(f"RDY count {count} out of range 0-{self.limits.max_rdy_count}")
        return Ready(count)

    def _take_fin_run(self, start: int) -> Command | None:
        """All FIN lines from `start` on as one command; None when they are few or unusual."""
        buffer = self._buffer
        if kernel.decode_fins is not None:
            spans, behind = kernel.decode_fins(buffer, start)
            if not spans:
                return None
            self._position = behind
            self.commands += (behind - start) // _FIN_WIDTH - 1
            return Finish(spans)
        count = min((len(buffer) - start) // _FIN_WIDTH, _FIN_WINDOW)
        if count < _FIN_RUN:
            return None
        lines = np.frombuffer(buffer, _FIN_LINE, count, start)
        regular = (lines["word"] == _FIN_WORD) & (lines["end"] == _LF)
        if not regular.all():
            count = int(regular.argmin())
        digits = lines["id"][:count].tobytes()
        odd = _NOT_HEX.search(digits) if digits.translate(None, _HEX_DIGITS) else None
        if odd is not None:
            count = odd.start() // 16
            digits = digits[: 16 * count]
        if count < _FIN_RUN:
            return None
        ids = np.frombuffer(binascii.unhexlify(digits), ">u8").astype(np.uint64)
        self._position = start + count * _FIN_WIDTH
        self.commands += count - 1
        # The difference wraps: zero does not follow the largest id.
        breaks = np.flatnonzero((np.diff(ids) != 1) | (ids[1:] == 0))
        firsts = ids[np.concatenate(([0], breaks + 1))].tolist()
        lasts = ids[np.concatenate((breaks, [count - 1]))].tolist()
        return Finish([(first, last + 1) for first, last in zip(firsts, lasts, strict=True)])

    def _fin(self, line: bytes, params: list[bytes]) -> Command:
        if not params:
            raise _invalid("FIN insufficient number of params")
        number = _message_id(params[0])
        return _unknown("FIN", params[0]) if number is None else Finish([(number, number + 1)])

    def _req(self, line: bytes, params: list[bytes]) -> Command:
        if len(params) < 2:
            raise _invalid("REQ insufficient number of params")
        number = _message_id(params[0])
        timeout_ms = _parse_number(params[1])
        if timeout_ms is None:
            raise _invalid(f"REQ could not parse timeout {_text(params[1])}")
        if number is None:
            return _unknown("REQ", params[0])
        return Requeue(number, min(max(timeout_ms, 0), self.limits.max_req_timeout_ms))

    def _touch(self, line: bytes, params: list[bytes]) -> Command:
        if not params:
            raise _invalid("TOUCH insufficient number of params")
        number = _message_id(params[0])
        return _unknown("TOUCH", params[0]) if number is None else Touch(number)

    def _cls(self, line: bytes, params: list[bytes]) -> Command:
        return StartClose()

    def _nop(self, line: bytes, params: list[bytes]) -> None:
        return None

    # publishing

    def _pub(self, line: bytes, params: list[bytes]) -> Command | None:
        topic = self._topic("PUB", params)
        self._remember(line, "PUB", topic)
        return self._single("PUB", topic, 0)

    def _mpub(self, line: bytes, params: list[bytes]) -> Command | None:
        topic = self._topic("MPUB", params)
        self._remember(line, "MPUB", topic)
        return self._multiple(topic)

    def _dpub(self, line: bytes, params: list[bytes]) -> Command | None:
        if len(params) < 2:
            raise _invalid("DPUB insufficient number of parameters")
        topic = self._topic("DPUB", params)
        defer_ms = _parse_number(params[1])
        if defer_ms is None:
            raise _invalid(f"DPUB could not parse timeout {_text(params[1])}")
        if not 0 <= defer_ms <= self.limits.max_req_timeout_ms:
            raise _invalid(f"DPUB timeout {defer_ms} out of range 0-{self.limits.max_req_timeout_ms}")
        return self._single("DPUB", topic, defer_ms)

    def _topic(self, verb: str, params: list[bytes]) -> str:
        if not params:
            raise _invalid(f"{verb} insufficient number of parameters")
        if not is_valid_name(params[0]):
            # NSQ prints the code twice for MPUB, and clients have learnt to expect it.
            prefix = "E_BAD_TOPIC " if verb == "MPUB" else ""
            raise FatalClientError(
                "E_BAD_TOPIC", f"{prefix}{verb} topic name {quote(params[0])} is not valid"
            )
        return params[0].decode()

    def _remember(self, line: bytes, verb: str, topic: str) -> None:
        if len(line) > _SHORT_LINE:
            return
        if len(self._publish_lines) >= 64:
            self._publish_lines.clear()
        self._publish_lines[line] = verb, topic

    def _take_publishes(self, verb: str, topic: str, line_end: int) -> Publish | None:
        """All PUBs or MPUBs from here on that have the same line before them, whole and in order, as one
        command. None if there are none: what is to be said of the first is said elsewhere."""
        if kernel.take_publishes is None:
            return None
        buffer, start, limits = self._buffer, self._position, self.limits
        counts, sizes, data, behind = kernel.take_publishes(
            buffer,
            start,
            buffer[start:line_end],
            verb == "MPUB",
            limits.max_msg_size,
            limits.max_body_size,
        )
        if not counts:
            return None
        self._position = behind
        self.commands += len(counts) - 1
        bodies = PackedBodies(array("I", sizes), data)
        return Publish(verb, topic, bodies, 0, counts) if len(counts) > 1 else Publish(verb, topic, bodies)

    def _single(self, verb: str, topic: str, defer_ms: int) -> Command | None:
        buffer, position = self._buffer, self._position
        if len(buffer) - position >= 4:
            size = _SIZE.unpack_from(buffer, position)[0]
            end = position + 4 + size
            if 0 < size <= self.limits.max_msg_size and end <= len(buffer):
                self._position = end
                return Publish(
                    verb, topic, PackedBodies(array("I", (size,)), buffer[position + 4 : end]), defer_ms
                )

        def read_size() -> Command | None:
            size = self._read_size()
            if size <= 0:
                raise _bad_message(f"{verb} invalid message body size {size}")
            if size > self.limits.max_msg_size:
                raise _bad_message(f"{verb} message too big {size} > {self.limits.max_msg_size}")
            return self._await_body(
                lambda: Publish(verb, topic, PackedBodies.of([self._read_bytes(size)]), defer_ms),
                "E_BAD_MESSAGE",
                f"{verb} failed to read message body",
            )

        return self._await_body(read_size, "E_BAD_MESSAGE", f"{verb} failed to read message body size")

    def _multiple(self, topic: str) -> Command | None:
        parts: list[PackedBodies] = []
        limits = self.limits

        def read_size() -> Command | None:
            size = self._read_size()
            if size <= 0:
                raise _bad_body(f"MPUB invalid body size {size}")
            if size > limits.max_body_size:
                raise _bad_body(f"MPUB body too big {size} > {limits.max_body_size}")
            return self._await_body(read_count, "E_BAD_BODY", "MPUB failed to read message count")

        def read_count() -> Command | None:
            count = self._read_size()
            if not 1 <= count <= limits.max_mpub_count:
                raise _bad_body(f"MPUB invalid message count {count}")
            return self._await_body(lambda: read_messages(count), "E_BAD_MESSAGE", "")

        def read_messages(count: int) -> Command:
            try:
                self._walk_messages(parts, count)
            finally:
                # The peer may have lied about the size; what we hold for it stays bounded.
                size = sum(len(part.data) for part in parts)
                if size > limits.max_body_size:
                    raise _too_much(parts, limits.max_body_size) from None
                self._packed = size + 4 * sum(len(part.lengths) for part in parts)
            self._packed = 0
            return Publish("MPUB", topic, PackedBodies.join(parts))

        return self._await_body(read_size, "E_BAD_BODY", "MPUB failed to read body size")

    def _walk_messages(self, parts: list[PackedBodies], count: int) -> None:
        """Take the buffered messages of an MPUB as one more part. The declared body size is not what ends
        it: NSQ reads `count` messages whatever they add up to, and so do we, up to the largest body
        allowed."""
        found = sum(len(part.lengths) for part in parts)
        if kernel.pack_messages is not None:
            sizes, data, self._position = kernel.pack_messages(
                self._buffer, self._position, count - found, self.limits.max_msg_size
            )
            if sizes:
                parts.append(PackedBodies(array("I", sizes), data))
                found += len(sizes) // 4
        bodies: list[bytes] = []
        try:
            self._walk_one_by_one(bodies, found, count)
        finally:
            if bodies:
                parts.append(PackedBodies.of(bodies))
            if len(parts) >= _MANY_PARTS:
                parts[:] = [PackedBodies.join(parts)]

    def _walk_one_by_one(self, bodies: list[bytes], found: int, count: int) -> None:
        """The messages from number `found` on, with NSQ's error for the first bad one."""
        buffer, position, available = self._buffer, self._position, len(self._buffer)
        max_msg_size = self.limits.max_msg_size
        unpack, append = _SIZE.unpack_from, bodies.append
        try:
            for number in range(found, count):
                if available - position < 4:
                    self._unread = f"MPUB failed to read message({number}) body size"
                    raise _Incomplete(4)
                (size,) = unpack(buffer, position)
                end = position + 4 + size
                if not 0 < size <= max_msg_size:
                    if size <= 0:
                        raise _bad_message(f"MPUB invalid message({number}) body size {size}")
                    raise _bad_message(f"MPUB message too big {size} > {max_msg_size}")
                if end > available:
                    self._unread = "MPUB failed to read message body"
                    raise _Incomplete(4 + size)
                append(buffer[position + 4 : end])
                position = end
        finally:
            self._position = position


def publish_line(topic: str) -> bytes:
    """How a PUB begins."""
    return b"PUB %b\n" % topic.encode()


def decode_multiple(body: bytes, limits: Limits) -> PackedBodies:
    """The messages of an MPUB's body without its leading size, which is what /mpub takes in binary form.
    Raises FatalClientError."""
    protocol = ServerProtocol(limits)
    protocol._buffer = body
    parts: list[PackedBodies] = []
    try:
        count = protocol._read_size()
        if not 1 <= count <= limits.max_mpub_count:
            raise _bad_body(f"MPUB invalid message count {count}")
        protocol._unread = "MPUB failed to read message body size"
        protocol._walk_messages(parts, count)
    except _Incomplete:
        if not protocol._unread:
            raise _bad_body("MPUB failed to read message count") from None
        raise _bad_message(protocol._unread) from None
    return PackedBodies.join(parts)


_Handler = Callable[[ServerProtocol, bytes, list[bytes]], Command | None]

_HANDLERS: Final[dict[bytes, _Handler]] = {
    b"IDENTIFY": ServerProtocol._identify,
    b"AUTH": ServerProtocol._auth,
    b"SUB": ServerProtocol._sub,
    b"RDY": ServerProtocol._rdy,
    b"FIN": ServerProtocol._fin,
    b"REQ": ServerProtocol._req,
    b"TOUCH": ServerProtocol._touch,
    b"CLS": ServerProtocol._cls,
    b"NOP": ServerProtocol._nop,
    b"PUB": ServerProtocol._pub,
    b"MPUB": ServerProtocol._mpub,
    b"DPUB": ServerProtocol._dpub,
}


def _parse_number(text: bytes) -> int | None:
    """An unsigned decimal as NSQ reads it: empty is 0, and overflow wraps into a signed 64-bit number."""
    if not _DIGITS.issuperset(text):
        return None
    value = 0
    for start in range(0, len(text), 1000):
        part = text[start : start + 1000]
        value = (value * 10 ** len(part) + int(part)) & 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _message_id(raw: bytes) -> int | None:
    """The id as a number; None when it is none that we could have made."""
    if len(raw) != 16:
        raise _invalid("invalid message ID")
    return int(raw, 16) if _HEX.issuperset(raw) else None


def _unknown(verb: str, raw: bytes) -> Refusal:
    return Refusal(ClientError(f"E_{verb}_FAILED", f"{verb} {_text(raw)} failed ID not in flight"))


def _text(raw: bytes) -> str:
    """Bytes of the peer inside an error text: they go back as they came."""
    return raw.decode("utf-8", "surrogateescape")


def _invalid(description: str) -> FatalClientError:
    return FatalClientError("E_INVALID", description)


def _bad_body(description: str) -> FatalClientError:
    return FatalClientError("E_BAD_BODY", description)


def _bad_message(description: str) -> FatalClientError:
    return FatalClientError("E_BAD_MESSAGE", description)


def _too_much(parts: list[PackedBodies], limit: int) -> FatalClientError:
    """An MPUB whose messages add up to more than a body may hold, named by the first one beyond."""
    lengths = PackedBodies.join(parts).lengths
    held = next(total for total in accumulate(lengths) if total > limit)
    return _bad_body(f"MPUB body too big {held} > {limit}")
