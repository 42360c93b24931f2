"""What a client may make an HTTP server keep, and for how long. Looked up where they are used."""

from typing import Final

MAX_HEAD: Final = 64 << 10
"""Bytes of a request line with its headers."""
MAX_KNOWN: Final = 1 << 10
"""Longer heads are not remembered."""
MAX_HEADS: Final = 1 << 10
MAX_PARTIAL: Final = 4 * MAX_HEAD
"""Bytes that may arrive of one before it is whole."""
MAX_QUEUED: Final = 32
"""Pipelined requests that may wait before the client is not read from."""
MAX_QUEUED_BYTES: Final = 1 << 20
"""And the bytes of their bodies."""
MAX_GATHERED: Final = 256 << 20
"""Bytes of bodies, over all connections of a server, at which further ones are refused."""
MAX_DROPPED: Final = 1 << 20
"""Bytes of a body that nobody wants which are read all the same, so that the connection can go on."""
LARGE: Final = 64 << 10
"""Bodies of this size are sent apart from their head, which saves a copy."""
MAX_UNREAD: Final = 256 << 20
"""Bytes of answers that clients have not read yet at which nothing further is answered but that."""
WRITE_HIGH: Final = 1 << 20
HEAD_S: Final = 10.0
"""How long a request's headers may take."""
BODY_S: Final = 60.0
"""How long its body may take, and how long a client may leave an answer unread."""
IDLE_S: Final = 300.0
"""How long a connection is kept for the next request."""
PUMP_S: Final = 0.005
"""How long the pipelined requests of one client are answered before the others have their turn."""
LINGER_S: Final = 2.0
"""How long a refused client may go on sending before the connection ends under it."""
SWEEP_S: Final = 1.0
DRAIN_S: Final = 2.0
