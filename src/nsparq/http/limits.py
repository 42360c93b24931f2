"""Limits on what a client can make an HTTP server keep, and for how long.

Code reads them from this module at each use, so that tests can change them.
"""

from typing import Final

MAX_HEAD: Final = 64 << 10
"""Bytes of a request line with its headers."""
MAX_KNOWN: Final = 1 << 10
"""Longest head that the server remembers, in bytes."""
MAX_HEADS: Final = 1 << 10
"""Heads that the server remembers."""
MAX_PARTIAL: Final = 4 * MAX_HEAD
"""Bytes that may arrive of a head before it is complete."""
MAX_QUEUED: Final = 32
"""Pipelined requests that may wait. With more, the client is not read from."""
MAX_QUEUED_BYTES: Final = 1 << 20
"""Bytes of their bodies."""
MAX_GATHERED: Final = 256 << 20
"""Bytes of bodies over all connections of a server. Further ones are refused."""
MAX_DROPPED: Final = 1 << 20
"""Bytes of an unwanted body that are read, so that the connection can stay open."""
LARGE: Final = 64 << 10
"""Bodies of this size are written separately from their head, which saves a copy."""
MAX_UNREAD: Final = 256 << 20
"""Bytes of responses that slow clients have not read. With more, requests get 503."""
WRITE_HIGH: Final = 1 << 20
"""Bytes of responses of one client above which it is not read from."""
HEAD_S: Final = 10.0
"""Time for the headers of a request."""
BODY_S: Final = 60.0
"""Time for the body of a request, and for a client to read a response."""
IDLE_S: Final = 300.0
"""Time that a connection waits for the next request."""
PUMP_S: Final = 0.005
"""Time for the pipelined requests of one client before others are served."""
LINGER_S: Final = 2.0
"""Time that a refused client may go on sending before its connection is closed."""
SWEEP_S: Final = 1.0
DRAIN_S: Final = 2.0
