"""Reads a table of `nsparq pipeline table` with Polars. Needs nsparq[delta] and polars."""

from datetime import UTC, datetime, timedelta

import polars as pl

an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
orders = (
    pl.scan_delta("tables/orders")
    .filter(pl.col("timestamp") >= an_hour_ago)
    .select("timestamp", "body")
    .sort("timestamp")
    .collect()
)
print(len(orders), "messages, the newest is", orders["body"][-1])
