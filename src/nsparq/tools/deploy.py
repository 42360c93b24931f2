"""`nsparq deploy`: the files for running nsparq that come with the package: systemd units, example
configuration, Prometheus, Grafana, container, Kubernetes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import nsparq
from nsparq.tools.parser import Parser

__all__ = ["find_files", "main"]

DESCRIPTION = """\
Files for running nsparq, from the installed package:

  nsparq deploy --list                          show their names
  nsparq deploy --write deploy                  write all of them into the folder deploy
  nsparq deploy --write . 'systemd/*'           write some of them
  nsparq deploy --write . prometheus            write a whole folder

--write creates folders and does not replace a file that has changed, unless --force is given.
"""


def find_files() -> tuple[Path, list[str]]:
    """The folder with the files, and their names."""
    package = Path(nsparq.__file__).parent
    # A build copies deploy/ into the package. In a clone it is used where it is.
    folder = next((one for one in (package / "deploy", package.parents[1] / "deploy") if one.is_dir()), None)
    if folder is None:
        raise FileNotFoundError(
            f"the files of `nsparq deploy` are missing in {package}: install nsparq again"
        )
    return folder, sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nsparq deploy", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="print the names of the files")
    action.add_argument("--write", type=Path, metavar="DIR", help="write files into this folder")
    parser.add_argument("--force", action="store_true", help="with --write: replace files that differ")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a file, a folder or a pattern; default: all"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        folder, files = find_files()
        chosen = _choose(files, arguments.names)
        if not arguments.list:
            _write(folder, chosen, arguments.write, arguments.force)
    except (OSError, _Refused) as error:
        print(f"nsparq deploy: {error}", file=sys.stderr)
        return 1
    if arguments.list:
        print(*chosen, sep="\n")
    return 0


class _Refused(Exception):
    """Nothing is written; the text says why."""


def _choose(files: list[str], names: list[str]) -> list[str]:
    chosen = set()
    for name in names or ["*"]:
        pattern = name.rstrip("/")
        found = {file for file in files if fnmatchcase(file, pattern) or file.startswith(f"{pattern}/")}
        if not found:
            raise _Refused(f"there is no file {name!r}; `nsparq deploy --list` shows the names")
        chosen |= found
    return sorted(chosen)


def _write(folder: Path, chosen: list[str], target: Path, force: bool) -> None:
    contents = {target / name: (folder / name).read_bytes() for name in chosen}
    different = [path for path, content in contents.items() if path.exists() and path.read_bytes() != content]
    if different and not force:
        listed = ", ".join(map(str, different))
        raise _Refused(f"nothing is written, because files there differ: {listed}; --force replaces them")
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        print(path)
