"""What a session is built with, and one that is real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

import pyarrow
import pyspark
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from nsparq.spark.session import home
from nsparq.spark.session.build import (
    ALWAYS_SET,
    CHATTER,
    CHECKPOINT_MANAGER,
    COLLECTOR,
    JAVA_VARIABLES,
    LOGGING,
    UNCHECKED_ARROW,
    build_session,
    configure,
    environment,
    register,
    session_environment,
    settings,
)
from nsparq.spark.session.doctor import State, examine
from nsparq.spark.session.package import package_file
from tests.support.polling import DEADLINE
from tests.support.spark import connect_server

REMOTE = "spark://10.0.0.1:7077"


class Builder:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}

    def config(self, name: str, value: str) -> Builder:
        self.options[name] = value
        return self


def configured(**arguments: object) -> dict[str, str]:
    return configure(Builder(), **arguments).options  # type: ignore[arg-type, attr-defined, return-value]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_HOME", "SPARK_LOCAL_IP"):
        monkeypatch.delenv(name, raising=False)


def test_a_local_session_keeps_to_itself() -> None:
    chosen = settings("local[2]")
    assert chosen["spark.driver.bindAddress"] == chosen["spark.driver.host"] == "127.0.0.1"
    assert chosen["spark.ui.port"] == "4040"
    assert chosen["spark.sql.streaming.checkpointFileManagerClass"] == CHECKPOINT_MANAGER


@pytest.mark.parametrize(
    "master", [REMOTE, "yarn", "k8s://https://127.0.0.1:6443", "spark://spark.example:7077"]
)
def test_what_is_right_for_one_machine_only_is_left_out_elsewhere(master: str, bare: None) -> None:
    chosen = settings(master)
    for name in ("spark.driver.bindAddress", "spark.driver.host", "spark.sql.shuffle.partitions"):
        assert name not in chosen
    assert "spark.sql.streaming.checkpointFileManagerClass" not in chosen
    assert "spark.python.daemon.module" not in chosen
    assert not {"PYSPARK_PYTHON", "SPARK_LOCAL_IP"} & environment(master).keys()


def test_the_driver_side_of_a_stream_finds_the_connector_whatever_python_it_is_given(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert environment(REMOTE)["PYTHONPATH"] == f"mine:{package_file()}"
    monkeypatch.delenv("PYTHONPATH")
    assert environment(REMOTE)["PYTHONPATH"] == str(package_file())
    assert "PYTHONPATH" not in environment("local[2]")


def test_a_cluster_on_this_machine_stays_on_the_loopback_interface(bare: None) -> None:
    for master in ("spark://127.0.0.1:7077", "spark://localhost:7077", "local-cluster[2,1,1024]"):
        assert settings(master)["spark.driver.bindAddress"] == "127.0.0.1"
        assert environment(master)["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize(
    ("master", "partitions"),
    [("local", 1), ("local[3]", 3), ("local[3,2]", 3), ("local[*]", os.cpu_count()), ("local[0]", 1)],
)
def test_a_shuffle_has_as_many_partitions_as_there_are_cores(master: str, partitions: int) -> None:
    assert settings(master)["spark.sql.shuffle.partitions"] == str(partitions)


def test_settings_of_the_caller_win_and_none_gives_way_to_sparks_own_default() -> None:
    name = "spark.sql.streaming.checkpointFileManagerClass"
    conf = {"spark.sql.shuffle.partitions": "7", name: None, "spark.mine": "x"}
    options = configured(master="local[2]", conf=conf)
    assert options["spark.sql.shuffle.partitions"] == "7" and options["spark.mine"] == "x"
    assert name not in options


def test_java_options_of_the_caller_are_added_to_ours() -> None:
    options = configured(conf={"spark.driver.extraJavaOptions": "-Dx=y"})["spark.driver.extraJavaOptions"]
    assert options.endswith(" -Dx=y") and "-Dlog4j2.configurationFile=" in options
    assert "spark.driver.extraJavaOptions" not in configured(conf={"spark.driver.extraJavaOptions": None})


def java_options(**arguments: object) -> list[str]:
    return configured(**arguments)["spark.driver.extraJavaOptions"].split()


@pytest.fixture
def no_java_variables(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*JAVA_VARIABLES, "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_a_local_session_has_the_faster_collector_and_unchecked_arrow(no_java_variables: None) -> None:
    assert {COLLECTOR, UNCHECKED_ARROW} <= {*java_options(master="local[2]")}
    for master in (REMOTE, "yarn", "local-cluster[2,1,1024]"):
        assert not {COLLECTOR, UNCHECKED_ARROW} & {*java_options(master=master)}


@pytest.mark.parametrize("name", ["extraJavaOptions", "defaultJavaOptions"])
def test_a_collector_that_the_caller_names_is_the_only_one(no_java_variables: None, name: str) -> None:
    options = java_options(conf={f"spark.driver.{name}": "-Dx=y -XX:+UseSerialGC"})
    assert COLLECTOR not in options and UNCHECKED_ARROW in options
    assert COLLECTOR in java_options(conf={f"spark.driver.{name}": "-XX:+UseGCOverheadLimit"})


@pytest.mark.parametrize("name", JAVA_VARIABLES)
def test_a_collector_in_the_environment_is_the_only_one(
    no_java_variables: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "-Xmx2g -XX:+UseZGC")
    assert COLLECTOR not in java_options()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("JDK_JAVA_OPTIONS", "@options.txt"),
        ("JDK_JAVA_OPTIONS", "-Xmx2g @options.txt"),
        ("JAVA_TOOL_OPTIONS", "-XX:VMOptionsFile=options.txt"),
        ("JAVA_TOOL_OPTIONS", "-XX:Flags=options.txt"),
        ("PYSPARK_SUBMIT_ARGS", "--properties-file spark.conf pyspark-shell"),
    ],
)
def test_a_file_of_options_may_name_a_collector(
    no_java_variables: None, monkeypatch: pytest.MonkeyPatch, name: str, options: str
) -> None:
    monkeypatch.setenv(name, options)
    assert COLLECTOR not in java_options()


def test_an_address_among_the_options_is_no_file(
    no_java_variables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Downer=ops@example.com")
    assert COLLECTOR in java_options()


@pytest.mark.parametrize("name", ["SPARK_HOME", "SPARK_CONF_DIR"])
def test_a_configuration_of_spark_may_name_a_collector(
    no_java_variables: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert COLLECTOR not in java_options()


def test_the_web_pages_can_be_moved_and_turned_off() -> None:
    assert configured(ui_port=5050)["spark.ui.port"] == "5050"
    off = configured(ui_port=None)
    assert off["spark.ui.enabled"] == "false" and "spark.ui.port" not in off


def test_the_environment_is_put_back(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    before = dict(os.environ)
    with session_environment("local[2]"):
        assert os.environ["JAVA_HOME"] != "/nowhere"
        assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert dict(os.environ) == before


def spark_in(directory: Path, version: str) -> Path:
    """What a directory must have to be taken for a Spark."""
    for name in ("bin/spark-submit", f"jars/spark-core_2.13-{version}.jar"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    return directory


def test_what_the_user_has_set_is_kept(bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PYSPARK_PYTHON", "SPARK_LOCAL_IP"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("SPARK_HOME", str(spark_in(tmp_path, pyspark.__version__)))
    assert environment("local[2]").keys() == {"JAVA_HOME"}
    monkeypatch.setenv("SPARK_HOME", "")
    assert environment("local[2]").keys() == {"JAVA_HOME", "SPARK_HOME"}


@pytest.mark.parametrize(
    ("removed", "version", "says"),
    [
        ("bin/spark-submit", pyspark.__version__, "has no bin/spark-submit: it is not a Spark directory"),
        (f"jars/spark-core_2.13-{pyspark.__version__}.jar", pyspark.__version__, "Spark is incomplete"),
        (None, "3.5.1", f"with Spark 3.5.1, but PySpark is {pyspark.__version__}: they differ"),
    ],
)
def test_a_spark_home_that_cannot_work_is_refused_and_the_doctor_names_it(
    bare: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    removed: str | None,
    version: str,
    says: str,
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(spark_in(tmp_path, version)))
    if removed is not None:
        (tmp_path / removed).unlink()
    with pytest.raises(home.BrokenHome, match=re.escape(says)), session_environment():
        pass
    (finding,) = (one for one in examine() if one.subject == "Spark home")
    assert finding.state is State.MISSING and says in finding.text and "unset SPARK_HOME" in finding.advice


CONNECTED = """
import sys, threading
from nsparq.pipeline.file.reading import parse
from nsparq.pipeline.execute.runner import run
from nsparq.spark import build_session, register
spark = build_session("connected", conf={"spark.sql.shuffle.partitions": "3"})
register(spark)
assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
print(spark.read.format("nsq").options(topic="t", nsqd="127.0.0.1:9").load().columns[-1])
try:
    run(spark, parse('[pipeline.p]\\nsource = "x"\\nsink = "noop"'), threading.Event())
