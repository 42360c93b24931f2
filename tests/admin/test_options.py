"""The options of nsqadmin: NSQ's flags, keys and defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nsparq.admin.options import TABLE, NsqadminOptions, clean_base_path
from nsparq.option_table import OptionError

# Every flag of NSQ's nsqadmin: file key and default, as NSQ documents them.
NSQ_OPTIONS: dict[str, tuple[str, Any]] = {
    "log-level": ("log_level", "info"),
    "log-prefix": ("log_prefix", "[nsqadmin] "),
    "http-address": ("http_address", "0.0.0.0:4171"),
    "base-path": ("base_path", "/"),
    "dev-static-dir": ("dev_static_dir", ""),
    "lookupd-http-address": ("nsqlookupd_http_addresses", ()),
    "nsqd-http-address": ("nsqd_http_addresses", ()),
    "graphite-url": ("graphite_url", ""),
    "proxy-graphite": ("proxy_graphite", False),
    "statsd-prefix": ("statsd_prefix", "nsq.%s"),
    "statsd-counter-format": ("statsd_counter_format", "stats.counters.%s.count"),
    "statsd-gauge-format": ("statsd_gauge_format", "stats.gauges.%s"),
    "statsd-interval": ("statsd_interval", 60.0),
    "notification-http-endpoint": ("notification_http_endpoint", ""),
    "http-client-connect-timeout": ("http_client_connect_timeout", 2.0),
    "http-client-request-timeout": ("http_client_request_timeout", 5.0),
    "http-client-tls-insecure-skip-verify": ("http_client_tls_insecure_skip_verify", False),
    "http-client-tls-root-ca-file": ("http_client_tls_root_ca_file", ""),
    "http-client-tls-cert": ("http_client_tls_cert", ""),
    "http-client-tls-key": ("http_client_tls_key", ""),
    "allow-config-from-cidr": ("allow_config_from_cidr", "127.0.0.1/8"),
    "acl-http-header": ("acl_http_header", "X-Forwarded-User"),
    "admin-user": ("admin_users", ()),
}
OURS = {
    "allowed-host",
    "auth-policy-file",
    "auth-secret",
    "auth-secret-for",
    "history-clients",
    "history-memory",
    "history-path",
    "pipeline-http-address",
    "poll-interval",
    "webhook-secret",
    "webhook-url",
}


def test_every_flag_of_nsq_is_there_with_its_file_key_and_default() -> None:
    found = {option.flag: (option.file_key, option.default) for option in TABLE.options}
    assert {flag: found[flag] for flag in found if flag not in OURS} == NSQ_OPTIONS
    assert OURS <= found.keys()
    assert {flag.flag for flag in TABLE.command_flags} == {"version", "config", "verbose"}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"poll_interval": 0.0}, "--poll-interval must be positive"),
        ({"graphite_url": "nowhere"}, "--graphite-url must be an http or https URL"),
        ({"notification_http_endpoint": "x:1"}, "--notification-http-endpoint must be an http"),
        ({"webhook_url": ("http://a", "b")}, "--webhook-url must be an http or https URL"),
        ({"webhook_secret": "s"}, "--webhook-secret needs --webhook-url"),
        ({"proxy_graphite": True}, "--proxy-graphite needs --graphite-url"),
        ({"pipeline_http_address": ("x",)}, "failed to resolve --pipeline-http-address"),
        ({"auth_secret_for": ("10.0.0.0/99",)}, "--auth-secret-for '10.0.0.0/99' is not a network"),
        ({"allow_config_from_cidr": "10.0.0.0"}, "failed to parse --allow-config-from-cidr"),
    ],
)
def test_an_invalid_option_is_refused_with_its_flag(values: dict[str, Any], text: str) -> None:
    NsqadminOptions(nsqd_http_address=("127.0.0.1:4151",)).validate()
    with pytest.raises(OptionError, match=f"^{text}"):
        NsqadminOptions(nsqd_http_address=("127.0.0.1:4151",), **values).validate()


@pytest.mark.parametrize(
    ("given", "clean"), [("/", ""), ("", ""), ("a/b/", "/a/b"), ("/a//b/../c", "/a/c"), ("//x", "/x")]
)
def test_a_base_path_is_cleaned(given: str, clean: str) -> None:
    assert clean_base_path(given) == clean
