"""`build_session()`: a Spark session with `format("nsq")`, set up for streaming.

Nothing has to be exported or configured before: it finds Java, Spark's workers use this Python, a
local session listens only on the loopback interface, and executors on other machines get nsparq as
a file.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Final
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from nsparq.spark.session.cache import cache_directory, digest, make_once
from nsparq.spark.session.class_archive import archive_options
from nsparq.spark.session.home import home_version, linked_home, named_home
from nsparq.spark.session.java import find_java, launcher_home
from nsparq.spark.session.package import package_file

__all__ = ["CHECKPOINT_MANAGER", "build_session", "configure", "register", "session_environment", "settings"]

CHECKPOINT_MANAGER: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""Starts no process for each file of a checkpoint. Only for local disks."""

DRIVER_JAVA: Final = "spark.driver.extraJavaOptions"

COLLECTOR: Final = "-XX:+UseParallelGC"
"""The garbage collector of a local session. G1, Java's default, does more at each write of a
reference, and Spark writes some for each row: without this, reading headers costs 8 % more."""

JAVA_VARIABLES: Final = (
    "JDK_JAVA_OPTIONS",
    "JAVA_TOOL_OPTIONS",
    "_JAVA_OPTIONS",
    "SPARK_SUBMIT_OPTS",
    "PYSPARK_SUBMIT_ARGS",
)
"""Java and Spark take further options for Java from them."""

_COLLECTOR_OR_FILE: Final = re.compile(
    r"-XX:\+Use\w+GC\b|-XX:VMOptionsFile|-XX:Flags|--properties-file|(^|\s)@"
)

UNCHECKED_ARROW: Final = "-Darrow.enable_unsafe_memory_access=true"
"""Arrow does not check the bounds of each access. Spark reads strings without that check anyway."""

UI_PORT: Final = 4040
LOOPBACK: Final = "127.0.0.1"

