"""Follows pages of the documentation word by word, with nsparq installed from a wheel.

    python -m tests.release.follow --python python3.12 README.md docs/tutorial.md
    python -m tests.release.follow --python python3.12 --without-compiler docs/tutorial.md

builds a wheel, installs it into a new virtual environment as the page says, and does what the page
says, in an empty folder:

- A file under `<!-- examples/... -->` is written under its name.
- The lines of a block marked `sh` are run in order, and so are the lines of other blocks that begin
  with `$ `.
- The lines behind such a line are its output. `…` stands for any text, and VARIES says which
numbers differ.
- A `toml` block without a name is a part of a file that a command has written.
- `pip install '.[server]'` installs the wheel. Anything else that pip is told to install, it must
find.

The pages use the standard ports, so all this runs in a network namespace of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.release.building import (
    ROOT,
    WITHOUT_COMPILER,
    build_sdist,
    build_wheel,
    clean_environment,
    clean_venv,
)
from tests.support.namespaces import in_own_network
from tests.support.polling import wait_until

PAGES = ("README.md", "docs/up.md", "docs/tutorial.md", "docs/tutorial-spark.md")
WITHOUT_SPARK = PAGES[:3]
PATIENCE_S = 900.0
"""A safety net: on a busy machine Spark alone takes minutes to start."""

BLOCK = re.compile(r"(?:^<!-- examples/(\S+) -->\n)?^(```+)(\w*)\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
RUN = {"cat", "curl", "echo", "find", "mkdir", "nsparq", "nsqadmin", "nsqd", "nsqlookupd", "pytest", "python"}
RUN |= {"nsq_stat", "nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq", "to_nsq"}
LEFT_OUT = {"make", "git", "cd", "docker", "kubectl", "source", "."}
"""They need a clone, or a program that is not ours."""
LASTS = re.compile(
    r"(nsqd|nsqlookupd|nsqadmin|nsparq (up|tail|stat|pipeline run)|python bill\.py)\b(?!.*--available-now)"
)
"""Programs that run until Ctrl-C."""
VARIES = re.compile(r"passed in|process \d+|\.parquet$|^revenue +running")
"""Lines of output whose numbers, also hexadecimal ones, are different each time."""
PORT_IN_USE = "is in use"


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class Part:
    """Lines that one of the files must have."""

    text: str


@dataclass(frozen=True)
class Command:
    text: str
    output: list[str] = field(default_factory=list)

    @property
    def is_install(self) -> bool:
        return self.text.startswith("pip install")


Step = File | Part | Command


def read_page(text: str) -> list[Step]:
    return [
        step for example, _, kind, block in BLOCK.findall(text) for step in _read_block(example, kind, block)
    ]


def _read_block(example: str, kind: str, block: str) -> Iterator[Step]:
    if example:
        yield File(Path(example).name, block)
    elif kind == "toml":
        yield Part(block)
    elif kind == "sh":
        for line in block.replace("\\\n", " ").splitlines():
            if command := line.split(" #")[0].strip():
                yield Command(command)
    elif kind in ("", "console") and block.startswith("$ "):
        for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = shown.rstrip("\n").split("\n")
            yield Command(command.split(" #")[0].strip(), [line for line in output if line.strip()])


def is_shown(expected: list[str], output: str) -> bool:
    """Whether the output has these lines, in any order."""
    # A message in a JSON answer is shown as it is, without the backslashes.
    lines = [" ".join(line.split()).replace('\\"', '"') for line in output.splitlines()]
    for line in expected:
        pattern = re.sub(r"(\\ )?…(\\ )?", ".*", re.escape(" ".join(line.split())))
        if VARIES.search(line):
            pattern = re.sub(r"[\da-f]+", r"[\\da-f]+", pattern)
        found = next((one for one in lines if re.fullmatch(pattern, one)), None)
        if found is None:
            return False
        lines.remove(found)
    return True


class Reader:
    """Somebody who follows a page: a folder, and programs that run in several terminals."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._variables = {**clean_environment(), "PATH": path, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        self._running: list[tuple[Command, subprocess.Popen[bytes], Path]] = []

    def follow(self, steps: list[Step]) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._kill)
            for step in steps:
                self._do(step)
            self._interrupt()

    def _do(self, step: Step) -> None:
        match step:
            case File(name, text):
                (self.folder / name).write_text(text, encoding="utf-8")
            case Part(text):
                written = "".join(path.read_text("utf-8") for path in self.folder.glob("*.toml"))
                assert text in written, f"no file has\n{text}"
            case Command() if not step.is_install:
                self._run(step)

    def _run(self, command: Command) -> None:
        name = re.split(r"[\s;|]", command.text)[0]
        if name in LEFT_OUT:
            return
        assert name in RUN, f"say in {__name__} what to do with: {command.text}"
        if PORT_IN_USE in "".join(command.output):
            return  # an example of an error
        print(f"$ {command.text}", flush=True)
        if LASTS.match(command.text):
            process, log = self._start(command)
            self._running.append((command, process, log))
            wait_until(lambda: self._is_ready(command, process, log), PATIENCE_S, what=self._said)
            return
        # A program that only looks may look too early.
        looks = command.text.startswith("curl -s ") or " status " in command.text
        wait_until(
            lambda: self._finish(command, looks), PATIENCE_S if looks else 0, interval=1, what=self._said
        )

    def _said(self) -> str:
        """What the programs that run have said."""
        return "\n".join(f"$ {command.text}\n{log.read_text('utf-8')}" for command, _, log in self._running)

    def _start(self, command: Command) -> tuple[subprocess.Popen[bytes], Path]:
        handle, name = tempfile.mkstemp(prefix="output-", dir=self.folder.parent)
        with os.fdopen(handle, "wb") as log:
            # The name of a program alone, so that the signal goes to it and not to a shell.
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command.text}" if LASTS.match(command.text) else command.text],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._variables,
            )
        return process, Path(name)

    def _is_ready(self, command: Command, process: subprocess.Popen[bytes], log: Path) -> bool:
        said = log.read_text("utf-8", errors="replace")
        # What this one waits for may be the work of another one.
        for other, running, its_log in self._running:
            assert running.poll() is None, (
                f"{other.text} ended with {running.returncode}:\n{its_log.read_text('utf-8', 'replace')}"
            )
        if command.output:
            return is_shown(command.output, said)
        if command.text.startswith("nsparq up"):
            return "ready: everything answers" in said
        if command.text.startswith("nsqd"):
            return answers("http://127.0.0.1:4151/ping")
        return True

    def _finish(self, command: Command, looks: bool) -> bool:
        process, log = self._start(command)
        status = process.wait(PATIENCE_S)
        said = log.read_text("utf-8", errors="replace")
        shown = is_shown(command.output, said)
        assert looks or (status == 0 and shown), (
            f"{command.text} ended with {status} and said\n{said}\nnot\n" + "\n".join(command.output)
        )
        return status == 0 and shown

    def _interrupt(self) -> None:
        """Ctrl-C in every terminal."""
        while self._running:
            command, process, _ = self._running.pop()
            process.send_signal(signal.SIGINT)
            status = process.wait(PATIENCE_S)
            assert status == 0, f"{command.text} ended with {status} after Ctrl-C"

    def _kill(self) -> None:
        for _, process, _ in self._running:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except URLError:
        return False


