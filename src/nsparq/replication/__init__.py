"""Replication: followers keep a copy of a data path, call by call.

`changes` is the form of a change on the wire, `recording` writes the changes of a primary down, and
`applying` makes them in a follower's data path.
"""
