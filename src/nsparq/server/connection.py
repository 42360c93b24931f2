"""One client's TCP connection: asyncio's side of it, its state, and its timers.

Bytes become commands in `inbox`, `commands` executes them, and what is sent goes through `outbox`.

A client that does not read gets no more messages, but its commands are executed: a consumer that is busy with
one message still finishes others. Only when replies pile up too is it not read from. If it never reads again,
the timer ends the connection.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from nsparq.broker.client import Client
from nsparq.errors import FatalClientError, ProtocolError
from nsparq.server.client_auth import ClientAuth
from nsparq.server.commands import EXECUTE, reason_of
from nsparq.server.inbox import Inbox, Step
from nsparq.server.lane import JOIN_AFTER, MAX_JOIN_AFTER, Lane
from nsparq.server.outbox import Outbox
from nsparq.transport.deflate import DeflateLayer
from nsparq.transport.layers import Layer, LayerError, LayerStack
from nsparq.transport.snappy import SnappyLayer
from nsparq.wire.commands import Command
from nsparq.wire.frames import ERROR, HEARTBEAT, encode_frame
from nsparq.wire.limits import Limits
from nsparq.wire.server import LineTooLong, ServerProtocol

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

LINGER_S: Final = 5.0
"""How long a closing connection may take to send its last bytes."""
HANDSHAKE_S: Final = 5.0
"""How long the TLS handshake may take."""
DECODE_S: Final = 0.004
"""How long one client's compressed bytes are decoded before others are served."""
UNFINISHED_S: Final = 60.0
"""How long a client without heartbeats may take for one large command: at least this, at most twice this."""


class State(enum.Enum):
    OPEN = enum.auto()
    """Commands are executed."""
    WAITING = enum.auto()
    """A command waits for an auth server or for the disk. Commands behind it wait, too."""
    ENDING = enum.auto()
    """No further command is executed. The connection closes when all publishes have their answers."""
    CLOSED = enum.auto()
    """Nothing is executed or added to be sent."""


_NEXT: Final = {
    State.OPEN: {State.WAITING, State.ENDING, State.CLOSED},
    State.WAITING: {State.OPEN, State.ENDING, State.CLOSED},
    State.ENDING: {State.ENDING, State.CLOSED},
    State.CLOSED: {State.CLOSED},
}


