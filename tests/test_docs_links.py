"""Everything that the documentation names exists: pages, headings, commands, flags, tests."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nsparq.admin.options import TABLE as NSQADMIN
from nsparq.lookup.options import TABLE as NSQLOOKUPD
from nsparq.option_table import OptionTable
from nsparq.options import TABLE as NSQD
from nsparq.testing import plugin
from nsparq.tools.main import COMMANDS
from nsparq.tools.reference import TABLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(ROOT / name / "README.md" for name in ("benchmarks", "changes", "deploy", "tests/conformance")),
    *sorted(DOCS.rglob("*.md")),
]
INSIDE = [DOCS / "architecture.md", *sorted((DOCS / "internals").glob("*.md"))]
DAEMONS = {"nsqd": NSQD, "nsqlookupd": NSQLOOKUPD, "nsqadmin": NSQADMIN}

FENCE = re.compile(r"^(```+)(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
PICTURE = re.compile(r"!\[[^\[\]]*\]\(([^()\s]+)\)")
IMAGE = re.compile(r"""<img\s[^>]*src=["']([^"']+)["']""")
SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
# Paths that exist on any machine, and paths for examples.
ALLOWED = re.compile(
    r"/(etc|proc)(/|$)|/var/(lib|cache|backups)(/|$)|/opt/nsparq(/|$)|/data/|/bin/(sh|kill)$|/usr/lib/sysusers\.d/"
)
ABSOLUTE = re.compile(
    r"(?<![\w/.:>~$}=-])/(?:bin|data|etc|home|mnt|opt|proc|root|run|srv|tmp|usr|var|work|Users)(?:/[\w.@-]+)+"
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# reading Markdown


@cache
def prose(page: Path) -> str:
    """Without blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, *kinds: str) -> list[str]:
    return [text for _, kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind in kinds]


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names


def spans(page: Path) -> list[str]:
    """Code inside lines."""
    return [" ".join(text.split()) for _, text in SPAN.findall(prose(page))]


def commands(page: Path) -> Iterator[str]:
    """Command lines, in blocks and inside lines."""
    for text in blocks(page, "sh", "console", ""):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"\|| && |; ", line.split(" # ")[0].strip().removeprefix("$ ")):
                yield part.strip()
    yield from spans(page)


def links(page: Path) -> Iterator[str]:
    text = SPAN.sub("code", prose(page))
    yield from LINK.findall(text)
    yield from PICTURE.findall(text)  # also inside a link
    yield from IMAGE.findall(text)


# links


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or not target.is_relative_to(ROOT):
            wrong.append(f"{link}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{link}: there is no such heading; there are {sorted(anchors(target))}")
    assert not wrong, "\n".join(wrong)


def test_every_page_is_in_the_index() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(INDEX) if "://" not in link}
    pages = {page for page in DOCS.rglob("*.md") if page != INDEX}
    assert pages <= listed, sorted(name_of(page) for page in pages - listed)


def test_the_readme_leads_to_the_index() -> None:
    assert "docs/README.md" in {*links(ROOT / "README.md")}


# examples


@each_page
def test_what_a_page_shows_of_an_example_is_in_its_file(page: Path) -> None:
    """Other tests run the files."""
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"<!-- (examples/\S+) -->\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(shown) == text.count("<!-- examples/")
    for name, block in shown:
        assert block in (ROOT / name).read_text(encoding="utf-8"), name


@each_page
def test_python_on_a_page_is_valid_and_uses_public_names(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(text))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nsparq":
                try:
                    module = importlib.import_module(node.module or "")
                except ImportError as error:
                    assert "pip install" in str(error), error  # an extra that is not installed here
                    continue
                for alias in node.names:
                    assert hasattr(module, alias.name), f"from {node.module} import {alias.name}"


@each_page
def test_other_blocks_on_a_page_are_valid(page: Path) -> None:
    for text in blocks(page, "toml"):
        # Lines with the same key are alternatives.
        alternatives = len({line.partition(" ")[0] for line in text.splitlines()}) == 1
        for part in text.splitlines() if alternatives else [text]:
            tomllib.loads(part)
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "sh"):
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert not done.returncode, done.stderr


