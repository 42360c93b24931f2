"""Dead letters: messages that were given up, in a topic of their own.

nsqd writes them for channels with a delivery policy: the body as it was, and the origin as headers
whose names begin with `nsq-dead-`. Clients that did not ask for headers get the letter as JSON, the
form in which the client library and the pipelines publish theirs.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["DeadLetter"]

PREFIX: Final = "nsq-dead-"
_NAMES: Final = {
    f"{PREFIX}topic": "topic",
    f"{PREFIX}channel": "channel",
    f"{PREFIX}id": "id",
    f"{PREFIX}timestamp": "timestamp_ns",
    f"{PREFIX}attempts": "attempts",
    f"{PREFIX}reason": "error",
    f"{PREFIX}client": "client",
    f"{PREFIX}given-up": "given_up_ns",
}
"""Headers of a dead letter, and the fields that they stand for."""
ORIGIN_HEADERS: Final = tuple(_NAMES)
"""In the order in which nsqd writes them."""
_TEXTS: Final = ("topic", "channel", "id", "error", "client")
_NUMBERS: Final = ("timestamp_ns", "attempts", "given_up_ns")


@dataclass(frozen=True)
class DeadLetter:
    """A message that was given up. As a dataclass, it can be a handler's payload."""

    topic: str
    channel: str
    id: str
    """Message id, 16 hex digits."""
    timestamp_ns: int
    """When the message was published."""
    attempts: int
    error: str
    """Why it was given up: name and text of the exception, or nsqd's reason."""
    text: str | None = None
    """The body, if it is UTF-8."""
    base64: str | None = None
    """The body, if it is not."""
    client: str = ""
    """Address of the client that had it last, if nsqd gave the message up."""
    given_up_ns: int = 0
    """When nsqd gave it up."""
    headers: dict[str, str] | None = None
    """Headers of the message itself; None if it had none."""

    @classmethod
    def from_message(cls, body: bytes, headers: Mapping[str, str]) -> DeadLetter | None:
        """The letter that a message of a dead-letter topic is, in either form. None if it is not a
        letter."""
        if f"{PREFIX}topic" in headers:
            fields: dict[str, Any] = {
                field: headers[name] for name, field in _NAMES.items() if name in headers
            }
            own = {name: value for name, value in headers.items() if name not in _NAMES}
            for name in _NUMBERS:
                # Anybody may publish such a header.
                digits = fields.get(name, "")
                fields[name] = (
                    int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else 0
                )
            fields |= as_text(body) | {"headers": own or None}
        else:
            found = _parse(body)
            if found is None:
                return None
            fields = found
        return cls(**dict.fromkeys(_TEXTS, "") | dict.fromkeys(_NUMBERS, 0) | fields)

    def origin_headers(self) -> dict[str, str]:
        """Everything but the body and the headers of the message itself, as headers."""
        fields = {name: str(getattr(self, field)) for name, field in _NAMES.items()}
        return {name: value for name, value in fields.items() if value}

    @property
    def body(self) -> bytes:
        """The original body of the message."""
        if self.base64 is not None:
            return base64.b64decode(self.base64)
        return (self.text or "").encode(errors="surrogatepass")

    def to_json(self) -> bytes:
        """The letter as clients without headers get it."""
        fields = asdict(self)
        if self.headers is None:
            del fields["headers"]
        text = json.dumps(fields, ensure_ascii=False)
        # A lone surrogate is valid in JSON but not in UTF-8: it stays an escape.
        return text.encode(errors="backslashreplace")


def as_text(body: bytes) -> dict[str, Any]:
    """The body as one of the fields `text` and `base64`."""
    try:
        return {"text": body.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}


def _parse(body: bytes) -> dict[str, Any] | None:
    """The fields of a letter in JSON. Fields that have a wrong type are left out."""
    if body[:1] != b"{" or b'"error"' not in body:
        return None
    try:
        found = json.loads(body)
        if found.get("base64") is not None:
            base64.b64decode(found["base64"], validate=True)
        elif not isinstance(found.get("text"), str):
            return None
    except (ValueError, TypeError, RecursionError, binascii.Error):
        return None
    if not found.get("topic") or not isinstance(found["topic"], str) or "error" not in found:
        return None
    fields = {name: found[name] for name in _TEXTS if isinstance(found.get(name), str)}
    fields |= {name: found[name] for name in _NUMBERS if type(found.get(name)) is int}
    headers = found.get("headers")
    if isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values()):
        fields["headers"] = headers
    return fields | {name: found.get(name) for name in ("text", "base64")}
