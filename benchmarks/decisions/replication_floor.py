"""What replication must cost at least on this machine:
`python -m benchmarks.decisions.replication_floor`.

Two processes do nothing but what a primary and its follower cannot avoid. One sends a frame of the
size that an MPUB of 200 messages of 200 bytes makes, the other reads it, writes it to a file and
confirms it with 25 bytes; up to `--window` frames are unconfirmed. There is no event loop, no
parsing, and no checksum. The same for a frame of 16 single messages. In between, a real nsqd
without followers takes the same publishes, as in `benchmarks.macro.replication`. The last column is
the processor time that a primary would take at least, as a ratio to that nsqd.

Two idle cores, medians of five rounds of 5,000 frames, with two unconfirmed frames and with one:

    us a frame                   nsqd alone   sending following  primary at least
    MPUB of 200   TCP                  44.4      12.7      17.5            1.29 x
                  TCP, one frame       44.4      20.7      25.7            1.47 x
    16 publishes  TCP                 114.9      10.5      11.3            1.09 x
                  TCP, one frame      113.0      16.4      17.0            1.15 x

Two busy cores of another machine, five rounds of 2,000 frames, two unconfirmed:

    us a frame                   nsqd alone   sending following  primary at least
    MPUB of 200   TCP                 107.0      13.5      20.8            1.13 x
                  TCP, sendfile       107.0      12.1      20.5            1.11 x
                  Unix socket         107.0      11.9      18.3            1.11 x
    16 publishes  TCP                 216.3       9.9      12.4            1.05 x
                  TCP, sendfile       216.3      12.1      12.7            1.06 x
                  Unix socket         216.3       6.3       7.2            1.03 x

So neither sendfile nor Unix sockets are worth their code. The faster nsqd is, the higher is the
floor: the copies into the sockets stay.

A primary takes 1.4 to 2.1 x. The Python code of replication takes 7 us of that for an MPUB when
nothing else runs (recording and waiting 1.4, making the frame 3.3 with a checksum of 1.3,
confirming 2.4). `perf record -e cpu-clock` on a primary that shares its cores with a follower and
two publishers shows 93 us for an MPUB, and 47 us in an nsqd alone: libpython 39 and 15, all system
calls 43 and 25, checksums 3.1 and 1.3. So Python takes 24 us more there, two to three times the 7
us and the turns that are added. Cold caches after each sleep are a possible reason; they could not
be counted in this machine.

Tried, and left out:

    no busy-polling by the primary               83.8 us, as before
    one confirmation for each read               94 us instead of 92, within the noise
    confirmations past FrameReader and Frame     94 us instead of 95, within the noise
    a further turn to gather publishes           82 us instead of 92 when nothing else runs, but 10 %
                                                 fewer messages a second; no gain on busy cores

Gathering as Nagle's algorithm does was tried, too: no frame is sent while one is unconfirmed, or
two, and the confirmation releases what has gathered since. The loads of
`benchmarks.macro.replication` on two busy cores, in turns, as ratios to a primary that does not
gather. Two equal builds differed by up to 11 % in the medians of 16 rounds and by up to 4 % in the
best round, so the best round counts:

    unanswered MPUBs   unconfirmed   frames for          publish              both
    per publisher      frames        2,500 MPUBs     rate      CPU       rate      CPU
    1                  any           2098          1         1         1         1
    1                  one           2322          0.95 x    1.04 x    0.89 x    1.06 x
    1                  two           2276          0.99 x    1.03 x    0.97 x    1.04 x
    8                  any            318          1         1         1         1
    8                  one            320          1.02 x    1.01 x    1.00 x    1.09 x   (medians of 10)
    8                  two            369          1.05 x    0.96 x    1.03 x    0.98 x

Gathering does not make fewer frames. With one unanswered MPUB the two publishers take turns: each
waits for the confirmation of the other's MPUB, and each frame has one. With eight, a turn of the
event loop already has all that has come. A primary takes 1.5 x then for publishing, and 1.4 x if
the messages are consumed meanwhile. And between two machines publishers would wait for up to two
round trips.

Tried together with that, and within the noise:

    OKs sent with the confirmation, not at the end of the turn
    a frame sent with each large append, not at the end of the turn
    busy-polling by the follower, for 30 or 100 us
    no busy-polling by the primary       the rates of publishing do not change, either
    TCP with Reno instead of BBR

Where the time goes, with one unanswered MPUB per publisher: an MPUB takes 190 us. The primary runs
for 128 us of that, waits 21 us for a core, and sleeps 41 us; the follower runs for 59 us, and both
cores are idle for 30 % of the time. A primary that has a core to itself (`taskset`) takes 129 us,
so other processes on its core are not the reason.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.macro.brokers import OURS, Spawned
from benchmarks.macro.crew import Crew
from benchmarks.macro.loads import Parameters, Round, publish_single

BATCH = 200
SIZE = 200
CONFIRM = bytes(25)
FRAMES = {
    "MPUB of 200": BATCH * (SIZE + 4) + 48 + 34,
    "16 single publishes": 16 * (SIZE + 4) + 48 + 34,
}
"""Bodies, the table of their lengths, the header of a batch, and those of a change and a frame."""
FILE_BYTES = 64 << 20
"""The file begins anew at this size, as a log begins a new segment."""


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def follow(end: socket.socket, path: Path, size: int, count: int, report: Connection) -> None:
    """The follower: a process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    buffer = memoryview(bytearray(size))
    began = time.process_time()
    position = 0
    for _ in range(count):
        received = 0
        while received < size:
            received += end.recv_into(buffer[received:])
        position = (position + os.pwrite(fd, buffer, position)) % FILE_BYTES
        end.sendall(CONFIRM)
    report.send(time.process_time() - began)


