"""Which functions one message passes through: `python -m benchmarks.decisions.message_trace`.

An nsqd runs in this process. Python's profiler notes every call of a function of ours while

- one PUB is received over TCP, answered, delivered to a consumer and finished (`pub`), and
- one message is published with `POST /pub` and answered (`http`).

Fewer calls in fewer files are easier to read. The table shows how many there are; `--calls` lists
them, indented by depth. `tests/test_message_trace.py` keeps the numbers from growing.

The trace counts every function, method, property and comprehension in a file of the package. It
does not count constructors that Python generates for records (data classes, named tuples), compiled
functions, and functions of libraries. Rounds that nsqd makes by itself (queue scan, upkeep, lag of
the loop) are stopped before the trace begins, the garbage collector does not run, and the polls of
a loop that stays awake are left out: none of them belongs to the message, and their number depends
on time. The first messages of a topic and the first lines of a client are not traced: those take
other paths.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import nsparq
from nsparq.busy_poll import BusyPoll
from nsparq.options import NsqdOptions
from nsparq.server.daemon import Nsqd

SOURCE = Path(nsparq.__file__).parent
WARM_UP = 3
"""Messages before the one that is traced."""
PUB = b"PUB t\n" + struct.pack(">i", 5) + b"hello"
POST = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Trace:
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    """Depth, file and function of each call."""
    _depth: int = 0

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(SOURCE) or frame.f_code is BusyPoll._poll.__code__:
            return
        if event == "call":
            self.calls.append((self._depth, str(path.relative_to(SOURCE)), frame.f_code.co_qualname))
            self._depth += 1
        elif event == "return":
            self._depth = max(0, self._depth - 1)

    @contextmanager
    def recording(self) -> Iterator[None]:
        gc.disable()
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    def summary(self) -> dict[str, int]:
        files = [file for _, file, _ in self.calls]
        return {
            "calls": len(self.calls),
            "functions": len({call[1:] for call in self.calls}),
            "files": len({*files}),
            "changes of file": sum(one != two for one, two in zip(files, files[1:], strict=False)),
        }


async def trace_pub() -> Trace:
    """One PUB from the socket to its FIN."""
    trace = Trace()
    async with _running() as nsqd:
        consumer, publisher = await _connect(nsqd.tcp_address), await _connect(nsqd.tcp_address)
        for _, writer in (consumer, publisher):
            writer.write(b"  V2")
        consumer[1].write(b"SUB t c\nRDY 10\n")
        await _frame(consumer[0])
        for _ in range(WARM_UP):
            await _publish_and_finish(nsqd, consumer, publisher)
        with trace.recording():
            await _publish_and_finish(nsqd, consumer, publisher)
        for _, writer in (consumer, publisher):
            writer.close()
    return trace


async def trace_http() -> Trace:
    """One `POST /pub` from the socket to its answer."""
    trace = Trace()
    async with _running() as nsqd:
        client = await _connect(nsqd.http_address)
        for _ in range(WARM_UP):
            await _post(client)
        with trace.recording():
            await _post(client)
        client[1].close()
    return trace


@asynccontextmanager
async def _running() -> AsyncIterator[Nsqd]:
    with tempfile.TemporaryDirectory() as directory:
        nsqd = Nsqd(NsqdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", data_path=directory))
        await nsqd.start()
        for task in [*nsqd._tasks]:
            task.cancel()
        yield nsqd
        await nsqd.stop()


async def _connect(address: object) -> Peer:
    assert isinstance(address, tuple)
    return await asyncio.open_connection(*address)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)


async def _publish_and_finish(nsqd: Nsqd, consumer: Peer, publisher: Peer) -> None:
    client = next(iter(nsqd.broker.topics["t"].channels["c"].clients))
    finished = client.finish_count
    publisher[1].write(PUB)
    assert (await _frame(publisher[0]))[4:] == b"OK"
    message = await _frame(consumer[0])
    consumer[1].write(b"FIN " + message[14:30] + b"\n")
    while client.finish_count == finished:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0)
    # A turn that the FIN has asked for would come now.
    for _ in range(3):
        await asyncio.sleep(0)


async def _post(client: Peer) -> None:
    reader, writer = client
    writer.write(POST)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert await reader.readexactly(2) == b"OK"


TRACES = {"pub": trace_pub, "http": trace_http}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decisions.message_trace")
    parser.add_argument("--calls", action="store_true", help="list the calls")
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"of {', '.join(TRACES)}; all if none")
    given = parser.parse_args()
    for name in given.paths or TRACES:
        trace = asyncio.run(TRACES[name]())
        if given.calls:
            for depth, file, function in trace.calls:
                print(f"{'  ' * depth}{function}  ({file})")
            print()
        print(f"{name:8}" + "  ".join(f"{number} {what}" for what, number in trace.summary().items()))


if __name__ == "__main__":
    main()
