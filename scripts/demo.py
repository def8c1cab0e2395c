"""The main job: ship real input through the broker, then check that what came out is what went in.

    scripts/demo [--no-spark] [file or directory …]      default: this machine's own logs under /var/log

Each source becomes a topic, each of its lines a message `<topic>.<class>|time|<run>-<line number>|<line>`. The check reads
files only: every record that the WAL got meanwhile must lie in the queues, byte for byte and once, and the payloads of
each source must hash to what was sent. A broker that is up is used and left up; else one is started and stopped again. Then
Spark audits the directory and archives what was shipped (demo_spark.py).
"""

import heapq
import os
import re
import shlex
import subprocess
import sys
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import demo_spark
import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kmq import record, status
from kmq.client.lines import LineSender, format_message, percent_encode, read_port
from kmq.errors import EXIT_FAILED, EXIT_OK, EXIT_RETRY, BusyError, ConfigError, KmqError, RetryError
from kmq.links.ownership import FileLock, describe
from kmq.log import dropped, wal
from kmq.settings import Settings, load

LOGS = Path("/var/log")
ENOUGH = 5000  # lines; with fewer, live process events are shipped as well
MOST_BYTES = 256 << 20  # of logs shipped without being asked: they take twice that on the disk
STALLED_S = 10.0  # nothing moves for this long: say so and stop waiting
READY_S = 60.0  # longest wait for a broker that is up but still recovering
POLL_S = 0.01
SAY_S = 2.0  # between two lines about the progress, where there is no terminal
_HEAD = 8192  # bytes that decide whether a file is text
_COMPRESSED = (b"\x1f\x8b", b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")

# The class of a line is its message key: what happened (dpkg), who spoke (syslog), or how bad it is.
_CLASSES = (
    re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*[\s\[-]+([A-Za-z][\w-]{0,31})"),
    re.compile(rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ ([A-Za-z][\w-]{0,31})"),
    re.compile(rb"\b(?i:(emerg|alert|crit|critical|fatal|error|warn|warning|notice|info|debug|trace))\b"),
)

out = Console(highlight=False, soft_wrap=True)


class Source:
    """One input: a file as long as it is now, or lines that are in memory."""

    def __init__(self, name: str, path: Path | None = None, collected: list[bytes] | None = None) -> None:
        self.name, self.path, self._collected = name, path, collected or []
        self.topic = ""
        self.bytes = path.stat().st_size if path else 0
        self.count = sum(1 for _ in self.lines())  # only the progress bar needs it
        self.sent = self.too_long = 0
        self.digest = sha256()  # of the payloads sent, each with a newline

    def lines(self) -> Iterator[bytes]:
        """Its lines without their newline; what is appended to the file meanwhile is left for the next run."""
        if self.path is None:
            yield from self._collected
            return
        left = self.bytes
        with self.path.open("rb") as file:
            for line in file:
                line, left = line[:left], left - len(line)
                if line:
                    yield line.removesuffix(b"\n")
                if left <= 0:
                    return

    def routing_key(self, line: bytes) -> bytes:
        if self.path is None:
            return b"%b.%b" % (self.topic.encode(), line.partition(b" ")[0].removeprefix(b"name="))
        return b"%b.%b" % (self.topic.encode(), line_class(line))


def line_class(line: bytes) -> bytes:
    """One word that says what kind of log line this is."""
    for pattern in _CLASSES[:2]:
        if match := pattern.match(line):
            return match[1].lower()
    match = _CLASSES[2].search(line, 0, 200)
    return match[1].lower() if match else b"line"


# --- input -------------------------------------------------------------------------------------------------------


def files_under(directory: Path) -> Iterator[Path]:
    """Regular files, not symlinks: those lead to logs found elsewhere, or to a terminal."""
    for parent, _, names in os.walk(directory):
        yield from (path for name in sorted(names) if (path := Path(parent, name)).is_file() and not path.is_symlink())


def why_not(path: Path) -> str:
    """Why a file is no readable text, as one word; "" when it is."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return "unreadable"
    if not head:
        return "empty"
    if head.startswith(_COMPRESSED):
        return "compressed"
    return "binary" if 0 in head else ""


def machine_logs() -> tuple[list[Source], Counter[str]]:
    """The text files under /var/log and, by reason, how many files were passed over."""
    chosen: list[Path] = []
    skipped: Counter[str] = Counter()
    room = MOST_BYTES
    for nbytes, path in sorted((path.stat().st_size, path) for path in files_under(LOGS)):
        reason = why_not(path) or ("too large" if nbytes > room else "")
        if reason:
            skipped[reason] += 1
        else:
            chosen.append(path)
            room -= nbytes
    return [Source(str(path), path) for path in sorted(chosen)], skipped


def named_files(names: list[str]) -> list[Source]:
    """What the user named, whatever is in it; of a directory all files."""
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            paths += files_under(path)
        elif path.is_file() and os.access(path, os.R_OK):
            paths.append(path)
        else:
            raise ConfigError(f"INPUT {name!r}: not a readable file or directory")
    return [Source(str(path), path) for path in paths]


def process_events(wanted: int) -> Source:
    """What the processes of this machine do, snapshot after snapshot, until there are `wanted` lines."""
    lines: list[bytes] = []
    fields = ("pid", "ppid", "name", "status", "cpu_times", "memory_info", "num_threads")
    while len(lines) < wanted:
        for process in psutil.process_iter(fields):
            info = process.info
            cpu, memory = info["cpu_times"], info["memory_info"]
            cpu_s, rss = (cpu.user + cpu.system if cpu else 0.0), (memory.rss if memory else 0)
            name = percent_encode(info["name"] or "unknown").replace(".", "-")
            lines.append(
                f"name={name} pid={info['pid']} ppid={info['ppid']} status={info['status']}"
                f" cpu_s={cpu_s:.2f} rss={rss} threads={info['num_threads']} at={time.time():.6f}".encode()
            )
    return Source("process events", collected=lines[:wanted])


def name_topics(sources: list[Source]) -> None:
    """Give each source a topic of its own: the file's base name, with its directories where two are alike."""
    taken = {"dead"}  # where the broker puts what is no message
    for source in sources:
        parts = source.path.absolute().parts if source.path else ("process",)
        spellings = (topic_name("-".join(parts[-depth:])) for depth in range(1, len(parts) + 1))
        numbered = (f"{topic_name(parts[-1])}-{n}" for n in range(2, len(sources) + 3))
        source.topic = next(name for name in (*spellings, *numbered) if name not in taken)
        taken.add(source.topic)


def topic_name(text: str) -> str:
    """`text` as a legal topic: one label, so that no longer topic can catch its messages."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", text.removesuffix(".log")).strip("-")[-150:]
    return name if record.is_topic(name) else f"log-{name.strip('-_')}".rstrip("-")


# --- the broker --------------------------------------------------------------------------------------------------


@contextmanager
def broker(settings: Settings) -> Iterator[None]:
    """A ready broker: the one that is up, or one of our own, stopped at the end."""
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
    kmq("up")
    try:
        yield
    finally:
        kmq("down")


def kmq(command: str) -> None:
    """Run `kmq <command>`; it says itself what is wrong."""
    done = subprocess.run([sys.executable, "-m", "kmq.cli", command], stdout=subprocess.PIPE, text=True)
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
    """How far it is: bars on a terminal, elsewhere a line every SAY_S."""

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
    """One shipment: who sent, and how far it has come."""

    def __init__(self, settings: Settings, sources: list[Source]) -> None:
        self.settings, self.sources = settings, sources
        self.began = time.time()
        self.id = f"{time.time_ns() // 1000:x}".encode()  # the message ids begin with it: others may be producing too
        self.starts = queue_sizes(settings.data)  # before first_seq is known: a queue is never ahead of the WAL
        self.first_seq = wal.last_stored(settings.data)[0] + 1
        self.last_seq = self.first_seq - 1  # of ours in the WAL, as far as it has been read
        self.stored = 0  # of ours in the WAL
        self.seconds = 0.0

    def ship(self) -> None:
        """Send everything and wait until it is routed."""
        settings = self.settings
        port = read_port(settings, "ingress", fixed=0)  # of the broker that is up, whatever KMQ_PORT says now
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
        """Count ours in what the WAL has got since the last look."""
        mark = b"|%b-" % self.id
        seen = max(self.last_seq, self.first_seq - 1)
        if durable_seq > seen:
            self.stored += sum(block.count(mark) for block in wal.read(self.settings.data, seen + 1, durable_seq))
            self.last_seq = durable_seq


# --- the check ---------------------------------------------------------------------------------------------------


class Queue:
    """What a topic got from this run."""

    def __init__(self) -> None:
        self.messages = self.bytes = self.first_seq = self.last_seq = 0
        self.digest = sha256()

    def add(self, seq: int, line: bytes, payload: bytes) -> None:
        self.messages += 1
        self.bytes += len(line)
        self.first_seq, self.last_seq = self.first_seq or seq, seq
        self.digest.update(payload + b"\n")


class Findings:
    """WAL against queues, and the queues of this run."""

    def __init__(self) -> None:
        self.records = self.gaps = self.duplicates = self.dropped = self.refused = 0
        self.queues: dict[str, Queue] = {}


def queue_sizes(data: str) -> dict[str, int]:
    """Size in bytes of every partition log."""
    return {str(path): path.stat().st_size for path in Path(data, "topics").glob("*/*/*.log")}


def queued_lines(path: str, start: int) -> Iterator[bytes]:
    """The whole lines of a partition log from byte `start` on."""
    with open(path, "rb") as file:
        file.seek(start)
        yield from (line for line in file if line.endswith(b"\n") and line != b"\n")


def stored_lines(data: str, low: int, high: int) -> Iterator[bytes]:
    """The records low…high of the WAL, each with its newline."""
    for block in wal.read(data, low, high):
        yield from (line + b"\n" for line in block.split(b"\n")[:-1])


def check(run: Run) -> Findings:
    """Walk the WAL and all queues side by side, in order of seq, from where they stood before the run."""
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
        while in_queues and record.seq_of(in_queues) < seq:  # before this run's, or once more
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
    """Take a record that is where it belongs into the figures, if it is of this run."""
    seq, _, routing_key, _, id, payload = line[:-1].split(b"|", 5)
    if routing_key == record.MALFORMED and b"|%b-" % run.id in payload[:1024]:
        found.refused += 1
    elif not id.startswith(run.id + b"-"):
        return
    topic = routing_key.partition(b".")[0].decode()
    found.queues.setdefault(topic, Queue()).add(
        int(seq), line, b64decode(payload) if id.endswith(b";enc=b64") else payload
    )


def is_intact(source: Source, queue: Queue) -> bool:
    """Whether the payloads of a source came out as they went in: all, each once, in order, byte for byte."""
    return queue.messages == source.sent and queue.digest.digest() == source.digest.digest()


# --- what a person sees ------------------------------------------------------------------------------------------


def size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


def say_input(sources: list[Source], skipped: Counter[str]) -> None:
    lines, total = sum(source.count for source in sources), sum(source.bytes for source in sources)
    left_out = f"; skipped {', '.join(f'{n} {why}' for why, n in skipped.items())}" if skipped else ""
    out.print(f"input      {lines:,} lines, {size(total)} of files, {len(sources)} source(s){left_out}")
    for source in sources:
        out.print(f"           {source.topic} <- {source.name} ({source.count:,})", markup=False)


def report(run: Run, found: Findings) -> bool:
    """Print the result; whether all of it is as it should be."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("queue", no_wrap=True)
    for title in ("messages", "bytes", "first seq", "last seq"):
        table.add_column(title, justify="right", no_wrap=True)
    for topic, queue in sorted(found.queues.items()):
        table.add_row(topic, *(f"{n:,}" for n in (queue.messages, queue.bytes, queue.first_seq, queue.last_seq)))
    out.print(table)
    too_long = sum(source.too_long for source in run.sources)
    damaged = [s.topic for s in run.sources if not is_intact(s, found.queues.get(s.topic, Queue()))]
    out.print(
        f"WAL        seq {run.first_seq:,} to {run.last_seq:,}, {found.records:,} records;"
        f" gaps {found.gaps}, duplicates {found.duplicates} (WAL against queues, byte for byte)"
    )
    if found.dropped:
        out.print(f"dropped    {found.dropped:,} records by drop_oldest, each named in dropped.log")
    if too_long:
        out.print(
            f"refused    {too_long:,} line(s) over KMQ_MAX_LINE, kept as dead.malformed ({found.refused:,} found)"
        )
    if damaged:
        out.print(f"payloads   NOT as sent: {', '.join(damaged)}")
    else:
        out.print(f"payloads   as sent, byte for byte: {len(run.sources)} of {len(run.sources)} source(s) by SHA-256")
    sent, nbytes = sum(q.messages for q in found.queues.values()), sum(q.bytes for q in found.queues.values())
    out.print(
        f"speed      {sent:,} messages in {run.seconds:.2f} s: {sent / run.seconds:,.0f} messages/s,"
        f" {size(nbytes / run.seconds)}/s (this sender included)"
    )
    return not (damaged or found.gaps or found.duplicates or found.refused != too_long)


def look_further(data: str, found: Findings) -> None:
    """Three commands, for the largest queue."""
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


def demo(inputs: list[str], with_spark: bool) -> int:
    settings = load()
    if with_spark:
        demo_spark.check_installed()
    os.makedirs(settings.pipes, exist_ok=True)
    lock = FileLock(f"{settings.pipes}/demo.owner")  # two at once would stop each other's broker
    lock.acquire("the demo on this broker", describe("demo", settings.data))
    skipped: Counter[str] = Counter()
    if inputs:
        sources = named_files(inputs)
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
    with broker(settings):
        run = Run(settings, sources)
        run.ship()
        out.print("checking   the WAL against the queues, and the payloads against what was sent")
        found = check(run)
    good = report(run, found)
    if found.queues:
        look_further(settings.data, found)
        if with_spark:
            sent = {source.topic: source.sent for source in sources if source.sent}
            good = demo_spark.analyse(settings.data, run.id.decode(), run.began, sent, out) and good
    return EXIT_OK if good else EXIT_FAILED


def main() -> int:
    try:
        inputs = [each for each in sys.argv[1:] if each != "--no-spark"]
        return demo(inputs, with_spark="--no-spark" not in sys.argv)
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