def lead(end: socket.socket, send: Callable[[socket.socket], None], count: int, window: int) -> float:
    """The primary. Gives its processor time."""
    began = time.process_time()
    unconfirmed = 0
    for _ in range(count):
        send(end)
        unconfirmed += 1
        while unconfirmed >= window:
            unconfirmed -= len(end.recv(4096)) // len(CONFIRM)
    while unconfirmed:
        unconfirmed -= len(end.recv(4096)) // len(CONFIRM)
    return time.process_time() - began


def copy(size: int) -> Callable[[socket.socket], None]:
    data = bytes(size)
    return lambda end: end.sendall(data)


def from_file(path: Path, size: int) -> Callable[[socket.socket], None]:
    path.write_bytes(bytes(size))
    fd = os.open(path, os.O_RDONLY)

    def send(end: socket.socket) -> None:
        sent = 0
        while sent < size:
            sent += os.sendfile(end.fileno(), fd, sent, size - sent)

    return send


def pair(path: str, size: int, count: int, window: int, directory: Path) -> tuple[float, float]:
    """Microseconds of both sides for a frame."""
    ours, theirs = socket.socketpair() if path == "Unix socket" else tcp()
    send = from_file(directory / "sent", size) if path == "TCP, sendfile" else copy(size)
    context = get_context("fork")
    report, reporting = context.Pipe()
    follower = context.Process(
        target=follow, args=(theirs, directory / "received", size, count, reporting), daemon=True
    )
    follower.start()
    theirs.close()
    led = lead(ours, send, count, window)
    followed: float = report.recv()
    follower.join()
    ours.close()
    return 1e6 * led / count, 1e6 * followed / count


def alone(frame: str, crew: Crew, parameters: Parameters) -> float:
    """Microseconds of a single nsqd for what makes one frame."""
    with Spawned(OURS, [], None) as broker:
        run = Round(broker, crew, parameters)
        before = broker.cpu_seconds()
        if frame == "MPUB of 200":
            run.publish(parameters.messages)
            count = parameters.messages / BATCH
        else:
            publish_single(run)
            count = parameters.single_messages / 16
        return 1e6 * (broker.cpu_seconds() - before) / count


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decisions.replication_floor", description=__doc__
    )
    parser.add_argument("--frames", type=int, default=5000, metavar="N", help="of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="in turns (%(default)s)")
    parser.add_argument("--window", type=int, default=2, metavar="N", help="unconfirmed frames (%(default)s)")
    options = parser.parse_args()
    parameters = Parameters(messages=BATCH * options.frames, single_messages=16 * options.frames)
    ours: dict[str, list[float]] = defaultdict(list)
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with Crew() as crew, tempfile.TemporaryDirectory(prefix="bench-floor-") as name:
        for _ in range(options.rounds):
            for frame, size in FRAMES.items():
                ours[frame].append(alone(frame, crew, parameters))
                for path in ("TCP", "TCP, sendfile", "Unix socket"):
                    one = pair(path, size, options.frames, options.window, Path(name))
                    found[frame, path].append(one)
    print(f"{'us a frame':38}{'nsqd alone':>12}{'sending':>10}{'following':>10}{'primary at least':>18}")
    for (frame, path), times in found.items():
        led, followed = (statistics.median(values) for values in zip(*times, strict=True))
        single = statistics.median(ours[frame])
        print(f"{frame:22}{path:16}{single:12.1f}{led:10.1f}{followed:10.1f}{1 + led / single:16.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
