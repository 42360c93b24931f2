"""`nsparq run` as a user runs it: a program in a folder, a real broker, signals, HTTP."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nsparq.client.metrics import HISTOGRAM, METRICS
from nsparq.runner.main import main
from nsparq.runner.watch import FileWatch
from nsparq.runner.worker import LoadFailed, load
from nsparq.testing import Broker, run_broker
from tests.support import unique_name, wait_until
from tests.support.polling import DEADLINE

PROGRAM = """
import asyncio, contextlib, os, pathlib
from nsparq.client import Subscriptions

@contextlib.asynccontextmanager
async def lifespan():
    yield
    pathlib.Path(f"ended.{os.getpid()}").touch()

app = Subscriptions(nsqd=["ADDRESS"], lifespan=lifespan)
other = 5

@app.subscribe("jobs", "ch", concurrency=4, retries=0)
async def work(job: dict) -> None:
    if "fail" in job:
        raise ValueError("no")
    if "wait" in job:
        pathlib.Path(job["wait"]).touch()
        while not os.path.exists(job["until"]):
            await asyncio.sleep(0.01)
    pathlib.Path("done.txt").open("a").write(f"{job['name']} VERSION\\n")
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


@pytest.fixture
def folder(tmp_path: Path, broker: Broker) -> Iterator[Path]:
    broker.create("jobs", "ch")
    write(tmp_path, broker, "1")
    yield tmp_path
    broker.delete("jobs")


def write(folder: Path, broker: Broker, version: str) -> None:
    text = PROGRAM.replace("ADDRESS", broker.tcp_address).replace("VERSION", version)
    (folder / "shop.py").write_text(text)


def done(folder: Path) -> list[str]:
    path = folder / "done.txt"
    return path.read_text().splitlines() if path.exists() else []


class Run:
    """A running `nsparq run`, with its HTTP address."""

    def __init__(self, folder: Path, *flags: str, descriptors: int = 0, **environment: str) -> None:
        """With a limit on descriptors, if one is given."""
        self._log = folder / "run.log"
        command = [sys.executable, "-m", "nsparq.tools.main", "run", "--http-address=127.0.0.1:0", *flags]
        if descriptors:
            command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stderr=log,
                env={**os.environ, **environment},
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """(0, "") while it does not listen."""
        _, found, rest = self.log().partition("status on http://")
        host, _, port = rest.partition("/")[0].partition(":")
        if not found or not port:
            return 0, ""
        connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def wait_ready(self) -> list[int]:
        """The process ids of the workers."""
        wait_until(lambda: self.get("/ready")[0] == 200)
        return [worker["pid"] for worker in json.loads(self.get("/ready")[1])["workers"]]

    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.get("/metrics")[1])
        return {
            sample.name.removeprefix("nsparq_"): sample.value
            for family in families
            for sample in family.samples
            if "le" not in sample.labels
        }

    def end(self, status: int = 0) -> None:
        assert self.process.wait(DEADLINE) == status, self.log()


def test_workers_run_are_restarted_and_stop_after_their_messages(folder: Path, broker: Broker) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "notify"))
        systemd.settimeout(DEADLINE)
        with Run(folder, "--workers=2", "shop:app", NOTIFY_SOCKET=str(folder / "notify")) as run:
            first, second = run.wait_ready()
            assert systemd.recv(100) == b"READY=1"
            assert run.get("/live")[0] == 200
            assert run.get("/other")[0] == 404
            broker.publish("jobs", *({"name": number} for number in range(20)), {"fail": 1}, "not JSON")
            broker.wait_empty("jobs", "ch")
            expected = {
                "consumer_messages_received_total": 22.0,
                "consumer_messages_finished_total": 22.0,
                "consumer_messages_requeued_total": 0.0,
                "consumer_messages_failed_total": 1.0,
                "consumer_messages_undecodable_total": 1.0,
                "consumer_dead_letters_total": 2.0,
                "consumer_handler_seconds_count": 21.0,
                "consumer_connections": 2.0,
                "consumer_messages_in_flight": 0.0,
                "run_workers_ready": 2.0,
                "run_restarts_total": 0.0,
            }
            # Workers report once a second.
            wait_until(lambda: expected.items() <= run.metrics().items())

            os.kill(first, signal.SIGKILL)
            wait_until(lambda: run.metrics().get("run_restarts_total") == 1)
            assert second in run.wait_ready()
            assert first not in run.wait_ready()
            # The counters of the dead worker stay.
            assert run.metrics()["consumer_messages_finished_total"] == 22

            go = folder / "go"
            broker.publish("jobs", {"name": "last", "wait": str(folder / "began"), "until": str(go)})
            wait_until((folder / "began").exists)
            run.process.send_signal(signal.SIGTERM)
            assert systemd.recv(100) == b"STOPPING=1"
            assert run.get("/ready")[0] == 503
            go.touch()
            run.end()
    assert done(folder)[-1] == "last 1"
    broker.wait_empty("jobs", "ch")
    # Two workers ended in order, each after its last message.
    assert len([*folder.glob("ended.*")]) == 2


