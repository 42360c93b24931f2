"""The follower's side of replication: keeps a data path equal to that of its primary."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path
from threading import RLock
from typing import Final

from nsparq.errors import NsparqError
from nsparq.replication.applying import Applier
from nsparq.replication.changes import Change, Kind, decode_changes
from nsparq.replication.frames import (
    MAX_FRAME,
    SILENCE_S,
    VERSION,
    BadFrame,
    Frame,
    FrameKind,
    encode_confirm,
    is_proof,
    proof,
    send_frame,
    send_pings,
)
from nsparq.replication.joining import Joining, WaitingChanges, inventory
from nsparq.replication.link import Link
from nsparq.replication.mark import MARK, UNKNOWN, Mark, read_mark, write_mark
from nsparq.replication.snapshot import remove_left_links
from nsparq.replication.syncing import Syncing
from nsparq.replication.tail import set_tail_aside
from nsparq.replication.tls import NodeTls
from nsparq.storage.files import Buffer, Files

logger = logging.getLogger(__name__)

_CATCH_UP: Final = 4 << 20
"""Bytes of changes that a follower makes before it looks for more of them."""
_WRITES: Final = frozenset({Kind.WRITE, Kind.ZEROS})
_AT_ONCE: Final = 1 << 20
"""Bytes of writes that the event loop makes. More would keep it from its other work."""


class Refused(NsparqError):
    """The primary does not accept this follower."""


class ForeignData(NsparqError):
    """The data path is not a copy of the cluster's. To follow would mean to lose it."""

    def __init__(self, root: Path, cluster: str) -> None:
        super().__init__(
            f"{root} has data, and is not a copy of cluster {cluster!r}: start this node with an empty "
            "data path, or remove the cluster's record from the coordinator to start with this one"
        )


