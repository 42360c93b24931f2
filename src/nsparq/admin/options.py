"""The options of nsqadmin: one table for its flags, its TOML file, its help and its reference page.

`python -m nsparq.admin.options --markdown` (or `--toml`) prints the checked-in copies under
docs/reference.
"""

import ipaddress
import posixpath
import sys
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from nsparq.addresses import split_address
from nsparq.daemon_options import COMMAND_FLAGS, allowed_host_option, log_level_option, log_prefix_option
from nsparq.option_table import (
    BOOL,
    DURATION,
    INT,
    STRING,
    STRINGS,
    OptionError,
    OptionTable,
    opt,
)
from nsparq.secret_scope import SecretScope

__all__ = ["TABLE", "NsqadminOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqadminOptions:
    """Durations are in seconds."""

    log_level: str = log_level_option()
    log_prefix: str = log_prefix_option("nsqadmin")

    http_address: str = opt("0.0.0.0:4171", "`host:port` for HTTP clients", STRING, heading="Addresses")
    base_path: str = opt("/", "prefix of all URLs, for use behind a proxy", STRING)
    lookupd_http_address: tuple[str, ...] = opt(
        (),
        "`host:port` of an nsqlookupd's HTTP API",
        STRINGS,
        file_key="nsqlookupd_http_addresses",
    )
    nsqd_http_address: tuple[str, ...] = opt(
        (),
        "`host:port` of an nsqd's HTTP API, if there is no nsqlookupd",
        STRINGS,
        file_key="nsqd_http_addresses",
    )
    pipeline_http_address: tuple[str, ...] = opt(
        (),
        "`host:port` of a pipeline runner's status: the `metrics_address` of its file",
        STRINGS,
        file_key="pipeline_http_addresses",
    )

    http_client_connect_timeout: float = opt(
        2.0,
        "time limit to connect to an nsqlookupd, an nsqd or graphite",
        DURATION,
        heading="Requests to daemons",
        bound="positive",
    )
    http_client_request_timeout: float = opt(
        5.0, "time limit for a whole response", DURATION, bound="positive"
    )
    http_client_tls_insecure_skip_verify: bool = opt(
        False, "do not check the certificates of nsqds with HTTPS", BOOL
    )
    http_client_tls_root_ca_file: str = opt(
        "", "PEM file with the authorities to trust (empty: those of the system)", STRING
    )
    http_client_tls_cert: str = opt("", "PEM file with nsqadmin's own certificate", STRING)
    http_client_tls_key: str = opt("", "PEM file with the key of that certificate", STRING)
    auth_secret: str = opt(
        "",
        "secret for nsqds that protect their HTTP API with a policy file; better set in the config file. It "
        "is sent to nodes of `--nsqd-http-address` and of `--auth-secret-for`, and over HTTPS to nodes with "
        "a certificate of `--http-client-tls-root-ca-file`; to no others",
        STRING,
    )
    auth_secret_for: tuple[str, ...] = opt(
        (),
        "nodes found by nsqlookupd that may get `--auth-secret`: a host, `host:port`, a network such as "
        "`10.1.0.0/16`, a pattern such as `*.nsq.example.com`, or `*` for every node, whoever registered it",
        STRINGS,
    )

    acl_http_header: str = opt(
        "X-Forwarded-User",
        "header with the user's name, set by a proxy",
        STRING,
        heading="Access",
    )
    admin_user: tuple[str, ...] = opt(
        (),
        "user in that header who may make changes; if none is given, everyone may",
        STRINGS,
        file_key="admin_users",
    )
    auth_policy_file: str = opt(
        "", "TOML file with identities and their permissions, as for nsqd; users then log in", STRING
    )
    allow_config_from_cidr: str = opt("127.0.0.1/8", "network that may use `/config` (empty: any)", STRING)
    allowed_host: tuple[str, ...] = allowed_host_option("nsqadmin", "nsqadmin")

    notification_http_endpoint: str = opt(
        "", "URL that every change is POSTed to", STRING, heading="Notifications"
    )
    webhook_url: tuple[str, ...] = opt(
        (),
        "URL that a finding of the overview is POSTed to when it appears, changes its severity or clears",
        STRINGS,
        file_key="webhook_urls",
    )
    webhook_secret: str = opt(
        "",
        "secret that signs these POSTs, in the header `X-Nsparq-Signature`; better set in the config file",
        STRING,
    )

    poll_interval: float = opt(
        5.0,
        "how often nsqadmin polls the nsqds for overview and charts; less often if polling takes long",
        DURATION,
        heading="Overview and charts",
        bound="positive",
    )
    history_memory: int = opt(
        352 << 20,
        "limit in bytes for the history behind the charts; a channel needs about 27 KB",
        INT,
        bound="not negative",
    )
    history_path: str = opt(
        "",
        "file in which the history survives restarts, at most as large as `--history-memory` (empty: none); "
        "written every five minutes and at a stop",
        STRING,
    )
    history_clients: int = opt(
        2000, "maximum number of clients with a history for charts", INT, bound="not negative"
    )

    graphite_url: str = opt(
        "",
        "URL of graphite, for `/api/graphite` and `/render`; the charts do not need it",
        STRING,
        heading="Graphite",
    )
    proxy_graphite: bool = opt(False, "forward `/render` to graphite", BOOL)
    statsd_prefix: str = opt(
        "nsq.%s", "the `--statsd-prefix` of nsqd, for callers of `/api/graphite`", STRING
    )
    statsd_counter_format: str = opt("stats.counters.%s.count", "how statsd names counters", STRING)
    statsd_gauge_format: str = opt("stats.gauges.%s", "how statsd names gauges", STRING)
    statsd_interval: float = opt(60.0, "the `--statsd-interval` of nsqd", DURATION, bound="positive")
    dev_static_dir: str = opt("", "serve the static files of the pages from this directory", STRING)

    def validate(self) -> None:
        """Raise OptionError for a value that nsqadmin cannot start with."""
        TABLE.check_bounds(self)
        if not self.nsqd_http_address and not self.lookupd_http_address:
            raise OptionError("--nsqd-http-address or --lookupd-http-address required")
        if self.nsqd_http_address and self.lookupd_http_address:
            raise OptionError("use --nsqd-http-address or --lookupd-http-address not both")
        if bool(self.http_client_tls_cert) != bool(self.http_client_tls_key):
            given, missing = ("cert", "key") if self.http_client_tls_cert else ("key", "cert")
            raise OptionError(f"--http-client-tls-{missing} must be specified with --http-client-tls-{given}")
        for flag, addresses in (
            ("lookupd-http-address", self.lookupd_http_address),
            ("nsqd-http-address", self.nsqd_http_address),
            ("pipeline-http-address", self.pipeline_http_address),
        ):
            for address in addresses:
                if split_address(address) is None:
                    raise OptionError(f"failed to resolve --{flag} ({address}) - not of the form host:port")
        try:
            SecretScope(self.auth_secret_for)
        except ValueError as error:
            raise OptionError(f"--auth-secret-for {error}") from None
        network(self.allow_config_from_cidr)
        for flag, url in (
            ("graphite-url", self.graphite_url),
            ("notification-http-endpoint", self.notification_http_endpoint),
            *(("webhook-url", url) for url in self.webhook_url),
        ):
            if url and not is_http_url(url):
                raise OptionError(f"--{flag} must be an http or https URL, not {url!r}")
        if self.webhook_secret and not self.webhook_url:
            raise OptionError("--webhook-secret needs --webhook-url")
        if self.proxy_graphite and not self.graphite_url:
            raise OptionError("--proxy-graphite needs --graphite-url")


def network(cidr: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network of --allow-config-from-cidr; None for any. Raises OptionError."""
    if not cidr:
        return None
    try:
        if "/" not in cidr:
            raise ValueError("not a network such as 10.0.0.0/8")
        return ipaddress.ip_network(cidr, strict=False)
    except ValueError as error:
        raise OptionError(f"failed to parse --allow-config-from-cidr ({cidr}) - {error}") from None


def clean_base_path(path: str) -> str:
    """With a slash at the start and none at the end; empty for the root."""
    cleaned = posixpath.normpath("/" + path.strip("/"))
    return "" if cleaned == "/" else cleaned


def is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


TABLE: Final = OptionTable(
    "nsqadmin",
    NsqadminOptions,
    COMMAND_FLAGS,
)


if __name__ == "__main__":
    TABLE.print_page(sys.argv[1:])
