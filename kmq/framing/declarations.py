"""Puts a record into the WAL for each request to change a topic: what the framer writes by itself.

Owner       the framer. Commands lay requests under topics/ (kmq/log/requests.py); the router removes one after it has
            carried out its record (kmq/log/topic_records.py).
Invariant   A request that waits gets a record. Records of one topic come in the order of the requests, and one is numbered
            only when the router is past the one before: so it names the incarnation that is in force then.
            A request that was there before a line reached the framer is numbered before that line, unless another of
            its topic is on its way, or there are thousands of topics.
Crash       A start finds the records that the router is not past in the WAL and in the ring (recovery.py).
Dropped     The router is past a record and its request is still there: drop_oldest took it. It is numbered again.
Cost        One stat a turn. topics/ is listed if it has changed, and ten times a second while a request waits.
"""

import os
import time
from collections.abc import Callable

from kmq.log import requests, topic_records, topics
from kmq.log.requests import Request
from kmq.log.topic_records import Change

_WAITING_S = 0.1  # between two looks while a request waits for the router
_LOOK_S = 1.0  # between two looks in any case
_COARSE_NS = 50_000_000  # two changes of a directory within this time may have the same mtime
_MANY, _PART = 2000, 10  # with more topics the listings take at most one part in so many of the time


class Declarations:
    """The requests that wait, and which of them have a record on its way to the router."""

    def __init__(self, data: str, routed_seq: Callable[[], int], numbered: dict[str, int]) -> None:
        """`routed_seq`: what the router is past. `numbered`: request → seq of the records that it is not past."""
        self._data, self._routed_seq, self._numbered = data, routed_seq, numbered
        self._directory = f"{data}/topics"
        self._seen_ns = 0  # mtime of topics/ when it was listed
        self._due = self._not_before = 0.0

    def due(self) -> list[Change]:
        """Return the changes to be numbered now, in order. Call `numbered` for each of them."""
        now = time.monotonic()
        try:
            found = os.stat(self._directory)
        except FileNotFoundError:
            return []
        mtime = found.st_mtime_ns
        if (mtime == self._seen_ns and now < self._due) or now < self._not_before:
            return []
        routed = self._routed_seq()  # first: what it is past is removed when we look
        waiting = [request for request in requests.waiting(self._data) if request.is_recorded]
        self._seen_ns = mtime if abs(time.time_ns() - mtime) > _COARSE_NS else 0
        self._due = now + (_WAITING_S if waiting else _LOOK_S)
        changes = self._next(waiting, routed)
        self._not_before = now + _PART * (time.monotonic() - now) if found.st_nlink > _MANY else 0.0
        return changes

    def _next(self, found: list[Request], routed: int) -> list[Change]:
        """Return the oldest change of each topic that has none on its way."""
        self._numbered = {each.name: self._numbered[each.name] for each in found if each.name in self._numbered}
        busy = {each.topic for each in found if self._numbered.get(each.name, 0) > routed}
        changes = []
        for request in found:
            if request.topic in busy:
                continue
            busy.add(request.topic)
            incarnation = 0 if request.verb == topic_records.CREATE else request.incarnation
            if incarnation is None:
                incarnation = self._incarnation(request.topic)
            if incarnation is not None:
                changes.append(Change(request.verb, request.topic, incarnation, request.values, request.name))
        return changes

    def numbered(self, change: Change, seq: int) -> None:
        """Note that the record of a change is in the ring."""
        self._numbered[change.request] = seq

    def _incarnation(self, topic: str) -> int | None:
        """Return the from_seq of a topic in force, 0 if there is none; None: the router is about to say."""
        declared = topics.read(self._data, topic)
        if declared.is_guessed:
            return None
        if declared.from_seq is None and os.path.isdir(f"{self._data}/topics/{topic}"):
            return None
        return declared.from_seq or 0
