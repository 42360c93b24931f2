"""Offsets as they stand in a checkpoint, and positions as a user writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.spark.options import OptionError
from nsparq.spark.source.positions import EARLIEST, BadOffset, Offsets, Place, Rule, Rules, decode, encode

PLACES = st.builds(Place, st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(0, 2**54 - 1))
OFFSETS = st.dictionaries(
    st.text(min_size=1), st.dictionaries(st.text(min_size=1), PLACES, min_size=1), max_size=4
)


@given(OFFSETS, st.randoms())
def test_the_same_offsets_are_the_same_text_and_come_back(content: dict[str, Any], random: Any) -> None:
    offsets = Offsets(content)
    text = json.dumps(encode(offsets))
    assert decode(json.loads(text)) == offsets
    shuffled = [*content.items()]
    random.shuffle(shuffled)
    again = Offsets({topic: dict(reversed([*nodes.items()])) for topic, nodes in shuffled})
    assert json.dumps(encode(again)) == text


def test_a_topic_without_nodes_is_left_out() -> None:
    offsets = Offsets()
    offsets.put("t", "n", Place("a", 1))
    offsets.drop("t", "n")
    assert encode(offsets) == {"logs": {}, "query": "", "version": 2}


def test_offsets_of_before_have_no_version_and_no_query() -> None:
    logs = {"version": {"n": ["a", 1]}, "t": {"n": ["b", 2]}}
    offsets = decode(logs)
    assert (offsets["version"]["n"], offsets.query, offsets.began) == (Place("a", 1), "", None)
    offsets.query, offsets.began = "q", decode({"t": {"n": ["b", 1]}})
    encoded = encode(offsets)
    assert [*encoded] == sorted(encoded)
    assert encode(decode(encoded)) == encoded
    assert (decode(encoded).query, decode(encoded).began) == ("q", {"t": {"n": Place("b", 1)}})


def test_offsets_of_a_later_version_are_refused() -> None:
    with pytest.raises(BadOffset, match="its version is 3"):
        decode({"logs": {}, "query": "", "version": 3})


@pytest.mark.parametrize(
    "content",
    [
        5,
        [],
        {"t": 5},
        {"t": {"n": 5}},
        {"t": {"n": [5, "x"]}},
        {"t": {"n": ["x", -1]}},
        {"t": {"n": ["x", True]}},
        {"t": {"n": ["x", 1, 2]}},
    ],
)
def test_what_is_no_offset_is_refused_and_shown(content: Any) -> None:
    with pytest.raises(BadOffset) as caught:
        decode(content)
    assert json.dumps(content) in str(caught.value)


def test_a_log_is_found_under_the_name_it_had() -> None:
    offsets = decode({"t": {"a:1": ["x", 5], "b:1": ["y", 6]}})
    assert offsets.find("t", "y") == "b:1"
    assert offsets.find("t", "z") is None and offsets.find("u", "x") is None


def test_a_copy_is_independent() -> None:
    offsets = decode({"t": {"n": ["x", 5]}})
    other = offsets.copy()
    other.put("t", "n", Place("x", 6))
    assert offsets.place("t", "n") == Place("x", 5)


# what a user writes


def rules(text: str) -> Rules:
    return Rules("startingPosition", text, ("earliest", "latest", "channel"), EARLIEST)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", Rule("earliest")),
        ("LATEST", Rule("latest")),
        ("channel", Rule("channel")),
        ("1700000000", Rule(time_ns=1_700_000_000_000_000_000)),
        ("1700000000.123456789", Rule(time_ns=1_700_000_000_123_456_789)),
        ("2023-11-14T22:13:20Z", Rule(time_ns=1_700_000_000_000_000_000)),
        ("2023-11-15T00:13:20.5+02:00", Rule(time_ns=1_700_000_000_500_000_000)),
    ],
)
def test_a_position_for_all(text: str, expected: Rule) -> None:
    assert rules(text).rule("any", "node:1") == expected


def test_json_names_topics_and_nodes_and_the_rest_has_the_default() -> None:
    found = rules(
        json.dumps(
            {
                "t": {"a:1": 5, "b:1": ["log", 6], "c:1": "latest", "d:1": "2023-11-14T22:13:20Z"},
                "u": "channel",
            }
        )
    )
    assert found.rule("t", "a:1") == Rule(sequence=5)
    assert found.rule("t", "b:1") == Rule(incarnation="log", sequence=6)
    assert found.rule("t", "c:1") == Rule("latest")
    assert found.rule("t", "d:1").time_ns == 1_700_000_000_000_000_000
    assert found.rule("t", "e:1") == EARLIEST
    assert found.rule("u", "any") == Rule("channel")
    assert found.rule("v", "any") == EARLIEST
    assert found.uses("channel") and not found.uses("earliest")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sometime",
        "-5",
        "2023-11-14T22:13:20",
        "1e99",
        "NaN",
        '{"t": -1}',
        '{"t": {"n": [1, 2]}}',
        '{"t"',
        "{5}",
    ],
)
def test_a_position_that_is_none_is_an_error_that_names_the_option(text: str) -> None:
    with pytest.raises(OptionError, match="option startingPosition "):
        rules(text)


def test_what_does_not_apply_is_no_word() -> None:
    with pytest.raises(OptionError, match="option endingPosition must be one of latest, a time"):
        Rules("endingPosition", "channel", ("latest",), EARLIEST)
