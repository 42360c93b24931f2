"""Spark's API for stream readers, which needs Spark 4.2: with 4.1 the import raises SparkTooOld.

Before 4.2 Spark did not tell a reader where a micro-batch starts. After a restart the reader could
not know which messages the sink has, so it could not read exactly once while an nsqd is away.
"""

from __future__ import annotations

import pyspark

from nsparq.spark.errors import SparkTooOld

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ModuleNotFoundError as error:
    raise SparkTooOld(pyspark.__version__) from error

__all__ = [
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
]
