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


def test_equal_bytes_cut_differently_are_not_equal() -> None:
    one, other = PackedBodies.of([b"ab", b"c"]), PackedBodies.of([b"a", b"bc"])
    assert one != other
    assert one == PackedBodies(array("I", (2, 1)), b"abc")
    assert hash(one) == hash(PackedBodies.of([b"ab", b"c"]))
    assert repr(one) == "PackedBodies([b'ab', b'c'])"


def test_what_is_packed_is_not_packed_again() -> None:
    packed = PackedBodies.of([b"a"])
    assert PackedBodies.of(packed) is packed
