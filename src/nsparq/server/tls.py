"""The TLS layer of the server, and contexts with its certificates.

Uses pyOpenSSL: the standard library cannot request a client certificate without verifying it (NSQ's
policy `require`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID
from OpenSSL import SSL

from nsparq.errors import StartError
from nsparq.transport.layers import MAX_PIECE, Layer, LayerError

REQUIRE: Final = "require"
REQUIRE_VERIFY: Final = "require-verify"

_MIN_VERSIONS: Final = {
    "tls1.0": SSL.TLS1_VERSION,
    "tls1.1": SSL.TLS1_1_VERSION,
    "tls1.2": SSL.TLS1_2_VERSION,
    "tls1.3": SSL.TLS1_3_VERSION,
}
_VERSION_NAMES: Final = {"TLSv1": "TLS1.0", "TLSv1.1": "TLS1.1", "TLSv1.2": "TLS1.2", "TLSv1.3": "TLS1.3"}

# For TLS 1.2 and older: OpenSSL's name and NSQ's name, preferred ones first.
_CIPHER_SUITES: Final = {
    "ECDHE-ECDSA-AES128-GCM-SHA256": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384": "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384": "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305": "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "ECDHE-RSA-CHACHA20-POLY1305": "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "ECDHE-ECDSA-AES128-SHA": "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "ECDHE-RSA-AES128-SHA": "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "ECDHE-ECDSA-AES256-SHA": "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "ECDHE-RSA-AES256-SHA": "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "AES128-GCM-SHA256": "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "AES256-GCM-SHA384": "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "AES128-SHA": "TLS_RSA_WITH_AES_128_CBC_SHA",
    "AES256-SHA": "TLS_RSA_WITH_AES_256_CBC_SHA",
}
_CIPHER_SUITES_13: Final = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"

_RECORD: Final = 16_384
"""Most bytes in one TLS record, and in one read."""
_RECORD_OVERHEAD: Final = 128
"""Upper limit for header, padding and authentication of a record, in any version."""
_PARTIAL_WRITE: Final = 0x1
"""OpenSSL's mode in which a write returns after one record. pyOpenSSL has no name for it."""


def build_context(
    cert: str, key: str, *, root_ca_file: str = "", policy: str = "", min_version: str = "tls1.0"
) -> SSL.Context:
    """Certificates and rules for new connections. A reload builds a new context; existing
    connections keep theirs. Raises StartError.
    """
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_min_proto_version(_MIN_VERSIONS[min_version])
    ciphers = ":".join(_CIPHER_SUITES)
    if min_version < "tls1.2":
        # The signatures of these versions are below OpenSSL's default security level.
        ciphers += ":@SECLEVEL=0"
    context.set_cipher_list(ciphers.encode())
    context.set_tls13_ciphersuites(_CIPHER_SUITES_13)
    # No sessions: every connection must send its certificate.
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(
        SSL.OP_NO_TICKET | SSL.OP_NO_RENEGOTIATION | SSL.OP_NO_COMPRESSION | SSL.OP_CIPHER_SERVER_PREFERENCE
    )
    context.clear_mode(_PARTIAL_WRITE)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)
    _load_certificate(context, cert, key)
    _set_policy(context, policy, root_ca_file)
    return context


def _load_certificate(context: SSL.Context, cert: str, key: str) -> None:
    _read("--tls-cert", cert)
    try:
        context.use_certificate_chain_file(cert)
    except SSL.Error as error:
        raise StartError(f"--tls-cert: {cert}: not a certificate in PEM format ({_reason(error)})") from error
    try:
        private_key = load_pem_private_key(_read("--tls-key", key), password=None)
    except TypeError as error:
        raise StartError(f"--tls-key: {key}: the key has a passphrase, which is not supported") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise StartError(f"--tls-key: {key}: not a private key in PEM format") from error
    try:
        context.use_privatekey(private_key)  # type: ignore[arg-type]  # TypeError for other kinds of keys
    except (SSL.Error, TypeError) as error:
        raise StartError(f"--tls-key: {key}: not the key of {cert}") from error


