"""An HTTP API without sockets: requests, responses, and the table of endpoints.

Routing, the OpenAPI document and the reference page all come from that table.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MethodType
from typing import Any, Final, TypeVar
from urllib.parse import unquote_to_bytes

from nsparq.errors import NsparqError

JSON_TYPE: Final = "application/json; charset=utf-8"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
DEFAULT_MAX_BODY: Final = 1 << 20
"""Limit on a request's body, in bytes, for endpoints that set none. Such a body is dropped."""

_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_SLASHES = re.compile("/+")


class ApiError(NsparqError):
    """A response other than success: a status, and a code for programs."""

    def __init__(
        self, status: int, code: str, headers: tuple[tuple[str, str], ...] = (), **more: str | int
    ) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code, self.headers = status, code, headers
        self.more = more
        """Further keys of the JSON body."""


class Later:
    """A handler returns it to say that it will call `request.answer()` later."""


LATER: Final = Later()


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A complete response. Most handlers return something simpler: see to_response()."""

    status: int = 200
    body: bytes = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    nsq_header: bool = True
    """Send `X-NSQ-Content-Type`. Clients tell NSQ's current JSON format from the old one by it."""


OK: Final = Response(body=b"OK", content_type=TEXT_TYPE)
EMPTY: Final = Response()


@dataclass(slots=True, eq=False)
class Request:
    """One complete request."""

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    """As received. See header()."""
    body: bytes = b""
    peer: str = ""
    """The client's address without its port; empty for a Unix socket."""
    peer_port: int = 0
    secure: Any = None
    """The TLS layer of the connection, if it has one."""
    identity: str | None = None
    """The client's identity if the API is guarded. Empty for an anonymous client."""
    is_http_1_0: bool = False
    """HTTP/1.0 clients must be told that the connection stays open."""
    endpoint: Endpoint | None = None
    path_value: str = ""
    """The part of the path that matches `{…}` in the endpoint's path."""
    _parameters: Mapping[str, str] | None = None
    _answer: Callable[[Result | Exception], None] | None = None

    @property
    def parameters(self) -> Mapping[str, str]:
        """The query parameters. Of a repeated one, the first. Raises ApiError."""
        if self._parameters is None:
            query = self.query
            # A publisher sends the same query with every request.
            self._parameters = _parse_cached(query) if len(query) <= 256 else parse_query(query)
        return self._parameters

    def parameter(self, name: str, missing: str) -> str:
        """A parameter that must not be missing or empty. Raises ApiError(400, missing)."""
        value = self.parameters.get(name)
        if not value:
            raise ApiError(400, missing)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean parameter. Any other value counts as the default."""
        return {"true": True, "1": True, "false": False, "0": False}.get(
            self.parameters.get(name, ""), default
        )

    def header(self, name: str) -> str:
        """The first header of that name, or an empty text."""
        wanted = name.lower().encode()
        for key, value in self.headers:
            if key.lower() == wanted:
                return value.decode("latin-1")
        return ""

    def answer(self, result: Result | Exception) -> None:
        """Send the response of a handler that returned LATER. An exception becomes an error."""
        if self._answer is not None:
            self._answer(result)


Result = None | str | bool | int | dict[str, Any] | list[Any] | Response
"""What a handler returns: None (an empty body), a text, a value for JSON, or a Response."""

Handler = Callable[[Request], Result | Later | Awaitable[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A query parameter and its description."""

    name: str
    help: str
    required: bool = False
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


H = TypeVar("H", bound=Callable[..., Any])


