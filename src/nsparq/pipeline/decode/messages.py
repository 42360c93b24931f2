"""A DataFrame of messages becomes a DataFrame of rows, and one of dead letters.

Every message is in exactly one of `good_rows` and `dead_letters`, in whichever query: both use the
same expression for "does not decode". It is stricter than Spark's own readers, which for example
silently take the first of two objects in a message. Spark itself reads JSON and CSV; Python code
reads Avro and Protobuf (see `formats`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from nsparq.headers import without_origin
from nsparq.pipeline.decode.avro import Avro
from nsparq.pipeline.decode.formats import (
    DECODED,
    FRAME_BYTES,
    HEADERS,
    ORIGIN,
    BodyFormat,
    SchemaFileError,
    Undecodable,
    frame_beginning,
    undecoded_columns,
    without_frame,
)
from nsparq.pipeline.decode.json_schema import JsonSchema
from nsparq.pipeline.decode.protobuf import Protobuf
from nsparq.pipeline.decode.reasons import dead_letter, why_not
from nsparq.pipeline.decode.samples import quoted
from nsparq.pipeline.file.spec import Decode
from nsparq.pipeline.functions import ERROR, ROW, decoded, violations

logger = logging.getLogger(__name__)

# Column names that are unlikely to be fields of a message.
_BAD: Final = "__nsparq_bad"
_CORRUPT: Final = "__nsparq_corrupt"
_END: Final = "__nsparq_end"
_REASON: Final = "__nsparq_reason"
_ROW: Final = "__nsparq_row"


def declared_columns(decode: Decode) -> str:
    """The columns that a pipeline file declares, as in CREATE TABLE. Empty if they must be
    inferred. Raises SchemaFileError."""
    format, json_schema = _body_format(decode), _json_schema(decode)
    if format is not None:
        return format.columns()
    if json_schema is None:
        return decode.schema
    json_schema.validator()
    return decode.schema or json_schema.columns()


def _body_format(decode: Decode) -> BodyFormat | None:
    """The format of messages that Spark itself cannot decode. None for the others."""
    if decode.format == "avro":
        return Avro(_text(decode.definition), decode.framing)
    if decode.format == "protobuf":
        return Protobuf(decode.definition, decode.message, decode.framing)
    return None


def _json_schema(decode: Decode) -> JsonSchema | None:
    return JsonSchema(_text(decode.definition), decode.framing) if decode.json_schema else None


def _text(definition: bytes) -> str:
    try:
        return definition.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SchemaFileError(f"is not UTF-8 text: {error}") from error


def good_rows(
    messages: DataFrame, decode: Decode, schema: StructType, *, bad: str, observed: str = DECODED
) -> DataFrame:
    """The decoded columns, and _topic, _node, _offset, _timestamp, _attempts, _id and, if it is
    wanted, _headers. With the format `message` these have no leading _.

    `bad` is what happens to messages that do not decode: `drop` leaves them out, `fail` ends the
    query at the first. The observation `observed` counts them in both cases.
    """
    undecoded = undecoded_columns(decode.format, decode.headers)
    if undecoded is not None:
        return messages.select(*(F.col(of).alias(name) for name, of in undecoded.items()))
    origin = [F.col(name).alias(f"_{name}") for name in (*ORIGIN, *([HEADERS] if decode.headers else ()))]
    marked = _marked(messages, decode, schema)
    # The observation also prevents Spark from decoding twice, for the filter and for the columns.
    counted = marked.observe(observed, F.count(F.lit(1)).alias("rows"), F.count_if(F.col(_BAD)).alias("bad"))
    if bad == "fail":
        refusal = F.raise_error(
            F.format_string(
                "message %d of topic %s at %s does not decode as %s%s; set dead_letters = \"TOPIC\" to move "
                "such messages to a topic",
                F.col("offset"), F.col("topic"), F.col("node"), F.lit(decode.format),
                F.coalesce(F.concat(F.lit(": "), F.col(_REASON)), F.lit("")),
            )
        )  # fmt: skip
        fits = F.when(F.col(_BAD), refusal.cast("boolean")).otherwise(True)
    else:
        fits = ~F.col(_BAD)
    columns = [F.col(_ROW)[name].alias(name) for name in schema.names]
    if decode.format == "text":
        columns = [F.col("body").cast("string").alias("text")]
    return counted.where(fits).select(*columns, *origin)


def dead_letters(
    messages: DataFrame, decode: Decode, schema: StructType, *, pipeline: str, channel: str, largest: int = 0
) -> DataFrame:
    """The column `body`: a JSON object for each message that does not decode, with the reason. If
    that has more than `largest` bytes, the message as it is; 0 is no limit."""
    format, options, framing, described = decode.format, dict(decode.options), decode.framing, schema.json()

    @F.udf(returnType=BinaryType(), useArrow=False)
    def letter(
        topic: str,
        node: str,
        offset: int,
        timestamp_ns: int,
        attempts: int,
        id: str,
        body: bytes,
        headers: dict[str, str] | None,
        reason: str,
    ) -> bytes:
        origin = {
            "topic": topic,
            "channel": channel,
            "id": id,
            "timestamp_ns": timestamp_ns,
            "attempts": attempts,
            "pipeline": pipeline,
            "node": node,
            "offset": offset,
            **({"headers": own} if (own := without_origin(headers or {})) else {}),
        }
        error = reason or found_reason(bytes(body))
        found = dead_letter(origin, bytes(body), error).encode(errors="replace")
        if not largest or len(found) <= largest:
            return found
        logger.error("%s on %s: %s is too large, published without its error: %s", topic, node, id, error)
        return bytes(body)

    def found_reason(body: bytes) -> str:
        import json

        fields = StructType.fromJson(json.loads(described))
        try:
            return why_not(without_frame(body, framing), format, fields, options)
        except Undecodable as error:
            return str(error)

    published = (F.unix_micros("timestamp") * 1000).alias("timestamp_ns")
    bad = _marked(messages, decode, schema).where(_BAD)
    origin = ("topic", "node", "offset", published, "attempts", "id")
    return bad.select(letter(*origin, "body", HEADERS, _REASON).alias("body"))


def _marked(messages: DataFrame, decode: Decode, schema: StructType) -> DataFrame:
    """Adds to each message the decoded row, whether it does not decode, and the reason if known."""
    format = _body_format(decode)
    if format is not None:
        both = messages.withColumn(_ROW, decoded("body", format, schema))
        read = both.withColumns({_REASON: F.col(_ROW)[ERROR], _ROW: F.col(_ROW)[ROW]})
        return read.withColumn(_BAD, F.col(_ROW).isNull())
    json_schema = _json_schema(decode)
    reason = F.lit(None).cast("string") if json_schema is None else violations("body", json_schema)
    text = F.expr(_text_of(decode))
    marks = [~F.is_valid_utf8(text)]
    if decode.format == "text":
        return messages.withColumn(_REASON, reason).withColumn(_BAD, marks[0])
    is_json = decode.format == "json"
    row = _json(schema, decode) if is_json else _csv(text, schema, decode.options)
    read = messages.withColumns({_ROW: row, _REASON: reason})
    marks += [F.col(_REASON).isNotNull(), F.col(_ROW).isNull(), F.col(_ROW)[_CORRUPT].isNotNull()]
    if is_json:
        marks += [~F.expr(_trimmed(decode)).endswith("}"), F.col(_ROW)[_END].isNull()]
    if decode.framing:
        beginning = frame_beginning(decode.framing).hex()
        marks.append(F.expr(f"length(body) < {FRAME_BYTES} OR NOT startswith(body, X'{beginning}')"))
    marks += [F.col(_ROW)[one.name].isNull() for one in schema.fields if not one.nullable]
    return read.withColumn(_BAD, F.coalesce(reduce(Column.__or__, marks), F.lit(True)))


_BLANKS: Final = r"' \t\r\n'"


def _text_of(decode: Decode) -> str:
    """SQL for the text of a message, without its frame (see `without_frame`)."""
    return f"CAST({f'substring(body, {FRAME_BYTES + 1})' if decode.framing else 'body'} AS STRING)"


def _trimmed(decode: Decode) -> str:
    return f"trim(TRAILING {_BLANKS} FROM {_text_of(decode)})"


def _json(schema: StructType, decode: Decode) -> Column:
    """Spark stops reading at the end of the first object. So this adds a last member to the
    message. If the decoded row lacks it, the object ended earlier, and other text follows it."""
    trimmed = _trimmed(decode)
    opened = f"left({trimmed}, length({trimmed}) - 1)"
    is_empty = F.expr(f"endswith(trim(TRAILING {_BLANKS} FROM {opened}), '{{')")
    end = F.when(is_empty, f'"{_END}":1}}').otherwise(f',"{_END}":1}}')
    return F.from_json(F.concat(F.expr(opened), end), _read_as(schema, _END), _permissive(decode.options))


def _csv(text: Column, schema: StructType, options: Mapping[str, str]) -> Column:
    fields = _read_as(schema).fields
    described = ", ".join(f"{quoted(one.name)} {one.dataType.simpleString()}" for one in fields)
    return F.from_csv(text, described, _permissive(options))


def _permissive(options: Mapping[str, str]) -> dict[str, str]:
    return {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}


def _read_as(schema: StructType, *more: str) -> StructType:
    fields = [StructField(one.name, one.dataType) for one in schema.fields]
    ends = [StructField(name, IntegerType()) for name in more]
    return StructType([*fields, *ends, StructField(_CORRUPT, StringType())])
