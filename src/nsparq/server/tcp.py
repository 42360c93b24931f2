"""The TCP side: one Connection per client, between the event loop and the broker.

Replies leave in the order of their commands. A publish is answered when its topic's append is done, so
anything said after it waits its turn behind it. What is said in one turn of the event loop leaves together: a
write costs more than most of what it tells.

What a client does not read is bounded. Once its socket is full it gets no more messages, but its commands are
heard all the same: a consumer that is busy with one message finishes others. Only when the answers to its
commands pile up too do we stop reading from it, until it catches up. A client that never does is cut off.

IDENTIFY may put transport layers under the conversation, and AUTH may have to be asked for elsewhere: while
that is under way nothing further is read, and what has been read already waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from nsparq.broker.broker import Broker
from nsparq.broker.client import Client
from nsparq.broker.topic import Done, Topic
from nsparq.errors import (
    ClientError,
    Exiting,
    FatalClientError,
    ProtocolError,
    StorageError,
    SubscribeRefused,
)
from nsparq.server.auth import AuthFailed, Grant, Permission
from nsparq.server.lane import JOIN_AFTER, JOIN_LAST, Lane
from nsparq.transport.deflate import DeflateLayer
from nsparq.transport.layers import Layer, LayerError, LayerStack
from nsparq.transport.snappy import SnappyLayer
from nsparq.wire import commands
from nsparq.wire.frames import CLOSE_WAIT, ERROR, HEARTBEAT, OK, RESPONSE, encode_frame
from nsparq.wire.limits import Limits
from nsparq.wire.server import CLOSING, SUBSCRIBED, LineTooLong, ServerProtocol

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

WRITE_HIGH = 256 << 10
"""Bytes waiting to leave at which a client gets no more messages."""
WRITE_LOW = 64 << 10
MAX_UNREAD = 256 << 10
"""Bytes of answers waiting behind those messages at which a client is not read from either."""
MAX_UNANSWERED = 4096
"""Publishes of one connection that may wait for the disk before it is not read from."""
LINGER_S = 5.0
"""How long a closing connection may take to accept its last bytes."""
HANDSHAKE_S = 5.0
"""How long TLS may take to come about."""
DECODE_S = 0.004
"""How long one client's compressed bytes are decoded before the others have their turn."""
UNFINISHED_S = 60.0
"""How long a client without heartbeats may take for one large command: at least this, at most twice this."""
SEND_AT_ONCE = 64 << 10
"""Bytes that are not held back until the end of the turn."""
LARGE_WRITE = 16 << 10
"""Bytes from which on frames are not put together before they are sent."""


