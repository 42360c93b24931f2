"""The server's side of a V2 conversation, without I/O: bytes in, commands out, in order.

`next_command(data)` takes bytes and gives the first command in them; while `has_more` is true,
`next_command()` gives the others. The caller executes each command before it asks for the next,
because IDENTIFY may put a transport layer under the bytes behind it.

`Reading` says what the next bytes are, and `_READERS` has a function for each. The state of the
conversation (INIT, SUBSCRIBED, CLOSING) is NSQ's, and changes by TRANSITIONS alone.

Checks are made in NSQ's order: state, parameters, names, sizes, body. The first that fails raises
FatalClientError, or LineTooLong, and ends the conversation.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from enum import Enum, auto
from itertools import accumulate
from typing import Final, NamedTuple

from nsparq import kernel
from nsparq.errors import FatalClientError, NsparqError
from nsparq.packed import PackedBodies
from nsparq.wire import command_lines
from nsparq.wire.command_lines import FIN_WIDTH, invalid, show
from nsparq.wire.commands import Auth, Command, Finish, Identify, Publish
from nsparq.wire.header_blocks import split_headers, take_headers
from nsparq.wire.identify import Identity, decode_identify, default_identity
from nsparq.wire.limits import MAX_LINE, UNCOUNTED, Limits, Unfinished
from nsparq.wire.mpub import SIZE, MessageReader, check_body_size, check_message_size

MAGIC: Final = b"  V2"

INIT: Final = 0
SUBSCRIBED: Final = 3
CLOSING: Final = 4

TRANSITIONS: Final = {
    (INIT, b"SUB"): SUBSCRIBED,
    (SUBSCRIBED, b"CLS"): CLOSING,
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

_MAX_STEPS: Final = 16
"""Things to read before the caller may do other work. No command has as many."""
_SMALL: Final = 512
"""Shorter pieces of a body are joined as they arrive: each would take 40 bytes more than it has."""
_MAX_JOINED: Final = 4096
"""Bytes to which they are joined. Joining them to longer ones would copy too much."""
_MAX_KNOWN_LINE: Final = 128
"""Longer lines are not remembered: they carry parameters that nobody reads."""
_MAX_KNOWN_LINES: Final = 64


class LineTooLong(NsparqError):
    """A line beyond MAX_LINE: the connection ends without an error frame, as in NSQ."""


class Reading(Enum):
    """What the next bytes are."""

    MAGIC = auto()
    LINE = auto()
    SIZE = auto()
    """The size of the body that follows a line."""
    BODY = auto()
    COUNT = auto()
    """The number of messages of an MPUB."""
    MESSAGES = auto()
    """The messages of an MPUB."""


class _Begun(NamedTuple):
    """A command whose line has passed all checks and whose body follows."""

    verb: str
    topic: str = ""
    defer_ms: int = 0
    has_headers: bool = False
    """Whether each message begins with a header block."""


class ServerProtocol:
    """One client's conversation."""

    def __init__(self, limits: Limits, peer: str = "", unfinished: Unfinished | None = None) -> None:
        """`unfinished` is shared with the other connections, and limits what they hold together."""
        self.limits = limits
        self.state = INIT
        self.identity: Identity = default_identity(limits, peer)
        self.tls_active = False
        self.commands = 0
        """Complete commands so far, including those without a reply."""
        self.has_more = False
        """Whether next_command() has bytes to look at."""
        self._reading = Reading.MAGIC
        self._buffer = b""
        self._position = 0
        self._chunks: list[bytes] = []
        """Received behind the buffer. They are joined to it when nothing is missing."""
        self._missing = 0
        """Bytes that must arrive before it makes sense to look at the input again."""
        self._begun = _Begun("")
        self._size = 0
        """Size of the body that is being read."""
        self._messages: MessageReader | None = None
        self._known_lines: dict[bytes, _Begun] = {}
        """Lines of PUB and MPUB that have passed all checks. Each is checked once."""
        self._unfinished = unfinished
        self._held = 0
        """Bytes received of the command that is not complete."""
        self._counted = 0
        """Those of them that count as unfinished."""

    def next_command(self, data: bytes = b"") -> Command | None:
        """Take bytes from the client, if there are any, and give the next complete command. None if
        there is none, or after many lines without anything to execute; has_more then tells which.
        Raises FatalClientError and LineTooLong."""
        if data:
            if self._missing > len(data):
                self._missing -= len(data)
                chunks = self._chunks
                if len(data) < _SMALL and chunks and len(chunks[-1]) < _MAX_JOINED:
                    chunks[-1] += data
                else:
                    chunks.append(data)
                self._hold(self._held + len(data))
                return None
            if self._chunks:
                self._chunks.append(data)
                data = b"".join(self._chunks)
                self._chunks.clear()
            if self._position < len(self._buffer):
                data = self._buffer[self._position :] + data
            self._buffer, self._position, self._missing = data, 0, 0
            self.has_more = True
        for _ in range(_MAX_STEPS):
            if not self.has_more:
                break
            command = _READERS[self._reading](self)
            if self._position == len(self._buffer):
                # An idle connection keeps nothing.
                self._buffer, self._position, self.has_more = b"", 0, False
            if command is not None:
                return command
        return None

    @property
    def unfinished_command(self) -> int | None:
        """The number of the unfinished command, if there is one that counts as unfinished."""
        return self.commands if self._counted else None

    def receive_eof(self) -> None:
        """The client sends no more. Raises FatalClientError if it stopped inside a command's
        body."""
        verb = self._begun.verb
        code, name = ("E_BAD_MESSAGE", "message body") if verb in ("PUB", "DPUB") else ("E_BAD_BODY", "body")
        if self._reading is Reading.SIZE:
            raise FatalClientError(code, f"{verb} failed to read {name} size")
        if self._reading is Reading.BODY:
            raise FatalClientError(code, f"{verb} failed to read {name}")
        if self._reading is Reading.COUNT:
            raise FatalClientError(code, "MPUB failed to read message count")
        if self._messages is not None:
            raise FatalClientError("E_BAD_MESSAGE", self._messages.unread)

    def take_rest(self) -> bytes:
        """Bytes received and not read. They belong to the layer that IDENTIFY has switched on."""
        rest = self._buffer[self._position :] + b"".join(self._chunks)
        self._buffer, self._position, self._missing, self.has_more = b"", 0, 0, False
        self._chunks.clear()
        return rest

    def discard(self) -> None:
        """Drop everything received: the connection reads no further command."""
        self.take_rest()
        self._reading, self._messages = Reading.LINE, None
        self._hold(0)

    # waiting for bytes

    def _wait_for(self, size: int) -> None:
        """The reader needs `size` bytes behind the position, and there are fewer."""
        left = len(self._buffer) - self._position
        self._missing = max(1, size - left)
        self.has_more = False
        if self._position > left:
            self._buffer, self._position = self._buffer[self._position :], 0
        self._hold(left + (0 if self._messages is None else self._messages.held))

    def _hold(self, size: int) -> None:
        """Note how much of an unfinished command is held. Raises FatalClientError if all clients
        together hold too much."""
        self._held = size
        counted = max(0, size - UNCOUNTED)
        if self._unfinished is None or counted == self._counted:
            return
        grows = counted > self._counted
        self._unfinished.size += counted - self._counted
        self._counted = counted
        limit = self._unfinished.limit
        if grows and self._unfinished.size > limit:
            verb = self._begun.verb
            raise FatalClientError(
                f"E_{verb}_FAILED", f"{verb} failed unfinished commands of all clients exceed {limit} bytes"
            )

    # readers: each reads one thing at the position, or waits for its bytes

    def _read_magic(self) -> None:
        magic = self._buffer[self._position : self._position + 4]
        if len(magic) < 4:
            self._wait_for(4)
            return
        if magic != MAGIC:
            raise FatalClientError("E_BAD_PROTOCOL")
        self._position += 4
        self._reading = Reading.LINE

    def _read_line(self) -> Command | None:
        """A whole command, or a run of FINs, PUBs or MPUBs that are alike."""
        buffer, start = self._buffer, self._position
        if self.state != INIT and buffer.startswith(b"FIN ", start):
            spans, behind = (kernel.decode_fins or command_lines.decode_fins)(buffer, start)
            if spans:
                self._position = behind
                self.commands += (behind - start) // FIN_WIDTH
                return Finish(spans)
        end = buffer.find(b"\n", start, start + MAX_LINE)
        if end < 0:
            if len(buffer) - start >= MAX_LINE:
                raise LineTooLong
            self._wait_for(0)
            return None
        known = self._known_lines.get(buffer[start:end])
        if known is None:
            self._position = end + 1
            return self._take_line(buffer[start:end].removesuffix(b"\r"))
        if kernel.take_publishes is not None:
            counts, sizes, data, behind = kernel.take_publishes(
                buffer,
                start,
                buffer[start : end + 1],
                known.verb == "MPUB",
                self.limits.max_msg_size,
                self.limits.max_body_size,
            )
            bodies = PackedBodies(array("I", sizes), data)
            if known.has_headers:
                messages, bodies = bodies, split_headers(bodies)
                if len(bodies.lengths) < len(messages.lengths):
                    width = end + 1 - start + (8 if known.verb == "MPUB" else 0)
                    counts, bodies, size = _cut_run(counts, messages, bodies, width)
                    behind = start + size
            if counts:
                self._position = behind
                self.commands += len(counts)
                return Publish(known.verb, known.topic, bodies, 0, counts if len(counts) > 1 else ())
        self._position = end + 1
        self._begun, self._reading = known, Reading.SIZE
        return None

    def _read_size(self) -> None:
        size = self._read_number()
        if size is None:
            return
        verb = self._begun.verb
        if verb in ("PUB", "DPUB"):
            check_message_size(size, self.limits, verb)
        else:
            check_body_size(size, self.limits, verb)
        self._size = size
        self._reading = Reading.COUNT if verb == "MPUB" else Reading.BODY

    def _read_body(self) -> Command | None:
        start, end = self._position, self._position + self._size
        if len(self._buffer) < end:
            self._wait_for(self._size)
            return None
        self._position = end
        body = self._buffer[start:end]
        verb, topic, defer_ms, _ = self._begun
        if verb == "IDENTIFY":
            self.identity = decode_identify(body, self.limits, self.identity)
            # The parameter `headers` has a meaning from now on, or none any more.
            self._known_lines.clear()
            return self._complete(Identify(self.identity))
        if verb == "AUTH":
            return self._complete(Auth(body))
        return self._complete(Publish(verb, topic, self._split(PackedBodies.of([body])), defer_ms))

    def _read_count(self) -> None:
        count = self._read_number()
        if count is not None:
            self._messages = MessageReader(count, self.limits, self.limits.max_body_size)
            self._reading = Reading.MESSAGES

    def _read_messages(self) -> Command | None:
        reader = self._messages
        assert reader is not None
        self._position = reader.take(self._buffer, self._position)
        if reader.missing:
            self._wait_for(reader.missing)
            return None
        return self._complete(Publish("MPUB", self._begun.topic, self._split(reader.bodies())))

    def _split(self, messages: PackedBodies) -> PackedBodies:
        return take_headers(messages, self._begun.verb) if self._begun.has_headers else messages

    def _read_number(self) -> int | None:
        """A signed 32-bit number; None if its bytes have still to arrive."""
        position = self._position
        if len(self._buffer) - position < 4:
            self._wait_for(4)
            return None
        self._position = position + 4
        number: int = SIZE.unpack_from(self._buffer, position)[0]
        return number

    def _complete(self, command: Command) -> Command:
        """The body of a command has been read."""
        self._reading, self._messages = Reading.LINE, None
        self.commands += 1
        self._hold(0)
        return command

    # lines

    def _take_line(self, line: bytes) -> Command | None:
        """Check a line. Gives the command, or None if its body follows or there is nothing to
        execute."""
        name, *params = line.split(b" ")
        if self.limits.tls_required and not self.tls_active and name != b"IDENTIFY":
            raise invalid(f"cannot {show(name)} in current state (TLS required)")
        if name not in _PARSERS and name not in _VERBS_WITH_BODY:
            raise invalid(f"invalid command {show(name)}")
        if self.state not in _ALLOWED.get(name, (self.state,)):
            raise invalid(f"cannot {show(name)} in current state")
        if name in _VERBS_WITH_BODY:
            self._begin(_VERBS_WITH_BODY[name], line, params)
            return None
        if name == b"SUB" and self.identity.heartbeat_ms == 0:
            raise invalid("cannot SUB with heartbeats disabled")
        # NSQ ignores RDY after CLS, whatever its parameters are.
        is_ignored = name == b"RDY" and self.state == CLOSING
        command = None if is_ignored else _PARSERS[name](params, self.limits)
        self.state = TRANSITIONS.get((self.state, name), self.state)
        self.commands += 1
        return command

    def _begin(self, verb: str, line: bytes, params: list[bytes]) -> None:
        """Check the line of a command whose body follows."""
        topic, defer_ms = "", 0
        if verb == "AUTH" and params:
            raise invalid("AUTH invalid number of parameters")
        if verb in ("PUB", "MPUB", "DPUB"):
            topic = command_lines.parse_topic(verb, params)
        if verb == "DPUB":
            defer_ms = command_lines.parse_delay(params[1], self.limits)
        has_headers = self.identity.headers and params[2 if verb == "DPUB" else 1 :] == [b"headers"]
        self._begun, self._reading = _Begun(verb, topic, defer_ms, has_headers), Reading.SIZE
        if verb in ("PUB", "MPUB") and len(line) <= _MAX_KNOWN_LINE:
            if len(self._known_lines) >= _MAX_KNOWN_LINES:
                self._known_lines.clear()
            self._known_lines[line] = self._begun


