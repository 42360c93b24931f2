"""TOML in, checked values out: `load()` reads a pipeline file and says everything that is wrong with it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nsparq.names import is_valid_name
from nsparq.pipeline.file.spec import (
    INPUT,
    MESSAGES,
    SINKS,
    TABLES,
    Console,
    Decode,
    Delta,
    DeltaTable,
    Files,
    FileTable,
    Format,
    Jdbc,
    Noop,
    Output,
    Parquet,
    Pipeline,
    PipelineFile,
    PipelineKeys,
    Run,
    Sink,
    Source,
    Spark,
    SpecError,
    Step,
    Table,
    Topic,
    Watermark,
    is_identifier,
    is_local,
)
from nsparq.pipeline.file.tables import Problems, did_you_mean, expand, keys, read_table, shorthand
from nsparq.pipeline.write.upsert_sql import DIALECTS, dialect_name
from nsparq.spark.option_fields import SparkOption
from nsparq.spark.options import TABLE, NsqOptions, OptionError, Use

__all__ = ["DEFAULT_NSQD", "NSQ_KEYS", "SINK_KEYS", "SOURCE_KEYS", "load", "parse", "read"]

DEFAULT_NSQD: Final = "127.0.0.1:4151"

_STREAMS: Final = {Use.LOG_STREAM, Use.QUEUE_STREAM}
NSQ_KEYS: Final = {
    one.attribute: one for one in TABLE.values() if one.uses == set(Use) and one.attribute != "topic"
}
"""Options of format("nsq") that are the same for all who read and write, and belong to [nsq]; by their
keys."""
SOURCE_KEYS: Final = {
    one.attribute: one
    for one in TABLE.values()
    if one.uses & _STREAMS and one.attribute not in {*NSQ_KEYS, "columns"}
}
"""Without `columns`: a pipeline uses all of them."""
SINK_KEYS: Final = {
    one.attribute: one
    for one in TABLE.values()
    if Use.SINK_STREAM in one.uses and one.attribute not in {*NSQ_KEYS, *keys(Topic), "refuse_topics"}
}
_DECODE_KEYS: Final = {
    "schema": {"json", "csv"},
    "sample": {"json", "csv"},
    "options": {"json", "csv"},
    "json_schema": {"json"},
    "schema_file": {"avro"},
    "descriptor_file": {"protobuf"},
    "message": {"protobuf"},
    "framing": {"json", "avro", "protobuf"},
}
"""Keys of `decode` that not all formats have."""


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
    try:
        given = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(str(path), [f"is no TOML: {error}"]) from error
    return read(given, path)


def read(given: Mapping[str, Any], path: Path | str = "pipelines.toml") -> PipelineFile:
    """What the TOML of a file says, which is, or could be, at this path. Raises SpecError."""
    path, problems = Path(path), Problems()
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
        self,
        given: Mapping[str, Any],
        place: str,
        known: Mapping[str, SparkOption],
        beside: Iterable[str] = (),
    ) -> dict[str, str]:
        """By their own names, from keys in snake_case."""
        found: dict[str, str] = {}
        for one, value in given.items():
            option = known.get(one)
            if option is None:
                self._problems.unknown(place, one, [*beside, *known])
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

    # [pipeline.NAME.sources.NAME]

    def _sources(self, value: Any, pipeline: str, nsq: Mapping[str, str]) -> tuple[Source, ...]:
        place, problems = f"pipeline.{pipeline}.sources", self._problems
        if not isinstance(value, dict) or not value:
            problems.add(place, "", f"must be tables, each with a name: [{place}.orders]")
            return ()
        found = []
        for name, given in value.items():
            at = f"{place}.{name}"
            if not is_identifier(name):
                problems.add(at, "", "a source's name is one that SQL can use: letters, digits, _")
            try:
                values = dict(shorthand("topic", given))
            except ValueError as error:
                problems.add(at, "", str(error))
                continue
            own = {one: values.pop(one) for one in keys(Source) if one in values}
            options = self._source_options(values, at, _channel(pipeline, name), nsq, keys(Source))
            if "decode" in own:
                own["decode"] = self._decode(own["decode"], at)
            if "watermark" in own:
                own["watermark"] = self._watermark(own["watermark"], at)
            source = read_table(Source, own, at, problems, name=name, options=options or {})
            if source is not None and options is not None:
                found.append(source)
        return tuple(found)

    def _source(self, value: Any, pipeline: str, nsq: Mapping[str, str]) -> Source | None:
        try:
            given = dict(shorthand("topic", value))
        except ValueError as error:
            self._problems.add(f"pipeline.{pipeline}", "source", str(error))
            return None
        options = self._source_options(given, f"pipeline.{pipeline}.source", pipeline, nsq)
        return None if options is None else Source(options=options)

    def _source_options(
        self,
        given: dict[str, Any],
        place: str,
        channel: str,
        nsq: Mapping[str, str],
        beside: Iterable[str] = (),
    ) -> dict[str, str] | None:
        """Of format("nsq"). `beside` are keys of the same table that are read elsewhere."""
        problems, before = self._problems, len(self._problems.found)
        if isinstance(given.get("topic"), list):
            given["topics"] = given.pop("topic")
        found = self._options(given, place, SOURCE_KEYS, beside)
        if len(problems.found) > before:
            return None
        found.setdefault("channel", channel)
        use = Use.QUEUE_STREAM if found.get("mode") == "queue" else Use.LOG_STREAM
        try:
            # In queue mode the checkpoint will be the place to stage.
            staging = {"staging": "."} if use is Use.QUEUE_STREAM else {}
            NsqOptions.parse({"nsqd": DEFAULT_NSQD, **staging, **nsq, **found}, use)
        except OptionError as error:
            problems.add(place, "", str(error))
            return None
        return found

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
        if "sources" in values:
            values["sources"] = self._sources(values["sources"], one, nsq)
        if "decode" in values:
            values["decode"] = self._decode(values["decode"], place)
        if "watermark" in values:
            values["watermark"] = self._watermark(values["watermark"], place)
        if "tables" in values:
            values["tables"] = self._tables(values["tables"], f"{place}.tables")
        if "step" in values:
            values["step"] = self._steps(values["step"], f"{place}.step")
        if "sink" in values:
            values["sink"] = self._outputs(values["sink"], f"{place}.sink")
        if "source" not in values and "sources" not in values:
            problems.add(place, "source", "is missing")
        keys = read_table(PipelineKeys, values, place, problems)
        if keys is None or len(problems.found) > before:
            return None
        found = self._assembled(one, keys, values, place)
        if len(problems.found) == before:
            self._check(found, place)
        return found

    def _assembled(self, name: str, keys: PipelineKeys, given: Mapping[str, Any], place: str) -> Pipeline:
        """The pipeline that the keys describe."""
        add = self._problems.add
        sources, steps = keys.sources, keys.steps
        if keys.source is not None:
            if sources:
                add(place, "sources", "cannot be together with 'source'")
            own = replace(
                keys.source,
                decode=keys.decode,
                dead_letters=keys.dead_letters,
                watermark=keys.watermark,
            )
            sources = (own,)
        else:
            for one in ("decode", "dead_letters", "watermark"):
                if one in given:
                    add(place, one, f"belongs to each source: [{place}.sources.{sources[0].name}]")
        ways = [
            one
            for one, is_used in (("sql", keys.sql), ("python", keys.python), ("step", keys.steps))
            if is_used
        ]
        if len(ways) > 1:
            add(place, ways[1], f"cannot be together with {ways[0]!r}; use [[{place}.step]] for several")
        elif not steps and ways:
            steps = (Step(name="result", sql=keys.sql, python=keys.python),)
        self._check_steps(steps, sources, keys.tables, place)
        results = [*(one.name for one in sources), *(one.name for one in steps)]
        outputs = []
        for at, output in _placed(keys.outputs, place):
            if output.result and output.result not in results:
                hint = did_you_mean(output.result, results) or f"there are {', '.join(results)}"
                add(at, "from", f"there is no source or step {output.result!r}; {hint}")
            elif not output.result and not steps and len(sources) > 1:
                add(at, "from", f"is missing: rows of which source? There are {', '.join(results)}")
            outputs.append(
                replace(
                    output,
                    result=output.result or results[-1],
                    output_mode=output.output_mode or keys.output_mode,
                )
            )
        return Pipeline(
            name=name,
            sources=sources,
            tables=keys.tables,
            steps=steps,
            outputs=tuple(outputs),
            trigger=keys.trigger,
            checkpoint=keys.checkpoint,
            retries=keys.retries,
        )

    def _check(self, found: Pipeline, place: str) -> None:
        """What the keys mean together."""
        for source in found.sources:
            self._check_source(source, found, place)
        for at, output in _placed(found.outputs, place):
            self._check_output(output, found, at, place)
        self._check_names(found, place)

    def _check_source(self, source: Source, found: Pipeline, place: str) -> None:
        add, at = self._problems.add, place if source.name == MESSAGES else f"{place}.sources.{source.name}"
        if source.dead_letters:
            if source.decode.format in ("raw", "message"):
                add(
                    at,
                    "dead_letters",
                    f"nothing fails to decode with {source.decode.format!r}: set 'decode', or leave this out",
                )
            if source.is_queue:
                add(at, "dead_letters", "the source is read twice for it, which mode 'queue' cannot")
            if found.reads(source.dead_letters):
                add(at, "dead_letters", "is a topic that the pipeline reads: it would go round in circles")
        if source.is_queue and len(found.outputs) > 1:
            add(at, "mode", "'queue' can be read by one sink only: each sink is a query that reads by itself")
        if source.is_queue and source.decode.is_inferred:
            add(f"{at}.decode", "schema", "is missing: a queue cannot be looked at without taking messages")

    def _check_output(self, output: Output, found: Pipeline, at: str, place: str) -> None:
        add, sink = self._problems.add, output.sink
        if isinstance(sink, Topic):
            if not sink.topic and not sink.topic_from:
                add(at, "topic", "is missing")
            if sink.topic and found.reads(sink.topic):
                add(at, "topic", "is one that the pipeline reads: it would go round in circles")
        where = place if len(found.outputs) == 1 else at
        if isinstance(sink, Delta | Jdbc) and sink.key_columns:
            if output.output_mode == "complete":
                add(where, "output_mode", "a sink with 'key' needs the rows that have changed: use 'update'")
        elif isinstance(sink, Files) and output.output_mode != "append":
            hint = ", or give it a 'key'" if isinstance(sink, Delta) else ""
            add(where, "output_mode", f"files can only be appended to: use 'append', with a watermark{hint}")
        if isinstance(sink, Jdbc) and sink.batch_column:
            places = [(one.sink.url, one.sink.table) for one in found.outputs if isinstance(one.sink, Jdbc)]
            if places.count((sink.url, sink.table)) > 1:
                add(at, "table", "is also that of another sink: with 'batch_column' only one may write to it")

    def _check_names(self, found: Pipeline, place: str) -> None:
        """No two queries share a channel or a checkpoint, and nsqd takes the names."""
        add = self._problems.add
        names = [output.name for output in found.outputs]
        for number, (at, output) in enumerate(_placed(found.outputs, place)):
            if output.name in names[:number]:
                text = f"{output.name!r} is taken" if output.name else "is missing: another sink has none"
                add(at, "name", text)
                return
        channels = [
            (f"source {source.name!r}", channel)
            for source in found.sources
            for channel in (
                *(source.channel(name) for name in names),
                *([source.letters_channel] if source.dead_letters else []),
            )
        ]
        owners: dict[str, str] = {}
        for owner, channel in channels:
            if channel in owners:
                also = "" if owners[channel] == owner else f" and of {owners[channel]}"
                add(place, "", f"the channel {channel!r} of {owner}{also} is used twice: choose another name")
            owners[channel] = owner
            if not is_valid_name(channel.encode()):
                add(place, "", f"the channel {channel!r} of {owner} is too long: set its 'channel'")

    def _decode(self, value: Any, place: str) -> Decode | None:
        try:
            given = shorthand("format", value)
        except ValueError as error:
            self._problems.add(place, "decode", str(error))
            return None
        found = read_table(Decode, given, f"{place}.decode", self._problems)
        return found and self._checked_decode(found, given, f"{place}.decode")

    def _checked_decode(self, found: Decode, given: Mapping[str, Any], place: str) -> Decode:
        for one, formats in _DECODE_KEYS.items():
            if one in given and found.format not in formats:
                self._problems.add(place, one, f"means nothing for {found.format!r}")
            elif one not in given and formats == {found.format} and one != "json_schema":
                self._problems.add(place, one, "is missing")
        path = getattr(found, found.definition_key or "schema_file")
        if not path:
            return found
        try:
            return replace(found, definition=Path(self._resolve(path)).read_bytes())
        except OSError as error:
            text = f"cannot be read: {error.strerror}: {error.filename}"
            self._problems.add(place, found.definition_key, text)
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
                if bool(step.sql) == bool(step.python):
                    self._problems.add(at, "", "needs either 'sql' or 'python'")
                found.append(replace(step, name=step.name or f"step{number}"))
        return tuple(found)

    def _check_steps(
        self, steps: tuple[Step, ...], sources: tuple[Source, ...], tables: tuple[Table, ...], place: str
    ) -> None:
        """Names in SQL: each is there once, whether in capitals or not, and before it is used."""
        add = self._problems.add
        known: list[str] = []
        for at, name in [
            *((f"{place}.sources.{one.name}", one.name) for one in sources),
            *((f"{place}.tables.{one.name}", one.name) for one in tables),
            *((f"{place}.step {number}", one.name) for number, one in enumerate(steps, 1)),
        ]:
            if name.lower() in {INPUT, *(one.lower() for one in known)}:
                add(at, "name", f"{name!r} is taken")
            known.append(name)
        for number, step in enumerate(steps, 1):
            earlier = known[: len(sources) + len(tables) + number - 1]
            at = f"{place}.step {number}"
            for one in step.sources:
                if one not in earlier:
                    hint = did_you_mean(one, earlier) or f"there are {', '.join(sorted(earlier))}"
                    add(at, "from", f"there is no earlier step {one!r}; {hint}")
        if len(sources) > 1 and steps and steps[0].python and not steps[0].sources:
            at = place if steps[0].name == "result" else f"{place}.step 1"
            add(at, "from", f"is missing: which of {', '.join(one.name for one in sources)}?")

    # [pipeline.NAME.tables.NAME]

    def _tables(self, value: Any, place: str) -> tuple[Table, ...]:
        if not isinstance(value, dict):
            self._problems.add(place, "", f"must be tables, each with a name: [{place}.countries]")
            return ()
        found = [self._table_of(given, f"{place}.{name}", name) for name, given in value.items()]
        return tuple(one for one in found if one is not None)

    def _table_of(self, given: Any, place: str, name: str) -> Table | None:
        add = self._problems.add
        if not is_identifier(name):
            add(place, "", "a table's name is one that SQL can use: letters, digits, _")
        if not isinstance(given, dict):
            add(place, "", 'must be a table, such as { csv = "countries.csv" }')
            return None
        kinds = [one for one in TABLES if one in given]
        if len(kinds) != 1:
            both = f"has both {kinds[0]!r} and {kinds[1]!r}" if kinds else f"needs one of {', '.join(TABLES)}"
            add(place, "", both)
            return None
        found = read_table(TABLES[kinds[0]], given, place, self._problems, name=name)
        if isinstance(found, FileTable | DeltaTable):
            found = replace(found, path=self._resolve(found.path))
        return found

    # [pipeline.NAME.sink]

    def _outputs(self, value: Any, place: str) -> tuple[Output, ...]:
        """One sink, or an array of them."""
        if not isinstance(value, list):
            output = self._output(value, place)
            return () if output is None else (output,)
        if not value:
            self._problems.add(place, "", "is empty")
        found = [self._output(one, f"{place} {number}") for number, one in enumerate(value, 1)]
        return tuple(one for one in found if one is not None)

    def _output(self, value: Any, place: str) -> Output | None:
        own: dict[str, Any] = {}
        if isinstance(value, dict):
            own = {one: value[one] for one in keys(Output) if one in value}
            value = {one: given for one, given in value.items() if one not in own}
        sink = self._sink(value, place)
        # A sink that cannot be read has said why.
        output = read_table(Output, own, place, self._problems, sink=sink or Noop())
        return output if sink is not None else None

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
        if isinstance(found, Files) or (isinstance(found, Format) and found.path):
            found = replace(found, path=self._resolve(found.path))
        self._check_sink(found, place)
        return self._parquet(found, place) if isinstance(found, Parquet) else found

    def _check_sink(self, found: Sink | None, place: str) -> None:
        """What the keys of a sink mean together."""
        add = self._problems.add
        if isinstance(found, Delta | Jdbc) and found.latest_by and not found.key_columns:
            add(place, "latest_by", "means nothing without 'key'")
        if isinstance(found, Jdbc) and found.key_columns:
            if found.batch_column:
                add(place, "batch_column", "means nothing with 'key', which is exactly once without it")
            name = dialect_name(found.url)
            if name not in DIALECTS:
                known = ", ".join(DIALECTS)
                add(place, "key", f"how to upsert is not known for {name!r}; it is for {known}")
        if isinstance(found, Format):
            if found.path and found.table:
                add(place, "table", "cannot be together with 'path'")
            if found.format.lower() == "nsq":
                add(place, "format", 'a topic is written { topic = "…" }')

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


def _channel(pipeline: str, source: str) -> str:
    """A source called `messages` is what the only source is."""
    return pipeline if source == MESSAGES else f"{pipeline}.{source}"


def _placed(outputs: Sequence[Output], place: str) -> Iterator[tuple[str, Output]]:
    """The outputs, and how problems call each of them."""
    for number, output in enumerate(outputs, 1):
        yield f"{place}.sink" if len(outputs) == 1 else f"{place}.sink {number}", output


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
