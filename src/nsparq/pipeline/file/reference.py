"""The reference page of the pipeline file, made of the classes that read it.

`python -m nsparq.pipeline.file.reference --markdown` prints the checked-in copy under docs/reference.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field
from typing import Any, Final

from nsparq.pipeline.file.reading import DEFAULT_NSQD, NSQ_KEYS, SINK_KEYS, SOURCE_KEYS
from nsparq.pipeline.file.spec import (
    SINKS,
    TABLES,
    Decode,
    Noop,
    Output,
    PipelineKeys,
    Run,
    Source,
    Spark,
    Step,
    Topic,
    Watermark,
)
from nsparq.pipeline.file.tables import keys
from nsparq.spark.option_fields import SparkOption

__all__ = ["markdown"]

HEAD: Final = """\
# The pipeline file

Generated from the source by `make docs`; do not edit. [What pipelines are](../pipelines.md), with examples.

A key that does not exist is an error. Durations are `250ms`, `5s`, `1m`, or a number of milliseconds; sizes
`512k`, `64m`, `1g`. Paths are relative to the file. `${NAME}` in a value (not in SQL) is an environment
variable, `${NAME:-text}` has a default."""

SOURCE_HEAD: Final = """\
A text is the `topic`, which may also be an array of topics. The keys are
[options of `format("nsq")`](spark-options.md). The `channel` is the pipeline's name unless it is given."""

SOURCES_HEAD: Final = """\
Instead of `source`, `decode`, `dead_letters` and `watermark` of the pipeline. SQL calls the decoded messages
`SOURCE`. A text is the `topic`. The `channel` is `NAME.SOURCE` unless it is given. The keys are those of
`source`, and:"""
TABLES_HEAD: Final = """\
A table to join with, which SQL calls `TABLE`. One of these kinds:"""
SINKS_HEAD: Final = """\
One sink is a table `[pipeline.NAME.sink]`; of several, each is a table `[[pipeline.NAME.sink]]`. These keys
are for all kinds of sinks:"""


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| key | default | |", "| --- | --- | --- |"]
    lines += [f"| `{key}` | {default} | {help.replace('|', chr(92) + '|')} |" for key, default, help in rows]
    return "\n".join(lines)


def _rows(table: type) -> list[tuple[str, str, str]]:
    return [(key, _default(one), one.metadata["help"]) for key, one in keys(table).items()]


def _default(declared: Field[Any]) -> str:
    shown: str = declared.metadata["shown"]
    if shown:
        return shown
    if declared.default is MISSING:
        return "" if declared.default_factory is not MISSING else "*required*"
    return "" if declared.default in ("", None, ()) else f"`{declared.default}`"


def _option_rows(known: Mapping[str, SparkOption]) -> list[tuple[str, str, str]]:
    return [(key, option.default_shown, option.help) for key, option in known.items()]


def markdown() -> str:
    parts = [
        HEAD,
        "## `[pipeline.NAME]`\n\nAs many as you like; all run in one Spark session.",
        _table(_rows(PipelineKeys)),
        "## `source`\n\n" + SOURCE_HEAD,
        _table(_option_rows(SOURCE_KEYS)),
        "## `[pipeline.NAME.sources.SOURCE]`\n\n" + SOURCES_HEAD,
        _table(_rows(Source)),
        "## `decode`\n\nA text is the `format`.",
        _table(_rows(Decode)),
        "## `watermark`",
        _table(_rows(Watermark)),
        "## `[pipeline.NAME.tables.TABLE]`\n\n" + TABLES_HEAD,
        *(part for kind in TABLES.values() for part in (kind.__doc__ or "", _table(_rows(kind)))),
        "## `[[pipeline.NAME.step]]`",
        _table(_rows(Step)),
    ]
    parts += ["## `sink`\n\n" + SINKS_HEAD, _table(_rows(Output))]
    for name, kind in SINKS.items():
        parts.append(f"## `sink`: {name}\n\n{kind.__doc__}")
        rows = _rows(kind) + (_option_rows(SINK_KEYS) if kind is Topic else [])
        parts.append('`sink = "noop"`' if kind is Noop else _table(rows))
    parts += [
        f"## `[nsq]`\n\nWhere nsqd is; without `nsqd` and `nsqlookupd` it is `{DEFAULT_NSQD}`.",
        _table(_option_rows(NSQ_KEYS)),
        "## `[spark]`",
        _table(_rows(Spark)),
        "## `[run]`",
        _table(_rows(Run)),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--markdown"]:
        sys.exit("usage: python -m nsparq.pipeline.file.reference --markdown")
    sys.stdout.write(markdown())
