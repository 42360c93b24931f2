"""Messages with headers on the wire: the rules, which both builds apply alike."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsparq.errors import FatalClientError
from nsparq.headers import MAX_BLOCK, decode_headers, encode_headers
from nsparq.packed import PackedBodies
from nsparq.wire.header_blocks import split_headers, take_headers
from tests.support.connection import header_block, sized, with_headers

from .harness import BUILDS, COMPILED, both_builds, using

GOOD = with_headers(b"body", {"a": "1", "b.c-d_0": "ü"})
MANY = {f"name-{n}": "" for n in range(100)}

BAD = {
    "no size": b"\x00\x00\x00",
    "no body": with_headers(b"", {"a": "1"}),
    "no body and no headers": sized(b""),
    "a size beyond the message": b"\x00\x00\x00\x09" + header_block({"a": "1"}) + b"x",
    "a size beyond the limit": with_headers(b"x", {"a": "x" * 40_000, "b": "x" * 30_000}),
    "a block cut in the name": sized(b"\x05abc") + b"x",
    "a block cut in the size of the value": sized(b"\x01a\x00") + b"x",
    "a block cut in the value": sized(b"\x01a\x00\x05abc") + b"x",
    "an empty name": with_headers(b"x", {"": "1"}),
    "a capital letter": with_headers(b"x", {"A": "1"}),
    "a name that is not ASCII": sized(b"\x02\xc3\xbc\x00\x00") + b"x",
    "a space in a name": with_headers(b"x", {"a b": "1"}),
    "a name twice": sized(header_block({"a": "1"}) * 2) + b"x",
    "one of many names twice": sized(header_block(MANY) + header_block({"name-7": "x"})) + b"x",
    "a value that is not UTF-8": sized(b"\x01a\x00\x01\xff") + b"x",
    "a surrogate": sized(b"\x01a\x00\x03\xed\xa0\x80") + b"x",
}


@both_builds
def test_bodies_and_blocks_come_apart(build: str) -> None:
    large = {"a": "x" * (MAX_BLOCK - 4)}
    messages = [({"a": "1"}, b"one"), ({}, b"two"), (MANY, b"\x00"), (large, b"four")]
    with using(build):
        found = take_headers(
            PackedBodies.of([with_headers(body, headers) for headers, body in messages]), "PUB"
        )
    assert found == PackedBodies.of([body for _, body in messages]).with_blocks(
        PackedBodies.of([header_block(headers) for headers, _ in messages])
    )
    assert [decode_headers(block) for block in found.headers or ()] == [headers for headers, _ in messages]


@both_builds
def test_messages_that_all_have_no_headers_are_plain_messages(build: str) -> None:
    with using(build):
        assert take_headers(PackedBodies.of([sized(b"") + b"x"] * 2), "PUB") == PackedBodies.of([b"x"] * 2)


@both_builds
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_message_that_breaks_a_rule_is_refused(build: str, bad: bytes) -> None:
    messages = PackedBodies.of([GOOD, GOOD, bad, GOOD])
    with using(build):
        assert len(split_headers(messages)) == 2
        with pytest.raises(FatalClientError, match="MPUB (message|bad header)") as caught:
            take_headers(messages, "MPUB")
    assert caught.value.code == "E_BAD_MESSAGE"


@given(st.lists(st.binary(max_size=20), max_size=4), st.data())
@example([sized(b"\x01a\x00\x00")], None)
def test_both_builds_agree_on_any_bytes(junk: list[bytes], data: st.DataObject | None) -> None:
    messages = [GOOD, *junk, *(sized(one) + b"x" for one in junk)]
    if data is not None:
        changed = bytearray(GOOD)
        changed[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
        messages.append(bytes(changed))
    outcomes = []
    for build in BUILDS:
        with using(build):
            outcomes.append([split_headers(PackedBodies.of(messages[n:])) for n in range(len(messages))])
    assert all(outcome == outcomes[0] for outcome in outcomes)


NAMES = st.sampled_from(["a", "b", "aa", "A", "nsq-producer", "nsq-producep"])


@given(st.lists(st.lists(st.tuples(NAMES, st.sampled_from(["", "1", "nsq-producer", "\xfc"])), max_size=3)))
@example([[("a", ""), ("b", "1")], [("a", "1"), ("b", ""), ("a", "")]])
@example([[("a", ""), ("b", "1")], [("a", "1"), ("a", "1")]])
@example([[("b", "")], [("b", "1"), ("nsq-producer", "")]])
def test_names_are_checked_whatever_the_message_before_has(blocks: list[list[tuple[str, str]]]) -> None:
    messages = [
        sized(b"".join(header_block({name: value}) for name, value in block)) + b"x" for block in blocks
    ]
    valid = [len({name for name, _ in block}) == len(block) and "A" not in dict(block) for block in blocks]
    accepted = (valid + [False]).index(False)
    has_numbers = any("nsq-producer" in dict(block) for block in blocks[:accepted])
    for build in BUILDS:
        with using(build):
            found = split_headers(PackedBodies.of(messages))
            assert len(found) == accepted
            if found.headers is not None:
                assert found.headers.has_numbers or not has_numbers
                assert found.headers.has_numbers == has_numbers or build == "pure" or accepted < len(blocks)


@given(st.dictionaries(st.from_regex(r"\A[a-z0-9._-]{1,9}\Z"), st.text(max_size=9), max_size=30))
def test_what_the_codec_writes_is_accepted(headers: dict[str, str]) -> None:
    block = encode_headers(headers)
    assert (block, decode_headers(block)) == (header_block(headers), headers)
    for build in BUILDS:
        with using(build):
            assert len(split_headers(PackedBodies.of([sized(block) + b"x"]))) == 1


@pytest.mark.skipif(COMPILED["split_headers"] is None, reason="the kernel is not built")
def test_the_kernel_refuses_what_it_cannot_work_with() -> None:
    split = COMPILED["split_headers"]
    for arguments in ((), (b"", "text"), (5, b"")):
        with pytest.raises(TypeError):
            split(*arguments)
    with pytest.raises(ValueError, match="lengths do not add up"):
        split(array("I", [6]), b"short")
