"""What an HTTP API is, apart from sockets: requests, answers, and the table of endpoints they are routed by.

The table is the one description: routing, the OpenAPI document and the reference page all come from it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from nsparq.errors import NsparqError

JSON_TYPE: Final = "application/json; charset=utf-8"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
DEFAULT_MAX_BODY: Final = 1 << 20
"""Bytes of a request's body where the endpoint says nothing: it is read and dropped."""

_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_SLASHES = re.compile("/+")


class ApiError(NsparqError):
    """An answer other than success: a status and a code, for a machine to read."""

    def __init__(
        self, status: int, code: str, headers: tuple[tuple[str, str], ...] = (), **more: str | int
    ) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code, self.headers = status, code, headers
        self.more = more
        """Said beside the code."""


class Later:
    """The handler's word that it will call `request.answer()` itself."""


LATER: Final = Later()


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An answer in full. Most handlers give something simpler: see Api.encode."""

    status: int = 200
    body: bytes = b""
    content_type: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    nsq_header: bool = True
    """Whether it says `X-NSQ-Content-Type`, by which clients tell NSQ's present format from its first one."""


OK: Final = Response(body=b"OK", content_type=TEXT_TYPE)
EMPTY: Final = Response()


class Request:
    """One request. `body` is complete."""

    __slots__ = (
        "_answer",
        "_parameters",
        "body",
        "endpoint",
        "headers",
        "identity",
        "is_old",
        "method",
        "path",
        "path_value",
        "peer",
        "peer_port",
        "query",
        "secure",
    )

    def __init__(self, method: str, path: str, query: str, headers: list[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        """As received; see header()."""
        self.body: bytes = b""
        self.peer = ""
        """The client's address without its port; empty for a Unix socket."""
        self.peer_port = 0
        self.secure: Any = None
        """The TLS layer that it came through."""
        self.identity: str | None = None
        """Who asks, where the API is guarded; empty for whoever shows no secret."""
        self.is_old = False
        """Whether it is of HTTP/1.0, which must be told that a connection is kept."""
        self.endpoint: Endpoint | None = None
        self.path_value = ""
        """What stands in place of `{…}` in the endpoint's path."""
        self._parameters: Mapping[str, str] | None = None
        self._answer: Callable[[Result | Exception], None] | None = None

    @property
    def parameters(self) -> Mapping[str, str]:
        """The query's parameters, of a repeated one the first. Raises ApiError."""
        if self._parameters is None:
            query = self.query
            # A publisher asks the same thing over and over.
            self._parameters = _parse_known(query) if len(query) <= 256 else parse_query(query)
        return self._parameters

    def parameter(self, name: str, missing: str) -> str:
        """A parameter that must be there and not empty. Raises ApiError(400, missing)."""
        value = self.parameters.get(name)
        if not value:
            raise ApiError(400, missing)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A parameter that says yes or no; anything else counts as its default."""
        return {"true": True, "1": True, "false": False, "0": False}.get(
            self.parameters.get(name, ""), default
        )

    def header(self, name: str) -> str:
        """The first header of that name, or nothing."""
        wanted = name.lower().encode()
        for key, value in self.headers:
            if key.lower() == wanted:
                return value.decode("latin-1")
        return ""

    def answer(self, result: Result | Exception) -> None:
        """For a handler that gave LATER. An exception is an answer too."""
        if self._answer is not None:
            self._answer(result)


Result = None | str | bool | int | dict[str, Any] | list[Any] | Response
"""Nothing (an empty body), a text, anything else as JSON, or a whole response."""

Handler = Callable[[Request], Result | Later | Awaitable[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A query parameter, as documented."""

    name: str
    help: str
    required: bool = False
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method on one path. `{name}` as the path's last part stands for anything without a slash."""

    method: str
    path: str
    path_schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string", "minLength": 1})
    """What `{name}` may be, if the path has one."""
    handler: Handler
    summary: str
    details: str = ""
    params: tuple[Param, ...] = ()
    group: str = ""
    """The heading it stands under in the reference."""
    permission: str = ""
    """What a client must be allowed to do, where the API is guarded."""
    topics: Callable[[Request], Collection[str]] | None = None
    """The topics that it must be allowed to do that with, if there is no parameter that says so; with any, if
    there are none."""
    is_owner: Callable[[Request], bool] | None = None
    """Whether what the request names belongs to its identity, or to nobody; asked after the permission."""
    checks_names: bool = False
    """Whether its handler checks the permission itself, for names that only the body has: whoever has the
    permission for any topic gets as far as that. Only nsqadmin's guard asks."""
    keeps_body: bool = False
    """Whether the handler looks at the body; otherwise it is read and dropped."""
    max_body: int = DEFAULT_MAX_BODY
    too_big: str = "BODY_TOO_BIG"
    """The code of the 413 that answers a longer body."""
    needs_body: bool = True
    """Whether there must be one, if it is looked at."""
    body_help: str = ""
    body_type: str = "application/octet-stream"
    body_schema: Mapping[str, Any] | None = None
    success: str = "empty"
    """What a 200 brings, in words."""
    success_type: str = ""
    success_schema: Mapping[str, Any] | None = None
    other_types: tuple[str, ...] = ()
    """In which it may come as well."""
    success_headers: tuple[tuple[str, str], ...] = ()
    """Headers of its own, and what they say."""
    errors: tuple[tuple[int, str], ...] = ()
    """Status and code of every answer but success, and those that any endpoint may give."""


class Api:
    """A table of endpoints, and what is said where none fits."""

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
        """Asked before each handler; raises ApiError to refuse."""
        self._check_host = check_host
        """Asked before the guard, in the same way; see nsparq.http.hosts."""
        self._exact: dict[tuple[str, str], Endpoint] = {}
        self._methods: dict[str, list[str]] = {}
        self._proper: dict[str, str] = {}
        """Each path by its lower case."""
        self._open: dict[str, str] = {}
        """Paths that end in `{…}`, by what stands before it."""
        for endpoint in self.endpoints:
            self._exact[endpoint.method, endpoint.path] = endpoint
            self._methods.setdefault(endpoint.path, []).append(endpoint.method)
            stem, brace, _ = endpoint.path.partition("{")
            if brace:
                self._open[stem] = endpoint.path
            else:
                self._proper[endpoint.path.lower().rstrip("/")] = endpoint.path

    def route(self, request: Request) -> Response | None:
        """Find the request's endpoint; or say at once why there is none."""
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
        pattern = self._open.get(stem + "/")
        return (pattern, value) if pattern and value else (None, "")

    def _redirect(self, request: Request, path: str) -> Response:
        """To the proper path where only its spelling is off: a slash too many, or upper case."""
        tidy = "/" + _SLASHES.sub("/", path).strip("/")
        proper = self._proper.get(tidy.lower())
        if proper is None or proper == path:
            return error_response(404, "NOT_FOUND")
        location = f"{proper}?{request.query}" if request.query else proper
        status = 301 if request.method == "GET" else 308
        return Response(status=status, headers=(("Location", location),), nsq_header=False)

    def handle(self, request: Request) -> Result | Later | Awaitable[Result]:
        """Have the request that was routed answered."""
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
    """Parameters by name; the first of a repeated one. Bytes that are not UTF-8 become lone surrogates, which
    no name check lets pass. Raises ApiError for what cannot be parsed."""
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


_parse_known = lru_cache(1024)(parse_query)


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
    """What a handler gave, as it goes out."""
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
