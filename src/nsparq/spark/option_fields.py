"""How an option of `format("nsq")` is declared: its kind of value, its help, and where it
applies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from nsparq.archive.store import check_url
from nsparq.client.connect.lookup import lookup_url
from nsparq.errors import StartError
from nsparq.flags import MAX_DURATION_S, format_duration, parse_duration
from nsparq.names import VALID_NAME, is_valid_name
from nsparq.secret_scope import SecretScope

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value: how to parse it from the text that Spark passes, and how to show it."""

    name: str
    parse: Callable[[str], T]
    """Raises ValueError with a text such as `must be a number`."""
    show: Callable[[T], str] = str


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def _number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) < 1 << 63):
        raise ValueError(f"must be a whole number, at least {least}")
    return int(text)


_TOO_LARGE: Final = 1 << 60
"""In bytes. Sums of sizes still fit into 64 bits."""
_UNITS: Final = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*([kmgt]?)(?:i?b)?", text.lower().strip(), re.ASCII)
    size = int(found[1]) << _UNITS[found[2]] if found is not None else 0
    if not 0 < size < _TOO_LARGE:
        raise ValueError("must be a size such as 1048576, 512k, 64m or 1g")
    return size


def _show_size(size: int) -> str:
    for unit in "tgmk":
        if size and size % (1 << _UNITS[unit]) == 0:
            return f"{size >> _UNITS[unit]}{unit}"
    return str(size)


def _duration(text: str) -> float:
    try:
        seconds = int(text) / 1000 if text.isascii() and text.isdigit() else parse_duration(text)
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds <= MAX_DURATION_S:
        raise ValueError("must be a duration such as 250ms, 5s or 1m, or a number of milliseconds")
    return seconds


def _name(text: str) -> str:
    if not is_valid_name(text.encode()):
        raise ValueError(f"must be an NSQ name: {VALID_NAME}")
    return text


def _listed(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ValueError("must name at least one, separated by commas")
    return [*dict.fromkeys(items)]


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(item) for item in _listed(text))


def _addresses(text: str) -> tuple[str, ...]:
    """`host:port` or URLs, unchanged; see http_client.base_url()."""
    for item in (items := _listed(text)):
        try:
            lookup_url(item, "/")
        except ValueError:
            raise ValueError("must be host:port or http://host:port") from None
    return tuple(items)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None


