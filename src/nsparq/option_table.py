"""Options of a daemon: one dataclass field for each, with its flag, file key, default, help and
bounds.

A daemon declares a frozen dataclass with fields made by `opt()`. An `OptionTable` of it reads the
command line and the TOML file, and writes the help text, the reference page and the example file.
"""

import difflib
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, Final, Generic, Literal, NoReturn, TypeVar

from nsparq.errors import StartError
from nsparq.flags import (
    MAX_DURATION_S,
    FlagError,
    HelpWanted,
    UnknownFlag,
    format_duration,
    parse_bool,
    parse_duration,
    parse_int,
    scan_flags,
)
from nsparq.version import version_line

__all__ = [
    "BOOL",
    "DURATION",
    "FLOAT",
    "INT",
    "NUMBERS",
    "STRING",
    "STRINGS",
    "CommandFlag",
    "CommandLineExit",
    "Kind",
    "Option",
    "OptionError",
    "OptionTable",
    "choice",
    "format_number",
    "opt",
]

T = TypeVar("T")


class OptionError(StartError):
    """An invalid value; the text names the flag or the file key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[T]):
    """How to read and print the values of one type."""

    name: str  # placeholder for the value in the help text; empty for booleans
    from_text: Callable[[str], T]  # from the value of a flag; raises ValueError
    from_file: Callable[[Any], T]  # from a value of the TOML file; raises ValueError
    to_toml: Callable[[T], str]
    combine: Callable[[list[T]], T] = lambda values: values[-1]  # for a repeated flag
    is_boolean: bool = False
    is_list: bool = False
    choices: tuple[str, ...] = ()  # the possible values, if they are few


def _quote(text: str) -> str:
    # A JSON string is also a valid TOML string.
    return json.dumps(text, ensure_ascii=False)


def _bool_from_file(value: Any) -> bool:
    if isinstance(value, int | str):
        try:
            return parse_bool(str(value))
        except ValueError:
            pass
    raise ValueError("must be true or false")


def _int_from_file(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("must be an integer")


def _string_from_file(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError("must be a string")


def _duration_from_file(value: Any) -> float:
    if isinstance(value, str) and not re.fullmatch(r"[0-9]+", value):
        try:
            return parse_duration(value)
        except ValueError:
            pass
    elif isinstance(value, int | str) and not isinstance(value, bool):
        # A larger number is out of bounds too: check_bounds() reports it.
        return min(int(value), 1 << 63) / 1000
    raise ValueError('must be a duration such as "250ms", or an integer in milliseconds')


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _strings_from_file(value: Any) -> tuple[str, ...]:
    items = _split(value) if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("must be an array of strings, or one string with commas")
    return tuple(items)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be numbers")
    try:
        return float(value)
    except ValueError:
        raise ValueError("parse error: write a number") from None


def _numbers_from_file(value: Any) -> tuple[float, ...]:
    items = _split(value) if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError("must be an array of numbers, or one string with commas")
    return tuple(_number(item) for item in items)


def format_number(number: float) -> str:
    """0.99 as 0.99, but 1.0 as 1."""
    return repr(number).removesuffix(".0")


BOOL: Final[Kind[bool]] = Kind(
    name="",
    from_text=parse_bool,
    from_file=_bool_from_file,
    to_toml=lambda value: "true" if value else "false",
    is_boolean=True,
)
FLOAT: Final[Kind[float]] = Kind(name="float", from_text=_number, from_file=_number, to_toml=format_number)
INT: Final[Kind[int]] = Kind(name="int", from_text=parse_int, from_file=_int_from_file, to_toml=str)
STRING: Final[Kind[str]] = Kind(name="string", from_text=str, from_file=_string_from_file, to_toml=_quote)
DURATION: Final[Kind[float]] = Kind(
    name="duration",
    from_text=parse_duration,
    from_file=_duration_from_file,
    to_toml=lambda seconds: _quote(format_duration(seconds)),
)
STRINGS: Final[Kind[tuple[str, ...]]] = Kind(
    name="value",
    from_text=lambda text: (text,) if text else (),
    from_file=_strings_from_file,
    to_toml=lambda values: "[" + ", ".join(map(_quote, values)) + "]",
    combine=lambda values: tuple(item for value in values for item in value),
    is_list=True,
)
NUMBERS: Final[Kind[tuple[float, ...]]] = Kind(
    name="value",
    from_text=lambda text: tuple(map(_number, _split(text))),
    from_file=_numbers_from_file,
    to_toml=lambda values: "[" + ", ".join(map(repr, values)) + "]",
    combine=lambda values: tuple(sorted(chain.from_iterable(values), reverse=True)),
    is_list=True,
)


def choice(*names: str, empty: str | None = None) -> Kind[str]:
    """One of the names, in upper or lower case; an empty value means `empty`, if that is given."""

    def from_text(text: str) -> str:
        lowered = text.lower()
        if not text and empty is not None:
            return empty
        if lowered not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return lowered

    def from_file(value: Any) -> str:
        return from_text(value if isinstance(value, str) else str(value))

    return Kind(name="string", from_text=from_text, from_file=from_file, to_toml=_quote, choices=names)


Bound = Literal["positive", "not negative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFlag:
    """A flag that is not an option: it has no file key."""

    flag: str
    kind: Kind[Any]
    help: str

    @property
    def notes(self) -> list[str]:
        """Notes after the help text that apply to every flag of this kind."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(CommandFlag):
    """One field of an options class."""

    attribute: str
    file_key: str
    default: Any
    default_text: str  # describes a default that depends on the machine; otherwise empty
    heading: str  # starts a group of options in help and documentation
    bound: Bound | None

    @property
    def notes(self) -> list[str]:
        return ["may be given several times"] if self.kind.is_list else []


