"""Avro and Protobuf as columns, for your own programs. Pipelines use the same code.

Each function returns a struct of `row`, the columns of the message, and `error`, the reason why it
does not decode. One of the two is null. `nsparq.pipeline.decode.formats` says why Spark's functions
are not used.
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
from nsparq.pipeline.decode.formats import BodyFormat, Decoder, Undecodable
from nsparq.pipeline.decode.json_schema import JsonSchema
from nsparq.pipeline.decode.protobuf import Protobuf
from nsparq.spark.columns import to_arrow

__all__ = ["from_avro", "from_protobuf"]

ROW: Final = "row"
ERROR: Final = "error"


def from_avro(body: Column | str, schema: str, *, framing: str = "") -> Column:
    """Decodes bytes that are Avro records with this schema, a JSON text. `framing="confluent"` if
    they begin with the frame of Confluent's serializer. Raises SchemaFileError."""
    return _decoded(body, Avro(schema, framing))


def from_protobuf(body: Column | str, message: str, descriptors: bytes, *, framing: str = "") -> Column:
    """Decodes bytes that are Protobuf messages of this type. `descriptors` is the output of
    `protoc --include_imports --descriptor_set_out=FILE`. Raises SchemaFileError."""
    return _decoded(body, Protobuf(descriptors, message, framing))


def _decoded(body: Column | str, format: BodyFormat) -> Column:
    row = StructType.fromDDL(format.columns())
    assert isinstance(row, StructType)
    return decoded(body, format, row)


def decoded(body: Column | str, format: BodyFormat, row: StructType) -> Column:
    """A struct of `row` and `error`."""
    result = StructType([StructField(ROW, row), StructField(ERROR, StringType())])
    kind = pa.struct(list(to_arrow(result)))

    def decode(bodies: pa.Array) -> pa.Array:
        return rows_of(bodies, format, kind)

    return _applied(decode, result, body)


def violations(body: Column | str, schema: JsonSchema) -> Column:
    """The first violation of the schema by a body. Null if there is none."""

    def validate(bodies: pa.Array) -> pa.Array:
        reason = _validator_of(schema)
        return pa.array([reason(one) for one in bodies.to_pylist()], pa.string())

    return _applied(validate, StringType(), body)


def _applied(function: Callable[[Any], Any], result: DataType, body: Column | str) -> Column:
    # Its type annotations do not allow a struct as a result.
    make: Any = arrow_udf
    # Spark may call a deterministic function again for each use of its result.
    found: Column = make(function, result).asNondeterministic()(body)
    return found


# in the tasks

# Cached, so that all micro-batches in a Python process share them.


@lru_cache(maxsize=64)
def _decoder_of(format: BodyFormat) -> Decoder:
    return format.decoder()


@lru_cache(maxsize=64)
def _validator_of(schema: JsonSchema) -> Any:
    return schema.validator()


def rows_of(bodies: pa.Array, format: BodyFormat, kind: pa.StructType) -> pa.Array:
    """The structs that `decoded` describes."""
    decode = _decoder_of(format)
    found = [_row(decode, body) for body in bodies.to_pylist()]
    try:
        return pa.array(found, kind)
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        # A value does not fit its column: convert the rows one by one to find it.
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
