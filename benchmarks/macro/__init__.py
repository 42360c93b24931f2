"""Loads put on whole daemons, over real sockets, from processes of their own."""
