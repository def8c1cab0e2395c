"""A Spark session that fits: a Java that is new enough, confs that suit KMQ, a quiet JVM.

Local mode is the default; the same code takes any master. Nothing is shipped to executors elsewhere: they need
`pip install kmq[spark]` at the same Python (PYSPARK_PYTHON), or `spark.submit.pyFiles` among the confs.
"""

import atexit
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kmq.errors import ConfigError, RetryError

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

JAVA = 17  # the oldest that Spark 4 runs on
GET_JAVA = "apt-get install openjdk-17-jre-headless"
_CHATTY = ("all", "trace", "debug", "info", "warn")
_LOG4J = Path(__file__).with_name("log4j2.properties")
_MASTER_S = 5.0  # for a master to take a connection
_SOCKET_DIR_CHARS = 60  # the kernel takes 107 for a socket's path, of which Spark's name has 42
_JVMS = Path("/usr/lib/jvm")  # where Debian installs them, whether or not PATH knows
# What the JVM prints before any logger is there: Spark asks for the module itself.
_NOISE = (b"WARNING: Using incubator modules", b"WARNING: package sun.security.action")
_TRACEBACK = (b"Traceback (most recent call last)", b"During handling of the above exception")
_PARTING = (b"pyspark/daemon.py", b"python_streaming_source_runner.py")  # where Python workers talk to the JVM


def session(
    master: str | None = None,
    app: str = "kmq",
    conf: Mapping[str, str] | None = None,
    log_level: str = "error",
    listen: bool = True,
) -> "SparkSession":
    """A session with format("kmq") registered; the one of this process where it has one already.

    `conf` wins over what KMQ sets, and so does what spark-submit was told where that has started this process; `log_level`
    (warn, error, fatal, …) is from where on the JVM's log goes to stderr. `listen`: what each streaming query does is kept beside
    its checkpoint, for `kmq pipeline status`, and rows that it leaves out as late are warned of (streaming/listener.py).
    """
    require_spark()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from kmq.spark.format import register

    given = _submitted() | dict(conf or {})
    master = master or given.get("spark.master") or "local[*]"
    if SparkContext._active_spark_context is None:
        check_master(master)
    confs = _confs(master) | given
    if master.startswith("local") and SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        confs = _sockets() | confs
    options = f"{log_options(log_level)} {confs.get('spark.driver.extraJavaOptions', '')}"
    confs["spark.driver.extraJavaOptions"] = options.strip()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if is_here(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Logs each error of a query with its Java trace as one line of JSON; the exception says it as well.
    logging.getLogger("SQLQueryContextLogger").setLevel("ERROR" if log_level in _CHATTY else "CRITICAL")
    if SparkContext._active_spark_context is None:
        settings = SparkConf(loadDefaults=False).setMaster(master).setAppName(app).setAll(list(confs.items()))
        gateway = SparkContext._gateway
        if gateway is None:  # a second session of a process has the JVM of the first, and one of spark-submit has its
            os.environ["JAVA_HOME"] = str(find_java())
            gateway = _launch(settings)
        SparkContext(conf=settings, gateway=gateway)
    spark: SparkSession = SparkSession.builder.config(map={**confs}).getOrCreate()
    register(spark)
    if listen:
        from kmq.spark.streaming import listener

        listener.listen(spark)
    return spark


def _submitted() -> dict[str, str]:
    """What spark-submit was told, where it has started this process and its JVM; else nothing."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # so that the conf is asked for in that JVM
    return dict(SparkConf().getAll())


def _confs(master: str) -> dict[str, str]:
    confs = {
        "spark.driver.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",  # kmq.spark.streaming.progress shows it
        "spark.sql.session.timeZone": "UTC",
        # Not in the working directory, where Spark would put an empty one at the first name it does not know.
        "spark.sql.warehouse.dir": f"{tempfile.gettempdir()}/spark-warehouse-{os.getuid()}",
        # Where pandas is not installed, Spark would warn at every UDF that it does without.
        "spark.sql.execution.pythonUDF.arrow.enabled": "true" if find_spec("pandas") else "false",
        # Filters on offset, recv_ts, topic and partition become ranges of segments.
        "spark.sql.python.filterPushdown.enabled": "true",
        # Without it 50 ms more a micro-batch, for checksums beside files that are on a local disk.
        "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager",
    }
    if is_here(master):
        confs["spark.driver.host"] = confs["spark.driver.bindAddress"] = "127.0.0.1"
        confs["spark.sql.shuffle.partitions"] = str(2 * cores(master))
    return confs


def _sockets() -> dict[str, str]:
    """Let the JVM and its Python workers talk by Unix sockets, in a directory of this process and this user alone.

    Over TCP each task waits 40 ms: Spark writes its reply in two small blocks, and the second one is held back until the
    kernel has acknowledged the first (Nagle's algorithm against delayed acknowledgement). Only in local mode: the executors of a
    standalone master on this machine may be another user's, who could not enter the directory.
    """
    place = tempfile.mkdtemp(prefix="kmq-spark-")
    if len(place) > _SOCKET_DIR_CHARS:
        os.rmdir(place)
        return {}
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": place}


def log_options(level: str) -> str:
    """Options of a JVM of Spark's: log on stderr from this level on."""
    return f'"-Dlog4j2.configurationFile=file:{_LOG4J}" -Dkmq.log.level={level}'


def is_here(master: str) -> bool:
    """Whether a master runs its executors on this machine, so that they need no other address than loopback."""
    return master.startswith(("local", "spark://127.0.0.1:", "spark://localhost:"))


def cores(master: str) -> int:
    """How many cores a master on this machine has: as many as it names, else all."""
    numbers = [int(number) for number in re.findall(r"\d+", master.partition("[")[2])]
    if master.startswith("local-cluster"):  # local-cluster[2,1,1024]: workers, cores of each, memory
        return numbers[0] * numbers[1]
    return 1 if master == "local" else numbers[0] if numbers else os.cpu_count() or 1


# --- what must be there --------------------------------------------------------------------------------------------


def require_spark() -> None:
    """ConfigError where the extra is not installed. Imports nothing of it."""
    if not all(map(find_spec, ("pyspark", "pyarrow", "numpy"))):
        raise ConfigError(
            "this needs Spark: pip install 'kmq[spark]'; in a clone of the repository: pip install '.[spark]'"
        )


def find_java() -> Path:
    """The home of a Java that Spark runs on: JAVA_HOME, the one on PATH, or Debian's. ConfigError names how to get one."""
    older = []
    for home in _java_homes():
        version = _java_version(home)
        if version >= JAVA:
            return home
        older.append(f"Java {version} at {home}" if version else f"no Java that runs at {home}")
    found = f"only {', '.join(older)} was found" if older else "none was found"
    raise ConfigError(f"Spark needs Java {JAVA} or newer, and {found}; {GET_JAVA}, or set JAVA_HOME")


def check_master(master: str) -> None:
    """Raise RetryError where no standalone master answers at its address: Spark itself would try for a minute."""
    if not master.startswith("spark://"):
        return
    why = ""
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _MASTER_S):
                return
        except ValueError:
            raise ConfigError(f"--master {master!r}: {address!r} must be host:port") from None
        except OSError as err:
            why = f"{address}: {err.strerror or err}"
    raise RetryError(f"--master {master}: nothing answers ({why}); start the master, or give another one")


def _java_homes() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if command := shutil.which("java"):
        yield Path(command).resolve().parents[1]
    if _JVMS.is_dir():
        yield from sorted(_JVMS.iterdir())


def _java_version(home: Path) -> int:
    """The major version; 0 where there is no Java that runs."""
    try:
        said = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=60)
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', said.stderr)
    return int(found[1]) if found and said.returncode == 0 else 0


