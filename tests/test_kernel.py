"""The compiled inner loops: what they give, that the Python beside them gives the same, what they
refuse."""

from __future__ import annotations

import gc
import os
import select
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsparq import kernel
from nsparq.client import Message
from nsparq.headers import encode_headers
from nsparq.packed import PackedBodies
from nsparq.wire.limits import Limits
from nsparq.wire.message import build_frames
from nsparq.wire.server import MAGIC
from tests.support import sized
from tests.support.scripted_nsqd import message_frame
from tests.wire.harness import BUILDS, COMPILED, Outcome, converse, using

CAN_BE_COMPILED = len(BUILDS) > 1
Pairs = list[tuple[socket.socket, socket.socket]]
needs_kernel = pytest.mark.skipif(kernel.BUILD != "compiled", reason="the kernel is not built")

SUBSCRIBED = MAGIC + b"SUB t c\n"
TOP = 2**64 - 1


# Which one is in use


def kernel_in_a_new_process(code: str, **environment: str) -> str:
    code = f"{code}\nfrom nsparq import kernel\nprint(kernel.BUILD, kernel.decode_fins is None)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_the_environment_can_leave_the_kernel_out() -> None:
    assert kernel_in_a_new_process("", NSPARQ_NO_EXTENSIONS="1") == "python True"


def test_without_a_built_kernel_python_does_the_work() -> None:
    code = "import sys; sys.modules['nsparq._kernel'] = None"
    assert kernel_in_a_new_process(code, NSPARQ_NO_EXTENSIONS="") == "python True"


def test_the_build_in_use_is_named_after_what_there_is() -> None:
    assert {function is None for function in COMPILED.values()} == {kernel.BUILD == "python"}


# Both agree on any input: asked through the code that uses them, so that it is included


def assert_both_agree(run: Callable[[], object]) -> None:
    outcomes = []
    for build in BUILDS:
        with using(build):
            outcomes.append(run())
    assert all(outcome == outcomes[0] for outcome in outcomes)


def outcome_of(data: bytes, limits: Limits) -> Outcome:
    return converse([data], limits, eof=True)


ID = st.integers(0, TOP) | st.integers(0, 20) | st.integers(TOP - 9, TOP)
FIN = st.builds(b"FIN %016x\n".__mod__, ID)
ODD_FIN = st.one_of(
    st.builds(b"FIN %016X\n".__mod__, ID),
    st.builds(b"FIN %016x\r\n".__mod__, ID),
    st.builds(b"FIN %b\n".__mod__, st.binary(min_size=16, max_size=16)),
    st.sampled_from([b"NOP\n", b"FIN 0123456789abcdef0\n", b"FIN 0123456789abcde\n", b"FIN \n", b"FIN"]),
)
# Mostly long runs, since below a handful of lines nothing is done at once.
FIN_LINES = st.lists(st.lists(FIN, max_size=20).map(b"".join) | ODD_FIN, max_size=6).map(b"".join)


SMALL = Limits(max_msg_size=20, max_body_size=60)
MESSAGE = st.one_of(
    st.binary(min_size=1, max_size=20).map(lambda body: struct.pack(">i", len(body)) + body),
    st.sampled_from([0, -1, 20, 21, 2**31 - 1, -(2**31)]).map(struct.Struct(">i").pack),
    st.binary(max_size=6),
)


