"""Topic -> streaming table -> materialized view -> topic."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
NSQD = os.environ.get("NSQD", "127.0.0.1:4151")
SCHEMA = "number BIGINT, item STRING, price DOUBLE, at TIMESTAMP"


@dp.table
def orders() -> DataFrame:
    """Every order. Spark finds format("nsq") by the installed package pyspark_nsq."""
    messages = (
        spark.readStream.format("nsq")
        .option("nsqd", NSQD)
        .option("topic", "orders")
        .option("channel", "shop")
        .load()
    )
    return messages.selectExpr(f"from_json(CAST(body AS STRING), '{SCHEMA}') AS o", "offset").select(
        "o.*", "offset"
    )


@dp.materialized_view
def revenue() -> DataFrame:
    return spark.table("orders").groupBy("item").agg({"price": "sum", "*": "count"})


dp.create_sink("large_orders", "nsq", {"nsqd": NSQD, "topic": "orders.large"})


@dp.append_flow(target="large_orders")
def to_large_orders() -> DataFrame:
    return spark.readStream.table("orders").where("price > 4").selectExpr("to_json(struct(*)) AS body")
