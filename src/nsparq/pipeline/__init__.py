"""Pipelines: topics are read, decoded, transformed with SQL and written elsewhere, by Spark.

A TOML file or a Python program describes them. `file/` reads the description, `execute/` runs it,
`decode/` and `write/` have the two ends of a query. `functions` has Avro and Protobuf as columns,
for your own programs.

From `nsparq pipeline run file.toml` to the first micro-batch:

1. `tools/pipeline.py` loads the file (`file/reading.py`), and builds a Spark session.
2. `execute/runner.py` locks the checkpoint directory and makes a `RunningPipeline` for each
   pipeline, which starts its queries in a thread (`execute/running_pipeline.py`).
3. `execute/queries.py` infers missing schemas (`schemas.py`) and determines where new queries begin
   (`beginnings.py`). Both are kept in `pipeline.json` for the next start.
4. It builds the DataFrames: messages, decoded rows (`decode/messages.py`), steps
   (`execute/steps.py`), columns for the sink. It starts a streaming query for each output, and one
   for the dead letters of each source.

One micro-batch of a query:

1. The source (`nsparq.spark.source`) asks every nsqd how far its log reaches. Spark logs the new
   offsets in the checkpoint; from then on the batch has a fixed content.
2. Tasks read their ranges of the log, decode the messages, and run the SQL.
3. The sink writes the rows (`write/sinks.py`) and commits them together with the number of the
   batch. If the batch runs again after a crash, the sink finds that number and does not write
   twice.
4. Spark logs the batch as done, and the source moves the query's channel forward.
5. `RunningPipeline.look` counts the progress report (`execute/progress.py`); the runner publishes
   the status.

A pipeline that only stores messages as Parquet files takes a shorter way:
`write/direct_parquet.py`.

Only modules that need Spark import it, so that a file can be checked without it. The names below
are imported when they are used, because Spark's tasks import this package too.
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
