"""The codec of header blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.headers import MAX_BLOCK, decode_headers, encode_headers, with_lazy_headers
from tests.wire.harness import both_builds, using

NAMES = st.text("abcz019-_.", min_size=1, max_size=20)
HEADERS = st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=5)


@both_builds
@given(HEADERS)
def test_headers_are_decoded_as_they_were_encoded(build: str, headers: dict[str, str]) -> None:
    with using(build):
        block = encode_headers(headers)
        assert decode_headers(block) == decode_headers(memoryview(block)) == headers
        assert len(block) == sum(3 + len(name) + len(value.encode()) for name, value in headers.items())


@both_builds
def test_the_block_is_that_of_the_specification(build: str) -> None:
    with using(build):
        assert encode_headers({"Tenant": "\xfc", "k": ""}) == b"\x06tenant\x00\x02\xc3\xbc\x01k\x00\x00"


@both_builds
@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"": "x"}, "not a header name: ''"),
        ({"a b": "x"}, "not a header name: 'a b'"),
        ({"\xfc": "x"}, "not a header name"),
        ({"n" * 256: "x"}, "not a header name"),
        ({"K": "1", "k": "2"}, "the header 'k' occurs twice"),
        ({"k": 5}, "the header 'k' is a int, not a text"),
        ({"k": "\ud800"}, "surrogates not allowed"),
        ({"k": "v" * (MAX_BLOCK - 3)}, "must not exceed 65535 bytes"),
        ({"k": "v" * (MAX_BLOCK + 1)}, "must not exceed 65535 bytes"),
    ],
)
def test_bad_headers_are_refused(build: str, headers: dict[str, str], text: str) -> None:
    with using(build):
        with pytest.raises((ValueError, TypeError), match=text):
            encode_headers(headers)


@both_builds
def test_the_largest_block_is_not_refused(build: str) -> None:
    with using(build):
        assert len(encode_headers({"k": "v" * (MAX_BLOCK - 4)})) == MAX_BLOCK


@both_builds
@given(st.binary(max_size=30))
def test_any_bytes_are_headers_or_refused(build: str, block: bytes) -> None:
    with using(build):
        try:
            headers = decode_headers(block)
        except ValueError:
            return
        assert encode_headers(headers) == block


@both_builds
@pytest.mark.parametrize(
    "block",
    [
        b"\x01",
        b"\x01k\x00",
        b"\x01k\x00\x02v",
        b"\x00\x00\x00",
        b"\x01K\x00\x00",
        b"\x01k\x00\x00" * 2,
        b"\x01k\x00\x01\xff",
        b"\x01\xff\x00\x00",
    ],
)
def test_bad_blocks_are_refused(build: str, block: bytes) -> None:
    with using(build):
        with pytest.raises(ValueError, match="header"):
            decode_headers(block)


def holder(block: bytes) -> Any:
    """Its class has lazy headers as the present build makes them."""

    @with_lazy_headers
    class Holder:
        __slots__ = ("_headers",)

    made: Any = Holder()
    made._headers = block
    return made


@both_builds
def test_headers_are_decoded_once_when_somebody_asks(build: str) -> None:
    with using(build):
        held = holder(encode_headers({"k": "\xfc", "tenant": "acme"}))
        assert isinstance(held._headers, bytes)
        found = held.headers
        assert found == {"k": "\xfc", "tenant": "acme"}
        assert held.headers is found and held._headers is found
        assert holder(b"").headers == {}


@both_builds
def test_messages_that_share_a_block_do_not_share_their_headers(build: str) -> None:
    with using(build):
        block = encode_headers({"k": "\xfc", "tenant": "acme"})
        for _ in range(5):
            headers = holder(block).headers
            assert headers == {"k": "\xfc", "tenant": "acme"}
            headers["tenant"] = "changed"
            del headers["k"]


@both_builds
@given(st.lists(st.sampled_from(["", "a", "b", "\xfc", "ab", "v" * 32, "w" * 32, "v" * 33, "w" * 33])))
def test_a_value_does_not_depend_on_those_that_the_name_had_before(build: str, values: list[str]) -> None:
    with using(build):
        for value in values:
            assert decode_headers(encode_headers({"tenant": value})) == {"tenant": value}


@both_builds
def test_a_bad_block_is_refused_each_time_somebody_asks(build: str) -> None:
    with using(build):
        held = holder(b"\x01K\x00\x00")
        for _ in range(2):
            with pytest.raises(ValueError, match="bad header at byte 0"):
                held.headers  # noqa: B018  # it raises
        del held._headers
        with pytest.raises(AttributeError):
            held.headers  # noqa: B018  # it raises
