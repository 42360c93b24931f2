"""The forms of the pages. A POST to /act makes the change, then redirects to a page that shows the
outcome.

ACTIONS lists the changes. Those that cannot be undone must be confirmed by typing the name of the
topic or channel.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from nsparq.admin.change.actions import Forbidden, audit
from nsparq.admin.change.messages import MAX_BODY
from nsparq.admin.change.operations import BadTarget, parse_target
from nsparq.admin.change.policies import FIELDS, parse_fields
from nsparq.admin.change.settings import NAMES, BadSetting, parse_setting
from nsparq.admin.security import FORM_TYPE, SESSION_COOKIE, Access, Actor, cookie
from nsparq.admin.show.dead_letters import FILTER, filter_of
from nsparq.admin.show.error_texts import error_text
from nsparq.admin.show.form import Form, chosen_message
from nsparq.http.api import ApiError, Endpoint, Handler, Request, Response
from nsparq.server.auth.grants import AuthFailed

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin

__all__ = ["ACTIONS", "FormAction", "Forms", "Note", "Notes"]

MAX_NOTES: Final = 1000


@dataclass(frozen=True, slots=True)
class Note:
    """A message at the top of the next page."""

    text: str
    is_good: bool = True


class Notes:
    """Notes that wait to be shown. Each is shown once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Note] = OrderedDict()

    def add(self, note: Note) -> str:
        """Returns its name, for the query of the next page."""
        name = secrets.token_urlsafe(9)
        self._waiting[name] = note
        if len(self._waiting) > MAX_NOTES:
            self._waiting.popitem(last=False)
        return name

    def take(self, name: str) -> Note | None:
        return self._waiting.pop(name, None)


class _Sent(NamedTuple):
    """A form and who sent it."""

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
    """A change that a form can ask for."""

    run: Callable[[Forms, _Sent], Awaitable[Note]]
    permission: str = "admin"
    is_of_channel: bool = False
    """It changes only the form's channel, if there is one. Other actions change the whole topic,
    whatever the form's channel: a permission for one channel is not enough for them."""
    is_of_node: bool = False
    """It changes a whole node, whatever topic the form names."""
    is_confirmed: bool = False
    """The user must type the name of the channel or topic."""


