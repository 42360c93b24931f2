"""Where Spark is: the pyspark package, or a SPARK_HOME that the user has named."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from nsparq.spark.cache import cache_directory, digest, make_once

__all__ = ["linked_home", "package_home", "spark_home"]


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
    named = os.environ.get("SPARK_HOME", "")
    return Path(named) if named else linked_home()
