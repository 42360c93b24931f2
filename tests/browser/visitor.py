"""Somebody at a browser: a real Chromium, driven by Playwright, that looks at one nsqadmin.

start_chromium() -> Browser             raises NoChromium; `with` it, once for many visitors
Profile(browser, **context)             with one page; context: Playwright's (viewport, has_touch …)
    forget(site)                        empty it for the next visitor, after a visit to this site
Visitor(profile, site)
    page                                Playwright's Page, for what is not here
    go(path)                            open a page of nsqadmin's, and wait until its script has run
    switch_scripts_off()                those of the pages, until the end of the visit
    next_page()                         `with` it: what happens inside opens a page; waits for its script
    follow(selector)                    click on what opens a page
    act(selector)                       send a form, and read the note on the next page
    confirm(id, name)                   open a confirmation, type the name, send it; returns the note
    text(selector) number(selector)     the text or number shown there now
    sees(selector, text)                wait until it is there, with this text in it
    close()                             end of the visit; raises for a complaint that is left
    axe(*rules)                         findings of an accessibility check, one line each
    complaints                          console and uncaught errors, dialogs, foreign requests
    allowed                             parts of complaints that a test expects

Everything that a page does wrong by itself is a complaint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import (
    Browser,
    Error,
    Locator,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

from tests.support import DEADLINE, wait_until

# The first is Debian's Chromium without windows: it takes less processor time.
CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = round(1000 * DEADLINE)
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
AXE_RULES = {
    "type": "tag",
    "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
}

SITUATION = """() => {
    const lines = ["address: " + location.href, "focus: #" + document.activeElement.id];
    for (const one of document.querySelectorAll("input, textarea, select, button")) {
        if (!one.checkVisibility()) continue;
        const { id, value, defaultValue } = one;
        if (value !== (defaultValue ?? value)) lines.push(`#${id} has ${JSON.stringify(value)}`);
        if (one.validationMessage) lines.push(`#${id}: ${one.validationMessage}`);
        if (one.disabled) lines.push(`#${id} is disabled`);
    }
    for (const form of document.querySelectorAll("form[data-sent]")) lines.push(`form #${form.id} was sent`);
    return lines;
}"""


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


class Profile:
    """One visitor after another may use it: a new one costs a second of processor time."""

    def __init__(self, browser: Browser, **context: Any) -> None:
        self._context = browser.new_context(
            **{"viewport": DESKTOP, "locale": "en-GB", "reduced_motion": "reduce", **context}
        )
        self._context.set_default_timeout(WAIT_MS)
        self.page: Page = self._context.new_page()
        self._protocol = self._context.new_cdp_session(self.page)

    def run_scripts(self, do_run: bool) -> None:
        self._protocol.send("Emulation.setScriptExecutionDisabled", {"value": not do_run})

    def forget(self, site: str) -> None:
        self.run_scripts(True)
        # The page itself leaves, since Chromium starts another process if the address is typed.
        self.page.evaluate("location.replace('about:blank')")
        self.page.wait_for_url("about:blank")
        self._context.set_offline(False)
        self._context.clear_cookies()
        self._protocol.send(
            "Storage.clearDataForOrigin", {"origin": site, "storageTypes": "local_storage,session_storage"}
        )
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size(DESKTOP)
        self.page.mouse.move(0, 0)

    def close(self) -> None:
        self._context.close()


class Visitor:
    def __init__(self, profile: Profile, site: str) -> None:
        self.site = site
        self.complaints: list[str] = []
        self.allowed: list[str] = []
        self.page = profile.page
        self._profile = profile
        self._pending: list[Request] = []
        self._listeners: dict[str, Callable[[Any], None]] = {
            "request": self._see_request,
            "requestfinished": self._see_end,
            "requestfailed": self._see_end,
            "console": self._see_console,
            "weberror": self._see_error,
            "dialog": self._see_dialog,
        }
        for event, listener in self._listeners.items():
            self.page.context.on(event, listener)  # type: ignore[call-overload]  # one signature for each event

    def point_at(self, chart: Locator, across: float, high: float = 60) -> None:
        """Move the mouse to a place of a chart until the chart shows its cursor. A chart that is
        drawn anew at the same moment does not notice the mouse."""

        chart.scroll_into_view_if_needed()

        def is_shown() -> bool:
            box = chart.bounding_box()
            if box is None:
                return False
            for step in (0, 1):
                self.page.mouse.move(box["x"] + box["width"] * across + step, box["y"] + high)
            return chart.locator("line.cursor").count() == 1

        wait_until(is_shown)

    # Watching

    def _see_request(self, request: Request) -> None:
        self._pending.append(request)
        if not request.url.startswith((self.site + "/", "blob:", "data:")):
            self.complaints.append(f"request to another host: {request.url}")

    def _see_end(self, request: Request) -> None:
        if request in self._pending:
            self._pending.remove(request)

    def _see_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console: {message.text}")

    def _see_error(self, error: Any) -> None:
        self.complaints.append(f"uncaught: {error.error}")

    def _see_dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def close(self) -> None:
        for event, listener in self._listeners.items():
            self.page.context.remove_listener(event, listener)
        left = [one for one in self.complaints if not any(part in one for part in self.allowed)]
        assert not left, "\n".join(left)

    # Doing

    def go(self, path: str, *, status: int = 200) -> None:
        answer = self.page.goto(self.site + path)
        assert answer is not None and answer.status == status, (path, answer and answer.status)
        self.wait_for_script()

    def switch_scripts_off(self) -> None:
        self._profile.run_scripts(False)

    def wait_for_script(self) -> None:
        """Until a page is as live as it gets: everything listens, and charts are drawn."""
        self.page.locator("html[data-ready=yes]").wait_for(state="attached")

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    @contextmanager
    def next_page(self) -> Iterator[None]:
        """A failure says what the page looks like: no page follows a form with a wrong field."""
        try:
            with self.page.expect_navigation():
                yield
            self.wait_for_script()
        except Error as error:
            raise AssertionError("\n".join([str(error), *self._situation()])) from error

    def _situation(self) -> list[str]:
        pending = [f"pending: {one.method} {one.url}" for one in self._pending]
        try:
            return [*self.page.evaluate(SITUATION), *pending]
        except Error as error:
            return [f"{self.page.url}: {error}", *pending]

    def follow(self, selector: str) -> None:
        with self.next_page():
            self.find(selector).click()

    def act(self, selector: str) -> str:
        self.follow(selector)
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
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE_SCRIPT)
        found = self.page.evaluate("options => axe.run(document, options)", options)["violations"]
        return [
            f"{self.page.url}: {one['id']}: {node['html'][:200]}: {node.get('failureSummary', '')}"
            for one in found
            for node in one["nodes"]
        ]

    def picture(self, path: Path, **options: Any) -> None:
        self.page.screenshot(path=path, **options)
