"""Upserts by key: the newest row of a micro-batch for each key, and when it replaces the row of the
table.

The columns `latest_by` order the rows of a key. Without them, all rows of a key must be equal,
because nothing says which one is newer. The sinks (`delta`, `jdbc`) merge these rows, in one
transaction per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StructType,
    VariantType,
)

from nsparq.pipeline.errors import PipelineError

ORIGIN: Final = ("_timestamp", "_offset")
"""Default of `latest_by` if the rows have both: time of publishing, and position in the log."""

_NO_ORDER: Final = (BinaryType, ArrayType, MapType, StructType, VariantType)
_NO_KEY: Final = (*_NO_ORDER, DoubleType, FloatType)
"""Types that databases compare differently, or not at all."""

_NUMBER, _RANK, _NEXT = "_nsparq_number", "_nsparq_rank", "_nsparq_next"


@dataclass(frozen=True, slots=True)
class Upsert:
    key: tuple[str, ...]
    latest_by: tuple[str, ...]
    """Empty if the rows have no order."""

    @classmethod
    def of(cls, key: Sequence[str], latest_by: Sequence[str], rows: StructType, place: str) -> Upsert:
        """Checks the columns of the rows. Raises PipelineError."""
        types = {one.name: one.dataType for one in rows.fields}
        if not latest_by and types.keys() >= set(ORIGIN):
            latest_by = ORIGIN
        for setting, names, refused in (("key", key, _NO_KEY), ("latest_by", latest_by, _NO_ORDER)):
            for name in names:
                if name not in types:
                    known = ", ".join(types)
                    raise PipelineError(f"{place} {setting}: there is no column {name!r}; there are {known}")
                if isinstance(types[name], refused):
                    shown = types[name].simpleString().upper()
                    raise PipelineError(
                        f"{place} {setting}: {name!r} is {shown}, which cannot be compared reliably; cast it "
                        "to another type"
                    )
        return cls(tuple(key), tuple(latest_by))

    def latest_rows(self, rows: DataFrame, empty_is_null: Collection[str] = ()) -> DataFrame:
        """The newest row of each key, computed in one pass. The job fails if a key is null, or if
        two different rows of a key are equally new. An empty string in `empty_is_null` is null."""
        order = [column(name).desc_nulls_last() for name in self.latest_by]
        window = Window.partitionBy(*map(column, self.key)).orderBy(*(order or map(column, self.key)))
        columns = [column(name) for name in rows.columns]
        numbered = rows.select(
            *columns,
            F.row_number().over(window).alias(_NUMBER),
            F.rank().over(window).alias(_RANK),
            F.lead(F.struct(*columns)).over(window).alias(_NEXT),
        )
        types = {one.name: one.dataType for one in rows.schema.fields}

        def is_same(name: str) -> Column:
            mine, following = column(name), column(_NEXT).getField(name)
            if _has_map(types[name]):
                # Spark cannot compare maps.
                mine, following = mine.cast("string"), following.cast("string")
            return mine.eqNullSafe(following)

        is_tie = (column(_RANK) == 1) & column(_NEXT).isNotNull() & _all(map(is_same, self.latest_by))
        is_null = reduce(or_, (column(name).isNull() for name in self.key))
        for name in empty_is_null:
            is_null |= column(name) == ""
        shown = F.to_json(F.struct(*map(column, self.key)), {"ignoreNullFields": "false"})
        counts = (
            F.when(is_null, _fail("a row has null in its key: ", shown, ""))
            .when(
                is_tie & ~_all(map(is_same, rows.columns)),
                _fail("a micro-batch has different rows with the key ", shown, f", and {self._missing}"),
            )
            .otherwise(column(_NUMBER) == 1)
        )
        return numbered.where(counts).select(*columns)

    @property
    def _missing(self) -> str:
        if not self.latest_by:
            return "nothing says which one is newer: set latest_by"
        names = ", ".join(self.latest_by)
        return f"the same {names}: add columns to latest_by that say which one is newer"

    def is_later(self, new: Callable[[str], str], old: Callable[[str], str]) -> str:
        """SQL condition: the new row is not older than the row of the table. Empty if always true.
        `new` and `old` return the SQL names of a column in the two rows."""
        condition = ""
        for name in reversed(self.latest_by):
            mine, theirs = new(name), old(name)
            if not condition:
                condition = f"{mine} >= {theirs} OR {theirs} IS NULL"
                continue
            condition = (
                f"{mine} > {theirs} OR ({theirs} IS NULL AND {mine} IS NOT NULL) OR "
                f"(({mine} = {theirs} OR ({mine} IS NULL AND {theirs} IS NULL)) AND ({condition}))"
            )
        return condition


def compute_only(batch: DataFrame) -> None:
    """Computes a micro-batch that the sink has already, and discards it. Otherwise Spark would not
    update the state of an aggregation, and would fail the micro-batch."""
    batch.write.format("noop").mode("overwrite").save()


def column(name: str) -> Column:
    """A column by its whole name, which may have dots and backticks."""
    return F.col("`" + name.replace("`", "``") + "`")


def _all(conditions: object) -> Column:
    return reduce(and_, conditions, F.lit(True))  # type: ignore[call-overload, no-any-return]


def _fail(before: str, shown: Column, after: str) -> Column:
    return F.raise_error(F.concat(F.lit(before), shown, F.lit(after)))


def _has_map(one: DataType) -> bool:
    if isinstance(one, StructType):
        return any(_has_map(field.dataType) for field in one.fields)
    return _has_map(one.elementType) if isinstance(one, ArrayType) else isinstance(one, MapType | VariantType)
