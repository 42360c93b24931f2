"""What a former primary had and never acknowledged: its messages go to files that people can read.

Batches of messages are copied as they are, so a batch that the present primary has is there byte
for byte. What is not there was never acknowledged, or is in a topic that was deleted since.
"""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from nsparq.headers import decode_headers
from nsparq.replication.joining import FORMER, SET_ASIDE
from nsparq.storage.batch import Head
from nsparq.storage.files import Files
from nsparq.storage.raw_batch import RawBatch, iter_batches
from nsparq.storage.recovery import Found, scan

logger = logging.getLogger(__name__)


def set_tail_aside(files: Files, root: Path, epoch: int) -> int:
    """Write the messages below FORMER that the data path does not have to files of JSON lines, one
    for each topic, and remove FORMER. Gives the number of messages."""
    former = root / FORMER
    count = 0
    for directory in sorted(former.glob("topics/*.topic")):
        target = root / SET_ASIDE / f"{directory.stem}-{epoch}.jsonl"
        found = _write(files, target, _missing(files, directory, root / directory.relative_to(former)))
        count += found
        if found:
            logger.warning(
                "REPLICATION: %d messages of topic %s are not on the primary, and are set aside in %s",
                found, directory.stem, target,
            )  # fmt: skip
    if former.exists():
        files.remove_tree(former)
    return count


def _missing(files: Files, former: Path, present: Path) -> Iterator[RawBatch]:
    """Batches in one directory that the other one does not have."""
    present_bases = _bases(files, present)
    for base in _bases(files, former):
        heads = {head: position for position, head in _heads(files, former, base)}
        if not heads:
            continue
        end = max(head.end for head in heads)
        following = [*present_bases[1:], end]
        for other, after in zip(present_bases, following, strict=False):
            if other < end and after > base:
                for _, head in _heads(files, present, other):
                    heads.pop(head, None)
        with files.opened(former / f"{base:020d}.log", read_only=True) as fd:
            for head, position in heads.items():
                # What is before the first one was finished, and removed.
                if not present_bases or head.end > present_bases[0]:
                    yield from iter_batches(files.read(fd, head.size, position))


def _bases(files: Files, directory: Path) -> list[int]:
    names = [name[:-4] for name in files.list_directory(directory) if name.endswith(".log")]
    return sorted(int(name) for name in names if name.isdecimal())


def _heads(files: Files, directory: Path, base: int) -> Iterator[tuple[int, Head]]:
    """Where whole batches stand in a segment."""
    with files.opened(directory / f"{base:020d}.log", read_only=True) as fd:

        def read(size: int, position: int) -> bytes:
            return files.read(fd, size, position)

        for one in scan(read, files.size(fd), first=base):
            if isinstance(one, Found):
                yield one.position, one.head


def _write(files: Files, target: Path, batches: Iterator[RawBatch]) -> int:
    """Write messages to a file, as nsq_to_file --json-lines does. Gives their number."""
    first = next(batches, None)
    if first is None:
        return 0
    files.make_directory(target.parent)
    count = size = 0
    with files.opened(target) as fd:
        # A crash may have left a part of it.
        files.truncate(fd, 0)
        for batch in chain([first], batches):
            lines = [*map(partial(_line, batch.timestamp_ns), batch.bodies(), batch.blocks())]
            data = b"".join(lines)
            files.write(fd, [data], size)
            size += len(data)
            count += len(lines)
        files.sync(fd)
    files.sync_names(target.parent)
    return count


def _line(timestamp_ns: int, body: bytes, block: bytes) -> bytes:
    try:
        shown = {"body": body.decode()}
    except UnicodeDecodeError:
        shown = {"body_base64": b64encode(body).decode()}
    fields = {"timestamp": timestamp_ns, "headers": decode_headers(block), **shown}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
