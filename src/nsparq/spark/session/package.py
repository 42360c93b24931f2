"""nsparq as one zip file, which Spark sends to executors on other machines.

Executors need Python with pyarrow and numpy, but not nsparq. `nsparq spark package` prints the
file's path, for the option --py-files of spark-submit.
"""

from __future__ import annotations

import importlib.util
import marshal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nsparq.spark.session.cache import cache_directory, digest, make_once

__all__ = ["package_file"]

PACKAGES: Final = ("nsparq", "pyspark_nsq")
EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # so that the same sources make the same file
UNCHECKED: Final = (0b01).to_bytes(4, "little")  # Python does not compare the compiled code with its source


def package_file() -> Path:
    """A zip file in the cache, or the one that nsparq itself runs from."""
    ours = next((parent for parent in Path(__file__).parents if parent.is_file()), None)
    if ours is not None:
        return ours
    files = dict(_sources())
    stamps = [f"{name} {path.stat().st_size} {path.stat().st_mtime_ns}" for name, path in files.items()]
    key = digest(sys.implementation.cache_tag, *stamps)
    return make_once(cache_directory() / f"nsparq-{key}.zip", lambda path: _write(path, files))


def _sources() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            yield f"{package}/{path.relative_to(root).as_posix()}", path


def _write(target: Path, files: dict[str, Path]) -> None:
    """Each source with its compiled code: Python caches none for a zip file."""
    with zipfile.ZipFile(target, "w") as archive:
        for name, path in files.items():
            source = path.read_bytes()
            code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=0))
            header = importlib.util.MAGIC_NUMBER + UNCHECKED + importlib.util.source_hash(source)
            for member, content in ((name, source), (f"{name}c", header + code)):
                archive.writestr(zipfile.ZipInfo(member, EPOCH), content, zipfile.ZIP_DEFLATED)
