"""The documentation builds as a site without a broken link, and needs no other host to be read."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nsparq.client
import nsparq.testing
from tests.support.polling import DEADLINE

ROOT = Path(__file__).parents[1]
# What a browser fetches by itself; links that a reader clicks are not among them.
FETCHED = re.compile(r"""<(?:script|img|iframe|link)\s[^>]*(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None and os.environ.get("CI") != "true":
        pytest.skip("mkdocs is not installed: pip install 'nsparq[docs]'")
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", f"--site-dir={folder}"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


def test_every_page_is_in_the_site_and_in_its_search(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README", "index")
        assert (site / name).is_file() and name in found


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not FETCHED.findall(page.read_text(encoding="utf-8")), page


def test_the_api_reference_has_every_public_name(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for module in (nsparq.client, nsparq.testing):
        for name in module.__all__:
            assert f'id="{module.__name__}.{name}"' in page or name == "Config", name
