"""Sinks: how the rows of a micro-batch are written.

- `sinks`: the stream writer for each kind of sink, `prepared` and `writer_of`
- `file_sink`: the Spark data source for files; it writes through one of the next two
- `parquet_table`: a directory of Parquet files. `part_files` writes them in the tasks, a commit in
  the driver adds them to the table, `compact` joins small ones
- `delta`: a Delta table; `delta_upkeep` joins its small files and removes old versions
- `direct_parquet`: files written by the tasks that read the log; rows do not pass through Spark
- `jdbc`: database tables; `upsert` and `upsert_sql` are for sinks with a key

To add a kind of sink, change these files in this order:

1. `file/sinks.py`: write a class with its keys and their rules, and add it to `SINKS`, the list of
   kinds. The reader, the reference page and the error texts use that list.
2. `write/sinks.py`: register a `writer_of` for the class, and a `prepared` if the sink needs other
   columns. A sink that Spark does not have uses `foreachBatch`; its code goes into a new module. To
   be exactly once, it keeps the number and the fingerprint of the last batch (`Target.planned`)
   with its data, and `check_batch` compares them.
3. `tests/pipeline/file/test_reading.py` (keys and problems) and `tests/pipeline/write` (rows, and a
   batch that runs again).
4. `make docs` writes the reference page. Describe the sink in docs/pipelines.md.
"""
