"""NSQ's reading endpoints: topics, channels, nodes, the counter.

Every answer is merged from what the daemons report at that moment. docs/nsqadmin.md lists where an
answer is better than NSQ's.
"""

from __future__ import annotations

import time

from nsparq.admin.collect.cluster import Found
from nsparq.admin.collect.fields import number, objects, text
from nsparq.admin.collect.merge import node_total
from nsparq.admin.routing import path_values
from nsparq.admin.show.api.table import NOT_THERE, UPSTREAM, Handlers, look
from nsparq.http.api import Param, Request, Result

__all__ = ["Stats"]


class Stats(Handlers):
    @look(
        "/api/topics",
        "The names of all topics.",
        details="With `inactive=true`: an object of the topics that no nsqd has, with their channels; "
        "nsqlookupds only.",
        params=(Param(name="inactive", help="`true`: only topics without producers"),),
        errors=(UPSTREAM,),
    )
    async def topics(self, request: Request) -> Result:
        if request.parameters.get("inactive") == "true":
            inactive = await self._admin.cluster.inactive()
            topics = {name: channels or None for name, channels in inactive.value.items()}
            return {"topics": topics, "message": inactive.message}
        found = await self._admin.cluster.topics()
        return {"topics": found.value or None, "message": found.message}

    @look(
        "/api/topics/{topic}",
        "The statistics of a topic: in total, on each node, and of its channels.",
        details="`node` is `*` for totals. `paused` is true if the topic is paused on any node. A topic that "
        "is known, but that no nsqd has, is 404 `NO_PRODUCERS`.",
        errors=NOT_THERE,
    )
    async def topic(self, request: Request) -> Result:
        (name,) = path_values(request)
        found = await self._admin.cluster.topic(name)
        for channel in found.value["channels"] or ():
            self._admin.watch.add_drain(channel)
        return {**found.value, "message": found.message}

    @look(
        "/api/topics/{topic}/{channel}",
        "The statistics of a channel: in total, on each node, and its clients.",
        details="`oldest_message_age_s`, `drain_rate` and `drain_time_s` are those of "
        "[lag as time](../how-to/monitoring.md#lag-as-time).",
        errors=(*NOT_THERE, (404, "CHANNEL_NOT_FOUND")),
    )
    async def channel(self, request: Request) -> Result:
        topic, name = path_values(request)
        found = await self._admin.cluster.channel(topic, name)
        self._admin.watch.add_drain(found.value)
        return {**found.value, "message": found.message}

    @look("/api/nodes", "Every nsqd, with its topics.", errors=(UPSTREAM,))
    async def nodes(self, request: Request) -> Result:
        found = await self._admin.cluster.nodes_with_topics()
        return {"nodes": [node.as_json() for node in found.value] or None, "message": found.message}

    @look(
        "/api/nodes/{node}",
        "All topics, channels and clients of one nsqd.",
        errors=((404, "NODE_NOT_FOUND"), UPSTREAM),
    )
    async def node(self, request: Request) -> Result:
        (address,) = path_values(request)
        found = await self._admin.cluster.node_stats(address)
        return {**node_total(found.value, time.time()), "message": found.message}

    @look("/api/counter", "The message count of each channel on each node.", errors=(UPSTREAM,))
    async def counter(self, request: Request) -> Result:
        nodes = await self._admin.cluster.nodes()
        stats = await self._admin.cluster.stats(nodes.value)
        counts = {}
        for one in stats.value:
            address = one.node.address
            for topic in one.topics:
                name = text(topic, "topic_name")
                for channel in objects(topic, "channels"):
                    channel_name = text(channel, "channel_name")
                    counts[f"{name}:{channel_name}:{address}"] = {
                        "node": address,
                        "topic_name": name,
                        "channel_name": channel_name,
                        "message_count": number(channel, "message_count"),
                    }
        return {"stats": counts, "message": Found(None, nodes.errors + stats.errors).message}
