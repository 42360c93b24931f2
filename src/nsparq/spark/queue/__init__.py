"""Queue mode: consumes a channel of any nsqd, also one without a log, as a stream.

reader.py       Spark's API for spark.readStream
planner.py      in the driver: when a batch starts, and who gives how many messages
task.py         in a task: takes messages, stages them, finishes them, returns rows
connection.py   in a task: the TCP connection (frames.py: many frames to Arrow at once)
staging.py      the directory that keeps messages from their FIN until the sink has them
"""
