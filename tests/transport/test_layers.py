"""Stacked layers behave as one layer."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.transport.deflate import DeflateLayer
from nsparq.transport.layers import MAX_PIECE, Layer, LayerError, LayerStack
from nsparq.transport.snappy import SnappyLayer


class Spelled(Layer):
    """A simple layer: it puts a letter before each message, and returns input byte by byte."""

    def __init__(self, letter: bytes) -> None:
        self.letter = letter
        self.output = b""
        self.given = 0
        self._input = b""

    def receive(self, data: bytes) -> Iterator[bytes]:
        self._input += data
        return iter(self._read, b"")

    def _read(self) -> bytes:
        piece, self._input = self._input[:1], self._input[1:]
        self.given += len(piece)
        return piece

    def send(self, data: bytes | memoryview) -> bytes:
        return self.letter + bytes(data)

    def take_output(self) -> bytes:
        output, self.output = self.output, b""
        return output

    def close(self) -> None:
        self.output += self.letter + b"!"


STACKS = {
    "snappy": (SnappyLayer,),
    "deflate": (DeflateLayer,),
    "deflate around snappy": (DeflateLayer, SnappyLayer),
    "three": (SnappyLayer, DeflateLayer, SnappyLayer),
}
each_stack = pytest.mark.parametrize("kinds", STACKS.values(), ids=STACKS)


def stack_of(kinds: tuple[type[Layer], ...]) -> LayerStack:
    return LayerStack([kind() for kind in kinds])


@each_stack
@given(
    sent=st.lists(st.one_of(st.binary(max_size=300), st.builds(bytes, st.integers(0, 200_000))), max_size=4),
    step=st.integers(1, 5000),
)
def test_bytes_sent_through_a_stack_are_received(
    kinds: tuple[type[Layer], ...], sent: list[bytes], step: int
) -> None:
    sender, receiver = stack_of(kinds), stack_of(kinds)
    wire = b"".join(map(sender.send, sent))
    pieces = [
        piece for start in range(0, len(wire), step) for piece in receiver.receive(wire[start : start + step])
    ]
    assert b"".join(pieces) == b"".join(sent)
    assert all(0 < len(piece) <= MAX_PIECE for piece in pieces)


@each_stack
def test_a_reader_of_a_stack_may_stop_and_continue_later(kinds: tuple[type[Layer], ...]) -> None:
    sent = random.Random(1).randbytes(1 << 19) + bytes(1 << 20)
    wire = stack_of(kinds).send(sent)
    receiver = stack_of(kinds)
    received = [
        next(receiver.receive(wire[: len(wire) // 3])),
        next(receiver.receive(wire[len(wire) // 3 :])),
    ]
    received += [next(receiver.receive(b"")) for _ in range(5)]
    received += receiver.receive(b"")
    assert b"".join(received) == sent


def test_the_first_layer_is_the_one_on_the_wire() -> None:
    stack = LayerStack([DeflateLayer(), SnappyLayer()])
    inner = zlib.decompressobj(-15).decompress(stack.send(b"contents"))
    assert bytes(cramjam.snappy.decompress(inner)) == b"contents"
    assert stack.layers[0].__class__ is DeflateLayer


def test_an_upgrade_is_confirmed_once_for_each_layer_from_the_outermost_inward() -> None:
    assert LayerStack([Spelled(b"a")]).confirm(b"OK") == b"aOK"
    assert LayerStack([Spelled(b"a"), Spelled(b"b")]).confirm(b"OK") == b"aOKabOK"


def test_outer_layers_decode_no_more_than_is_read() -> None:
    outer, inner = Spelled(b"a"), Spelled(b"b")
    pieces = LayerStack([outer, inner]).receive(b"twelve bytes")
    assert (next(pieces), next(pieces)) == (b"t", b"w")
    assert (outer.given, inner.given) == (2, 2)


def test_output_of_an_inner_layer_passes_the_outer_ones() -> None:
    outer, inner = Spelled(b"a"), Spelled(b"b")
    stack = LayerStack([outer, inner])
    assert stack.take_output() == b""
    inner.output = b"word"
    assert stack.take_output() == b"aword"
    stack.close()
    assert stack.take_output() == b"a!ab!"


def test_a_stack_is_established_when_all_layers_are_and_ended_when_one_is() -> None:
    outer, inner = Spelled(b"a"), Spelled(b"b")
    stack = LayerStack([outer, inner])
    assert stack.is_established
    assert not stack.is_ended
    outer.is_established = False
    assert not stack.is_established
    inner.is_ended = True
    assert stack.is_ended


@given(garbage=st.binary(min_size=1, max_size=500))
def test_garbage_in_any_layer_gives_bytes_or_a_layer_error(garbage: bytes) -> None:
    for wire in (garbage, DeflateLayer().send(garbage)):
        try:
            list(LayerStack([DeflateLayer(), SnappyLayer()]).receive(wire))
        except LayerError as error:
            assert error.reason.startswith(("deflate: ", "snappy: "))
