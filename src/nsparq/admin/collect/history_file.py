"""The history on disk, so that charts and findings survive a restart of nsqadmin.

One file, written whole every few minutes and at a clean stop, and replaced in one step. It is a ZIP
file, which has a checksum for each member:

    about.json                      format, time, and for each table its figures, steps and pieces
    <table>/<piece>.json            the names of some series
    <table>/<piece>.<ring>.npy      their points: ordinals, values

nsqadmin logs a file that is damaged or has another format, and does not use it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy

from nsparq.admin.collect.history import Piece, Table
from nsparq.errors import StartError
from nsparq.storage.files import Files

__all__ = ["HistoryFile"]

logger = logging.getLogger(__name__)

FORMAT: Final = 1
SAVE_S: Final = 300.0
MOST_BUSY: Final = 20
"""Saving takes at most this fraction of the time: 1/20."""
ABOUT: Final = "about.json"


class _Unusable(Exception):
    """The file cannot be used. The text says why."""


class HistoryFile:
    """load() once, then start() and close()."""

    def __init__(self, path: Path, tables: Mapping[str, Table], more: Callable[[], Any]) -> None:
        """`more` gives any JSON that is saved as well."""
        self._path = path
        self._new_path = path.with_name(path.name + ".new")
        self._tables = tables
        self._more = more
        self.error = ""
        """Why the last save failed; empty if it worked."""
        self.saved_s = 0.0
        self.failures = 0
        self._took_s = 0.0
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # Reading

    def load(self) -> Any:
        """Fill the tables. Gives what `more` gave when it was saved; None if there is nothing.
        Raises StartError if the directory cannot be written to."""
        if not os.access(self._path.parent, os.W_OK | os.X_OK):
            raise StartError(f"--history-path: the directory {self._path.parent} cannot be written to")
        try:
            with zipfile.ZipFile(self._path) as archive:
                about, pieces = self._read(archive)
        except FileNotFoundError:
            logger.info("history: %s does not exist yet", self._path)
            return None
        except Exception as error:
            # A damaged file may lead to any error, also of a decompressor, or to one of memory.
            logger.error("history: cannot use %s, so the charts start empty: %s", self._path, _text(error))
            return None
        for name, table in self._tables.items():
            if saved := about["tables"].get(name):
                table.restore(saved["figures"], saved["steps"], pieces[name], time.time())
        self.saved_s = float(about["saved"])
        logger.info("history: read %s, saved %.0f s ago", self._path, max(0.0, time.time() - self.saved_s))
        return about.get("more")

    def _read(self, archive: zipfile.ZipFile) -> tuple[dict[str, Any], dict[str, list[Piece]]]:
        """Everything, checked, before anything is used."""
        about = json.loads(archive.read(ABOUT))
        if about["format"] != FORMAT:
            raise _Unusable(f"it has format {about['format']}, and this version reads format {FORMAT}")
        float(about["saved"])
        for saved in about["tables"].values():
            saved["figures"], saved["steps"] = [*map(str, saved["figures"])], [*map(float, saved["steps"])]
        pieces: dict[str, list[Piece]] = {}
        for name, table in self._tables.items():
            saved = about["tables"].get(name)
            for number in range(saved["pieces"] if saved else 0):
                piece = _read_piece(archive, f"{name}/{number}", len(table.steps), len(saved["figures"]))
                pieces.setdefault(name, []).append(piece)
            pieces.setdefault(name, [])
        return about, pieces

    # Writing

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Save for the last time."""
        task, self._task = self._task, None
        self._closing.set()
        if task is not None:
            await task

    async def _run(self) -> None:
        while not self._closing.is_set():
            try:
                async with asyncio.timeout(max(SAVE_S, MOST_BUSY * self._took_s)):
                    await self._closing.wait()
            except TimeoutError:
                await self.save()
        await self.save()

    async def save(self) -> None:
        """In pieces: the loop copies one, and a thread writes it. A failure shows in `error`."""
        begun = time.monotonic()
        try:
            await self._write()
            self.error, self.saved_s = "", time.time()
        except Exception as error:
            # Whatever it is, the next save may work.
            self.failures += 1
            self.error = _text(error)
            logger.error("history: cannot write %s: %s", self._path, self.error)
            with suppress(OSError):
                self._new_path.unlink()
        self._took_s = time.monotonic() - begun

    async def _write(self) -> None:
        about: dict[str, Any] = {"format": FORMAT, "saved": time.time(), "tables": {}, "more": self._more()}
        with await asyncio.to_thread(open, self._new_path, "wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, table in self._tables.items():
                    count = table.piece_count
                    about["tables"][name] = {"figures": table.figures, "steps": table.steps, "pieces": count}
                    for number in range(count):
                        piece = table.piece(number)
                        await asyncio.to_thread(_write_piece, archive, f"{name}/{number}", piece)
                archive.writestr(ABOUT, json.dumps(about))
            await asyncio.to_thread(os.fsync, file.fileno())
        os.replace(self._new_path, self._path)
        await asyncio.to_thread(Files().sync_directory, self._path.parent)


def _text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _write_piece(archive: zipfile.ZipFile, name: str, piece: Piece) -> None:
    series = {"keys": piece.keys, "born": piece.born_s, "seen": piece.seen_s}
    archive.writestr(f"{name}.json", json.dumps(series))
    for ring, (ordinals, values) in enumerate(zip(piece.ordinals, piece.values, strict=True)):
        with archive.open(f"{name}.{ring}.npy", "w", force_zip64=True) as member:
            npy.write_array(member, ordinals, allow_pickle=False)
            npy.write_array(member, values, allow_pickle=False)


def _read_piece(archive: zipfile.ZipFile, name: str, rings: int, width: int) -> Piece:
    """Raises what a damaged file leads to."""
    series = json.loads(archive.read(f"{name}.json"))
    keys = [[str(part) for part in key] for key in series["keys"]]
    born_s, seen_s = [*map(float, series["born"])], [*map(float, series["seen"])]
    if not len(keys) == len(born_s) == len(seen_s):
        raise _Unusable(f"{name}.json is not consistent")
    piece = Piece(keys, born_s, seen_s, [], [])
    for ring in range(rings):
        with archive.open(f"{name}.{ring}.npy") as member:
            ordinals = npy.read_array(member, allow_pickle=False)
            values = npy.read_array(member, allow_pickle=False)
            if member.read():
                raise _Unusable(f"{name}.{ring}.npy is longer than it should be")
        if ordinals.ndim != 1 or values.shape != (len(ordinals), len(keys), width):
            raise _Unusable(f"{name}.{ring}.npy has another shape")
        piece.ordinals.append(ordinals.astype(np.int64))
        piece.values.append(values.astype(np.float32))
    return piece
