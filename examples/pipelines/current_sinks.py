"""Functions that current.toml calls with each micro-batch and its number."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame

DIRECTORY = Path(__file__).parent / "data" / "deliveries"


def save_delivery(batch: DataFrame, number: int) -> None:
    """One directory for each micro-batch. A batch that runs again replaces what it wrote before, so
    the result is exactly once."""
    batch.coalesce(1).write.mode("overwrite").json(str(DIRECTORY / f"batch={number}"))
