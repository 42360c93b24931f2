"""The nsparq command: its help, and that it imports only the requested command."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from nsparq.tools import main as main_module
from nsparq.tools.main import COMMANDS, Command, main
from nsparq.version import __version__
from tests.support.polling import DEADLINE

ALL = [command for commands in COMMANDS.values() for command in commands]


@pytest.mark.parametrize("asked", ["help", "-h", "-help", "--help"])
def test_help_lists_every_command_on_stdout(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("Usage: nsparq COMMAND")
    for command in ALL:
        assert f"\n  {command.name} " in out and command.help in out
    assert max(map(len, out.splitlines())) <= 100


def test_no_arguments_print_the_help_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Usage: nsparq COMMAND")


@pytest.mark.parametrize("asked", ["version", "-version", "--version"])
def test_the_version_is_one_line(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 0
    assert capsys.readouterr().out == f"nsparq {__version__}\n"


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("nsq", "did you mean `nsparq nsqd`?"),
        ("nsq_to_file", "did you mean `nsparq to-file`?"),
        ("x", "`nsparq --help` lists the commands"),
    ],
)
def test_an_unknown_command_gets_a_hint(asked: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 2
    assert capsys.readouterr().err == f"nsparq: there is no command '{asked}'; {hint}\n"


@pytest.mark.usefixtures("root_logger_restored")
@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_every_command_exists_and_has_help(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    if command.extra == "server":
        pytest.importorskip("uvloop")
    try:
        status = main(["help", command.name])
    except SystemExit as leave:
        status = int(leave.code or 0)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    assert command.name in out.splitlines()[0]


def test_arguments_and_status_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> int:
        given.append(arguments)
        return 7

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=run))
    assert main(["auth", "check", "--x", "help"]) == 7
    assert given == [["check", "--x", "help"]]


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="uvloop")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert main(["nsqd"]) == 1
    assert capsys.readouterr().err == "nsparq nsqd: uvloop is missing: pip install 'nsparq[server]'\n"


def test_an_import_error_of_ours_is_not_reported_as_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {"Tools": (Command("x", "nsparq.tools.nowhere", ""),)}
    monkeypatch.setattr(main_module, "COMMANDS", commands)
    with pytest.raises(ModuleNotFoundError):
        main(["x"])


def test_an_interrupt_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=interrupted))
    assert main(["auth"]) == 130


def test_a_closed_reader_prints_no_traceback() -> None:
    code = (
        "import importlib, sys, types\n"
        "from nsparq.tools.main import main\n"
        "def flood(arguments):\n"
        "    while True: print('x' * 1000)\n"
        "importlib.import_module = lambda name: types.SimpleNamespace(main=flood)\n"
        "sys.exit(main(['auth']))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(DEADLINE) == 1


def test_the_help_loads_no_command_and_needs_no_extra() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('uvloop', 'numpy', 'crc32c', 'rich')))\n"
        "from nsparq.tools.main import main\n"
        "status = main(['--help'])\n"
        "assert not [name for name in sys.modules if name.startswith(('nsparq.server', 'asyncio'))]\n"
        "sys.exit(status or main(['auth', 'secret']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