class Follower:
    """A copy of a primary's data path, in this process. follow() is called again after a connection
    has ended, and goes on where it was."""

    def __init__(
        self,
        root: Path,
        cluster: str,
        name: str,
        secret: bytes,
        files: Files | None = None,
        *,
        tls: NodeTls | None = None,
    ) -> None:
        self._root = root
        self._cluster = cluster
        self._name = name
        self._secret = secret
        self._tls = tls
        self._files = files or Files()
        self._applier: Applier | None = None
        self._syncing = Syncing(self._sync_ended)
        self._sync_error: BaseException | None = None
        """Why what was made here may not be on disk. Another sync would not tell."""
        self._link: Link | None = None
        """The present connection."""
        self._is_busy = False
        """Whether a thread makes changes."""
        self._lock = RLock()
        """Held by whoever changes the data path. A thread goes on for a moment when the task that
        waits for it is cancelled."""
        self._process = secrets.token_hex(8)
        """Tells this follower from another one of the same name."""
        self._copy = ""
        """Id of the copy, which the primary has given to it."""
        self.epoch = 0
        self.number = 0
        """Changes of this epoch that were made here. Some may still have to be synced."""
        self.is_complete = False
        """Whether the data path is that of a primary after some change: not while a snapshot is
        being received."""
        self.is_connected = False
        """Whether a primary has welcomed this follower."""

    async def follow(self, host: str, port: int) -> None:
        """Follow a primary until the connection ends, or the primary is silent. Raises OSError,
        BadFrame, BadChange, Refused, ForeignData."""
        context = None if self._tls is None else self._tls.client
        async with asyncio.timeout(SILENCE_S):
            _, link = await asyncio.get_running_loop().create_connection(Link, host, port, ssl=context)
        try:
            await self._greet(link)
            self.is_connected = True
            pings = asyncio.create_task(send_pings(link))
            self._link = link
            try:
                if not self._can_resume:
                    await self._join(link)
                self._confirm()
                await self._take_changes(link)
            finally:
                self._link = None
                pings.cancel()
        finally:
            self.is_connected = False
            link.close()

    async def close(self) -> None:
        """Close the files: no change follows, and a broker may open the data path. Waits for the
        disk."""
        await self._syncing.close()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            if self._applier is not None:
                self._applier.close()
                self._applier = None

    async def _greet(self, link: Link) -> None:
        challenge = await link.take_from(SILENCE_S, FrameKind.CHALLENGE)
        nonce = secrets.token_bytes(16)
        hello = {
            "version": VERSION,
            "name": self._name,
            "proof": proof(self._secret, "follower", bytes(challenge.data), self._name),
            "nonce": nonce.hex(),
            "epoch": self.epoch,
            "number": self.number if self._can_resume else -1,
            "copy": self._copy,
            "process": self._process,
        }
        send_frame(link, Frame.of_fields(FrameKind.HELLO, hello))
        answer = await link.take_from(SILENCE_S, FrameKind.WELCOME, FrameKind.REFUSED)
        if answer.kind is FrameKind.REFUSED:
            raise Refused(answer.text)
        epoch, resumes, given, primary, copy = answer.fields(
            epoch=int, resumes=bool, proof=str, name=str, copy=str
        )
        if not is_proof(given, self._secret, "primary", nonce, primary):
            raise BadFrame("the primary does not know the cluster's secret")
        if epoch < self.epoch:
            raise BadFrame(f"a primary of epoch {epoch}, after one of epoch {self.epoch}")
        link.reader.limit = MAX_FRAME
        self.epoch, self._copy = epoch, copy
        logger.info("REPLICATION: %s follows %s, epoch %d", self._name, primary, epoch)
        if not resumes:
            await self._syncing.close()
            await asyncio.to_thread(self._begin)

    @property
    def _can_resume(self) -> bool:
        """Without open files it cannot go on, only begin."""
        return self.is_complete and self._applier is not None and self._sync_error is None

    # joining

    def _begin(self) -> None:
        """The data path is not a whole one until a snapshot is complete."""
        with self._lock:
            self._close()
            self.is_complete = False
            mark, names = read_mark(self._files, self._root), self._files.list_directory(self._root)
            # A crash may have left a part of the first mark, or this node may have tried to be the
            # first.
            own = {f"{MARK}.tmp"} if mark is None or mark.cluster != UNKNOWN else {f"{MARK}.tmp", MARK}
            if {*names} - own and (mark is None or mark.cluster != self._cluster):
                raise ForeignData(self._root, self._cluster)
            remove_left_links(self._root)
            was_primary = mark is not None and mark.was_primary
            write_mark(self._files, self._root, Mark(self._cluster, False, was_primary))
            self._sync_error = None
            joining = Joining(self._files, self._root, keeps_former=was_primary)
            self._applier = Applier(self._root, self._files, joining)

    async def _join(self, link: Link) -> None:
        """Take a snapshot. Changes that come meanwhile wait in a file, and are made then."""
        kept = await asyncio.to_thread(inventory, self._files, self._root)
        send_frame(link, Frame.of_fields(FrameKind.INVENTORY, {"files": kept}))
        waiting = WaitingChanges(self._files, self._root)
        end: int | None = None
        """Number of changes that the data path needs; known after the snapshot."""
        taking: asyncio.Task[Frame] | None = None
        try:
            while end is None or self.number < end or not waiting.is_empty or (taking and taking.done()):
                if taking is None:
                    kinds = FrameKind.JOINING, FrameKind.SNAPSHOT, FrameKind.JOINED, FrameKind.CHANGES
                    taking = asyncio.create_task(link.take_from(SILENCE_S, *kinds))
                if end is not None and not waiting.is_empty:
                    await asyncio.to_thread(self._apply_waiting, waiting)
                else:
                    await asyncio.wait([taking])
                if not taking.done():
                    continue
                frame, taking = taking.result(), None
                if frame.kind is FrameKind.JOINING:
                    self.number = frame.number
                elif frame.kind is FrameKind.SNAPSHOT:
                    await asyncio.to_thread(self._apply, frame.data, is_snapshot=True)
                elif frame.kind is FrameKind.CHANGES:
                    await asyncio.to_thread(waiting.add, frame.number, frame.rest)
                else:
                    end = frame.number
                    await asyncio.to_thread(self._end_snapshot)
        finally:
            await _end(taking)
            await asyncio.to_thread(waiting.close)
        await asyncio.to_thread(self._complete)
        logger.info("REPLICATION: %s has a copy of the data path", self._name)

    def _apply_waiting(self, waiting: WaitingChanges) -> None:
        """Make some of the changes that wait: more than come meanwhile."""
        size = 0
        while not waiting.is_empty and size < _CATCH_UP:
            first, data = waiting.take()
            size += len(data)
            self._apply(data, first)

    def _end_snapshot(self) -> None:
        with self._lock:
            if self._applier is None or self._applier.joining is None:
                raise BadFrame("the end of a snapshot that has not begun")
            self._applier.joining.remove_others()
            self._applier.joining = None
            self._files.sync_pending()

    def _complete(self) -> None:
        with self._lock:
            set_tail_aside(self._files, self._root, self.epoch)
            write_mark(self._files, self._root, Mark(self._cluster, True, copies=(self._copy,)))
            self.is_complete = True

    # following

    async def _take_changes(self, link: Link) -> None:
        self._is_busy = False
        link.take_at_once = self._take_at_once
        while True:
            frame = await link.take_from(SILENCE_S, FrameKind.CHANGES)
            # This frame waited for one that needed a thread. Apply it here if possible: a thread
            # would make the next frame wait, too, and so on as long as the primary is busy.
            if self._take_at_once(frame):
                continue
            self._is_busy = True
            await asyncio.to_thread(self._apply, frame.rest, frame.number)
            self._confirm()
            await self._syncing.has_room()
            self._is_busy = False

    def _take_at_once(self, frame: Frame) -> bool:
        """Make changes on the event loop, if they are only writes: as nsqd does. A thread would
        take longer to begin than to write."""
        if self._is_busy or frame.kind is not FrameKind.CHANGES or len(frame.data) > _AT_ONCE:
            return False
        changes = [*decode_changes(frame.rest)]
        if not _WRITES.issuperset([change.kind for change in changes]):
            return False
        # A thread of an earlier connection may still be at work.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._make(changes, frame.number)
        finally:
            self._lock.release()
        self._confirm()
        return True

    def _confirm(self) -> None:
        made = self.number
        if self._applier is not None and (syncs := self._applier.take_syncs()):
            self._syncing.add(syncs)
        if self._link is not None and self.is_complete and self._sync_error is None:
            synced = min(made, self._syncing.before)
            if not self._link.is_closing():
                self._link.write(encode_confirm(made, synced))

    def _apply(self, data: Buffer, first: int = 0, *, is_snapshot: bool = False) -> None:
        self._make([*decode_changes(data)], first, is_snapshot=is_snapshot)

    def _make(self, changes: list[Change], first: int, *, is_snapshot: bool = False) -> None:
        """Make changes, before which there are `first` ones. Their syncs are left in the
        applier."""
        if not is_snapshot and first != self.number:
            raise BadFrame(f"changes from {first} on, after {self.number}")
        with self._lock:
            if self._applier is None:
                raise ConnectionAbortedError("this node follows no longer")
            try:
                for number, change in enumerate(changes, first + 1):
                    self._applier.apply(change, number)
            except BaseException:
                # Some are made, and some are not. The data path is a good one, but nobody knows
                # which.
                self._close()
                raise
            if not is_snapshot:
                self.number += len(changes)

    def _sync_ended(self, error: BaseException | None) -> None:
        if error is None:
            self._confirm()
            return
        logger.error("REPLICATION: %s cannot sync, and has to join anew: %s", self._name, error)
        self._sync_error = error
        if self._link is not None:
            self._link.transport.abort()


async def _end(task: asyncio.Task[Frame] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
