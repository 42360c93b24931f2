"""Finds problems in the figures of the last polls, the most urgent first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nsparq.admin.collect.pipelines import readers
from nsparq.admin.collect.watch import Watch
from nsparq.admin.health.daemons import daemon_problems, pipeline_problems
from nsparq.admin.health.problem import Problem, Severity, in_order
from nsparq.admin.health.queues import queue_problems

__all__ = ["Problem", "Severity", "find_problems"]


def find_problems(
    watch: Watch, pipelines: Sequence[Mapping[str, Any]] = (), others: Iterable[Problem] = ()
) -> list[Problem]:
    """The most urgent first, with `others` among them."""
    return in_order(
        [
            *others,
            *daemon_problems(watch),
            *queue_problems(watch, readers(pipelines)),
            *pipeline_problems(pipelines),
        ]
    )
