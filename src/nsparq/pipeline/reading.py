"""TOML in, checked values out: `load()` reads a pipeline file and says everything that is wrong with it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nsparq.names import is_valid_name
from nsparq.pipeline.spec import (
    INPUT,
    MESSAGES,
    SINKS,
    Console,
    Decode,
    Files,
    Noop,
    Parquet,
    Pipeline,
    PipelineFile,
    Run,
    Sink,
    Source,
    Spark,
    SpecError,
    Step,
    Topic,
    Watermark,
    is_local,
)
from nsparq.pipeline.tables import Problems, did_you_mean, expand, keys, read_table, shorthand
from nsparq.spark.options import TABLE, NsqOptions, OptionError, SparkOption, Use

__all__ = ["DEFAULT_NSQD", "NSQ_KEYS", "SINK_KEYS", "SOURCE_KEYS", "load", "parse"]

DEFAULT_NSQD: Final = "127.0.0.1:4151"

_STREAMS: Final = {Use.LOG_STREAM, Use.QUEUE_STREAM}
NSQ_KEYS: Final = {
    one.attribute: one for one in TABLE.values() if one.uses == set(Use) and one.attribute != "topic"
}
"""Options of format("nsq") that are the same for all who read and write, and belong to [nsq]; by their
keys."""
SOURCE_KEYS: Final = {
    one.attribute: one for one in TABLE.values() if one.uses & _STREAMS and one.attribute not in NSQ_KEYS
}
SINK_KEYS: Final = {
    one.attribute: one
    for one in TABLE.values()
    if Use.SINK_STREAM in one.uses and one.attribute not in {*NSQ_KEYS, *keys(Topic), "refuse_topics"}
}


def load(path: Path | str) -> PipelineFile:
    """Raises SpecError."""
    path = Path(path)
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise SpecError(str(path), [error.strerror or str(error)]) from error
    except UnicodeDecodeError as error:
        raise SpecError(str(path), [f"is no UTF-8 text: {error}"]) from error
    return parse(content, path)


def parse(content: str, path: Path | str = "pipelines.toml") -> PipelineFile:
    """The text of a file that is, or could be, at this path. Raises SpecError."""
    path = Path(path)
    try:
        given = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(str(path), [f"is no TOML: {error}"]) from error
    problems = Problems()
    found = _Reader(path.absolute(), problems).read(given)
    if found is None or problems.found:
        raise SpecError(str(path), problems.found)
    return found


class _Reader:
    """Reads one file; what is wrong goes to `problems`."""

    TABLES: Final = ("nsq", "spark", "run", "pipeline")

    def __init__(self, path: Path, problems: Problems) -> None:
        self._path, self._problems = path, problems

    def read(self, given: Mapping[str, Any]) -> PipelineFile | None:
        for one in given:
            if one not in self.TABLES:
                hint = did_you_mean(one, self.TABLES) or f"there are {', '.join(self.TABLES)}"
                self._problems.add("", f"[{one}]", f"there is no such table; {hint}")
        nsq = self._nsq(self._table(given, "nsq"))
        spark = read_table(Spark, self._table(given, "spark"), "spark", self._problems)
        run = read_table(Run, self._table(given, "run"), "run", self._problems)
        declared = self._table(given, "pipeline")
        if not declared:
            self._problems.add("", "", "there is no pipeline: add a table [pipeline.NAME]")
        pipelines = [self._pipeline(one, table, nsq) for one, table in declared.items()]
        if spark is None or run is None or self._problems.found:
            return None
        directory = self._resolve(run.checkpoint or f"checkpoints/{self._path.stem}")
        found = []
        for pipeline in pipelines:
            assert pipeline is not None
            own = self._resolve(pipeline.checkpoint or f"{directory}/{pipeline.name}")
            found.append(replace(pipeline, checkpoint=own))
        self._check_checkpoints(found)
        return PipelineFile(
            path=self._path,
            nsq=nsq,
            spark=replace(spark, app_name=spark.app_name or self._path.stem),
            run=replace(run, checkpoint=directory),
            pipelines=tuple(found),
        )

    def _table(self, given: Mapping[str, Any], one: str) -> Mapping[str, Any]:
        value = given.get(one, {})
        if not isinstance(value, dict):
            self._problems.add("", one, "must be a table")
            return {}
        return value

    def _resolve(self, path: str) -> str:
        """Relative to the file; URLs and absolute paths stay."""
        return path if not is_local(path) else os.path.normpath(self._path.parent / path)

    def _check_checkpoints(self, found: list[Pipeline]) -> None:
        owners: dict[str, str] = {}
        for one in found:
            owner = owners.setdefault(one.checkpoint, one.name)
            if owner != one.name:
                text = f"is that of [pipeline.{owner}]: each needs its own"
                self._problems.add(f"pipeline.{one.name}", "checkpoint", text)

    # options of format("nsq")

    def _nsq(self, given: Mapping[str, Any]) -> dict[str, str]:
        found = self._options(given, "nsq", NSQ_KEYS)
        if not {"nsqd", "nsqlookupd"} & given.keys():
            found["nsqd"] = DEFAULT_NSQD
        return found

    def _options(
        self, given: Mapping[str, Any], place: str, known: Mapping[str, SparkOption]
    ) -> dict[str, str]:
        """By their own names, from keys in snake_case."""
        found: dict[str, str] = {}
        for one, value in given.items():
            option = known.get(one)
            if option is None:
                self._problems.unknown(place, one, known)
                continue
            try:
                text = _option_text(value)
                if option.kind.name == "file":
                    text = self._resolve(text)
                option.kind.parse(text)
                found[option.name] = text
            except ValueError as error:
                shown = "" if option.is_secret else f", not {value!r}"
                self._problems.add(place, one, f"{error}{shown}")
        return found

    def _source(self, value: Any, pipeline: str, nsq: Mapping[str, str]) -> Source | None:
        place, problems = f"pipeline.{pipeline}.source", self._problems
        try:
            given = dict(shorthand("topic", value))
        except ValueError as error:
            problems.add(f"pipeline.{pipeline}", "source", str(error))
            return None
        if isinstance(given.get("topic"), list):
            given["topics"] = given.pop("topic")
        before = len(problems.found)
        found = self._options(given, place, SOURCE_KEYS)
        if len(problems.found) > before:
            return None
        found.setdefault("channel", pipeline)
        use = Use.QUEUE_STREAM if found.get("mode") == "queue" else Use.LOG_STREAM
        try:
            # In queue mode the checkpoint will be the place to stage.
            staging = {"staging": "."} if use is Use.QUEUE_STREAM else {}
            NsqOptions.parse({"nsqd": DEFAULT_NSQD, **staging, **nsq, **found}, use)
        except OptionError as error:
            problems.add(place, "", str(error))
            return None
        return Source(options=found)

    # [pipeline.NAME]

    def _pipeline(self, one: str, given: Any, nsq: Mapping[str, str]) -> Pipeline | None:
        place, problems = f"pipeline.{one}", self._problems
        if not isinstance(given, dict):
            problems.add(place, "", "must be a table")
            return None
        before = len(problems.found)
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,47}", one):
            problems.add(place, "", "a pipeline's name has at most 48 letters, digits, _ - and . only")
        values = dict(given)
        if "source" in values:
            values["source"] = self._source(values["source"], one, nsq)
        if "decode" in values:
            values["decode"] = self._decode(values["decode"], place)
        if "watermark" in values:
            values["watermark"] = self._watermark(values["watermark"], place)
        if "sink" in values:
            values["sink"] = self._sink(values["sink"], f"{place}.sink")
        if "step" in values:
            values["step"] = self._steps(values["step"], f"{place}.step")
        found = read_table(Pipeline, values, place, problems, name=one)
        if found is None or len(problems.found) > before:
            return None
        self._check(found, place)
        if not found.sql and not found.python:
            return found
        return replace(found, steps=(Step(name="result", sql=found.sql, python=found.python),))

    def _check(self, found: Pipeline, place: str) -> None:
        """What the keys mean together."""
        add = self._problems.add
        is_queue = found.source.options.get("mode") == "queue"
        ways = [one for one, is_used in _ways(found) if is_used]
        if len(ways) > 1:
            add(place, ways[1], f"cannot be together with {ways[0]!r}; use [[{place}.step]] for several")
        if found.dead_letters:
            if found.decode.format in ("raw", "message"):
                add(
                    place,
                    "dead_letters",
                    f"nothing fails to decode with {found.decode.format!r}: set 'decode', or leave this out",
                )
            if is_queue:
                add(place, "dead_letters", "the source is read twice for it, which mode 'queue' cannot")
            if found.source.reads(found.dead_letters):
                add(place, "dead_letters", "is a topic that the pipeline reads: it would go round in circles")
        if is_queue and found.decode.format in ("json", "csv") and not found.decode.schema:
            add(
                f"{place}.decode", "schema", "is missing: a queue cannot be looked at without taking messages"
            )
        if isinstance(found.sink, Topic):
            if not found.sink.topic and not found.sink.topic_from:
                add(f"{place}.sink", "topic", "is missing")
            if found.sink.topic and found.source.reads(found.sink.topic):
                add(f"{place}.sink", "topic", "is one that the pipeline reads: it would go round in circles")
        if isinstance(found.sink, Files) and found.output_mode != "append":
            add(place, "output_mode", "files can only be appended to: use 'append', with a watermark")

    def _decode(self, value: Any, place: str) -> Decode | None:
        try:
            given = shorthand("format", value)
        except ValueError as error:
            self._problems.add(place, "decode", str(error))
            return None
        found = read_table(Decode, given, f"{place}.decode", self._problems)
        if found is not None and found.format in ("text", "raw", "message"):
            for one in ("schema", "sample", "options"):
                if one in given:
                    self._problems.add(f"{place}.decode", one, f"means nothing for {found.format!r}")
        return found

    def _watermark(self, value: Any, place: str) -> Watermark | None:
        if not isinstance(value, dict):
            self._problems.add(place, "watermark", 'must be a table: { column = "at", delay = "10s" }')
            return None
        return read_table(Watermark, value, f"{place}.watermark", self._problems)

    def _steps(self, value: Any, place: str) -> tuple[Step, ...]:
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self._problems.add(place, "", f"must be an array of tables: [[{place}]]")
            return ()
        found: list[Step] = []
        for number, given in enumerate(value, 1):
            at = f"{place} {number}"
            values = dict(given)
            if "watermark" in values:
                values["watermark"] = self._watermark(values["watermark"], at)
            step = read_table(Step, values, at, self._problems)
            if step is not None:
                step = replace(step, name=step.name or f"step{number}")
                self._check_step(step, {MESSAGES, *(one.name for one in found)}, at)
                found.append(step)
        return tuple(found)

    def _check_step(self, step: Step, known: set[str], place: str) -> None:
        if bool(step.sql) == bool(step.python):
            self._problems.add(place, "", "needs either 'sql' or 'python'")
        if step.name in {*known, INPUT}:
            self._problems.add(place, "name", f"{step.name!r} is taken")
        for one in step.sources:
            if one not in known:
                hint = did_you_mean(one, known) or f"there are {', '.join(sorted(known))}"
                self._problems.add(place, "from", f"there is no earlier step {one!r}; {hint}")

    # [pipeline.NAME.sink]

    def _sink(self, value: Any, place: str) -> Sink | None:
        if isinstance(value, str):
            return self._simple_sink(value, place)
        if not isinstance(value, dict):
            self._problems.add(place, "", 'must be a table, such as { topic = "results" }')
            return None
        kinds = [one for one in SINKS if one in value]
        if not kinds and "topic_from" in value:
            kinds = ["topic"]
        if len(kinds) == 1:
            return self._sink_of(SINKS[kinds[0]], dict(value), place)
        if kinds:
            text = f"has both {kinds[0]!r} and {kinds[1]!r}: rows go to one place"
        else:
            hints = [hint for one in value if (hint := did_you_mean(one, SINKS))]
            text = "; ".join([f"needs one of {', '.join(SINKS)}", *hints[:1]])
        self._problems.add(place, "", text)
        return None

    def _simple_sink(self, value: str, place: str) -> Sink | None:
        simple = {"console": Console(), "noop": Noop()}
        if value in simple:
            return simple[value]
        hint = did_you_mean(value, simple)
        if value in SINKS:
            hint = f'write {{ {value} = "…" }}'
        elif not hint and is_valid_name(value.encode()):
            hint = f'a topic is written {{ topic = "{value}" }}'
        text = f"as a text it is 'console' or 'noop', not {value!r}"
        self._problems.add(place, "", f"{text}; {hint}" if hint else text)
        return None

    def _sink_of(self, kind: type[Sink], given: dict[str, Any], place: str) -> Sink | None:
        more: dict[str, Any] = {}
        if kind is Topic:
            own = {one: given.pop(one) for one in list(given) if one in SINK_KEYS}
            more["options"] = self._options(own, place, SINK_KEYS)
        if kind is Noop or given.get("console") is True:
            given.pop("noop" if kind is Noop else "console")
        found = read_table(kind, given, place, self._problems, **more)
        if isinstance(found, Files):
            found = replace(found, path=self._resolve(found.path))
        return self._parquet(found, place) if isinstance(found, Parquet) else found

    def _parquet(self, found: Parquet, place: str) -> Parquet:
        ours = is_local(found.path)
        if not found.writer:
            found = replace(found, writer="nsparq" if ours else "spark")
        if found.writer == "nsparq" and not ours:
            self._problems.add(place, "writer", f"'nsparq' needs a directory, and {found.path!r} is none")
        if found.writer == "spark" and found.compact:
            self._problems.add(place, "compact", "needs the writer 'nsparq'")
        elif found.compact and not found.partition_by:
            text = "needs 'partition_by': files in the table's own directory cannot be replaced in one step"
            self._problems.add(place, "compact", text)
        return found


def _ways(found: Pipeline) -> tuple[tuple[str, bool], ...]:
    return ("sql", bool(found.sql)), ("python", bool(found.python)), ("step", bool(found.steps))


def _option_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        if not all(isinstance(one, str) for one in value):
            raise ValueError("must be an array of texts")
        return ",".join(map(expand, value))
    if isinstance(value, dict):
        raise ValueError("must be no table")
    # TOML has its own way to write a time.
    return str(value.isoformat()) if hasattr(value, "isoformat") else expand(str(value))
