"""What ends a query. The texts are for whoever runs it: they name the option that helps."""

from __future__ import annotations

from nsparq.errors import NsparqError
from nsparq.version import __version__

__all__ = ["ChannelOwned", "DataLoss", "NoAnswer", "NoLog", "SparkTooOld"]


class ChannelOwned(NsparqError):
    """The channel is another query's."""

    retry_helps = False

    def __init__(self, topic: str, channel: str, node: str, owner: str, since: str) -> None:
        super().__init__(
            f"the channel {channel} of topic {topic} on {node} belongs to another query, {owner}, since "
            f"{since}. nsqd removes what a channel has passed, so each query needs a channel of its own: set "
            "the option channel to another name. If the other query is gone for good, release its channel: "
            f"POST http://{node}/channel/release?topic={topic}&channel={channel}"
        )


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


class SparkTooOld(NsparqError):
    """A Spark whose data sources cannot do what a stream needs."""

    retry_helps = False

    def __init__(self, version: str) -> None:
        super().__init__(
            f"Spark {version} cannot read a topic as a stream, and so cannot run pipelines: that needs Spark "
            "4.2 or newer. With this one, topics can be read as tables, and written as tables and streams"
        )
