"""Commands on Spark as a person runs them: what they print, how they end; and the progress of jobs and streams."""

import contextlib
import io
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from brokers import FREE_PORTS, environment
from command_tree import every_command
from commands import PATIENCE_S, wait
from heard import Heard
from made_data import write_data
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from rich.console import Console

from kmq.spark import register
from kmq.spark.streaming import streams
from kmq.spark.streaming.streams import Progress

pytestmark = [
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.sampled(0.4, group="file"),  # none needs another: each run takes a part
]

# For JVMs that live for seconds.
QUICK = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"
STREAM = """
import sys, typer
from kmq.cli.spark_options import On
from kmq.cli.spark_options import running

def main(kind: str) -> None:
    with running("stream", On("local[1]", ["{quick}"]), continuous=kind == "continuous") as job:
        query = job.spark.readStream.format("rate").load().writeStream.format("noop").start()
        print("started", flush=True)
        query.awaitTermination()

typer.run(main)
""".replace("{quick}", QUICK)


# Signalled when there is no stream yet; the one that is started then has nothing to do, so no job that could be cancelled.
EARLY = """
import sys, time, typer
from kmq.spark.streaming import streams
from kmq.cli.spark_options import On
from kmq.cli.spark_options import running

def main(data: str) -> None:
    with running("stream", On("local[1]", ["{quick}"]), continuous=True) as job:
        rows = job.spark.readStream.format("kmq").option("path", data).option("subscribe", "orders").load()
        print("started", flush=True)
        streams.stopping.wait()
        rows.writeStream.format("noop").start().awaitTermination()

typer.run(main)
""".replace("{quick}", QUICK)
# A JVM that answers nothing any more.
HUNG = """
import os, signal, typer
from kmq.spark.streaming import streams
from kmq.cli.spark_options import On
from kmq.cli.spark_options import running

def main() -> None:
    streams.STOP_S = 2.0
    with running("stream", On("local[1]", ["{quick}"]), continuous=True) as job:
        os.kill(job.spark.sparkContext._gateway.proc.pid, signal.SIGSTOP)
        print("started", flush=True)
        job.spark.range(10).collect()

typer.run(main)
""".replace("{quick}", QUICK)


@pytest.mark.parametrize(
    ("kind", "number", "send", "code"),
    [
        pytest.param("continuous", signal.SIGTERM, os.kill, 0, marks=pytest.mark.soak),
        ("continuous", signal.SIGTERM, os.killpg, 0),
        pytest.param("continuous", signal.SIGINT, os.killpg, 0, marks=pytest.mark.soak),
        ("once", signal.SIGTERM, os.kill, 143),
    ],
)
def test_a_signal_stops_a_stream_in_order_and_the_exit_code_tells_if_work_is_left(kind, number, send, code):
    returned, out, err = signalled(number, STREAM, kind, send=send)
    assert returned == code, out + err
    assert [line for line in err.splitlines() if not line.startswith("ts=")] == []


def signalled(number, script, *arguments, send=os.kill):
    """(exit code, stdout, stderr) of a script that is sent a signal when it says that it has started.

    `send`: os.kill signals the process alone; os.killpg all of its group, as a shell and `timeout` do.
    """
    command = [sys.executable, "-c", script, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment(), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout.readline() == "started\n"
            send(process.pid, number)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return process.returncode, out, err


def test_a_driver_that_is_killed_takes_its_jvm_with_it():
    """The JVM is in no process group of the driver; it holds the driver's stdout open while it lives."""
    code, out, err = signalled(signal.SIGKILL, STREAM, "continuous")
    assert code == -signal.SIGKILL, out + err


def test_a_signal_before_its_stream_is_active_stops_it_too(tmp_path):
    data = write_data(tmp_path / "data", [b"orders|0|1|a"])
    code, out, err = signalled(signal.SIGTERM, EARLY, data)
    assert code == 0, out + err


STARTING = """
import typer
from kmq.cli.spark_options import On
from kmq.cli.spark_options import running
from pyspark import java_gateway

launch = java_gateway.launch_gateway
def launched(conf, popen_kwargs):
    print("started", flush=True)
    return launch(conf, popen_kwargs)
java_gateway.launch_gateway = launched

def main() -> None:
    with running("stream", On("local[1]")):
        raise AssertionError("the session came to be")

typer.run(main)
"""


def test_a_signal_while_java_starts_ends_the_command_at_once():
    code, out, err = signalled(signal.SIGTERM, STARTING)
    assert (code, out) == (143, ""), err


@pytest.mark.soak
def test_a_jvm_that_hangs_does_not_hold_up_the_end():
    code, _, err = signalled(signal.SIGTERM, HUNG)
    assert (code, err.count("kmq: not stopped within 2 s; ended anyway")) == (143, 1), err


SLOW = """
import os, sys, time
if "kmq.spark.stream_planner" in sys.orig_argv and not os.path.exists({once!r}):
    open({once!r}, "w").close()
    time.sleep(15)
"""


def test_a_stream_whose_worker_is_not_up_in_time_is_started_again(spark, tmp_path, capfd):
    """The first interpreter of its planner takes longer than the 10 s that Spark waits, as on a busy machine."""
    data = write_data(tmp_path / "data", [b"orders|0|%d|a" % n for n in range(50)])
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW.format(once=str(tmp_path / "once")))
    spark.sparkContext.environment["PYTHONPATH"] = str(tmp_path / "slow")
    try:
        register(spark)  # a source has the environment of when it was registered
        rows = spark.readStream.format("kmq").option("path", data).option("subscribe", "orders")
        rows = rows.option("startingOffsets", "earliest").schema("offset bigint").load()
        counts, described = [], []

        def add(batch, _):
            counts.append(batch.count())
            described.append(spark.sparkContext.getLocalProperty("spark.job.description"))

        streams.follow(rows, add, "copy", streams.Trigger(checkpoint=str(tmp_path / "c")))
    finally:
        spark.sparkContext.environment.pop("PYTHONPATH")
        register(spark)
    assert (counts, described) == ([50], ["copy, batch 0: orders/0: up to 50 records"])
    assert capfd.readouterr().err.count("event=stream_restarted query=copy start=2 of=8") == 1


