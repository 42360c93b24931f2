"""An archive of Java's loaded classes (`nsparq spark warm`), which halves the start-up time of a
session.

Making it takes half a minute and some 200 MB, so it is made only on request, in the cache. It fits
one Java and one set of Spark's jars; Java ignores an archive that does not fit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from nsparq.errors import NsparqError
from nsparq.spark.session.cache import cache_directory, digest, make_once
from nsparq.spark.session.home import linked_home, named_home
from nsparq.spark.session.java import Java, find_java

__all__ = ["ArchiveFailed", "archive_options", "archive_path", "make_archive"]

TIMEOUT: Final = 300.0
FIRST_WITH_CACHE: Final = 25
"""The first Java that makes an archive (an "AOT cache") without a base archive."""


class ArchiveFailed(NsparqError):
    """The archive could not be made. The text says why."""


def archive_path(java: Java) -> Path | None:
    """Where the archive for this Java and this Spark belongs. None if they support none."""
    home = linked_home()
    if home is None or named_home() is not None:
        return None
    if java.major < FIRST_WITH_CACHE and not (java.home / "lib" / "server" / "classes.jsa").exists():
        return None
    jars = sorted(entry.name for entry in os.scandir(home / "jars"))
    stamps = [(home / "jars" / name).stat().st_mtime_ns for name in jars]
    itself = java.executable.stat()
    key = digest(java.home, java.version, itself.st_size, itself.st_mtime_ns, *jars, *stamps)
    return cache_directory() / f"startup-{digest(home)}-{key}"


def archive_options(java: Java) -> list[str]:
    """Options that make Java use the archive, if it exists."""
    path = archive_path(java)
    if path is None or not path.exists():
        return []
    # Without warnings about an archive that does not fit.
    if java.major < FIRST_WITH_CACHE:
        return [f"-XX:SharedArchiveFile={path}", "-Xlog:cds*=off"]
    return [f"-XX:AOTCache={path}", "-Xlog:aot*=off", "-Xlog:cds*=off"]


def make_archive() -> Path:
    """Run a session with all common features, and archive the classes that it loads."""
    java = find_java()
    path = archive_path(java)
    if path is None:
        raise ArchiveFailed(f"Java {java.version} in {java.home} cannot make an archive for this Spark")
    make_once(path, lambda aside: _train(java, aside))
    for other in path.parent.glob(f"{path.name.rpartition('-')[0]}-*"):
        if other != path:
            other.unlink(missing_ok=True)
    return path


def _train(java: Java, path: Path) -> None:
    option = "AOTCacheOutput" if java.major >= FIRST_WITH_CACHE else "ArchiveClassesAtExit"
    command = [sys.executable, "-m", __name__, f"-XX:{option}={path}"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ArchiveFailed(f"the training session did not end within {TIMEOUT:.0f} s") from error
    if done.returncode != 0 or not path.exists():
        output = done.stdout.decode(errors="replace").strip()
        raise ArchiveFailed(f"the training session ended with status {done.returncode}: {output[-2000:]}")


def _training_session(java_option: str) -> None:
    from pyspark import SparkContext

    from nsparq.spark.session.build import build_session

    with tempfile.TemporaryDirectory() as scratch:
        spark = build_session(
            master="local[2]", ui_port=0, conf={"spark.driver.extraJavaOptions": java_option}
        )
        rows = spark.range(1000).selectExpr("id % 7 AS key", "CAST(id AS STRING) AS text")
        rows.createOrReplaceTempView("rows")
        spark.sql("SELECT key, count(*), max(text) FROM rows GROUP BY key").collect()
        rows.write.partitionBy("key").parquet(f"{scratch}/in")
        rows.mapInArrow(lambda batches: batches, rows.schema).count()
        stream = spark.readStream.schema("text STRING, key INT").parquet(f"{scratch}/in")
        counts = stream.groupBy("key").count().writeStream.outputMode("complete").format("noop")
        plain = stream.writeStream.format("parquet").option("path", f"{scratch}/out")
        for name, writer in (("counts", counts), ("plain", plain)):
            query = (
                writer.option("checkpointLocation", f"{scratch}/{name}").trigger(availableNow=True).start()
            )
            query.awaitTermination()
        spark.stop()
        # The JVM writes the archive when it ends.
        gateway = SparkContext._gateway
        assert gateway is not None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(TIMEOUT)


if __name__ == "__main__":
    _training_session(sys.argv[1])
