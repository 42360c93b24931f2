"""Builds pipelines in a Python program, with the same result as a file.

Each function returns a table of the file, with the keys on the reference page. `pipeline_file`
passes the tables to the reader of files, with the same checks and errors. Instead of a string, a
function at module level may be given for `module:function`, and a path or a timedelta where it
fits. None means that the key is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

from nsparq.pipeline.file.reading import read
from nsparq.pipeline.file.spec import PipelineFile

__all__ = [
    "Keys",
    "Value",
    "decoding",
    "pipeline",
    "pipeline_file",
    "sink",
    "source",
    "step",
    "table",
    "watermark",
]

Value: TypeAlias = (
    "str | int | float | datetime | timedelta | os.PathLike[str] | Callable[..., object] "
    "| Sequence[Value] | Mapping[str, Value] | None"
)
Keys: TypeAlias = Mapping[str, Value]
"""A table of the file."""
Function: TypeAlias = "str | Callable[..., object]"
Duration: TypeAlias = str | int | timedelta


def pipeline_file(
    path: Path | str,
    pipelines: Mapping[str, Keys],
    *,
    nsq: Keys | None = None,
    spark: Keys | None = None,
    run: Keys | None = None,
) -> PipelineFile:
    """A whole file with these pipelines, by name. Raises SpecError.

    `path` is where the file would be, such as `__file__`. Relative paths start in its directory,
    and the checkpoints are named after it.
    """
    given = {"nsq": nsq, "spark": spark, "run": run, "pipeline": pipelines}
    return read(_plain(given), path)


def pipeline(
    *,
    sink: Value,
    source: Value = None,
    sources: Mapping[str, Value] | None = None,
    decode: Value = None,
    dead_letters: str | None = None,
    watermark: Keys | None = None,
    tables: Mapping[str, Keys] | None = None,
    sql: str | None = None,
    python: Function | None = None,
    step: Sequence[Keys] | None = None,
    output_mode: str | None = None,
    trigger: Duration | None = None,
    checkpoint: str | Path | None = None,
    retries: int | None = None,
) -> Keys:
    """`[pipeline.NAME]`: one `source`, or `sources` by name; one `sink`, or a list of sinks."""
    return _table(locals())


def source(
    topic: str | Sequence[str] | None = None,
    *,
    decode: Value = None,
    dead_letters: str | None = None,
    watermark: Keys | None = None,
    **options: Value,
) -> Keys:
    """A source, with more options of format("nsq") in snake_case. For the only `source` of a
    pipeline, decode, dead_letters and watermark belong to the pipeline."""
    return _table(locals())


def decoding(format: str, **keys: Value) -> Keys:
    """`decode`, such as `decoding("json", schema="number BIGINT NOT NULL")`."""
    return _table(locals())


def watermark(column: str, delay: Duration) -> Keys:
    """How late rows may come."""
    return _table(locals())


def table(**keys: Value) -> Keys:
    """A table to join with, such as `table(csv="countries.csv")`."""
    return _table(locals())


def step(
    sql: str | None = None,
    *,
    python: Function | None = None,
    name: str | None = None,
    from_: str | Sequence[str] | None = None,
    watermark: Keys | None = None,
) -> Keys:
    """A transformation: SQL, or a function."""
    return _table(locals())


def sink(
    *, name: str | None = None, from_: str | None = None, output_mode: str | None = None, **keys: Value
) -> Keys:
    """A sink of any kind, such as `sink(topic="results")` or `sink(parquet="data",
    partition_by="date")`."""
    return _table(locals())


def _table(given: Mapping[str, Any]) -> dict[str, Value]:
    """The arguments of a function as keys. The argument `from_` is the key `from`."""
    found: dict[str, Value] = {}
    for name, value in given.items():
        if name in ("keys", "options"):
            found.update(value)
        else:
            found[name.removesuffix("_")] = value
    return found


def _plain(value: Any) -> Any:
    """A value as TOML has it. Other values stay, and the reader refuses them."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, timedelta):
        return f"{round(value / timedelta(milliseconds=1))}ms"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return value
