"""The options of nsqd: the one table behind its flags, its TOML file, its help and its reference page.

`python -m nsparq.options --markdown` (or `--toml`) prints the checked-in copies under docs/reference.
"""

import hashlib
import socket
import sys
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from nsparq.flags import parse_bool
from nsparq.option_table import (
    BOOL,
    DURATION,
    INT,
    NUMBERS,
    STRING,
    STRINGS,
    CommandFlag,
    Kind,
    OptionError,
    OptionTable,
    choice,
    format_number,
    opt,
)

__all__ = ["TABLE", "NsqdOptions", "TlsRequired", "default_node_id"]

NODE_IDS: Final = 1024


class TlsRequired(StrEnum):
    """Who must use TLS. False in a condition when nobody must."""

    NO = "false"
    YES = "true"
    EXCEPT_HTTP = "tcp-https"  # TCP clients must; plain HTTP stays open

    def __bool__(self) -> bool:
        return self is not TlsRequired.NO


def _tls_required_from_text(text: str) -> TlsRequired:
    if text.lower() == TlsRequired.EXCEPT_HTTP:
        return TlsRequired.EXCEPT_HTTP
    try:
        return TlsRequired.YES if parse_bool(text) else TlsRequired.NO
    except ValueError:
        raise ValueError("must be true, false or tcp-https") from None


def _tls_required_to_toml(value: TlsRequired) -> str:
    return f'"{value}"' if value is TlsRequired.EXCEPT_HTTP else str(value)


TLS_REQUIRED: Final[Kind[TlsRequired]] = Kind(
    name="value",
    from_text=_tls_required_from_text,
    from_file=lambda value: _tls_required_from_text(str(value)),
    to_toml=_tls_required_to_toml,
    is_boolean=True,
)


