"""Dead letters: messages that were given up, as JSON in a topic of their own.

nsqd writes them for channels with a delivery policy, and so do the client library and the
pipelines.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DeadLetter"]


@dataclass(frozen=True)
class DeadLetter:
    """Published to a dead-letter topic, as JSON. As a dataclass, it can be a handler's payload."""

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

    @property
    def body(self) -> bytes:
        """The original body of the message."""
        return base64.b64decode(self.base64) if self.base64 is not None else (self.text or "").encode()

    def to_json(self) -> bytes:
        """The message in the dead-letter topic."""
        text = json.dumps(asdict(self), ensure_ascii=False)
        # A lone surrogate is valid in JSON but not in UTF-8: it stays an escape.
        return text.encode(errors="backslashreplace")


def as_text(body: bytes) -> dict[str, Any]:
    """The body as one of the fields `text` and `base64`."""
    try:
        return {"text": body.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}
