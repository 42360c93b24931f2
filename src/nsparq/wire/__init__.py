"""NSQ's TCP protocol as bytes and values: no sockets, no clock, no tasks."""
