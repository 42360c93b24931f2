"""Which nsqd a consumer is connected to, and how it stays so.

Those that were named are kept: connected, and connected again whenever they were lost. Those that nsqlookupd
knows are connected when they are found, and looked for again when they were lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final

from nsparq.client.config import Config
from nsparq.client.connection import Connection, checked_addresses
from nsparq.client.errors import ClientError, ConnectFailed
from nsparq.client.lookup import Lookup, LookupFailed
from nsparq.private_random import private_random

logger = logging.getLogger(__name__)

STEADY_S: Final = 5.0
"""A connection that lasted this long was a good one: if it is lost, it is tried again soon."""


class Discovery:
    """`connections` are those that are open, by address. lost() must be told of their end."""

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
        """Who sees to an address: one at a time, for as long as it is wanted or until it is connected."""
        self._poller: asyncio.Task[None] | None = None
        self._missing: set[str] = set()
        """Those that were lost, and that nobody sees to."""
        self._is_worth_asking = asyncio.Event()
        """One was lost: nsqlookupd may know more."""

    def start(self) -> None:
        for address in self._named:
            self._see_to(address, self._keep(address))
        if self._lookup.addresses:
            self._poller = asyncio.create_task(self._poll())
            self._poller.add_done_callback(log_failure)

    async def stop(self) -> None:
        """Look for no more. Connections that are open stay so."""
        tasks = [*self._tasks.values(), *filter(None, [self._poller])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def lost(self, connection: Connection) -> None:
        if self.connections.get(connection.address) is connection:
            del self.connections[connection.address]
        if connection.address not in self._tasks:
            self._missing.add(connection.address)
            self._is_worth_asking.set()

    async def connect(self, address: str) -> None:
        """Connect to one nsqd, and keep connected to it. Raises ConnectFailed if it cannot be reached now,
        ClientError if it is connected already, or being connected."""
        checked_addresses([address])
        if address in self.connections or address in self._tasks:
            raise ClientError(f"{address}: already connected")
        outcome: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        keeper = self._see_to(address, self._keep(address, outcome))
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
        """See to an address no longer. Its connection is the caller's to close. Raises ClientError if it is
        neither connected nor to be."""
        task, connection = self._tasks.get(address), self.connections.get(address)
        if task is None and connection is None:
            raise ClientError(f"{address}: not connected")
        if task is not None:
            task.cancel()
            del self._tasks[address]
        return connection

    def _see_to(self, address: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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
        """Stay connected. Whoever waits for the first outcome gets it, and if it is none, that is all."""
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
            # Not all consumers of a broker that was restarted at the same moment.
            await asyncio.sleep(private_random.uniform(delay / 2, delay))
            delay = min(max(delay, 0.01) * 2, max(config.max_reconnect_delay, config.reconnect_delay))

    async def _poll(self) -> None:
        """Ask nsqlookupd now, then regularly; and soon after a connection was lost or nobody answered, then
        less and less often."""
        config = self._config
        interval, first = config.lookupd_poll_interval, config.reconnect_delay or 0.01
        # Consumers that were started together need not ask together for ever.
        regular = interval + private_random.uniform(0, config.lookupd_poll_jitter * interval)
        hurry = 0.0
        while True:
            self._is_worth_asking.clear()
            is_answered = await self._discover()
            if is_answered and (not self._missing or hurry >= config.max_reconnect_delay):
                # What is still missing is gone for good, as far as we can tell.
                self._missing.clear()
                hurry = 0.0
            else:
                hurry = min(hurry * 2 or first, max(config.max_reconnect_delay, first), interval)
            try:
                async with asyncio.timeout(private_random.uniform(hurry / 2, hurry) if hurry else regular):
                    await self._is_worth_asking.wait()
            except TimeoutError:
                regular = regular if hurry else interval
            else:
                # Whoever ended it needs a moment, to be back or to be forgotten.
                await asyncio.sleep(min(hurry or first, interval))

    async def _discover(self) -> bool:
        """Connect to what nsqlookupd knows and we do not have. Nothing waits for one that does not answer.
        False if nobody could be asked."""
        try:
            found = await self._lookup.producers(self._topic)
        except LookupFailed as error:
            logger.warning("%s: %s", self._topic, error)
            return False
        for address in found:
            if address not in self.connections and address not in self._tasks:
                self._see_to(address, self._try(address))
        return True

    async def _try(self, address: str) -> None:
        try:
            await self._open(address)
        except ConnectFailed as error:
            logger.warning("%s", error)


def log_failure(task: asyncio.Task[Any]) -> None:
    """For tasks that nobody awaits: what they should not have raised is at least seen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_coro(), exc_info=error)
