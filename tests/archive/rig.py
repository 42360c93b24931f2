"""A broker with an archive, in one thread: uploads and fetches happen at once.

rig = ArchiveRig(tmp_path / "data", store=LocalStore(tmp_path / "store"), archive_local_bytes=5_000)
rig.fill(50)                            # publishes, and lets upkeep archive and remove
rig.store.is_away = True                # every call to the store fails
rig.store.kill_at(3)                    # the third call from now on raises Killed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from nsparq.archive.store import Store, StoredObject
from nsparq.broker.broker import Broker, run_inline
from nsparq.errors import ArchiveUnavailable
from nsparq.server.archiving import Archiving
from nsparq.storage.disk_log import DiskLog
from tests.broker.rig import Rig

CALLS = ("put_new", "put", "delete", "get", "read", "size", "list", "directories")


class Killed(BaseException):
    """The process ends here, as with kill -9."""


class Inline(Executor):
    """Runs everything at once, in the thread of the caller."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Held(Executor):
    """Keeps work until the test runs it."""

    def __init__(self) -> None:
        self._works: list[Callable[[], None]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._works.append(lambda: future.set_result(work(*args, **kwargs)))
        return future

    def run(self) -> int:
        """Run the works so far. Gives their number."""
        works, self._works = self._works, []
        for work in works:
            work()
        return len(works)


class FaultyStore(Store):
    """A store that can be away, and in which a call can kill the process."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_away = False
        self.calls: list[str] = []
        self._kill_at = 0
        self._kills_after = False

    @classmethod
    def local(cls, directory: Path) -> FaultyStore:
        return cls(directory.as_uri())

    def kill_at(self, number: int, *, after: bool = False) -> None:
        """Kill at the call with this number from now on, before it happens or after it."""
        self.calls.clear()
        self._kill_at, self._kills_after = number, after

    def _around(self, name: str, call: Callable[[], Any]) -> Any:
        self.calls.append(name)
        if self.is_away:
            raise ArchiveUnavailable("the store is away")
        is_last = len(self.calls) == self._kill_at
        if is_last and not self._kills_after:
            raise Killed
        result = call()
        if is_last:
            raise Killed
        return result

    def put_new(self, key: str, data: bytes) -> bool:
        return bool(self._around("put_new", lambda: Store.put_new(self, key, data)))

    def put(self, key: str, parts: Iterable[bytes]) -> None:
        self._around("put", lambda: Store.put(self, key, parts))

    def delete(self, keys: Any) -> None:
        self._around("delete", lambda: Store.delete(self, keys))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._around("get", lambda: Store.get(self, key))
        return found

    def read(self, key: str, start: int, length: int) -> memoryview:
        return memoryview(self._around("read", lambda: Store.read(self, key, start, length)))

    def size(self, key: str) -> int | None:
        found: int | None = self._around("size", lambda: Store.size(self, key))
        return found

    def _sync(self, key: str) -> None:
        """Without the real fsyncs, which only cost time here."""

    def list(self, prefix: str, after: str | None = None) -> Iterator[StoredObject]:
        return iter(self._around("list", lambda: [*Store.list(self, prefix, after)]))


class ArchiveRig(Rig):
    def __init__(
        self,
        data_path: Path,
        *,
        store: FaultyStore,
        uploader: Executor | None = None,
        **flags: Any,
    ) -> None:
        self.store = store
        self._uploader = uploader or Inline()
        self.archiving: Archiving
        data_path.mkdir(exist_ok=True)
        settings: dict[str, Any] = {"max_bytes_per_file": 1000, "mem_queue_size": 1, "archive": store.url}
        super().__init__(data_path, **(settings | flags))

    def start(self) -> None:
        self.archiving = Archiving(
            self.options,
            store=self.store,
            files=self.files,
            fetchers=Inline(),
            uploader=self._uploader,
            call_soon=lambda work: work(),
        )
        self.broker = Broker(
            self.options,
            files=self.files,
            wall_ns=self.clock.wall,
            monotonic_ns=self.clock,
            wake=self._wake,
            archive=self.archiving,
            background=self.background or run_inline,
        )
        self.archiving.open(self.broker)
        self.broker.open()

    @property
    def log(self) -> DiskLog:
        log = self.topic().log
        assert isinstance(log, DiskLog)
        return log

    def fill(self, count: int, start: int = 0, topic: str = "t") -> None:
        """Publish messages with the numbers as bodies, of 100 bytes; nine fill a segment."""
        for number in range(start, start + count):
            self.publish(topic, b"%d" % number + b"." * 90)
        self.settle()

    def settle(self, rounds: int = 4) -> None:
        """Sync, archive, and let files leave the disk."""
        for _ in range(rounds):
            self.clock.advance(3)
            self.maintain()
            self.turn()

    def local_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.data_path.glob("topics/*.topic/*.log"))

    def objects(self, suffix: str = "") -> list[str]:
        self.store.is_away, away = False, self.store.is_away
        keys = [found.key for found in Store.list(self.store, "topics/")]
        self.store.is_away = away
        return [key for key in keys if key.endswith(suffix)]


def numbers(bodies: Iterable[bytes]) -> list[int]:
    return [int(body.partition(b".")[0]) for body in bodies]
