"""`python -m kmq.gateway.core.compactor`: compacts topics declared `cleanup = "compact"`, beside the gateway.

Owner       the gateway starts it when a pass is due (keep_compacted). It shares one lock with Spark's `compact` pipeline,
            to which it gives way.
Invariant   It only lays out segments; the router installs them (kmq/log/compaction.py). A segment is laid out only if
            the disk and KMQ_DATA_QUOTA have room for it beside what the broker keeps free.
Crash       Killed at any call it has changed nothing, or whole segments. What it had compared is compared again.
Load        A process of its own at idle priority, so that neither its memory nor its work is the gateway's. It reads
            and writes at most KMQ_COMPACT_RATE bytes a second, and works at most a quarter of the time, because a CPU
            limit of a container counts idle priority too. Memory: kmq/log/replaced.py. One segment at a time is on the
            disk twice, until the router has installed it.
Order       Topics of KMQ itself come first, also in the middle of a pass over a large topic: they are small, and a
            start of the gateway reads them.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from kmq.broker.admission import Admission
from kmq.broker.clock import GAP_S
from kmq.broker.supervisor import end_with
from kmq.config.settings import Settings, load
from kmq.errors import BusyError, CorruptError, KmqError
from kmq.log import compaction, identity, passes, topics
from kmq.log.passes import CompactedTopic, CompactedTopics, Pass
from kmq.log.replaced import Horizon, KeyComparison, Removable, SyncedPartition
from kmq.logfmt import Logger

MIN_DIRTY = 0.5  # share of a segment's bytes: below it rewriting costs more than it gains
_CPU_SHARE = 0.25  # of one core
_LOOK_S = 10.0  # between two looks, in a pass, whether a topic of KMQ itself is due
_BURST_S = 1.0  # of idle time that may be caught up
_ASK_S = 0.2  # between two looks whether another compactor waits
_NAP_S = 0.2  # longest sleep at once
_INSTALL_S = 30.0  # longest wait for the router to install a segment


class NoRoom(KmqError):
    """The disk has no room for the copy of a segment."""


class Throttle:
    """How much reading, writing and working is too much. `rest` says how long to wait after each `add`."""

    def __init__(
        self,
        rate: int,
        cpu_share: float = _CPU_SHARE,
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        """`rate`: bytes a second; 0: no limit."""
        self._rate, self._share, self._now, self._cpu = rate, cpu_share, now, cpu
        self._free_at, self._cpu_at = now(), cpu()
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """Note bytes that were read or written, and the CPU time since the last call."""
        self.nbytes += nbytes
        cpu_s, self._cpu_at = self._cpu() - self._cpu_at, self._cpu()
        seconds = max(nbytes / self._rate if self._rate else 0.0, cpu_s / self._share)
        self._free_at = max(self._free_at, self._now() - _BURST_S) + seconds

    def rest(self) -> float:
        """Return how many seconds to wait before more is done."""
        return max(0.0, self._free_at - self._now())


class Compactor:
    """The passes of one run."""

    def __init__(
        self,
        data: str,
        log: Logger,
        throttle: Throttle,
        has_room: Callable[[int], bool] = lambda nbytes: True,
        install_s: float = _INSTALL_S,
    ) -> None:
        """`has_room`: may so many bytes be written? `install_s`: longest wait for the router after each segment."""
        self._data, self._log, self._throttle, self._has_room = data, log, throttle, has_room
        self._install_s = install_s
        self._tables = CompactedTopics(data)
        self._asked_at = self._looked_at = time.monotonic()
        self.has_failed = False

    def run(self, users_too: bool = True, min_dirty: float = MIN_DIRTY) -> int:
        """Make every pass that is due; return how many segments were laid out.

        `users_too`: not only topics of KMQ itself. `min_dirty`: share of a segment's bytes below which it stays as it
        is. Raises BusyError if another compactor is at work or waits.
        """
        with compaction.compactor(self._data, in_background=True) as place:
            if compaction.waiting(self._data):
                return 0
            return self._make_due(place, users_too, min_dirty)

    def _make_due(self, where: str, users_too: bool, min_dirty: float) -> int:
        tables = [table for table in self._tables.found() if users_too or table.name.startswith("__")]
        clock = passes.clock(self._data, time.time(), GAP_S)
        count = 0
        for table, number in passes.due(self._data, tables, clock):
            end = compaction.synced_ends(self._data).get((table.name, number), 0)
            place = SyncedPartition(self._data, table.name, number, end)
            try:
                count += self._pass(table, place, clock.horizon(table.delete_retention), where, min_dirty)
            except FileNotFoundError:  # the topic was deleted, or the segment by retention: the next time
                continue
            except (CorruptError, NoRoom) as err:
                self.has_failed = True
                effect = "tried again later"
                self._log.warn("not_compacted", topic=table.name, partition=number, reason=err, effect=effect)
        return count

    def _pass(
        self, table: CompactedTopic, place: SyncedPartition, horizon: Horizon, where: str, min_dirty: float
    ) -> int:
        """Compare one partition, lay out what is worth it, and note that; return how many segments were laid out."""
        began, moved_before = time.monotonic(), self._throttle.nbytes
        step = partial(self._step, None if table.name.startswith("__") else where)
        comparison = KeyComparison(place, horizon, identity.marks_from(self._data), step)
        count = removed = nbytes = saved = 0
        self._check_life(table)
        for found in comparison.removable():
            if found.nbytes >= min_dirty * os.path.getsize(found.segment.path(self._data)):
                self._check_life(table)
                saved += self._lay_out(found, where, step)
                count, removed, nbytes = count + 1, removed + found.count, nbytes + found.nbytes
        self._note(table, place, comparison, nbytes)
        self._log.info(
            "compaction_pass",
            topic=table.name,
            partition=place.partition,
            records=comparison.records,
            removed=removed,
            segments=count,
            saved=saved,
            moved=self._throttle.nbytes - moved_before,
            seconds=round(time.monotonic() - began, 3),
        )
        return count

    def _check_life(self, table: CompactedTopic) -> None:
        """Raise FileNotFoundError if the topic was deleted: offsets may be those of its next life by now."""
        if topics.load(self._data, table.name)[1] != table.from_seq:
            raise FileNotFoundError(f"topic {table.name} was deleted")

    def _note(self, table: CompactedTopic, place: SyncedPartition, comparison: KeyComparison, removed: int) -> None:
        """Note a complete pass. What is known of other lives of a topic, or of topics not compacted any more, goes."""
        kept = comparison.nbytes - removed
        if not comparison.sealed:
            return
        done = Pass(table.from_seq, comparison.sealed[-1].end, kept, comparison.young, int(time.time()))
        lives = {known.name: known.from_seq for known in self._tables.found()}
        rows = {at: row for at, row in passes.read(self._data).items() if lives.get(at[0]) == row.from_seq}
        passes.write(self._data, rows | {(table.name, place.partition): done})

    def _lay_out(self, found: Removable, where: str, step: Callable[[int], None]) -> int:
        path = found.segment.path(self._data)
        size = os.path.getsize(path) - found.nbytes
        if not self._has_room(size):
            raise NoRoom(f"{path}: the disk or KMQ_DATA_QUOTA has no room for a copy of {size} bytes")
        saved = compaction.lay_out(self._data, found.segment, found.offsets, where, step)
        self._log.info("segment_laid_out", segment=found.segment, removed=found.count, saved=saved)
        deadline = time.monotonic() + self._install_s
        while self._install_s and os.path.exists(found.segment.place(self._data)):
            self._ask()
            if time.monotonic() > deadline:
                raise BusyError(f"{path}: the router has not installed its compacted form in {self._install_s:g} s")
            time.sleep(_NAP_S / 4)
        return saved

    def _step(self, where: str | None, nbytes: int) -> None:
        """Wait as the throttle says. `where`: given in a pass over a user's topic, which one of KMQ itself interrupts."""
        self._throttle.add(nbytes)
        self._ask()
        while rest := self._throttle.rest():
            time.sleep(min(rest, _NAP_S))
            self._ask()
        if where is not None and time.monotonic() - self._looked_at > _LOOK_S:
            self._looked_at = time.monotonic()
            self._make_due(where, users_too=False, min_dirty=MIN_DIRTY)
            self._looked_at = time.monotonic()

    def _ask(self) -> None:
        """Raise BusyError if another compactor waits for this one to end."""
        if time.monotonic() - self._asked_at > _ASK_S:
            self._asked_at = time.monotonic()
            if compaction.is_wanted(self._data):
                raise BusyError(f"{self._data}: another compactor waits")


