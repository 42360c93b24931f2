"""How the client reaches nsqd and nsqlookupd: connections, their handshake, lookups, secrets."""