def command_to_follow(programs: Path, *pages: str) -> list[str]:
    """In a network of its own, with what is installed there."""
    return in_own_network(sys.executable, "-m", "tests.release.follow", f"--programs={programs}", *pages)


def follow_page(page: str, programs: Path) -> None:
    """In an empty folder."""
    steps = read_page((ROOT / page).read_text("utf-8"))
    assert any(isinstance(step, Command) for step in steps), f"{page} has no commands"
    with tempfile.TemporaryDirectory(prefix="nsparq-page-") as temporary:
        folder = Path(temporary, "empty")
        folder.mkdir()
        Reader(folder, programs).follow(steps)


# from the command line


def install(page: str, wheel: Path, programs: Path) -> None:
    """What the page says about pip."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    variables = {**clean_environment(), "PATH": path, "PIP_QUIET": "2"}
    # No compiler is needed: all other packages are wheels or, like PySpark, Python alone.
    strict = "pip install --only-binary=:all: --no-binary=pyspark"
    for step in read_page((ROOT / page).read_text("utf-8")):
        if isinstance(step, Command) and step.is_install:
            command = re.sub(r"(?<=['\s])\.(?=\[|$)", str(wheel), step.text)
            print(f"$ {command}", flush=True)
            subprocess.run(command.replace("pip install", strict), shell=True, check=True, env=variables)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.release.follow", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter to install with")
    parser.add_argument("--without-compiler", action="store_true", help="build without a C compiler")
    parser.add_argument("--programs", type=Path, help="the bin folder to use; nothing is built or installed")
    parser.add_argument("pages", nargs="*", default=PAGES, help=f"by default {', '.join(PAGES)}")
    arguments = parser.parse_args()
    if arguments.programs:
        for page in arguments.pages:
            print(f"# {page}", flush=True)
            follow_page(page, arguments.programs)
        return
    with tempfile.TemporaryDirectory(prefix="nsparq-wheel-") as temporary:
        folder = Path(temporary)
        variables = WITHOUT_COMPILER if arguments.without_compiler else {}
        wheel, _ = build_wheel(build_sdist(folder), folder / "dist", arguments.python, **variables)
        programs = clean_venv(folder / "venv", arguments.python)
        for page in arguments.pages:
            install(page, wheel, programs)
        build = "python" if arguments.without_compiler else "compiled"
        subprocess.run(
            [programs / "python", ROOT / ".ci/try-wheel", f"--build={build}"],
            check=True,
            env=clean_environment(),
        )
        subprocess.run(command_to_follow(programs, *arguments.pages), check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