except Exception as error:
    print(error)
"""


def test_a_session_of_spark_connect_knows_the_data_source(spark: SparkSession) -> None:
    pytest.importorskip("grpc")
    with connect_server(spark) as address:
        done = subprocess.run(
            [sys.executable, "-c", CONNECTED],
            env={**os.environ, "SPARK_REMOTE": address},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
    column, refusal = done.stdout.splitlines() or ["", ""]
    assert column == "headers", done.stderr
    assert refusal.startswith("pipelines need a Spark session in this process, not one of Spark Connect")


def test_sparks_home_has_its_programs_but_no_zip_of_python_files(
    bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = Path(environment("local[2]")["SPARK_HOME"])
    assert home.is_relative_to(tmp_path)
    assert (home / "bin" / "spark-submit").exists() and any((home / "jars").glob("spark-core_*.jar"))
    assert not (home / "python").exists()
    # YARN looks for that file.
    assert "SPARK_HOME" not in environment("yarn")


def test_a_client_without_jars_has_no_home_to_offer(
    bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = home.find_spec("json")
    monkeypatch.setattr(home, "find_spec", lambda name: spec)
    assert home.linked_home() is None
    assert "SPARK_HOME" not in environment("local[2]")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert home.named_home() == tmp_path


def test_a_client_without_jars_is_not_enough(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "package_home", lambda: None)
    (finding,) = (one for one in examine() if one.subject == "Spark home")
    assert finding.state is State.MISSING and "only a client for Spark Connect" in finding.text


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Aborting task", False),
        ("Current batch is falling behind. The trigger interval is 1000 milliseconds, but spent 1009", False),
        ("Data source write support MicroBatchWrite[epoch: 4, writer: x] is aborting.", False),
        ("Failed to cancel job group 1-2. Cannot find active jobs for it.", False),
        ("[queryId = 2ca40] [batchId = 4] Lost task 1.0 in stage 4.0 (TID 9) (x): TaskKilled (why)", False),
        ("[queryId = 2ca40] Lost task 1.0 in stage 4.0 (TID 9) (x): ExceptionFailure", True),
        ("Query [id = 1] terminated with error", True),
    ],
)
def test_the_log_leaves_out_chatter_only(line: str, shown: bool) -> None:
    setting = re.search(r"^\S+\.regex = (.*)$", LOGGING, re.MULTILINE)
    assert setting is not None
    regex = setting[1].replace(2 * "\\", "\\")
    assert all(pattern in regex for pattern in CHATTER)
    assert (re.fullmatch(regex, line) is None) == shown


# The real one


def listening(pid: int) -> list[str]:
    """The addresses on which a process listens, as the kernel writes them."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except OSError:  # closed in the meantime
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].partition(":")[0])
    return found


