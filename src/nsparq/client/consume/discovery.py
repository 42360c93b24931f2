"""Which nsqd a consumer connects to.

An nsqd that was given by address is reconnected whenever its connection is lost. An nsqd that
nsqlookupd reported is connected when it is found; when its connection is lost, nsqlookupd is asked
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Final

from nsparq.client.config import Config
from nsparq.client.connect.connection import Connection, checked_addresses
from nsparq.client.connect.lookup import Lookup, LookupFailed
from nsparq.client.consume.event_loop import log_failure
from nsparq.client.errors import ClientError, ConnectFailed
from nsparq.private_random import private_random

logger = logging.getLogger(__name__)

STEADY_S: Final = 5.0
"""After a connection that lasted this long, the reconnect delay starts again at its minimum."""


class Discovery:
    """`connections` are the open ones, by address. Call lost() when one ends."""

    def __init__(
        self,
        config: Config,
        topic: str,
        lookup: Lookup,
        named: Iterable[str],
        open_connection: Callable[[str], Awaitable[Connection]],
        on_open: Callable[[Connection], None],
    ) -> None:
        self.connections: dict[str, Connection] = {}
        self._config = config
        self._topic = topic
        self._lookup = lookup
        self._named = checked_addresses(named)
        self._open_connection = open_connection
        self._on_open = on_open
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """At most one per address, which keeps it connected or connects it once."""
        self._poller: asyncio.Task[None] | None = None
        self._question: asyncio.Task[None] | None = None
        """The last question to nsqlookupd. It waits for those that have not answered yet."""
        self._missing: set[str] = set()
        """Addresses of lost connections that have no task."""
        self._is_lookup_due = asyncio.Event()
        """A connection was lost: nsqlookupd may know a replacement."""
        self._is_topic_unknown = False
        """nsqlookupd has answered that no nsqd has the topic."""

    def start(self) -> None:
        for address in self._named:
            self._start_task(address, self._keep(address))
        if self._lookup.addresses:
            self._poller = asyncio.create_task(self._poll())
            self._poller.add_done_callback(log_failure)

    async def stop(self) -> None:
        """End all tasks. Open connections stay open."""
        tasks = [*self._tasks.values(), *filter(None, [self._poller, self._question])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def lost(self, connection: Connection) -> None:
        if self.connections.get(connection.address) is connection:
            del self.connections[connection.address]
        if connection.address not in self._tasks:
            self._missing.add(connection.address)
            self._is_lookup_due.set()

    @property
    def is_ready(self) -> bool:
        """Whether an nsqd is connected, or none has the topic yet."""
        return bool(self.connections) or (self._is_topic_unknown and not self._named)

    async def connect(self, address: str) -> None:
        """Connect to one nsqd and keep it connected. Raises ConnectFailed if it cannot be reached
        now, ClientError if it is connected or being connected."""
        checked_addresses([address])
        if address in self.connections or address in self._tasks:
            raise ClientError(f"{address}: already connected")
        outcome: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        keeper = self._start_task(address, self._keep(address, outcome))
        try:
            ends: set[asyncio.Future[Any]] = {keeper, outcome}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            connection = self.forget(address) if self._tasks.get(address) is keeper else None
            if connection is not None:
                connection.close()
            raise
        failure = outcome.result() if outcome.done() else f"{address}: disconnected"
        if failure is not None:
            raise ConnectFailed(failure)

    def forget(self, address: str) -> Connection | None:
        """End the task of an address. The caller closes the connection. Raises ClientError."""
        task, connection = self._tasks.get(address), self.connections.get(address)
        if task is None and connection is None:
            raise ClientError(f"{address}: not connected")
        if task is not None:
            task.cancel()
            del self._tasks[address]
        return connection

    def _start_task(self, address: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks[address] = asyncio.create_task(work)

        def done(_: object) -> None:
            if self._tasks.get(address) is task:
                del self._tasks[address]

        task.add_done_callback(done)
        task.add_done_callback(log_failure)
        return task

    async def _open(self, address: str) -> Connection:
        connection = await self._open_connection(address)
        self.connections[address] = connection
        self._missing.discard(address)
        self._on_open(connection)
        return connection

    async def _keep(self, address: str, outcome: asyncio.Future[str | None] | None = None) -> None:
        """Keep an address connected. `outcome` gets the result of the first attempt, an error text
        or None; if that attempt fails, the task ends."""
        config, clock = self._config, asyncio.get_running_loop().time
        delay = config.reconnect_delay
        while True:
            began = clock()
            try:
                connection = await self._open(address)
            except ConnectFailed as error:
                if outcome is not None and not outcome.done():
                    outcome.set_result(str(error))
                    return
                logger.warning("%s; trying again in %.1f s", error, delay)
            else:
                if outcome is not None and not outcome.done():
                    outcome.set_result(None)
                await connection.closed.wait()
                if clock() - began >= STEADY_S:
                    delay = config.reconnect_delay
            # Random: not all consumers of a restarted broker at the same moment.
            await asyncio.sleep(private_random.uniform(delay / 2, delay))
            delay = min(max(delay, 0.01) * 2, max(config.max_reconnect_delay, config.reconnect_delay))

    async def _poll(self) -> None:
        """Ask nsqlookupd now, then regularly. After a lost connection, or if no nsqlookupd
        answered, ask sooner, with growing pauses."""
        config = self._config
        interval, first = config.lookupd_poll_interval, config.reconnect_delay or 0.01
        # Random: consumers that were started together do not ask together forever.
        regular = interval + private_random.uniform(0, config.lookupd_poll_jitter * interval)
        pause = 0.0
        while True:
            self._is_lookup_due.clear()
            is_answered = await self._discover()
            if is_answered and (not self._missing or pause >= config.max_reconnect_delay):
                # What is still missing after the longest pause is probably gone for good.
                self._missing.clear()
                pause = 0.0
            else:
                pause = min(pause * 2 or first, max(config.max_reconnect_delay, first), interval)
            try:
                async with asyncio.timeout(private_random.uniform(pause / 2, pause) if pause else regular):
                    await self._is_lookup_due.wait()
            except TimeoutError:
                regular = regular if pause else interval
            else:
                # Give the nsqd time to come back, or nsqlookupd time to forget it.
                await asyncio.sleep(min(pause or first, interval))

    async def _discover(self) -> bool:
        """Connect to every new nsqd that nsqlookupd reports. False if none answered."""
        if self._question is not None:
            self._question.cancel()
            await asyncio.wait({self._question})
        is_answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._question = asyncio.create_task(self._ask(is_answered))
        self._question.add_done_callback(log_failure)
        return await is_answered

    async def _ask(self, is_answered: asyncio.Future[bool]) -> None:
        """`is_answered` gets its result with the first answer. This goes on with later ones."""
        try:
            async with aclosing(self._lookup.producers(self._topic)) as answers:
                async for found in answers:
                    if found is None:
                        continue
                    self._is_topic_unknown = not found
                    for address in found:
                        if address not in self.connections and address not in self._tasks:
                            self._start_task(address, self._try(address))
                    if not is_answered.done():
                        is_answered.set_result(True)
        except LookupFailed as error:
            logger.warning("%s: %s", self._topic, error)
        finally:
            if not is_answered.done():
                is_answered.set_result(False)

    async def _try(self, address: str) -> None:
        try:
            await self._open(address)
        except ConnectFailed as error:
            logger.warning("%s", error)
