"""The brokers that a producer may connect to, in the order to try them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from time import monotonic
from typing import Final

from nsparq.client.connect.connection import checked_addresses
from nsparq.client.connect.lookup import Lookup, LookupFailed
from nsparq.private_random import private_random

logger = logging.getLogger(__name__)

AVOID_S: Final = 30.0
"""For this time a broker that failed is tried after the others."""
LATE_S: Final = 2.0
"""When all known brokers have failed: how long a silent nsqlookupd, which may know more, is waited
for. Then they can be tried again."""


class Candidates:
    """Knows which brokers failed lately. Call failed() when one does."""

    def __init__(self, named: Iterable[str], lookup: Lookup) -> None:
        """Raises ValueError for an invalid address, or if there is none at all."""
        self._named = checked_addresses(named)
        self._lookup = lookup
        self._failed: dict[str, float] = {}
        """When each broker last failed."""
        if not self._named and not lookup.addresses:
            raise ValueError("a producer needs the address of an nsqd or of an nsqlookupd")

    def failed(self, address: str) -> None:
        self._failed[address] = monotonic()

    async def in_order(self) -> AsyncGenerator[str, None]:
        """Each address once. Close it.

        nsqlookupd is asked only after the named brokers, except those that failed lately: they come
        after the brokers that nsqlookupd knows, or as soon as it has been silent for a moment.
        Raises LookupFailed if no broker is named and no nsqlookupd answers."""
        since = monotonic() - AVOID_S
        self._failed = {address: at for address, at in self._failed.items() if at > since}
        tried: set[str] = set()
        for address in self._named:
            if address not in self._failed:
                tried.add(address)
                yield address
        async with aclosing(self._discovered()) as answers:
            async for discovered in answers:
                # Random: producers spread over the brokers.
                private_random.shuffle(discovered)
                for address in sorted([*self._named, *discovered], key=self._failed_at):
                    if address not in tried:
                        tried.add(address)
                        yield address

    def _failed_at(self, address: str) -> float:
        return self._failed.get(address, 0.0)

    async def _discovered(self) -> AsyncGenerator[list[str], None]:
        """What nsqlookupd knows; empty until one has answered, and at the end."""
        is_enough = bool(self._named)
        try:
            if self._lookup.addresses:
                async with aclosing(self._lookup.nodes()) as answers:
                    while True:
                        async with asyncio.timeout(LATE_S if is_enough else None):
                            found = await anext(answers)
                        is_enough = is_enough or found is not None
                        yield found or []
        except StopAsyncIteration:
            pass
        except TimeoutError:
            logger.warning("an nsqlookupd has been silent for %g s: not waiting for it", LATE_S)
        except LookupFailed as error:
            if not self._named:
                raise
            logger.warning("%s", error)
        yield []
