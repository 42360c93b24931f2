"""docs/spark.md: its Python, options, commands and settings are right."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import nsparq.spark
from nsparq.spark.datasource import SCHEMA
from nsparq.spark.options import NsqOptions, Use
from nsparq.spark.session.build import settings
from nsparq.tools.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
SHELL = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == name
    ]


@pytest.mark.parametrize("text", PYTHON, ids=range(len(PYTHON)))
def test_python_of_the_page_is_right(text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "nsparq.spark":
            assert {alias.name for alias in node.names} <= set(nsparq.spark.__all__)
    for call in calls(tree, "options"):
        given = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
        NsqOptions.parse(given, Use.LOG_STREAM if "channel" in given else Use.LOG_BATCH)


def test_everything_that_the_package_offers_is_there() -> None:
    for name in nsparq.spark.__all__:
        assert getattr(nsparq.spark, name) is not None
    assert not hasattr(nsparq.spark, "nothing_else")


def test_commands_of_the_page_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [words for line in SHELL if (words := shlex.split(line, comments=True))[0] == "nsparq"]
    commands += [shlex.split(inner) for inner in re.findall(r"\$\((nsparq .*?)\)", "\n".join(SHELL))]
    assert ["nsparq", "spark", "doctor"] in commands and ["nsparq", "spark", "package"] in commands
    for _, *arguments in commands:
        with pytest.raises(SystemExit, match="0"):
            main([*arguments, "--help"])
    capsys.readouterr()


def test_the_table_of_columns_is_the_schema() -> None:
    section = PAGE[PAGE.index("| column |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `?([\w<>,]+)`? \|", section, re.MULTILINE)
    assert rows == [(field.name, field.dataType.simpleString()) for field in SCHEMA.fields]


def test_the_table_of_settings_is_complete() -> None:
    section = PAGE[PAGE.index("| setting |") :].partition("\n\n")[0]
    ours = settings("local[2]").keys() - {"spark.master", "spark.ui.enabled", "spark.driver.bindAddress"}
    assert ours == set(re.findall(r"^\| `(spark[\w.]+)`", section, re.MULTILINE))
