"""What a pipeline has to remember beside Spark's checkpoint, in `pipeline.json` of the same directory.

Its identity, the schemas that were inferred, and where its queries began: all of them must be the same after
a restart. A key that belongs to a named source or output ends with that name.

    {"format": 1, "id": "9f0c…", "schema": "number BIGINT", "schema-payments": …, "batch-large": 7,
     "beginnings": {"rows": {"messages": {…}}, "letters": …}}

`format` is the version of the file. Files written before there was one have none, and are read as version 1.
A newer file is refused: a program that does not know what is in it would start the pipeline at another place.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.spec import Pipeline, is_local

__all__ = ["FORMAT", "NAME", "PipelineMemory", "write_json"]

NAME: Final = "pipeline.json"
FORMAT: Final = 1
"""The newest version of the file that this program reads, and the one that it writes."""


_writing: Final = threading.Lock()
"""The outputs of a pipeline are written by different threads, and all of them put things here."""


class PipelineMemory:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._path = Path(pipeline.checkpoint) / NAME

    def get(self, key: str) -> Any:
        """None if it has never been put. Raises PipelineError."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> None:
        """Raises PipelineError."""
        with _writing:
            content = {"format": FORMAT} | self._read() | {key: value}
            try:
                write_json(self._path, content)
            except OSError as error:
                raise PipelineError(f"{self._place} {self._path}: {error.strerror}") from error

    @property
    def identity(self) -> str:
        """Of this pipeline with this checkpoint; another one as soon as the checkpoint is gone."""
        if self.get("id") is None:
            self.put("id", uuid4().hex)
        return str(self.get("id"))

    @property
    def _place(self) -> str:
        return f"[pipeline.{self._pipeline.name}] checkpoint:"

    def _read(self) -> dict[str, Any]:
        if not is_local(self._pipeline.checkpoint):
            raise PipelineError(
                f"{self._place} must be a directory of this machine, or mounted here: there is something to "
                "remember there"
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
            raise PipelineError(f"{self._place} {self._path} is not a file that a pipeline has written")
        if found > FORMAT:
            raise PipelineError(
                f"{self._place} {self._path} has format {found}, and this version of nsparq reads formats up "
                f"to {FORMAT}: a newer nsparq has written it. Use that version, or another checkpoint"
            )


def write_json(path: Path, content: Any) -> None:
    """All of it, or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = path.with_name(f".{path.name}.tmp")
    with waiting.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(waiting, path)
