"""Sends sealed segments of all topics to the archive, one topic at a time, and reads them back.

The event loop decides what to send and notes what has arrived. One thread uploads and commits, and
a few others fetch segments for readers. A store that is away delays only these threads.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nsparq.archive.cache import CachedSource, SegmentCache
from nsparq.archive.restore import Restored, restore
from nsparq.archive.store import Store
from nsparq.archive.topic_archive import Pace, Replaced, Sealed, TopicArchive, latest_manifest
from nsparq.errors import ArchiveUnavailable, StartError
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.files import Files, Work
from nsparq.storage.manifest import BadManifest, Manifest, SegmentEntry, place_of
from nsparq.storage.segment_list import ARCHIVE_FILE

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.topic import Topic
    from nsparq.options import NsqdOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

SEGMENTS_AT_ONCE: Final = 4
"""Segments that one commit adds. Small, so that files can leave the disk soon."""
FETCH_THREADS: Final = 4
FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
CACHE_DIRECTORY: Final = "archive-cache"


@dataclass(slots=True)
class Upload:
    """Segments of one topic on their way into the archive. run() is called in a thread."""

    archive: TopicArchive
    files: Files
    path: Path
    """The local manifest."""
    sealed: list[Sealed]
    expired: list[SegmentEntry]
    gaps: list[tuple[int, int]]
    channels: dict[str, int]
    settings: dict[str, Any]
    pace: Pace
    collects_at_s: float | None
    """The present time, if unknown objects are to be removed."""
    manifest: Manifest | None = None
    error: Exception | None = None
    _naming: Lock = field(default_factory=Lock)
    """Held while the local manifest is opened or renamed; never while the disk syncs, because the
    event loop may wait for it."""
    _is_over: bool = False

    def end(self) -> None:
        """The topic was deleted, or nsqd stops. The directory may be another topic's or another
        run's from now on, so the thread must commit nothing more and leave the files alone."""
        with self._naming:
            self._is_over = True

    def _check(self) -> None:
        if self._is_over:
            raise ArchiveUnavailable("the topic was deleted, or nsqd stops")

    def run(self) -> None:
        try:
            entries = [self.archive.upload(one, self.pace) for one in self.sealed]
            # Only the owner of the archive may remove objects, and a commit makes this run the
            # owner.
            claims = self.collects_at_s is not None and not self.archive.is_owner
            if entries or self.expired or claims:
                manifest = self.archive.commit(
                    entries,
                    self.expired,
                    gaps=self.gaps,
                    channels=self.channels,
                    settings=self.settings,
                    check=self._check,
                )
                self._write(manifest.encode())
                self.manifest = manifest
            if self.collects_at_s is not None:
                self.archive.collect(self.collects_at_s)
        except Exception as error:
            if not isinstance(error, OSError | Replaced):
                logger.exception("archive: internal error")
            self.error = error

    def _write(self, content: bytes) -> None:
        """Replace the local manifest. Raises OSError."""
        files, temporary = self.files, self.path.with_name(self.path.name + ".tmp")
        with ExitStack() as stack:
            with self._naming:
                self._check()
                fd = stack.enter_context(files.opened(temporary))
                files.truncate(fd, 0)
                files.write(fd, [content], 0)
            files.sync(fd)
        with self._naming:
            self._check()
            files.rename(temporary, self.path)
        files.sync_names(self.path.parent)


