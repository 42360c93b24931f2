"""HTTP/1.1 for the daemons: tables of endpoints, and a server on a parser in C."""
