"""Checks that objects are freed at once, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from .polling import wait_until


@contextmanager
def freed_without_collecting(thing: object) -> Iterator[None]:
    """The block drops the last reference to the object, which must then be freed."""
    watch = weakref.ref(thing)
    del thing
    gc.disable()
    try:
        yield
        assert watch() is None
    finally:
        gc.enable()


@contextmanager
def all_freed_without_collecting(kind: type) -> Iterator[None]:
    """The block creates objects of this class, at least one. All must be freed soon after it."""
    made: list[weakref.ref[object]] = []
    build = kind.__init__

    def watched(self: object, *arguments: object, **named: object) -> None:
        made.append(weakref.ref(self))
        build(self, *arguments, **named)

    def alive() -> list[object]:
        return [thing for watch in made if (thing := watch()) is not None]

    kind.__init__ = watched  # type: ignore[misc]  # put back below
    gc.disable()
    try:
        yield
        wait_until(lambda: made)
        wait_until(lambda: not alive(), what=lambda: f"{len(alive())} of {len(made)} are not freed")
    finally:
        gc.enable()
        kind.__init__ = build  # type: ignore[misc]
