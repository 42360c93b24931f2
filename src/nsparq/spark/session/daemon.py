"""Spark's parent of Python worker processes, for local sessions: as Spark's own, but quiet at the end."""

from __future__ import annotations

from pyspark import daemon

from nsparq.spark.session.quiet import hush

if __name__ == "__main__":
    hush()
    daemon.manager()
