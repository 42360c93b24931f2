"""The client's half of NSQ's TCP protocol V2, as small and cheap as a load tool needs it.

It knows nothing of this project's own packages: the tool has to talk to any NSQ-compatible broker
alike, and an error in our codec must not cancel itself out here.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Address = tuple[str, int]
Rows = npt.NDArray[np.void]

MAGIC = b"  V2"
RESPONSE, ERROR, MESSAGE, MESSAGE_WITH_HEADERS = 0, 1, 2, 3
HEARTBEAT = b"_heartbeat_"
OK_FRAME = struct.pack(">ii", 6, RESPONSE) + b"OK"
HEAD = struct.Struct(">ii")  # a frame's size (type included, itself not) and type
FRAME_HEAD_BYTES = 8
MESSAGE_HEAD_BYTES = 26  # timestamp 8, attempts 2, id 16; the body follows
ID_START = FRAME_HEAD_BYTES + 10
ID_END = ID_START + 16
BODY_START = FRAME_HEAD_BYTES + MESSAGE_HEAD_BYTES
FIN_LINE = np.dtype([("word", "V4"), ("id", "V16"), ("end", "V1")])


class BrokerRefused(Exception):
    """The broker answered with an error, or hung up."""


def with_headers(body: bytes) -> bytes:
    """A message with a header as tracing adds it, behind the size of its header block."""
    name, value = b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    block = struct.pack(">B11sH", len(name), name, len(value)) + value
    return struct.pack(">I", len(block)) + block + body


def encode_pub(topic: str, body: bytes) -> bytes:
    return b"PUB %s\n" % topic.encode() + struct.pack(">i", len(body)) + body


def encode_mpub(topic: str, bodies: Sequence[bytes]) -> bytes:
    records = b"".join(struct.pack(">i", len(body)) + body for body in bodies)
    return b"MPUB %s\n" % topic.encode() + struct.pack(">ii", len(records) + 4, len(bodies)) + records


def connect(
    address: Address, *, timeout: float = 10.0, identify: bool = True, headers: bool = False
) -> socket.socket:
    """A connection past the magic and, unless told otherwise, a default IDENTIFY. `headers` asks
    for message headers, which NSQ does not have."""
    connection = socket.create_connection(address, timeout=timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    greeting = MAGIC
    if identify:
        fields: dict[str, object] = {
            "client_id": "load",
            "hostname": "load",
            "user_agent": "macro-benchmark/1",
            **({"feature_negotiation": True, "headers": True} if headers else {}),
        }
        encoded = json.dumps(fields).encode()
        greeting += b"IDENTIFY\n" + struct.pack(">i", len(encoded)) + encoded
    connection.sendall(greeting)
    if headers and json.loads(receive_frame(connection)[1]).get("headers") is not True:
        raise BrokerRefused("the broker knows no message headers")
    elif identify and not headers:
        expect_ok(connection)
    return connection


def wait_in_kernel(connection: socket.socket) -> None:
    """Leave the connection's timeout to the system: Python's own costs a poll() before each
    call."""
    seconds = connection.gettimeout() or 0.0
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(count)
        if not part:
            raise BrokerRefused("the broker closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive_frame(connection: socket.socket) -> tuple[int, bytes]:
    """The next frame that is neither a heartbeat (answered here) nor an error (raised).

    Heartbeats keep the connection alive, not the wait: its timeout is for the frame, whatever comes
    before.
    """
    give_up = time.monotonic() + (connection.gettimeout() or 3600.0)
    while time.monotonic() < give_up:
        size, kind = HEAD.unpack(receive_exactly(connection, FRAME_HEAD_BYTES))
        data = receive_exactly(connection, size - 4)
        if kind == ERROR:
            raise BrokerRefused(data.decode(errors="replace"))
        if data != HEARTBEAT or kind == MESSAGE:
            return kind, data
        connection.sendall(b"NOP\n")
    raise TimeoutError("nothing but heartbeats from the broker")


def expect_ok(connection: socket.socket) -> None:
    kind, data = receive_frame(connection)
    if (kind, data) != (RESPONSE, b"OK"):
        raise BrokerRefused(f"expected OK, got a frame of type {kind}: {data[:80]!r}")


def subscribe(connection: socket.socket, topic: str, channel: str) -> None:
    connection.sendall(f"SUB {topic} {channel}\n".encode())
    expect_ok(connection)


def create_channel(address: Address, topic: str, channel: str) -> None:
    """Topic and channel come into being with their first SUB, and outlive it."""
    with connect(address, identify=False) as connection:
        subscribe(connection, topic, channel)


class FrameBuffer:
    """The bytes of one connection, turned into message ids with as little work per message as
    possible.

    The messages of a load all have one size, so a run of them is a matrix with a frame per row, and
    the ids are sixteen of its columns. Whatever breaks the run (a heartbeat, an error, another
    size) is taken by itself. `columns` may reach into the body, for a load that carries something
    there.
    """

    def __init__(
        self,
        body_bytes: int,
        columns: slice = slice(ID_START, ID_END),
        capacity: int = 1 << 20,
        kind: int = MESSAGE,
    ) -> None:
        self.frame_bytes = BODY_START + body_bytes
        self.columns = columns
        self.width = columns.stop - columns.start
        self.head = np.frombuffer(HEAD.pack(self.frame_bytes - 4, kind), np.uint64)[0]
        self.memory = bytearray(max(capacity, 4 * self.frame_bytes))
        self.view = memoryview(self.memory)
        # What a run of frames from the start on looks like. One item per row, not one per byte:
        # numpy then copies a row in one move.
        frames = len(self.memory) // self.frame_bytes
        self.heads: npt.NDArray[np.uint64] = np.ndarray(
            (frames,), np.uint64, self.memory, strides=(self.frame_bytes,)
        )
        self.wanted: npt.NDArray[np.void] = np.ndarray(
            (frames,),
            np.dtype((np.void, self.width)),
            self.memory,
            offset=columns.start,
            strides=(self.frame_bytes,),
        )
        self.filled = 0
        self.replies: list[bytes] = []  # responses that are not heartbeats, in order
        self.errors: list[bytes] = []
        self.heartbeats = 0  # not yet answered

    def receive_from(self, connection: socket.socket) -> None:
        received = connection.recv_into(self.view[self.filled :])
        if not received:
            raise BrokerRefused("the broker closed the connection")
        self.filled += received

    def take_messages(self) -> list[Rows]:
        """The wanted columns of every whole message received so far, copied out, a row per
        message."""
        taken = []
        while self.filled >= FRAME_HEAD_BYTES:
            count = self._uniform_run()
            if count:
                taken.append(self.wanted[:count].copy())
                self._drop(count * self.frame_bytes)
                continue
            size, kind = HEAD.unpack_from(self.memory)
            end = 4 + size
            if end > self.filled:
                if end > len(self.memory):
                    raise BrokerRefused(f"a frame of {size} bytes is more than this tool has room for")
                break
            if kind in (MESSAGE, MESSAGE_WITH_HEADERS):
                taken.append(self.wanted[:1].copy())
            else:
                self._take_reply(kind, bytes(self.view[FRAME_HEAD_BYTES:end]))
            self._drop(end)
        return taken

    def _drop(self, count: int) -> None:
        rest = self.filled - count
        if rest:
            self.view[:rest] = self.view[count : self.filled]
        self.filled = rest

    def _uniform_run(self) -> int:
        """How many frames from the start on are messages of the expected size, one after
        another."""
        count = self.filled // self.frame_bytes
        if not count:
            return 0
        expected = self.heads[:count] == self.head
        return count if expected.all() else int(expected.argmin())

    def _take_reply(self, kind: int, data: bytes) -> None:
        if kind == ERROR:
            self.errors.append(data)
        elif data == HEARTBEAT:
            self.heartbeats += 1
        else:
            self.replies.append(data)


class Finisher:
    """Writes the FIN lines of any number of messages as one block."""

    def __init__(self) -> None:
        self._make_room(0)

    def _make_room(self, count: int) -> None:
        lines = np.frombuffer(bytearray(b"FIN 0123456789abcdef\n" * count), FIN_LINE)
        self.ids, self.bytes = lines["id"], lines.view(np.uint8).data

    def encode(self, ids: Rows) -> memoryview:
        count = len(ids)
        if count > len(self.ids):
            self._make_room(2 * count)
        self.ids[:count] = ids
        return self.bytes[: count * FIN_LINE.itemsize]
