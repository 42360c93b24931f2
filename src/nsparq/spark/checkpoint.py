"""Identifies a micro-batch for a sink, by the file that Spark writes before it runs the batch.

When Spark plans batch N it writes `offsets/N` into the query's checkpoint: the ranges of all
sources, and the time. After a crash it runs the batch again by the same file. A checkpoint restored
from an older copy does not have the file: Spark plans batch N again, with other ranges. So a batch
is identified by its number and the content of that file, not by the number alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from nsparq.errors import NsparqError
from nsparq.spark.checkpoint_store import mirror_of

__all__ = ["LENGTH", "CheckpointBehind", "check_batch", "fingerprint"]

LENGTH: Final = 15
"""Digits of a fingerprint. As a number it fits into the version of a Delta transaction."""


class CheckpointBehind(NsparqError):
    """The sink has later batches of the same query, or this batch with other content."""

    retry_helps = False


def fingerprint(checkpoint: str, batch: int) -> str:
    """15 hexadecimal digits, the same each time a batch is run, and different if it was planned
    again. Empty if the checkpoint is not on a local file system, or does not have the batch.

    Every sink asks for it before it commits. So a checkpoint that belongs into an object store is
    copied there now. Raises CheckpointTaken, ArchiveUnavailable.
    """
    parts = urlsplit(checkpoint)
    if parts.scheme not in ("", "file") or not parts.path:
        return ""
    directory = Path(unquote(parts.path) if parts.scheme else checkpoint)
    try:
        planned = (directory / "offsets" / str(batch)).read_bytes()
    except OSError:
        return ""
    if mirror := mirror_of(directory.parent):
        mirror.record(directory, batch)
    return hashlib.sha256(planned).hexdigest()[:LENGTH]


def check_batch(sink: str, batch: int, planned: str, last: int, last_planned: str) -> bool:
    """Whether the sink, which is at batch `last`, has the batch. Raises CheckpointBehind."""
    if batch > last:
        return False
    if batch == last and (not planned or not last_planned or planned == last_planned):
        return True
    has = f"batches up to {last}" if batch < last else f"another batch {last}"
    raise CheckpointBehind(
        f"batch {batch} is refused: {sink} has {has} of the same query. The query's checkpoint was deleted, "
        "or is an older copy, or another driver uses it. Continue with the newest checkpoint, in one driver"
    )
