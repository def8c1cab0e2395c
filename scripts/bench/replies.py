"""How long a reply takes, and the rate of messages that this allows with few messages in flight."""

from collections.abc import Iterator
from pathlib import Path

from bench.gauges import rest_of_machine, stage_cpu
from bench.lines import KEY
from bench.pod import Pod, pod
from bench.report import Figure, say
from bench.requests import Requests
from bench.scale import Scale

CONNECTIONS = 1000


def acked_latency(directory: Path, scale: Scale) -> Iterator[Figure]:
    """Time from send() until the caller has the reply that the message is on disk: kmq.Producer, then raw lines."""
    runs = (
        ("one", (), "1 in flight", "≤ 280", ""),
        ("window", (), "64 in flight", "", ""),
        ("paced", (10_000.0,), "10,000 msg/s", "", "≤ 3000"),
    )
    with pod(directory) as running:
        running.load("count", KEY, 1000, 100)
        for kind, arguments, name, p50, p99 in runs:
            say(f"acked latency, {name}: {scale.latency_s:.0f} s")
            with rest_of_machine(running) as rest:
                found = running.produce(kind, *arguments, scale.latency_s)
            if "rate" in found:
                yield Figure("acked-latency", name, found["rate"], "msg/s", "≥ 130000")
            yield Figure("acked-latency", f"{name}, p50", found["p50"], "µs", p50)
            yield Figure("acked-latency", f"{name}, p99", found["p99"], "µs", p99, rest[0])
        say("acked latency, raw lines")
        found, note = requests(running, "one", scale.latency_s)
        yield Figure("acked-latency", "raw lines, 1 in flight, p50", found["p50"], "µs", "≤ 280")
        yield Figure("acked-latency", "raw lines, 1 in flight, p99", found["p99"], "µs", note=note)
        found, note = requests(running, "window", scale.latency_s)
        yield Figure("acked-latency", "raw lines, 64 in flight", found["rate"], "msg/s", "≥ 130000", note)


def connections(directory: Path, scale: Scale) -> Iterator[Figure]:
    """Many producers, each of which waits for its reply before it sends again."""
    with pod(directory) as running:
        running.load("count", KEY, 1000, 100)
        say(f"{CONNECTIONS:,} connections: {scale.latency_s:.0f} s")
        found, note = requests(running, "connections", CONNECTIONS, scale.latency_s)
        yield Figure("connections", f"{CONNECTIONS:,}, 1 in flight each", found["rate"], "msg/s", "≥ 60000", note)


def requests(running: Pod, kind: str, *arguments: float) -> tuple[dict[str, float], str]:
    """Return the generator's measurements, and a note of how many cores the generator and each stage took."""
    generator = Requests("kmq", kind, running.port, *arguments)
    with rest_of_machine(running) as rest, stage_cpu(running) as taken:
        found = generator.go().result()
    seconds = arguments[-1]
    each = ", ".join(f"{stage} {cpu / seconds:.2f}" for stage, cpu in taken.items())
    running.settle()
    return found, f"cores: generator {found['cores']:.2f}, {each}; {rest[0]}"
