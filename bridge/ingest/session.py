"""The Spark session: the one of spark-submit or a notebook, or a local one on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from bridge.extras import how_to_install
from bridge.ingest.errors import NotInstalled, stop_if_asked

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

T = TypeVar("T")
PACKAGES = ("pyspark", "pyarrow", "pandas")
MASTER = "local[*,4]"  # all cores, and a task may fail three times, as on a cluster
LOCAL = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.codegen.wholeStage": "false",  # no row goes through the JVM: nothing to compile
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# The JVM starts tasks and sees no message: a better compiler and collector cost more than they save.
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

GREETING = b"WARNING: Using incubator modules"
LOGGING = """
rootLogger.level = LEVEL
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = LEVEL
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n
"""


def require(*packages: str) -> None:
    """Raise NotInstalled if one of the packages is not installed."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        raise NotInstalled(f"{', '.join(absent)} {verb} not installed: {how_to_install('spark')}")


def require_java(remote: str | None = None) -> None:
    """Raise NotInstalled if Spark could not start its Java virtual machine here."""
    if remote is not None or is_submitted():
        return
    remedy = "install a Java 17 runtime (Debian: apt install openjdk-17-jre-headless) or set JAVA_HOME to one"
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise NotInstalled(
            f"Spark needs Java and there is none{f' in JAVA_HOME={home}' if home else ''}: {remedy}"
        )
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', output)
    import pyspark

    needed = 17 if int(pyspark.__version__.split(".")[0]) >= 4 else 8
    if found is None or int(found[1]) < needed:
        version = found[1] if found else "unknown"
        raise NotInstalled(
            f"Spark {pyspark.__version__} needs Java {needed} and {java} is {version}: {remedy}"
        )


def is_submitted() -> bool:
    """Return whether spark-submit, pyspark or a platform started this process, with its own settings."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ


def open_session(
    master: str | None = None,
    remote: str | None = None,
    app: str = "streambridge ingest",
    *,
    verbose: bool = False,
) -> SparkSession:
    """Open the session to work in: by default a local one with all cores that logs only errors."""
    require(*PACKAGES)
    require_java(remote)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app)
    if remote:
        return builder.remote(remote).getOrCreate()
    if is_submitted():
        return builder.getOrCreate()
    # the Python workers must find this package and this Python, whatever the current directory
    home = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", JVM)  # of the JVM that makes the command of the other
    for name, value in LOCAL.items():
        builder = builder.config(name, value)
    with tempfile.TemporaryDirectory() as folder:  # the JVM reads it once, at start
        log = Path(folder, "log4j2.properties")
        log.write_text(LOGGING.replace("LEVEL", "info" if verbose else "error"))
        builder = builder.config(
            "spark.driver.extraJavaOptions", f"{JVM} -Dlog4j2.configurationFile={log.as_uri()}"
        )
        with nullcontext() if verbose else _without_greeting():
            return builder.master(master or MASTER).getOrCreate()


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a Spark schema; times are in us of UTC."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        found = to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # Spark before 4.3 has no such argument, and means UTC
        found = to_arrow_schema(schema)
    return pa.schema(list(found))


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema of an Arrow schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    found: StructType = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    return found


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Filter out of standard error the greeting of a JVM started in the block; no option turns it off."""
    reader, writer = os.pipe()
    kept = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)

    def pass_on() -> None:  # until the JVM has ended
        with open(reader, "rb") as lines, open(kept, "wb", buffering=0) as out:
            for line in lines:
                if not line.startswith(GREETING):
                    out.write(line)

    threading.Thread(target=pass_on, daemon=True).start()
    try:
        yield
    finally:
        os.dup2(kept, 2)


def watched(spark: SparkSession, what: str, work: Callable[[], T], every: float = 5.0) -> T:
    """Run a Spark job; if it takes long, log the progress of its tasks to standard error.

    The job runs in a thread of its own: a thread that waits for the JVM gets no signals. An exception raised
    by a signal cancels this job, and no other job of the session.
    """
    try:
        context: Any = spark.sparkContext
    except Exception:  # Spark Connect has none, and each version raises something else
        context = None
    tracker = context.statusTracker() if context else None
    group = f"streambridge-{uuid4()}"

    def grouped() -> T:
        if context:
            context.setJobGroup(group, what)  # it applies to this thread's jobs, like a tag
        else:
            spark.addTag(group)
        return work()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(grouped)
        try:
            while not wait([working], every).done:
                stop_if_asked()
                stages = map(tracker.getStageInfo, tracker.getActiveStageIds()) if tracker else ()
                for info in filter(None, stages):
                    sys.stderr.write(f"{what}: {info.numCompletedTasks} of {info.numTasks} tasks\n")
        except BaseException:
            if context:
                context.cancelJobGroup(group)
            else:
                spark.interruptTag(group)
            raise
        return working.result()
