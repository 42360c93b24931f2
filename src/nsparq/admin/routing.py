"""What nsqadmin adds to nsparq.http: paths with several names, base path, ETags, compression."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from isal import isal_zlib

from nsparq.http.api import (
    JSON_TYPE,
    Api,
    ApiError,
    Endpoint,
    Later,
    Request,
    Response,
    Result,
    error_response,
    to_response,
)
from nsparq.http.describe import openapi

__all__ = ["AdminApi", "describe_paths", "path_values", "topic_and_channel", "with_etag"]

logger = logging.getLogger(__name__)

MIN_COMPRESSED: Final = 1024
"""Bytes. Compressing a smaller body costs more than it saves."""
COMPRESSED_TYPES: Final = ("text/", "application/json", "image/svg+xml")
GZIP_BITS, DEFLATE_BITS = 31, 15


class AdminApi(Api):
    """A table of endpoints below a base path. Any part of a path may be a `{name}`."""

    def __init__(
        self,
        *,
        title: str,
        version: str,
        endpoints: Iterable[Endpoint],
        base: str = "",
        guard: Callable[[Request, Endpoint], Awaitable[None] | None] | None = None,
        check_host: Callable[[Request], None] | None = None,
        show_error: Callable[[Request, ApiError], Response | None] = lambda request, error: None,
    ) -> None:
        """`base` has no slash at its end. `show_error` may answer with a page in place of JSON."""
        placed = [dataclasses.replace(one, path=(base + one.path).rstrip("/") or "/") for one in endpoints]
        super().__init__(title=title, version=version, endpoints=placed, guard=guard, check_host=check_host)
        self._show_error = show_error
        self._patterns: dict[int, list[tuple[list[str], str]]] = {}
        """Paths with a `{name}`, by their number of parts; longer fixed beginnings come first."""
        for path in sorted({one.path for one in placed if "{" in one.path}, key=lambda path: path.find("{")):
            parts = path.split("/")
            self._patterns.setdefault(len(parts), []).insert(0, (parts, path))

    def _find(self, path: str) -> tuple[str | None, str]:
        if path in self._methods and "{" not in path:
            return path, ""
        parts = path.split("/")
        for pattern, proper in self._patterns.get(len(parts), ()):
            values = [part for part, expected in zip(parts, pattern, strict=True) if expected[:1] == "{"]
            fixed = all(e[:1] == "{" or e == part for part, e in zip(parts, pattern, strict=True))
            if fixed and all(values):
                return proper, "/".join(values)
        return None, ""

    def handle(self, request: Request) -> Result | Later | Awaitable[Result]:
        try:
            result = super().handle(request)
        except ApiError as error:
            return _complete(request, self._from_error(request, error))
        if isinstance(result, Awaitable):
            return self._complete_later(request, result)
        assert not isinstance(result, Later)
        return _complete(request, to_response(result))

    async def _complete_later(self, request: Request, waiting: Awaitable[Result]) -> Response:
        try:
            response = to_response(await waiting)
        except ApiError as error:
            response = self._from_error(request, error)
        return _complete(request, response)

    def _from_error(self, request: Request, error: ApiError) -> Response:
        if error.status == 502:
            logger.error("%s %s: %s", request.method, request.path, error.code)
        page = self._show_error(request, error)
        return page or error_response(error.status, error.code, error.headers, **error.more)


def path_values(request: Request) -> list[str]:
    """The values of the `{name}` parts of the endpoint's path, in order."""
    return request.path_value.split("/")


def topic_and_channel(request: Request) -> tuple[str, str]:
    """Of a path that ends in `{topic}` or `{topic}/{channel}`; the channel may be empty."""
    topic, _, channel = request.path_value.partition("/")
    return topic, channel


def with_etag(request: Request, response: Response) -> Response:
    """A browser that has this content already gets 304 and no body."""
    tag = f'"{hashlib.blake2b(response.body, digest_size=12).hexdigest()}"'
    headers = (*response.headers, ("ETag", tag))
    if request.header("If-None-Match") == tag:
        return Response(status=304, headers=headers, nsq_header=response.nsq_header)
    return dataclasses.replace(response, headers=headers)


def describe_paths(api: Api) -> dict[str, Any]:
    """The OpenAPI document, with a parameter for each `{name}` of a path."""
    document = openapi(api)
    for path, operations in document["paths"].items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        for operation in operations.values():
            others = [one for one in operation["parameters"] if one["in"] != "path"]
            operation["parameters"] = others + [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in names
            ]
    return document


def _complete(request: Request, response: Response) -> Response:
    """Add the cache headers, and compress a large body if the client accepts that."""
    headers = [("Vary", "Accept-Encoding")]
    has_own = any(name == "Cache-Control" for name, _ in response.headers)
    if response.content_type == JSON_TYPE and not has_own:
        headers.append(("Cache-Control", "no-store"))
    body = response.body
    if len(body) >= MIN_COMPRESSED and response.content_type.startswith(COMPRESSED_TYPES):
        encoding, bits = _encoding(request.header("Accept-Encoding"))
        if encoding:
            compressor = isal_zlib.compressobj(1, isal_zlib.DEFLATED, bits)
            body = compressor.compress(body) + compressor.flush()
            headers.append(("Content-Encoding", encoding))
    return dataclasses.replace(response, body=body, headers=(*response.headers, *headers))


def _encoding(accepted: str) -> tuple[str, int]:
    offers = {}
    for offer in accepted.lower().split(","):
        name, _, quality = offer.partition(";")
        offers[name.strip()] = quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    for name, bits in (("gzip", GZIP_BITS), ("deflate", DEFLATE_BITS)):
        if offers.get(name, offers.get("*", False) and name == "gzip"):
            return name, bits
    return "", 0
