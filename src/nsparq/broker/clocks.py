"""Wall time for deciding what is old enough to be removed.

The wall clock can be set. What was removed because of a wrong clock does not come back when the clock is put
right, so a wall clock that runs ahead of the monotonic clock is not believed at once.
"""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

STEP_NS: Final = 60 * 1_000_000_000
"""A wall clock that is ahead of where it should be by more than this has been set."""
CONFIRM_NS: Final = 3600 * 1_000_000_000
"""A wall clock that was set forward is believed when it has run evenly for this long."""


class AgeClock:
    """Wall time that a clock set forward does not move at once.

    It begins at `known_ns`, the latest wall time that an earlier run has left. While the wall clock is ahead
    of it by a step, it goes on by the monotonic clock. It follows the wall clock when that has run evenly for
    CONFIRM_NS. It follows a wall clock that was set back at once: things look younger then, and are kept.
    """

    def __init__(self, known_ns: int, wall_ns: int, monotonic_ns: int) -> None:
        self._now_ns = known_ns
        self._at_ns = monotonic_ns
        """When it was read last, on the monotonic clock."""
        self._ahead_ns = wall_ns - known_ns
        """How far the wall clock was ahead of this one when that was last more than it should have been."""
        self._ahead_since_ns = monotonic_ns

    def read(self, wall_ns: int, monotonic_ns: int) -> int:
        """The time to measure ages by, in nanoseconds since 1970."""
        self._now_ns += monotonic_ns - self._at_ns
        self._at_ns = monotonic_ns
        ahead_ns = wall_ns - self._now_ns
        if ahead_ns > STEP_NS:
            if abs(ahead_ns - self._ahead_ns) > STEP_NS:
                logger.warning(
                    "the clock was set forward by %.0f s: ages are measured by it in an hour", ahead_ns / 1e9
                )
                self._ahead_ns, self._ahead_since_ns = ahead_ns, monotonic_ns
            if monotonic_ns - self._ahead_since_ns < CONFIRM_NS:
                return self._now_ns
        self._ahead_ns = 0
        self._now_ns = wall_ns
        return wall_ns
