"""The options of a client: names, values and limits."""

from __future__ import annotations

import importlib.util
import math
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsparq.client.config import Config, ConfigError, milliseconds
from tests.support.certificates import certificates


def option(*texts: str) -> Config:
    return Config.from_strings(texts)


# Names and values as text


def test_dashes_and_underscores_are_the_same() -> None:
    assert option("max-in-flight,5") == option("max_in_flight,5") == Config(max_in_flight=5)


def test_without_a_comma_the_value_is_true() -> None:
    assert option("snappy").snappy is True
    assert option("tls-v1", "tls-insecure-skip-verify").tls_insecure_skip_verify is True


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("false", False), ("0", False), ("T", True), ("F", False)],
)
def test_booleans_are_read_as_in_the_reference(text: str, value: bool) -> None:
    assert option(f"tls_v1,{text}").tls_v1 is value


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("1.5s", 1.5), ("2m", 120.0), ("250", 0.25), ("90000", 90.0)]
)
def test_a_duration_has_a_unit_or_is_milliseconds(text: str, seconds: float) -> None:
    assert option(f"write_timeout,{text}").write_timeout == seconds


@pytest.mark.parametrize("text", ["-1", "-1ms", "-1ns", "-5s"])
def test_a_negative_heartbeat_interval_is_sent_as_minus_one(text: str) -> None:
    assert option(f"heartbeat_interval,{text}").identify()["heartbeat_interval"] == -1


def test_texts_override_keyword_arguments() -> None:
    config = Config.from_strings(["max_attempts,2"], max_attempts=9, user_agent="mine")
    assert (config.max_attempts, config.user_agent) == (2, "mine")


def test_blanks_around_name_and_value_do_not_matter() -> None:
    assert option(" max_attempts , 3 ").max_attempts == 3


def test_a_value_may_contain_commas() -> None:
    assert option("user_agent,a, b,c").user_agent == "a, b,c"


@pytest.mark.parametrize("name", ["not_a_real_config_value", "tls_config", "discovery_filter", ""])
def test_an_unknown_option_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"invalid option {name}"):
        option(f"{name},1")


@pytest.mark.parametrize(
    "text",
    ["tls_v1,lol", "read_timeout,soon", "max_in_flight,many", "lookupd_poll_jitter,x", "read_timeout,"],
)
def test_a_value_that_cannot_be_read_is_named(text: str) -> None:
    name, _, value = text.partition(",")
    with pytest.raises(ConfigError, match=f"invalid value '{value}' of option {name}"):
        option(text)


def test_an_error_of_the_configuration_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_the_reference_s_name_for_authorization_at_nsqlookupd_is_known() -> None:
    """In the reference client, too, true means that the secret is sent."""
    assert option("skip_lookupd_authorization,true").lookupd_authorization is True
    assert option("skip-lookupd-authorization,0").lookupd_authorization is False


# Limits

LIMITS: list[tuple[str, float, float]] = [
    ("read_timeout", 0.1, 300),
    ("write_timeout", 0.1, 300),
    ("lookupd_poll_interval", 0.01, 300),
    ("lookupd_poll_jitter", 0, 1),
    ("max_requeue_delay", 0, 3600),
    ("default_requeue_delay", 0, 3600),
    ("max_backoff_duration", 0, 3600),
    ("backoff_multiplier", 0, 3600),
    ("max_attempts", 0, 65535),
    ("low_rdy_idle_timeout", 1, 300),
    ("low_rdy_timeout", 1, 300),
    ("rdy_redistribute_interval", 0.001, 5),
    ("sample_rate", 0, 99),
    ("deflate_level", 1, 9),
    ("max_in_flight", 0, math.inf),
    ("msg_timeout", 0, math.inf),
    ("max_msg_size", 0, math.inf),
]


@pytest.mark.parametrize(("name", "low", "high"), LIMITS)
def test_values_within_the_limits_of_the_reference_are_taken_others_are_not(
    name: str, low: float, high: float
) -> None:
    # A heartbeat may not be longer than the read timeout.
    rest: dict[str, Any] = {"heartbeat_interval": 0.1}
    good, bad = [low], [low - 1e-6 if isinstance(low, float) else low - 1]
    if high < math.inf:
        good.append(high)
        bad.append(high + 1)
    for value in good:
        assert getattr(Config(**{**rest, name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError, match=f"invalid {name}: "):
            Config(**{**rest, name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_numbers_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="invalid dial_timeout"):
        Config(dial_timeout=value)


def test_the_defaults_are_those_of_the_reference() -> None:
    config = Config()
    expected = {
        "dial_timeout": 1,
        "read_timeout": 60,
        "write_timeout": 1,
        "lookupd_poll_interval": 60,
        "lookupd_poll_jitter": 0.3,
        "max_requeue_delay": 900,
        "default_requeue_delay": 90,
        "backoff_strategy": "exponential",
        "max_backoff_duration": 120,
        "backoff_multiplier": 1,
        "max_attempts": 5,
        "low_rdy_idle_timeout": 10,
        "low_rdy_timeout": 30,
        "rdy_redistribute_interval": 5,
        "heartbeat_interval": 30,
        "deflate_level": 6,
        "output_buffer_size": 16384,
        "output_buffer_timeout": 0.25,
        "msg_timeout": 0,
        "lookupd_authorization": True,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_heartbeat_may_not_be_longer_than_the_read_timeout() -> None:
    Config(heartbeat_interval=5, read_timeout=5)
    with pytest.raises(ConfigError, match="heartbeat_interval must not be longer than read_timeout"):
        Config(heartbeat_interval=5.001, read_timeout=5)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"backoff_strategy": "linear"}, "unknown backoff_strategy 'linear'"),
        ({"tls_min_version": "ssl3.0"}, "unknown tls_min_version 'ssl3.0'"),
        ({"tls_cert": "c.pem"}, "tls_cert and tls_key must be given together"),
        ({"tls_key": "c.key"}, "tls_cert and tls_key must be given together"),
        ({"deflate": True, "snappy": True}, "exclude each other"),
        ({"local_addr": "127.0.0.1"}, "local_addr is not host:port"),
    ],
)
def test_contradicting_options_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Config(**values)


