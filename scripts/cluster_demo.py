"""A cluster on one machine: two broker pods, a Spark cluster, and pipelines over both pods at once.

    scripts/cluster_demo.py [file or directory …]      default: this machine's own logs under /var/log

The lines go to the two pods in turn. A standalone master and two workers, with a process for each executor, audit and
archive
them over HTTP, as they would from other machines. Everything is on loopback and in a directory that is removed.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import demo
import demo_input
import typer
from rich.table import Table

from kmq.cli.spark_options import On, running
from kmq.client.lines import LineSender
from kmq.errors import EXIT_FAILED, EXIT_OK, EXIT_RETRY, KmqError, RetryError
from kmq.links import layout
from kmq.message.text import format_message
from kmq.spark.sessions import Standalone, find_java, require_spark

PODS = 2
WORKERS = 2
MOST_LINES = 100_000  # enough to see all of them work
ROUTED_S = 60.0
SHM = Path("/dev/shm")

out = demo.out


class Pod:
    """A broker with directories, ports and an instance name of its own."""

    def __init__(self, number: int, root: Path) -> None:
        self.name, self.data, self.pipes = (
            f"pod-{number}",
            root / f"pod-{number}" / "data",
            root / f"pod-{number}" / "p",
        )
        self.count = 0
        self._instance = f"cluster-demo-{os.getpid()}-{number}"
        settings = {"INSTANCE": self._instance, "DATA": self.data, "PIPES": self.pipes}
        ports = dict.fromkeys(
            ("PORT", "ACK_PORT", "HTTP_PORT", "GRPC_PORT", "EGRESS_PORT", "STATUS_PORT", "KAFKA_PORT"), 0
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "RB_"))}
        self._env = kept | {f"KMQ_{name}": str(value) for name, value in (settings | ports).items()}

    def kmq(self, *arguments: str) -> str:
        """Run `kmq …` in this pod's environment and return its output."""
        command = [sys.executable, "-m", "kmq", *arguments]
        done = subprocess.run(command, env=self._env, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(done.returncode)
        return done.stdout

    def port(self, name: str) -> int:
        return int((self.pipes / f"{name}.port").read_text())

    @contextmanager
    def up(self) -> Iterator[None]:
        self.kmq("up")
        out.print(f"pod        {self.name}: lines in on {self.port('ingress')}, HTTP on {self.port('http')}")
        try:
            yield
        finally:
            self.kmq("down")
            self._forget()

    def _forget(self) -> None:
        """Remove the rings, which a broker leaves for its next start: this broker has no next start."""
        for path in SHM.glob(f"{self._instance}.*"):
            path.unlink()
        layout.remove_left_bells(self._instance)

    def wait_routed(self) -> None:
        """Wait until the queues have all sent messages."""
        deadline = time.monotonic() + ROUTED_S
        while sum(path.read_bytes().count(b"\n") for path in self.data.glob("topics/*/*/*.log")) < self.count:
            if time.monotonic() > deadline:
                raise RetryError(
                    f"{self.name} has not routed all after {ROUTED_S:.0f} s; its log: {self.pipes}/kmq.log"
                )
            time.sleep(demo.POLL_S)


def ship(pods: list[Pod], sources: list[demo_input.Source]) -> None:
    """Send the lines of the sources to the pods, in turn."""
    with ExitStack() as stack:
        senders = [stack.enter_context(LineSender("127.0.0.1", pod.port("ingress"))) for pod in pods]
        lines = ((source, line) for source in sources for line in source.lines())
        for number, ((source, line), pod, sender) in enumerate(
            zip(lines, cycle(pods), cycle(senders), strict=False), 1
        ):
            sender.send(format_message(source.routing_key(line), line, b"%d" % number))
            pod.count += 1
            if number == MOST_LINES:
                break
    for pod in pods:
        pod.wait_routed()
    out.print(f"shipped    {', '.join(f'{pod.count:,} to {pod.name}' for pod in pods)}")


def analyse(pods: list[Pod], to: Path) -> bool:
    """Audit and archive on the cluster. Return True if both have everything."""
    names = {f"127.0.0.1:{pod.port('http')}": pod for pod in pods}
    where = {"kmq.bootstrap.servers": ",".join(names)}
    begin = time.monotonic()
    with Standalone(WORKERS) as cluster:
        out.print(f"cluster    {cluster.url}, {WORKERS} workers, in {time.monotonic() - begin:.1f} s")
        with running("cluster-demo", On(cluster.url), conf=cluster.conf) as job:
            from kmq.spark.audit import audit
            from kmq.spark.pipelines import archive

            begin = time.monotonic()
            is_good = audit.run(job.spark, where, progress=job.progress) == EXIT_OK
            out.print(f"audit      {'good' if is_good else 'NOT good'}, in {time.monotonic() - begin:.1f} s")
            begin = time.monotonic()
            everything = where | {"subscribePattern": r"(?!__).*"}
            done = archive.run(job.spark, everything, str(to), schema=archive.NONE, progress=job.progress)
            rows = (
                job.spark.read.parquet(str(to)).groupBy("broker", "topic").count().orderBy("broker", "topic").collect()
            )
            out.print(f"archive    {done.rows:,} rows as Parquet, in {time.monotonic() - begin:.1f} s")
    table = Table("pod", "topic", box=None, pad_edge=False, header_style="bold")
    table.add_column("archived", justify="right")
    for broker, topic, count in rows:
        table.add_row(names[broker].name, topic, f"{count:,}")
    out.print(table)
    archived = {name: sum(count for broker, _, count in rows if broker == name) for name in names}
    wrong = [
        f"{pod.name} {archived[name]:,} of {pod.count:,}" for name, pod in names.items() if archived[name] != pod.count
    ]
    out.print(f"archived   NOT all: {', '.join(wrong)}" if wrong else "archived   every message of every pod, once")
    return is_good and not wrong


def run(inputs: list[str]) -> int:
    require_spark()
    find_java()
    sources, skipped = demo_input.named_files(inputs) if inputs else demo_input.machine_logs()
    if sum(source.count for source in sources) < demo_input.ENOUGH and not inputs:
        sources.append(demo_input.process_events(demo_input.ENOUGH))
    demo_input.name_topics(sources)
    demo.say_input(sources, skipped)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kmq-cluster-") as root, ExitStack() as stack:
        pods = [Pod(number, Path(root)) for number in range(1, PODS + 1)]
        for pod in pods:
            stack.enter_context(pod.up())
        ship(pods, sources)
        good = analyse(pods, Path(root) / "archive")
    out.print(f"result     {'good' if good else 'NOT good'}, {time.monotonic() - begin:.0f} s in all")
    return EXIT_OK if good else EXIT_FAILED


def main() -> int:
    try:
        return run(sys.argv[1:])
    except typer.Exit as ended:
        return int(ended.exit_code)
    except KmqError as error:
        print(f"cluster-demo: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"cluster-demo: {error}", file=sys.stderr)
        return EXIT_RETRY
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
