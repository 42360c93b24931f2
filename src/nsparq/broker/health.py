"""Present errors of the daemon, by source. `/ping`, `/stats` and the metrics show them."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Health:
    """The latest error of each source, until the source works again."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.warnings: dict[str, str] = {}
        """Errors that keep nobody from publishing, such as an archive that is away. /ping stays OK,
        because producers must not go elsewhere."""
        self.other: Callable[[], str | None] = lambda: None
        """Another source, which is asked each time."""

    def set(self, error: str | None, source: str = "publish") -> None:
        """Note the error of a source; None if it works again. A source is publishing, or an
        activity and its subject: `sync TOPIC`, `checkpoint TOPIC:CHANNEL`."""
        _note(self.errors, error, source, logging.ERROR)

    def warn(self, error: str | None, source: str) -> None:
        """The same for a warning."""
        _note(self.warnings, error, source, logging.WARNING)

    @property
    def error(self) -> str | None:
        """The oldest error, or None."""
        return next(iter(self.errors.values())) if self.errors else self.other()

    def of_topic(self, topic: str) -> tuple[str | None, list[str]]:
        """The error and the warnings for somebody who may know of this topic alone; all of them if
        the topic is empty."""
        error = self.error
        if not topic:
            return error, [*self.warnings.values()]
        own, warnings = (
            [text for source, text in noted.items() if _is_about(topic, source, text)]
            for noted in (self.errors, self.warnings)
        )
        if error is not None:
            error = own[0] if own else "an error that is not of this topic"
        return error, warnings


def _is_about(topic: str, source: str, text: str) -> bool:
    """An activity names its subject, and an error of publishing begins with its topic."""
    activity, _, subject = source.rpartition(" ")
    return (subject.partition(":")[0] if activity else text.partition(":")[0]) == topic


def _note(noted: dict[str, str], error: str | None, source: str, level: int) -> None:
    known = noted.get(source)
    if error is not None:
        if error != known:
            logger.log(level, "%s", error)
        noted[source] = error
    elif known is not None:
        logger.info("recovered from: %s", known)
        del noted[source]
