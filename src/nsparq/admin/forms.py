"""The forms of the pages: what they ask for is done, and the browser is sent to the page that shows it.

What cannot be undone must be confirmed by typing the name of what it concerns.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, urlsplit

from nsparq.admin.actions import Refused, audit
from nsparq.admin.actor import Actor
from nsparq.admin.messages import MAX_BODY
from nsparq.admin.replay import BadTarget, parse_target
from nsparq.admin.security import SESSION_COOKIE, cookie
from nsparq.http.api import ApiError, Endpoint, Request, Response
from nsparq.server.auth import AuthFailed

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["Form", "Forms", "Note", "Notes"]

MAX_NOTES: Final = 1000
MAX_FIELDS: Final = 2000
CONFIRMED: Final = ("delete", "empty", "tombstone", "seek", "move")
"""What must be confirmed by name."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is said on the next page."""

    text: str
    is_good: bool = True


class Notes:
    """Kept until they are shown, each once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Note] = OrderedDict()

    def leave(self, note: Note) -> str:
        name = secrets.token_urlsafe(9)
        self._waiting[name] = note
        if len(self._waiting) > MAX_NOTES:
            self._waiting.popitem(last=False)
        return name

    def take(self, name: str) -> Note | None:
        return self._waiting.pop(name, None)


class Form:
    """What was filled in; of a repeated field all values."""

    def __init__(self, body: bytes) -> None:
        try:
            self._fields: Mapping[str, list[str]] = parse_qs(
                body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS
            )
        except ValueError:
            raise ApiError(413, "TOO_MANY_FIELDS") from None

    def __getitem__(self, name: str) -> str:
        return self._fields.get(name, [""])[0]

    def all(self, name: str) -> list[str]:
        return self._fields.get(name, [])

    def number(self, name: str) -> int:
        value = self[name].strip()
        if not value:
            return 0
        if not (value.isascii() and value.isdigit()) or len(value) > 12:
            raise ApiError(400, f"{name} must be a number")
        return int(value)


class Forms:
    """The handlers of one nsqadmin."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin

    def endpoints(self) -> list[Endpoint]:
        act = Endpoint(
            group="Pages",
            method="POST",
            path="/act",
            handler=self.act,
            summary="What the forms of the pages send.",
            permission="read",
            keeps_body=True,
            max_body=4 * MAX_BODY,
            body_type="application/x-www-form-urlencoded",
        )
        if not self._admin.guard.has_login:
            return [act]
        return [
            act,
            Endpoint(group="Pages", method="GET", path="/login", handler=self.show_login, summary="Log in."),
            Endpoint(
                group="Pages",
                method="POST",
                path="/login",
                handler=self.log_in,
                summary="Log in.",
                keeps_body=True,
                max_body=64 << 10,
                body_type="application/x-www-form-urlencoded",
            ),
            Endpoint(
                group="Pages",
                method="POST",
                path="/logout",
                handler=self.log_out,
                summary="Log out.",
                keeps_body=True,
                body_type="application/x-www-form-urlencoded",
            ),
        ]

    # Acting

    async def act(self, request: Request) -> Response:
        form = Form(request.body)
        action, topic, channel, node = form["action"], form["topic"], form["channel"], form["node"]
        access = self._admin.guard.access(request)
        actor = self._admin.guard.actor(request)
        names = {"topic": topic, "channel": channel, "node": node}
        is_allowed = (
            access.may("publish", topic) if action == "publish" else access.may("admin", topic, channel)
        )
        if not is_allowed:
            raise Refused(f"{action}_form"[:50], actor, **names)
        if action in CONFIRMED:
            expected = channel or topic
            if not expected or form["confirm"].strip() != expected:
                note = Note(f"Not done: to confirm, type {expected} exactly.", is_good=False)
                return self._go(self._place(action, form), note)
        try:
            said = await self._run(action, actor, form, request)
        except ApiError as error:
            reason = str(error.more.get("reason", "")) or error.code
            return self._go(self._place(action, form), Note(f"Not done: {reason}", is_good=False))
        return self._go(self._place(action, form, is_done=True), said)

    async def _run(self, action: str, actor: Actor, form: Form, request: Request) -> Note:
        topic, channel, node = form["topic"], form["channel"], form["node"]
        actions, operations = self._admin.actions, self._admin.operations
        access = self._admin.guard.access(request)
        match action:
            case "create":
                return _done("Created.", await actions.create(actor, topic, channel))
            case "delete" if channel:
                return _done(f"Deleted {channel}.", await actions.delete_channel(actor, topic, channel))
            case "delete":
                return _done(f"Deleted {topic}.", await actions.delete_topic(actor, topic))
            case "pause" | "unpause" | "empty" if channel:
                done = {"pause": "Paused.", "unpause": "Resumed.", "empty": "Emptied."}[action]
                return _done(done, await actions.change_channel(actor, action, topic, channel))
            case "pause" | "unpause" | "empty":
                done = {"pause": "Paused.", "unpause": "Resumed.", "empty": "Emptied."}[action]
                return _done(done, await actions.change_topic(actor, action, topic))
            case "tombstone":
                said = await actions.tombstone(actor, topic, node)
                return _done(f"{topic} is taken off {node}.", said)
            case "publish":
                body = form["body"].replace("\r\n", "\n").encode()
                where = await operations.publish(
                    actor, topic, body, node=node, defer_ms=form.number("defer_ms")
                )
                return Note(f"Published to {where}.")
            case "copy":
                chosen = [_chosen(value) for value in form.all("message")]
                copied = await operations.copy(
                    actor, access, topic, chosen, to=form["to"].strip(), unwrap=form["unwrap"] == "1"
                )
                return Note(f"Published {copied:,} once more.")
            case "move":
                moved, left = await operations.move(
                    actor,
                    access,
                    topic,
                    channel,
                    to=form["to"].strip(),
                    unwrap=form["unwrap"] == "1",
                    count=form.number("count"),
                )
                return Note(f"Moved {moved:,}; {left:,} are left.")
            case "seek":
                try:
                    target = parse_target(form["to"], form["time"])
                except BadTarget as error:
                    raise ApiError(400, str(error)) from error
                plans = await operations.replay(actor, topic, channel, target)
                again, skipped = sum(p.again for p in plans), sum(p.skipped for p in plans)
                warning = "; ".join(f"{p.node}: {p.error}" for p in plans if p.error)
                return _done(f"Done: {again:,} messages come again, {skipped:,} are skipped.", warning)
        raise ApiError(400, "INVALID_ACTION")

    def _place(self, action: str, form: Form, *, is_done: bool = False) -> tuple[str, ...]:
        """Which page shows what came of it. Made of names, so it is always one of ours."""
        topic, channel, node, origin = form["topic"], form["channel"], form["node"], form["page"]
        if origin == "lookup":
            return ("lookup",)
        if action in ("publish", "copy", "move"):
            return ("messages", topic, channel) if channel else ("messages", topic)
        if action == "seek" and not is_done:
            return ("replay", topic, channel)
        if action == "tombstone":
            return ("nodes", node) if origin == "node" else ("topics", topic)
        if action == "create" and not is_done:
            return ("topics",)
        if action == "delete" and is_done:
            return ("topics", topic) if channel else ("topics",)
        if origin == "node":
            return ("nodes", node)
        if channel and not (action == "create" and origin == "topic"):
            return ("topics", topic, channel)
        return ("topics", topic) if topic else ("topics",)

    def _go(self, place: tuple[str, ...], note: Note) -> Response:
        location = self._admin.pages.page_of(*place, note=self._admin.notes.leave(note))
        return Response(status=303, headers=(("Location", location),), nsq_header=False)

    # Logging in

    async def show_login(self, request: Request) -> Response:
        back = request.parameters.get("next", "")
        return self._admin.pages.render(request, "login.html", back=back, failed=False)

    async def log_in(self, request: Request) -> Response:
        form = Form(request.body)
        guard = self._admin.guard
        actor = Actor.of(request, form["name"])
        try:
            session = await guard.log_in(request, form["name"].strip(), form["password"])
        except AuthFailed as error:
            audit("log_in", actor, f"failed - {error}")
            return self._admin.pages.render(request, "login.html", status=401, back=form["next"], failed=True)
        grant = guard.sessions.find(session)
        audit("log_in", Actor.of(request, grant.identity if grant else form["name"]), "done")
        headers = (
            ("Location", self._own_path(form["next"])),
            guard.set_cookie(request, SESSION_COOKIE, session),
        )
        return Response(status=303, headers=headers, nsq_header=False)

    async def log_out(self, request: Request) -> Response:
        guard = self._admin.guard
        audit("log_out", guard.actor(request), "done")
        guard.sessions.end(cookie(request, SESSION_COOKIE))
        headers = (
            ("Location", f"{self._admin.base}/login"),
            guard.set_cookie(request, SESSION_COOKIE, ""),
        )
        return Response(status=303, headers=headers, nsq_header=False)

    def _own_path(self, wanted: str) -> str:
        """Where to go after logging in: a page of ours, whatever the form says."""
        home = self._admin.base or "/"
        try:
            parts = urlsplit(wanted)
        except ValueError:
            return home
        is_own = not parts.scheme and not parts.netloc and parts.path.startswith(f"{self._admin.base}/")
        is_plain = wanted.isascii() and wanted.isprintable() and "\\" not in wanted and wanted[:2] != "//"
        return wanted if is_own and is_plain else home


def _done(text: str, warning: str) -> Note:
    return Note(f"{text} {warning}", is_good=False) if warning else Note(text)


def _chosen(value: str) -> tuple[str, int]:
    """A message among those shown: its number, and its node."""
    sequence, _, node = value.partition("@")
    if not (sequence.isascii() and sequence.isdigit()) or len(sequence) > 19:
        raise ApiError(400, "INVALID_MESSAGE")
    return node, int(sequence)