def opt(
    default: T | Callable[[], T],
    help: str,
    kind: Kind[T],
    *,
    file_key: str = "",
    default_text: str = "",
    heading: str = "",
    bound: Bound | None = None,
) -> T:
    """A dataclass field that is an option. A callable default is called once per instance."""
    metadata = {
        "help": help,
        "kind": kind,
        "file_key": file_key,
        "default_text": default_text,
        "heading": heading,
        "bound": bound,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _option(declared: Field[Any]) -> Option:
    factory = declared.default_factory
    return Option(
        attribute=declared.name,
        flag=declared.name.replace("_", "-"),
        default=declared.default if factory is MISSING else factory(),
        **{**declared.metadata, "file_key": declared.metadata["file_key"] or declared.name},
    )


_PAGE_HEAD = """\
# Options of {program}

Generated from the source by `make docs`; do not edit.

Flags follow Go's syntax: `-flag value`, `--flag value` and `--flag=value` are the same. A boolean flag may
stand alone and takes a value only with `=`. If a flag is repeated, the last one counts; lists collect all.
Durations are written like `250ms`, `1.5s` or `2h45m`, with the units `ns us µs ms s m h`.

`--config` names a TOML file with the keys below. In the file, a duration may also be an integer in
milliseconds, and a list may also be one string with commas. A flag overrides the file, and the file overrides
the default. Unknown keys are logged and ignored.

## Command line only

| flag | meaning |
| --- | --- |"""


class CommandLineExit(Exception):
    """Print the text and exit: status 0 for help, 2 for a wrong command line."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text, self.status = text, status


class OptionTable(Generic[T]):
    """Reads the values of one options class, and describes its options."""

    def __init__(self, program: str, options_class: type[T], command_flags: Sequence[CommandFlag]) -> None:
        self.program = program
        self._options_class = options_class
        self.command_flags = tuple(command_flags)
        self.options = tuple(map(_option, fields(options_class)))  # type: ignore[arg-type]  # a dataclass

    def read_command_line(self, arguments: Sequence[str]) -> tuple[T, list[str]]:
        """The options (flag over file over default), not yet validated, and warnings for the
        operator. Handles the command flags `version` and `config`.

        Raises CommandLineExit, or OptionError if the config file cannot be used.
        """
        commands, from_flags = self.read_flags_or_exit(arguments)
        from_file: dict[str, Any] = {}
        warnings: list[str] = []
        if path := commands.get("config"):
            from_file, unknown = self.read_file(Path(path))
            warnings += [f"{path}: unknown key {key} ignored" for key in unknown]
        values = from_file | from_flags
        return self._options_class(**values), warnings

    def read_flags_or_exit(self, arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """read_flags(), with CommandLineExit for wrong flags, `--help` and `--version`."""
        try:
            commands, values = self.read_flags(arguments)
        except HelpWanted:
            raise CommandLineExit(self.usage(), 0) from None
        except FlagError as error:
            self.refuse(self.explained(error))
        if commands.get("version"):
            raise CommandLineExit(version_line(self.program) + "\n", 0)
        return commands, values

    def refuse(self, reason: str) -> NoReturn:
        """The command line is wrong."""
        text = f"{self.program}: {reason}\n`{self.program} --help` lists the flags\n"
        raise CommandLineExit(text, 2) from None

    def explained(self, error: FlagError) -> str:
        """The text of the error, with the flag that was probably meant."""
        if not isinstance(error, UnknownFlag):
            return str(error)
        known = [flag.flag for flag in (*self.command_flags, *self.options)]
        similar = difflib.get_close_matches(error.name, known, 1)
        return f"{error}; did you mean --{similar[0]}?" if similar else str(error)

    def read_flags(self, arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The given command flags by flag name, and the given options by attribute.

        Raises FlagError, or HelpWanted.
        """
        known: dict[str, CommandFlag] = {flag.flag: flag for flag in (*self.command_flags, *self.options)}
        given: dict[str, list[Any]] = {}
        for name, text in scan_flags(arguments, {name: flag.kind.is_boolean for name, flag in known.items()}):
            kind = known[name].kind
            try:
                value = kind.from_text(text)
            except ValueError as error:
                invalid = "invalid boolean value" if kind is BOOL else "invalid value"
                target = f"-{name}" if kind is BOOL else f"flag -{name}"
                raise FlagError(f"{invalid} {_quote(text)} for {target}: {error}") from None
            given.setdefault(name, []).append(value)
        values = {name: known[name].kind.combine(parts) for name, parts in given.items()}
        commands = {flag.flag: values[flag.flag] for flag in self.command_flags if flag.flag in values}
        return commands, {
            option.attribute: values[option.flag] for option in self.options if option.flag in values
        }

    def read_file(self, path: Path) -> tuple[dict[str, Any], list[str]]:
        """The options in the TOML file, by attribute, and its unknown keys. Raises OptionError."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise OptionError(f"{path}: {reason}") from error
        values = {}
        for option in self.options:
            if option.file_key in content:
                try:
                    values[option.attribute] = option.kind.from_file(content.pop(option.file_key))
                except ValueError as error:
                    raise OptionError(f"{path}: {option.file_key} (flag --{option.flag}) {error}") from None
        return values, list(content)

    def check_bounds(self, options: object) -> None:
        """Raise OptionError for the first number that is out of bounds."""
        for option in self.options:
            value = getattr(options, option.attribute)
            if option.bound == "positive" and value <= 0:
                raise OptionError(f"--{option.flag} must be positive")
            if option.bound == "not negative" and value < 0:
                raise OptionError(f"--{option.flag} must not be negative")
            if option.kind is DURATION and not abs(value) <= MAX_DURATION_S:
                raise OptionError(f"--{option.flag} must be at most {MAX_DURATION_S / 3600:.0f}h (100 years)")

    def usage(self) -> str:
        """The help text, with flags formatted as Go does."""
        lines = [f"Usage of {self.program}:"]
        for flag in (*self.command_flags, *self.options):
            notes = flag.notes
            if isinstance(flag, Option):
                if flag.heading:
                    lines.append(f"\n{flag.heading}:")
                if flag.default_text or flag.default not in ("", ()):
                    notes.append(f"default {flag.default_text or flag.kind.to_toml(flag.default)}")
            lines.append(f"  -{flag.flag} {flag.kind.name}".rstrip())
            text = flag.help.replace("`", "") + (f" ({'; '.join(notes)})" if notes else "")
            lines += (f"    \t{line}" for line in textwrap.wrap(text, 100))
        return "\n".join(lines) + "\n"

    def print_page(self, arguments: Sequence[str]) -> None:
        """The main function of an options module: print one of the checked-in pages."""
        pages = {"--markdown": self.markdown, "--toml": self.toml}
        if len(arguments) != 1 or arguments[0] not in pages:
            module = getattr(sys.modules["__main__"].__spec__, "name", "")
            sys.exit(f"usage: python -m {module} {'|'.join(pages)}")
        sys.stdout.write(pages[arguments[0]]())

    def markdown(self) -> str:
        """The reference page."""
        return "\n".join(self._markdown_lines()) + "\n"

    def _markdown_lines(self) -> Iterator[str]:
        yield _PAGE_HEAD.format(program=self.program)
        for flag in self.command_flags:
            yield f"| `--{flag.flag}` | {flag.help} |"
        for option in self.options:
            if option.heading:
                yield ""
                yield f"## {option.heading}"
                yield ""
                yield "| flag | file key | default | meaning |"
                yield "| --- | --- | --- | --- |"
            default = option.default_text or f"`{option.kind.to_toml(option.default)}`"
            meaning = "; ".join((option.help, *option.notes))
            yield f"| `--{option.flag}` | `{option.file_key}` | {default} | {meaning} |"

    def toml(self) -> str:
        """The example file; defaults that depend on the machine are comments."""
        lines = [
            f"# Options of {self.program}, with their defaults: {self.program} --config <this file>",
            "# Generated from the source by `make docs`; do not edit.",
        ]
        for option in self.options:
            if option.heading:
                lines += ["", f"# ---- {option.heading} ----"]
            lines += ["", *(f"# {line}" for line in textwrap.wrap(option.help, 100))]
            if option.default_text:
                lines.append(f"# {option.file_key} = <{option.default_text}>")
            else:
                lines.append(f"{option.file_key} = {option.kind.to_toml(option.default)}")
        return "\n".join(lines) + "\n"
