"""Builds the sdist and wheels from a copy of the tree, and makes the environments that they are
tried in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_COPIED = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "build",
    "dist",
    "node_modules",
    "*.egg-info",
    "*.so",
    "__pycache__",
    ".*_cache",
    "*-data",
)
BUILD_S = 600.0
WITHOUT_COMPILER = {"CC": "/nonexistent/cc"}


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """The output of a command that must succeed. It sees neither our sources nor our
    environment."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
        env={**clean_environment(), **variables},
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    """As a user's: without the variables by which Python finds our sources."""
    ours = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "NSPARQ_NO_EXTENSIONS")
    return {name: value for name, value in os.environ.items() if name not in ours}


def build_sdist(folder: Path) -> Path:
    """The sdist of the tree, unpacked."""
    copy = shutil.copytree(ROOT, folder / "tree", ignore=NOT_COPIED, symlinks=True)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=copy)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def build_wheel(
    source: Path, folder: Path, python: str = sys.executable, **variables: str
) -> tuple[Path, str]:
    """A wheel of a source tree, and what the build has said. The running Python uses its own
    setuptools."""
    # What an earlier build left there would be used again.
    shutil.rmtree(source / "build", ignore_errors=True)
    isolation = ["--no-build-isolation"] if python == sys.executable else []
    command = ["-m", "pip", "wheel", "-v", "--no-deps", *isolation, "--wheel-dir", folder, source]
    said = run(python, *command, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel, said


def clean_venv(folder: Path, python: str) -> Path:
    """A virtual environment with nothing but pip."""
    run(python, "-m", "venv", folder)
    return folder / "bin"


def borrowing_venv(folder: Path, wheel: Path) -> Path:
    """A virtual environment of the running Python. nsparq is that of the wheel, and all other
    packages are the ones that are installed here, so it needs no network."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python")]
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(
        "\n".join(path for path in sys.path if any(Path(path).glob("*.dist-info")))
    )
    # The program of this environment would use the packages of this environment.
    script = folder / "bin/pytest"
    script.write_text('#!/bin/sh\nexec python -m pytest "$@"\n')
    script.chmod(0o755)
    return folder / "bin"
