"""Trends: rises, slopes and shares over minutes, which one look at the stats page cannot show.

    Trends(page, settings, log).run()     in the gateway, which runs all the time: it looks every 5 s

Owner       the gateway. It publishes each trend in force on the stats page, and judge_concerns (kmq/broker/concerns.py)
            makes a finding of it. So `kmq status`, another process, has the same list as /readyz, metrics and console.
Invariant   A published trend was true within the last HOLD_S. So a trend that swings about its threshold does not
            appear and disappear with each look.
Crash       A new gateway begins without history, and removes the trends that the former one published.
Memory      180 samples of some 60 numbers, and 361 of two.
Not covered Without a gateway no trend is judged. `lag_grows` is judged where the lags are
            (kmq/gateway/groups/admin.py). How fast the disk fills is known after ROOM_LEAST_S; after a start the past
            is unknown.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kmq.broker.health import judge, state_of
from kmq.broker.histogram import BOUNDS_S, HistogramSnapshot, difference
from kmq.broker.stats import AGENT, TRENDS, StatsPage
from kmq.config.settings import Settings
from kmq.config.values import GIB
from kmq.log import compaction, passes
from kmq.log.passes import CompactedTopic, CompactedTopics

LOOK_S, MINUTE_S, HOLD_S = 5.0, 60.0, 60.0
RATE, PERCENT = 6, 1  # above so many in a minute, and this share of all messages, it is no accident
DROPPED_S, FLAP_S, FLAPS = 300.0, 900.0, 6
SLOW_LOOKS = 4  # of the 12 of a minute: a restart of a stage, or one slow sync, affects two at most
_SLOW_ACK, _SLOW_SYNC = (next(at for at, bound in enumerate(BOUNDS_S) if bound >= least) + 1 for least in (1.0, 0.5))
_FILES_EACH = 12  # looks
ROOM_NEAR_S, ROOM_FAR_S, ROOM_LEAST_S = 900.0, 6 * 3600.0, 300.0
DAY_S = 86_400.0
_AHEAD = 24  # a slope predicts this multiple of its observed time, at most a day
# Trend → the counters (process, word) that it sums. `sent` is the total for shares.
_COUNTERS = {
    "sent": (("framer", "messages"),),
    "dropped": (("durability", "dropped"), ("router", "dropped")),
    "refused": (("ingress", "refused"), ("framer", "refused")),
    "errors": (("ingress", "errs_format"), ("ingress", "errs_limit"), ("ingress", "errs_order")),
    "unauthorized": (("ingress", "unauthorized"), ("gateway", "unauthorized")),
    "turned_away": (("ingress", "turned_away"), ("gateway", "turned_away")),
}

Figures = tuple[int, int] | None  # the numbers of a finding; None: the trend is not true now


class _TrendSample(NamedTuple):
    at: float  # CLOCK_MONOTONIC
    is_ready: bool
    counts: dict[str, int]  # by name of _COUNTERS: since the first look
    acks: HistogramSnapshot
    syncs: HistogramSnapshot


class _Room(NamedTuple):
    at: float
    bytes: int  # that are left


class Trends:
    """The trends of one broker, as one gateway has seen them."""

    def __init__(self, page: StatsPage, settings: Settings) -> None:
        self._page, self._settings = page, settings
        self._samples: deque[_TrendSample] = deque(maxlen=int(FLAP_S / LOOK_S))
        self._words: dict[tuple[str, str], int] = {}  # each counter at the last look
        self._true: dict[str, tuple[float, tuple[int, int]]] = {}  # trend → when it was last true, and its figures
        self._lasts: dict[str, float] = {}  # trend of the agent → since when
        most = int(ROOM_FAR_S / (LOOK_S * _FILES_EACH)) + 1
        self._disk, self._quota = deque[_Room](maxlen=most), deque[_Room](maxlen=most)
        self._compacted, self._looks = CompactedTopics(settings.data), 0
        for code in TRENDS:
            page.publish_trend(code)

    async def run(self) -> None:
        """Look until cancelled. An error of one look is logged, and the next one is tried."""
        while True:
            try:
                await asyncio.to_thread(self.look, time.monotonic())
            except Exception:
                logging.getLogger(__name__).exception("a look at the trends failed")
            await asyncio.sleep(LOOK_S)

    def look(self, now: float) -> None:
        """Take a sample, and publish true trends. `now`: CLOCK_MONOTONIC."""
        page = self._page.copy()
        self._sample(page, now)
        self._judge_rates(now)
        self._judge_agent(page, now)
        self._looks += 1
        if self._looks % _FILES_EACH == 0:  # not at a start: this reads every declaration of a topic
            self._judge_room(page, now)
            self._publish("compactor_behind", self._uncompacted(), now)

    def _publish(self, code: str, figures: Figures, now: float, hold_s: float = HOLD_S) -> None:
        if figures is not None:
            self._true[code] = now, figures
        at, held = self._true.get(code, (float("-inf"), (0, 0)))
        self._page.publish_trend(code, *(held if now - at <= hold_s else ()))

    # --- counters ----------------------------------------------------------------------------------------------------

    def _sample(self, page: StatsPage, now: float) -> None:
        is_ready = judge(page, self._settings).ready
        last = self._samples[-1] if self._samples else None
        # Errors of a broker that accepts nothing are explained already.
        accepts = is_ready and last is not None and last.is_ready and not page.rows["ingress"].admission
        counts = dict(last.counts) if last is not None else dict.fromkeys(_COUNTERS, 0)
        for name, words in _COUNTERS.items():
            for process, field in words:
                count = getattr(page.rows[process], field)
                before = self._words.get((process, field), count)
                self._words[process, field] = count
                if name != "errors" or accepts:
                    counts[name] += count - before if count >= before else count  # a new process counts from 0
        times = page.histogram("ack").snapshot(), page.histogram("sync").snapshot()
        self._samples.append(_TrendSample(now, is_ready, counts, *times))

    def _span(self, seconds: float) -> list[_TrendSample]:
        """Return the samples of the last `seconds`, with the one before them."""
        now = self._samples[-1].at
        return [each for each in self._samples if now - each.at < seconds + LOOK_S]

    def _judge_rates(self, now: float) -> None:
        minute, long = self._span(MINUTE_S), self._span(DROPPED_S)
        rises = {name: minute[-1].counts[name] - minute[0].counts[name] for name in _COUNTERS}
        for code in ("refused", "errors", "unauthorized", "turned_away"):
            share = PERCENT * rises["sent"] if code in ("refused", "errors") else 0
            is_true = rises[code] > RATE and rises[code] * 100 > share
            self._publish(code, (rises[code], rises["sent"]) if is_true else None, now)
        dropped = long[-1].counts["dropped"] - long[0].counts["dropped"]
        self._publish("dropped", (dropped, 0) if dropped else None, now)
        flaps = sum(before.is_ready != after.is_ready for before, after in pairwise(self._samples))
        self._publish("flapping", (flaps, 0) if flaps > FLAPS else None, now)
        self._publish("slow_acks", _slow([each.acks for each in minute], _SLOW_ACK), now)
        self._publish("slow_sync", _slow([each.syncs for each in minute], _SLOW_SYNC), now)

    def _judge_agent(self, page: StatsPage, now: float) -> None:
        """Publish for how many seconds the agent is behind or away, once that is a minute."""
        row = page.rows[AGENT]
        seen = {
            "agent_behind": row.pid and not row.failing and row.newest > row.epoch,
            "agent_disconnected": row.pid and state_of(AGENT, row) != "ready",
        }
        for code, is_true in seen.items():
            since = self._lasts.setdefault(code, now) if is_true else self._lasts.pop(code, now)
            lasts_s = now - since
            self._publish(code, (int(lasts_s), 0) if is_true and lasts_s >= MINUTE_S else None, now, hold_s=0)

    # --- files -------------------------------------------------------------------------------------------------------

    def _judge_room(self, page: StatsPage, now: float) -> None:
        disk, row = os.statvfs(self._settings.data), page.rows["ingress"]
        for code, rooms, left, size in (
            ("disk_fills", self._disk, disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize),
            ("quota_fills", self._quota, row.quota_limit - row.quota_used, row.quota_limit),
        ):
            rooms.append(_Room(now, left))
            filled_s = _filled_in(rooms) if left * 2 < size else None
            self._publish(code, None if filled_s is None else (filled_s, 0), now)
        soon = [left_s for rooms in (self._disk, self._quota) if (left_s := _left_in(rooms, ROOM_NEAR_S)) is not None]
        self._page.rows["gateway"].full_in = max(1, int(min(soon))) if soon else 0

    def _uncompacted(self) -> Figures:
        """Return the number of partitions in which a GiB has waited for a day, and how many bytes wait there."""
        data = self._settings.data
        tables = self._compacted.found()
        rows, ends = (passes.read(data), compaction.synced_ends(data)) if tables else ({}, {})
        waiting = [
            nbytes
            for table in tables
            for number in range(table.partitions)
            if (nbytes := _waits(data, table, number, rows, ends.get((table.name, number), 0)))
        ]
        return (len(waiting), sum(waiting)) if waiting else None


def _slow(seen: Sequence[HistogramSnapshot], bucket: int) -> Figures:
    """Return how many events were in this bucket or above, of how many; None if they were few, or in few looks."""
    steps = [difference(new, old) for old, new in pairwise(seen)]
    slow = [sum(step.counts[bucket:]) for step in steps]
    total = sum(sum(step.counts) for step in steps)
    is_true = sum(map(bool, slow)) >= SLOW_LOOKS and sum(slow) * 100 > total * PERCENT
    return (sum(slow), total) if is_true else None


def _filled_in(rooms: Sequence[_Room]) -> int | None:
    """Return in how many seconds the room is used up, if short and long observations predict it."""
    now = rooms[-1].at
    found = []
    for span_s in (ROOM_NEAR_S, ROOM_FAR_S):
        left_s = _left_in(rooms, span_s)
        known_s = now - next(each.at for each in rooms if now - each.at <= span_s)
        if left_s is None or left_s > min(DAY_S, _AHEAD * known_s):
            return None
        found.append(left_s)
    return max(1, int(max(found)))


def _left_in(rooms: Sequence[_Room], span_s: float) -> float | None:
    """Return in how many seconds the room is used up, by what was seen in the last `span_s`; None: never, or not known."""
    seen = [each for each in rooms if rooms[-1].at - each.at <= span_s]
    return _left_s(seen) if rooms[-1].at - seen[0].at >= ROOM_LEAST_S else None


def _left_s(rooms: Sequence[_Room]) -> float | None:
    """Return when the least-squares line through these points reaches 0, in seconds from the last; None if never."""
    mean_at = sum(each.at for each in rooms) / len(rooms)
    mean = sum(each.bytes for each in rooms) / len(rooms)
    spread = sum((each.at - mean_at) ** 2 for each in rooms)
    slope = sum((each.at - mean_at) * (each.bytes - mean) for each in rooms) / spread
    return max(0.0, rooms[-1].bytes / -slope) if slope < 0 else None


def _waits(data: str, table: CompactedTopic, number: int, rows: dict[passes.At, passes.Pass], end: int) -> int:
    """Return the bytes of a partition that have waited a day for the compactor, without a pass meanwhile; else 0."""
    done, day_ago = passes.of(rows, table, number), time.time() - DAY_S
    if done is not None and done.at > day_ago:
        return 0
    sealed, nbytes = passes.pending(data, (table.name, number), done, end)
    new = [segment for segment in sealed if done is None or segment.first >= done.end]
    if nbytes <= GIB or not new:
        return 0
    try:
        return nbytes if os.stat(new[0].path(data)).st_mtime < day_ago else 0
    except FileNotFoundError:  # retention has deleted it
        return 0
