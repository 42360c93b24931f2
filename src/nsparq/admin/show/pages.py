"""The pages. Each handler collects the data for its template; render() makes the page.

The server renders everything and escapes every value. The script on a page draws the charts,
filters, and refreshes the live part of the page by asking for it with `live=1`. The pages also work
without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from nsparq.admin.change.operations import PEEK, SEEK, BadTarget, Plan, parse_target
from nsparq.admin.collect.cluster import Unreachable
from nsparq.admin.collect.history import RANGES
from nsparq.admin.collect.merge import Node, number
from nsparq.admin.collect.messages import DEFAULT_COUNT, MAX_COUNT, STATES
from nsparq.admin.collect.upstream import RequestFailed
from nsparq.admin.health import Severity
from nsparq.admin.routing import path_values, topic_and_channel, with_etag
from nsparq.admin.security import PAGE_HEADERS, TOKEN_COOKIE, cookie
from nsparq.admin.show.templating import Assets, make_environment
from nsparq.http.api import ApiError, Endpoint, Request, Response

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["Pages", "error_text"]

HTML_TYPE: Final = "text/html; charset=utf-8"
MAX_ROWS: Final = 2000
"""Topics on one page. The filter finds others."""
MAX_NODE_ROWS: Final = 400
"""Rows on the page of a node, which are larger."""
MAX_PROBLEMS: Final = 20
"""Problems on the overview. A link shows all."""
BUSIEST: Final = 8
PROBLEM_COUNT: Final = "X-Problem-Count"
"""Header with the number of problems, for open pages."""
ERRORS: Final = {
    "TOPIC_NOT_FOUND": "topic not found",
    "CHANNEL_NOT_FOUND": "channel not found",
    "NODE_NOT_FOUND": "node not found",
    "NO_PRODUCERS": "no node has this topic",
    "FORBIDDEN": "you are not allowed to do this",
    "INVALID_TOPIC": "not a valid topic name",
    "INVALID_CHANNEL": "not a valid channel name",
    "MSG_EMPTY": "the message is empty",
    "NOTHING_CHOSEN": "no messages are selected",
    "SAME_TOPIC": "the messages are already in this topic: enter another one",
    "NOT_SUPPORTED": "the nodes run NSQ's own nsqd, which does not support this",
}
"""Error codes in words."""
Show = Callable[[Request], Awaitable["Response"]]


def error_text(error: ApiError) -> str:
    return str(error.more.get("reason", "")) or ERRORS.get(error.code, error.code)


class Pages:
    """The handlers of one nsqadmin's pages."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._watch = admin.watch
        self.assets = Assets(admin.base, admin.options.dev_static_dir)
        self._environment = make_environment(self.assets, admin.base)

    def endpoints(self) -> list[Endpoint]:
        shown: list[tuple[str, str, Show, str]] = [
            ("/", "read", self.overview, "What needs attention."),
            ("/topics", "read", self.topics, "All topics."),
            ("/topics/{topic}", "read", self.topic, "A topic."),
            ("/topics/{topic}/{channel}", "read", self.channel, "A channel."),
            ("/nodes", "read", self.nodes, "All nodes."),
            ("/nodes/{node}", "read", self.node, "A node."),
            ("/lookup", "read", self.lookup, "nsqlookupds, and inactive topics."),
            ("/counter", "read", self.counter, "The message count."),
            ("/messages/{topic}", "subscribe", self.messages, "Messages of a topic."),
            ("/messages/{topic}/{channel}", "subscribe", self.messages, "Messages of a channel."),
            ("/replay/{topic}/{channel}", "admin", self.replay, "Move a channel in its topic's log."),
            ("/pipelines", "read", self.pipelines, "Spark pipelines."),
        ]
        found = [
            Endpoint(
                group="Pages",
                method="GET",
                path=path,
                handler=handler,
                permission=permission,
                summary=summary,
                success="a page",
                success_type=HTML_TYPE,
            )
            for path, permission, handler, summary in shown
        ]
        files = [
            Endpoint(
                group="Pages",
                method="GET",
                path=f"/{folder}/{{file}}",
                handler=self.assets.serve,
                summary="Style sheet, scripts, icon.",
                success="the file",
            )
            for folder in ("static", "fonts")
        ]
        return found + files

    # Rendering

    def render(self, request: Request, template: str, /, status: int = 200, **context: Any) -> Response:
        """The whole page, or with `live=1` only its live part."""
        guard = self._admin.guard
        token, value = guard.token(request)
        found = self._environment.get_template(template)
        is_live = request.parameters.get("live") == "1" and "live" in found.blocks
        problem_count = sum(1 for one in self._admin.problems() if one.severity > Severity.NOTICE)
        context |= {
            "access": guard.access(request),
            "has_login": guard.has_login,
            "csrf": token,
            "path": request.path,
            "watch": self._watch,
            "options": self._admin.options,
            "note": None if is_live else self._admin.notes.take(request.parameters.get("note", "")),
            "ranges": RANGES,
            "problem_count": problem_count,
        }
        if is_live:
            text = "".join(found.blocks["live"](found.new_context(context)))
        else:
            text = found.render(context)
        headers = list(PAGE_HEADERS)
        if not cookie(request, TOKEN_COOKIE):
            headers.append(guard.set_cookie(request, TOKEN_COOKIE, value))
        headers.append(("Cache-Control", "no-cache" if is_live else "no-store"))
        if is_live:
            headers.append((PROBLEM_COUNT, str(problem_count)))
        response = Response(
            status=status,
            body=text.encode("utf-8", "replace"),
            content_type=HTML_TYPE,
            headers=tuple(headers),
            nsq_header=False,
        )
        return with_etag(request, response) if is_live else response

    def error(self, request: Request, error: ApiError) -> Response:
        """The error page."""
        if error.status == 401:
            back = request.path + (f"?{request.query}" if request.query else "")
            location = f"{self._admin.base}/login?{urlencode({'next': back})}"
            return Response(status=303, headers=(("Location", location),), nsq_header=False)
        if error.code in ERRORS:
            words = ERRORS[error.code]
            title, reason = words[0].upper() + words[1:], str(error.more.get("reason", ""))
        else:
            is_upstream = error.code.startswith("UPSTREAM_ERROR")
            title = "No daemon answers" if is_upstream else "Request failed"
            reason = error_text(error)
        is_inactive = error.code == "NO_PRODUCERS" and "/topics/" in request.path
        topic = topic_and_channel(request)[0] if is_inactive else ""
        return self.render(
            request, "error.html", status=error.status, title=title, reason=reason, inactive_topic=topic
        )

    # Pages

    async def overview(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        problems = self._admin.problems()
        topics = self._watch.topics
        return self.render(
            request,
            "overview.html",
            problems=problems if request.parameters.get("all") else problems[:MAX_PROBLEMS],
            count=len(problems),
            totals=self._watch.totals.latest(()) or {},
            busiest=[(name, topics.latest((name,)) or {}) for (name,) in topics.top("in_rate", BUSIEST)],
        )

    async def topics(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        words = request.parameters.get("q", "").strip().lower()
        names = [name for name in self._watch.channels_of if words in name.lower()]
        rows = [(name, self._watch.topics.latest((name,)) or {}) for name in names[:MAX_ROWS]]
        return self.render(request, "topics.html", rows=rows, count=len(names), words=words)

    async def topic(self, request: Request) -> Response:
        (name,) = path_values(request)
        await self._watch.wait_for_first()
        found = await self._admin.cluster.topic(name)
        for one in found.value["channels"] or ():
            self._watch.add_drain(one)
        nodes = [part["node"] for part in found.value["nodes"]]
        return self.render(
            request,
            "topic.html",
            topic=name,
            stats=found.value,
            message=found.message,
            rates=self._watch.topics.latest((name,)) or {},
            channel_rates={
                one["channel_name"]: self._watch.channels.latest((name, one["channel_name"])) or {}
                for one in found.value["channels"] or ()
            },
            can_peek=self._any_has(nodes, PEEK),
        )

    async def channel(self, request: Request) -> Response:
        topic, name = path_values(request)
        await self._watch.wait_for_first()
        found = await self._admin.cluster.channel(topic, name)
        self._watch.add_drain(found.value)
        nodes = [part["node"] for part in found.value["nodes"]]
        return self.render(
            request,
            "channel.html",
            topic=topic,
            channel=name,
            stats=found.value,
            message=found.message,
            rates=self._watch.channels.latest((topic, name)) or {},
            client_rates={
                (client["node"], client["remote_address"]): self._watch.clients.latest(
                    (topic, name, client["node"], client["remote_address"])
                )
                for client in found.value["clients"] or ()
            },
            can_peek=self._any_has(nodes, PEEK),
            can_seek=self._any_has(nodes, SEEK),
        )

    def _any_has(self, nodes: list[str], feature: str) -> bool:
        states = (self._watch.nodes.get(address) for address in nodes)
        return any(state is not None and state.has(feature) for state in states)

    async def nodes(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        rows = [
            (state, self._watch.nodes_table.latest((address,)) or {})
            for address, state in self._watch.nodes.items()
        ]
        return self.render(request, "nodes.html", rows=rows, lookupds=self._admin.cluster.lookupds)

    async def node(self, request: Request) -> Response:
        (address,) = path_values(request)
        found = await self._admin.cluster.node_stats(address)
        words = request.parameters.get("q", "").strip().lower()
        wanted = [topic for topic in found.value["topics"] or () if words in topic["topic_name"].lower()]
        return self.render(
            request,
            "node.html",
            node=address,
            stats=found.value,
            words=words,
            topics=[*_within(wanted, MAX_NODE_ROWS)],
            count=len(wanted),
            message=found.message,
            state=self._watch.nodes.get(address),
            rates=self._watch.nodes_table.latest((address,)) or {},
        )

    async def lookup(self, request: Request) -> Response:
        cluster = self._admin.cluster
        message, inactive = "", {}
        try:
            found = await cluster.inactive()
            message, inactive = found.message, found.value
        except Unreachable as error:
            message = error.reason
        return self.render(
            request,
            "lookup.html",
            inactive=inactive,
            message=message,
            lookupds=cluster.lookupds,
            nsqds=cluster.nsqds,
        )

    async def counter(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        return self.render(request, "counter.html", totals=self._watch.totals.latest(()) or {})

    async def messages(self, request: Request) -> Response:
        topic, channel = topic_and_channel(request)
        parameters = request.parameters
        count = _whole(parameters, "count") or DEFAULT_COUNT
        start = _whole(parameters, "from")
        node, state = parameters.get("node", ""), parameters.get("state", "")
        nodes, found = await self._admin.operations.peek(
            topic, channel, node=node, count=min(count, MAX_COUNT), start=start, state=state
        )
        words = parameters.get("q", "")
        return self.render(
            request,
            "messages.html",
            topic=topic,
            channel=channel,
            nodes=nodes,
            found=found,
            shown=[one for one in found.messages if not words or one.contains(words)],
            words=words,
            count=min(count, MAX_COUNT),
            node=node,
            state=state,
            start=start,
            states=STATES,
            has_letters=any(one.letter is not None for one in found.messages),
        )

    async def replay(self, request: Request) -> Response:
        topic, channel = path_values(request)
        parameters = request.parameters
        to, when = parameters.get("to", ""), parameters.get("time", "")
        nodes = await self._admin.operations.nodes_with(topic, SEEK)
        plans: list[Plan] = []
        problem = ""
        if to:
            try:
                plans = await self._admin.operations.plan(topic, channel, parse_target(to, when))
            except BadTarget as error:
                problem = str(error)
        positions = await asyncio.gather(*(self._positions(node, topic) for node in nodes.able))
        return self.render(
            request,
            "replay.html",
            topic=topic,
            channel=channel,
            nodes=nodes,
            to=to,
            when=when,
            plans=plans,
            problem=problem,
            positions=[one for one in positions if one],
            now_s=time.time(),
        )

    async def _positions(self, node: Node, topic: str) -> dict[str, Any] | None:
        try:
            answer = await self._admin.cluster.get(node, "/topic/positions", topic=topic)
        except RequestFailed:  # the page works without it
            return None
        if not isinstance(answer, dict):
            return None
        names = ("messages", "bytes", "first_timestamp", "last_timestamp")
        return {"node": node.address, **{name: number(answer, name) for name in names}}

    async def pipelines(self, request: Request) -> Response:
        return self.render(request, "pipelines.html", pipelines=self._admin.pipelines)

    def page_of(self, *names: str, note: str = "") -> str:
        """The path of a page, with a note to show there."""
        path = self._admin.base + "".join(f"/{quote(name, safe='')}" for name in names) or "/"
        return f"{path}?note={note}" if note else path


def _within(topics: Iterable[Mapping[str, Any]], rows: int) -> Iterator[Mapping[str, Any]]:
    """As many topics, with their channels and consumers, as fit into `rows`; at least one."""
    for topic in topics:
        yield topic
        rows -= 1 + sum(1 + len(channel["clients"] or ()) for channel in topic["channels"])
        if rows <= 0:
            return


def _whole(parameters: Mapping[str, str], name: str) -> int | None:
    value = parameters.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