# --- the gateway's task -----------------------------------------------------------------------------------------------

_DUE_S = 15.0  # between two looks; the router's checkpoints, which say what may be compacted, come every 30 s
_FAILED_S = 600.0  # after a compactor that has failed
_COMPACTOR = "kmq.gateway.core.compactor"


async def keep_compacted(settings: Settings, log: Logger, look_s: float = _DUE_S) -> None:
    """Start the compactor whenever a pass over some topic is due, one at a time, until cancelled.

    While no topic is declared to be compacted, this reads a directory and one file status for each topic, every
    `look_s`. A look at a topic reads file sizes; kmq/log/passes.py says when a pass is due. The compactor ends with the
    gateway, however that ends. What it does is safe at every call.
    """
    tables = CompactedTopics(settings.data)
    while True:
        pause = look_s
        try:
            if await asyncio.to_thread(_is_due, settings, tables) and await _compact(settings, log):
                pause = _FAILED_S
        except (KmqError, OSError) as err:
            pause = _FAILED_S
            log.warn("not_compacted", reason=err, effect="tried again later")
        await asyncio.sleep(pause)


def _is_due(settings: Settings, compacted: CompactedTopics) -> bool:
    tables, data = compacted.found(), settings.data
    if settings.compact == "off":
        tables = [table for table in tables if table.name.startswith("__")]
    if not tables or compaction.waiting(data) or compaction.is_wanted(data):
        return False
    return bool(passes.due(data, tables, passes.clock(data, time.time(), GAP_S)))