class Busy:
    """A stream, and the stop of its command, on a machine where no Python worker starts for `busy_s` of pauses."""

    _spark = name = lastProgress = None
    runId = "1"

    def __init__(self, busy_s, stop_after_s=math.inf):
        self.starts, self.paused_s = 0, 0.0
        self._busy_s, self._stop_after_s = busy_s, stop_after_s

    def trigger(self, **_):
        return self

    def start(self):
        self.starts += 1
        return self

    def awaitTermination(self, _):
        if self.paused_s < self._busy_s:
            raise PySparkException("Python worker failed to connect back.")
        return True

    @property
    def _jsq(self):
        return SimpleNamespace(lastProgress=lambda: None, recentProgress=list)

    def stop(self):
        pass

    def wait(self, seconds):
        self.paused_s += seconds

    def is_set(self):
        return self.paused_s > self._stop_after_s


def test_the_starts_of_a_stream_carry_over_a_minute_in_which_no_worker_starts(monkeypatch):
    stream = Busy(busy_s=61)
    monkeypatch.setattr(streams, "stopping", stream)
    streams.run(stream)
    assert stream.paused_s >= 61


def test_a_machine_that_stays_busy_ends_the_stream_and_a_stop_ends_its_pauses(monkeypatch):
    stream, stopped = Busy(busy_s=math.inf), Busy(busy_s=math.inf, stop_after_s=5)
    monkeypatch.setattr(streams, "stopping", stream)
    with pytest.raises(PySparkException, match="failed to connect back"):
        streams.run(stream)
    assert stream.starts == streams.STARTS
    monkeypatch.setattr(streams, "stopping", stopped)
    streams.run(stopped)
    assert stopped.starts < streams.STARTS


def test_kmq_sql_reads_a_script_and_ends_at_its_first_error_with_one_line(tmp_path):
    data = write_data(tmp_path / "data", [b"orders|0|1|a", b"orders|0|2|b"], {"orders": 1})
    script = "select count(*) as n from orders; select value_text from orders order by seq;\nselect 1 from nope"
    command = [sys.executable, "-m", "kmq", "sql", "--csv", "--path", data, "--master", "local[1]", "--conf", QUICK]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, input=script, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.split() == ["n", "2", "value_text", "a", "b"]
    assert done.returncode == 78
    assert (
        done.stderr.splitlines()[-1]
        == "kmq: unknown topic `nope`; expected one of orders, append, all_topics, __consumer_offsets"
    )
    assert not [line for line in done.stderr.splitlines()[:-1] if not line.startswith("ts=")], "Spark is quiet"
    assert os.listdir(tmp_path) == ["data"], "nothing is left where it was run"


# --- progress ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gated(spark, tmp_path):
    """A function that runs a job of two tasks which wait until they are let go, and the function that lets them."""
    gate = tmp_path / "open"

    @F.udf("bigint")
    def wait_for_gate(n):
        deadline = time.monotonic() + PATIENCE_S
        while not Path(gate).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return n

    rows = spark.range(0, 2, 1, 2).select(wait_for_gate("id"))
    job = threading.Thread(target=rows.collect)
    job.start()
    yield gate.touch
    gate.touch()
    job.join()


def test_without_a_terminal_progress_is_a_line_of_logfmt_every_few_seconds(spark, gated, capfd):
    heard = Heard(capfd)
    with Progress(spark, "audit", Console(file=io.StringIO()), log_s=0.1) as progress:
        progress.describe("reading the WAL")
        said = heard.wait_for("tasks_done=0 tasks=2")
    assert 'stage=audit event=step what="reading the WAL"' in said
    assert 'event=progress what="reading the WAL" tasks_done=0 tasks=2' in said


