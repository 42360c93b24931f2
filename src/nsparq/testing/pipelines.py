"""Pipelines in tests: messages in, rows out, with Spark and without a broker.

    result = try_pipeline("shop.toml", "large-orders", {"orders": [{"number": 1, "price": 200.0}]})
    assert result.messages == [{"number": 1, "price": 200.0}]

Needs the extra `spark`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsparq.pipeline.decode.samples import Sample
from nsparq.pipeline.file.reading import load
from nsparq.pipeline.file.spec import Pipeline, PipelineFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


__all__ = ["Given", "PipelineResult", "given", "local_session", "try_pipeline"]

Body = bytes | str | Mapping[str, Any]

FIRST: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""When the first message of a test was published, unless the test sets it."""
UTC_TIME: Final = {"spark.sql.session.timeZone": "UTC"}
# Short jobs on little data: fast compilation matters more than fast code.
QUICK_JAVA: Final = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


@dataclass(frozen=True, slots=True)
class Given:
    """A message with its time of publishing and its attempts."""

    body: Body
    timestamp: datetime | None = None
    attempts: int = 0


def given(body: Body, *, timestamp: datetime | str | None = None, attempts: int = 0) -> Given:
    """A message published at this time. A string is ISO 8601, in UTC unless it has an offset."""
    at = datetime.fromisoformat(timestamp) if isinstance(timestamp, str) else timestamp
    return Given(body, at if at is None or at.tzinfo else at.replace(tzinfo=UTC), attempts)


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a pipeline would have written."""

    outputs: dict[str, list[dict[str, Any]]]
    """The rows of each sink, by the name of the output. Times are in the session's time zone."""
    letters: list[dict[str, Any]] = field(default_factory=list)
    """The dead letters."""
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Messages that `on_error = "drop"` skipped, as dead letters."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the only output; see `messages` for those of a topic. Raises KeyError."""
        if len(self.outputs) > 1:
            raise KeyError(f"there are several outputs: {self._names}; use rows_of() or messages_of()")
        return self.rows_of(*self.outputs)

    def rows_of(self, output: str) -> list[dict[str, Any]]:
        """Raises KeyError."""
        if output not in self.outputs:
            raise KeyError(f"there is no output {output!r}; there are {self._names}")
        return self.outputs[output]

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self.outputs))

    @property
    def messages(self) -> list[Any]:
        """The messages of the only output, a topic, parsed as JSON."""
        return [json.loads(row["body"]) for row in self.rows]

    def messages_of(self, output: str) -> list[Any]:
        """Raises KeyError."""
        return [json.loads(row["body"]) for row in self.rows_of(output)]


def try_pipeline(
    file: PipelineFile | Path | str,
    name: str = "",
    messages: Mapping[str, Sequence[Body | Given]] | Sequence[Body | Given] = (),
    *,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    spark: SparkSession | None = None,
) -> PipelineResult:
    """The rows that a pipeline of a file would write for these messages. Nothing is written.

    `messages` are lists by topic, or one list if the pipeline reads one topic only. A message is
    bytes, a string, a dict, which becomes a JSON object, or the result of `given()`. `name` may be
    empty if the file has one pipeline. `tables` are rows, as dicts, that replace tables to join
    with. The default session is `local_session()`.

    Raises PipelineError where the pipeline would fail, for example at a message that does not
    decode without `dead_letters` and `on_error = "drop"`. Raises SpecError for a wrong file.
    """
    from nsparq.pipeline.errors import PipelineError
    from nsparq.pipeline.execute import runner
    from nsparq.pipeline.execute.trial import DEAD_LETTER, FAIL, QUICK, try_out

    if not isinstance(file, PipelineFile):
        file = load(file)
    pipeline = _chosen(file, name)
    samples = _samples(pipeline, messages)
    session = spark or local_session()
    # An existing checkpoint with an inferred schema must not change the result of a test.
    with (
        tempfile.TemporaryDirectory(prefix="nsparq-try-") as empty,
        _configured(session, {**UTC_TIME, **file.spark.conf, **QUICK}),
    ):
        pipeline = replace(pipeline, checkpoint=empty)
        runner.prepare(session, file)
        trial = try_out(session, file, pipeline, samples, _frames(session, pipeline, tables or {}))
    for one in trial.undecoded:
        if one.fate == FAIL:
            raise PipelineError(
                f"[pipeline.{pipeline.name}]: message {one.letter['offset']} of topic {one.letter['topic']} "
                f"does not decode, which fails the pipeline: {one.letter['error']}"
            )
    return PipelineResult(
        {name: table.to_pylist(maps_as_pydicts="strict") for name, table in trial.rows.items()},
        [dict(one.letter) for one in trial.undecoded if one.fate == DEAD_LETTER],
        [dict(one.letter) for one in trial.undecoded if one.fate != DEAD_LETTER],
    )


def local_session() -> SparkSession:
    """The Spark session of this process, or a new one for short tests: one core, no web pages."""
    from nsparq.pipeline.execute.trial import QUICK
    from nsparq.spark.session.build import build_session

    conf = {**UTC_TIME, **QUICK, **QUICK_JAVA}
    return build_session("nsparq tests", master="local[1]", ui_port=None, conf=conf)


def _chosen(file: PipelineFile, name: str) -> Pipeline:
    known = {one.name: one for one in file.pipelines}
    if not name and len(known) == 1:
        return file.pipelines[0]
    if name not in known:
        raise KeyError(f"{file.path} has no pipeline {name!r}; there are {', '.join(known)}")
    return known[name]


def _samples(pipeline: Pipeline, messages: Mapping[str, Sequence[Any]] | Sequence[Any]) -> list[Sample]:
    if not isinstance(messages, Mapping):
        topics = {topic for source in pipeline.sources for topic in source.listed_topics}
        if len(topics) != 1:
            raise ValueError(f"give the messages by topic: {pipeline.name} reads {pipeline.topics}")
        messages = {topics.pop(): messages}
    for topic in messages:
        if not pipeline.reads(topic):
            raise ValueError(f"{pipeline.name} does not read the topic {topic!r}: it reads {pipeline.topics}")
    numbered = enumerate((topic, one) for topic, own in messages.items() for one in own)
    return [
        Sample(
            topic=topic,
            body=_body(one.body),
            timestamp=one.timestamp or FIRST + timedelta(milliseconds=number),
            offset=number,
            attempts=one.attempts,
            id=f"{number:016x}",
        )
        for number, (topic, value) in numbered
        for one in [value if isinstance(value, Given) else Given(value)]
    ]


def _body(value: Body) -> bytes:
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def _frames(
    spark: SparkSession, pipeline: Pipeline, tables: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, DataFrame]:
    """Tables with the columns of the file, or else those of the rows."""
    schemas = {one.name: getattr(one, "schema", "") for one in pipeline.tables}
    for name in tables:
        if name not in schemas:
            raise ValueError(f"{pipeline.name} has no table {name!r}; it has {', '.join(schemas) or 'none'}")
    return {
        name: spark.createDataFrame([dict(row) for row in rows], schemas[name] or None)
        for name, rows in tables.items()
    }


@contextmanager
def _configured(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Changes settings of a session, as far as a running session allows it."""
    before = {name: spark.conf.get(name, None) for name in settings if spark.conf.isModifiable(name)}
    try:
        for name in before:
            spark.conf.set(name, settings[name])
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)
