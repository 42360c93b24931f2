"""Which functions one message passes through: `python -m benchmarks.decisions.message_trace`.

An nsqd runs in this process, with a consumer and a publisher on it. Python's profiler notes every call of a
function of ours while one PUB is received, delivered and finished. Fewer calls in fewer files are easier to
read. The table says how many there are; `--calls` lists them, indented by depth.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import nsparq
from nsparq.options import NsqdOptions
from nsparq.server.daemon import Nsqd

SOURCE = Path(nsparq.__file__).parent
WARM_UP = 3
"""Messages before the one that is traced: a new topic, and the first line of a client, take other ways."""


@dataclass
class Trace:
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    """Depth, file and function of each call."""
    _depth: int = 0

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(SOURCE):
            return
        if event == "call":
            self.calls.append((self._depth, str(path.relative_to(SOURCE)), frame.f_code.co_qualname))
            self._depth += 1
        elif event == "return":
            self._depth = max(0, self._depth - 1)

    def summary(self) -> dict[str, int]:
        files = [file for _, file, _ in self.calls]
        return {
            "calls": len(self.calls),
            "functions": len({call[1:] for call in self.calls}),
            "files": len({*files}),
            "changes of file": sum(one != two for one, two in zip(files, files[1:], strict=False)),
        }


async def trace_message() -> Trace:
    trace = Trace()
    with tempfile.TemporaryDirectory() as directory:
        nsqd = Nsqd(NsqdOptions(tcp_address="127.0.0.1:0", http_address="", data_path=directory))
        await nsqd.start()
        consumer, publisher = await _connect(nsqd), await _connect(nsqd)
        consumer[1].write(b"SUB t c\nRDY 10\n")
        await _frame(consumer[0])
        for _ in range(WARM_UP):
            await _message(consumer, publisher)
        sys.setprofile(trace.note)
        await _message(consumer, publisher)
        sys.setprofile(None)
        for _, writer in (consumer, publisher):
            writer.close()
        await nsqd.stop()
    return trace


async def _connect(nsqd: Nsqd) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert isinstance(nsqd.tcp_address, tuple)
    reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
    writer.write(b"  V2")
    return reader, writer


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)


async def _message(
    consumer: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    publisher: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """One message, published, received and finished."""
    publisher[1].write(b"PUB t\n" + struct.pack(">i", 5) + b"hello")
    assert (await _frame(publisher[0]))[4:] == b"OK"
    message = await _frame(consumer[0])
    consumer[1].write(b"FIN " + message[14:30] + b"\n")
    # The broker's turn after the FIN ends before this.
    for _ in range(10):
        await asyncio.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decisions.message_trace")
    parser.add_argument("--calls", action="store_true", help="list the calls")
    given = parser.parse_args()
    trace = asyncio.run(trace_message())
    if given.calls:
        for depth, file, function in trace.calls:
            print(f"{'  ' * depth}{function}  ({file})")
        print()
    for name, number in trace.summary().items():
        print(f"{name:16} {number:4}")


if __name__ == "__main__":
    main()
