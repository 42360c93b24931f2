"""Transactions over HTTP: see broker.transactions for what they are.

What a commit does takes several turns of the event loop, so that nobody waits for a large one. It is a task
of its own: it goes on when the client that asked for it has gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakValueDictionary

from nsparq.broker.transactions import (
    NAME,
    UNKNOWN_OWNER,
    AlreadyCommitted,
    Committed,
    Damaged,
    Incomplete,
    PartSealed,
    StagingFull,
    Transaction,
    Unfinished,
    WrongPosition,
)
from nsparq.errors import CorruptBatch, Exiting, FatalClientError, StorageError
from nsparq.http.api import ApiError, Request, Result
from nsparq.server.arguments import name_of, number_of
from nsparq.wire.server import decode_multiple

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

MAX_NOTE: Final = 4096
RETRY_S: Final = 1.0
"""How soon a commit that the disk has broken off is tried again."""


class TransactionApi:
    """The handlers of one nsqd."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._transactions = nsqd.broker.transactions
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def topics(self, request: Request) -> set[str]:
        """Whose publishers may do something with the transaction; none if it is not known."""
        try:
            transaction = self._transactions.find(*_which(request))
        except (AlreadyCommitted, ApiError):
            return set()
        return set() if transaction is None else transaction.topics

    def admin_topics(self, request: Request) -> set[str]:
        """Whose admins may resolve the transaction. For one that is not open: those of the whole daemon."""
        return self.topics(request) or {""}

    def is_owner(self, request: Request) -> bool:
        """Whether the request may use the name of the producer."""
        return self._transactions.is_owner(request.parameters.get("producer", ""), request.identity)

    # handlers

    def stage(self, request: Request) -> Result:
        producer, sequence = _which(request)
        part = _identifier(request, "part")
        topic = name_of(request, "topic")
        defer_ms = number_of(request, "defer") or 0
        if defer_ms > self._nsqd.options.max_req_timeout * 1000:
            raise ApiError(400, "INVALID_ARG_DEFER")
        try:
            bodies = decode_multiple(request.body, self._nsqd.limits)
        except FatalClientError as error:
            raise ApiError(413, error.code.removeprefix("E_")) from error
        try:
            messages = self._transactions.stage(
                producer,
                sequence,
                part,
                topic,
                bodies,
                defer_ms=defer_ms,
                at=number_of(request, "at"),
                owner=request.identity,
            )
        except AlreadyCommitted as error:
            _refuse(error)
        except PartSealed as error:
            raise ApiError(409, "PART_SEALED") from error
        except WrongPosition as error:
            raise ApiError(409, "WRONG_POSITION", messages=error.messages) from error
        except StagingFull as error:
            # Others may make room for this one; the producer itself has to commit or abort first.
            status, code = (409, "TOO_MUCH_STAGED") if error.is_producers else (503, "STAGING_FULL")
            raise ApiError(status, code, limit=error.limit) from error
        except OSError as error:
            logger.error("transaction %s/%d: cannot be staged: %s", producer, sequence, error)
            raise ApiError(503, "WRITE_FAILED") from error
        return {"messages": messages}

    async def prepare(self, request: Request) -> Result:
        producer, sequence = _which(request)
        parts, note = _wanted(request)
        async with self._lock(producer):
            self._check_promise(producer, sequence, request.parameters.get("promise"))
            # Somebody else may have used the name while this request waited for its turn.
            self._check_owner(request)
            transaction = self._promise(producer, sequence, parts, note, request.identity)
            await self._write_promise(transaction)
        return {"sequence": sequence, "messages": transaction.messages}

    async def commit(self, request: Request) -> Result:
        producer, sequence = _which(request)
        remember_s = number_of(request, "remember")
        wanted = _wanted(request) if request.body else None
        promise = request.parameters.get("promise")
        commit = self._commit(producer, sequence, wanted, promise, remember_s, request=request)
        return await self._in_task(commit)

    async def resolve(self, request: Request) -> Result:
        producer, sequence = _which(request)
        return await self._in_task(self._resolve(producer, sequence))

    async def abort(self, request: Request) -> None:
        producer, sequence = _which(request)
        async with self._lock(producer):
            self._check_owner(request)
            self._check_promise(producer, sequence, request.parameters.get("promise"))
            try:
                self._transactions.abort(producer, sequence)
            except AlreadyCommitted as error:
                _refuse(error)

    def state(self, request: Request) -> Result:
        producer, sequence = _which(request)
        known = self._transactions.producers.get(producer)
        committed = Committed() if known is None else known.committed
        answer: dict[str, Any] = {
            "state": "unknown",
            "committed_sequence": committed.sequence if committed.sequence >= 0 else None,
            "committed_note": committed.note,
        }
        try:
            transaction = self._transactions.find(producer, sequence)
        except AlreadyCommitted:
            is_last = committed.sequence == sequence
            answer |= {"state": "committed", "note": committed.note if is_last else ""}
            return answer | ({"lost_messages": committed.lost} if is_last and committed.lost else {})
        return answer if transaction is None else answer | _shown(transaction)

    def list_all(self, request: Request) -> Result:
        return {
            "producers": [
                {
                    "producer": producer.name,
                    "owner": None if producer.owner == UNKNOWN_OWNER else producer.owner,
                    "committed_sequence": producer.committed.sequence,
                    "committed_messages": producer.committed.messages,
                    "open": [
                        {
                            "sequence": transaction.sequence,
                            "state": transaction.state,
                            "topics": sorted(transaction.topics),
                            "messages": transaction.messages,
                            "bytes": transaction.size_bytes,
                            "lost_messages": transaction.lost_messages,
                            "touched": transaction.touched_wall_ns,
                        }
                        for transaction in producer.open.values()
                    ],
                }
                for producer in self._transactions.producers.values()
            ]
        }

    def disown(self, request: Request) -> None:
        producer = _identifier(request, "producer")
        try:
            self._transactions.disown(producer)
        except OSError as error:
            logger.error("producer %s: its owner cannot be removed: %s", producer, error)
            raise ApiError(503, "WRITE_FAILED") from error

    # committing

    async def resume(self) -> None:
        """Finish, for as long as the daemon runs, what has been decided and was broken off: by a crash before
        this run, or by the disk."""
        while True:
            for transaction in self._transactions.unfinished():
                name, sequence = transaction.producer.name, transaction.sequence
                # What stands in its way is in the log and in /ping, or an operator has to see to it.
                with suppress(ApiError):
                    await self._commit(name, sequence, None, None, None)
            await asyncio.sleep(RETRY_S)

    def _lock(self, producer: str) -> asyncio.Lock:
        """One change at a time for each producer."""
        lock = self._locks.get(producer)
        if lock is None:
            lock = self._locks[producer] = asyncio.Lock()
        return lock

    async def _commit(
        self,
        producer: str,
        sequence: int,
        wanted: tuple[dict[str, int], str] | None,
        promise: str | None,
        remember_s: float | None,
        *,
        request: Request | None = None,
    ) -> Result:
        async with self._lock(producer):
            await self._finish_earlier(producer, sequence)
            try:
                transaction = self._transactions.find(producer, sequence)
            except AlreadyCommitted:
                return self._already_committed(producer, sequence)
            if transaction is None or transaction.decision is None:
                if request is not None:
                    self._check_owner(request)
                owner = None if request is None else request.identity
                transaction = await self._decide(producer, sequence, wanted, promise, transaction, owner)
            return await self._finish(transaction, remember_s)

    async def _resolve(self, producer: str, sequence: int) -> Result:
        """Finish a transaction without those of its messages that cannot be read."""
        async with self._lock(producer):
            await self._finish_earlier(producer, sequence)
            try:
                transaction = self._transactions.find(producer, sequence)
            except AlreadyCommitted:
                return self._already_committed(producer, sequence)
            if transaction is None or (transaction.decision is None and not transaction.lost):
                raise ApiError(409, "NOT_DAMAGED")
            if transaction.decision is None:
                await self._write_decision(transaction, accept_loss=True)
            return await self._finish(transaction, None, accept_loss=True)

    async def _finish_earlier(self, producer: str, sequence: int) -> None:
        """What a producer has had decided comes before anything newer."""
        known = self._transactions.producers.get(producer)
        while known is not None and (earlier := known.decided()) is not None and earlier.sequence < sequence:
            try:
                await self._finish(earlier, None)
            except ApiError as error:
                if error.code == "DAMAGED_TRANSACTION":
                    raise
                raise ApiError(503, "EARLIER_TRANSACTION_UNFINISHED", sequence=earlier.sequence) from error

    def _already_committed(self, producer: str, sequence: int) -> Result:
        last = self._transactions.producers[producer].committed
        is_last = last.sequence == sequence
        return {
            "sequence": sequence,
            "messages": last.messages if is_last else None,
            "already_committed": True,
            **({"lost_messages": last.lost} if is_last and last.lost else {}),
        }

    async def _decide(
        self,
        producer: str,
        sequence: int,
        wanted: tuple[dict[str, int], str] | None,
        promise: str | None,
        transaction: Transaction | None,
        owner: str | None,
    ) -> Transaction:
        self._check_promise(producer, sequence, promise)
        if wanted is not None:
            transaction = self._promise(producer, sequence, *wanted, owner)
        elif transaction is None:
            raise ApiError(409, "INCOMPLETE_TRANSACTION", reason="nothing has been prepared")
        await self._write_decision(transaction)
        return transaction

    async def _write_decision(self, transaction: Transaction, *, accept_loss: bool = False) -> None:
        try:
            self._transactions.decide(transaction, accept_loss=accept_loss)
        except Incomplete as error:
            raise ApiError(409, "INCOMPLETE_TRANSACTION", reason=str(error)) from error
        except Damaged as error:
            _say_damaged(error)
        except Unfinished as error:
            raise ApiError(
                503, "EARLIER_TRANSACTION_UNFINISHED", sequence=error.transaction.sequence
            ) from error
        except (StorageError, OSError, Exiting) as error:
            raise ApiError(503, "WRITE_FAILED") from error
        try:
            await self._write_promise(transaction)
        except ApiError:
            self._transactions.revoke(transaction)
            raise

    def _check_promise(self, producer: str, sequence: int, expected: str | None) -> None:
        """A client that was given up must not undo what its successor has promised since."""
        if expected is None:
            return
        try:
            transaction = self._transactions.find(producer, sequence)
        except AlreadyCommitted as error:
            _refuse(error)
        if expected != ("" if transaction is None else transaction.note):
            raise ApiError(409, "WRONG_PROMISE")

    def _check_owner(self, request: Request) -> None:
        if request.identity is not None and not self.is_owner(request):
            raise ApiError(403, "OWNED_BY_ANOTHER")

    def _promise(
        self, producer: str, sequence: int, parts: dict[str, int], note: str, owner: str | None
    ) -> Transaction:
        try:
            return self._transactions.promise(producer, sequence, parts, note, owner=owner)
        except OSError as error:
            logger.error("transaction %s/%d: %s", producer, sequence, error)
            raise ApiError(503, "WRITE_FAILED") from error
        except AlreadyCommitted as error:
            _refuse(error)
        except Incomplete as error:
            raise ApiError(409, "INCOMPLETE_TRANSACTION", reason=str(error)) from error

    async def _write_promise(self, transaction: Transaction) -> None:
        sync = transaction.is_synchronous
        try:
            await self._nsqd.in_disk_thread(lambda: transaction.write_promise(sync=sync))
        except OSError as error:
            logger.error("%s: %s", transaction, error)
            raise ApiError(503, "WRITE_FAILED") from error

    async def _finish(
        self, transaction: Transaction, remember_s: float | None, *, accept_loss: bool = False
    ) -> Result:
        """Publish what is still to be published of a transaction that has been decided upon."""
        nsqd, transactions = self._nsqd, self._transactions
        try:
            if not transaction.is_published:
                await self._publish(transaction, accept_loss=accept_loss)
            if transaction.lost_messages and not accept_loss:
                raise Damaged(transaction)
            longest_s = nsqd.options.transaction_retention
            limit_s = longest_s if remember_s is None else min(remember_s, longest_s)
            sync = transaction.is_synchronous
            committed = await nsqd.in_disk_thread(
                lambda: transactions.write_committed(transaction, sync=sync, remember_s=limit_s)
            )
        except Damaged as error:
            nsqd.broker.health.set(None, str(transaction))
            _say_damaged(error)
        except (StorageError, OSError, Exiting) as error:
            nsqd.broker.health.set(f"{transaction}: the commit is broken off: {error}", str(transaction))
            raise ApiError(503, "WRITE_FAILED") from error
        transactions.finish(transaction, committed)
        return {
            "sequence": committed.sequence,
            "messages": committed.messages,
            "already_committed": False,
            **({"lost_messages": committed.lost} if committed.lost else {}),
        }

    async def _publish(self, transaction: Transaction, *, accept_loss: bool) -> None:
        """Publish all that can be read. Can be tried again after StorageError, OSError, Exiting, ApiError."""
        nsqd, transactions = self._nsqd, self._transactions
        for chunk in transaction.chunks[transaction.applied :]:
            if transaction.applied in transaction.lost:
                transactions.pass_over(transaction, chunk)
                continue
            try:
                bodies = await nsqd.in_disk_thread(partial(chunk.read, nsqd.broker.files))
            except (CorruptBatch, OSError) as error:
                # Another error may be over in a moment: descriptors or memory that are used up, say.
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
                await _committed(topic)
        if transaction.lost_messages:
            transaction.is_published = True
            try:
                await self._write_promise(transaction)
            except ApiError:
                transaction.is_published = False
                raise
            transactions.release(transaction)

    async def _in_task(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for it, and let it go on if nobody waits any more."""
        return await asyncio.shield(self._nsqd.launch(work))


async def _committed(topic: Topic) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(verb: str, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    topic.publishing.when_committed(finish, "commit")
    await done


def _shown(transaction: Transaction) -> dict[str, Any]:
    # Decided is committed, to all intents, unless it is damaged: nothing but time is needed.
    is_decided = transaction.decision is not None
    return {
        "state": "committed" if is_decided and not transaction.lost_messages else transaction.state,
        **(
            {"lost_messages": transaction.lost_messages, "decided": is_decided}
            if transaction.lost_messages
            else {}
        ),
        "parts": {name: part.messages for name, part in transaction.parts.items()},
        "prepared": transaction.promised,
        "note": transaction.note,
    }


def _say_damaged(error: Damaged) -> NoReturn:
    transaction = error.transaction
    raise ApiError(
        409,
        "DAMAGED_TRANSACTION",
        sequence=transaction.sequence,
        lost_messages=transaction.lost_messages,
        reason=str(error),
    ) from error


def _refuse(error: AlreadyCommitted) -> NoReturn:
    raise ApiError(409, "ALREADY_COMMITTED", sequence=error.sequence) from error


def _which(request: Request) -> tuple[str, int]:
    producer = _identifier(request, "producer")
    sequence = number_of(request, "sequence")
    if sequence is None:
        raise ApiError(400, "MISSING_ARG_SEQUENCE")
    return producer, sequence


def _identifier(request: Request, parameter: str) -> str:
    text = request.parameters.get(parameter)
    if text is None:
        raise ApiError(400, f"MISSING_ARG_{parameter.upper()}")
    if not NAME.fullmatch(text):
        raise ApiError(400, f"INVALID_ARG_{parameter.upper()}")
    return text


def _wanted(request: Request) -> tuple[dict[str, int], str]:
    """The parts that a transaction is to consist of, with the number of messages in each; and a note."""
    try:
        body = json.loads(request.body)
        parts, note = body["parts"], body.get("note", "")
        if not isinstance(parts, dict) or not isinstance(note, str) or len(note) > MAX_NOTE:
            raise ValueError("`parts` is an object, and `note` a short string")
        unknown = body.keys() - {"parts", "note"}
        if unknown:
            raise ValueError(f"there is no {min(unknown)!r}")
        if not all(type(count) is int and count >= 0 for count in parts.values()):
            raise ValueError("each part has a number of messages")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ApiError(400, "INVALID_PARTS", reason=str(error)) from error
    return parts, note
