"""The benchmark of a shard: three brokers and a Consul on this machine, beside one broker alone.

    python scripts/bench_shard [acked latency failover crowded away idle] [--only PART] [--quick] [--json FILE] [--dir DIR]

All four brokers share this machine's disk and cores. Rates and latencies of the shard stand beside those of the broker
alone in the same run. The CPU is that of all processes of a broker, for each message.
"""

import argparse
import contextlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that this folder is the package `bench_shard`

import psutil  # noqa: E402
from shard_demo import NAMES, ShardBroker, consul  # noqa: E402

import kmq  # noqa: E402
from bench.report import Figure, Measure, run, say  # noqa: E402
from bench.requests import Requests  # noqa: E402
from bench.sending import Sending  # noqa: E402
from kmq.broker.stats import PROCESSES, peek  # noqa: E402

SHARD = {"SHARD": "demo", "SESSION_TTL": "2s", "REPLICA_LAG": "5s"}
WAIT_S = 60.0


class Bench(NamedTuple):
    """The brokers to measure. `alone`: a broker without a shard."""

    shard: list[ShardBroker]
    alone: ShardBroker
    quick: bool

    @property
    def seconds(self) -> float:
        return 2.0 if self.quick else 8.0

    def leader(self) -> ShardBroker:
        """Return the leader once it accepts clients and all brokers are in the ISR."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for broker in self.shard:
                view = broker.view()
                if view.get("role") == "leader" and len(view.get("isr") or ()) == len(self.shard):
                    return broker
            time.sleep(0.1)
        raise SystemExit("bench: the shard has no leader with all replicas in its ISR")


def processes(broker: ShardBroker) -> dict[str, psutil.Process]:
    """Return the processes of a broker by name."""
    page = peek(broker.instance)
    rows = page.rows if page is not None else {}
    found = {}
    for name in PROCESSES:
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            if rows[name].pid and rows[name].state_name != "stopped":
                found[name] = psutil.Process(rows[name].pid)
    return found


def cpu(broker: ShardBroker) -> float:
    """Return the seconds of CPU that a broker has taken so far."""
    return sum(sum(each.cpu_times()[:2]) for each in processes(broker).values())


# --- parts -----------------------------------------------------------------------------------------------------------


def acked(bench: Bench) -> Iterator[Figure]:
    """Acked lines without ids, one key, at full speed: at one broker, at the leader, through a follower's port."""
    leader = bench.leader()
    others = [broker for broker in bench.shard if broker is not leader]
    for nbytes, at_least, follower_bar, leader_bar in ((100, 0.38, 0.65, 0.35), (1000, 0.33, 3.4, 1.3)):
        say(f"acked, {nbytes} B: {3 * bench.seconds:.0f} s")
        rates, costs = {}, {}
        for name, where, taking in (
            ("one broker", bench.alone, [bench.alone]),
            ("leader", leader, bench.shard),
            ("a follower's door", others[0], bench.shard),
        ):
            before = {each.name: cpu(each) for each in taking}
            found = Requests("kmq", "flood", where.ports["PORT"], nbytes, bench.seconds).go().result()
            rates[name] = found["rate"]
            costs[name] = {each.name: (cpu(each) - before[each.name]) / found["count"] * 1e6 for each in taking}
        base, mine = rates["one broker"], costs["leader"]
        size = f"{nbytes} B"
        yield Figure("acked", f"{size}, one broker", base, "msg/s")
        yield Figure("acked", f"{size}, shard", rates["leader"], "msg/s", "≥ 350000" if nbytes == 100 else "≥ 60000")
        yield Figure("acked", f"{size}, shard / one broker", rates["leader"] / base, "x", f"≥ {at_least}")
        yield Figure("acked", f"{size}, one broker: CPU", costs["one broker"][bench.alone.name], "s/M msg")
        more = mine[leader.name] - costs["one broker"][bench.alone.name]
        yield Figure("acked", f"{size}, leader: CPU above that", more, "s/M msg", f"≤ {leader_bar}")
        each = statistics.mean(mine[other.name] for other in others)
        yield Figure("acked", f"{size}, follower: CPU", each, "s/M msg", f"≤ {follower_bar}")
        through = rates["a follower's door"] / rates["leader"]
        yield Figure("acked", f"{size}, through a follower's door / direct", through, "x", "≥ 0.7")


