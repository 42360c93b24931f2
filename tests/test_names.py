"""Topic and channel names, and how an invalid one is quoted."""

from __future__ import annotations

import pytest

from nsparq.names import is_ephemeral, is_valid_name, quote


@pytest.mark.parametrize(
    "name",
    [
        b"a",
        b"Z",
        b"0",
        b".",
        b"-",
        b"_",
        b"...",
        b"Topic-1_x.y",
        b"a" * 64,
        b"a#ephemeral",
        b"a" * 54 + b"#ephemeral",
        b"ephemeral",
    ],
)
def test_letters_digits_dot_dash_and_underscore_are_valid_up_to_64(name: bytes) -> None:
    assert is_valid_name(name)


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"a" * 65,
        b"a" * 55 + b"#ephemeral",
        b"#ephemeral",
        b"a#ephemeral#ephemeral",
        b"a#Ephemeral",
        b"a#",
        b"a#ephemeralx",
        b"a#ephemera",
        b"#ephemerala",
        b"a b",
        b" a",
        b"a\n",
        b"a\r",
        b"a\x00",
        b"a#ephemeral\n",
        b"t!",
        b"a/b",
        b"a:b",
        b"*",
        b"\xff",
        "é".encode(),
        "１".encode(),
    ],
)
def test_other_names_are_invalid(name: bytes) -> None:
    assert not is_valid_name(name)


def test_every_byte_is_valid_or_invalid_by_the_rule() -> None:
    allowed = b".-_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert bytes(byte for byte in range(256) if is_valid_name(bytes([byte]))) == bytes(sorted(allowed))


def test_the_suffix_makes_a_name_ephemeral() -> None:
    assert is_ephemeral("a#ephemeral")
    assert not is_ephemeral("ephemeral")
    assert not is_ephemeral("a")


@pytest.mark.parametrize(
    ("raw", "quoted"),
    [
        (b"", '""'),
        (b"t!", '"t!"'),
        (b"a b~", '"a b~"'),
        (b"'`", '"\'`"'),
        (b'a"b', r'"a\"b"'),
        (b"a\\b", r'"a\\b"'),
        (b"\a\b\t\n\v\f\r", r'"\a\b\t\n\v\f\r"'),
        (b"\x00\x01\x1b\x1f\x7f", r'"\x00\x01\x1b\x1f\x7f"'),
    ],
)
def test_ascii_is_quoted_with_backslashes(raw: bytes, quoted: str) -> None:
    assert quote(raw) == quoted


@pytest.mark.parametrize("text", ["é", "日本", "😀", "\ufffd", "e\u0301"], ids=ascii)
def test_printable_characters_stay_as_they_are(text: str) -> None:
    assert quote(text.encode()) == f'"{text}"'


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("\x85", r'"\u0085"'),
        ("\xa0", r'"\u00a0"'),
        ("\xad", r'"\u00ad"'),
        ("\u2028", r'"\u2028"'),
        ("\u3000", r'"\u3000"'),
        ("\ue000", r'"\ue000"'),
        ("\ufeff", r'"\ufeff"'),
        ("\U000e0001", r'"\U000e0001"'),
        ("\U000f0000", r'"\U000f0000"'),
    ],
    ids=ascii,
)
def test_other_characters_are_shown_by_their_number(text: str, quoted: str) -> None:
    assert quote(text.encode()) == quoted


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b"\x80",
        b"\xc3",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
    ],
    ids=["no start", "no lead", "cut", "cut 3", "cut 4", "overlong", "surrogate", "beyond Unicode"],
)
def test_bytes_that_are_no_utf_8_are_shown_one_by_one(raw: bytes) -> None:
    assert quote(raw) == '"' + "".join(f"\\x{byte:02x}" for byte in raw) + '"'


def test_valid_and_invalid_bytes_mix() -> None:
    assert quote(b"a\xc3\xa9\xc3b\xff") == '"aé\\xc3b\\xff"'


def test_a_line_of_invalid_bytes_is_quoted_in_linear_time() -> None:
    assert len(quote(b"\xf0" * 16_000)) == 4 * 16_000 + 2
