"""The pages. Each handler collects the data for its template; render() makes the page.

The server renders everything and escapes every value. The script on a page draws the charts,
filters, and refreshes the live part of the page by asking for it with `live=1`. The pages also work
without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from nsparq.admin.change.operations import PEEK, SEEK
from nsparq.admin.change.policies import FEATURE as POLICIES
from nsparq.admin.change.policies import by_order, by_policy
from nsparq.admin.change.settings import DURABILITIES
from nsparq.admin.change.settings import FEATURE as SETTINGS
from nsparq.admin.collect.cluster import Unreachable
from nsparq.admin.collect.history import RANGES
from nsparq.admin.collect.search import Results, search
from nsparq.admin.health import Severity
from nsparq.admin.routing import path_values, topic_and_channel, with_etag
from nsparq.admin.security import FORM_TYPE, PAGE_HEADERS, TOKEN_COOKIE, cookie
from nsparq.admin.show.dead_letters import DeadLetterPages
from nsparq.admin.show.error_texts import ERRORS, error_text
from nsparq.admin.show.messages import LINES_TYPE, MessagePages
from nsparq.admin.show.nodes import NodePages
from nsparq.admin.show.order import Order, Paging
from nsparq.admin.show.templating import Assets, make_environment
from nsparq.http.api import ApiError, Endpoint, Request, Response

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["Pages"]

HTML_TYPE: Final = "text/html; charset=utf-8"
MAX_ROWS: Final = 200
"""Rows of a table on one page."""
CHANNEL_FIGURES: Final = (
    "depth",
    "oldest_message_age_s",
    "in_flight_count",
    "deferred_count",
    "requeue_count",
    "timeout_count",
    "dead_letter_count",
    "message_count",
    "client_count",
)
CLIENT_FIGURES: Final = (
    "in_flight_count",
    "ready_count",
    "finish_count",
    "requeue_count",
    "message_count",
    "connected",
)
MAX_PROBLEMS: Final = 20
"""Problems on the overview. A link shows all."""
BUSIEST: Final = 8
PIPELINE_COLUMNS: Final = (
    "name",
    "state",
    "lag",
    "rows_per_second",
    "rows",
    "batch_seconds",
    "last_batch",
    "dead_letters",
    "late",
    "failures",
)
PROBLEM_COUNT: Final = "X-Problem-Count"
"""Header with the number of problems, for open pages."""
Show = Callable[[Request], Awaitable["Response"]]


class Pages:
    """The handlers of one nsqadmin's pages."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin
        self._watch = admin.watch
        self.assets = Assets(admin.base, admin.options.dev_static_dir)
        self._environment = make_environment(self.assets, admin.base)

    def endpoints(self) -> list[Endpoint]:
        shown, nodes = MessagePages(self._admin), NodePages(self._admin)
        pages: list[tuple[str, str, Show, str]] = [
            ("/", "read", self.overview, "What needs attention."),
            ("/topics", "read", self.topics, "All topics."),
            ("/topics/{topic}", "read", self.topic, "A topic."),
            ("/topics/{topic}/{channel}", "read", self.channel, "A channel."),
            ("/nodes", "read", nodes.all, "All nodes."),
            ("/nodes/{node}", "read", nodes.one, "A node."),
            ("/lookup", "read", self.lookup, "nsqlookupds, and inactive topics."),
            ("/counter", "read", self.counter, "The message count."),
            ("/messages/{topic}", "subscribe", shown.messages, "Messages of a topic."),
            ("/messages/{topic}/{channel}", "subscribe", shown.messages, "Messages of a channel."),
            ("/replay/{topic}/{channel}", "admin", shown.replay, "Move a channel in its topic's log."),
            (
                "/dead_letters/{topic}",
                "subscribe",
                DeadLetterPages(self._admin).show,
                "Dead letters of a topic.",
            ),
            ("/pipelines", "read", self.pipelines, "Spark pipelines."),
            ("/search", "read", self.search, "Topics, channels, nodes and consumers by name."),
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
            for path, permission, handler, summary in pages
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
        download = Endpoint(
            group="Pages",
            method="POST",
            path="/download/{topic}",
            handler=shown.download,
            permission="subscribe",
            summary="The selected messages as a file.",
            keeps_body=True,
            body_type=FORM_TYPE,
            success="a JSON object for each message, one in a line",
            success_type=LINES_TYPE,
        )
        return [*found, download, *files]

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
            body = "".join(found.blocks["live"](found.new_context(context)))
        else:
            body = found.render(context)
        headers = list(PAGE_HEADERS)
        if not cookie(request, TOKEN_COOKIE):
            headers.append(guard.set_cookie(request, TOKEN_COOKIE, value))
        headers.append(("Cache-Control", "no-cache" if is_live else "no-store"))
        if is_live:
            headers.append((PROBLEM_COUNT, str(problem_count)))
        response = Response(
            status=status,
            body=body.encode("utf-8", "replace"),
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
            title = "Unknown: a daemon does not answer" if is_upstream else "Request failed"
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
            is_new=not self._watch.channels_of,
            cluster=self._admin.cluster,
            busiest=[(name, topics.latest((name,)) or {}) for (name,) in topics.top("in_rate", BUSIEST)],
        )

    async def topics(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        words = request.parameters.get("q", "").strip()
        rows = [
            (name, self._watch.topics.latest((name,)) or {})
            for name in self._watch.channels_of
            if words.lower() in name.lower()
        ]
        columns: dict[str, Callable[[Any], Any]] = {
            "name": lambda row: row[0].lower(),
            "channels": lambda row: len(self._watch.channels_of[row[0]]),
            **{figure: _figure(figure) for figure in self._watch.topics.figures},
        }
        order = Order(request, columns)
        paging = Paging(request, order.sorted(rows), MAX_ROWS)
        return self.render(request, "topics.html", paging=paging, order=order, words=words)

    async def topic(self, request: Request) -> Response:
        (name,) = path_values(request)
        await self._watch.wait_for_first()
        found = await self._admin.cluster.topic(name)
        for one in found.value["channels"] or ():
            self._watch.add_drain(one)
        nodes = [part["node"] for part in found.value["nodes"]]
        words = request.parameters.get("q", "").strip()
        channels = [
            (one, self._watch.channels.latest((name, one["channel_name"])) or {})
            for one in found.value["channels"] or ()
            if words.lower() in one["channel_name"].lower()
        ]
        columns: dict[str, Callable[[Any], Any]] = {
            "name": lambda row: row[0]["channel_name"].lower(),
            **{figure: _field(figure) for figure in CHANNEL_FIGURES},
            **{figure: _figure(figure) for figure in ("in_rate", "out_rate")},
        }
        order = Order(request, columns)
        can_set = self._any_has(nodes, SETTINGS)
        is_live = request.parameters.get("live") == "1"
        _, settings = await self._admin.settings.read(name) if can_set and not is_live else (None, [])
        return self.render(
            request,
            "topic.html",
            topic=name,
            stats=found.value,
            message=found.message,
            rates=self._watch.topics.latest((name,)) or {},
            order=order,
            paging=Paging(request, order.sorted(channels), MAX_ROWS),
            words=words,
            can_peek=self._any_has(nodes, PEEK),
            settings=settings,
            durabilities=DURABILITIES,
            **await self._policies(request, nodes, name),
        )

    async def channel(self, request: Request) -> Response:
        topic, name = path_values(request)
        await self._watch.wait_for_first()
        found = await self._admin.cluster.channel(topic, name)
        self._watch.add_drain(found.value)
        nodes = [part["node"] for part in found.value["nodes"]]
        clients = [
            (one, self._watch.clients.latest((topic, name, one["node"], one["remote_address"])) or {})
            for one in found.value["clients"] or ()
        ]
        columns: dict[str, Callable[[Any], Any]] = {
            "name": lambda row: row[0]["hostname"].lower(),
            "node": lambda row: row[0]["node"],
            **{figure: _field(figure) for figure in CLIENT_FIGURES},
            "finish_rate": _figure("finish_rate"),
        }
        order = Order(request, columns)
        return self.render(
            request,
            "channel.html",
            topic=topic,
            channel=name,
            stats=found.value,
            message=found.message,
            rates=self._watch.channels.latest((topic, name)) or {},
            order=order,
            paging=Paging(request, order.sorted(clients), MAX_ROWS),
            can_peek=self._any_has(nodes, PEEK),
            can_seek=self._any_has(nodes, SEEK),
            **await self._policies(request, nodes, topic, name),
        )

    async def _policies(
        self, request: Request, nodes: list[str], topic: str, channel: str = ""
    ) -> dict[str, Any]:
        """For policy.html and order.html."""
        if request.parameters.get("live") == "1" or not self._any_has(nodes, POLICIES):
            return {"policies": [], "policy_groups": [], "policy_errors": []}
        support, found = await self._admin.policies.read(topic, channel)
        return {
            "policies": found,
            "policy_groups": by_policy(found),
            "policy_errors": support.errors,
            "orders": by_order(found),
        }

    def _any_has(self, nodes: list[str], feature: str) -> bool:
        states = (self._watch.nodes.get(address) for address in nodes)
        return any(state is not None and state.has(feature) for state in states)

    async def search(self, request: Request) -> Response:
        await self._watch.wait_for_first()
        words = request.parameters.get("q", "").strip()
        found = search(self._watch, words) if words else Results()
        return self.render(request, "search.html", words=words, found=found)

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

    async def pipelines(self, request: Request) -> Response:
        order = Order(request, {name: methodcaller("get", name) for name in PIPELINE_COLUMNS})
        pipelines = self._admin.pipelines
        rows = order.sorted(pipelines.found)
        return self.render(request, "pipelines.html", pipelines=pipelines, rows=rows, order=order)

    def page_of(self, *names: str, note: str = "") -> str:
        """The path of a page, with a note to show there."""
        path = self._admin.base + "".join(f"/{quote(name, safe='')}" for name in names) or "/"
        return f"{path}?note={note}" if note else path


def _figure(name: str) -> Callable[[tuple[Any, Mapping[str, float]]], Any]:
    """A figure of the polls, of a row that has an object and its figures."""
    return lambda row: row[1].get(name)


def _field(name: str) -> Callable[[tuple[Mapping[str, Any], Any]], Any]:
    """A field of the object of such a row."""
    return lambda row: row[0][name]