ALWAYS_SET: Final = {
    "SPARK_AUTH_SOCKET_TIMEOUT": "15",
    "SPARK_BUFFER_SIZE": "65536",
    "SPARK_LOCAL_DIRS": "",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
"""Variables that Spark adds to the environment of a data source when a stream starts. The
environment is a HashMap that all streams of the session share. Two streams that start at the same
time can corrupt it; their tasks then cannot be deserialised. Replacing existing entries is
harmless, so they are set from the start."""

# Harmless messages of Spark: at every start, while a query is idle, and when a query is stopped.
CHATTER: Final = (
    r"Abort(ing|ed) commit for partition .*",
    r"Aborting task",
    # The source waits up to a second for messages, and Spark takes that for a late batch. The depth
    # of its channel shows whether a query falls behind.
    r"Current batch is falling behind\..*",
    r"Data source write support .* (is aborting|aborted)\.",
    r"Failed to cancel job group .*",
    r"Lost task .* TaskKilled .*",
    r"Service 'SparkUI' could not bind on port .*",
    # We always register nsq: Spark finds none if another package is broken.
    r"The data source nsq replaced .*",
    r"Unable to load native-hadoop library .*",
    r"spark\.sql\.adaptive\.enabled is not supported in streaming .*",
)

LOGGING: Final = """\
# Warnings and errors on standard error, without harmless ones.
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{yyyy-MM-dd HH:mm:ss}} %p %c{{1}}: %m%n%ex
appender.stderr.filter.chatter.type = RegexFilter
appender.stderr.filter.chatter.regex = {chatter}
appender.stderr.filter.chatter.onMatch = DENY
appender.stderr.filter.chatter.onMismatch = NEUTRAL
""".format(chatter=rf"(?s)(\[.*?\] )*({'|'.join(CHATTER)})".replace("\\", 2 * "\\"))

_environment_lock = RLock()


def build_session(
    app_name: str = "nsparq",
    *,
    master: str = "local[*]",
    ui_port: int | None = UI_PORT,
    conf: Mapping[str, str | None] | None = None,
) -> SparkSession:
    """The session of this process, created if there is none yet.

    `conf` has further settings, which override ours; None keeps Spark's default instead of ours.
    `ui_port` is the port of Spark's web pages (or the next free one); None turns them off. An
    existing session takes only settings of `conf` that can be changed while it runs.

    If SPARK_REMOTE names a Spark Connect server, the session is one of that server. Then the server
    decides `master`, `ui_port` and our settings.
    """
    if os.environ.get("SPARK_REMOTE"):
        return _connect(app_name, conf or {})
    active = SparkSession.getActiveSession() or _session_of_another_thread()
    if active is not None:
        for name, value in (conf or {}).items():
            if value is not None and active.conf.isModifiable(name):
                active.conf.set(name, value)
        register(active)
        return active
    builder = configure(SparkSession.builder.appName(app_name), master=master, ui_port=ui_port, conf=conf)
    with session_environment(master):
        spark = builder.getOrCreate()
    register(spark)
    return spark


def _connect(app_name: str, conf: Mapping[str, str | None]) -> SparkSession:
    builder = SparkSession.builder.appName(app_name)
    for name, value in conf.items():
        if value is not None:
            builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def is_connect(spark: SparkSession) -> bool:
    """Whether it is a session of a Spark Connect server. Then this process has no JVM."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _session_of_another_thread() -> SparkSession | None:
    made = SparkSession._instantiatedSession
    return made if made is not None and made.sparkContext._jsc is not None else None


def register(spark: SparkSession) -> None:
    """Register format("nsq") in a session, for the calling thread, and send nsparq to executors.

    Every thread that starts a stream with this sink has to call it: Spark then looks only in the
    thread's active session, and a new thread has none.

    With Spark Connect nothing is sent: the server's Python needs nsparq itself.
    """
    from nsparq.spark.datasource import NsqDataSource

    if is_connect(spark):
        spark.dataSource.register(NsqDataSource)
        return
    activate(spark)
    context = spark.sparkContext
    if not _is_local(context.master or "") and package_file().name not in (context._python_includes or ()):
        context.addPyFile(str(package_file()))
    for name, value in ALWAYS_SET.items():
        context.environment.setdefault(name, value)
    spark.dataSource.register(NsqDataSource)


def activate(spark: SparkSession) -> None:
    SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)


def configure(
    builder: SparkSession.Builder,
    *,
    master: str = "local[*]",
    ui_port: int | None = UI_PORT,
    conf: Mapping[str, str | None] | None = None,
) -> SparkSession.Builder:
    """Apply our settings to your own builder; see `session_environment` and `register`."""
    conf = conf or {}
    merged: dict[str, str | None] = {**settings(master, ui_port=ui_port, conf=conf)}
    for name, value in conf.items():
        if name.endswith("JavaOptions") and value is not None and merged.get(name):
            value = f"{merged[name]} {value}"
        merged[name] = value
    for name, value in merged.items():
        if value is not None:
            builder = builder.config(name, value)
    return builder


def settings(
    master: str, *, ui_port: int | None = UI_PORT, conf: Mapping[str, str | None] | None = None
) -> dict[str, str]:
    """Our settings, where they differ from Spark's defaults. `conf` has those of the caller."""
    chosen = {
        "spark.master": master,
        # Otherwise Python workers wait some 40 ms for each exchange with the JVM.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.enabled": "true" if ui_port is not None else "false",
        DRIVER_JAVA: " ".join(_java_options(master, conf or {})),
    }
    if ui_port is not None:
        chosen["spark.ui.port"] = str(ui_port)
    if _is_loopback(master):
        chosen["spark.driver.bindAddress"] = chosen["spark.driver.host"] = LOOPBACK
    if _is_local(master):
        chosen["spark.python.daemon.module"] = "nsparq.spark.session.daemon"
        chosen["spark.sql.shuffle.partitions"] = str(_cores(master))
        chosen["spark.sql.streaming.checkpointFileManagerClass"] = CHECKPOINT_MANAGER
    return chosen


def _java_options(master: str, conf: Mapping[str, str | None]) -> list[str]:
    logging = make_once(
        cache_directory() / f"log4j2-{digest(LOGGING)}.properties",
        lambda path: _write(path, LOGGING),
    )
    options = [f"-Dlog4j2.configurationFile=file:{logging}", *archive_options(find_java())]
    if _is_local(master):
        options.append(UNCHECKED_ARROW)
        if not _may_name_collector(conf):
            options.append(COLLECTOR)
    return options


def _may_name_collector(conf: Mapping[str, str | None]) -> bool:
    """Whether the user's options have a garbage collector, or refer to a file that may have one.
    Java does not start with two."""
    if named_home() is not None or "SPARK_CONF_DIR" in os.environ:
        return True
    options = [value for name, value in conf.items() if name.startswith("spark.driver.")]
    options += map(os.environ.get, JAVA_VARIABLES)
    return any(_COLLECTOR_OR_FILE.search(one or "") for one in options)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@contextmanager
def session_environment(master: str = "local[*]") -> Iterator[None]:
    """Sets the environment variables that Spark's JVM needs at its start."""
    with _environment_lock:
        chosen = environment(master)
        before = {name: os.environ.get(name) for name in chosen}
        os.environ.update(chosen)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def environment(master: str) -> dict[str, str]:
    """The variables that `session_environment` sets. Variables set by the user stay, except a
    JAVA_HOME that does not work. Raises BrokenHome."""
    chosen = {"JAVA_HOME": str(launcher_home(find_java()))}
    home, named = linked_home(), named_home()
    if named is not None:
        # With a wrong one Spark fails later without a reason.
        home_version(named)
    # YARN needs the pyspark.zip that our home leaves out.
    elif home is not None and not master.startswith("yarn"):
        chosen["SPARK_HOME"] = str(home)
    if "PYSPARK_PYTHON" not in os.environ and _is_loopback(master):
        # On other machines this path may not exist, so the user has to set it.
        chosen["PYSPARK_PYTHON"] = sys.executable
    if "SPARK_LOCAL_IP" not in os.environ and _is_loopback(master):
        chosen["SPARK_LOCAL_IP"] = LOOPBACK
    if not _is_local(master):
        # The process of a stream's driver does not get the files that are sent to executors, and
        # its Python, chosen for the executors, may be another one.
        before = os.environ.get("PYTHONPATH")
        chosen["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(package_file())]))
    return chosen


def _is_local(master: str) -> bool:
    return re.match(r"local($|\[)", master) is not None


def _is_loopback(master: str) -> bool:
    """Whether the whole session runs on this machine."""
    if _is_local(master) or master.startswith("local-cluster"):
        return True
    host = urlsplit(master).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _cores(master: str) -> int:
    given = re.match(r"local\[\s*(\d+)", master)
    if given:
        return max(1, int(given[1]))
    return (os.cpu_count() or 1) if "*" in master else 1


def has_file_system(spark: SparkSession, url: str) -> bool:
    """Whether Spark can read and write below a URL: its JAR is there."""
    jvm: Any = spark._jvm
    jsc: Any = spark._jsc
    try:
        jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(
            url.partition("://")[0], jsc.hadoopConfiguration()
        )
    except Exception:  # PySpark converts only some of Java's exceptions
        return False
    return True
