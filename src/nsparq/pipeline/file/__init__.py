"""The pipeline file: from TOML, or a Python program, to checked values. Needs no Spark.

- `reading` reads a file and reports every problem; with `checks` and `nsq_options`
- `builder` gives the same values from a Python program
- `spec` has the values: `PipelineFile`, `Pipeline`, `Source`, `Decode`, `Step`, `Output`
- `sinks` and `tables` have the kinds of sinks, and of tables to join with
- `keys` makes TOML tables of dataclasses, and reads each kind of value
- `reference` prints the reference page, generated from these classes
- `ready_made` has the files that the commands `new`, `archive` and `stats` write
"""
