"""The options of nsqd: flags, file, defaults, validation, and the generated copies in
docs/reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from nsparq.option_table import CommandLineExit, OptionError
from nsparq.options import (
    TABLE,
    NsqdOptions,
    TlsRequired,
    default_node_id,
)

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"

# Every flag of NSQ's nsqd: file key and default, as NSQ documents them.
NSQ_OPTIONS: dict[str, tuple[str, Any]] = {
    "log-level": ("log_level", "info"),
    "log-prefix": ("log_prefix", "[nsqd] "),
    "tcp-address": ("tcp_address", "0.0.0.0:4150"),
    "http-address": ("http_address", "0.0.0.0:4151"),
    "https-address": ("https_address", "0.0.0.0:4152"),
    "broadcast-tcp-port": ("broadcast_tcp_port", 0),
    "broadcast-http-port": ("broadcast_http_port", 0),
    "lookupd-tcp-address": ("nsqlookupd_tcp_addresses", ()),
    "auth-http-address": ("auth_http_addresses", ()),
    "auth-http-request-method": ("auth_http_request_method", "get"),
    "http-client-connect-timeout": ("http_client_connect_timeout", 2.0),
    "http-client-request-timeout": ("http_client_request_timeout", 5.0),
    "topology-region": ("topology_region", ""),
    "topology-zone": ("topology_zone", ""),
    "data-path": ("data_path", ""),
    "mem-queue-size": ("mem_queue_size", 10000),
    "max-bytes-per-file": ("max_bytes_per_file", 104857600),
    "sync-every": ("sync_every", 2500),
    "sync-timeout": ("sync_timeout", 2.0),
    "queue-scan-worker-pool-max": ("queue_scan_worker_pool_max", 4),
    "queue-scan-selection-count": ("queue_scan_selection_count", 20),
    "msg-timeout": ("msg_timeout", 60.0),
    "max-msg-timeout": ("max_msg_timeout", 900.0),
    "max-msg-size": ("max_msg_size", 1048576),
    "max-body-size": ("max_body_size", 5242880),
    "max-req-timeout": ("max_req_timeout", 3600.0),
    "max-heartbeat-interval": ("max_heartbeat_interval", 60.0),
    "max-rdy-count": ("max_rdy_count", 2500),
    "max-output-buffer-size": ("max_output_buffer_size", 65536),
    "max-output-buffer-timeout": ("max_output_buffer_timeout", 30.0),
    "min-output-buffer-timeout": ("min_output_buffer_timeout", 0.025),
    "output-buffer-timeout": ("output_buffer_timeout", 0.25),
    "max-channel-consumers": ("max_channel_consumers", 0),
    "statsd-address": ("statsd_address", ""),
    "statsd-interval": ("statsd_interval", 60.0),
    "statsd-mem-stats": ("statsd_mem_stats", True),
    "statsd-prefix": ("statsd_prefix", "nsq.%s"),
    "statsd-udp-packet-size": ("statsd_udp_packet_size", 508),
    "statsd-exclude-ephemeral": ("statsd_exclude_ephemeral", False),
    "e2e-processing-latency-percentile": ("e2e_processing_latency_percentiles", ()),
    "e2e-processing-latency-window-time": ("e2e_processing_latency_window_time", 600.0),
    "tls-cert": ("tls_cert", ""),
    "tls-key": ("tls_key", ""),
    "tls-root-ca-file": ("tls_root_ca_file", ""),
    "tls-client-auth-policy": ("tls_client_auth_policy", ""),
    "tls-required": ("tls_required", TlsRequired.NO),
    "tls-min-version": ("tls_min_version", "tls1.0"),
    "deflate": ("deflate", True),
    "max-deflate-level": ("max_deflate_level", 6),
    "snappy": ("snappy", True),
    "enable-experiment": ("enable_experiment", ()),
}
OUR_OPTIONS: dict[str, tuple[str, Any]] = {
    "allowed-host": ("allowed_hosts", ()),
    "durability": ("durability", "os"),
    "producer-window-time": ("producer_window_time", 600.0),
    "producer-window-count": ("producer_window_count", 1_000_000),
    "retention-age": ("retention_age", 0.0),
    "retention-bytes": ("retention_bytes", 0),
    "topics-file": ("topics_file", ""),
    "archive": ("archive", ""),
    "restore": ("restore", False),
    "archive-local-bytes": ("archive_local_bytes", 0),
    "archive-retention-age": ("archive_retention_age", 0.0),
    "archive-retention-bytes": ("archive_retention_bytes", 0),
    "archive-bandwidth": ("archive_bandwidth", 100 << 20),
    "archive-cache-path": ("archive_cache_path", ""),
    "archive-cache-bytes": ("archive_cache_bytes", 1 << 30),
    "archive-collect-interval": ("archive_collect_interval", 3600.0),
    "archive-unknown-age": ("archive_unknown_age", 86400.0),
    "transaction-timeout": ("transaction_timeout", 3600.0),
    "transaction-retention": ("transaction_retention", 604800.0),
    "max-staged-bytes": ("max_staged_bytes", 32 << 30),
    "max-staged-bytes-per-producer": ("max_staged_bytes_per_producer", 16 << 30),
    "mem-queue-bytes": ("mem_queue_bytes", 67108864),
    "max-unfinished-bytes": ("max_unfinished_bytes", 268435456),
    "checkpoint-interval": ("checkpoint_interval", 1.0),
    "auth-policy-file": ("auth_policy_file", ""),
    "replication-cluster": ("replication_cluster", ""),
    "replication-coordinator": ("replication_coordinator", ""),
    "replication-address": ("replication_address", "0.0.0.0:4153"),
    "replication-broadcast-address": ("replication_broadcast_address", ""),
    "replication-secret-file": ("replication_secret_file", ""),
    "replication-tls-cert": ("replication_tls_cert", ""),
    "replication-tls-key": ("replication_tls_key", ""),
    "replication-tls-root-ca-file": ("replication_tls_root_ca_file", ""),
    "replication-lease": ("replication_lease", 3.0),
    "replication-snapshot-rate": ("replication_snapshot_rate", 52428800),
    "min-in-sync": ("min_in_sync", 1),
}
FROM_HOSTNAME = {
    "node-id": "id",
    "broadcast-address": "broadcast_address",
    "replication-name": "replication_name",
}


def parse(*arguments: str) -> NsqdOptions:
    return TABLE.read_command_line(arguments)[0]


def parse_file(tmp_path: Path, content: str, *arguments: str) -> NsqdOptions:
    path = tmp_path / "nsqd.toml"
    path.write_text(content, encoding="utf-8")
    return parse(f"--config={path}", *arguments)


def refused(*arguments: str) -> CommandLineExit:
    with pytest.raises(CommandLineExit) as caught:
        TABLE.read_command_line(arguments)
    return caught.value


def test_every_flag_of_nsq_is_there_with_its_file_key_and_default() -> None:
    fixed = {
        option.flag: (option.file_key, option.default) for option in TABLE.options if not option.default_text
    }
    assert fixed == NSQ_OPTIONS | OUR_OPTIONS
    varying = {option.flag: option.file_key for option in TABLE.options if option.default_text}
    assert varying == FROM_HOSTNAME
    assert {flag.flag for flag in TABLE.command_flags} == {"version", "config", "verbose", "worker-id"}


def test_options_are_frozen_and_slotted() -> None:
    options = NsqdOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.node_id = 1  # type: ignore[misc]
    assert not hasattr(options, "__dict__")


# The command line


def test_without_arguments_the_defaults_hold_and_are_valid() -> None:
    options, warnings = TABLE.read_command_line([])
    assert (options, warnings) == (NsqdOptions(), [])
    options.validate()


def test_flags_are_converted_to_the_type_of_their_option() -> None:
    options = parse(
        "-tcp-address",
        "127.0.0.1:0",
        "--msg-timeout=1.5s",
        "-deflate=false",
        "--statsd-exclude-ephemeral",
        "-node-id=7",
    )
    assert (options.tcp_address, options.msg_timeout, options.node_id) == ("127.0.0.1:0", 1.5, 7)
    assert (options.deflate, options.statsd_exclude_ephemeral) == (False, True)


def test_the_last_of_a_repeated_scalar_wins_and_lists_collect() -> None:
    options = parse(
        "--sync-every=1", "--sync-every=2", "--lookupd-tcp-address=a:1,b:2", "--lookupd-tcp-address", "c:3"
    )
    assert options.sync_every == 2
    assert options.lookupd_tcp_address == ("a:1,b:2", "c:3")


def test_percentiles_split_at_commas_and_are_sorted_downwards() -> None:
    options = parse(
        "--e2e-processing-latency-percentile=0.5,0.99", "-e2e-processing-latency-percentile", "1, 0.95"
    )
    assert options.e2e_processing_latency_percentile == (1.0, 0.99, 0.95, 0.5)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--tls-required", TlsRequired.YES),
        ("--tls-required=true", TlsRequired.YES),
        ("--tls-required=false", TlsRequired.NO),
        ("--tls-required=tcp-https", TlsRequired.EXCEPT_HTTP),
    ],
)
def test_tls_required_is_a_boolean_with_a_third_value(argument: str, expected: TlsRequired) -> None:
    assert parse(argument).tls_required is expected


def test_only_a_requirement_counts_as_true() -> None:
    assert [bool(value) for value in TlsRequired] == [False, True, True]


def test_flags_without_effect_are_accepted() -> None:
    assert parse("--verbose", "--worker-id", "--verbose=false") == NsqdOptions()


@pytest.mark.parametrize("level", ["debug", "INFO", "Warn", "error", "fatal"])
def test_log_levels_are_read_in_any_case(level: str) -> None:
    assert parse("--log-level", level).log_level == level.lower()


@pytest.mark.parametrize("version", ["tls1.0", "TLS1.1", "tls1.2", "tls1.3"])
def test_tls_versions_are_read_in_any_case(version: str) -> None:
    assert parse(f"--tls-min-version={version}").tls_min_version == version.lower()


@pytest.mark.parametrize("mode", ["os", "fsync", "memory"])
def test_there_are_three_durability_modes(mode: str) -> None:
    assert parse(f"--durability={mode}").durability == mode


DURATION = "write a duration such as 250ms, 90s or 1h30m"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nope"], "flag provided but not defined: -nope"),
        (["--msg-timeout"], "flag needs an argument: -msg-timeout"),
        (["--msg-timeout=5"], f'invalid value "5" for flag -msg-timeout: parse error: {DURATION}'),
        (["--sync-every", "x"], 'invalid value "x" for flag -sync-every: parse error: write a whole number'),
        (["--deflate=maybe"], 'invalid boolean value "maybe" for -deflate: parse error: write true or false'),
        (["--tls-required=x"], 'invalid value "x" for flag -tls-required: must be true, false or tcp-https'),
        (
            ["--log-level=warning"],
            'invalid value "warning" for flag -log-level: must be one of debug, info, warn, error, fatal',
        ),
        (
            ["--tls-min-version=ssl3.0"],
            'invalid value "ssl3.0" for flag -tls-min-version: must be one of tls1.0, tls1.1, tls1.2, tls1.3',
        ),
        (
            ["--durability=none"],
            'invalid value "none" for flag -durability: must be one of os, fsync, memory',
        ),
        (
            ["--e2e-processing-latency-percentile=x"],
            'invalid value "x" for flag -e2e-processing-latency-percentile: parse error: write a number',
        ),
        (["--version", "--nope"], "flag provided but not defined: -nope"),
        (["--data-pth=x"], "flag provided but not defined: -data-pth; did you mean --data-path?"),
    ],
)
def test_a_wrong_command_line_is_status_2_with_the_reason_and_where_help_is(
    arguments: list[str], text: str
) -> None:
    leave = refused(*arguments)
    assert leave.status == 2
    assert leave.text == f"nsqd: {text}\n`nsqd --help` lists the flags\n"


def test_help_is_status_0_and_names_every_flag() -> None:
    leave = refused("--help")
    assert leave.status == 0
    assert leave.text.startswith("Usage of nsqd:\n")
    for flag in (*TABLE.command_flags, *TABLE.options):
        assert f"\n  -{flag.flag}" in leave.text
    assert (
        '\n  -msg-timeout duration\n    \ttime after which an unanswered message is requeued (default "1m")\n'
        in leave.text
    )


# The file


def test_a_flag_overrides_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    options = parse_file(tmp_path, "sync_every = 5\nmsg_timeout = '2s'\n", "--sync-every=6")
    assert (options.sync_every, options.msg_timeout, options.max_rdy_count) == (6, 2.0, 2500)


def test_a_list_of_flags_replaces_that_of_the_file(tmp_path: Path) -> None:
    options = parse_file(tmp_path, 'nsqlookupd_tcp_addresses = ["a:1"]', "--lookupd-tcp-address=b:2")
    assert options.lookupd_tcp_address == ("b:2",)


@pytest.mark.parametrize(
    ("line", "attribute", "expected"),
    [
        ("id = 5", "node_id", 5),
        ('id = "5"', "node_id", 5),
        ("msg_timeout = 1500", "msg_timeout", 1.5),
        ('msg_timeout = "1500"', "msg_timeout", 1.5),
        ('msg_timeout = "1m30s"', "msg_timeout", 90.0),
        ("deflate = false", "deflate", False),
        ('deflate = "false"', "deflate", False),
        ("deflate = 0", "deflate", False),
        ("statsd_exclude_ephemeral = 1", "statsd_exclude_ephemeral", True),
        ('topology_zone = "z"', "topology_zone", "z"),
        ("topology_zone = 7", "topology_zone", "7"),
        ('nsqlookupd_tcp_addresses = ["a:1", "b:2"]', "lookupd_tcp_address", ("a:1", "b:2")),
        ('nsqlookupd_tcp_addresses = "a:1, b:2"', "lookupd_tcp_address", ("a:1", "b:2")),
        ('nsqlookupd_tcp_addresses = ""', "lookupd_tcp_address", ()),
        (
            "e2e_processing_latency_percentiles = [0.5, 1, 0.9]",
            "e2e_processing_latency_percentile",
            (0.5, 1.0, 0.9),
        ),
        ('e2e_processing_latency_percentiles = "0.5,0.9"', "e2e_processing_latency_percentile", (0.5, 0.9)),
        ("tls_required = true", "tls_required", TlsRequired.YES),
        ('tls_required = "tcp-https"', "tls_required", TlsRequired.EXCEPT_HTTP),
        ('tls_min_version = ""', "tls_min_version", "tls1.0"),
        ('tls_min_version = "tls1.2"', "tls_min_version", "tls1.2"),
        ('log_level = "DEBUG"', "log_level", "debug"),
    ],
)
def test_values_of_the_file_are_converted(
    tmp_path: Path, line: str, attribute: str, expected: object
) -> None:
    assert getattr(parse_file(tmp_path, line), attribute) == expected


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("id = 1.5", "id (flag --node-id) must be an integer"),
        ("id = true", "id (flag --node-id) must be an integer"),
        ("deflate = 2", "deflate (flag --deflate) must be true or false"),
        ("deflate = []", "deflate (flag --deflate) must be true or false"),
        ("data_path = true", "data_path (flag --data-path) must be a string"),
        (
            "log_level = 'warning'",
            "log_level (flag --log-level) must be one of debug, info, warn, error, fatal",
        ),
        ("tls_required = 'x'", "tls_required (flag --tls-required) must be true, false or tcp-https"),
        (
            "nsqlookupd_tcp_addresses = 5",
            "nsqlookupd_tcp_addresses (flag --lookupd-tcp-address) must be an array",
        ),
        (
            "nsqlookupd_tcp_addresses = [5]",
            "nsqlookupd_tcp_addresses (flag --lookupd-tcp-address) must be an array",
        ),
        (
            "e2e_processing_latency_percentiles = [true]",
            "e2e_processing_latency_percentiles (flag --e2e-processing-latency-percentile) must be numbers",
        ),
        (
            "e2e_processing_latency_percentiles = 0.5",
            "e2e_processing_latency_percentiles (flag --e2e-processing-latency-percentile) must be an array",
        ),
        *(
            (f"msg_timeout = {value}", "msg_timeout (flag --msg-timeout) must be a duration")
            for value in ("1.5", "true", "'5x'", "[1]")
        ),
    ],
)
def test_a_wrong_value_in_the_file_names_the_file_the_key_and_the_flag(
    tmp_path: Path, line: str, text: str
) -> None:
    with pytest.raises(OptionError) as caught:
        parse_file(tmp_path, line)
    assert str(caught.value).startswith(f"{tmp_path / 'nsqd.toml'}: {text}")


@pytest.mark.parametrize("value", ["9" * 400, f"'{'9' * 400}'", "'2000000h'"])
def test_an_absurd_duration_in_the_file_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(OptionError, match="--max-req-timeout must be at most 876000h"):
        parse_file(tmp_path, f"max_req_timeout = {value}").validate()


def test_unknown_keys_of_the_file_are_ignored_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "nsqd.toml"
    path.write_text("sync_every = 5\nsync_evry = 6\n[table]\nx = 1\n")
    options, warnings = TABLE.read_command_line([f"--config={path}"])
    assert options.sync_every == 5
    assert warnings == [f"{path}: unknown key sync_evry ignored", f"{path}: unknown key table ignored"]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file or directory"):
        parse(f"--config={tmp_path / 'none.toml'}")


@pytest.mark.parametrize("content", [b"sync_every = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"bad\.toml: "):
        parse(f"--config={path}")


# Meaning


@pytest.mark.parametrize(("hostname", "node_id"), [("localhost", 16), ("nsq-host-1.example.com", 313)])
def test_the_default_node_id_is_that_of_nsq(hostname: str, node_id: int) -> None:
    assert default_node_id(hostname) == node_id


def test_any_client_certificate_policy_turns_tls_required_on() -> None:
    assert parse("--tls-client-auth-policy=require").tls_required is TlsRequired.YES
    options = NsqdOptions(tls_client_auth_policy="require", tls_required=TlsRequired.EXCEPT_HTTP)
    assert options.tls_required is TlsRequired.EXCEPT_HTTP


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, TlsRequired.YES),
        (False, TlsRequired.NO),
        ("true", TlsRequired.YES),
        ("tcp-https", TlsRequired.EXCEPT_HTTP),
    ],
)
def test_tls_required_may_be_a_bool_or_a_text(given: Any, expected: TlsRequired) -> None:
    assert NsqdOptions(tls_required=given).tls_required is expected


def test_tls_required_may_be_nothing_else() -> None:
    with pytest.raises(OptionError, match="--tls-required must be true, false or tcp-https"):
        NsqdOptions(tls_required="perhaps")  # type: ignore[arg-type]  # that is the point


CLUSTER = {
    "replication_cluster": "c",
    "replication_coordinator": "etcd://127.0.0.1:2379",
    "replication_secret_file": "secret",
    "replication_name": "a",
}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_deflate_level": 0}, "--max-deflate-level must be [1,9]"),
        ({"max_deflate_level": 10}, "--max-deflate-level must be [1,9]"),
        ({"node_id": -1}, "--node-id must be [0,1024)"),
        ({"node_id": 1024}, "--node-id must be [0,1024)"),
        ({"tls_cert": "c"}, "--tls-cert and --tls-key must be given together"),
        ({"tls_key": "k"}, "--tls-cert and --tls-key must be given together"),
        ({"tls_required": TlsRequired.YES}, "cannot require TLS client connections without TLS key and cert"),
        (
            {"tls_client_auth_policy": "require"},
            "cannot require TLS client connections without TLS key and cert",
        ),
        ({"auth_http_request_method": "POST"}, "--auth-http-request-method must be post or get"),
        (
            {"e2e_processing_latency_percentile": (0.5, 1.5)},
            "invalid E2E processing latency percentile: 1.5",
        ),
        ({"e2e_processing_latency_percentile": (2.0,)}, "invalid E2E processing latency percentile: 2"),
        ({"e2e_processing_latency_percentile": (0.0,)}, "invalid E2E processing latency percentile: 0"),
        (
            {"e2e_processing_latency_percentile": (float("nan"),)},
            "invalid E2E processing latency percentile: nan",
        ),
        ({"min_in_sync": 2}, "--min-in-sync needs --replication-cluster"),
        (
            {"replication_coordinator": "etcd://h:1"},
            "--replication-coordinator needs --replication-cluster",
        ),
        ({"replication_tls_cert": "c"}, "--replication-tls-cert needs --replication-cluster"),
        ({"replication_cluster": "c"}, "--replication-cluster needs --replication-coordinator"),
        (
            {**CLUSTER, "replication_cluster": "a/b"},
            "--replication-cluster must have 1 to 64 characters of `.a-zA-Z0-9_-`",
        ),
        (
            {**CLUSTER, "replication_name": "a b"},
            "--replication-name must have 1 to 64 characters of `.a-zA-Z0-9_-`",
        ),
        (
            {**CLUSTER, "replication_tls_cert": "c", "replication_tls_key": "k"},
            (
                "--replication-tls-cert, --replication-tls-key, --replication-tls-root-ca-file must be given "
                "together"
            ),
        ),
        (
            {**CLUSTER, "durability": "memory"},
            (
                "--replication-cluster does not work with --durability=memory: messages would be "
                "acknowledged before they are copied"
            ),
        ),
        ({"sync_every": 0}, "--sync-every must be positive"),
        ({"sync_timeout": 0.0}, "--sync-timeout must be positive"),
        ({"mem_queue_size": -1}, "--mem-queue-size must not be negative"),
        ({"retention_age": -1.0}, "--retention-age must not be negative"),
        ({"max_req_timeout": 876_001 * 3600.0}, "--max-req-timeout must be at most 876000h (100 years)"),
        ({"msg_timeout": float("inf")}, "--msg-timeout must be at most 876000h (100 years)"),
        ({"sync_timeout": float("nan")}, "--sync-timeout must be at most 876000h (100 years)"),
    ],
)
def test_values_that_nsqd_cannot_start_with_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        NsqdOptions(**values).validate()
    assert str(caught.value) == text


def test_the_limits_of_the_valid_ranges_are_valid() -> None:
    for values in (
        {"node_id": 0, "max_deflate_level": 1, "mem_queue_size": 0},
        {"node_id": 1023, "max_deflate_level": 9, "e2e_processing_latency_percentile": (1.0, 0.001)},
        {"tls_cert": "c", "tls_key": "k", "tls_required": TlsRequired.YES},
        {"auth_http_request_method": "post"},
        {**CLUSTER, "min_in_sync": 2},
    ):
        NsqdOptions(**values).validate()


# The generated copies


@pytest.mark.parametrize(
    ("name", "generate"), [("nsqd-options.md", TABLE.markdown), ("nsqd.example.toml", TABLE.toml)]
)
def test_the_checked_in_reference_is_what_the_source_generates(name: str, generate: Any) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == generate(), "stale: run `make docs`"


def test_the_example_file_gives_the_defaults() -> None:
    options, warnings = TABLE.read_command_line([f"--config={REFERENCE / 'nsqd.example.toml'}"])
    assert (options, warnings) == (NsqdOptions(), [])


def test_the_example_file_mentions_every_key() -> None:
    example = (REFERENCE / "nsqd.example.toml").read_text(encoding="utf-8")
    for option in TABLE.options:
        assert f"\n{option.file_key} = " in example or f"\n# {option.file_key} = " in example
