"""Prepare, commit and abort transactions. See broker.transactions for what a transaction is.

A commit takes several turns of the event loop, so that a large one delays nobody. Its errors are
those of the HTTP API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakValueDictionary

from nsparq.broker.tagged import count_in_range
from nsparq.broker.transaction import (
    AlreadyCommitted,
    Damaged,
    Incomplete,
    PartSealed,
    StagingFull,
    Transaction,
    Unfinished,
    WrongPosition,
)
from nsparq.errors import CorruptBatch, Exiting, StorageError
from nsparq.http.api import ApiError

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S: Final = 1.0
"""Time before a commit that a disk error stopped is tried again."""

Parts = tuple[dict[str, int], str]
"""The number of messages in each part of a transaction, and the producer's note."""


class Committer:
    """The transactions of one nsqd. Every method raises ApiError.

    `promise` is the note that the client expects to be prepared now, or None for any. `identity` is
    the client's, or None if the API is not guarded.
    """

    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._transactions = nsqd.broker.transactions
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def resume(self) -> None:
        """Finish commits that a crash or a disk error has interrupted. Runs until cancelled."""
        while True:
            for transaction in self._transactions.unfinished():
                try:
                    await self.commit(transaction.producer.name, transaction.sequence)
                except ApiError:
                    pass  # the log and /ping report it, or the transaction waits for an operator
                except Exception:
                    # It must not stop the others, and not the next round.
                    logger.exception("%s: internal error", transaction)
            await asyncio.sleep(RETRY_S)

    async def prepare(
        self, producer: str, sequence: int, wanted: Parts, *, promise: str | None, identity: str | None
    ) -> Transaction:
        async with self._lock(producer):
            self._check_promise(producer, sequence, promise)
            # Another client may have taken the name while this one waited for the lock.
            self._check_owner(producer, identity)
            transaction = self._promise(producer, sequence, wanted, identity)
            await self._write_promise(transaction)
        return transaction

    async def commit(
        self,
        producer: str,
        sequence: int,
        *,
        wanted: Parts | None = None,
        promise: str | None = None,
        remember_s: float | None = None,
        identity: str | None = None,
    ) -> dict[str, Any]:
        """Publish the parts in `wanted`, or those that are prepared."""
        async with self._lock(producer):
            await self._finish_earlier(producer, sequence)
            try:
                transaction = self._transactions.find(producer, sequence)
            except AlreadyCommitted:
                return self._already_committed(producer, sequence)
            if transaction is None or transaction.decision is None:
                self._check_owner(producer, identity)
                self._check_promise(producer, sequence, promise)
                if wanted is not None:
                    transaction = self._promise(producer, sequence, wanted, identity)
                elif transaction is None:
                    raise ApiError(409, "INCOMPLETE_TRANSACTION", reason="nothing has been prepared")
                await self._decide(transaction)
            return await self._finish(transaction, remember_s)

    async def resolve(self, producer: str, sequence: int) -> dict[str, Any]:
        """Commit a transaction without the messages that cannot be read."""
        async with self._lock(producer):
            await self._finish_earlier(producer, sequence)
            try:
                transaction = self._transactions.find(producer, sequence)
            except AlreadyCommitted:
                return self._already_committed(producer, sequence)
            if transaction is None or (transaction.decision is None and not transaction.lost):
                raise ApiError(409, "NOT_DAMAGED")
            if transaction.decision is None:
                await self._decide(transaction, accept_loss=True)
            return await self._finish(transaction, None, accept_loss=True)

    async def abort(self, producer: str, sequence: int, *, promise: str | None, identity: str | None) -> None:
        async with self._lock(producer):
            self._check_owner(producer, identity)
            self._check_promise(producer, sequence, promise)
            with transaction_errors(f"transaction {producer}/{sequence}"):
                self._transactions.abort(producer, sequence)

    async def disown(self, producer: str) -> None:
        """Let the next identity that uses the producer's name own it."""
        # With the lock, so that no thread writes the owner at the same time.
        async with self._lock(producer):
            with transaction_errors(f"producer {producer}: cannot remove its owner"):
                self._transactions.disown(producer)

    def _lock(self, producer: str) -> asyncio.Lock:
        """One change at a time for each producer."""
        lock = self._locks.get(producer)
        if lock is None:
            lock = self._locks[producer] = asyncio.Lock()
        return lock

    def _check_promise(self, producer: str, sequence: int, expected: str | None) -> None:
        """A client that has been replaced must not undo what its successor has prepared."""
        if expected is None:
            return
        with transaction_errors(f"transaction {producer}/{sequence}"):
            transaction = self._transactions.find(producer, sequence)
        if expected != ("" if transaction is None else transaction.note):
            raise ApiError(409, "WRONG_PROMISE")

    def _check_owner(self, producer: str, identity: str | None) -> None:
        if identity is not None and not self._transactions.is_owner(producer, identity):
            raise ApiError(403, "OWNED_BY_ANOTHER")

    def _promise(self, producer: str, sequence: int, wanted: Parts, owner: str | None) -> Transaction:
        parts, note = wanted
        with transaction_errors(f"transaction {producer}/{sequence}"):
            return self._transactions.promise(producer, sequence, parts, note, owner=owner)

    async def _write_promise(self, transaction: Transaction) -> None:
        sync = transaction.is_synchronous
        with transaction_errors(str(transaction)):
            await self._write(lambda: transaction.write_promise(sync=sync))

    async def _write(self, work: Callable[[], T]) -> T:
        """Write files of a producer in a thread. If the task is cancelled meanwhile, because the
        client disconnects or nsqd stops, it goes on until the thread has ended: otherwise the next
        request would get the producer's lock, and the late thread would undo what that writes."""
        thread = asyncio.ensure_future(self._nsqd.in_disk_thread(work))
        is_cancelled = False
        while not thread.done():
            try:
                await asyncio.wait([thread])
            except asyncio.CancelledError:
                is_cancelled = True
        task = asyncio.current_task()
        if is_cancelled and task is not None:
            # The task ends where it waits next.
            task.cancel()
        return thread.result()

    async def _finish_earlier(self, producer: str, sequence: int) -> None:
        """Finish an older commit of the producer that is still under way."""
        known = self._transactions.producers.get(producer)
        while known is not None and (earlier := known.decided()) is not None and earlier.sequence < sequence:
            try:
                await self._finish(earlier, None)
            except ApiError as error:
                if error.code == "DAMAGED_TRANSACTION":
                    raise
                raise ApiError(503, "EARLIER_TRANSACTION_UNFINISHED", sequence=earlier.sequence) from error

    def _already_committed(self, producer: str, sequence: int) -> dict[str, Any]:
        last = self._transactions.producers[producer].committed
        is_last = last.sequence == sequence
        return {
            "sequence": sequence,
            "messages": last.messages if is_last else None,
            "already_committed": True,
            **({"lost_messages": last.lost} if is_last and last.lost else {}),
        }

    async def _decide(self, transaction: Transaction, *, accept_loss: bool = False) -> None:
        """Record on disk that the transaction is to be published. After that it is never undone."""
        with transaction_errors(str(transaction)):
            self._transactions.decide(transaction, accept_loss=accept_loss)
        try:
            await self._write_promise(transaction)
        except ApiError:
            self._transactions.revoke(transaction)
            raise

    async def _finish(
        self, transaction: Transaction, remember_s: float | None, *, accept_loss: bool = False
    ) -> dict[str, Any]:
        """Publish the rest of a decided transaction, and record that it is committed."""
        nsqd, transactions = self._nsqd, self._transactions
        try:
            if not transaction.is_published:
                await self._publish(transaction, accept_loss=accept_loss)
            if transaction.lost_messages and not accept_loss:
                raise Damaged(transaction)
            longest_s = nsqd.options.transaction_retention
            limit_s = longest_s if remember_s is None else min(remember_s, longest_s)
            sync = transaction.is_synchronous
            committed = await self._write(
                lambda: transactions.write_committed(transaction, sync=sync, remember_s=limit_s)
            )
        except Damaged as error:
            nsqd.broker.health.set(None, str(transaction))
            raise _damaged(error) from error
        except (StorageError, OSError, Exiting) as error:
            nsqd.broker.health.set(f"{transaction}: the commit was interrupted: {error}", str(transaction))
            raise ApiError(503, "WRITE_FAILED") from error
        transactions.finish(transaction, committed)
        return {
            "sequence": committed.sequence,
            "messages": committed.messages,
            "already_committed": False,
            **({"lost_messages": committed.lost} if committed.lost else {}),
        }

    async def _publish(self, transaction: Transaction, *, accept_loss: bool) -> None:
        """Publish every message that can be read. May be called again after StorageError, OSError,
        Exiting or ApiError."""
        nsqd, transactions = self._nsqd, self._transactions
        await self._count_archived(transaction)
        for chunk in transaction.chunks[transaction.applied :]:
            if transaction.applied in transaction.lost:
                transactions.pass_over(transaction, chunk)
                continue
            try:
                bodies = await nsqd.in_disk_thread(partial(chunk.read, nsqd.broker.files))
            except (CorruptBatch, OSError) as error:
                # Other errors may go away: too many open files, or no memory.
                if not accept_loss and not isinstance(error, CorruptBatch | FileNotFoundError):
                    raise
                transactions.lose(transaction, chunk, error)
                try:
                    await self._write_promise(transaction)
                except ApiError:
                    del transaction.lost[transaction.applied]
                    raise
                transactions.pass_over(transaction, chunk)
            else:
                transactions.apply(transaction, chunk, bodies)
        for name in sorted(transaction.topics):
            topic = nsqd.broker.topics.get(name)
            if topic is not None:
                await _wait_until_committed(topic)
        if transaction.lost_messages:
            transaction.is_published = True
            try:
                await self._write_promise(transaction)
            except ApiError:
                transaction.is_published = False
                raise
            transactions.release(transaction)

    async def _count_archived(self, transaction: Transaction) -> None:
        """Count the messages that a run before a crash has published and that have left the
        disk."""
        decision = transaction.decision
        assert decision is not None
        for name in [*transaction.uncounted]:
            while (place := transaction.locate_uncounted(name)) is not None:
                work = partial(count_in_range, place, decision.tag, decision.topics[name][1])
                found = await self._nsqd.in_disk_thread(work, is_remote=place.is_remote)
                transaction.count(name, place, found)
            del transaction.uncounted[name]


