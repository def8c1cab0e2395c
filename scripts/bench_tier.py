#!/usr/bin/env python3
"""The benchmark of the tier: what the copy off the machine and topics in it cost, beside the bars of their design.

    python scripts/bench_tier.py [PART …] [--only PART] [--quick] [--json FILE] [--dir DIR]

upload     CPU for a GB of lines: read and checked, compressed, written, read back, committed; of the WAL and of a topic
restore    CPU for a GB of the WAL: read, unpacked, indexed, and every queue rebuilt by the router
fetch      CPU to fetch an object of 64 MiB into the cache
cold       a consumer of old records at the lines door: its first bytes, its rate; and what the processes take
hot        rate and latency of producers while kmq.tier works at what is due, beside the same while it is stopped
rows       CPU of a fetch at the end of a partition with 10,000 rows, beside one without
idle       1,000 idle partitions: what kmq.tier writes, and its CPU
many       a restore of 1,000 partitions that have 10,000 objects

Lines are JSON of about 100 bytes. The store is a directory. Ratios of one run count, in turns; seconds depend on the machine.
"""

import argparse
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent)

from bench.gauges import cpu_exact, cpu_seconds, pss  # noqa: E402
from bench.pod import Pod, wait_until  # noqa: E402
from bench.report import Figure, Measure, run, say  # noqa: E402
from bench.throughput import run_plain  # noqa: E402
from kmq.client.lines import read_port  # noqa: E402
from kmq.client.producer import Producer  # noqa: E402
from kmq.config.settings import load  # noqa: E402
from kmq.config.values import MIB  # noqa: E402
from kmq.files import give_up  # noqa: E402
from kmq.gateway.core.partitions import Partitions  # noqa: E402
from kmq.links.layout import Block  # noqa: E402
from kmq.log import checkpoint, identity, reader, rows, segment, topics, wal  # noqa: E402
from kmq.log.segment import Limits  # noqa: E402
from kmq.log.wal import Wal  # noqa: E402
from kmq.logfmt import Logger  # noqa: E402
from kmq.message import record  # noqa: E402
from kmq.router.queues import Queues  # noqa: E402
from kmq.tier.cache import TierCache  # noqa: E402
from kmq.tier.restore import Restore, find_source  # noqa: E402
from kmq.tier.store import DirectoryStore  # noqa: E402
from kmq.tier.turn import Copier, TurnOptions  # noqa: E402

_GROUP = 2000  # lines of a block
_FIRST_US = 1_700_000_000_000_000
_OBJECT = 64 * MIB
_IDLE = 1000  # partitions


class Quiet(Logger):
    """Writes nothing."""

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        pass


def payload(n: int) -> bytes:
    """Return a JSON object that packs about as well as those of users: 4 or 5 : 1 with its line."""
    noise = n * 0x9E3779B97F4A7C15 % (1 << 64)
    return b'{"user": "u%d", "id": "%016x", "amount": %d, "at": "2026-11-30T06:%02d:%02dZ"}' % (
        noise >> 50,
        noise,
        noise % 10_000,
        n // 60 % 60,
        n % 60,
    )


