"""Rules across the tables of a pipeline file: names, topics, channels, modes. Needs no Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsparq.names import is_valid_name
from nsparq.pipeline.file.keys import Problems, did_you_mean
from nsparq.pipeline.file.sinks import Jdbc, Topic
from nsparq.pipeline.file.spec import INPUT, MESSAGES, Output, Pipeline, Source, Step
from nsparq.pipeline.file.tables import Table

_LOOP = "is a topic that the pipeline reads: that would be an endless loop"


def output_places(outputs: Sequence[Output], place: str) -> Iterator[tuple[str, Output]]:
    """The outputs, and the table of the file that each is in."""
    for number, output in enumerate(outputs, 1):
        yield f"{place}.sink" if len(outputs) == 1 else f"{place}.sink {number}", output


def check_checkpoints(pipelines: Sequence[Pipeline], problems: Problems) -> None:
    """No two pipelines share a checkpoint."""
    owners: dict[str, str] = {}
    for one in pipelines:
        owner = owners.setdefault(one.checkpoint, one.name)
        if owner != one.name:
            text = f"is also that of [pipeline.{owner}]: each pipeline needs its own"
            problems.add(f"pipeline.{one.name}", "checkpoint", text)


def check_steps(
    steps: Sequence[Step], sources: Sequence[Source], tables: Sequence[Table], place: str, problems: Problems
) -> None:
    """Each name in SQL is used once, regardless of case, and a step names only earlier ones."""
    known: list[str] = []
    for at, name in [
        *((f"{place}.sources.{one.name}", one.name) for one in sources),
        *((f"{place}.tables.{one.name}", one.name) for one in tables),
        *((f"{place}.step {number}", one.name) for number, one in enumerate(steps, 1)),
    ]:
        if name.lower() in {INPUT, *(one.lower() for one in known)}:
            problems.add(at, "name", f"{name!r} is already used")
        known.append(name)
    for number, step in enumerate(steps, 1):
        earlier = known[: len(sources) + len(tables) + number - 1]
        for one in step.sources:
            if one not in earlier:
                text = f"there is no earlier step {one!r}; {did_you_mean(one, sorted(earlier))}"
                problems.add(f"{place}.step {number}", "from", text)
    if len(sources) > 1 and steps and steps[0].python and not steps[0].sources:
        at = place if steps[0].name == "result" else f"{place}.step 1"
        problems.add(at, "from", f"is missing: name one or more of {', '.join(one.name for one in sources)}")


def check_pipeline(pipeline: Pipeline, place: str, problems: Problems) -> None:
    for source in pipeline.sources:
        _check_source(source, pipeline, place, problems)
    for at, output in output_places(pipeline.outputs, place):
        _check_output(output, pipeline, at, place, problems)
    _check_names(pipeline, place, problems)


def _check_source(source: Source, pipeline: Pipeline, place: str, problems: Problems) -> None:
    add, format = problems.add, source.decode.format
    at = place if source.name == MESSAGES else f"{place}.sources.{source.name}"
    if source.dead_letters:
        if format in ("raw", "message"):
            text = f"every message decodes with format {format!r}: set 'decode', or remove this key"
            add(at, "dead_letters", text)
        if source.is_queue:
            add(at, "dead_letters", "reads the source a second time, which mode 'queue' does not allow")
        if pipeline.reads(source.dead_letters):
            add(at, "dead_letters", _LOOP)
    if source.is_queue and len(pipeline.outputs) > 1:
        add(at, "mode", "'queue' allows one sink only, because each sink reads the source separately")
    if source.is_queue and source.decode.is_inferred:
        text = "is missing: it cannot be inferred in mode 'queue', where reading takes the messages"
        add(f"{at}.decode", "schema", text)


def _check_output(output: Output, pipeline: Pipeline, at: str, place: str, problems: Problems) -> None:
    sink = output.sink
    if isinstance(sink, Topic) and sink.topic and pipeline.reads(sink.topic):
        problems.add(at, "topic", _LOOP)
    if refused := sink.refused_mode(output.output_mode):
        problems.add(place if len(pipeline.outputs) == 1 else at, "output_mode", refused)
    if isinstance(sink, Jdbc) and sink.batch_column:
        targets = [(one.sink.url, one.sink.table) for one in pipeline.outputs if isinstance(one.sink, Jdbc)]
        if targets.count((sink.url, sink.table)) > 1:
            text = "is also that of another sink: with 'batch_column' only one sink may write to it"
            problems.add(at, "table", text)


def _check_names(pipeline: Pipeline, place: str, problems: Problems) -> None:
    """No two queries share a channel or a checkpoint, and the channels are valid names for nsqd."""
    names = [output.name for output in pipeline.outputs]
    for number, (at, output) in enumerate(output_places(pipeline.outputs, place)):
        if output.name in names[:number]:
            text = f"{output.name!r} is already used" if output.name else "is missing: another sink has none"
            problems.add(at, "name", text)
            return
    owners: dict[str, str] = {}
    for source in pipeline.sources:
        owner = f"source {source.name!r}"
        letters = [source.letters_channel] if source.dead_letters else []
        for channel in (*map(source.channel, names), *letters):
            if channel in owners:
                also = "" if owners[channel] == owner else f" and of {owners[channel]}"
                text = f"the channel {channel!r} of {owner}{also} is used twice: choose another name"
                problems.add(place, "", text)
            owners[channel] = owner
            if not is_valid_name(channel.encode()):
                problems.add(place, "", f"the channel {channel!r} of {owner} is too long: set its 'channel'")
