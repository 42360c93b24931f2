"""Group B: IDENTIFY, its fields, their limits, and the reply."""

from __future__ import annotations

import json
import struct

import pytest

from tests.support import wait_until

REPLY_KEYS = [
    "max_rdy_count",
    "version",
    "max_msg_timeout",
    "msg_timeout",
    "tls_v1",
    "deflate",
    "deflate_level",
    "max_deflate_level",
    "snappy",
    "sample_rate",
    "auth_required",
    "output_buffer_size",
    "output_buffer_timeout",
    "topology_region",
    "topology_zone",
]


def accepts(broker, **fields) -> dict:
    with broker.connect() as connection:
        return connection.identify(**fields)


def refuses(broker, text: str, **fields) -> None:
    with broker.connect() as connection:
        connection.command("IDENTIFY", body=json.dumps(fields).encode())
        connection.expect_fatal(f"E_BAD_BODY IDENTIFY {text}")


def test_case_015_without_negotiation_the_reply_is_ok(broker):
    with broker.connect() as connection:
        connection.command("IDENTIFY", body=b"{}")
        connection.expect_ok()


def test_case_015_with_negotiation_the_reply_has_all_keys_in_order(broker):
    with broker.connect() as connection:
        connection.command("IDENTIFY", body=b'{"feature_negotiation":true}')
        data = connection.read_frame().data
    reply = json.loads(data)
    if broker.is_reference and len(reply) == 13:
        # NSQ 1.3.0 as released lacks the two topology keys that its later source has.
        reply |= dict.fromkeys(REPLY_KEYS[-2:], "")
    assert list(reply) == REPLY_KEYS
    assert b" " not in data and b"\n" not in data
    version = reply.pop("version")
    assert [part.isdigit() for part in version.split(".")] == [True, True, True]
    assert reply == {
        "max_rdy_count": 2500,
        "max_msg_timeout": 900_000,
        "msg_timeout": 60_000,
        "tls_v1": False,
        "deflate": False,
        "deflate_level": 6,
        "max_deflate_level": 6,
        "snappy": False,
        "sample_rate": 0,
        "auth_required": False,
        "output_buffer_size": 16_384,
        "output_buffer_timeout": 250,
        "topology_region": "",
        "topology_zone": "",
    }


def test_case_016_identify_may_be_repeated_before_sub(broker):
    with broker.connect() as connection:
        for timeout_ms in (1000, 2000, 3000):
            assert connection.identify(msg_timeout=timeout_ms)["msg_timeout"] == timeout_ms


def test_case_017_identify_after_sub_is_fatal(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command("IDENTIFY", body=b"{}")
        connection.expect_fatal("E_INVALID cannot IDENTIFY in current state")


def test_case_018_body_size_must_be_positive(broker):
    with broker.connect() as connection:
        connection.send(b"IDENTIFY\n" + struct.pack(">i", -1))
        connection.expect_fatal("E_BAD_BODY IDENTIFY invalid body size -1")


def test_case_018_body_size_is_limited_by_max_body_size(small_broker):
    with small_broker.connect() as connection:
        connection.command("IDENTIFY", body=b"{}".ljust(1000))
        connection.expect_ok()
    with small_broker.connect() as connection:
        connection.send(b"IDENTIFY\n" + struct.pack(">i", 1001))
        connection.expect_fatal("E_BAD_BODY IDENTIFY body too big 1001 > 1000")


@pytest.mark.parametrize("body", [b"[]", b'{"client_id":1}', b'{"heartbeat_interval":1e3}', b"{} x"])
def test_case_019_body_that_does_not_decode_is_refused(broker, body):
    with broker.connect() as connection:
        connection.command("IDENTIFY", body=body)
        connection.expect_fatal("E_BAD_BODY IDENTIFY failed to decode JSON body")


@pytest.mark.parametrize("body", [b"null", b' {"client_id":"\xff","sample_rate":null,"long_id":[{}]}\r\n'])
def test_case_020_lenient_forms_of_the_body_are_accepted(broker, body):
    with broker.connect() as connection:
        connection.command("IDENTIFY", body=body)
        connection.expect_ok()


def test_case_020_upper_case_keys_count_and_the_last_duplicate_wins(broker):
    with broker.connect() as connection:
        fields = b'"msg_timeout":1000,"MSG_TIMEOUT":2000,"sample_rate":5,"sample_rate":7'
        body = b'{"Feature_Negotiation":true,' + fields + b"}"
        connection.command("IDENTIFY", body=body)
        reply = json.loads(connection.read_frame().data)
    assert (reply["msg_timeout"], reply["sample_rate"]) == (2000, 7)


def test_case_021_heartbeat_interval_is_limited(broker):
    for interval in (0, 1000, 60_000):
        accepts(broker, heartbeat_interval=interval)
    for interval in (999, 60_001):
        refuses(broker, f"heartbeat interval ({interval}) is invalid", heartbeat_interval=interval)


def test_case_021_heartbeat_limit_follows_its_flag(small_broker):
    accepts(small_broker, heartbeat_interval=5000)
    refuses(small_broker, "heartbeat interval (5001) is invalid", heartbeat_interval=5001)


# Case 22 is in test_g_heartbeat.py: time has to pass.


def test_case_023_sub_without_heartbeats_is_refused(broker, topic, channel):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=-1)
        connection.command("SUB", topic, channel)
        connection.expect_fatal("E_INVALID cannot SUB with heartbeats disabled")


