"""Running pipelines, checking them, and trying them on a few messages.

- `runner` runs all pipelines of a file; `status` publishes their status, `view` shows it
- `running_pipeline`: one pipeline; starts, restarts and stops it, and counts in `progress`
- `queries` builds and starts the streaming queries of a pipeline, with `schemas` (columns of the
  messages), `beginnings` (positions in the log), `tables` and `steps`
- `check` has Spark check a pipeline; `state_check` compares it with its checkpoint
- `trial`: `nsparq pipeline try`, and `nsparq.testing.try_pipeline`
- `batch_read`: messages as a batch, for `stats` and for `replay`, which publishes them again
"""
