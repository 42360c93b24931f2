"""A Python program builds the same as a file, with the same errors."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import nsparq.pipeline
from nsparq.pipeline.file import builder
from nsparq.pipeline.file.builder import (
    decoding,
    pipeline,
    pipeline_file,
    sink,
    source,
    step,
    table,
    watermark,
)
from nsparq.pipeline.file.keys import keys
from nsparq.pipeline.file.reading import load, parse
from nsparq.pipeline.file.spec import Output, PipelineFile, PipelineKeys, Source, SpecError, Step, Watermark

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "examples").rglob("*.toml"))


def as_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"from_" if name == "from" else name: value for name, value in given.items()}


def called(function: Callable[..., Any], given: Any) -> Any:
    """The table from a function of the builder. Other values stay unchanged."""
    if isinstance(given, list):
        return [called(function, one) for one in given]
    if not isinstance(given, dict):
        return given
    found = dict(given)
    for name, part in (("decode", decoding), ("watermark", watermark)):
        if name in found:
            found[name] = called(part, found[name])
    return function(**as_arguments(found))


def built(given: Mapping[str, Any], path: Path) -> PipelineFile:
    pipelines = {}
    for name, table_ in given["pipeline"].items():
        found = dict(table_)
        for key, function in (("source", source), ("step", step), ("sink", sink)):
            if key in found:
                found[key] = called(function, found[key])
        for key, function in (("sources", source), ("tables", table)):
            if key in found:
                found[key] = {one: called(function, value) for one, value in found[key].items()}
        pipelines[name] = called(pipeline, found)
    return pipeline_file(path, pipelines, **{name: given[name] for name in given if name != "pipeline"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_example_file_can_be_built(path: Path) -> None:
    assert built(tomllib.loads(path.read_text()), path) == load(path)


def transformation(rows: object) -> object:
    return rows


def test_functions_paths_and_durations_stand_for_texts(tmp_path: Path) -> None:
    found = pipeline_file(
        tmp_path / "p.py",
        {
            "p": pipeline(
                source=source(["a", "b"], max_rows_per_trigger=5),
                python=transformation,
                sink=sink(parquet=tmp_path / "data", partition_by=("date",)),
                trigger=timedelta(milliseconds=1500),
                retries=0,
            )
        },
    )
    text = f"""
[pipeline.p]
source = {{ topic = ["a", "b"], max_rows_per_trigger = 5 }}
python = "{__name__}:transformation"
sink = {{ parquet = "data", partition_by = ["date"] }}
trigger = "1500ms"
retries = 0
"""
    assert found == parse(text, tmp_path / "p.py")


def test_errors_are_the_same_as_for_a_file() -> None:
    with pytest.raises(SpecError) as caught:
        pipeline_file(
            "/data/p.py",
            {"p": pipeline(source=source("a", topc="b"), python=lambda rows: rows, sink="consol")},
            nsq={"nsqds": "x"},
        )
    assert caught.value.problems == [
        "[nsq] nsqds: unknown key; did you mean 'nsqd'?",
        "[pipeline.p.source] topc: unknown key; did you mean 'topic'?",
        "[pipeline.p.sink]: must be 'console', 'noop' or a table, not 'consol'; did you mean 'console'?",
        "[pipeline.p] python: must name a function as module:function",
    ]


@pytest.mark.parametrize(
    ("function", "table_"),
    [(pipeline, PipelineKeys), (source, Source), (watermark, Watermark), (step, Step), (sink, Output)],
)
def test_every_key_is_an_argument(function: Callable[..., Any], table_: type) -> None:
    known = {name.removesuffix("_") for name in inspect.signature(function).parameters}
    assert known >= keys(table_).keys()


def test_the_package_has_what_it_names() -> None:
    for name in nsparq.pipeline.__all__:
        assert getattr(nsparq.pipeline, name) is not None
    assert {*builder.__all__} <= {*nsparq.pipeline.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = nsparq.pipeline.nothing
