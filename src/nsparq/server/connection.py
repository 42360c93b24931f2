"""One client's TCP connection: asyncio's side of it, its state, and its timers.

`protocol` makes commands of bytes, `commands` executes them, `outbox` sends replies and messages.

A client that does not read gets no more messages, but its commands are executed: a consumer that is
busy with one message still finishes others. When replies pile up, too, nothing is read from it. If
it never reads again, the timer ends the connection.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final

from nsparq.addresses import join_address
from nsparq.broker.client import Client
from nsparq.errors import FatalClientError, ProtocolError
from nsparq.server.client_auth import ClientAuth
from nsparq.server.commands import EXECUTE, reason_of
from nsparq.server.inbox import Inbox
from nsparq.server.lane import LaneMember
from nsparq.server.outbox import Outbox
from nsparq.transport.deflate import DeflateLayer
from nsparq.transport.layers import Layer, LayerError, LayerStack
from nsparq.transport.snappy import SnappyLayer
from nsparq.wire.commands import Command
from nsparq.wire.frames import ERROR, HEARTBEAT, encode_frame
from nsparq.wire.server import LineTooLong, ServerProtocol

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

LINGER_S: Final = 5.0
"""How long a closing connection may take to send its last bytes."""
HANDSHAKE_S: Final = 5.0
"""How long the TLS handshake may take."""
EXECUTE_S: Final = 0.004
"""How long one client's bytes are decoded, and its commands executed, before others are served."""
BULK: Final = 16 << 10
"""Bytes from which on the commands in them may take longer than that."""
CHECK_EVERY: Final = 16
"""Commands after which the time is checked. A run of like commands counts as one."""
UNFINISHED_S: Final = 60.0
"""A client without heartbeats may take between once and twice this for one large command."""


