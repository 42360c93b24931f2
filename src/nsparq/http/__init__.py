"""HTTP/1.1 for the daemons: endpoints declared in a table, served by a thin protocol on a C parser."""
