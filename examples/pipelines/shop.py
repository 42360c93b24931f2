"""The pipeline of shop.toml, built and run by a Python program.

`python shop.py` runs until Ctrl-C. With `--available-now` it ends when all that is there has been
read.
"""

import signal
import sys
import threading
from datetime import timedelta

from nsparq.pipeline import (
    PipelineFile,
    build_session,
    decoding,
    pipeline,
    pipeline_file,
    run,
    sink,
    source,
    step,
    table,
    watermark,
)

ORDER = "number BIGINT NOT NULL, price DOUBLE, phone STRING, at TIMESTAMP NOT NULL"
PAYMENT = "order_number BIGINT NOT NULL, paid_at TIMESTAMP NOT NULL"
LOCATED = "SELECT number, price, country, at FROM orders LEFT JOIN countries ON startswith(phone, prefix)"
PAID = """
    SELECT number, price, country, paid_at FROM located JOIN payments
    ON number = order_number AND paid_at BETWEEN at AND at + INTERVAL 1 HOUR
"""


def shop(trigger: str = "1s") -> PipelineFile:
    delay = timedelta(seconds=10)
    return pipeline_file(
        __file__,
        {
            "shop": pipeline(
                sources={
                    "orders": source(
                        "orders",
                        decode=decoding("json", schema=ORDER),
                        dead_letters="orders.dead",
                        watermark=watermark("at", delay),
                    ),
                    "payments": source(
                        "payments",
                        decode=decoding("json", schema=PAYMENT),
                        watermark=watermark("paid_at", delay),
                    ),
                },
                tables={"countries": table(csv="countries.csv", schema="prefix STRING, country STRING")},
                step=[step(LOCATED, name="located"), step(PAID, name="paid")],
                sink=[
                    sink(topic="orders.paid"),
                    sink(name="lake", from_="located", parquet="data/located", partition_by=["country"]),
                ],
                trigger=trigger,
            )
        },
        nsq={"nsqd": ["127.0.0.1:4151"]},
    )


def main() -> None:
    file = shop("available-now" if "--available-now" in sys.argv else "1s")
    spark = build_session(file)
    stop = threading.Event()
    # Spark has its own handler for Ctrl-C. Ours replaces it.
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    for one in run(spark, file, stop).pipelines:
        print(one.name, one.state, one.rows, "messages", one.error)
    spark.stop()


if __name__ == "__main__":
    main()