def test_a_changed_file_replaces_the_workers(folder: Path, broker: Broker) -> None:
    with Run(folder, "--reload", "shop") as run:
        (old,) = run.wait_ready()
        (folder / "shop.py").write_text("this is no Python")
        wait_until(lambda: "waits until a file is changed" in run.log())
        assert "SyntaxError" in run.log()
        assert run.get("/ready")[0] == 503
        write(folder, broker, "two")
        assert run.wait_ready() != [old]
        broker.publish("jobs", {"name": "a"})
        wait_until(lambda: done(folder) == ["a two"])
        run.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: replacing the workers" in run.log())
        run.process.send_signal(signal.SIGINT)
        run.end()


def test_a_second_signal_does_not_wait_and_workers_never_outlive_the_supervisor(
    folder: Path, broker: Broker
) -> None:
    job = {"name": "a", "wait": str(folder / "began"), "until": str(folder / "never")}
    with Run(folder, "shop:app") as run:
        run.wait_ready()
        broker.publish("jobs", job)
        wait_until((folder / "began").exists)
        run.process.send_signal(signal.SIGTERM)
        wait_until(lambda: run.get("/ready")[0] == 503)
        run.process.send_signal(signal.SIGTERM)
        run.end(1)
    with Run(folder, "--stop-timeout=0s", "shop:app") as run:
        (worker,) = run.wait_ready()
        run.process.kill()
        wait_until(lambda: not Path(f"/proc/{worker}").exists())


def test_a_program_that_does_not_load_any_more_replaces_no_healthy_worker(
    folder: Path, broker: Broker
) -> None:
    with Run(folder, "--workers=3", "shop:app") as run:
        _, second, third = run.wait_ready()
        (folder / "shop.py").write_text("import no_such_package")
        # Again, too: the first worker does not run then.
        for times in (1, 2):
            run.process.send_signal(signal.SIGHUP)
            wait_until(lambda: run.log().count("the other workers are not replaced") >= times)  # noqa: B023
            workers = json.loads(run.get("/ready")[1])["workers"]
            assert [worker["pid"] for worker in workers if worker["ready"]] == [second, third]
        write(folder, broker, "2")
        run.process.send_signal(signal.SIGHUP)
        wait_until(lambda: not {second, third} & {*run.wait_ready()})
        run.process.send_signal(signal.SIGTERM)
        run.end()


def test_a_program_that_has_been_loaded_is_kept_although_no_worker_was_ready(folder: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        host, port = nobody.getsockname()
        program = re.sub(r'nsqd=\[".*?"\]', f'nsqd=["{host}:{port}"]', (folder / "shop.py").read_text())
        (folder / "shop.py").write_text(program)
        with Run(folder, "--workers=2", "shop:app") as run:
            # They report that they are not connected.
            wait_until(lambda: run.get("/ready")[1].count('"unconnected": ["jobs/ch"]') == 2)
            (folder / "shop.py").write_text("import no_such_package")
            run.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "the other workers are not replaced" in run.log(), what=run.log)
            run.process.send_signal(signal.SIGTERM)
            run.end()


