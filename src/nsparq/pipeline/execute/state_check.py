"""Whether a query can continue with the state in its checkpoint. Spark decides; nothing is started.

Spark decides when it plans the first micro-batch after a start: the stateful operators must be the
same as before, and their keys and values must have the same types. `judge()` lets Spark plan that
micro-batch over a copy of the few files it needs. The checkpoint is not changed, and may be in use
meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no stubs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from nsparq.pipeline.errors import in_words, is_refused_state

KINDS: Final = {
    "stateStoreSave": "an aggregation",
    "StatefulStreamlineAggregate": "an aggregation",
    "sessionWindowStateStoreSaveExec": "an aggregation by session",
    "dedupe": "dropDuplicates",
    "dedupeWithinWatermark": "dropDuplicatesWithinWatermark",
    "symmetricHashJoin": "a join of streams",
    "globalLimit": "LIMIT",
}
"""Spark's names of operators with state, and the user's."""
_AGGREGATIONS: Final = {"stateStoreSave", "StatefulStreamlineAggregate", "sessionWindowStateStoreSaveExec"}
_NO_METADATA: Final = '{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{}}'
"""Of a query that has not begun."""
_FIRST_DEFAULT: Final = 12
"""IncrementalExecution's first parameter with a default. Spark's version decides how many
follow."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Both texts are empty if the state fits, or if there is none yet."""

    refused: str = ""
    """Why Spark would refuse to start the query."""
    note: str = ""
    """What the user should know if Spark would start the query, or if that is unknown."""


