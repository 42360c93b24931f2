"""The frames of a batch, as a client gets them: built once, and shared by all channels.

Delivery builds the frames of a batch without headers itself: they are the same for every client.
"""

from __future__ import annotations

from array import array

from nsparq import kernel
from nsparq.broker.client import Client
from nsparq.broker.tagged import DEAD_LETTERS
from nsparq.dead_letter import PREFIX, DeadLetter
from nsparq.headers import decode_headers
from nsparq.packed import PackedBodies
from nsparq.storage.batch import Batch
from nsparq.wire.message import build_frames

_DEAD = PREFIX.encode()


def frames_for(client: Client, batch: Batch, first_id: int) -> tuple[bytes, array[int]]:
    """First-delivery frames and their offsets. `first_id` is the id of sequence number 0."""
    first_id += batch.base
    build = kernel.build_frames or build_frames
    if batch.headers is not None and client.identity.headers:
        if batch.frames_with_headers is None:
            blocks = batch.headers.lengths, batch.headers.data
            batch.frames_with_headers = build(
                first_id, batch.timestamps_ns, batch.lengths, batch.data, *blocks
            )
        return batch.frames_with_headers
    if batch.frames is None:
        lengths, data = batch.lengths, batch.data
        if batch.headers is not None and batch.tag == DEAD_LETTERS:
            letters = _letters_as_json(batch, batch.headers)
            lengths, data = letters.lengths, letters.data
        batch.frames = build(first_id, batch.timestamps_ns, lengths, data)
    return batch.frames


def _letters_as_json(batch: Batch, headers: PackedBodies) -> PackedBodies:
    """Dead letters for clients that cannot see their headers."""
    bodies = []
    for body, block in zip(batch.bodies(), headers[:], strict=True):
        letter = DeadLetter.from_message(body, decode_headers(block)) if _DEAD in block else None
        bodies.append(body if letter is None else letter.to_json())
    return PackedBodies.of(bodies)