@needs_kernel
class TestBothBuilds:
    __test__ = CAN_BE_COMPILED

    @given(FIN_LINES)
    @example(b"".join(b"FIN %016x\n" % n for n in [*range(TOP - 8, TOP + 1), *range(8)]))
    @example(b"FIN ffffffffffffffff\nFIN 0000000000000000\n" * 4)
    @example(b"FIN 0000000000000000\n" * 8)
    @example(b"".join(b"FIN %016x\n" % n for n in range(0x0FF, 0x10A)))
    @example(b"".join(b"FIN %016x\n" % n for n in range(0x9FFFFFFFFFF8, 0xA00000000008)))
    @example(b"FIN ffffffffffffffff\nFIN!0000000000000000\n" * 4)
    def test_both_decode_the_same_fins(self, lines: bytes) -> None:
        assert_both_agree(lambda: outcome_of(SUBSCRIBED + lines, Limits()))

    @given(
        publishes=st.lists(
            st.tuples(st.sampled_from([b"PUB t\n", b"PUB t\n", b"PUB u\n", b"NOP\n"]), MESSAGE)
            | st.tuples(
                st.just(b"MPUB t\n"),
                st.lists(MESSAGE, max_size=4).map(lambda m: sized(struct.pack(">i", len(m)) + b"".join(m))),
            ),
            max_size=8,
        )
    )
    def test_both_take_the_same_runs_of_publishes(self, publishes: list[tuple[bytes, bytes]]) -> None:
        data = MAGIC + b"".join(line + content for line, content in publishes)
        assert_both_agree(lambda: outcome_of(data, SMALL))

    @given(pubs=st.lists(st.tuples(st.sampled_from([b"t", b"tt"]), MESSAGE), min_size=1, max_size=6))
    def test_both_take_the_same_single_messages(self, pubs: list[tuple[bytes, bytes]]) -> None:
        pieces = [MAGIC, *(b"PUB %s\n%s" % pub for pub in pubs)]
        assert_both_agree(lambda: converse(pieces, SMALL, eof=True))

    @given(count=st.integers(0, 13), messages=st.lists(MESSAGE, max_size=13).map(b"".join))
    def test_both_cut_an_mpub_into_the_same_messages(self, count: int, messages: bytes) -> None:
        data = MAGIC + b"MPUB t\n" + struct.pack(">ii", 9, count) + messages
        assert_both_agree(lambda: outcome_of(data, SMALL))

    @given(
        st.integers(0, 2**64 - 40) | st.integers(2**64 - 40, 2**64 - 31),
        st.integers(-(2**63), 2**63 - 1) | st.none(),
        st.lists(st.binary(max_size=30), max_size=30),
        st.randoms(use_true_random=False),
    )
    def test_both_build_the_same_frames(
        self, first_id: int, stamp: int | None, bodies: list[bytes], random: Any
    ) -> None:
        stamps: Any = stamp
        if stamp is None:
            stamps = np.array([random.randint(-(2**63), 2**63 - 1) for _ in bodies], np.int64)
        lengths, data = array("I", map(len, bodies)), b"".join(bodies)
        assert_both_agree(lambda: (kernel.build_frames or build_frames)(first_id, stamps, lengths, data))


# The functions themselves


def messages_in(data: bytes, position: int, count: int, max_size: int) -> tuple[list[bytes], int]:
    """What pack_messages finds, slowly."""
    bodies: list[bytes] = []
    while len(bodies) < count and position + 4 <= len(data):
        (size,) = struct.unpack_from(">i", data, position)
        if not 0 < size <= max_size or position + 4 + size > len(data):
            break
        bodies.append(data[position + 4 : position + 4 + size])
        position += 4 + size
    return bodies, position


class Index:
    """An object that can stand for an integer, and that fails or misbehaves while being asked."""

    def __init__(self, answer: Callable[[], int]) -> None:
        self.answer = answer

    def __index__(self) -> int:
        return self.answer()


