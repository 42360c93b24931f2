"""Which pipelines write messages to files just as they are, and how the messages lie in them. Needs no Spark.

Such a pipeline has nothing for Spark to compute: the tasks that read a range of a log may write the files
themselves; see `direct`. All messages of a range are of one topic and one node, so these need not be looked
at row by row to find the directory that a row belongs to, and date and hour only where they change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nsparq.pipeline.file.spec import Parquet, Pipeline

if TYPE_CHECKING:
    import pyarrow as pa

    from nsparq.pipeline.write.parts import Values

__all__ = ["NAMES", "ORIGIN", "Layout", "layout_of"]

ORIGIN: Final = ("topic", "node", "offset", "timestamp", "attempts", "id")
"""Columns of the source that stay, with _ in front: messages have fields of these names too often."""
NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "message": {name: name for name in ("body", "topic", "node", "offset", "timestamp", "id")},
    "raw": {"body": "body", **{f"_{name}": name for name in ORIGIN}},
}
"""For each way of decoding that changes nothing: what the columns are called, and which of the source's they
are."""
_SAME_IN_A_RANGE: Final = ("topic", "node")
_LASTING_US: Final = {"date": 86_400_000_000, "hour": 3_600_000_000}


@dataclass(frozen=True, slots=True)
class Layout:
    """How messages lie in files. It travels to the tasks as text."""

    path: str
    compression: str
    partition_by: tuple[str, ...]
    columns: Mapping[str, str]
    """Of the files: their names, and which of the source's they are."""
    fixed: Mapping[str, str]
    """The same of those columns that are directories."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Layout:
        found: dict[str, Any] = json.loads(text)
        return cls(**{**found, "partition_by": tuple(found["partition_by"])})

    @property
    def encodings(self) -> dict[str, Any]:
        """What ParquetWriter is to do with the columns. A dictionary serves those that hardly ever change;
        numbers that count up are kept as differences; who would look for a body by its first and last?"""
        of = {source: name for name, source in self.columns.items()}
        packed = {of[name]: "DELTA_BINARY_PACKED" for name in ("offset", "timestamp") if name in of}
        return {
            "use_dictionary": [of[name] for name in ("topic", "node", "attempts") if name in of],
            "column_encoding": packed,
            "write_statistics": [name for name in self.columns if self.columns[name] != "body"],
        }

    def pieces(self, batch: pa.RecordBatch, topic: str, node: str) -> Iterator[tuple[Values, pa.RecordBatch]]:
        """Messages of one range, with the source's columns, apart by the directory that they belong to."""
        if not batch.num_rows:
            return
        renamed = batch.select([*self.columns.values()]).rename_columns([*self.columns])
        times = batch.column("timestamp").view("int64").to_numpy()
        lasting = min((_LASTING_US[name] for name in self.partition_by if name in _LASTING_US), default=0)
        if not lasting or times.min() // lasting == times.max() // lasting:
            yield self._values(topic, node, int(times[0])), renamed
            return
        changes = np.flatnonzero(np.diff(times // lasting)) + 1
        borders = [0, *changes.tolist(), batch.num_rows]
        for low, high in zip(borders, borders[1:], strict=False):
            yield self._values(topic, node, int(times[low])), renamed.slice(low, high - low)

    def _values(self, topic: str, node: str, time_us: int) -> Values:
        moment = datetime.fromtimestamp(time_us // 1_000_000, UTC)
        known = {"topic": topic, "node": node}
        made = {"date": moment.date().isoformat(), "hour": str(moment.hour)}
        return tuple(
            (name, known[self.fixed[name]] if name in self.fixed else made[name])
            for name in self.partition_by
        )


def layout_of(pipeline: Pipeline) -> Layout | None:
    """None if the rows have to pass through Spark."""
    if len(pipeline.sources) > 1 or len(pipeline.outputs) > 1 or pipeline.steps:
        return None
    source, sink = pipeline.sources[0], pipeline.outputs[0].sink
    names = NAMES.get(source.decode.format)
    if not isinstance(sink, Parquet) or sink.writer != "nsparq" or names is None:
        return None
    if source.watermark is not None or source.is_queue:
        return None
    fixed = {name: names[name] for name in sink.partition_by if names.get(name) in _SAME_IN_A_RANGE}
    made = {name for name in sink.partition_by if name in _LASTING_US and name not in names}
    if made and names.get(sink.date_from) != "timestamp":
        return None
    if len(fixed) + len(made) < len(sink.partition_by):
        return None
    columns = {name: source for name, source in names.items() if name not in fixed}
    return Layout(sink.path, sink.compression, sink.partition_by, columns, fixed)
