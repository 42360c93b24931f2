"""`nsq_to_file`: writes the messages of topics to files. A message is finished once it is on disk.

Each topic has a consumer, a file, and a task between them: messages are written as they arrive, and
synced and finished together. Everything that touches the disk runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

from nsparq.client import ClientError, Config, Message
from nsparq.daemon_options import log_level_option, log_prefix_option
from nsparq.option_table import BOOL, DURATION, INT, STRING, STRINGS, OptionError, opt
from nsparq.tools.cluster import AskFailed, Cluster
from nsparq.tools.json_lines import to_line
from nsparq.tools.options import (
    SourceOptions,
    ToolTable,
    check_topics,
    connect_timeout_option,
    request_timeout_option,
)
from nsparq.tools.run import GRACE_S, Ending, on_signal, run_tool, unless_ended
from nsparq.tools.topic_files import REV, FileNames, FileRules, TopicFiles, make_directories

__all__ = ["TABLE", "NsqToFileOptions", "main"]

logger = logging.getLogger(__name__)

PROGRAM: Final = "nsq_to_file"


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqToFileOptions(SourceOptions):
    program = PROGRAM
    # An archive must not give up messages: it would lose them.
    max_attempts = 0

    topic: tuple[str, ...] = opt((), "topic to archive", STRINGS, heading="What to archive")
    topic_pattern: str = opt(
        "",
        "regular expression that matches a part of the names of the topics to archive, among those given or, "
        "if none are given, those that the nsqlookupds know",
        STRING,
    )
    topic_refresh: float = opt(
        60.0, "time between two searches for new topics, if none are given", DURATION, bound="positive"
    )
    channel: str = opt("nsq_to_file", "channel to consume from", STRING)
    http_client_connect_timeout: float = connect_timeout_option()
    http_client_request_timeout: float = request_timeout_option(5.0)

    output_dir: str = opt("/tmp", "directory for complete files", STRING, heading="Files")
    work_dir: str = opt(
        "",
        "directory for files that are being written, on the same file system",
        STRING,
        default_text="the output directory",
    )
    filename_format: str = opt(
        f"<TOPIC>.<HOST>{REV}.<DATETIME>.log",
        f"names of files, with the placeholders `<TOPIC>`, `<HOST>`, `<PID>`, `<DATETIME>` and `{REV}`, a "
        "number that grows when the file already exists",
        STRING,
    )
    datetime_format: str = opt(
        "%Y-%m-%d_%H", "format of `<DATETIME>`, with the codes of strftime; local time", STRING
    )
    host_identifier: str = opt(
        "",
        "value of `<HOST>`; it may contain `<SHORT_HOST>` and `<HOSTNAME>`",
        STRING,
        default_text="the hostname up to its first dot",
    )
    json_lines: bool = opt(
        False,
        "write each message as a JSON object with `timestamp`, `headers` and `body`, or `body_base64` if it "
        "is not UTF-8; `to_nsq --json-lines` reads them",
        BOOL,
    )
    gzip: bool = opt(False, "compress the files", BOOL)
    gzip_level: int = opt(6, "level of compression, from 1 (fast) to 9 (small)", INT)
    skip_empty_files: bool = opt(False, "write no file for a period without messages", BOOL)
    rotate_size: int = opt(
        0, "start a new file after this many bytes; 0: no limit", INT, bound="not negative"
    )
    rotate_interval: float = opt(
        0.0,
        "start a new file after this time; 0: only when `<DATETIME>` changes",
        DURATION,
        bound="not negative",
    )
    sync_interval: float = opt(
        30.0,
        "longest time until messages are synced and finished; they are synced sooner when --max-in-flight "
        "messages have arrived",
        DURATION,
        bound="positive",
    )

    log_level: str = log_level_option()
    log_prefix: str = log_prefix_option(PROGRAM)

    def consumer_config(self) -> Config:
        return replace(SourceOptions.consumer_config(self), headers=self.json_lines)

    def validate(self) -> None:
        check_topics(self.topic, self.channel)
        SourceOptions.validate(self)
        if not 1 <= self.gzip_level <= 9:
            raise OptionError(f"invalid --gzip-level value ({self.gzip_level}), should be 1-9")
        if not self.topic and not self.topic_pattern:
            raise OptionError("--topic or --topic-pattern required")
        if not self.topic and not self.lookupd_http_address:
            raise OptionError("--lookupd-http-address must be specified when no --topic specified")
        try:
            pattern = re.compile(self.topic_pattern)
        except re.error as error:
            raise OptionError(f"--topic-pattern {self.topic_pattern}: {error}") from None
        if self.topic and not any(map(pattern.search, self.topic)):
            raise OptionError("--topic-pattern matches none of the given topics")
        if self.rules().need_revisions and REV not in self.filename_format:
            raise OptionError(f"missing {REV} in --filename-format when gzip, rotation, or work dir enabled")
        if self.filename_format.count(REV) > 1:
            raise OptionError(f"--filename-format has {REV} more than once")

    def rules(self) -> FileRules:
        output = Path(self.output_dir).resolve()
        return FileRules(
            output_dir=output,
            work_dir=Path(self.work_dir).resolve() if self.work_dir else output,
            gzip_level=self.gzip_level if self.gzip else 0,
            rotate_size=self.rotate_size,
            rotate_interval=self.rotate_interval,
            skip_empty_files=self.skip_empty_files,
        )

    def names(self, topic: str) -> FileNames:
        hostname = socket.gethostname()
        short = hostname.partition(".")[0]
        host = self.host_identifier.replace("<SHORT_HOST>", short).replace("<HOSTNAME>", hostname)
        return FileNames(
            self.filename_format,
            self.datetime_format,
            topic=topic,
            host=host or short,
            is_gzip=self.gzip,
            has_revisions=self.rules().need_revisions,
        )


TABLE: Final = ToolTable(
    PROGRAM,
    NsqToFileOptions,
    command="to-file",
    about="""