def default_node_id(hostname: str) -> int:
    """The node id of a machine that was not given one: NSQ's, so that ids stay the same after a migration."""
    digest = hashlib.md5(hostname.encode(), usedforsecurity=False).digest()
    return zlib.crc32(digest) % NODE_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqdOptions:
    """Everything nsqd can be told. Durations are seconds, lists are tuples."""

    log_level: str = opt(
        "info",
        "least severe level that is logged: debug, info, warn, error, fatal",
        choice("debug", "info", "warn", "error", "fatal"),
        heading="Logging",
    )
    log_prefix: str = opt("[nsqd] ", "start of every log line", STRING)

    node_id: int = opt(
        lambda: default_node_id(socket.gethostname()),
        "part of every message id, unique in the cluster, 0 to 1023",
        INT,
        file_key="id",
        default_text="from the hostname",
        heading="Node and addresses",
    )
    tcp_address: str = opt(
        "0.0.0.0:4150",
        "`host:port` for TCP clients, or the path of a Unix socket; `0.0.0.0` and `[::]` mean every address "
        "of the machine, IPv4 and IPv6",
        STRING,
    )
    http_address: str = opt(
        "0.0.0.0:4151",
        "`host:port` for HTTP clients, or the path of a Unix socket; empty disables",
        STRING,
    )
    https_address: str = opt(
        "0.0.0.0:4152",
        "`host:port` for HTTPS clients, with TLS configured; empty disables",
        STRING,
    )
    broadcast_address: str = opt(
        socket.gethostname,
        "address that nsqlookupd tells consumers to connect to",
        STRING,
        default_text="the hostname",
    )
    broadcast_tcp_port: int = opt(
        0,
        "TCP port that nsqlookupd tells consumers; 0 means the real one",
        INT,
        bound="not negative",
    )
    broadcast_http_port: int = opt(
        0,
        "HTTP port that nsqlookupd tells consumers; 0 means the real one",
        INT,
        bound="not negative",
    )
    lookupd_tcp_address: tuple[str, ...] = opt(
        (),
        "`host:port` of an nsqlookupd to register with",
        STRINGS,
        file_key="nsqlookupd_tcp_addresses",
    )
    allowed_host: tuple[str, ...] = opt(
        (),
        "host name under which browsers may use the HTTP API, besides IP addresses, our own names, and names "
        "that only a private network has. Others are refused, so that no foreign page can reach us through a "
        "name of its own; programs may use any, and so may everybody with `--auth-policy-file`",
        STRINGS,
        file_key="allowed_hosts",
    )
    topology_region: str = opt("", "region of this node, for topology-aware consumption", STRING)
    topology_zone: str = opt("", "zone of this node, for topology-aware consumption", STRING)

    data_path: str = opt(
        "",
        "directory for messages and metadata, which must exist; empty means the current directory",
        STRING,
        heading="Storage",
    )
    durability: str = opt(
        "os",
        "when a publish is acknowledged: `os` once the operating system has it (survives a killed process), "
        "`fsync` once it is on disk (survives a power cut), `memory` at once (only overflow and a clean stop "
        "write to disk)",
        choice("os", "fsync", "memory"),
    )
    mem_queue_size: int = opt(
        10_000,
        "newest messages of a topic kept in memory too; the most an ephemeral one holds",
        INT,
        bound="not negative",
    )
    mem_queue_bytes: int = opt(
        64 * 1024 * 1024,
        "bytes of recent messages kept in memory, for the whole daemon; all ephemeral topics together may "
        "hold as much again",
        INT,
        bound="not negative",
    )
    max_bytes_per_file: int = opt(
        100 * 1024 * 1024, "bytes of a log file before the next is begun", INT, bound="positive"
    )
    sync_every: int = opt(
        2500, "messages per fsync of a topic's log, which happens ten times a second at the most", INT,
        bound="positive",
    )  # fmt: skip
    sync_timeout: float = opt(
        2.0, "longest time between fsyncs while messages arrive", DURATION, bound="positive"
    )
    checkpoint_interval: float = opt(
        1.0,
        "time between writes of channel states; a crash redelivers what was finished since",
        DURATION,
        bound="positive",
    )
    retention_age: float = opt(
        0.0,
        "how long messages are kept after every channel has passed them; 0 means not at all",
        DURATION,
        bound="not negative",
    )
    retention_bytes: int = opt(
        0,
        "bytes per topic that are kept after every channel has passed them; 0 means none",
        INT,
        bound="not negative",
    )
    transaction_timeout: float = opt(
        3600.0,
        "how long a transaction that is neither prepared nor committed is kept after its last message",
        DURATION,
        bound="positive",
    )
    transaction_retention: float = opt(
        7 * 86400.0,
        "how long a prepared transaction is kept, and how long after a producer's last one it is remembered "
        "what it has committed",
        DURATION,
        bound="positive",
    )
    max_staged_bytes: int = opt(
        32 << 30,
        "bytes of messages staged for all transactions together; a request counts as 16 KiB at least",
        INT,
        bound="not negative",
    )
    max_staged_bytes_per_producer: int = opt(
        16 << 30, "the same for the transactions of one producer", INT, bound="not negative"
    )

    queue_scan_worker_pool_max: int = opt(
        4, "most workers looking for timed out and due messages", INT, heading="Queue scan", bound="positive"
    )
    queue_scan_selection_count: int = opt(20, "channels looked at per scan", INT, bound="positive")

    msg_timeout: float = opt(
        60.0,
        "time before an unanswered message is requeued",
        DURATION,
        heading="Messages and commands",
        bound="positive",
    )
    max_msg_timeout: float = opt(
        900.0, "longest timeout that a client may ask for or reach by TOUCH", DURATION, bound="positive"
    )
    max_msg_size: int = opt(1024 * 1024, "bytes of one message", INT, bound="positive")
    max_body_size: int = opt(5 * 1024 * 1024, "bytes of one command body", INT, bound="positive")
    max_unfinished_bytes: int = opt(
        256 * 1024 * 1024,
        "bytes of commands that have arrived in part, over all TCP clients; a command that does not fit is "
        "refused. At least --max-body-size is allowed",
        INT,
        bound="positive",
    )
    max_req_timeout: float = opt(
        3600.0, "longest delay of a requeued or deferred message", DURATION, bound="not negative"
    )

    max_heartbeat_interval: float = opt(
        60.0,
        "longest heartbeat interval that a client may ask for",
        DURATION,
        heading="Clients",
        bound="positive",
    )
    max_rdy_count: int = opt(2500, "highest RDY count of a client", INT, bound="positive")
    max_output_buffer_size: int = opt(
        64 * 1024, "largest output buffer, in bytes, that a client may ask for", INT, bound="positive"
    )
    max_output_buffer_timeout: float = opt(
        30.0, "longest output buffer timeout that a client may ask for", DURATION, bound="positive"
    )
    min_output_buffer_timeout: float = opt(
        0.025, "shortest output buffer timeout that a client may ask for", DURATION, bound="positive"
    )
    output_buffer_timeout: float = opt(
        0.25, "output buffer timeout of a client that does not ask for one", DURATION, bound="positive"
    )
    max_channel_consumers: int = opt(0, "clients per channel; 0 means any number", INT, bound="not negative")

    e2e_processing_latency_percentile: tuple[float, ...] = opt(
        (),
        "fraction (0 < p <= 1) at which the time from publish to FIN is reported; several with commas",
        NUMBERS,
        file_key="e2e_processing_latency_percentiles",
        heading="End-to-end latency",
    )
    e2e_processing_latency_window_time: float = opt(
        600.0, "time that the latency figures look back", DURATION, bound="positive"
    )

    statsd_address: str = opt(
        "", "UDP `host:port` of a statsd daemon; empty means none", STRING, heading="statsd"
    )
    statsd_interval: float = opt(60.0, "time between pushes to statsd", DURATION, bound="positive")
    statsd_mem_stats: bool = opt(True, "push memory and garbage collector figures too", BOOL)
    statsd_prefix: str = opt("nsq.%s", "prefix of statsd keys; %s becomes the node's name", STRING)
    statsd_udp_packet_size: int = opt(508, "bytes of one statsd packet", INT, bound="positive")
    statsd_exclude_ephemeral: bool = opt(False, "leave out ephemeral topics and channels", BOOL)

    tls_cert: str = opt("", "path of the certificate file", STRING, heading="TLS")
    tls_key: str = opt("", "path of the key file", STRING)
    tls_root_ca_file: str = opt("", "path of the certificate authorities file", STRING)
    tls_client_auth_policy: str = opt(
        "",
        "`require` a client certificate, or `require-verify` a valid one; implies --tls-required",
        STRING,
    )
    tls_required: TlsRequired = opt(
        TlsRequired.NO,
        "require TLS: true, false, or tcp-https to leave plain HTTP open",
        TLS_REQUIRED,
    )
    tls_min_version: str = opt(
        "tls1.0",
        "oldest version accepted: tls1.0, tls1.1, tls1.2, tls1.3",
        choice("tls1.0", "tls1.1", "tls1.2", "tls1.3", empty="tls1.0"),
    )

    deflate: bool = opt(True, "let clients ask for deflate compression", BOOL, heading="Compression")
    max_deflate_level: int = opt(6, "highest deflate level that a client may ask for, 1 to 9", INT)
    snappy: bool = opt(True, "let clients ask for snappy compression", BOOL)

    auth_http_address: tuple[str, ...] = opt(
        (),
        "`host:port` or URL of an auth server",
        STRINGS,
        file_key="auth_http_addresses",
        heading="Auth",
    )
    auth_policy_file: str = opt(
        "",
        "path of a file that says which secrets may do what; guards the HTTP API as well. See docs/auth.md",
        STRING,
    )
    auth_http_request_method: str = opt("get", "how the auth server is asked: get or post", STRING)
    http_client_connect_timeout: float = opt(
        2.0, "time to connect to auth servers and nsqlookupds", DURATION, bound="not negative"
    )
    http_client_request_timeout: float = opt(
        5.0,
        "time for a request to auth servers and nsqlookupds",
        DURATION,
        bound="not negative",
    )

    enable_experiment: tuple[str, ...] = opt(
        (),
        "name of an experiment to switch on: `topology-aware-consumption` serves clients of the same zone, "
        "then of the same region, before others",
        STRINGS,
        heading="Experiments",
    )

    def __post_init__(self) -> None:
        # True and "true" mean YES here too: a program that says so must not get plain HTTP all the same.
        try:
            object.__setattr__(self, "tls_required", _tls_required_from_text(str(self.tls_required)))
        except ValueError as error:
            raise OptionError(f"--tls-required {error}") from None
        if self.tls_client_auth_policy and not self.tls_required:
            object.__setattr__(self, "tls_required", TlsRequired.YES)

    def validate(self) -> None:
        """Raise OptionError, in NSQ's words where it has some, for a value that nsqd cannot start with."""
        if not 1 <= self.max_deflate_level <= 9:
            raise OptionError("--max-deflate-level must be [1,9]")
        if not 0 <= self.node_id < NODE_IDS:
            raise OptionError("--node-id must be [0,1024)")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise OptionError("--tls-cert and --tls-key must be given together")
        if self.tls_required and not self.tls_cert:
            raise OptionError("cannot require TLS client connections without TLS key and cert")
        if self.tls_client_auth_policy not in ("", "require", "require-verify"):
            raise OptionError("--tls-client-auth-policy must be require or require-verify")
        if self.auth_http_request_method not in ("get", "post"):
            raise OptionError("--auth-http-request-method must be post or get")
        for percentile in self.e2e_processing_latency_percentile:
            if not 0 < percentile <= 1:
                raise OptionError(f"invalid E2E processing latency percentile: {format_number(percentile)}")
        TABLE.check_bounds(self)


TABLE: Final = OptionTable(
    "nsqd",
    NsqdOptions,
    (
        CommandFlag(flag="version", kind=BOOL, help="print the version and exit"),
        CommandFlag(flag="config", kind=STRING, help="path of a TOML file with options"),
        CommandFlag(flag="verbose", kind=BOOL, help="accepted for old scripts, no effect; see --log-level"),
        CommandFlag(flag="worker-id", kind=BOOL, help="accepted for old scripts, no effect; see --node-id"),
    ),
)


if __name__ == "__main__":
    TABLE.print_page(sys.argv[1:])