def _set_policy(context: SSL.Context, policy: str, root_ca_file: str) -> None:
    if root_ca_file:
        _read("--tls-root-ca-file", root_ca_file)
        try:
            context.load_verify_locations(root_ca_file)
            if policy == REQUIRE_VERIFY:
                # Tells the client which authorities we trust: it may have several certificates.
                context.load_client_ca(root_ca_file.encode())
        except SSL.Error as error:
            reason = _reason(error)
            raise StartError(f"--tls-root-ca-file: {root_ca_file}: no certificates ({reason})") from error
    elif policy == REQUIRE_VERIFY:
        context.set_default_verify_paths()
    wanted = SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT
    if policy == REQUIRE_VERIFY:
        context.set_verify(wanted)
    elif policy == REQUIRE:
        context.set_verify(wanted, lambda *_: True)


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartError(f"{flag}: {path}: {error.strerror}") from error


class TlsLayer(Layer):
    """The server's side of one TLS connection. Its attributes are set by the handshake."""

    def __init__(self, context: SSL.Context) -> None:
        self._connection = SSL.Connection(context, None)
        self._connection.set_accept_state()
        self._has_input = False
        self._failure = ""
        """Why reading failed. A text: the traceback of an error would keep the layer alive."""
        self.is_established = False
        self.cipher_suite = ""
        """The IANA name, such as TLS_AES_128_GCM_SHA256."""
        self.version = ""
        """For instance TLS1.3."""
        self.negotiated_protocol = ""
        self.common_name = ""
        """From the client's certificate, verified only with `require-verify`. May be empty."""

    def receive(self, data: bytes) -> Iterator[bytes]:
        if data and not self.is_ended:
            self._connection.bio_write(data)
            self._has_input = True
        return iter(self._read, b"")

    def _read(self) -> bytes:
        """The contents of several records, up to MAX_PIECE bytes."""
        if self._failure:
            raise LayerError(self._failure)
        if not self._has_input:
            return b""
        pieces: list[bytes] = []
        room = MAX_PIECE
        try:
            if not self.is_established:
                self._connection.do_handshake()
                self._establish()
            while room >= _RECORD:
                piece = self._connection.recv(_RECORD)
                pieces.append(piece)
                room -= len(piece)
        except SSL.WantReadError:
            self._has_input = False
        except SSL.ZeroReturnError:
            self._has_input = False
            self.is_ended = True
        except (SSL.Error, ValueError) as error:
            self._failure = f"TLS: {_reason(error)}"
            if not pieces:
                raise LayerError(self._failure) from error
        return b"".join(pieces)

    def _establish(self) -> None:
        connection = self._connection
        name = connection.get_cipher_name() or ""
        self.cipher_suite = _CIPHER_SUITES.get(name, name)
        version = connection.get_protocol_version_name()
        self.version = _VERSION_NAMES.get(version, version)
        self.negotiated_protocol = connection.get_alpn_proto_negotiated().decode("ascii", "replace")
        certificate = connection.get_peer_certificate(as_cryptography=True)
        if certificate is not None:
            # May raise ValueError. Of several names NSQ uses the last.
            names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            self.common_name = str(names[-1].value) if names else ""
        self.is_established = True

    def send(self, data: bytes | memoryview) -> bytes:
        if not self.is_established:
            raise LayerError("TLS: the handshake is not finished")
        if not data:
            return self.take_output()
        try:
            sent = self._connection.send(data)
        except SSL.Error as error:
            raise LayerError(f"TLS: {_reason(error)}") from error
        # Writing to memory never stops early, so nothing is left to send.
        assert sent == len(data)
        return self._drain(sent + _RECORD_OVERHEAD * (2 + sent // _RECORD))

    def take_output(self) -> bytes:
        return self._drain(_RECORD)

    def _drain(self, size: int) -> bytes:
        """Everything that OpenSSL has written: about `size` bytes."""
        output = b""
        try:
            while True:
                part = self._connection.bio_read(size)
                output = output + part if output else part
                if len(part) < size:
                    return output
        except SSL.WantReadError:
            return output

    def close(self) -> None:
        if self.is_established and not self._failure:
            try:
                self._connection.shutdown()
            except SSL.Error:
                # The peer is already gone.
                pass


def _reason(error: SSL.Error | ValueError) -> str:
    """OpenSSL's innermost reason, such as "no shared cipher"."""
    if isinstance(error, ValueError):
        return "malformed client certificate"
    if isinstance(error, SSL.SysCallError):
        return str(error.args[-1])
    entries = error.args[0] if error.args else []
    return next((reason for _, _, reason in entries if reason), "unknown reason")
