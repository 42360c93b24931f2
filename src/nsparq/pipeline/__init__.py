"""Pipelines that are declared, not coded: topics are read, decoded, transformed by SQL and written elsewhere.

A TOML file says what (`spec`), or a Python program (`builder`); the runner makes streaming queries of it.
Only the modules that touch Spark import it, so that a file can be checked without. The names below are
imported when they are used: tasks of Spark import this package too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from nsparq.pipeline.errors import PipelineError
    from nsparq.pipeline.execute.runner import build_session, run
    from nsparq.pipeline.file.builder import (
        Keys,
        Value,
        decoding,
        pipeline,
        pipeline_file,
        sink,
        source,
        step,
        table,
        watermark,
    )
    from nsparq.pipeline.file.reading import load
    from nsparq.pipeline.file.spec import PipelineFile, SpecError

__all__ = [
    "Keys",
    "PipelineError",
    "PipelineFile",
    "SpecError",
    "Value",
    "build_session",
    "decoding",
    "load",
    "pipeline",
    "pipeline_file",
    "run",
    "sink",
    "source",
    "step",
    "table",
    "watermark",
]

_ELSEWHERE: Final = {
    "PipelineError": "errors",
    "PipelineFile": "file.spec",
    "SpecError": "file.spec",
    "build_session": "execute.runner",
    "load": "file.reading",
    "run": "execute.runner",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'file.builder')}"), name)
