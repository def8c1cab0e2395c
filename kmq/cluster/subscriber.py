"""Receiving: every message at least once, in order; a message is marked only after it was processed.

A subscriber keeps the last message that it has processed (`done`) in Consul, under `bq-delivered/<broker>`. It reads
all messages, drops those up to `done`, and hands out the others. If messages are missing it hands out a Snapshot:
a message names a state to reach, so skipping to that state is the same as processing the messages one by one.
Example: with `done` 40 and the messages 39…42 in Consul, `fetch` returns the messages 41 and 42.

Invariant   At most one subscriber of a broker marks: the mark is written in a Txn that checks its lock.
            A mark never names a message unless it was processed or skipped by a snapshot.
Crash       Killed between processing and marking: the message is handed out again.
            Consul restored from an older backup: the epoch is lower, or a known epoch has another id. A snapshot
            follows.
            A subscriber returns after another process was subscriber: a snapshot follows, because it has missed
            messages that the other one processed.
Not covered A subscriber is killed, and Consul is restored to a time before its last messages. No key shows that to the
            next process, so it continues from the restored mark without a snapshot.
            A subscriber is delayed after `fetch` for longer than its session lasts. It processes its messages while the
            next subscriber is already further. Both may change a state, and the older value may win until a newer
            message changes it.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from kmq.cluster import consul
from kmq.cluster.consul import (
    LOCK_DELAY_S,
    Conflict,
    ConsulError,
    KvEntry,
    KvOperation,
    Pause,
    Steps,
    cas,
    check_session,
)
from kmq.cluster.presence import STATES, Keys, Presence, decode_fields, encode_fields, holder_of
from kmq.cluster.publisher import Mark, Message
from kmq.errors import BusyError

_POLL_S = 0.1  # between two attempts to become the subscriber
_ERROR_CHARS = 300  # of a processing error, as others see it
_REFRESH_S = 3600.0  # an idle subscriber writes its mark again, so that it does not look absent (publisher.py)


class Displaced(ConsulError):
    """Another process is the subscriber of this broker now. It gets the items processed since the last mark again."""


class Snapshot(NamedTuple):
    """All states at one epoch, the result of all messages up to it. `states`: by key, without `kmq/<cluster>/`."""

    epoch: int
    states: dict[str, bytes]
    id: str = ""  # of the message of that epoch; "": there is none


Item = Message | Snapshot


class Subscriber:
    """The subscriber of one broker."""

    def __init__(
        self, keys: Keys, broker: str, presence: Presence, who: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys, self._broker, self._presence, self._who, self._clock = keys, broker, presence, who, clock
        self._key = keys.subscriber(broker)
        self.done: Mark | None = None  # the last item processed; None: nothing yet, so a snapshot comes first
        self._marked: Mark | None = None  # the mark in Consul
        self._version = 0  # of the mark's key, so that a mark that arrives late does not undo a newer one
        self.newest = 0  # the last message that we have seen
        self._position = 0  # of the last watch
        self._handed_out: int | None = None  # the last epoch that `fetch` has returned
        self._since, self._error = "", ""

    def open(self, start: int | None = None, mark: Mark | None = None) -> Steps[None]:
        """Become the subscriber, and read the mark of this broker. `start`: continue with this message instead.

        `mark`: `done` of an earlier Subscriber of this process. It is used if Consul's mark is older: either `mark`
        was not marked in time, or Consul was restored, and then a snapshot has to follow. If the mark differs from
        `mark` otherwise, another process has continued meanwhile, and a snapshot follows too.
        A subscriber that died holds its place for some seconds. Raises BusyError that names the holder after that.
        """
        self._since = f"{time.time():.6f}"
        until = self._clock() + 2 * self._presence.ttl_s + LOCK_DELAY_S + 1
        while (holder := (yield from self._presence.lock(self._key, self._value()))) is not None:
            if self._clock() > until:
                raise BusyError(f"broker {self._broker} has a subscriber already: {holder_of(holder)}")
            yield Pause(_POLL_S)
        found = yield from consul.read(self._keys.delivered_to(self._broker))
        self.done = self._marked = Mark.decode(found.value) if found is not None else None
        self._version = found.version if found is not None else 0
        if mark is not None and self.done is not None and mark.epoch <= self.done.epoch:
            self.done = self.done if mark[:2] == self.done[:2] else None
        elif mark is not None:
            self.done = mark
        if start is not None:
            self.done = Mark(start - 1, "", time.time())

    @property
    def session(self) -> str:
        """Return the session in Consul that holds our place."""
        return self._presence.session

    def _value(self) -> bytes:
        return encode_fields(holder=self._who, since=self._since, error=quote(self._error[:_ERROR_CHARS], safe=""))

    def report(self, error: str) -> Steps[None]:
        """Show others the error of the message that cannot be processed; "": it was processed.

        Raises Displaced. This is the only check meanwhile: while no item can be processed, no mark is written.
        """
        self._error = error
        if (yield from self._presence.lock(self._key, self._value())) is not None:
            raise Displaced(f"broker {self._broker} has another subscriber now")

    # --- messages ----------------------------------------------------------------------------------------------------

    def fetch(self, wait_s: float) -> Steps[list[Item]]:
        """Return the items to be processed now, in order; [] if no message has come within `wait_s`.

        Items that were returned before and are not processed are returned again, at once. Raises ValueError if the
        first entry is not a message. If a later one is not, return the messages before it.
        """
        if self.done is None:
            return (yield from self.choose([]))
        has_more = self._handed_out not in (None, self.done.epoch)
        watched = yield from consul.watch(self._keys.messages, 0 if has_more else self._position, wait_s)
        self._position = 0  # an error on the way must not make the next watch wait
        items = yield from self.choose(watched.entries)
        self._position = watched.position
        return items

    def again(self) -> None:
        """Make the next `fetch` return at once, even with no items."""
        self._position = 0

    def choose(self, entries: Sequence[KvEntry]) -> Steps[list[Item]]:
        """Return the items to be processed, given all entries under `bq/` as they were read just now.

        Raises ValueError as `fetch` does, and SessionLost if we were away so long that another may have our place.
        """
        items = yield from self._choose(entries)
        if items:
            yield from self._presence.check_if_late()
        return items

    def _choose(self, entries: Sequence[KvEntry]) -> Steps[list[Item]]:
        found = {epoch: entry for entry in entries if (epoch := self._keys.epoch_of(entry.key)) is not None}
        following = (yield from self._following(self.done, found)) if self.done is not None else None
        if following is None:
            snapshot = yield from self.snapshot()
            self.newest = self._handed_out = snapshot.epoch
            return [snapshot]
        items: list[Item] = []
        for epoch, entry in following:
            try:
                items.append(Message.decode(entry.value, epoch))
            except ValueError:
                if not items:
                    if (yield from self._read_epoch()) >= epoch:
                        raise
                    self._handed_out = None  # KMQ has not published this epoch yet: nothing is left to hand out
                break
        if items:
            self.newest = self._handed_out = following[-1][0]
        return items

    def _read_epoch(self) -> Steps[int]:
        found = yield from consul.read(self._keys.epoch)
        return self._keys.decode_epoch(found.value) if found is not None else 0

    def _following(self, done: Mark, found: dict[int, KvEntry]) -> Steps[list[tuple[int, KvEntry]] | None]:
        """Return the messages after the last one processed, in order; None if they do not continue it without a gap.

        The key `epoch` is read only if no message is new or some are missing, not for each message.
        """
        last, newest = done.epoch, max(found, default=0)
        if newest <= last or any(epoch not in found for epoch in range(last + 1, newest + 1)):
            end = yield from self._read_epoch()
            if end < last:
                return None  # Consul was restored
            found = {epoch: entry for epoch, entry in found.items() if epoch <= end}  # KMQ did not write later ones
            newest = max(found, default=0)
            missing = next((epoch for epoch in range(last + 1, end + 1) if epoch not in found), None)
            if missing is not None and (yield from self._is_gone(missing, newest)):
                return None
        is_there = last in found
        if done.id and newest >= last and not (is_there and Message.decode(found[last].value, last).id == done.id):
            return None
        return [(epoch, found[epoch]) for epoch in sorted(found) if epoch > last]

    def _is_gone(self, epoch: int, newest: int) -> Steps[bool]:
        """Return True if a message was trimmed, or deleted by hand. False: it is new, and the next watch brings it."""
        return epoch < newest or (yield from consul.read(self._keys.message(epoch))) is None

    def snapshot(self) -> Steps[Snapshot]:
        """Read the epoch, its message and all states in one Txn."""
        keys = self._keys
        trees = [keys.epoch, keys.messages, *(keys.root + prefix for prefix in STATES)]
        entries = yield from consul.txn([KvOperation("get-tree", tree) for tree in trees])
        values = {entry.key: entry.value for entry in entries}
        epoch = keys.decode_epoch(values.pop(keys.epoch, b"0"))
        newest = values.get(keys.message(epoch))
        states = {key.removeprefix(keys.root): values[key] for key in values if not key.startswith(keys.messages)}
        return Snapshot(epoch, states, Message.decode(newest, epoch).id if newest is not None else "")

    # --- marks -------------------------------------------------------------------------------------------------------

    def processed(self, item: Item) -> None:
        """Note that this item was processed. `mark` writes it to Consul."""
        self.done = Mark(item.epoch, item.id, time.time())

    @property
    def is_unmarked(self) -> bool:
        """Return True if the mark in Consul is not `done`, or is so old that it has to be refreshed."""
        if self.done is None:
            return False
        if self._marked is None or self.done[:2] != self._marked[:2]:
            return True
        return time.time() - self.done.ts > _REFRESH_S

    def mark(self) -> Steps[None]:
        """Write `done` to Consul as our mark. Raises Displaced if another subscriber has taken over."""
        if not self.is_unmarked:
            return
        assert self.done is not None
        mark = self.done = self.done._replace(ts=time.time())
        where = self._keys.delivered_to(self._broker)
        while True:
            ours = check_session(self._key, self._presence.session)
            try:
                written = yield from consul.txn([ours, cas(where, mark.encode(), self._version)])
                break
            except Conflict as conflict:
                if conflict.op_index == 0:
                    raise Displaced(f"broker {self._broker} has another subscriber now: {conflict}") from conflict
            found = yield from consul.read(where)  # an earlier mark of ours, whose answer was lost
            self._version = found.version if found is not None else 0
        self._version = written[-1].version
        self._marked = mark

    def close(self) -> Steps[None]:
        """Mark, and give the place to another process."""
        yield from self.mark()
        yield from self._presence.unlock(self._key)


# --- status ----------------------------------------------------------------------------------------------------------
# The progress of the queue and its subscribers, read from Consul.


class Node(NamedTuple):
    """One subscriber. `read`: the last epoch it has processed; `lag`: later messages; `holder`: "" if it is away."""

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


def _node(broker: str, mark: Mark | None, place: KvEntry | None, last: int) -> Node:
    read, seen = (mark.epoch, mark.ts) if mark is not None else (0, 0.0)
    error = unquote(decode_fields(place.value).get("error", "")) if place is not None else ""
    return Node(broker, read, max(0, last - read), seen, holder_of(place) if place is not None else "", error)
