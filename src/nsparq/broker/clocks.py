"""Wall time for deciding what is old enough to be removed.

Somebody may set the wall clock. Messages removed because of a wrong clock do not come back, so a
wall clock that jumps ahead of the monotonic clock is not trusted at once.
"""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

STEP_NS: Final = 60 * 1_000_000_000
"""A wall clock that is ahead by more than this was set forward."""
CONFIRM_NS: Final = 3600 * 1_000_000_000
"""A wall clock that was set forward is trusted after it has run evenly for this long."""


class AgeClock:
    """Wall time that follows a clock set forward only after an hour.

    It begins at `known_ns`, the latest wall time that an earlier run left. While the wall clock is
    ahead by more than STEP_NS, it follows the monotonic clock, until the wall clock has run evenly
    for CONFIRM_NS. It follows a wall clock that was set back at once: messages then look younger,
    and are kept.
    """

    def __init__(self, known_ns: int, wall_ns: int, monotonic_ns: int) -> None:
        self._now_ns = known_ns
        self._at_ns = monotonic_ns
        """Monotonic time of the last read()."""
        self._ahead_ns = wall_ns - known_ns
        """How far the wall clock was ahead at its last step forward."""
        self._ahead_since_ns = monotonic_ns

    def read(self, wall_ns: int, monotonic_ns: int) -> int:
        """The time to measure ages by, in nanoseconds since 1970."""
        self._now_ns += monotonic_ns - self._at_ns
        self._at_ns = monotonic_ns
        ahead_ns = wall_ns - self._now_ns
        if ahead_ns > STEP_NS:
            if abs(ahead_ns - self._ahead_ns) > STEP_NS:
                logger.warning(
                    "the clock was set forward by %.0f s: retention will use the new time in an hour",
                    ahead_ns / 1e9,
                )
                self._ahead_ns, self._ahead_since_ns = ahead_ns, monotonic_ns
            if monotonic_ns - self._ahead_since_ns < CONFIRM_NS:
                return self._now_ns
        self._ahead_ns = 0
        self._now_ns = wall_ns
        return wall_ns