class Forms:
    """The handlers of one nsqadmin."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin

    def endpoints(self) -> list[Endpoint]:
        act = _post(
            "/act",
            self.act,
            "Changes from the forms of the pages.",
            permission="read",
            checks_names=True,
            max_body=4 * MAX_BODY,
        )
        if not self._admin.guard.has_login:
            return [act]
        return [
            act,
            Endpoint(group="Pages", method="GET", path="/login", handler=self.show_login, summary="Log in."),
            _post("/login", self.log_in, "Log in.", max_body=64 << 10),
            _post("/logout", self.log_out, "Log out."),
        ]

    # Acting

    async def act(self, request: Request) -> Response:
        form = Form(request.body)
        name = form["action"]
        guard = self._admin.guard
        sent = _Sent(form, guard.actor(request), guard.access(request))
        action = ACTIONS.get(name)
        if action is None:
            raise ApiError(400, "INVALID_ACTION")
        channel = sent.channel if action.is_of_channel else ""
        topic = "" if action.is_of_node else sent.topic
        if not sent.access.may(action.permission, topic, channel):
            names = {"topic": sent.topic, "channel": sent.channel, "node": sent.node}
            raise Forbidden(f"{name}_form", sent.actor, **names)
        if action.is_confirmed:
            expected = channel or sent.topic
            if not expected or form["confirm"].strip() != expected:
                note = Note(f"Not confirmed: type {expected} exactly.", is_good=False)
                return self._go(self._place(name, form), note)
        try:
            note = await action.run(self, sent)
        except Forbidden:
            raise
        except ApiError as error:
            return self._go(self._place(name, form), Note(f"Failed: {error_text(error)}", is_good=False))
        return self._go(self._place(name, form, is_done=True), note)

    async def _create(self, sent: _Sent) -> Note:
        actions = self._admin.actions
        warning = await actions.create(sent.actor, sent.access, sent.topic, sent.channel)
        return _done("Created.", warning)

    async def _delete(self, sent: _Sent) -> Note:
        topic, channel = sent.topic, sent.channel
        warning = await self._admin.actions.delete(sent.actor, topic, channel)
        return _done(f"Deleted {channel or topic}.", warning)

    async def _change(self, sent: _Sent) -> Note:
        name = sent.form["action"]
        done = {"pause": "Paused.", "unpause": "Resumed.", "empty": "Emptied."}[name]
        return _done(done, await self._admin.actions.change(sent.actor, name, sent.topic, sent.channel))

    async def _tombstone(self, sent: _Sent) -> Note:
        warning = await self._admin.actions.tombstone(sent.actor, sent.topic, sent.node)
        return _done(f"Removed {sent.topic} from {sent.node}.", warning)

    async def _switch_over(self, sent: _Sent) -> Note:
        warning = await self._admin.actions.switch_over(sent.actor, sent.node)
        return _done(f"{sent.node} hands over. A follower serves within seconds.", warning)

    async def _publish(self, sent: _Sent) -> Note:
        form = sent.form
        body = form["body"].replace("\r\n", "\n").encode()
        address = await self._admin.operations.publish(
            sent.actor,
            sent.topic,
            body,
            node=sent.node,
            defer_ms=form.number("defer_ms"),
            headers=_headers_of(form["headers"]),
        )
        return Note(f"Published to {address}.")

    async def _copy(self, sent: _Sent) -> Note:
        form = sent.form
        copied = await self._admin.operations.copy(
            sent.actor,
            sent.access,
            sent.topic,
            [chosen_message(value) for value in form.all("message")],
            to=form["to"].strip(),
            unwrap=form["unwrap"] == "1",
        )
        return Note(f"Messages published again: {copied:,}.")

    async def _move(self, sent: _Sent) -> Note:
        form = sent.form
        moved, left, warning = await self._admin.operations.move(
            sent.actor,
            sent.access,
            sent.topic,
            sent.channel,
            to=form["to"].strip(),
            unwrap=form["unwrap"] == "1",
            count=form.number("count"),
        )
        return _done(f"Messages moved: {moved:,}; left in the channel: {left:,}.", warning)

    async def _seek(self, sent: _Sent) -> Note:
        try:
            target = parse_target(sent.form["to"], sent.form["time"])
        except BadTarget as error:
            raise ApiError(400, str(error)) from error
        plans, warning = await self._admin.operations.replay(sent.actor, sent.topic, sent.channel, target)
        again, skipped = sum(p.again for p in plans), sum(p.skipped for p in plans)
        return _done(f"Channel moved. Messages delivered again: {again:,}; skipped: {skipped:,}.", warning)

    async def _settings(self, sent: _Sent) -> Note:
        try:
            changes = {name: parse_setting(name, sent.form[name]) for name in NAMES if sent.form.all(name)}
        except BadSetting as error:
            raise ApiError(400, str(error)) from error
        if not changes:
            raise ApiError(400, "NOTHING_CHOSEN")
        warning = await self._admin.settings.change(sent.actor, sent.topic, changes)
        return _done("Settings changed. They apply from now on.", warning)

    async def _policy(self, sent: _Sent) -> Note:
        values = None
        if sent.form["action"] == "policy":
            try:
                values = parse_fields({name: sent.form[name] for name in FIELDS})
            except BadSetting as error:
                raise ApiError(400, str(error)) from error
        warning = await self._admin.policies.change(sent.actor, sent.access, sent.topic, sent.channel, values)
        return _done("Policy removed." if values is None else "Policy set. It applies from now on.", warning)

    async def _order(self, sent: _Sent) -> Note:
        ordered_by = sent.form["ordered_by"].strip() if sent.form["action"] == "order" else None
        warning = await self._admin.policies.order(sent.actor, sent.topic, sent.channel, ordered_by)
        done = "The channel has no order now." if ordered_by is None else "Order set. It applies from now on."
        return _done(done, warning)

    async def _redrive(self, sent: _Sent) -> Note:
        form = sent.form
        try:
            wanted = filter_of({name: form[name] for name in FILTER})
        except BadTarget as error:
            raise ApiError(400, str(error)) from error
        warning = await self._admin.dead_letters.redrive(
            sent.actor, sent.access, sent.topic, form["origin"], wanted, form["rate"].strip()
        )
        return _done("The redrive has begun.", warning)

    async def _cancel_redrive(self, sent: _Sent) -> Note:
        warning = await self._admin.dead_letters.cancel(sent.actor, sent.topic)
        return _done("The redrive has ended. Letters that were not put back stay as they are.", warning)

    def _place(self, action: str, form: Form, *, is_done: bool = False) -> tuple[str, ...]:
        """The page for the outcome, as names: so it is always one of our own pages."""
        topic, channel, node, origin = form["topic"], form["channel"], form["node"], form["page"]
        if origin == "lookup":
            return ("lookup",)
        if action in ("publish", "copy", "move"):
            return ("messages", topic, channel) if channel else ("messages", topic)
        if (action == "seek" and not is_done) or origin == "replay":
            return ("replay", topic, channel)
        if action == "settings":
            return ("topics", topic)
        if action in ("redrive", "cancel_redrive"):
            return ("dead_letters", topic)
        if action == "tombstone":
            return ("nodes", node) if origin == "node" else ("topics", topic)
        if action == "switch_over" and is_done:
            return ("nodes",)
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
        location = self._admin.pages.page_of(*place, note=self._admin.notes.add(note))
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
        """The page after the login: always one of ours, whatever the form says."""
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
    "switch_over": FormAction(Forms._switch_over, is_of_node=True),
    "publish": FormAction(Forms._publish, permission="publish"),
    "copy": FormAction(Forms._copy),
    "move": FormAction(Forms._move, is_of_channel=True, is_confirmed=True),
    "settings": FormAction(Forms._settings),
    "policy": FormAction(Forms._policy, is_of_channel=True),
    "remove_policy": FormAction(Forms._policy, is_of_channel=True),
    "order": FormAction(Forms._order, is_of_channel=True),
    "remove_order": FormAction(Forms._order, is_of_channel=True),
    "seek": FormAction(Forms._seek, is_of_channel=True, is_confirmed=True),
    "redrive": FormAction(Forms._redrive),
    "cancel_redrive": FormAction(Forms._cancel_redrive),
}
"""By the form's field `action`."""


def _post(path: str, handler: Handler, summary: str, **more: Any) -> Endpoint:
    return Endpoint(
        group="Pages",
        method="POST",
        path=path,
        handler=handler,
        summary=summary,
        keeps_body=True,
        body_type=FORM_TYPE,
        **more,
    )


def _done(text: str, warning: str) -> Note:
    return Note(f"{text} {warning}", is_good=False) if warning else Note(text)


def _headers_of(lines: str) -> dict[str, str]:
    """Headers of a message, one a line. Raises ApiError."""
    headers: dict[str, str] = {}
    for line in filter(None, map(str.strip, lines.splitlines())):
        name, colon, value = line.partition(":")
        if not colon:
            raise ApiError(400, f"a header is a name, a colon and a value, not {line[:80]!r}")
        name = name.strip().lower()
        if name in headers:
            raise ApiError(400, f"the header {name!r} occurs twice")
        headers[name] = value.strip()
    return headers
