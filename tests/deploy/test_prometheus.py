"""Prometheus itself, from Debian: it loads our files, scrapes our daemons, and raises the
alerts."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from nsparq.pipeline.execute.progress import Figures, State
from nsparq.pipeline.execute.status import Status, serve
from tests.admin.support import AdminThread
from tests.support import BrokerProcess, BrokerThread, TestBroker, wait_until
from tests.support.lookupd import LookupdThread
from tests.support.polling import DEADLINE

from .alert_cases import CASES
from .test_monitoring import EXPRESSIONS, PROMETHEUS, ROOT, RULES

FILES = ROOT / "deploy/prometheus"
# `make` unpacks Debian's package there where Prometheus is not installed.
PATH = os.pathsep.join((os.environ.get("PATH", ""), f"{sys.prefix}/prometheus/usr/bin"))
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
ALERTS = [rule["alert"] for rule in RULES]


def program(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus)")
    return found


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# promtool


def test_the_files_are_valid() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "config", FILES / "prometheus.yml")


def test_every_alert_fires_in_time_and_only_in_trouble(tmp_path: Path) -> None:
    assert sorted(case.alert for case in CASES) == sorted(ALERTS)
    tests = []
    for case in CASES:
        firing = f'count(ALERTS{{alertstate="firing",alertname="{case.alert}"}}) by (alertname)'
        sample = {"labels": f'{{alertname="{case.alert}"}}', "value": 1}
        for values, expected in (
            (case.trouble, {case.not_yet: [], case.fires: [sample]}),
            *((case.trouble | change, {case.fires: []}) for change in case.normal),
        ):
            queries = [
                {"expr": firing, "eval_time": f"{minutes}m", "exp_samples": samples}
                for minutes, samples in expected.items()
            ]
            series = [{"series": name, "values": text} for name, text in values.items()]
            tests.append({"interval": "1m", "input_series": series, "promql_expr_test": queries})
    rules = {"rule_files": [str(FILES / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    # JSON is YAML too.
    (tmp_path / "cases.yml").write_text(json.dumps(rules))
    promtool("test", "rules", tmp_path / "cases.yml")


# a running Prometheus


class Server:
    """Prometheus with our files, except the addresses and the intervals."""

    def __init__(self, directory: Path, targets: dict[str, list[str]]) -> None:
        config = json.loads(json.dumps(PROMETHEUS))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(FILES / "alerts.yml", directory)
        self._log = directory / "log"
        command = [
            program("prometheus"),
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
        try:
            self._port = wait_until(self._listening, what=self._log.read_text)
            wait_until(self._ready, what=self._log.read_text)
        except BaseException:
            self.close()
            raise

    def _listening(self) -> int | None:
        """The port that the system has chosen: the log does not have it."""
        assert self._process.poll() is None, self._log.read_text()
        own = set()
        for descriptor in Path(f"/proc/{self._process.pid}/fd").iterdir():
            own |= {*re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor))}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in own:
                return int(fields[1].rpartition(":")[2], 16)
        return None

    def _ready(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=DEADLINE) as answer:
                return answer.status == 200
        except URLError:
            return False

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urlencode(query)}"
        with urlopen(url, timeout=DEADLINE) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", found
        return found["data"]

    def alerts(self) -> list[dict[str, Any]]:
        """Those that fire or are pending."""
        found: list[dict[str, Any]] = self.ask("alerts")["alerts"]
        return found

    def value(self, query: str) -> float:
        """The sum of what a query finds; 0 for nothing."""
        return sum(float(one["value"][1]) for one in self.ask("query", query=query)["result"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Trouble:
    """Daemons for which Prometheus has every reason to raise alerts. step() makes it worse."""

    def __init__(self, stack: ExitStack) -> None:
        self.lookupd = stack.enter_context(LookupdThread())
        self.nsqd = stack.enter_context(BrokerThread(e2e_processing_latency_percentile=(0.5,)))
        registered = "{}:{}".format(*self.lookupd.address)
        self.weak = stack.enter_context(BrokerProcess(lookupd_tcp_address=(registered,)))
        wait_until(lambda: self.lookupd.nodes())
        self.admin = stack.enter_context(AdminThread(nsqd_http_address=(text(self.nsqd),)))
        self.weak.publish("t", b"a")
        self.nsqd.control("create", "idle", "c")
        self.nsqd.control("create", "lonely")
        # A consumer that takes nothing, one that answers nothing, and one that requeues everything.
        for topic, rdy in (("growing", 0), ("unanswered", 1), ("requeued", 1)):
            consumer = self._requeueing = stack.enter_context(self.nsqd.connect())
            consumer.identify(msg_timeout=1000 if topic == "unanswered" else 60_000)
            consumer.sub(topic, "c", rdy=rdy)
        self.nsqd.control("create", "poison")
        self.nsqd.request(
            "PUT", "/topic/settings?topic=poison", b'{"policy": {"max_attempts": 1}}'
        ).expect_json()
        self._failing = stack.enter_context(self.nsqd.connect())
        self._failing.sub("poison", "c", rdy=1)
        names = ("down", "failing", "stuck", "behind", "undecodable")
        self.pipelines = {name: Figures(name, state=State.RUNNING) for name in names}
        status = Status("shop.toml", [*self.pipelines.values()], time.time())
        self.runner = serve("127.0.0.1:0", status)
        stack.callback(self.runner.close)
        self.lost_runner = serve("127.0.0.1:0", status)

    @property
    def targets(self) -> dict[str, list[str]]:
        """By the jobs of deploy/prometheus/prometheus.yml."""
        return {
            "nsqd": [text(self.nsqd), text(self.weak)],
            "nsqlookupd": [text(self.lookupd)],
            "nsqadmin": [text(self.admin)],
            "nsparq-pipelines": [self.runner.address, self.lost_runner.address],
        }

    def begin(self) -> None:
        self.lost_runner.close()
        for topic in ("idle", "unanswered", "requeued"):
            self.nsqd.publish(topic, b"a")
        self.nsqd.publish("growing", *[b"a"] * 1001)
        which = {"producer": "p", "sequence": "1", "part": "a", "topic": "t"}
        self.nsqd.http("POST", "/transaction/stage", b"\0\0\0\x01\0\0\0\x01a", **which)
        # It cannot write to its files, and nearly all of its descriptors are open.
        resource.prlimit(self.weak.pid, resource.RLIMIT_FSIZE, (1, 1))
        assert self.weak.request("POST", "/pub?topic=t", b"a").status != 200
        opened = len([*Path(f"/proc/{self.weak.pid}/fd").iterdir()])
        resource.prlimit(self.weak.pid, resource.RLIMIT_NOFILE, (opened + 3, opened + 3))
        self.pipelines["down"].state = State.FAILED
        self.pipelines["stuck"].lag, self.pipelines["stuck"].last_batch = 5, time.time() - 1000
        self.pipelines["behind"].lag = 1001

    def step(self) -> None:
        self.nsqd.publish("growing", b"a")
        self.nsqd.publish("lonely", b"a")
        self._requeueing.req(self._requeueing.read_message().id)
        self.nsqd.publish("poison", b"a")
        self._failing.req(self._failing.read_message().id)
        # Longer than nsqd waits between two looks at its own lag: each look then finds 0.4 s and
        # more.
        self.nsqd.call(lambda broker: time.sleep(0.9))
        self.pipelines["failing"].failures += 1
        self.pipelines["behind"].lag = (self.pipelines["behind"].lag or 0) + 1
        self.pipelines["undecodable"].undecodable += 1


def text(daemon: TestBroker) -> str:
    assert isinstance(daemon.http_address, tuple)
    return "{}:{}".format(*daemon.http_address)


def test_a_real_prometheus_scrapes_the_daemons_and_sees_their_trouble(tmp_path: Path) -> None:
    program("prometheus")
    # They need a damaged or full disk, a cluster, an absent store, or minutes. promtool has seen
    # them fire.
    left_out = {"NsqdDiskNearlyFull", "NsqdDiskFilling", "NsqdMessagesLost", "NsqdMessagesDropped"}
    left_out |= {"NsqdClusterWithoutPrimary", "NsqdClusterDegraded", "NsqdCoordinatorDown"}
    left_out |= {"NsqdArchiveNotWritten", "NsqdArchiveNotRead"}
    left_out |= {"NsqTransactionDamaged", "NsqChannelLate", "NsqChannelDrainsSlowly", "NsqadminWebhookFails"}
    seen: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        trouble = Trouble(stack)
        prometheus = Server(tmp_path, trouble.targets)
        stack.callback(prometheus.close)
        targets = [one for job in PROMETHEUS["scrape_configs"] for one in trouble.targets[job["job_name"]]]
        wait_until(
            lambda: prometheus.value("sum(up)") == len(targets), what=lambda: prometheus.ask("targets")
        )
        wait_until(lambda: not prometheus.alerts(), what=prometheus.alerts)
        trouble.begin()
        for target in targets:
            if target != trouble.lost_runner.address:
                with urlopen(f"http://{target}/metrics", timeout=DEADLINE) as answer:
                    assert promtool("check", "metrics", text=answer.read().decode()) == "", target

        def are_raised(expected: set[str]) -> bool:
            """Those with a `for` are pending first."""
            trouble.step()
            for alert in prometheus.alerts():
                seen[alert["labels"]["alertname"]] = alert["annotations"]
            return expected <= {*seen}

        expected = {*ALERTS} - left_out
        by_a_lost_nsqd = expected & {"NsqdDown", "NsqlookupdWithoutNsqds"}
        by_lost_others = expected & {"NsqlookupdDown", "NsqadminDown"}
        first = expected - by_a_lost_nsqd - by_lost_others
        wait_until(lambda: are_raised(first), what=lambda: first - {*seen})
        trouble.weak.kill()
        wait_until(lambda: are_raised(by_a_lost_nsqd), what=lambda: by_a_lost_nsqd - {*seen})
        trouble.lookupd.stop()
        trouble.admin.stop()
        wait_until(lambda: are_raised(by_lost_others), what=lambda: by_lost_others - {*seen})
        assert "error expanding template" not in str(seen)
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
        for expression in EXPRESSIONS:
            query = expression.replace("$__rate_interval", "5m").replace("$", "")
            prometheus.ask("query", query=query)
