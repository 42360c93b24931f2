"""Options of format("nsq") as keys: of [nsq], a source and a sink. Needs no Spark."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from nsparq.pipeline.file.keys import Problems, did_you_mean, expand, is_local, keys
from nsparq.pipeline.file.sinks import Topic
from nsparq.spark.option_fields import SparkOption, refused
from nsparq.spark.options import TABLE, NsqOptions, OptionError, Use

DEFAULT_NSQD: Final = "127.0.0.1:4151"

_STREAMS: Final = {Use.LOG_STREAM, Use.QUEUE_STREAM}
NSQ_KEYS: Final = {
    one.attribute: one for one in TABLE.values() if one.uses == set(Use) and one.attribute != "topic"
}
"""Keys of [nsq]: options that are the same for all readers and writers."""
SOURCE_KEYS: Final = {
    one.attribute: one
    for one in TABLE.values()
    if one.uses & _STREAMS and one.attribute not in {*NSQ_KEYS, "columns", "trigger_interval"}
}
"""Without `columns`, because a pipeline uses all columns, and `trigger_interval`: it has
`trigger`."""
SINK_KEYS: Final = {
    one.attribute: one
    for one in TABLE.values()
    if Use.SINK_STREAM in one.uses and one.attribute not in {*NSQ_KEYS, *keys(Topic), "refuse_topics"}
}


def resolve(path: str, directory: Path) -> str:
    """The path relative to the directory of the file. URLs and absolute paths stay."""
    return os.path.normpath(directory / path) if is_local(path) else path


def read_options(
    given: Mapping[str, Any],
    place: str,
    known: Mapping[str, SparkOption],
    directory: Path,
    problems: Problems,
    beside: Iterable[str] = (),
) -> dict[str, str]:
    """Options by Spark's names, from keys in snake_case. `beside` are the table's other keys."""
    found: dict[str, str] = {}
    for one, value in given.items():
        option = known.get(one)
        if option is None:
            problems.add(place, one, f"unknown key; {did_you_mean(one, [*beside, *known])}")
            continue
        try:
            text = _text(value)
            if option.kind.name == "file":
                text = resolve(text, directory)
            option.kind.parse(text)
            found[option.name] = text
        except ValueError as error:
            problems.add(place, one, f"{error}{refused(option, value)}")
    return found


def read_source_options(
    given: dict[str, Any],
    place: str,
    channel: str,
    nsq: Mapping[str, str],
    directory: Path,
    problems: Problems,
    beside: Iterable[str] = (),
) -> dict[str, str] | None:
    """None if problems were added. `channel` is the default channel."""
    before = len(problems.found)
    if isinstance(given.get("topic"), list):
        given["topics"] = given.pop("topic")
    found = read_options(given, place, SOURCE_KEYS, directory, problems, beside)
    if len(problems.found) > before:
        return None
    found.setdefault("channel", channel)
    use = Use.QUEUE_STREAM if found.get("mode") == "queue" else Use.LOG_STREAM
    try:
        # In queue mode the staging directory will be in the checkpoint.
        staging = {"staging": "."} if use is Use.QUEUE_STREAM else {}
        NsqOptions.parse({"nsqd": DEFAULT_NSQD, **staging, **nsq, **found}, use)
    except OptionError as error:
        problems.add(place, "", str(error))
        return None
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        if not all(isinstance(one, str) for one in value):
            raise ValueError("must be an array of strings")
        return ",".join(map(expand, value))
    if isinstance(value, dict):
        raise ValueError("must not be a table")
    # TOML has its own type for times.
    return str(value.isoformat()) if hasattr(value, "isoformat") else expand(str(value))
