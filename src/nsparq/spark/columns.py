"""The columns of a source, the same in both modes: all of them, or those that the user selects.

Each of Spark's processes imports this module, so it imports Arrow only when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from nsparq.spark.options import OptionError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SCHEMA", "arrow_schema", "chosen"]

SCHEMA: Final = (
    StructType()
    .add("topic", StringType(), False)
    .add("node", StringType(), False)
    .add("offset", LongType(), False)
    .add("timestamp", TimestampType(), False)
    .add("attempts", IntegerType(), False)
    .add("id", StringType(), False)
    .add("body", BinaryType(), False)
    .add("headers", MapType(StringType(), StringType()), True)
)
"""`headers` is null for a message without headers. It is the last column: a query that was written
before it keeps the places of the others."""


def chosen(names: str) -> StructType:
    """The columns that option `columns` names; all if it is empty. Raises OptionError."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or SCHEMA.names
    for number, name in enumerate(wanted):
        if name not in SCHEMA.names:
            raise OptionError(f"option columns names {name!r}; format nsq has {', '.join(SCHEMA.names)}")
        if name in wanted[:number]:
            raise OptionError(f"option columns names {name!r} twice")
    return StructType([SCHEMA[name] for name in wanted])


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects. Raises OptionError for unknown columns."""
    known = {field.name: field.dataType for field in SCHEMA.fields}
    for field in schema.fields:
        if known.get(field.name) != field.dataType:
            has = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
            raise OptionError(
                f"the schema has {field.name} {field.dataType.simpleString()}; format nsq has {has}"
            )
    return to_arrow(schema)


def to_arrow(schema: StructType) -> pa.Schema:
    """Spark's own conversion, with times in UTC."""
    from pyspark.sql.pandas import types

    convert: Callable[..., pa.Schema] = types.to_arrow_schema
    # Spark 4.1 has no such parameter and always uses UTC.
    return convert(schema, **({"timezone": "UTC"} if "timezone" in signature(convert).parameters else {}))
