"""Avro messages as a table, without a pipeline file. Needs nsparq[spark,formats]."""

from pathlib import Path

from nsparq.pipeline.functions import from_avro
from nsparq.spark import build_session

NSQD = "127.0.0.1:4151"

spark = build_session("avro", master="local[2]")
messages = spark.read.format("nsq").option("nsqd", NSQD).option("topic", "orders.avro").load()
order = from_avro("body", Path("order.avsc").read_text())
orders = messages.select("offset", order.alias("order"))
orders.where("order.error IS NULL").select("order.row.*").orderBy("number").show()
orders.where("order.error IS NOT NULL").select("offset", "order.error").show(truncate=False)
spark.stop()