def test_case_024_output_buffer_size_is_limited(broker):
    for size in (-1, 0, 64, 65_536):
        accepts(broker, output_buffer_size=size)
    for size in (63, 65_537):
        refuses(broker, f"output buffer size ({size}) is invalid", output_buffer_size=size)


def test_case_025_output_buffer_timeout_is_limited(broker):
    for timeout_ms in (-1, 0, 25, 30_000):
        accepts(broker, output_buffer_timeout=timeout_ms)
    for timeout_ms in (24, 30_001):
        refuses(broker, f"output buffer timeout ({timeout_ms}) is invalid", output_buffer_timeout=timeout_ms)


def test_cases_024_and_025_buffer_limits_follow_their_flags(small_broker):
    accepts(small_broker, output_buffer_size=1024, output_buffer_timeout=1000)
    refuses(small_broker, "output buffer size (1025) is invalid", output_buffer_size=1025)
    refuses(small_broker, "output buffer timeout (1001) is invalid", output_buffer_timeout=1001)


def test_case_026_disabled_buffering_is_reported_as_size_1_and_timeout_0(broker):
    reply = accepts(broker, output_buffer_size=-1)
    assert (reply["output_buffer_size"], reply["output_buffer_timeout"]) == (1, 0)
    reply = accepts(broker, output_buffer_size=-1, output_buffer_timeout=100)
    assert (reply["output_buffer_size"], reply["output_buffer_timeout"]) == (1, 0)


def test_case_026_disabled_flush_timer_is_reported_as_timeout_0(broker):
    reply = accepts(broker, output_buffer_timeout=-1)
    assert (reply["output_buffer_size"], reply["output_buffer_timeout"]) == (16_384, 0)


def test_case_027_sample_rate_is_a_percentage(broker):
    for rate in (0, 1, 99):
        assert accepts(broker, sample_rate=rate)["sample_rate"] == rate
    for rate in (-1, 100):
        refuses(broker, f"sample rate ({rate}) is invalid", sample_rate=rate)


def test_case_028_msg_timeout_is_limited(broker):
    for asked, effective in ((0, 60_000), (1000, 1000), (900_000, 900_000)):
        assert accepts(broker, msg_timeout=asked)["msg_timeout"] == effective
    for timeout_ms in (-1, 999, 900_001):
        refuses(broker, f"msg timeout ({timeout_ms}) is invalid", msg_timeout=timeout_ms)


def test_case_028_msg_timeout_limit_follows_its_flag(small_broker):
    reply = accepts(small_broker, msg_timeout=1500)
    assert (reply["msg_timeout"], reply["max_msg_timeout"]) == (1500, 1500)
    refuses(small_broker, "msg timeout (1501) is invalid", msg_timeout=1501)


def test_case_028_default_msg_timeout_is_not_checked_against_its_limit(small_broker):
    assert accepts(small_broker)["msg_timeout"] == 60_000


def test_case_029_reply_shows_the_effective_values_of_this_client(broker):
    asked = {"msg_timeout": 1234, "sample_rate": 42, "output_buffer_size": 4096, "output_buffer_timeout": 100}
    reply = accepts(broker, **asked)
    assert {key: reply[key] for key in asked} == asked


def test_case_030_reply_shows_max_rdy_count(small_broker):
    assert accepts(small_broker)["max_rdy_count"] == 50


