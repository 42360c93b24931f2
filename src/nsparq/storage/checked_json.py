"""JSON objects with a checksum, on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crc32c import crc32c

from nsparq.storage.files import Files


def write_json(files: Files, path: Path, fields: Mapping[str, Any], *, sync: bool) -> None:
    files.replace(path, encode_json(fields), sync=sync)


def encode_json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({**fields, "crc": crc_of(fields)}).encode()


def read_json(files: Files, path: Path) -> dict[str, Any] | None:
    """The object in the last whole line; None if there is no file. Raises ValueError if no line is
    whole."""
    raw = files.read_whole(path)
    if raw is None:
        return None
    lines = raw.split(b"\n")
    while True:
        try:
            return decode_json(lines.pop())
        except ValueError:
            if not any(lines):
                raise


def decode_json(line: bytes) -> dict[str, Any]:
    """What encode_json() was given. Raises ValueError."""
    try:
        fields: dict[str, Any] = json.loads(line)
        if fields.pop("crc") != crc_of(fields):
            raise ValueError("checksum mismatch")
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("unexpected content") from error
    return fields


def crc_of(content: object) -> int:
    crc: int = crc32c(json.dumps(content, sort_keys=True).encode())
    return crc
