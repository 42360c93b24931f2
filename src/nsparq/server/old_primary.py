"""Hides the node that this one has replaced from lookups, at nsqlookupds that know nothing of
clusters: NSQ's own.

The old primary may be silent: its connection to nsqlookupd stays open, and nsqlookupd lists it for
five minutes. Ours removes it at once, since the new primary's IDENTIFY names the cluster. For NSQ's
the new primary tombstones each topic of the old one, again and again, until nsqlookupd itself has
given up on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Final
from urllib.parse import quote

from nsparq.fetch import FetchError, fetch
from nsparq.server.lookup_peer import LookupPeers

logger = logging.getLogger(__name__)

REPEAT_S: Final = 15.0
"""Less than NSQ's tombstones last (45 s)."""
ROUNDS: Final = 24
"""Longer than NSQ's nsqlookupd lists a silent node (5 minutes)."""


class OldPrimary:
    def __init__(
        self, node: str, peers: LookupPeers, topics: Callable[[], Iterable[str]], threads: Executor
    ) -> None:
        """`node` is its `broadcast_address:http_port`."""
        self._node = node
        self._peers = peers
        self._topics = topics
        self._threads = threads

    async def hide(
        self,
        is_still_replaced: Callable[[], Awaitable[bool]],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Ends when nsqlookupd no longer lists it by itself, or when it is primary again."""
        await self._peers.settled()
        for _ in range(ROUNDS):
            # This process may have stood still, and the other one may be primary again.
            if not await is_still_replaced():
                return
            loop = asyncio.get_running_loop()
            for address in self._peers.http_addresses_without_clusters:
                await loop.run_in_executor(
                    self._threads, partial(self._tombstone, address, [*self._topics()])
                )
            await sleep(REPEAT_S)

    def _tombstone(self, address: str, topics: list[str]) -> None:
        for topic in topics:
            url = f"http://{address}/topic/tombstone?topic={quote(topic)}&node={quote(self._node)}"
            try:
                answer = fetch(url, method="POST", connect_timeout=1.0, request_timeout=2.0)
            except FetchError as error:
                # It may be down. The next round tries again.
                logger.warning("LOOKUPD(%s): cannot hide %s: %s", address, self._node, error)
                return
            if answer.status != 200:
                logger.warning(
                    "LOOKUPD(%s): cannot hide %s in topic %s: status %d",
                    address,
                    self._node,
                    topic,
                    answer.status,
                )
