"""The producer with acknowledgements: kmq.Producer in a process of its own; fsync is on."""

import json
import time
from collections.abc import Callable

from bench.lines import KEY, line
from kmq.client.producer import Producer

ONE_BATCH = 200_000  # bytes of a list of messages
BATCHES = 40  # lists that may be without a reply at the same time


def produce(kind: str, port: int, arguments: list[str]) -> None:
    """Print what one kind of use gives, as JSON."""
    measured: dict[str, Callable[..., dict[str, float]]] = {
        "many": _produce_many,
        "one": _produce_one,
        "window": _produce_window,
        "paced": _produce_paced,
    }
    print(json.dumps(measured[kind](port, *map(float, arguments))))


def _payload(nbytes: float) -> bytes:
    """Of a message whose line has so many bytes, with an id of seven digits."""
    return b"x" * (int(nbytes) - len(line(KEY + "|1700000000.000000", 1_000_000, 0)))


def _produce_many(port: int, nbytes: float, seconds: float) -> dict[str, float]:
    """Lists of messages, a bounded number of them without reply; until the last reply."""
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
    """One message without reply at a time."""
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
    """Message after message, 64 without reply."""
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
    """One message after the other at an even pace, whose replies nobody waits for."""
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
