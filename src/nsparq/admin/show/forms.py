"""The forms of the pages: what they ask for is done, and the browser is sent to the page that shows it.

What cannot be undone must be confirmed by typing the name of what it concerns.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from nsparq.admin.change.actions import Refused, audit
from nsparq.admin.change.actor import Actor
from nsparq.admin.change.messages import MAX_BODY
from nsparq.admin.change.replay import BadTarget, parse_target
from nsparq.admin.security import SESSION_COOKIE, Access, cookie
from nsparq.http.api import ApiError, Endpoint, Request, Response
from nsparq.server.auth.grants import AuthFailed

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["ACTIONS", "Form", "FormAction", "Forms", "Note", "Notes"]

MAX_NOTES: Final = 1000
MAX_FIELDS: Final = 2000


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


class _Filled(NamedTuple):
    """A form that somebody has sent."""

    form: Form
    actor: Actor
    access: Access

    @property
    def topic(self) -> str:
        return self.form["topic"]

    @property
    def channel(self) -> str:
        return self.form["channel"]

    @property
    def node(self) -> str:
        return self.form["node"]


class FormAction(NamedTuple):
    """What a form can ask for, and what that takes."""

    run: Callable[[Forms, _Filled], Awaitable[Note]]
    needs: str = "admin"
    """The permission."""
    is_of_channel: bool = False
    """Whether it concerns the form's channel alone, if there is one. Anything else concerns the whole topic,
    whatever else the form says: then a permission for one channel is not enough."""
    is_confirmed: bool = False
    """Whether the name of what it concerns must be typed."""


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
            checks_names=True,
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
        name = form["action"]
        guard = self._admin.guard
        filled = _Filled(form, guard.actor(request), guard.access(request))
        action = ACTIONS.get(name)
        if action is None:
            raise ApiError(400, "INVALID_ACTION")
        channel = filled.channel if action.is_of_channel else ""
        if not filled.access.may(action.needs, filled.topic, channel):
            names = {"topic": filled.topic, "channel": filled.channel, "node": filled.node}
            raise Refused(f"{name}_form", filled.actor, **names)
        if action.is_confirmed:
            expected = channel or filled.topic
            if not expected or form["confirm"].strip() != expected:
                note = Note(f"Not done: to confirm, type {expected} exactly.", is_good=False)
                return self._go(self._place(name, form), note)
        try:
            said = await action.run(self, filled)
        except Refused:
            raise
        except ApiError as error:
            reason = str(error.more.get("reason", "")) or error.code
            return self._go(self._place(name, form), Note(f"Not done: {reason}", is_good=False))
        return self._go(self._place(name, form, is_done=True), said)

    async def _create(self, filled: _Filled) -> Note:
        actions = self._admin.actions
        said = await actions.create(filled.actor, filled.access, filled.topic, filled.channel)
        return _done("Created.", said)

    async def _delete(self, filled: _Filled) -> Note:
        actions, topic, channel = self._admin.actions, filled.topic, filled.channel
        if channel:
            return _done(f"Deleted {channel}.", await actions.delete_channel(filled.actor, topic, channel))
        return _done(f"Deleted {topic}.", await actions.delete_topic(filled.actor, topic))

    async def _change(self, filled: _Filled) -> Note:
        name = filled.form["action"]
        done = {"pause": "Paused.", "unpause": "Resumed.", "empty": "Emptied."}[name]
        actions, topic, channel = self._admin.actions, filled.topic, filled.channel
        if channel:
            return _done(done, await actions.change_channel(filled.actor, name, topic, channel))
        return _done(done, await actions.change_topic(filled.actor, name, topic))

    async def _tombstone(self, filled: _Filled) -> Note:
        said = await self._admin.actions.tombstone(filled.actor, filled.topic, filled.node)
        return _done(f"{filled.topic} is taken off {filled.node}.", said)

    async def _publish(self, filled: _Filled) -> Note:
        form = filled.form
        body = form["body"].replace("\r\n", "\n").encode()
        where = await self._admin.operations.publish(
            filled.actor, filled.topic, body, node=filled.node, defer_ms=form.number("defer_ms")
        )
        return Note(f"Published to {where}.")

    async def _copy(self, filled: _Filled) -> Note:
        form = filled.form
        copied = await self._admin.operations.copy(
            filled.actor,
            filled.access,
            filled.topic,
            [_chosen(value) for value in form.all("message")],
            to=form["to"].strip(),
            unwrap=form["unwrap"] == "1",
        )
        return Note(f"Published {copied:,} once more.")

    async def _move(self, filled: _Filled) -> Note:
        form = filled.form
        moved, left = await self._admin.operations.move(
            filled.actor,
            filled.access,
            filled.topic,
            filled.channel,
            to=form["to"].strip(),
            unwrap=form["unwrap"] == "1",
            count=form.number("count"),
        )
        return Note(f"Moved {moved:,}; {left:,} are left.")

    async def _seek(self, filled: _Filled) -> Note:
        try:
            target = parse_target(filled.form["to"], filled.form["time"])
        except BadTarget as error:
            raise ApiError(400, str(error)) from error
        plans = await self._admin.operations.replay(filled.actor, filled.topic, filled.channel, target)
        again, skipped = sum(p.again for p in plans), sum(p.skipped for p in plans)
        warning = "; ".join(f"{p.node}: {p.error}" for p in plans if p.error)
        return _done(f"Done: {again:,} messages come again, {skipped:,} are skipped.", warning)

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


ACTIONS: Final[Mapping[str, FormAction]] = {
    "create": FormAction(Forms._create, is_of_channel=True),
    "delete": FormAction(Forms._delete, is_of_channel=True, is_confirmed=True),
    "pause": FormAction(Forms._change, is_of_channel=True),
    "unpause": FormAction(Forms._change, is_of_channel=True),
    "empty": FormAction(Forms._change, is_of_channel=True, is_confirmed=True),
    "tombstone": FormAction(Forms._tombstone, is_confirmed=True),
    "publish": FormAction(Forms._publish, needs="publish"),
    "copy": FormAction(Forms._copy),
    "move": FormAction(Forms._move, is_of_channel=True, is_confirmed=True),
    "seek": FormAction(Forms._seek, is_of_channel=True, is_confirmed=True),
}
"""By the form's field `action`."""


def _done(text: str, warning: str) -> Note:
    return Note(f"{text} {warning}", is_good=False) if warning else Note(text)


def _chosen(value: str) -> tuple[str, int]:
    """A message among those shown: its number, and its node."""
    sequence, _, node = value.partition("@")
    if not (sequence.isascii() and sequence.isdigit()) or len(sequence) > 19:
        raise ApiError(400, "INVALID_MESSAGE")
    return node, int(sequence)
