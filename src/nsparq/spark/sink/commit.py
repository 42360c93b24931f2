"""The driver's part of the sink: publishes a batch as one transaction, exactly once.

On several nsqd this is a two-phase commit: all nodes prepare (promise), then all commit. The first
commit is the decision. Promise and commit carry a note, new for each attempt, that names the nodes
taking part. When a driver has died and its batch is repeated, the new driver follows two rules:

1. If a node has committed, that was the decision: promises with the same note are committed, and
   everything else that is staged, also by the repetition, is dropped. A promise that is damaged or
   gone is an error.
2. If no node has committed, nothing was decided: the parts of the repetition replace what was
   promised.

So every node is asked before the first commit, and the driver waits for a node that does not
answer. An old driver that is still running is shut out: nodes are handled in the order of their
names, the first node always takes part, and it commits only if its promise still has this driver's
note. So only the driver that was the last to prepare the first node can decide.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode
from uuid import uuid4

from nsparq.errors import NsparqError
from nsparq.fetch import without_secrets
from nsparq.spark.checkpoint import CheckpointBehind, check_batch
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Backoff, Refused, Unreachable
from nsparq.spark.sink.nodes import FindAgain, SinkNode
from nsparq.spark.sink.send import StagingLost

__all__ = ["CheckpointBehind", "Coordinator", "TransactionDamaged", "check_replay"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

ABORT_S: Final = 3.0
"""Time limit for cleaning up. The repetition's commit drops what stays behind, or it expires."""
MAX_NOTE: Final = 4096

Parts = Mapping[str, int]
"""Number of messages by part."""


class TransactionDamaged(NsparqError):
    """Messages that a node had promised to publish are lost. An operator has to decide."""

    retry_helps = False


class _Overtaken(NsparqError):
    """Another driver works on the same transaction."""


class _State(NamedTuple):
    """The transaction on a node: `unknown`, `open`, `prepared`, `committed` or `damaged`."""

    state: str
    note: str
    is_decided: bool
    """Whether it is committed, or would be if it were not damaged."""


def check_replay(producer: str, sequence: int, planned: str, committed: int, note: str) -> None:
    """A committed batch may be repeated only if it was the last. Raises CheckpointBehind."""
    try:
        check_batch(f"nsqd, for producer {producer},", sequence, planned, committed, _fingerprint(note))
    except CheckpointBehind as behind:
        raise CheckpointBehind(f"{behind}, or set option producer to a name that was never used") from None