class _Schemas(NamedTuple):
    keys: StructType
    values: StructType


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operator of a query that keeps state."""

    name: str
    stores: dict[str, _Schemas]
    """By name. A join has several stores. Empty if Spark keeps the schemas in another form."""

    @property
    def kind(self) -> str:
        return KINDS.get(self.name, self.name)

    @property
    def state(self) -> str:
        return f"the state of {self.kind}"


def judge(
    rows: DataFrame, output_mode: str, checkpoint: Path, steps: Mapping[str, DataFrame] | None = None
) -> Verdict:
    """Whether a query of these rows can continue from the checkpoint, a local directory. `steps`
    are the results of its steps by the names to show, to say which one has changed."""
    try:
        with tempfile.TemporaryDirectory(prefix="nsparq-check-") as directory:
            return _judge(rows, output_mode, checkpoint, steps or {}, Path(directory))
    except FileNotFoundError:
        return Verdict(note="it changed while it was being read; check again")
    except PySparkException as error:
        return Verdict(note=f"Spark cannot plan the query here: {in_words(error)}")
    except (Py4JError, AttributeError, TypeError) as error:
        # These are internal classes of Spark, which may differ in another version.
        return Verdict(
            note=f"this check does not work with Spark {rows.sparkSession.version}: {in_words(error)}"
        )


def has_state(rows: DataFrame, output_mode: str) -> bool:
    """Whether a query of these rows has operators with state."""
    with tempfile.TemporaryDirectory(prefix="nsparq-check-") as directory:
        planner = _Planner(rows.sparkSession, output_mode, _NO_METADATA)
        return bool(planner.operators(rows, Path(directory)))


def _judge(
    rows: DataFrame, output_mode: str, checkpoint: Path, steps: Mapping[str, DataFrame], directory: Path
) -> Verdict:
    planned, committed = _last(checkpoint / "offsets"), _last(checkpoint / "commits")
    if planned is None:
        return Verdict()
    lines = (checkpoint / "offsets" / str(planned)).read_text().splitlines()
    if lines[0] != "v1":
        return Verdict(note=f"its log of offsets has the unknown format {lines[0]!r}")
    if verdict := _judge_sources(rows, len(lines) - 2):
        return verdict
    before = directory / "before"
    _copy_description(checkpoint, before)
    planner = _Planner(rows.sparkSession, output_mode, lines[1])
    was, now = _read_operators(rows.sparkSession, before), planner.operators(rows, directory / "now")
    try:
        planner.plan(rows, before, planned + 1 if planned == committed else planned)
    except PySparkException as error:
        if not is_refused_state(error):
            raise
        number, text = _difference(was, now)
        step = _step_of(number, steps, planner, directory) if text else ""
        return Verdict(refused=f"{step}{text or _without_advice(error)}")
    return Verdict(note=_other_meaning(was, now))


def _step_of(number: int, steps: Mapping[str, DataFrame], planner: _Planner, directory: Path) -> str:
    """The step that the operator belongs to. Empty if unknown."""
    for at, (name, result) in enumerate(steps.items()):
        if number >= 0 and len(planner.operators(result, directory / f"step-{at}")) > number:
            return f"{name}: "
    return ""


def _judge_sources(rows: DataFrame, before: int) -> Verdict | None:
    """Spark identifies sources by their order, and requires the same number as before."""
    leaves = rows._jdf.queryExecution().analyzed().collectLeaves()
    now = sum(leaves.apply(at).isStreaming() for at in range(leaves.size()))
    if now == before:
        return None
    return Verdict(
        refused=f"the query had {_sources(before)}, and has {_sources(now)} now; a source that a join or a "
        "union reads twice counts twice"
    )


def _sources(number: int) -> str:
    return "1 source" if number == 1 else f"{number} sources"


class _Planner:
    """Lets Spark plan a micro-batch of a streaming query, as after a start."""

    def __init__(self, spark: SparkSession, output_mode: str, metadata: str) -> None:
        jvm: Any = spark._jvm
        self._streaming = jvm.org.apache.spark.sql.execution.streaming
        self._mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, output_mode.capitalize())()
        self._some, self._id = jvm.scala.Some, jvm.java.util.UUID.randomUUID()
        # Like a streaming query: a separate session, with the settings from the checkpoint.
        self._session = spark._jsparkSession.cloneSession()
        settings = self._session.sessionState().conf()
        kept = {"spark.sql.adaptive.enabled": "false", "spark.sql.cbo.enabled": "false"}
        for name, value in (json.loads(metadata).get("conf", {}) | kept).items():
            settings.setConfString(name, value)
        log = _object(self._streaming.checkpointing, "OffsetSeqMetadata")
        self._metadata = log.apply(metadata)
        log.setSessionConf(self._metadata, settings)

    def operators(self, rows: DataFrame, directory: Path) -> dict[int, _Operator]:
        """The operators that a new query would have."""
        self.plan(rows, directory, 0)
        return _read_operators(rows.sparkSession, directory)

    def plan(self, rows: DataFrame, checkpoint: Path, batch: int) -> None:
        """Writes the description of new state. Raises PySparkException if Spark refuses."""
        # Spark logs the offsets of a batch before it plans the batch, and looks for that entry.
        (checkpoint / "offsets").mkdir(parents=True)
        (checkpoint / "offsets" / str(batch)).touch()
        runtime = self._streaming.runtime
        execution = runtime.IncrementalExecution(
            self._session,
            rows._jdf.queryExecution().analyzed(),
            self._mode,
            _url(checkpoint / "state"),
            self._id,
            self._id,
            batch,
            self._some(self._metadata),
            self._metadata,
            _object(runtime, "WatermarkPropagator").noop(),
            True,
            *_defaults(runtime.IncrementalExecution),
        )
        execution.executedPlan()


def _url(path: Path) -> str:
    """A Hadoop URL, without escapes. A bare path could be in another file system."""
    return f"file://{path}"


def _object(package: Any, name: str) -> Any:
    """A Scala object."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def _defaults(kind: Any) -> Iterator[Any]:
    """The default values of the parameters that have one."""
    number = _FIRST_DEFAULT
    while True:
        try:
            yield getattr(kind, f"$lessinit$greater$default${number}")()
        except Py4JError:
            return
        number += 1


# the description of the state in a checkpoint


def _last(log: Path) -> int | None:
    """The number of the newest entry."""
    names = os.listdir(log) if log.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=None)


def _copy_description(checkpoint: Path, to: Path) -> None:
    """Copies the files that describe the state, and not the state, which may be large."""
    source, target = checkpoint / "state", to / "state"
    target.mkdir(parents=True)
    for operator in source.iterdir() if source.is_dir() else ():
        (target / operator.name).mkdir()
        for directory, names, files in os.walk(operator):
            at = Path(directory)
            if at == operator:
                # All partitions have the schema of the first.
                names[:] = [name for name in names if name == "0" or not name.isdigit()]
            if {"_metadata", "_stateSchema"} & set(at.relative_to(operator).parts):
                copied = target / at.relative_to(source)
                copied.mkdir(parents=True, exist_ok=True)
                for name in files:
                    shutil.copyfile(at / name, copied / name)


