"""TLS for the client, with the standard library's memory buffers. It checks the server's name."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Final

from nsparq.transport.layers import Layer, LayerError

_RECORDS: Final = 65_536


class TlsClientLayer(Layer):
    """take_output() starts the handshake, which ends when is_established is True."""

    def __init__(self, context: ssl.SSLContext, server_hostname: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        name = server_hostname or None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self.is_established = False
        self.is_ended = False
        self._continue_handshake()

    def _continue_handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLCertVerificationError as error:
            raise LayerError(f"TLS: the server's certificate: {error.verify_message or error}") from error
        except ssl.SSLError as error:
            raise LayerError(f"TLS: {error.reason or error}") from error
        self.is_established = True

    def receive(self, data: bytes) -> Iterator[bytes]:
        if data:
            self._incoming.write(data)
        return iter(self._read, b"")

    def _read(self) -> bytes:
        if not self.is_established:
            self._continue_handshake()
            if not self.is_established:
                return b""
        try:
            piece = self._tls.read(_RECORDS)
        except (ssl.SSLWantReadError, ssl.SSLSyscallError):
            return b""
        except ssl.SSLZeroReturnError:
            self.is_ended = True
            return b""
        except ssl.SSLError as error:
            raise LayerError(f"TLS: {error.reason or error}") from error
        if not piece:
            self.is_ended = True
        return piece

    def send(self, data: bytes | memoryview) -> bytes:
        if not self.is_established:
            raise LayerError("TLS: the handshake is not finished")
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            raise LayerError(f"TLS: {error.reason or error}") from error
        return self._outgoing.read()

    def take_output(self) -> bytes:
        return self._outgoing.read()

    def close(self) -> None:
        try:
            self._tls.unwrap()
        except (ssl.SSLError, ValueError):
            # Our closing message is written; do not wait for the peer's.
            pass
