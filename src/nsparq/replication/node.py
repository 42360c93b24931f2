"""A node of a cluster: it follows the primary, or is the primary.

    observe the record ──► the primary is alive ─────────────► follow it
            ▲          └─► it is not, and this node has ─────► take over by compare-and-set,
            │              everything that was acknowledged    then serve until
            └───────────────────────────────────────────────── another node has taken over,
                                                               or an operator asks for a switch-over

The sign of life only decides when a node tries to take over. Whether it may is decided by the
record: see acknowledging.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol

from nsparq.errors import NsparqError
from nsparq.replication.acknowledging import Fenced
from nsparq.replication.changes import BadChange
from nsparq.replication.coordinator import Coordinator, Found, NoAnswer, State
from nsparq.replication.follower import Follower, ForeignData, Refused
from nsparq.replication.frames import BadFrame
from nsparq.replication.mark import UNKNOWN, Mark, new_copy_id, read_mark, write_mark
from nsparq.replication.membership import Membership
from nsparq.replication.primary import SNAPSHOT_RATE, Primary
from nsparq.replication.tls import NodeTls
from nsparq.storage.files import Files

logger = logging.getLogger(__name__)

HAND_OVER_S: Final = 5.0
"""How long a primary that stops waits for its followers to have its last changes."""


class Server(Protocol):
    """What a primary runs on its data path. It uses the files of the primary."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class NotPossible(NsparqError):
    """A switch-over that would leave nobody to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    cluster: str
    name: str
    """Of this node; no other node of the cluster has it."""
    root: Path
    """The data path."""
    secret: bytes
    listen: tuple[str, int]
    """Where this node listens for followers when it is primary."""
    address: str
    """`host:port` that followers connect to."""
    lease_s: float
    """How long a sign of life holds."""
    snapshot_rate: float = SNAPSHOT_RATE
    """Bytes per second for a follower that joins."""
    tcp_address: str = ""
    """`host:port` where clients find this node when it is primary; empty if it is not known."""
    http_address: str = ""
    tls: NodeTls | None = None
    """Encrypts the connections between the nodes."""


class Node:
    """Runs until it is cancelled, and then hands over if it is primary."""

    def __init__(
        self, settings: NodeSettings, coordinator: Coordinator, make_server: Callable[[Node, Primary], Server]
    ) -> None:
        self.settings = settings
        self.membership: Membership | None = None
        """As this node has seen it last."""
        self.primary: Primary | None = None
        """While this node is primary."""
        self.follower: Follower | None = None
        """While this node is not primary."""
        self.replaced: Membership | None = None
        """The record before this node took over. None if it was primary before, or is the first."""
        self.known: set[str] = set()
        """Nodes that were in sync at some time since the process has started."""
        self._coordinator = coordinator
        self._silence = ""
        self._record: _Record | None = None
        self._make_server = make_server
        self._files = Files()
        self._poll_s = settings.lease_s / 6
        self._should_end = asyncio.Event()
        """Set when this node is to be primary no longer."""
        self._gives_way: tuple[int, float] = (0, 0.0)
        """The epoch in which a switch-over was asked for, and until when this node lets another one
        take over."""
        self._shown = ""
        """The state that the log has shown."""
        self._primary_is_silent = False

    async def run(self) -> None:
        """Raises StartError, ForeignData, and OSError if this node cannot listen."""
        while True:
            found = await self._await_role()
            await self._serve(found)

    def switch_over(self) -> None:
        """Let a follower take over. Raises NotPossible."""
        if self.primary is None:
            raise NotPossible("this node is not primary")
        if len(self.primary.acknowledging.membership.in_sync) < 2:
            raise NotPossible("no follower has everything that was acknowledged")
        epoch = self.primary.acknowledging.membership.epoch
        self._gives_way = (epoch, monotonic() + 4 * self.settings.lease_s)
        self._should_end.set()

    async def leads(self) -> bool:
        """Whether the coordinator says now that this node is primary, in the epoch that it serves
        in."""
        try:
            found = (await self._observe()).found
        except NoAnswer:
            return False
        primary = self.primary
        return (
            primary is not None
            and found is not None
            and found.membership.epoch == primary.acknowledging.membership.epoch
        )

    @property
    def coordinator_error(self) -> str:
        """Why the coordinator did not answer the last request; empty if it did."""
        return self._silence if self._record is None else self._record.error

    @property
    def last_event(self) -> str:
        """What the log has said last of this node's role."""
        return self._shown

    def _show(self, text: str, *, level: int = logging.INFO) -> None:
        """Log a state once."""
        if text != self._shown:
            self._shown = text
            logger.log(level, "REPLICATION: %s", text)

    # follower

    async def _await_role(self) -> Found:
        """Follow the primary until this node has taken over. Gives the record of that."""
        settings = self.settings
        follower = Follower(
            settings.root, settings.cluster, settings.name, settings.secret, self._files, tls=settings.tls
        )
        self.follower = follower
        following: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    state = await self._observe()
                    self._silence = ""
                    self.membership = state.found.membership if state.found is not None else None
                    if self.membership is not None:
                        self.known |= self.membership.in_sync
                    if self._should_take_over(state):
                        await _end(following)
                        following = None
                        await follower.close()
                        if (found := await self._take_over(state)) is not None:
                            return found
                except NoAnswer as error:
                    self._silence = str(error)
                    self._show(self._silence, level=logging.WARNING)
                else:
                    if following is None:
                        following = self._start_following(follower, state)
                if following is None:
                    await asyncio.sleep(self._poll_s)
                else:
                    done, _ = await asyncio.wait([following], timeout=self._poll_s)
                    if done:
                        self._show_end(following)
                        following = None
                        await asyncio.sleep(self._poll_s)
        finally:
            self.follower = None
            await _end(following)
            await follower.close()

    async def _observe(self) -> State:
        """Raises NoAnswer, for a record that this version does not know, too."""
        try:
            return await self._coordinator.observe()
        except ValueError as error:
            raise NoAnswer(str(error)) from error

    def _should_take_over(self, state: State) -> bool:
        name = self.settings.name
        if state.found is None:
            return True
        membership = state.found.membership
        self._primary_is_silent = state.alive != membership.primary
        if not self._primary_is_silent:
            if membership.primary == name:
                self._show(f"a node with the name {name!r} is primary already", level=logging.WARNING)
            return False
        if name not in membership.in_sync:
            self._show("the primary is silent, and this node does not have everything", level=logging.WARNING)
            return False
        epoch, until = self._gives_way
        if membership.epoch == epoch and monotonic() < until and membership.in_sync - {name}:
            return False
        mark = read_mark(self._files, self.settings.root)
        if mark is None or not mark.is_complete or mark.cluster not in (self.settings.cluster, UNKNOWN):
            self._show(
                f"cannot take over: the record says that {name!r} has a copy, but there is none in "
                f"{self.settings.root}",
                level=logging.ERROR,
            )
            return False
        if membership.copies[name] not in mark.copies:
            self._show(
                f"cannot take over: {self.settings.root} is not the copy of {name!r} that has everything: "
                "it is a backup, or another node has the same name",
                level=logging.ERROR,
            )
            return False
        return True

    async def _take_over(self, state: State) -> Found | None:
        """None if another node was first. Raises NoAnswer if nobody knows."""
        settings, name = self.settings, self.settings.name
        before, version = state.found or (None, 0)
        copy, mark = new_copy_id(), read_mark(self._files, settings.root)
        if mark is None and before is None:
            mark = Mark(UNKNOWN, True)
        if mark is not None and mark.cluster in (settings.cluster, UNKNOWN):
            # The record may get the new id although no answer comes.
            write_mark(self._files, settings.root, mark._replace(copies=(*mark.copies, copy)))
        wanted = Membership(1, name, {name: copy}) if before is None else before.taken_over_by(name, copy)
        wanted = replace(
            wanted,
            addresses={**wanted.addresses, name: settings.address},
            tcp_address=settings.tcp_address,
            http_address=settings.http_address,
        )
        self.replaced = None if before is None or before.primary == name else before
        return await self._coordinator.compare_and_set(version, wanted)

    def _start_following(self, follower: Follower, state: State) -> asyncio.Task[None] | None:
        if state.found is None or state.found.membership.primary == self.settings.name:
            return None
        membership = state.found.membership
        host, _, port = membership.addresses[membership.primary].rpartition(":")
        return asyncio.create_task(follower.follow(host.strip("[]"), int(port)))

    def _show_end(self, following: asyncio.Task[None]) -> None:
        """Why following has ended. Raises ForeignData."""
        error = following.exception()
        if isinstance(error, ForeignData):
            raise error
        if error is not None and not isinstance(error, OSError | BadFrame | BadChange | Refused | ValueError):
            raise error
        if isinstance(error, OSError) and self._primary_is_silent:
            # The log has said why this node does not take over.
            return
        what = (
            "the primary refuses this node" if isinstance(error, Refused) else "not connected to the primary"
        )
        self._show(f"{what}: {error}", level=logging.WARNING)

    # primary

    async def _serve(self, found: Found) -> None:
        """Be primary until another node has taken over, or is to do so."""
        settings = self.settings
        self._show(f"{settings.name} is primary, in epoch {found.membership.epoch}")
        self._should_end.clear()
        copies = (found.membership.copies[settings.name],)
        write_mark(self._files, settings.root, Mark(settings.cluster, True, was_primary=True, copies=copies))
        record = _Record(self._coordinator, found, self._should_end.set, self.known)
        primary = Primary(
            settings.root,
            found.membership,
            settings.secret,
            record.change_set,
            snapshot_rate=settings.snapshot_rate,
        )
        record.primary = self.primary = primary
        self._record = record
        keeping = asyncio.create_task(record.keep_alive(settings.name, settings.lease_s / 4))
        server = self._make_server(self, primary)
        try:
            await primary.listen(*settings.listen, tls=settings.tls)
            await server.start()
            primary.serve(is_serving=True)
            try:
                await self._should_end.wait()
            finally:
                await _uninterrupted(self._stop(server, primary))
        finally:
            self.primary = self._record = None
            # Followers that are disconnected now stay in the in-sync set, so that one can take
            # over.
            primary.acknowledging.refuse(NotPossible("this node stops"))
            await primary.close()
            await _end(keeping)
            await record.close()
            if not primary.acknowledging.is_fenced:
                with suppress(NoAnswer):
                    await self._coordinator.release()

    async def _stop(self, server: Server, primary: Primary) -> None:
        """Stop serving, and let the followers have the last changes: then one of them takes over as
        after a clean stop."""
        self._show(str(primary.acknowledging.error or "handing over"))
        refuse_late = asyncio.get_running_loop().call_later(
            HAND_OVER_S, primary.acknowledging.refuse, NotPossible("this node stops")
        )
        primary.serve(is_serving=False)
        try:
            await server.stop()
            safe = asyncio.get_running_loop().create_future()
            primary.when_safe(lambda error: None if safe.done() else safe.set_result(error))
            error = await safe
            if error is not None:
                logger.warning("REPLICATION: followers do not have the last changes: %s", error)
        finally:
            refuse_late.cancel()


