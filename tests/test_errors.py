"""The lists of errors are complete and name the module of each error."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import nsparq.client
import nsparq.client.errors
import nsparq.errors

SOURCE = Path(nsparq.__file__).parent
ELSEWHERE = {"admin", "spark", "pipeline"}
"""Packages whose errors are in no list."""
LINE = re.compile(r"^[│ ]*[├└]── (\w+) +(?:([a-z_.]+): )?\S")


@cache
def defined() -> dict[str, set[tuple[str, str]]]:
    """Name and module of every public error, by the root of its tree. Parsed, not imported: some
    modules need optional packages."""
    bases: dict[tuple[str, str], list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = [base.id for base in node.bases if isinstance(base, ast.Name)]
                bases[node.name, ".".join(parts)] = names

    def root(name: str, module: str) -> str | None:
        if (name, module) in (("ClientError", "client.errors"), ("NsparqError", "errors")):
            return module
        for base in bases.get((name, module), ()):
            # If two have the same name, the one of the same package.
            places = [place for named, place in bases if named == base]
            near = [place for place in places if place.partition(".")[0] == module.partition(".")[0]]
            for place in near or places:
                if (found := root(base, place)) is not None:
                    return found
        return None

    trees: dict[str, set[tuple[str, str]]] = {"errors": set(), "client.errors": set()}
    for name, module in bases:
        if name.startswith("_") or module.partition(".")[0] in ELSEWHERE:
            continue
        tree = "errors" if name == "ClientError" else root(name, module)
        if tree is not None and (name, module) != ("NsparqError", "errors"):
            trees[tree].add((name, module))
    return trees


def listed(text: str | None, module: str) -> list[tuple[str, str]]:
    found = [LINE.match(line) for line in (text or "").splitlines()]
    return [(match[1], match[2] or module) for match in found if match]


@pytest.mark.parametrize("module", [nsparq.errors, nsparq.client.errors])
def test_every_error_is_in_the_list_with_the_module_that_defines_it(module: object) -> None:
    name = module.__name__.removeprefix("nsparq.")  # type: ignore[attr-defined]
    found = listed(module.__doc__, name)
    assert len(set(found)) == len(found)
    assert set(found) == defined()[name]


def test_the_errors_of_the_client_can_be_imported_from_it() -> None:
    internal = {"LookupFailed"}
    wanted = {name for name, _ in defined()["client.errors"]} - internal
    assert wanted | {"ClientError", "ConfigError"} <= set(nsparq.client.__all__)


def test_every_export_of_the_client_has_a_docstring() -> None:
    for name in nsparq.client.__all__:
        assert inspect.getdoc(getattr(nsparq.client, name))
