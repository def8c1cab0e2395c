"""A broker at a glance, as one document: its status, its rates, its topics by rate, and its last events.

Task        `kmq top` and the gateway's console each look again and again, and show the document.
Invariant   `status` is the document of `kmq status --json`, made by the same code at the moment that `as_of` names.
            Events that clients cause never push out other events: each class of kinds has a ring of its own, and
            clients cause at most one event a minute for each name, with a count. Our source fixes the names. Ids of
            events rise, over restarts of the gateway too, so a reader that knows the last id misses no event that is
            kept.
Cost        A look at the page takes some 0.2 ms; topics have a budget of their own.
Memory      At most the events of _CLASSES, each of at most _LONGEST characters a field.
"""

import time
from collections import deque
from collections.abc import Callable
from heapq import merge
from itertools import islice
from threading import RLock
from typing import Any, NamedTuple

from kmq.broker import status
from kmq.broker.health import Verdict
from kmq.broker.stats import PROCESSES, StatsPage
from kmq.broker.status import BrokerStatus, StagePace
from kmq.broker.topic_rates import TopicRates
from kmq.config.settings import Settings
from kmq.log import reader
from kmq.logfmt import Logger

# --- events ----------------------------------------------------------------------------------------------------------

_LONGEST = 300
_COALESCED_S = 60.0
# Class → kinds, and how many events are kept.
_CLASSES = {
    "state": (("started", "stopped", "restarted", "not_ready", "ready", "warning", "cleared", "repaired"), 300),
    "changed": (("changed",), 200),
    "files": (("rolled",), 100),
    "refused": (("refused",), 100),
    "noted": (("noted",), 100),
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
    """Events that clients caused under one name since the last report."""

    def __init__(self, kind: str, reported_at: float) -> None:
        self.kind, self.reported_at, self.count, self.last = kind, reported_at, 0, ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


class Events:
    """The last events of one gateway."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._next = int(clock()) * 1000  # above any id of the gateway before, which had fewer than 1,000 a second
        self._rings = {name: deque[Event](maxlen=most) for name, (_, most) in _CLASSES.items()}
        self._counted: dict[str, _Counted] = {}
        self._lock = RLock()

    def add(self, kind: str, about: str, text: str) -> None:
        """Keep an event."""
        with self._lock:
            self._next += 1
            event = Event(self._next, round(self._clock(), 3), kind, about[:_LONGEST], text[:_LONGEST])
            self._rings[_CLASS_OF.get(kind, "state")].append(event)

    def count(self, kind: str, name: str, count: int, peer: str, reason: str) -> None:
        """Count events that clients caused. A name has one kind, and is reported at once first, then once a minute.

        Kind `refused`: the broker did not serve the client; `noted`: anything else.
        """
        with self._lock:
            event = self._counted.get(name)
            if event is None:
                event = self._counted[name] = _Counted(kind, self._clock() - _COALESCED_S)
            event.count += count
            event.last = f"last {peer}: {reason}" if peer else f"last: {reason}"
            self.sweep()

    def sweep(self) -> None:
        """Report the counts that are a minute old. Call about once a second."""
        now = self._clock()
        with self._lock:
            for name, event in self._counted.items():
                if event.count and now - event.reported_at >= _COALESCED_S:
                    self.add(event.kind, name, f"{_times(event.count)}: {event.last}")
                    event.reported_at, event.count = now, 0

    def after(self, id: int = 0) -> list[Event]:
        """Return the events with higher ids, in order."""
        with self._lock:
            return [event for event in merge(*self._rings.values()) if event.id > id]

    def newest(self, most: int) -> list[Event]:
        """Return the last events, oldest first."""
        with self._lock:
            last = islice(merge(*(reversed(ring) for ring in self._rings.values()), reverse=True), most)
            return [*last][::-1]


# --- transitions -----------------------------------------------------------------------------------------------------
# Of readiness and warnings, which the gateway logs, too. `Overview` notes what changes on the page and in the files.

SETTLED_S = 1.0  # how long a state must last to be logged, so that flapping is not


class VerdictChanges:
    """Reports changes of the verdict: of readiness as a log line and an event of the console, of warnings as an event.

    When a ready broker becomes unready, `not_ready` is logged at once. Every other change must last SETTLED_S first.
    `ready_again` follows only a logged `not_ready`, so the first readiness after a start has no line.
    """

    def __init__(self, log: Logger | None, report: Callable[[str, str, str], None] = lambda *event: None) -> None:
        """`log`: None to write no lines. `report` takes each change as an event: kind, about, text."""
        self.log, self._report = log, report
        self._said: str | None = None  # code of the reason last logged, "" for ready; None: nothing logged yet
        self._seen, self._since = "", 0.0
        self._warnings: dict[tuple[str, str], str] = {}

    def begin(self, verdict: Verdict) -> None:
        """Take this verdict as known: only later changes are reported."""
        self._said = self._seen = verdict.first.code if verdict.first else ""
        self._warnings = _warnings(verdict)

    def follow(self, verdict: Verdict, now: float) -> None:
        """Report what has changed. Call at each check."""
        self._follow_readiness(verdict, now)
        warnings = _warnings(verdict)
        for key in warnings.keys() - self._warnings.keys():
            self._report("warning", key[1], warnings[key])
        for key in self._warnings.keys() - warnings.keys():
            self._report("cleared", key[1], f"{key[0]}: is over")
        self._warnings = warnings

    def _follow_readiness(self, verdict: Verdict, now: float) -> None:
        reason = verdict.first
        code = reason.code if reason else ""
        if code != self._seen:
            self._seen, self._since = code, now
        is_settled = now - self._since >= SETTLED_S or self._said == ""
        if code == self._said or not is_settled:
            return
        before, self._said = self._said, code
        if reason:
            effect = "/readyz and gRPC health say no: a Service sends nothing here"
            self._report("not_ready", reason.about, str(reason))
            if self.log is not None:
                self.log.warn("not_ready", reason=code, why=reason.why, effect=effect, advice=reason.advice)
        elif before:
            self._report("ready", "broker", "messages are accepted and become durable again")
            if self.log is not None:
                self.log.info("ready_again")


def _warnings(verdict: Verdict) -> dict[tuple[str, str], str]:
    return {(warning.code, warning.about): str(warning) for warning in verdict.warnings}


# --- overview --------------------------------------------------------------------------------------------------------

_RATES_S = 2.0  # what a rate is measured over: long enough to be readable, short enough to see a stop at once
_EVENTS = 50


class Overview:
    """The overview of one broker. Call `look` and `document` in one thread; `events` in any."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.events, self.pace, self.topics = Events(), StagePace(), TopicRates(settings.data)
        self._starts: dict[str, int] = {}
        self._states: dict[str, str] = {}
        self._segment: int | None = None

    def look(self, budget_s: float) -> None:
        """Look at the page, and for `budget_s` at topics. Call at least about once a second."""
        page = status.page_of(self._settings)
        self.pace.add(page, self._settings.intakes)
        if page is not None:
            self._follow(page)
        self.events.sweep()
        self.topics.look(budget_s)

    def _follow(self, page: StatsPage) -> None:
        """Note processes that were started, stopped or restarted since the last look. The first look notes no event."""
        for name in PROCESSES:
            row = page.rows[name]
            starts, state = row.starts, row.state_name
            former = self._starts.get(name)
            before = self._states.get(name, state)
            if former is not None and starts > former and starts > 1:
                self.events.add("restarted", name, f"{name} was started again; {_times(starts - 1)} since kmq up")
            elif former is not None and starts != former and starts:
                self.events.add("started", name, f"{name} was started, pid {row.pid}")
            if state == "stopped" != before:
                self.events.add("stopped", name, f"{name} has ended in order")
            self._starts[name], self._states[name] = starts, state

    def follow_files(self) -> None:
        """Note that the WAL has begun a new segment. Call every few seconds."""
        segments = reader.wal(self._settings.data).segments()
        newest = segments[-1][0] if segments else None
        if self._segment is not None and newest is not None and newest != self._segment:
            self.events.add("rolled", "append.log", f"the WAL has begun a new segment at seq {newest}")
        self._segment = newest

    def document(self, found: BrokerStatus, topics: int) -> dict[str, Any]:
        """Return the document, ready for JSON, with the `topics` topics that have the highest rates."""
        shown = status.as_json(found)
        return {
            "as_of": shown["as_of"],
            "status": shown,
            "rates": self.pace.rates(_RATES_S),
            "latency": self.pace.latency(),
            "intakes": self.pace.intakes(_RATES_S),
            "topics": self.topics.rows(topics),
            "topics_total": self.topics.total,
            "events": [event.fields() for event in self.events.newest(_EVENTS)],
        }