def _launch(conf: "SparkConf") -> Any:
    """Start the JVM of this process; a second time where the first one ends at once, as on a machine short of memory or ports.

    Raises RetryError where that ends too, with what it has said.
    """
    try:
        return _launched(conf)
    except RetryError as err:
        print(f"kmq: {err}; starting it once more", file=sys.stderr)
    return _launched(conf)


def _launched(conf: "SparkConf") -> Any:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    reading, writing = os.pipe()
    said: deque[bytes] = deque(maxlen=3)
    reader = threading.Thread(target=_pass_on, args=(os.fdopen(reading, "rb"), said), daemon=True)
    reader.start()
    failure: PySparkRuntimeError | None = None
    try:
        return launch_gateway(conf, {"stderr": writing})  # type: ignore[no-untyped-call]
    except PySparkRuntimeError as err:
        failure = err
    finally:
        os.close(writing)
    reader.join(1)
    why = " ".join(line.decode(errors="replace").strip() for line in said)
    raise RetryError(
        f"Spark's Java at {os.environ['JAVA_HOME']} ended before it was ready: {why or failure}"
    ) from failure


def _pass_on(stderr: IO[bytes], last: deque[bytes]) -> None:
    """The JVM's stderr, and that of its Python workers, to ours, less what nobody needs to read; `last` keeps some."""
    for text in _without_partings(stderr):
        if not text.startswith(_NOISE):
            last.append(text)
            try:
                os.write(2, text)
            except OSError:
                pass  # a closed terminal must not stop the job


def _without_partings(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines, and Python's tracebacks whole, less those of workers whose JVM has closed their connection.

    It does so when a stream ends; a Unix socket, unlike TCP, lets them know, and they print it.
    """
    held: list[bytes] = []
    has_parted = False
    for line in lines:
        if has_parted and line == b"\n":
            continue
        has_parted = False
        if not held and not line.startswith(_TRACEBACK):
            yield line
            continue
        held.append(line)
        if line.startswith((b" ", b"\n", *_TRACEBACK)):
            continue
        whole, held = b"".join(held), []
        has_parted = line.startswith((b"BrokenPipeError", b"EOFError")) and any(each in whole for each in _PARTING)
        if not has_parted:
            yield whole
    yield from held