def test_links_and_headings_are_understood(tmp_path: Path) -> None:
    """The parsing that this file relies on."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c's!\n## A `b` c's!\n## PUT /x/y\n```sh\n# no heading\n[no](link)\n```\n"
        '[one](a.md#b) [![two](c.png)](d.md) `[no](x)` <img src="e.png">\n'
    )
    assert anchors(page) == {"a-b-cs", "a-b-cs-1", "put-xy"}
    assert sorted(links(page)) == ["a.md#b", "c.png", "d.md", "e.png"]


# commands


@cache
def scripts() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {*project["scripts"]}


@cache
def targets() -> set[str]:
    return {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)}


def first_words(page: Path, program: str) -> Iterator[str]:
    """What follows the program's name in each command line."""
    for command in commands(page):
        words = [word for word in command.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if len(words) > 1 and Path(words[0]).name == program:
            yield words[1]


@each_page
def test_every_command_exists(page: Path) -> None:
    """Programs of NSQ and of ours."""
    for command in commands(page):
        if found := re.match(r"(?:\S*/)?(nsqd|nsqlookupd|nsqadmin|nsparq|to_nsq|nsq_\w+)(?= |$)", command):
            assert found[1] in scripts() or hasattr(plugin, found[1]), command  # fixtures look alike


@each_page
def test_every_subcommand_exists(page: Path) -> None:
    known = {command.name for group in COMMANDS.values() for command in group}
    for word in first_words(page, "nsparq"):
        assert word in known or word.startswith("-") or not word.isalpha() or word.isupper(), f"nsparq {word}"


@each_page
def test_every_make_target_exists(page: Path) -> None:
    for word in first_words(page, "make"):
        assert word in targets(), f"make {word}"


@each_page
def test_every_module_to_be_run_exists(page: Path) -> None:
    for module in re.findall(r"python3? -m ([\w.]+)", page.read_text(encoding="utf-8")):
        if module.partition(".")[0] in ("benchmarks", "tests", "nsparq", "fuzz"):
            places = [ROOT, ROOT / "src"]
            path = module.replace(".", "/")
            assert any((p / f"{path}.py").exists() or (p / path).is_dir() for p in places), module


@cache
def known_flags() -> frozenset[str]:
    """The flags of all our programs, including benchmarks."""
    found = {flag for table in (*DAEMONS.values(), *TABLES) for flag in table_flags(table)}
    for folder in ("src", "benchmarks", "tests/soak"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            found |= set(re.findall(r"--[a-z][\w-]*", text))
            switches = re.findall(r'"--([\w-]+)",\s+action=argparse\.BooleanOptionalAction', text)
            found |= {f"--no-{name}" for name in switches}
            if folder == "benchmarks":
                # The fields of their parameter classes are flags.
                fields = re.findall(r"^    (\w+): \w+ = ", text, re.MULTILINE)
                found |= {f"--{name.replace('_', '-')}" for name in fields}
    return frozenset(found)


@cache
def table_flags(table: OptionTable[Any]) -> set[str]:
    return {*re.findall(r"`(--[\w-]+)`", table.markdown())}


@each_page
def test_every_flag_of_a_daemon_exists(page: Path) -> None:
    for command in commands(page):
        words = command.split()
        table = DAEMONS.get(Path(words[0]).name) if words else None
        if table is not None:
            given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
            assert given <= table_flags(table) | {"--help"}, command


@each_page
def test_every_flag_named_alone_is_known_to_some_program(page: Path) -> None:
    foreign = {"--cacert", "--py-files", "--conf", "--deploy-mode"}
    for span in spans(page):
        if re.match(r"--[a-z]", span):
            flag = re.match(r"--[\w-]+", span)
            assert flag and flag[0] in known_flags() | foreign, span


# paths and tests


@each_page
def test_a_page_whose_commands_need_files_of_deploy_says_how_to_get_them(page: Path) -> None:
    """An installed package has them, and there may be no clone."""
    lines = "".join(blocks(page, "sh", "console"))
    if re.search(r"(?<![\w/.-])deploy/\w", lines):
        assert "nsparq deploy --write deploy" in page.read_text(encoding="utf-8")


@each_page
def test_docs_have_no_path_of_a_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [match for match in ABSOLUTE.findall(text) if not ALLOWED.match(match)]
    assert not found


@each_page
def test_every_test_that_is_named_exists(page: Path) -> None:
    named = set()
    for span in spans(page):
        named |= set(re.findall(r"(?<![\w/])(test_\w+)(?![\w*.])", span))
    assert named <= all_tests(), sorted(named - all_tests())


@pytest.mark.parametrize("page", INSIDE, ids=name_of)
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    for span in spans(page):
        if re.fullmatch(r"(?:\w+/)*\w+\.(?:py|c)|(?:\w+/)+", span):
            assert any((place / span).exists() for place in (ROOT, ROOT / "src" / "nsparq")), span


@cache
def all_tests() -> frozenset[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "node_modules" not in path.parts:
            found |= {*re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))}
    return frozenset(found)
