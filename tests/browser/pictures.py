"""Shrinks PNG files: our pages have few colours, but Chromium writes them with many.

shrink(path)        rewrites the file with a palette of 256 of its colours
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB, PALETTE = 2, 3
KIND = 36
"""Colours are of one kind that differ by less in red, green and blue."""
Bytes = NDArray[np.uint8]


def shrink(path: Path) -> None:
    pixels = decode(path.read_bytes())
    path.write_bytes(encode(pixels))


def chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    assert data.startswith(SIGNATURE)
    place = len(SIGNATURE)
    while place < len(data):
        (size,) = struct.unpack_from(">I", data, place)
        yield data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        place += 12 + size


def decode(data: bytes) -> Bytes:
    """Height x width x 3, of what Chromium writes: 8 bits, no transparency, not interlaced."""
    content = b""
    for kind, part in chunks(data):
        if kind == b"IHDR":
            width, height, bits, colours, *_ = struct.unpack(">IIBBBBB", part)
            assert (bits, colours) == (8, RGB)
        elif kind == b"IDAT":
            content += part
    rows = np.frombuffer(zlib.decompress(content), np.uint8).reshape(height, 1 + 3 * width)
    found = np.zeros((height, 3 * width), np.int64)
    above = np.zeros(3 * width, np.int64)
    for place, row in enumerate(rows):
        above = found[place] = _unfiltered(int(row[0]), row[1:].astype(np.int64), above)
    return found.astype(np.uint8).reshape(height, width, 3)


def _unfiltered(kind: int, row: NDArray[np.int64], above: NDArray[np.int64]) -> NDArray[np.int64]:
    """A byte is the difference to a prediction from the pixels left, above, and above left."""
    if kind == 0:
        return row
    if kind == 1:
        return np.cumsum(row.reshape(-1, 3), axis=0).reshape(-1) & 255
    if kind == 2:
        return (row + above) & 255
    values, up = row.tolist(), above.tolist()
    for place in range(len(values)):
        left, corner = (values[place - 3], up[place - 3]) if place >= 3 else (0, 0)
        guess = (left + up[place]) // 2 if kind == 3 else _paeth(left, up[place], corner)
        values[place] = (values[place] + guess) & 255
    return np.array(values)


def _paeth(left: int, up: int, corner: int) -> int:
    wanted = left + up - corner
    return min((left, up, corner), key=lambda one: abs(wanted - one))


def _palette(colours: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The most frequent colours, and at least one of each kind, so that a small green dot stays
    green."""
    ranked = colours[np.argsort(-counts)]
    _, first = np.unique(ranked // KIND, axis=0, return_index=True)
    chosen = sorted(first)[:200]
    others = np.setdiff1d(np.arange(len(ranked)), chosen)
    return ranked[[*chosen, *others][:256]]


def encode(pixels: Bytes) -> bytes:
    height, width, _ = pixels.shape
    colours, which, counts = np.unique(
        pixels.reshape(-1, 3).astype(np.int64), axis=0, return_inverse=True, return_counts=True
    )
    palette = _palette(colours, counts)
    nearest = np.array([((palette - colour) ** 2).sum(axis=1).argmin() for colour in colours], np.uint8)
    rows = np.zeros((height, 1 + width), np.uint8)
    rows[:, 1:] = nearest[which.reshape(-1)].reshape(height, width)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, PALETTE, 0, 0, 0),
        b"PLTE": palette.astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(rows.tobytes(), 9),
        b"IEND": b"",
    }
    written = (
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
        for kind, part in parts.items()
    )
    return SIGNATURE + b"".join(written)
