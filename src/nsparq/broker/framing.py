"""The frames of a batch, as a client gets them: built once, and shared by all channels."""

from __future__ import annotations

from array import array

from nsparq.broker.client import Client
from nsparq.storage.batch import Batch
from nsparq.wire.message import build_frames


def frames_for(client: Client, batch: Batch, first_id: int) -> tuple[bytes, array[int]]:
    """First-delivery frames and their offsets. `first_id` is the id of sequence number 0."""
    has_headers = batch.headers is not None and client.identity.headers
    frames = batch.frames_with_headers if has_headers else batch.frames
    if frames is None:
        headers = batch.headers if has_headers else None
        frames = build_frames(first_id + batch.base, batch.timestamps_ns, batch.lengths, batch.data, headers)
        if has_headers:
            batch.frames_with_headers = frames
        else:
            batch.frames = frames
    return frames
