"""One Spark session for all tests of a run: starting a JVM takes longer than most tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.forked_workers import python_for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLASSES = Path(sys.prefix) / ".spark-classes.jsa"
"""The archive that `tests.support.spark_classes` writes; `make test` runs it."""

# For short jobs on little data: compile quickly, do not verify classes, do not replan.
STARTS_FAST = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -XX:ReservedCodeCacheSize=240m"
)
FAST_JAVA = (
    f"{STARTS_FAST} -XX:SharedArchiveFile={CLASSES} -Xlog:disable" if CLASSES.exists() else STARTS_FAST
)
FAST = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": FAST_JAVA,
    "spark.driver.memory": "1g",
    "spark.sql.streaming.stopTimeout": "20s",
}


@pytest.fixture(scope="session")
def spark_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session itself. Tests take `spark`, which also cleans up."""
    pytest.importorskip("pyspark")
    from nsparq.spark.session.build import build_session

    warehouse = tmp_path_factory.mktemp("warehouse")
    conf = {**FAST, "spark.sql.warehouse.dir": str(warehouse)}
    with python_for_spark(tmp_path_factory.mktemp("python")) as python:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYSPARK_PYTHON", str(python))
            session = build_session("tests", master="local[2]", ui_port=None, conf=conf)
        yield session
        session.stop()


@pytest.fixture(scope="session")
def spark_settings(spark_session: SparkSession) -> dict[str, str]:
    """The settings of the session before the first test."""
    return spark_session.conf.getAll


@pytest.fixture
def spark(spark_session: SparkSession, spark_settings: dict[str, str]) -> Iterator[SparkSession]:
    """A local[2] session with format("nsq"). After the test, its queries and settings are
    removed."""
    before = settings_text(spark_session)
    yield spark_session
    for query in spark_session.streams.active:
        query.stop()
    if settings_text(spark_session) == before:
        return
    after = spark_session.conf.getAll
    for name in after.keys() - spark_settings.keys():
        spark_session.conf.unset(name)
    for name, value in spark_settings.items():
        if after.get(name) != value:
            spark_session.conf.set(name, value)


def settings_text(spark: SparkSession) -> str:
    """All settings, to compare: in one exchange with Java, instead of three for each setting."""
    return str(spark.conf._jconf.getAllAsJava().toString())


@contextmanager
def connect_server(spark: SparkSession) -> Iterator[str]:
    """Starts Spark Connect in the JVM of the session; its address. Both share tables."""
    jvm: Any = spark._jvm
    from tests.support.auth_server import unused_port

    port = unused_port()
    settings = spark._jsc.sc().conf()
    settings.set("spark.connect.grpc.binding.address", "127.0.0.1")
    settings.set("spark.connect.grpc.binding.port", str(port))
    service = jvm.org.apache.spark.sql.connect.SparkConnectPlugin().driverPlugin()
    service.init(spark._jsc.sc(), None)
    try:
        yield f"sc://127.0.0.1:{port}"
    finally:
        service.shutdown()
