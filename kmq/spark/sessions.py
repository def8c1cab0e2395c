"""Starts a Spark session with a Java that is new enough, confs that suit KMQ, and a quiet JVM.

    spark = session("local[4]")     # spark.read.format("kmq") works

Local mode is the default; the same code runs on any master. Nothing is shipped to executors on other machines: they
need the extra `spark` for the same Python (PYSPARK_PYTHON), or `spark.submit.pyFiles` among the confs.

Stderr      of the JVM and of its Python workers is copied to ours, without tracebacks of workers whose JVM has closed
            their connection. The JVM closes it when a stream ends. A Unix socket, unlike TCP, reports that to the
            worker at once, and the worker prints it. Several workers share one stderr, so their tracebacks may
            interleave line by line.
Invariant   A line of any other error is never removed. In interleaved tracebacks it is unknown which line belongs to
            which. So they are removed together, and only if each of them is proven to be of a closed connection.
            Interleaved with any other error all of them are copied, in the order of arrival. A traceback is held back
            until the line that names its exception, and at most MAX_LINES. All other lines are copied at once.
Overflow    of Spark's own pattern, when a stream stops: its stack is left out too (without_overflows).
Not covered Tracebacks that cut each other in the middle of a line: they are copied.
"""

import atexit
import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from kmq.broker.concerns import is_in_pod
from kmq.errors import ConfigError, RetryError, pip_install, quotation
from kmq.spark import failures

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

JAVA = 17  # the oldest that Spark 4 runs on
GET_JAVA = "apt-get install openjdk-17-jre-headless"
_VERBOSE_LEVELS = ("all", "trace", "debug", "info", "warn")
_LOG4J = Path(__file__).with_name("log4j2.properties")
_MASTER_S = 5.0  # longest wait for a master to accept a connection
_SOCKET_DIR_CHARS = 60  # the kernel limits a socket's path to 107 characters, and Spark's file name takes 42
_JVMS = Path("/usr/lib/jvm")  # where Debian installs JVMs, whether or not they are on PATH
# The JVM prints these before any logger exists, because Spark itself requests the module.
_NOISE = (b"WARNING: Using incubator modules", b"WARNING: package sun.security.action")


