"""Spark's filter push-down to a Python source is wrong for a DataFrame used twice.

    python -m benchmarks.decisions.filter_pushdown

Spark plans the reading of a Python source once for each DataFrame, keeps the plan, and puts a new
one in its place whenever filters are pushed down. So a query without filters reads what the last
one with filters has left over, and of two filters in one query both scans get the rows of the
second. With Spark 4.2.1 and 4.3.0:

    all of ten rows                  10: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    a < 5                             5: [0, 1, 2, 3, 4]
    all of them again                 5: [0, 1, 2, 3, 4], expected [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    a < 2 and a >= 8, in a union      4: [8, 8, 9, 9], expected [0, 1, 8, 9]

Chosen: the option `pushFilters` is off, as Spark's own setting is. When this prints what is
expected, it can be on for that version of Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyspark.sql import DataFrame
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    Filter,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
)
from pyspark.sql.types import StructType

from nsparq.spark.session.build import build_session


class Ten(DataSource):
    """The numbers from 0 to 9."""

    @classmethod
    def name(cls) -> str:
        return "ten"

    def schema(self) -> str:
        return "a bigint"

    def reader(self, schema: StructType) -> DataSourceReader:
        return TenReader()


class TenReader(DataSourceReader):
    def __init__(self) -> None:
        self.low, self.high = 0, 10

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for one in filters:
            if isinstance(one, LessThan):
                self.high = min(self.high, one.value)
            elif isinstance(one, GreaterThanOrEqual):
                self.low = max(self.low, one.value)
            else:
                yield one

    def partitions(self) -> list[InputPartition]:
        return [InputPartition((self.low, self.high))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        for number in range(*partition.value):
            yield (number,)


def main() -> int:
    conf = {"spark.sql.python.filterPushdown.enabled": "true"}
    spark = build_session("decisions", master="local[2]", ui_port=None, conf=conf)
    try:
        spark.dataSource.register(Ten)
        frame = spark.read.format("ten").load()
        tried: list[tuple[str, DataFrame, list[int]]] = [
            ("all of ten rows", frame, [*range(10)]),
            ("a < 5", frame.where("a < 5"), [*range(5)]),
            ("all of them again", frame.select("a"), [*range(10)]),
            ("a < 2 and a >= 8, in a union", frame.where("a < 2").union(frame.where("a >= 8")), [0, 1, 8, 9]),
        ]
        for what, asked, expected in tried:
            found = sorted(row.a for row in asked.collect())
            wrong = f", expected {expected}" if found != expected else ""
            print(f"{what:<30} {len(found):>4}: {found}{wrong}")
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
