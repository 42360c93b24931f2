"""What the published clients are put through over TLS, compression and AUTH, whatever their event
loop.

A driver script (`drive_…_secure.py HOST CONNECTIONS`) goes through the kinds of connections that it
is given as JSON, each with a topic of its own, publishes the bodies below and finishes what it
receives. It prints what happened as JSON lines, and asserts nothing. At the end it keeps its
connections until a line on stdin.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

CHANNEL: Final = "secure"
MAX_IN_FLIGHT: Final = 10
SINGLE: Final = b"single"
SEVERAL: Final = [b"several-%d" % number for number in range(100)]
LARGE_TEXT: Final = b"0123456789abcdef" * 6250
LARGE_NOISE: Final = random.Random(1).randbytes(100_000)


@dataclass(frozen=True)
class Connections:
    """One kind of connection: its layers and credentials."""

    name: str
    port: int
    topic: str
    tls: bool = False
    snappy: bool = False
    deflate: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    secret: str = ""

    def options(self) -> dict[str, Any]:
        """Options, with the names of pynsq and gnsq."""
        options: dict[str, Any] = {"tls_v1": self.tls, "snappy": self.snappy, "deflate": self.deflate}
        if self.cert:
            options["tls_options"] = {"certfile": self.cert, "keyfile": self.key}
        if self.tls:
            options.setdefault("tls_options", {})["ca_certs"] = self.ca
        if self.secret:
            options["auth_secret"] = self.secret.encode()
        return options


def host_and_connections() -> tuple[str, list[Connections]]:
    return sys.argv[1], [Connections(**fields) for fields in json.loads(sys.argv[2])]


def digest(body: bytes) -> str:
    """A short text for a body, in reports."""
    return hashlib.sha256(body).hexdigest()[:16]


class Run:
    """The results of one kind of connection."""

    def __init__(self, connections: Connections) -> None:
        self.name = connections.name
        self._open: set[str] = set()
        self._finished: set[str] = set()

    def report(self, event: str, **details: object) -> None:
        sys.stdout.write(json.dumps({"event": event, "connections": self.name, **details}) + "\n")
        sys.stdout.flush()

    def published(self, bodies: Iterable[bytes]) -> None:
        digests = [digest(body) for body in bodies]
        self._open |= {*digests} - self._finished
        self.report("published", bodies=digests)

    def finished(self, body: bytes) -> None:
        found = digest(body)
        self._finished.add(found)
        self._open.discard(found)
        self.report("finished", body=found)

    @property
    def is_done(self) -> bool:
        return not self._open and len(self._finished) == 3 + len(SEVERAL)
