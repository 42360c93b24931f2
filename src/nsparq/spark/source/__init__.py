"""Log mode: reads the log of nsparq's nsqd as a batch or a stream, exactly once.

batch.py, stream.py   Spark's API for spark.read and spark.readStream
driver.py             LogSource: plans how far each micro-batch reads
  bounds.py             where reading begins and ends, by the options
  peers.py              the nodes: who answers, the state of their logs
  channels.py           moves the query's channel along
  losses.py             messages that are gone before they were read
  ranges.py, plan.py    cuts a batch into ranges and tasks
positions.py          offsets in the checkpoint, and positions written by a user
filters.py            filters that Spark pushes down to a batch
range_reader.py       in a task: fetches a range of a log
arrow.py              in a task: decodes raw batches to Arrow
"""