def latency(bench: Bench) -> Iterator[Figure]:
    """One message in flight: from its send to its reply."""
    leader = bench.leader()
    say(f"latency: {2 * bench.seconds:.0f} s")
    base, found = (
        Requests("kmq", "one", broker.ports["PORT"], bench.seconds).go().result() for broker in (bench.alone, leader)
    )
    for at, bar in (("p50", 1100), ("p99", 5000)):
        yield Figure("latency", f"one broker, {at}", base[at], "µs")
        yield Figure("latency", f"shard, {at}", found[at], "µs")
        yield Figure("latency", f"shard - one broker, {at}", found[at] - base[at], "µs", f"≤ {bar}")


def _probe(bench: Bench) -> kmq.Producer:
    """Return a producer with an id that knows all brokers of the shard, once it has had a reply."""
    producer = kmq.Producer(",".join(f"127.0.0.1:{broker.ports['PORT']}" for broker in bench.shard))
    producer.send("test.probe", b"x").result(WAIT_S)
    return producer


def _kills(bench: Bench, rounds: int) -> list[float]:
    """Kill all processes of the leader, `rounds` times. Return the sorted times in which a producer had no reply."""
    times = []
    for _ in range(rounds):
        leader = bench.leader()
        with _probe(bench) as producer:
            leader.kill()
            began = time.monotonic()
            producer.send("test.probe", b"x").result(WAIT_S)
            times.append(time.monotonic() - began)
        leader.up()
    return sorted(times)


def _p95(times: list[float]) -> float:
    return times[int(0.95 * (len(times) - 1) + 0.5)]


def failover(bench: Bench) -> Iterator[Figure]:
    """The leader is killed, or resigns; time until a producer with an id gets its next ack from another broker."""
    rounds = 3 if bench.quick else 20
    say(f"failover: {rounds} kills of the leader, and as often it resigns")
    times = _kills(bench, rounds)
    yield Figure("failover", "kill -9 of the leader, median", statistics.median(times), "s")
    yield Figure("failover", "the same, p95", _p95(times), "s", "≤ 5")
    pauses = sorted(_resigned(bench) for _ in range(rounds))
    yield Figure("failover", "pause while the leader resigns, median", statistics.median(pauses), "s")
    yield Figure("failover", "the same, p95", _p95(pauses), "s", "≤ 2")


def _resigned(bench: Bench) -> float:
    """Let the leader resign; return the longest time in which a producer had no reply meanwhile."""
    leader, moments = bench.leader(), [time.monotonic()]
    with _probe(bench) as producer, ThreadPoolExecutor(1) as pool:
        done = pool.submit(leader.kmq, "cluster", "resign", "--wait")
        while not done.done():
            producer.send("test.probe", b"x").result(WAIT_S)
            moments.append(time.monotonic())
        if done.result().returncode:
            raise SystemExit(f"bench: {done.result().stderr.strip()}")
        producer.send("test.probe", b"x").result(WAIT_S)
    moments.append(time.monotonic())
    return max(after - before for before, after in pairwise(moments))