def test_a_copy_is_checked_too() -> None:
    with pytest.raises(ConfigError):
        replace(Config(), read_timeout=1000)


def test_snappy_without_its_packages_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="snappy needs the packages cramjam and crc32c"):
        Config(snappy=True)
    Config(deflate=True)


def test_the_secret_is_not_shown() -> None:
    assert "xyzzy" not in repr(Config(auth_secret="xyzzy"))


# Derived values


@pytest.mark.parametrize(("depth", "seconds"), [(0, 1), (1, 2), (3, 8), (5, 32)])
def test_exponential_backoff_doubles(depth: int, seconds: float) -> None:
    assert Config().backoff(depth) == seconds
    assert Config(backoff_multiplier=0.25).backoff(depth) == seconds / 4


@given(st.integers(0, 20))
def test_full_jitter_stays_below_the_exponential_pause(depth: int) -> None:
    pause = Config(backoff_strategy="full_jitter").backoff(depth)
    assert 0 <= pause <= 2**depth


def test_full_jitter_draws_anew_each_time() -> None:
    config = Config(backoff_strategy="full_jitter")
    assert len({config.backoff(10) for _ in range(20)}) > 10


@pytest.mark.parametrize("multiplier", [0.0, 0.001])
def test_backoff_of_any_depth_is_a_number(multiplier: float) -> None:
    assert math.isfinite(Config(backoff_multiplier=multiplier).backoff(100_000))


def test_the_requeue_delay_grows_with_the_attempts_up_to_its_limit() -> None:
    config = Config()
    assert [config.requeue_delay(attempts) for attempts in (0, 1, 2, 3)] == [0, 90, 180, 270]
    assert config.requeue_delay(10) == config.requeue_delay(65535) == 900


@given(st.integers(0, 10**9))
def test_whole_milliseconds_survive_as_seconds(count: int) -> None:
    assert milliseconds(count / 1000) == count


def test_parts_of_milliseconds_are_cut_off() -> None:
    assert (milliseconds(0.0019), milliseconds(0.00099), milliseconds(-0.5)) == (1, 0, -1)


def test_identify_has_what_the_reference_sends() -> None:
    config = Config(
        client_id="id",
        hostname="host",
        heartbeat_interval=1.5,
        msg_timeout=2.5,
        output_buffer_timeout=-1,
        sample_rate=7,
        deflate=True,
        tls_v1=True,
        topology_region="r",
        topology_zone="z",
        user_agent="ua",
    )
    assert config.identify() == {
        "headers": True,
        "client_id": "id",
        "hostname": "host",
        "short_id": "id",
        "long_id": "host",
        "user_agent": "ua",
        "feature_negotiation": True,
        "tls_v1": True,
        "deflate": True,
        "deflate_level": 6,
        "snappy": False,
        "heartbeat_interval": 1500,
        "sample_rate": 7,
        "output_buffer_size": 16384,
        "output_buffer_timeout": -1,
        "msg_timeout": 2500,
        "topology_region": "r",
        "topology_zone": "z",
    }


# TLS


def test_a_context_that_is_given_is_used_as_it_is() -> None:
    context = ssl.create_default_context()
    assert Config(tls_v1=True, tls_config=context).ssl_context() is context


@pytest.mark.parametrize("version", ["tls1.0", "tls1.1", "tls1.2", "tls1.3"])
def test_the_minimum_version_is_set(version: str) -> None:
    expected = {
        "tls1.0": ssl.TLSVersion.TLSv1,
        "tls1.1": ssl.TLSVersion.TLSv1_1,
        "tls1.2": ssl.TLSVersion.TLSv1_2,
        "tls1.3": ssl.TLSVersion.TLSv1_3,
    }
    assert Config(tls_min_version=version).ssl_context().minimum_version == expected[version]


def test_a_server_is_checked_unless_that_is_switched_off() -> None:
    strict = Config(tls_root_ca_file=str(certificates().ca.cert)).ssl_context()
    assert (strict.check_hostname, strict.verify_mode) == (True, ssl.CERT_REQUIRED)
    lax = Config(tls_insecure_skip_verify=True).ssl_context()
    assert (lax.check_hostname, lax.verify_mode) == (False, ssl.CERT_NONE)


@pytest.mark.parametrize(
    "values",
    [
        lambda missing: {"tls_root_ca_file": missing},
        lambda missing: {"tls_cert": missing, "tls_key": missing},
    ],
)
def test_a_missing_file_is_an_error_when_it_is_needed(
    values: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    config = Config(tls_v1=True, **values(str(tmp_path / "missing.pem")))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"missing\.pem: No such file or directory"):
        config.ssl_context()
