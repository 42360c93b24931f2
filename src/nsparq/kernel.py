"""The compiled inner loops, or None for each: then the Python code beside each use does the work.

NSPARQ_NO_EXTENSIONS=1 leaves the compiled code out.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Any, Final

PackMessages = Callable[[bytes, int, int, int], tuple[bytes, bytes, int]]
TakePublishes = Callable[[bytes, int, bytes, bool, int, int], tuple[list[int], bytes, bytes, int]]
EncodeMpub = Callable[[bytes, Any], bytes | None]
SplitHeaders = Callable[["array[int]", bytes], tuple[bytes, bytes, bytes, bytes, bool]]
EncodeWithHeaders = Callable[..., bytes | None]
CountNumbers = Callable[["array[int]", bytes, int, int, bytes], tuple[int, int, int]]
BuildFrames = Callable[..., tuple[bytes, "array[int]"]]
DecodeMessages = Callable[[bytes, int, int], tuple[list[tuple[int, int, bytes, bytes, bytes]], int]]
DecodeFins = Callable[[bytes, int], tuple[list[tuple[int, int]], int]]
SendEach = Callable[[list[int], bytes, object], list[tuple[int, int]]]
ReadPublishes = Callable[[int, bytes, int], tuple[list[int], list[bytes], list[tuple[int, bytes]]]]
EncodeSingles = Callable[[Any, Any, list[bytes], list[bytes], int], tuple[bytes, bytes]]
UnpackBatches = Callable[[Any, int, int, int, int, int, bool], tuple[bytes, bytes, bytes, bytes, bytes, int]]
UnpackHeaders = Callable[[bytes, bytes], tuple[bytes, bytes, bytes, bytes, bytes] | None]

pack_messages: PackMessages | None = None
take_publishes: TakePublishes | None = None
encode_mpub: EncodeMpub | None = None
split_headers: SplitHeaders | None = None
encode_headers: Callable[[Any], bytes | None] | None = None
decode_headers: Callable[[Any], dict[str, str] | None] | None = None
lazy_headers: Callable[[Any, Callable[[bytes], dict[str, str]]], Any] | None = None
encode_with_headers: EncodeWithHeaders | None = None
count_numbers: CountNumbers | None = None
build_frames: BuildFrames | None = None
decode_messages: DecodeMessages | None = None
decode_fins: DecodeFins | None = None
encode_singles: EncodeSingles | None = None
unpack_batches: UnpackBatches | None = None
unpack_headers: UnpackHeaders | None = None
open_ring: Callable[[], object] | None = None
"""What send_each() sends with; None without io_uring. Only the thread that opens it may use it."""
send_each: SendEach | None = None
read_publishes: ReadPublishes | None = None
"""On Linux alone."""

if not os.environ.get("NSPARQ_NO_EXTENSIONS"):
    try:
        from nsparq import _kernel  # type: ignore[attr-defined,unused-ignore]  # compiled, if at all
    except ImportError:
        pass
    else:
        pack_messages = _kernel.pack_messages
        take_publishes = _kernel.take_publishes
        encode_mpub = _kernel.encode_mpub
        split_headers = _kernel.split_headers
        encode_headers = _kernel.encode_headers
        decode_headers = _kernel.decode_headers
        lazy_headers = _kernel.lazy_headers
        encode_with_headers = _kernel.encode_with_headers
        count_numbers = _kernel.count_numbers
        build_frames = _kernel.build_frames
        decode_messages = _kernel.decode_messages
        decode_fins = _kernel.decode_fins
        encode_singles = _kernel.encode_singles
        unpack_batches = _kernel.unpack_batches
        unpack_headers = _kernel.unpack_headers
        open_ring = _kernel.open_ring
        send_each = _kernel.send_each
        read_publishes = getattr(_kernel, "read_publishes", None)

BUILD: Final = "python" if pack_messages is None else "compiled"
"""Which of the two is in use. `nsqd --version` shows it."""
