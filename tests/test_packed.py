"""Bodies end to end: reads like a list of them, joins and splits without losing any."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from nsparq.packed import PackedBodies

BODIES = st.lists(st.binary(max_size=5), max_size=20)


@given(BODIES)
def test_it_reads_like_the_list_it_was_made_of(bodies: list[bytes]) -> None:
    packed = PackedBodies.of(bodies)
    assert (len(packed), [*packed], packed[:], packed) == (len(bodies), bodies, bodies, bodies)
    assert [packed[i] for i in range(-len(bodies), len(bodies))] == bodies * 2


@given(st.lists(BODIES, min_size=1, max_size=5))
def test_parts_join_to_the_whole(parts: list[list[bytes]]) -> None:
    joined = PackedBodies.join([PackedBodies.of(part) for part in parts])
    assert joined == [body for part in parts for body in part]


@given(BODIES, st.integers(1, 8))
def test_pieces_are_no_longer_than_asked_and_make_up_the_whole(bodies: list[bytes], most: int) -> None:
    pieces = PackedBodies.of(bodies).split(most)
    assert all(len(piece) <= most for piece in pieces)
    assert PackedBodies.join(pieces) == bodies


MESSAGES = st.lists(st.tuples(st.binary(max_size=3), st.sampled_from([b"", b"", b"h", b"hh"])), max_size=9)


def packed(messages: list[tuple[bytes, bytes]]) -> PackedBodies:
    bodies = PackedBodies.of([body for body, _ in messages])
    return bodies.with_blocks(PackedBodies.of([block for _, block in messages]))


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 30))
def test_headers_stay_with_their_messages(
    parts: list[list[tuple[bytes, bytes]]], most: int, count: int
) -> None:
    whole = [message for part in parts for message in part]
    joined = PackedBodies.join([packed(part) for part in parts])
    assert joined == packed(whole)
    assert (joined.headers is None) == (not any(block for _, block in whole))
    pieces = joined.split(most)
    assert pieces == ([packed(whole[n : n + most]) for n in range(0, len(whole), most)] or [packed([])])
    assert joined.without_first(count) == packed(whole[count:])


def test_messages_with_other_headers_are_not_equal() -> None:
    one = packed([(b"a", b"h")])
    assert one != packed([(b"a", b"")])
    assert repr(one) == "PackedBodies([b'a'], headers=[b'h'])"


def test_equal_bytes_cut_differently_are_not_equal() -> None:
    one, other = PackedBodies.of([b"ab", b"c"]), PackedBodies.of([b"a", b"bc"])
    assert one != other
    assert one == PackedBodies(array("I", (2, 1)), b"abc")
    assert hash(one) == hash(PackedBodies.of([b"ab", b"c"]))
    assert repr(one) == "PackedBodies([b'ab', b'c'])"


def test_what_is_packed_is_not_packed_again() -> None:
    packed = PackedBodies.of([b"a"])
    assert PackedBodies.of(packed) is packed
