"""The positions in the log where the queries of a pipeline begin.

Queries that start together must begin at the same position, so that a message is in the rows or in
the dead letters, and `latest` means the same for all of them. The first start determines the
position, creates the channels, so that nsqd keeps the messages, and writes the position to
`pipeline.json`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from nsparq.errors import NsparqError
from nsparq.pipeline.decode.formats import HEADERS
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.sinks import Memory
from nsparq.pipeline.file.spec import MESSAGES, Output, Pipeline, PipelineFile, Source
from nsparq.pipeline.pipeline_json import PipelineJson
from nsparq.spark.columns import SCHEMA
from nsparq.spark.options import NsqOptions, Use
from nsparq.spark.source.positions import decode, encode

BATCH_BYTES: Final = "256m"
"""Limit of a micro-batch, if the file sets none. A pipeline that has years to read shows rows, and
can be stopped, after some seconds."""


class Beginnings:
    """Where the queries of one pipeline begin. A pipeline with one query needs no entry."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._kept = pipeline, PipelineJson(pipeline)
        self._is_needed = len(pipeline.roles) > 1
        self._known: dict[str, dict[str, Any]] = {}
        if not self._is_needed:
            return
        before = self._kept.get("beginning")
        if before is not None:
            # Written by a version whose pipelines had one source and one output.
            self._known = {role: {MESSAGES: before} for role in ("rows", "letters")}
        self._known |= self._kept.get("beginnings") or {}

    @property
    def missing(self) -> list[str]:
        """Roles of new queries. A query with a checkpoint continues from there, and its channel
        must not move: it may not have read the messages before the new beginning."""
        if not self._is_needed:
            return []
        return [
            role for role in self._pipeline.roles if role not in self._known and not self._has_begun(role)
        ]

    @property
    def have_begun(self) -> bool:
        """Whether one of the queries has a place where it begins, or has read something."""
        return bool(self._known) or any(map(self._has_begun, self._pipeline.roles))

    def _has_begun(self, role: str) -> bool:
        """Whether Spark has logged offsets for this query."""
        offsets = Path(self._pipeline.checkpoint) / role / "offsets"
        return offsets.is_dir() and any(one.name.isdigit() for one in offsets.iterdir())

    def of(self, role: str, source: Source) -> dict[str, Any] | None:
        """The startingPosition of a source, without topics it no longer reads. None if unknown."""
        found = self._known.get(role, {}).get(source.name)
        if found is None:
            return None
        return {topic: nodes for topic, nodes in _places(found).items() if source.reads(topic)}

    def settle(
        self, file: PipelineFile, sources_read: Mapping[str, set[str]], abandoned: threading.Event
    ) -> None:
        """Determines where the new queries begin, and keeps it. `sources_read` are the names of the
        sources that each role reads. Raises PipelineError, Abandoned."""
        pipeline, new = self._pipeline, self.missing
        found: dict[str, Any] = {}
        for source in pipeline.sources:
            for role, output in _queries(pipeline):
                if role not in new or source.name not in sources_read[role] or source.is_queue:
                    continue
                options = source_options(file, pipeline, source, output)
                if source.name in found:
                    options["startingPosition"] = json.dumps(_places(found[source.name]))
                found.setdefault(source.name, _begin(pipeline, source, options))
        known = self._kept.get("beginnings") or {}
        self._kept.put("beginnings", {**known, **dict.fromkeys(new, found)}, abandoned)


def _places(beginning: Mapping[str, Any]) -> dict[str, Any]:
    """Positions by topic and node, from an offset in any version."""
    offsets = decode(beginning)
    return {topic: {node: [*place] for node, place in nodes.items()} for topic, nodes in offsets.items()}


def _begin(pipeline: Pipeline, source: Source, options: dict[str, str]) -> dict[str, Any]:
    """Creates the channel of a query with these options, and returns the offset where it begins."""
    from nsparq.spark.source.driver import LogSource

    try:
        opened = LogSource(NsqOptions.parse(options, Use.LOG_STREAM))
        try:
            return encode(opened.initial())
        finally:
            opened.close()
    except NsparqError as error:
        raise PipelineError(f"{pipeline.place_of(source)}: {error}") from error


def _queries(pipeline: Pipeline) -> Iterator[tuple[str, Output | None]]:
    """The roles of all queries. A query for dead letters has no output."""
    for output in pipeline.outputs:
        yield output.role, output
    for source in pipeline.sources:
        if source.dead_letters:
            yield source.letters_role, None


def source_options(
    file: PipelineFile, pipeline: Pipeline, source: Source, output: Output | None
) -> dict[str, str]:
    """Options of format("nsq") for the query of an output, or without one for the dead letters."""
    options = {**file.nsq, **source.options}
    if not source.is_queue and not {"maxRowsPerTrigger", "maxBytesPerTrigger"} & options.keys():
        options["maxBytesPerTrigger"] = BATCH_BYTES
    if pipeline.is_paced_by_source:
        options["triggerInterval"] = f"{round(pipeline.trigger.seconds * 1000)}ms"
    if output is not None and not source.decode.headers:
        # Nobody needs the headers, so they are not decoded. Dead letters have them.
        options["columns"] = ",".join(name for name in SCHEMA.names if name != HEADERS)
    if source.is_queue:
        place = "staging" if source.name == MESSAGES else f"staging-{source.name}"
        options.setdefault("staging", f"{pipeline.checkpoint}/{place}")
    if output is None:
        options["channel"] = source.letters_channel
        return options
    options["channel"] = source.channel(output.name)
    if isinstance(output.sink, Memory):
        # Its checkpoint is temporary.
        options.setdefault("ownChannel", "false")
    return options
