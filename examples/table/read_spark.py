"""Reads a table of `nsparq pipeline table` with Spark, without a JAR. Needs nsparq[spark,delta].

deltalake knows which files belong to the table, and Spark reads them in parallel, as they are now.
For a table in an object store Spark needs the store's file system, such as Hadoop's JAR for S3.
With Delta's own JAR it is `spark.read.format("delta").load("tables/orders")`, also as a stream.
"""

from pathlib import Path

from deltalake import DeltaTable

from nsparq.spark import build_session

TABLE = str(Path("tables/orders").resolve())

spark = build_session("orders", master="local[2]")
files = DeltaTable(TABLE).file_uris()
orders = spark.read.option("basePath", TABLE).option("mergeSchema", "true").parquet(*files)
orders.createOrReplaceTempView("orders")
(row,) = spark.sql(
    "SELECT count(*) AS count, max_by(body, timestamp) AS newest FROM orders "
    "WHERE timestamp >= now() - INTERVAL 1 HOUR"
).collect()
print(row["count"], "messages, the newest is", bytes(row["newest"]))
spark.stop()