def crowded(bench: Bench) -> Iterator[Figure]:
    """The leader of many partitions and groups is killed."""
    partitions, groups, rounds = (100, 100, 2) if bench.quick else (1000, 1000, 5)
    leader = bench.leader()
    say(f"crowded: {partitions} partitions, {groups} groups, {rounds} kills of the leader")
    made = leader.kmq("topics", "create", "crowded", "--partitions", str(partitions))
    if made.returncode:
        raise SystemExit(f"bench: {made.stderr.strip()}")
    with contextlib.closing(HTTPConnection("127.0.0.1", leader.ports["HTTP_PORT"], timeout=WAIT_S)) as http:
        for number in range(groups):
            offsets = [{"partition": number % partitions, "offset": 0}]
            http.request(
                "POST", "/api/topics/crowded/commit", json.dumps({"group": f"group-{number}", "offsets": offsets})
            )
            reply = http.getresponse()
            if (text := reply.read()) and reply.status >= 300:
                raise SystemExit(f"bench: {text.decode()}")
    times = _kills(bench, rounds)
    what = f"{partitions} partitions, {groups} groups"
    yield Figure("crowded", f"kill -9, {what}, median", statistics.median(times), "s")
    yield Figure("crowded", "the longest", times[-1], "s", "≤ 10")


def away(bench: Bench) -> Iterator[Figure]:
    """A follower is killed and returns, while the leader takes messages of 100 B all the time."""
    seconds, rate = (15.0, 20_000) if bench.quick else (60.0, 50_000)
    leader = bench.leader()
    follower = next(broker for broker in bench.shard if broker is not leader)
    say(f"away: {seconds:.0f} s without a follower, at {rate} msg/s")
    load = Sending("paced", f"127.0.0.1:{leader.ports['PORT']}", rate, seconds + 40).go()
    follower.kill()
    time.sleep(seconds / 2)
    before = _committed(leader, seconds / 2)
    began, hw = time.monotonic(), leader.view()["hw"]
    follower.up()
    bench.leader()
    took = time.monotonic() - began
    during = (leader.view()["hw"] - hw) / took
    yield Figure("away", "committed while it is away", before, "msg/s")
    yield Figure("away", f"in the ISR after its return of {seconds:.0f} s", took, "s", "≤ 20")
    yield Figure("away", "committed until then / before", during / before, "x", "≥ 0.7")
    load.result()


def _committed(leader: ShardBroker, seconds: float) -> float:
    """Return the committed messages per second, measured for `seconds`."""
    began, hw = time.monotonic(), leader.view()["hw"]
    time.sleep(seconds)
    return float((leader.view()["hw"] - hw) / (time.monotonic() - began))


def idle(bench: Bench) -> Iterator[Figure]:
    """A shard to which nobody sends."""
    bench.leader()
    seconds = 5.0 if bench.quick else 30.0
    say(f"idle: {seconds:.0f} s")
    before = [cpu(broker) for broker in bench.shard]
    time.sleep(seconds)
    taken = [cpu(broker) - then for broker, then in zip(bench.shard, before, strict=True)]
    yield Figure("idle", "the dearest broker", max(taken) / seconds * 100, "% of a core", "≤ 2")
    memory = [processes(broker)["replica"].memory_full_info().pss / 1e6 for broker in bench.shard]
    yield Figure("idle", "the largest replica", max(memory), "MB PSS", "≤ 42")


PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "acked": acked,
    "latency": latency,
    "failover": failover,
    "crowded": crowded,
    "away": away,
    "idle": idle,
}


@contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Measure]:
    with tempfile.TemporaryDirectory(dir=options.dir) as home, consul(Path(home)) as address:
        root = Path(home)
        (root / "secret").write_text(secrets.token_hex(16))
        brokers = [ShardBroker(name, root, address, **SHARD) for name in NAMES]
        alone = ShardBroker("alone", root, "", SHARD="", CLUSTER="")
        try:
            for broker in (*brokers, alone):
                broker.up()
            while (done := brokers[0].kmq("cluster", "init", "--brokers", ",".join(NAMES))).returncode:
                if "not there" not in done.stderr:
                    raise SystemExit(f"bench: {done.stderr.strip()}")
                time.sleep(0.2)
            bench = Bench(brokers, alone, options.quick)
            yield lambda part: PARTS[part](bench)
        finally:
            for broker in (*brokers, alone):
                broker.end()


def main() -> int:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/bench_shard",
        description=summary,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return run(parser, tuple(PARTS), "a quarter of everything", prepare)


if __name__ == "__main__":
    sys.exit(main())
