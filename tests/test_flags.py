"""Go's flag syntax and value formats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.flags import (
    FlagError,
    HelpWanted,
    format_duration,
    parse_bool,
    parse_duration,
    parse_int,
    scan_flags,
)

FLAGS = {"name": False, "size": False, "deflate": True}


def scan(*arguments: str) -> list[tuple[str, str]]:
    return list(scan_flags(arguments, FLAGS))


@pytest.mark.parametrize(
    "arguments", [("-name", "v"), ("--name", "v"), ("-name=v",), ("--name=v",)], ids=" ".join
)
def test_one_dash_and_two_are_the_same_with_and_without_equals(arguments: tuple[str, ...]) -> None:
    assert scan(*arguments) == [("name", "v")]


def test_a_bare_boolean_is_true_and_takes_no_argument() -> None:
    assert scan("--deflate", "--name", "v") == [("deflate", "true"), ("name", "v")]


def test_a_boolean_takes_a_value_with_equals_only() -> None:
    assert scan("-deflate=false", "-size=1") == [("deflate", "false"), ("size", "1")]
    assert scan("-deflate", "false", "-size=1") == [("deflate", "true")]


def test_scanning_stops_at_the_first_argument_that_is_not_a_flag() -> None:
    assert scan("-size", "1", "stop", "-size", "2") == [("size", "1")]
    assert scan("-size", "1", "-", "-size", "2") == [("size", "1")]
    assert scan("-size", "1", "", "-size", "2") == [("size", "1")]


def test_two_dashes_alone_end_the_flags() -> None:
    assert scan("-size", "1", "--", "-size", "2") == [("size", "1")]


def test_a_value_may_look_like_a_flag_be_empty_or_contain_equals() -> None:
    assert scan("-name", "-size", "--name=", "--name=a=b") == [
        ("name", "-size"),
        ("name", ""),
        ("name", "a=b"),
    ]


def test_every_occurrence_of_a_repeated_flag_is_reported_in_order() -> None:
    assert scan("-size", "1", "-size", "2") == [("size", "1"), ("size", "2")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-nope",), "flag provided but not defined: -nope"),
        (("--nope=1",), "flag provided but not defined: -nope"),
        (("-name",), "flag needs an argument: -name"),
        (("---name", "v"), "bad flag syntax: ---name"),
        (("-=v",), "bad flag syntax: -=v"),
        (("--=v",), "bad flag syntax: --=v"),
    ],
)
def test_errors_have_the_text_of_go(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(FlagError) as caught:
        scan(*arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize("flag", ["-h", "--h", "-help", "--help"])
def test_help_is_understood_unless_a_flag_has_that_name(flag: str) -> None:
    with pytest.raises(HelpWanted):
        scan(flag)
    assert list(scan_flags([flag], {"h": True, "help": True})) == [(flag.lstrip("-"), "true")]


@given(st.lists(st.text(alphabet="-=hnamesize019 ", max_size=8)))
def test_any_arguments_are_read_or_refused_but_never_crash(arguments: list[str]) -> None:
    try:
        assert all(name in FLAGS for name, _ in scan_flags(arguments, FLAGS))
    except (FlagError, HelpWanted):
        pass


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True"])
def test_true_is_spelt_as_in_go(text: str) -> None:
    assert parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "f", "F", "false", "FALSE", "False"])
def test_false_is_spelt_as_in_go(text: str) -> None:
    assert parse_bool(text) is False


@pytest.mark.parametrize("text", ["", "yes", "on", "tRUE", " true"])
def test_other_words_are_not_booleans(text: str) -> None:
    with pytest.raises(ValueError, match="parse error"):
        parse_bool(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("42", 42), ("-42", -42), ("+7", 7), ("1_000", 1000), ("0x1F", 31), ("0b101", 5), ("0o17", 15)]
    + [("017", 15), ("0_17", 15), ("9223372036854775807", 2**63 - 1)],
)
def test_integers_are_read_as_in_go(text: str, number: int) -> None:
    assert parse_int(text) == number


@pytest.mark.parametrize("text", ["", "-", "1.0", "1e3", "abc", " 1", "1 ", "08", "1__0", "_1", "٣", "0x"])
def test_other_text_is_not_an_integer(text: str) -> None:
    with pytest.raises(ValueError, match="parse error"):
        parse_int(text)


def test_an_integer_beyond_64_bits_is_out_of_range() -> None:
    with pytest.raises(ValueError, match="value out of range"):
        parse_int("9223372036854775808")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("1.5s", 1.5),
        ("2h45m", 9900.0),
        ("60s", 60.0),
        ("15m", 900.0),
        ("1h", 3600.0),
        ("10us", 0.00001),
        ("10µs", 0.00001),  # micro sign
        ("10μs", 0.00001),  # Greek mu
        ("7ns", 7e-9),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("0", 0.0),
        ("-1s", -1.0),
        ("+1s", 1.0),
        ("1m0.5s", 60.5),
        ("1m1m", 120.0),
    ],
)
def test_durations_are_read_as_in_go(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-", "5", "s", ".s", "1x", "1 s", "1s ", "1.2.3s", "1d", "1S", "٣s", "1s5", "99999999h"]
)
def test_other_text_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="parse error"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.25, "250ms"),
        (60.0, "1m"),
        (5400.0, "1h30m"),
        (1.5, "1s500ms"),
        (-2.0, "-2s"),
        (3e-9, "3ns"),
    ],
)
def test_durations_are_shown_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(min_value=-(10**15), max_value=10**15))
def test_a_shown_duration_reads_back_the_same(nanoseconds: int) -> None:
    seconds = nanoseconds / 1e9
    assert parse_duration(format_duration(seconds)) == seconds
