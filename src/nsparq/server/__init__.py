"""The daemon: event loop, sockets, limits, start and shutdown."""
