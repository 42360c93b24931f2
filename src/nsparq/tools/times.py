"""Times on the command line: `90m` ago, `2d` ago, a date and time, or Unix seconds."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Final

from nsparq.flags import parse_duration

__all__ = ["TIME_HELP", "parse_time"]

TIME_HELP: Final = (
    "how long ago, such as `90m` or `2d`; a time of this time zone, such as `12:30` or `2026-01-31T12:00`; "
    "with a zone, such as `2026-01-31T12:00Z`; or Unix seconds"
)
DAY_S: Final = 86400.0


def parse_time(text: str, now_s: float | None = None) -> float:
    """Unix seconds. Raises ValueError."""
    now_s = time.time() if now_s is None else now_s
    if re.fullmatch(r"[0-9]{9,10}(\.[0-9]+)?", text):
        return float(text)
    if days := re.fullmatch(r"([0-9]+)d(.*)", text):
        return now_s - int(days[1]) * DAY_S - (parse_duration(days[2]) if days[2] else 0)
    try:
        return now_s - abs(parse_duration(text))
    except ValueError:
        pass
    try:
        if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?", text):
            text = f"{datetime.fromtimestamp(now_s):%Y-%m-%d}T{text.rjust(len(text.split(':')) * 3 - 1, '0')}"
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time; write one such as 90m, 2d, 12:30 or 2026-01-31T12:00"
        ) from None
