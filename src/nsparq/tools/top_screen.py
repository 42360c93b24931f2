"""The screen of `nsparq top`: draws the model with rich, and reads keys."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Final

from nsparq.tools.cluster import AskFailed
from nsparq.tools.figures import Poll, Row
from nsparq.tools.output import table_of
from nsparq.tools.top import VIEWS, Model

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["is_possible", "keys_of", "run"]

KEYS: Final = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left",
    "\r": "enter", "\n": "enter", "\x1b": "esc", "\x7f": "backspace", "\x08": "backspace", "\x03": "ctrl-c",
}  # fmt: skip
KEY: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
FRAME_LINES: Final = 4
"""Lines above and below the rows."""
HINT: Final = "c t n views   ↑↓ Enter Esc look closer   ←→ sort   r reverse   / filter   space stop   q quit"


def is_possible() -> bool:
    """Whether there is a terminal to draw on. Raises ModuleNotFoundError if rich is missing."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    import rich  # noqa: F401

    return True


def keys_of(typed: str) -> list[str]:
    """Names of keys. Unknown escape sequences are left out."""
    found = KEY.findall(typed)
    return [KEYS.get(key, key) for key in found if key in KEYS or not key.startswith("\x1b")]


def run(model: Model, ask: Callable[[], Poll], interval: float) -> int:
    """Until q or Ctrl-C. Raises AskFailed if the first poll fails."""
    from rich.console import Console
    from rich.live import Live

    model.update(ask())
    reading, writing = os.pipe()
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.wait(interval):
            try:
                model.update(ask())
                model.message = ""
            except AskFailed as error:
                model.message = str(error)
            if not stop.is_set():
                os.write(writing, b"x")

    poller = threading.Thread(target=keep_asking, daemon=True)
    console = Console(highlight=False)
    try:
        with _keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
            poller.start()
            goes_on = True
            while goes_on:
                live.update(draw(model, console.width, console.height), refresh=True)
                ready = select.select([keyboard, reading], [], [], 1.0)[0]
                if reading in ready:
                    os.read(reading, 4096)
                if keyboard in ready:
                    typed = os.read(keyboard, 4096)
                    goes_on = bool(typed) and all(
                        model.press(key) for key in keys_of(typed.decode(errors="ignore"))
                    )
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
    return 0


@contextmanager
def _keyboard() -> Iterator[int]:
    """Keys arrive one by one and are not shown. A signal must not leave the terminal like that."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def draw(model: Model, width: int, height: int) -> Text:
    from rich.text import Text

    rows = model.rows()
    view = VIEWS[model.place.view]
    key, is_falling = model.sorted_by
    columns = [
        one._replace(heading=one.heading + (" ▼" if is_falling else " ▲")) if one.key == key else one
        for one in view.columns
    ]
    head, *lines = table_of(rows, columns)
    room = max(1, height - FRAME_LINES)
    first = max(0, min(model.selected - room // 2, len(lines) - room))
    screen = Text(no_wrap=True, overflow="crop", end="")
    status = f"{datetime.now():%H:%M:%S}" + ("  stopped" if model.is_stopped else "")
    screen.append(f"{model.totals()}   {status}\n", "bold")
    screen.append(f"{model.place.title}{_counted(model, len(rows))}\n", "cyan")
    screen.append(f"{head[:width]}\n", "bold underline")
    for at, line in enumerate(lines[first : first + room], first):
        style = "reverse" if at == model.selected else _style(rows[at])
        screen.append(f"{line[:width]:<{width if at == model.selected else 0}}\n", style)
    screen.append("\n" * (room - len(lines[first : first + room])))
    if model.is_typing:
        screen.append(f"/{model.filter}█", "bold")
    else:
        screen.append(_problem(model) or HINT, "red" if _problem(model) else "dim")
    return screen


def _counted(model: Model, count: int) -> str:
    return f"   {count} with {model.filter!r}" if model.filter else ""


def _problem(model: Model) -> str:
    failed = model.last.answers.failed if model.last else {}
    return model.message or next((str(error) for error in failed.values()), "")


def _style(row: Row) -> str:
    """Yellow for a backlog that nobody reads, red for a node with a problem."""
    if row.get("health") not in (None, "OK"):
        return "red"
    is_stuck = row.get("depth") and (row.get("paused") or row.get("client_count") == 0)
    return "yellow" if is_stuck else ""
