"""TLS between the nodes of a cluster, in both directions: each node shows a certificate, and each
checks that the cluster's certificate authority has signed the other's.

Host names are not checked: a node is whoever has a certificate of the authority and the cluster's
secret. So the authority must be one that signs for the cluster alone.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from nsparq.errors import StartError


class NodeTls:
    """Both sides of a node. Raises StartError if a file cannot be used."""

    def __init__(self, cert: Path, key: Path, root_ca_file: Path) -> None:
        self._cert, self._key, self._root_ca_file = cert, key, root_ca_file
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.client.check_hostname = False
        for context in (self.server, self.client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
        self.load()

    def load(self) -> None:
        """Read the files, again too: new connections use what they have now. Raises StartError, and
        then what was loaded before stays."""
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.server, self.client):
            try:
                context.load_cert_chain(self._cert, self._key)
            except (OSError, ValueError) as error:
                pair = f"--replication-tls-cert {self._cert} and --replication-tls-key {self._key}"
                raise StartError(f"{pair} cannot be used: {_reason(error)}") from error
            try:
                context.load_verify_locations(self._root_ca_file)
            except (OSError, ValueError) as error:
                flag = f"--replication-tls-root-ca-file {self._root_ca_file}"
                raise StartError(f"{flag} cannot be used: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
