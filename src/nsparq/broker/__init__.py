"""Topics, channels and the rules of delivery. Synchronous: no sockets, no tasks, time is an
argument."""
