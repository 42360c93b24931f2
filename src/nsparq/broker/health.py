"""What is wrong with the daemon now, by source. `/ping`, `/stats` and the metrics show it."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Health:
    """The latest error of each source that has not worked since."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}

    def set(self, error: str | None, source: str = "publish") -> None:
        """Note the error of one source, or with None that the source works again. A source is publishing,
        or it is named after what it does and for whom: `sync TOPIC`, `checkpoint TOPIC:CHANNEL`."""
        known = self._errors.get(source)
        if error is not None:
            if error != known:
                logger.error("%s", error)
            self._errors[source] = error
        elif known is not None:
            logger.info("recovered from: %s", known)
            del self._errors[source]

    @property
    def error(self) -> str | None:
        """The oldest error; None when nothing is wrong."""
        return next(iter(self._errors.values())) if self._errors else None
