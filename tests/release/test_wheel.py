"""The sdist is complete, a wheel of it has everything, and the pages can be followed with it.

`make test-wheel` does the same in clean environments, on each Python that we support, Spark
included."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from itertools import chain
from pathlib import Path

import pytest

from nsparq.version import __version__
from tests.release.building import ROOT, WITHOUT_COMPILER, borrowing_venv, build_sdist, build_wheel, run
from tests.release.follow import (
    WITHOUT_SPARK,
    File,
    Part,
    command_to_follow,
    is_shown,
    read_page,
)
from tests.release.follow import Command as Shown
from tests.support import namespaces
from tests.test_docs_links import commands, links

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
FOR_DEVELOPERS = {"test", "docs"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist."""
    built, _ = build_wheel(sdist, tmp_path_factory.mktemp("wheel"))
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return borrowing_venv(tmp_path_factory.mktemp("venv"), wheel)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


# what is in them


def tree() -> Iterator[str]:
    """Every file of the repository. An sdist that somebody unpacked has no git."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a clone")
    yield from (name for name in listed.stdout.split("\0") if (ROOT / name).is_file())


def test_the_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    """So `make test` works in it too."""
    missing = [name for name in tree() if not (sdist / name).exists()]
    assert not missing
    built = [
        path for path in sdist.rglob("*") if path.suffix in (".so", ".pyc") or "node_modules" in path.parts
    ]
    assert not built


def test_the_wheel_has_the_package_with_its_data_and_the_compiled_kernel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = [name for name in tree() if name.startswith("src/") and not name.endswith(".c")]
    package = {name.removeprefix("src/") for name in source}
    deploy = {f"nsparq/{name}" for name in tree() if name.startswith("deploy/")}
    kernel = {name for name in names if re.fullmatch(r"nsparq/_kernel\..*\.so", name)}
    assert names == package | deploy | kernel
    assert len(kernel) == 1


def test_a_build_without_a_compiler_says_so(sdist: Path, tmp_path: Path) -> None:
    built, said = build_wheel(sdist, tmp_path, **WITHOUT_COMPILER)
    assert "WARNING: nsparq is built without its compiled kernel" in said
    with zipfile.ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


# what the package index shows


def test_the_description_has_absolute_links_to_files_that_exist(wheel: Path, tmp_path: Path) -> None:
    found = metadata(wheel)
    assert found["Description-Content-Type"] == "text/markdown"
    page = tmp_path / "README.md"
    page.write_text(found.get_payload(), encoding="utf-8")
    shown, written = [*links(page)], [*links(ROOT / "README.md")]
    assert len(shown) == len(written)
    repository = PROJECT["project"]["urls"]["Repository"]
    for link, original in zip(shown, written, strict=True):
        if original.startswith(("http", "#")):
            assert link == original
        else:
            match = re.fullmatch(rf"{repository}/(blob|raw)/v{__version__}/([^#]+)(#.*)?", link)
            assert match and (ROOT / match[2]).exists(), link
            assert (match[1] == "raw") == (Path(match[2]).suffix in (".png", ".svg")), link


def test_the_metadata_names_the_project(wheel: Path) -> None:
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("nsparq", __version__)
    assert {url.split(", ")[0] for url in found.get_all("Project-URL", [])} == {*PROJECT["project"]["urls"]}
    assert {*found.get_all("Provides-Extra", [])} == {*EXTRAS}


def test_the_repository_is_named_in_one_place() -> None:
    """Until it exists, it may still be another one."""
    repository = PROJECT["project"]["urls"]["Repository"].removeprefix("https://")
    files = [ROOT / name for name in tree() if not name.startswith("tests/conformance/nsqjs/")]
    found = [path for path in files if repository.encode() in path.read_bytes()]
    assert found == [ROOT / "pyproject.toml"]


def test_all_is_the_union_of_the_other_extras() -> None:
    (everything,) = EXTRAS["all"]
    match = re.fullmatch(r"nsparq\[([\w,-]+)\]", everything)
    assert match and {*match[1].split(",")} == {*EXTRAS} - {"all"} - FOR_DEVELOPERS


def test_the_page_about_installing_has_every_extra() -> None:
    page = (ROOT / "docs/how-to/install.md").read_text("utf-8")
    table = page[page.index("| extra |") :].partition("\n\n")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == {*EXTRAS} - FOR_DEVELOPERS


def test_every_package_that_an_extra_names_is_pinned() -> None:
    named = {re.split(r"[\[><=;]", one)[0] for one in chain.from_iterable(EXTRAS.values())} - {"nsparq"}
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert {normal(name) for name in named} <= {normal(name) for name in pinned}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_cibuildwheel_builds_for_every_platform_and_python() -> None:
    versions = [
        line.rsplit(" ", 1)[1] for line in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)
    ]
    for platform, systems in {
        "linux": ("manylinux_x86_64", "musllinux_x86_64", "manylinux_aarch64", "musllinux_aarch64"),
        "macos": ("macosx_x86_64", "macosx_arm64"),
    }.items():
        command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", platform]
        archs = "x86_64,aarch64" if platform == "linux" else "x86_64,arm64"
        done = subprocess.run([*command, "--archs", archs, str(ROOT)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        expected = {f"cp{version.replace('.', '')}-{system}" for version in versions for system in systems}
        assert {*done.stdout.split()} == expected


# following the pages


def test_the_installed_package_works(programs: Path, tmp_path: Path) -> None:
    python = programs / "python"
    assert run(python, "-c", "import nsparq; print(nsparq.__file__)", cwd=tmp_path).startswith(
        str(programs.parent)
    )
    assert run(python, ROOT / ".ci/try-wheel", cwd=tmp_path).startswith("OK: ")
    listed = run(programs / "nsparq", "deploy", "--list", cwd=tmp_path).split()
    assert listed == sorted(name.removeprefix("deploy/") for name in tree() if name.startswith("deploy/"))


@pytest.mark.parametrize("page", WITHOUT_SPARK)
def test_a_page_can_be_followed_word_by_word(page: str, programs: Path) -> None:
    if not namespaces.are_possible():
        pytest.skip("no namespaces")
    run(*command_to_follow(programs, page), cwd=ROOT, PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_installs_nsparq_from_an_index_that_does_not_have_it(page: Path) -> None:
    """There is no release. Who registers the name first decides what such a command installs."""
    named = [one for one in commands(page) if re.search(r"\bpip install\b.* '?nsparq\b(?!-)", one)]
    assert named == (["pip install nsparq"] if page.name == "install.md" else []), (
        "say '.[extra]', in a clone"
    )


def test_every_extra_that_the_pages_install_exists() -> None:
    for page in PAGES:
        for extras in re.findall(r"(?:nsparq|'\.)\[([a-z,]+)\]", page.read_text("utf-8")):
            assert {*extras.split(",")} <= {*EXTRAS}, page


PAGE = """\
<!-- examples/tutorial/bill.py -->
```python
print(1)
```
```sh
pip install '.[server]'    # a comment
nsqd \\
  --data-path=data
```
```
$ python bill.py
billed 1

$ pytest -q
2 passed in 0.29s
```
```toml
a = 1
```
```json
{}
```
"""


def test_a_page_is_understood() -> None:
    assert read_page(PAGE) == [
        File("bill.py", "print(1)\n"),
        Shown("pip install '.[server]'"),
        Shown("nsqd    --data-path=data"),
        Shown("python bill.py", ["billed 1"]),
        Shown("pytest -q", ["2 passed in 0.29s"]),
        Part("a = 1\n"),
    ]


@pytest.mark.parametrize(
    ("expected", "output", "shown"),
    [
        (["a 1", "b"], "b\nx\na  1\n", True),
        (["a 1"], "a 2\n", False),
        (["a", "a"], "a\n", False),
        (["… b …"], "a b c\n", True),
        (["2 passed in 0.29s"], "2 passed in 1.00s\n", True),
        (["x/date=2026-11-15/00-0dcc4cf7-00.parquet"], "x/date=2026-11-18/01-1a-01.parquet\n", True),
    ],
)
def test_output_is_compared_with_what_the_page_shows(expected: list[str], output: str, shown: bool) -> None:
    assert is_shown(expected, output) == shown
