"""Pages, help texts, log lines and errors use the words that readers know from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs", "changes", "deploy", "examples", "src")
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
