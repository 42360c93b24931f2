"""Retries of failed messages: whether, after which delay, and what the log says about them.

nsqd counts the deliveries of a message (`attempts`), and that count decides. So retries survive a
restart of the consumer, and a delivery that ended without an answer counts too.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

from nsparq.client.config import Config
from nsparq.client.message import Message, Reject, Requeue, check_delay

__all__ = ["FailureLog", "RetryDelay", "RetryOn", "RetryRules"]

logger = logging.getLogger(__name__)

RetryDelay = float | Callable[[int], float]
RetryOn = type[Exception] | tuple[type[Exception], ...]

MAX_RETRIES: Final = 65534
"""nsqd counts attempts up to 65,535."""
REPEAT_S: Final = 60.0
"""How often the same failure is logged."""
MAX_KINDS: Final = 1000


@dataclass(frozen=True)
class RetryRules:
    """`config` has the number of attempts. `delay` gets the number of the retry, from 1."""

    config: Config
    delay: Callable[[int], float]
    on: tuple[type[Exception], ...]

    @classmethod
    def of(
        cls, config: Config, retries: int | None, delay: RetryDelay | None, on: RetryOn | None
    ) -> RetryRules:
        """The rules of a subscription; None means what `config` says. Raises ValueError,
        TypeError."""
        if retries is not None:
            if isinstance(retries, bool) or not isinstance(retries, int):
                raise TypeError(f"retries is a number, not {retries!r}")
            if not 0 <= retries <= MAX_RETRIES:
                raise ValueError(f"retries is from 0 to {MAX_RETRIES}, not {retries}")
            config = replace(config, max_attempts=retries + 1)
        kinds = (Exception,) if on is None else on if isinstance(on, tuple) else (on,)
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise TypeError(f"retry_on is an exception class or a tuple of them, not {on!r}")
        return cls(config, _delays(config, delay), kinds)

    def is_final(self, message: Message, error: Exception) -> bool:
        """Whether the message is given up after this error."""
        if isinstance(error, Requeue):
            return False
        is_last = 0 < self.config.max_attempts <= message.attempts
        return is_last or self.is_hopeless(error)

    def is_hopeless(self, error: Exception) -> bool:
        """Whether another attempt cannot help. It is the message's fault, so the consumer does not
        back off."""
        return isinstance(error, Reject) or not isinstance(error, self.on)


def _delays(config: Config, delay: RetryDelay | None) -> Callable[[int], float]:
    if delay is None:
        return config.requeue_delay
    if callable(delay):
        return _guarded(config, delay)
    check_delay(delay)
    first, longest = float(delay), config.max_requeue_delay
    return lambda retry: min(first * 2.0 ** min(retry - 1, 64), max(longest, first))


def _guarded(config: Config, function: Callable[[int], float]) -> Callable[[int], float]:
    """A function of the user. If it fails, the usual delay counts: the message must go back."""

    def delay(retry: int) -> float:
        try:
            found = float(function(retry))
            check_delay(found)
            return found
        except Exception:
            usual = config.requeue_delay(retry)
            logger.exception("retry_delay failed for retry %d; the delay is %g s", retry, usual)
            return usual

    return delay


class FailureLog:
    """Logs failures of handlers: a line with a traceback for the first of a kind. Repetitions are
    counted, and reported with the next line of that kind, a minute later."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._kinds: dict[object, tuple[float, int]] = {}
        """When each kind was logged, and its repetitions since."""

    def add(self, what: str, error: BaseException, *, delay: float, attempts: int, limit: int) -> None:
        """A message failed and is tried again after `delay` seconds. `limit` is the number of
        attempts; 0: no limit."""
        now, kind = self._clock(), _kind(error)
        logged_at, repeated = self._kinds.get(kind, (now - REPEAT_S, 0))
        is_due = now - logged_at >= REPEAT_S
        more = f"; {repeated} more failures like this since the last line" if repeated and is_due else ""
        of = f" of {limit}" if limit else ""
        logger.log(
            logging.ERROR if is_due else logging.DEBUG,
            "%s: %s: %s; attempt %d%s, retry in %g s%s",
            what,
            type(error).__name__,
            error,
            attempts,
            of,
            delay,
            more,
            exc_info=error if is_due else None,
        )
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (now, 0) if is_due else (logged_at, repeated + 1)


def _kind(error: BaseException) -> object:
    """The class of an error and the line that raised it."""
    frames: Iterable[tuple[object, int]] = traceback.walk_tb(error.__traceback__)
    last = None
    for frame, line in frames:
        last = (frame.f_code.co_filename, line)  # type: ignore[attr-defined]  # walk_tb gives frames
    return type(error), last
