"""Notices messages that disappeared before the query read them, and decides what follows.

With option failOnDataLoss the query fails with DataLoss; otherwise the loss is logged, once. Losses
are judged before a channel is moved or created: otherwise the next start would find everything in
order, and continue.
"""

from __future__ import annotations

import logging

from nsparq.spark.cluster.api import LogStatus, Positions
from nsparq.spark.errors import DataLoss
from nsparq.spark.options import NsqOptions
from nsparq.spark.source.channels import Channels
from nsparq.spark.source.peers import Log
from nsparq.spark.source.plan import begins_epoch
from nsparq.spark.source.positions import Place

__all__ = ["Losses"]

logger = logging.getLogger(__name__)


class Losses:
    """What the driver knows about the ends of all logs, and about messages that are gone."""

    def __init__(self, options: NsqOptions, channels: Channels) -> None:
        self._options = options
        self._channels = channels
        self.ends: dict[Log, Place] = {}
        """The end of each log at the last poll, by the node's name at that time."""
        self._logged: set[str] = set()

    def warn_once(self, text: str, level: int = logging.WARNING) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.log(level, "%s", text)

    def _report(self, what: str) -> None:
        """Raises DataLoss, unless the options allow the loss."""
        if self._options.fail_on_data_loss:
            raise DataLoss(what)
        self.warn_once(f"{what}; the query continues without them", logging.ERROR)

    def note_deleted(self, log: Log, place: Place) -> None:
        """The node answers and no longer has the topic. Raises DataLoss."""
        self._note_gone(log, place, "has been deleted")
        self.ends.pop(log, None)

    def note_replaced(self, log: Log, place: Place) -> None:
        """The topic has another log now. Raises DataLoss."""
        self._note_gone(log, place, "has been deleted and created again")

    def _note_gone(self, log: Log, place: Place, happened: str) -> None:
        self._channels.forget(log)
        what = f"topic {log[0]} on {log[1]} {happened}"
        end = self.ends.get(log)
        if end is None or end.incarnation != place.incarnation:
            self._report(f"{what}, perhaps with unread messages from {place.sequence} on")
        elif end.sequence > place.sequence:
            self._report(f"{what} with up to {end.sequence - place.sequence} unread messages")
        else:
            logger.warning("%s; all its messages had been read", what)

    def note_rollback(self, log: Log, place: Place, positions: Positions) -> Place:
        """The log was restored from an older copy. Returns its end. Raises DataLoss."""
        self._report(
            f"topic {log[0]} on {log[1]} ends at {positions.latest}, but the query has read it up to "
            f"{place.sequence}"
        )
        return place._replace(sequence=positions.latest)

    def readable_from(self, log: Log, place: Place, status: LogStatus) -> int:
        """The query's place, or the beginning of the log if that is later. Raises DataLoss."""
        assert status.positions is not None
        earliest = status.positions.earliest
        if place.sequence < earliest:
            self.note_removed(log, place.sequence, earliest, status)
        return max(place.sequence, earliest)

    def note_removed(self, log: Log, start: int, earliest: int, status: LogStatus) -> None:
        """The log begins after the query's place. Raises DataLoss.

        It is no loss if nsqd continued there after a crash and a channel has kept all unread
        messages: then the query had read everything before.
        """
        if not (self.is_held(log, status) and begins_epoch(earliest)):
            self._report(
                f"topic {log[0]} on {log[1]}: up to {earliest - start} messages from {start} on were removed "
                "before they were read"
            )

    def is_held(self, log: Log, status: LogStatus | None) -> bool:
        """Whether a channel of the query keeps unread messages from being removed."""
        if self._options.channel is None:
            return False
        return status is None or (status.has_channel and self._channels.is_ours(log, status.owner))