def test_the_log_says_why_a_worker_cannot_start_its_lifespan(folder: Path) -> None:
    program = (folder / "shop.py").read_text()
    failing = program.replace(
        "    yield\n", "    raise ConnectionRefusedError('no database')\n    yield\n", 1
    )
    (folder / "shop.py").write_text(failing)
    with Run(folder, "shop:app") as run:
        wait_until(lambda: "is started again" in run.log(), what=run.log)
        assert "ConnectionRefusedError: no database" in run.log()
        assert "exited with status 1" in run.log()


def test_without_descriptors_some_workers_wait_and_the_others_run(folder: Path) -> None:
    with Run(folder, "--workers=8", "shop:app", descriptors=16) as run:
        # Later each time.
        wait_until(lambda: "is started again in 1 s" in run.log(), what=run.log)
        assert "cannot be started: [Errno 24] Too many open files" in run.log()
        assert "Traceback" not in run.log()
        run.process.send_signal(signal.SIGTERM)
        run.end()


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["shop:missing"], 1, "shop has no 'missing'; it has app\n"),
        (["shop.py"], 2, "name the module, not the file: shop:app\n"),
        (["shop:app", "--workers=0"], 2, "must be a number from 1 to 1000"),
        (["shop:app", "--http-address=TAKEN"], 1, "cannot listen on 127.0.0.1:"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_run_ends_with_an_error(
    folder: Path, broker: Broker, arguments: list[str], status: int, text: str
) -> None:
    given = [argument.replace("TAKEN", broker.http_address) for argument in arguments]
    result = subprocess.run(
        [sys.executable, "-m", "nsparq.tools.main", "run", *given],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert result.returncode == status
    assert text in result.stderr


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("", "has no 'app'$"),
        ("app = 5", "has the type int, not nsparq.client.Subscriptions"),
        ("from nsparq.client import Subscriptions\napp = Subscriptions(nsqd=['a:1'])", "has no subscription"),
        ("import no_such_package", "(?s)cannot be imported:.*No module named 'no_such_package'"),
        ("1 / 0", "(?s)cannot be imported:.*ZeroDivisionError"),
    ],
)
def test_the_error_says_what_is_wrong_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, text: str
) -> None:
    name = unique_name("program")
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LoadFailed, match=text):
        load(f"{name}:app")
    with pytest.raises(LoadFailed, match="there is no module 'nowhere' in "):
        load("nowhere.inside:app")


def test_changes_are_found_in_python_files_only(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "a").mkdir()
    kept = tmp_path / "a" / "kept.py"
    kept.touch()
    watch = FileWatch([tmp_path])
    for ignored in ("venv/x.py", ".hidden.txt", "a/notes.md"):
        (tmp_path / ignored).touch()
    assert watch.changed() == []
    new = tmp_path / "new.py"
    new.touch()
    kept.write_text("x")
    changes: Any = {new, kept}
    assert {*watch.changed()} == changes
    kept.unlink()
    assert (watch.changed(), watch.changed()) == ([kept], [])


def test_files_of_a_folder_that_cannot_be_read_have_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("removed", "unread"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").touch()
    watch = FileWatch([tmp_path])
    read = os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name == "unread":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return read(path)

    shutil.rmtree(tmp_path / "removed")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        assert watch.changed() == [tmp_path / "removed" / "x.py"]
    assert watch.changed() == []
    (tmp_path / "unread" / "x.py").unlink()
    assert watch.changed() == [tmp_path / "unread" / "x.py"]


def test_the_page_lists_the_flags_and_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    page = text[text.index("## Running") : text.index("## Stopping")]
    with pytest.raises(SystemExit):
        main(["--help"])
    flags = {*re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)}
    assert {*re.findall(r"^\| `(--[\w-]+)`", page, re.MULTILINE)} == flags
    rows = re.findall(r"^\| (`nsparq_.*?) \| (\w+) \|", page, re.MULTILINE)
    listed = {(name, kind) for names, kind in rows for name in re.findall(r"nsparq_\w+", names)}
    exported = {(name, kind) for name, kind, _ in METRICS.values()} | {(HISTOGRAM, "histogram")}
    assert exported == {(name, kind) for name, kind in listed if "_consumer_" in name}
