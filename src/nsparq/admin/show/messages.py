"""The pages about messages: those of a topic or channel, their download, and replay."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from nsparq.admin.change.actions import audit
from nsparq.admin.change.messages import Stored
from nsparq.admin.change.operations import SEEK, BadTarget, Plan, parse_target
from nsparq.admin.collect.browse import MAX_GROUPED, BadPlace, Place, Wanted
from nsparq.admin.collect.filter import BadFilter, Filter
from nsparq.admin.collect.messages import DEFAULT_COUNT, MAX_COUNT, STATES
from nsparq.admin.routing import path_values, topic_and_channel
from nsparq.admin.show.form import Form, chosen_message
from nsparq.http.api import Request, Response

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["BadQuery", "MessagePages", "wanted_of"]

COUNTS: Final = (20, 50, 200, 1000)
MAX_PAGE_TEXT: Final = 1_000_000
"""Characters of bodies on a page of messages, roughly."""
LEAST_SHOWN: Final = 2000
"""Characters that are shown of every body."""
STATE: Final = ("q", "node", "state", "count", "before", "after", "from", "time", "tail")
"""The parameters that the address of a page of messages keeps."""
LINES_TYPE: Final = "application/x-ndjson"

BadQuery = (BadFilter, BadPlace, BadTarget)


def wanted_of(parameters: Mapping[str, str], default_count: int = DEFAULT_COUNT) -> Wanted:
    """Which messages a request asks for. Raises one of BadQuery."""
    count, start = _whole(parameters, "count"), _whole(parameters, "from")
    before, after, when = (parameters.get(name, "") for name in ("before", "after", "time"))
    state = parameters.get("state", "")
    return Wanted(
        count=min(count or default_count, MAX_COUNT),
        before=Place.parse(before) if before and not after else None,
        after=Place.parse(after) if after else None,
        start=start if not (before or after) else None,
        time=parse_target("time", when)["time"] if when and start is None and not (before or after) else "",
        state=state if state in STATES else "",
        filter=Filter(parameters.get("q", "")),
    )


def as_lines(topic: str, found: list[tuple[str, int, Stored]]) -> bytes:
    """A JSON object for each message, with its whole body."""
    lines = []
    for node, sequence, (body, headers) in found:
        line: dict[str, Any] = {"topic": topic, "node": node, "sequence": sequence}
        if headers:
            line["headers"] = headers
        try:
            line["body"] = body.decode()
        except UnicodeDecodeError:
            line["body_base64"] = base64.b64encode(body).decode()
        lines.append(json.dumps(line, ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines).encode()


class MessagePages:
    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin

    async def messages(self, request: Request) -> Response:
        topic, channel = topic_and_channel(request)
        parameters = request.parameters
        problem = ""
        try:
            wanted = wanted_of(parameters)
        except BadQuery as error:
            problem, wanted = str(error), Wanted()
        is_start = not (wanted.before or wanted.after)
        nodes, found = await self._admin.operations.browse(
            topic, channel, wanted, node=parameters.get("node", ""), with_reasons=is_start
        )
        kept = {name: parameters[name] for name in STATE if parameters.get(name)}
        here = self._admin.pages.page_of("messages", topic, *([channel] if channel else []))

        def link(**changes: str) -> str:
            """The address of this page with other parameters. Another place or filter replaces the
            present place."""
            left = {n: v for n, v in kept.items() if n not in ("before", "after", "from", "time", "tail")}
            query = {name: value for name, value in {**left, **changes}.items() if value}
            return f"{here}?{urlencode(query)}" if query else here

        return self._admin.pages.render(
            request,
            "messages.html",
            topic=topic,
            channel=channel,
            nodes=nodes,
            found=found,
            problem=problem,
            asked=parameters,
            wanted=wanted,
            here=here,
            link=link,
            is_start=is_start and wanted.is_backward,
            is_tail=parameters.get("tail") == "1" and is_start and wanted.is_backward,
            counts=sorted({*COUNTS, wanted.count}),
            states=STATES,
            max_grouped=MAX_GROUPED,
            shown_length=max(LEAST_SHOWN, MAX_PAGE_TEXT // max(1, len(found.messages))),
            has_letters=any(one.letter is not None for one in found.messages),
        )

    async def download(self, request: Request) -> Response:
        """The selected messages as a file, with their whole bodies."""
        (topic,) = path_values(request)
        chosen = [chosen_message(value) for value in Form(request.body).all("message")]
        found = await self._admin.operations.whole(topic, chosen)
        audit("download_messages", self._admin.guard.actor(request), f"done, {len(found)}", topic=topic)
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in topic)
        return Response(
            body=as_lines(topic, found),
            content_type=LINES_TYPE,
            headers=(("Content-Disposition", f'attachment; filename="{name}.jsonl"'),),
            nsq_header=False,
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
                plans, _ = await self._admin.operations.plan(topic, channel, parse_target(to, when))
            except BadTarget as error:
                problem = str(error)
        _, settings = await self._admin.settings.read(topic)
        return self._admin.pages.render(
            request,
            "replay.html",
            topic=topic,
            channel=channel,
            nodes=nodes,
            to=to,
            when=when,
            plans=plans,
            problem=problem,
            settings=settings,
            now_s=time.time(),
        )


def _whole(parameters: Mapping[str, str], name: str) -> int | None:
    value = parameters.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None
