"""`nsparq deploy` lists and writes the files of deploy/. tests/release tries it in an installed
package."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsparq.tools.deploy import find_files
from nsparq.tools.main import main

DEPLOY = Path(__file__).parents[2] / "deploy"
NAMES = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file())


def test_every_file_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_files() == (DEPLOY, NAMES)
    assert main(["deploy", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == NAMES


def test_all_files_are_written_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "--write", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "new" / name) for name in NAMES]
    for name in NAMES:
        assert (tmp_path / "new" / name).read_bytes() == (DEPLOY / name).read_bytes()


@pytest.mark.parametrize("name", ["prometheus", "prometheus/", "prometheus/*"])
def test_a_folder_or_a_pattern_chooses(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "--write", str(tmp_path), name, "etc/nsqd.toml"]) == 0
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == ["etc/nsqd.toml", *(one for one in NAMES if one.startswith("prometheus/"))]
    assert main(["deploy", "--list", name]) == 0
    assert "prometheus/alerts.yml" in capsys.readouterr().out


def test_a_changed_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").mkdir()
    mine = tmp_path / "etc/nsqd.toml"
    mine.write_text("mine")
    command = ["deploy", "--write", str(tmp_path), "etc"]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert (
        said
        == f"nsparq deploy: nothing is written, because files there differ: {mine}; --force replaces them\n"
    )
    assert [*(tmp_path / "etc").iterdir()] == [mine]
    assert main([*command, "--force"]) == 0
    assert mine.read_bytes() == (DEPLOY / "etc/nsqd.toml").read_bytes()
    assert main(command) == 0, "files that are the same are no reason to stop"


def test_an_unknown_name_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "--write", str(tmp_path), "etc", "helm"]) == 1
    assert capsys.readouterr().err == (
        "nsparq deploy: there is no file 'helm'; `nsparq deploy --list` shows the names\n"
    )
    assert not [*tmp_path.iterdir()]


def test_a_command_line_without_an_action_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["deploy"])
    assert "--list --write" in capsys.readouterr().err
