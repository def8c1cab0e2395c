"""Runs a Spark cluster on this machine's loopback: a standalone master and workers, as child processes.

    with Standalone(workers=2) as cluster:
        spark = session(cluster.url, conf=cluster.conf)

For tests, the cluster demo and benchmarks. Each executor is a process of its own and shares nothing with the driver, as
on a cluster of machines. The system chooses free ports. Only processes started here are ended here, including
executors.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from kmq.errors import RetryError
from kmq.spark.sessions import find_java, log_options, require_spark

_READY_S = 90.0  # longest wait until a JVM reports that it is ready; on an idle machine it takes a few seconds
_STOP_S = 10.0
_POLL_S = 0.05
_FRUGAL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # master and workers do little work, and should start fast
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


class Standalone:
    """A master and its workers, each offering `cores` and `memory_mb` for one executor."""

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
