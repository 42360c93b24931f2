"""JSON objects as Go's decoder takes them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.wire.go_json import BOOL, INT32, INT64, STRING, decode_object

KINDS = {"name": STRING, "port": INT64, "rate": INT32, "on": BOOL}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", {}),
        (b"null", {}),
        (b' {"name":"x","port":1,"rate":2,"on":true} ', {"name": "x", "port": 1, "rate": 2, "on": True}),
        (b'{"NAME":"x","Port":1}', {"name": "x", "port": 1}),
        (b'{"name":"first","Name":"last"}', {"name": "last"}),
        (b'{"name":"first","Name":null}', {"name": "first"}),
        (b'{"name":null,"port":null}', {}),
        (b'{"na-me":1," name":1,"name ":1,"":1}', {}),
        (b'{"other":[1,{"name":"y"}],"more":1.5}', {}),
        (b'{"other":%s}' % (b"9" * 10_000), {}),
        (b'{"other":' + b"[" * 200 + b"]" * 200 + b"}", {}),
        (b'{"port":-9223372036854775808,"rate":-0}', {"port": -(2**63), "rate": 0}),
        (b'{"port":9223372036854775807,"rate":2147483647}', {"port": 2**63 - 1, "rate": 2**31 - 1}),
        (b'{"name":"\\ud800x"}', {"name": "\ufffdx"}),
        (b'{"name":"\\udc00\\ud800\\u0041"}', {"name": "\ufffd\ufffdA"}),
        (b'{"name":"\\ud83d\\ude00\\u0000"}', {"name": "\U0001f600\x00"}),
        (b'{"name":"caf\xc3\xa9 a\xc3b\xff"}', {"name": "café a\ufffdb\ufffd"}),
    ],
)
def test_known_fields_are_taken_and_the_rest_ignored(body: bytes, expected: dict[str, Any]) -> None:
    assert decode_object(body, KINDS) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b'"name"',
        b"{",
        b"{} {}",
        b"{}\x00",
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"name":"\t"}',
        b'{"name":1}',
        b'{"name":1,"name":"x"}',
        b'{"port":"1"}',
        b'{"port":1.0}',
        b'{"port":1e3}',
        b'{"port":true}',
        b'{"on":1}',
        b'{"port":9223372036854775808}',
        b'{"port":-9223372036854775809}',
        b'{"rate":2147483648}',
        b'{"port":%s}' % (b"9" * 10_000),
        b'{"other":NaN}',
        b'{"other":-Infinity}',
        b"[" * 100_000,
        b'{"name":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
def test_a_value_of_the_wrong_type_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        decode_object(body, KINDS)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_a_value_error(body: bytes) -> None:
    try:
        assert decode_object(body, KINDS).keys() <= KINDS.keys()
    except ValueError:
        pass