def session(
    master: str | None = None,
    app: str = "kmq",
    conf: Mapping[str, str] | None = None,
    log_level: str = "error",
    listen: bool = True,
) -> "SparkSession":
    """Return a session with format("kmq") registered; the session of this process if it has one already.

    `conf` overrides the confs that KMQ sets. If spark-submit started this process, its confs override KMQ's too.
    `log_level` (warn, error, fatal, …): the least severe messages of the JVM's log that go to stderr.
    `listen`: keep the status of each streaming query beside its checkpoint, for `kmq pipeline status`, and log a
    warning when a query drops late rows (streaming/listener.py).

    Raises ConfigError without Spark or Java, RetryError if the master or the JVM does not answer.
    """
    require_spark()
    failures.require_pyspark()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from kmq.spark.format import register

    given = _submitted() | dict(conf or {})
    master = master or given.get("spark.master") or "local[*]"
    if SparkContext._active_spark_context is None:
        check_master(master)
    confs = default_confs(master) | given
    if master.startswith("local") and SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        directory = tempfile.mkdtemp(prefix="kmq-spark-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        confs = _sockets(directory) | confs
        if python := _python(directory):
            os.environ.setdefault("PYSPARK_PYTHON", python)
    options = f"{log_options(log_level)} {confs.get('spark.driver.extraJavaOptions', '')}"
    confs["spark.driver.extraJavaOptions"] = options.strip()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if is_here(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # This logger writes each error of a query, with its Java stack trace, as a line of JSON; the exception has it too.
    logging.getLogger("SQLQueryContextLogger").setLevel("ERROR" if log_level in _VERBOSE_LEVELS else "CRITICAL")
    if SparkContext._active_spark_context is None:
        settings = SparkConf(loadDefaults=False).setMaster(master).setAppName(app).setAll(list(confs.items()))
        gateway = SparkContext._gateway
        if gateway is None:  # a second session reuses the JVM of the first; under spark-submit its JVM is used
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
    """Return spark-submit's confs if it started this process and its JVM; else nothing."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # otherwise SparkConf would not ask that JVM
    return dict(SparkConf().getAll())


def default_confs(master: str) -> dict[str, str]:
    """Return the settings that a session on `master` has unless others are given."""
    confs = {
        "spark.driver.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",  # kmq.spark.streaming.streams shows it
        "spark.sql.session.timeZone": "UTC",
        # Spark creates this directory at the first unknown table name, by default in the working directory.
        "spark.sql.warehouse.dir": f"{tempfile.gettempdir()}/spark-warehouse-{os.getuid()}",
        # Without pandas, Spark would warn at every UDF that it falls back to running without Arrow.
        "spark.sql.execution.pythonUDF.arrow.enabled": "true" if find_spec("pandas") else "false",
        # For the option pushFilters of format("kmq").
        "spark.sql.python.filterPushdown.enabled": "true",
        # The default writes checksums beside files on a local disk, which takes 50 ms more for each micro-batch.
        "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager",
    }
    if is_here(master):
        confs["spark.driver.host"] = confs["spark.driver.bindAddress"] = "127.0.0.1"
        confs["spark.sql.shuffle.partitions"] = str(2 * cores(master))
    return confs


def _sockets(directory: str) -> dict[str, str]:
    """Return confs that connect the JVM and its Python workers by Unix sockets, in a directory of this process alone.

    Over TCP each task waits 40 ms: Spark writes its reply in two small blocks, and the second block is held back until
    the kernel has acknowledged the first (Nagle's algorithm against delayed acknowledgement). Only for local mode: the
    executors of a standalone master on this machine may run as another user, who could not enter the directory.
    """
    if len(directory) > _SOCKET_DIR_CHARS:
        return {}
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": directory}


# What Spark puts before PYTHONPATH, with the home of pyspark.
_ZIPPED = "{home}/python/lib/pyspark.zip:{home}/python/lib/py4j-{version}-src.zip:"
_PYTHON = """#!/bin/sh
PYTHONPATH="${{PYTHONPATH#{zipped}}}"
export PYTHONPATH="${{PYTHONPATH#{home}/jars/spark-core_*.jar}}"
[ "$*" != "-m pyspark.sql.streaming.python_streaming_source_runner" ] || set -- -m kmq.spark.stream_planner
exec {python} "$@"
"""


def _python(directory: str) -> str:
    """Return a command, made in `directory`, that starts Python for workers; "" where there can be none.

    Spark has its Python processes import pyspark from a zip, where no compiled files are. Each fresh interpreter, such
    as the planner of each stream, then compiles pyspark for 0.5 s of CPU. This command leaves the zip out, if pyspark
    is installed as files, and starts planners by stream_planner.py.
    """
    import py4j.version
    import pyspark

    home, command = os.path.dirname(pyspark.__file__), f"{directory}/python"
    if not os.path.isdir(f"{home}/python/lib") or os.environ.get("SPARK_HOME", home) != home:
        return ""  # another installation of Spark
    quoted = {"home": shlex.quote(home), "python": shlex.quote(sys.executable)}
    zipped = shlex.quote(_ZIPPED.format(home=home, version=py4j.version.__version__))
    with open(command, "w", encoding="utf-8") as script:
        script.write(_PYTHON.format(zipped=zipped, **quoted))
    os.chmod(command, 0o700)
    return command if os.access(command, os.X_OK) else ""  # no file system without programs


def log_options(level: str) -> str:
    """Return the options of a Spark JVM that logs messages of this level and above to stderr."""
    return f'"-Dlog4j2.configurationFile=file:{_LOG4J}" -Dkmq.log.level={level}'


def is_here(master: str) -> bool:
    """Return True if a master runs its executors on this machine, so that they need only the loopback address."""
    return master.startswith(("local", "spark://127.0.0.1:", "spark://localhost:"))


def cores(master: str) -> int:
    """Return the number of cores of a master on this machine: the number in its name, else all cores."""
    numbers = [int(number) for number in re.findall(r"\d+", master.partition("[")[2])]
    if master.startswith("local-cluster"):  # local-cluster[2,1,1024]: workers, cores of each, memory
        return numbers[0] * numbers[1]
    return 1 if master == "local" else numbers[0] if numbers else os.cpu_count() or 1


# --- requirements ----------------------------------------------------------------------------------------------------


def require_spark() -> None:
    """Raise ConfigError if the extra `spark` is not installed. Imports none of its packages."""
    if not all(map(find_spec, ("pyspark", "pyarrow", "numpy"))):
        raise ConfigError(f"this needs Spark: {pip_install('spark')}")


def find_java() -> Path:
    """Return the home of a Java that Spark runs on: JAVA_HOME, the Java on PATH, or one of Debian's.

    Raises ConfigError with the command that installs one.
    """
    unusable = []
    for home in _java_homes():
        version = _java_version(home)
        if version >= JAVA:
            return home
        unusable.append(f"Java {version} at {home}" if version else f"no Java that runs at {home}")
    found = f"only {', '.join(unusable)} was found" if unusable else "none was found"
    get = "use the image of k8s/Containerfile.spark" if is_in_pod() else GET_JAVA
    raise ConfigError(f"Spark needs Java {JAVA} or newer, and {found}; {get}, or set JAVA_HOME")


def check_master(master: str) -> None:
    """Raise RetryError if no standalone master answers at its addresses. Spark itself would try for a minute."""
    if not master.startswith("spark://"):
        return
    why = ""
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _MASTER_S):
                return
        except ValueError:
            raise ConfigError(f"--master {quotation(master, address)} must be host:port") from None
        except OSError as err:
            why = err.strerror or str(err)
    raise RetryError(f"--master {quotation(master)}: nothing answers ({why}); start the master, or give another one")


def _java_homes() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if command := shutil.which("java"):
        yield Path(command).resolve().parents[1]
    if _JVMS.is_dir():
        yield from sorted(_JVMS.iterdir())


def _java_version(home: Path) -> int:
    """Return the major version of Java; 0 if none runs there."""
    try:
        done = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=60)
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', done.stderr)
    return int(found[1]) if found and done.returncode == 0 else 0


# --- the JVM ---------------------------------------------------------------------------------------------------------


def _launch(conf: "SparkConf") -> Any:
    """Start the JVM of this process. Try once more if it ends at once, for example for lack of memory or ports.

    Raises RetryError with the JVM's last output if the second one ends too.
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
    last_lines: deque[bytes] = deque(maxlen=3)
    reader = threading.Thread(target=_copy_stderr, args=(os.fdopen(reading, "rb"), last_lines), daemon=True)
    reader.start()
    failure: PySparkRuntimeError | None = None
    # In a session of its own: a SIGTERM or SIGHUP for our process group must not end the JVM before its streams are
    # stopped. The JVM ends when its stdin closes, also if this process is killed.
    options = {"stderr": writing, "start_new_session": True}
    try:
        return launch_gateway(conf, options)  # type: ignore[no-untyped-call]
    except PySparkRuntimeError as err:
        failure = err
    finally:
        os.close(writing)
    reader.join(1)
    why = " ".join(line.decode(errors="replace").strip() for line in last_lines)
    raise RetryError(
        f"Spark's Java at {os.environ['JAVA_HOME']} ended before it was ready: {why or failure}"
    ) from failure


def _copy_stderr(stderr: IO[bytes], last_lines: deque[bytes]) -> None:
    """Copy the stderr of the JVM and its Python workers to ours, without noise; `last_lines` keeps the last of it."""
    for line in without_disconnects(without_overflows(stderr)):
        if not line.startswith(_NOISE):
            last_lines.append(line)
            try:
                os.write(2, line)
            except OSError:
                pass  # a closed terminal must not stop the job


# --- closed connections in stderr ------------------------------------------------------------------------------------

MAX_LINES = 1000  # of tracebacks that interleave: the ones of 50 workers
_HEADER = b"Traceback (most recent call last)"
_CHAINED = b"During handling of the above exception"
# The name of an exception, and its message. A log line has a space or a `=` before its first colon.
_ENDING = re.compile(rb"[^\s:=|]+(?:: .*)?$")
_CLOSED = (b"BrokenPipeError", b"EOFError")
# Frames of the loops in which a worker talks to the JVM. No traceback has two frames of the same function there.
_FRAME = re.compile(
    rb'  File "[^"]*/pyspark/(daemon|sql/streaming/python_streaming_source_runner)\.py", line \d+, in (\S+)'
)


class _Tracebacks:
    """Tracebacks that interleave, from the first header until each of them has named its exception."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._count = self._begun = self._ended = 0
        self._frames: Counter[tuple[bytes, bytes]] = Counter()
        self._has_other = False  # an error that is not a closed connection: all lines are passed on
        self.is_over = False

    @staticmethod
    def begin_with(line: bytes) -> bool:
        return line.startswith((_HEADER, _CHAINED))

    def include(self, line: bytes) -> bool:
        """Return True if a line may be part of them."""
        return line.startswith((b" ", b"\n", _CHAINED)) or _HEADER in line or _ENDING.match(line) is not None

    def add(self, line: bytes) -> None:
        self._held.append(line)
        self._count += 1
        self._begun += line.count(_HEADER)
        if frame := _FRAME.match(line):
            self._frames[frame[1], frame[2]] += 1
        elif _ENDING.match(line):
            self._ended += 1
            self._has_other |= not line.startswith(_CLOSED)
            self.is_over = self._ended >= self._begun
            self._has_other |= self.is_over and not self._are_all_of_workers()
        if self._count >= MAX_LINES:
            self.is_over = self._has_other = True

    def _are_all_of_workers(self) -> bool:
        """Return True if each traceback is proven to have a frame of a worker's loop.

        Two frames of one function belong to two tracebacks; frames of two functions may belong to one.
        """
        files = {file for file, _ in self._frames}
        proven = sum(max(count for (file, _), count in self._frames.items() if file == each) for each in files)
        return 0 < self._begun <= proven

    def released(self) -> list[bytes]:
        """Return the lines that can be copied by now, each of them once."""
        if not self._has_other:
            return []
        released, self._held = self._held, []
        return released

    def rest(self) -> list[bytes]:
        return self._held


def without_disconnects(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, except tracebacks of workers whose connection was closed, and blank lines right after these."""
    tracebacks: _Tracebacks | None = None
    has_removed = False
    for line in lines:
        if has_removed and line == b"\n":
            continue
        has_removed = False
        if tracebacks is None and _Tracebacks.begin_with(line):
            tracebacks = _Tracebacks()
        if tracebacks is None or not tracebacks.include(line):
            yield line
            continue
        tracebacks.add(line)
        yield from tracebacks.released()
        if tracebacks.is_over:
            has_removed = bool(tracebacks.rest())
            tracebacks = None
    if tracebacks is not None:
        yield from tracebacks.rest()


# --- an overflow in stderr -------------------------------------------------------------------------------------------

_OVERFLOW = re.compile(rb'Exception in thread "stream execution thread for .*" java\.lang\.StackOverflowError\s*')
_FRAME_OF_JAVA, _FRAME_OF_PATTERN = b"\tat java.base/java.", b"\tat java.base/java.util.regex.Pattern$"
_INNERMOST = 4  # frames at most of what a pattern calls


def without_overflows(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, except the stack of a stream's thread that has overflowed in a regular expression.

    If a batch of a Python function is stopped, it ends with an error. Spark compares the text of that error with a
    pattern, which overflows if the text is long. The stream ends as it should. An overflow that does end a query is
    in the query's error too.
    """
    held: list[bytes] = []  # the header, and frames of what the pattern has called
    is_inside = False
    for line in lines:
        if (held or is_inside) and line.startswith(_FRAME_OF_JAVA) and len(held) <= _INNERMOST:
            is_inside = is_inside or line.startswith(_FRAME_OF_PATTERN)
            held = [] if is_inside else [*held, line]
            continue
        yield from held
        is_inside = False
        held = [line] if _OVERFLOW.fullmatch(line) else []
        if not held:
            yield line
    yield from held


# --- standalone ------------------------------------------------------------------------------------------------------

_READY_S = 90.0  # longest wait until a JVM reports that it is ready; on an idle machine it takes a few seconds
_STOP_S = 10.0
_POLL_S = 0.05
_FRUGAL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # master and workers do little work, and should start fast
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


class Standalone:
    """A Spark cluster on this machine's loopback: a master and workers, as child processes.

    Each worker offers `cores` and `memory_mb` for one executor, a process of its own that shares nothing with the
    driver, as on a cluster of machines. The system chooses free ports. Only processes started here are ended here,
    including executors. For tests, the cluster demo and benchmarks.

        with Standalone(workers=2) as cluster:
            spark = session(cluster.url, conf=cluster.conf)
    """

    def __init__(self, workers: int = 2, cores: int = 1, memory_mb: int = 512) -> None:
        require_spark()
        self._wanted, self._cores, self._memory_mb = workers, cores, memory_mb
        self.home = Path(tempfile.mkdtemp(prefix="kmq-spark-"))
        self._all: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self.url = ""
        self.conf = {"spark.executor.memory": f"{memory_mb}m", "spark.executor.cores": str(cores)}

    def __enter__(self) -> "Standalone":
        try:
            port = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
            master = self._start("master", _MASTER, *port)
            self.url = self._wait_for_log("master", master, rb"Starting Spark master at (spark://[\w.:]+)")
            offer = ("--cores", str(self._cores), "--memory", f"{self._memory_mb}m", "--work-dir", f"{self.home}/work")
            names = [f"worker-{number}" for number in range(self._wanted)]
            self.workers = [self._start(name, _WORKER, *port, *offer, self.url) for name in names]
            for name, worker in zip(names, self.workers, strict=True):
                self._wait_for_log(name, worker, rb"(Successfully registered with master)")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End workers, executors and the master, and remove what they wrote."""
        for process in reversed(self._all):  # workers first: they end their executors
            process.terminate()
        deadline = time.monotonic() + _STOP_S
        for process in reversed(self._all):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # the group has no process left, as expected
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def kill_worker(self, number: int) -> None:
        """SIGKILL a worker and its executors, as if their machine were lost."""
        os.killpg(self.workers[number].pid, signal.SIGKILL)
        self.workers[number].wait()

    def _start(self, name: str, main_class: str, *arguments: str) -> "subprocess.Popen[bytes]":
        import pyspark

        home = Path(pyspark.__file__).parent
        env = os.environ | {
            "JAVA_HOME": str(find_java()),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{log_options('info')} {_FRUGAL}",
        }
        command = [str(home / "bin" / "spark-class"), main_class, *arguments]
        with open(self.home / f"{name}.log", "wb") as log:
            # A process group of its own, so that Ctrl-C reaches only the driver, and a worker's executors end with it.
            process = subprocess.Popen(
                command,
                env=env,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._all.append(process)
        return process

    def _wait_for_log(self, name: str, process: "subprocess.Popen[bytes]", pattern: bytes) -> str:
        """Wait until `pattern` is in the log of a process; return its group. Raises RetryError if the process ends."""
        log = self.home / f"{name}.log"
        deadline = time.monotonic() + _READY_S
        while not (found := re.search(pattern, log.read_bytes())):
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise RetryError(f"Spark's {name} did not start: {' / '.join(last) or 'it printed nothing'}")
            time.sleep(_POLL_S)
        return found[1].decode()
