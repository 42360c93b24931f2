"""pipeline.json: its values, and the versions of the file that are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsparq.pipeline.errors import PipelineError, retry_helps
from nsparq.pipeline.file.reading import parse
from nsparq.pipeline.file.spec import Pipeline
from nsparq.pipeline.pipeline_json import FORMAT, NAME, PipelineJson


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    (pipeline,) = parse('[pipeline.p]\nsource = "x"\nsink = "noop"').pipelines
    return replace(pipeline, checkpoint=str(tmp_path / "checkpoint"))


def written(pipeline: Pipeline, content: Any = None) -> Any:
    path = Path(pipeline.checkpoint) / NAME
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return json.loads(path.read_text())


def test_values_are_kept_for_the_next_run_with_the_version_of_the_file(pipeline: Pipeline) -> None:
    memory = PipelineJson(pipeline)
    assert memory.get("schema") is None
    memory.put("schema", "a INT")
    again = PipelineJson(pipeline)
    assert (again.get("schema"), again.identity) == ("a INT", PipelineJson(pipeline).identity)
    assert written(pipeline) == {"format": FORMAT, "schema": "a INT", "id": again.identity}


def test_a_file_without_a_version_is_read_and_gets_one(pipeline: Pipeline) -> None:
    written(pipeline, {"id": "old", "schema": "a INT"})
    memory = PipelineJson(pipeline)
    assert (memory.identity, memory.get("schema")) == ("old", "a INT")
    memory.put("batch", 7)
    assert written(pipeline) == {"format": 1, "id": "old", "schema": "a INT", "batch": 7}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"format": FORMAT + 1, "id": "new"}, f"has format {FORMAT + 1}, .* A newer nsparq wrote it"),
        ({"format": "x"}, "was not written by a pipeline"),
        ([1], "was not written by a pipeline"),
    ],
)
def test_a_file_of_a_newer_version_is_refused_and_left_alone(
    pipeline: Pipeline, content: Any, expected: str
) -> None:
    written(pipeline, content)
    for use in (lambda memory: memory.get("id"), lambda memory: memory.put("id", "x")):
        with pytest.raises(PipelineError, match=expected) as caught:
            use(PipelineJson(pipeline))
        assert not retry_helps(caught.value)
    assert written(pipeline) == content
