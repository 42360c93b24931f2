"""Present errors of the daemon, by source. `/ping`, `/stats` and the metrics show them."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Health:
    """The latest error of each source, until the source works again."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.other: Callable[[], str | None] = lambda: None
        """Another source, which is asked each time."""

    def set(self, error: str | None, source: str = "publish") -> None:
        """Note the error of a source; None if it works again. A source is publishing, or an
        activity and its subject: `sync TOPIC`, `checkpoint TOPIC:CHANNEL`."""
        known = self.errors.get(source)
        if error is not None:
            if error != known:
                logger.error("%s", error)
            self.errors[source] = error
        elif known is not None:
            logger.info("recovered from: %s", known)
            del self.errors[source]

    @property
    def error(self) -> str | None:
        """The oldest error, or None."""
        return next(iter(self.errors.values())) if self.errors else self.other()
