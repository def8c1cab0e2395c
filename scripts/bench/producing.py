"""The producer with acknowledgements: kmq.Producer in a process of its own; fsync is on."""

import json
import time
from collections.abc import Callable

from bench.lines import KEY, line
from kmq.client.producer import Producer

ONE_BATCH = 200_000  # bytes of a list of messages
BATCHES = 40  # lists that may be without a reply at the same time


def produce(kind: str, port: int, arguments: list[str]) -> None:
    """Print the measurements of one kind of use as JSON."""
    measured: dict[str, Callable[..., dict[str, float]]] = {
        "many": _produce_many,
        "one": _produce_one,
        "window": _produce_window,
        "paced": _produce_paced,
    }
    print(json.dumps(measured[kind](port, *map(float, arguments))))


def _payload(nbytes: float) -> bytes:
    """Return the payload of a message whose line has `nbytes` bytes, with an id of seven digits."""
    return b"x" * (int(nbytes) - len(line(KEY + "|1700000000.000000", 1_000_000, 0)))


def _produce_many(port: int, nbytes: float, seconds: float) -> dict[str, float]:
    """Send lists of messages, with a limited number of lists in flight, until the last reply."""
    payloads = [_payload(nbytes)] * int(ONE_BATCH / nbytes)
    with Producer(port=port, max_in_flight=BATCHES * len(payloads)) as producer:
        producer.send_many(KEY, payloads).result()
        begin, count, cpu = time.monotonic(), 0, time.process_time()
        while time.monotonic() < begin + seconds:
            producer.send_many(KEY, payloads)
            count += len(payloads)
        producer.flush()
        return {
            "count": count,
            "rate": count / (time.monotonic() - begin),
            "cpu": (time.process_time() - cpu) / count * 1e6,
        }


def _produce_one(port: int, seconds: float) -> dict[str, float]:
    """Send one message at a time, and wait for its reply."""
    taken: list[float] = []
    payload = _payload(100)
    with Producer(port=port) as producer:
        producer.send(KEY, payload).result()
        until = time.monotonic() + seconds
        while (begin := time.monotonic()) < until:
            producer.send(KEY, payload).result()
            taken.append(time.monotonic() - begin)
    return _shares(taken)


def _produce_window(port: int, seconds: float) -> dict[str, float]:
    """Send single messages, with 64 in flight."""
    taken: list[float] = []
    payload = _payload(100)
    with Producer(port=port, max_in_flight=64) as producer:
        producer.send(KEY, payload).result()
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            for _ in range(1000):
                producer.send(KEY, payload, callback=lambda d: taken.append(time.monotonic() - d.since))
        producer.flush()
        return {"rate": len(taken) / (time.monotonic() - begin)} | _shares(taken)


def _produce_paced(port: int, rate: float, seconds: float) -> dict[str, float]:
    """Send single messages at an even pace, without waiting for their replies."""
    taken: list[float] = []
    payload = _payload(100)
    with Producer(port=port) as producer:
        producer.send(KEY, payload).result()
        begin = time.monotonic()
        for n in range(int(rate * seconds)):
            wait = begin + n / rate - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            producer.send(KEY, payload, callback=lambda d: taken.append(time.monotonic() - d.since))
    return _shares(taken)


def _shares(seconds: list[float]) -> dict[str, float]:
    taken = sorted(seconds)
    return {name: taken[int(share * len(taken))] * 1e6 for name, share in (("p50", 0.5), ("p99", 0.99))}
