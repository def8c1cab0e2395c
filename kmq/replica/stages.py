"""The stages of this broker, as `replica` sees them, and how they go from one role to the next.

Owner       the process `replica` (lock pipes/replica.owner). It alone writes the role page (kmq/links/role.py).
Change      the page says `waiting`, in a new generation; the stages let go; the rings are removed, and what is left in
            the FIFO `raw` is read away; the WAL is cut where the new leader says so (follow.py); the next role begins.
            A promotion is a start of the four stages on the directory as it lies.
Invariant   Rings and WAL are touched only while no stage holds a lock (role.py says why none can come back meanwhile).
            What was numbered, or waited, and is not in the WAL goes with the role. Nobody has had a reply to it.
Stopped     A stage that is stopped or hangs keeps its lock, and the change of role waits for it: it may be in the
            middle of a write.
Crash       Each start of the process is a change of role.
"""

import asyncio
import contextlib
import errno
import os
import re
import time

from kmq.broker.stage import ring_identity
from kmq.broker.stats import StatsPage
from kmq.config.settings import DRAIN_S, Settings
from kmq.files import FULL
from kmq.links import layout, received
from kmq.links.fifo import open_fifo
from kmq.links.layout import Identity
from kmq.links.ownership import FileLock
from kmq.links.role import SYNCED, RolePage
from kmq.log import checkpoint, topic_changes, wal
from kmq.log.committed import Epochs, read_committed, shown_seq, write_committed
from kmq.log.segment import Limits
from kmq.logfmt import Logger

_LOOK_S = 0.02  # between two looks at the locks
_TOLD_S = 10.0  # after it, who does not let go is named
_ROOM_S = 0.5  # while the disk is full
_NOTE_S = 1.0  # the file `committed` is at most this old
_FIFO_BYTES = 1 << 16
_FIFO_TOLD_S = 60.0  # between two log lines about lines that a shell has written on a follower
_MESSAGES = re.compile(rb"(?m)^!c \S+ \d+ (\d+) ")


