"""A real cluster of two worker processes: the connector goes there by itself, and an executor may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyspark
import pytest

from tests.support import BrokerProcess, wait_until
from tests.support.spark_cluster import SparkCluster

MESSAGES = 2000
PACKAGES = Path(pyspark.__file__).parents[1]


@pytest.mark.timeout(240)
def test_a_cluster_reads_and_writes_topics_exactly_once_though_an_executor_is_killed(tmp_path: Path) -> None:
    bodies = [b"message %d" % number for number in range(2 * MESSAGES)]
    with BrokerProcess() as first, BrokerProcess() as second, SparkCluster(tmp_path) as cluster:
        first.publish("in", *bodies[:MESSAGES])
        second.publish("in", *bodies[MESSAGES:])
        nodes = ",".join(f"{host}:{port}" for host, port in (first.http_address, second.http_address))
        options = {
            "batch": {"topic": "in", "nsqd": nodes},
            "stream": {"topic": "in", "nsqd": nodes, "channel": "spark", "maxRowsPerTrigger": "400"},
            "sink": {"topic": "out", "nsqd": nodes},
        }
        # A Python for the tasks that has all that is installed except nsparq.
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={PACKAGES}:$PYTHONPATH exec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        environment = {**os.environ, "PYSPARK_PYTHON": str(python)}
        command = [sys.executable, "-m", "tests.spark.drive_cluster", cluster.url]
        command += [json.dumps(cluster.conf), json.dumps(options)]
        log = tmp_path / "driver.log"
        with (
            log.open("wb") as errors,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors) as driver,
        ):
            assert driver.stdout is not None
            try:
                facts = json.loads(driver.stdout.readline() or "{}")
                assert (facts.get("rows"), facts.get("distinct")) == (2 * MESSAGES, 2 * MESSAGES)
                (file,) = facts["files"]
                assert ".zip/nsparq/" in file  # what was sent, not what happens to be installed there

                # While some of the batches are through:
                wait_until(lambda: published(first) + published(second) or driver.poll() is not None, 100)
                executors = cluster.executors()
                assert len(executors) == 2
                os.kill(executors[0], signal.SIGKILL)
                facts = json.loads(driver.stdout.readline())
                assert facts["batches"] >= 2 * MESSAGES / 400
                assert driver.wait(20) == 0
            except BaseException:
                driver.kill()
                sys.stdout.write(f"{log.read_text()}\n{cluster.logs()}")
                raise
        found = Counter(body for broker in (first, second) for body in everything(broker, "out"))
        assert found == Counter(bodies)


def published(broker: BrokerProcess) -> int:
    stats = broker.topic_stats("out")
    return stats["message_count"] if stats else 0


def everything(broker: BrokerProcess, topic: str) -> list[bytes]:
    count = published(broker)
    with broker.connect() as connection:
        connection.identify()
        connection.sub(topic, "check", rdy=1000)
        return [message.body for message in connection.read_messages(count, finish=True)]
