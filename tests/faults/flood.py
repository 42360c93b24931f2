"""A client that keeps sending and does not read."""

from __future__ import annotations

import socket
import time

MOST_BYTES = 256 << 20
"""Far more bytes than a server and the system buffer for a client that does not read."""


def send_until_held_back(connection: socket.socket, block: bytes, unit: int) -> int:
    """Send whole units, of which `block` has many, until for a second nothing is taken. Gives how
    many bytes that were. Leaves the socket non-blocking."""
    sent = 0
    # Otherwise the system would take megabytes of answers for it, and the server would have to make
    # them.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.setblocking(False)
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 1:
        assert sent < MOST_BYTES, f"{sent // unit} taken, and no end"
        try:
            sent += connection.send(block[sent % unit :])
            quiet_since = time.monotonic()
        except BlockingIOError:
            time.sleep(0.02)
    return sent
