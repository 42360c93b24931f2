"""/debug: inspect a Python process that misbehaves.

NSQ serves Go's profiles here. Those that make sense for Python keep their paths: `cmdline`,
`profile`, `goroutine` (here: threads and tasks) and `heap` (here: the objects that the garbage
collector tracks). `block`, `threadcreate`, `symbol` and `/debug/setblockrate` are about Go's
runtime and do not exist here.
"""

from __future__ import annotations

import asyncio
import cProfile
import ctypes
import gc
import io
import pstats
import sys
import threading
import traceback
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from nsparq.fetch import without_secrets
from nsparq.http.api import TEXT_TYPE, ApiError, Endpoint, Param, Request, Response, endpoints_of

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

MAX_PROFILE_S: Final = 300.0
SHOWN_TASKS: Final = 200
SHOWN_TYPES: Final = 50


def _report(path: str, summary: str, **more: Any) -> Endpoint:
    return Endpoint(
        method="GET",
        path=f"/debug/pprof{path}",
        summary=summary,
        permission="admin",
        success="text",
        success_type=TEXT_TYPE,
        **more,
    )


class DebugApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._is_profiling = False

    @_report("/", "List the endpoints under /debug.")
    def index(self, request: Request) -> Response:
        lines = [f"{one.method} {one.path}: {one.summary}\n" for one in endpoints_of(self)]
        return _text("".join(lines))

    @_report("/cmdline", "Get the command line, its parts separated by NUL, without secrets in addresses.")
    def command_line(self, request: Request) -> Response:
        return _text("\0".join(without_secrets(one) if "://" in one else one for one in sys.orig_argv))

    @_report(
        "/profile",
        "Profile the event loop: time by function, slowest first.",
        details="The daemon is slower meanwhile. Only one profile runs at a time.",
        params=(
            Param(
                name="seconds",
                help="duration (default 30, at most 300)",
                schema={"type": "number", "exclusiveMinimum": 0, "maximum": MAX_PROFILE_S},
            ),
        ),
        errors=((400, "INVALID_ARG_SECONDS"), (409, "ALREADY_PROFILING")),
    )
    async def profile(self, request: Request) -> Response:
        try:
            seconds = float(request.parameters.get("seconds", "30"))
        except ValueError:
            raise ApiError(400, "INVALID_ARG_SECONDS") from None
        if not 0 < seconds <= MAX_PROFILE_S:
            raise ApiError(400, "INVALID_ARG_SECONDS")
        if self._is_profiling:
            raise ApiError(409, "ALREADY_PROFILING")
        profile = cProfile.Profile()
        try:
            profile.enable()
        except ValueError:  # another tool is profiling this process
            raise ApiError(409, "ALREADY_PROFILING") from None
        self._is_profiling = True
        try:
            await asyncio.sleep(seconds)
        finally:
            profile.disable()
            self._is_profiling = False
        out = io.StringIO()
        pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(60)
        return _text(out.getvalue())

    @_report("/goroutine", "Get the stacks of all threads and tasks.")
    def stacks(self, request: Request) -> Response:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}\n")
        tasks = [*asyncio.all_tasks()]
        for task in tasks[:SHOWN_TASKS]:
            out = io.StringIO()
            task.print_stack(file=out)
            parts.append(out.getvalue() + "\n")
        parts.append(f"{len(tasks)} tasks\n")
        return _text("".join(parts))

    @_report("/heap", "Count the objects of each type that the garbage collector tracks.")
    def heap(self, request: Request) -> Response:
        counts = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
        lines = [f"{count:>10} {name}" for name, count in counts.most_common(SHOWN_TYPES)]
        return _text("\n".join([f"{sum(counts.values()):>10} objects", *lines]) + "\n")

    @Endpoint(
        method="POST",
        path="/debug/freememory",
        summary="Collect garbage and return freed memory to the system.",
        permission="admin",
    )
    def free_memory(self, request: Request) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def _text(text: str) -> Response:
    return Response(body=text.encode("utf-8", "replace"), content_type=TEXT_TYPE, nsq_header=False)
