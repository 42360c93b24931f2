"""What ends a query in log mode. The texts are for whoever runs it: they name the option that helps."""

from __future__ import annotations

from nsparq.errors import NsparqError
from nsparq.version import __version__

__all__ = ["DataLoss", "NoAnswer", "NoLog"]


class DataLoss(NsparqError):
    """Messages that should be read are not there any more."""

    retry_helps = False

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. To go on without them, set the option failOnDataLoss to false")


class NoAnswer(NsparqError):
    """An nsqd, or everybody, was away for longer than the option retryFor allows."""


class NoLog(NsparqError):
    """An nsqd without the API that log mode needs."""

    retry_helps = False

    def __init__(self, node: str) -> None:
        super().__init__(
            f"the nsqd {node} has no log that can be read: it is NSQ's own, or an nsparq older than "
            f"{__version__}. Set the option mode to queue, or update it"
        )
