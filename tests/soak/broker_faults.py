"""nsqd under mixed load, killed, stopped and starved again and again: what is lost, what comes
twice?

    python -m tests.soak.broker_faults --minutes 30
    python -m tests.soak.broker_faults --trials 5 --seed 7 --directory /tmp/run

Publishers send by PUB, MPUB, DPUB, HTTP and transactions. Consumers finish, requeue, ignore and
leave. Others come and go on an ephemeral channel, and somebody pauses and seeks. A trial is one
fault: SIGKILL, SIGTERM, SIGKILL while it starts, no room in its files, no descriptors. Each start
has another node id. The run ends by itself and prints a table. Its exit status is 1 if an
acknowledged message is lost, or if one comes twice that must not.

The channel `audit` has no consumer until the end. It must then hold each message once. On the
channel `work` a message may come again after its FIN only if a crash came before the next
checkpoint of the channel.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.faults.load import LOST, Batch, LonePublisher, Publisher, Worker, await_checkpoint, drain
from tests.soak.support import clock, table
from tests.support import (
    ERROR,
    RESPONSE,
    BrokerDied,
    BrokerProcess,
    ConnectionClosed,
    RawConnection,
    multi,
    wait_until,
)

TOPIC = "t"
AUDIT, WORK, REPLAYED, SIDE = "audit", "work", "replayed", "side#ephemeral"
FAULTS = ("SIGKILL", "SIGTERM", "SIGKILL while starting", "no room in files", "no descriptors")
SAID_EVERY_S = 5.0
GONE = (*LOST, BrokerDied, NotImplementedError, ValueError)
"""Errors that a client of a restarting daemon may get."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    trials: int = 0
    """Least number of trials."""
    seconds: float = 0.0
    """Least duration."""
    seed: int = 0
    faults: tuple[str, ...] = FAULTS
    durability: str = "os"
    waits_s: tuple[float, float] = (0.0, 1.0)
    """Time without faults before the next one, after messages were acknowledged."""


@dataclass
class Report:
    trials: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    refused: int = 0
    unanswered: int = 0
    refused_and_there: int = 0
    """Refused, but in the log: an error of a damaged disk does not tell which."""
    lost: int = 0
    doubled: int = 0
    """Twice on the channel that had no consumer."""
    again: int = 0
    """Came again after FIN because a crash came before the next checkpoint."""
    doubled_after_fin: int = 0
    """Came again after FIN for another reason."""
    split: int = 0
    """Unanswered batches of which only a part is in the log."""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.doubled_after_fin or self.split)

    def __str__(self) -> str:
        rows: list[tuple[str, Any]] = [(f"trials: {name}", count) for name, count in self.trials.items()]
        return table(
            [
                *rows,
                ("trials", self.trials.total()),
                ("acknowledged", self.acknowledged),
                ("lost", self.lost),
                ("doubled", self.doubled + self.doubled_after_fin),
                ("again after a crash, as allowed", self.again),
                ("half of a batch", self.split),
                ("refused", self.refused),
                ("refused, and there all the same", self.refused_and_there),
                ("batches without an answer", self.unanswered),
                ("seconds", round(self.seconds)),
            ]
        )


# Publishers; each body is unique


class Deferring(Publisher):
    """DPUBs, due at once to half a second later."""

    def work(self, connection: RawConnection) -> None:
        while not self.stopping.wait(0.005):
            batch = self.next_batch()[:1]
            self.unanswered.append(batch)
            connection.command("DPUB", self.topic, self.random.choice([0, 50, 500]), body=batch[0])
            frame = connection.read_frame()
            self.unanswered.pop()
            if frame == (RESPONSE, b"OK"):
                self.acknowledged.append(batch)
            else:
                assert frame.type == ERROR
                self.failed.append((frame.data, batch))


