"""An acknowledged change is on every node that may take over, whatever is lost, late or repeated.

The simulation has nodes with lists of changes instead of disks, a network that delays and cuts, and
a coordinator whose answers may be late or lost. A seed decides everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nsparq.replication.acknowledging import Acknowledging, Fenced, Progress
from nsparq.replication.membership import Membership

NAMES = ("a", "b", "c")


class Coordinator:
    def __init__(self) -> None:
        self.membership = Membership(1, "a", {"a": ""}, {name: f"{name}:4160" for name in NAMES})
        self.version = 1

    def compare_and_set(self, version: int, wanted: Membership) -> bool:
        if version != self.version:
            return False
        # Through its form on the wire.
        self.membership, self.version = Membership.from_json(wanted.to_json()), self.version + 1
        return True


@dataclass
class Node:
    name: str
    changes: list[str] = field(default_factory=list)
    copy: str = ""
    """The id of its changes."""
    epoch: int = 0
    """The latest that it has heard of."""
    primary: Acknowledging | None = None
    version: int = 0
    """Of the record that it knows, as a primary."""


class World:
    """Nodes, their network and the coordinator. `bug` plants a mistake."""

    def __init__(self, seed: int, bug: str = "") -> None:
        self.chance = random.Random(seed)
        self.bug = bug
        self.coordinator = Coordinator()
        self.nodes = {name: Node(name) for name in NAMES}
        self.acknowledged: list[str] = []
        self.events: list[Callable[[], None]] = []
        """What may happen next, in any order."""
        self._published = 0
        self._connections: dict[tuple[str, str], int] = {}
        """Number of the connection between a primary and a follower; messages of earlier ones are
        lost."""
        self._lead(self.nodes["a"], self.coordinator.membership)

    def _lead(self, node: Node, membership: Membership) -> None:
        node.epoch, node.version = membership.epoch, self.coordinator.version
        node.primary = Acknowledging(membership, lambda wanted: self._ask(node, wanted))
        node.primary.recorded(len(node.changes))

    # the coordinator, which may be slow or away

    def _ask(self, node: Node, wanted: Membership) -> None:
        version, primary = node.version, node.primary
        is_awaited = True

        def arrive() -> None:
            if self.bug == "shrinks without compare-and-set":
                is_done = self.coordinator.compare_and_set(self.coordinator.version, wanted)
            else:
                is_done = self.coordinator.compare_and_set(version, wanted)
            found, now = self.coordinator.membership, self.coordinator.version
            self.events.append(lambda: answer(is_done, found, now))

        def answer(is_done: bool, found: Membership, now: int) -> None:
            if node.primary is primary and primary is not None and node.version == version and is_awaited:
                node.version = now
                self._answer(node, primary, is_done or found == wanted, found)

        def give_up() -> None:
            """No answer in time. The request may still be on its way."""
            nonlocal is_awaited
            if node.primary is primary and primary is not None and node.version == version:
                if self.bug == "takes silence for a refusal":
                    is_awaited = False
                    found, node.version = self.coordinator.membership, self.coordinator.version
                    self._answer(node, primary, found == wanted, found)
                else:
                    self._ask(node, wanted)

        self.events.append(arrive)
        if self.chance.random() < 0.2:
            self.events.append(give_up)
        if self.bug == "acknowledges before the coordinator answers":
            assert node.primary is not None
            node.primary.membership = wanted

    def _answer(self, node: Node, primary: Acknowledging, is_done: bool, found: Membership) -> None:
        if is_done:
            primary.set_changed()
            return
        primary.set_unchanged(found)
        if primary.is_fenced:
            node.primary = None

    # what happens

    def publish(self) -> None:
        leaders = [node for node in self.nodes.values() if node.primary is not None]
        if not leaders:
            return
        node = self.chance.choice(leaders)
        primary = node.primary
        assert primary is not None
        self._published += 1
        change = f"{node.name}{node.epoch}-{self._published}"
        node.changes.append(change)
        primary.recorded(len(node.changes))

        def done(error: Exception | None) -> None:
            if error is None:
                self.acknowledged.append(change)
            else:
                assert isinstance(error, Fenced)

        if self.bug == "acknowledges before the follower wrote":
            done(None)
        else:
            primary.when_safe(done)
        for (leader, follower), number in [*self._connections.items()]:
            if leader == node.name:
                self._send(node, self.nodes[follower], number)

    def _send(self, leader: Node, follower: Node, connection: int) -> None:
        """The leader's changes so far, and the follower's word for them."""
        epoch, changes = leader.epoch, [*leader.changes]
        place = leader.name, follower.name

        def arrive() -> None:
            if self._connections.get(place) != connection or follower.epoch != epoch or follower.primary:
                return
            if len(changes) > len(follower.changes):
                follower.changes = changes
            number = len(follower.changes)
            self.events.append(lambda: confirm(number))

        def confirm(number: int) -> None:
            if leader.primary is not None and self._connections.get(place) == connection:
                leader.primary.confirmed(follower.name, Progress(number, number))

        self.events.append(arrive)

    def connect(self) -> None:
        """A node finds a primary, by its own idea of who that is, and goes on or joins anew."""
        follower = self.chance.choice([*self.nodes.values()])
        leaders = [n for n in self.nodes.values() if n.primary is not None and n is not follower]
        if follower.primary is not None or not leaders:
            return
        leader = self.chance.choice(leaders)
        place = leader.name, follower.name
        if leader.epoch < follower.epoch or place in self._connections or leader.primary is None:
            return
        is_same = follower.changes == leader.changes[: len(follower.changes)]
        resumes = leader.epoch == follower.epoch and is_same and self.chance.random() < 0.5
        if self.bug == "does not cut the tail":
            resumes = True
        if not resumes:
            if leader.primary.may_take_over(follower.name) and self.bug != "empties a node of the set":
                return
            follower.changes, follower.copy = [], str(self.chance.random())
        self._connections[place] = connection = self.chance.randrange(1 << 30)
        follower.epoch = leader.epoch

        def joined() -> None:
            if leader.primary is None or self._connections.get(place) != connection or follower.primary:
                return
            if not resumes:
                follower.changes = [*leader.changes]
            number = len(follower.changes)
            leader.primary.caught_up(follower.name, follower.copy, Progress(number, number))
            self._send(leader, follower, connection)

        self.events.append(joined)

    def cut(self) -> None:
        """A connection ends. The primary may notice late."""
        if not self._connections:
            return
        place = self.chance.choice([*self._connections])
        del self._connections[place]
        leader = self.nodes[place[0]]

        def notice() -> None:
            if leader.primary is not None and place not in self._connections:
                leader.primary.lost(place[1])

        self.events.append(notice)

    def kill(self) -> None:
        """A primary ends for good, as far as anybody knows. It starts again as a follower."""
        leaders = [node for node in self.nodes.values() if node.primary is not None]
        if leaders and self.chance.random() < 0.5:
            node = self.chance.choice(leaders)
            node.primary = None
            for place in [place for place in self._connections if place[0] == node.name]:
                del self._connections[place]

    def elect(self) -> None:
        """A node believes that the primary is gone, rightly or not, and takes over if it may."""
        node = self.chance.choice([*self.nodes.values()])
        found, version = self.coordinator.membership, self.coordinator.version
        may = found.copies.get(node.name) == node.copy or self.bug == "elects from outside of the set"
        if node.primary is not None or not may:
            return

        def arrive() -> None:
            copy = f"{node.name}{version}"
            if node.primary is None and self.coordinator.compare_and_set(
                version, found.taken_over_by(node.name, copy)
            ):
                node.copy = copy
                self._connections = {p: n for p, n in self._connections.items() if p[1] != node.name}
                self._lead(node, self.coordinator.membership)
                self.check(node)

        self.events.append(arrive)

    def check(self, node: Node) -> None:
        lost = [change for change in self.acknowledged if change not in node.changes]
        assert not lost, f"{node.name} took over without {lost}"

    def run(self, steps: int) -> None:
        acts = (self.publish, self.publish, self.publish, self.connect, self.cut, self.kill, self.elect)
        for _ in range(steps):
            if self.events and self.chance.random() < 0.6:
                self.events.pop(self.chance.randrange(len(self.events)))()
            else:
                self.chance.choice(acts)()


def test_what_was_acknowledged_is_on_every_node_that_takes_over() -> None:
    acknowledged = takeovers = 0
    for seed in range(300):
        world = World(seed)
        world.run(400)
        acknowledged += len(world.acknowledged)
        takeovers += world.coordinator.membership.epoch - 1
    # The simulation does something.
    assert acknowledged > 5_000 and takeovers > 1_000


@pytest.mark.parametrize(
    "bug",
    [
        "acknowledges before the follower wrote",
        "acknowledges before the coordinator answers",
        "shrinks without compare-and-set",
        "takes silence for a refusal",
        "elects from outside of the set",
        "does not cut the tail",
        "empties a node of the set",
    ],
)
def test_a_planted_bug_is_found(bug: str) -> None:
    with pytest.raises(AssertionError, match="took over without"):
        for seed in range(300):
            World(seed, bug).run(400)