def _read_operators(spark: SparkSession, checkpoint: Path) -> dict[int, _Operator]:
    """Operators by their numbers, which count from the end of the query."""
    found = {}
    for directory in (checkpoint / "state").glob("[0-9]*"):
        if (path := _description(directory / "_metadata")) is None:
            continue
        described = json.loads(path.read_text().splitlines()[1])["operatorInfo"]
        stores = {
            path.parent.parent.name: schemas
            for path in sorted((directory / "0").glob("**/_metadata/schema"))
            if (schemas := _read_schemas(spark, path)) is not None
        }
        found[int(described["operatorId"])] = _Operator(described["operatorName"], stores)
    return dict(sorted(found.items()))


def _description(directory: Path) -> Path | None:
    """The file with the operator's name, in either version of it."""
    newest = _last(directory / "v2")
    path = directory / "metadata" if newest is None else directory / "v2" / str(newest)
    return path if path.is_file() else None


def _read_schemas(spark: SparkSession, path: Path) -> _Schemas | None:
    jvm: Any = spark._jvm
    where = jvm.org.apache.hadoop.fs.Path(_url(path))
    opened = where.getFileSystem(spark._jsc.hadoopConfiguration()).open(where)
    state = jvm.org.apache.spark.sql.execution.streaming.state
    schemas = _object(state, "StateSchemaCompatibilityChecker").readSchemaFile(opened)
    if schemas.size() != 1:
        return None
    one = schemas.head()
    keys, values = json.loads(one.keySchema().json()), json.loads(one.valueSchema().json())
    return _Schemas(StructType.fromJson(keys), StructType.fromJson(values))


# the difference, in words


def _without_advice(error: PySparkException) -> str:
    """Without Spark's advice to turn the check off."""
    return in_words(error).partition(" If you want to force")[0]


def _difference(was: dict[int, _Operator], now: dict[int, _Operator]) -> tuple[int, str]:
    """The operator that differs, counted from the beginning of the query, and how. -1 if it is no
    single operator, and no text if the difference is unknown."""
    if not was:
        return -1, f"the checkpoint has no state, and {_listed(now)} needs it"
    if [one.name for one in was.values()] != [one.name for one in now.values()]:
        return -1, f"its state belongs to {_listed(was)}, and the query has {_listed(now)} now"
    for number, (old, new) in enumerate(reversed([*zip(was.values(), now.values(), strict=True)])):
        for before, after in _pairs(old, new):
            if _types(before.keys) != _types(after.keys):
                by = "grouped by" if old.name in _AGGREGATIONS else "kept by"
                keys, new_keys = _columns(before.keys), _columns(after.keys)
                return number, f"{old.state} is {by} {keys}, and would now be by {new_keys}"
            if _types(before.values) != _types(after.values):
                values, new_values = _columns(before.values), _columns(after.values)
                return number, f"{old.state} has {values}, and would now have {new_values}"
    return -1, ""


def _other_meaning(was: dict[int, _Operator], now: dict[int, _Operator]) -> str:
    """A note if names differ: Spark compares types only, and a new name may mean new content."""
    for number, old in was.items():
        for pair in _pairs(old, now.get(number, old)):
            for before, after in zip(*pair, strict=True):
                if before.names != after.names:
                    return (
                        f"{old.state} continues: {_columns(before)} is taken for {_columns(after)}, because "
                        "the types are the same. If more than a name has changed, results will be wrong"
                    )
    return ""


def _pairs(old: _Operator, new: _Operator) -> list[tuple[_Schemas, _Schemas]]:
    return [(schemas, new.stores[name]) for name, schemas in old.stores.items() if name in new.stores]


def _types(schema: StructType) -> list[str]:
    return [field.dataType.simpleString() for field in schema.fields]


def _columns(schema: StructType) -> str:
    if not schema.fields:
        return "nothing"
    return ", ".join(map(_column, schema.fields))


def _column(field: StructField) -> str:
    shown = "" if isinstance(field.dataType, StructType) else field.dataType.simpleString().upper()
    if re.fullmatch(r"field\d+", field.name):
        # A column that a join compares; Spark gives it no name.
        return shown
    name = "an expression" if field.name == "_groupingexpression" else field.name
    return f"{name} {shown}".rstrip()


def _listed(operators: dict[int, _Operator]) -> str:
    return ", then ".join(one.kind for one in reversed(operators.values())) or "no step with state"
