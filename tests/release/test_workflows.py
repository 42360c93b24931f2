"""The workflows of the build server: their form, and that what they name exists. They cannot be run
here."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsparq.version import __version__
from tests.release.building import ROOT
from tests.test_docs_links import targets

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    return found


def commands(path: Path) -> list[str]:
    return [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]


@each_workflow
def test_a_workflow_has_the_form_that_github_expects(path: Path) -> None:
    for schema in ("vendor.github-workflows", "custom.github-workflows-require-timeout"):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@each_workflow
def test_what_a_workflow_runs_exists(path: Path) -> None:
    text = "\n".join(commands(path))
    assert {*re.findall(r"make ([\w-]+)", text)} <= targets()
    for name in re.findall(r"(?<![\w/])(\.ci/[\w-]+|src/[\w/.]+)", text):
        assert (ROOT / name).exists(), name
    for job in jobs(path).values():
        for step in job["steps"]:
            if file := step.get("with", {}).get("file"):
                assert (ROOT / file).exists(), file


@each_workflow
def test_a_workflow_is_tried_on_every_python_that_we_support(path: Path) -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [match[1] for line in classifiers if (match := re.search(r":: (3\.\d+)$", line))]
    matrices = [job["strategy"]["matrix"] for job in jobs(path).values() if "strategy" in job]
    tried = [matrix["python"] for matrix in matrices if "python" in matrix]
    assert tried and all(one == versions for one in tried)


@each_workflow
def test_a_shell_script_has_no_text_from_outside(path: Path) -> None:
    """A tag or a branch may be named like a command: it goes through a variable."""
    assert not [command for command in commands(path) if "${{" in command]


def test_publishing_needs_a_tried_wheel_and_no_token() -> None:
    publish = RELEASE["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "try" and publish["if"] == "github.ref_type == 'tag'"
    assert publish["environment"] == "pypi"
    assert "with" not in publish["steps"][-1], "a password would be there"
    assert RELEASE["jobs"]["try"]["needs"] == "wheels" and RELEASE["jobs"]["wheels"]["needs"] == "sdist"
    secrets = re.findall(r"secrets\.(\w+)", (ROOT / ".github/workflows/release.yml").read_text())
    assert secrets == ["GITHUB_TOKEN"], "the image goes to the registry of the repository"


def test_every_artifact_is_made_before_it_is_used() -> None:
    steps = [step for job in RELEASE["jobs"].values() for step in job["steps"]]
    made = [step["with"]["name"] for step in steps if "upload-artifact" in step.get("uses", "")]
    used = [step["with"] for step in steps if "download-artifact" in step.get("uses", "")]
    assert made == ["dist-sdist", "dist-${{ matrix.os }}"]
    assert [one.get("name") or one["pattern"] for one in used] == ["dist-sdist", "dist-*", "dist-*"]


@pytest.mark.parametrize(("tag", "fits"), [("v{}", True), ("v9.9.9", False)])
def test_the_tag_must_be_the_version(tag: str, fits: bool, tmp_path: Path) -> None:
    """With a changelog whose release has a date."""
    (script,) = (step for step in RELEASE["jobs"]["sdist"]["steps"] if "The tag" in step.get("name", ""))
    (tmp_path / "src/nsparq").mkdir(parents=True)
    (tmp_path / "src/nsparq/version.py").write_text((ROOT / "src/nsparq/version.py").read_text())
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__}, 2026-12-01\n")
    done = subprocess.run(
        ["bash", "-e", "-c", script["run"]],
        cwd=tmp_path,
        env={"TAG": tag.format(__version__), "PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode == 0) == fits
