"""Authentication and permissions: admin users by header, or logins and secrets of a policy file.

Also the protection against foreign pages (CSRF). A browser that changes something must come from
our own pages: its headers must say so, and the request must carry the page's token. A program sends
no `Origin` and none of our cookies, so it needs no token, as with NSQ's nsqadmin.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from nsparq.addresses import join_address
from nsparq.admin.routing import path_values
from nsparq.http.api import ApiError, Endpoint, Request
from nsparq.server.auth.grants import AuthFailed, Grant, Permission
from nsparq.server.auth.tokens import TokenCache, secret_from_header

__all__ = ["CHANGES", "EVERYTHING", "PAGE_HEADERS", "Access", "Actor", "Guard", "Sessions", "cookie"]

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
"""Headers of every page: scripts only from our files, nothing from other sites, no frames."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks for a change, for the log and for notifications."""

    user: str
    """Empty if unknown."""
    remote_address: str
    user_agent: str
    url: str

    @classmethod
    def of(cls, request: Request, user: str = "") -> Actor:
        """`user` is verified. Without one it is the unverified user of HTTP Basic, as in NSQ."""
        is_secure = request.secure is not None or request.header("X-Scheme") == "https"
        target = request.path + (f"?{request.query}" if request.query else "")
        return cls(
            user=user or _basic_user(request),
            remote_address=join_address(request.peer, request.peer_port) if request.peer_port else "",
            user_agent=request.header("User-Agent"),
            url=f"{'https' if is_secure else 'http'}://{request.header('Host')}{target}",
        )


def _basic_user(request: Request) -> str:
    """The name in an Authorization header of the basic scheme, or an empty text."""
    scheme, _, credentials = request.header("Authorization").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        decoded = base64.b64decode(credentials, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""
    name, colon, _ = decoded.partition(":")
    return name if colon else ""


@dataclass(frozen=True, slots=True)
class Access:
    """A user and their permissions."""

    user: str
    grant: Grant | None = None
    """None without a policy file: then `is_admin` alone decides."""
    is_admin: bool = True
    is_logged_in: bool = False
    """By a session, which a log out ends."""
    is_known: bool = True
    """False if there is a login and the user has not logged in."""

    def may(self, permission: str, topic: str = "", channel: str = "") -> bool:
        if not self.is_known:
            return False
        if self.grant is not None:
            return self.grant.allows(Permission(permission), topic, channel)
        return self.is_admin or permission == Permission.READ

    def may_any(self, permission: str) -> bool:
        """Whether the user has the permission for any topic."""
        if self.grant is not None:
            return self.grant.may(Permission(permission))
        return self.may(permission)

    def check(self, permission: str, topic: str = "", channel: str = "") -> None:
        """Raises ApiError."""
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
    """Users who have logged in. In memory only: after a restart they log in again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, _Session] = OrderedDict()

    def begin(self, grant: Grant) -> str:
        """Returns the value of the cookie."""
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
    """Checks every request before its handler runs."""

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
        """Raises ApiError for a request that is not allowed. Checking a password takes time: then
        the result is to be awaited."""
        if request.method in CHANGES:
            self.check_source(request)
        if not endpoint.permission:
            return None
        if self._tokens is None:
            _check(self._by_header(request), request, endpoint)
            return None
        access = self._known(request)
        if access is None:
            return self._check_secret(request, endpoint)
        _check(access, request, endpoint)
        return None

    async def _check_secret(self, request: Request, endpoint: Endpoint) -> None:
        assert self._tokens is not None
        try:
            secret = secret_from_header(request.header("Authorization"))
            grant = await self._tokens.grant(secret, **_about(request))
        except AuthFailed as error:
            raise _login_required() from error
        _check(Access(grant.identity, grant, is_admin=False), request, endpoint)

    async def log_in(self, request: Request, name: str, password: str) -> str:
        """Returns the value of the session's cookie. Without a name the password is a generated
        secret. Raises AuthFailed."""
        assert self._tokens is not None
        secret = f"{name}:{password}" if name else password
        if not secret:
            raise AuthFailed("nothing was entered")
        return self.sessions.begin(await self._tokens.grant(secret.encode(), **_about(request)))

    def access(self, request: Request) -> Access:
        """The user of a request that has passed the guard. An unknown user has no permissions."""
        if self._tokens is None:
            return self._by_header(request)
        try:
            return self._known(request) or _NOBODY
        except ApiError:
            return _NOBODY

    def actor(self, request: Request) -> Actor:
        """The user for the log and for notifications."""
        return Actor.of(request, self.access(request).user)

    def _by_header(self, request: Request) -> Access:
        if not self._admin_users:
            return EVERYTHING
        user = request.header(self._acl_header)
        return Access(user, is_admin=user in self._admin_users)

    def _known(self, request: Request) -> Access | None:
        """The user, if no password has to be checked."""
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

    # Foreign pages

    def check_source(self, request: Request) -> None:
        """Raises ApiError for a request that another site's page made a browser send."""
        site, origin = request.header("Sec-Fetch-Site"), request.header("Origin")
        if site and site not in ("same-origin", "none"):
            raise ApiError(403, "FORBIDDEN", reason="sent by another site's page")
        if origin and site != "same-origin" and not _is_own(origin, request):
            raise ApiError(403, "FORBIDDEN", reason="sent by another site's page")
        is_browser = site or origin or cookie(request, TOKEN_COOKIE) or cookie(request, SESSION_COOKIE)
        if is_browser and not self._has_token(request):
            raise ApiError(403, "FORBIDDEN", reason="the page is out of date; load it again")

    def token(self, request: Request) -> tuple[str, str]:
        """The token for the forms of a page, and the value of the cookie that it belongs to."""
        known = cookie(request, TOKEN_COOKIE) or secrets.token_urlsafe(24)
        return self._token_of(known), known

    def _token_of(self, value: str) -> str:
        return hmac.new(self._key, value.encode(), hashlib.sha256).hexdigest()

    def _has_token(self, request: Request) -> bool:
        known = cookie(request, TOKEN_COOKIE)
        shown = request.header(TOKEN_HEADER) or _form_field(request, TOKEN_FIELD)
        return bool(known) and hmac.compare_digest(shown.encode(), self._token_of(known).encode())

    def set_cookie(self, request: Request, name: str, value: str) -> tuple[str, str]:
        """The header that sets a cookie. An empty value deletes it."""
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
