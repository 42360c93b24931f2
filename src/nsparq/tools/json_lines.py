"""Messages with their headers as lines of JSON: nsq_to_file writes them, to_nsq reads them.

    {"timestamp":1763449200000000000,"headers":{"tenant":"acme"},"body":"hello"}

`body_base64` takes the place of `body` if that is not UTF-8. Only the body is needed to publish.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence

from nsparq.client import Message
from nsparq.headers import encode_headers
from nsparq.option_table import OptionError

__all__ = [
    "Record",
    "Records",
    "body_fields",
    "headers_prefix",
    "parse_headers",
    "to_line",
    "unzip",
    "with_headers",
]

Record = tuple[bytes, Mapping[str, str]]
"""Body and headers."""
Records = AsyncIterator[Sequence[bytes | Record]]
"""Records of the input, part by part: all of them with headers, or all without."""


def body_fields(body: bytes) -> dict[str, str]:
    """The body as one of the fields `body` and `body_base64`."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def headers_prefix(headers: Mapping[str, str]) -> bytes:
    """What --headers prints before a message."""
    return f"{json.dumps(headers, ensure_ascii=False)} | ".encode()


def to_line(message: Message) -> bytes:
    """Without a line feed."""
    shown = {"timestamp": message.timestamp_ns, "headers": message.headers, **body_fields(message.body)}
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()


def from_line(line: bytes) -> Record:
    """Raises ValueError with a text for the user."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    body, encoded, headers = found.get("body"), found.get("body_base64"), found.get("headers") or {}
    if not isinstance(headers, dict):
        raise ValueError("`headers` is not an object")
    if isinstance(body, str) and encoded is None:
        data = body.encode()
    elif isinstance(encoded, str) and body is None:
        try:
            data = base64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise ValueError(f"`body_base64` is not base64: {error}") from error
    else:
        raise ValueError("there must be a text `body` or `body_base64`")
    if not data:
        raise ValueError("the body is empty")
    _check(headers)
    return data, headers


def _check(headers: Mapping[str, str]) -> None:
    try:
        encode_headers(headers)
    except TypeError as error:
        raise ValueError(str(error)) from error


def parse_headers(texts: Sequence[str]) -> dict[str, str]:
    """Name and value of each `name=value` of --header. Raises OptionError."""
    headers: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name.lower() in headers:
            raise OptionError(f"--header {text!r} should be of the form name=value, each name once")
        headers[name.lower()] = value
    try:
        _check(headers)
    except ValueError as error:
        raise OptionError(f"--header: {error}") from error
    return headers


def with_headers(source: AsyncIterator[list[bytes]], header: Sequence[str], is_json: bool) -> Records:
    """The records as the flags --header and --json-lines say: headers of a line of JSON win. It
    raises OSError for a line that is not a message, after those before it."""
    common = parse_headers(header)
    return _with_headers(source, common, is_json) if common or is_json else source


def unzip(records: Sequence[bytes | Record]) -> tuple[list[bytes], list[Mapping[str, str]] | None]:
    """Bodies and headers, for publish_many()."""
    with_headers = [one for one in records if not isinstance(one, bytes)]
    if with_headers:
        return [body for body, _ in with_headers], [headers for _, headers in with_headers]
    return [one for one in records if isinstance(one, bytes)], None


async def _with_headers(
    source: AsyncIterator[list[bytes]], common: Mapping[str, str], is_json: bool
) -> AsyncIterator[list[Record]]:
    number = 0
    async for lines in source:
        records: list[Record] = []
        for line in lines:
            number += 1
            try:
                body, headers = from_line(line) if is_json else (line, {})
            except ValueError as error:
                if records:
                    yield records
                raise OSError(f"record {number}: {error}") from error
            records.append((body, {**common, **headers}))
        yield records