class Connection(asyncio.Protocol):
    """One client from accept to end of stream."""

    def __init__(self, nsqd: Nsqd, limits: Limits) -> None:
        self.nsqd = nsqd
        self.client: Client
        self.protocol: ServerProtocol
        self.inbox: Inbox
        self.outbox: Outbox
        self.auth: ClientAuth
        self.state = State.OPEN
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._is_reading = True
        """Whether the event loop, or a lane, reads from the client."""
        self._is_resuming = False
        """Whether _resume() is about to be called."""
        self._waiting_for: asyncio.Task[None] | None = None
        """Work that must end before anything further is executed."""
        self._repeated: Command | None = None
        """The command to execute again when that work has ended."""
        self._timer: asyncio.TimerHandle | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._last_command = 0.0
        self._commands_seen = 0
        self._last_heartbeat = 0.0
        self._lane: Lane | None = None
        """Reads from the client together with others who publish one message at a time."""
        self.join_lane_after = JOIN_AFTER

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        nsqd, self._transport = self.nsqd, transport
        peer = transport.get_extra_info("peername")
        host, address = (peer[0], f"{peer[0]}:{peer[1]}") if isinstance(peer, tuple) else ("", "")
        self.protocol = ServerProtocol(self._limits, host, nsqd.unfinished)
        self.outbox = Outbox(transport, nsqd.sender, self)
        self.inbox = Inbox(self.protocol, self.outbox)
        self.client = Client(
            identity=self.protocol.identity,
            address=address,
            send=self.outbox.send,
            close=self.close,
            connect_s=nsqd.broker.wall_ns() // 1_000_000_000,
        )
        self.auth = ClientAuth(nsqd.authenticator, self.client)
        nsqd.broker.clients.add(self.client)
        nsqd.connections.add(self)
        self.restart_timer()
        logger.info("TCP: new client(%s)", address)

    def data_received(self, data: bytes) -> None:
        if self.state is State.OPEN and not self.inbox.has_more:
            self._execute(self.inbox.receive(data))
        elif self.state in (State.OPEN, State.WAITING):
            self.inbox.keep(data)

    def eof_received(self) -> bool:
        try:
            self.protocol.receive_eof()
        except ProtocolError as error:
            self.fail(error)
        if self.state in (State.OPEN, State.WAITING):
            self.answer_publishes()
            self._end()
        return True

    def pause_writing(self) -> None:
        self.client.is_writable = False
        self.outbox.block(self._loop.time())

    def resume_writing(self) -> None:
        self.client.is_writable = True
        self.outbox.unblock()
        self.adjust_reading()
        if self.client.channel is not None:
            self.client.channel.delivery.offer(self.client)

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave_lane()
        self._enter(State.CLOSED)
        self.nsqd.connection_ended(self)
        self.nsqd.broker.clients.discard(self.client)
        if self.client.channel is not None:
            self.client.channel.remove_client(self.client)
        self._release()
        logger.info("client(%s): disconnected", self.client.address)

    def _release(self) -> None:
        """Drop all buffers and break all reference cycles. The garbage collector hardly ever runs in nsqd, so
        a cycle would keep this connection with everything that it has received."""
        for handle in (self._timer, self._handshake_timer, self._waiting_for):
            if handle is not None:
                handle.cancel()
        self._timer = self._handshake_timer = self._waiting_for = self._repeated = None
        self.inbox.clear()
        self.outbox.clear()
        client = self.client
        client.tls = None
        client.send, client.close = _ignore_data, _ignore

    # executing commands

    def _execute(self, steps: Iterator[Step]) -> None:
        """Execute commands until there are no more, or the connection has to wait."""
        inbox = self.inbox
        # Not the loop's clock, which stands still within a turn.
        stop_s = time.monotonic() + DECODE_S if self.outbox.layers is not None else 0.0
        try:
            while True:
                for step in steps:
                    if step is not None:
                        EXECUTE[type(step)](self, step)
                    elif not self.outbox.has_room or time.monotonic() > stop_s:
                        inbox.put_back(steps)
                        self.adjust_reading()
                        break
                    if self.state is not State.OPEN or self._transport.is_closing():
                        if self.state is State.WAITING:
                            inbox.put_back(steps)
                        break
                else:
                    if inbox.has_more:
                        steps = inbox.take_back()
                        continue
                break
        except LineTooLong:
            logger.warning("client(%s): line too long", self.client.address)
            self.close()
        except ProtocolError as error:
            self.fail(error)
        except LayerError as error:
            self._layers_failed(error)
        except Exception:
            logger.exception("client(%s): internal error", self.client.address)
            self.close()
        if self.protocol.commands != self._commands_seen:
            self._commands_seen = self.protocol.commands
            self._last_command = self._loop.time()
        if inbox.is_ended and self.state in (State.OPEN, State.WAITING):
            self.eof_received()

    def wait_for(self, work: Awaitable[object], repeated: Command | None = None) -> None:
        """Execute nothing until `work` has ended; then the repeated command and those behind it."""

        async def run() -> None:
            try:
                await work
            except ProtocolError as error:
                self.fail(error)
            except Exception:
                logger.exception("client(%s): internal error", self.client.address)
                self.close()
            self._waiting_for = None
            if self.state is State.WAITING:
                self._enter(State.OPEN)
                self._resume()

        self._enter(State.WAITING)
        self._repeated = repeated
        self._waiting_for = asyncio.ensure_future(run())
        self.adjust_reading()

    def _resume(self) -> None:
        """Execute the commands that had to wait."""
        self._is_resuming = False
        if self.state is not State.OPEN:
            return
        repeated, self._repeated = self._repeated, None
        steps = self.inbox.take_back()
        self._execute(steps if repeated is None else chain((repeated,), steps))
        self.adjust_reading()

    def adjust_reading(self) -> None:
        """Read from the client exactly while its commands can be executed at once."""
        can_execute = self.state is State.OPEN and self.outbox.has_room
        if can_execute and self.inbox.has_more:
            if not self._is_resuming:
                self._is_resuming = True
                self._loop.call_soon(self._resume)
            can_execute = False
        if can_execute == self._is_reading or self.state is State.CLOSED:
            return
        self.leave_lane()
        self._is_reading = can_execute
        if can_execute:
            # The client may have sent commands that we did not read.
            self._last_command = self._loop.time()
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _enter(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    # publishes

    def published(self, count: int, verb: str, error: Exception | None) -> None:
        """The topic has appended the oldest `count` unanswered publishes, or could not."""
        if self.state is State.CLOSED:
            return
        if error is not None:
            self.outbox.withdraw_all()
            self.fail(FatalClientError(f"E_{verb}_FAILED", f"{verb} failed {reason_of(error)}"))
            return
        self.outbox.ok(count)
        if self.state is State.ENDING:
            if not self.outbox.unanswered:
                self.close()
        elif not self._is_reading:
            self.adjust_reading()

    def answer_publishes(self) -> None:
        """Have publishes that wait for the end of the turn appended now."""
        if self.outbox.unanswered:
            self.nsqd.broker.turn()

    # layers

    def start_layers(self) -> None:
        """Put the transport layers that IDENTIFY has agreed on under the conversation."""
        identity = self.client.identity
        wanted: list[Layer] = []
        if identity.tls:
            self.client.tls = tls = self.nsqd.tls_layer()
            wanted.append(tls)
        if identity.snappy:
            wanted.append(SnappyLayer())
        elif identity.deflate:
            wanted.append(DeflateLayer(identity.deflate_level))
        if not wanted:
            return
        outbox = self.outbox
        if outbox.layers is not None or outbox.unanswered:
            reason = "publishes are unanswered" if outbox.unanswered else "the layers are up already"
            raise FatalClientError("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}")
        outbox.flush()
        outbox.layers = LayerStack(wanted)
        self.protocol.tls_active = identity.tls
        if identity.tls:
            self._handshake_timer = self._loop.call_later(HANDSHAKE_S, self._check_handshake)
        outbox.confirm_layers()
        self.inbox.start_layers()

    def _check_handshake(self) -> None:
        if self.state is not State.CLOSED and not self.outbox.are_layers_confirmed:
            self._layers_failed(LayerError("TLS handshake timed out"))

    def _layers_failed(self, error: LayerError) -> None:
        logger.info("client(%s): %s", self.client.address, error)
        outbox = self.outbox
        outbox.write_layer_output()
        if not outbox.are_layers_confirmed:
            outbox.layers = None
            text = f"E_IDENTIFY_FAILED IDENTIFY failed {error.reason}"
            outbox.send(encode_frame(ERROR, text.encode("utf-8", "replace")))
        self.close()

    # the outbox's owner

    def sending_failed(self, error: Exception) -> None:
        if isinstance(error, LayerError):
            self._layers_failed(error)
        else:
            logger.error("internal error while sending", exc_info=error)
            self.close()

    def unsent_grew(self) -> None:
        self.adjust_reading()

    # lanes

    def join_lane(self, topic_name: str) -> None:
        """Have a lane read from the client from now on, unless something is in its way."""
        nsqd, outbox = self.nsqd, self.outbox
        self.protocol.lone_publishes = 0
        topic = nsqd.broker.topics.get(topic_name)
        is_busy = self.client.channel is not None or outbox.has_frames or not self._is_reading
        if topic is None or is_busy or outbox.layers is not None or self.auth.is_required:
            return
        descriptor = outbox.descriptor
        if descriptor >= 0:
            self._lane = nsqd.lanes.join(topic, self, descriptor)
        if self._lane is not None:
            outbox.before_send = self.leave_lane
            self._transport.pause_reading()

    def leave_lane(self) -> None:
        """Have the event loop read from the client again. To join a lane takes longer the next time."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        self.outbox.before_send = None
        self.outbox.expect(lane.leave(self, self.outbox.known_descriptor))
        self.join_lane_after = min(2 * self.join_lane_after, MAX_JOIN_AFTER)
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def receive_from_lane(self, data: bytes) -> None:
        """The lane has read something other than a PUB to its topic. Empty data is an end of stream or an
        error, which the event loop will meet again."""
        self.leave_lane()
        if data:
            self.data_received(data)

    def note_publish(self, topic_name: str, now: float) -> None:
        """The lane has read a PUB of the client."""
        self.client.publish_counts[topic_name] += 1
        self._last_command = now

    # the end

    def fail(self, error: ProtocolError) -> None:
        """Reply with an error. A fatal one ends the connection, after all earlier replies."""
        level = logging.INFO if error.fatal else logging.DEBUG
        logger.log(level, "client(%s): %s", self.client.address, error.shown)
        frame = encode_frame(ERROR, str(error).encode("utf-8", "surrogateescape"))
        if not error.fatal:
            self.outbox.reply(frame)
            return
        self.inbox.clear()
        self.answer_publishes()
        if self.state is not State.CLOSED:
            self.outbox.reply(frame)
            self._end()

    def _end(self) -> None:
        """Close as soon as all publishes have their answers."""
        if self.outbox.unanswered:
            self._enter(State.ENDING)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection after its last bytes have been sent, or after LINGER_S."""
        if self.state is State.CLOSED:
            return
        self.nsqd.sender.send_oks()
        self.leave_lane()
        self._enter(State.CLOSED)
        self.inbox.clear()
        if self.client.channel is not None:
            self.client.channel.remove_client(self.client)
        self.outbox.flush()
        if self.outbox.layers is not None:
            self.outbox.layers.close()
            self.outbox.write_layer_output()
        self._transport.close()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)

    def _abort(self) -> None:
        self.leave_lane()
        self._enter(State.CLOSED)
        self._transport.abort()

    async def recheck(self) -> None:
        """The policy has changed: end a subscription that it no longer permits. Publishes are checked one by
        one."""
        channel = self.client.channel
        if channel is None:
            return
        try:
            if self.auth.has_expired:
                await self.auth.authenticate()
            self.auth.require("SUB", channel.topic.name, channel.name)
        except FatalClientError as error:
            if self.state is not State.CLOSED:
                self.fail(error)

    # time

    def restart_timer(self) -> None:
        self._last_command = self._last_heartbeat = self._loop.time()
        self._schedule_timer()

    def _schedule_timer(self) -> None:
        """One timer serves heartbeats, the read deadline and the write deadline. Without heartbeats it serves
        only the deadline of a large unfinished command."""
        interval = self.protocol.identity.heartbeat_ms / 1000
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state is State.CLOSED:
            return
        if interval:
            due = min(self._last_heartbeat + interval, self._last_command + 2 * interval)
            self._timer = self._loop.call_at(due, self._on_timer, interval)
        else:
            unfinished = self.protocol.unfinished_command
            self._timer = self._loop.call_later(UNFINISHED_S, self._check_progress, unfinished)

    def _on_timer(self, interval: float) -> None:
        now, blocked_since = self._loop.time(), self.outbox.blocked_since
        self._timer = None
        if blocked_since and now - blocked_since >= interval:
            logger.warning("client(%s): does not read; closing", self.client.address)
            self._abort()
            return
        if self._is_reading and now - self._last_command >= 2 * interval:
            logger.warning("client(%s): said nothing for %.0f s; closing", self.client.address, 2 * interval)
            self._abort()
            return
        if now - self._last_heartbeat >= interval:
            self._last_heartbeat = now
            is_handshaking = self.outbox.layers is not None and not self.outbox.are_layers_confirmed
            if not blocked_since and not is_handshaking:
                self.outbox.reply(HEARTBEAT)
        self._schedule_timer()

    def _check_progress(self, unfinished: int | None) -> None:
        """End the connection if the command that was unfinished at the last check still is."""
        if self._is_reading and unfinished is not None and self.protocol.unfinished_command == unfinished:
            logger.warning(
                "client(%s): did not finish a command for %.0f s; closing", self.client.address, UNFINISHED_S
            )
            self._abort()
        else:
            self._schedule_timer()


def _ignore_data(data: bytes | memoryview) -> None:
    """Sends nothing: the client has left."""


def _ignore() -> None:
    """Closes nothing: the client has left."""
