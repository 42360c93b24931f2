"""Which servers get the auth secret."""

from __future__ import annotations

import pytest

from nsparq.client.config import Config
from nsparq.client.connect.secret import reason_to_withhold


@pytest.mark.parametrize(
    ("address", "host", "is_encrypted", "scope", "may_get_it"),
    [
        ("evil.example", "evil.example", False, "10.0.0.0/8", False),
        ("evil.example:", "evil.example", False, "10.0.0.0/8", False),
        ("[2001:db8::1]", "2001:db8::1", False, "10.0.0.0/8", False),
        ("10.0.0.1@evil.example", "evil.example", False, "10.0.0.0/8", False),
        ("", "", False, "10.0.0.0/8", False),
        ("10.0.0.5", "10.0.0.5", False, "10.0.0.0/8", True),
        ("10.0.0.5", "10.0.0.5", False, "10.0.0.5:80", True),
        ("10.0.0.5", "10.0.0.5", False, "10.0.0.5:443", False),
        ("10.0.0.5", "10.0.0.5", True, "10.0.0.5:443", True),
        ("10.0.0.5", "10.0.0.5", True, "10.0.0.5:80", False),
        ("[fd00::1]", "fd00::1", False, "fd00::/8", True),
        ("nsqd-1.nsq.example", "nsqd-1.nsq.example", False, "*.nsq.example", True),
        ("/run/nsqd.sock", "", False, "10.0.0.0/8", True),
        ("evil.example", "evil.example", False, "*", True),
    ],
)
def test_an_address_without_a_port_has_that_of_its_scheme(
    address: str, host: str, is_encrypted: bool, scope: str, may_get_it: bool
) -> None:
    config = Config(auth_secret_for=(scope,))
    reason = reason_to_withhold(config, address, host, is_encrypted=is_encrypted)
    assert reason == ("" if may_get_it else "auth_secret_for does not include it")
