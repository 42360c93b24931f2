"""What Spark has written down about a micro-batch before it runs it, as a sink may look at it.

Spark writes `offsets/N` into a query's checkpoint when it plans batch N: the ranges of all sources, and the
time. A batch that is run again after a crash is run by that same file. A checkpoint that was restored from an
older copy has no such file yet: its batch N is planned anew, with other ranges. So the number of a batch does
not say which batch it is, and number and file together do.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from nsparq.errors import NsparqError

__all__ = ["LENGTH", "CheckpointBehind", "check_batch", "fingerprint"]

LENGTH: Final = 15
"""Digits of a fingerprint: as a number it fits into a version of a Delta transaction."""


class CheckpointBehind(NsparqError):
    """The sink has this batch, or later ones, of the same query with other content."""

    retry_helps = False


def fingerprint(checkpoint: str, batch: int) -> str:
    """15 hexadecimal digits. They are the same for each run of a batch, and differ for a batch that was
    planned anew. Empty if the checkpoint is not on a file system of this machine, or does not say."""
    parts = urlsplit(checkpoint)
    if parts.scheme not in ("", "file") or not parts.path:
        return ""
    directory = Path(unquote(parts.path) if parts.scheme else checkpoint)
    try:
        planned = (directory / "offsets" / str(batch)).read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(planned).hexdigest()[:LENGTH]


def check_batch(sink: str, batch: int, planned: str, last: int, last_planned: str) -> bool:
    """Whether the sink, whose last batch of this query is `last`, has the batch already: it is being run
    again, and nothing is to be written. Fingerprints that are empty are not compared. Raises
    CheckpointBehind."""
    if batch > last:
        return False
    if batch == last and (not planned or not last_planned or planned == last_planned):
        return True
    has = f"batches up to {last}" if batch < last else f"another batch {last}"
    raise CheckpointBehind(
        f"batch {batch} is refused: {sink} has {has} of the same query. The query's checkpoint was deleted, "
        "or is an older copy, or another driver goes on with it. Go on with the newest checkpoint, in one "
        "driver"
    )
