"""The declared topics and their partitions, as groups know them: read from disk, and compared with the last look.

    a look finds that topic orders grew from 4 to 8 partitions   → changed(TopicChange({"orders": 8}, …,
    young={"orders": 4}))

Owner       The gateway's event loop. Directories are read in a thread.
Cost        A stat each second. A look at every topic when one was added or deleted, and every _TOPICS_S.
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

_TOPICS_S = 5.0  # between two looks for more partitions
_Declared = dict[str, tuple[int, int | None]]  # topic → partitions, from_seq


class TopicChange(NamedTuple):
    """The changes found by a look.

    partitions_of   all topics with their partitions
    again           names that were deleted and declared anew
    young           topics that were added or grew since the last look → their number of partitions before; at the first
                    look, topics that have grown → their first number of partitions
    """

    partitions_of: dict[str, int]
    again: list[str]
    young: dict[str, int]


class Beginning(NamedTuple):
    """A topic whose partitions from number `before` on are not assigned yet: groups must begin there first."""

    topic: str
    before: int


class DeclaredTopics:
    """The topics, followed on disk, and looked up when a caller names one. `changed` is called with each change."""

    def __init__(self, data: str, partitions: Partitions, changed: Callable[[TopicChange], None], log: Logger) -> None:
        self._data, self._partitions, self._changed, self._log = data, partitions, changed, log
        self._declared: _Declared = {}
        self._first: dict[str, int] = {}  # of the first look: topic → partitions before it grew
        self._has_looked = False
        self._seen, self._at = 0, 0.0
        self._why = ""  # why the last look failed, to log it once

    def __contains__(self, topic: str) -> bool:
        return topic in self._declared

    async def follow(self) -> None:
        """Look for topics that were added, deleted, or extended. Call it about once a second."""
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
        self._apply(declared)
        self._has_looked = True
        self._first.clear()

    async def know(self, names: Iterable[str]) -> None:
        """Look up topics that are named now, because they may be younger than the last look."""
        found = await asyncio.to_thread(self._partitions.declared_of, names)
        self._apply(self._declared | found)  # after the look: meanwhile another one may have found more

    def _look_at_all(self) -> _Declared:
        names = topics.names(self._data)
        if not self._has_looked:
            self._first = {name: self._partitions.first_count(name) for name in names}
        return self._partitions.declared_of(names)

    def _apply(self, declared: _Declared) -> None:
        # A pending topic keeps its former from_seq. Otherwise the router's next value would look like its first life.
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
        self._changed(TopicChange(partitions_of, again, young))
