"""What is freed at once, and what would wait for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freed_without_collecting(thing: object) -> Iterator[None]:
    """The block drops the last reference to the thing, and that is the end of it."""
    watch = weakref.ref(thing)
    del thing
    gc.disable()
    try:
        yield
        assert watch() is None
    finally:
        gc.enable()
