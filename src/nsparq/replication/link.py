"""A connection between a primary and a follower, at either end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, cast

from nsparq.errors import NsparqError
from nsparq.replication.frames import BadFrame, Frame, FrameKind, FrameReader
from nsparq.storage.files import Buffer

MAX_READY: Final = 1 << 20
"""Bytes of frames that nobody has taken, beyond which nothing more is read."""


class Link(asyncio.Protocol):
    """Frames are taken one by one; those that `take_at_once` accepts, when they arrive.

    To wake a task for each frame would cost more than to handle most frames.
    """

    transport: asyncio.Transport

    def __init__(self, begin: Callable[[Link], object] | None = None) -> None:
        """`begin` is called when there is a connection."""
        self.reader = FrameReader()
        self.take_at_once: Callable[[Frame], bool] | None = None
        """Takes the next frame, if it can. An error ends the connection."""
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Frame] = deque()
        self._size = 0
        """Bytes of these."""
        self._is_paused = False
        """Whether nothing more is read."""
        self._heard_s = self._loop.time()
        """When something has arrived."""
        self._error: Exception | None = None
        """Why nothing more arrives."""
        self._reading: asyncio.Future[None] | None = None
        """Who waits for a frame."""
        self._writing: asyncio.Future[None] | None = None
        """Who waits until the peer has read."""
        self._is_full = False
        """Whether the peer does not read."""

    # called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance(): those of uvloop are of another class.
        self.transport = cast(asyncio.Transport, transport)
        if self._begin is not None:
            self._begin(self)

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self._heard_s = self._loop.time()
        try:
            for frame in self.reader.feed(data):
                if self._ready or self.take_at_once is None or not self.take_at_once(frame):
                    self._ready.append(frame)
                    self._size += len(frame.data)
        except (NsparqError, OSError) as error:
            self._end(error)
            self.transport.abort()
        if self._ready:
            _wake(self._reading)
            if self._size > MAX_READY and not self._is_paused:
                self._is_paused = True
                self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionResetError("the connection has ended"))

    def _end(self, error: Exception) -> None:
        self._error = self._error or error
        _wake(self._reading)
        _wake(self._writing)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        _wake(self._writing)

    # taking

    async def take_from(self, silence_s: float, *kinds: FrameKind) -> Frame:
        """The same from a peer that pings. Raises TimeoutError if it is silent."""
        while True:
            try:
                async with asyncio.timeout_at(self._heard_s + silence_s):
                    frame = await self.take(FrameKind.PING, *kinds)
            except TimeoutError as error:
                if error is self._error:
                    raise
                if self._loop.time() < self._heard_s + silence_s:
                    continue  # there were frames that were taken at once
                raise TimeoutError(f"silence of {silence_s:g} s") from error
            if frame.kind is not FrameKind.PING:
                return frame

    async def take(self, *kinds: FrameKind) -> Frame:
        """The next frame, which must be of one of these kinds. Raises BadFrame, OSError."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._reading = self._loop.create_future()
            await self._reading
        frame = self._ready.popleft()
        self._size -= len(frame.data)
        if self._is_paused and not self._ready:
            self._is_paused = False
            if not self.is_closing():
                self.transport.resume_reading()
        if frame.kind not in kinds:
            raise BadFrame(f"unexpected {frame.kind.name}")
        return frame

    # sending

    def is_closing(self) -> bool:
        return self.transport.is_closing()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def writelines(self, data: Sequence[Buffer]) -> None:
        self.transport.writelines(data)

    async def drain(self) -> None:
        """Wait until the peer has read most of it. Raises OSError."""
        while self._is_full:
            if self._error is not None:
                raise self._error
            self._writing = self._loop.create_future()
            await self._writing

    def close(self) -> None:
        self.transport.close()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
