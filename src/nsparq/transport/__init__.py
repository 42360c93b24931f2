"""Transport layers of a connection: bytes into bytes, no socket. Shared by server and client."""
