"""docs/tools.md: transcripts are run; other command lines must be accepted."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsparq.tools.reference import TABLES
from tests.support import TestBroker, start_broker
from tests.support.polling import DEADLINE

from .processes import command, environment, http, tcp

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(console|sh)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SESSIONS = [text for kind, text in BLOCKS if kind == "console"]
LINES = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
TABLE_OF = {table.program: table for table in TABLES}
TOOLS = [program for program in TABLE_OF if " " not in program]

ENOUGH_TIME = """#!/bin/sh
shift
"$@" &
tries=0
until [ -n "$(find archive -type f -size +0 2>/dev/null)" ] || [ $tries -ge 400 ]; do
    sleep 0.05
    tries=$((tries + 1))
done
sleep 0.5
kill $!
wait $!
"""

# Parts of the output that change.
CHANGES = [
    (r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}", "TIME"),
    (r"tail\d{6}#", "tail#"),
    (r"\d{4}-\d\d-\d\d_\d\d", "HOUR"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (re.escape(socket.gethostname().partition(".")[0]) + "-0", "HOST-0"),
    (r"(?m)^ *-?\d+ +-?\d+ \| [ \d]+ \| [ \d]+ \| [ \w.-]+$", "FIGURES"),
    (r"\d[\d.]*k?/s|(?<=waiting )\S+", "N"),
    (r"(?m)^TOPIC +CHANNEL .*$", lambda found: " ".join(found[0].split())),
    (r"(?m)^(orders +archive) .*$", r"\1 FIGURES"),
    (r" +(?=FIGURES|archive)", " "),
]


def settled(text: str) -> str:
    for pattern, word in CHANGES:
        text = re.sub(pattern, word, text)
    return text


@contextmanager
def load(broker: TestBroker) -> Iterator[None]:
    """A channel to watch."""
    stop = threading.Event()
    broker.control("create", "orders", "archive")

    def publish() -> None:
        with broker.connect() as connection:
            while not stop.wait(0.01):
                connection.mpub("orders", [b"x"] * 10)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tools under their names, as after installation."""
    directory = tmp_path_factory.mktemp("bin")
    for program, module in [(tool, tool) for tool in TOOLS] + [("nsparq", "main")]:
        path = directory / program
        path.write_text(f'#!/bin/sh\nexec {shlex.join(command(module))} "$@"\n')
        path.chmod(0o755)
    # Wait for the expected output: a second may be too short on a busy machine.
    path = directory / "timeout"
    path.write_text(ENOUGH_TIME)
    path.chmod(0o755)
    return directory


def test_there_is_something_to_check() -> None:
    assert len(SESSIONS) == 5 and len(LINES) == 50
    for program in TOOLS:
        assert f"\n### {program}\n" in PAGE
    for program in TABLE_OF:
        assert f"`{program}" in PAGE or f"`{program.removeprefix('nsparq ')}`" in PAGE


@pytest.mark.parametrize("session", SESSIONS, ids=lambda text: text.split()[1])
def test_transcripts_show_the_real_output(session: str, shims: Path, tmp_path: Path) -> None:
    variables = environment()
    variables["PATH"] = f"{shims}:{variables['PATH']}"
    steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE)
    assert len(steps) == session.count("$ ")
    with start_broker() as broker, load(broker):
        for line, expected in steps:
            line = re.sub(r"127\.0\.0\.1:4150\b", tcp(broker), line)
            line = re.sub(r"address=127\.0\.0\.1:4151\b", f"address={http(broker)}", line)
            line = line.replace("--interval=1s", "--interval=50ms")
            line = line.replace(
                "nsparq top", f"nsparq top --interval=50ms --nsqd-http-address={http(broker)}"
            )
            done = subprocess.run(
                ["bash", "-c", line],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
                env=variables,
                timeout=DEADLINE,
            )
            assert settled(done.stdout.decode()) == settled(expected), line


@pytest.mark.parametrize("line", LINES)
def test_every_other_command_line_is_accepted(line: str) -> None:
    words = shlex.split(line.removeprefix("source <(").removesuffix(")").partition(" > ")[0])
    while words[0] not in (*TOOLS, "nsparq"):
        words.pop(0)
    program = " ".join(words[:2]) if words[0] == "nsparq" else words[0]
    table = TABLE_OF[program]
    table.check(table.read(words[len(program.split()) :]))
