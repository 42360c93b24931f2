"""A session on a cluster, as a user has it: MASTER CONF OPTIONS (the last two as JSON); prints JSON lines."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator

import pyarrow
from pyspark.sql import functions

from nsparq.spark.session import build_session


def where(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Each task says where it found the connector."""
    import nsparq.spark.datasource

    for _ in batches:
        yield pyarrow.RecordBatch.from_pydict({"file": [nsparq.spark.datasource.__file__]})


def tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    master, conf, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    spark = build_session("cluster test", master=master, ui_port=None, conf=conf)
    batch = spark.read.format("nsq").options(**options["batch"]).load()
    row = batch.agg(functions.count("*"), functions.countDistinct("body")).first()
    assert row is not None
    files = {row.file for row in batch.limit(1).mapInArrow(where, "file string").collect()}
    tell(rows=row[0], distinct=row[1], files=sorted(files))
    with tempfile.TemporaryDirectory() as checkpoint:
        stream = spark.readStream.format("nsq").options(**options["stream"]).load()
        writer = stream.select("body").writeStream.format("nsq").options(**options["sink"])
        writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
        query = writer.start()
        query.awaitTermination()
        tell(batches=query.lastProgress["batchId"] + 1)  # type: ignore[index]
    spark.stop()


if __name__ == "__main__":
    main()
