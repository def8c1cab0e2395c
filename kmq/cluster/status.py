"""How far the queue is, as Consul has it."""

from typing import NamedTuple
from urllib.parse import unquote

from kmq.cluster import consul
from kmq.cluster.consul import Entry, Steps
from kmq.cluster.keys import Keys, decode_fields
from kmq.cluster.presence import holder_of
from kmq.cluster.trimming import Mark


class Node(NamedTuple):
    """One subscriber. `read`: the last epoch it has processed, of `lag` more it has not. `holder`: "": it is away."""

    broker: str
    read: int
    lag: int
    seen: float  # when it last marked, in seconds since the epoch of Unix; 0: never
    holder: str
    error: str  # of the message that it cannot process; "": none


class Status(NamedTuple):
    """The queue at one moment."""

    epoch: int
    publisher: str  # who holds the lock now; "": nobody
    nodes: list[Node]


def read_status(keys: Keys) -> Steps[Status]:
    """Read the epoch, the lock, and all nodes."""
    epoch = yield from consul.read(keys.epoch)
    lock = yield from consul.read(keys.coordinator)
    marks = yield from consul.watch(keys.delivered, 0, 0)
    present = yield from consul.watch(keys.subscribers, 0, 0)
    last = keys.decode_epoch(epoch.value) if epoch is not None else 0
    delivered = {entry.key.removeprefix(keys.delivered): Mark.decode(entry.value) for entry in marks.entries}
    here = {entry.key.removeprefix(keys.subscribers): entry for entry in present.entries if entry.session}
    nodes = [_node(broker, delivered.get(broker), here.get(broker), last) for broker in sorted({*delivered, *here})]
    return Status(last, holder_of(lock) if lock is not None and lock.session else "", nodes)


def _node(broker: str, mark: Mark | None, place: Entry | None, last: int) -> Node:
    read, seen = (mark.epoch, mark.ts) if mark is not None else (0, 0.0)
    error = unquote(decode_fields(place.value).get("error", "")) if place is not None else ""
    return Node(broker, read, max(0, last - read), seen, holder_of(place) if place is not None else "", error)
