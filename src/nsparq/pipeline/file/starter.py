"""A first pipeline file for somebody's topic: what `nsparq pipeline new` writes. Needs no Spark."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from typing import Final

from nsparq.pipeline.decode.samples import guess_format, infer_json
from nsparq.pipeline.file.reading import DEFAULT_NSQD
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Refused, Unreachable

__all__ = ["peek", "starter"]

WIDTH: Final = 100


def peek(nsqd: str, topic: str, count: int = 100) -> list[bytes]:
    """The newest messages of a topic, which stay where they are. Raises Unreachable and Refused."""
    with Client(nsqd, Access(timeout=5.0)) as client:
        answer = client.get("/topic/peek", topic=topic, count=count).json()
    return [
        base64.b64decode(one["body_base64"]) if "body_base64" in one else one["body"].encode()
        for one in answer["messages"]
    ]


def look(nsqd: str, topic: str) -> tuple[list[bytes], str]:
    """Messages, and why there are none."""
    try:
        found = peek(nsqd, topic)
    except Unreachable as error:
        return [], f"{error}"
    except Refused as error:
        reason = "there is no such topic yet" if error.code == "TOPIC_NOT_FOUND" else str(error)
        return [], f"{topic}: {reason}"
    return found, "" if found else f"{topic} has no messages yet"


def starter(topic: str, bodies: Sequence[bytes], *, nsqd: str = DEFAULT_NSQD, name: str = "") -> str:
    """A pipeline that shows the topic on the console, with what comes next as comments."""
    name = name or re.sub(r"[^A-Za-z0-9_-]+", "-", topic).strip("-") or "first"
    format = guess_format(bodies) if bodies else "json"
    schema = infer_json(bodies) if format == "json" else ""
    lines = [
        f"# nsparq pipeline run FILE      reads the topic {topic} and shows it on the console",
        "# nsparq pipeline check FILE    says what is wrong, without running it",
        "",
        "[nsq]",
        f"nsqd = [{json.dumps(nsqd)}]",
        "",
        f"[pipeline.{name}]",
        f"source = {json.dumps(topic)}",
        *_decode(format, schema, bool(bodies)),
    ]
    if format != "raw":
        lines.append(
            f"dead_letters = {json.dumps(f'{topic}.dead')}    # where messages go that are no {format}"
        )
    lines += [
        f'sql = "SELECT {_columns(format, schema)} FROM input"',
        'sink = "console"',
        "",
        "# Other sinks:",
        f'#   sink = {{ topic = "{topic}.out" }}',
        f'#   sink = {{ parquet = "data/{name}", partition_by = ["date"] }}',
        "# A count for every minute of publishing, written as soon as the minute is over:",
        '#   watermark = { column = "_timestamp", delay = "10s" }',
        '#   sql = """SELECT window.start AS minute, count(*) AS messages',
        '#            FROM input GROUP BY window(_timestamp, \'1 minute\')"""',
    ]
    return "\n".join(lines) + "\n"


def _decode(format: str, schema: str, was_seen: bool) -> list[str]:
    if format != "json":
        return [f'decode = "{format}"']
    if not schema:
        said = (
            ""
            if was_seen
            else "    # the columns are taken from the first messages; or give a schema, as below"
        )
        lines = [f'decode = "json"{said}']
        if not was_seen:
            lines.append(
                '# decode = { format = "json", schema = "number INT NOT NULL, item STRING, price DOUBLE" }'
            )
        return lines
    if len(schema) < WIDTH and '"' not in schema and "\\" not in schema:
        return [f'decode = {{ format = "json", schema = "{schema}" }}']
    return [f"decode = {{ format = \"json\", schema = '''{schema}''' }}"]


def _columns(format: str, schema: str) -> str:
    if format == "json" and schema:
        return "*"
    return {"text": "_timestamp, text", "raw": "_timestamp, hex(body) AS body"}.get(format, "*")
