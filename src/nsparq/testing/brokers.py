"""nsqd and nsqlookupd in the test's process: the real daemons, each on a loop in its own thread."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsparq.addresses import join_address
from nsparq.client.loop_thread import LoopThread
from nsparq.client.payloads.encode import encode_bodies
from nsparq.headers import Headers, encode_headers
from nsparq.names import is_valid_name
from nsparq.packed import PackedBodies
from nsparq.process import Daemon, load_runner

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker as BrokerCore
    from nsparq.broker.peek import PeekedMessage
    from nsparq.server.daemon import Nsqd

__all__ = ["Broker", "Lookupd", "run_broker", "run_lookupd"]

ANY_PORT: Final = "127.0.0.1:0"
POLL_S: Final = 0.005
PATIENCE_S: Final = 5.0
PEEK_BYTES: Final = 64 << 20


def run_broker(data_path: Path | str | None = None, **options: Any) -> Broker:
    """A running nsqd, for a `with` statement. `options` are nsqd's, in snake_case; durations are
    seconds. By default it listens on free ports of 127.0.0.1 and keeps its data in a temporary
    directory. Raises StartError, also if the extra `server` is not installed."""
    return Broker(data_path, **options)


def run_lookupd(**options: Any) -> Lookupd:
    """A running nsqlookupd, in the same way.
    `run_broker(lookupd_tcp_address=[lookupd.tcp_address])` registers with it."""
    return Lookupd(**options)


class _Background:
    """A daemon in a thread."""

    tcp_address: str
    """`host:port`"""
    http_address: str

    def __init__(self, options: dict[str, Any]) -> None:
        self._options: dict[str, Any] = {
            "tcp_address": ANY_PORT,
            "http_address": ANY_PORT,
            "broadcast_address": "127.0.0.1",
        }
        self._options |= {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
        self._thread: LoopThread[Any] | None = None
        self._errors: list[dict[str, Any]] = []

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> tuple[Callable[..., Any], Callable[[], Daemon]]:
        """A function that runs a coroutine, and one that creates the daemon on its loop."""
        raise NotImplementedError

    def start(self) -> None:
        """Start again after stop(), on the same ports."""
        if self._thread is not None:
            raise RuntimeError("already running")
        run, make = self._load()
        self._thread = LoopThread(
            lambda: _running(make), name=type(self).__name__, run=run, on_loop_error=self._errors.append
        )
        daemon = self._thread.resource
        self.tcp_address = _text(daemon.tcp_address)
        self.http_address = _text(daemon.http_address)
        # After a restart clients reconnect to the same ports.
        self._options["tcp_address"] = self.tcp_address
        self._options["http_address"] = self.http_address

    def stop(self) -> None:
        """A clean stop. Raises AssertionError after an error on its loop. Twice is safe."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.stop()
        errors, self._errors = self._errors, []
        if errors:
            raise AssertionError(f"unhandled error in the daemon: {errors}") from errors[0].get("exception")

    def restart(self) -> None:
        """Stop, and start with the same ports and data. Clients lose their connections and
        reconnect."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop for good. Twice is safe."""
        self.stop()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._thread is None:
            raise RuntimeError("not running")
        return self._thread.call(function, *arguments)

    @property
    def _daemon(self) -> Any:
        if self._thread is None:
            raise RuntimeError("not running")
        return self._thread.resource


