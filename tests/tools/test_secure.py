"""The tools with TLS, compression, secrets and Unix sockets."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsparq.options import TlsRequired
from nsparq.server.auth.policy_file import hash_generated
from tests.support import BrokerThread, start_broker, unique_name
from tests.support.certificates import certificates

from .processes import Tool, http, run_tool, tcp, wait_for_channel

SECRET = secrets.token_hex(32)
POLICY = f"""
[[identity]]
name = "me"
secret = "{hash_generated(SECRET.encode())}"
[[identity.allow]]
topic = ".*"
permissions = ["publish", "subscribe", "read"]
"""
CA = str(certificates().ca.cert)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerThread]:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(POLICY)
    path.chmod(0o600)
    flags = certificates().server_flags(tls_required=TlsRequired.YES, auth_policy_file=str(path))
    with BrokerThread(**flags) as broker:
        yield broker


@pytest.mark.parametrize("more", [(), ("deflate",), ("snappy",)], ids=["plain", "deflate", "snappy"])
def test_tls_compression_and_a_secret_are_options_of_the_client(
    guarded: BrokerThread, more: tuple[str, ...]
) -> None:
    topic = unique_name("topic")
    options = ("tls_v1", f"tls_root_ca_file,{certificates().ca.cert}", f"auth_secret,{SECRET}", *more)
    address = f"--nsqd-tcp-address={tcp(guarded)}"
    given = [f"--producer-opt={option}" for option in options]
    assert run_tool("to_nsq", f"--topic={topic}", address, *given, input=b"one\ntwo\n").status == 0
    given = [f"--consumer-opt={option}" for option in options]
    done = run_tool("nsq_tail", f"--topic={topic}", address, *given, "-n=2")
    assert (done.status, done.out) == (0, b"one\ntwo\n")
    assert SECRET not in done.err


def test_the_secret_may_come_from_the_environment(guarded: BrokerThread) -> None:
    """Other users of the machine cannot see it there."""
    topic = unique_name("topic")
    address, given = f"--nsqd-tcp-address={tcp(guarded)}", ("tls_v1", f"tls_root_ca_file,{CA}")
    options = [f"--producer-opt={option}" for option in given]
    done = run_tool("to_nsq", f"--topic={topic}", address, *options, input=b"one\n", NSQ_SECRET=SECRET)
    assert done.status == 0, done.err
    options = [f"--consumer-opt={option}" for option in given]
    done = run_tool("nsq_tail", f"--topic={topic}", address, *options, "-n=1", NSQ_SECRET=SECRET)
    assert (done.status, done.out) == (0, b"one\n")
    assert SECRET not in done.err
    # The option of this client takes precedence.
    done = run_tool(
        "nsq_tail", f"--topic={topic}", address, *options, "--consumer-opt=auth_secret,no", NSQ_SECRET=SECRET
    )
    assert (done.status, "E_AUTH_FAILED" in done.err) == (1, True)


def test_figures_are_shown_with_the_secret(guarded: BrokerThread) -> None:
    """By an nsqd that only answers over HTTPS and names that port."""
    topic = unique_name("topic")
    guarded.control("create", topic, "c")
    arguments = (f"--topic={topic}", "--channel=c", "--count=1", "--interval=10ms")
    arguments += (f"--nsqd-http-address={http(guarded)}",)
    done = run_tool("nsq_stat", *arguments, NSQ_SECRET=SECRET, SSL_CERT_FILE=CA)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[2].split() == b"0 0 | 0 0 0 0 0 | 0 0 0 0 | 0s 0s".split()
    done = run_tool("nsq_stat", *arguments, SSL_CERT_FILE=CA)
    assert (done.status, done.err.rstrip().endswith("status 401: set NSQ_SECRET")) == (1, True)
    done = run_tool("nsq_stat", *arguments, NSQ_SECRET="wrong", SSL_CERT_FILE=CA)
    assert (done.status, done.err.rstrip().endswith("status 401: NSQ_SECRET is wrong")) == (1, True)
    done = run_tool("nsq_stat", *arguments, NSQ_SECRET=SECRET)
    assert (done.status, "certificate" in done.err) == (1, True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((f"auth_secret,{SECRET}",), "tls"),
        (("tls_v1",), "certificate"),
        (("tls_v1", "tls_insecure_skip_verify"), "auth"),
        (("tls_v1", "tls_insecure_skip_verify", "auth_secret,wrong"), "auth"),
    ],
    ids=["no TLS", "unknown authority", "no secret", "wrong secret"],
)
def test_a_refused_client_gets_the_reason(
    guarded: BrokerThread, options: tuple[str, ...], reason: str
) -> None:
    given = [f"--consumer-opt={option}" for option in options]
    done = run_tool("nsq_tail", "--topic=t", f"--nsqd-tcp-address={tcp(guarded)}", *given)
    assert (done.status, done.out) == (1, b"")
    assert reason in done.err.splitlines()[-1].lower()


def test_an_nsqd_can_be_on_a_unix_socket(tmp_path: Path) -> None:
    path, topic = tmp_path / "nsqd.sock", unique_name("topic")
    with start_broker(tcp_address=str(path)) as broker:
        address = f"--nsqd-tcp-address={path}"
        with Tool("nsq_tail", f"--topic={topic}", "--channel=c", address) as tool:
            wait_for_channel(broker, topic, "c")
            done = run_tool("to_nsq", f"--topic={topic}", address, input=json.dumps({"a": 1}).encode())
            assert done.status == 0
            tool.wait_for_out(b'{"a": 1}\n')
            assert tool.terminate() == 0
