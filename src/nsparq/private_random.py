"""A random source of our own, independent of the global state of the `random` module.

A program that seeds `random` must not make all its consumers poll nsqlookupd in step. A broker in a
thread of a test must not change the random numbers that the test relies on: hypothesis rejects
that.
"""

from __future__ import annotations

import os
import random

private_random = random.Random()

# Without a new seed, a forked child would draw the same numbers as its parent.
os.register_at_fork(after_in_child=private_random.seed)