class Coordinator:
    """One transaction, and all nodes that may take part. Raises Unreachable after `retry_for`
    seconds, Refused, StagingLost, TransactionDamaged, CheckpointBehind."""

    def __init__(
        self,
        producer: str,
        sequence: int,
        nodes: Iterable[SinkNode],
        access: Access,
        retry_for: float,
        remember_s: int | None = None,
        planned: str = "",
        find_again: FindAgain | None = None,
    ) -> None:
        """`remember_s` is how long nsqd remembers a producer without further transactions.
        `planned` is the batch's fingerprint, or empty; the note includes it. `find_again` says
        where a node is that does not answer."""
        self._producer, self._sequence, self._planned = producer, sequence, planned
        self._nodes = {node.name: node for node in nodes}
        self._access = access
        self._retry_for = retry_for
        self._remember_s = remember_s
        self._find_again = find_again
        self._clients: dict[str, Client] = {}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"transaction {self._producer}/{self._sequence}"

    # for the writers

    def commit(self, parts: Mapping[str, Parts]) -> None:
        """Publish these parts, by name of the node, unless the transaction was published before."""
        try:
            states = self._states()
            if not _decided(states):
                self._agree(states, parts)
                return
        except _Overtaken as overtaken:
            if not _decided(self._states()):
                raise
            logger.warning("%s", overtaken)
        self._settle()

    def _agree(self, states: Mapping[str, _State], parts: Mapping[str, Parts]) -> None:
        """Nothing has been decided: prepare and commit."""
        if not parts:
            return
        first = min(states)
        if len(states) == 1:
            self._commit(first, self._note(parts), parts[first])
            return
        # Also nodes with nothing to publish: after a crash, all must know the decision.
        wanted: dict[str, Parts] = {**dict.fromkeys(states, {}), **parts}
        note = self._note(wanted)
        for name in sorted(wanted):
            self._prepare(name, wanted[name], note, states[name].note)
        for name in sorted(wanted):
            # The first commit decides; promises of others cannot change that.
            self._commit(name, note, None if name == first else wanted[name])

    def _note(self, parts: Iterable[str]) -> str:
        """Identifies this attempt, and names the nodes taking part if there is room."""
        owner = {"by": uuid4().hex, "planned": self._planned}
        note = json.dumps({**owner, "nodes": [[*self._nodes[name]] for name in sorted(parts)]})
        return note if len(note) <= MAX_NOTE else json.dumps(owner)

    def abort(self, *, for_good: bool) -> None:
        """Drop what is staged, unless it was decided. `for_good`: nobody repeats the batch."""
        self._retry_for = min(self._retry_for, ABORT_S)
        try:
            states = self._states()
            is_promised = any(state.state in ("prepared", "damaged") for state in states.values())
            is_decided = bool(_decided(states))
            if not is_decided and (not is_promised or for_good):
                for name, state in sorted(states.items()):
                    self._abort(name, state)
            elif is_decided and for_good:
                logger.error("%s: Spark reports the write as failed, but it is published", self)
                self._settle()
        except NsparqError as error:
            logger.warning("%s: staged messages stay until they expire: %s", self, error)

    def _settle(self) -> None:
        """A node has committed, so commit on all. Raises TransactionDamaged at the end."""
        # Ask again: now that it is decided, every node that takes part shows its promise.
        states = self._states()
        decided = _decided(states)[0]
        note = states[decided].note
        logger.warning("%s was committed before; completing it on all nodes", self)
        damage: TransactionDamaged | None = None
        for name, state in sorted(states.items()):
            if state.is_decided:
                if state.note != note:
                    logger.error("%s: its parts on %s and on %s differ", self, decided, name)
                if state.state == "damaged":
                    damage = self._damage(name, self._sequence)
            elif state.state in ("prepared", "damaged") and state.note == note:
                try:
                    self._commit(name, note)
                except TransactionDamaged as error:
                    damage = error
            else:
                # The repetition has staged this; it is not part of the decision.
                self._abort(name, state)
                if any(node.name == name for node in _named(note)):
                    damage = TransactionDamaged(
                        f"{self}: the messages that {self._nodes[name]} had promised are lost; {decided} has "
                        f"committed its part. To accept the loss: POST "
                        f"{self._url(name, 'commit', self._sequence)} with the body "
                        '{"parts": {}}'
                    )
        if damage is not None:
            raise damage

    def _damage(self, name: str, sequence: int) -> TransactionDamaged:
        return TransactionDamaged(
            f"{self}: staged messages of batch {sequence} are damaged on {self._nodes[name]}; its log says "
            f"which. To continue without them: POST {self._url(name, 'resolve', sequence)}"
        )

    def _url(self, name: str, verb: str, sequence: int) -> str:
        query = urlencode({"producer": self._producer, "sequence": sequence})
        return f"{without_secrets(self._nodes[name].url)}/transaction/{verb}?{query}"

    # nodes

    def _states(self) -> dict[str, _State]:
        """States of all nodes, and of those that only a promise names."""
        states: dict[str, _State] = {}
        while missing := [name for name in sorted(self._nodes) if name not in states]:
            for name in missing:
                state = states[name] = self._ask(name, self._state)
                for other in _named(state.note):
                    self._nodes.setdefault(other.name, other)
        return states

    def _state(self, client: Client) -> _State:
        answer = client.get("/transaction", **self._which).object()
        committed = answer.get("committed_sequence")
        if isinstance(committed, int):
            note = str(answer.get("committed_note") or "")
            check_replay(self._producer, self._sequence, self._planned, committed, note)
        state = str(answer.get("state"))
        is_decided = state == "committed" or (state == "damaged" and answer.get("decided") is True)
        return _State(state, str(answer.get("note") or ""), is_decided)

    def _prepare(self, name: str, parts: Parts, note: str, instead_of: str) -> None:
        """Prepare, unless another driver has prepared since this one asked for the state."""
        body = json.dumps({"parts": dict(parts), "note": note}).encode()

        def work(client: Client) -> None:
            try:
                client.post("/transaction/prepare", body, **self._which, promise=instead_of)
            except Refused as refused:
                # If the answer to our first request was lost, the conflict is with our own promise.
                if refused.code != "WRONG_PROMISE" or self._state(client).note != note:
                    raise

        self._ask(name, work)

    def _commit(self, name: str, note: str, parts: Parts | None = None) -> None:
        """Commit these parts or, without them, what was prepared with this note."""
        more: dict[str, str | int] = {} if self._remember_s is None else {"remember": self._remember_s}
        if parts is None:
            body = b""
            more["promise"] = note
        else:
            body = json.dumps({"parts": dict(parts), "note": note}).encode()

        def work(client: Client) -> dict[str, Any]:
            return client.post("/transaction/commit", body, **self._which, **more).object()

        # If it was committed before, either our own answer was lost, or another driver was faster.
        if self._ask(name, work).get("already_committed") and self._ask(name, self._state).note != note:
            raise _Overtaken(f"{self} was committed on {self._nodes[name]} by another driver")

    def _abort(self, name: str, state: _State) -> None:
        """Drop what is staged there, unless it was prepared or committed meanwhile."""
        if state.is_decided or state.state == "unknown":
            return
        with suppress(_Overtaken):
            self._ask(
                name,
                lambda client: client.post("/transaction/abort", b"", **self._which, promise=state.note),
            )

    @property
    def _which(self) -> dict[str, str | int]:
        return {"producer": self._producer, "sequence": self._sequence}

    def _ask(self, name: str, work: Callable[[Client], T]) -> T:
        """The answer of a node, after retries. All these requests may be sent twice."""
        backoff = Backoff(self._retry_for)
        while True:
            try:
                return work(self._client(name))
            except Refused as refused:
                if refused.code in ("ALREADY_COMMITTED", "WRONG_PROMISE"):
                    raise _Overtaken(f"{self}: another driver writes it too: {refused}") from refused
                if refused.code == "INCOMPLETE_TRANSACTION":
                    reason = refused.details.get("reason", "")
                    raise StagingLost(
                        f"{self}: {self._nodes[name]} has lost staged messages ({reason}), and has published "
                        "none of them"
                    ) from refused
                if refused.code == "DAMAGED_TRANSACTION":
                    # It may be an earlier transaction, which blocks this one.
                    raise self._damage(name, refused.details.get("sequence", self._sequence)) from refused
                if refused.status < 500 or not backoff.wait():
                    raise
                logger.warning("%s; trying again", refused)
            except Unreachable as error:
                if not backoff.wait():
                    raise Unreachable(f"{error}, for {self._retry_for:g} s (option retryFor)") from error
            if self._find_again is not None:
                self._nodes[name] = self._find_again(self._nodes[name])

    def _client(self, name: str) -> Client:
        url = self._nodes[name].url
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = Client(url, self._access)
        return client


def _decided(states: Mapping[str, _State]) -> list[str]:
    return sorted(name for name, state in states.items() if state.is_decided)


def _fingerprint(note: str) -> str:
    """Empty if the note has none: it was written by an older version, or by another program."""
    try:
        return str(json.loads(note)["planned"])
    except (ValueError, TypeError, LookupError):
        return ""


def _named(note: str) -> list[SinkNode]:
    """The nodes in a promise's note; none if another program wrote it."""
    try:
        return [SinkNode(str(name), str(url)) for name, url in json.loads(note)["nodes"]]
    except (ValueError, TypeError, LookupError):
        return []