def test_spark_listens_on_the_loopback_interface_only(spark: SparkSession) -> None:
    gateway = SparkContext._gateway
    assert gateway is not None
    # 127.0.0.1, in the byte order of the machine, by itself or within IPv6.
    own = {"0100007F", "0000000000000000FFFF00000100007F"}
    addresses = listening(gateway.proc.pid)
    assert addresses and set(addresses) <= own


def test_python_workers_are_of_this_installation(
    bare: None, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    # The session of the tests has a Python that starts faster.
    monkeypatch.setattr(spark.sparkContext, "pythonExec", environment("local[2]")["PYSPARK_PYTHON"])

    def where(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyspark

        for _ in batches:
            yield pyarrow.RecordBatch.from_pydict({"python": [sys.prefix], "pyspark": [pyspark.__file__]})

    (row,) = spark.range(1).coalesce(1).mapInArrow(where, "python string, pyspark string").collect()
    import pyspark

    assert row.python == sys.prefix
    assert row.pyspark == pyspark.__file__  # not one in a zip file


def test_the_data_source_is_known(spark: SparkSession) -> None:
    frame = spark.read.format("nsq").options(topic="t", nsqd="127.0.0.1:9").load()
    assert frame.columns == ["topic", "node", "offset", "timestamp", "attempts", "id", "body", "headers"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(register, id="register"),
        pytest.param(lambda spark: build_session(), id="build_session"),
    ],
)
def test_another_thread_can_write_a_stream_once_it_was_told(
    spark: SparkSession, how: Callable[[SparkSession], object], tmp_path: Path
) -> None:
    def write() -> None:
        how(spark)
        assert SparkSession.getActiveSession() is spark
        rows = spark.readStream.format("rate").load().selectExpr("CAST(value AS STRING) AS body")
        writer = rows.writeStream.format("nsq").options(topic="t", nsqd="127.0.0.1:9")
        # Without it Spark does not find the data source here.
        writer.option("checkpointLocation", str(tmp_path)).start().stop()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(write).result()


def test_a_second_call_gives_the_same_session_and_changes_what_can_be_changed(spark: SparkSession) -> None:
    conf = {"spark.sql.shuffle.partitions": "3", "spark.driver.memory": "9g", "spark.sql.ansi.enabled": None}
    assert build_session(master="local[7]", conf=conf) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
    assert spark.conf.get("spark.driver.memory") != "9g"


def test_what_a_starting_stream_enters_into_the_shared_environment_is_there_from_the_beginning() -> None:
    """Another version of Spark may add more, which would corrupt the environment."""
    (jar,) = Path(pyspark.__file__).parent.glob("jars/spark-sql_*.jar")
    name = "org/apache/spark/sql/execution/python/streaming/PythonStreamingSourceRunner.class"
    with ZipFile(jar) as archive:
        entered = set(re.findall(rb"SPARK_[A-Z_]+", archive.read(name)))
    assert entered <= {key.encode() for key in ALWAYS_SET}
