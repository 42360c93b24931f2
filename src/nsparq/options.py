"""The options of nsqd: one table for flags, TOML file, help and reference page.

`python -m nsparq.options --markdown` (or `--toml`) prints the checked-in copies under
docs/reference. The module is longer than others because the table is one piece.
"""

import hashlib
import re
import socket
import sys
import zlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from nsparq.daemon_options import COMMAND_FLAGS, allowed_host_option, log_level_option, log_prefix_option
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
_NODE_NAME: Final = re.compile(r"[.a-zA-Z0-9_-]{1,64}")


class TlsRequired(StrEnum):
    """Which clients must use TLS. False in a condition if none must."""

    NO = "false"
    YES = "true"
    EXCEPT_HTTP = "tcp-https"  # TCP clients only; plain HTTP stays open

    def __bool__(self) -> bool:
        return self is not TlsRequired.NO


def _tls_required_from_text(text: str) -> TlsRequired:
    if text.lower() == TlsRequired.EXCEPT_HTTP:
        return TlsRequired.EXCEPT_HTTP
    try:
        return TlsRequired.YES if parse_bool(text) else TlsRequired.NO
    except ValueError:
        raise ValueError("must be true, false or tcp-https") from None


TLS_REQUIRED: Final[Kind[TlsRequired]] = Kind(
    name="value",
    from_text=_tls_required_from_text,
    from_file=lambda value: _tls_required_from_text(str(value)),
    to_toml=lambda value: f'"{value}"' if value is TlsRequired.EXCEPT_HTTP else str(value),
    is_boolean=True,
)


