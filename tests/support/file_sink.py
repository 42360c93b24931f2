"""Reads what Spark's file sink has committed, without Spark.

The directory also has files of unfinished batches. The sink's log says which files count: one log
file for each batch, and every tenth one repeats all earlier entries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq


def committed_files(directory: Path) -> list[Path]:
    log = directory / "_spark_metadata"
    if not log.is_dir():
        return []
    names = [path.name for path in log.iterdir() if not path.name.startswith(".")]
    whole = [int(name.removesuffix(".compact")) for name in names if name.endswith(".compact")]
    since = max(whole, default=-1)
    wanted = [f"{since}.compact"] if whole else []
    wanted += [name for name in names if name.isdigit() and int(name) > since]
    found: dict[str, Path] = {}
    for name in wanted:
        for line in (log / name).read_text().splitlines()[1:]:
            entry: dict[str, Any] = json.loads(line)
            path = unquote(urlsplit(entry["path"]).path)
            assert entry["action"] == "add", entry
            found[path] = Path(path)
    return [*found.values()]


def committed_rows(directory: Path, *columns: str) -> pa.Table:
    """All rows; an empty table without columns if there are none."""
    tables = [
        pq.read_table(path, columns=[*columns], partitioning=None) for path in committed_files(directory)
    ]
    return pa.concat_tables(tables) if tables else pa.table({})
