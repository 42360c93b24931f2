"""Every example runs as a user would run it, and the documentation shows the same text."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import selectors
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsparq.client import Config
from nsparq.options import TlsRequired
from nsparq.server.auth.policy_file import hash_generated
from nsparq.testing import Broker, Lookupd, run_broker, run_lookupd
from nsparq.version import __version__
from tests.support import wait_until
from tests.support.certificates import certificates
from tests.support.polling import DEADLINE

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
HOW_TO = ("how-to/asyncio.md", "how-to/django.md", "how-to/fastapi.md")
PAGES = ("tutorial.md", "client.md", "coming-from-pynsq.md", *HOW_TO)
DJANGO = (
    "django_shop/settings.py",
    "django_shop/shop/models.py",
    "django_shop/shop/views.py",
    "django_shop/shop/consumers.py",
)
PATIENCE_S = DEADLINE


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def lookupd(broker: Broker) -> Iterator[Lookupd]:
    with run_lookupd() as lookupd:
        broker.register_with(lookupd)
        yield lookupd
        broker.register_with()


@pytest.fixture(autouse=True)
def no_topics(broker: Broker) -> Iterator[None]:
    yield
    for topic in broker.stats()["topics"]:
        broker.delete(topic["topic_name"])


class Program:
    """A running example. Its text is that of the documentation, except the addresses."""

    def __init__(
        self,
        directory: Path,
        name: str,
        addresses: dict[str, str],
        warnings: str = "error",
        **environment: str,
    ) -> None:
        self.path = copy(directory, name, addresses)
        self.process = subprocess.Popen(
            [sys.executable, "-W", warnings, str(self.path)],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        self._output = b""

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def expect(self, *lines: str) -> None:
        """These lines of output, in any order, and no others before them."""
        assert sorted(self._read_line() for _ in lines) == sorted(lines)

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._output:
                assert selector.select(deadline - time.monotonic()), "no output"
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, f"it ended:\n{self.process.stderr.read().decode()}"  # type: ignore[union-attr]
                self._output += data
        line, _, self._output = self._output.partition(b"\n")
        return line.decode()

    def end(self, stdin: str = "", errors: str = "") -> str:
        """Wait until it ends with status 0. Returns the rest of its output."""
        output, said = self.process.communicate(stdin.encode(), timeout=PATIENCE_S)
        assert (self.process.returncode, re.sub("<.*>", "<…>", said.decode())) == (0, errors)
        return (self._output + output).decode()

    def interrupt(self, errors: str = "") -> None:
        """Send Ctrl-C; it must end with status 0."""
        self.process.send_signal(signal.SIGINT)
        assert self.end(errors=errors) == ""


def copy(directory: Path, name: str, addresses: dict[str, str]) -> Path:
    source = (EXAMPLES / name).read_text()
    for written, real in addresses.items():
        source = source.replace(written, real)
    path = directory / Path(name).name
    path.write_text(source)
    return path


@pytest.fixture
def addresses(broker: Broker) -> dict[str, str]:
    return {"127.0.0.1:4150": broker.tcp_address}


def bodies(broker: Broker, topic: str) -> list[bytes]:
    return [message.body for message in broker.peek(topic, count=1000)]


def waiting(broker: Broker, topic: str, channel: str) -> int:
    stats = broker.channel_stats(topic, channel)
    assert stats is not None
    return int(stats["depth"])


def run_pytest(directory: Path, *names: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "nsparq.testing.plugin", *names]
    result = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr


# the tutorial


def test_the_tutorial_works_as_written(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    # Nobody has subscribed yet: the messages wait for the first channel.
    with Program(tmp_path, "tutorial/order.py", addresses) as order:
        assert order.end() == "ordered 1\nordered 2\nordered 3\n"
    with Program(tmp_path, "tutorial/bill.py", addresses) as bill:
        bill.expect(*(f"billed order {number}: tea, 4.50" for number in (1, 2, 3)))
        broker.wait_empty("orders", "billing")
        broker.publish("orders", b"one tea please")
        wait_until(lambda: bodies(broker, "orders.dead"))
        reason = "not JSON: Expecting value: line 1 column 1 (char 0)"
        bill.interrupt(f"orders/billing: <…> cannot be decoded: {reason}\n")
    (letter,) = map(json.loads, bodies(broker, "orders.dead"))
    assert letter["text"] == "one tea please"
    assert letter["error"] == f"DecodeFailed: {reason}"


def test_the_tests_of_the_tutorial_pass(tmp_path: Path) -> None:
    for name in ("tutorial/bill.py", "tutorial/test_bill.py"):
        copy(tmp_path, name, {})
    run_pytest(tmp_path, "test_bill.py")


# how-to


def test_publish(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("events", "ch")
    with Program(tmp_path, "publish.py", addresses) as program:
        assert program.end() == "the broker refused: E_BAD_MESSAGE\n"
    assert bodies(broker, "orders") == [b'{"number":1,"item":"tea"}']
    found = broker.peek("events", "ch", count=1000)
    assert {message.body for message in found if message.state == "deferred"} == {b"in a minute"}
    ready = [message.body for message in found if message.state == "ready"]
    assert ready[:3] == [b"one", b"two", b"three"]
    assert sorted(ready[3:]) == sorted(b"%d" % number for number in range(100))


def test_headers(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("orders", "print")
    with Program(tmp_path, "headers.py", addresses) as program:
        lines = program.end().splitlines()
    event = 'com.example.order.placed {"number":2}'
    assert sorted(lines) == sorted(['acme {"number":1}', "acme 3", "acme 4", "apex 5", "- 6", event])


def test_traces(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    with Program(tmp_path, "traces.py", addresses) as program:
        spans = [line.split(" ") for line in program.end().splitlines()]
    names = [" ".join(words[:-1]) for words in spans]
    assert names == ["publish orders", "order", "bill", "process orders"]
    assert len({words[-1] for words in spans}) == 1


def test_consume(tmp_path: Path, broker: Broker, lookupd: Lookupd) -> None:
    broker.create("events", "storage")
    broker.publish("events", b"a", b"not yet")
    wait_until(lambda: lookupd.producers("events"))
    with Program(tmp_path, "consume.py", {"127.0.0.1:4161": lookupd.http_address}) as program:
        program.expect("stored a")
        wait_until(
            lambda: {m.body: m.state for m in broker.peek("events", "storage")} == {b"not yet": "deferred"}
        )
        broker.publish("events", b"broken")
        wait_until(lambda: len(broker.peek("events", "storage")) == 2)
        assert {m.state for m in broker.peek("events", "storage")} <= {"deferred", "in_flight"}
        broker.publish("events", b"b")  # waits for the end of the pause
        program.expect("stored b")


def test_iterate(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("events", "reader")
    broker.publish("events", b"a", b"b", b"end")
    with Program(tmp_path, "iterate.py", addresses) as program:
        assert program.end() == "1 a\n1 b\n1 end\n"
    broker.wait_empty("events", "reader")


def test_batches(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("readings", "database")
    broker.publish("readings", *(b'{"sensor": %d, "value": 0.5}' % number for number in range(250)))
    with Program(tmp_path, "batches.py", addresses) as program:
        program.expect("stored 100", "stored 100", "stored 50")
        broker.wait_empty("readings", "database")
        program.interrupt()
    connection = sqlite3.connect(tmp_path / "readings.db")
    assert connection.execute("select count(distinct sensor) from readings").fetchone() == (250,)
    connection.close()


def test_retries(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("charges", "bank")
    broker.publish("charges", {"cents": 5}, {"cents": 0})
    with Program(tmp_path, "retries.py", addresses) as program:
        program.expect("charged 5 cents at attempt 3")
        broker.wait_empty("charges", "bank")
        program.process.send_signal(signal.SIGINT)
        _, said = program.process.communicate(timeout=PATIENCE_S)
    letters = [json.loads(body) for body in bodies(broker, "charges.dead")]
    assert [(one["attempts"], one["error"]) for one in letters] == [(1, "ValueError: nothing to charge")]
    # The first failure is in the log with its delay, the second is not.
    line = "ConnectionError: the bank does not answer; attempt 1 of 4, retry in 0.5 s"
    assert said.decode().count("retry in") == said.decode().count(line) == 1


def test_lifespan(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("words", "upper")
    broker.publish("words", "tea")
    with Program(tmp_path, "lifespan.py", addresses) as program:
        wait_until(lambda: bodies(broker, "words.upper") == [b"TEA"])
        broker.wait_empty("words", "upper")
        program.interrupt()


def test_dead_letters(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("payments", "ledger")
    broker.publish("payments", b'{"account": "a", "cents": 5}')
    broker.publish("payments", b'{"account": "a", "cents": 0}', b'{"account": "a", "cents": "5"}')
    # It logs the messages that it gives up.
    with Program(tmp_path, "dead_letters.py", addresses) as program:
        program.expect(
            "booked 5",
            'Reject: nothing to pay (attempt 1): {"account": "a", "cents": 0}',
            'DecodeFailed: cents: expected an integer, got "5" (attempt 1): {"account": "a", "cents": "5"}',
        )


def test_payloads(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    for topic, channel in (
        ("orders", "dataclass"),
        ("visits", "pydantic"),
        ("readings", "msgspec"),
        ("lines", "text"),
    ):
        broker.create(topic, channel)
    order = {"number": 1, "placed": "2025-03-01T12:00:00Z", "currency": "EUR"}
    broker.publish("orders", json.dumps(order | {"items": [{"sku": "a", "price": 1.5}] * 2}).encode())
    broker.publish("visits", b'{"page": "/", "seconds": 0.5}')
    broker.publish("readings", b'{"sensor": "north", "value": 2}', b'{"sensor": "south", "value": 3}')
    broker.publish("lines", b"loud")
    with Program(tmp_path, "payloads.py", addresses) as program:
        program.expect("2025 3.0 EURO", "/ attempt 1", "south", "LOUD")
        program.interrupt()


def test_tls_and_auth(tmp_path: Path) -> None:
    made = certificates()
    for name, path in (
        ("ca.pem", made.ca.cert),
        ("client.pem", made.client.cert),
        ("client.key", made.client.key),
    ):
        (tmp_path / name).write_bytes(path.read_bytes())
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f"""
        [[identity]]
        name = "me"
        secret = "{hash_generated(b"open sesame")}"
        [[identity.allow]]
        topic = "^events$"
        permissions = ["publish"]
        """
    )
    flags = made.server_flags(
        tls_root_ca_file=str(tmp_path / "ca.pem"),
        tls_client_auth_policy="require-verify",
        tls_required=TlsRequired.YES,
        auth_policy_file=str(policy),
    )
    with run_broker(**flags) as broker:
        addresses = {"nsqd.example.com:4150": broker.tcp_address}
        with Program(tmp_path, "tls_and_auth.py", addresses, NSQ_SECRET="open sesame") as program:
            assert program.end() == ""
        assert bodies(broker, "events") == [b"for your eyes only"]


def test_scripts(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("lines", "script")
    with Program(tmp_path, "script_publish.py", addresses) as program:
        assert program.end("one\ntwo\n") == ""
    with Program(tmp_path, "script_consume.py", addresses) as program:
        assert program.end() == "one\ntwo\n"
    broker.wait_empty("lines", "script")


def test_tests_with_faults(tmp_path: Path) -> None:
    copy(tmp_path, "test_faults.py", {})
    run_pytest(tmp_path, "test_faults.py")


# coming from pynsq


@pytest.mark.parametrize("name", ["coming_from_pynsq/reader_pynsq.py", "coming_from_pynsq/reader.py"])
def test_old_and_new_readers_do_the_same(
    tmp_path: Path, broker: Broker, addresses: dict[str, str], name: str
) -> None:
    broker.create("events", "print")
    broker.publish("events", b"a", b"b")
    with Program(tmp_path, name, addresses, warnings="ignore") as program:
        program.expect("a", "b")
        broker.wait_empty("events", "print")


@pytest.mark.parametrize("name", ["coming_from_pynsq/writer_pynsq.py", "coming_from_pynsq/writer.py"])
def test_old_and_new_writers_do_the_same(
    tmp_path: Path, broker: Broker, addresses: dict[str, str], name: str
) -> None:
    with Program(tmp_path, name, addresses, warnings="ignore") as program:
        program.expect("OK")
    assert bodies(broker, "events") == [b"hello"]


# frameworks


def test_asyncio(tmp_path: Path, broker: Broker, addresses: dict[str, str]) -> None:
    broker.create("readings", "alarms")
    with Program(tmp_path, "asyncio_service.py", addresses) as program:
        wait_until(lambda: b"reading 1 is too warm" in bodies(broker, "alarms"))
        program.interrupt()
    # The consumer may have stopped before the last reading came. Then it waits for the next start.
    published = broker.stats("readings")["topics"][0]["message_count"]
    wait_until(lambda: len(bodies(broker, "alarms")) + waiting(broker, "readings", "alarms") == published)


def post(url: str, content_type: str, body: bytes) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@contextmanager
def serving(directory: Path, pattern: str, *command: str) -> Iterator[str]:
    """Run a web server. Gives the URL that the pattern finds in its log."""
    log = directory / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=directory, stdout=file, stderr=file)
    try:
        wait_until(lambda: re.search(pattern, log.read_text()) or process.poll() is not None)
        found = re.search(pattern, log.read_text())
        assert found, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    assert "Traceback" not in log.read_text(), log.read_text()


def test_fastapi(tmp_path: Path) -> None:
    # A broker of its own: it is stopped.
    with run_broker() as broker:
        copy(tmp_path, "fastapi_shop.py", {"127.0.0.1:4150": broker.tcp_address})
        command = ("uvicorn", "fastapi_shop:app", "--port=0")
        with serving(tmp_path, r"running on (http://\S+)", *command) as url:
            order = b'{"number": 1, "item": "tea"}'
            assert post(f"{url}/orders", "application/json", order) == 202
            assert post(f"{url}/orders", "application/json", b"{}") == 422
            broker.wait_empty("orders", "billing")
            with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
                line = 'messages_finished_total{topic="orders",channel="billing"} 1'
                assert line in answer.read().decode()
            broker.stop()
            assert post(f"{url}/orders", "application/json", order) == 503
    assert "billed order 1: tea" in (tmp_path / "server.log").read_text()


def test_django(
    tmp_path: Path, broker: Broker, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop").mkdir()
    for name in DJANGO:
        copy(tmp_path / Path(name).relative_to("django_shop").parent, name, addresses)
    broker.create("orders", "billing")
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "settings")
    migrate = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity=0"]
    subprocess.run(migrate, cwd=tmp_path, check=True, timeout=PATIENCE_S)
    application = "django.core.wsgi:get_wsgi_application()"
    command = ("gunicorn", "--workers=2", "--preload", "--bind=127.0.0.1:0", application)
    with serving(tmp_path, r"Listening at: (http://\S+)", *command) as url:
        form = "application/x-www-form-urlencoded"
        assert [post(f"{url}/orders", form, b"item=tea") for _ in range(10)] == [201] * 10
    with serving(
        tmp_path, r"billed (order) 10\n", "nsparq.tools.main", "run", "--workers=2", "shop.consumers:app"
    ):
        broker.wait_empty("orders", "billing")
    connection = sqlite3.connect(tmp_path / "shop.sqlite3")
    assert connection.execute("select billed, count(*) from shop_order group by billed").fetchall() == [
        (1, 10)
    ]
    connection.close()


# what the documentation shows


def examples() -> list[str]:
    # tests/pipeline has those of Spark, test_examples.py, and those that read a table,
    # test_table.py. tests/integrations/test_taskiq.py has that of taskiq.
    of_others = ("pipelines/", "declarative/", "tutorial_spark/", "notebook_spark.py", "table/", "taskiq/")
    names = (str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py"))
    return sorted(name for name in names if not name.startswith(of_others))


@pytest.mark.parametrize("name", examples())
def test_every_example_is_run_and_shown(name: str) -> None:
    assert f'"{name}"' in Path(__file__).read_text(), "no test runs it"
    assert any(f"<!-- examples/{name} -->" in (ROOT / "docs" / page).read_text() for page in PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_tested_examples(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"(?:<!-- examples/(\S+) -->\n)?```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python")
    for name, block in blocks:
        assert name, f"without the name of its example: {block[:100]}"
        assert block in (EXAMPLES / name).read_text(), f"{name} has changed"
    assert blocks


def test_the_page_of_the_client_lists_every_option_with_its_default() -> None:
    text = (ROOT / "docs" / "client.md").read_text()
    table = text[text.index("## Configuration") :]
    listed = dict(re.findall(r"^\| `(\w+)` \|(.*?)\|", table, re.MULTILINE))
    assert [*listed] == [field.name for field in dataclasses.fields(Config)]
    for field in dataclasses.fields(Config):
        default = field.default
        if default is dataclasses.MISSING:
            shown = "of the machine"
        elif isinstance(default, int | float) and not isinstance(default, bool):
            shown = f"{default:g}"
        else:
            shown = "" if default is None else str(default).replace(__version__, "…")
        assert listed[field.name].strip() == shown, field.name
