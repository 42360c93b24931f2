"""The path of one message stays short to read: see benchmarks/decisions/message_trace.py."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.decisions.message_trace import TRACES
from nsparq import kernel


@pytest.mark.skipif(kernel.BUILD != "compiled", reason="without compiled code the path is another one")
@pytest.mark.parametrize(("path", "calls", "files"), [("pub", 39, 10), ("http", 39, 13)])
def test_one_message_passes_through_few_functions(path: str, calls: int, files: int) -> None:
    trace = asyncio.run(TRACES[path]())
    found = trace.summary()
    listed = "\n".join(f"{'  ' * depth}{function}  ({file})" for depth, file, function in trace.calls)
    assert found["calls"] <= calls and found["files"] <= files, f"{found}\n{listed}"