class MadeDirectory:
    """A data directory that is made without a broker, and its copy. The topic `orders` has all records.

    made = MadeDirectory(home, Limits(tier="on"))
    made.write(64 * MIB)
    made.copier().turn()
    """

    def __init__(self, home: str, limits: Limits, partitions: int = 1, store: str = "") -> None:
        self.data, self.limits = f"{home}/data", limits
        self.store = DirectoryStore(store or f"{home}/store")
        identity.open_data(self.data)
        topics.declare(self.data, "orders", partitions, partitioner="crc32")  # takes turns by single seqs
        self._wal = Wal(self.data, give_up, 1 << 20, limits)
        self._queues = Queues(self.data, give_up, Quiet("bench"), limits)
        self._queues.recover(0)
        self._seq = 1

    def write(self, nbytes: int) -> int:
        """Write about so many bytes of lines; return how many there are."""
        before, head = nbytes, b"orders|%d|%d|"
        while nbytes > 0:
            seq = self._seq
            lines = [head % (n, n) + payload(n) for n in range(seq, seq + _GROUP)]
            text = b"".join(
                record.number([line], seq + at, record.format_ts(_FIRST_US + seq + at))[0]
                for at, line in enumerate(lines)
            )
            self._wal.append([(text, seq, _GROUP, _FIRST_US + seq + _GROUP - 1)])
            key = len(record.common_key(lines))
            self._queues.route([Block(text, 0, [len(text), seq, _GROUP, key, _FIRST_US, 0, 0])])
            self._queues.make_topics()
            self._seq, nbytes = seq + _GROUP, nbytes - len(text)
        self._wal.sync()
        self.tick()
        return before - nbytes

    def tick(self) -> None:
        """Let the router write a checkpoint, install rows, and delete what its limits say."""
        for _ in range(4):
            self._queues.checkpoints.start()
            self._queues.settle()
            self._queues.retention.roll_over_soon()
            self._queues.tick()
            self._queues.settle()

    def close(self) -> None:
        self._queues.close()
        self._wal.close()

    def copier(self, object_bytes: int = _OBJECT, limits: Limits | None = None) -> Copier:
        durable = lambda: wal.last_stored(self.data)[0]  # noqa: E731
        options = TurnOptions(object_bytes, 0, durable, limits=lambda: limits or self.limits)
        return Copier(self.data, self.store, Quiet("bench"), options)

    @property
    def directory(self) -> str:
        return f"{self.data}/topics/orders/0"


class Bench:
    def __init__(self, directory: Path, quick: bool) -> None:
        self.directory, self.quick = directory, quick
        self.mb = 140 if quick else 420
        self.rounds = 2 if quick else 4

    @contextmanager
    def home(self, directory: Path | None = None) -> Iterator[str]:
        path = tempfile.mkdtemp(prefix="tier-", dir=directory or self.directory)
        try:
            yield path
        finally:
            shutil.rmtree(path)

    @contextmanager
    def pod(self, gateway: bool = False, **settings: object) -> Iterator[Pod]:
        """A broker whose store is in memory: as with a bucket, its disk does not have the store, too."""
        with self.home() as home, self.home(Path("/dev/shm")) as store:
            running = Pod(Path(home), gateway)
            more = {"KMQ_TIER": f"file://{store}/store", "KMQ_TIER_EVERY": "1s", **settings}
            running.environment |= {name: str(value) for name, value in more.items()}
            running.settings = load(running.environment)
            try:
                running.up()
                yield running
            finally:
                running.down()
                for left in Path("/dev/shm").glob(f"*{running.settings.instance}.*"):
                    left.unlink()


# --- what a copy costs -----------------------------------------------------------------------------------------------


def _cpu_of(do: Callable[[], object]) -> float:
    before = time.process_time()
    do()
    return time.process_time() - before


def upload(bench: Bench) -> Iterator[Figure]:
    with bench.home() as home:
        made = MadeDirectory(home, Limits(tier="off"))
        gb = made.write(bench.mb * 1_000_000) / 1e9
        cpu = _cpu_of(made.copier().turn)
        copier = made.copier(limits=Limits(tier="on"))
        copier.claim()
        topic = _cpu_of(copier.turn)
        found = next(iter(copier.commits.state.logs.values())).rows
        stored = sum(row.nbytes for row in found)
        yield Figure("upload", "the WAL", cpu / gb, "CPU s/GB", "≤ 8", f"{gb:.2f} GB")
        note = f"{len(found)} objects, {stored / sum(row.size for row in found):.1f} : 1"
        yield Figure("upload", "a topic", topic / (stored / 1e9), "CPU s/GB", "≤ 8", note)
        made.close()


