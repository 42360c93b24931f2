"""What a pipeline has to remember beside Spark's checkpoint, in `pipeline.json` of the same directory.

Its identity, the schema that was inferred, and where it began: all of them must be the same after a restart.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.spec import Pipeline, is_local

__all__ = ["NAME", "PipelineMemory", "write_json"]

NAME: Final = "pipeline.json"


class PipelineMemory:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._path = Path(pipeline.checkpoint) / NAME
        self._content: dict[str, Any] | None = None

    def get(self, key: str) -> Any:
        """None if it has never been put. Raises PipelineError."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> None:
        """Raises PipelineError."""
        content = self._read() | {key: value}
        try:
            write_json(self._path, content)
        except OSError as error:
            raise PipelineError(f"{self._place} {self._path}: {error.strerror}") from error
        self._content = content

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
        if self._content is None:
            if not is_local(self._pipeline.checkpoint):
                raise PipelineError(
                    f"{self._place} must be a directory of this machine, or mounted here: there is something "
                    "to remember there"
                )
            try:
                self._content = json.loads(self._path.read_text())
            except FileNotFoundError:
                self._content = {}
            except (OSError, ValueError) as error:
                raise PipelineError(f"{self._place} {self._path} cannot be read: {error}") from error
        assert self._content is not None
        return self._content


def write_json(path: Path, content: Any) -> None:
    """All of it, or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = path.with_name(f".{path.name}.tmp")
    with waiting.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(waiting, path)
