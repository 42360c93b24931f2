"""Topics in a notebook: run it cell by cell in an editor that supports `# %%`, or as a script."""

# %% A session, with Java, the connector and the settings.
from nsparq.spark import build_session

spark = build_session("notebook", master="local[2]")
NSQD = "127.0.0.1:4151"

# %% A topic as a table, with all messages that nsqd has.
messages = spark.read.format("nsq").option("nsqd", NSQD).option("topic", "orders").load()
messages.printSchema()
print(messages.count(), "messages")

# %% JSON to columns. `from_json` needs a schema, inferred from a sample.
from nsparq.pipeline.decode.samples import infer_json  # noqa: E402

schema = infer_json(bytes(row.body) for row in messages.limit(100).collect())
print(schema)
messages.createOrReplaceTempView("messages")
orders = spark.sql(
    f"SELECT order.*, offset FROM (SELECT from_json(CAST(body AS STRING), '{schema}') AS order, offset FROM "
    "messages)"
)
orders.createOrReplaceTempView("orders")
spark.sql(
    "SELECT item, count(*) AS sold, round(sum(price), 2) AS revenue FROM orders GROUP BY item ORDER BY item"
).show()

# %% The same topic as a stream, into a table in memory. The depth of its channel is its lag. The
# channel is shared ("ownChannel" is false): without a permanent checkpoint, each run of this cell
# is a new query.
stream = (
    spark.readStream.format("nsq")
    .option("nsqd", NSQD)
    .option("topic", "orders")
    .option("channel", "notebook")
    .option("ownChannel", "false")
    .load()
)
query = (
    stream.selectExpr("window(timestamp, '1 minute').start AS minute", "length(body) AS size")
    .groupBy("minute")
    .agg({"size": "sum", "*": "count"})
    .writeStream.format("memory")
    .queryName("minutes")
    .outputMode("complete")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
spark.table("minutes").show()

# %% Rows become messages: only a column `body` is needed.
(
    spark.sql("SELECT to_json(struct(item, count(*) AS sold)) AS body FROM orders GROUP BY item")
    .write.format("nsq")
    .option("nsqd", NSQD)
    .option("topic", "sold")
    .mode("append")
    .save()
)

# %% A pipeline file, run in this session until all present messages have been read.
import threading  # noqa: E402
from pathlib import Path  # noqa: E402

from nsparq.pipeline.execute import runner  # noqa: E402
from nsparq.pipeline.file.reading import parse  # noqa: E402

FILE = f"""
[nsq]
nsqd = ["{NSQD}"]

[pipeline.cheap]
source = "orders"
decode = {{ format = "json", schema = "{schema}" }}
dead_letters = "orders.dead"
sql = "SELECT number, price FROM input WHERE price < 4"
sink = {{ memory = "cheap" }}
trigger = "available-now"
"""
status = runner.run(spark, parse(FILE, Path("notebook.toml")), threading.Event())
for pipeline in status.pipelines:
    print(pipeline.name, pipeline.state, pipeline.rows, "rows", pipeline.dead_letters, "dead letters")
print(spark.table("cheap").count(), "cheap orders")

# %%
spark.stop()
