"""nsqd.dat, in NSQ's own format."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from nsparq.storage.files import Files
from nsparq.storage.metadata import FILE_NAME, ChannelEntry, TopicEntry, encode_metadata, read_metadata

TOPICS = [
    TopicEntry("orders", False, [ChannelEntry("emails", True), ChannelEntry("archive", False)]),
    TopicEntry("clicks", True, []),
]


def write(directory: Path, content: bytes) -> None:
    (directory / FILE_NAME).write_bytes(content)


def test_the_file_is_one_line_of_json_as_nsq_writes_it_and_a_checksum() -> None:
    assert encode_metadata(TOPICS, "1.3.0") == (
        b'{"topics":['
        b'{"name":"orders","paused":false,"channels":'
        b'[{"name":"emails","paused":true},{"name":"archive","paused":false}]},'
        b'{"name":"clicks","paused":true,"channels":[]}'
        b'],"version":"1.3.0","crc":2930313714}'
    )
    assert json.loads(encode_metadata([], "1.3.0"))["topics"] == []


def test_metadata_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, encode_metadata(TOPICS, "1.3.0"))
    assert read_metadata(Files(), tmp_path) == (TOPICS, True)


def test_without_a_file_there_are_no_topics(tmp_path: Path) -> None:
    assert read_metadata(Files(), tmp_path) == ([], False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"topics":null,"version":"1.3.0"}', []),
        (b"{}", []),
        (b'{"topics":[{"name":"t","paused":true,"channels":null}]}', [TopicEntry("t", True, [])]),
        (b'{"topics":[{"name":"t"}]}', [TopicEntry("t", False, [])]),
        (
            b'{"topics":[{"name":"t","channels":[{"name":"c"}]}], "more": 1}\n',
            [TopicEntry("t", False, [ChannelEntry("c", False)])],
        ),
    ],
)
def test_what_is_left_out_or_null_is_empty(
    tmp_path: Path, content: bytes, expected: list[TopicEntry]
) -> None:
    write(tmp_path, content)
    assert read_metadata(Files(), tmp_path) == (expected, False)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b"7",
        b'{"topics":7}',
        b'{"topics":[7]}',
        b'{"topics":["t"]}',
        b'{"topics":[{}]}',
        b'{"topics":[{"name":"t","channels":7}]}',
        b'{"topics":[{"name":"t","channels":[7]}]}',
        b'{"topics":[{"name":"t","channels":[{}]}]}',
    ],
)
def test_a_file_that_cannot_be_parsed_is_an_error(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, content)
    with pytest.raises(ValueError):
        read_metadata(Files(), tmp_path)


def test_any_flipped_bit_in_our_own_file_is_an_error_or_changes_nothing_that_counts(tmp_path: Path) -> None:
    """A changed name would create a topic that nobody asked for."""
    whole = encode_metadata(TOPICS, "1.3.0")
    for position in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[position] ^= 1 << bit
            write(tmp_path, bytes(changed))
            with suppress(ValueError):
                found = read_metadata(Files(), tmp_path)
                assert found.topics in (TOPICS, []) or not found.is_ours, changed
