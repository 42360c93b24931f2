"""nsparq as a file for executors, as a package that Spark finds, and in its processes."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pyspark_nsq
from nsparq.spark.datasource import NsqDataSource
from nsparq.spark.session.package import package_file


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nsparq"


def test_a_python_that_has_no_nsparq_can_import_it_from_the_file(cache: Path) -> None:
    path = package_file()
    assert path.parent == cache
    # Without the directories of installed packages: nothing else is needed up to here.
    code = f"""
import sys; sys.path.insert(0, {str(path)!r})
import pyspark_nsq, nsparq.spark, nsparq.kernel, nsparq.wire.frames
for module in (pyspark_nsq, nsparq.spark, nsparq.kernel, nsparq.wire.frames):
    assert module.__file__.startswith({str(path)!r}) and module.__file__.endswith(".pyc"), module
from nsparq.spark.session.package import package_file
assert str(package_file()) == {str(path)!r}
"""
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_file_holds_sources_too_and_nothing_else(cache: Path) -> None:
    with zipfile.ZipFile(package_file()) as archive:
        names = archive.namelist()
    assert {Path(name).suffix for name in names} == {".py", ".pyc"}
    assert {"nsparq/spark/datasource.py", "pyspark_nsq/__init__.py"} <= set(names)


def test_the_same_sources_make_the_same_file_and_a_change_another(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "a.py"
    source.write_text("x = 1\n")
    monkeypatch.setattr("nsparq.spark.session.package._sources", lambda: iter([("p/a.py", source)]))
    first = package_file()
    content = first.read_bytes()
    first.unlink()
    assert package_file() == first and first.read_bytes() == content
    source.write_text("x = 22\n")
    assert package_file() != first


def test_spark_finds_the_data_source_by_itself() -> None:
    assert pyspark_nsq.DefaultSource is NsqDataSource
    assert not hasattr(pyspark_nsq, "nothing_else")


def test_a_connector_that_cannot_be_loaded_does_not_harm_other_packages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nsparq.spark.datasource", None)
    assert not hasattr(pyspark_nsq, "DefaultSource")
    # Not in its text: PySpark has that written as JSON, once it has run in this process.
    assert any(message.startswith('format("nsq") cannot be loaded') for message in caplog.messages)


@pytest.mark.parametrize(
    ("error", "shown"), [("BrokenPipeError()", False), ("EOFError()", False), ("ValueError('x')", True)]
)
def test_a_process_of_sparks_says_nothing_when_its_jvm_has_gone(
    error: str, shown: bool, tmp_path: Path
) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "worker.py").write_text(
        "import nsparq.spark, traceback\n"
        f"try:\n    raise {error}\nexcept Exception:\n    traceback.print_exc()\n"
        f"raise {error}\n"
    )
    command = [sys.executable, "-m", "pyspark.worker"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == (2 if shown else 0)


def test_in_a_process_of_the_users_nothing_is_changed() -> None:
    code = "import nsparq.spark; raise EOFError"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "EOFError" in done.stderr
