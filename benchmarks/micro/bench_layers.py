"""How fast each transport layer is by itself, and how much of that is the library under it.

python -m benchmarks.micro.bench_layers [--size 65536] [--rounds 5] [--profile]

Each line is a layer in one direction: contents in MB/s (uncompressed bytes), best of the rounds;
the same by the bare library (for TLS the standard library's ssl, as the other way to do it); and
the ratio of the two. Layers and libraries take turns within a round, so compare ratios, not figures
of two runs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import random
import ssl
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import cramjam
from OpenSSL import SSL

from nsparq.server.tls import TlsLayer, build_context
from nsparq.transport.deflate import DeflateLayer
from nsparq.transport.layers import Layer, LayerStack
from nsparq.transport.snappy import SnappyLayer
from tests.support.certificates import certificates

PIECES = 16
"""Pieces that are sent one after the other. They differ, because deflate would compress repeated
ones too well."""


@dataclass
class Task:
    name: str
    layer: Callable[[], object]
    library: Callable[[], object] | None
    layer_times: list[float] = field(default_factory=list)
    library_times: list[float] = field(default_factory=list)


def messages(size: int, seed: int) -> bytes:
    """Frames as a consumer gets them, with small JSON bodies."""
    source = random.Random(seed)
    found: list[bytes] = []
    while sum(map(len, found)) < size:
        body = {
            "id": source.getrandbits(48),
            "user": f"user-{source.randrange(5000)}",
            "event": source.choice(["click", "view", "purchase"]),
            "at": 1_700_000_000 + source.randrange(10**6),
            "tags": source.sample(["a", "b", "new", "eu", "mobile", "beta"], 3),
        }
        found.append(source.randbytes(34) + json.dumps(body).encode())
    return b"".join(found)[:size]


def consume(layer: Layer | LayerStack, wire: list[bytes]) -> None:
    for data in wire:
        for _ in layer.receive(data):
            pass


class TlsPair:
    """A connected pair of our layer and the standard library's client, and a pair of the standard
    library."""

    def __init__(self, context: SSL.Context) -> None:
        self.layer = TlsLayer(context)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = certificates().client_context()
        self.client = client.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")
        while not self.layer.is_established:
            shake(self.client)
            list(self.layer.receive(self.outgoing.read()))
            self.incoming.write(self.layer.take_output())
        shake(self.client)

    def encrypt(self, data: bytes) -> bytes:
        self.client.write(data)
        return self.outgoing.read()


class StandardServer:
    def __init__(self) -> None:
        found = certificates()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(found.server.cert, found.server.key)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client_in, client_out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        client = found.client_context().wrap_bio(client_in, client_out, server_hostname="localhost")
        for _ in range(3):
            shake(client)
            self.incoming.write(client_out.read())
            shake(self.server)
            client_in.write(self.outgoing.read())
        self._client, self._client_out = client, client_out

    def encrypt(self, data: bytes) -> bytes:
        self._client.write(data)
        return self._client_out.read()

    def send(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self.server.write(piece)
            self.outgoing.read()

    def consume(self, wire: list[bytes]) -> None:
        for data in wire:
            self.incoming.write(data)
            try:
                while self.server.read(65_536):
                    pass
            except ssl.SSLWantReadError:
                pass


def shake(side: ssl.SSLObject) -> None:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        pass


def snappy_library(pieces: list[bytes]) -> Callable[[], object]:
    return lambda: [bytes(cramjam.snappy.compress_raw(piece)) for piece in pieces]


def unsnappy_library(pieces: list[bytes]) -> Callable[[], object]:
    compressed = [bytes(cramjam.snappy.compress_raw(piece)) for piece in pieces]
    return lambda: [bytes(cramjam.snappy.decompress_raw(data)) for data in compressed]


def deflate_library(pieces: list[bytes], level: int) -> Callable[[], object]:
    compressor = zlib.compressobj(level, zlib.DEFLATED, -15)
    return lambda: [compressor.compress(piece) + compressor.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]


def inflate_library(wire: list[bytes]) -> Callable[[], object]:
    def run() -> None:
        decompressor = zlib.decompressobj(-15)
        for data in wire:
            decompressor.decompress(data)

    return run


def sending(layer: Layer | LayerStack, pieces: list[bytes]) -> Callable[[], object]:
    return lambda: [layer.send(piece) for piece in pieces]


def tasks(size: int, kind: str) -> list[Task]:
    if kind == "json":
        pieces = [messages(size, seed) for seed in range(PIECES)]
    else:
        pieces = [random.Random(seed).randbytes(size) for seed in range(PIECES)]
    snappy_wire = [SnappyLayer().send(piece) for piece in pieces]
    found = [
        Task(f"snappy, {kind}, send", sending(SnappyLayer(), pieces), snappy_library(pieces)),
        Task(
            f"snappy, {kind}, receive",
            lambda: consume(SnappyLayer(), snappy_wire),
            unsnappy_library(pieces),
        ),
    ]
    for level in (1, 6):
        name = f"deflate {level}, {kind}"
        deflater = DeflateLayer(level)
        wire = [deflater.send(piece) for piece in pieces]
        found.append(
            Task(f"{name}, send", sending(DeflateLayer(level), pieces), deflate_library(pieces, level))
        )
        found.append(
            Task(
                f"{name}, receive",
                lambda wire=wire: consume(DeflateLayer(), wire),  # type: ignore[misc]
                inflate_library(wire),
            )
        )
    if kind == "json":
        found += tls_tasks(pieces)
    return found


def tls_tasks(pieces: list[bytes]) -> list[Task]:
    server = certificates().server
    context = build_context(str(server.cert), str(server.key))
    pair, standard = TlsPair(context), StandardServer()
    found = [
        Task("TLS 1.3, send", sending(pair.layer, pieces), lambda: standard.send(pieces)),
        # Records can be read once only, so the client's encrypting is in both figures.
        Task(
            "TLS 1.3, client sends, receive",
            lambda: consume(pair.layer, [pair.encrypt(piece) for piece in pieces]),
            lambda: standard.consume([standard.encrypt(piece) for piece in pieces]),
        ),
    ]
    for name, inner in (("snappy", SnappyLayer()), ("deflate 1", DeflateLayer(1))):
        stack = LayerStack([TlsPair(context).layer, inner])
        found.append(Task(f"TLS 1.3 + {name}, json, send", sending(stack, pieces), None))
    return found


def timed(work: Callable[[], object]) -> float:
    """Seconds for one pass over the pieces, measured over enough passes."""
    passes = 1
    while True:
        started = time.perf_counter()
        for _ in range(passes):
            work()
        elapsed = time.perf_counter() - started
        if elapsed > 0.05:
            return elapsed / passes
        passes = max(passes * 2, int(passes * 0.06 / max(elapsed, 1e-6)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=65_536, help="bytes per piece")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--profile", action="store_true", help="where the layers spend their time")
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {SSL.SSLeay_version(SSL.SSLEAY_VERSION).decode()}, ", end="")
    print(f"zlib {zlib.ZLIB_RUNTIME_VERSION}, pieces of {arguments.size} bytes, {arguments.rounds} rounds\n")
    found = [task for kind in ("json", "random") for task in tasks(arguments.size, kind)]
    found = [task for task in found if arguments.only in task.name]
    if arguments.profile:
        profile(found)
        return
    for _ in range(arguments.rounds):
        for task in found:
            task.layer_times.append(timed(task.layer))
            if task.library is not None:
                task.library_times.append(timed(task.library))
    print(f"{'layer':32} {'MB/s':>8} {'us/piece':>9} {'library':>8} {'ratio':>6}")
    for task in found:
        best = min(task.layer_times)
        rate = arguments.size * PIECES / best / 1e6
        line = f"{task.name:32} {rate:8.0f} {best / PIECES * 1e6:9.2f}"
        if task.library_times:
            bare = arguments.size * PIECES / min(task.library_times) / 1e6
            line += f" {bare:8.0f} {rate / bare:6.2f}"
        print(line)


def profile(found: list[Task]) -> None:
    for task in found:
        print(task.name)
        profiler = cProfile.Profile()
        profiler.enable()
        deadline = time.perf_counter() + 0.3
        while time.perf_counter() < deadline:
            task.layer()
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(8)


if __name__ == "__main__":
    main()
