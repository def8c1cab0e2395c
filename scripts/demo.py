"""The main demo: ship real input through the broker, then check that the output equals the input.

    scripts/demo [--no-group] [--no-spark] [file or directory …]      default: this machine's own logs under /var/log

Each source becomes a topic, each of its lines a message `<topic>.<class>|time|<run>-<line number>|<line>`
(demo_input.py). The check reads files only: every record that the WAL got meanwhile must be in the queues, byte for
byte and once, and the payloads of each source must have the hash of the input. A running broker is used and left
running; else one is started and stopped again. Then three consumers of a group read what was shipped, and one of them
is killed (demo_group.py). Then Spark audits the directory and archives what was shipped (demo_spark.py); without Java
that part is skipped.

Exit code 0: every line of the input is stored whole, and was read by the group. 1: some are not, for example because
they are longer than KMQ_MAX_LINE and only their beginning is kept, in the topic `dead`; the output names each source
with such lines.
"""

import heapq
import os
import shlex
import subprocess
import sys
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import demo_group
import demo_spark
import typer
from demo_input import ENOUGH, Source, machine_logs, name_topics, named_files, process_events
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kmq.broker import status
from kmq.client.lines import LineSender, read_port
from kmq.config.settings import Settings, load
from kmq.config.values import KIB, MIB
from kmq.errors import EXIT_FAILED, EXIT_OK, EXIT_RETRY, BusyError, ConfigError, KmqError, RetryError
from kmq.links.ownership import FileLock, describe
from kmq.log import dropped, wal
from kmq.message import record
from kmq.message.text import format_message

STALLED_S = 10.0  # report and stop waiting if nothing moves for this long
READY_S = 60.0  # longest wait for a broker that is up but still recovering
POLL_S = 0.01
NAMED = 10  # files left out are named up to here, and counted beyond
UNITS = (("MiB", MIB), ("KiB", KIB))
SAY_S = 2.0  # between two lines about the progress, where there is no terminal

out = Console(highlight=False, soft_wrap=True)


# --- the broker --------------------------------------------------------------------------------------------------


@contextmanager
def broker(settings: Settings, with_gateway: bool) -> Iterator[None]:
    """Yield with a ready broker: the running one, or one that is stopped at the end. Only the group needs the
    gateway.
    """
    supervised = FileLock(f"{settings.pipes}/supervisor.owner")
    held = supervised.is_held()
    if held and not supervised.holder().endswith(f"data={os.path.abspath(settings.data)}"):
        raise BusyError(
            f"KMQ_PIPES={settings.pipes} serves another broker ({supervised.holder()}); use another directory"
        )
    # Stages may run without a supervisor. Their locks tell; the stats page still says ready just after a SIGKILL.
    if held or FileLock(f"{settings.pipes}/ingress.owner").is_held():
        wait_ready(settings)
        out.print("broker     was up; it is used and left up")
        yield
        return
    kmq("up", *([] if with_gateway else ["--no-gateway"]))
    try:
        yield
    finally:
        kmq("down")