class Archiving:
    """The archive of an nsqd: broker.broker.Archive.

    More than 20 attributes: its parts, the work under way, and what /metrics shows of it.
    """

    def __init__(
        self,
        options: NsqdOptions,
        *,
        store: Store | None = None,
        files: Files | None = None,
        fetchers: Executor | None = None,
        uploader: Executor | None = None,
        call_soon: Callable[[Work], None] | None = None,
    ) -> None:
        """Raises StartError. Tests pass executors that run at once, and `call_soon`."""
        self.store = store or Store(options.archive)
        self._options = options
        self._files = files or Files()
        self._fetchers = fetchers or ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="nsqd-archive-read")
        self._uploader = uploader or ThreadPoolExecutor(1, thread_name_prefix="nsqd-archive-send")
        self._call_soon = call_soon or self._soon_on_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        directory = options.archive_cache_path or Path(options.data_path or ".") / CACHE_DIRECTORY
        self.cache = SegmentCache(
            self.store,
            Path(directory),
            options.archive_cache_bytes,
            files=self._files,
            submit=self._submit_fetch,
            clock=lambda: self._broker.monotonic_ns() / 1e9,
        )
        self._broker: Broker
        self._writer = uuid.uuid4().hex
        self._pace = Pace(options.archive_bandwidth)
        self._archives: dict[Topic, TopicArchive] = {}
        self._waiting: dict[Topic, None] = {}
        """Topics with something to send, in the order of their turns."""
        self._running: Upload | None = None
        self._collect_at: dict[Topic, float] = {}
        self._retry_at = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._is_stopping = False
        self.error = ""
        """Why the last upload failed; empty if it did not."""
        self.restored: dict[str, Restored] = {}
        """Topics that this run has brought back from the archive."""
        self.sent_bytes = 0
        self.sent_segments = 0

    def open(self, broker: Broker) -> None:
        """Before the broker opens the data path. Raises StartError."""
        self._broker = broker
        with suppress(RuntimeError):  # a test without an event loop
            self._loop = asyncio.get_running_loop()
        try:
            self.cache.open()
        except OSError as error:
            raise StartError(f"--archive-cache-path: {error}") from error
        if self._options.restore:
            place = broker.data_path
            try:
                self.restored = restore(
                    self.store, broker.files, place.path, place.topic_directory, self._options.node_id
                )
            except OSError as error:
                raise StartError(f"--restore: {error}") from error

    def stop(self) -> None:
        """Send nothing more. A call to the store in progress ends by itself, within half a
        minute."""
        self._is_stopping = True
        if self._running is not None:
            self._running.end()
        self._pace.stopped.set()
        self._uploader.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self.cache.close()

    # for the broker

    def source_of(self, topic: str, incarnation: str) -> CachedSource:
        return CachedSource(self.cache, place_of(topic, incarnation))

    def recover(self, topic: str, incarnation: str) -> Manifest:
        return latest_manifest(self.store, topic, incarnation)

    def forget(self, topic: Topic) -> None:
        if self._running is not None and self._running.archive is self._archives.get(topic):
            self._running.end()
        self.restored.pop(topic.name, None)
        for known in (self._archives, self._waiting, self._collect_at):
            known.pop(topic, None)
        self._broker.health.warn(None, f"archive {topic}")

    def in_background(self, work: Work, then: Work) -> None:
        self._run(self._fetchers, work, then)

    def look_at(self, topic: Topic) -> None:
        """Called about once a second for topics that are used."""
        log = topic.log
        if not isinstance(log, DiskLog) or not log.settings.is_archived or topic.is_exiting:
            return
        now_s = self._broker.monotonic_ns() / 1e9
        archive = self._archives.get(topic)
        if archive is not None and archive.is_replaced:
            return
        if topic not in self._collect_at and any(segment.entry is not None for segment in log.segments):
            # Nobody may publish to it in this run, and an earlier one may have left unknown
            # objects.
            self._collect_at[topic] = now_s + self._options.archive_collect_interval
        is_due = now_s >= self._collect_at.get(topic, inf)
        if log.segments.expired or is_due or log.segments.unarchived(log.committed):
            self._waiting.setdefault(topic)
        if self._waiting:
            # If the store is away, the next round looks again.
            self._broker.upkeep.note_changed(topic)
        self._start_next(now_s)

    # uploading

    def _start_next(self, now_s: float) -> None:
        if self._running is not None or self._is_stopping or now_s < self._retry_at:
            return
        while self._waiting:
            topic = next(iter(self._waiting))
            del self._waiting[topic]
            if topic.is_exiting or not isinstance(topic.log, DiskLog):
                continue
            try:
                upload = self._prepare(topic, topic.log, now_s)
            except OSError as error:
                # Out of descriptors, or the disk fails.
                self._broker.health.warn(f"{topic}: cannot be archived: {error}", f"archive {topic}")
                continue
            self._running = upload
            self._run(self._uploader, upload.run, partial(self._done, topic, upload))
            return

    def _prepare(self, topic: Topic, log: DiskLog, now_s: float) -> Upload:
        assert topic.directory is not None
        path = topic.directory / ARCHIVE_FILE
        archive = self._archives.get(topic)
        if archive is None:
            archive = TopicArchive(
                self.store,
                self._read_local(topic, path),
                writer=self._writer,
                node=self._options.node_id,
                wall_ns=self._broker.wall_ns,
                unknown_s=self._options.archive_unknown_age,
                replaced_s=self._options.archive_collect_interval,
            )
            self._archives[topic] = archive
            self._collect_at.setdefault(topic, now_s + self._options.archive_collect_interval)
        is_due = now_s >= self._collect_at[topic]
        sealed = [Sealed.of(one) for one in log.segments.unarchived(log.committed)[:SEGMENTS_AT_ONCE]]
        expired, log.segments.expired = log.segments.expired, []
        return Upload(
            archive,
            self._broker.files,
            path,
            sealed,
            expired,
            log.gaps.ranges,
            {channel.name: channel.low() for channel in topic.channels.values() if channel.is_durable},
            topic.settings.stored(),
            self._pace,
            self._broker.wall_ns() / 1e9 if is_due else None,
        )

    def _read_local(self, topic: Topic, path: Path) -> Manifest:
        """What the log knows of its archive. If the file is missing, damaged or about another log,
        nothing: the first commit reads the archive's own manifest."""
        raw = self._broker.files.read_whole(path)
        with suppress(BadManifest):
            found = None if raw is None else Manifest.decode(raw)
            if found is not None and found.incarnation == topic.incarnation:
                return found
        return Manifest(topic=topic.name, incarnation=topic.incarnation)

    def _done(self, topic: Topic, upload: Upload) -> None:
        self._running = None
        now_s = self._broker.monotonic_ns() / 1e9
        log = topic.log
        assert isinstance(log, DiskLog)
        if upload.manifest is not None:
            self.sent_segments += len(upload.sealed)
            self.sent_bytes += sum(one.size for one in upload.sealed)
            log.segments.confirm(upload.manifest.segments)
        else:
            log.segments.expired = upload.expired + log.segments.expired
        error, self.error = upload.error, ""
        if topic.is_exiting or self._is_stopping:
            error = None
        if error is not None:
            self.error = str(error)
        if error is not None and not isinstance(error, Replaced):
            self._retry_at = now_s + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        else:
            self._backoff_s = FIRST_BACKOFF_S
            if upload.collects_at_s is not None and not topic.is_exiting:
                self._collect_at[topic] = now_s + self._options.archive_collect_interval
        if not topic.is_exiting:
            text = None if error is None else f"{topic}: cannot be archived: {error}"
            self._broker.health.warn(text, f"archive {topic}")
            # Segments may leave the disk now, or there are more to send.
            self._broker.upkeep.note_changed(topic)
            if error is None:
                self.look_at(topic)
        self._start_next(now_s)

    # threads

    def _submit_fetch(self, work: Work) -> None:
        with suppress(RuntimeError):  # nsqd stops
            self._fetchers.submit(work)

    async def fetch_in_thread(self, work: Callable[[], T]) -> T:
        """Run work that may have to wait for the archive."""
        return await asyncio.get_running_loop().run_in_executor(self._fetchers, work)

    def _run(self, executor: Executor, work: Work, then: Work) -> None:
        try:
            future: Future[None] = executor.submit(work)
        except RuntimeError:
            return  # nsqd stops

        def finish() -> None:
            error = future.exception()
            if error is not None:
                logger.error("archive: internal error", exc_info=error)
            then()

        def ended(_: object) -> None:
            if not future.cancelled():
                self._call_soon(finish)

        future.add_done_callback(ended)

    def _soon_on_loop(self, work: Work) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed: the daemon is gone
                self._loop.call_soon_threadsafe(work)

    # what operators see

    def stats_of(self, topic: Topic) -> dict[str, Any]:
        """The figures of a topic: what is archived, and what waits for it."""
        log = topic.log
        segments = log.segments if isinstance(log, DiskLog) else None
        waiting = segments.unarchived(log.end) if segments is not None else []
        archived = [segment for segment in segments or () if segment.entry is not None]
        age_s = (self._broker.age_ns() - waiting[0].last_ns) / 1e9 if waiting else 0.0
        archive, restored = self._archives.get(topic), self.restored.get(topic.name)
        return {
            "enabled": isinstance(log, DiskLog) and log.settings.is_archived,
            "segments": len(archived),
            "bytes": sum(segment.size for segment in archived),
            "first_ns": archived[0].first_ns if archived else None,
            "waiting_segments": len(waiting),
            "waiting_bytes": sum(segment.size for segment in waiting),
            "oldest_waiting_age_s": round(max(0.0, age_s), 3),
            "error": self._broker.health.warnings.get(f"archive {topic}", ""),
            "replaced": archive is not None and archive.is_replaced,
            "missing_after_ns": None if restored is None else restored.last_ns,
        }
