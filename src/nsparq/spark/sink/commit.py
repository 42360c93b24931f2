"""The driver's side of the sink: a batch becomes one transaction, on one nsqd or several, and happens once.

On several nsqd it takes two rounds: all promise (prepare), then all commit. The first commit is the decision.
Promise and commit carry a note, made anew for each try, which names the nodes that take part. Whoever finds
a batch half done, because its driver died and the batch is being repeated, goes by two rules:

1. If a node has committed it, that was the decision: promises with the same note are committed, and whatever
   else is staged, by the repetition too, is dropped. A promise that is damaged or gone is an error.
2. If none has, nothing was decided: the repetition's own parts take the place of what was promised.

So every node is asked before the first commit, and one that does not answer is waited for. Should a driver
that was given up still be at work, it is shut out: nodes are dealt with in the order of their names, the
first always takes part, and it is committed only if its promise still has our note. Whoever was the last to
prepare it can decide, and nobody else.
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
from nsparq.spark.cluster.http_client import Access, Client, Patience, Refused, Unreachable
from nsparq.spark.sink.nodes import SinkNode
from nsparq.spark.sink.send import StagingLost

__all__ = ["CheckpointBehind", "Coordinator", "TransactionDamaged", "check_replay"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

ABORT_S: Final = 3.0
"""For cleaning up: what stays behind is dropped by the repetition's commit, or expires."""
MAX_NOTE: Final = 4096

Parts = Mapping[str, int]
"""The messages of each part."""


class TransactionDamaged(NsparqError):
    """Messages that a node had promised to publish are lost. The query waits for an operator: going on would
    call half a batch published."""

    retry_helps = False


class _Overtaken(NsparqError):
    """Somebody else does the same work. If it is done, that shows in the states of the nodes."""


class _State(NamedTuple):
    """What has become of the transaction on a node: `unknown`, `open`, `prepared`, `committed` or
    `damaged`."""

    state: str
    note: str
    is_decided: bool
    """Whether it is committed, or would be but for its damage."""


def check_replay(producer: str, sequence: int, planned: str, committed: int, note: str) -> None:
    """A batch that has been committed is repeated, which is fine if it was the last, and the same. Raises
    CheckpointBehind."""
    try:
        check_batch(f"nsqd, for producer {producer},", sequence, planned, committed, _fingerprint(note))
    except CheckpointBehind as behind:
        raise CheckpointBehind(
            f"{behind}, or set the option producer to a name that was never used"
        ) from None