async def _compact(settings: Settings, log: Logger) -> int:
    """Let a compactor make every pass that is due; return its exit code."""
    command = sys.executable, "-m", _COMPACTOR, "--with", str(os.getpid())
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | settings.environment())
    try:
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if code < 0:
        log.warn("not_compacted", reason=f"ended by signal {-code}", effect="tried again later")
    return code


# --- the process ------------------------------------------------------------------------------------------------------


def _room(settings: Settings, nbytes: int) -> bool:
    """Ask `Admission.has_room`, with files counted now."""
    return Admission(settings, lambda: 0).has_room(nbytes)


def main() -> int:
    """Make the passes that are due. Returns an exit code of kmq/errors.py."""
    parser = argparse.ArgumentParser(prog="python -m kmq.gateway.core.compactor", description=__doc__)
    parser.add_argument("--with", dest="gateway", type=int, default=0, help="the process with which this one ends")
    arguments = parser.parse_args()
    if arguments.gateway:
        end_with(arguments.gateway)
    log = Logger("compactor")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the gateway ends it
    os.nice(19)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        settings = load()
        compactor = Compactor(settings.data, log, Throttle(settings.compact_rate), partial(_room, settings))
        compactor.run(users_too=settings.compact == "on")
    except BusyError:
        return 0  # the next time
    except (KmqError, OSError) as err:
        log.warn("not_compacted", reason=err, effect="tried again later")
        return getattr(err, "exit_code", 1)
    return int(compactor.has_failed)


if __name__ == "__main__":
    sys.exit(main())
