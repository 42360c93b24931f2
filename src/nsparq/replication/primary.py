"""The primary's side of replication: lets followers join, sends them changes, hears what they have
made."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from threading import Event, get_ident
from typing import Any, Final, NoReturn

from nsparq.replication.acknowledging import NOTHING, Acknowledging, ChangeSet, Done, Progress
from nsparq.replication.changes import Change
from nsparq.replication.feed import Feed
from nsparq.replication.frames import (
    MAX_FRAME,
    SILENCE_S,
    VERSION,
    BadFrame,
    Frame,
    FrameKind,
    is_proof,
    proof,
    send_frame,
    send_pings,
)
from nsparq.replication.joining import Kept
from nsparq.replication.link import Link
from nsparq.replication.mark import new_copy_id
from nsparq.replication.membership import Membership
from nsparq.replication.recording import PrimaryFiles
from nsparq.replication.snapshot import Snapshot, remove_left_links
from nsparq.replication.tls import NodeTls

logger = logging.getLogger(__name__)

SNAPSHOT_BYTES: Final = 1 << 20
"""Changes of a snapshot in one frame, about."""
GREETING_S: Final = 10.0
STALLED_S: Final = 60.0
"""The same for a follower that joins, and does not take what it is sent."""
SNAPSHOT_RATE: Final = 50 << 20
"""Bytes per second of a snapshot."""
COMPARING: Final = 4
"""Blocks that a follower has already count this much less: they are read, and not sent."""


class Primary:
    """All followers of this node. Lives in one event loop."""

    def __init__(
        self,
        root: Path,
        membership: Membership,
        secret: bytes,
        change_set: ChangeSet,
        *,
        silence: float = SILENCE_S,
        snapshot_rate: float = SNAPSHOT_RATE,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._root = root
        remove_left_links(root)
        self._secret = secret
        self._silence = silence
        self._snapshot_rate = snapshot_rate
        self._feed = Feed(self._wake)
        self.files = PrimaryFiles(root, self._feed.record)
        """For the broker."""
        self.acknowledging = Acknowledging(membership, change_set)
        self._followers: dict[str, _Follower] = {}
        self._links: dict[Link, asyncio.Task[None]] = {}
        """All connections, and who serves them."""
        self._server: asyncio.Server | None = None

    def _wake(self) -> None:
        if get_ident() == self._thread:
            # This does not write to a pipe.
            self._loop.call_soon(self._flush)
        else:
            self._loop.call_soon_threadsafe(self._flush)

    async def listen(self, host: str, port: int, *, tls: NodeTls | None = None) -> int:
        """Gives the port."""
        context = None if tls is None else tls.server
        # Not served at once: if that is cancelled, close() must know the server.
        self._server = await self._loop.create_server(
            lambda: Link(self._begin), host, port, ssl=context, start_serving=False
        )
        await self._server.start_serving()
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for follower in [*self._followers.values()]:
            follower.end("the primary stops")
        # Some may not have a follower yet, because they are being greeted.
        for link in [*self._links]:
            link.transport.abort()

    def when_safe(self, done: Done) -> None:
        """Call `done` once all changes so far are on every node that may take over."""
        # The first change of a turn has woken up _flush(): one frame has those of a whole turn.
        self.acknowledging.recorded(self._feed.recorded)
        self.acknowledging.when_safe(done)

    def serve(self, *, is_serving: bool) -> None:
        """While the broker serves, followers make syncs beside the changes. It must not sync on the
        event loop then. Before and after that it does, and followers make syncs in order."""
        self.files.await_synced = self._await_synced if is_serving else None

    def _await_synced(self, number: int) -> None:
        """Called by other threads. An error is not theirs: nothing is acknowledged any more."""
        synced = Event()
        try:
            self._loop.call_soon_threadsafe(
                self.acknowledging.when_synced, number, lambda error: synced.set()
            )
        except RuntimeError:
            return  # the loop has closed: the node is gone
        self._wait(synced)

    def _wait(self, event: Event) -> None:
        event.wait()

    def followers(self) -> list[dict[str, Any]]:
        """The connected followers, for people."""
        return [
            follower.describe(self.acknowledging, self._loop.time()) for follower in self._followers.values()
        ]

    @property
    def changes(self) -> int:
        """The number of changes in this epoch."""
        return self._feed.recorded

    def _flush(self) -> None:
        self._feed.flush()
        self.acknowledging.recorded(self._feed.end)
        for follower in [*self._followers.values()]:
            follower.send_changes()

    # connections

    def _begin(self, link: Link) -> None:
        self._links[link] = self._loop.create_task(self._serve(link))

    async def _serve(self, link: Link) -> None:
        peer = link.transport.get_extra_info("peername")
        follower: _Follower | None = None
        try:
            async with asyncio.timeout(GREETING_S):
                follower, position = await self._greet(link)
            self._followers[follower.name] = follower
            logger.info("REPLICATION: %s has connected from %s", follower, peer)
            pings = asyncio.create_task(send_pings(link))
            try:
                await self._follow(follower, position)
            finally:
                pings.cancel()
        except (BadFrame, OSError, TimeoutError) as error:
            reason = "it does not answer" if isinstance(error, TimeoutError) else str(error)
            logger.warning("REPLICATION: %s: connection ended: %s", follower or peer, reason)
        finally:
            link.close()
            del self._links[link]
            if follower is not None and self._followers.get(follower.name) is follower:
                del self._followers[follower.name]
                self.acknowledging.lost(follower.name)

    async def _greet(self, link: Link) -> tuple[_Follower, int | None]:
        """The follower, and how many changes of this epoch it has; None if it must join anew."""
        challenge = secrets.token_bytes(16)
        send_frame(link, Frame(FrameKind.CHALLENGE, challenge))
        hello = await link.take(FrameKind.HELLO)
        version, name, given = hello.fields(version=int, name=str, proof=str)
        if not is_proof(given, self._secret, "follower", challenge, name):
            send_frame(link, Frame(FrameKind.REFUSED, b"it has another secret than the primary"))
            raise BadFrame("the follower does not know the cluster's secret")
        if version != VERSION:
            self._refuse(link, name, f"the primary speaks version {VERSION} of the protocol, not {version}")
        epoch, number, process, copy, nonce = hello.fields(
            epoch=int, number=int, process=str, copy=str, nonce=str
        )
        membership = self.acknowledging.membership
        with hello.reading():
            own_proof = proof(self._secret, "primary", bytes.fromhex(nonce), membership.primary)
        earlier = self._followers.get(name)
        if earlier is not None and earlier.process != process:
            host = earlier.link.transport.get_extra_info("peername")[0]
            reason = f"another node with the name {name!r} is connected, from {host}"
            self._refuse(link, name, f"{reason}: give each node a --replication-name of its own")
        if earlier is not None:
            earlier.end("it has connected again")
        resumes = epoch == membership.epoch and self._feed.since(number) is not None
        if not resumes:
            copy = new_copy_id()
        if self.acknowledging.is_fenced or epoch > membership.epoch:
            self._refuse(link, name, "this node is no longer primary")
        if self.acknowledging.needs_other_copy(name, copy):
            # It would change its data path, which may be the last copy of what was acknowledged. Or
            # another node of that name has the copy.
            self._refuse(link, name, "it is still in the in-sync set, and must leave that first; try again")
        link.reader.limit = MAX_FRAME
        welcome = {
            "epoch": membership.epoch,
            "resumes": resumes,
            "proof": own_proof,
            "name": membership.primary,
            "copy": copy,
        }
        send_frame(link, Frame.of_fields(FrameKind.WELCOME, welcome))
        return _Follower(name, process, copy, self._feed, link), number if resumes else None

    def _refuse(self, link: Link, name: str, reason: str) -> NoReturn:
        send_frame(link, Frame(FrameKind.REFUSED, reason.encode()))
        raise BadFrame(f"{name} was refused: {reason}")

    async def _follow(self, follower: _Follower, position: int | None) -> None:
        """Serve a follower until its connection ends."""
        if position is None:
            position = await self._send_snapshot(follower, await self._take_inventory(follower.link))
        else:
            follower.position = position
            follower.send_changes()
        is_caught_up = False
        progress, follower.confirmed_s = NOTHING, self._loop.time()

        def hear(frame: Frame) -> bool:
            nonlocal is_caught_up, progress
            if frame.kind is FrameKind.CONFIRM:
                if self._followers.get(follower.name) is not follower:
                    raise ConnectionResetError("it has connected again")
                progress, follower.confirmed_s = Progress._make(frame.numbers), self._loop.time()
                if not is_caught_up and progress.made >= position:
                    is_caught_up = True
                    self.acknowledging.caught_up(follower.name, follower.copy, progress)
                elif is_caught_up:
                    self.acknowledging.confirmed(follower.name, progress)
                self._feed.confirmed(follower.name, progress.made)
            elif frame.kind is not FrameKind.PING:
                return False
            elif min(progress) >= (follower.position or 0):
                follower.confirmed_s = self._loop.time()
            elif is_caught_up and self._loop.time() - follower.confirmed_s > self._silence:
                # It is alive, but its disk stands still.
                raise TimeoutError
            return True

        follower.link.take_at_once = hear
        while True:
            # Some may have come before.
            hear(await follower.link.take_from(self._silence, FrameKind.CONFIRM))

    async def _take_inventory(self, link: Link) -> dict[str, Kept]:
        """The files that a follower has. It reads all of them first, and shows that it is alive."""
        frame = await link.take_from(self._silence, FrameKind.INVENTORY)
        (files,) = frame.fields(files=dict)
        with frame.reading():
            return {name: Kept(int(size), str(digests)) for name, (size, digests) in files.items()}

    async def _send_snapshot(self, follower: _Follower, inventory: dict[str, Kept]) -> int:
        """Gives the number of changes that the follower must make, so that no byte of the snapshot
        is newer than its data path."""
        link = follower.link
        snapshot = Snapshot(self.files, self._root)
        try:
            await asyncio.to_thread(snapshot.link, link.is_closing)
            _check(link)
            with self.files.frozen() as open_files:
                self._flush()
                snapshot.take(open_files)
            # From here on the follower gets all changes, too.
            follower.position = self._feed.end
            self._feed.confirmed(follower.name, follower.position)
            send_frame(link, Frame.of_number(FrameKind.JOINING, follower.position))
            logger.info("REPLICATION: sending a snapshot to %s", follower)
            due = self._loop.time()
            sent = 0
            changes = snapshot.changes(inventory)
            while True:
                compared = snapshot.compared
                data = await asyncio.to_thread(_next_piece, changes, snapshot)
                if not data:
                    break
                sent += len(data)
                _check(link)
                send_frame(link, Frame(FrameKind.SNAPSHOT, data))
                async with asyncio.timeout(STALLED_S):
                    await link.drain()
                cost = len(data) + (snapshot.compared - compared) / COMPARING
                due = max(due, self._loop.time() - 1) + cost / self._snapshot_rate
                await asyncio.sleep(due - self._loop.time())
        finally:
            await asyncio.to_thread(snapshot.close)
        self._flush()
        send_frame(link, Frame.of_number(FrameKind.JOINED, self._feed.end))
        had = snapshot.compared
        logger.info("REPLICATION: %s was sent %d bytes of the snapshot, and had %d", follower, sent, had)
        return self._feed.end


class _Follower:
    """A follower that is connected."""

    def __init__(self, name: str, process: str, copy: str, feed: Feed, link: Link) -> None:
        self.name = name
        self.process = process
        """Another one of the same name has another."""
        self.copy = copy
        """Id of its copy: see mark."""
        self.link = link
        self.position: int | None = None
        """Changes that were sent; None before it has a snapshot."""
        self.confirmed_s = 0.0
        """When it has confirmed something, or had nothing to confirm; time of the event loop."""
        self._feed = feed

    def __str__(self) -> str:
        return self.name

    def describe(self, acknowledging: Acknowledging, now_s: float) -> dict[str, Any]:
        """For people. `seconds_behind` is the time without a confirmation while one is awaited."""
        confirmed = acknowledging.progress_of(self.name).made
        behind = self._feed.recorded - confirmed
        return {
            "name": self.name,
            "is_in_sync": self.name in acknowledging.membership.in_sync,
            "is_joining": not acknowledging.may_take_over(self.name),
            "changes_behind": behind,
            "bytes_behind": self._feed.bytes_behind(confirmed),
            "seconds_behind": round(now_s - self.confirmed_s, 3) if behind and self.confirmed_s else 0.0,
        }

    def send_changes(self) -> None:
        """Send everything new. A follower that is too far behind is disconnected."""
        if self.position is None or self.link.is_closing():
            return
        blocks = self._feed.since(self.position)
        if blocks is None or self.link.transport.get_write_buffer_size() > self._feed.kept_bytes:
            self.end("it is too far behind")
            return
        for block in blocks:
            self.link.writelines(block.frame)
            self.position = block.end

    def end(self, reason: str) -> None:
        if not self.link.is_closing():
            logger.warning("REPLICATION: disconnecting %s: %s", self, reason)
            self.link.transport.abort()


def _check(link: Link) -> None:
    """Raises OSError if it has ended."""
    if link.is_closing():
        raise ConnectionResetError("the connection has ended")


def _next_piece(changes: Iterator[Change], snapshot: Snapshot) -> bytes:
    """The next changes of a snapshot, encoded; nothing at its end."""
    pieces: list[bytes] = []
    size = -snapshot.compared // COMPARING
    for change in changes:
        pieces.append(change.encode())
        size += len(pieces[-1])
        if size + snapshot.compared // COMPARING >= SNAPSHOT_BYTES:
            break
    return b"".join(pieces)