Archives topics in files: one message per line, by default a new file every hour, optionally
compressed. A message is finished only when it is safely on disk, so a crash loses nothing; the
last messages may then be written twice. SIGHUP closes the current files and starts new ones.
""",
    examples=(
        "nsq_to_file --topic=orders --output-dir=/data/nsq --nsqd-tcp-address=127.0.0.1:4150",
        "nsq_to_file --topic-pattern='^shop' --output-dir=/data/nsq --work-dir=/data/nsq/.work --gzip \\",
        "            --rotate-size=100000000 --lookupd-http-address=127.0.0.1:4161",
        "nsq_to_file --topic=orders --filename-format='<TOPIC>/<DATETIME>.log' \\",
        "            --datetime-format=%Y/%m/%d --nsqd-tcp-address=127.0.0.1:4150",
    ),
)


class Archive:
    """Writes the messages of one topic to its files."""

    def __init__(self, topic: str, options: NsqToFileOptions) -> None:
        """Raises ValueError if the topic's name cannot be part of a file name."""
        self._nsqd = options.nsqd_tcp_address
        self._batch_size, self._interval = options.max_in_flight, options.sync_interval
        self._files = TopicFiles(options.rules(), options.names(topic))
        self._line: Callable[[Message], bytes] = to_line if options.json_lines else attrgetter("body")
        self._consumer = options.consumer(topic, options.channel, self._collect)
        self._arrived: list[Message] = []
        """Messages not yet written."""
        self._written: list[Message] = []
        """Messages not yet synced, and so not finished."""
        self._wake = asyncio.Event()
        self._must_close = False
        self._must_stop = False

    async def _collect(self, message: Message) -> None:
        message.auto_response = False
        self._arrived.append(message)
        self._wake.set()

    def close_file(self) -> None:
        """Sync, close and move the file; the next message opens another."""
        self._must_close = True
        self._wake.set()

    def stop(self) -> None:
        self._must_stop = True
        self._wake.set()

    async def run(self, ending: Ending) -> None:
        """Run until stop() is called or something fails."""
        stopping: asyncio.Task[None] | None = None
        try:
            await asyncio.to_thread(self._files.recover)
            await unless_ended(ending, self._connect())
            tick_at = asyncio.get_running_loop().time() + self._interval
            while stopping is None or not stopping.done():
                is_tick = not await self._woken(tick_at)
                if is_tick:
                    tick_at += self._interval
                if self._must_stop and stopping is None:
                    # Messages that arrive before all connections are closed are still written and
                    # finished.
                    stopping = asyncio.create_task(self._consumer.stop(GRACE_S))
                    stopping.add_done_callback(lambda _: self._wake.set())
                await self._store(is_tick=is_tick, is_stopping=stopping is not None)
            await asyncio.to_thread(self._files.close)
        except (OSError, ClientError) as error:
            ending.fail("%s: %s", self._consumer, error)
        except Exception:
            logger.exception("%s: unexpected error", self._consumer)
            ending.fail("%s: stopped after an unexpected error", self._consumer)
        finally:
            if stopping is not None:
                stopping.cancel()
                await asyncio.wait({stopping})
            else:
                await self._consumer.stop(0)

    async def _connect(self) -> None:
        await self._consumer.start()
        for address in self._nsqd:
            await self._consumer.connect(address)

    async def _woken(self, until: float) -> bool:
        """Whether there is something to do before the time `until`."""
        try:
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def _store(self, *, is_tick: bool, is_stopping: bool) -> None:
        arrived, self._arrived = self._arrived, []
        must_close, self._must_close = self._must_close, False
        self._written += arrived
        is_full = len(self._written) >= self._batch_size or self._consumer.is_starved
        is_synced = await asyncio.to_thread(
            self._files.store,
            [*map(self._line, arrived)],
            sync=is_tick or is_stopping or must_close or (is_full and bool(self._written)),
            tick=is_tick,
        )
        if must_close:
            await asyncio.to_thread(self._files.close)
        if is_synced:
            for message in self._written:
                message.finish()
            self._written = []


