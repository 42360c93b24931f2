"""What the site needs beyond Markdown: a hook of MkDocs, see mkdocs.yml.

The pages are written for a reader of the repository. So they link to files outside of docs/, and
docs/README.md is the index. Here the index becomes the navigation, and what the pages link to
becomes part of the site: Markdown as it is, any other file as a page that shows its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s:#]+)(#[^()\s]*)?\)")
ENTRY = re.compile(r"\[([^\[\]]+)\]\(([^()\s:#]+\.md)\)")


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return "project/" + path.replace("/README.md", ".md").lower()
    return f"project/{path}.md"


def outside(page: str) -> set[str]:
    """The files outside of docs/ that a page of the repository leads to."""
    found = set()
    for link, _ in LINK.findall(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
        target = resolve(page, link)
        if not target.startswith("docs/") and (ROOT / target).is_file():
            found.add(target)
    return found


def resolve(page: str, link: str) -> str:
    """The file that a link on a page means; a folder means its README."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target


def on_config(config: Any) -> Any:
    """Each section of the index is a section of the navigation, in the same order."""
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    config.nav = [{"Home": "README.md"}]
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0].partition(":")[0]
        entries = ENTRY.findall(part.replace("\n  ", " "))
        config.nav.append({title: [{name: site_path(resolve("docs/README.md", to))} for name, to in entries]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is outside of docs/, and what that leads to."""
    waiting = {path for file in files.documentation_pages() for path in outside(f"docs/{file.src_uri}")}
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(site_path(path)) is None:
            text = (ROOT / path).read_text(encoding="utf-8")
            if path.endswith(".md"):
                waiting |= outside(path)
            else:
                language = path.rpartition(".")[2]
                text = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}\n````\n"
            file = File.generated(config, site_path(path), content=text)
            file.repository_path = path
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links between docs/ and the rest of the repository lead to their place in the site."""
    source = getattr(page.file, "repository_path", f"docs/{page.file.src_uri}")
    if not source.endswith(".md"):
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = resolve(source, link[1])
        if not (ROOT / target).is_file():
            return link[0]
        if target.startswith("docs/") and not target.endswith(".md"):
            to = target.removeprefix("docs/")
        else:
            to = site_path(target)
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(to, here)}{link[2] or ''})"

    parts = re.split(r"(^```+.*?^```+$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)
