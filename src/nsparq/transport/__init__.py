"""Transport layers of a connection: TLS and compression without sockets, for server and client."""
