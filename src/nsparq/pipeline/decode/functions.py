"""Avro and Protobuf as columns, for programs of your own; pipelines decode by the same.

The result of each is a struct of `row`, the columns of the message, and `error`, the reason why it does not
decode: one of the two is null. `nsparq.pipeline.decode.bodies` says why these are not Spark's own functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DataType, StringType, StructField, StructType

from nsparq.pipeline.decode.avro import Avro
from nsparq.pipeline.decode.bodies import BodyFormat, Decoder, Undecodable
from nsparq.pipeline.decode.json_schema import JsonSchema
from nsparq.pipeline.decode.protobuf import Protobuf

__all__ = ["from_avro", "from_protobuf"]

ROW: Final = "row"
ERROR: Final = "error"


def from_avro(body: Column | str, schema: str, *, framing: str = "") -> Column:
    """Of a column of bytes, each an Avro record with this schema, as JSON text. `framing="confluent"` if the
    frame of Confluent's serializer comes before it. Raises SchemaFileError."""
    return _decoded(body, Avro(schema, framing))


def from_protobuf(body: Column | str, message: str, descriptors: bytes, *, framing: str = "") -> Column:
    """Of a column of bytes, each a Protobuf message of this name, which the descriptors have: the content of
    the file that `protoc --include_imports --descriptor_set_out=FILE` writes. Raises SchemaFileError."""
    return _decoded(body, Protobuf(descriptors, message, framing))


def _decoded(body: Column | str, format: BodyFormat) -> Column:
    row = StructType.fromDDL(format.columns())
    assert isinstance(row, StructType)
    return decoded(body, format, row)


def decoded(body: Column | str, format: BodyFormat, row: StructType) -> Column:
    """A struct of `row` and `error`."""
    result = StructType([StructField(ROW, row), StructField(ERROR, StringType())])
    kind = _arrow_type(result)

    def decode(bodies: pa.Array) -> pa.Array:
        return rows_of(bodies, format, kind)

    return _applied(decode, result, body)


def violations(body: Column | str, schema: JsonSchema) -> Column:
    """A text: what the schema finds wrong with a body. Null if nothing."""

    def validate(bodies: pa.Array) -> pa.Array:
        reason = _validator(schema)
        return pa.array([reason(one) for one in bodies.to_pylist()], pa.string())

    return _applied(validate, StringType(), body)


def _applied(function: Callable[[Any], Any], result: DataType, body: Column | str) -> Column:
    # Its declared types know no struct as a result.
    make: Any = arrow_udf
    # Spark may call a deterministic function again for each use of what it returns.
    found: Column = make(function, result).asNondeterministic()(body)
    return found


def _arrow_type(struct: StructType) -> pa.DataType:
    from nsparq.spark.columns import to_arrow

    return pa.struct(list(to_arrow(struct)))


# in the tasks


def rows_of(bodies: pa.Array, format: BodyFormat, kind: pa.StructType) -> pa.Array:
    """The structs of `decoded`."""
    decode = _decoder(format)
    found = [_row(decode, body) for body in bodies.to_pylist()]
    try:
        return pa.array(found, kind)
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        # Some value does not fit its column; whose, is found one by one.
        return pa.concat_arrays([_fitting(one, kind) for one in found])


def _row(decode: Decoder, body: bytes | None) -> dict[str, Any]:
    if body is None:
        return {ROW: None, ERROR: None}
    try:
        return {ROW: decode(body), ERROR: None}
    except Undecodable as error:
        return {ROW: None, ERROR: str(error)}


def _fitting(found: dict[str, Any], kind: pa.StructType) -> pa.Array:
    try:
        return pa.array([found], kind)
    except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
        return pa.array([{ROW: None, ERROR: str(error)}], kind)


@lru_cache(maxsize=64)
def _decoder(format: BodyFormat) -> Decoder:
    """One for all micro-batches of a task's process."""
    return format.decoder()


@lru_cache(maxsize=64)
def _validator(schema: JsonSchema) -> Any:
    return schema.validator()
