"""Addresses of daemons. tests/server/test_daemon.py has the usual ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from nsparq.addresses import join_address, remove_stale_socket, split_address


@pytest.mark.parametrize(
    "address", ["host:", "host:²", "host:４１５０", "host:-1", "host:+1", "host: 1", "host:1x", ""]
)
def test_a_port_is_made_of_digits(address: str) -> None:
    assert split_address(address) is None


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("::1", 65535), ("", 0), ("host.example", 4150)])
def test_join_address_and_split_address_are_inverse(address: tuple[str, int]) -> None:
    assert split_address(join_address(*address)) == address


def test_only_a_socket_is_removed(tmp_path: Path) -> None:
    stale, file, nothing = tmp_path / "stale.sock", tmp_path / "file", tmp_path / "nothing"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    file.write_text("precious")
    for path in (stale, file, nothing, tmp_path):
        remove_stale_socket(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
