"""The filter of the messages page, and the reasons of dead letters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nsparq.admin.collect.browse import by_reason
from nsparq.admin.collect.filter import BadFilter, Filter
from nsparq.admin.collect.messages import ShownMessage


def message(body: bytes, **more: Any) -> ShownMessage:
    about = {"node": "n:1", "id": "00ff", "sequence": 1, "timestamp_ns": 5, "attempts": 2, "state": "ready"}
    return ShownMessage(**{**about, "size": len(body), "body": body, **more})


def letter(error: str, inner: str = '{"order": 17}', **more: Any) -> ShownMessage:
    said = {"topic": "orders", "channel": "billing", "id": "1", "attempts": 5, "error": error}
    return message(json.dumps({**said, "text": inner, "base64": None}).encode(), **more)


ORDER = message(
    b'{"id": 17, "price": 2.5, "paid": true, "note": null, "name": "Green Tea", "a.b": 1,'
    b' "customer": {"id": "c-9"}, "items": [{"name": "milk"}, 7]}'
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tea",
        '"green tea"',
        "00FF",
        "id=17",
        "id=17.0",
        "id!=18",
        "price>2 price<=2.5",
        "price<3 price>=2.5 tea",
        "paid=true",
        "note=null",
        "name~tea",
        'name="Green Tea"',
        "customer.id=c-9",
        "items.0.name=milk items.1=7",
        "a.b=1",
        "missing!=1",
        "@attempts=2 @size>10 @node=n:1 @state=ready @id~ff",
    ],
)
def test_a_filter_matches(text: str) -> None:
    assert Filter(text).matches(ORDER)


@pytest.mark.parametrize(
    ("text", "is_match"),
    [
        ("@header.tenant=acme", True),
        ("@header.Tenant~ACM", True),
        ("@header.retries>2 @header.retries<=3", True),
        ("@header.missing!=x", True),
        ("@header.tenant~", True),
        ("@header.missing~", False),
        ("@header.tenant>2", False),
        ("@header.tenant!=acme", False),
        ("@header.origin=mail", True),
    ],
)
def test_a_filter_looks_at_headers(text: str, is_match: bool) -> None:
    headers = {"tenant": "acme", "retries": "3"}
    own = {"origin": "mail"}
    assert Filter(text).matches(message(b"x", headers=headers | own)) is is_match
    inside = json.dumps({"topic": "orders", "error": "x", "text": "x", "headers": headers}).encode()
    assert Filter(text).matches(message(inside, headers=own)) is is_match


@pytest.mark.parametrize(
    "text",
    [
        "coffee",
        "tea coffee",
        "id=18",
        "id!=17",
        "price>2.5",
        "paid=1",
        "paid>0",
        "name>1",
        "name=Green",
        "missing=null",
        "items.9=1",
        "items.x=1",
        "@attempts>2",
        "@reason=x",
    ],
)
def test_a_filter_does_not_match(text: str) -> None:
    assert not Filter(text).matches(ORDER)


@pytest.mark.parametrize("text", ["price>tea", "@nothing=1", '"open', '{"a": 1}', "x" * 1001])
def test_a_bad_filter_is_refused(text: str) -> None:
    with pytest.raises(BadFilter):
        Filter(text)


def test_the_fields_of_a_dead_letter_are_those_inside_and_its_own() -> None:
    one = letter("ValueError: bad amount")
    for text in ("order=17", "channel=billing", "error~amount", "@attempts=5", '"bad amount"'):
        assert Filter(text).matches(one), text
    assert Filter('@reason="ValueError: bad amount"').matches(one)
    assert not Filter("order=18").matches(one)


def test_whole_numbers_are_compared_exactly_however_large() -> None:
    large = message(b'{"id": 9007199254740993, "huge": 1%s}' % (b"0" * 400))
    assert Filter("id=9007199254740993").matches(large)
    assert not Filter("id=9007199254740992").matches(large)
    assert not Filter("huge=1").matches(large)
    assert Filter(f"huge=1{'0' * 400}").matches(large)
    assert Filter("huge>1").matches(large)


def test_a_binary_body_has_text_and_no_fields() -> None:
    one = message(b"\xff\x00tea")
    assert Filter("tea").matches(one) and not Filter("a=1").matches(one)
    assert one.preview == "ff 00 74 65 61"


def test_reasons_that_differ_by_numbers_and_ids_are_one() -> None:
    errors = [
        "Timeout: 17 ms\nTraceback …",
        "Timeout: 18 ms",
        "no user 5f0c1a52-9c1b-4c5e-8f6a-0123456789ab",
        "no user 6f0c1a52-9c1b-4c5e-8f6a-0123456789ab",
        "no user 00ff00ff00ff00ff",
    ]
    found = by_reason([message(b"{}")] + [letter(e, timestamp_ns=n + 1) for n, e in enumerate(errors)])
    assert [(one.text, one.count, one.first_ns, one.last_ns) for one in found] == [
        ("no user #", 3, 3, 5),
        ("Timeout: # ms", 2, 1, 2),
    ]