def test_on_a_terminal_progress_is_a_bar_that_goes_away(spark, gated):
    screen = io.StringIO()
    with Progress(spark, "audit", Console(file=screen, force_terminal=True, width=100)):
        wait(lambda: "0/2 tasks" in screen.getvalue())
        gated()
    assert screen.getvalue().endswith("\x1b[2K"), "the last line is erased"


def test_a_stream_shows_its_batches(spark, tmp_path, capfd):
    data = write_data(tmp_path / "data", [b"orders|0|%d|a" % n for n in range(50)], {"orders": 1})
    rows = spark.readStream.format("kmq").option("path", data).option("subscribe", "orders")
    rows = rows.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 20).schema("offset bigint").load()
    stream = rows.writeStream.format("noop").queryName("copy").option("checkpointLocation", str(tmp_path / "c"))
    query = stream.start()
    heard = Heard(capfd)
    try:
        with Progress(spark, "copy", Console(file=io.StringIO()), log_s=0.05):
            said = heard.wait_for("event=batch query=copy batch=2 rows=10 ")
    finally:
        query.stop()
    assert "behind=0" in said


# --- the prompt ----------------------------------------------------------------------------------------------------


class Terminal:
    """A command in a terminal of its own: what is typed, and what it has shown so far."""

    def __init__(self, command, env, cwd):
        self.text = ""
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.chdir(cwd)
            os.execve(command[0], command, env)

    def type(self, keys):
        self.text = ""
        os.write(self._fd, keys.encode())

    def wait(self, what):
        def shown():
            if select.select([self._fd], [], [], 0)[0]:
                with contextlib.suppress(OSError):  # its end
                    self.text += os.read(self._fd, 65536).decode(errors="replace")
            return re.search(what, re.sub(r"\x1b\[[\d;?]*\w", "", self.text), re.DOTALL)  # without colours

        wait(shown, lambda: f"{what!r} in {self.text!r}")

    def end(self):
        """Its exit code, when it has ended; drains what it still shows."""
        with contextlib.suppress(OSError):
            while os.read(self._fd, 65536):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_the_prompt_answers_lives_through_errors_and_ctrl_c_and_ends_with_ctrl_d(tmp_path):
    data = write_data(tmp_path / "data", [b"orders|0|%d|a" % n for n in range(7)], {"orders": 1})
    command = [sys.executable, "-m", "kmq", "sql", "--path", data, "--master", "local[1]", "--conf", QUICK]
    shell = Terminal(command, environment(HOME=tmp_path, TERM="xterm"), tmp_path)
    try:
        shell.wait("tables: orders, append, all_topics.*kmq> ")
        shell.type("select count(*) as n\nfrom orders;\n")
        shell.wait(r"n\s+─+\s+7\s.*1 row\(s\).*kmq> ")
        shell.type("select nope from orders;\n")
        shell.wait("kmq: .*nope.*kmq> ")
        shell.type("half a line\x03")
        shell.wait("kmq> $")
        shell.type("select count(*) from range(1000000000000) where id % 7 = 8;\n")
        shell.wait("0/1 tasks")
        shell.type("\x03")
        shell.wait("kmq: .*cancel.*kmq> ")
        shell.type("\x04")
        assert shell.end() == 0
        assert "select count(*) as n" in (tmp_path / ".kmq_sql_history").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(shell.pid, signal.SIGKILL)


def pasted_examples():
    """The examples of all help texts that end by themselves and need no other host."""
    whole = "\n".join(command.epilog or "" for _, command in every_command()).replace("\\\n", " ")
    joined = re.sub(r"\\\s*\n\s*", " ", whole)
    lines = [re.sub(r"\s+", " ", line).strip() for line in joined.splitlines()]
    kept = [line for line in lines if re.match(r"kmq (sql .|audit|pipeline run)", line)]
    return [
        line for line in dict.fromkeys(kept) if "--continuous" not in line and " b:" not in line and "pods/" not in line
    ]


@pytest.mark.soak
def test_the_examples_of_help_work_when_pasted(broker):
    """One after the other at a broker on its usual ports, which must be free: a JVM for each."""
    for name in FREE_PORTS:
        broker.env.pop(name)
    broker.up()
    broker.send_lines(
        [b'%b.k%d|0|%d|{"user": "u%d"}' % (t, n, n, n) for t in (b"orders", b"test", b"jobs") for n in range(20)]
    )
    broker.send_lines([b"dead.letter_%d|0|%d|lost %d" % (n, n, n) for n in range(5)])
    examples = pasted_examples()
    assert len(examples) >= 12
    for line in examples:
        print(line, flush=True)
        result = broker.run("bash", "-c", line, patience_s=PATIENCE_S)
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
        assert result.stdout.strip(), line
