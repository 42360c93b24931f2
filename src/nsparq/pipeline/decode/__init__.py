"""Decoding: from message bodies to columns, and to dead letters for messages that do not decode.

- `messages`: a DataFrame of messages in, rows and dead letters out; every query uses it
- `avro`, `protobuf`, `json_schema`: one format each, without Spark; `formats` has common parts
- `samples` infers columns from sample messages
- `reasons` says why a message does not decode
"""
