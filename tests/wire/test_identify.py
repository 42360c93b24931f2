"""IDENTIFY: the fields of its body, the order of their checks, the effective values, and the
reply."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nsparq.errors import FatalClientError
from nsparq.wire.identify import Identity, decode_identify, default_identity
from nsparq.wire.limits import Limits

LIMITS = Limits()
UNDECODABLE = "E_BAD_BODY IDENTIFY failed to decode JSON body"


def identify(limits: Limits = LIMITS, /, **fields: Any) -> Identity:
    return decode_identify(json.dumps(fields).encode(), limits)


def refusal(body: bytes | dict[str, Any], limits: Limits = LIMITS) -> str:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(FatalClientError) as caught:
        decode_identify(raw, limits)
    return str(caught.value)


# The body: test_go_json.py has the rules of its JSON


@pytest.mark.parametrize("body", [b"{}", b"null", b'{"long_id":1}'])
def test_a_body_without_fields_means_all_defaults(body: bytes) -> None:
    assert decode_identify(body, LIMITS) == Identity()


def test_a_body_that_is_not_one_json_object_is_refused() -> None:
    assert refusal(b"[]") == UNDECODABLE


TEXTS = ("client_id", "hostname", "user_agent", "topology_region", "topology_zone")
SWITCHES = ("feature_negotiation", "tls_v1", "snappy", "deflate", "observe")


@pytest.mark.parametrize(("names", "wrong"), [(TEXTS, 1), (SWITCHES, 1)])
def test_a_value_of_the_wrong_type_is_refused(names: tuple[str, ...], wrong: object) -> None:
    for name in names:
        assert refusal({name: wrong}) == UNDECODABLE


@pytest.mark.parametrize(
    ("field", "bits"),
    [
        ("heartbeat_interval", 64),
        ("output_buffer_size", 64),
        ("output_buffer_timeout", 64),
        ("deflate_level", 64),
        ("msg_timeout", 64),
        ("sample_rate", 32),
    ],
)
def test_an_integer_beyond_its_field_does_not_decode(field: str, bits: int) -> None:
    assert refusal({field: 1 << (bits - 1)}) == UNDECODABLE
    largest = {field: (1 << (bits - 1)) - 1}
    if field == "deflate_level":
        identify(**largest)
    else:
        assert "is invalid" in refusal(largest)


# Fields


def test_texts_are_taken_as_they_are() -> None:
    identity = identify(**{name: f"{name} 日本" for name in TEXTS})
    assert [getattr(identity, name) for name in TEXTS] == [f"{name} 日本" for name in TEXTS]


TIGHT = Limits(
    msg_timeout_ms=5_000,
    max_msg_timeout_ms=7_000,
    max_heartbeat_interval_ms=2_000,
    max_output_buffer_size=128,
    output_buffer_timeout_ms=60,
    min_output_buffer_timeout_ms=50,
    max_output_buffer_timeout_ms=100,
)
# field, its attribute, the limits, wanted and effective values, refused values
NUMBERS = [
    (
        "heartbeat_interval",
        "heartbeat_ms",
        LIMITS,
        {0: 30_000, -1: 0, 1000: 1000, 60_000: 60_000},
        [-2, 1, 999, 60_001],
    ),
    (
        "heartbeat_interval",
        "heartbeat_ms",
        TIGHT,
        {0: 30_000, -1: 0, 1000: 1000, 2000: 2000},
        [999, 2001, 30_000],
    ),
    (
        "output_buffer_timeout",
        "output_buffer_timeout_ms",
        LIMITS,
        {0: 250, -1: 0, 25: 25, 30_000: 30_000},
        [-2, 1, 24, 30_001],
    ),
    ("output_buffer_timeout", "output_buffer_timeout_ms", TIGHT, {0: 60, -1: 0, 50: 50, 100: 100}, [49, 101]),
    (
        "output_buffer_size",
        "output_buffer_size",
        LIMITS,
        {0: 16_384, -1: 1, 64: 64, 65_536: 65_536},
        [-2, 1, 63, 65_537],
    ),
    ("output_buffer_size", "output_buffer_size", TIGHT, {0: 16_384, -1: 1, 64: 64, 128: 128}, [63, 129]),
    ("sample_rate", "sample_rate", LIMITS, {0: 0, 1: 1, 99: 99}, [-1, 100, 101]),
    (
        "msg_timeout",
        "msg_timeout_ms",
        LIMITS,
        {0: 60_000, 1000: 1000, 900_000: 900_000},
        [-1, 1, 999, 900_001],
    ),
    ("msg_timeout", "msg_timeout_ms", TIGHT, {0: 5_000, 1000: 1000, 7_000: 7_000}, [999, 7_001]),
]


@pytest.mark.parametrize(("field", "attribute", "limits", "granted", "refused"), NUMBERS)
def test_a_number_within_the_limits_is_granted_and_zero_is_the_default(
    field: str, attribute: str, limits: Limits, granted: dict[int, int], refused: list[int]
) -> None:
    assert {wanted: getattr(identify(limits, **{field: wanted}), attribute) for wanted in granted} == granted
    assert getattr(identify(limits), attribute) == granted[0]
    name = field.replace("_", " ")
    for wanted in refused:
        assert refusal({field: wanted}, limits) == f"E_BAD_BODY IDENTIFY {name} ({wanted}) is invalid"


def test_no_output_buffer_also_means_no_timeout() -> None:
    identity = identify(output_buffer_size=-1, output_buffer_timeout=1000)
    assert (identity.output_buffer_size, identity.output_buffer_timeout_ms) == (1, 0)
    assert identify(output_buffer_size=-1).output_buffer_timeout_ms == 0


def test_the_timeout_is_checked_even_if_it_is_not_used() -> None:
    assert "output buffer timeout (1)" in refusal({"output_buffer_size": -1, "output_buffer_timeout": 1})


def test_the_first_bad_field_in_nsq_s_order_decides() -> None:
    fields = {
        "feature_negotiation": True,
        "snappy": True,
        "deflate": True,
        "msg_timeout": 1,
        "sample_rate": 100,
        "output_buffer_size": 1,
        "output_buffer_timeout": 1,
        "heartbeat_interval": 1,
    }
    order = [
        "heartbeat_interval",
        "output_buffer_timeout",
        "output_buffer_size",
        "sample_rate",
        "msg_timeout",
    ]
    for field in order:
        assert f"IDENTIFY {field.replace('_', ' ')} (" in refusal(fields)
        del fields[field]
    assert refusal(fields).startswith("E_IDENTIFY_FAILED ")


# Negotiation

OFFERING = Limits(tls_available=True)


@pytest.mark.parametrize(
    ("asked", "attribute", "condition"),
    [
        ("tls_v1", "tls", "tls_available"),
        ("snappy", "snappy", "snappy_allowed"),
        ("deflate", "deflate", "deflate_allowed"),
    ],
)
def test_a_layer_needs_the_clients_wish_negotiation_and_the_servers_offer(
    asked: str, attribute: str, condition: str
) -> None:
    fields = {asked: True}
    assert getattr(identify(OFFERING, feature_negotiation=True, **fields), attribute)
    assert not getattr(identify(OFFERING, **fields), attribute)
    assert not getattr(identify(OFFERING, feature_negotiation=True, **{asked: False}), attribute)
    declining = replace(OFFERING, **{condition: False})
    assert not getattr(identify(declining, feature_negotiation=True, **fields), attribute)


BOTH = {"feature_negotiation": True, "deflate": True, "snappy": True}


def test_both_compressions_at_once_are_refused() -> None:
    assert refusal(BOTH) == "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"


def test_both_compressions_are_no_conflict_if_only_one_is_allowed() -> None:
    identity = identify(replace(OFFERING, snappy_allowed=False), **BOTH)
    assert (identity.deflate, identity.snappy) == (True, False)
    identity = identify(replace(OFFERING, deflate_allowed=False), **BOTH)
    assert (identity.deflate, identity.snappy) == (False, True)
    identity = identify(replace(OFFERING, deflate_allowed=False, snappy_allowed=False), **BOTH)
    assert (identity.deflate, identity.snappy) == (False, False)


@pytest.mark.parametrize(
    ("wanted", "maximum", "level"), [(-1, 6, 6), (0, 9, 6), (1, 6, 1), (7, 6, 6), (9, 9, 9), (0, 3, 3)]
)
def test_the_deflate_level_is_clamped_without_an_error(wanted: int, maximum: int, level: int) -> None:
    limits = replace(OFFERING, max_deflate_level=maximum)
    identity = identify(limits, feature_negotiation=True, deflate=True, deflate_level=wanted)
    assert identity.deflate_level == level


@pytest.mark.parametrize(("maximum", "level"), [(9, 6), (3, 3)])
def test_without_deflate_the_level_is_the_default_within_the_maximum(maximum: int, level: int) -> None:
    limits = replace(OFFERING, max_deflate_level=maximum)
    assert identify(limits, feature_negotiation=True, deflate_level=2).deflate_level == level
    declining = replace(limits, deflate_allowed=False)
    identity = identify(declining, feature_negotiation=True, deflate=True, deflate_level=2)
    assert (identity.deflate, identity.deflate_level) == (False, level)


# The reply


def test_without_negotiation_the_reply_is_ok() -> None:
    assert identify().reply(LIMITS) == b"OK"
    assert identify(feature_negotiation=False, msg_timeout=1000).reply(LIMITS) == b"OK"


def test_with_negotiation_the_reply_is_one_json_object_with_keys_in_nsq_s_order() -> None:
    assert identify(feature_negotiation=True).reply(LIMITS) == (
        b'{"max_rdy_count":2500,"version":"1.3.0","max_msg_timeout":900000,"msg_timeout":60000,"tls_v1":false,'
        b'"deflate":false,"deflate_level":6,"max_deflate_level":6,"snappy":false,"sample_rate":0,'
        b'"auth_required":false,"output_buffer_size":16384,"output_buffer_timeout":250,'
        b'"topology_region":"","topology_zone":""}'
    )


def test_an_observer_is_told_that_it_is_one_and_nobody_else_sees_the_key() -> None:
    assert json.loads(identify(feature_negotiation=True, observe=True).reply(LIMITS))["observe"] is True
    assert not identify(observe=True).observe


def test_the_reply_holds_the_client_s_values_and_the_server_s_limits() -> None:
    limits = Limits(
        version="9.9",
        max_rdy_count=7,
        max_msg_timeout_ms=8_000,
        max_deflate_level=4,
        topology_region="r\u00e9",
        topology_zone="z",
        auth_required=True,
        tls_available=True,
    )
    identity = identify(
        limits,
        feature_negotiation=True,
        tls_v1=True,
        deflate=True,
        deflate_level=9,
        sample_rate=50,
        msg_timeout=2_000,
        output_buffer_size=-1,
        topology_region="mine",
        topology_zone="too",
    )
    assert json.loads(identity.reply(limits)) == {
        "max_rdy_count": 7,
        "version": "9.9",
        "max_msg_timeout": 8_000,
        "msg_timeout": 2_000,
        "tls_v1": True,
        "deflate": True,
        "deflate_level": 4,
        "max_deflate_level": 4,
        "snappy": False,
        "sample_rate": 50,
        "auth_required": True,
        "output_buffer_size": 1,
        "output_buffer_timeout": 0,
        "topology_region": "r\u00e9",
        "topology_zone": "z",
    }


def test_a_client_that_never_identified_has_the_defaults_and_its_address() -> None:
    identity = default_identity(TIGHT, "10.0.0.1")
    assert identity == Identity(
        client_id="10.0.0.1", hostname="10.0.0.1", output_buffer_timeout_ms=60, msg_timeout_ms=5_000
    )
    assert (identity.heartbeat_ms, identity.output_buffer_size) == (30_000, 16_384)


def test_a_second_identify_keeps_the_times_and_sizes_it_does_not_name() -> None:
    first = decode_identify(b'{"heartbeat_interval":-1,"msg_timeout":2000,"output_buffer_size":64}', LIMITS)
    second = decode_identify(b'{"client_id":"a","sample_rate":5}', LIMITS, first)
    assert (second.heartbeat_ms, second.msg_timeout_ms, second.output_buffer_size) == (0, 2000, 64)
    assert (second.client_id, second.sample_rate) == ("a", 5)