class Connection(asyncio.Protocol):
    """One client from accept to end of stream."""

    def __init__(self, nsqd: Nsqd, limits: Limits) -> None:
        self._nsqd = nsqd
        self._broker: Broker = nsqd.broker
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._protocol: ServerProtocol
        self.client: Client
        self._replies: deque[bytes | None] = deque()
        """What is to be sent once the publishes before it are answered; None stands for such a publish."""
        self._timer: asyncio.TimerHandle | None = None
        self._last_command = 0.0
        self._commands_seen = 0
        self._last_heartbeat = 0.0
        self._blocked_since = 0.0
        """When the client stopped taking our bytes; 0 while it does."""
        self._most_unread = 0
        """Bytes that may wait to leave, from then on, while the client is read from."""
        self._is_closing = False
        self._is_ending = False
        """Whether the last word is among the replies: nothing more is heard."""
        self._is_reading = True
        self._layers: LayerStack | None = None
        self._is_confirmed = False
        """Whether the client has been told that the layers are up."""
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._outgoing: list[bytes | memoryview] = []
        """Frames of this turn that are to leave together, through the layers if there are any."""
        self._outgoing_size = 0
        self._descriptor = -1
        self._waiting_for: asyncio.Task[None] | None = None
        """What must be done before anything further is heard from the client."""
        self._again: commands.Command | None = None
        """The command that waits for it."""
        self._commands: Iterator[commands.Command] | None = None
        """Commands received behind it."""
        self._pieces: Iterator[bytes] | None = None
        """What the layers are still to decode."""
        self._is_going_on = False
        """Whether _go_on() is about to be called."""
        self._held: list[bytes] = []
        """Bytes that arrived although we were not reading."""
        self._secret = b""
        self._grant: Grant | None = None
        self._last_topic: Topic | None = None
        """Where the last command, a PUB, went, if the next one may go there without further ado."""
        self._publisher: tuple[Done, str] = (self.published, "PUB")
        self._alone = 0
        """PUBs that came one at a time and went there, without a break."""
        self._join_after = JOIN_AFTER
        self._lane: Lane | None = None
        """Where the client is read from with others who publish one message at a time."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport
        transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        peer = transport.get_extra_info("peername")
        host, address = (peer[0], f"{peer[0]}:{peer[1]}") if isinstance(peer, tuple) else ("", "")
        self._protocol = ServerProtocol(self._limits, host, self._nsqd.unfinished)
        self.client = Client(
            identity=self._protocol.identity,
            address=address,
            send=self._write,
            close=self.close,
            connect_s=self._broker.wall_ns() // 1_000_000_000,
        )
        self._broker.clients.add(self.client)
        self._nsqd.connections.add(self)
        self._last_command = self._last_heartbeat = self._loop.time()
        self._schedule_timer()
        logger.info("TCP: new client(%s)", address)

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._is_ending:
            return
        topic = self._last_topic
        if topic is not None:
            # Another PUB like the last one: all that is said below of a command, in as few steps as possible.
            body = None if topic.is_exiting else self._protocol.receive_again(data)
            if body is not None:
                self._replies.append(None)
                topic.publish_single(body, self._publisher)
                self.client.publish_counts[topic.name] += 1
                self._last_command = self._loop.time()
                self._alone += 1
                if len(self._replies) >= MAX_UNANSWERED:
                    self._adjust_reading()
                elif self._alone >= self._join_after:
                    self._join_lane(topic)
                return
            self._last_topic = None
            self._alone = 0
        if self._waiting_for is not None or self._pieces is not None:
            self._held.append(data)
        elif self._layers is None:
            self._receive(data)
        else:
            self._decode(self._layers.receive(data))

    def _receive(self, data: bytes) -> None:
        """Bytes of the conversation itself, whatever lies under it."""
        protocol = self._protocol
        if data.startswith(b"FIN "):
            spans = protocol.receive_fins(data)
            if spans is not None:
                self._finish(spans)
                self._last_command = self._loop.time()
                return
        publish = protocol.receive_publish(data)
        self._run((publish,) if publish is not None else protocol.receive_data(data))

    def _run(self, received: Iterable[commands.Command]) -> None:
        """Do what the client says, until it is to wait."""
        protocol = self._protocol
        try:
            for command in received:
                _HANDLERS[type(command)](self, command)
                if self._is_ending or self._transport.is_closing():
                    break
                if self._waiting_for is not None:
                    if not isinstance(received, tuple):
                        self._commands = iter(received)
                    break
        except LineTooLong:
            logger.warning("client(%s): line too long", self.client.address)
            self.close()
        except ProtocolError as error:
            self._fail(error)
        except Exception:
            logger.exception("client(%s): internal error", self.client.address)
            self.close()
        if protocol.commands != self._commands_seen:
            self._commands_seen = protocol.commands
            self._last_command = self._loop.time()

    def eof_received(self) -> bool:
        try:
            self._protocol.receive_eof()
        except ProtocolError as error:
            self._fail(error)
        if not self._is_closing and not self._is_ending:
            self._say_goodbye()
        return True

    # layers

    def _upgrade(self) -> None:
        """Put the layers under the conversation that IDENTIFY has agreed on."""
        identity = self.client.identity
        wanted: list[Layer] = []
        if identity.tls:
            self.client.tls = tls = self._nsqd.tls_layer()
            wanted.append(tls)
        if identity.snappy:
            wanted.append(SnappyLayer())
        elif identity.deflate:
            wanted.append(DeflateLayer(identity.deflate_level))
        if not wanted:
            return
        if self._layers is not None or self._replies:
            reason = "publishes are unanswered" if self._replies else "the layers are up already"
            raise FatalClientError("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}")
        self.flush()
        self._layers = LayerStack(wanted)
        if identity.tls:
            self._handshake_timer = self._loop.call_later(HANDSHAKE_S, self._check_handshake)
        else:
            self._confirm()
        # A client that did not wait for our answer has sent bytes of the new layer already.
        rest = self._protocol.take_rest()
        if rest:
            self._decode(self._layers.receive(rest))

    def _check_handshake(self) -> None:
        if not self._is_confirmed and not self._is_closing and self._layers is not None:
            self._layer_failed(LayerError("TLS handshake timed out"))

    def _confirm(self) -> None:
        """One OK for each layer, inside it."""
        layers = self._layers
        assert layers is not None
        self._is_confirmed = True
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        self._protocol.tls_active = self.client.tls is not None
        self._transport.write(layers.confirm(OK))

    def _decode(self, pieces: Iterator[bytes]) -> None:
        """Take in what the layers make of the bytes received, a bounded part of it at a time."""
        layers = self._layers
        assert layers is not None
        self._pieces = pieces
        # Not the loop's clock: that one stands still within a turn.
        stop = time.monotonic() + DECODE_S
        try:
            for piece in pieces:
                if not self._is_confirmed:
                    self._confirm()
                self._receive(piece)
                if self._is_closing or self._is_ending:
                    return
                if not self._may_hear or time.monotonic() > stop:
                    self._adjust_reading()
                    return
        except LayerError as error:
            self._layer_failed(error)
            return
        self._pieces = None
        output = layers.take_output()
        if output:
            self._transport.write(output)
        if layers.is_established and not self._is_confirmed:
            self._confirm()
        if layers.is_ended and not self._is_closing:
            self.eof_received()

    def _say_goodbye(self) -> None:
        """Close as soon as every publish has its answer."""
        if self._replies:
            self._broker.turn()
        if self._replies:
            self._is_ending = True
        else:
            self.close()

    def _layer_failed(self, error: LayerError) -> None:
        logger.info("client(%s): %s", self.client.address, error)
        layers, was_up = self._layers, self._is_confirmed
        assert layers is not None
        self._transport.write(layers.take_output())
        if not was_up:
            self._layers = None
            reason = f"IDENTIFY failed {error.reason}"
            self._write(encode_frame(ERROR, f"E_IDENTIFY_FAILED {reason}".encode("utf-8", "replace")))
        self._pieces = None
        self.close()

    def _write(self, data: bytes | memoryview) -> None:
        if self._lane is not None:
            self.leave_lane()
        if not self._outgoing:
            if len(data) >= SEND_AT_ONCE and self._layers is None:
                self._nsqd.answer()
                self._transport.write(data)
                return
            self._nsqd.flush_later(self)
        self._outgoing.append(data)
        self._outgoing_size += len(data)
        if self._outgoing_size >= SEND_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Send what was said in this turn as one piece. Nothing leaves before the layers are up."""
        self._nsqd.answer()
        outgoing, layers = self._outgoing, self._layers
        if not outgoing or (layers is not None and not self._is_confirmed):
            return
        size = self._outgoing_size
        self._outgoing, self._outgoing_size = [], 0
        try:
            if layers is not None:
                self._transport.write(layers.send(_joined(outgoing)))
            elif size >= LARGE_WRITE:
                # Copying them would cost more than a write of several pieces.
                self._transport.writelines(outgoing)
            else:
                self._transport.write(_joined(outgoing))
        except LayerError as error:
            self._layer_failed(error)
        if self._blocked_since:
            self._adjust_reading()

    @property
    def descriptor(self) -> int:
        """Where bytes may be written that nothing is ahead of; -1 if there is no such place."""
        if self._is_closing or self._transport.is_closing() or self._transport.get_write_buffer_size():
            return -1
        if self._descriptor < 0:
            self._descriptor = self._transport.get_extra_info("socket").fileno()
        return self._descriptor

    def say_ok(self, sent: int, count: int = 1) -> None:
        """Say the rest of one or several OKs, of which so many bytes have been written already."""
        self.leave_lane()
        if not self._is_closing:
            self._transport.write((OK * count)[sent:])
            if self._blocked_since:
                self._adjust_reading()

    # in company

    def _join_lane(self, topic: Topic) -> None:
        """Have the lane read from the client, if there is one and nothing is in its way."""
        self._alone = 0
        is_simple = self.client.channel is None and self._is_reading and not self._outgoing and not self._held
        descriptor = self.descriptor if is_simple else -1
        if descriptor < 0 or not self._protocol.ends_with_publish(topic.name):
            return
        self._lane = self._nsqd.lanes.join(topic, self, descriptor)
        if self._lane is not None:
            self._transport.pause_reading()

    def leave_lane(self) -> None:
        """Be read from by the event loop again, as everybody who does not just publish one message at a time.
        Next time that takes longer to believe."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        self._replies.extend((None,) * lane.leave(self, self._descriptor))
        self._join_after = min(2 * self._join_after, JOIN_LAST)
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def hear(self, data: bytes) -> None:
        """The lane has read something that it leaves to us; nothing, if that was the end or an error, which
        we shall meet again."""
        self.leave_lane()
        if data:
            self.data_received(data)

    def note_publish(self, topic_name: str, now: float) -> None:
        """The lane has read a PUB of the client."""
        self.client.publish_counts[topic_name] += 1
        self._last_command = now

    # waiting

    def _wait_for(self, work: Awaitable[None], command: commands.Command | None) -> None:
        """Hear nothing further from the client until `work` is done; then do `command` (again)."""

        async def run() -> None:
            try:
                await work
            except ProtocolError as error:
                self._again = None
                self._fail(error)
            except Exception:
                logger.exception("client(%s): internal error", self.client.address)
                self._again = None
                self.close()
            self._waiting_for = None
            if not self._is_closing and not self._is_ending:
                self._go_on()

        self._again = command
        self._waiting_for = asyncio.ensure_future(run())
        self._adjust_reading()

    def _go_on(self) -> None:
        """Take up what had to wait: the command, those behind it, bytes half decoded, bytes not looked at."""
        self._is_going_on = False
        if self._is_closing or self._is_ending:
            return
        again, self._again = self._again, None
        if again is not None:
            self._run((again,))
        if self._commands is not None and self._may_hear:
            received, self._commands = self._commands, None
            self._run(received)
        if self._pieces is not None and self._may_hear:
            self._decode(self._pieces)
        while self._held and self._pieces is None and self._may_hear:
            self.data_received(self._held.pop(0))
        self._adjust_reading()

    @property
    def _may_hear(self) -> bool:
        """Whether the client's next words can be dealt with: it reads our answers, does not publish faster
        than the disk takes it, and waits for nothing."""
        return (
            (self.client.is_writable or self._transport.get_write_buffer_size() < self._most_unread)
            and len(self._replies) < MAX_UNANSWERED
            and self._waiting_for is None
            and not self._is_closing
            and not self._is_ending
        )

    def pause_writing(self) -> None:
        self.client.is_writable = False
        self._blocked_since = self._loop.time()
        # Messages come no more, so what comes on top of this are answers.
        self._most_unread = self._transport.get_write_buffer_size() + MAX_UNREAD

    def resume_writing(self) -> None:
        self.client.is_writable = True
        self._blocked_since = 0.0
        self._adjust_reading()
        if self.client.channel is not None:
            self.client.channel.offer(self.client)

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave_lane()
        self._is_closing = True
        self._nsqd.connection_ended(self)
        self._broker.clients.discard(self.client)
        if self.client.channel is not None:
            self.client.channel.remove_client(self.client)
        self._release()
        logger.info("client(%s): disconnected", self.client.address)

    def _release(self) -> None:
        """Drop the buffers, and break every reference cycle. The garbage collector hardly ever runs in nsqd,
        so a cycle would keep this connection, with everything that it has received."""
        for handle in (self._timer, self._handshake_timer, self._waiting_for):
            if handle is not None:
                handle.cancel()
        self._timer = self._handshake_timer = self._waiting_for = None
        self._protocol.discard()
        self._layers = self._pieces = self._commands = self._again = self.client.tls = None
        self._last_topic = None
        self._publisher = (_unheard, "PUB")
        self._replies.clear()
        self._held.clear()
        self._outgoing.clear()
        self.client.send, self.client.close = _nowhere, _nothing

    # sending

    def _reply(self, frame: bytes) -> None:
        if self._replies:
            self._replies.append(frame)
        else:
            self._write(frame)

    def _all_published(self, count: int, verb: str, error: Exception | None) -> None:
        """So many of the oldest unanswered publishes are done."""
        replies = self._replies
        if error is None and not self._is_closing:
            if verb == "MPUB" and len(replies) == count and not self._outgoing and self._layers is None:
                # All that it has sent is stored: it may prepare the next ones while we are at the channels.
                # Single ones wait for the end of the turn; answered here, they came back in smaller groups.
                replies.clear()
                self._nsqd.answer_now(self, count)
                if self._is_ending:
                    self.close()
                elif not self._is_reading:
                    self._adjust_reading()
                return
            for _ in range(count - 1):
                replies.popleft()
            self._write(OK * (count - 1))
        self.published(verb, error)

    def published(self, verb: str, error: Exception | None) -> None:
        """The oldest unanswered publish is done."""
        if self._is_closing:
            return
        replies = self._replies
        if error is None:
            replies.popleft()
            if replies or self._outgoing or self._layers is not None:
                self._write(OK)
            else:
                self._nsqd.answer_later(self)
            while replies and replies[0] is not None:
                self._write(replies.popleft())  # type: ignore[arg-type]  # just seen not to be None
            if self._is_ending and not replies:
                self.close()
            elif not self._is_reading:
                self._adjust_reading()
        else:
            replies.clear()
            self._fail(FatalClientError(f"E_{verb}_FAILED", f"{verb} failed {_reason(error)}"))

    def _fail(self, error: ProtocolError) -> None:
        """Answer with an error; a fatal one ends the conversation, after the answers that come before it."""
        level = logging.INFO if error.fatal else logging.DEBUG
        logger.log(level, "client(%s): %s", self.client.address, error.shown)
        frame = encode_frame(ERROR, str(error).encode("utf-8", "surrogateescape"))
        if not error.fatal:
            self._reply(frame)
            return
        self._protocol.discard()
        if self._replies:
            # Publishes are still to be answered: have them appended now.
            self._broker.turn()
        if self._replies:
            # They wait for the disk. Their answers go first, then this one, then the connection.
            self._replies.append(frame)
            self._is_ending = True
            return
        self._write(frame)
        self.close()

    def close(self) -> None:
        """End the connection after what is written has left, or after a while all the same."""
        if self._is_closing:
            return
        self._nsqd.answer()
        self.leave_lane()
        self._is_closing = True
        self._protocol.discard()
        if self.client.channel is not None:
            self.client.channel.remove_client(self.client)
        self.flush()
        if self._layers is not None:
            self._layers.close()
            self._transport.write(self._layers.take_output())
        self._transport.close()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)

    def _adjust_reading(self) -> None:
        """Stop reading from a client that cannot be heard now, or of which enough is waiting already; have
        that looked at once it can be heard."""
        may_hear = self._may_hear
        if may_hear and (self._pieces is not None or self._commands is not None or self._held):
            if not self._is_going_on:
                self._is_going_on = True
                self._loop.call_soon(self._go_on)
            may_hear = False
        wanted = may_hear
        if wanted == self._is_reading or self._is_closing:
            return
        self.leave_lane()
        self._is_reading = wanted
        if wanted:
            # It was not silent, it was not listened to.
            self._last_command = self._loop.time()
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # time

    def _schedule_timer(self) -> None:
        """One timer serves the heartbeat, the read deadline and the write deadline. Without heartbeats it
        serves only the deadline of a command that takes up shared room."""
        interval = self._protocol.identity.heartbeat_ms / 1000
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_closing:
            return
        if interval:
            due = min(self._last_heartbeat + interval, self._last_command + 2 * interval)
            self._timer = self._loop.call_at(due, self._on_timer, interval)
        else:
            unfinished = self._protocol.unfinished_command
            self._timer = self._loop.call_later(UNFINISHED_S, self._check_progress, unfinished)

    def _check_progress(self, unfinished: int | None) -> None:
        """Close the connection if the command that was unfinished at the last check still is."""
        if self._is_reading and unfinished is not None and self._protocol.unfinished_command == unfinished:
            logger.warning(
                "client(%s): did not finish a command for %.0f s; closing", self.client.address, UNFINISHED_S
            )
            self._abort()
        else:
            self._schedule_timer()

    def _on_timer(self, interval: float) -> None:
        now = self._loop.time()
        self._timer = None
        if self._blocked_since and now - self._blocked_since >= interval:
            logger.warning("client(%s): does not read; closing", self.client.address)
            self._abort()
            return
        if self._is_reading and now - self._last_command >= 2 * interval:
            logger.warning("client(%s): said nothing for %.0f s; closing", self.client.address, 2 * interval)
            self._abort()
            return
        if now - self._last_heartbeat >= interval:
            self._last_heartbeat = now
            if not self._blocked_since and (self._layers is None or self._is_confirmed):
                self._reply(HEARTBEAT)
        self._schedule_timer()

    def _abort(self) -> None:
        self.leave_lane()
        self._is_closing = True
        self._transport.abort()

    # commands

    def _on_identify(self, command: commands.Identify) -> None:
        self.client.identity = command.identity
        self._last_heartbeat = self._last_command = self._loop.time()
        self._schedule_timer()
        if self._replies:
            self._broker.turn()
        self._reply(encode_frame(RESPONSE, command.identity.reply(self._limits)))
        self._upgrade()

    def _on_auth(self, command: commands.Auth) -> None:
        if self._grant is not None:
            raise FatalClientError("E_INVALID", "AUTH already set")
        if self._nsqd.authenticator is None:
            raise FatalClientError("E_AUTH_DISABLED", "AUTH disabled")
        self._secret = command.secret
        self._wait_for(self._authenticate(answer=True), None)

    async def _authenticate(self, *, answer: bool = False) -> None:
        """Have the client's secret looked at, for the first time or because what it grants has expired."""
        authenticator, tls = self._nsqd.authenticator, self.client.tls
        assert authenticator is not None
        try:
            grant = await authenticator.authenticate(
                self._secret,
                remote_ip=self.client.address.rpartition(":")[0],
                tls=tls is not None,
                common_name=tls.common_name if tls else "",
            )
        except AuthFailed as error:
            logger.warning("client(%s): AUTH failed: %s", self.client.address, error)
            raise FatalClientError("E_AUTH_FAILED", "AUTH failed") from error
        if not grant.authorizations and answer:
            raise FatalClientError("E_UNAUTHORIZED", "AUTH no authorizations found")
        self._grant = self.client.grant = grant
        if answer:
            self._reply(encode_frame(RESPONSE, grant.reply()))

    def _may(self, command: commands.Command, verb: str, topic: str, channel: str) -> bool:
        """Whether the client may do this. False when that is being asked: the command will come again.
        Raises what an answer of no is."""
        if self._nsqd.authenticator is None:
            return True
        if self._has_expired_grant:
            self._wait_for(self._authenticate(), command)
            return False
        self._require_permission(verb, topic, channel)
        return True

    @property
    def _has_expired_grant(self) -> bool:
        return self._grant is not None and self._grant.is_expired(self._loop.time())

    def _require_permission(self, verb: str, topic: str, channel: str) -> None:
        """Raise the error for a client that may not do this: by its grant, or as anybody without a secret."""
        authenticator = self._nsqd.authenticator
        assert authenticator is not None
        grant = self._grant or authenticator.anonymous
        if grant is None:
            raise FatalClientError("E_AUTH_FIRST", f"AUTH required before {verb}")
        permission = Permission.SUBSCRIBE if verb == "SUB" else Permission.PUBLISH
        if not grant.allows(permission, topic, channel):
            raise FatalClientError("E_UNAUTHORIZED", f'AUTH failed for {verb} on "{topic}" "{channel}"')

    async def recheck(self) -> None:
        """The policy has changed: end the subscription that it no longer allows. Publishers are checked with
        each publish."""
        channel = self.client.channel
        if channel is None:
            return
        try:
            if self._has_expired_grant:
                await self._authenticate()
            self._require_permission("SUB", channel.topic.name, channel.name)
        except FatalClientError as error:
            if not self._is_closing:
                self._fail(error)

    def _on_subscribe(self, command: commands.Subscribe) -> None:
        if not self._may(command, "SUB", command.topic, command.channel):
            return
        try:
            self._broker.subscribe(self.client, command.topic, command.channel)
        except (Exiting, SubscribeRefused, OSError) as error:
            raise FatalClientError("E_SUB_FAILED", f"SUB failed {_reason(error)}") from error
        self.client.state = SUBSCRIBED
        channel = self.client.channel
        if channel is None or self._broker.is_durable(channel.topic):
            self._reply(OK)
        else:
            self._wait_for(self._confirm_subscription(channel.topic), None)

    async def _confirm_subscription(self, topic: Topic) -> None:
        """The channel may be new: with fsync the disk has it before the client is told."""
        try:
            await self._nsqd.durable(topic)
        except OSError as error:
            raise FatalClientError("E_SUB_FAILED", f"SUB failed {_reason(error)}") from error
        self._reply(OK)

    def _on_publish(self, command: commands.Publish) -> None:
        verb = command.verb
        if self._nsqd.authenticator is not None and not self._may(command, verb, command.topic, ""):
            return
        count = len(command.counts) or 1
        self._replies.extend((None,) * count)
        try:
            self._broker.publish(
                command.topic,
                command.bodies,
                command.defer_ms,
                self.published if count == 1 else partial(self._all_published, count),
                verb,
                has_company=self._protocol.has_more,
            )
        except (Exiting, StorageError, OSError) as error:
            for _ in range(count):
                self._replies.pop()
            raise FatalClientError(f"E_{verb}_FAILED", f"{verb} failed {_reason(error)}") from error
        self.client.publish_counts[command.topic] += len(command.bodies)
        if not self._replies:
            # It was appended at once, so that the client can go on while we serve the others.
            self._nsqd.answer()
        if verb == "PUB" and self._layers is None and self._nsqd.authenticator is None:
            self._last_topic = self._broker.topics.get(command.topic)
        if len(self._replies) >= MAX_UNANSWERED:
            self._adjust_reading()

    def _on_ready(self, command: commands.Ready) -> None:
        channel = self.client.channel
        if channel is not None:
            channel.set_ready(self.client, command.count)

    def _on_finish(self, command: commands.Finish) -> None:
        self._finish(command.spans)

    def _finish(self, spans: list[tuple[int, int]]) -> None:
        channel = self.client.channel
        if channel is not None:
            for error in channel.finish(self.client, spans, self._broker.monotonic_ns()):
                self._fail(error)

    def _on_requeue(self, command: commands.Requeue) -> None:
        self._on_message(
            lambda channel, now_ns: channel.requeue(self.client, command.id, command.timeout_ms, now_ns)
        )

    def _on_touch(self, command: commands.Touch) -> None:
        self._on_message(lambda channel, now_ns: channel.touch(self.client, command.id, now_ns))

    def _on_message(self, act: Callable[[Any, int], None]) -> None:
        if self.client.channel is not None:
            try:
                act(self.client.channel, self._broker.monotonic_ns())
            except ClientError as error:
                self._fail(error)

    def _on_start_close(self, command: commands.StartClose) -> None:
        self.client.ready_count = 0
        self.client.state = CLOSING
        self._reply(CLOSE_WAIT)

    def _on_refusal(self, command: commands.Refusal) -> None:
        self._fail(command.error)


