"""The part of Spark's API for stream readers that Spark 4.2 has added. With Spark 4.1 the import is refused.

Before 4.2 a reader was not told where a micro-batch starts. After a restart it could not know which messages
the sink has, so it could neither keep the place of an nsqd that is away nor be exactly once.
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
