"""The step of shop.toml that SQL cannot express."""

from __future__ import annotations

from pyspark.sql import DataFrame

__all__ = ["without_duplicates"]


def without_duplicates(events: DataFrame) -> DataFrame:
    """Drops duplicates. Spark remembers an id until the watermark has passed its event."""
    return events.dropDuplicatesWithinWatermark(["id"])
