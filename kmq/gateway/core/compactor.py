"""`python -m kmq.gateway.core.compactor`: compacts topics declared `cleanup = "compact"`, beside the gateway.

Owner       the gateway starts it when a pass is due (keep_compacted), and the agent of a fleet with --now, for `kmq fleet run
            compact`: then it makes every pass, due or not. One lock admits one compactor; --now waits for it.
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

MIN_DIRTY = 0.5  # share of a segment's bytes: below it a rewrite costs more than it gains
_CPU_SHARE = 0.25  # of one core
_LOOK_S = 10.0  # between two looks, in a pass, whether a topic of KMQ itself is due
_BURST_S = 1.0  # of idle time that may be made up for
_POLL_S = 0.05
_INSTALL_S = 30.0  # longest wait for the router to install a segment


class NoRoom(KmqError):
    """The disk has no room for the copy of a segment."""


class Throttle:
    """Limits reading, writing and CPU time. `rest` returns how long to wait after each `add`."""

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
        """Return how many seconds to wait before going on."""
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
        self._looked_at = time.monotonic()
        self.failures: list[str] = []

    def run(self, users_too: bool = True, min_dirty: float = MIN_DIRTY, now: bool = False) -> int:
        """Make every pass that is due; return how many segments were laid out.

        `users_too`: also topics of users, not only those of KMQ itself. `min_dirty`: a segment with a smaller share of
        removable bytes stays as it is. `now`: make all passes, due or not, after any other compactor. Raises BusyError
        if another compactor is at work, or if the router does not install segments.
        """
        with compaction.compactor(self._data, waits=now) as place:
            self._wait_for_router(lambda: compaction.waiting(self._data))
            return self._make_passes(place, users_too, min_dirty, now)

    def _make_passes(self, where: str, users_too: bool, min_dirty: float, now: bool = False) -> int:
        tables = [table for table in self._tables.found() if users_too or table.name.startswith("__")]
        clock = passes.clock(self._data, time.time(), GAP_S)
        count = 0
        for table, number in passes.due(self._data, tables, clock, now):
            end = compaction.synced_ends(self._data).get((table.name, number), 0)
            place = SyncedPartition(self._data, table.name, number, end)
            try:
                count += self._pass(table, place, passes.horizon(clock, table.delete_retention), where, min_dirty)
            except FileNotFoundError:  # the topic was deleted, or the segment by retention: skip it this time
                continue
            except (CorruptError, NoRoom) as err:
                self.failures.append(f"{table.name}-{number}: {err}")
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
        """Raise FileNotFoundError if the topic was deleted: offsets may belong to its next life by now."""
        if topics.load(self._data, table.name)[1] != table.from_seq:
            raise FileNotFoundError(f"topic {table.name} was deleted")

    def _note(self, table: CompactedTopic, place: SyncedPartition, comparison: KeyComparison, removed: int) -> None:
        """Note a complete pass. Notes of other lives of a topic, or of topics no longer compacted, are removed."""
        bytes_left = comparison.nbytes - removed
        if not comparison.sealed:
            return
        done = Pass(table.from_seq, comparison.sealed[-1].end, bytes_left, comparison.young, int(time.time()))
        lives = {each.name: each.from_seq for each in self._tables.found()}
        rows = {at: row for at, row in passes.read(self._data).items() if lives.get(at[0]) == row.from_seq}
        passes.write(self._data, rows | {(table.name, place.partition): done})

    def _lay_out(self, found: Removable, where: str, step: Callable[[int], None]) -> int:
        path = found.segment.path(self._data)
        size = os.path.getsize(path) - found.nbytes
        if not self._has_room(size):
            raise NoRoom(f"{path}: the disk or KMQ_DATA_QUOTA has no room for a copy of {size} bytes")
        saved = compaction.lay_out(self._data, found.segment, found.offsets, where, step)
        self._log.info("segment_laid_out", segment=found.segment, removed=found.count, saved=saved)
        if self._install_s:
            self._wait_for_router(lambda: os.path.exists(found.segment.outbox_path(self._data)))
        return saved

    def _wait_for_router(self, has_left: Callable[[], object]) -> None:
        """Wait until the router has installed what is laid out."""
        deadline = time.monotonic() + self._install_s
        while has_left():
            if time.monotonic() >= deadline:
                outbox = compaction.outbox(self._data)
                raise BusyError(f"{outbox}: the router has not installed a segment in {self._install_s:g} s")
            time.sleep(_POLL_S)

    def _step(self, where: str | None, nbytes: int) -> None:
        """Wait as the throttle says. `where`: set in a pass over a user's topic, which KMQ's own topics interrupt."""
        self._throttle.add(nbytes)
        time.sleep(self._throttle.rest())
        if where is not None and time.monotonic() - self._looked_at > _LOOK_S:
            self._looked_at = time.monotonic()
            self._make_passes(where, users_too=False, min_dirty=MIN_DIRTY)
            self._looked_at = time.monotonic()


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
    if not tables or compaction.waiting(data) or compaction.is_at_work(data):
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
    """Make the passes that are due; with --now print what failed. Returns an exit code of kmq/errors.py."""
    parser = argparse.ArgumentParser(prog="python -m kmq.gateway.core.compactor", description=__doc__)
    parser.add_argument("--with", dest="gateway", type=int, default=0, help="the process with which this one ends")
    parser.add_argument("--now", action="store_true", help="compact all topics with cleanup=compact, due or not")
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
        compactor.run(users_too=arguments.now or settings.compact == "on", now=arguments.now)
    except (KmqError, OSError) as err:
        if isinstance(err, BusyError) and not arguments.now:
            return 0  # it is done in the next run
        log.warn("not_compacted", reason=err, effect="tried again later")
        return getattr(err, "exit_code", 1)
    for failure in compactor.failures if arguments.now else ():
        print(failure)
    return int(bool(compactor.failures))


if __name__ == "__main__":
    sys.exit(main())
