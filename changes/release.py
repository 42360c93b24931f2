"""`make release VERSION=0.2.0`: set the version and move the notes of changes/ into CHANGELOG.md.

It changes files and nothing else: look at the result, commit it, and tag it
(docs/how-to/releasing.md).
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUPS = ("Added", "Changed", "Fixed")
"""A note belongs to the group that its first word names, otherwise to "Changed"."""
VERSION_LINE = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
WAITING = ", not yet released"
"""In the heading of the next release, if CHANGELOG.md already has some text for it."""


class Refused(Exception):
    """Nothing was changed; the text says why."""


def release(root: Path, version: str, today: datetime.date) -> None:
    number = numbers(version)
    version_file = root / "src/nsparq/version.py"
    changelog_file = root / "CHANGELOG.md"
    changelog = changelog_file.read_text("utf-8")
    released = re.findall(r"^## ([\d.]+), \d{4}-", changelog, re.MULTILINE)
    if released and number <= max(map(numbers, released)):
        raise Refused(f"{version} is not newer than {released[0]}, the last release in CHANGELOG.md")
    notes = [path for path in sorted((root / "changes").glob("*.md")) if path.name != "README.md"]
    if not notes:
        raise Refused("there is nothing to release: changes/ has no notes")
    text = grouped([entry for path in notes for entry in entries(path)])
    heading = f"## {version}, {today.isoformat()}"
    waiting = re.search(rf"^## [\d.]+{WAITING}\n", changelog, re.MULTILINE)
    end = changelog.find("\n## ", waiting.end() if waiting else 0)
    end = len(changelog) if end < 0 else end
    # Keep what is already written for this release, and put the notes behind it.
    before, written = (
        changelog[: waiting.start() if waiting else end],
        changelog[waiting.end() if waiting else end : end],
    )
    after = changelog[end:]
    section = "\n\n".join(filter(None, (heading, written.strip(), text)))
    changelog_file.write_text(
        "\n\n".join(filter(None, (before.strip(), section, after.strip()))) + "\n", "utf-8"
    )
    version_file.write_text(
        VERSION_LINE.sub(f'__version__ = "{version}"', version_file.read_text("utf-8")), "utf-8"
    )
    for path in notes:
        path.unlink()


def numbers(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise Refused(f"a version looks like 0.2.0, not {version!r}")
    return tuple(map(int, version.split(".")))


def entries(note: Path) -> list[str]:
    """The points of a note, each as an item of a list: it is a list, or one paragraph."""
    text = note.read_text("utf-8").strip()
    if not text:
        raise Refused(f"{note.name} is empty")
    if not text.startswith("- "):
        return ["- " + text.replace("\n", "\n  ")]
    return [item.strip() for item in re.split(r"^(?=- )", text, flags=re.MULTILINE) if item.strip()]


def grouped(items: list[str]) -> str:
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    for item in items:
        word = item.removeprefix("- ").split()[0].rstrip(":")
        groups[word if word in groups else "Changed"].append(item)
    return "\n\n".join(
        f"### {name}\n\n" + "\n".join(of_group) for name, of_group in groups.items() if of_group
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="changes/release.py", description=__doc__)
    parser.add_argument("version", help="of the release, like 0.2.0")
    arguments = parser.parse_args(argv)
    try:
        release(ROOT, arguments.version, datetime.datetime.now(datetime.UTC).date())
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 1
    print(f"CHANGELOG.md and src/nsparq/version.py are at {arguments.version}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
