"""Random choices of our own, apart from the state that `random` shares with the whole process.

A program that seeds `random` must not make all its consumers ask nsqlookupd in step, and a broker in a thread
of a test must not draw from what the test relies on (hypothesis objects to that)."""

from __future__ import annotations

import os
import random

chance = random.Random()

os.register_at_fork(after_in_child=chance.seed)
