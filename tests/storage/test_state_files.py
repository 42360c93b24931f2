"""The files of a topic's state and of its channels."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from nsparq.storage.files import Files
from nsparq.storage.state_files import (
    TOPIC_FILE,
    ChannelState,
    TopicState,
    decode_channel_state,
    read_channel_state,
    read_topic_state,
)

from .support import FaultyFiles, flip

# the topic


def topic_state() -> TopicState:
    return TopicState(
        incarnation="0123abcd",
        origin=123456,
        paused=True,
        pause_position=123460,
        clean_end=123470,
        gaps=[(123456, 123458), (123461, 123465)],
    )


def test_a_topic_s_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = Files()
    topic_state().write(files, tmp_path)
    assert read_topic_state(files, tmp_path) == topic_state()
    fresh = TopicState(incarnation="x", origin=5)
    fresh.write(files, tmp_path)
    assert read_topic_state(files, tmp_path) == fresh
    assert (fresh.paused, fresh.pause_position, fresh.clean_end, fresh.gaps) == (False, -1, -1, [])


def test_a_topic_without_state_has_none(tmp_path: Path) -> None:
    assert read_topic_state(Files(), tmp_path) is None
    assert read_topic_state(Files(), tmp_path / "nowhere") is None


BROKEN = {
    "empty": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "a list": b"[]",
    "a number": b"1",
    "a string": b'"gaps"',
    "null": b"null",
    "nothing in it": b"{}",
    "no gaps": b'{"incarnation": "x", "origin": 5}',
    "gaps that are none": b'{"incarnation": "x", "origin": 5, "gaps": 7}',
    "gaps of one number": b'{"incarnation": "x", "origin": 5, "gaps": [[7]]}',
    "gaps of text": b'{"incarnation": "x", "origin": 5, "gaps": [["a", "b"]]}',
    "no origin": b'{"incarnation": "x", "gaps": []}',
    "more than we know": b'{"incarnation": "x", "origin": 5, "gaps": [], "colour": "blue"}',
    "an origin of text": b'{"incarnation": "x", "origin": "5", "gaps": []}',
    "an end of null": b'{"incarnation": "x", "origin": 5, "gaps": [], "clean_end": null}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_damaged_topic_state_is_reported_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / TOPIC_FILE).write_bytes(content)
    assert read_topic_state(Files(), tmp_path) is None
    assert "is damaged" in caplog.text
    assert "every message of its log" in caplog.text


def figures(state: TopicState) -> tuple[object, ...]:
    return state.origin, state.paused, state.pause_position, state.clean_end, state.gaps


def test_a_flipped_bit_in_a_topic_s_state_is_noticed(tmp_path: Path) -> None:
    """A changed digit of the origin or of a gap would skip messages silently."""
    topic_state().write(Files(), tmp_path)
    path = tmp_path / TOPIC_FILE
    whole = path.read_bytes()
    unnoticed = []
    for position in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole)
            flip(path, position, bit)
            found = read_topic_state(Files(), tmp_path)
            if found is not None and figures(found) != figures(topic_state()):
                unnoticed.append((position, bit))
    assert not unnoticed


def test_a_topic_s_state_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    files = FaultyFiles()
    topic_state().write(files, tmp_path)
    files.fail("write", errno.EIO, torn=20)
    with pytest.raises(OSError, match="Input/output error"):
        TopicState(incarnation="new", origin=0).write(files, tmp_path)
    assert read_topic_state(files, tmp_path) == topic_state()


# the channel


def channel_state(count: int = 3) -> ChannelState:
    return ChannelState(
        cursor=(1 << 54) + 5,
        seen=(1 << 54) + 9,
        paused=True,
        sequences=np.arange(count, dtype=np.uint64) + np.uint64((1 << 63) + 1),
        due_ns=np.arange(count, dtype=np.int64) * 10**18,
        attempts=np.array([65535, 0, 7][:count], np.uint16),
    )


def assert_same(found: ChannelState | None, expected: ChannelState) -> None:
    assert found is not None
    assert (found.cursor, found.seen, found.paused) == (expected.cursor, expected.seen, expected.paused)
    for name in ("sequences", "due_ns", "attempts"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_channel_s_state_is_decoded_as_it_was_encoded(count: int) -> None:
    assert_same(decode_channel_state(channel_state(count).encode()), channel_state(count))


def test_skips_of_a_channel_are_decoded_as_they_were_encoded() -> None:
    state = ChannelState(cursor=5, seen=6, skips=[(7, 9), (1 << 54, (1 << 54) + 1)])
    assert decode_channel_state(state.encode()).skips == state.skips
    assert decode_channel_state(channel_state().encode()).skips == []


def test_unfinished_messages_can_be_forgotten_from_a_number_on() -> None:
    state = channel_state()
    state.drop_from((1 << 63) + 2)
    assert state.sequences.tolist() == [(1 << 63) + 1]
    assert (state.due_ns.tolist(), state.attempts.tolist()) == ([0], [65535])
    state.drop_from(0)
    assert len(state.sequences) == len(state.due_ns) == len(state.attempts) == 0


@pytest.mark.parametrize("node_id", [0, 5, 1023])
def test_an_old_channel_file_with_ids_of_any_node_still_opens(node_id: int) -> None:
    """Until "NQC2" the files held message ids: the node id, and the sequence number in the lower 54
    bits."""
    sequences = [1, (1 << 53) + 7, (1 << 54) - 1]
    ids = np.array(sequences, np.uint64) + np.uint64(node_id << 54)
    arrays = (
        ids.tobytes() + np.array([0, 4, 0], np.int64).tobytes() + np.array([1, 0, 3], np.uint16).tobytes()
    )
    state = decode_channel_state(sealed({**FIELDS, "count": 3}, arrays, magic=b"NQC1"))
    assert state.sequences.tolist() == sequences
    assert (state.due_ns.tolist(), state.attempts.tolist()) == ([0, 4, 0], [1, 0, 3])


def test_a_channel_begins_with_nothing_unfinished() -> None:
    state = ChannelState(cursor=5, seen=6)
    assert_same(decode_channel_state(state.encode()), state)
    assert (state.paused, len(state.sequences), len(state.due_ns), len(state.attempts)) == (False, 0, 0, 0)


@pytest.mark.parametrize("count", [0, 3])
def test_a_channel_s_state_cut_anywhere_is_an_error(count: int) -> None:
    raw = channel_state(count).encode()
    for cut in range(len(raw)):
        with pytest.raises(ValueError, match=r"too short|checksum mismatch"):
            decode_channel_state(raw[:cut])


@pytest.mark.parametrize("count", [0, 3])
def test_any_flipped_bit_in_a_channel_s_state_is_an_error(count: int) -> None:
    raw = channel_state(count).encode()
    for position in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[position] ^= 1 << bit
            with pytest.raises(ValueError, match="checksum mismatch"):
                decode_channel_state(bytes(changed))


def test_bytes_after_a_channel_s_state_are_an_error() -> None:
    with pytest.raises(ValueError, match="checksum mismatch"):
        decode_channel_state(channel_state().encode() + b"\0")


def sealed(fields: Any, arrays: bytes = b"", length: int | None = None, magic: bytes = b"NQC2") -> bytes:
    """A state with a correct checksum and any content."""
    text = json.dumps(fields).encode()
    size = (len(text) if length is None else length).to_bytes(4, "little")
    return magic + crc32c(text + arrays, crc32c(size)).to_bytes(4, "little") + size + text + arrays


FIELDS = {"cursor": 1, "seen": 2, "paused": False, "count": 0}
CONTRADICTIONS = {
    "fewer messages than it says": sealed({**FIELDS, "count": 2}, b"\0" * 35),
    "no JSON": sealed(FIELDS, length=5),
    "more JSON than there is": sealed(FIELDS, length=1 << 31),
    "a field too few": sealed({"cursor": 1, "seen": 2, "count": 0}),
    "no fields": sealed([]),
    "a count of text": sealed({**FIELDS, "count": "2"}),
}


@pytest.mark.parametrize("raw", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_channel_s_state_that_contradicts_itself_is_an_error(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode_channel_state(raw)
    path = tmp_path / "c.channel"
    path.write_bytes(raw)
    assert read_channel_state(Files(), path) is None


def test_a_missing_channel_state_is_none_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_channel_state(Files(), tmp_path / "c.channel") is None
    assert "c.channel is damaged (missing)" in caplog.text


def test_the_state_of_another_channel_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = channel_state()
    state.channel = "c"
    for name in ("c", "d"):
        Files().replace(tmp_path / f"{name}.channel", state.encode(), sync=False)
    assert_same(read_channel_state(Files(), tmp_path / "c.channel"), state)
    assert read_channel_state(Files(), tmp_path / "d.channel") is None
    assert "d.channel is damaged (it belongs to channel c)" in caplog.text


def test_a_channel_s_state_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "c.channel"
    Files().replace(path, channel_state().encode(), sync=False)
    assert_same(read_channel_state(Files(), path), channel_state())


def test_a_damaged_channel_state_is_reported_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.channel"
    path.write_bytes(channel_state().encode()[:-1])
    assert read_channel_state(Files(), path) is None
    assert f"{path} is damaged" in caplog.text


# versions


def written_versions(path: Path, *counts: int) -> list[bytes]:
    versions = [channel_state(count).encode() for count in counts]
    for version in versions:
        Files().add_version(path, version)
    return versions


def test_the_last_checkpoint_in_the_file_counts(tmp_path: Path) -> None:
    written_versions(tmp_path / "c.channel", 2, 0, 3)
    assert_same(read_channel_state(Files(), tmp_path / "c.channel"), channel_state(3))


def test_a_checkpoint_cut_anywhere_leaves_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "c.channel"
    first, last = written_versions(path, 3, 2)
    for cut in range(len(last)):
        path.write_bytes(first + last[:cut])
        assert_same(read_channel_state(Files(), path), channel_state(3))


def test_a_checkpoint_after_a_torn_one_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.channel"
    first, second, last = written_versions(path, 3, 1, 2)
    for cut in range(1, len(second)):
        path.write_bytes(first + second[:cut] + last)
        assert_same(read_channel_state(Files(), path), channel_state(2))
    assert not caplog.records
    path.write_bytes(first + bytes(4096))
    assert_same(read_channel_state(Files(), path), channel_state(3))
    assert "the last checkpoint is incomplete" in caplog.text


def test_a_topic_s_state_cut_anywhere_leaves_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / TOPIC_FILE
    topic_state().write(Files(), tmp_path)
    size = path.stat().st_size
    later = TopicState(incarnation="later", origin=3)
    later.write(Files(), tmp_path)
    whole = path.read_bytes()
    assert read_topic_state(Files(), tmp_path) == later
    for cut in range(size, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert read_topic_state(Files(), tmp_path) == topic_state()
    path.write_bytes(whole[:size] + bytes(100))
    assert read_topic_state(Files(), tmp_path) == topic_state()
    path.write_bytes(whole[: size + 20])
    later.write(Files(), tmp_path)
    assert read_topic_state(Files(), tmp_path) == later