class Posting(Publisher):
    """/pub and /mpub of the HTTP API."""

    def work(self, connection: RawConnection) -> None:
        while not self.stopping.wait(0.005):
            batch = self.next_batch()
            self.unanswered.append(batch)
            path = "/pub?" if len(batch) == 1 else "/mpub?binary=true&"
            body = batch[0] if len(batch) == 1 else multi(batch)
            answer = self.broker.request("POST", f"{path}topic={self.topic}", body)
            self.unanswered.pop()
            if answer.status == 200:
                self.acknowledged.append(batch)
            else:
                self.failed.append((answer.body, batch))


class Committing(Publisher):
    """Transactions; each request is repeated until it is answered."""

    def work(self, connection: RawConnection) -> None:
        while not self.stopping.is_set():
            batch = self.next_batch()
            parts = 0
            while not self._commit(batch, parts):
                parts += 1
                if self.stopping.wait(0.02):
                    self.unanswered.append(batch)
                    return
            self.acknowledged.append(batch)

    def _commit(self, batch: Batch, number: int) -> bool:
        which = {"producer": f"producer-{self.number}", "sequence": len(self.acknowledged)}
        part = f"part-{number}"
        body = struct.pack(">I", len(batch)) + b"".join(struct.pack(">I", len(one)) + one for one in batch)
        try:
            query = urlencode({**which, "part": part, "topic": self.topic})
            staged = self.broker.request("POST", f"/transaction/stage?{query}", body)
            if staged.status == 200:
                wanted = b'{"parts": {"%b": %d}}' % (part.encode(), len(batch))
                done = self.broker.request("POST", f"/transaction/commit?{urlencode(which)}", wanted)
                return done.status == 200 or b"ALREADY_COMMITTED" in done.body
            return b"ALREADY_COMMITTED" in staged.body
        except GONE:
            return False


# Consumers


class Working(Worker):
    """Finishes most messages, requeues some, lets some time out, and sometimes disconnects."""

    def __init__(self, run: Run, number: int) -> None:
        super().__init__(run.broker, run.gate)
        self.run_ = run
        self.random = random.Random(number)

    def work(self, connection: RawConnection) -> None:
        connection.identify(msg_timeout=2000)
        connection.sub(TOPIC, WORK, rdy=self.random.choice([1, 50, 200]))
        finished: list[bytes] = []
        for _ in range(self.random.randint(200, 3000)):
            if self.stopping.is_set():
                break
            try:
                message = connection.read_message(0.1)
            except TimeoutError:
                continue
            self.run_.deliver(message.body)
            choice = self.random.random()
            if choice < 0.02:
                connection.req(message.id, self.random.choice([0, 100]))
            elif choice > 0.002 + 0.02:
                connection.fin(message.id)
                finished.append(message.body)
            if len(finished) >= 100:
                self._confirm(connection, finished)
        self._confirm(connection, finished)

    def _confirm(self, connection: RawConnection, finished: list[bytes]) -> None:
        """nsqd has heard these FINs; before that a crash may cost them. One that comes after its
        message has timed out is refused, and then this connection is given up without a claim."""
        asked_ns = time.time_ns()
        connection.barrier()
        if any(frame.type == ERROR for frame in connection._frames):
            raise ConnectionClosed
        self.run_.finished.update(dict.fromkeys(finished, (asked_ns, time.time_ns())))
        finished.clear()


class Reading(Worker):
    """Finishes everything on a channel."""

    def __init__(self, run: Run, channel: str, visits: int = 1 << 60) -> None:
        super().__init__(run.broker, run.gate)
        self.channel = channel
        self.visits = visits
        """It reconnects after so many messages."""

    def work(self, connection: RawConnection) -> None:
        connection.identify()
        connection.sub(TOPIC, self.channel, rdy=200)
        for _ in range(self.visits):
            if self.stopping.is_set():
                return
            with suppress(TimeoutError):
                message = connection.read_message(0.1)
                connection.fin(message.id)


