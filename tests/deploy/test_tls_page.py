"""docs/how-to/tls.md, step by step: its openssl commands, then nsqd, clients, tools, nsqadmin."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsparq.client import Config
from nsparq.client.sync import Producer
from nsparq.options import TABLE as NSQD
from nsparq.spark.options import NsqOptions, Use
from tests.admin.support import AdminThread
from tests.support import BrokerProcess, unique_name, wait_until
from tests.support.polling import DEADLINE

PAGE = (Path(__file__).parents[2] / "docs/how-to/tls.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- test: (\w+) -->\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
NAME, ADDRESS = "nsqd-1.example.com", "10.0.0.5"
FILES = ("ca.pem", "client.pem", "client.key")


def run(text: str, folder: Path, input: bytes = b"", **variables: str) -> str:
    """Runs the commands of a block, with our programs on the path. Returns their output."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        input=input,
        capture_output=True,
        timeout=DEADLINE,
        env={**os.environ, "PATH": programs, **variables},
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's first commands have been run, for a server on this machine."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("authority", "server", "client"):
        run(BLOCKS[name].replace(NAME, "localhost").replace(ADDRESS, "127.0.0.1"), folder)
    return folder


@pytest.fixture(scope="module")
def broker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """nsqd with the flags of the page, the strictest."""
    program, *flags = shlex.split(BLOCKS["nsqd"])
    assert program == "nsqd"
    _, options = NSQD.read_flags(flags)
    files = {name: str(folder / value) for name, value in options.items() if (folder / value).exists()}
    assert files.keys() == {"tls_cert", "tls_key", "tls_root_ca_file"}
    with BrokerProcess(tmp_path_factory.mktemp("data"), **{**options, **files}) as broker:
        yield broker


def addressed(text: str, broker: BrokerProcess) -> str:
    """A block of the page with the ports of this broker."""
    assert isinstance(broker.address, tuple) and isinstance(broker.https_address, tuple)
    text = text.replace(f"{NAME}:4150", f"localhost:{broker.address[1]}")
    return text.replace(f"{NAME}:4152", f"localhost:{broker.https_address[1]}")


def context(folder: Path) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=folder / "ca.pem")
    made.load_cert_chain(folder / "client.pem", folder / "client.key")
    return made


def test_the_certificates_are_what_the_page_says(folder: Path) -> None:
    assert run("openssl verify -CAfile ca.pem server.pem client.pem", folder).count("OK") == 2
    shown = run("openssl x509 -in server.pem -noout -text", folder)
    assert "DNS:localhost, IP Address:127.0.0.1" in shown
    assert (folder / "server.key").stat().st_mode & 0o077 == 0


def test_the_tools_publish_and_consume(broker: BrokerProcess, folder: Path) -> None:
    assert run(addressed(BLOCKS["tools"], broker), folder) == "hello\n"


def test_our_library_publishes(broker: BrokerProcess, folder: Path) -> None:
    (config,) = (node for node in ast.walk(ast.parse(BLOCKS["library"])) if isinstance(node, ast.Call))
    values = {word.arg or "": ast.literal_eval(word.value) for word in config.keywords}
    files = {name: str(folder / value) for name, value in values.items() if value in FILES}
    assert len(files) == 3
    assert isinstance(broker.address, tuple)
    with Producer(f"localhost:{broker.address[1]}", config=Config(**{**values, **files})) as producer:
        producer.publish(unique_name("library"), b"hello")


def test_https_requires_the_certificate(broker: BrokerProcess, folder: Path) -> None:
    with broker.http_connect(https=True, tls=context(folder)) as connection:
        assert connection.request("GET", "/ping").body == b"OK"
    answer = broker.request("GET", "/ping")
    assert (answer.status, b"TLS_REQUIRED" in answer.body) == (403, True)


def test_curl_publishes(broker: BrokerProcess, folder: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    assert run(addressed(BLOCKS["curl"], broker), folder, no_proxy="localhost") == "OK"


def test_nsqadmin_follows_to_https(broker: BrokerProcess, folder: Path) -> None:
    flags = shlex.split(BLOCKS["nsqadmin"])[1:]
    files = {
        flag[2:].replace("-", "_"): str(folder / name) for flag, name in (f.split("=") for f in flags[1:])
    }
    assert len(files) == 3
    assert isinstance(broker.http_address, tuple)
    topic = unique_name("shown")
    with broker.http_connect(https=True, tls=context(folder)) as connection:
        connection.request("POST", f"/topic/create?topic={topic}")
    with AdminThread(nsqd_http_address=(f"localhost:{broker.http_address[1]}",), **files) as admin:
        assert topic in admin.get("/api/topics")["topics"]


def test_spark_has_these_options() -> None:
    (options,) = (node for node in ast.walk(ast.parse(BLOCKS["spark"])) if isinstance(node, ast.Dict))
    parsed = NsqOptions.parse(
        {**ast.literal_eval(options), "topic": "orders", "channel": "warehouse"}, Use.LOG_STREAM
    )
    shown = json.dumps({name: str(getattr(parsed, name)) for name in parsed.__dataclass_fields__})
    for name in FILES:
        assert f"/etc/nsparq/tls/{name}" in shown


def test_a_new_certificate_is_used_without_a_restart(broker: BrokerProcess, folder: Path) -> None:
    """Last: what was there before is replaced, by the commands of the page."""
    before = served(broker, folder)
    with broker.http_connect(https=True, tls=context(folder)) as connection:
        run(BLOCKS["server"].replace(NAME, "localhost").replace(ADDRESS, "127.0.0.1"), folder)
        broker.signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: certificates reloaded" in broker.stderr_text())
        assert connection.request("GET", "/ping").body == b"OK"
    assert served(broker, folder) != before


def served(broker: BrokerProcess, folder: Path) -> bytes:
    """The certificate that the broker shows."""
    with broker.http_connect(https=True, tls=context(folder)) as connection:
        assert isinstance(connection.socket, ssl.SSLSocket)
        found = connection.socket.getpeercert(binary_form=True)
        assert found is not None
        return found
