"""Who may use nsqadmin, and from where: admin users by header, logins and secrets of a policy file; and that
no foreign page makes a browser do anything here.

A program has no cookies of ours and says no `Origin`: it needs nothing but what NSQ's nsqadmin asked of it. A
browser that changes something must come from our own pages, by its own word and by a token that they carry.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from nsparq.admin.change.actor import Actor
from nsparq.admin.show.routing import path_values
from nsparq.http.api import ApiError, Endpoint, Request
from nsparq.server.auth.grants import AuthFailed, Grant, Permission
from nsparq.server.auth.tokens import TokenCache, secret_from_header

__all__ = ["CHANGES", "EVERYTHING", "PAGE_HEADERS", "Access", "Guard", "Sessions", "cookie"]

SESSION_COOKIE: Final = "nsqadmin_session"
TOKEN_COOKIE: Final = "nsqadmin_token"
TOKEN_HEADER: Final = "X-CSRF-Token"
TOKEN_FIELD: Final = "csrf"
SESSION_IDLE_S: Final = 12 * 3600.0
SESSION_MAX_S: Final = 7 * 24 * 3600.0
MAX_SESSIONS: Final = 10_000
FORM_TYPE: Final = "application/x-www-form-urlencoded"
CHANGES: Final = ("POST", "PUT", "DELETE", "PATCH")

CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Final = (
    ("Content-Security-Policy", CONTENT_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""What every page tells the browser: no script but our files, nothing from elsewhere, in nobody's frame."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who it is and what they may do."""

    user: str
    grant: Grant | None = None
    """None where there is no policy file: then `is_admin` alone decides."""
    is_admin: bool = True
    is_logged_in: bool = False
    """By a session, which can be ended."""
    is_known: bool = True
    """False where there is a login, and nobody has logged in."""

    def may(self, permission: str, topic: str = "", channel: str = "") -> bool:
        if not self.is_known:
            return False
        if self.grant is not None:
            return self.grant.allows(Permission(permission), topic, channel)
        return self.is_admin or permission == Permission.READ

    def may_any(self, permission: str) -> bool:
        """Whether it is permitted for any topic at all."""
        if self.grant is not None:
            return self.grant.may(Permission(permission))
        return self.may(permission)

    def check(self, permission: str, topic: str = "", channel: str = "") -> None:
        if not self.may(permission, topic, channel):
            raise ApiError(403, "FORBIDDEN")


EVERYTHING: Final = Access("")
_NOBODY: Final = Access("", is_admin=False, is_known=False)


@dataclass(slots=True)
class _Session:
    grant: Grant
    began: float
    used: float


