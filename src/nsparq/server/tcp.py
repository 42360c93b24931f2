"""The TCP side: one Connection per client, between the event loop and the broker.

Replies leave in the order of their commands. A publish is answered when its topic's append is done, so
anything said after it waits its turn behind it. What a client does not read is bounded: we stop sending
messages to it, and stop reading from it, until it catches up; if it never does, it is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsparq.broker.broker import Broker
from nsparq.broker.client import Client
from nsparq.errors import (
    ClientError,
    Exiting,
    FatalClientError,
    ProtocolError,
    StorageError,
    SubscribeRefused,
)
from nsparq.wire import commands
from nsparq.wire.frames import CLOSE_WAIT, ERROR, HEARTBEAT, OK, RESPONSE, encode_frame
from nsparq.wire.limits import Limits
from nsparq.wire.server import CLOSING, SUBSCRIBED, LineTooLong, ServerProtocol

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

WRITE_HIGH = 256 << 10
"""Bytes waiting to leave at which a client gets no more messages and is not read from."""
WRITE_LOW = 64 << 10
MAX_UNANSWERED = 4096
"""Publishes of one connection that may wait for the disk before it is not read from."""
LINGER_S = 5.0
"""How long a closing connection may take to accept its last bytes."""


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
        self._is_closing = False
        self._is_ending = False
        """Whether the last word is among the replies: nothing more is heard."""
        self._is_reading = True

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        self._transport = transport
        transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        peer = transport.get_extra_info("peername")
        host, address = (peer[0], f"{peer[0]}:{peer[1]}") if isinstance(peer, tuple) else ("", "")
        self._protocol = ServerProtocol(self._limits, host)
        self.client = Client(
            identity=self._protocol.identity,
            address=address,
            send=transport.write,
            close=self.close,
            connect_s=self._broker.clock() // 1_000_000_000,
        )
        self._broker.clients.add(self.client)
        self._nsqd.connections.add(self)
        self._last_command = self._last_heartbeat = self._loop.time()
        self._schedule_timer()
        logger.info("TCP: new client(%s)", address)

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._is_ending:
            return
        protocol = self._protocol
        try:
            publish = protocol.receive_publish(data)
            if publish is not None:
                self._on_publish(publish)
                data = b""
            for command in protocol.receive_data(data) if data else ():
                _HANDLERS[type(command)](self, command)
                if self._is_ending or self._transport.is_closing():
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
        return self._is_closing

    def pause_writing(self) -> None:
        self.client.is_writable = False
        self._blocked_since = self._loop.time()
        self._adjust_reading()

    def resume_writing(self) -> None:
        self.client.is_writable = True
        self._blocked_since = 0.0
        self._adjust_reading()
        if self.client.channel is not None:
            self.client.channel.offer(self.client)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._nsqd.connection_ended(self)
        self._broker.clients.discard(self.client)
        if self.client.channel is not None:
            self.client.channel.remove_client(self.client)
        logger.info("client(%s): disconnected", self.client.address)

    # sending

    def _reply(self, frame: bytes) -> None:
        if self._replies:
            self._replies.append(frame)
        else:
            self._transport.write(frame)

    def _published(self, verb: str, error: Exception | None) -> None:
        """The oldest unanswered publish is done."""
        if self._is_closing:
            return
        replies = self._replies
        if error is None:
            replies.popleft()
            self._transport.write(OK)
            while replies and replies[0] is not None:
                self._transport.write(replies.popleft())  # type: ignore[arg-type]  # just seen not to be None
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
        logger.log(level, "client(%s): %s", self.client.address, error)
        frame = encode_frame(ERROR, str(error).encode("utf-8", "surrogateescape"))
        if not error.fatal:
            self._reply(frame)
            return
        if self._replies:
            # Publishes are still to be answered: have them appended now.
            self._broker.turn()
        if self._replies:
            # They wait for the disk. Their answers go first, then this one, then the connection.
            self._replies.append(frame)
            self._is_ending = True
            return
        self._transport.write(frame)
        self.close()

    def close(self) -> None:
        """End the connection after what is written has left, or after a while all the same."""
        if self._is_closing:
            return
        self._is_closing = True
        if self.client.channel is not None:
            self.client.channel.remove_client(self.client)
        self._transport.close()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)

    def _adjust_reading(self) -> None:
        """Stop reading from a client that does not read, or that publishes faster than the disk takes it."""
        wanted = self.client.is_writable and len(self._replies) < MAX_UNANSWERED
        if wanted == self._is_reading or self._is_closing:
            return
        self._is_reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # time

    def _schedule_timer(self) -> None:
        """One timer serves the heartbeat, the read deadline and the write deadline."""
        interval = self._protocol.identity.heartbeat_ms / 1000
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if interval and not self._is_closing:
            due = min(self._last_heartbeat + interval, self._last_command + 2 * interval)
            self._timer = self._loop.call_at(due, self._on_timer, interval)

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
            if not self._blocked_since:
                self._reply(HEARTBEAT)
        self._schedule_timer()

    def _abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    # commands

    def _on_identify(self, command: commands.Identify) -> None:
        self.client.identity = command.identity
        self._last_heartbeat = self._last_command = self._loop.time()
        self._schedule_timer()
        self._reply(encode_frame(RESPONSE, command.identity.reply(self._limits)))

    def _on_auth(self, command: commands.Auth) -> None:
        raise FatalClientError("E_AUTH_DISABLED", "AUTH disabled")

    def _on_subscribe(self, command: commands.Subscribe) -> None:
        try:
            self._broker.subscribe(self.client, command.topic, command.channel)
        except (Exiting, SubscribeRefused, OSError) as error:
            raise FatalClientError("E_SUB_FAILED", f"SUB failed {_reason(error)}") from error
        self.client.state = SUBSCRIBED
        self._reply(OK)

    def _on_publish(self, command: commands.Publish) -> None:
        verb = command.verb
        self._replies.append(None)
        try:
            self._broker.publish(command.topic, command.bodies, command.defer_ms, self._published, verb)
        except (Exiting, StorageError, OSError) as error:
            self._replies.pop()
            raise FatalClientError(f"E_{verb}_FAILED", f"{verb} failed {_reason(error)}") from error
        self.client.publish_counts[command.topic] += len(command.bodies)
        if len(self._replies) >= MAX_UNANSWERED:
            self._adjust_reading()

    def _on_ready(self, command: commands.Ready) -> None:
        channel = self.client.channel
        if channel is not None:
            channel.set_ready(self.client, command.count)

    def _on_finish(self, command: commands.Finish) -> None:
        channel = self.client.channel
        if channel is not None:
            for error in channel.finish(self.client, command.spans, self._broker.clock()):
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
                act(self.client.channel, self._broker.clock())
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


def _reason(error: Exception) -> str:
    """What a client may know of a failure: never a path."""
    if isinstance(error, OSError):
        return error.strerror or "disk error"
    cause = error.__cause__
    if isinstance(error, StorageError) and isinstance(cause, OSError):
        return cause.strerror or "disk error"
    return str(error)