async def _wait_until_committed(topic: Topic) -> None:
    """Wait until the topic's messages are as durable as its settings require."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    topic.publishing.when_committed(finish)
    await done


@contextmanager
def transaction_errors(what: str) -> Iterator[None]:
    """Turn the errors of transactions into ApiError. `what` is for the log."""
    try:
        yield
    except AlreadyCommitted as error:
        raise ApiError(409, "ALREADY_COMMITTED", sequence=error.sequence) from error
    except PartSealed as error:
        raise ApiError(409, "PART_SEALED") from error
    except WrongPosition as error:
        raise ApiError(409, "WRONG_POSITION", messages=error.messages) from error
    except StagingFull as error:
        # Other producers may free the shared room. Its own limit only the producer can free.
        status, code = (409, "TOO_MUCH_STAGED") if error.is_producers else (503, "STAGING_FULL")
        raise ApiError(status, code, limit=error.limit) from error
    except Incomplete as error:
        raise ApiError(409, "INCOMPLETE_TRANSACTION", reason=str(error)) from error
    except Damaged as error:
        raise _damaged(error) from error
    except Unfinished as error:
        raise ApiError(503, "EARLIER_TRANSACTION_UNFINISHED", sequence=error.transaction.sequence) from error
    except (StorageError, OSError, Exiting) as error:
        logger.error("%s: %s", what, error)
        raise ApiError(503, "WRITE_FAILED") from error


def _damaged(error: Damaged) -> ApiError:
    sequence, lost = error.transaction.sequence, error.transaction.lost_messages
    return ApiError(409, "DAMAGED_TRANSACTION", sequence=sequence, lost_messages=lost, reason=str(error))
