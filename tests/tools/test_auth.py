"""nsparq auth: creates, hashes and checks secrets, and does not leak them."""

from __future__ import annotations

import asyncio
import getpass
import io
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nsparq.server.auth.grants import AuthFailed, Permission
from nsparq.server.auth.policy import StaticPolicy
from nsparq.server.auth.policy_file import hash_generated
from nsparq.tools.auth import main

ALLOW = '[[identity.allow]]\ntopic = "^billing"\npermissions = ["publish", "subscribe"]\n'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The inputs at the prompts of a terminal, in order."""
    lines: list[str] = []
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(getpass, "getpass", lambda prompt: lines.pop(0))
    return lines


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def opens(tmp_path: Path, line: str, secret: bytes) -> bool:
    """Whether a policy with this line accepts the secret, as identity `x`."""
    path = tmp_path / "made.toml"
    path.write_text(f'[[identity]]\nname = "x"\n{line}\n{ALLOW}')
    with ThreadPoolExecutor(1) as threads:
        policy = StaticPolicy(path, threads)
        try:
            asyncio.run(policy.authenticate(secret, remote_ip="", tls=False, common_name=""))
        except AuthFailed:
            return False
    return True


def test_a_secret_is_printed_with_its_matching_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["secret"]) == 0
    out, err = capsys.readouterr()
    secret, line = out.splitlines()
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert opens(tmp_path, line, secret.encode())
    assert secret not in err
    main(["secret"])
    assert capsys.readouterr().out.splitlines()[0] != secret


def test_a_password_is_asked_for_twice(
    tmp_path: Path, typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    typed += ["correct hörse", "correct hörse"]
    assert main(["hash"]) == 0
    out, err = capsys.readouterr()
    assert opens(tmp_path, out.strip(), "x:correct hörse".encode())
    assert "name:password" in err and "hörse" not in out + err
    typed += ["one", "two"]
    assert main(["hash"]) == 1
    assert capsys.readouterr() == ("", "nsparq auth: the two secrets differ\n")


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_a_password_may_come_through_a_pipe(
    ending: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"a \xff b" + ending)
    assert main(["hash"]) == 0
    out, err = capsys.readouterr()
    assert opens(tmp_path, out.strip(), b"x:a \xff b")
    assert err.startswith("This password is short.")


def test_a_generated_secret_from_elsewhere_gets_the_fast_hash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"long and random\n")
    assert main(["hash", "--generated"]) == 0
    assert capsys.readouterr() == (f'secret = "{hash_generated(b"long and random")}"\n', "")


def test_an_empty_password_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"\n")
    assert main(["hash"]) == 1
    assert capsys.readouterr() == ("", "nsparq auth: nothing was typed\n")


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(f"""
        [[identity]]
        name = "billing"
        secret = ["{hash_generated(b"old")}", "{hash_generated(b"new")}"]
        [[identity.allow]]
        topic = "^billing"
        permissions = ["publish", "subscribe"]
        [[identity.allow]]
        topic = "^orders$"
        channels = ["^billing$", "^audit"]
        permissions = ["subscribe"]

        [[identity]]
        name = "idle"
        secret = "scrypt:4:8:1:{"00" * 16}:{"00" * 32}"

        [[anonymous.allow]]
        topic = ".*"
        permissions = ["read"]
    """)
    return path


def test_a_check_prints_the_permissions(policy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(policy_file)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "identity     secrets      topic     channels          permissions",
        "billing      2 generated  ^billing  .*                publish, subscribe",
        "                          ^orders$  ^billing$ ^audit  subscribe",
        "idle         password                                 nothing",
        "(anonymous)  none         .*        .*                read",
    ]
    assert err == "warning: identity 'idle' has no permissions: it has no allow\n"


def test_a_check_of_a_bad_file_says_why(policy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy_file.write_text("[[identity]]\n")
    assert main(["check", str(policy_file)]) == 1
    expected = f"nsparq auth: {policy_file}: identity 1: name must be a string without a colon\n"
    assert capsys.readouterr() == ("", expected)
    assert main(["check", str(policy_file.parent / "none")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_who_prints_the_identity_of_a_secret(
    policy_file: Path, typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    typed += ["new"]
    assert main(["who", str(policy_file)]) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[1] == "billing   ^billing  .*                publish, subscribe"
    typed += ["wrong"]
    assert main(["who", str(policy_file)]) == 1
    assert capsys.readouterr() == ("", "nsparq auth: no identity has this secret\n")


@pytest.mark.parametrize("arguments", [[], ["fly"], ["check"], ["secret", "x"]])
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(arguments)
    assert leave.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("nsparq auth") and second.endswith("--help` explains it")


def test_the_example_of_the_documentation_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "auth.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "policy.toml"
    path.write_text(example)
    assert main(["check", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out in page
    shown = re.findall(r"^[0-9a-f]{64}$|ada:correct-horse", page, re.MULTILINE)
    assert len({*shown}) == 2
    for secret in shown:
        piped(monkeypatch, secret.encode())
        assert main(["who", str(path)]) == 0
    assert all(f"`{permission}`" in page for permission in Permission)