@needs_kernel
class TestPackMessages:
    __test__ = CAN_BE_COMPILED

    @given(
        st.lists(MESSAGE, max_size=8).map(b"".join),
        st.integers(0, 200),
        st.integers(-2, 10),
        st.sampled_from([0, 1, 19, 20, 2**31 - 1, 2**31, 2**40, -1]),
    )
    def test_it_packs_whole_messages_of_an_allowed_size(
        self, data: bytes, position: int, count: int, max_size: int
    ) -> None:
        lengths, bodies, end = COMPILED["pack_messages"](data, position, count, max_size)
        packed = PackedBodies(array("I", lengths), bodies)
        assert (packed[:], end) == messages_in(data, position, count, max_size)

    @pytest.mark.parametrize("position", [5, 6, 1000, sys.maxsize])
    def test_a_position_at_or_behind_the_end_gives_nothing(self, position: int) -> None:
        assert COMPILED["pack_messages"](b"\x00\x00\x00\x01c", position, 3, 10) == (b"", b"", position)

    def test_a_negative_position_is_refused(self) -> None:
        for position in (-1, -4, -sys.maxsize - 1):
            with pytest.raises(ValueError, match="position is negative"):
                COMPILED["pack_messages"](b"\x00\x00\x00\x01c", position, 3, 10)

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            (b"", 0, 1),
            (b"", 0, 1, 1, None),
            (bytearray(b""), 0, 1, 1),
            (memoryview(b""), 0, 1, 1),
            ("", 0, 1, 1),
            (None, 0, 1, 1),
            (b"", "0", 1, 1),
            (b"", 0.0, 1, 1),
            (b"", 0, None, 1),
            (b"", 0, 1, b"1"),
        ],
    )
    def test_other_types_are_refused(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(TypeError):
            COMPILED["pack_messages"](*arguments)

    @pytest.mark.parametrize("place", [1, 2, 3])
    @pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**100])
    def test_numbers_beyond_64_bits_are_refused(self, place: int, number: int) -> None:
        arguments: list[Any] = [b"\x00\x00\x00\x01c", 0, 1, 1]
        arguments[place] = number
        with pytest.raises(OverflowError):
            COMPILED["pack_messages"](*arguments)

    def test_an_error_while_an_argument_is_read_comes_through(self) -> None:
        def fail() -> int:
            raise KeyError("no number")

        with pytest.raises(KeyError):
            COMPILED["pack_messages"](b"\x00\x00\x00\x01c", 0, 1, Index(fail))

    def test_it_keeps_nothing(self) -> None:
        data = b"\x00\x00\x00\x02ab" * 50
        assert_nothing_is_kept(lambda: COMPILED["pack_messages"](data, 0, 100, 10))


