"""What the site needs beyond Markdown: a hook of MkDocs, see mkdocs.yml.

The pages are written for a reader of the repository. So they link to files outside of docs/, and
docs/README.md is the index. Here the index becomes the navigation, and what the pages link to
becomes part of the site: Markdown as it is, any other file as a page that shows its text, a folder
as a list of its files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(^(?P<ticks>```+).*?^(?P=ticks)$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s:#]+)(#[^()\s]*)?\)")
ENTRY = re.compile(r"\[([^\[\]]+)\]\(([^()\s:#]+\.md)\)")
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def site_path(path: str) -> str:
    """Where a file or folder of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    # MkDocs leaves out names that begin with a dot.
    path = re.sub(r"(^|/)\.", r"\1", path)
    if path.endswith(".md"):
        return "project/" + path.replace("/README.md", ".md").lower()
    return f"project/{path}.md"


def resolve(page: str, link: str) -> str:
    """The file or folder that a link on a page means; a folder with a README means that."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target


def outside(page: str, text: str) -> set[str]:
    """What a page leads to outside of docs/."""
    targets = {resolve(page, link) for link, _ in LINK.findall(FENCE.sub("", text))}
    return {path for path in targets if not path.startswith(("docs/", "..")) and (ROOT / path).exists()}


def text_of(path: str) -> str:
    """The page for something outside of docs/."""
    place = ROOT / path
    if path.endswith(".md"):
        return place.read_text(encoding="utf-8")
    if place.is_dir():
        names = sorted(child.name for child in place.iterdir() if child.name != "__pycache__")
        return f"{NOT_SEARCHED}# {path}\n\n" + "".join(f"- [{name}]({place.name}/{name})\n" for name in names)
    code = place.read_text(encoding="utf-8")
    return f"{NOT_SEARCHED}# {path}\n\n````{path.rpartition('.')[2]}\n{code}\n````\n"


def on_config(config: Any) -> Any:
    """Each section of the index is a section of the navigation, in the same order."""
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    config.nav = [{"Home": "README.md"}]
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0]
        entries = ENTRY.findall(part.replace("\n  ", " "))
        config.nav.append({title: [{name: site_path(resolve("docs/README.md", to))} for name, to in entries]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is outside of docs/, and what that leads to."""
    waiting: set[str] = set()
    for file in files.documentation_pages():
        waiting |= outside(f"docs/{file.src_uri}", file.content_string)
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(site_path(path)) is None:
            text = text_of(path)
            waiting |= outside(path, text)
            file = File.generated(config, site_path(path), content=text)
            file.repository_path = path
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links between docs/ and the rest of the repository lead to their place in the site."""
    source = getattr(page.file, "repository_path", f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        target = resolve(source, link[1])
        if not (ROOT / target).exists():
            return link[0]
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(site_path(target), here)}{link[2] or ''})"

    parts = re.split(r"(^```+.*?^```+$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)
