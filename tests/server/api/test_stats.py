"""The encoding of /stats in slices. tests/conformance has the contents."""

from __future__ import annotations

import json

from nsparq.server.api.stats import SLICE_SIZE, _join_in_slices, _json_pieces


def test_the_pieces_of_stats_make_the_whole() -> None:
    stats = {
        "health": 'NOK - \udcff "',
        "topics": [{"a": 1}, {"b": [2, None]}],
        "none": None,
        "producers": [],
    }
    found = json.loads(b"".join(_json_pieces(stats)))
    assert found == stats | {"health": 'NOK - ? "'}


def test_long_stats_are_joined_in_several_turns_of_the_loop() -> None:
    given: list[int] = []

    def pieces():
        for _ in range(100):
            given.append(10_000)
            yield b"x" * 10_000

    joining = _join_in_slices(pieces())
    turns = 0
    try:
        while True:
            joining.send(None)
            turns += 1
            assert sum(given) <= turns * (SLICE_SIZE + 10_000)
    except StopIteration as done:
        assert done.value == b"x" * 1_000_000
    assert turns >= 13
