"""Reads a table of `nsparq pipeline table` with pandas. Needs nsparq[delta] and pandas."""

from datetime import UTC, datetime, timedelta

from deltalake import DeltaTable

an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
orders = DeltaTable("tables/orders").to_pandas(
    columns=["timestamp", "body"], filters=[("timestamp", ">=", an_hour_ago)]
)
print(len(orders), "messages, the newest is", orders.sort_values("timestamp").body.iloc[-1])
