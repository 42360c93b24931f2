"""The checkpoint of a query without state in an object store, for which Spark has no file system.

Spark writes its checkpoint to a local directory of the driver. For such a query the checkpoint is
small: an id, and for each micro-batch the offsets. They are copied to the store before the sink
commits the batch. So a driver on another machine can run the same batch again:

    <url>/<role>/metadata                      the query's id
    <url>/<role>/batches/00000000000000000012  offsets of batches 11 and 12, and that 11 is done
    <url>/pipeline/00000003.json               what the pipeline keeps beside Spark's checkpoint

Every object is written once, by a conditional put. Of two drivers with the same checkpoint one is
refused: at the first object that the other has written with another content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from nsparq.archive.store import Store
from nsparq.errors import NsparqError

__all__ = ["SCHEMES", "CheckpointStore", "CheckpointTaken", "mirror_of"]

SCHEMES: Final = ("s3://", "gs://", "az://")
NAME: Final = "mirror.json"
"""In the local directory: the URL, and whether the content was fetched."""
PREFIX: Final = "nsparq-checkpoint-"
"""Of the local directory's parent. A machine may clean up its temporary files."""
FORMAT: Final = 1
KEEP: Final = 20
"""Batches that stay in the store. The last one is enough; older ones refuse late drivers."""


class CheckpointTaken(NsparqError):
    """Another driver uses the same checkpoint."""

    retry_helps = False

    def __init__(self, url: str, key: str) -> None:
        super().__init__(
            f"{url}/{key} was written by another driver: only one may use a checkpoint. Stop one of them"
        )


class CheckpointStore:
    """All calls raise ArchiveUnavailable, which a later attempt may not."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = Store(url)

    # queries

    def fetch(self, directory: Path, roles: Iterable[str]) -> None:
        """Writes what Spark needs to continue into a new local directory."""
        for role in roles:
            metadata = self._store.get(f"{role}/metadata")
            last = max((one.key for one in self._store.list(f"{role}/batches/")), default=None)
            if metadata is None or last is None:
                continue
            content = self._decoded(last, self._store.get(last))
            for log in ("offsets", "commits"):
                (directory / role / log).mkdir(parents=True, exist_ok=True)
                for number, text in content[log].items():
                    (directory / role / log / number).write_text(text)
            (directory / role / "metadata").write_bytes(metadata)

    def record(self, directory: Path, batch: int) -> None:
        """Stores the plan of a batch; `directory` is that of its query. Raises CheckpointTaken."""
        role = directory.name
        begun = directory / "begun"
        if not begun.exists():
            self._put(f"{role}/metadata", (directory / "metadata").read_bytes())
            begun.touch()
        files = [directory / "offsets" / str(batch)]
        if batch:
            files += [directory / log / str(batch - 1) for log in ("offsets", "commits")]
        content: dict[str, Any] = {"format": FORMAT, "offsets": {}, "commits": {}}
        for path in files:
            content[path.parent.name][path.name] = path.read_text()
        self._put(f"{role}/batches/{batch:020d}", json.dumps(content).encode())
        if batch % KEEP == 0:
            self._remove_old(f"{role}/batches/", KEEP)

    # the pipeline

    def read(self) -> dict[str, Any]:
        """What was kept last."""
        last = max((one.key for one in self._store.list("pipeline/")), default=None)
        return {} if last is None else self._decoded(last, self._store.get(last))

    def keep(self, content: dict[str, Any]) -> None:
        """Raises CheckpointTaken."""
        last = max((one.key for one in self._store.list("pipeline/")), default="pipeline/00000000.json")
        number = int(last.rpartition("/")[2].removesuffix(".json")) + 1
        self._put(f"pipeline/{number:08d}.json", json.dumps(content, indent=1).encode())
        self._remove_old("pipeline/", 2)

    # details

    def _put(self, key: str, content: bytes) -> None:
        # The answer to an earlier attempt may have been lost, so the same content is ours.
        if not self._store.put_new(key, content) and self._store.get(key) != content:
            raise CheckpointTaken(self.url, key)

    def _remove_old(self, prefix: str, kept: int) -> None:
        self._store.delete(sorted(one.key for one in self._store.list(prefix))[:-kept])

    def _decoded(self, key: str, content: bytes | None) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(content or b"{}")
        if found.get("format", 1) > FORMAT:
            raise NsparqError(f"{self.url}/{key} has format {found['format']}: use the nsparq that wrote it")
        return found


def mirror_of(directory: Path) -> CheckpointStore | None:
    """Where a pipeline's checkpoint directory is copied to. None if it is not."""
    try:
        url = json.loads((directory / NAME).read_text())["url"]
    except FileNotFoundError:
        if directory.parent.name.startswith(PREFIX):
            raise NsparqError(
                f"{directory / NAME} was removed while the pipeline runs: start it again"
            ) from None
        return None
    return CheckpointStore(url)
