"""The pages: what is shown, gathered for the templates, and the forms on them.

Everything is rendered here, with every value escaped; the script on the pages only draws charts, filters, and
replaces the live part of a page by what it asks for again with `live=1`. Without it the pages work too.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from nsparq.admin.change.messages import DEFAULT_COUNT, MAX_COUNT, STATES
from nsparq.admin.change.operations import PEEK, SEEK
from nsparq.admin.change.replay import BadTarget, Plan, parse_target
from nsparq.admin.collect.cluster import Unreachable
from nsparq.admin.collect.history import RANGES
from nsparq.admin.collect.merge import Node, number
from nsparq.admin.collect.upstream import AskFailed
from nsparq.admin.health import Severity
from nsparq.admin.security import PAGE_HEADERS, TOKEN_COOKIE, cookie
from nsparq.admin.show.routing import path_values
from nsparq.admin.show.templating import Assets, make_environment
from nsparq.http.api import ApiError, Endpoint, Request, Response

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["Pages"]

HTML_TYPE: Final = "text/html; charset=utf-8"
MAX_ROWS: Final = 2000
"""Topics on one page; the filter finds the others."""
MAX_NODE_ROWS: Final = 400
"""The same on the page of a node, where a row has more to it."""
MAX_PROBLEMS: Final = 20
"""On the overview; the others are a click away."""
BUSIEST: Final = 8
PROBLEM_COUNT: Final = "X-Problem-Count"
"""Header by which an open page learns how many need a person."""
Show = Callable[[Request], Awaitable["Response"]]


class Pages:
    """The handlers of one nsqadmin's pages."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._watch = admin.watch
        self.assets = Assets(admin.base, admin.options.dev_static_dir)
        self._environment = make_environment(self.assets, admin.base)

    def endpoints(self) -> list[Endpoint]:
        shown: list[tuple[str, str, Show, str]] = [
            ("/", "read", self.overview, "What needs a person."),
            ("/topics", "read", self.topics, "All topics."),
            ("/topics/{topic}", "read", self.topic, "A topic."),
            ("/topics/{topic}/{channel}", "read", self.channel, "A channel."),
            ("/nodes", "read", self.nodes, "All nodes."),
            ("/nodes/{node}", "read", self.node, "A node."),
            ("/lookup", "read", self.lookup, "nsqlookupds, and topics that nobody has."),
            ("/counter", "read", self.counter, "One number."),
            ("/messages/{topic}", "subscribe", self.messages, "Messages of a topic."),
            ("/messages/{topic}/{channel}", "subscribe", self.messages, "Messages of a channel."),
            ("/replay/{topic}/{channel}", "admin", self.replay, "A channel moved in its log."),
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
                summary="What the pages are made of.",
                success="the file",
            )
            for folder in ("static", "fonts")
        ]
        return found + files

    # Rendering

    def render(self, request: Request, template: str, /, status: int = 200, **context: Any) -> Response:
        """A page; or its live part alone, if that is what is asked for."""
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
        body = text.encode("utf-8", "replace")
        headers = list(PAGE_HEADERS)
        if not cookie(request, TOKEN_COOKIE):
            headers.append(guard.set_cookie(request, TOKEN_COOKIE, value))
        if is_live:
            tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            headers += [("ETag", tag), ("Cache-Control", "no-cache"), (PROBLEM_COUNT, str(problem_count))]
            if request.header("If-None-Match") == tag:
                return Response(status=304, headers=tuple(headers), nsq_header=False)
        else:
            headers.append(("Cache-Control", "no-store"))
        return Response(
            status=status, body=body, content_type=HTML_TYPE, headers=tuple(headers), nsq_header=False
        )

    def error(self, request: Request, error: ApiError) -> Response:
        """A page that says what is wrong."""
        if error.status == 401:
            back = request.path + (f"?{request.query}" if request.query else "")
            location = f"{self._admin.base}/login?{urlencode({'next': back})}"
            return Response(status=303, headers=(("Location", location),), nsq_header=False)
        titles = {
            "TOPIC_NOT_FOUND": "There is no such topic",
            "CHANNEL_NOT_FOUND": "There is no such channel",
            "NODE_NOT_FOUND": "There is no such node",
            "NO_PRODUCERS": "No node has this topic",
            "FORBIDDEN": "You may not do this",
        }
        is_upstream = error.code.startswith("UPSTREAM_ERROR")
        title = "Nobody answers" if is_upstream else titles.get(error.code, "This did not work")
        reason = str(error.more.get("reason", "")) or (error.code if title != titles.get(error.code) else "")
        names = path_values(request) if request.path_value else []
        is_idle = error.code == "NO_PRODUCERS" and "/topics/" in request.path
        return self.render(
            request,
            "error.html",
            status=error.status,
            title=title,
            reason=reason,
            idle_topic=names[0] if is_idle and names else "",
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
        found = await self._admin.json_api.topic_stats(name)
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
        found = await self._admin.json_api.channel_stats(topic, name)
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
        found = await self._admin.json_api.node_stats(address)
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
        message, idle = "", {}
        try:
            found = await cluster.inactive()
            message, idle = found.message, found.value
        except Unreachable as error:
            message = str(error)
        return self.render(
            request, "lookup.html", idle=idle, message=message, lookupds=cluster.lookupds, nsqds=cluster.nsqds
        )

    async def counter(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        return self.render(request, "counter.html", totals=self._watch.totals.latest(()) or {})

    async def messages(self, request: Request) -> Response:
        topic, channel = [*path_values(request), ""][:2]
        parameters = request.parameters
        count = _whole(parameters, "count") or DEFAULT_COUNT
        start = _whole(parameters, "from")
        node, state = parameters.get("node", ""), parameters.get("state", "")
        able, found = await self._admin.operations.peek(
            topic, channel, node=node, count=min(count, MAX_COUNT), start=start, state=state
        )
        words = parameters.get("q", "")
        return self.render(
            request,
            "messages.html",
            topic=topic,
            channel=channel,
            able=able,
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
        able = await self._admin.operations.nodes_with(topic, SEEK)
        plans: list[Plan] = []
        problem = ""
        if to:
            try:
                plans = await self._admin.operations.plan(topic, channel, parse_target(to, when))
            except BadTarget as error:
                problem = str(error)
        positions = await asyncio.gather(*(self._positions(node, topic) for node in able.able))
        return self.render(
            request,
            "replay.html",
            topic=topic,
            channel=channel,
            able=able,
            to=to,
            when=when,
            plans=plans,
            problem=problem,
            positions=[one for one in positions if one],
            now_s=time.time(),
        )

    async def _positions(self, node: Node, topic: str) -> dict[str, Any] | None:
        try:
            said = await self._admin.cluster.get(node, "/topic/positions", topic=topic)
        except AskFailed:  # the page says what it can without it
            return None
        if not isinstance(said, dict):
            return None
        names = ("messages", "bytes", "first_timestamp", "last_timestamp")
        return {"node": node.address, **{name: number(said, name) for name in names}}

    async def pipelines(self, request: Request) -> Response:
        return self.render(request, "pipelines.html", pipelines=self._admin.pipelines)

    # Places

    def page_of(self, *names: str, note: str = "") -> str:
        """The path of a page, with a note to be shown there."""
        path = self._admin.base + "".join(f"/{quote(name, safe='')}" for name in names) or "/"
        return f"{path}?note={note}" if note else path


def _within(topics: Iterable[Mapping[str, Any]], rows: int) -> Iterator[Mapping[str, Any]]:
    """As many topics as fit, with their channels and consumers, into so many rows; one at the least."""
    for topic in topics:
        yield topic
        rows -= 1 + sum(1 + len(channel["clients"] or ()) for channel in topic["channels"])
        if rows <= 0:
            return


def _whole(parameters: Mapping[str, str], name: str) -> int | None:
    value = parameters.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