class Archives:
    """The archives of all topics: those given, or all that the nsqlookupds know."""

    def __init__(self, options: NsqToFileOptions, ending: Ending) -> None:
        self._options, self._ending = options, ending
        self._pattern = re.compile(options.topic_pattern)
        self._archives: dict[str, Archive | None] = {}
        """None for a topic that cannot be archived."""
        self._tasks: list[asyncio.Task[None]] = []
        self._cluster = Cluster(
            options.http_client_connect_timeout,
            options.http_client_request_timeout,
            options.consumer_config(),
        )

    async def run(self) -> None:
        on_signal(signal.SIGHUP, self._close_files)
        self._add(self._options.topic)
        while not self._options.topic and not self._ending.is_due:
            await self._find_topics()
            await self._ending.wait(self._options.topic_refresh)
        await self._ending.wait()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for archive in self._running():
            archive.stop()
        await asyncio.gather(*self._tasks)

    def _add(self, topics: Iterable[str]) -> None:
        for topic in topics:
            if topic in self._archives or not self._pattern.search(topic):
                continue
            try:
                archive = self._archives[topic] = Archive(topic, self._options)
            except ValueError as error:
                self._archives[topic] = None
                logger.error("cannot archive the topic %s: %s", topic, error)
                continue
            logger.info("archiving the topic %s", topic)
            self._tasks.append(asyncio.create_task(archive.run(self._ending)))

    async def _find_topics(self) -> None:
        for address in self._options.lookupd_http_address:
            # One by one: the answer of one is useful even if another does not answer.
            try:
                asking = asyncio.to_thread(self._cluster.topics, [address])
                self._add(sorted(await unless_ended(self._ending, asking) or ()))
            except AskFailed as error:
                logger.error("cannot look up topics: %s", error)

    def _running(self) -> list[Archive]:
        return [archive for archive in self._archives.values() if archive is not None]

    def _close_files(self) -> None:
        logger.info("SIGHUP: closing the current files")
        for archive in self._running():
            archive.close_file()


async def work(options: NsqToFileOptions, ending: Ending) -> None:
    rules = options.rules()
    try:
        for directory in (rules.output_dir, rules.work_dir):
            await asyncio.to_thread(make_directories, directory)
        if os.stat(rules.work_dir).st_dev != os.stat(rules.output_dir).st_dev:
            raise OptionError("--work-dir and --output-dir must be on the same file system")
    except OSError as error:
        raise OptionError(f"cannot use {error.filename}: {error.strerror}") from error
    await Archives(options, ending).run()


main = partial(run_tool, TABLE, work)


if __name__ == "__main__":
    sys.exit(main())
