"""Somebody at a browser: a real Chromium, driven by Playwright, that looks at one nsqadmin.

start_chromium() -> Browser             raises NoChromium; `with` it, once for many visitors
Visitor(browser, site, **context)       a fresh profile; context: Playwright's (viewport, color_scheme …)
    page                                Playwright's Page, for what is not here
    go(path)                            open a page of nsqadmin's, and wait until its script has run
    act(id)                             click what sends a form, and read the note on the page that follows
    confirm(id, name)                   open a dangerous action, type the name, do it; the note
    text(selector) number(selector)     what is shown there, now
    sees(selector, text)                wait until it is there, with this text in it
    axe(*rules)                         what an accessibility check has to say, one line each
    complaints                          console errors, uncaught errors, dialogs, requests to other hosts
    allowed                             parts of complaints that are expected, for tests that provoke them

Everything that a page does wrong by itself is a complaint, and `close()` raises for any that is left.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Request, expect, sync_playwright

from tests.support import DEADLINE

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = round(1000 * DEADLINE)
AXE_RULES = {
    "type": "tag",
    "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
}


class NoChromium(Exception):
    """None is installed."""


def find_chromium() -> str:
    named = os.environ.get("NSPARQ_TEST_CHROMIUM", "")
    for name in (named,) if named else CHROMIUM:
        if found := shutil.which(name):
            return found
    raise NoChromium(
        "Chromium is not installed: `apt-get install chromium`, or name it in NSPARQ_TEST_CHROMIUM"
    )


@contextmanager
def start_chromium() -> Iterator[Browser]:
    path = find_chromium()
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT_MS)
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=WAIT_MS)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    def __init__(self, browser: Browser, site: str, **context: Any) -> None:
        self.site = site
        self.complaints: list[str] = []
        self.allowed: list[str] = []
        self._context = browser.new_context(
            **{
                "viewport": {"width": 1280, "height": 800},
                "locale": "en-GB",
                "reduced_motion": "reduce",
                **context,
            }
        )
        self._context.set_default_timeout(WAIT_MS)
        self._context.on("request", self._see_request)
        self._context.on("console", self._see_console)
        self._context.on("weberror", lambda one: self.complaints.append(f"uncaught: {one.error}"))
        self.page: Page = self._context.new_page()
        self.page.on("dialog", self._see_dialog)

    # Watching

    def _see_request(self, request: Request) -> None:
        if not request.url.startswith((self.site + "/", "blob:", "data:")):
            self.complaints.append(f"request to another host: {request.url}")

    def _see_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console: {message.text}")

    def _see_dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def close(self) -> None:
        self._context.close()
        left = [one for one in self.complaints if not any(part in one for part in self.allowed)]
        assert not left, "\n".join(left)

    # Doing

    def go(self, path: str, *, status: int = 200) -> None:
        answer = self.page.goto(self.site + path)
        assert answer is not None and answer.status == status, (path, answer and answer.status)
        self.wait_for_script()

    def wait_for_script(self) -> None:
        """Until a page is as live as it gets: everything listens, and charts are drawn."""
        self.page.locator("html[data-ready=yes]").wait_for(state="attached")

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def act(self, selector: str) -> str:
        with self.page.expect_navigation():
            self.find(selector).click()
        self.wait_for_script()
        return self.text("#note")

    def confirm(self, name: str, typed: str) -> str:
        self.find(f"#{name}-open").click()
        self.find(f"#{name}-name").fill(typed)
        return self.act(f"#{name}-do")

    # Seeing

    def text(self, selector: str) -> str:
        return self.find(selector).inner_text().strip()

    def number(self, selector: str) -> float:
        return float(re.sub(r"[^0-9.-]", "", self.text(selector)))

    def sees(self, selector: str, text: str | re.Pattern[str] = "") -> None:
        expect(self.find(selector).first).to_contain_text(text)

    def axe(self, *rules: str) -> list[str]:
        options: dict[str, Any] = {"runOnly": [*rules] if rules else AXE_RULES, "resultTypes": ["violations"]}
        found = Axe().run(self.page, options=options).response["violations"]
        return [
            f"{self.page.url}: {one['id']}: {node['html'][:200]}: {node.get('failureSummary', '')}"
            for one in found
            for node in one["nodes"]
        ]

    def picture(self, path: Path, **options: Any) -> None:
        self.page.screenshot(path=path, **options)
