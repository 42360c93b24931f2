"""Certificates for tests, created on first use, once per process.

certificates() -> Certificates      paths of PEM files, in a directory that is removed at exit

    ca.pem                          the authority
    server.pem server.key           for localhost and 127.0.0.1, signed by it
    client.pem client.key           common name `client`, signed by it
    foreign.pem foreign.key         common name `foreign`, signed by another authority

issue(directory, name, ...)         more certificates, for reloads and special cases
"""

from __future__ import annotations

import atexit
import functools
import ipaddress
import shutil
import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Pair:
    """A certificate and its key: paths for programs, objects to sign others."""

    cert: Path
    key: Path
    certificate: x509.Certificate
    private_key: Key


@dataclass(frozen=True)
class Certificates:
    ca: Pair
    server: Pair
    client: Pair
    foreign: Pair

    def server_flags(self, **more: object) -> dict[str, object]:
        """The flags that enable TLS in nsqd."""
        return {"tls_cert": str(self.server.cert), "tls_key": str(self.server.key), **more}

    def client_context(self, pair: Pair | None = None) -> ssl.SSLContext:
        """A client context that trusts our server and presents the given certificate."""
        context = ssl.create_default_context(cafile=self.ca.cert)
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context


@functools.cache
def certificates() -> Certificates:
    directory = Path(tempfile.mkdtemp(prefix="nsparq-certificates-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    ca = issue(directory, "ca", is_authority=True)
    return Certificates(
        ca=ca,
        server=issue(directory, "server", signer=ca, hosts=("localhost", "127.0.0.1")),
        client=issue(directory, "client", signer=ca),
        foreign=issue(directory, "foreign", signer=issue(directory, "foreign-ca", is_authority=True)),
    )


def issue(
    directory: Path,
    name: str,
    *,
    signer: Pair | None = None,
    hosts: tuple[str, ...] = (),
    common_names: tuple[str, ...] | None = None,
    is_authority: bool = False,
    is_expired: bool = False,
    is_for_both: bool = False,
    use_rsa: bool = False,
    passphrase: bytes = b"",
) -> Pair:
    """Write name.pem and name.key. Without a signer it is self-signed; with hosts it is for a
    server, unless it is for both sides."""
    key: Key = rsa.generate_private_key(65_537, 2048) if use_rsa else ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, text)
            for text in ((name,) if common_names is None else common_names)
        ]
    )
    issuer, issuer_key = (signer.certificate.subject, signer.private_key) if signer else (subject, key)
    now = datetime.now(UTC)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH]
    if is_for_both:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + timedelta(days=-1 if is_expired else 1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
        .add_extension(_key_usage(is_authority), critical=True)
    )
    if not is_authority:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    certificate = builder.sign(issuer_key, hashes.SHA256())
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key", certificate, key)
    pair.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    return pair


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_encipherment=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
