"""What tasks do to the process that they run in: once, and only in a process of Spark's."""

from __future__ import annotations

import gc

import pytest
from pyspark import TaskContext

from nsparq.spark import worker


def test_a_worker_is_prepared_once_and_no_other_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(worker, "_prepared", None)
    monkeypatch.setattr(worker, "keep_freed", lambda *_: done.append("memory"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("collector"))
    # To count what is frozen takes longer than a short task.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted"))
    worker.prepare_worker()
    assert done == []
    monkeypatch.setattr(TaskContext, "get", lambda: TaskContext)
    for _ in range(3):
        worker.prepare_worker()
    assert done == ["memory", "collector"]