def default_node_id(hostname: str) -> int:
    """The default node id of a host: NSQ's, so that it stays after a migration."""
    digest = hashlib.md5(hostname.encode(), usedforsecurity=False).digest()
    return zlib.crc32(digest) % NODE_IDS


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqdOptions:
    """All options of nsqd. Durations are in seconds, lists are tuples."""

    log_level: str = log_level_option()
    log_prefix: str = log_prefix_option("nsqd")

    node_id: int = opt(
        lambda: default_node_id(socket.gethostname()),
        "number of this node, 0 to 1023, unique in the cluster; part of every message id",
        INT,
        file_key="id",
        default_text="from the hostname",
        heading="Node and addresses",
    )
    tcp_address: str = opt(
        "0.0.0.0:4150",
        "`host:port` for TCP clients, or the path of a Unix socket; `0.0.0.0` and `[::]` mean all IPv4 and "
        "IPv6 addresses of the machine",
        STRING,
    )
    http_address: str = opt(
        "0.0.0.0:4151",
        "`host:port` for HTTP clients, or the path of a Unix socket; empty disables HTTP",
        STRING,
    )
    https_address: str = opt(
        "0.0.0.0:4152", "`host:port` for HTTPS clients, if TLS is configured; empty disables HTTPS", STRING
    )
    broadcast_address: str = opt(
        socket.gethostname,
        "address that nsqd registers with nsqlookupd, for clients to connect to",
        STRING,
        default_text="the hostname",
    )
    broadcast_tcp_port: int = opt(
        0,
        "TCP port that nsqd registers with nsqlookupd; 0 means the port of --tcp-address",
        INT,
        bound="not negative",
    )
    broadcast_http_port: int = opt(
        0,
        "HTTP port that nsqd registers with nsqlookupd; 0 means the port of --http-address",
        INT,
        bound="not negative",
    )
    lookupd_tcp_address: tuple[str, ...] = opt(
        (), "`host:port` of an nsqlookupd to register with", STRINGS, file_key="nsqlookupd_tcp_addresses"
    )
    allowed_host: tuple[str, ...] = allowed_host_option("nsqd")
    topology_region: str = opt("", "region of this node, for topology-aware consumption", STRING)
    topology_zone: str = opt("", "zone of this node, for topology-aware consumption", STRING)

    data_path: str = opt(
        "",
        "existing directory for messages and metadata; empty means the current directory",
        STRING,
        heading="Storage",
    )
    durability: str = opt(
        "os",
        "when nsqd acknowledges a publish: `os` after it has passed the message to the operating system "
        "(survives a crash of nsqd), `fsync` after the message is on disk (survives a power cut), `memory` "
        "at once (nsqd writes messages to disk only on overflow and at a clean stop)",
        choice("os", "fsync", "memory"),
    )
    mem_queue_size: int = opt(
        10_000,
        "how many of the newest messages of a topic to keep in memory as well; an ephemeral topic keeps no "
        "others",
        INT,
        bound="not negative",
    )
    mem_queue_bytes: int = opt(
        64 * 1024 * 1024,
        "limit in bytes for recent messages in memory, for all topics together; ephemeral topics may hold "
        "the same amount in addition",
        INT,
        bound="not negative",
    )
    max_bytes_per_file: int = opt(
        100 * 1024 * 1024, "size in bytes at which a new log file is started", INT, bound="positive"
    )
    sync_every: int = opt(
        2500,
        "fsync a topic's log after this many messages, but at most ten times a second",
        INT,
        bound="positive",
    )
    sync_timeout: float = opt(
        2.0, "longest time between two fsyncs while messages arrive", DURATION, bound="positive"
    )
    checkpoint_interval: float = opt(
        1.0,
        "time between two checkpoints of a channel; after a crash, messages finished since are redelivered",
        DURATION,
        bound="positive",
    )
    producer_window_time: float = opt(
        600.0,
        "how long a message of an idempotent producer is known, so that a repeat is not stored; at least "
        "this long",
        DURATION,
        bound="positive",
    )
    producer_window_count: int = opt(
        1_000_000,
        "minimum number of an idempotent producer's latest messages that nsqd remembers per topic",
        INT,
        bound="positive",
    )
    retention_age: float = opt(
        0.0,
        "how long to keep messages for replay after all channels have finished them; 0 means no limit by "
        "age if --retention-bytes is set, and otherwise that nothing is kept",
        DURATION,
        bound="not negative",
    )
    retention_bytes: int = opt(
        0,
        "limit in bytes per topic for messages kept for replay after all channels have finished them; 0 "
        "means no limit by size if --retention-age is set, and otherwise that nothing is kept",
        INT,
        bound="not negative",
    )
    topics_file: str = opt(
        "",
        "path of a TOML file with topics, channels, their settings and delivery policies, which nsqd applies "
        "at its start and on SIGHUP. See docs/delivery-policies.md",
        STRING,
    )
    transaction_timeout: float = opt(
        3600.0,
        "how long to keep a transaction after its last message if it is neither prepared nor committed",
        DURATION,
        bound="positive",
    )
    transaction_retention: float = opt(
        7 * 86400.0,
        "how long to keep a prepared transaction, and to remember a producer's commits after its last one",
        DURATION,
        bound="positive",
    )
    max_staged_bytes: int = opt(
        32 << 30,
        "limit in bytes for messages staged by all transactions; a request counts as at least 16 KiB",
        INT,
        bound="not negative",
    )
    max_staged_bytes_per_producer: int = opt(
        16 << 30, "the same limit for the transactions of one producer", INT, bound="not negative"
    )

    archive: str = opt(
        "",
        "object store to which sealed log files go: `s3://bucket/prefix`, `gs://bucket/prefix`, "
        "`az://container/prefix` or `file:///directory`; empty means no archive. Credentials and "
        "endpoints come from the store's usual environment variables. See docs/how-to/archive.md",
        STRING,
        heading="Archive",
    )
    restore: bool = opt(
        False,
        "at a start with an empty data path, bring back the topics that the archive has of this --node-id, "
        "with their channels; a data path that has topics is left as it is",
        BOOL,
    )
    archive_local_bytes: int = opt(
        0,
        "limit in bytes per topic for log files on disk: beyond it archived files leave the disk although "
        "channels need them, which then read them from the archive; 0 means that only files which no "
        "channel needs leave the disk",
        INT,
        bound="not negative",
    )
    archive_retention_age: float = opt(
        0.0,
        "how long the archive keeps messages after all channels have finished them; 0 means no limit by age",
        DURATION,
        bound="not negative",
    )
    archive_retention_bytes: int = opt(
        0,
        "limit in bytes per topic for the log with its archive; the oldest messages that all channels have "
        "finished are removed; 0 means no limit by size",
        INT,
        bound="not negative",
    )
    archive_bandwidth: int = opt(
        100 * 1024 * 1024,
        "limit in bytes per second for uploads to the archive; 0 means no limit",
        INT,
        bound="not negative",
    )
    archive_cache_path: str = opt(
        "",
        "directory for copies of log files that are read back from the archive; empty means "
        "`archive-cache` in the data path",
        STRING,
    )
    archive_cache_bytes: int = opt(
        1 << 30,
        "limit in bytes for these copies, of all topics together; one file may exceed it",
        INT,
        bound="positive",
    )
    archive_collect_interval: float = opt(
        3600.0,
        "how often nsqd looks for objects of a topic's archive that nobody needs; manifests that were "
        "replaced longer ago than this are removed",
        DURATION,
        bound="positive",
    )
    archive_unknown_age: float = opt(
        86400.0,
        "how old an object must be before it is removed because no manifest names it",
        DURATION,
        bound="positive",
    )

    replication_cluster: str = opt(
        "",
        "name of the cluster of nsqds that keep copies of one data path, of which one serves; empty means "
        "that this is the only copy. See docs/how-to/replication.md",
        STRING,
        heading="Replication",
    )
    replication_coordinator: str = opt(
        "",
        "where the cluster's record is kept: `etcd://host:port,host:port` (or `etcd+https://`), or "
        "`postgresql://user@host/database`",
        STRING,
    )
    replication_name: str = opt(
        socket.gethostname,
        "name of this node, unique in the cluster",
        STRING,
        default_text="the hostname",
    )
    replication_address: str = opt(
        "0.0.0.0:4153", "`host:port` on which followers connect to the primary", STRING
    )
    replication_broadcast_address: str = opt(
        "",
        "`host:port` that the other nodes connect to; empty means --broadcast-address and the port of "
        "--replication-address",
        STRING,
    )
    replication_secret_file: str = opt(
        "", "path of a file with the cluster's secret, the same on all nodes", STRING
    )
    replication_tls_cert: str = opt(
        "",
        "path of this node's certificate: connections between nodes then use TLS, and each node shows "
        "its certificate to the other",
        STRING,
    )
    replication_tls_key: str = opt("", "path of the key of that certificate", STRING)
    replication_tls_root_ca_file: str = opt(
        "",
        "path of the file with the certificate authority that signs the certificates of this cluster's nodes "
        "and of nobody else",
        STRING,
    )
    replication_lease: float = opt(
        3.0,
        "how long the primary may be silent before a follower takes over; whole seconds with etcd",
        DURATION,
        bound="positive",
    )
    replication_snapshot_rate: int = opt(
        50 << 20,
        "bytes per second that the primary sends to a follower that joins, so that clients do not suffer",
        INT,
        bound="positive",
    )
    min_in_sync: int = opt(
        1,
        "refuse publishes while fewer nodes, including the primary, have every acknowledged message",
        INT,
        bound="positive",
    )

    queue_scan_worker_pool_max: int = opt(
        4,
        "maximum number of workers that look for timed-out and due messages",
        INT,
        heading="Queue scan",
        bound="positive",
    )
    queue_scan_selection_count: int = opt(20, "channels to check per scan", INT, bound="positive")

    msg_timeout: float = opt(
        60.0,
        "time after which an unanswered message is requeued",
        DURATION,
        heading="Messages and commands",
        bound="positive",
    )
    max_msg_timeout: float = opt(
        900.0, "longest timeout that a client may request or reach by TOUCH", DURATION, bound="positive"
    )
    max_msg_size: int = opt(1024 * 1024, "limit in bytes for one message", INT, bound="positive")
    max_body_size: int = opt(
        5 * 1024 * 1024, "limit in bytes for the body of one command", INT, bound="positive"
    )
    max_unfinished_bytes: int = opt(
        256 * 1024 * 1024,
        "limit in bytes for commands that have arrived in part, over all TCP clients; a command beyond it is "
        "refused. The limit is at least --max-body-size",
        INT,
        bound="positive",
    )
    max_req_timeout: float = opt(
        3600.0, "longest delay of a requeued or deferred message", DURATION, bound="not negative"
    )

    max_heartbeat_interval: float = opt(
        60.0,
        "longest heartbeat interval that a client may request",
        DURATION,
        heading="Clients",
        bound="positive",
    )
    max_rdy_count: int = opt(2500, "highest RDY count that a client may set", INT, bound="positive")
    max_output_buffer_size: int = opt(
        64 * 1024, "largest output buffer, in bytes, that a client may request", INT, bound="positive"
    )
    max_output_buffer_timeout: float = opt(
        30.0, "longest output buffer timeout that a client may request", DURATION, bound="positive"
    )
    min_output_buffer_timeout: float = opt(
        0.025, "shortest output buffer timeout that a client may request", DURATION, bound="positive"
    )
    output_buffer_timeout: float = opt(
        0.25, "output buffer timeout of a client that requests none", DURATION, bound="positive"
    )
    max_channel_consumers: int = opt(
        0, "maximum number of clients per channel; 0 means no limit", INT, bound="not negative"
    )

    e2e_processing_latency_percentile: tuple[float, ...] = opt(
        (),
        "percentile (0 < p <= 1) of the time from publish to FIN to report; several with commas",
        NUMBERS,
        file_key="e2e_processing_latency_percentiles",
        heading="End-to-end latency",
    )
    e2e_processing_latency_window_time: float = opt(
        600.0, "time window of the latency figures", DURATION, bound="positive"
    )

    statsd_address: str = opt(
        "", "UDP `host:port` of a statsd daemon; empty disables statsd", STRING, heading="statsd"
    )
    statsd_interval: float = opt(60.0, "time between two pushes to statsd", DURATION, bound="positive")
    statsd_mem_stats: bool = opt(True, "also push memory and garbage collector figures", BOOL)
    statsd_prefix: str = opt("nsq.%s", "prefix of statsd keys; %s is replaced by the node's name", STRING)
    statsd_udp_packet_size: int = opt(508, "size in bytes of a statsd packet", INT, bound="positive")
    statsd_exclude_ephemeral: bool = opt(False, "leave out ephemeral topics and channels", BOOL)

    tls_cert: str = opt("", "path of the certificate file", STRING, heading="TLS")
    tls_key: str = opt("", "path of the key file", STRING)
    tls_root_ca_file: str = opt("", "path of the file with certificate authorities", STRING)
    tls_client_auth_policy: str = opt(
        "",
        "`require` any client certificate, or `require-verify` a valid one; implies --tls-required",
        STRING,
    )
    tls_required: TlsRequired = opt(
        TlsRequired.NO, "require TLS: true, false, or tcp-https to still allow plain HTTP", TLS_REQUIRED
    )
    tls_min_version: str = opt(
        "tls1.0",
        "oldest TLS version to accept: tls1.0, tls1.1, tls1.2, tls1.3",
        choice("tls1.0", "tls1.1", "tls1.2", "tls1.3", empty="tls1.0"),
    )

    deflate: bool = opt(True, "allow clients to use deflate compression", BOOL, heading="Compression")
    max_deflate_level: int = opt(6, "highest deflate level that a client may request, 1 to 9", INT)
    snappy: bool = opt(True, "allow clients to use snappy compression", BOOL)

    auth_http_address: tuple[str, ...] = opt(
        (), "`host:port` or URL of an auth server", STRINGS, file_key="auth_http_addresses", heading="Auth"
    )
    auth_policy_file: str = opt(
        "",
        "path of a file with secrets and their permissions; it also protects the HTTP API. See docs/auth.md",
        STRING,
    )
    auth_http_request_method: str = opt("get", "HTTP method for the auth server: get or post", STRING)
    http_client_connect_timeout: float = opt(
        2.0, "time limit for a connection to an auth server or nsqlookupd", DURATION, bound="not negative"
    )
    http_client_request_timeout: float = opt(
        5.0, "time limit for a request to an auth server or nsqlookupd", DURATION, bound="not negative"
    )

    enable_experiment: tuple[str, ...] = opt(
        (),
        "name of an experiment to enable: `topology-aware-consumption` prefers clients of the same zone, "
        "then of the same region",
        STRINGS,
        heading="Experiments",
    )

    def __post_init__(self) -> None:
        # Programs may pass True or "true": plain HTTP must not stay open then.
        try:
            object.__setattr__(self, "tls_required", _tls_required_from_text(str(self.tls_required)))
        except ValueError as error:
            raise OptionError(f"--tls-required {error}") from None
        if self.tls_client_auth_policy and not self.tls_required:
            object.__setattr__(self, "tls_required", TlsRequired.YES)

    def validate(self) -> None:
        """Raise OptionError for an invalid value, with NSQ's text where it has one."""
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
        if self.restore and not self.archive:
            raise OptionError("--restore needs --archive")
        self._validate_replication()
        for percentile in self.e2e_processing_latency_percentile:
            if not 0 < percentile <= 1:
                raise OptionError(f"invalid E2E processing latency percentile: {format_number(percentile)}")
        TABLE.check_bounds(self)

    def _validate_replication(self) -> None:
        needed = ("replication_coordinator", "replication_secret_file", "replication_name")
        tls = ("replication_tls_cert", "replication_tls_key", "replication_tls_root_ca_file")
        if not self.replication_cluster:
            # Somebody who gives these expects copies of the data.
            given = [flag for flag in (*needed[:2], *tls) if getattr(self, flag)]
            given += ["min_in_sync"] if self.min_in_sync > 1 else []
            if given:
                raise OptionError(f"{_flag(given[0])} needs --replication-cluster")
            return
        for flag in needed:
            if not getattr(self, flag):
                raise OptionError(f"--replication-cluster needs {_flag(flag)}")
        for flag in ("replication_cluster", "replication_name"):
            if not _NODE_NAME.fullmatch(getattr(self, flag)):
                raise OptionError(f"{_flag(flag)} must have 1 to 64 characters of `.a-zA-Z0-9_-`")
        if len({bool(getattr(self, flag)) for flag in tls}) > 1:
            raise OptionError(f"{', '.join(map(_flag, tls))} must be given together")
        if self.durability == "memory":
            raise OptionError(
                "--replication-cluster does not work with --durability=memory: messages would be "
                "acknowledged before they are copied"
            )
        if self.archive and _is_inside(self.archive_cache_path, self.data_path):
            raise OptionError(
                "--archive with --replication-cluster needs an --archive-cache-path outside of the data "
                "path, because the data path is replicated"
            )


def _is_inside(path: str, directory: str) -> bool:
    """Whether a path, or the default in the directory, is inside of a directory."""
    return not path or Path(path).resolve().is_relative_to(Path(directory or ".").resolve())


TABLE: Final = OptionTable(
    "nsqd",
    NsqdOptions,
    (
        *COMMAND_FLAGS,
        CommandFlag(flag="worker-id", kind=BOOL, help="no effect, accepted for old scripts; see --node-id"),
    ),
)


if __name__ == "__main__":
    TABLE.print_page(sys.argv[1:])
