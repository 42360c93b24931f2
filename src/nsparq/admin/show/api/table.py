"""How an endpoint of the JSON API is declared, above its handler.

class Nodes(Handlers):
    @look("/api/nodes", "Every nsqd, with its topics.", errors=(UPSTREAM,))
    async def nodes(self, request: Request) -> Result: ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from nsparq.http.api import JSON_TYPE, ApiError, Endpoint, Request, endpoints_of

if TYPE_CHECKING:
    from nsparq.admin.daemon import Nsqadmin
    from nsparq.admin.security import Access, Actor

__all__ = ["Handlers", "change", "look", "object_of", "parse_body", "text_field"]

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
        """In the order of the source."""
        return endpoints_of(self)

    def _actor(self, request: Request) -> Actor:
        return self._admin.guard.actor(request)

    def _access(self, request: Request) -> Access:
        return self._admin.guard.access(request)


def look(path: str, summary: str, **more: Any) -> Endpoint:
    """An endpoint that answers GET with a JSON object."""
    usual = {
        "group": "Topics, channels, nodes",
        "permission": "read",
        "success": "an object",
        "success_type": JSON_TYPE,
    }
    return Endpoint(method="GET", path=path, summary=summary, **usual | more)


def change(
    method: str, path: str, summary: str, body: Mapping[str, Any] | None = None, **more: Any
) -> Endpoint:
    """An endpoint that changes something. `body`: the properties of its JSON body."""
    usual: dict[str, Any] = {
        "group": "Changes",
        "permission": "admin",
        "success": "`message`: empty, or a warning about what did not work everywhere",
        "success_type": JSON_TYPE,
        "success_schema": object_of(message=TEXT),
    }
    if body is not None:
        usual |= {
            "keeps_body": True,
            "body_type": "application/json",
            "body_schema": {"type": "object", "properties": body},
            "body_help": "a JSON object: " + ", ".join(f"`{name}`" for name in body),
        }
    return Endpoint(method=method, path=path, summary=summary, **usual | more)


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