class Stages:
    """The stages of this broker, as `replica` sees them: the page, the locks, the rings, the FIFOs."""

    def __init__(self, settings: Settings, stats: StatsPage, who: str, log: Logger) -> None:
        self.settings, self.stats, self.who, self.log = settings, stats, who, log
        self.data, self.data_id = settings.data, stats.data_id
        self.page = RolePage.make(settings.instance, self.data_id)
        self.raw = open_fifo(settings.pipes, "raw")
        self.synced = open_fifo(settings.pipes, SYNCED)
        self.dropped = 0  # messages that went with a role
        self.cut_records = 0
        self.bootstraps = 0  # whose files this process has begun to put in place
        self._noted, self._noted_at = read_committed(self.data), 0.0
        self._fifo_told = 0.0
        self._is_full = False
        self._fifo_lines = 0
        self._looked_at = 0  # the time of topics/ when its requests were refused last
        self._mend()

    @property
    def ring(self) -> Identity:
        """What the ring `framed` looks like."""
        return ring_identity(self.settings, self.data_id, "framed")

    def durability_starts(self) -> int:
        """How often durability was started; a change of role does not count."""
        return self.stats.rows["durability"].starts

    def routed_seq(self) -> int:
        return self.stats.rows["router"].seq

    # --- letting go --------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """End the role: return once no stage holds anything, and nothing of the role is left but the WAL."""
        self.page.leave()
        began, told = time.monotonic(), False
        while held := self._held():
            if not told and time.monotonic() - began > _TOLD_S:
                self.log.warn("role_held", by="; ".join(held), effect="the next role waits until it has let go")
                told = True
            await asyncio.sleep(_LOOK_S)
        while not self._has_mended():
            await asyncio.sleep(_ROOM_S)
        self._drop()

    def _has_mended(self) -> bool:
        """Mend the end of the WAL; return False if the disk is full."""
        try:
            self._mend()
        except OSError as err:
            if err.errno not in FULL:
                raise
            if not self._is_full:
                self.log.warn(
                    "disk_full",
                    file=err.filename or self.data,
                    lacks="disk_full",
                    effect="the next role waits for room",
                )
            self._is_full = True
            return False
        self._is_full = False
        return True

    def _held(self) -> list[str]:
        """Return who still holds something of the role."""
        pipes, data, instance = self.settings.pipes, self.data, self.settings.instance
        paths = [f"{pipes}/{name}.owner" for name in ("ingress", "raw", *layout.RINGS, received.NAME)]
        locks = [FileLock(path) for path in (*paths, f"{data}/append/.owner", f"{data}/topics/.owner")]
        found = [lock.holder() or lock.path for lock in locks if lock.is_held()]
        return found + [f"ring {name}" for name in (*layout.RINGS, received.NAME) if layout.is_held(instance, name)]

    def show_doors(self, doors: tuple[tuple[str, str], ...]) -> None:
        """Let the doors of this broker lead to these of the leader; (): nobody leads, as far as we know.

        Only to a broker that has led in the epoch that we have promised. It follows nobody of that epoch, or an earlier
        one, any more: so no circle of followers passes connections on to each other.
        """
        if dict(doors) != self.page.leader:
            self.page.show_leader(dict(doors))

    def has_wal(self) -> bool:
        """Return True if a stage of this broker writes the WAL now."""
        return FileLock(f"{self.data}/append/.owner").is_held()

    def _mend(self) -> None:
        """Cut a torn end of the WAL, and write lost indexes again, as durability does at its start, unless it runs.

        `replica` says where the WAL ends, and reads its epochs, before that start. After a power cut there may be a hole
        in front of the last record, or a segment without an index.
        """
        lock = FileLock(f"{self.data}/append/.owner")
        if not wal.last_stored(self.data)[0] or not lock.try_acquire(self.who):
            return

        def refuse(path: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

        try:
            unindexed = wal.torn_bytes(self.settings.ring_bytes)
            wal.Wal(self.data, refuse, unindexed, Limits.of(self.settings), self.settings.fsync).close()
        finally:
            lock.release()

    def _drop(self) -> None:
        """Remove the rings, empty the FIFO, and say what went with them."""
        instance = self.settings.instance
        numbered = max(0, layout.last_seq(instance, "framed", self.ring) - wal.last_stored(self.data)[0])
        nbytes = layout.filling(instance, received.NAME).nbytes
        for name in (*layout.RINGS, received.NAME):
            layout.remove(instance, name)
        lines = self._empty_fifo()
        self.dropped += numbered + lines
        if numbered or lines:
            effect = "their producers have no reply, and send them again"
            self.log.warn("lines_dropped_with_role", numbered=numbered, lines=lines, received=nbytes, effect=effect)

    def _empty_fifo(self) -> int:
        """Read away what waits in `raw`; return how many messages that was, as far as the FIFO says it."""
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.raw, _FIFO_BYTES):
                parts.append(part)
        text = b"".join(parts)
        plain = sum(1 for line in text.splitlines() if line and not line.startswith(b"!"))
        return plain + sum(int(count) for count in _MESSAGES.findall(text))

    def drop_fifo(self) -> None:
        """As a follower, read away what a shell has written into `raw`: it must not surface at a later promotion."""
        self._fifo_lines += self._empty_fifo()
        now = time.monotonic()
        if self._fifo_lines and now - self._fifo_told > _FIFO_TOLD_S:
            self.log.warn("fifo_lines_dropped", count=self._fifo_lines, reason="this broker does not lead its shard")
            self.dropped += self._fifo_lines
            self._fifo_lines, self._fifo_told = 0, now

    def refuse_requests(self) -> None:
        """As a follower, refuse what was laid into topics/: a later promotion would carry it out. Call it all the time."""
        with contextlib.suppress(FileNotFoundError):
            changed = os.stat(f"{self.data}/topics").st_mtime_ns
            if changed != self._looked_at:
                topic_changes.refuse_requests(self.data, self.log)
                self._looked_at = changed

    # --- what is committed -------------------------------------------------------------------------------------------

    def epochs(self) -> Epochs:
        """Return where each epoch begins in the WAL as it lies."""
        # Not from `shown` on: after a power cut queues have on disk only what router.ckpt vouches for.
        return Epochs.load(self.data, checkpoint.routed_seq(self.data))

    def shown(self) -> int:
        """The seq up to which records of this directory are committed for sure."""
        return shown_seq(self.data)

    def note_hw(self) -> None:
        """Keep what is committed, for a start without a leader; call it all the time."""
        now = time.monotonic()
        if self.page.hw > self._noted and now - self._noted_at > _NOTE_S:
            self._noted_at = now
            try:
                write_committed(self.data, self.page.hw)
                self._noted = self.page.hw
            except OSError as err:
                if err.errno not in FULL:  # a full disk: the file says less, which is true as well
                    raise

    async def await_end(self) -> None:
        """Return once durability has let go of the WAL, at most after DRAIN_S."""
        until = time.monotonic() + DRAIN_S
        while self.has_wal() and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
