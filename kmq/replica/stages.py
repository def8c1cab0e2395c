"""The four stages as the process `replica` controls them, and how they change from one role to the next.

Example: on a promotion the role page goes from `following` to `waiting`, and then to `leading` in a new generation.

Owner       The process `replica` (lock pipes/replica.owner). It alone writes the role page (kmq/links/role.py).
Change      The page says `waiting`, in a new generation. The stages release everything. The rings are removed, and the
            rest of the FIFO `raw` is read and dropped. The WAL is cut where the new leader says (follow.py). Then the
            next role begins. A promotion is a start of the four stages on the directory as it is.
Invariant   Rings and WAL are changed only while no stage holds a lock (role.py says why none can return meanwhile).
            Lines that were numbered, or waited, and are not in the WAL are dropped with the role. No client has had a
            reply to them.
Stopped     A stage that is stopped or hangs keeps its lock. The change of role waits for it, because it may be in the
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
_REPORT_S = 10.0  # after this time a stage that still holds a lock is named
_ROOM_S = 0.5  # between two tries while the disk is full
_NOTE_S = 1.0  # greatest age of the file `committed`
_FIFO_BYTES = 1 << 16
_FIFO_REPORT_S = 60.0  # between two log lines about lines that a shell wrote on a follower
_MESSAGES = re.compile(rb"(?m)^!c \S+ \d+ (\d+) ")


class Stages:
    """The stages of this broker: the page, the locks, the rings, the FIFOs."""

    def __init__(self, settings: Settings, stats: StatsPage, who: str, log: Logger) -> None:
        self.settings, self.stats, self.who, self.log = settings, stats, who, log
        self.data, self.data_id = settings.data, stats.data_id
        self.page = RolePage.make(settings.instance, self.data_id)
        self.raw = open_fifo(settings.pipes, "raw")
        self.synced = open_fifo(settings.pipes, SYNCED)
        self.dropped = 0  # messages dropped with a role
        self.cut_records = 0
        self.bootstraps = 0  # bootstraps that this process has begun to put in place
        self._noted, self._noted_at = read_committed(self.data), 0.0
        self._fifo_reported_at = 0.0
        self._is_full = False
        self._fifo_lines = 0
        self._looked_at = 0  # mtime of topics/ when its requests were last refused
        self._mend()

    @property
    def ring(self) -> Identity:
        """The identity of the ring `framed`."""
        return ring_identity(self.settings, self.data_id, "framed")

    def durability_starts(self) -> int:
        """How often durability was started, without changes of role."""
        return self.stats.rows["durability"].starts

    def routed_seq(self) -> int:
        return self.stats.rows["router"].seq

    # --- letting go --------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """End the role. Return once no stage holds anything, and only the WAL is left of the role."""
        self.page.leave()
        began, is_reported = time.monotonic(), False
        while held := self._held():
            if not is_reported and time.monotonic() - began > _REPORT_S:
                self.log.warn("role_held", by="; ".join(held), effect="the next role waits until it has let go")
                is_reported = True
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
        """Return the holders of the locks and rings that belong to the role."""
        pipes, data, instance = self.settings.pipes, self.data, self.settings.instance
        paths = [f"{pipes}/{name}.owner" for name in ("ingress", "raw", *layout.RINGS, received.NAME)]
        locks = [FileLock(path) for path in (*paths, f"{data}/append/.owner", f"{data}/topics/.owner")]
        found = [lock.holder() or lock.path for lock in locks if lock.is_held()]
        return found + [f"ring {name}" for name in (*layout.RINGS, received.NAME) if layout.is_held(instance, name)]

    def show_doors(self, doors: tuple[tuple[str, str], ...] | None) -> None:
        """Let this broker's doors pass clients to these of the leader; (): unknown; None: send clients elsewhere.

        Call it only for a broker that has led in the epoch that we have promised. Such a broker no longer follows
        anyone of that epoch or an earlier one, so followers never pass connections on in a circle.
        """
        shown = None if doors is None else dict(doors)
        if shown != self.page.leader:
            self.page.show_leader(shown)

    def has_wal(self) -> bool:
        """Return True if a stage of this broker writes the WAL now."""
        return FileLock(f"{self.data}/append/.owner").is_held()

    def _mend(self) -> None:
        """Cut a torn end of the WAL, and rebuild lost indexes, as durability does at its start. Skip it if durability
        runs.

        `replica` needs the end and the epochs of the WAL before that start. After a power cut there may be a hole
        before the last record, or a segment without an index.
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
        """Remove the rings, empty the FIFO, and log what was dropped with them."""
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
        """Read and drop what waits in `raw`; return how many messages that was, as far as the FIFO tells."""
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.raw, _FIFO_BYTES):
                parts.append(part)
        text = b"".join(parts)
        plain = sum(1 for line in text.split(b"\n") if line and not line.startswith(b"!"))
        return plain + sum(int(count) for count in _MESSAGES.findall(text))

    def drop_fifo(self) -> None:
        """As a follower, drop what a shell wrote into `raw`, so that a later promotion does not store it."""
        self._fifo_lines += self._empty_fifo()
        now = time.monotonic()
        if self._fifo_lines and now - self._fifo_reported_at > _FIFO_REPORT_S:
            self.log.warn("fifo_lines_dropped", count=self._fifo_lines, reason="this broker does not lead its shard")
            self.dropped += self._fifo_lines
            self._fifo_lines, self._fifo_reported_at = 0, now

    def refuse_requests(self) -> None:
        """As a follower, refuse requests under topics/: a later promotion would carry them out. Call it often."""
        with contextlib.suppress(FileNotFoundError):
            changed = os.stat(f"{self.data}/topics").st_mtime_ns
            if changed != self._looked_at:
                topic_changes.refuse_requests(self.data, self.log)
                self._looked_at = changed

    # --- what is committed -------------------------------------------------------------------------------------------

    def epochs(self) -> Epochs:
        """Return where each epoch begins in the WAL as it lies."""
        # Not from `shown` on: after a power cut the queues are sure to be on disk only up to router.ckpt.
        return Epochs.load(self.data, checkpoint.routed_seq(self.data))

    def shown(self) -> int:
        """The seq up to which records of this directory are surely committed."""
        return shown_seq(self.data)

    def note_hw(self) -> None:
        """Save hw for a start without a leader. Call it often."""
        now = time.monotonic()
        if self.page.hw > self._noted and now - self._noted_at > _NOTE_S:
            self._noted_at = now
            try:
                write_committed(self.data, self.page.hw)
                self._noted = self.page.hw
            except OSError as err:
                if err.errno not in FULL:  # on a full disk the file keeps a lower hw, which is also true
                    raise

    async def await_end(self) -> None:
        """Return once durability has released the WAL, or after DRAIN_S."""
        until = time.monotonic() + DRAIN_S
        while self.has_wal() and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
