"""Patterns of permissions: Go's syntax, correct matches, and never slow."""

from __future__ import annotations

import re
import time

import pytest

from nsparq.server.auth.patterns import BadPattern, Pattern, compile_pattern


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("", ["", "a"], []),
        ("b", ["b", "abc"], ["", "a", "B"]),
        ("^b", ["b", "bc"], ["ab"]),
        ("b$", ["b", "ab"], ["bc", ""]),
        ("^$", [""], ["a"]),
        (r"\Ab\z", ["b"], ["ab", "bc"]),
        (r"\bb\b", ["b", "a.b-c"], ["ab", "bc"]),
        (r"a\Bb", ["ab"], ["a.b"]),
        (".", ["a", "#", "é"], [""]),
        ("a|bc|", ["", "a", "bc", "x"], []),
        ("^(a|bc)$", ["a", "bc"], ["", "b", "abc"]),
        ("^a*$", ["", "a", "aaa"], ["ab"]),
        ("^a+?$", ["a", "aaa"], [""]),
        ("^a?b$", ["b", "ab"], ["aab"]),
        ("^a{2}$", ["aa"], ["a", "aaa"]),
        ("^a{2,}$", ["aa", "aaaaa"], ["a"]),
        ("^a{1,3}?$", ["a", "aaa"], ["", "aaaa"]),
        ("^a{0}b$", ["b"], ["ab"]),
        ("^(ab){2}$", ["abab"], ["ab", "ababab"]),
        ("a{,2}", ["a{,2}"], ["aa"]),
        ("^(a*)*$", ["", "aaa"], ["ab"]),
        ("^[a-c_.]$", ["a", "c", "_", "."], ["d", "-"]),
        ("^[^a-c]$", ["d", "-", "é"], ["a"]),
        ("^[]a-]$", ["]", "a", "-"], ["b"]),
        (r"^[\]\d\-z]$", ["]", "5", "-", "z"], ["d"]),
        (r"^[\x61-\x{63}]$", ["a", "b", "c"], ["d"]),
        ("^[[:alpha:]_]+$", ["aZ_"], ["a1"]),
        ("^[[:^alpha:]]+$", ["1-#"], ["a"]),
        (r"^\d\D\w\W\s?\S$", ["1aa-b"], ["aaa-b"]),
        (r"^a\.b\-c\x2e\056\Q.*\E$", ["a.b-c...*"], ["axb-c...*"]),
        (r"^\Qa+", ["a+"], ["aa"]),
        (r"^\Qab\E+$", ["ab", "abb"], ["abab"]),
        (r"^\t\n\r\f\v\a$", [], ["tnrfva"]),
        ("^(?i)aB[c-d]$", ["ABC", "abd"], ["xbc"]),
        ("^(?i:a)b$", ["Ab", "ab"], ["aB"]),
        ("^(?i)a(?-i)b$", ["Ab"], ["AB"]),
        ("^((?i)a)b$", ["Ab"], ["AB"]),
        ("^(?P<name>a)(?<other>b)(?:c)$", ["abc"], ["ab"]),
        ("(?m)^a$", ["a"], ["ba"]),
        ("(?s)^.$", ["a"], [""]),
        ("é", [], ["e", ""]),
        ("^(orders|billing)\\.[a-z]+(#ephemeral)?$", ["orders.eu", "billing.x#ephemeral"], ["orders", "x.y"]),
    ],
)
def test_a_pattern_matches_any_part_of_the_name(pattern: str, matching: list[str], others: list[str]) -> None:
    compiled = Pattern(pattern)
    assert [name for name in matching + others if compiled.search(name)] == matching


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing )"),
        ("[a", "missing ]"),
        ("[z-a]", "invalid character class range"),
        ("*", "no argument for repetition operator"),
        ("a{1001}", "invalid repetition size"),
        ("\\", "trailing \\"),
        (r"\1", "invalid escape sequence"),
        ("(?=a)", "invalid perl operator"),
        ("(?!a)", "invalid perl operator"),
        ("a" * 70_000, "longer than"),
    ],
)
def test_what_go_refuses_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(BadPattern, match=re.escape(reason)):
        Pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(\w+\.?)+$",
        "(a|a)*$",
        "(a*)*b",
        "^(a?){30}a{30}$",
        ".*.*.*.*.*.*.*.*x",
        "^(([a-z])+.)+[A-Z]([a-z])+$",
    ],
)
def test_no_pattern_is_slow_whatever_the_name(pattern: str) -> None:
    compiled = Pattern(pattern)
    begin = time.thread_time()
    compiled.search("a" * 54 + "#ephemeral")
    compiled.search("a" * 64)
    assert time.thread_time() - begin < 0.5


def test_a_pattern_equals_one_of_the_same_text_and_is_compiled_once() -> None:
    assert Pattern("a") == Pattern("a") != Pattern("b")
    assert len({Pattern("a"), Pattern("a"), Pattern("b")}) == 2
    assert repr(Pattern("^a")) == "Pattern('^a')"
    assert compile_pattern("^a$") is compile_pattern("^a$")


def test_the_reason_shows_the_start_of_the_pattern() -> None:
    with pytest.raises(BadPattern, match=r"^missing \): \(a in '\(a'$"):
        Pattern("(a")
    with pytest.raises(BadPattern) as caught:
        Pattern("(" + "a" * 5000)
    assert len(str(caught.value)) < 450
