"""/debug: what a person wants to know of a Python process that misbehaves.

NSQ serves Go's profiles here. Those that make sense keep their place: `cmdline`, `profile`, `goroutine`
(here: threads and tasks) and `heap` (here: what the collector tracks). `block`, `threadcreate`, `symbol` and
`/debug/setblockrate` speak of Go's runtime and are absent.
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
from typing import TYPE_CHECKING, Final

from nsparq.http.api import TEXT_TYPE, ApiError, Endpoint, Param, Request, Response

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

MAX_PROFILE_S: Final = 300.0
SHOWN_TASKS: Final = 200
SHOWN_TYPES: Final = 50


class DebugApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._is_profiling = False

    def endpoints(self) -> list[Endpoint]:
        def get(path: str, handler: object, summary: str, **more: object) -> Endpoint:
            return Endpoint(
                group="Debugging",
                method="GET",
                path=f"/debug/pprof{path}",
                handler=handler,  # type: ignore[arg-type]
                summary=summary,
                permission="admin",
                success="text",
                success_type=TEXT_TYPE,
                **more,  # type: ignore[arg-type]
            )

        seconds = Param(
            name="seconds",
            help="how long to watch (default 30, at most 300)",
            schema={"type": "number", "exclusiveMinimum": 0, "maximum": MAX_PROFILE_S},
        )
        return [
            get("/", self._index, "What there is under /debug."),
            get("/cmdline", self._command_line, "The command line, its parts separated by NUL."),
            get(
                "/profile",
                self._profile,
                "Where the event loop's time goes: a profile by function, slowest first.",
                details="Slows the daemon down while it watches. One at a time.",
                params=(seconds,),
                errors=((400, "INVALID_ARG_SECONDS"), (409, "ALREADY_PROFILING")),
            ),
            get("/goroutine", self._stacks, "The stacks of all threads and tasks."),
            get("/heap", self._heap, "How many objects of each type the garbage collector tracks."),
            Endpoint(
                group="Debugging",
                method="POST",
                path="/debug/freememory",
                handler=self._free_memory,
                summary="Collect garbage and give memory back to the system.",
                permission="admin",
            ),
        ]

    def _index(self, request: Request) -> Response:
        text = "".join(f"{e.method} {e.path}: {e.summary}\n" for e in self.endpoints())
        return _text(text)

    def _command_line(self, request: Request) -> Response:
        return _text("\0".join(sys.orig_argv))

    async def _profile(self, request: Request) -> Response:
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
        except ValueError:  # of another tool that is at work in this process
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

    def _stacks(self, request: Request) -> Response:
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

    def _heap(self, request: Request) -> Response:
        counts = Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())
        lines = [f"{count:>10} {name}" for name, count in counts.most_common(SHOWN_TYPES)]
        return _text("\n".join([f"{sum(counts.values()):>10} objects", *lines]) + "\n")

    def _free_memory(self, request: Request) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _text(text: str) -> Response:
    return Response(body=text.encode("utf-8", "replace"), content_type=TEXT_TYPE, nsq_header=False)