@needs_kernel
class TestDecodeFins:
    __test__ = CAN_BE_COMPILED

    @pytest.mark.parametrize(
        ("numbers", "spans"),
        [
            ([5], [(5, 6)]),
            ([5, 6, 7], [(5, 8)]),
            ([5, 7], [(5, 6), (7, 8)]),
            ([5, 4], [(5, 6), (4, 5)]),
            ([5, 5], [(5, 6), (5, 6)]),
            ([TOP], [(TOP, TOP + 1)]),
            ([TOP - 1, TOP], [(TOP - 1, TOP + 1)]),
            ([TOP, 0], [(TOP, TOP + 1), (0, 1)]),
            ([TOP, 0, 1], [(TOP, TOP + 1), (0, 2)]),
            ([0, 0], [(0, 1), (0, 1)]),
            ([2**63 - 1, 2**63], [(2**63 - 1, 2**63 + 1)]),
        ],
    )
    def test_ids_that_follow_each_other_are_one_span(
        self, numbers: list[int], spans: list[tuple[int, int]]
    ) -> None:
        data = b"".join(b"FIN %016x\n" % number for number in numbers)
        assert COMPILED["decode_fins"](data, 0) == (spans, len(data))
        assert COMPILED["decode_fins"](b"NOP\n" + data + b"FIN 01", 4) == (spans, len(data) + 4)

    @pytest.mark.parametrize(
        "odd",
        [
            b"",
            b"FIN",
            b"FIN 0123456789abcdef",
            b"FIN 0123456789abcdef\r\n",
            b"FIN 0123456789abcdeF\n",
            b"FIN 0123456789abcdeg\n",
            b"FIN 0123456789abcde\n\n",
            b"FIN g123456789abcdef\n",
            b"FIN 0123456789abcd\x00f\n",
            b"fin 0123456789abcdef\n",
            b"FIN\t0123456789abcdef\n",
            b"NOP\nFIN 0123456789abcdef\n",
        ],
    )
    def test_it_stops_at_anything_unusual(self, odd: bytes) -> None:
        assert COMPILED["decode_fins"](odd, 0) == ([], 0)
        plain = b"FIN 0000000000000007\n"
        assert COMPILED["decode_fins"](plain + odd + plain, 0) == ([(7, 8)], 21) or odd == b""

    def test_every_byte_in_the_place_of_a_digit_is_judged(self) -> None:
        for place in range(4, 20):
            for byte in range(256):
                line = bytearray(b"FIN 0000000000000000\n")
                line[place] = byte
                spans, end = COMPILED["decode_fins"](bytes(line), 0)
                if byte in b"0123456789abcdef":
                    number = int(line[4:20], 16)
                    assert (spans, end) == ([(number, number + 1)], 21)
                else:
                    assert (spans, end) == ([], 0)

    @pytest.mark.parametrize("position", [21, 22, 1000, sys.maxsize])
    def test_a_position_at_or_behind_the_end_gives_nothing(self, position: int) -> None:
        assert COMPILED["decode_fins"](b"FIN 0123456789abcdef\n", position) == ([], position)

    def test_a_negative_position_is_refused(self) -> None:
        for position in (-1, -21, -sys.maxsize - 1):
            with pytest.raises(ValueError, match="position is negative"):
                COMPILED["decode_fins"](b"FIN 0123456789abcdef\n", position)

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            (b"",),
            (b"", 0, 0),
            ("", 0),
            (bytearray(b""), 0),
            (None, 0),
            (b"", "0"),
            (b"", 0.0),
            (b"", None),
        ],
    )
    def test_other_types_are_refused(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(TypeError):
            COMPILED["decode_fins"](*arguments)

    def test_numbers_beyond_64_bits_are_refused(self) -> None:
        for number in (2**63, -(2**63) - 1, 10**100):
            with pytest.raises(OverflowError):
                COMPILED["decode_fins"](b"FIN 0123456789abcdef\n", number)

    def test_it_keeps_nothing(self) -> None:
        data = b"".join(b"FIN %016x\n" % (TOP - 3 * i) for i in range(50))
        assert_nothing_is_kept(lambda: COMPILED["decode_fins"](data, 0))


@needs_kernel
class TestBuildFrames:
    __test__ = CAN_BE_COMPILED

    def test_lengths_that_do_not_add_up_are_refused(self) -> None:
        for lengths, data in (([1], b""), ([], b"x"), ([2, 2], b"xxx"), ([2**32 - 1], b"x"), ([0], b"x")):
            with pytest.raises(ValueError, match="lengths do not add up"):
                COMPILED["build_frames"](0, 0, array("I", lengths), data)

    def test_times_that_are_not_one_for_each_message_are_refused(self) -> None:
        for count in (0, 1, 3):
            with pytest.raises(ValueError, match="lengths do not add up"):
                COMPILED["build_frames"](0, np.zeros(count, np.int64), array("I", [1, 1]), b"xx")
        with pytest.raises(ValueError, match="lengths do not add up"):
            COMPILED["build_frames"](0, b"\x00" * 15, array("I", [1, 1]), b"xx")

    def test_times_with_gaps_between_them_are_refused_and_not_misread(self) -> None:
        with pytest.raises((ValueError, BufferError)):
            COMPILED["build_frames"](0, np.zeros(4, np.int64)[::2], array("I", [1, 1]), b"xx")

    def test_a_table_cut_short_is_not_read_beyond_its_end(self) -> None:
        assert COMPILED["build_frames"](0, 0, b"\x00\x00\x00", b"") == (b"", array("q", [0]))

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            (0, 0, array("I")),
            (0, 0, array("I"), b"", None),
            ("0", 0, array("I"), b""),
            (0.0, 0, array("I"), b""),
            (None, 0, array("I"), b""),
            (0, "0", array("I"), b""),
            (0, 0.0, array("I"), b""),
            (0, None, array("I"), b""),
            (0, 0, [1], b"x"),
            (0, 0, None, b"x"),
            (0, 0, array("I"), "x"),
            (0, 0, array("I"), None),
            (0, np.zeros(1, np.int64), array("I", [1]), "x"),
        ],
    )
    def test_other_types_are_refused(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(TypeError):
            COMPILED["build_frames"](*arguments)

    @pytest.mark.parametrize(
        ("first_id", "stamp"),
        [(-1, 0), (2**64, 0), (10**100, 0), (0, 2**63), (0, -(2**63) - 1), (0, 10**100)],
    )
    def test_numbers_that_do_not_fit_their_field_are_refused(self, first_id: int, stamp: int) -> None:
        with pytest.raises(OverflowError):
            COMPILED["build_frames"](first_id, stamp, array("I", [1]), b"x")

    @pytest.mark.parametrize(
        "arguments",
        [(0, 0), (0, "stamps"), (0, "short"), (-1, 0), (0, "stamps", None), (0, "stamps", "I", None)],
    )
    def test_the_buffers_are_let_go_whether_it_works_or_not(self, arguments: tuple[Any, ...]) -> None:
        # While something holds its buffer a bytearray cannot grow.
        stamps, lengths, data = bytearray(16), bytearray(struct.pack("=II", 1, 2)), bytearray(b"xyz")
        given: list[Any] = [0, stamps, lengths, data]
        for place, argument in enumerate(arguments):
            if argument == "short":
                stamps = given[1] = bytearray(8)
            elif not isinstance(argument, str):
                given[place] = argument
        try:
            COMPILED["build_frames"](*given)
        except (TypeError, ValueError, OverflowError):
            pass
        for buffer in (stamps, lengths, data):
            buffer.append(0)

    def test_it_keeps_nothing(self) -> None:
        lengths, data = array("I", [300] * 50), bytes(300 * 50)
        stamps = np.zeros(50, np.int64)
        assert_nothing_is_kept(lambda: COMPILED["build_frames"](1 << 60, stamps, lengths, data))
        assert_nothing_is_kept(lambda: COMPILED["build_frames"](1 << 60, 1 << 60, lengths, data))


@needs_kernel
class TestMessagesOfAClient:
    """Their results are compared with those of Python in tests/wire/test_client.py and
    tests/test_headers.py."""

    __test__ = CAN_BE_COMPILED

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("decode_messages", ()),
            ("decode_messages", ("", 0, 1)),
            ("decode_messages", (bytearray(), 0, 1)),
            ("decode_messages", (b"", "0", 1)),
            ("decode_messages", (b"", 0, None)),
            ("encode_with_headers", (b"PUB t", b"x")),
            ("encode_with_headers", ("PUB t", b"x", {"k": "v"})),
            ("encode_with_headers", (b"PUB t", b"x", {"k": "v"}, "", 0)),
            ("encode_with_headers", (b"PUB t", b"x", {"k": "v"}, b"", "0")),
            ("lazy_headers", ()),
            ("lazy_headers", (property(), len)),
            ("lazy_headers", (Message.touched,)),
        ],
    )
    def test_other_types_are_refused(self, name: str, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(TypeError):
            COMPILED[name](*arguments)

    @pytest.mark.parametrize("position", [-1, 70, 71, 2**62])
    def test_outside_of_the_buffer_there_are_no_messages(self, position: int) -> None:
        data = message_frame("1") * 2
        assert COMPILED["decode_messages"](data, position, 100) == ([], position)

    def test_a_frame_is_taken_when_all_of_it_is_there(self) -> None:
        frames = [message_frame("1", block=encode_headers({"k": "v"})), message_frame("2")] * 2
        ends = [sum(map(len, frames[: i + 1])) for i in range(len(frames))]
        data = b"".join(frames)
        for size in range(len(data) + 1):
            messages, position = COMPILED["decode_messages"](data[:size], 0, 1000)
            assert position == max([0, *(end for end in ends if end <= size)])
            assert len(messages) == sum(end <= size for end in ends)

    def test_headers_that_a_finalizer_decodes_are_not_those_of_another_block(self) -> None:
        decode = COMPILED["decode_headers"]

        class Decoding:
            """The garbage collector runs its finalizer, which decodes a block."""

            def __init__(self, block: bytes) -> None:
                self.itself, self.block = self, block

            def __del__(self) -> None:
                decode(self.block)

        threshold = gc.get_threshold()
        gc.collect()
        try:
            # Before 3.12 any allocation may start the collector: here the first, the second, and so
            # on.
            for allocations in range(8):
                for i in range(20):
                    ours, other = (
                        encode_headers({"tenant": f"{name}{i}" * 10}) for name in ("ours", "other")
                    )
                    decode(ours)
                    in_use = [{str(n): n} for n in range(200)]  # no dict is left to be used again
                    Decoding(other)
                    gc.set_threshold(gc.get_count()[0] + allocations)
                    decode(ours)
                    gc.set_threshold(0)
                    assert decode(other) == {"tenant": f"other{i}" * 10}
                    del in_use
        finally:
            gc.set_threshold(*threshold)

    def test_they_keep_nothing(self) -> None:
        headers = {"tenant": "acme", "k": "\xfc"}
        block, bad = encode_headers(headers), b"\x01k\x00\x01\xff"
        frames = message_frame("1", block=block) + message_frame("2")
        assert_nothing_is_kept(lambda: COMPILED["decode_messages"](frames, 0, 1000))
        assert_nothing_is_kept(lambda: COMPILED["encode_with_headers"](b"PUB t", b"x", headers))
        assert_nothing_is_kept(lambda: [COMPILED["decode_headers"](one) for one in (block, bad, block[:-1])])

        def read(block: bytes) -> object:
            message: Any = Message.__new__(Message)
            message._headers = block
            with suppress(ValueError):
                return message.headers

        assert_nothing_is_kept(lambda: [read(block), read(bad)])


def assert_nothing_is_kept(call: Callable[[], object]) -> None:
    """A forgotten reference would leave at least a block behind with each call."""
    call()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        call()
    assert sys.getallocatedblocks() - before < 500


@needs_kernel
class TestSendEach:
    __test__ = CAN_BE_COMPILED

    @pytest.fixture(params=["one by one", "together"])
    def ring(self, request: pytest.FixtureRequest) -> object:
        """None on systems without io_uring: then all are sent to one by one."""
        return COMPILED["open_ring"]() if request.param == "together" else None

    # A ring takes 64 at a time.
    @pytest.mark.parametrize("count", [0, 1, 5, 64, 65, 130])
    def test_every_socket_gets_the_bytes(self, ring: object, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        try:
            for _ in range(3):
                assert COMPILED["send_each"]([ours.fileno() for ours, _ in pairs], b"OK", ring) == []
            assert [theirs.recv(10) for _, theirs in pairs] == [b"OKOKOK"] * count
        finally:
            close_all(pairs)

    def test_another_thread_than_the_rings_sends_without_it(self) -> None:
        ring, pairs = COMPILED["open_ring"](), [socket.socketpair() for _ in range(5)]
        descriptors = [ours.fileno() for ours, _ in pairs]
        try:
            with ThreadPoolExecutor(1) as threads:
                assert threads.submit(COMPILED["send_each"], descriptors, b"OK", ring).result(60) == []
            assert COMPILED["send_each"](descriptors, b"!", ring) == []
            assert [theirs.recv(10) for _, theirs in pairs] == [b"OK!"] * 5
        finally:
            close_all(pairs)

    @pytest.mark.skipif(sys.platform != "linux", reason="there are no rings, and no /proc")
    def test_a_ring_that_nothing_refers_to_is_closed(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        rings = [COMPILED["open_ring"]() for _ in range(20)]
        assert len(os.listdir("/proc/self/fd")) == before + sum(ring is not None for ring in rings)
        del rings
        assert len(os.listdir("/proc/self/fd")) == before

    def test_those_that_take_less_are_named_with_what_they_took(self, ring: object) -> None:
        pairs = [socket.socketpair() for _ in range(4)]
        full, gone = pairs[1][0], pairs[2]
        full.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                full.send(bytes(4096))
        gone[1].close()
        try:
            descriptors = [ours.fileno() for ours, _ in pairs]
            descriptors.insert(2, -1)
            assert COMPILED["send_each"](descriptors, b"OK", ring) == [(1, 0), (2, 0), (3, 0)]
            assert pairs[0][1].recv(10) == pairs[3][1].recv(10) == b"OK"
        finally:
            close_all(pairs)

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ([1], b"x"),
            ((1,), b"", None),
            ([1], "x", None),
            (["x"], b"x", None),
            ([2**70], b"x", None),
            ([1], b"x", "ring"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: tuple[object, ...]) -> None:
        with pytest.raises((TypeError, OverflowError, ValueError)):
            COMPILED["send_each"](*arguments)


def pub(body: bytes, topic: bytes = b"t") -> bytes:
    return b"PUB %b\n%b" % (topic, sized(body))


class TestReadPublishes:
    __test__ = CAN_BE_COMPILED

    LINE = b"PUB t\n"

    @pytest.fixture
    def pairs(self) -> Iterator[Pairs]:
        pairs = [socket.socketpair() for _ in range(5)]
        yield pairs
        close_all(pairs)

    def read(self, pairs: Pairs, max_size: int = 1000) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """What was published and what else was said, by the number of the pair."""
        numbers = {ours.fileno(): number for number, (ours, _) in enumerate(pairs)}
        with select.epoll() as poller:
            for descriptor in numbers:
                poller.register(descriptor, select.EPOLLIN)
            descriptors, bodies, others = COMPILED["read_publishes"](poller.fileno(), self.LINE, max_size)
        published = {numbers[fd]: body for fd, body in zip(descriptors, bodies, strict=True)}
        return published, {numbers[fd]: data for fd, data in others}

    def test_publishes_are_told_from_all_else(self, pairs: Pairs) -> None:
        for number, said in enumerate((pub(b"one"), pub(b"2"), b"NOP\n", pub(b"x", b"u"))):
            pairs[number][1].send(said)
        assert self.read(pairs) == ({0: b"one", 1: b"2"}, {2: b"NOP\n", 3: pub(b"x", b"u")})
        assert self.read(pairs) == ({}, {}), "and all of it has been read"

    @pytest.mark.parametrize("size", [1, 1000, 1001, 4096 - 10, 4096 - 9])
    def test_large_messages(self, pairs: Pairs, size: int) -> None:
        said = pub(b"x" * size)
        pairs[0][1].send(said)
        if size <= 1000:
            assert self.read(pairs) == ({0: b"x" * size}, {})
        else:
            assert self.read(pairs) == ({}, {0: said[:4096]})
            assert self.read(pairs)[1].get(0, b"") == said[4096:], "the rest is for whoever reads next"

    @pytest.mark.parametrize(
        "said",
        [
            pub(b"whole")[:-1],
            pub(b"whole") + b"N",
            pub(b"whole") * 2,
            b"PUB t\n",
            b"P",
            b"PUB t\n" + bytes(4),
            b"PUB t\n" + b"\xff" * 4 + b"x",
        ],
    )
    def test_what_is_not_exactly_one_publish_is_given_as_it_came(self, pairs: Pairs, said: bytes) -> None:
        pairs[0][1].send(said)
        assert self.read(pairs) == ({}, {0: said})

    def test_an_end_and_an_error_are_nothing_said(self, pairs: Pairs) -> None:
        pairs[0][1].close()
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()
            pairs.append((ours, theirs))
            pairs[1][1].send(pub(b"x"))
            assert self.read(pairs) == ({1: b"x"}, {0: b"", 5: b""})

    def test_no_more_than_64_at_a_time(self) -> None:
        pairs = [socket.socketpair() for _ in range(70)]
        try:
            for _, theirs in pairs:
                theirs.send(pub(b"x"))
            assert len(self.read(pairs)[0]) == 64
            assert len(self.read(pairs)[0]) == 6
        finally:
            close_all(pairs)

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ((), TypeError),
            (("x", b"", 1), TypeError),
            ((0, "x", 1), TypeError),
            ((0, b"x", "1"), TypeError),
            ((-1, b"x", 1), OSError),
            ((2**70, b"x", 1), OverflowError),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: tuple[object, ...], error: type[Exception]) -> None:
        with pytest.raises(error):
            COMPILED["read_publishes"](*arguments)


def close_all(pairs: Pairs) -> None:
    for pair in pairs:
        for end in pair:
            end.close()
