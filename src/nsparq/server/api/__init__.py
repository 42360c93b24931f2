"""The HTTP API of nsqd: a module for each subject, put together in table.py."""
