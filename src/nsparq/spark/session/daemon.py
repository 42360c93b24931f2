"""Parent of the Python workers of a local session: Spark's own daemon, without tracebacks at the
end."""

from __future__ import annotations

from pyspark import daemon

from nsparq.spark.worker import hide_lost_jvm_tracebacks

if __name__ == "__main__":
    hide_lost_jvm_tracebacks()
    daemon.manager()
