"""The table in README.md and the tests agree, and no case is missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
GROUPS = {
    "A": range(1, 15),
    "B": range(15, 36),
    "C": range(36, 48),
    "D": range(48, 56),
    "E": range(56, 71),
    "F": range(71, 88),
    "G": range(88, 95),
    "H": range(95, 112),
    "I": range(112, 125),
    "J": range(125, 134),
    "K": range(134, 153),
    "L": range(153, 174),
    "M": range(174, 178),
    "N": range(178, 200),
    "O": range(200, 210),
    "P": range(210, 219),
    "Q": range(219, 228),
}


class Row(NamedTuple):
    files: list[str]
    status: str


def table() -> dict[str, Row]:
    """Rows by case, such as "A1"."""
    rows: dict[str, Row] = {}
    for line in (HERE / "README.md").read_text().splitlines():
        if found := re.fullmatch(r"\| ([A-Z]\d+) \| (.+) \| (.*) \| (.+) \|", line):
            assert found[1] not in rows, f"{found[1]} stands twice in the table"
            rows[found[1]] = Row(re.findall(r"`(\w+\.py)`", found[3]), found[4])
    return rows


def cases_tested() -> dict[int, set[str]]:
    """Files with a test of the case, by its number in the name: test_case_007_…,
    test_cases_024_and_025_…"""
    found: dict[int, set[str]] = {}
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_case"):
                name = re.match(r"test_cases?_(\d{3}(?:_and_\d{3})*)_[a-z]", node.name)
                assert name, f"{node.name} carries no case number"
                for number in name[1].split("_and_"):
                    found.setdefault(int(number), set()).add(path.name)
    return found


def test_the_table_lists_every_case_of_its_groups_once():
    assert list(table()) == [f"{group}{number}" for group, cases in GROUPS.items() for number in cases]


def test_every_case_has_a_test_or_a_reason_for_having_none():
    covered = cases_tested()
    for case, row in table().items():
        files = covered.get(int(case[1:]), set())
        assert files == set(row.files), f"{case}: the table names {row.files}, tests are in {sorted(files)}"
        if not files:
            assert row.status.startswith(("not yet", "elsewhere")), f"{case} has neither test nor reason"


def test_no_test_carries_a_number_outside_the_groups():
    known = {number for cases in GROUPS.values() for number in cases}
    assert set(cases_tested()) <= known
