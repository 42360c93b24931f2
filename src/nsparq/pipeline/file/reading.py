"""Reads a pipeline file: TOML in, checked values out, or a SpecError with every problem. Needs no
Spark.

`_Reader` goes through the file from the outside in. Rules for one table are with its class (`spec`,
`sinks`, `tables`); rules that concern several tables are in `checks`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from nsparq.names import is_valid_name
from nsparq.pipeline.file.checks import check_checkpoints, check_pipeline, check_steps, output_places
from nsparq.pipeline.file.keys import (
    Problems,
    did_you_mean,
    is_identifier,
    keys,
    read_table,
    shorthand,
)
from nsparq.pipeline.file.nsq_options import (
    DEFAULT_NSQD,
    NSQ_KEYS,
    SINK_KEYS,
    read_options,
    read_source_options,
    resolve,
)
from nsparq.pipeline.file.sinks import SINKS, Console, Noop, Sink, Topic
from nsparq.pipeline.file.spec import (
    MESSAGES,
    Decode,
    Output,
    Pipeline,
    PipelineFile,
    PipelineKeys,
    Run,
    Source,
    Spark,
    SpecError,
    Step,
    Watermark,
)
from nsparq.pipeline.file.tables import TABLES, Table

__all__ = ["load", "parse", "read"]

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
"""Keys of `decode` that only some formats have."""
_SQL_NAME: Final = "must be a name that SQL can use: letters, digits, _"

WithPath = TypeVar("WithPath", Sink, Table)


def load(path: Path | str) -> PipelineFile:
    """Raises SpecError."""
    path = Path(path)
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise SpecError(str(path), [error.strerror or str(error)]) from error
    except UnicodeDecodeError as error:
        raise SpecError(str(path), [f"is not UTF-8 text: {error}"]) from error
    return parse(content, path)


def parse(content: str, path: Path | str = "pipelines.toml") -> PipelineFile:
    """Reads the text of a file that is, or could be, at this path. Raises SpecError."""
    try:
        given = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(str(path), [f"is not valid TOML: {error}"]) from error
    return read(given, path)


def read(given: Mapping[str, Any], path: Path | str = "pipelines.toml") -> PipelineFile:
    """Reads parsed TOML of a file that is, or could be, at this path. Raises SpecError."""
    path, problems = Path(path), Problems()
    found = _Reader(path.absolute(), problems).read(given)
    if found is None or problems.found:
        raise SpecError(str(path), problems.found)
    return found


class _Reader:
    """Reads one file and adds what is wrong to `problems`.

    `place` is the table of the file that a value is in, such as `pipeline.orders.sink`.
    """

    TABLES: Final = ("nsq", "spark", "run", "pipeline")

    def __init__(self, path: Path, problems: Problems) -> None:
        self._path, self._directory = path, path.parent
        self._problems, self._add = problems, problems.add
        self._nsq: dict[str, str] = {}
        """[nsq], as options of format("nsq")."""

    def read(self, given: Mapping[str, Any]) -> PipelineFile | None:
        for one in given:
            if one not in self.TABLES:
                self._add("", f"[{one}]", f"unknown table; {did_you_mean(one, self.TABLES)}")
        nsq = self._table(given, "nsq")
        self._nsq = read_options(nsq, "nsq", NSQ_KEYS, self._directory, self._problems)
        if not {"nsqd", "nsqlookupd"} & nsq.keys():
            self._nsq["nsqd"] = DEFAULT_NSQD
        spark = read_table(Spark, self._table(given, "spark"), "spark", self._problems)
        run = read_table(Run, self._table(given, "run"), "run", self._problems)
        declared = self._table(given, "pipeline")
        if not declared:
            self._add("", "", "there is no pipeline: add a table [pipeline.NAME]")
        pipelines = [self._pipeline(name, table) for name, table in declared.items()]
        if spark is None or run is None or self._problems.found:
            return None
        directory = self._resolve(run.checkpoint or f"checkpoints/{self._path.stem}")
        found = [
            replace(one, checkpoint=self._resolve(one.checkpoint or f"{directory}/{one.name}"))
            for one in pipelines
            if one is not None
        ]
        check_checkpoints(found, self._problems)
        return PipelineFile(
            path=self._path,
            nsq=self._nsq,
            spark=replace(spark, app_name=spark.app_name or self._path.stem),
            run=replace(run, checkpoint=directory),
            pipelines=tuple(found),
        )

    def _table(self, given: Mapping[str, Any], one: str) -> Mapping[str, Any]:
        value = given.get(one, {})
        if not isinstance(value, dict):
            self._add("", one, "must be a table")
            return {}
        return value

    def _shorthand(self, key: str, value: Any, place: str, at: str = "") -> dict[str, Any] | None:
        """See `shorthand`. The value itself is at `place`, or at the key `at` of it."""
        try:
            return dict(shorthand(key, value))
        except ValueError as error:
            self._add(place, at, str(error))
            return None

    def _resolve(self, path: str) -> str:
        return resolve(path, self._directory)

    def _with_path(self, found: WithPath) -> WithPath:
        path = getattr(found, "path", "")
        return replace(found, path=self._resolve(path)) if path else found  # type: ignore[call-arg]  # not all

    # [pipeline.NAME]

    def _pipeline(self, name: str, given: Any) -> Pipeline | None:
        place, problems = f"pipeline.{name}", self._problems
        if not isinstance(given, dict):
            self._add(place, "", "must be a table")
            return None
        before = len(problems.found)
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,47}", name):
            self._add(place, "", "the name of a pipeline has at most 48 letters, digits, _ - and . only")
        values = self._read_inner(
            given,
            place,
            source=self._source,
            sources=self._sources,
            decode=self._decode,
            watermark=self._watermark,
            tables=self._tables,
            step=self._steps,
            sink=self._outputs,
        )
        if "source" not in values and "sources" not in values:
            self._add(place, "source", "is missing")
        keys = read_table(PipelineKeys, values, place, problems)
        if keys is None or len(problems.found) > before:
            return None
        found = self._assembled(name, keys, values, place)
        if len(problems.found) == before:
            check_pipeline(found, place, problems)
        return found

    def _read_inner(
        self, given: Mapping[str, Any], place: str, **readers: Callable[[Any, str], Any]
    ) -> dict[str, Any]:
        """The values of a table, with those that are tables themselves read by their readers."""
        values = dict(given)
        for key, read in readers.items():
            if key in values:
                values[key] = read(values[key], place)
        return values

    def _assembled(self, name: str, keys: PipelineKeys, given: Mapping[str, Any], place: str) -> Pipeline:
        """The pipeline that the keys describe."""
        sources, steps = keys.sources, keys.steps
        if keys.source is not None:
            if sources:
                self._add(place, "sources", "cannot be combined with 'source'")
            of_source = {
                "decode": keys.decode,
                "dead_letters": keys.dead_letters,
                "watermark": keys.watermark,
            }
            sources = (replace(keys.source, **of_source),)  # type: ignore[arg-type]  # each has its own type
        else:
            for one in ("decode", "dead_letters", "watermark"):
                if one in given:
                    self._add(place, one, f"belongs in each source: [{place}.sources.{sources[0].name}]")
        ways = [one for one in ("sql", "python", "step") if given.get(one)]
        if len(ways) > 1:
            text = f"cannot be combined with {ways[0]!r}; use [[{place}.step]] for several steps"
            self._add(place, ways[1], text)
        elif not steps and ways:
            steps = (Step(name="result", sql=keys.sql, python=keys.python),)
        check_steps(steps, sources, keys.tables, place, self._problems)
        results = [*(one.name for one in sources), *(one.name for one in steps)]
        outputs = []
        for at, output in output_places(keys.outputs, place):
            if output.result and output.result not in results:
                text = f"there is no source or step {output.result!r}; {did_you_mean(output.result, results)}"
                self._add(at, "from", text)
            elif not output.result and not steps and len(sources) > 1:
                self._add(at, "from", f"is missing: name one of {', '.join(results)}")
            result, mode = output.result or results[-1], output.output_mode or keys.output_mode
            outputs.append(replace(output, result=result, output_mode=mode))
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

    def _source(self, value: Any, place: str) -> Source | None:
        given = self._shorthand("topic", value, place, "source")
        if given is None:
            return None
        channel = place.removeprefix("pipeline.")
        options = self._source_options(given, f"{place}.source", channel)
        return None if options is None else Source(options=options)

    def _source_options(
        self, given: dict[str, Any], place: str, channel: str, beside: Iterable[str] = ()
    ) -> dict[str, str] | None:
        return read_source_options(given, place, channel, self._nsq, self._directory, self._problems, beside)

    def _sources(self, value: Any, place: str) -> tuple[Source, ...]:
        pipeline, place = place.removeprefix("pipeline."), f"{place}.sources"
        if not isinstance(value, dict) or not value:
            self._add(place, "", f"must be tables, each with a name: [{place}.orders]")
            return ()
        found = []
        for name, given in value.items():
            at = f"{place}.{name}"
            if not is_identifier(name):
                self._add(at, "", f"the name of a source {_SQL_NAME}")
            values = self._shorthand("topic", given, at)
            if values is None:
                continue
            own = {one: values.pop(one) for one in keys(Source) if one in values}
            # A source called `messages` has the same channel as the only source of a pipeline.
            channel = pipeline if name == MESSAGES else f"{pipeline}.{name}"
            options = self._source_options(values, at, channel, keys(Source))
            own = self._read_inner(own, at, decode=self._decode, watermark=self._watermark)
            source = read_table(Source, own, at, self._problems, name=name, options=options or {})
            if source is not None and options is not None:
                found.append(source)
        return tuple(found)

    def _decode(self, value: Any, place: str) -> Decode | None:
        given = self._shorthand("format", value, place, "decode")
        if given is None:
            return None
        place = f"{place}.decode"
        found = read_table(Decode, given, place, self._problems)
        if found is None:
            return None
        for one, formats in _DECODE_KEYS.items():
            if one in given and found.format not in formats:
                self._add(place, one, f"does not apply to format {found.format!r}")
            elif one not in given and formats == {found.format} and one != "json_schema":
                self._add(place, one, "is missing")
        path = getattr(found, found.definition_key or "schema_file")
        if not path:
            return found
        try:
            return replace(found, definition=Path(self._resolve(path)).read_bytes())
        except OSError as error:
            text = f"cannot be read: {error.strerror}: {error.filename}"
            self._add(place, found.definition_key, text)
            return found

    def _watermark(self, value: Any, place: str) -> Watermark | None:
        if not isinstance(value, dict):
            self._add(place, "watermark", 'must be a table: { column = "at", delay = "10s" }')
            return None
        return read_table(Watermark, value, f"{place}.watermark", self._problems)

    def _steps(self, value: Any, place: str) -> tuple[Step, ...]:
        place = f"{place}.step"
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self._add(place, "", f"must be an array of tables: [[{place}]]")
            return ()
        found: list[Step] = []
        for number, given in enumerate(value, 1):
            at = f"{place} {number}"
            values = self._read_inner(given, at, watermark=self._watermark)
            step = read_table(Step, values, at, self._problems)
            if step is not None:
                if bool(step.sql) == bool(step.python):
                    self._add(at, "", "needs either 'sql' or 'python'")
                found.append(replace(step, name=step.name or f"step{number}"))
        return tuple(found)

    def _tables(self, value: Any, place: str) -> tuple[Table, ...]:
        place = f"{place}.tables"
        if not isinstance(value, dict):
            self._add(place, "", f"must be tables, each with a name: [{place}.countries]")
            return ()
        found = [self._join_table(given, f"{place}.{name}", name) for name, given in value.items()]
        return tuple(one for one in found if one is not None)

    def _join_table(self, given: Any, place: str, name: str) -> Table | None:
        if not is_identifier(name):
            self._add(place, "", f"the name of a table {_SQL_NAME}")
        if not isinstance(given, dict):
            self._add(place, "", 'must be a table, such as { csv = "countries.csv" }')
            return None
        kinds = [one for one in TABLES if one in given]
        if len(kinds) != 1:
            both = f"has both {kinds[0]!r} and {kinds[1]!r}" if kinds else f"needs one of {', '.join(TABLES)}"
            self._add(place, "", both)
            return None
        found = read_table(TABLES[kinds[0]], given, place, self._problems, name=name)
        return found and self._with_path(found)

    # [pipeline.NAME.sink]

    def _outputs(self, value: Any, place: str) -> tuple[Output, ...]:
        """One sink, or an array of sinks."""
        place = f"{place}.sink"
        if not isinstance(value, list):
            found = [self._output(value, place)]
        else:
            found = [self._output(one, f"{place} {number}") for number, one in enumerate(value, 1)]
            if not value:
                self._add(place, "", "is empty")
        return tuple(one for one in found if one is not None)

    def _output(self, value: Any, place: str) -> Output | None:
        own: dict[str, Any] = {}
        if isinstance(value, dict):
            own = {one: value[one] for one in keys(Output) if one in value}
            value = {one: given for one, given in value.items() if one not in own}
        sink = self._sink(value, place)
        # The problems of a sink that cannot be read have been added.
        output = read_table(Output, own, place, self._problems, sink=sink or Noop())
        return output if sink is not None else None

    def _sink(self, value: Any, place: str) -> Sink | None:
        if isinstance(value, str):
            return self._simple_sink(value, place)
        if not isinstance(value, dict):
            self._add(place, "", 'must be a table, such as { topic = "results" }')
            return None
        kinds = [one for one in SINKS if one in value]
        if not kinds and "topic_from" in value:
            kinds = ["topic"]
        if len(kinds) == 1:
            return self._sink_of(SINKS[kinds[0]], dict(value), place)
        if kinds:
            text = f"has both {kinds[0]!r} and {kinds[1]!r}: each sink is of one kind"
        else:
            hints = [hint for one in value if "?" in (hint := did_you_mean(one, SINKS))]
            text = "; ".join([f"needs one of {', '.join(SINKS)}", *hints[:1]])
        self._add(place, "", text)
        return None

    def _simple_sink(self, value: str, place: str) -> Sink | None:
        simple = {"console": Console(), "noop": Noop()}
        if value in simple:
            return simple[value]
        hint = did_you_mean(value, simple)
        if value in SINKS:
            hint = f'write {{ {value} = "…" }}'
        elif "?" not in hint:
            hint = f'for a topic, write {{ topic = "{value}" }}' if is_valid_name(value.encode()) else ""
        text = f"must be 'console', 'noop' or a table, not {value!r}"
        self._add(place, "", f"{text}; {hint}" if hint else text)
        return None

    def _sink_of(self, kind: type[Sink], given: dict[str, Any], place: str) -> Sink | None:
        more: dict[str, Any] = {}
        if kind is Topic:
            own = {one: given.pop(one) for one in list(given) if one in SINK_KEYS}
            more["options"] = read_options(own, place, SINK_KEYS, self._directory, self._problems)
        if kind is Noop or given.get("console") is True:
            given.pop("noop" if kind is Noop else "console")
        found = read_table(kind, given, place, self._problems, **more)
        if found is None:
            return None
        found = self._with_path(found)
        for key, text in found.problems():
            self._add(place, key, text)
        return found