def restore(bench: Bench) -> Iterator[Figure]:
    with bench.home() as home:
        made = MadeDirectory(home, Limits(tier="off"))
        gb = made.write(bench.mb * 1_000_000) / 1e9
        made.copier().turn()
        made.close()
        cpu = _cpu_of(partial(_restore, made.store, f"{home}/again"))
        yield Figure("restore", "the WAL, and the queues of it", cpu / gb, "CPU s/GB")


def _restore(store: DirectoryStore, data: str) -> None:
    source = find_source(store, "", "bench@here")
    assert source is not None
    settings = load({"KMQ_DATA": data}, "none.toml")
    Restore(store, source, settings, Quiet("bench"), lambda nbytes: None).run(is_drill=True)


def fetch(bench: Bench) -> Iterator[Figure]:
    with bench.home() as home:
        made = MadeDirectory(home, Limits(tier="on"))
        made.write(_OBJECT * bench.rounds + 2 * MIB)
        made.copier().turn()
        made.tick()
        found, cache = rows.of(made.directory), TierCache(made.data, made.store, 1 << 30)
        cpu = [_cpu_of(partial(cache.fetch, made.directory, found.life, row)) for row in found.rows]
        note = ", ".join(f"{each:.2f}" for each in cpu)
        yield Figure("fetch", "an object of 64 MiB", statistics.median(cpu), "CPU s", "≤ 0.7", note)
        made.close()


# --- a broker --------------------------------------------------------------------------------------------------------


def _produce(running: Pod, topic: str, nbytes: int) -> None:
    count = nbytes // 150  # a stored line
    with Producer(port=running.port) as producer:
        for begin in range(0, count, 5000):
            producer.send_many(topic, [payload(n) for n in range(begin, begin + 5000)])
    running.settle()