def _no_handler(request: Request) -> Result:
    raise NotImplementedError("the endpoint has no handler: see endpoints_of()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method on one path. `{name}` as the last part of the path matches any text without a
    slash.

    As a decorator it describes the method that handles its requests; a method may have several.
    endpoints_of() then gives the endpoints of an object. `topics`, `is_owner` and `max_body_of` are
    methods of that object, too.
    """

    method: str
    path: str
    path_schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string", "minLength": 1})
    """The schema of `{name}`, if the path has one."""
    handler: Handler = _no_handler
    summary: str
    details: str = ""
    params: tuple[Param, ...] = ()
    group: str = ""
    """The heading in the reference page."""
    permission: str = ""
    """The permission that a client needs if the API is guarded."""
    topics: Callable[..., Collection[str]] | None = None
    """The topics of a request that need the permission, if no parameter names the topic. If there
    are none, the permission for any topic is enough."""
    is_owner: Callable[..., bool] | None = None
    """Whether the client owns what the request names, or nobody does."""
    checks_names: bool = False
    """The handler checks the permission for the names in the body. The guard only checks that the
    client has the permission for some topic. Used by nsqadmin's guard alone."""
    keeps_body: bool = False
    """The handler reads the body. Otherwise the body is dropped. True if there is `body_help`."""
    max_body: int = DEFAULT_MAX_BODY
    max_body_of: Callable[[Any], int] | None = None
    """Gives `max_body` if it is an option of the daemon."""
    too_big: str = "BODY_TOO_BIG"
    """The code of the 413 for a longer body."""
    needs_body: bool = True
    """The body is required, if the handler reads it."""
    body_help: str = ""
    body_type: str = "application/octet-stream"
    body_schema: Mapping[str, Any] | None = None
    success: str = "empty"
    """Description of the body of a 200."""
    success_type: str = ""
    """The default is JSON if there is a schema."""
    success_schema: Mapping[str, Any] | None = None
    other_types: tuple[str, ...] = ()
    """Other content types that a 200 may have."""
    success_headers: tuple[tuple[str, str], ...] = ()
    """Special headers of a 200, with their descriptions."""
    errors: tuple[tuple[int, str], ...] = ()
    """Status and code of each error, without those that any endpoint may give."""

    def __post_init__(self) -> None:
        if self.body_help:
            object.__setattr__(self, "keeps_body", True)
        if self.success_schema and not self.success_type:
            object.__setattr__(self, "success_type", JSON_TYPE)

    def __call__(self, handler: H) -> H:
        # Decorators run from the bottom up.
        handler.__dict__["endpoints"] = [self, *handler.__dict__.get("endpoints", ())]
        return handler


def endpoints_of(api: object, group: str = "") -> list[Endpoint]:
    """The endpoints that decorate an object's methods. `group` replaces their own group."""
    return [
        replace(
            found,
            group=group or found.group,
            handler=MethodType(method, api),
            topics=found.topics and MethodType(found.topics, api),
            is_owner=found.is_owner and MethodType(found.is_owner, api),
            max_body=found.max_body_of(api) if found.max_body_of else found.max_body,
        )
        for method in vars(type(api)).values()
        for found in getattr(method, "endpoints", ())
    ]


class Api:
    """A table of endpoints, and the routing of requests."""

    def __init__(
        self,
        *,
        title: str,
        version: str,
        endpoints: Iterable[Endpoint],
        guard: Callable[[Request, Endpoint], Awaitable[None] | None] | None = None,
        check_host: Callable[[Request], None] | None = None,
    ) -> None:
        self.title = title
        self.version = version
        self.endpoints = tuple(endpoints)
        self.guard = guard
        """Called before each handler. Raises ApiError to refuse the request."""
        self._check_host = check_host
        """Called before the guard, in the same way. See nsparq.http.hosts."""
        self._exact: dict[tuple[str, str], Endpoint] = {}
        self._methods: dict[str, list[str]] = {}
        self._by_lower_case: dict[str, str] = {}
        """Each path by its lower case."""
        self._patterns_by_stem: dict[str, str] = {}
        """Paths that end in `{…}`, by the part before it."""
        for endpoint in self.endpoints:
            self._exact[endpoint.method, endpoint.path] = endpoint
            self._methods.setdefault(endpoint.path, []).append(endpoint.method)
            stem, brace, _ = endpoint.path.partition("{")
            if brace:
                self._patterns_by_stem[stem] = endpoint.path
            else:
                self._by_lower_case[endpoint.path.lower().rstrip("/")] = endpoint.path

    def route(self, request: Request) -> Response | None:
        """Set the request's endpoint, or give the response if there is none."""
        endpoint = self._exact.get((request.method, request.path))
        if endpoint is not None and "{" not in request.path:
            request.endpoint = endpoint
            return None
        path = request.path
        if path == "*" and request.method == "OPTIONS":
            return Response(nsq_header=False)
        if "%" in path:
            path = unquote_to_bytes(path).decode("utf-8", "replace")
        proper, request.path_value = self._find(path)
        if proper is None:
            return self._redirect(request, path)
        request.endpoint = self._exact.get((request.method, proper))
        if request.endpoint is not None:
            return None
        methods = sorted({*self._methods[proper], "OPTIONS"})
        allow = (("Allow", ", ".join(methods)),)
        if request.method == "OPTIONS":
            return Response(headers=allow, nsq_header=False)
        return error_response(405, "METHOD_NOT_ALLOWED", allow)

    def _find(self, path: str) -> tuple[str | None, str]:
        if path in self._methods and "{" not in path:
            return path, ""
        stem, _, value = path.rpartition("/")
        pattern = self._patterns_by_stem.get(stem + "/")
        return (pattern, value) if pattern and value else (None, "")

    def _redirect(self, request: Request, path: str) -> Response:
        """A redirect if only slashes or upper case are wrong. Otherwise a 404."""
        tidy = "/" + _SLASHES.sub("/", path).strip("/")
        proper = self._by_lower_case.get(tidy.lower())
        if proper is None or proper == path:
            return error_response(404, "NOT_FOUND")
        location = f"{proper}?{request.query}" if request.query else proper
        status = 301 if request.method == "GET" else 308
        return Response(status=status, headers=(("Location", location),), nsq_header=False)

    def handle(self, request: Request) -> Result | Later | Awaitable[Result]:
        """Call the handler of a routed request."""
        endpoint = request.endpoint
        assert endpoint is not None
        if self._check_host is not None:
            self._check_host(request)
        if self.guard is not None:
            waiting = self.guard(request, endpoint)
            if waiting is not None:
                return self._handle_after(waiting, request, endpoint)
        return endpoint.handler(request)

    async def _handle_after(self, waiting: Awaitable[None], request: Request, endpoint: Endpoint) -> Result:
        await waiting
        answered: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def answer(result: Result | Exception) -> None:
            if answered.done():
                return
            if isinstance(result, Exception):
                answered.set_exception(result)
            else:
                answered.set_result(result)

        request._answer = answer
        result = endpoint.handler(request)
        if isinstance(result, Later):
            return await answered
        return await result if isinstance(result, Awaitable) else result


def parse_query(query: str) -> Mapping[str, str]:
    """Parameters by name. Of a repeated one, the first. Bytes that are not UTF-8 become lone
    surrogates, which no valid name contains. Raises ApiError for a malformed query."""
    found: dict[str, str] = {}
    if not query:
        return found
    if ";" in query or _BAD_ESCAPE.search(query):
        raise ApiError(400, "INVALID_REQUEST")
    for part in query.split("&"):
        if part:
            name, _, value = part.partition("=")
            found.setdefault(_unquote(name), _unquote(value))
    return found


_parse_cached = lru_cache(1024)(parse_query)


def _unquote(text: str) -> str:
    if "%" in text or "+" in text or not text.isascii():
        return unquote_to_bytes(text.replace("+", " ").encode("latin-1")).decode("utf-8", "surrogateescape")
    return text


def error_response(
    status: int, code: str, headers: tuple[tuple[str, str], ...] = (), **more: str | int
) -> Response:
    body = encode_json({"message": code, **more})
    return Response(status=status, body=body, content_type=JSON_TYPE, headers=headers)


def to_response(result: Result) -> Response:
    """The response for what a handler returned."""
    if result == "OK":
        return OK
    if isinstance(result, Response):
        return result
    if result is None:
        return EMPTY
    if isinstance(result, str):
        body = result.encode("utf-8", "replace")
        return Response(body=body, content_type=TEXT_TYPE if body else "")
    return Response(body=encode_json(result), content_type=JSON_TYPE)


def encode_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