class Managing(Worker):
    """Pauses, seeks and peeks, like an operator."""

    def work(self, connection: RawConnection) -> None:
        chance = random.Random()
        while not self.stopping.wait(0.2):
            what = chance.choice(["pause", "pause", "seek", "stats"])
            if what == "pause":
                channel = chance.choice([WORK, REPLAYED, ""])
                self.broker.control("pause", TOPIC, channel)
                self.stopping.wait(0.1)
                self.broker.control("unpause", TOPIC, channel)
            elif what == "seek":
                query = urlencode({"topic": TOPIC, "channel": REPLAYED, "time": time.time() - 1})
                self.broker.request("POST", f"/channel/seek?{query}")
            else:
                self.broker.stats()


@dataclass(frozen=True)
class Crash:
    at_ns: int
    noted_ns: int
    """Time of the last checkpoint of the channel `work`."""


class Run:
    """One campaign, from the first message to the report."""

    def __init__(self, options: Options, directory: Path, say: Say) -> None:
        self.options = options
        self.directory = directory
        self.say = say
        self.chance = random.Random(options.seed)
        self.report = Report()
        self.gate = threading.Event()
        self.delivered: set[bytes] = set()
        self.finished: dict[bytes, tuple[int, int]] = {}
        """When a worker asked whether nsqd has heard the FIN, and when it knew. On a busy machine a
        crash may come between the answer and the second time."""
        self.crashes: list[Crash] = []
        self._lock = threading.Lock()

    def run(self) -> Report:
        began = time.monotonic()
        with ExitStack() as stack:
            self.broker = stack.enter_context(self._start())
            for channel in (AUDIT, WORK, REPLAYED):
                self.broker.control("create", TOPIC, channel)
            kinds = (Publisher, Publisher, LonePublisher, LonePublisher, Deferring, Posting, Committing)
            self.publishers = [
                kind(self.broker, self.gate, TOPIC, number) for number, kind in enumerate(kinds)
            ]
            readers = [Reading(self, REPLAYED), Reading(self, SIDE, 50)]
            workers = [Working(self, number) for number in range(3)]
            managing = Managing(self.broker, self.gate)
            self.gate.set()
            for thread in (*self.publishers, *workers, *readers, managing):
                thread.start()
                stack.callback(thread.stop)
            self._trials(began)
            managing.stop()
            for publisher in self.publishers:
                publisher.stop()
            self._unpause()
            acknowledged = self._acknowledged()
            while missing := len(acknowledged - self.delivered):
                wait_until(
                    lambda missing=missing: len(acknowledged - self.delivered) < missing,
                    interval=0.1,
                    what=f"{missing} more messages reach a worker",
                )
            self._judge(acknowledged, drain(self.broker, TOPIC, AUDIT, quiet=1.0))
        self.report.seconds = time.monotonic() - began
        return self.report

    def deliver(self, body: bytes) -> None:
        """A worker received this message."""
        with self._lock:
            finished = self.finished.pop(body, None)
            if finished is None:
                self.delivered.add(body)
            elif any(crash.noted_ns <= finished[1] and finished[0] <= crash.at_ns for crash in self.crashes):
                self.report.again += 1
            else:
                self.report.doubled_after_fin += 1

    # trials

    def _start(self) -> BrokerProcess:
        return BrokerProcess(
            self.directory,
            durability=self.options.durability,
            node_id=self.chance.randrange(1024),
            max_bytes_per_file=1 << 20,
            checkpoint_interval=0.2,
        )

    def _restart(self) -> None:
        self.broker.flags["node_id"] = self.chance.randrange(1024)
        self.broker.start()
        self.gate.set()

    def _trials(self, began: float) -> None:
        said = began
        while (
            self.report.trials.total() < self.options.trials
            or time.monotonic() < began + self.options.seconds
        ):
            goal = len(self._acknowledged()) + 200
            wait_until(lambda goal=goal: len(self._acknowledged()) >= goal, what="messages are acknowledged")
            time.sleep(self.chance.uniform(*self.options.waits_s))
            fault = self.chance.choice(self.options.faults)
            if self.report.trials.total() < len(self.options.faults):
                fault = self.options.faults[self.report.trials.total()]
            self.report.trials[fault] += 1
            self._do(fault)
            if time.monotonic() > said + SAID_EVERY_S:
                said = time.monotonic()
                trials, count = self.report.trials.total(), len(self._acknowledged())
                doubled = self.report.doubled_after_fin
                self.say(f"{clock()} {trials} trials, {count:,} acknowledged, {doubled} doubled")

    def _do(self, fault: str) -> None:
        if fault == "SIGTERM":
            self.gate.clear()
            self.broker.terminate()
            self._restart()
        elif fault == "no room in files":
            newest = max(self._topic_directory().glob("*.log"))
            self._starve(resource.RLIMIT_FSIZE, newest.stat().st_size + self.chance.randrange(1, 4096))
        elif fault == "no descriptors":
            self._starve(resource.RLIMIT_NOFILE, len(list(Path(f"/proc/{self.broker.pid}/fd").iterdir())))
        else:
            self._kill()
            if fault == "SIGKILL while starting":
                process = self.broker.launch()
                time.sleep(self.chance.uniform(0, 0.5))
                process.kill()
                process.wait()
            self._restart()

    def _kill(self) -> None:
        self.gate.clear()
        self.broker.kill()
        state = await_checkpoint(self.broker, WORK, lambda state: True, TOPIC)
        self.crashes.append(Crash(time.time_ns(), state.written_ns))

    def _topic_directory(self) -> Path:
        return self.directory / "topics" / f"{TOPIC}.topic"

    def _starve(self, limit: int, room: int) -> None:
        """Lower a resource limit for a moment; nsqd must recover by itself."""
        soft, hard = resource.prlimit(self.broker.pid, limit)
        resource.prlimit(self.broker.pid, limit, (room, hard))
        time.sleep(self.chance.uniform(0.2, 1.0))
        resource.prlimit(self.broker.pid, limit, (soft, hard))

    # the end

    def _unpause(self) -> None:
        for channel in ("", WORK, REPLAYED):
            self.broker.control("unpause", TOPIC, channel)

    def _acknowledged(self) -> set[bytes]:
        return {body for each in self.publishers for batch in tuple(each.acknowledged) for body in batch}

    def _judge(self, acknowledged: set[bytes], audited: list[bytes]) -> None:
        there = set(audited)
        unanswered = [batch for each in self.publishers for batch in each.unanswered]
        failed = [batch for each in self.publishers for _, batch in each.failed]
        report = self.report
        report.acknowledged = len(acknowledged)
        report.lost = len(acknowledged - there)
        report.doubled = len(audited) - len(there)
        report.unanswered = len(unanswered)
        report.refused = sum(map(len, failed))
        report.refused_and_there = sum(body in there for batch in failed for body in batch)
        report.split = sum(len({body in there for body in batch}) == 2 for batch in (*unanswered, *failed))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.broker_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=0.0, metavar="N", help="at least")
    parser.add_argument("--trials", type=int, default=10, metavar="N", help="at least (%(default)s)")
    parser.add_argument("--durability", choices=("os", "fsync"), default="os")
    parser.add_argument("--faults", metavar="LIST", help=f"of: {', '.join(FAULTS)}; default: all")
    parser.add_argument("--seed", type=int, help="of the random choices")
    parser.add_argument("--directory", type=Path, help="the data path, kept afterwards")
    given = parser.parse_args(arguments)
    faults = tuple(name.strip() for name in given.faults.split(",")) if given.faults else FAULTS
    if not set(FAULTS).issuperset(faults):
        parser.error(f"--faults: there are {', '.join(FAULTS)}")
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    options = Options(
        trials=given.trials, seconds=given.minutes * 60, seed=seed, faults=faults, durability=given.durability
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    say(f"seed {seed}")
    with ExitStack() as stack:
        directory = given.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(exist_ok=True)
        report = Run(options, directory, say).run()
    say(str(report))
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
