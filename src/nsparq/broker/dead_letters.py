"""Dead letters of a channel: messages that its delivery policy has given up.

A letter is the message as it was, with its origin as headers; see nsparq.dead_letter.

A dead letter is appended to its topic and the message is finished as one. While the letter is
being written, the message stays among the unfinished ones. A crash between the two would write the
letter twice, so each checkpoint of the channel has a position in the dead-letter topic: the channel
knows of all its letters before that. After a crash, or a stop while letters wait for an fsync, nsqd
reads the letters from there on, and counts their messages as finished.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from nsparq.broker.cold_reads import cannot_read
from nsparq.broker.letters import decode_letter
from nsparq.broker.tagged import DEAD_LETTERS, tagged_messages
from nsparq.dead_letter import ORIGIN_HEADERS, PREFIX, DeadLetter
from nsparq.errors import Exiting, StorageError
from nsparq.headers import decode_headers, encode_headers
from nsparq.packed import PackedBodies
from nsparq.storage.batch import Batch
from nsparq.storage.number_ranges import NumberRanges
from nsparq.storage.segment import Cold
from nsparq.storage.state_files import ChannelState

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

MAX_LETTERS: Final = 500
MAX_BYTES: Final = 1 << 20
"""Limits on what one channel writes at a time; a larger letter is written alone."""
MAX_BEHIND: Final = 1 << 20
"""After so many letters of a topic, all channels that may have letters there write a checkpoint,
idle ones, too. A start after a crash reads letters since the oldest of these checkpoints, about two
seconds for a million."""


class GivenUp(NamedTuple):
    """A message that is about to become a dead letter."""

    attempts: int
    reason: str
    client: str
    """Address of the client that had it last."""


class DeadLetters:
    """Writes the dead letters of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.count = 0
        """Dead letters written since the start."""
        self._writing: dict[int, GivenUp] = {}
        """Messages whose letters are appended and wait for an fsync."""
        self._topic: Topic | None = None
        """The topic of the last letters."""
        self._start = self._end = 0
        """Positions there before and after the last letters."""
        self.noted = ""
        """The dead-letter topic in the state on disk: the only one in which a start looks for
        letters of the channel."""
        self._holding: set[Topic] = set()
        """Topics that keep letters for us until a checkpoint has settled them."""
        self.redriven: dict[str, NumberRanges] = {}
        """Letters that were put back into the channel: see ChannelState."""

    def add(self, sequence: int, given_up: GivenUp) -> None:
        """The policy gives a message up."""
        self._channel.unfinished.given_up[sequence] = given_up
        self._channel.topic.broker.next_turn.add_channel(self._channel)

    def write(self) -> None:
        """Append the letters of messages that were given up, and finish the messages."""
        channel, given_up = self._channel, self._channel.unfinished.given_up
        broker, policy = channel.topic.broker, channel.retries.policy
        if self._writing:
            return
        if policy is None:
            # It was removed meanwhile. The messages are sent again.
            for sequence, one in [*given_up.items()]:
                del given_up[sequence]
                channel.unfinished.requeue((sequence,), one.attempts)
            return
        letters = self._letters()
        if not letters:
            return
        name = policy.dead_letter_topic(channel.topic.name)
        source = f"dead letters {channel}"
        try:
            topic = self._find_topic(name)
            if name != self.noted:
                # The policy has changed while earlier letters waited for an fsync.
                channel.topic.save_channel(channel)
            topic.publishing.flush()
            start = topic.log.end
            bodies = PackedBodies.of([body for body, _ in letters.values()])
            blocks = PackedBodies.of([block for _, block in letters.values()])
            topic.publishing.append_tagged(bodies.with_blocks(blocks), 0, DEAD_LETTERS)
        except (StorageError, Exiting, OSError) as error:
            broker.health.set(f"{channel}: cannot write dead letters to {name}: {error}", source)
            broker.upkeep.retry(channel)
            return
        self._writing = {sequence: given_up[sequence] for sequence in letters}
        self._topic, self._start, self._end = topic, start, topic.log.end
        if channel.is_durable:
            self.hold(topic, start)
        if start // MAX_BEHIND != topic.log.end // MAX_BEHIND:
            _mark_changed(broker, name)
        topic.publishing.when_committed(lambda error: self._written(name, error))

    def _letters(self) -> dict[int, tuple[bytes, bytes]]:
        """The next letters to write, by sequence number: body and header block."""
        channel, unfinished = self._channel, self._channel.unfinished
        broker = channel.topic.broker
        letters: dict[int, tuple[bytes, bytes]] = {}
        size = 0
        for sequence, given_up in islice([*unfinished.given_up.items()], MAX_LETTERS):
            try:
                found = channel.delivery.find(sequence)
            except (Cold, OSError) as error:
                if not letters:
                    cannot_read(channel, error)
                break
            if found is None:
                channel.lost_to_damage(sequence)
                del unfinished.given_up[sequence]
                continue
            batch, index = found
            origin = DeadLetter(
                topic=channel.topic.name,
                channel=channel.name,
                id=f"{channel.topic.first_id + sequence:016x}",
                timestamp_ns=batch.timestamp_of(index),
                attempts=given_up.attempts,
                error=given_up.reason,
                client=given_up.client,
                given_up_ns=broker.wall_ns(),
            )
            body, block = _without_origin(batch.only(index))
            block += encode_headers(origin.origin_headers())
            size += len(body) + len(block)
            if letters and size > MAX_BYTES:
                break
            letters[sequence] = body, block
        return letters

    def _find_topic(self, name: str) -> Topic:
        """The dead-letter topic. A new one is as durable as the channel's own."""
        broker, durability = self._channel.topic.broker, self._channel.topic.settings.durability
        is_new = name not in broker.topics
        topic = broker.get_topic(name)
        if is_new and durability is not None:
            topic.change_settings({"durability": durability})
        return topic

    def _written(self, name: str, error: Exception | None) -> None:
        channel, broker = self._channel, self._channel.topic.broker
        if channel.is_exiting:
            # It was deleted, or nsqd stops: then its state says that letters are pending.
            return
        written, self._writing = self._writing, {}
        source = f"dead letters {channel}"
        if error is not None:
            # The letters may be there or not. Write them again: twice is better than never.
            broker.health.set(f"{channel}: cannot write dead letters to {name}: {error}", source)
            broker.upkeep.retry(channel)
            return
        broker.health.set(None, source)
        given_up = channel.unfinished.given_up
        for sequence, one in written.items():
            # A seek may have begun the message anew meanwhile.
            if given_up.get(sequence) is one:
                del given_up[sequence]
                channel.unfinished.forget(sequence)
        self.count += len(written)
        channel.mark_changed()
        if given_up or channel.retries.expires:
            broker.next_turn.add_channel(channel)

    # checkpoints

    def hold(self, topic: Topic, start: int) -> None:
        """Have a topic keep its letters from `start` on until a checkpoint has settled them."""
        self._holding.add(topic)
        topic.holds.setdefault(self, start)

    def note_in(self, state: ChannelState, *, is_anew: bool) -> None:
        """Note in a state of the channel which letters were put back, and up to where it knows of
        its letters. After a seek (`is_anew`) it has nothing to do with the letters so far: their
        messages are finished, or are to be delivered again."""
        state.redriven = self.redriven.copy()
        policy, broker = self._channel.retries.policy, self._channel.topic.broker
        given_up = self._channel.unfinished.given_up
        is_pending = any(given_up.get(sequence) is one for sequence, one in self._writing.items())
        if is_pending and not is_anew and self._topic is not None:
            state.letters_topic, state.letters_position = self._topic.name, self._start
            state.are_letters_pending = True
        elif policy is not None:
            state.letters_topic = policy.dead_letter_topic(self._channel.topic.name)
            topic = broker.topics.get(state.letters_topic)
            state.letters_position = topic.log.end if topic is not None else 0

    def state_written(self, state: ChannelState) -> None:
        """A state is on disk: the dead-letter topic need not keep what lies before its position. A
        topic that the state does not name has no letters that the state does not know, because
        the first letter in another topic comes after a state that names it."""
        self.noted = state.letters_topic
        for topic in [*self._holding]:
            if topic.name == state.letters_topic and state.letters_position < self._end:
                topic.holds[self] = max(topic.holds[self], state.letters_position)
            else:
                self._release(topic)

    def files_removed(self) -> None:
        """The channel was deleted, and its state: no start will look for its letters."""
        for topic in [*self._holding]:
            self._release(topic)

    def _release(self, topic: Topic) -> None:
        self._holding.remove(topic)
        del topic.holds[self]


