"""What nsqd and nsqlookupd tell each other: the topics and channels of this node, and which
channels a topic that is new here has on other nodes."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from nsparq.broker.topic import Topic
from nsparq.errors import Exiting
from nsparq.fetch import FetchError, fetch
from nsparq.names import is_ephemeral, is_valid_name
from nsparq.server.lookup_peer import LookupPeers
from nsparq.server.old_primary import OldPrimary
from nsparq.version import NSQ_VERSION

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

MAX_ANSWER: Final = 16 << 20
"""Limit in bytes on an nsqlookupd's list of channels."""


class Discovery:
    """Asks in threads, so that nothing waits for the answers."""

    def __init__(self, nsqd: Nsqd) -> None:
        self.peers = LookupPeers(
            nsqd.options.lookupd_tcp_address,
            identity=self._identity,
            registrations=self._registrations,
            max_body_size=nsqd.options.max_body_size,
        )
        self._nsqd = nsqd
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="nsqd-discover")
        """Its own: an nsqlookupd that does not answer occupies all of them for seconds."""

    async def start(self) -> None:
        """Connect, and ask for the channels of topics that were made before."""
        await self.peers.start()
        replication, broker = self._nsqd.replication, self._nsqd.broker
        if replication is not None and replication.replaced_address:
            old = OldPrimary(replication.replaced_address, self.peers, lambda: broker.topics, self._threads)
            self._nsqd.launch(old.hide(replication.leads))
        for topic in broker.topics.values():
            self._begin(topic)

    async def stop(self) -> None:
        await self.peers.stop()
        # A request in progress may take seconds, and nobody waits for its answer any more.
        self._threads.shutdown(wait=False, cancel_futures=True)

    # what we tell

    def _identity(self) -> dict[str, str | int]:
        nsqd, options = self._nsqd, self._nsqd.options
        return {
            "version": NSQ_VERSION,
            "tcp_port": nsqd.broadcast_tcp_port,
            "http_port": nsqd.broadcast_http_port,
            "hostname": nsqd.hostname,
            "broadcast_address": options.broadcast_address,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
            **({} if nsqd.replication is None else nsqd.replication.identity),
        }

    def _registrations(self) -> list[tuple[str, str]]:
        return [
            (topic.name, channel)
            for topic in self._nsqd.broker.topics.values()
            for channel in (topic.channels or ("",))
        ]

    def announce(self, verb: str, topic_name: str, channel: str) -> None:
        """A topic or channel has come or gone: see broker.Announce."""
        self.peers.changed("REGISTER" if verb == "REGISTER" else "UNREGISTER", topic_name, channel)
        if verb == "REGISTER" and not channel:
            self._begin(self._nsqd.broker.topics[topic_name])

    # what we ask

    def _begin(self, topic: Topic) -> None:
        """Ask for the topic's channels if that has still to be done."""
        if topic.discovery_start < 0 or not self.peers.is_running:
            return
        if self.peers.addresses:
            self._nsqd.launch(self._discover(topic))
        else:
            topic.end_discovery()

    async def _discover(self, topic: Topic) -> None:
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
            await self.peers.settled()
            asked = [self._ask(address, topic.name) for address in self.peers.http_addresses]
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
        options = self._nsqd.options
        ask = partial(
            fetch,
            f"http://{address}/channels?topic={quote(topic)}",
            connect_timeout=options.http_client_connect_timeout,
            request_timeout=options.http_client_request_timeout,
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
