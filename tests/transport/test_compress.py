"""The compressing layers: their output, accepted input, and refused input."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterable

import cramjam
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from nsparq.transport.deflate import DeflateLayer
from nsparq.transport.layers import MAX_PIECE, Layer, LayerError
from nsparq.transport.snappy import SnappyLayer
from tests.support.memory import freed_without_collecting

IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
COMPRESSED, UNCOMPRESSED, PADDING = 0x00, 0x01, 0xFE
SYNC = b"\x00\x00\xff\xff"

KINDS = [pytest.param(SnappyLayer, id="snappy"), pytest.param(DeflateLayer, id="deflate")]
each_kind = pytest.mark.parametrize("kind", KINDS)
NewLayer = Callable[[], Layer]

# Compressible and incompressible, shorter and longer than a chunk.
contents = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda text, times: text * times, st.binary(min_size=1, max_size=40), st.integers(1, 6000)),
    st.builds(lambda seed, size: random.Random(seed).randbytes(size), st.integers(), st.integers(0, 140_000)),
)


def decode(layer: Layer, *arrived: bytes) -> bytes:
    """All output of the layer, joined."""
    pieces = [piece for data in arrived for piece in layer.receive(data)]
    assert all(0 < len(piece) <= MAX_PIECE for piece in pieces)
    return b"".join(pieces)


def split(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]


def chunk(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(3, "little") + body


def checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def stored(data: bytes) -> bytes:
    return chunk(UNCOMPRESSED, checksum(data) + data)


def compressed(data: bytes) -> bytes:
    return chunk(COMPRESSED, checksum(data) + bytes(cramjam.snappy.compress_raw(data)))


def raw_deflate(data: bytes, flush: int = zlib.Z_SYNC_FLUSH) -> bytes:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush(flush)


# Both


@each_kind
@given(sent=st.lists(contents, max_size=4), cuts=st.lists(st.integers(0, 1 << 20), max_size=12))
def test_what_is_sent_is_received_however_it_is_split(
    kind: NewLayer, sent: list[bytes], cuts: list[int]
) -> None:
    sender, receiver = kind(), kind()
    wire = b"".join(map(sender.send, sent))
    assert decode(receiver, *split(wire, cuts)) == b"".join(sent)


@each_kind
@given(sent=contents)
def test_everything_sent_can_be_decoded_at_once(kind: NewLayer, sent: bytes) -> None:
    sender, receiver = kind(), kind()
    for _ in range(2):
        assert decode(receiver, sender.send(sent)) == sent


@each_kind
def test_bytes_may_arrive_one_by_one(kind: NewLayer) -> None:
    sent = b"some bytes, some bytes, some bytes " * 20
    assert decode(kind(), *(bytes([byte]) for byte in kind().send(sent))) == sent


@each_kind
def test_views_are_sent_as_bytes_are(kind: NewLayer) -> None:
    assert decode(kind(), kind().send(memoryview(b"--contents--" * 9)[2:-2])) == (b"--contents--" * 9)[2:-2]


@each_kind
def test_sending_nothing_writes_nothing(kind: NewLayer) -> None:
    layer = kind()
    assert layer.send(b"") == b""
    assert layer.take_output() == b""
    assert list(layer.receive(b"")) == []


@each_kind
@given(garbage=st.binary(max_size=2000), valid=contents)
def test_garbage_gives_bytes_or_a_layer_error(kind: NewLayer, garbage: bytes, valid: bytes) -> None:
    for data in (garbage, kind().send(valid) + garbage):
        layer = kind()
        try:
            decode(layer, data)
        except LayerError as error:
            assert error.reason


@each_kind
@given(sent=contents, data=st.data())
def test_a_damaged_stream_gives_bytes_or_a_layer_error(
    kind: NewLayer, sent: bytes, data: st.DataObject
) -> None:
    wire = bytearray(kind().send(b"x" + sent))
    wire[data.draw(st.integers(0, len(wire) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(kind(), bytes(wire))
    except LayerError:
        pass


@each_kind
def test_a_failed_layer_stays_failed(kind: NewLayer) -> None:
    layer = kind()
    for data in (b"\xff" * 100, b"", kind().send(b"fine")):
        with pytest.raises(LayerError):
            list(layer.receive(data))


@each_kind
def test_a_reader_may_stop_and_continue_later(kind: NewLayer) -> None:
    sent = random.Random(1).randbytes(1 << 20)
    wire = kind().send(sent)
    layer = kind()
    received = [next(layer.receive(wire[: len(wire) // 2]))]
    received += [next(layer.receive(b"")), next(layer.receive(wire[len(wire) // 2 :]))]
    rest = layer.receive(b"")
    received.append(next(rest))
    received += rest
    assert b"".join(received) == sent
    assert max(map(len, received)) == MAX_PIECE


@each_kind
def test_a_bomb_is_expanded_piece_by_piece(kind: NewLayer) -> None:
    # 64 MiB of zeros: deflate shrinks them to a thousandth, snappy to a twentieth.
    wire = kind().send(bytes(64 << 20))
    layer = kind()
    tracemalloc.start()
    try:
        pieces = layer.receive(wire)
        assert [len(next(pieces)) for _ in range(3)] == [MAX_PIECE] * 3
        count = sum(len(piece) for piece in pieces)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == (64 << 20) - 3 * MAX_PIECE
    assert peak < len(wire) + (1 << 20)


@each_kind
@pytest.mark.parametrize("fails", [False, True], ids=["in use", "failed"])
def test_a_layer_is_freed_with_its_last_reference(kind: NewLayer, fails: bool) -> None:
    # A compressor uses hundreds of kilobytes, and a busy broker rarely collects cycles.
    layer = kind()
    with freed_without_collecting(layer):
        layer.send(b"something")
        try:
            decode(layer, b"\xff" * 100 if fails else kind().send(b"something"))
        except LayerError:
            pass
        del layer


# Deflate


def test_deflate_is_a_raw_stream_with_a_sync_flush_after_each_send() -> None:
    layer = DeflateLayer()
    inflate = zlib.decompressobj(-15)
    for sent in (b"first", b"second " * 50_000, b"third"):
        wire = layer.send(sent)
        assert wire.endswith(SYNC)
        assert inflate.decompress(wire) == sent
    assert not inflate.eof


def test_deflate_takes_its_level() -> None:
    words = [b"%x" % number for number in range(5_000)]
    sent = b" ".join(random.Random(2).choices(words, k=50_000))
    sizes = [len(DeflateLayer(level).send(sent)) for level in (1, 6, 9)]
    assert sizes[0] >= sizes[1] > sizes[2]


def test_deflate_bomb_of_a_thousand_to_one() -> None:
    wire = raw_deflate(bytes(32 << 20))
    assert len(wire) * 1000 < 32 << 20
    layer = DeflateLayer()
    assert sum(len(piece) for piece in layer.receive(wire)) == 32 << 20


@pytest.mark.parametrize(
    "size", [MAX_PIECE - 1, MAX_PIECE, MAX_PIECE + 1, 2 * MAX_PIECE, 10 * MAX_PIECE + 257]
)
def test_deflate_hands_out_all_of_a_stream_that_fills_its_last_piece(size: int) -> None:
    assert decode(DeflateLayer(), raw_deflate(bytes(size))) == bytes(size)


def test_deflate_final_block_is_end_of_stream() -> None:
    layer = DeflateLayer()
    assert decode(layer, raw_deflate(b"last words", zlib.Z_FINISH) + b"and more") == b"last words"
    assert layer.is_ended
    assert decode(layer, b"and still more") == b""


def test_deflate_refuses_a_zlib_header() -> None:
    with pytest.raises(LayerError, match="deflate: corrupt stream"):
        decode(DeflateLayer(), zlib.compress(b"contents"))


# Snappy, sending


def test_snappy_identifies_its_stream_once() -> None:
    layer = SnappyLayer()
    first, second = layer.send(b"OK"), layer.send(b"OK")
    assert first == IDENTIFIER + stored(b"OK")
    assert second == stored(b"OK")


def test_snappy_stores_blocks_that_do_not_shrink() -> None:
    layer = SnappyLayer()
    layer.send(b"-")
    text, noise = b"text " * 1000, random.Random(3).randbytes(5000)
    assert layer.send(text) == compressed(text)
    assert layer.send(noise) == stored(noise)


@pytest.mark.parametrize("repeated", range(0, 400, 25))
def test_snappy_stores_blocks_that_shrink_by_less_than_an_eighth(repeated: int) -> None:
    data = random.Random(4).randbytes(1000 - repeated) + bytes(repeated)
    layer = SnappyLayer()
    layer.send(b"-")
    saved = len(data) - len(cramjam.snappy.compress_raw(data))
    assert layer.send(data) == (compressed(data) if saved > len(data) // 8 else stored(data))


def test_snappy_cuts_into_chunks_of_65536_bytes() -> None:
    data = random.Random(5).randbytes(150_000)
    wire = SnappyLayer().send(data)
    blocks = [data[start : start + 65_536] for start in range(0, len(data), 65_536)]
    assert wire == IDENTIFIER + b"".join(map(stored, blocks))


@given(sent=contents)
def test_snappy_agrees_with_another_implementation(sent: bytes) -> None:
    assert bytes(cramjam.snappy.decompress(SnappyLayer().send(sent) or IDENTIFIER)) == sent
    assert decode(SnappyLayer(), bytes(cramjam.snappy.compress(sent))) == sent


# Snappy, receiving


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(IDENTIFIER, id="another identifier"),
        pytest.param(chunk(PADDING, b""), id="empty padding"),
        pytest.param(chunk(PADDING, bytes(300)), id="padding"),
        pytest.param(chunk(0x80, b"skip me"), id="first skippable type"),
        pytest.param(chunk(0xFD, bytes(1 << 20)), id="last skippable type, a mebibyte"),
        pytest.param(stored(b""), id="empty stored chunk"),
        pytest.param(compressed(b""), id="empty compressed chunk"),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000, 1 << 21])
def test_snappy_reads_all_that_the_format_allows(between: bytes, step: int) -> None:
    if len(between) > 1 << 16 and step == 1:
        step = 3001
    wire = IDENTIFIER + between + stored(b"one,") + between + compressed(b"two") + between + stored(b"!")
    parts = [wire[start : start + step] for start in range(0, len(wire), step)]
    assert decode(SnappyLayer(), *parts) == b"one,two!"


REFUSED = {
    "no stream identifier": (stored(b"data"), "no stream identifier"),
    "padding before the identifier": (chunk(PADDING, b"") + IDENTIFIER, "no stream identifier"),
    "plain text": (b"NOP\nNOP\n", "no stream identifier"),
    "identifier of another format": (b"\xff\x06\x00\x00SnApPy", "wrong stream identifier"),
    "identifier of another length": (b"\xff\x07\x00\x00sNaPpYy", "wrong stream identifier"),
    "bad checksum, stored": (IDENTIFIER + chunk(1, b"\0\0\0\0data"), "wrong checksum"),
    "bad checksum, compressed": (
        IDENTIFIER + chunk(0, b"\0\0\0\0" + bytes(cramjam.snappy.compress_raw(b"data"))),
        "wrong checksum",
    ),
    "first unskippable type": (IDENTIFIER + chunk(0x02, b"data"), "unknown type 0x02"),
    "last unskippable type": (IDENTIFIER + chunk(0x7F, b"data"), "unknown type 0x7f"),
    "no room for a checksum": (IDENTIFIER + chunk(1, b"abc"), "chunk of 3 bytes"),
    "compressed nothing at all": (IDENTIFIER + chunk(0, checksum(b"")), "corrupt chunk"),
    "compressed nonsense": (IDENTIFIER + chunk(0, checksum(b"") + b"\xff\xff\xff"), "corrupt chunk"),
    "wrong length inside": (IDENTIFIER + chunk(0, checksum(b"data") + b"\x05\x0cdata"), "corrupt chunk"),
}


@pytest.mark.parametrize(("wire", "reason"), REFUSED.values(), ids=REFUSED)
def test_snappy_refuses_invalid_streams(wire: bytes, reason: str) -> None:
    with pytest.raises(LayerError, match=reason):
        decode(SnappyLayer(), wire)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"\x01" + (65_541).to_bytes(3, "little"), "chunk of 65541 bytes"),
        (b"\x00" + (76_495).to_bytes(3, "little"), "chunk of 76495 bytes"),
        (b"\x02" + (10).to_bytes(3, "little"), "unknown type"),
    ],
)
def test_snappy_refuses_a_chunk_by_its_header_without_waiting_for_it(header: bytes, reason: str) -> None:
    with pytest.raises(LayerError, match=reason):
        decode(SnappyLayer(), IDENTIFIER + header)


def test_snappy_refuses_a_chunk_that_claims_to_expand_further_without_expanding_it() -> None:
    # A chunk that is valid except for its size of 65,537 bytes, and one that claims 4 GiB.
    big = bytes(65_537)
    with pytest.raises(LayerError, match="expands to 65537 bytes"):
        decode(SnappyLayer(), IDENTIFIER + compressed(big))
    tracemalloc.start()
    try:
        with pytest.raises(LayerError, match="expands to 4294967295 bytes"):
            decode(SnappyLayer(), IDENTIFIER + chunk(0, b"\0\0\0\0" + b"\xff\xff\xff\xff\x0f" + b"\0" * 20))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_snappy_takes_the_longest_chunks() -> None:
    noise = random.Random(6).randbytes(65_536)
    wire = IDENTIFIER + stored(noise) + compressed(noise) + compressed(bytes(65_536))
    assert decode(SnappyLayer(), wire) == noise + noise + bytes(65_536)


def test_snappy_returns_the_bytes_before_an_error() -> None:
    pieces = SnappyLayer().receive(IDENTIFIER + stored(b"fine, ") + compressed(b"still fine") + chunk(2, b""))
    assert next(pieces) == b"fine, still fine"
    with pytest.raises(LayerError):
        next(pieces)


def test_snappy_gathers_small_chunks_into_one_piece() -> None:
    commands = [b"FIN 0123456789abcdef\n"] * 5000
    pieces = list(SnappyLayer().receive(IDENTIFIER + b"".join(map(stored, commands))))
    assert b"".join(pieces) == b"".join(commands)
    assert len(pieces) == -(-5000 // (MAX_PIECE // 21))


def test_snappy_keeps_no_more_of_its_input_than_an_unfinished_chunk() -> None:
    layer = SnappyLayer()
    tracemalloc.start()
    try:
        decode(layer, IDENTIFIER + stored(bytes(60_000)) * 16 + b"\x01")
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
