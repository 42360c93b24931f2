"""Writes rows to topics: tasks stage them in nsqd, then one commit publishes all of them.

writers.py   Spark's API for df.write and df.writeStream
nodes.py     which nsqd to publish to, and which delivery guarantee they allow
rows.py      in a task: Arrow batches to chunks
send.py      in a task: sends chunks, retries (pipe.py: one pipelined HTTP connection)
commit.py    in the planner: the transaction over all nodes
"""
