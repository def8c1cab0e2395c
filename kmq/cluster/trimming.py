"""Which messages are deleted: those that every subscriber has read, except the last few.

Every watch brings all messages, so what all have read is kept to KEPT messages and KEPT_BYTES: for people to look at,
and for subscribers that read again.

Invariant   A message that a registered broker has not processed is never deleted, unless that broker has been away for
            ABSENT_S, or has marked a message that Consul has lost by being restored: it sees that, and a snapshot
            follows. The last message that all have processed is never deleted, because by its id a broker sees
            whether the messages are still those that it knows (a restored Consul may have others).
            The mark of a broker that has been away for GONE_S is deleted, unless it marks meanwhile. If it comes back,
            it is new: a snapshot comes first.
"""

import math
import time
from typing import NamedTuple

from kmq.cluster import consul
from kmq.cluster.consul import MAX_OPERATIONS, Entry, Operation, Steps
from kmq.cluster.keys import Keys, decode_fields, encode_fields
from kmq.cluster.lock import GUARDS, Lock
from kmq.config.values import KIB

KEPT = 100
KEPT_BYTES = 256 * KIB
ABSENT_S = 86_400.0
GONE_S = 30 * 86_400.0


class Mark(NamedTuple):
    """How far a broker is: the last message it has processed, its id, and when it said so (seconds)."""

    epoch: int
    id: str
    ts: float

    def encode(self) -> bytes:
        return encode_fields(epoch=self.epoch, id=self.id, ts=f"{self.ts:.6f}")

    @classmethod
    def decode(cls, value: bytes) -> "Mark":
        """Return the mark; that of nothing if the text is none."""
        fields = decode_fields(value)
        try:
            epoch, ts = int(fields["epoch"]), float(fields["ts"])
        except (KeyError, ValueError):
            return NO_MARK
        return cls(epoch, fields.get("id", ""), ts) if 0 <= epoch < 10**18 and math.isfinite(ts) else NO_MARK


NO_MARK = Mark(0, "", 0.0)


def slowest(keys: Keys, now: float) -> Steps[tuple[int | None, list[Entry]]]:
    """Return the last message that all registered brokers have processed, and the marks of those that are gone.

    None if there are no brokers. A clock that was ahead when it marked makes a broker absent as well, in time.
    """
    marks = yield from consul.watch(keys.delivered, 0, 0)
    present = yield from consul.watch(keys.subscribers, 0, 0)
    here = {entry.key.removeprefix(keys.subscribers) for entry in present.entries if entry.session}
    epochs, gone = [], []
    for entry in marks.entries:
        mark = Mark.decode(entry.value)
        if entry.key.removeprefix(keys.delivered) in here or abs(now - mark.ts) < ABSENT_S:
            epochs.append(mark.epoch)
        elif abs(now - mark.ts) > GONE_S:
            gone.append(entry)
    return min(epochs, default=None), gone


def superfluous(sizes: dict[int, int], read_by_all: int) -> list[int]:
    """Return which of these messages may go, given their sizes in bytes; the oldest first."""
    read = sorted(epoch for epoch in sizes if epoch <= read_by_all)
    kept_bytes = 0
    for kept, epoch in enumerate(reversed(read)):
        kept_bytes += sizes[epoch]
        if kept and (kept == KEPT or kept_bytes > KEPT_BYTES):
            return read[: len(read) - kept]
    return []


def trim(keys: Keys, lock: Lock) -> Steps[None]:
    """Delete what is not needed any more. `lock`: the publisher's.

    Raises Conflict, and deletes nothing more, once the epoch has been written again: what was read may be from before
    Consul was restored. Whoever publishes next trims.
    """
    last = yield from consul.read(keys.epoch)
    if last is None:
        return
    newest = keys.decode_epoch(last.value)  # a key above it is no message of KMQ's
    guard = Operation("check-index", keys.epoch, version=last.version)
    read_by_all, left = yield from slowest(keys, time.time())
    there = (yield from consul.watch(keys.messages, 0, 0)).entries
    epochs = {entry.key: keys.epoch_of(entry.key) for entry in there}
    sizes = {epoch: len(entry.value) for entry in there if (epoch := epochs[entry.key]) is not None and epoch <= newest}
    if not sizes:
        return
    gone = superfluous(sizes, max(sizes) if read_by_all is None else read_by_all)
    deletions = [Operation("delete", keys.message(epoch)) for epoch in gone]
    deletions += [Operation("delete-cas", entry.key, version=entry.version) for entry in left]
    room = MAX_OPERATIONS - GUARDS - 1
    for at in range(0, len(deletions), room):
        yield from consul.txn(lock.around([guard, *deletions[at : at + room]]))
