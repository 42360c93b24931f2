"""The mark of a data path: the cluster whose copy it is, which copy, and whether it is complete.

A node takes over only with a complete copy, and empties only a copy. So a node whose disk was
replaced does not serve an empty data path, and a data path that was never replicated is not lost
because its node was told to follow another one.

A copy has an id. It gets a new one each time that it joins, and each time that its node takes over.
The record names the ids that may take over. So neither a backup that was put back nor another node
of the same name passes for the copy that has everything.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final, NamedTuple

from nsparq.storage.checked_json import read_json, write_json
from nsparq.storage.files import Files

MARK: Final = "replica.json"
_FORMAT: Final = 1
UNKNOWN: Final = ""
"""The cluster of a data path whose node has asked to be the first of one, and does not know whether
it is. It is no copy, unless the record names its id."""


class Mark(NamedTuple):
    cluster: str
    is_complete: bool
    """False while a snapshot is being received."""
    was_primary: bool = False
    """Whether this node was primary since it joined last. It may have what nobody else has."""
    copies: tuple[str, ...] = ()
    """Ids under which the record may know this copy: more than one while nobody knows whether the
    node has taken over."""


def new_copy_id() -> str:
    return secrets.token_hex(8)


def write_mark(files: Files, root: Path, mark: Mark) -> None:
    """It is on disk when this returns."""
    write_json(files, root / MARK, {"format": _FORMAT, **mark._asdict()}, sync=True)


def read_mark(files: Files, root: Path) -> Mark | None:
    """None if the data path is not marked. Raises ValueError if the mark cannot be understood."""
    fields = read_json(files, root / MARK)
    if fields is None:
        return None
    if fields.get("format") != _FORMAT:
        raise ValueError(f"{root / MARK} has format {fields.get('format')}, and this version knows {_FORMAT}")
    return Mark(
        str(fields["cluster"]),
        bool(fields["is_complete"]),
        bool(fields.get("was_primary")),
        # A mark without ids is of a time when a record had none.
        tuple(map(str, fields.get("copies", [""]))),
    )