@contextmanager
def _peak(pid: int) -> Iterator[list[int]]:
    """Yield a list that has the highest PSS of a process, seen ten times a second, after the block."""
    over, found = threading.Event(), [0]

    def look() -> None:
        while not over.wait(0.1):
            found[0] = max(found[0], pss(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _read(running: Pod, topic: str, offset: int, nbytes: int) -> tuple[float, float]:
    """Read so many bytes at the lines door; return the seconds until the first one, and from then to the last one."""
    buffer = bytearray(MIB)
    with socket.create_connection(("127.0.0.1", read_port(running.settings, "egress", 0))) as sock:
        begin, left, first = time.monotonic(), nbytes, 0.0
        sock.sendall(f"CONSUME {topic}/0 from={offset} raw\n".encode())
        while left > 0:
            count = sock.recv_into(buffer)
            if not count:
                raise SystemExit("bench: the reader was sent away")
            first = first or time.monotonic() - begin
            left -= count
        return first, time.monotonic() - begin - first


def cold(bench: Bench) -> Iterator[Figure]:
    with bench.pod(gateway=True, KMQ_SEGMENT_BYTES="16MiB", KMQ_TIER_OBJECT=_OBJECT) as running:
        for topic, limits in (("hot", ()), ("cold", ("--set", "tier=on", "--set", "local_retention_bytes=32MiB"))):
            running._kmq("topics", "create", topic, *limits)
        page = running.page()
        gateway, copying = page.rows["gateway"].pid, page.rows["tier"].pid
        directory = f"{running.settings.data}/topics/cold/0"
        with _peak(copying) as most:
            say("storing old records")
            _produce(running, "hot", 2 * _OBJECT)
            _produce(running, "cold", bench.mb * 1_000_000)
            wait_until(lambda: bool(rows.of(directory).rows) and segment.listing(directory)[0][0] > 0, 0.2)
            wait_until(lambda: _is_quiet(directory), 2.0)
        found = rows.of(directory).cold(segment.listing(directory)[0][0])
        nbytes = sum(row.nbytes for row in found[:-1])
        _read(running, "hot", 0, _OBJECT)
        before, rates, firsts, used = pss(gateway), [], [], []
        for _ in range(bench.rounds):
            shutil.rmtree(f"{running.settings.data}/tier/cache", ignore_errors=True)
            cpu = cpu_seconds(gateway)
            first, seconds = _read(running, "cold", 0, nbytes)
            used.append((cpu_seconds(gateway) - cpu) / nbytes * 1e9)
            firsts.append(first)
            rates.append(nbytes / (first + seconds) / 1e6)
        _, again = _read(running, "cold", 0, nbytes)
        note = f"{nbytes / 1e6:.0f} MB in {len(found) - 1} objects; again, out of the cache: {nbytes / again / 1e6:.0f}"
        yield Figure("cold", "a consumer, with the wait for each object", max(rates), "MB/s", "≥ 60", note)
        yield Figure("cold", "until the first record is there", min(firsts), "s", "≤ 1")
        yield Figure("cold", "the gateway", statistics.median(used), "CPU s/GB")
        grown = (pss(gateway) - before) / 1e6
        yield Figure(
            "cold", "memory: the gateway, after cold reads", grown, "MB PSS", "≤ 10", f"{before / 1e6:.1f} before"
        )
        largest = max(row.size for row in found) / 1e6
        bar = f"≤ {45 + largest:.1f}"
        yield Figure("cold", "memory: kmq.tier, most", most[0] / 1e6, "MB PSS", bar, f"45 and an object: {largest:.1f}")


def _is_quiet(directory: str) -> bool:
    """Return True if all segments that may leave the disk have left it."""
    return sum(part.size for part in segment.survey(directory)) < 64 * MIB


def hot(bench: Bench) -> Iterator[Figure]:
    """The process is stopped by a signal, so that both turns have the same broker, and the same work is due."""
    seconds = 2.0 if bench.quick else 5.0
    with bench.pod(KMQ_TIER_TOPICS="on", KMQ_SEGMENT_BYTES="64MiB", KMQ_TIER_OBJECT=_OBJECT) as running:
        running._kmq("topics", "create", "test", "--set", "local_retention_bytes=64MiB")
        running.load("count", "test.probe", 10_000, 100)
        copying = running.page().rows["tier"]
        rates: dict[str, list[float]] = {"stopped": [], "at work": []}
        waits: dict[str, list[float]] = {"stopped": [], "at work": []}
        uploaded = 0
        for _ in range(bench.rounds):
            for name, number in (("stopped", signal.SIGSTOP), ("at work", signal.SIGCONT)):
                os.kill(copying.pid, number)
                before = copying.bytes
                count, taken, _ = run_plain(running, ["test.probe"], 1000, seconds)
                rates[name].append(count / taken)
                waits[name].append(running.produce("paced", 2000, seconds)["p99"] / 1000)
                uploaded += copying.bytes - before
        each = "; ".join(f"{name}: {', '.join(f'{rate:,.0f}' for rate in found)}" for name, found in rates.items())
        ratio = sum(rates["at work"]) / sum(rates["stopped"])
        yield Figure("hot", "1 KB, plain: at work / stopped", ratio, "x", "≥ 0.85", each)
        each = "; ".join(f"{name}: {', '.join(f'{p99:.1f}' for p99 in found)}" for name, found in waits.items())
        median = [statistics.median(waits[name]) for name in ("stopped", "at work")]
        yield Figure(
            "hot", "p99 of 2,000 msg/s: stopped / at work", median[0] / median[1], "x", "≥ 0.85", f"ms: {each}"
        )
        yield Figure("hot", "uploaded meanwhile", uploaded / 1e6, "MB stored")


def idle(bench: Bench) -> Iterator[Figure]:
    seconds = 10.0 if bench.quick else 40.0
    with bench.pod(KMQ_TIER_TOPICS="on", KMQ_TIER_EVERY="5s") as running:
        running._kmq("topics", "create", "orders", "--partitions", str(_IDLE))
        with Producer(port=running.port) as producer:
            producer.send_many("orders", [payload(n) for n in range(20 * _IDLE)])
        running.settle()
        copying, store = running.page().rows["tier"], running.settings.tier.removeprefix("file://")
        say("waiting until all is copied, and router.ckpt is written")
        wait_until(lambda: copying.seq >= running.last_seq(), 0.2)
        wait_until(lambda: checkpoint.routed_seq(running.settings.data) >= running.last_seq(), 0.5)
        time.sleep(6.0)  # a turn
        names, cpu = _names(store), cpu_exact(copying.pid)
        time.sleep(seconds)
        used = (cpu_exact(copying.pid) - cpu) / seconds * 100
        yield Figure("idle", f"{_IDLE:,} partitions: new keys", len(_names(store) - names), "keys", "≤ 0")
        yield Figure("idle", f"{_IDLE:,} partitions, a turn each 5 s: CPU", used, "%", "< 0.5")


def _names(store: str) -> set[str]:
    return {f"{directory}/{name}" for directory, _, names in os.walk(store) for name in names}


# --- many rows -------------------------------------------------------------------------------------------------------


@contextmanager
def _many(bench: Bench, partitions: int, objects: int) -> Iterator[MadeDirectory]:
    """A directory, in memory, with so many partitions, each of which has about so many small objects."""
    with bench.home(Path("/dev/shm")) as home:
        segment_bytes = MIB if partitions == 1 else 4096
        limits = Limits(segment_bytes=segment_bytes, tier="on", local_retention_bytes=segment_bytes)
        made = MadeDirectory(home, limits, partitions)
        made.write(partitions * (objects + 2) * 4096)
        for _ in range(3):
            made.copier(object_bytes=4096).turn()
            made.tick()
        made.close()
        yield made


def rows_at_the_end(bench: Bench) -> Iterator[Figure]:
    """The directory without rows is the same one, without its file `tier`."""
    with _many(bench, 1, 2000 if bench.quick else 10_000) as made:
        plain = f"{made.data}.plain"
        shutil.copytree(made.data, plain, symlinks=True)
        os.unlink(rows.path_of(f"{plain}/topics/orders/0"))
        found = len(rows.of(made.directory).rows)
        end = reader.partition(made.data, "orders", 0).end_offset()
        opened = [Partitions(data).open("orders", 0) for data in (plain, made.data)]
        used: list[float] = [0.0, 0.0]
        for _ in range(20):
            for at, log in enumerate(opened):
                used[at] += _cpu_of(partial(_fetch_at, log, end))
        note = f"{found:,} rows; {used[0] / 4000 * 1e6:.0f} and {used[1] / 4000 * 1e6:.0f} µs a fetch"
        yield Figure("rows", "a hot fetch beside rows / without", used[1] / used[0], "x", "≤ 1.05", note)


def _fetch_at(log: object, end: int) -> None:
    """Fetch 200 times near the end: the bounds, and a batch, as Kafka's door does."""
    for at in range(200):
        log.bounds()  # type: ignore[attr-defined]
        batch = log.batch(end - 1 - at % 10, 16_384)  # type: ignore[attr-defined]
        if batch.segment is not None:
            batch.segment.close()


def many(bench: Bench) -> Iterator[Figure]:
    partitions = 100 if bench.quick else 1000
    with _many(bench, partitions, 10) as made:
        objects = sum(len(log.rows) for log in made.copier().commits.read().logs.values())
        begin = time.monotonic()
        with bench.home() as target:
            cpu = _cpu_of(partial(_restore, made.store, f"{target}/data"))
            seconds = time.monotonic() - begin
        what = f"{partitions:,} partitions, {objects:,} objects"
        yield Figure("many", f"restore: {what}", seconds, "s", "≤ 30", f"CPU {cpu:.1f} s")


PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "upload": upload,
    "restore": restore,
    "fetch": fetch,
    "cold": cold,
    "hot": hot,
    "rows": rows_at_the_end,
    "idle": idle,
    "many": many,
}


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    bench = Bench(options.dir, options.quick)
    yield lambda part: PARTS[part](bench)


def main() -> int:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="make bench-tier",
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return run(parser, tuple(PARTS), "a third of the bytes, fewer turns", prepare)


if __name__ == "__main__":
    sys.exit(main())
