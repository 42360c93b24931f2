"""The reference page of the pipeline file, generated from the classes that read the file.

`python -m nsparq.pipeline.file.reference --markdown` prints the checked-in copy under
docs/reference.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field
from typing import Any, Final

from nsparq.pipeline.file.keys import keys
from nsparq.pipeline.file.nsq_options import DEFAULT_NSQD, NSQ_KEYS, SINK_KEYS, SOURCE_KEYS
from nsparq.pipeline.file.sinks import SINKS, Noop, Topic
from nsparq.pipeline.file.spec import Decode, Output, PipelineKeys, Run, Source, Spark, Step, Watermark
from nsparq.pipeline.file.tables import TABLES
from nsparq.spark.option_fields import SparkOption

HEAD: Final = """\
# The pipeline file

Generated from the source by `make docs`; do not edit. [What pipelines are](../pipelines.md), with examples.

An unknown key is an error. Durations are `250ms`, `5s`, `1m`, or a number of milliseconds; sizes are `512k`,
`64m`, `1g`. Paths are relative to the file. `${NAME}` in a value (not in SQL) is replaced by the environment
variable; `${NAME:-text}` has a default."""

SOURCE_HEAD: Final = """\
A string is the `topic`, which may also be an array of topics. The keys are
[options of `format("nsq")`](spark-options.md). The default `channel` is the pipeline's name."""

SOURCES_HEAD: Final = """\
Instead of `source`, `decode`, `dead_letters` and `watermark` of the pipeline. In SQL the decoded messages are
the table `SOURCE`. A string is the `topic`. The default `channel` is `NAME.SOURCE`. The keys are those of
`source`, and:"""
TABLES_HEAD: Final = """\
A table to join with. In SQL its name is `TABLE`. The kinds are:"""
SINKS_HEAD: Final = """\
One sink is a table `[pipeline.NAME.sink]`. Several sinks are tables `[[pipeline.NAME.sink]]`. All kinds of
sinks have these keys:"""


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
        "## `[pipeline.NAME]`\n\nA file has one or more of these. All run in one Spark session.",
        _table(_rows(PipelineKeys)),
        "## `source`\n\n" + SOURCE_HEAD,
        _table(_option_rows(SOURCE_KEYS)),
        "## `[pipeline.NAME.sources.SOURCE]`\n\n" + SOURCES_HEAD,
        _table(_rows(Source)),
        "## `decode`\n\nA string is the `format`.",
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
        f"## `[nsq]`\n\nAddresses and credentials. The default `nsqd` is `{DEFAULT_NSQD}`.",
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
