"""Writes an archive of the classes that Spark loads. With it, the JVMs of the tests start much
faster.

`python -m tests.support.spark_classes` loads the classes that most tests use; the JVM writes the
archive when it ends. A JVM of another version or with other libraries ignores it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nsparq.spark.session.build import build_session
from tests.support.spark import CLASSES, FAST, STARTS_FAST

if TYPE_CHECKING:
    import pyarrow as pa


def unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def main() -> None:
    unfinished = CLASSES.with_suffix(".tmp")
    options = f"{STARTS_FAST} -XX:ArchiveClassesAtExit={unfinished} -Xlog:disable"
    conf = {**FAST, "spark.driver.extraJavaOptions": options}
    with tempfile.TemporaryDirectory() as folder:
        spark = build_session("classes", master="local[2]", ui_port=None, conf=conf)
        jvm = spark.sparkContext._gateway.proc
        lines, copy = str(Path(folder) / "lines"), str(Path(folder) / "copy")
        spark.range(10).selectExpr("cast(id as string) as value").write.text(lines)
        stream = spark.readStream.text(lines).mapInArrow(unchanged, "value string").writeStream
        stream.trigger(availableNow=True).start(
            copy, format="parquet", checkpointLocation=f"{folder}/checkpoint"
        ).awaitTermination()
        spark.read.parquet(copy).groupBy("value").count().orderBy("value").collect()
        spark.stop()
        # The JVM ends when its input ends.
        jvm.stdin.close()
        jvm.wait()
    unfinished.replace(CLASSES)
    sys.stdout.write(f"{CLASSES}\n")


if __name__ == "__main__":
    main()