class _Record:
    """The coordinator's record, while this node is primary."""

    primary: Primary

    def __init__(
        self, coordinator: Coordinator, found: Found, fenced: Callable[[], None], known: set[str]
    ) -> None:
        """Adds nodes that come into sync to `known`."""
        self._coordinator = coordinator
        self._known = known
        self._found = found
        self._fenced = fenced
        self.error = ""
        """Why the coordinator did not answer the last request; empty if it did."""
        self._changing: asyncio.Task[None] | None = None

    def change_set(self, wanted: Membership) -> None:
        """See acknowledging.ChangeSet."""
        self._changing = asyncio.create_task(self._or_end(lambda: self._change(wanted)))

    async def _or_end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """An error of the work ends the role. A node of a later version may have written the
        record."""
        try:
            await work()
        except Exception as error:
            self.error = f"{error}"
            logger.error(
                "REPLICATION: this node ends its role: %s", error,
                exc_info=not isinstance(error, ValueError),
            )  # fmt: skip
            self._fence(f"nobody knows whether this node is still primary: {error}")

    async def _change(self, wanted: Membership) -> None:
        names = ", ".join(sorted(wanted.in_sync))
        while True:
            try:
                found = await self._coordinator.compare_and_set(self._found.version, wanted)
                # The answer to an earlier request of ours may have been lost.
                seen = found or (await self._coordinator.observe()).found
                break
            except NoAnswer as error:
                self._note_silence(error)
                await asyncio.sleep(0.2)
        if seen is not None and seen.membership == wanted:
            self._found = seen
            self._known |= wanted.in_sync
            logger.info("REPLICATION: in sync: %s", names)
            self.primary.acknowledging.set_changed()
        elif seen is not None and seen.version == self._found.version:
            self.change_set(wanted)
        else:
            self._fence()

    def _note_silence(self, error: NoAnswer) -> None:
        if not self.error:
            logger.warning("REPLICATION: %s", error)
        self.error = str(error)

    def _fence(self, *reason: str) -> None:
        self.primary.acknowledging.refuse(Fenced(*reason))
        self._fenced()

    async def keep_alive(self, name: str, interval_s: float) -> None:
        """Give signs of life, until another node has taken over."""
        await self._or_end(lambda: self._keep_alive(name, interval_s))

    async def _keep_alive(self, name: str, interval_s: float) -> None:
        mine = self._found.membership
        while True:
            try:
                state = await self._coordinator.observe()
                seen = None if state.found is None else state.found.membership
                if seen is None or (seen.epoch, seen.primary) != (mine.epoch, mine.primary):
                    self._fence()
                    return
                if state.alive != name:
                    # Another node's sign of life may have taken the place of ours.
                    await self._coordinator.release()
                await self._coordinator.keep_alive(name)
                self.error = ""
            except NoAnswer as error:
                self._note_silence(error)
            await asyncio.sleep(interval_s)

    async def close(self) -> None:
        await _end(self._changing)


async def _uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the end of the work even if this task is cancelled: SIGTERM may come while another
    node takes over, and the data path must be closed by then."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def _end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for it."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("REPLICATION: ended with %r", error)
