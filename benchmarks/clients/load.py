"""One run of one client library in its own process: the load and its duration."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field


@dataclass
class Load:
    """The load, as JSON on the driver's command line; the driver prints its figures as JSON."""

    what: str
    address: str
    topic: str
    count: int
    tasks: int = 16
    batch: int = 200
    size: int = 100
    in_flight: int = 200
    headers: int = 0
    """1: all messages have the same headers; 2: each has its own trace. Only nsparq has headers."""
    loop: str = "asyncio"
    _began: float = field(default=0.0, repr=False)
    _cpu: float = field(default=0.0, repr=False)
    _seen: int = field(default=0, repr=False)
    _body_size: int = field(default=0, repr=False)

    @classmethod
    def from_arguments(cls) -> Load:
        return cls(**json.loads(sys.argv[1]))

    def to_argument(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if not name.startswith("_")})

    def run(self, work: Callable[[Load], Awaitable[None]]) -> None:
        """Run on the requested event loop; libraries with their own loop ignore it."""

        async def main() -> None:
            await work(self)

        if self.loop == "uvloop":
            import uvloop

            uvloop.run(main())
        else:
            asyncio.run(main())

    @property
    def body_size(self) -> int:
        """`size` counts the headers: three bytes more for each, and four for all."""
        headers = self.message_headers
        sizes = [3 + len(name) + len(value) for name, value in headers.items()]
        return self.size - sum([*sizes, 4] if sizes else sizes)

    @property
    def body(self) -> bytes:
        return b"x" * self.body_size

    @property
    def message_headers(self) -> dict[str, str]:
        return headers_of(0) if self.headers else {}

    def batch_headers(self, count: int) -> dict[str, str] | list[dict[str, str]]:
        """For `count` messages that are published together."""
        return [headers_of(number) for number in range(count)] if self.headers == 2 else self.message_headers

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def begin(self) -> None:
        self._body_size = self.body_size
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def received(self, body: bytes) -> bool:
        """Whether that was the last message."""
        assert len(body) == self._body_size
        self._seen += 1
        return self._seen == self.count

    def end(self) -> None:
        elapsed, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        print(json.dumps({"elapsed": elapsed, "cpu": cpu}), flush=True)


def headers_of(number: int) -> dict[str, str]:
    """Always of the same size."""
    return {"traceparent": f"00-0af7651916cd43dd8448eb211c80319c-{number:016x}-01", "tenant": "acme"}