_HANDLERS: dict[type, Callable[[Connection, Any], None]] = {
    commands.Publish: Connection._on_publish,
    commands.Finish: Connection._on_finish,
    commands.Ready: Connection._on_ready,
    commands.Requeue: Connection._on_requeue,
    commands.Touch: Connection._on_touch,
    commands.Identify: Connection._on_identify,
    commands.Auth: Connection._on_auth,
    commands.Subscribe: Connection._on_subscribe,
    commands.StartClose: Connection._on_start_close,
    commands.Refusal: Connection._on_refusal,
}


def _joined(frames: list[bytes | memoryview]) -> bytes | memoryview:
    return frames[0] if len(frames) == 1 else b"".join(frames)


def _nowhere(data: bytes | memoryview) -> None:
    """Where bytes for a client go that has left."""


def _nothing() -> None:
    """How a client is closed that has left."""


def _unheard(verb: str, error: Exception | None) -> None:
    """Who is told of a publish once the publisher has left."""


def _reason(error: Exception) -> str:
    """What a client may know of a failure: never a path."""
    if isinstance(error, OSError):
        return error.strerror or "disk error"
    cause = error.__cause__
    if isinstance(error, StorageError) and isinstance(cause, OSError):
        return cause.strerror or "disk error"
    return str(error)