class Broker(_Background):
    """nsqd. Its methods block for milliseconds and may be called from any thread. In a coroutine
    use `wait_empty_async`: `wait_empty` would block the loop that the test's client may need."""

    def __init__(self, data_path: Path | str | None = None, **options: Any) -> None:
        self._own_directory = "" if data_path else tempfile.mkdtemp(prefix="nsparq-")
        self.data_path = Path(data_path or self._own_directory)
        self.https_address = ""
        super().__init__({"https_address": ANY_PORT, "data_path": str(self.data_path), **options})
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Broker:
        return self

    def _load(self) -> tuple[Callable[..., Any], Callable[[], Daemon]]:
        def load() -> type[Nsqd]:
            from nsparq.server.daemon import Nsqd

            return Nsqd

        run, nsqd = load_runner(load)
        from nsparq.options import NsqdOptions

        return run, lambda: nsqd(NsqdOptions(**self._options))

    def start(self) -> None:
        super().start()
        self.https_address = _text(self._daemon.https_address)
        if self.https_address:
            self._options["https_address"] = self.https_address

    def close(self) -> None:
        """Stop, and remove the temporary directory, if there is one."""
        try:
            self.stop()
        finally:
            if self._own_directory:
                shutil.rmtree(self._own_directory, ignore_errors=True)

    # messages

    def publish(
        self, topic: str, *bodies: object, defer: float = 0.0, headers: Headers | None = None
    ) -> None:
        """Publish without a client: bytes, texts or objects, as a Producer does. All of them get
        the same headers."""
        if not is_valid_name(topic.encode()):
            raise ValueError(f"invalid topic name {topic!r}")
        encoded = encode_bodies(bodies)
        if not encoded or not all(encoded):
            raise ValueError("at least one message is needed, and none may be empty")
        packed = PackedBodies.of(encoded)
        if headers:
            packed = packed.with_blocks(PackedBodies.of([encode_headers(headers)] * len(encoded)))
        self._call(self._publish, topic, packed, defer)

    async def _publish(self, topic: str, bodies: PackedBodies, defer: float) -> None:
        broker: BrokerCore = self._daemon.broker
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def published(error: Exception | None) -> None:
            done.set_result(None) if error is None else done.set_exception(error)

        publishing = broker.get_topic(topic).publishing
        publishing.publish(bodies, int(defer * 1000) * 1_000_000, published)
        await done

    def peek(self, topic: str, channel: str = "", *, count: int = 100) -> list[PeekedMessage]:
        """Messages, without consuming them: the unfinished ones of a channel (in flight, requeued,
        deferred and ready), or the newest of the topic's log, finished or not. They have `body`,
        `headers`, `attempts`, `state` and more."""
        found: list[PeekedMessage] = self._call(self._peek, topic, channel, count)
        return found

    async def _peek(self, topic: str, channel: str, count: int) -> list[PeekedMessage]:
        from nsparq.broker.peek import STATES, peek_channel, peek_topic

        known = self._daemon.broker.topics.get(topic)
        if known is None or (channel and channel not in known.channels):
            return []
        if channel:
            chosen = peek_channel(known.channels[channel], STATES, count, PEEK_BYTES, PEEK_BYTES)
            return await asyncio.to_thread(chosen.read)
        newest = peek_topic(known, None, count, PEEK_BYTES, PEEK_BYTES)
        return await asyncio.to_thread(newest.read)

    # topics and channels

    def create(self, topic: str, channel: str = "") -> None:
        """Create a topic, and a channel, which gets every message from now on."""

        def work() -> None:
            made = self._daemon.broker.get_topic(topic)
            if channel:
                made.get_channel(channel)

        self._call(work)

    def delete(self, topic: str) -> None:
        """Delete a topic with its channels and messages, if it exists."""
        broker = self._daemon.broker
        self._call(lambda: broker.delete_topic(topic) if topic in broker.topics else None)

    def stats(self, topic: str = "", channel: str = "") -> dict[str, Any]:
        """nsqd's /stats, as a dictionary."""
        from nsparq.broker.stats import broker_stats

        text = self._call(lambda: json.dumps(broker_stats(self._daemon.broker, topic, channel)))
        stats: dict[str, Any] = json.loads(text)
        return stats

    def channel_stats(self, topic: str, channel: str) -> dict[str, Any] | None:
        """The /stats of a channel: `depth`, `in_flight_count`, `deferred_count`, `clients` and
        more. None if there is no such channel."""
        found = [one for part in self.stats(topic)["topics"] or [] for one in part["channels"] or []]
        return next((one for one in found if one["channel_name"] == channel), None)

    # waiting

    def wait_empty(self, topic: str, channel: str, within: float = PATIENCE_S) -> None:
        """Wait until the channel exists and all its messages are finished: none is waiting, in
        flight or deferred. Raises AssertionError after `within` seconds, with what is left."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("wait_empty() would block this event loop: await wait_empty_async()")
        for _ in self._until_empty(topic, channel, within):
            time.sleep(POLL_S)

    async def wait_empty_async(self, topic: str, channel: str, within: float = PATIENCE_S) -> None:
        """wait_empty() for coroutines."""
        for _ in self._until_empty(topic, channel, within):
            await asyncio.sleep(POLL_S)

    def _until_empty(self, topic: str, channel: str, within: float) -> Iterator[None]:
        """Yields before each further look. Raises AssertionError."""
        deadline = time.monotonic() + within
        while left := self._left(topic, channel):
            if time.monotonic() > deadline:
                raise AssertionError(f"after {within:g} s {left}")
            yield

    def _left(self, topic: str, channel: str) -> str:
        """The unfinished messages in words; empty if there are none."""
        stats = self.channel_stats(topic, channel)
        if stats is None:
            return f"there is no channel {topic}/{channel}"
        counts = [f"{stats[key]} {name}" for name, key in _COUNTS.items() if stats[key]]
        return f"{topic}/{channel} has {', '.join(counts)}" if counts else ""

    # nsqlookupd

    def register_with(self, *lookupds: Lookupd) -> None:
        """Register with these nsqlookupds from now on, and with no others."""
        addresses = tuple(lookupd.tcp_address for lookupd in lookupds)
        self._options["lookupd_tcp_address"] = addresses
        self._call(self._daemon.change_lookupds, addresses)


_COUNTS: Final = {"waiting": "depth", "in flight": "in_flight_count", "deferred": "deferred_count"}


class Lookupd(_Background):
    """nsqlookupd. Clients use its `http_address`, brokers its `tcp_address`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options)
        self.start()

    def __enter__(self) -> Lookupd:
        return self

    def _load(self) -> tuple[Callable[..., Any], Callable[[], Daemon]]:
        def load() -> Any:
            from nsparq.lookup.daemon import Nsqlookupd

            return Nsqlookupd

        run, lookupd = load_runner(load)
        from nsparq.lookup.options import NsqlookupdOptions

        return run, lambda: lookupd(NsqlookupdOptions(**self._options))

    def producers(self, topic: str) -> list[str]:
        """Addresses of the nsqds that have a topic, as consumers get them."""

        def work() -> list[str]:
            daemon = self._daemon
            answer = daemon.registry.lookup_json(topic, daemon.clock())
            found = json.loads(answer)["producers"] if answer else []
            return [join_address(one["broadcast_address"], one["tcp_port"]) for one in found]

        producers: list[str] = self._call(work)
        return producers


@asynccontextmanager
async def _running(make: Callable[[], Daemon]) -> AsyncIterator[Daemon]:
    daemon = make()
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.stop()


def _text(address: tuple[str, int] | str) -> str:
    return address if isinstance(address, str) else join_address(*address)
