"""Where Spark is: the pyspark package, or a SPARK_HOME that the user has named."""

from __future__ import annotations

import importlib.metadata
import os
import re
from importlib.util import find_spec
from pathlib import Path

from nsparq.errors import NsparqError
from nsparq.spark.session.cache import cache_directory, digest, make_once

__all__ = ["BrokenHome", "home_version", "linked_home", "named_home", "package_home", "spark_home"]


class BrokenHome(NsparqError):
    """SPARK_HOME names a directory that is no Spark, or another one than PySpark is made for."""


def package_home() -> Path | None:
    """The directory of the pyspark package, if it is installed and has its jars (a mere client has none)."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent
    return directory if (directory / "jars").is_dir() else None


def linked_home() -> Path | None:
    """Links to what Spark's JVM needs of the package, without pyspark.zip.

    With a zip of the Python files in its home, Spark would have every worker process compile them anew;
    without it they are taken from the installed package. The first job of a session gains a second by that.
    """
    package = package_home()
    if package is None:
        return None

    def make(path: Path) -> None:
        path.mkdir()
        for name in ("bin", "sbin", "jars", "data"):
            (path / name).symlink_to(package / name)

    return make_once(cache_directory() / f"spark-home-{digest(package)}", make)


def spark_home() -> Path | None:
    """The home that our sessions use."""
    return named_home() or linked_home()


def named_home() -> Path | None:
    """The one that SPARK_HOME names, if it is set."""
    named = os.environ.get("SPARK_HOME", "")
    return Path(named) if named else None


def home_version(home: Path) -> str:
    """The version of the Spark in a directory. Raises BrokenHome if it cannot be used with this PySpark."""
    if not (home / "bin" / "spark-submit").is_file():
        raise BrokenHome(f"SPARK_HOME is {home}, which has no bin/spark-submit: it is no Spark")
    names = [jar.name for jar in (home / "jars").glob("spark-core_*.jar")]
    found = [match[1] for name in names if (match := re.match(r"spark-core_[\d.]+-(.+)\.jar", name))]
    if not found:
        raise BrokenHome(f"SPARK_HOME is {home}, which has no jars/spark-core_*.jar: Spark is incomplete")
    python = importlib.metadata.version("pyspark")
    if found[0].split(".")[:2] != python.split(".")[:2]:
        raise BrokenHome(f"SPARK_HOME is {home} with Spark {found[0]}, but PySpark is {python}: they differ")
    return found[0]
