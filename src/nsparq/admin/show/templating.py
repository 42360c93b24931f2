"""The templates of the pages, which escape every value, their filters, and the static files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup

from nsparq.admin.routing import with_etag
from nsparq.admin.security import PAGE_HEADERS
from nsparq.flags import format_duration
from nsparq.http.api import TEXT_TYPE, Request, Response
from nsparq.version import NSQ_VERSION, __version__

__all__ = ["Assets", "make_environment"]

HERE: Final = Path(__file__).parent
TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": TEXT_TYPE,
}
UNKNOWN: Final = "–"
"""Shown in place of an unknown figure."""


class Assets:
    """The files of static/, read once. A file in `directory` wins, and is read each time."""

    def __init__(self, base: str, directory: str = "") -> None:
        self._base = base
        self._live = Path(directory) if directory else None
        self._files = {path.name: path.read_bytes() for path in _files(HERE / "static")}
        self._tags = {
            name: hashlib.blake2b(content, digest_size=8).hexdigest() for name, content in self._files.items()
        }

    def url(self, name: str) -> str:
        return f"{self._base}/static/{name}?v={self._tags.get(name, '')}"

    def serve(self, request: Request) -> Response:
        name = request.path_value
        content = self._files.get(name)
        if self._live is not None:
            found = {path.name: path for path in _files(self._live)}.get(name)
            content = found.read_bytes() if found else content
        if content is None:
            return Response(status=404, body=b"NOT_FOUND", content_type=TEXT_TYPE, nsq_header=False)
        is_exact = self._live is None and request.query == f"v={self._tags[name]}"
        cache = "public, max-age=31536000, immutable" if is_exact else "no-cache"
        headers = (*PAGE_HEADERS, ("Cache-Control", cache))
        kind = TYPES.get(Path(name).suffix, "application/octet-stream")
        return with_etag(
            request, Response(body=content, content_type=kind, headers=headers, nsq_header=False)
        )


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file()]


class _Compiled(BytecodeCache):
    """What Jinja has compiled. All environments of a process share it: compiling takes 0.3 s."""

    def __init__(self) -> None:
        self._code: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if (code := self._code.get(bucket.key)) is not None:
            bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._code[bucket.key] = bucket.bytecode_to_string()


_COMPILED: Final = _Compiled()


def make_environment(assets: Assets, base: str) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        bytecode_cache=_COMPILED,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        extensions=["jinja2.ext.do"],
    )
    environment.globals |= {
        "base": base,
        "asset": assets.url,
        "version": __version__,
        "nsq_version": NSQ_VERSION,
        "page": lambda *names: base + "".join(f"/{quote(str(name), safe='')}" for name in names) or "/",
        "slug": slug,
    }
    environment.filters |= {
        "n": whole,
        "rate": rate,
        "seconds": seconds,
        "duration": format_duration,
        "drain": drain,
        "ns": lambda value: seconds(value / 1e9),
        "bytes": size,
        "time": moment,
        "when": when,
        "address": address,
        "cut_headers": cut_headers,
        "percent": lambda value: UNKNOWN if _is_unknown(value) else f"{value:.0%}",
    }
    return environment


# Filters


def _is_unknown(value: Any) -> bool:
    return value is None or not isinstance(value, int | float) or not math.isfinite(value)


def whole(value: Any) -> str:
    return UNKNOWN if _is_unknown(value) else f"{value:,.0f}"


def rate(value: Any) -> str:
    """Per second."""
    if _is_unknown(value):
        return UNKNOWN
    return (
        f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:,.1f}" if value >= 1 else f"{value:.2f}"
    )


def seconds(value: Any) -> str:
    if _is_unknown(value):
        return UNKNOWN
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    for unit, length in (("d", 86400), ("h", 3600)):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{value / 60:.0f} min"


def drain(channel: Mapping[str, Any]) -> str:
    """The time to drain of a channel."""
    if channel["drain_time_s"] is not None:
        return seconds(channel["drain_time_s"])
    return UNKNOWN if channel["drain_rate"] is None else "not draining"


def size(value: Any) -> str:
    if _is_unknown(value):
        return UNKNOWN
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(value) < 1000:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} PB"


def moment(value: Any) -> str:
    """Unix seconds as a UTC time."""
    if _is_unknown(value) or not 0 < value < 1e11:
        return UNKNOWN
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S")


def when(value: Any) -> str | Markup:
    """Unix seconds as an element with the time in UTC. The script shows the chosen time zone."""
    text = moment(value)
    if text == UNKNOWN:
        return text
    return Markup('<time datetime="{}Z">{}</time>').format(text.replace(" ", "T"), text)


def address(value: str) -> Markup:
    """`host:port`, which a narrow column breaks before the port and not inside it."""
    host, colon, port = value.rpartition(":")
    return Markup("{}<wbr>{}").format(host, colon + port)


def cut_headers(headers: Mapping[str, str], limit: int) -> list[tuple[str, str]]:
    """The first headers, with at most so many characters in all."""
    shown = []
    for name, value in headers.items():
        if limit <= len(name):
            break
        limit -= len(name)
        shown.append((name, value[:limit]))
        limit -= len(value)
    return shown


def slug(*names: Iterable[str]) -> str:
    """An element id from any names. Other characters than letters and digits become their code."""
    return "-".join(
        "".join(c if c.isascii() and (c.isalnum() or c == "_") else f"_{ord(c):x}_" for c in str(name))
        for name in names
    )
