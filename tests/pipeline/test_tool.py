"""`nsparq pipeline`: the commands that need no Spark."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsparq.pipeline.execute.progress import Figures, State
from nsparq.pipeline.execute.status import Status, write_status
from nsparq.pipeline.file.reading import load, parse
from nsparq.pipeline.file.ready_made import starter
from nsparq.testing import Broker, run_broker
from nsparq.tools.main import main
from tests.support.polling import DEADLINE

pytestmark = pytest.mark.usefixtures("root_logger_restored", "signals_restored")


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


def test_a_first_file_knows_the_columns_of_the_topic(
    tmp_path: Path, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.publish("shop.orders", b'{"number": 1, "at": "2026-11-15T12:00:00Z"}')
    path = tmp_path / "p.toml"
    arguments = ["new", str(path), "--topic=shop.orders", f"--nsqd-http-address={broker.http_address}"]
    assert main(["pipeline", *arguments]) == 0
    assert capsys.readouterr().out == f"nsparq pipeline run {path}\n"
    (pipeline,) = load(path).pipelines
    assert pipeline.name == "shop-orders"
    assert pipeline.sources[0].decode.schema == "number BIGINT, at TIMESTAMP"
    assert pipeline.sources[0].dead_letters == "shop.orders.dead"
    assert main(["pipeline", *arguments]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["pipeline", "check", "--no-spark", str(path)]) == 0
    assert capsys.readouterr().out == (
        "shop-orders: shop.orders -> json (dead letters: shop.orders.dead) -> 1 step -> console\n"
    )


def test_a_first_file_works_without_the_topic(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    for address, reason in ((broker.http_address, "this topic does not exist yet"), ("127.0.0.1:9", "")):
        assert main(["pipeline", "new", "--topic=nothing", f"--nsqd-http-address={address}"]) == 0
        output = capsys.readouterr()
        (pipeline,) = parse(output.out).pipelines
        assert pipeline.sources[0].topics == "nothing"
        assert pipeline.sources[0].decode.format == "json"
        assert f"no message to infer columns from: {'nothing: ' if reason else ''}{reason}" in output.err


@pytest.mark.parametrize(
    ("bodies", "format", "schema"),
    [
        ([b"hello"], "text", ""),
        ([b"\xff"], "raw", ""),
        ([b"{}"], "json", ""),
        ([b'{"a b": 1, "\\"": 2}'], "json", '`a b` BIGINT, `"` BIGINT'),
        ([json.dumps({f"column_{n}": n for n in range(30)}).encode()], "json", None),
    ],
)
def test_a_first_file_can_always_be_read(bodies: list[bytes], format: str, schema: str | None) -> None:
    (pipeline,) = parse(starter("t", bodies)).pipelines
    assert pipeline.sources[0].decode.format == format
    assert schema is None or pipeline.sources[0].decode.schema == schema


def test_a_wrong_file_has_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[pipeline.a]\nsource = "x"\nsnk = "console"\n')
    for command in ("check", "run", "status"):
        assert main(["pipeline", command, str(path)]) == 2
        assert capsys.readouterr().err.splitlines() == [
            f"{path}: [pipeline.a] snk: unknown key; did you mean 'sink'?",
            f"{path}: [pipeline.a] sink: is missing",
        ]
    path.write_text('[pipeline.a]\nsource = "x"\nsink = "console"\n')
    assert main(["pipeline", "run", str(path), "--only=b"]) == 2
    assert "there is no pipeline 'b'; there are a" in capsys.readouterr().err


def test_a_time_to_begin_with_must_make_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[pipeline.a]\nsource = { topic = "x", mode = "queue" }\nsink = { topic = "y" }\n')
    assert main(["pipeline", "run", str(path), "--since=2d"]) == 1
    assert '--since: pipeline a: a source with mode = "queue" has no times' in capsys.readouterr().err
    assert main(["pipeline", "run", str(path), "--since=2d", "--checkpoint=s3://lake/c"]) == 1
    with pytest.raises(SystemExit):
        main(["pipeline", "run", str(path), "--since=yesterday"])
    assert "'yesterday' is not a time; write one such as 90m, 2d" in capsys.readouterr().err


def test_the_status_of_pipelines_that_never_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "status", str(tmp_path)]) == 1
    assert "these pipelines have never been run" in capsys.readouterr().err


def test_the_status_file_of_a_newer_version_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = Figures("shop", state=State.FAILED, error="no such column")
    write_status(tmp_path, Status("shop.toml", [figures], started=0.0, is_running=False))
    content = json.loads((tmp_path / "status.json").read_text())
    content["pipelines"][0]["temperature"] = 21
    (tmp_path / "status.json").write_text(json.dumps(content))
    assert main(["pipeline", "status", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["shop", "failed", "0", "unknown", "0"]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_a_signal_ends_a_process_that_does_not_look_at_the_event(number: int, expected: int) -> None:
    code = """
