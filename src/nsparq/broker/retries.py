"""A channel's delivery policy at work: after a failed attempt, a message is sent again at once,
sent again later, or given up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.cold_reads import cannot_read
from nsparq.broker.dead_letters import GivenUp
from nsparq.broker.runs import Run
from nsparq.delivery_policy import DeliveryPolicy, Failure, parse_policy
from nsparq.storage.segment import Cold

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

MAX_EXPIRED: Final = 1000
"""Expired messages that wait to become dead letters at a time."""
MAX_FAILURES: Final = 65_535
"""Failed attempts that are counted: a checkpoint has two bytes for them. No policy allows more,
except without a limit."""
EXPIRY_CHECK_NS: Final = 100_000_000
"""Longest time between two checks of the oldest message of a channel that delivers. A message
behind it is older only if the wall clock was set back."""


class Retries:
    """Decides about the failed attempts of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.own_policy: DeliveryPolicy | None = None
        """The channel's own policy; None if the topic's applies."""
        self.expired_count = 0
        """Messages that were dropped because of their age."""

        self.expires = False
        """Whether messages become too old to be delivered."""
        self.none_expires_before_ns = 0
        """Until then (monotonic) no message at the cursor or behind it expires."""

    @property
    def policy(self) -> DeliveryPolicy | None:
        """The policy in effect."""
        return self.own_policy or self._channel.topic.settings.policy

    def policy_changed(self) -> None:
        """The channel or its topic has got another policy, or none."""
        policy, upkeep = self.policy, self._channel.topic.broker.upkeep
        self.expires = policy is not None and policy.expire_after > 0
        self.none_expires_before_ns = 0
        if self.expires:
            upkeep.expiring.add(self._channel)
        else:
            upkeep.expiring.discard(self._channel)

    def send_again(
        self, run: Run, sequences: list[int], failure: Failure, now_ns: int, delay_ns: int = 0
    ) -> None:
        """Attempts have ended badly. `delay_ns` is the delay that the client asked for."""
        channel, policy = self._channel, self.policy
        if policy is None or not policy.counts(failure) or channel.is_exiting:
            # A stop of nsqd, which ends all connections, is no failure of a client.
            if delay_ns:
                for sequence in sequences:
                    channel.defer(sequence, now_ns + delay_ns, run.attempts)
            else:
                channel.unfinished.requeue(sequences, run.attempts)
            return
        failures = channel.unfinished.failures
        at_once = []
        for sequence in sequences:
            number = failures[sequence] = min(failures.get(sequence, 0) + 1, MAX_FAILURES)
            if self.are_used_up(number):
                channel.dead_letters.add(sequence, GivenUp(run.attempts, failure.value, run.client.address))
            elif wait_ns := delay_ns or policy.delay_ns(number):
                channel.defer(sequence, now_ns + wait_ns, run.attempts)
            else:
                at_once.append(sequence)
        channel.unfinished.requeue(at_once, run.attempts)

    def are_used_up(self, failures: int) -> bool:
        """Whether a message with so many failed attempts is to be given up."""
        policy = self.policy
        return policy is not None and 0 < policy.max_attempts <= failures

    def is_expired(self, timestamp_ns: int) -> bool:
        """Whether a message with this publish time is too old to be delivered."""
        return self._time_left_ns(timestamp_ns) < 0

    def _time_left_ns(self, timestamp_ns: int) -> float:
        policy = self.policy
        if policy is None or not policy.expire_after:
            return math.inf
        return timestamp_ns + policy.expire_after * 1e9 - self._channel.topic.broker.age_ns()

    def expire(self, sequence: int, attempts: int) -> None:
        """A message of the channel is too old. No other part of the channel has it any more."""
        channel, policy = self._channel, self.policy
        assert policy is not None
        if policy.expired == "drop":
            self.expired_count += 1
            channel.unfinished.forget(sequence)
        else:
            channel.dead_letters.add(sequence, GivenUp(attempts, "expired", ""))

    def expire_new(self, stop_ns: int) -> bool:
        """Take messages at the cursor that are too old out of delivery, until `stop_ns` at most.
        False if one may be left there: then this turn must send nothing."""
        channel, cursor, delivery = self._channel, self._channel.cursor, self._channel.delivery
        try:
            while delivery.reading is None:
                batch = delivery.find_batch()
                if batch is None:
                    return True
                left_ns = self._time_left_ns(batch.timestamp_of(cursor.position - batch.base))
                if left_ns >= 0:
                    now_ns = channel.topic.broker.monotonic_ns()
                    self.none_expires_before_ns = now_ns + int(min(left_ns, EXPIRY_CHECK_NS))
                    return True
                if len(channel.unfinished.given_up) >= MAX_EXPIRED:
                    break
                cursor.position += 1
                self.expire(cursor.position - 1, 0)
                channel.mark_changed()
                if channel.topic.broker.monotonic_ns() > stop_ns:
                    channel.topic.broker.next_turn.add_channel(channel)
                    break
        except (Cold, OSError) as error:
            cannot_read(channel, error)
        return False

    # on disk

    def stored(self) -> dict[str, Any] | None:
        return None if self.own_policy is None else self.own_policy.stored()

    def restore(self, stored: Mapping[str, object] | None) -> None:
        try:
            self.own_policy = None if stored is None else parse_policy(stored, self._channel.topic.name)
        except ValueError as error:
            logger.error("%s: its delivery policy is invalid and is not applied: %s", self._channel, error)
        self.policy_changed()


def refuse_cycle(topic: Topic, policy: DeliveryPolicy) -> None:
    """Raises ValueError if dead letters of the topic would come back to it."""
    reached = [policy.dead_letter_topic(topic.name)]
    for name in reached:
        if name == topic.name:
            raise ValueError(f"dead letters of {topic} would come back to it")
        found = topic.broker.topics.get(name)
        if found is None:
            continue
        policies = [found.settings.policy, *(one.retries.own_policy for one in found.channels.values())]
        following = {one.dead_letter_topic(name) for one in policies if one is not None}
        reached += [one for one in following if one not in reached]
