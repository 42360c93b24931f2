"""Letters decoded for a whole batch are those decoded one by one."""

from __future__ import annotations

import random

import pytest

from nsparq.broker.letters import MAX_EXAMPLES, Letter, decode_letter, decode_letters
from nsparq.dead_letter import DeadLetter
from nsparq.headers import encode_headers
from nsparq.packed import PackedBodies
from nsparq.storage.batch import Batch, encode_batch
from nsparq.storage.raw_batch import RawBatch, iter_batches

BASE = 1000


def message(number: int, own: dict[str, str] | None = None, **changed: object) -> tuple[bytes, bytes]:
    """Body and header block of a letter."""
    fields = {
        "topic": "orders",
        "channel": "billing",
        "id": f"{(7 << 54) + 12345 + number:016x}",
        "timestamp_ns": 1_790_000_000_000_000_000 + number,
        "attempts": 3,
        "error": "requeued",
        "client": "10.0.0.1:4000",
        "given_up_ns": 1_790_000_001_000_000_000 + number,
    }
    letter = DeadLetter(**fields | changed)  # type: ignore[arg-type]
    return b"body %d" % number, encode_headers(own or {}) + encode_headers(letter.origin_headers())


def batch_of(messages: list[tuple[bytes, bytes]]) -> RawBatch:
    packed = PackedBodies.of([body for body, _ in messages])
    blocks = PackedBodies.of([block for _, block in messages])
    batch = Batch(BASE, 1, 0, packed.lengths, packed.data, 0, blocks if blocks.data else None)
    (found,) = iter_batches(b"".join(encode_batch(batch)))
    return found


def one_by_one(messages: list[tuple[bytes, bytes]]) -> list[Letter | None]:
    return [decode_letter(BASE + index, body, block) for index, (body, block) in enumerate(messages)]


OLD = DeadLetter("orders", "billing", f"{77:016x}", 5, 2, "requeued", text="old").to_json(), b""


@pytest.mark.parametrize(
    "messages",
    [
        [message(1)],
        [message(number) for number in range(100)],
        [message(number, {"key": "k" * (number % 7)}) for number in range(100)],
        [message(number, attempts=number % 20, client="" if number % 3 else "a:1") for number in range(100)],
        [message(number, channel=f"c{number}") for number in range(4 * MAX_EXAMPLES)],
        [message(number, timestamp_ns=10**number) for number in range(19)] * 2,
        [message(number, timestamp_ns=9 * 10**18 + 10**number) for number in range(22)] * 2,
        [OLD, (b"?", b""), (b"?", b"?"), *(message(number) for number in range(50)), OLD],
        [*(message(number) for number in range(50)), OLD, (b"?", b""), (b"?", encode_headers({"a": "b"}))],
        [OLD] * 20,
        [(b"?", message(1)[1][1:]), *(message(number) for number in range(50))],
    ],
)
def test_a_batch_gives_the_letters_of_its_messages(messages: list[tuple[bytes, bytes]]):
    assert decode_letters(batch_of(messages)) == one_by_one(messages)


def test_letters_with_any_byte_changed_are_those_decoded_one_by_one():
    chance = random.Random(1)
    for _ in range(30):
        messages = [message(number, {"own": "ü"}) for number in range(40)]
        for index in chance.sample(range(1, 40), 30):
            body, block = messages[index]
            place = chance.randrange(len(block))
            changed = block[:place] + bytes((chance.choice(b"0f:g/`G\x00" + block),)) + block[place + 1 :]
            messages[index] = body, changed
        assert decode_letters(batch_of(messages)) == one_by_one(messages)


def test_the_values_are_those_of_the_letter():
    letter = decode_letters(batch_of([message(number, {"own": "1"}) for number in range(40)]))[30]
    assert letter == Letter(
        number=BASE + 30,
        sequence=12375,
        timestamp_ns=1_790_000_000_000_000_030,
        given_up_ns=1_790_000_001_000_000_030,
        body=b"body 30",
        block=encode_headers({"own": "1"}),
        origin=("orders", "billing"),
        attempts=3,
        reason="requeued",
        client="10.0.0.1:4000",
    )