def _producer(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", text):
        raise ValueError("must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -")
    return text


def _directory(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        text = unquote(parts.path)
    elif "://" in text:
        raise ValueError("must be a directory, such as /data/staging: object stores have no hard links")
    return os.path.abspath(text)


def _store(text: str) -> str:
    try:
        check_url(text)
    except StartError:
        raise ValueError(
            "must be the URL of a store, as of nsqd's --archive: s3://bucket/prefix, gs://bucket/prefix, "
            "az://container/prefix or file:///directory"
        ) from None
    return text


BOOL: Final[Kind[bool]] = Kind("true or false", _bool, lambda value: str(value).lower())
COUNT: Final[Kind[int]] = Kind("number", lambda text: _number(text, 1))
SIZE: Final[Kind[int]] = Kind("size", _size, _show_size)
DURATION: Final[Kind[float]] = Kind("duration", _duration, format_duration)
TEXT: Final[Kind[str]] = Kind("text", str)
NAME: Final[Kind[str]] = Kind("name", _name)
PATTERNS: Final[Kind[tuple[str, ...]]] = Kind(
    "patterns of addresses", lambda text: SecretScope(_listed(text)).patterns, ", ".join
)
NAMES: Final[Kind[tuple[str, ...]]] = Kind("names", _names, ", ".join)
ADDRESSES: Final[Kind[tuple[str, ...]]] = Kind("addresses", _addresses, ", ".join)
PATTERN: Final[Kind[re.Pattern[str]]] = Kind("regular expression", _pattern, lambda pattern: pattern.pattern)
FILE: Final[Kind[str]] = Kind("file", str)
DIRECTORY: Final[Kind[str]] = Kind("directory", _directory)
STORE: Final[Kind[str]] = Kind("URL of a store", _store)
PRODUCER: Final[Kind[str]] = Kind("name", _producer)
SEQUENCE: Final[Kind[int]] = Kind("number", lambda text: _number(text, 0))


def choice(*names: str) -> Kind[str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text.lower()

    return Kind(" or ".join(f"`{name}`" for name in names), parse)


# where an option applies


class Use(StrEnum):
    LOG_STREAM = "log stream"
    LOG_BATCH = "log batch"
    QUEUE_STREAM = "queue stream"
    SINK_STREAM = "sink stream"
    SINK_BATCH = "sink batch"


LOG: Final = frozenset({Use.LOG_STREAM, Use.LOG_BATCH})
QUEUE: Final = frozenset({Use.QUEUE_STREAM})
SOURCE: Final = LOG | QUEUE
SINK: Final = frozenset({Use.SINK_STREAM, Use.SINK_BATCH})
EVERYWHERE: Final = SOURCE | SINK


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOption:
    name: str
    attribute: str
    kind: Kind[Any]
    default: Any
    help: str
    uses: frozenset[Use]
    heading: str
    default_text: str
    is_secret: bool

    @property
    def default_shown(self) -> str:
        if self.default_text:
            return self.default_text
        return f"`{self.kind.show(self.default)}`" if self.default not in (None, (), "") else ""


def opt(
    kind: Kind[Any],
    default: Any,
    help: str,
    uses: Iterable[Use] = EVERYWHERE,
    *,
    heading: str = "",
    default_text: str = "",
    is_secret: bool = False,
) -> Any:
    """A field of NsqOptions. `help` begins with a small letter and has no final full stop;
    `heading` opens a group of the reference page."""
    metadata = {
        "kind": kind,
        "help": help,
        "uses": frozenset(uses),
        "heading": heading,
        "default_text": default_text,
        "is_secret": is_secret,
    }
    return field(default=default, repr=not is_secret, metadata=metadata)


def refused(option: SparkOption, value: Any) -> str:
    """A refused value for the end of an error text, without secrets."""
    if option.is_secret:
        return ""
    shown = repr(value)
    if option.kind is ADDRESSES:
        # The name and password of a URL, which need not be a valid one.
        shown = re.sub(r"""((?:\w+://)?)[^,'"\[\s]*@""", r"\1", shown)
    return f", not {shown if len(shown) <= 100 else shown[:99] + '…'}"


def table_of(options: type) -> dict[str, SparkOption]:
    """The fields of NsqOptions, by lower-case name."""
    heading = ""
    found = {}
    for one in fields(options):
        metadata = dict(one.metadata)
        heading = metadata.pop("heading") or heading
        assert one.default is not MISSING
        option = SparkOption(
            name=camel(one.name), attribute=one.name, default=one.default, heading=heading, **metadata
        )
        found[option.name.lower()] = option
    return found


def camel(attribute: str) -> str:
    """The name of an option, by its field."""
    first, *rest = attribute.split("_")
    return first + "".join(word.capitalize() for word in rest)


# the reference page

_COLUMNS: Final = (
    ("stream", frozenset({Use.LOG_STREAM})),
    ("batch", frozenset({Use.LOG_BATCH})),
    ("queue", QUEUE),
    ("sink", SINK),
)

_INTRODUCTION: Final = """\
# Options of `format("nsq")`

Generated from `nsparq.spark.options`. Names are not case-sensitive; an unknown option is an error.
Sizes may end in `k`, `m`, `g` (powers of 1024); a duration is `250ms`, `5s`, `1m`, or a number of
milliseconds.

*stream* and *batch* are the source in log mode, *queue* is the source in queue mode, *sink* is writing,
both as a batch and as a stream.
""".splitlines()


def markdown(options: Iterable[SparkOption]) -> str:
    """The reference page."""
    lines = [*_INTRODUCTION]
    heading = ""
    for option in options:
        if option.heading != heading:
            heading = option.heading
            lines += [
                "",
                f"## {heading}",
                "",
                "| option | value | default | for | |",
                "| --- | --- | --- | --- | --- |",
            ]
        uses = [name for name, uses in _COLUMNS if uses & option.uses]
        where = "all" if len(uses) == len(_COLUMNS) else ", ".join(uses)
        text = option.help.replace("|", "\\|")
        lines.append(f"| `{option.name}` | {option.kind.name} | {option.default_shown} | {where} | {text} |")
    return "\n".join(lines) + "\n"
