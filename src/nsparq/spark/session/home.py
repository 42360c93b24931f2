"""Finds Spark: in the pyspark package, or in SPARK_HOME if the user has set it."""

from __future__ import annotations

import importlib.metadata
import os
import re
from importlib.util import find_spec
from pathlib import Path

from nsparq.errors import NsparqError
from nsparq.spark.session.cache import cache_directory, digest, make_once

__all__ = ["BrokenHome", "home_version", "linked_home", "named_home", "package_home"]


class BrokenHome(NsparqError):
    """SPARK_HOME is not a Spark directory, or its version differs from PySpark's."""


def package_home() -> Path | None:
    """The directory of the pyspark package, if it has jars (pyspark-client has none)."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent
    return directory if (directory / "jars").is_dir() else None


def linked_home() -> Path | None:
    """A directory with links to the parts of the package that Spark's JVM needs, without
    pyspark.zip.

    With pyspark.zip every worker process would compile its modules again; without it workers import
    the installed package. That makes the first job of a session a second faster.
    """
    package = package_home()
    if package is None:
        return None

    def make(path: Path) -> None:
        path.mkdir()
        for name in ("bin", "sbin", "jars", "data"):
            (path / name).symlink_to(package / name)

    return make_once(cache_directory() / f"spark-home-{digest(package)}", make)


def named_home() -> Path | None:
    named = os.environ.get("SPARK_HOME", "")
    return Path(named) if named else None


def home_version(home: Path) -> str:
    """The version of Spark in a directory. Raises BrokenHome if it does not fit this PySpark."""
    if not (home / "bin" / "spark-submit").is_file():
        raise BrokenHome(f"SPARK_HOME is {home}, which has no bin/spark-submit: it is not a Spark directory")
    names = [jar.name for jar in (home / "jars").glob("spark-core_*.jar")]
    found = [match[1] for name in names if (match := re.match(r"spark-core_[\d.]+-(.+)\.jar", name))]
    if not found:
        raise BrokenHome(f"SPARK_HOME is {home}, which has no jars/spark-core_*.jar: Spark is incomplete")
    python = importlib.metadata.version("pyspark")
    if found[0].split(".")[:2] != python.split(".")[:2]:
        raise BrokenHome(f"SPARK_HOME is {home} with Spark {found[0]}, but PySpark is {python}: they differ")
    return found[0]
