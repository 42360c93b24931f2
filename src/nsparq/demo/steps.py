"""A step of shop.toml that SQL has no words for."""

from __future__ import annotations

from pyspark.sql import DataFrame

__all__ = ["without_duplicates"]


def without_duplicates(events: DataFrame) -> DataFrame:
    """What was sent twice counts once. An id is remembered as long as its event could still come."""
    return events.dropDuplicatesWithinWatermark(["id"])
