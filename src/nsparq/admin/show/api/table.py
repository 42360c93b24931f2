"""How an endpoint of the JSON API is declared: a decorator above its handler is its table entry.

class Nodes(Handlers):
    @look("/api/nodes", "Every nsqd, with its topics.", errors=(UPSTREAM,))
    async def nodes(self, request: Request) -> Result: ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nsparq.http.api import JSON_TYPE, ApiError, Endpoint, Request

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin
    from nsparq.admin.security import Access, Actor

__all__ = ["Handlers", "change", "endpoint", "look", "object_of", "parse_body", "text_field"]

F = TypeVar("F", bound=Callable[..., Any])

TEXT: Final = {"type": "string"}
COUNT: Final = {"type": "integer", "minimum": 0}
UPSTREAM: Final = (502, "UPSTREAM_ERROR: …")
NOT_THERE: Final = ((404, "TOPIC_NOT_FOUND"), (404, "NO_PRODUCERS"), UPSTREAM)
FORBIDDEN: Final = (403, "FORBIDDEN")


class Handlers:
    """The handlers of one subject, for one nsqadmin."""

    def __init__(self, admin: Nsqadmin) -> None:
        self._admin = admin

    def endpoints(self) -> list[Endpoint]:
        """The table entries of the decorated methods, in the order of the source."""
        return [
            Endpoint(handler=getattr(self, name), **entry)
            for name, member in vars(type(self)).items()
            for entry in getattr(member, "entries", ())
        ]

    def _actor(self, request: Request) -> Actor:
        return self._admin.guard.actor(request)

    def _access(self, request: Request) -> Access:
        return self._admin.guard.access(request)


def endpoint(**entry: Any) -> Callable[[F], F]:
    """`entry` has the fields of an Endpoint, without its handler. A handler may have several."""

    def attach(handler: F) -> F:
        # Decorators run from the bottom up.
        entries = [entry, *getattr(handler, "entries", ())]
        handler.entries = entries  # type: ignore[attr-defined]  # functions take attributes
        return handler

    return attach


def look(path: str, summary: str, **more: Any) -> Callable[[F], F]:
    """An endpoint that answers GET with a JSON object."""
    entry = {
        "group": "Topics, channels, nodes",
        "permission": "read",
        "success": "an object",
        "success_type": JSON_TYPE,
    }
    return endpoint(method="GET", path=path, summary=summary, **{**entry, **more})


def change(
    method: str, path: str, summary: str, body: Mapping[str, Any] | None = None, **more: Any
) -> Callable[[F], F]:
    """An endpoint that changes something. `body`: the properties of its JSON body."""
    entry: dict[str, Any] = {
        "group": "Changes",
        "permission": "admin",
        "success": "`message`: empty, or a warning about what did not work everywhere",
        "success_type": JSON_TYPE,
        "success_schema": object_of(message=TEXT),
    }
    if body is not None:
        entry |= {
            "keeps_body": True,
            "body_type": "application/json",
            "body_schema": {"type": "object", "properties": body},
            "body_help": "a JSON object: " + ", ".join(f"`{name}`" for name in body),
        }
    return endpoint(method=method, path=path, summary=summary, **{**entry, **more})


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties}


def parse_body(request: Request) -> dict[str, Any]:
    """A JSON object, its keys in lower case, because Go ignores case. Raises ApiError."""
    try:
        parsed = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, str(error) or "too deep") from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    return {name.lower(): value for name, value in parsed.items()}


def text_field(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ApiError(400, f"{name} must be a string")
    return value
