"""Upserts by key: which row of a micro-batch counts for each key, and when it replaces the row of the table.

The columns `latest_by` order the rows of a key. Without them, any two rows of a key must be equal: nothing
would say which of them to take. The sinks do the rest, each in one transaction per micro-batch.
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

__all__ = ["Upsert", "compute_only"]

ORIGIN: Final = ("_timestamp", "_offset")
"""When a message was published, and its place in the log: what `latest_by` is if the rows have both."""

_NO_ORDER: Final = (BinaryType, ArrayType, MapType, StructType, VariantType)
_NO_KEY: Final = (*_NO_ORDER, DoubleType, FloatType)
"""Engines differ in how they compare these types, or cannot."""

_NUMBER, _RANK, _NEXT = "_nsparq_number", "_nsparq_rank", "_nsparq_next"


@dataclass(frozen=True, slots=True)
class Upsert:
    key: tuple[str, ...]
    latest_by: tuple[str, ...]
    """Empty if nothing orders the rows."""

    @classmethod
    def of(cls, key: Sequence[str], latest_by: Sequence[str], rows: StructType, place: str) -> Upsert:
        """For rows with these columns. Raises PipelineError."""
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
        """One row for each key, computed in one pass. The job fails at a key that is null, and at two rows of
        a key of which neither is the later, unless they are equal. In the columns `empty_is_null` an empty
        text counts as null."""
        order = [_col(name).desc_nulls_last() for name in self.latest_by]
        window = Window.partitionBy(*map(_col, self.key)).orderBy(*(order or map(_col, self.key)))
        columns = [_col(name) for name in rows.columns]
        numbered = rows.select(
            *columns,
            F.row_number().over(window).alias(_NUMBER),
            F.rank().over(window).alias(_RANK),
            F.lead(F.struct(*columns)).over(window).alias(_NEXT),
        )
        types = {one.name: one.dataType for one in rows.schema.fields}

        def is_same(name: str) -> Column:
            mine, following = _col(name), _col(_NEXT).getField(name)
            if _has_map(types[name]):
                # Spark compares no maps.
                mine, following = mine.cast("string"), following.cast("string")
            return mine.eqNullSafe(following)

        is_tie = (_col(_RANK) == 1) & _col(_NEXT).isNotNull() & _all(map(is_same, self.latest_by))
        is_null = reduce(or_, (_col(name).isNull() for name in self.key))
        for name in empty_is_null:
            is_null |= _col(name) == ""
        shown = F.to_json(F.struct(*map(_col, self.key)), {"ignoreNullFields": "false"})
        counts = (
            F.when(is_null, _fail("a row has no value for its key: ", shown, ""))
            .when(
                is_tie & ~_all(map(is_same, rows.columns)),
                _fail("a micro-batch has different rows with the key ", shown, f", and {self._missing}"),
            )
            .otherwise(_col(_NUMBER) == 1)
        )
        return numbered.where(counts).select(*columns)

    @property
    def _missing(self) -> str:
        if not self.latest_by:
            return "nothing says which of them is the later: set latest_by"
        names = ", ".join(self.latest_by)
        return f"the same {names}: name further columns in latest_by that tell which of them is the later"

    def is_later(self, new: Callable[[str], str], old: Callable[[str], str]) -> str:
        """SQL: the new row is not older than the table's. Empty if that is always so. `new` and `old` give
        the columns of the two their names."""
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
    """For a micro-batch that the sink has already. Spark keeps the state of an aggregation as its rows are
    computed, and fails a micro-batch of which nobody has asked for all of them."""
    batch.write.format("noop").mode("overwrite").save()


def _col(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


def _all(conditions: object) -> Column:
    return reduce(and_, conditions, F.lit(True))  # type: ignore[call-overload, no-any-return]


def _fail(before: str, shown: Column, after: str) -> Column:
    return F.raise_error(F.concat(F.lit(before), shown, F.lit(after)))


def _has_map(one: DataType) -> bool:
    if isinstance(one, StructType):
        return any(_has_map(field.dataType) for field in one.fields)
    return _has_map(one.elementType) if isinstance(one, ArrayType) else isinstance(one, MapType | VariantType)
