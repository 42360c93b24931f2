"""Asks nsqd and nsqlookupd over HTTP: http_client.py is the client, api.py has their calls, and
nodes.py finds the nsqd that have the topics."""
