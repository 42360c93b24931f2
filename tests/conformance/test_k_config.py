"""Group K: /config, reading and changing options at run time."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack

import pytest

from tests.support import wait_until

# By key: the flag to set (empty for none), and the answer to GET. Texts are bare, others JSON.
GIVEN = {
    "log_level": (("log_level", "debug"), 1),
    "log_prefix": (("log_prefix", "[some prefix] "), "[some prefix] "),
    "id": (("node_id", 77), 77),
    "broadcast_address": (("broadcast_address", "b.example.com"), "b.example.com"),
    "broadcast_tcp_port": (("broadcast_tcp_port", 1234), 1234),
    "broadcast_http_port": (("broadcast_http_port", 1235), 1235),
    "http_client_connect_timeout": (("http_client_connect_timeout", 1.25), 1_250_000_000),
    "http_client_request_timeout": (("http_client_request_timeout", 2.5), 2_500_000_000),
    "mem_queue_size": (("mem_queue_size", 123), 123),
    "max_bytes_per_file": (("max_bytes_per_file", 1_234_567), 1_234_567),
    "sync_every": (("sync_every", 12), 12),
    "sync_timeout": (("sync_timeout", 1.5), 1_500_000_000),
    "queue_scan_worker_pool_max": (("queue_scan_worker_pool_max", 3), 3),
    "queue_scan_selection_count": (("queue_scan_selection_count", 21), 21),
    "msg_timeout": (("msg_timeout", 61.5), 61_500_000_000),
    "max_msg_timeout": (("max_msg_timeout", 901.0), 901_000_000_000),
    "max_msg_size": (("max_msg_size", 1001), 1001),
    "max_body_size": (("max_body_size", 10_001), 10_001),
    "max_req_timeout": (("max_req_timeout", 3601.0), 3_601_000_000_000),
    "max_heartbeat_interval": (("max_heartbeat_interval", 59.0), 59_000_000_000),
    "max_rdy_count": (("max_rdy_count", 2501), 2501),
    "max_output_buffer_size": (("max_output_buffer_size", 65_537), 65_537),
    "max_output_buffer_timeout": (("max_output_buffer_timeout", 31.0), 31_000_000_000),
    "min_output_buffer_timeout": (("min_output_buffer_timeout", 0.026), 26_000_000),
    "output_buffer_timeout": (("output_buffer_timeout", 0.251), 251_000_000),
    "max_channel_consumers": (("max_channel_consumers", 7), 7),
    "statsd_interval": (("statsd_interval", 61.0), 61_000_000_000),
    "statsd_mem_stats": (("statsd_mem_stats", False), False),
    "statsd_prefix": (("statsd_prefix", "a.%s.b"), "a.b_example_com_1235.b."),
    "statsd_udp_packet_size": (("statsd_udp_packet_size", 509), 509),
    "statsd_exclude_ephemeral": (("statsd_exclude_ephemeral", True), True),
    "e2e_processing_latency_percentiles": (("e2e_processing_latency_percentile", (0.99, 0.5)), [0.99, 0.5]),
    "e2e_processing_latency_window_time": (("e2e_processing_latency_window_time", 601.0), 601_000_000_000),
    "tls_min_version": (("tls_min_version", "tls1.2"), 771),
    "deflate": (("deflate", False), False),
    "max_deflate_level": (("max_deflate_level", 5), 5),
    "snappy": (("snappy", False), False),
}
# Answers of a broker without flags.
DEFAULTS = {
    "log_level": 2,
    "log_prefix": "[nsqd] ",
    "nsqlookupd_tcp_addresses": [],
    "auth_http_addresses": [],
    "http_client_connect_timeout": 2_000_000_000,
    "http_client_request_timeout": 5_000_000_000,
    "mem_queue_size": 10_000,
    "max_bytes_per_file": 104_857_600,
    "sync_every": 2500,
    "sync_timeout": 2_000_000_000,
    "queue_scan_worker_pool_max": 4,
    "queue_scan_selection_count": 20,
    "msg_timeout": 60_000_000_000,
    "max_msg_timeout": 900_000_000_000,
    "max_msg_size": 1_048_576,
    "max_body_size": 5_242_880,
    "max_req_timeout": 3_600_000_000_000,
    "max_heartbeat_interval": 60_000_000_000,
    "max_rdy_count": 2500,
    "max_output_buffer_size": 65_536,
    "max_output_buffer_timeout": 30_000_000_000,
    "min_output_buffer_timeout": 25_000_000,
    "output_buffer_timeout": 250_000_000,
    "max_channel_consumers": 0,
    "statsd_address": "",
    "statsd_interval": 60_000_000_000,
    "statsd_mem_stats": True,
    "statsd_udp_packet_size": 508,
    "statsd_exclude_ephemeral": False,
    "e2e_processing_latency_percentiles": [],
    "e2e_processing_latency_window_time": 600_000_000_000,
    "tls_cert": "",
    "tls_key": "",
    "tls_root_ca_file": "",
    "tls_client_auth_policy": "",
    "tls_required": 0,
    "tls_min_version": 769,
    "deflate": True,
    "max_deflate_level": 6,
    "snappy": True,
}
# In NSQ's sources of 1.3.0, but not in the release of that name.
NEWER = {
    "auth_http_request_method": "get",
    "topology_region": "",
    "topology_zone": "",
    "enable_experiment": [],
}
NO_KEYS = ["nope", "node_id", "verbose", "worker_id", "version", "config", "lookupd_tcp_address", "LOG_LEVEL"]


def expect_value(answer, value):
    if isinstance(value, str):
        answer.expect_text(value)
    else:
        found = answer.expect_json()
        assert (found, type(found)) == (value, type(value))
        assert answer.body == json.dumps(value, separators=(",", ":")).encode()


@pytest.fixture(scope="module")
def told_broker(shared_broker):
    return shared_broker(**dict(flag for flag, _ in GIVEN.values()))


def test_case_147_get_returns_the_value_of_the_flag(told_broker):
    with told_broker.http_connect() as connection:
        for key, (_, value) in GIVEN.items():
            expect_value(connection.request("GET", f"/config/{key}"), value)


def test_case_147_get_returns_the_default(broker):
    with broker.http_connect() as connection:
        for key, value in DEFAULTS.items():
            expect_value(connection.request("GET", f"/config/{key}"), value)


@pytest.mark.deviation("not in NSQ 1.3.0 as released")
def test_case_147_get_knows_the_newer_keys_too(broker):
    for key, value in NEWER.items():
        expect_value(broker.request("GET", f"/config/{key}"), value)


def test_case_147_addresses_are_shown_as_given_and_ports_as_they_are(broker):
    for key in ("tcp_address", "http_address", "https_address"):
        expect_value(broker.request("GET", f"/config/{key}"), "127.0.0.1:0")
    expect_value(broker.request("GET", "/config/data_path"), str(broker.data_path))
    expect_value(broker.request("GET", "/config/broadcast_tcp_port"), broker.address[1])
    expect_value(broker.request("GET", "/config/broadcast_http_port"), broker.http_address[1])
    hostname = socket.gethostname()
    expect_value(broker.request("GET", "/config/broadcast_address"), hostname)
    name = f"{hostname}_{broker.http_address[1]}".replace(".", "_")
    expect_value(broker.request("GET", "/config/statsd_prefix"), f"nsq.{name}.")
    assert 0 <= broker.request("GET", "/config/id").expect_json() < 1024


def test_case_147_an_unknown_key_is_an_invalid_option(broker):
    for key in NO_KEYS:
        broker.request("GET", f"/config/{key}").expect_error(400, "INVALID_OPTION")
        broker.request("PUT", f"/config/{key}", b"1").expect_error(400, "INVALID_OPTION")


def test_case_147_only_two_keys_can_be_changed(broker):
    for key in {*DEFAULTS} - {"log_level", "nsqlookupd_tcp_addresses"}:
        broker.request("PUT", f"/config/{key}", b"1").expect_error(400, "INVALID_OPTION")
    expect_value(broker.request("GET", "/config/max_msg_size"), DEFAULTS["max_msg_size"])


def test_case_147_put_log_level(shared_broker):
    broker = shared_broker(max_msg_size=100)
    levels = ("debug", "info", "warn", "error", "fatal")
    for number, level in enumerate(levels, 1):
        for spelling in (level, level.upper(), level.title()):
            expect_value(broker.request("PUT", "/config/log_level", spelling.encode()), number)
            expect_value(broker.request("GET", "/config/log_level"), number)
    expect_value(broker.request("PUT", "/config/log_level", [b"wa", b"rn"]), 3)
    for bad in (b"warning", b'"info"', b"bad", b"info\n", b" info", b"2", b"\xff"):
        broker.request("PUT", "/config/log_level", bad).expect_error(400, "INVALID_VALUE")
    for size in (b"", b"x" * 101, [b"x" * 60, b"x" * 41]):
        broker.request("PUT", "/config/log_level", size).expect_error(413, "INVALID_VALUE")
    expect_value(broker.request("GET", "/config/log_level"), 3)
    expect_value(broker.request("PUT", "/config/log_level", b"info"), 2)


def test_case_147_the_size_is_checked_before_the_key(shared_broker):
    broker = shared_broker(max_msg_size=100)
    for body in (b"", b"x" * 101):
        broker.request("PUT", "/config/nope", body).expect_error(413, "INVALID_VALUE")


def test_case_147_the_log_level_holds_at_once_and_not_after_a_restart(own_process):
    broker = own_process()
    broker.request("PUT", "/config/log_level", b"fatal")
    before = broker.stderr_text()
    broker.control("create", "silent")
    assert broker.stderr_text() == before
    broker.request("PUT", "/config/log_level", b"info")
    broker.control("create", "told")
    wait_until(lambda: "told" in broker.stderr_text())
    assert "silent" not in broker.stderr_text()
    broker.request("PUT", "/config/log_level", b"error")
    broker.restart()
    expect_value(broker.request("GET", "/config/log_level"), 2)


def test_case_147_put_lookupd_addresses(own_broker):
    broker = own_broker()
    path = "/config/nsqlookupd_tcp_addresses"
    expect_value(broker.request("GET", path), [])
    # Nothing listens there, but that is no reason to refuse it.
    for addresses in (["127.0.0.1:1"], ["127.0.0.1:1", "127.0.0.1:2"], ["127.0.0.1:2"], []):
        expect_value(broker.request("PUT", path, json.dumps(addresses).encode()), addresses)
        expect_value(broker.request("GET", path), addresses)
    expect_value(broker.request("PUT", path, b' [ "127.0.0.1:1"\n] '), ["127.0.0.1:1"])
    for bad in (b"{}", b'"127.0.0.1:1"', b"[1]", b"nope", b'["a"] x', b"127.0.0.1:1", b'["a"', b"\xff"):
        broker.request("PUT", path, bad).expect_error(400, "INVALID_VALUE")
    broker.request("PUT", path, b"").expect_error(413, "INVALID_VALUE")
    expect_value(broker.request("GET", path), ["127.0.0.1:1"])
    # A missing list counts as empty; NSQ returns it as given.
    shown = None if broker.is_reference else []
    expect_value(broker.request("PUT", path, b"null"), shown)
    expect_value(broker.request("GET", path), shown)


class Lookupd(threading.Thread):
    """A fake nsqlookupd: answers OK to everything, and records its clients."""

    def __init__(self):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.commands = []
        self.connected = 0
        self.connections = []
        self.start()

    def run(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        self.connected += 1
        try:
            with connection, connection.makefile("rb") as stream:
                assert stream.read(4) == b"  V1"
                while line := stream.readline():
                    if line == b"IDENTIFY\n":
                        stream.read(int.from_bytes(stream.read(4), "big"))
                        answer = json.dumps(
                            {
                                "tcp_port": 1,
                                "http_port": 1,
                                "version": "1.3.0",
                                "broadcast_address": "127.0.0.1",
                                "hostname": "h",
                            }
                        ).encode()
                    else:
                        answer = b"OK"
                    self.commands.append(line.decode().strip())
                    connection.sendall(len(answer).to_bytes(4, "big") + answer)
        except OSError:
            pass
        finally:
            self.connected -= 1

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.join()


@pytest.mark.allow_leftovers("the threads of the scripted lookupds end with their connections")
def test_case_148_lookupd_peers_follow_the_list(own_broker, topic):
    with ExitStack() as stack:
        one, two, three = lookupds = [Lookupd() for _ in range(3)]
        for lookupd in lookupds:
            stack.callback(lookupd.close)
        broker = own_broker()
        broker.control("create", topic)
        path = "/config/nsqlookupd_tcp_addresses"

        def expect(*wanted):
            body = json.dumps([lookupd.address for lookupd in wanted]).encode()
            expect_value(broker.request("PUT", path, body), json.loads(body))
            wait_until(
                lambda: all(lookupd.connected == (lookupd in wanted) for lookupd in lookupds),
                what=lambda: [lookupd.connected for lookupd in lookupds],
            )
            for lookupd in wanted:
                wait_until(lambda lookupd=lookupd: f"REGISTER {topic}" in lookupd.commands)

        expect()
        expect(one)
        expect(two, three)
        # The remaining ones get the new registrations.
        broker.control("create", "new_topic")
        for lookupd in (two, three):
            wait_until(lambda lookupd=lookupd: "REGISTER new_topic" in lookupd.commands)
        assert "REGISTER new_topic" not in one.commands
        expect(one, three)
        expect()
        broker.stop()
