"""systemd accepts the units, and the daemons accept their configuration."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nsparq.admin.options import TABLE as NSQADMIN
from nsparq.lookup.options import TABLE as NSQLOOKUPD
from nsparq.option_table import OptionTable
from nsparq.options import TABLE as NSQD
from nsparq.tools.main import main
from tests.support.polling import DEADLINE

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
ETC = ROOT / "deploy/etc"
DAEMONS: dict[str, OptionTable[Any]] = {"nsqd": NSQD, "nsqlookupd": NSQLOOKUPD, "nsqadmin": NSQADMIN}
INSTALLED = "/opt/nsparq/bin"

each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
each_daemon = pytest.mark.parametrize("name", DAEMONS)


def settings(unit: Path) -> dict[str, list[str]]:
    """What a unit says, by key; a key may come several times."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def unit_of(name: str) -> dict[str, list[str]]:
    return settings(ROOT / f"deploy/systemd/{name}.service")


def test_there_is_a_unit_for_each_program() -> None:
    assert {unit.stem for unit in UNITS} == {*DAEMONS, "nsparq-pipeline@"}


@each_unit
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    """As it is, but for where the programs are."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    programs = Path(sys.executable).parent
    copy = tmp_path / unit.name.replace("@", "@shop")
    copy.write_text(unit.read_text(encoding="utf-8").replace(INSTALLED, str(programs)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_addition_for_a_replicated_nsqd_is_accepted(tmp_path: Path) -> None:
    addition = ROOT / "deploy/systemd/nsqd.service.d/replicated.conf"
    nothing, command = settings(addition)["ExecStart"]
    (usual,) = unit_of("nsqd")["ExecStart"]
    # The usual command, and one flag more.
    assert nothing == "" and command.startswith(f"{usual} ")
    _, options = NSQD.read_flags(command.removeprefix(usual).split())
    assert options == {"replication_secret_file": "${CREDENTIALS_DIRECTORY}/replication.secret"}
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    unit, programs = tmp_path / "nsqd.service", str(Path(sys.executable).parent)
    (tmp_path / "nsqd.service.d").mkdir()
    source = ROOT / "deploy/systemd/nsqd.service"
    for path, copy in ((source, unit), (addition, tmp_path / "nsqd.service.d" / addition.name)):
        copy.write_text(path.read_text(encoding="utf-8").replace(INSTALLED, programs))
    verify = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@each_daemon
def test_the_daemon_accepts_the_command_of_its_unit(name: str) -> None:
    (command,) = unit_of(name)["ExecStart"]
    program, *flags = command.split()
    assert program == f"{INSTALLED}/{name}"
    commands, options = DAEMONS[name].read_flags(flags)
    assert commands["config"] == f"/etc/nsparq/{name}.toml"
    assert options.get("data_path") == ("/var/lib/nsqd" if name == "nsqd" else None)


@each_daemon
def test_the_daemon_accepts_its_configuration(name: str) -> None:
    """Also with everything that is commented out."""
    text = (ETC / f"{name}.toml").read_text(encoding="utf-8")
    options, warnings = DAEMONS[name].read_command_line([f"--config={ETC / name}.toml"])
    options.validate()
    assert not warnings
    everything = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert {*tomllib.loads(everything)} <= {*known_keys(name)}
    assert name == "nsqlookupd" or {*tomllib.loads(everything)} > {*tomllib.loads(text)}


def known_keys(name: str) -> set[str]:
    return {*re.findall(r"^\| `--[\w-]+` \| `(\w+)` \|", DAEMONS[name].markdown(), re.MULTILINE)}


def test_data_is_written_where_the_unit_allows_it() -> None:
    unit = unit_of("nsqd")
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["StateDirectory"] == ["nsqd"]
    assert "--data-path=/var/lib/nsqd" in unit["ExecStart"][0]


def test_a_pipeline_file_and_its_unit_fit_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = unit_of("nsparq-pipeline@")
    check, run = (unit[key][0].split() for key in ("ExecStartPre", "ExecStart"))
    assert check[:3] == [f"{INSTALLED}/nsparq", "pipeline", "check"]
    assert run[:3] == [f"{INSTALLED}/nsparq", "pipeline", "run"]
    assert check[-1] == run[-1] == "/etc/nsparq/pipelines/%i.toml"
    # SIGTERM to all of them would end Spark under the micro-batch.
    assert unit["KillMode"] == ["mixed"]
    file = ETC / "pipelines/shop.toml"
    checkpoint = tomllib.loads(file.read_text(encoding="utf-8"))["run"]["checkpoint"]
    assert checkpoint == "${STATE_DIRECTORY:-/var/lib/nsparq-pipelines/shop}"
    assert unit["StateDirectory"] == ["nsparq-pipelines/%i"]
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    assert main([*check[1:-1], str(file)]) == 0, capsys.readouterr().err
    for arguments in (check, run):
        options = [word for word in arguments if word.startswith("--")]
        with pytest.raises(SystemExit, match="0"):
            main([*arguments[1:3], *options, "--help"])
    capsys.readouterr()


@each_unit
def test_a_unit_stops_by_sigterm_and_comes_back_after_a_crash(unit: Path) -> None:
    found = settings(unit)
    assert found["KillSignal"] == ["SIGTERM"]
    assert found["Restart"] in (["always"], ["on-failure"])
    assert found["RestartPreventExitStatus"] == ["2"]
    assert found["StartLimitIntervalSec"] == ["0"]


@each_unit
def test_a_unit_is_sandboxed(unit: Path) -> None:
    found = settings(unit)
    assert found["CapabilityBoundingSet"] == [""]
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictSUIDSGID"):
        assert found[key] == ["yes"], key
    # Whom /etc/nsparq can be read by.
    assert (found["User"], found["Group"]) == (["nsparq"], ["nsparq"])


def test_the_user_of_the_units_is_created() -> None:
    lines = (ROOT / "deploy/systemd/nsparq.sysusers.conf").read_text(encoding="utf-8").splitlines()
    assert [line.split()[:2] for line in lines if not line.startswith("#")] == [["u", "nsparq"]]
