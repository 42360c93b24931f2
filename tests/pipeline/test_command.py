"""`nsparq pipeline run` as a service: a process with its own Spark, ended by a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsparq.testing import Broker
from tests.support.polling import SPARK_DEADLINE, wait_until
from tests.support.spark import FAST

pytest.importorskip("pyspark")

PATIENCE_S = SPARK_DEADLINE


def test_a_pipeline_runs_until_it_is_told_to_end(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(f"""
        [nsq]
        nsqd = ["{broker.http_address}"]
        [pipeline.copy]
        source = "given"
        sink = {{ topic = "copied" }}
    """)
    broker.publish("given", b"too old")
    since = time.time()
    broker.publish("given", b"before")
    conf = [f"--conf={name}={value}" for name, value in FAST.items()]
    command = [
        sys.executable,
        "-m",
        "nsparq.tools.main",
        "pipeline",
        "run",
        "p.toml",
        f"--since={since:.6f}",
        *conf,
    ]
    log = tmp_path / "log"
    with log.open("wb") as stderr, subprocess.Popen(command, cwd=tmp_path, stderr=stderr) as process:
        try:
            wait_until(lambda: len(broker.peek("copied")) == 1, PATIENCE_S, what=log.read_text)
            broker.publish("given", b"while it runs")
            wait_until(lambda: len(broker.peek("copied")) == 2, PATIENCE_S, what=log.read_text)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, log.read_text()
        finally:
            process.kill()
    assert [message.body for message in broker.peek("copied")] == [b"before", b"while it runs"]
    assert "copy: stopped" in log.read_text()
    again = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert again.returncode == 1
    assert "--since: pipeline copy: it has begun, and continues where" in again.stderr
