"""A broker, and a way to run a pipeline file in the session of the tests."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nsparq.pipeline.execute.progress import Figures
from nsparq.pipeline.execute.status import Status
from nsparq.pipeline.file.reading import parse
from nsparq.pipeline.file.spec import PipelineFile
from nsparq.testing import Broker, run_broker
from tests.support.polling import SPARK_DEADLINE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S = SPARK_DEADLINE
Until = Callable[[dict[str, Figures]], Any]


@pytest.fixture(scope="session")
def pipeline_broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


@pytest.fixture
def broker(pipeline_broker: Broker) -> Iterator[Broker]:
    yield pipeline_broker
    for topic in pipeline_broker.stats()["topics"]:
        pipeline_broker.delete(topic["topic_name"])


class Runs:
    """Runs pipeline files, with their checkpoints below `directory`."""

    def __init__(self, spark: SparkSession, broker: Broker, directory: Path) -> None:
        self._spark, self._broker, self.directory = spark, broker, directory
        self.status: Status | None = None

    def __call__(self, text: str, until: Until | None = None) -> dict[str, Figures]:
        """Runs until all pipelines have ended or `until` is true. Returns the last figures."""
        if "[nsq]" not in text:
            text = f'[nsq]\nnsqd = ["{self._broker.http_address}"]\n{text}'
        return self.file(parse(text, self.directory / "p.toml"), until)

    def file(self, file: PipelineFile, until: Until | None = None) -> dict[str, Figures]:
        from nsparq.pipeline.execute import runner

        stop = threading.Event()
        deadline = time.monotonic() + PATIENCE_S
        is_late = False

        def watch(status: Status) -> None:
            nonlocal is_late
            self.status = status
            is_late = time.monotonic() > deadline
            if is_late or (until is not None and until({one.name: one for one in status.pipelines})):
                stop.set()

        self._spark.conf.set("spark.sql.session.timeZone", "UTC")
        done = runner.run(self._spark, file, stop, watch=watch)
        assert not is_late, [one.as_json() for one in done.pipelines]
        return {one.name: one for one in done.pipelines}


@pytest.fixture
def run(spark: SparkSession, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    # The process that tends Delta tables is forked, as Spark's are.
    monkeypatch.setattr(sys, "executable", spark.sparkContext.pythonExec)
    return Runs(spark, broker, tmp_path)


def bodies(broker: Broker, topic: str) -> list[Any]:
    """The messages of a topic, parsed as JSON."""
    return [json.loads(message.body) for message in broker.peek(topic, count=1000)]
