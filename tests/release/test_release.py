"""`make release` turns the notes of changes/ into a release of CHANGELOG.md."""

from __future__ import annotations

import datetime
import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from nsparq.version import __version__
from tests.release.building import ROOT

specification = importlib.util.spec_from_file_location("release", ROOT / "changes/release.py")
assert specification and specification.loader
tool = importlib.util.module_from_spec(specification)
specification.loader.exec_module(tool)

TODAY = datetime.date(2026, 12, 1)
OLD = "# Changelog\n\nChanges.\n\n## 0.1.0, 2026-11-20\n\nThe first.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes/README.md").write_text("about")
    (tmp_path / "changes/a.md").write_text("Added one\nthing.\n")
    points = "- Fixed this,\n  and more.\n- nsqd does that.\n- Fixed: what was wrong.\n"
    (tmp_path / "changes/b.md").write_text(points)
    (tmp_path / "src/nsparq").mkdir(parents=True)
    (tmp_path / "src/nsparq/version.py").write_text('"""V."""\n\n__version__ = "0.1.0"\nNSQ = "1.3.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(OLD)
    return tmp_path


NOTES = """\
### Added

- Added one
  thing.

### Changed

- nsqd does that.

### Fixed

- Fixed this,
  and more.
- Fixed: what was wrong.
"""


def test_the_notes_become_a_release(tree: Path) -> None:
    tool.release(tree, "0.2.0", TODAY)
    assert (tree / "CHANGELOG.md").read_text() == OLD.replace(
        "## 0.1.0", f"## 0.2.0, 2026-12-01\n\n{NOTES}\n## 0.1.0"
    )
    assert '__version__ = "0.2.0"\nNSQ = "1.3.0"\n' in (tree / "src/nsparq/version.py").read_text()
    assert [path.name for path in (tree / "changes").iterdir()] == ["README.md"]


def test_text_that_waits_for_the_release_is_kept(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0, not yet released\n\nThe first.\n")
    tool.release(tree, "0.1.0", TODAY)
    assert (
        tree / "CHANGELOG.md"
    ).read_text() == f"# Changelog\n\n## 0.1.0, 2026-12-01\n\nThe first.\n\n{NOTES}"


@pytest.mark.parametrize(
    ("version", "refused"),
    [("0.1.0", "not newer"), ("0.0.9", "not newer"), ("v1", "looks like"), ("0.2.0rc1", "looks like")],
)
def test_a_wrong_version_changes_nothing(tree: Path, version: str, refused: str) -> None:
    with pytest.raises(tool.Refused, match=refused):
        tool.release(tree, version, TODAY)
    assert (tree / "CHANGELOG.md").read_text() == OLD and (tree / "changes/a.md").exists()


def test_there_is_no_release_without_notes(tree: Path) -> None:
    for name in ("a.md", "b.md"):
        (tree / "changes" / name).unlink()
    with pytest.raises(tool.Refused, match="no notes"):
        tool.release(tree, "0.2.0", TODAY)


def test_the_notes_of_this_tree_can_be_released(tmp_path: Path) -> None:
    for name in ("changes", "CHANGELOG.md", "src/nsparq/version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    notes = [path.read_text("utf-8") for path in (ROOT / "changes").glob("*.md") if path.name != "README.md"]
    tool.release(tmp_path, "99.0.0", TODAY)
    text = (tmp_path / "CHANGELOG.md").read_text("utf-8")
    words = re.findall(r"\w+", text)
    assert all(word in words for note in notes for word in re.findall(r"\w+", note))


def test_the_changelog_has_the_present_version() -> None:
    assert f"\n## {__version__}, " in (ROOT / "CHANGELOG.md").read_text("utf-8")
