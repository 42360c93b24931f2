"""`pipeline.json` in a pipeline's checkpoint directory: what must survive a restart beside Spark's
checkpoint.

It holds the pipeline's identity, the schemas that were inferred, and the positions where its
queries began. A key that belongs to a named source or output ends with that name.

    {"format": 1, "id": "9f0c…", "schema": "number BIGINT", "schema-payments": …, "batch-large": 7,
     "beginnings": {"rows": {"messages": {…}}, "letters": …}}

`format` is the version of the file. The first files had no version; they are read as version 1. A
newer version is refused, because a program that does not understand it would start at another
position. With a checkpoint in an object store, each version of the file is an object there.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from nsparq.errors import NsparqError
from nsparq.pipeline.durable import write_json
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.keys import is_local
from nsparq.pipeline.file.spec import Pipeline
from nsparq.spark.checkpoint_store import SCHEMES, CheckpointStore, mirror_of

NAME: Final = "pipeline.json"
FORMAT: Final = 1
"""The version that this program writes, and the newest that it reads."""

_writing: Final = threading.Lock()
"""Several outputs of a pipeline write to the file, each in its own thread."""


class Abandoned(NsparqError):
    """The runner has given up this start of a pipeline. Nothing was written."""


class PipelineJson:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._path = Path(pipeline.checkpoint) / NAME

    def get(self, key: str) -> Any:
        """None if the key was never put. Raises PipelineError."""
        return self._read().get(key)

    def put(self, key: str, value: Any, abandoned: threading.Event | None = None) -> None:
        """Raises PipelineError, and Abandoned if the event is set, as another runner may write
        then."""
        if abandoned is not None and abandoned.is_set():
            raise Abandoned
        with _writing:
            content = {"format": FORMAT} | self._read() | {key: value}
            if (store := self._store()) is not None:
                store.keep(content)
                return
            try:
                write_json(self._path, content)
            except OSError as error:
                raise PipelineError(f"{self._place} {self._path}: {error.strerror}") from error

    @property
    def identity(self) -> str:
        """Identifies the pipeline with this checkpoint. A new checkpoint gets a new identity."""
        if self.get("id") is None:
            self.put("id", uuid4().hex)
        return str(self.get("id"))

    @property
    def _place(self) -> str:
        return f"[pipeline.{self._pipeline.name}] checkpoint:"

    def _store(self) -> CheckpointStore | None:
        checkpoint = self._pipeline.checkpoint
        if checkpoint.startswith(SCHEMES):
            return CheckpointStore(checkpoint)
        return mirror_of(Path(checkpoint))

    def _read(self) -> dict[str, Any]:
        if (store := self._store()) is not None:
            kept = store.read()
            self._check(kept)
            return kept
        if not is_local(self._pipeline.checkpoint):
            raise PipelineError(
                f"{self._place} must be a directory, s3://, gs:// or az://: this pipeline keeps {NAME} there"
            )
        try:
            content: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            content = {}
        except (OSError, ValueError) as error:
            raise PipelineError(f"{self._place} {self._path} cannot be read: {error}") from error
        self._check(content)
        return content

    def _check(self, content: Any) -> None:
        found = content.get("format", 1) if isinstance(content, dict) else None
        if type(found) is not int or found < 1:
            raise PipelineError(f"{self._place} {self._path} was not written by a pipeline")
        if found > FORMAT:
            raise PipelineError(
                f"{self._place} {self._path} has format {found}, and this version of nsparq reads formats up "
                f"to {FORMAT}. A newer nsparq wrote it: use that version, or another checkpoint"
            )
