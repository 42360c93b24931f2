"""A real Spark cluster on the loopback interface: a standalone master and a worker, each a process.

with SparkCluster(tmp_path) as cluster:
    build_session(master=cluster.url, conf=cluster.conf)
                                    in another process: a process has one session
    cluster.executors()             pids of the processes that run tasks, to kill them for example
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from types import TracebackType

from nsparq.spark.session.build import environment

from .polling import wait_until
from .spark import FAST, FAST_JAVA

MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
STARTING = re.compile(r"Starting Spark master at (spark://\S+)")


class SparkCluster:
    """A session on it gets this many `executors`: processes with one core each. With several
    `workers`, each has as many. `hidden` is a directory that workers and executors see empty, as if
    they were on other machines; that needs root."""

    def __init__(
        self, directory: Path, *, executors: int = 2, workers: int = 1, hidden: Path | None = None
    ) -> None:
        self.directory = directory
        self._workers, self._hidden = workers, hidden
        self.url = ""
        self.conf = {
            **FAST,
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": FAST_JAVA,
        }
        self._count = executors
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SparkCluster:
        try:
            master = self._start("master", MASTER, "--port", "0", "--webui-port", "0")
            self.url = wait_until(lambda: self._said(master, STARTING), 40, what=master)
            limits = ("--cores", f"{self._count}", "--memory", f"{self._count}g", "--webui-port", "0")
            for number in range(self._workers):
                work = self.directory / (f"work-{number}" if number else "work")
                self._start(work.name, WORKER, *limits, "--work-dir", str(work), self.url)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        # Executors end with their worker.
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def executors(self) -> list[int]:
        """Every running executor, found by its command line and its working directory."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes()
                inside = os.readlink(entry / "cwd").startswith(str(self.directory))
            except OSError:  # gone, or not ours to look at
                continue
            if inside and b"CoarseGrainedExecutorBackend" in command:
                found.append(int(entry.name))
        return sorted(found)

    def logs(self) -> str:
        return "\n".join(
            f"== {path.relative_to(self.directory)}\n{path.read_text(errors='replace')[-4000:]}"
            for pattern in ("*.log", "work*/*/*/stderr")
            for path in sorted(self.directory.glob(pattern))
        )

    def _start(self, name: str, *command: str) -> Path:
        spark = environment("spark://127.0.0.1")
        variables = {
            **os.environ,
            **spark,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": FAST_JAVA,
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        }
        log = self.directory / f"{name}.log"
        words = [f"{spark['SPARK_HOME']}/bin/spark-class", command[0], "--host", "127.0.0.1", *command[1:]]
        if self._hidden is not None and command[0] == WORKER:
            hide = 'mount -t tmpfs none "$1" && shift && exec "$@"'
            words = ["unshare", "--mount", "sh", "-c", hide, "sh", str(self._hidden), *words]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, env=variables, cwd=self.directory, stdout=output, stderr=subprocess.STDOUT
            )
        self._processes.append(process)
        return log

    def _said(self, log: Path, pattern: re.Pattern[str]) -> str:
        assert self._processes[-1].poll() is None, log.read_text()
        found = pattern.search(log.read_text())
        return found[1] if found else ""
