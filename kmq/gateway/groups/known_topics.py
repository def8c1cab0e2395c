"""The topics that the coordinator of consumer groups knows: followed on disk, and looked at when somebody names one.

Cost        A stat each second; a look at every topic when one came or went, and every _TOPICS_S.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kmq.errors import KmqError
from kmq.gateway.core.partitions import Partitions
from kmq.log import topics
from kmq.logfmt import Logger
from kmq.message import record

_TOPICS_S = 5.0  # between two looks whether a topic has more partitions
_Declared = dict[str, tuple[int, int | None]]  # topic → partitions, from_seq


class Change(NamedTuple):
    """What a look has found.

    partitions_of   all topics with their partitions
    again           names that were deleted and declared anew
    young           topics that came or grew since the last look → how many partitions they had before; at the first look
                    topics that have grown → how many they had at first
    """

    partitions_of: dict[str, int]
    again: list[str]
    young: dict[str, int]


class KnownTopics:
    """`changed` is called with each change."""

    def __init__(self, data: str, partitions: Partitions, changed: Callable[[Change], None], log: Logger) -> None:
        self._data, self._partitions, self._changed, self._log = data, partitions, changed, log
        self._declared: _Declared = {}
        self._first: dict[str, int] = {}  # of the first look: topic → partitions before it grew
        self._has_looked = False
        self._seen, self._at = 0, 0.0
        self._why = ""  # why the last look has failed, so that the log says it once

    def __contains__(self, topic: str) -> bool:
        return topic in self._declared

    async def follow(self) -> None:
        """Look whether topics came, went, or have more partitions. Call about once a second."""
        try:
            seen = os.stat(f"{self._data}/topics").st_mtime_ns
            if seen == self._seen and time.monotonic() < self._at:
                return
            declared = await asyncio.to_thread(self._look_at_all)
        except (KmqError, OSError) as err:
            if self._why != str(err):
                self._log.warn("topics_not_read", reason=err, effect="groups keep the topics that they know")
            self._why = str(err)
            return
        self._why = ""
        self._seen, self._at = seen, time.monotonic() + _TOPICS_S
        self._take(declared)
        self._has_looked = True
        self._first.clear()

    async def know(self, names: Iterable[str]) -> None:
        """Look at topics that are named now, because they may be younger than the last look."""
        found = await asyncio.to_thread(self._look_at, names)
        self._take(self._declared | found)  # not before the look: meanwhile another one may have found more

    def _look_at_all(self) -> _Declared:
        names = topics.names(self._data)
        if not self._has_looked:
            self._first = {name: self._partitions.first_count(name) for name in names}
        return {name: self._partitions.declared(name) for name in names}

    def _look_at(self, names: Iterable[str]) -> _Declared:
        there = [n for n in names if record.is_topic_name(n) and os.path.isdir(f"{self._data}/topics/{n}")]
        return {name: self._partitions.declared(name) for name in there}

    def _take(self, declared: _Declared) -> None:
        # A topic that is pending keeps its former from_seq: else the router's next word would be its first life.
        since_of = {name: since for name, (_, since) in self._declared.items()}
        declared = {
            name: (count, since_of.get(name) if since is None else since) for name, (count, since) in declared.items()
        }
        if declared == self._declared:
            return
        again = [name for name, (_, since) in declared.items() if since_of.get(name) not in (None, since)]
        partitions_of = {name: count for name, (count, _) in declared.items()}
        if self._has_looked:
            before = {name: count for name, (count, _) in self._declared.items() if name not in again}
        else:
            before = partitions_of | self._first
        self._declared = declared
        young = {name: before.get(name, 0) for name, count in partitions_of.items() if before.get(name, 0) < count}
        self._changed(Change(partitions_of, again, young))
