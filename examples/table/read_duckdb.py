"""Reads a table of `nsparq pipeline table` with DuckDB. Needs nsparq[delta] and duckdb.

DuckDB reads the files through pyarrow, and skips files, row groups and columns that the query does
not need. Its own extension (`SELECT … FROM delta_scan('tables/orders')`) does the same; DuckDB
downloads it at the first use.
"""

import duckdb
from deltalake import DeltaTable

orders = DeltaTable("tables/orders").to_pyarrow_dataset()
count, newest = duckdb.execute(
    "SELECT count(*), max_by(body, timestamp) FROM orders WHERE timestamp >= now() - INTERVAL 1 HOUR"
).fetchone()
print(count, "messages, the newest is", newest)
