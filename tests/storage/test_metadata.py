"""nsqd.dat, in NSQ's own format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsparq.errors import StartError
from nsparq.storage.files import Files
from nsparq.storage.metadata import FILE_NAME, ChannelEntry, TopicEntry, encode_metadata, read_metadata

TOPICS = [
    TopicEntry("orders", False, [ChannelEntry("emails", True), ChannelEntry("archive", False)]),
    TopicEntry("clicks", True, []),
]


def write(directory: Path, content: bytes) -> None:
    (directory / FILE_NAME).write_bytes(content)


def test_the_file_is_one_line_of_json_as_nsq_writes_it() -> None:
    assert encode_metadata(TOPICS, "1.3.0") == (
        b'{"topics":['
        b'{"name":"orders","paused":false,"channels":'
        b'[{"name":"emails","paused":true},{"name":"archive","paused":false}]},'
        b'{"name":"clicks","paused":true,"channels":[]}'
        b'],"version":"1.3.0"}'
    )
    assert json.loads(encode_metadata([], "1.3.0")) == {"topics": [], "version": "1.3.0"}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, encode_metadata(TOPICS, "1.3.0"))
    assert read_metadata(Files(), tmp_path) == TOPICS


def test_no_file_is_no_topics(tmp_path: Path) -> None:
    assert read_metadata(Files(), tmp_path) == []


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
    assert read_metadata(Files(), tmp_path) == expected


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
def test_a_file_that_cannot_be_understood_stops_the_start(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, content)
    with pytest.raises(StartError, match="failed to parse metadata") as error:
        read_metadata(Files(), tmp_path)
    assert str(tmp_path / FILE_NAME) in str(error.value)