def kmq(*command: str) -> None:
    """Run `kmq <command>`, which reports its own errors."""
    done = subprocess.run([sys.executable, "-m", "kmq", *command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    out.print("broker     " + done.stdout.strip().removeprefix("kmq: "))


def wait_ready(settings: Settings) -> None:
    deadline = time.monotonic() + READY_S
    while not (now := status.collect(settings)).ready:
        if time.monotonic() > deadline:
            states = ", ".join(f"{stage.name} {stage.state}" for stage in now.stages) or "no stage has started"
            raise RetryError(f"the broker is up but not ready ({states}); see: kmq status, {settings.pipes}/kmq.log")
        time.sleep(POLL_S)


# --- shipping ----------------------------------------------------------------------------------------------------


class Meter:
    """Shows progress: bars on a terminal, elsewhere a line every SAY_S."""

    def __init__(self, total: int) -> None:
        self.total, self._said = total, time.monotonic()
        columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
        self._tasks = {what: self._bars.add_task(what, total=total) for what in ("sent", "routed")}

    def show(self, what: str, count: int) -> None:
        self._bars.update(self._tasks[what], completed=count)
        if not out.is_terminal and time.monotonic() - self._said > SAY_S:
            out.print(f"{what:10} {count:,} of {self.total:,}")
            self._said = time.monotonic()

    def __enter__(self) -> "Meter":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()


class Run:
    """One shipment: its sender, and its progress."""

    def __init__(self, settings: Settings, sources: list[Source]) -> None:
        self.settings, self.sources = settings, sources
        self.began = time.time()
        self.id = f"{time.time_ns() // 1000:x}".encode()  # message ids begin with it, because others may produce too
        self.starts = queue_sizes(settings.data)  # before first_seq is known: a queue is never ahead of the WAL
        self.first_seq = wal.last_stored(settings.data)[0] + 1
        self.last_seq = self.first_seq - 1  # the last record of this run in the WAL, as far as it has been read
        self.stored = 0  # records of this run in the WAL
        self.cut: list[bytes] = []  # the part of each line that is too long which must be kept
        self.seconds = 0.0

    def ship(self) -> None:
        """Send everything and wait until it is routed."""
        settings = self.settings
        port = read_port(settings, "ingress", fixed=0)  # of the running broker, whatever KMQ_PORT is now
        total = sum(source.count for source in self.sources)
        out.print(f"shipping   {total:,} messages through {settings.host}:{port}")
        with Meter(total) as meter:
            begin = time.monotonic()
            with LineSender(settings.host, port) as sender:
                for source in self.sources:
                    for line in self._messages(source):
                        sender.send(line)
                        if sender.sent % 4096 == 0:
                            meter.show("sent", sender.sent)
                meter.show("sent", sender.sent)
            self._wait_routed(sender.sent, meter)
            self.seconds = time.monotonic() - begin

    def _messages(self, source: Source) -> Iterator[bytes]:
        for number, payload in enumerate(source.lines(), 1):
            line = format_message(source.routing_key(payload), payload, b"%b-%d" % (self.id, number))
            if len(line) > self.settings.max_line + 1:
                source.too_long += 1
                self.cut.append(sha256(line[: self.settings.max_line]).digest())
            else:
                source.sent += 1
                source.digest.update(payload + b"\n")
            yield line

    def _wait_routed(self, count: int, meter: Meter) -> None:
        moved, before = time.monotonic(), (0, 0)
        while True:
            now = {stage.name: stage for stage in status.collect(self.settings).stages}
            durable, routed = now["durability"].seq, now["router"].seq
            self._follow(durable)
            meter.show("routed", self.stored)
            if self.stored == count and routed >= self.last_seq:
                return
            if (durable, routed) != before:
                moved, before = time.monotonic(), (durable, routed)
            elif time.monotonic() - moved > STALLED_S:
                states = ", ".join(f"{stage.name} {stage.state} at seq {stage.seq}" for stage in now.values())
                out.print(f"stalled    nothing has moved for {STALLED_S:.0f} s ({states}); see: kmq status")
                return
            time.sleep(POLL_S)

    def _follow(self, durable_seq: int) -> None:
        """Count the records of this run that the WAL got since the last look."""
        mark = b"|%b-" % self.id
        seen = max(self.last_seq, self.first_seq - 1)
        if durable_seq > seen:
            self.stored += sum(block.count(mark) for block in wal.read(self.settings.data, seen + 1, durable_seq))
            self.last_seq = durable_seq


# --- the check ---------------------------------------------------------------------------------------------------


class Queue:
    """What a topic received from this run."""

    def __init__(self) -> None:
        self.messages = self.bytes = self.first_seq = self.last_seq = 0
        self.digest = sha256()

    def add(self, seq: int, line: bytes, payload: bytes) -> None:
        self.messages += 1
        self.bytes += len(line)
        self.first_seq, self.last_seq = self.first_seq or seq, seq
        self.digest.update(payload + b"\n")


class Findings:
    """The comparison of WAL and queues, and the queues of this run."""

    def __init__(self) -> None:
        self.records = self.gaps = self.duplicates = self.dropped = 0
        self.cut: list[bytes] = []  # what is kept of each line of ours that was too long
        self.queues: dict[str, Queue] = {}


def queue_sizes(data: str) -> dict[str, int]:
    """Return the size in bytes of every partition log."""
    return {str(path): path.stat().st_size for path in Path(data, "topics").glob("*/*/*.log")}


def queued_lines(path: str, start: int) -> Iterator[bytes]:
    """Yield the whole lines of a partition log from byte `start` on."""
    with open(path, "rb") as file:
        file.seek(start)
        yield from (line for line in file if line.endswith(b"\n") and line != b"\n")


def stored_lines(data: str, low: int, high: int) -> Iterator[bytes]:
    """Yield the records low…high of the WAL, each with its newline."""
    for block in wal.read(data, low, high):
        yield from (line + b"\n" for line in block.split(b"\n")[:-1])


def check(run: Run) -> Findings:
    """Compare the WAL with all queues, in order of seq, from where they ended before the run."""
    data, found = run.settings.data, Findings()
    grown = [
        (path, run.starts.get(path, 0)) for path, size in queue_sizes(data).items() if size > run.starts.get(path, 0)
    ]
    queued = heapq.merge(*(queued_lines(path, start) for path, start in grown), key=record.seq_of)
    in_queues = next(queued, b"")
    expected = run.first_seq
    not_stored, not_routed = dropped.read(data, "framed"), dropped.read(data, "durable")
    for line in stored_lines(data, run.first_seq, run.last_seq):
        seq = record.seq_of(line)
        found.records += 1
        missing = sum(high - low + 1 for low, high in dropped.without(expected, seq - 1, not_stored))
        found.gaps += missing
        found.dropped += seq - expected - missing
        expected = seq + 1
        while in_queues and record.seq_of(in_queues) < seq:  # of an earlier run, or a duplicate
            found.duplicates += record.seq_of(in_queues) >= run.first_seq
            in_queues = next(queued, b"")
        if in_queues == line:
            note(found, run, line)
            in_queues = next(queued, b"")
        elif any(span.first <= seq <= span.last for span in not_routed):
            found.dropped += 1
        else:
            found.gaps += 1
    while in_queues and record.seq_of(in_queues) <= run.last_seq:
        found.duplicates += 1
        in_queues = next(queued, b"")
    return found


def note(found: Findings, run: Run, line: bytes) -> None:
    """Count a record that is in the right queue, if it belongs to this run."""
    seq, _, routing_key, _, id, payload = record.fields(line[:-1])
    if routing_key == record.MALFORMED and b"|%b-" % run.id in payload[:1024]:
        found.cut.append(sha256(payload).digest())
    elif not id.startswith(run.id + b"-"):
        return
    topic = routing_key.partition(b".")[0].decode()
    found.queues.setdefault(topic, Queue()).add(
        int(seq), line, b64decode(payload) if id.endswith(b";enc=b64") else payload
    )


def is_intact(source: Source, queue: Queue) -> bool:
    """Return True if the lines that were sent whole are stored unchanged: all, each once, in order, byte for byte."""
    return queue.messages == source.sent and queue.digest.digest() == source.digest.digest()


# --- what a person sees ------------------------------------------------------------------------------------------


def size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


def limit(nbytes: int) -> str:
    """Return a setting in bytes as a person writes it."""
    return next((f"{nbytes // unit} {name}" for name, unit in UNITS if nbytes % unit == 0), f"{nbytes} B")


def say_input(sources: list[Source], skipped: Mapping[Path, str]) -> None:
    lines, total = sum(source.count for source in sources), sum(source.bytes for source in sources)
    reasons = Counter(reason.partition(",")[0] for reason in skipped.values())
    left_out = f"; skipped {', '.join(f'{n} {why}' for why, n in reasons.items())}" if skipped else ""
    out.print(f"input      {lines:,} lines, {size(total)} of files, {len(sources)} source(s){left_out}", markup=False)
    for source in sources:
        marks = [f"{source.count:,}"]
        if source.packing:
            marks.append(f"unpacked from {source.packing}")
        if source.nuls:
            marks.append(f"binary: {source.nuls:,} with a NUL, stored as base64")
        out.print(f"           {source.topic} <- {source.name} ({', '.join(marks)})", markup=False)
    for path, reason in [*skipped.items()][:NAMED]:
        out.print(f"           skipped {path}: {reason}", markup=False)


def report(run: Run, found: Findings) -> bool:
    """Print the result. Return True if there is no error."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("queue", no_wrap=True)
    for title in ("messages", "bytes", "first seq", "last seq"):
        table.add_column(title, justify="right", no_wrap=True)
    for topic, queue in sorted(found.queues.items()):
        table.add_row(topic, *(f"{n:,}" for n in (queue.messages, queue.bytes, queue.first_seq, queue.last_seq)))
    out.print(table)
    damaged = [s.topic for s in run.sources if not is_intact(s, found.queues.get(s.topic, Queue()))]
    out.print(
        f"WAL        seq {run.first_seq:,} to {run.last_seq:,}, {found.records:,} records;"
        f" gaps {found.gaps}, duplicates {found.duplicates} (WAL against queues, byte for byte)"
    )
    if found.dropped:
        out.print(f"dropped    {found.dropped:,} records by drop_oldest, each named in dropped.log")
    say_cut(run, found)
    whole = [s for s in run.sources if s.topic not in damaged and not s.too_long]
    if damaged:
        out.print(f"payloads   NOT as sent: {', '.join(damaged)}")
    out.print(f"payloads   as sent, byte for byte: {len(whole)} of {len(run.sources)} source(s) by SHA-256")
    sent, nbytes = sum(q.messages for q in found.queues.values()), sum(q.bytes for q in found.queues.values())
    out.print(
        f"speed      {sent:,} messages in {run.seconds:.2f} s: {sent / run.seconds:,.0f} messages/s,"
        f" {size(nbytes / run.seconds)}/s (this sender included)"
    )
    return len(whole) == len(run.sources) and not (found.gaps or found.duplicates or found.cut)


def say_cut(run: Run, found: Findings) -> None:
    """Print the lines that could not be shipped whole, and errors in the parts that are kept of them."""
    for source in run.sources:
        if source.too_long:
            are = "is" if source.too_long == 1 else "are"
            out.print(
                f"cut        {source.topic}: {source.too_long:,} of {source.count:,} lines {are} longer than KMQ_MAX_LINE"
                f" ({limit(run.settings.max_line)}): kept in dead.log, cut",
                markup=False,
            )
    if run.cut:
        out.print("           to ship them whole: raise KMQ_MAX_LINE, and RB_BYTES to three times that")
    if found.cut != run.cut:
        out.print(f"           dead.log does NOT hold the beginning of each: {len(found.cut):,} of {len(run.cut):,}")


def look_further(data: str, found: Findings) -> None:
    """Print three commands for the largest queue."""
    topic = max(found.queues, key=lambda name: found.queues[name].messages)
    here = os.path.relpath(data) if Path(data).absolute().is_relative_to(Path.cwd()) else os.path.abspath(data)
    log = shlex.quote(next(f"{here}/{n}" for n in (f"{topic}.log", f"{topic}-0.log") if os.path.exists(f"{here}/{n}")))
    out.print("look further:")
    for command in (
        f"tail -n 3 {log}",
        f"awk -F'|' '{{n[$3]++}} END {{for (k in n) print n[k], k}}' {log} | sort -rn",
        f"cat {log} | cut -d'|' -f6- | head -n 5",
    ):
        out.print(f"  {command}", markup=False)


def shipped(run: Run, found: Findings) -> demo_group.Shipped:
    """Return what the group is to read: the topics with records of this run, including those declared below one of
    its own.
    """
    sizes = queue_sizes(run.settings.data)
    grown = {Path(path).parts[-3] for path, size in sizes.items() if size > run.starts.get(path, 0)}
    topics = sorted(topic for topic in grown if topic.partition(".")[0] in found.queues)
    return demo_group.Shipped(run.id.decode(), run.began, topics, sum(each.messages for each in found.queues.values()))


def demo(inputs: list[str], with_group: bool, with_spark: bool) -> int:
    settings = load()
    without_spark = demo_spark.missing() if with_spark else ""
    if without_spark:
        out.print(f"spark      skipped, the audit and the archive with it: {without_spark}", markup=False)
    os.makedirs(settings.pipes, exist_ok=True)
    lock = FileLock(f"{settings.pipes}/demo.owner")  # two at once would stop each other's broker
    lock.acquire("the demo on this broker", describe("demo", settings.data))
    if inputs:
        sources, skipped = named_files(inputs)
    else:
        sources, skipped = machine_logs()
        lines = sum(source.count for source in sources)
        if lines < ENOUGH:
            out.print(f"input      {lines:,} lines of logs, fewer than {ENOUGH:,}: collecting live process events")
            sources.append(process_events(ENOUGH - lines))
    name_topics(sources)
    say_input(sources, skipped)
    if not any(source.count for source in sources):
        raise ConfigError("INPUT holds no line: nothing to ship")
    with broker(settings, with_group):
        run = Run(settings, sources)
        run.ship()
        out.print("checking   the WAL against the queues, and the payloads against what was sent")
        found = check(run)
        good = report(run, found)
        if with_group and found.queues:
            good = demo_group.consume(settings, shipped(run, found), out) and good
    if found.queues:
        look_further(settings.data, found)
        if without_spark:
            out.print(f"\nspark      was skipped: {without_spark}", markup=False)
        elif with_spark:
            sent = {source.topic: source.sent for source in sources if source.sent}
            good = demo_spark.analyse(settings.data, run.id.decode(), run.began, sent, out) and good
    return EXIT_OK if good else EXIT_FAILED


def main() -> int:
    try:
        inputs = [each for each in sys.argv[1:] if each not in ("--no-group", "--no-spark")]
        return demo(inputs, with_group="--no-group" not in sys.argv, with_spark="--no-spark" not in sys.argv)
    except typer.Exit as ended:  # Spark was stopped by a signal
        return int(ended.exit_code)
    except KmqError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a log that was rotated away between two looks, for one
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_RETRY
    except KeyboardInterrupt:
        print("demo: interrupted; what was sent stays in the queues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
