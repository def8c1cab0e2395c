"""What has happened to the broker: the last events, in bounded memory.

Invariant   Strangers never push out what an operator must see: each class of kinds has a ring of its own, and what
            strangers cause is one event a minute for each name, with a count. The names stand in our source.
            Ids rise, over restarts of the gateway too, so a reader that knows the last id misses nothing that is kept.
Threads     The event loop and the console's thread both write and read, so each of them holds the lock.
Memory      At most _KEPT events, each of at most _LONGEST characters a field.
"""

import time
from collections import deque
from collections.abc import Callable
from heapq import merge
from itertools import islice
from threading import RLock
from typing import Any, NamedTuple

_LONGEST = 300
_COALESCED_S = 60.0
# Class → kinds, and how many events are kept.
_CLASSES = {
    "state": (("started", "stopped", "restarted", "not_ready", "ready", "warning", "cleared", "repaired"), 300),
    "changed": (("changed",), 200),
    "files": (("rolled",), 100),
    "refused": (("refused",), 100),
}
_CLASS_OF = {kind: name for name, (kinds, _) in _CLASSES.items() for kind in kinds}
KINDS = tuple(_CLASS_OF)


class Event(NamedTuple):
    """One event. `at`: unix seconds; `about`: a process, topic, group or code; `text`: one sentence."""

    id: int
    at: float
    kind: str
    about: str
    text: str

    def fields(self) -> dict[str, Any]:
        """Return what JSON shows."""
        return self._asdict()


class _Counted:
    """What strangers have caused under one name since it was last told."""

    def __init__(self, told_at: float) -> None:
        self.told_at, self.count, self.last = told_at, 0, ""


class Events:
    """The last events of one gateway."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._next = int(clock()) * 1000  # above any id of the gateway before, which had fewer than 1,000 a second
        self._rings = {name: deque[Event](maxlen=most) for name, (_, most) in _CLASSES.items()}
        self._refused: dict[str, _Counted] = {}
        self._lock = RLock()

    def add(self, kind: str, about: str, text: str) -> None:
        """Keep an event."""
        with self._lock:
            self._next += 1
            event = Event(self._next, round(self._clock(), 3), kind, about[:_LONGEST], text[:_LONGEST])
            self._rings[_CLASS_OF[kind]].append(event)

    def refused(self, name: str, count: int, peer: str, reason: str) -> None:
        """Count what strangers have caused: told at once the first time, then once a minute."""
        with self._lock:
            known = self._refused.get(name)
            if known is None:
                known = self._refused[name] = _Counted(self._clock() - _COALESCED_S)
            known.count += count
            known.last = f"last {peer}: {reason}" if peer else reason
            self.sweep()

    def sweep(self) -> None:
        """Tell what was counted for a minute. Call about once a second."""
        now = self._clock()
        with self._lock:
            for name, known in self._refused.items():
                if known.count and now - known.told_at >= _COALESCED_S:
                    self.add("refused", name, f"{known.count} times: {known.last}")
                    known.told_at, known.count = now, 0

    def after(self, id: int = 0) -> list[Event]:
        """Return the events with higher ids, in order."""
        with self._lock:
            return [event for event in merge(*self._rings.values()) if event.id > id]

    def newest(self, most: int) -> list[Event]:
        """Return the last events, oldest first."""
        with self._lock:
            last = islice(merge(*(reversed(ring) for ring in self._rings.values()), reverse=True), most)
            return [*last][::-1]
