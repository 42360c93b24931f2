"""Delivery policies: what becomes of a message whose attempts fail, or that grows too old.

A topic or a channel may have one; the channel's replaces the topic's. Without a policy everything
is as in NSQ: a message is sent again until a client finishes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Final

from nsparq.flags import parse_duration
from nsparq.names import is_ephemeral, is_valid_name
from nsparq.private_random import private_random

MAX_DELAY_S: Final = 365 * 86400.0
DEAD_SUFFIX: Final = ".dead"


class Failure(Enum):
    """How an attempt ended badly."""

    REQUEUED = "requeued"
    TIMED_OUT = "timed out"
    DISCONNECTED = "disconnected"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPolicy:
    """Times are in seconds."""

    max_attempts: int = 4
    """Failed attempts after which a message becomes a dead letter; 0 for no limit. Some client
    libraries give up after 5 attempts by themselves, so the default is below that."""
    count: str = "failures"
    """Which attempts count: "failures" (REQ and timeout), or "deliveries" (also those whose client
    disconnected)."""
    retry_delay: float = 0.0
    """Delay after the first failed attempt. A delay that the client asks for replaces it."""
    retry_factor: float = 2.0
    """Each further delay is longer by this factor."""
    max_retry_delay: float = 300.0
    retry_jitter: float = 0.1
    """Delays vary by up to this share, so that messages do not all come back together."""
    dead_letters: str = ""
    """Topic for dead letters; empty for the name of the message's topic with `.dead` added."""
    expire_after: float = 0.0
    """Age at which a message is not delivered any more; 0 for never."""
    expired: str = "dead_letters"
    """What becomes of it then: "dead_letters" or "drop"."""

    def counts(self, failure: Failure) -> bool:
        return failure is not Failure.DISCONNECTED or self.count == "deliveries"

    def delay_ns(self, failures: int) -> int:
        """The delay after so many failed attempts."""
        if not self.retry_delay:
            return 0
        exponent = min(failures - 1, math.log(MAX_DELAY_S) / math.log(max(self.retry_factor, 1.001)))
        delay = min(self.retry_delay * self.retry_factor**exponent, self.max_retry_delay)
        return int(delay * private_random.uniform(1 - self.retry_jitter, 1 + self.retry_jitter) * 1e9)

    def dead_letter_topic(self, topic: str) -> str:
        return self.dead_letters or topic + DEAD_SUFFIX

    def stored(self) -> dict[str, Any]:
        """The values that differ from the defaults."""
        defaults = asdict(DeliveryPolicy())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


def parse_policy(values: object, topic: str) -> DeliveryPolicy:
    """The policy of a topic, or of one of its channels, from JSON or TOML. Raises ValueError with a
    text for the user."""
    if not isinstance(values, Mapping):
        raise ValueError("a policy must be an object")
    known = [field.name for field in fields(DeliveryPolicy)]
    for name in values:
        if name not in known:
            raise ValueError(f"a policy has no {name!r}; it has {', '.join(known)}")
    policy = DeliveryPolicy(**{name: _checked(name, value) for name, value in values.items()})
    if policy.max_retry_delay < policy.retry_delay:
        raise ValueError("max_retry_delay must not be smaller than retry_delay")
    letters = policy.dead_letter_topic(topic)
    if not is_valid_name(letters.encode()):
        raise ValueError(f"dead_letters must be the name of a topic, not {letters!r}")
    if is_ephemeral(letters):
        raise ValueError("dead_letters must not be an ephemeral topic: it would not keep them")
    return policy


_CHOICES: Final = {"count": ("failures", "deliveries"), "expired": ("dead_letters", "drop")}
_BOUNDS: Final = {
    "retry_delay": (0.0, MAX_DELAY_S),
    "retry_factor": (1.0, 1000.0),
    "max_retry_delay": (0.0, MAX_DELAY_S),
    "retry_jitter": (0.0, 1.0),
    "expire_after": (0.0, MAX_DELAY_S),
}


DURATIONS: Final = ("retry_delay", "max_retry_delay", "expire_after")
"""Fields that may also be texts such as `5m`."""


def _checked(name: str, value: Any) -> Any:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ValueError(f"{name} must be {' or '.join(map(repr, _CHOICES[name]))}, not {value!r}")
    elif name == "dead_letters":
        if type(value) is not str:
            raise ValueError(f"dead_letters must be the name of a topic, not {value!r}")
    elif name == "max_attempts":
        if type(value) is not int or not 0 <= value <= 65_535:
            raise ValueError(f"max_attempts must be a whole number from 0 to 65535, not {value!r}")
    else:
        low, high = _BOUNDS[name]
        found = _seconds(name, value) if name in DURATIONS and type(value) is str else value
        if type(found) not in (int, float) or not low <= found <= high:
            raise ValueError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
        return found
    return value


def _seconds(name: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        raise ValueError(f"{name} must be seconds, or a duration such as '5m', not {text!r}") from None
