"""The guards of conftest.py catch leftovers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CASES = """
import asyncio, logging, socket, threading, warnings
import pytest

kept = []
release = threading.Event()

def test_clean():
    with socket.socket():
        pass
    thread = threading.Thread(target=lambda: None)
    thread.start()

def test_thread():
    kept.append(threading.Thread(target=release.wait))
    kept[-1].start()

def test_socket():
    kept.append(socket.socket())

@pytest.mark.allow_leftovers("foreign code")
def test_allowed():
    kept.append(socket.socket())

def test_loop_error():
    async def fail():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)
    asyncio.run(fail())

def test_warning():
    warnings.warn("old", DeprecationWarning)

def test_skipped():
    pytest.skip("no such program")

def test_end():
    release.set()
    for thing in kept:
        thing.close() if isinstance(thing, socket.socket) else thing.join()
"""


@pytest.mark.parametrize("in_ci", [False, True], ids=["at a desk", "on the build server"])
def test_guards_catch_leftovers_and_skips(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, in_ci: bool
) -> None:
    monkeypatch.setenv("CI", "true" if in_ci else "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # it imports fixtures from tests.support
    pytester.makeconftest(
        (Path(__file__).parent / "conftest.py").read_text().replace("GRACE = 20.0", "GRACE = 0.1")
    )
    pytester.makeini("[pytest]\nfilterwarnings = error\nmarkers = allow_leftovers(reason): x\n")
    pytester.makepyfile(CASES)
    result = pytester.runpytest_subprocess("-rA", "-p", "no:schemathesis")
    skipped = "*skipped on the build server: *no such program*" if in_ci else "SKIPPED *: no such program"
    result.stdout.fnmatch_lines_random(
        [
            "PASSED *::test_clean",
            "ERROR *::test_thread *",
            "*left over: [[]'thread Thread-*",
            "ERROR *::test_socket *",
            "*left over: [[]'socket:*",
            "PASSED *::test_allowed",
            "ERROR *::test_loop_error *",
            "*logged by the event loop: [[]'Exception in callback *",
            "FAILED *::test_warning *",
            skipped,
            "PASSED *::test_end",
        ]
    )
    result.assert_outcomes(passed=6, errors=3, failed=2 if in_ci else 1, skipped=0 if in_ci else 1)
