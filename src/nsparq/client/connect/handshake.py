"""The handshake of a connection to an nsqd: IDENTIFY, TLS, compression, AUTH."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, Final

from nsparq.addresses import split_address
from nsparq.client.connect.secret import reason_to_withhold
from nsparq.client.errors import ConnectFailed, reason_of
from nsparq.transport.layers import Layer, LayerStack
from nsparq.wire import client as wire
from nsparq.wire.client import Error

if TYPE_CHECKING:
    from nsparq.client.connect.connection import Connection

logger = logging.getLogger(__name__)

DEFAULT_MAX_RDY: Final = 2500
"""For a server that does not negotiate."""
MAX_NUMBER: Final = 2**31 - 1
MAX_DEFLATE_LEVEL: Final = 9


class Handshake:
    """While it runs, the connection puts incoming bytes into `arrived`, or the error that ends
    it."""

    def __init__(self, connection: Connection) -> None:
        self.arrived: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._connection = connection
        self._address, self._config = connection.address, connection.config

    async def run(self) -> None:
        """Raises ConnectFailed, or the error that ended the connection."""
        connection = self._connection
        body = json.dumps(self._config.identify()).encode()
        connection.send_now(wire.MAGIC + wire.identify(body))
        answer = await self._response("IDENTIFY")
        try:
            # A server older than feature negotiation replies OK. It has no features.
            agreed: dict[str, Any] = json.loads(answer) if answer.startswith(b"{") else {}
        except (ValueError, RecursionError) as error:
            raise self._failed(f"invalid reply to IDENTIFY: {answer[:100]!r}") from error
        connection.max_rdy_count = _positive(agreed.get("max_rdy_count")) or DEFAULT_MAX_RDY
        connection.msg_timeout = _positive(agreed.get("msg_timeout")) / 1000 or connection.msg_timeout
        connection.has_headers = agreed.get("headers") is True
        await self._upgrade(agreed)
        if agreed.get("auth_required"):
            await self._authenticate()

    def take_arrived(self) -> bytes:
        """Bytes after the last response. Raises the error that ended the connection."""
        pieces = []
        while not self.arrived.empty():
            data = self.arrived.get_nowait()
            if isinstance(data, Exception):
                raise data
            pieces.append(data)
        return b"".join(pieces)

    async def _response(self, command: str) -> bytes:
        """The next response. Heartbeats that come first are answered."""
        decoder = self._connection.decoder
        while True:
            frames = decoder.receive_data(b"", most=1)
            while not frames:
                data = await self.arrived.get()
                if isinstance(data, Exception):
                    raise data
                frames = decoder.receive_data(data, most=1)
            frame = frames[0]
            if isinstance(frame, Error):
                raise self._failed(f"{command} failed: {frame.text}")
            if isinstance(frame, list):
                raise self._failed(f"the server sent a message before the reply to {command}")
            if frame.data != wire.HEARTBEAT:
                return frame.data
            self._connection.send_now(wire.NOP)

    async def _upgrade(self, agreed: dict[str, Any]) -> None:
        """Add the layers that the server agreed to. It confirms each with OK."""
        config = self._config
        if config.tls_v1 and not agreed.get("tls_v1"):
            raise self._failed("the server does not offer TLS")
        if config.tls_v1:
            await self._add_layer(await self._tls_layer())
        if config.snappy and agreed.get("snappy"):
            from nsparq.transport.snappy import SnappyLayer

            await self._add_layer(SnappyLayer())
        elif config.deflate and agreed.get("deflate"):
            from nsparq.transport.deflate import DeflateLayer

            level = _positive(agreed.get("deflate_level"), MAX_DEFLATE_LEVEL) or config.deflate_level
            await self._add_layer(DeflateLayer(level))

    async def _tls_layer(self) -> Layer:
        from nsparq.transport.tls_client import TlsClientLayer

        host, _ = split_address(self._address) or ("", 0)
        try:
            # In a thread: reading certificates takes milliseconds, those of the system tens of
            # them.
            context = await asyncio.to_thread(self._config.ssl_context)
            return TlsClientLayer(context, host)
        except (OSError, ValueError) as error:
            # An unreadable certificate, or an impossible host name.
            raise self._failed(f"TLS: {reason_of(error)}") from error

    async def _add_layer(self, layer: Layer) -> None:
        """Put a layer inside the present ones, and wait for the server to confirm it."""
        connection = self._connection
        connection.layers = LayerStack([*(connection.layers.layers if connection.layers else ()), layer])
        connection.send_layer_output()
        # Bytes behind the last frame already belong to the new layer.
        rest = connection.decoder.take_rest() + self.take_arrived()
        for piece in layer.receive(rest):
            self.arrived.put_nowait(piece)
        connection.send_layer_output()
        if await self._response("the upgrade") != wire.OK:
            raise self._failed("the server did not confirm the upgrade")

    async def _authenticate(self) -> None:
        config = self._config
        if not config.auth_secret:
            raise self._failed("the server requires AUTH, but auth_secret is not set")
        peer = self._connection.peer_address
        host = peer[0] if isinstance(peer, tuple) else ""
        if reason := reason_to_withhold(config, self._address, host, is_encrypted=config.tls_v1):
            raise self._failed(f"the server requires AUTH, but {reason}")
        self._connection.send_now(wire.auth(config.auth_secret.encode()))
        identity = await self._response("AUTH")
        logger.debug("%s: authorized: %s", self._address, identity.decode("utf-8", "replace"))

    def _failed(self, reason: str) -> ConnectFailed:
        return ConnectFailed(f"{self._address}: {reason}")


def _positive(value: object, most: int = MAX_NUMBER) -> int:
    """A number that the server sent, at most `most`; 0 if it is anything else."""
    return min(value, most) if type(value) is int and value > 0 else 0
