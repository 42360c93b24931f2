from __future__ import annotations

import pytest

from nsparq.secret_scope import SecretScope


@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        ("*", ["anything:1", "10.1.2.3:4151", "::1:9"], []),
        ("10.1.0.0/16", ["10.1.2.3:1", "::ffff:10.1.2.3:1"], ["10.2.0.1:1", "10.1.2.3.evil.test:1"]),
        ("fd00::/8", ["fd12::1:80"], ["fe80::1:80", "10.0.0.1:80"]),
        ("10.1.2.3", ["10.1.2.3:4151", "10.1.2.3:1"], ["10.1.2.30:4151", "x.10.1.2.3:1"]),
        ("10.1.2.3:4151", ["10.1.2.3:4151"], ["10.1.2.3:4152"]),
        ("[::1]:4151", ["::1:4151"], ["::1:1"]),
        ("::1", ["::1:4151"], ["::2:4151"]),
        ("nsqd-1", ["nsqd-1:1", "NSQD-1:1", "nsqd-1.:1"], ["nsqd-1.evil.test:1", "nsqd-11:1"]),
        ("*.nsq.local", ["a.nsq.local:1"], ["nsq.local:1", "a.b.nsq.local:1", "a.nsq.local.evil.test:1"]),
        ("nsqd-*:4151", ["nsqd-7:4151"], ["nsqd-7:1", "nsqd-7.evil.test:4151"]),
    ],
)
def test_a_pattern_covers_the_addresses_it_matches(
    pattern: str, covered: list[str], not_covered: list[str]
) -> None:
    scope = SecretScope([pattern])
    for expected, addresses in ((True, covered), (False, not_covered)):
        for address in addresses:
            host, _, port = address.rpartition(":")
            assert scope.covers(host, int(port)) is expected, address


def test_an_empty_scope_covers_nothing() -> None:
    assert not SecretScope([]).covers("127.0.0.1", 4151)


@pytest.mark.parametrize("pattern", ["", "10.0.0.0/99", "a..b", "http://x", "x y", "(a|b)", "a@b", "host:x"])
def test_an_invalid_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a "):
        SecretScope([pattern])