def _mark_changed(broker: Broker, name: str) -> None:
    """Have all channels write a checkpoint whose dead letters go to a topic."""
    for topic in broker.topics.values():
        for channel in topic.channels.values():
            policy = channel.retries.policy
            if policy is not None and policy.dead_letter_topic(topic.name) == name:
                channel.mark_changed()


def _without_origin(message: Batch) -> tuple[bytes, bytes]:
    """Body and header block of a message that becomes a letter. If it is a letter already, all that
    it says becomes the body, so that the new origin does not replace the old one. Other headers
    with names of an origin are left out: each name may occur once."""
    if message.headers is None:
        return message.data, b""
    if PREFIX.encode() not in message.headers.data:
        return message.data, message.headers.data
    headers = decode_headers(message.headers.data)
    letter = DeadLetter.from_message(message.data, headers) if ORIGIN_HEADERS[0] in headers else None
    if letter is not None:
        return letter.to_json(), b""
    own = {name: value for name, value in headers.items() if name not in ORIGIN_HEADERS}
    return message.data, encode_headers(own)


def settle(broker: Broker) -> None:
    """At the start: finish the messages whose dead letters the last run wrote. The topics must be
    loaded."""
    channels: dict[str, list[Channel]] = defaultdict(list)
    for topic in broker.topics.values():
        for channel in topic.channels.values():
            name, _ = channel.checkpoint.letters_seen
            if name in broker.topics:
                channels[name].append(channel)
    for name, some in channels.items():
        log = broker.topics[name].log
        for channel in some:
            channel.dead_letters.hold(broker.topics[name], channel.checkpoint.letters_seen[1])
        # Letters that no checkpoint has settled have not left the disk.
        since = max(log.archived_end, min(channel.checkpoint.letters_seen[1] for channel in some))
        by_origin = {(channel.topic.name, channel.name): channel for channel in some}
        written: dict[Channel, set[int]] = defaultdict(set)
        for number, body, block in tagged_messages(log, DEAD_LETTERS, since):
            letter = decode_letter(number, body, block)
            origin = by_origin.get(letter.origin) if letter is not None else None
            # Before its own position a channel knows of its letters. Messages from there may be
            # unfinished again: after a seek, or because they were put back.
            if letter is not None and origin is not None and number >= origin.checkpoint.letters_seen[1]:
                written[origin].add(letter.sequence)
        for channel in some:
            channel.finish_settled(written[channel])
