"""Header blocks of many messages at once: as a column of maps for Spark, and back.

There is no loop over rows. The compiled kernel cuts the blocks; without it `to_maps` finds the
first header of all messages, then the second of all that have one, and so on. `nsparq.headers`
describes a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nsparq import kernel
from nsparq.headers import MAX_BLOCK, ORIGIN, encode_headers

__all__ = ["MAPS", "no_maps", "to_blocks", "to_maps"]

MAPS: Final = pa.map_(pa.string(), pa.string())

Longs = npt.NDArray[np.int64]
Refuse = Callable[[Longs, str], None]
"""Raises an error for the first of some rows, with a text that says what is wrong."""


def no_maps(count: int) -> pa.Array:
    """The column of messages without headers."""
    return pa.nulls(count, MAPS)


def to_maps(offsets: npt.NDArray[np.int32], data: bytes) -> pa.Array:
    """The headers of messages whose blocks lie end to end in `data`, as maps; null for an empty
    block. Raises ValueError if these are no blocks."""
    if kernel.unpack_headers is not None:
        found = kernel.unpack_headers(offsets.tobytes(), data)
        if found is not None:
            limits, *strings = found
            names, values = _strings(*strings[:2]), _strings(*strings[2:])
            return _maps(np.frombuffer(limits, np.int32), names, values)
    raw = np.frombuffer(data, np.uint8)
    at, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    rows = np.flatnonzero(at < ends)
    at, ends = at[rows], ends[rows]
    owners: list[Longs] = []
    # Of each header: the name, and the value behind its size.
    starts: list[Longs] = []
    sizes: list[Longs] = []
    while len(rows):
        name_ends = at + 1 + raw[at]
        if (name_ends + 2 > ends).any():
            raise ValueError("not a header block")
        value_sizes = (raw[name_ends].astype(np.int64) << 8) | raw[name_ends + 1]
        behind = name_ends + 2 + value_sizes
        if (behind > ends).any():
            raise ValueError("not a header block")
        owners.append(rows)
        starts.append(at)
        sizes.append(name_ends - at)
        more = behind < ends
        rows, at, ends = rows[more], behind[more], ends[more]
    if not owners:
        return no_maps(len(offsets) - 1)
    return _cut(len(offsets) - 1, data, np.concatenate(owners), np.concatenate(starts), np.concatenate(sizes))


def _cut(count: int, data: bytes, owners: Longs, starts: Longs, sizes: Longs) -> pa.Array:
    """Cuts `data` where names and values begin and end; every second piece is one of them."""
    # Headers of a message keep their order: they lie in that order, so their places sort all. A
    # stable sort joins the sorted runs, the first headers and the second ones and so on: 25 times
    # as fast.
    order = np.argsort(starts, kind="stable")
    starts, sizes = starts[order], sizes[order]
    total = len(starts)
    edges = np.empty(4 * total + 1, np.int32)
    edges[0:-1:4] = starts
    edges[1::4] = starts + 1
    edges[2::4] = starts + sizes
    edges[3::4] = starts + sizes + 2
    edges[-1] = len(data)
    pieces = _strings(edges, data)
    places = np.arange(0, 4 * total, 4, dtype=np.int32)
    names, values = pieces.take(pa.array(places + 1)), pieces.take(pa.array(places + 3))
    limits = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(owners, minlength=count), out=limits[1:])
    return _maps(limits, names, values)


def _strings(offsets: bytes | npt.NDArray[np.int32], data: bytes) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), buffers[1].size // 4 - 1, buffers)


def _maps(limits: npt.NDArray[np.int32], names: pa.Array, values: pa.Array) -> pa.Array:
    """Maps with the names and values between each two limits; null where there are none."""
    empty = limits[1:] == limits[:-1]
    return pa.MapArray.from_arrays(
        pa.array(limits), names, values, mask=pa.array(empty) if empty.any() else None
    )


def to_blocks(maps: pa.Array, refuse: Refuse) -> pa.Array:
    """The header block of each map, empty for null, without ORIGIN. `refuse` gets the rows
    that break a rule."""
    maps = maps.fill_null(pa.scalar([], MAPS)) if maps.null_count else maps
    limits = maps.offsets.to_numpy().astype(np.int64)
    names, values = maps.keys[limits[0] : limits[-1]], maps.items[limits[0] : limits[-1]]
    limits -= limits[0]
    owners = np.repeat(np.arange(len(maps)), np.diff(limits))
    if values.null_count:
        refuse(owners[_where(values.is_null())], "a value of column headers is null; leave the header out")
    encoded = names.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    sized: list[bytes] = []
    lower: dict[bytes, int] = {}
    for code, name in enumerate(encoded.dictionary.to_pylist()):
        try:
            # Size and name; the two bytes behind them are the size of an empty value.
            sized.append(encode_headers({name: ""})[:-2])
        except ValueError as error:
            refuse(owners[codes == code], f"column headers: {error}")
        lower.setdefault(sized[-1], len(lower))
    if len(codes) > 1:
        same = owners * len(lower) + np.array([lower[one] for one in sized])[codes]
        order = np.argsort(same, kind="stable")
        again = order[1:][np.diff(same[order]) == 0]
        if len(again):
            name = sized[codes[again.min()]][1:].decode()
            refuse(owners[again], f"column headers has {name!r} twice; names are written in lower case")
    left_out = [code for code, one in enumerate(sized) if one[1:].decode() in ORIGIN]
    if left_out:
        kept = ~np.isin(codes, left_out)
        owners, codes, values = owners[kept], codes[kept], values.filter(pa.array(kept))
        np.cumsum(np.bincount(owners, minlength=len(maps)), out=limits[1:])
    lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
    heads = pa.array(sized, pa.binary()).take(pa.array(codes))
    long = owners[lengths > MAX_BLOCK]
    if len(long):
        refuse(long, _TOO_LARGE)
    value_sizes = pa.Array.from_buffers(
        pa.binary(2), len(codes), [None, pa.py_buffer(lengths.astype(">u2").tobytes())]
    ).cast(pa.binary())
    joined = pc.binary_join_element_wise(heads, value_sizes, values.cast(pa.binary()), b"")
    # The blocks lie in the same bytes: one begins where the first header of its message begins.
    ends = np.frombuffer(joined.buffers()[1], np.int32)[joined.offset :][limits]
    large = np.flatnonzero(np.diff(ends) > MAX_BLOCK)
    if len(large):
        refuse(large, _TOO_LARGE)
    return pa.Array.from_buffers(
        pa.binary(), len(maps), [None, pa.py_buffer(np.ascontiguousarray(ends)), joined.buffers()[2]]
    )


_TOO_LARGE: Final = f"column headers: the headers of a message must not exceed {MAX_BLOCK} bytes"


def _where(true: Any) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = true.to_numpy(zero_copy_only=False)
    return found