class Coordinator:
    """One transaction, and all nodes that may have to do with it. Raises Unreachable when time is up,
    Refused, StagingLost, TransactionDamaged, CheckpointBehind."""

    def __init__(
        self,
        producer: str,
        sequence: int,
        nodes: Iterable[SinkNode],
        access: Access,
        retry_for: float,
        remember_s: int | None = None,
        planned: str = "",
    ) -> None:
        """`remember_s` is how long nsqd is to know of a producer that has no further transactions. `planned`
        is the batch's fingerprint, if there is one; it goes with the note."""
        self._producer, self._sequence, self._planned = producer, sequence, planned
        self._nodes = {node.name: node for node in nodes}
        self._access = access
        self._retry_for = retry_for
        self._remember_s = remember_s
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

    # what the writers ask for

    def commit(self, parts: Mapping[str, Parts]) -> None:
        """Publish these parts, by name of the node, unless the transaction has been published before."""
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
        """Nothing has been decided: promise and commit."""
        if not parts:
            return
        first = min(states)
        if len(states) == 1:
            self._commit(first, self._note(parts), parts[first])
            return
        # All of them, also those that have nothing to publish: any that is left after a crash must know.
        wanted: dict[str, Parts] = {**dict.fromkeys(states, {}), **parts}
        note = self._note(wanted)
        for name in sorted(wanted):
            self._prepare(name, wanted[name], note, states[name].note)
        for name in sorted(wanted):
            # With the first it is decided, and no promise of others can change that.
            self._commit(name, note, None if name == first else wanted[name])

    def _note(self, parts: Iterable[str]) -> str:
        """Whose promise it is, and to whom it is of interest."""
        owner = {"by": uuid4().hex, "planned": self._planned}
        note = json.dumps({**owner, "nodes": [[*self._nodes[name]] for name in sorted(parts)]})
        return note if len(note) <= MAX_NOTE else json.dumps(owner)

    def abort(self, *, for_good: bool) -> None:
        """Drop what has been staged, if it is certain that nothing has been decided. Raises nothing: see
        ABORT_S. `for_good`: nobody will repeat the batch and finish what has been begun."""
        self._retry_for = min(self._retry_for, ABORT_S)
        try:
            states = self._states()
            is_promised = any(state.state in ("prepared", "damaged") for state in states.values())
            is_decided = bool(_decided(states))
            if not is_decided and (not is_promised or for_good):
                for name, state in sorted(states.items()):
                    self._abort(name, state)
            elif is_decided and for_good:
                logger.error("%s: the write is reported as failed, but is published all the same", self)
                self._settle()
        except NsparqError as error:
            logger.warning("%s: what has been staged stays until it expires: %s", self, error)

    def _settle(self) -> None:
        """It has been committed somewhere: everywhere, then. Raises TransactionDamaged once all has been done
        that can be done."""
        # Looked at anew, now that it is decided: nobody who takes part can seem not to have promised yet.
        states = self._states()
        decided = _decided(states)[0]
        note = states[decided].note
        logger.warning("%s has been committed before; finishing that", self)
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
                # Not a part of what was decided: the repetition has staged it.
                self._abort(name, state)
                if any(node.name == name for node in _named(note)):
                    damage = TransactionDamaged(
                        f"{self}: what {self._nodes[name]} had promised is gone, and lost; {decided} has "
                        f"committed its share. To accept that: POST "
                        f"{self._url(name, 'commit', self._sequence)} with the body "
                        '{"parts": {}}'
                    )
        if damage is not None:
            raise damage

    def _damage(self, name: str, sequence: int) -> TransactionDamaged:
        return TransactionDamaged(
            f"{self}: staged messages of batch {sequence} are damaged on {self._nodes[name]}, whose log says "
            f"which. To go on without them: POST {self._url(name, 'resolve', sequence)}"
        )

    def _url(self, name: str, verb: str, sequence: int) -> str:
        query = urlencode({"producer": self._producer, "sequence": sequence})
        return f"{without_secrets(self._nodes[name].url)}/transaction/{verb}?{query}"

    # nodes

    def _states(self) -> dict[str, _State]:
        """Of all nodes, and of those that a promise names: they may have gone from nsqlookupd since."""
        states: dict[str, _State] = {}
        while missing := [name for name in sorted(self._nodes) if name not in states]:
            for name in missing:
                state = states[name] = self._ask(name, self._state)
                for other in _named(state.note):
                    self._nodes.setdefault(other.name, other)
        return states

    def _state(self, client: Client) -> _State:
        answer = self._object(client.get("/transaction", **self._which))
        committed = answer.get("committed_sequence")
        if isinstance(committed, int):
            note = str(answer.get("committed_note") or "")
            check_replay(self._producer, self._sequence, self._planned, committed, note)
        state = str(answer.get("state"))
        is_decided = state == "committed" or (state == "damaged" and answer.get("decided") is True)
        return _State(state, str(answer.get("note") or ""), is_decided)

    def _prepare(self, name: str, parts: Parts, note: str, instead_of: str) -> None:
        """Unless somebody else has promised something since we looked."""
        body = json.dumps({"parts": dict(parts), "note": note}).encode()

        def work(client: Client) -> None:
            try:
                client.post("/transaction/prepare", body, **self._which, promise=instead_of)
            except Refused as refused:
                # Its answer may have been lost, and then it is our own promise that is in the way.
                if refused.code != "WRONG_PROMISE" or self._state(client).note != note:
                    raise

        self._ask(name, work)

    def _commit(self, name: str, note: str, parts: Parts | None = None) -> None:
        """These parts, or what has been prepared under this note."""
        more: dict[str, str | int] = {} if self._remember_s is None else {"remember": self._remember_s}
        if parts is None:
            body = b""
            more["promise"] = note
        else:
            body = json.dumps({"parts": dict(parts), "note": note}).encode()

        def work(client: Client) -> dict[str, Any]:
            return self._object(client.post("/transaction/commit", body, **self._which, **more))

        # Either our answer was lost, and it was us, or somebody was faster.
        if self._ask(name, work).get("already_committed") and self._ask(name, self._state).note != note:
            raise _Overtaken(f"{self} has been committed on {self._nodes[name]} by another driver")

    def _abort(self, name: str, state: _State) -> None:
        """Drop what is staged there, unless more has come of it meanwhile."""
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
        """What a node answers, however long it is away, within reason. All that is asked here may be asked
        twice."""
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(self._nodes[name].url, self._access)
        patience = Patience(self._retry_for)
        while True:
            try:
                return work(client)
            except Refused as refused:
                if refused.code in ("ALREADY_COMMITTED", "WRONG_PROMISE"):
                    raise _Overtaken(f"{self}: another driver is at work: {refused}") from refused
                if refused.code == "INCOMPLETE_TRANSACTION":
                    reason = refused.details.get("reason", "")
                    raise StagingLost(
                        f"{self}: {self._nodes[name]} has lost what was staged ({reason}); nothing of "
                        "it has been published there"
                    ) from refused
                if refused.code == "DAMAGED_TRANSACTION":
                    # It may be an earlier one, which keeps this one waiting.
                    raise self._damage(name, refused.details.get("sequence", self._sequence)) from refused
                if refused.status < 500 or not patience.wait():
                    raise
                logger.warning("%s; trying again", refused)
            except Unreachable as error:
                if not patience.wait():
                    raise Unreachable(f"{error}, for {self._retry_for:g} s") from error

    def _object(self, answer: Any) -> dict[str, Any]:
        try:
            content = answer.json()
        except ValueError as error:
            raise Unreachable(f"not what nsqd would answer: {error}") from error
        if not isinstance(content, dict):
            raise Unreachable("not what nsqd would answer")
        return content


def _decided(states: Mapping[str, _State]) -> list[str]:
    return sorted(name for name, state in states.items() if state.is_decided)


def _fingerprint(note: str) -> str:
    """Empty if the note has none: it is of before, or not one of ours."""
    try:
        return str(json.loads(note)["planned"])
    except (ValueError, TypeError, LookupError):
        return ""


def _named(note: str) -> list[SinkNode]:
    """The nodes in a promise's note; none, if it is not one of ours."""
    try:
        return [SinkNode(str(name), str(url)) for name, url in json.loads(note)["nodes"]]
    except (ValueError, TypeError, LookupError):
        return []