class Sessions:
    """Who has logged in. In memory only: after a restart they log in again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, _Session] = OrderedDict()

    def begin(self, grant: Grant) -> str:
        """The value of the cookie."""
        name = secrets.token_urlsafe(32)
        now = self._clock()
        self._known[_digest(name)] = _Session(grant, now, now)
        while len(self._known) > MAX_SESSIONS:
            self._known.popitem(last=False)
        return name

    def find(self, name: str) -> Grant | None:
        key = _digest(name)
        session = self._known.get(key)
        if session is None:
            return None
        now = self._clock()
        is_old = now - session.used > SESSION_IDLE_S or now - session.began > SESSION_MAX_S
        if is_old or session.grant.is_expired(now):
            del self._known[key]
            return None
        session.used = now
        self._known.move_to_end(key)
        return session.grant

    def end(self, name: str) -> None:
        self._known.pop(_digest(name), None)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class Guard:
    """Stands before every endpoint."""

    def __init__(
        self,
        *,
        acl_header: str = "X-Forwarded-User",
        admin_users: tuple[str, ...] = (),
        tokens: TokenCache | None = None,
        base: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._acl_header = acl_header
        self._admin_users = frozenset(admin_users)
        self._tokens = tokens
        self._base = base
        self._key = secrets.token_bytes(32)
        self.sessions = Sessions(clock)

    @property
    def has_login(self) -> bool:
        return self._tokens is not None

    def __call__(self, request: Request, endpoint: Endpoint) -> Awaitable[None] | None:
        """Let the request pass, or raise ApiError; something to wait for if a password is to be checked."""
        if request.method in CHANGES:
            self.check_source(request)
        if not endpoint.permission:
            return None
        if self._tokens is None:
            _check(self._by_header(request), request, endpoint)
            return None
        access = self._known(request)
        if access is None:
            return self._ask(request, endpoint)
        _check(access, request, endpoint)
        return None

    async def _ask(self, request: Request, endpoint: Endpoint) -> None:
        assert self._tokens is not None
        try:
            secret = secret_from_header(request.header("Authorization"))
            grant = await self._tokens.grant(secret, **_about(request))
        except AuthFailed as error:
            raise _login_required() from error
        _check(Access(grant.identity, grant, is_admin=False), request, endpoint)

    async def log_in(self, request: Request, name: str, password: str) -> str:
        """The value of the session's cookie. Without a name the password is a generated secret. Raises
        AuthFailed."""
        assert self._tokens is not None
        secret = f"{name}:{password}" if name else password
        if not secret:
            raise AuthFailed("nothing was entered")
        return self.sessions.begin(await self._tokens.grant(secret.encode(), **_about(request)))

    def access(self, request: Request) -> Access:
        """Who it is that has passed; somebody who may do nothing, if it is not known."""
        if self._tokens is None:
            return self._by_header(request)
        try:
            return self._known(request) or _NOBODY
        except ApiError:
            return _NOBODY

    def actor(self, request: Request) -> Actor:
        """Whom the log and notifications name."""
        return Actor.of(request, self.access(request).user)

    def _by_header(self, request: Request) -> Access:
        if not self._admin_users:
            return EVERYTHING
        user = request.header(self._acl_header)
        return Access(user, is_admin=user in self._admin_users)

    def _known(self, request: Request) -> Access | None:
        """Who it is, if that needs no waiting."""
        assert self._tokens is not None
        if session := cookie(request, SESSION_COOKIE):
            grant = self.sessions.find(session)
            if grant is not None:
                return Access(grant.identity, grant, is_admin=False, is_logged_in=True)
        try:
            secret = secret_from_header(request.header("Authorization"))
        except AuthFailed as error:
            raise _login_required() from error
        grant = self._tokens.known(secret, **_about(request))
        return None if grant is None else Access(grant.identity, grant, is_admin=False)

    # Where it comes from

    def check_source(self, request: Request) -> None:
        """Refuse what a page of somebody else's has made a browser send."""
        site, origin = request.header("Sec-Fetch-Site"), request.header("Origin")
        if site and site not in ("same-origin", "none"):
            raise ApiError(403, "FORBIDDEN", reason="sent by another site's page")
        if origin and site != "same-origin" and not _is_own(origin, request):
            raise ApiError(403, "FORBIDDEN", reason="sent by another site's page")
        is_browser = site or origin or cookie(request, TOKEN_COOKIE) or cookie(request, SESSION_COOKIE)
        if is_browser and not self._has_token(request):
            raise ApiError(403, "FORBIDDEN", reason="the page is out of date; load it again")

    def token(self, request: Request) -> tuple[str, str]:
        """What the forms of a page carry, and the cookie that it belongs to; it may have to be set."""
        known = cookie(request, TOKEN_COOKIE) or secrets.token_urlsafe(24)
        return self._token_of(known), known

    def _token_of(self, value: str) -> str:
        return hmac.new(self._key, value.encode(), hashlib.sha256).hexdigest()

    def _has_token(self, request: Request) -> bool:
        known = cookie(request, TOKEN_COOKIE)
        shown = request.header(TOKEN_HEADER) or _form_field(request, TOKEN_FIELD)
        return bool(known) and hmac.compare_digest(shown.encode(), self._token_of(known).encode())

    def set_cookie(self, request: Request, name: str, value: str) -> tuple[str, str]:
        """The header that sets it; an empty value ends it."""
        parts = [f"{name}={value}", f"Path={self._base or '/'}", "HttpOnly", "SameSite=Lax"]
        if not value:
            parts.append("Max-Age=0")
        if request.secure is not None or "https" in (
            request.header("X-Scheme"),
            request.header("X-Forwarded-Proto"),
        ):
            parts.append("Secure")
        return "Set-Cookie", "; ".join(parts)

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()


def _about(request: Request) -> dict[str, Any]:
    return {"remote_ip": request.peer, "tls": request.secure is not None, "common_name": ""}


def _login_required() -> ApiError:
    return ApiError(401, "AUTH_REQUIRED", (("WWW-Authenticate", "Bearer"),))


def _check(access: Access, request: Request, endpoint: Endpoint) -> None:
    parts = endpoint.path.split("/")
    names = [part[1:-1] for part in parts if part.startswith("{")]
    values = dict(zip(names, path_values(request), strict=False))
    if "topic" in values:
        allowed = access.may(endpoint.permission, values["topic"], values.get("channel", ""))
    elif endpoint.checks_names:
        allowed = access.may_any(endpoint.permission)
    else:
        allowed = access.may(endpoint.permission)
    if not allowed:
        is_anonymous = access.grant is not None and not access.user
        raise _login_required() if is_anonymous else ApiError(403, "FORBIDDEN")


def _is_own(origin: str, request: Request) -> bool:
    try:
        theirs = urlsplit(origin).netloc.lower()
    except ValueError:
        return False
    ours = (request.header("Host"), request.header("X-Forwarded-Host"))
    return bool(theirs) and theirs in {name.strip().lower() for name in ours}


def cookie(request: Request, name: str) -> str:
    for part in request.header("Cookie").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def _form_field(request: Request, name: str) -> str:
    if not request.header("Content-Type").startswith(FORM_TYPE):
        return ""
    try:
        return parse_qs(request.body.decode("utf-8", "replace"), max_num_fields=2000).get(name, [""])[0]
    except ValueError:
        return ""