import sys, threading
from nsparq.tools.pipeline_common import Stopping
stopping = Stopping(0.05)
print("ready", flush=True)
stopping.event.wait()
threading.Event().wait(60)
sys.exit(9)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(DEADLINE) == expected


def test_a_signal_does_not_wait_for_spark_to_start(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    (tmp_path / "p.toml").write_text('[run]\nstop_grace = "1h"\n[pipeline.p]\nsource = "x"\nsink = "noop"\n')
    code = """
import sys, threading
from nsparq.pipeline.execute import runner
from nsparq.tools.main import main
runner.build_session = lambda *_: threading.Event().wait()
sys.exit(main(["pipeline", "run", "p.toml"]))
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"starting Spark" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert b"stopped while Spark was starting" in process.stderr.read()
    assert process.returncode == 0


def test_ready_made_pipelines_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / 'a "strange" name'
    arguments = ["--topic=a", "--topic=b", "--since=2026-11-15T12:00:00Z", "--lookupd-http-address=l:4161"]
    assert main(["pipeline", "archive", *arguments, f"--output-dir={output}", "--show"]) == 0
    file = parse(capsys.readouterr().out)
    (pipeline,) = file.pipelines
    assert file.nsq == {"nsqlookupd": "l:4161"}
    assert file.run.checkpoint == f"{output}/_nsparq/checkpoint"
    assert pipeline.sources[0].options == {
        "topics": "a,b",
        "startingPosition": "2026-11-15T12:00:00Z",
        "channel": "archive",
        "maxBytesPerTrigger": "512m",
        "partitionBytes": "128m",
    }
    assert main(["pipeline", "stats", "--topic-pattern=.*", "--follow", "--to=stats", "--show"]) == 0
    (pipeline,) = parse(capsys.readouterr().out).pipelines
    assert [pipeline.reads(topic) for topic in ("stats", "statsd", "a")] == [False, True, True]
    assert pipeline.outputs[0].output_mode == "append"


@pytest.mark.parametrize("topics", [[], ["--topic=a", "--topic-pattern=b"]])
def test_a_ready_made_pipeline_needs_topics_or_a_pattern(
    topics: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "archive", *topics, "--output-dir=x"]) == 2
    assert "needs either --topic or --topic-pattern" in capsys.readouterr().err


def test_there_is_help_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "check", "try", "new", "status", "archive", "compact", "replay", "stats"):
        with pytest.raises(SystemExit) as caught:
            main(["pipeline", command, "--help"])
        assert caught.value.code == 0
        assert "usage: nsparq pipeline" in capsys.readouterr().out


def test_a_missing_directory_cannot_be_compacted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    assert main(["pipeline", "compact", str(tmp_path / "x")]) == 1
    assert "is not a directory" in capsys.readouterr().err
    assert main(["pipeline", "compact", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "there are no files to join\n"
