"""Errors that end a query. Their texts name the option that helps."""

from __future__ import annotations

from nsparq.errors import NsparqError
from nsparq.version import __version__

__all__ = ["ChannelOwned", "DataLoss", "NoAnswer", "NoLog", "SparkTooOld"]


class ChannelOwned(NsparqError):
    """The channel belongs to another query."""

    retry_helps = False

    def __init__(self, topic: str, channel: str, node: str, owner: str, since: str) -> None:
        super().__init__(
            f"the channel {channel} of topic {topic} on {node} belongs to another query, {owner}, since "
            f"{since}. nsqd removes messages that a channel has passed, so each query needs a channel of its "
            "own: set option channel to another name. If the other query no longer exists, release its "
            f"channel: POST http://{node}/channel/release?topic={topic}&channel={channel}"
        )


class DataLoss(NsparqError):
    """Messages that should be read are gone."""

    retry_helps = False

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. To continue without them, set option failOnDataLoss to false")


class NoAnswer(NsparqError):
    """An nsqd, or all of them, did not answer for longer than option retryFor allows."""


class NoLog(NsparqError):
    """The nsqd does not have the API that log mode needs."""

    retry_helps = False

    def __init__(self, node: str) -> None:
        super().__init__(
            f"the nsqd {node} has no log to read: it is NSQ's own, or older than nsparq {__version__}. Set "
            "option mode to queue, or update this nsqd"
        )


class SparkTooOld(NsparqError):
    """This version of Spark cannot read streams from a Python source as we need it."""

    retry_helps = False

    def __init__(self, version: str) -> None:
        super().__init__(
            f"Spark {version} cannot read a topic as a stream, and so cannot run pipelines: that needs Spark "
            "4.2 or newer. It can read topics as tables, and write both tables and streams"
        )