def test_case_031_deflate_level_is_clamped_and_reported(broker):
    for asked, level in ((-1, 6), (1, 1), (7, 6)):
        reply = accepts(broker, deflate=True, deflate_level=asked)
        # A server that will not deflate reports its default.
        assert reply["deflate_level"] == (level if reply["deflate"] else 6)
        assert reply["max_deflate_level"] == 6


def test_case_031_without_deflate_the_level_is_the_default_within_the_maximum(broker, small_broker):
    assert accepts(broker, deflate_level=2)["deflate_level"] == 6
    reply = accepts(small_broker, deflate_level=2)
    assert (reply["deflate_level"], reply["max_deflate_level"]) == (3, 3)


def test_case_032_both_compressions_at_once_are_refused(broker):
    with broker.connect() as connection:
        connection.command("IDENTIFY", body=b'{"feature_negotiation":true,"snappy":true,"deflate":true}')
        connection.expect_fatal("E_IDENTIFY_FAILED cannot enable both deflate and snappy compression")


def test_case_032_without_negotiation_compression_is_ignored(broker, topic):
    with broker.connect() as connection:
        connection.identify(feature_negotiation=False, snappy=True, deflate=True, tls_v1=True)
        connection.pub(topic, b"plain")


def test_case_032_switched_off_compressions_are_answered_false_and_stay_plain(shared_broker, topic):
    broker = shared_broker(snappy=False, deflate=False)
    with broker.connect() as connection:
        reply = connection.identify(snappy=True, deflate=True, deflate_level=3)
        assert (reply["snappy"], reply["deflate"], reply["deflate_level"]) == (False, False, 6)
        connection.pub(topic, b"plain")


def test_case_033_tls_without_a_certificate_is_declined_and_stays_plain(broker, topic):
    with broker.connect() as connection:
        assert connection.identify(tls_v1=True)["tls_v1"] is False
        connection.pub(topic, b"plain")


def test_case_034_identity_shows_in_stats(broker, topic, channel):
    with broker.connect() as connection:
        connection.identify(client_id="id-1", hostname="host.example", user_agent="agent/1.0", sample_rate=7)
        connection.sub(topic, channel)
        (client,) = broker.channel_stats(topic, channel)["clients"]
        assert client["client_id"] == "id-1"
        assert client["hostname"] == "host.example"
        assert client["user_agent"] == "agent/1.0"
        assert client["remote_address"] == connection.local_address
        assert client["sample_rate"] == 7
        assert (client["version"], client["state"]) == ("V2", 3)
        assert (client["tls"], client["snappy"], client["deflate"]) == (False, False, False)


def test_case_034_before_identify_the_ids_are_the_peer_address(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        (client,) = broker.channel_stats(topic, channel)["clients"]
        assert (client["client_id"], client["hostname"]) == ("127.0.0.1", "127.0.0.1")
        assert client["user_agent"] == ""


def test_case_034_after_an_empty_identify_the_ids_are_empty(broker, topic, channel):
    with broker.connect() as connection:
        connection.identify()
        connection.sub(topic, channel)
        (client,) = broker.channel_stats(topic, channel)["clients"]
        assert (client["client_id"], client["hostname"]) == ("", "")


def test_case_034_publishers_show_in_stats_with_what_they_published(broker, topic):
    with broker.connect() as connection:
        connection.identify(client_id="publisher")
        connection.pub(topic, b"one")
        connection.mpub(topic, [b"two", b"three"])

        def found():
            producers = broker.stats(topic)["producers"] or []
            return [one for one in producers if one["remote_address"] == connection.local_address]

        (producer,) = wait_until(found)
        assert producer["client_id"] == "publisher"
        assert producer["pub_counts"] == [{"topic": topic, "count": 3}]


def test_case_035_first_bad_field_decides_the_error(broker):
    bad = {
        "heartbeat_interval": (1, "heartbeat interval (1) is invalid"),
        "output_buffer_timeout": (2, "output buffer timeout (2) is invalid"),
        "output_buffer_size": (3, "output buffer size (3) is invalid"),
        "sample_rate": (100, "sample rate (100) is invalid"),
        "msg_timeout": (5, "msg timeout (5) is invalid"),
    }
    fields = {name: value for name, (value, _) in reversed(bad.items())}
    for name, (_, text) in bad.items():
        refuses(broker, text, **fields)
        del fields[name]


def test_case_035_bad_field_is_reported_before_clashing_compressions(broker):
    refuses(
        broker,
        "msg timeout (5) is invalid",
        msg_timeout=5,
        snappy=True,
        deflate=True,
        feature_negotiation=True,
    )
