"""Pages, help texts, log lines and errors use the words that readers know from elsewhere, in lines
of at most 100 characters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs", "changes", "deploy", "examples", "src")
LONGEST = 100
KINDS = {".css", ".html", ".js", ".json", ".md", ".py", ".toml", ".yml"}

# What earlier versions of the pages said, and what they say now.
PLAIN = {
    r"who may do what": "authentication and permissions",
    r"what needs a person|needs? a person": "needs attention",
    r"take (it |them )?off a node": "remove from node",
    r">\s*together\s*<": "total",
    r"messages are put back": "requeued",
    r"is of use, not needed": "is optional",
    r"nothing is known yet": "no data yet, or how to switch it on",
}


def texts() -> list[Path]:
    places = [ROOT / name for name in TEXTS]
    files = [path for place in places for path in ([place] if place.is_file() else place.rglob("*"))]
    return [path for path in files if path.suffix in KINDS]


@pytest.mark.parametrize("quaint", PLAIN)
def test_texts_use_the_ordinary_term(quaint: str) -> None:
    pattern = re.compile(quaint.replace(" ", r"\s+"), re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}: say {PLAIN[quaint]}"
        for path in texts()
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_all_kinds_of_texts_are_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in texts()}
    assert {
        "README.md",
        "docs/auth.md",
        "src/nsparq/options.py",
        "src/nsparq/admin/show/templates/topic.html",
        "src/nsparq/admin/show/static/charts.js",
    } <= names


# Blocks of code, tables and pictures, which may be wider, and generated pages.
NO_PROSE = re.compile(r"^```.*?^```|^ *\|.*?$|^ {4,}.*?$|^(- )?\[?!\[.*?$", re.MULTILINE | re.DOTALL)
GENERATED = "Generated from "


def test_lines_of_prose_on_pages_are_short() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in texts() if path.suffix == ".md"}
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path, text in pages.items()
        if GENERATED not in text
        for line in NO_PROSE.sub("", text).splitlines()
        if len(line) > LONGEST and " " in line
    ]
    assert not found


def test_lines_of_comments_and_docstrings_are_short() -> None:
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=W505", "--output-format=json"]
    limit = f"--config=lint.pycodestyle.max-doc-length={LONGEST}"
    checked = subprocess.run([*ruff, limit, "."], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode in (0, 1), checked.stderr
    places = [(Path(one["filename"]), one["location"]["row"]) for one in json.loads(checked.stdout)]
    long = [(path, path.read_text(encoding="utf-8").splitlines()[row - 1]) for path, row in places]
    # Drawings and tables may be wider. They have runs of blanks, or borders.
    drawing = re.compile(r"\S {2,}\S|[+|]--")
    assert long
    assert not [f"{path.relative_to(ROOT)}: {line}" for path, line in long if not drawing.search(line)]
