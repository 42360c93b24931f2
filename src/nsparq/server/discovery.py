"""Asks nsqlookupd which channels a topic that is new on this node has on other nodes."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import Executor
from functools import partial
from typing import Final
from urllib.parse import quote

from nsparq.broker.topic import Topic
from nsparq.errors import Exiting
from nsparq.fetch import FetchError, fetch
from nsparq.names import is_ephemeral, is_valid_name
from nsparq.options import NsqdOptions
from nsparq.server.lookup_peer import LookupPeers

logger = logging.getLogger(__name__)

MAX_ANSWER: Final = 16 << 20
"""Limit in bytes on an nsqlookupd's list of channels."""


class Discovery:
    """Asks in threads, so that nothing waits for the answers."""

    def __init__(self, options: NsqdOptions, peers: LookupPeers, threads: Executor) -> None:
        self._options = options
        self._peers = peers
        self._threads = threads

    async def discover(self, topic: Topic) -> None:
        """Create the channels of a new topic. They get its messages from the first one on: until
        then the topic keeps all of them. If nsqd stops before, its next run does this."""
        try:
            await self._create_channels(topic)
        except asyncio.CancelledError:
            raise
        except BaseException:
            topic.end_discovery()
            raise
        # Not before the channels are as durable as configured: nobody would ask for them again.
        topic.broker.changes.when_durable(lambda _: topic.end_discovery())

    async def _create_channels(self, topic: Topic) -> None:
        try:
            await self._peers.settled()
            asked = [self._ask(address, topic.name) for address in self._peers.http_addresses]
            names = {name for found in await asyncio.gather(*asked) for name in found}
            for name in sorted(names - topic.channels.keys() - topic.deleted_in_discovery):
                if (
                    not topic.is_exiting
                    and is_valid_name(name.encode("utf-8", "replace"))
                    and not is_ephemeral(name)
                ):
                    topic.get_channel(name, start=topic.discovery_start)
        except (Exiting, OSError) as error:
            logger.warning("TOPIC(%s): channels could not be created: %s", topic.name, error)

    async def _ask(self, address: str, topic: str) -> list[str]:
        ask = partial(
            fetch,
            f"http://{address}/channels?topic={quote(topic)}",
            connect_timeout=self._options.http_client_connect_timeout,
            request_timeout=self._options.http_client_request_timeout,
            max_bytes=MAX_ANSWER,
        )
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
            found = json.loads(answer.body)["channels"] if answer.status == 200 else []
            if not isinstance(found, list):
                raise TypeError("the response has no list of channels")
            return [name for name in found if isinstance(name, str)]
        except (FetchError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("TOPIC(%s): cannot ask %s for channels: %s", topic, address, error)
            return []