def _cut_run(
    counts: list[int], messages: PackedBodies, bodies: PackedBodies, width: int
) -> tuple[list[int], PackedBodies, int]:
    """End a run of publishes before the first command that has a bad message. `bodies` are those of
    the messages before that one. Gives the number of messages of each command that is left, their
    bodies, and the size of these commands. `width` is the size of a command without its
    messages."""
    counts = counts[: bisect_right([*accumulate(counts)], len(bodies.lengths))]
    found = sum(counts)
    if 0 < found < len(bodies.lengths):
        bodies = bodies.split(found)[0]
    return counts, bodies, len(counts) * width + 4 * found + sum(messages.lengths[:found])


_READERS: Final[dict[Reading, Callable[[ServerProtocol], Command | None]]] = {
    Reading.MAGIC: ServerProtocol._read_magic,
    Reading.LINE: ServerProtocol._read_line,
    Reading.SIZE: ServerProtocol._read_size,
    Reading.BODY: ServerProtocol._read_body,
    Reading.COUNT: ServerProtocol._read_count,
    Reading.MESSAGES: ServerProtocol._read_messages,
}

_PARSERS: Final[dict[bytes, Callable[[list[bytes], Limits], Command | None]]] = {
    b"SUB": command_lines.parse_subscribe,
    b"RDY": command_lines.parse_ready,
    b"FIN": command_lines.parse_finish,
    b"REQ": command_lines.parse_requeue,
    b"TOUCH": command_lines.parse_touch,
    b"CLS": command_lines.parse_close,
    b"NOP": command_lines.parse_nop,
}

_VERBS_WITH_BODY: Final = {verb.encode(): verb for verb in ("IDENTIFY", "AUTH", "PUB", "MPUB", "DPUB")}