class State(enum.Enum):
    OPEN = enum.auto()
    """Commands are executed."""
    WAITING = enum.auto()
    """A command waits for an auth server or for the disk. Commands behind it wait, too."""
    ENDING = enum.auto()
    """No further command is executed. When all publishes are answered, the connection closes."""
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

    def __init__(self, nsqd: Nsqd) -> None:
        self.nsqd = nsqd
        self.client: Client
        self.protocol: ServerProtocol
        self.inbox: Inbox
        self.outbox: Outbox
        self.auth: ClientAuth
        self.lane_member = LaneMember()
        self.state = State.OPEN
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.is_reading = True
        """Whether the event loop reads from the client, because commands can be executed at
        once."""
        self._is_resuming = False
        """Whether _resume() is scheduled."""
        self._waiting_for: asyncio.Task[None] | None = None
        """Work that must end before anything further is executed."""
        self._repeated: Command | None = None
        """The command to execute again when that work has ended."""
        self._turn_s = self._stop_s = 0.0
        """A turn of the event loop, and when others must be served in it."""
        self._timer: asyncio.TimerHandle | None = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        self.last_command = 0.0
        self._commands_seen = 0
        self._last_heartbeat = 0.0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # never another
        nsqd, self._transport = self.nsqd, transport
        peer = transport.get_extra_info("peername")
        host, address = (peer[0], join_address(*peer[:2])) if isinstance(peer, tuple) else ("", "")
        self.protocol = ServerProtocol(nsqd.limits, host, nsqd.unfinished)
        self.outbox = Outbox(transport, nsqd.broker.next_turn, nsqd.oks, self)
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
        protocol, inbox = self.protocol, self.inbox
        if self.state is not State.OPEN or inbox.has_more or protocol.has_more:
            if self.state in (State.OPEN, State.WAITING):
                inbox.keep(data)
            return
        if self.outbox.layers is None:
            self._execute(data)
        else:
            inbox.keep(data)
            self._execute()

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
        self.lane_member.leave(self)
        self._enter(State.CLOSED)
        self.nsqd.connection_ended(self)
        self.nsqd.broker.clients.discard(self.client)
        if self.client.channel is not None:
            self.client.channel.remove_client(self.client)
        self._release()
        logger.info("client(%s): disconnected", self.client.address)

    def _release(self) -> None:
        """Drop all buffers and break all reference cycles. The garbage collector hardly ever runs
        in nsqd, so a cycle would keep this connection with everything that it has received."""
        for handle in (self._timer, self._handshake_timer, self._waiting_for):
            if handle is not None:
                handle.cancel()
        self._timer = self._handshake_timer = self._waiting_for = self._repeated = None
        self.inbox.clear()
        self.outbox.clear()
        self.client.tls = None
        self.client.send = self.client.close = _ignore

    # executing commands

    def _execute(self, data: bytes = b"") -> None:
        """Execute commands until there are no more, or the connection has to wait."""
        protocol, inbox, outbox = self.protocol, self.inbox, self.outbox
        stop_s = self._stop_time() if not data or len(data) >= BULK else 0.0
        executed = 0
        has_decoded = False
        command, self._repeated = self._repeated, None
        try:
            if command is None:
                command = protocol.next_command(data)
            while True:
                if command is not None:
                    EXECUTE[type(command)](self, command)
                    if self.state is not State.OPEN or self._transport.is_closing():
                        break
                if protocol.has_more:
                    if stop_s:
                        executed += 1
                        if executed % CHECK_EVERY == 0 and time.monotonic() > stop_s:
                            self.adjust_reading()
                            break
                    command = protocol.next_command()
                elif not inbox.has_more:
                    break
                elif has_decoded and (not outbox.has_room or time.monotonic() > stop_s):
                    self.adjust_reading()
                    break
                else:
                    has_decoded = outbox.layers is not None
                    command = protocol.next_command(inbox.take())
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
        if protocol.commands != self._commands_seen:
            self._commands_seen = protocol.commands
            self.last_command = self._loop.time()
        if inbox.is_ended and self.state in (State.OPEN, State.WAITING):
            self.eof_received()

    def _stop_time(self) -> float:
        """When others must be served. The event loop may read many times from a client that sends
        faster than we execute, all in one turn, in which its clock stands still."""
        turn_s = self._loop.time()
        if turn_s != self._turn_s:
            self._turn_s, self._stop_s = turn_s, time.monotonic() + EXECUTE_S
        return self._stop_s

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
        self._execute()
        self.adjust_reading()

    def adjust_reading(self) -> None:
        """Read from the client exactly while its commands can be executed at once."""
        can_execute = self.state is State.OPEN and self.outbox.has_room
        if can_execute and (self.inbox.has_more or self.protocol.has_more or self._repeated is not None):
            if not self._is_resuming:
                self._is_resuming = True
                self._loop.call_soon(self._resume)
            can_execute = False
        if can_execute == self.is_reading or self.state is State.CLOSED:
            return
        self.lane_member.leave(self)
        self.is_reading = can_execute
        if can_execute:
            # The client may have sent commands that we did not read.
            self.last_command = self._loop.time()
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _enter(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    # publishes

    def published(self, count: int, verb: str, error: Exception | None) -> None:
        """The topic has appended the oldest `count` publishes, or `error` says why not."""
        if self.state is State.CLOSED:
            return
        if error is not None:
            self.outbox.give_up_answers()
            self.fail(FatalClientError(f"E_{verb}_FAILED", f"{verb} failed {reason_of(error)}"))
            return
        self.outbox.ok(count)
        if self.state is State.ENDING:
            if not self.outbox.unanswered:
                self.close()
        elif not self.is_reading:
            self.adjust_reading()

    def answer_publishes(self) -> None:
        """Append publishes that wait for the end of the turn now."""
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

    def sending_failed(self, error: Exception) -> None:
        if isinstance(error, LayerError):
            self._layers_failed(error)
        else:
            logger.error("internal error while sending", exc_info=error)
            self.close()

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
        self.nsqd.oks.send()
        self.lane_member.leave(self)
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
        self.lane_member.leave(self)
        self._enter(State.CLOSED)
        self._transport.abort()

    async def recheck(self) -> None:
        """The policy has changed: end a subscription that it no longer permits."""
        channel = self.client.channel
        if channel is None:
            return
        try:
            if self.auth.is_of_an_old_policy:
                await self.auth.authenticate()
            self.auth.require("SUB", channel.topic.name, channel.name)
        except FatalClientError as error:
            if self.state is not State.CLOSED:
                self.fail(error)

    # time

    def restart_timer(self) -> None:
        self.last_command = self._last_heartbeat = self._loop.time()
        self._schedule_timer()

    def _schedule_timer(self) -> None:
        """One timer serves heartbeats, the read deadline and the write deadline. Without heartbeats
        it serves only the deadline of a large unfinished command."""
        interval = self.protocol.identity.heartbeat_ms / 1000
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state is State.CLOSED:
            return
        if interval:
            due = min(self._last_heartbeat + interval, self.last_command + 2 * interval)
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
        if self.is_reading and now - self.last_command >= 2 * interval:
            logger.warning("client(%s): sent nothing for %.0f s; closing", self.client.address, 2 * interval)
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
        if self.is_reading and unfinished is not None and self.protocol.unfinished_command == unfinished:
            logger.warning(
                "client(%s): did not finish a command for %.0f s; closing", self.client.address, UNFINISHED_S
            )
            self._abort()
        else:
            self._schedule_timer()


def _ignore(*data: object) -> None:
    """Sends or closes nothing: the client has left."""
