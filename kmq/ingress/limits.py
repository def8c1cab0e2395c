"""Limits: when a producer is refused or ended: memory, deadlines, and a disk or quota without room.

Memory      Unread replies of all connections together: UNREAD_BYTES. Over that the largest are broken first.
Clock       Deadlines count only time in which producers could be heard: ingress sweeps when every connection that was
            ready has had its turn and the framer takes everything. So neither backpressure nor a stopped ingress makes
            a producer late.
Cost        Nothing per message: a sweep looks at each connection once a second. It is never early, and at most two
            seconds late.
"""

import select
import time
from collections.abc import Callable, Iterable

from kmq.broker.admission import Admission
from kmq.broker.stage import Stage
from kmq.broker.stats import ADMISSIONS, Row
from kmq.config.values import MIB
from kmq.ingress.connection import Connection
from kmq.wire import refusals

# --- memory ----------------------------------------------------------------------------------------------------------

UNREAD_BYTES = 32 * MIB  # of all replies that producers have not read


class UnreadBudget:
    """Bytes of replies that wait for their producers."""

    def __init__(self) -> None:
        self.bytes = 0

    def follow(self, connection: Connection) -> None:
        """Update the count after a connection's pending replies changed."""
        replies = connection.replies
        self.bytes += len(replies.pending) - replies.counted
        replies.counted = len(replies.pending)

    def forget(self, connection: Connection) -> None:
        """Stop counting a connection that has ended."""
        self.bytes -= connection.replies.counted
        connection.replies.counted = 0

    def exceeded_by(self, connections: Iterable[Connection]) -> list[Connection]:
        """Return the connections to break because unread replies take too much memory."""
        if self.bytes <= UNREAD_BYTES:
            return []
        return largest(connections, self.bytes - UNREAD_BYTES, lambda connection: connection.replies.counted)


def largest(connections: Iterable[Connection], excess: int, size: Callable[[Connection], int]) -> list[Connection]:
    """Return as few connections as possible that together have `excess` bytes, the largest first."""
    chosen: list[Connection] = []
    for connection in sorted(connections, key=size, reverse=True):
        chosen.append(connection)
        excess -= size(connection)
        if excess <= 0:
            break
    return chosen


# --- deadlines -------------------------------------------------------------------------------------------------------
# A connection is late if it sends nothing, does not finish what it has begun, or reads no replies.

SWEEP_S = 1.0
UNREAD = "reads no replies"
_ANYTHING = select.EPOLLIN | select.EPOLLOUT


class Deadlines:
    """KMQ_IDLE and KMQ_LINE_DEADLINE, in seconds; infinity: no deadline."""

    def __init__(self, idle: float, line: float) -> None:
        self.idle, self.line = idle, line
        self.due = time.monotonic() + SWEEP_S  # of the next sweep
        self._now = 0.0  # of the clock of the deadlines

    def late(self, connections: Iterable[Connection]) -> dict[Connection, str]:
        """Return the late connections, and why each is late. Call when `due`."""
        self.due = time.monotonic() + SWEEP_S
        self._now += SWEEP_S
        now, idle, line = self._now, self.idle, self.line
        late: dict[Connection, str] = {}
        for connection in connections:
            interest, replies = connection.interest, connection.replies
            if connection.was_active or replies.answered < replies.passed or not interest & _ANYTHING:
                connection.was_active, connection.quiet_since = False, now
            elif now - connection.quiet_since >= idle:
                late[connection] = "idle"
                continue
            elif replies.pending and now - connection.quiet_since >= line:
                late[connection] = UNREAD
                continue
            if not connection.is_unfinished:
                connection.unfinished_since = 0.0
            elif not connection.unfinished_since or not interest & select.EPOLLIN:
                connection.unfinished_since = now
            elif now - connection.unfinished_since >= line:
                late[connection] = "unfinished"
        return late


# --- gate ------------------------------------------------------------------------------------------------------------


class Gate:
    """The refusal that holds for all producers at present; b"" while messages are accepted.

    Ingress itself measures disk and quota. It also reads what durability waits for, and in a shard the role page.
    """

    def __init__(self, stage: Stage) -> None:
        self.refusal = b""  # code and reason
        self.lacks_room = False  # the reason is the disk or the quota
        self._row, self._log, self._role = stage.row, stage.log, stage.role
        durability = self._durability = stage.page.rows["durability"]
        self._admission = Admission(stage.settings, lambda: durability.bytes)

    def publish(self) -> None:
        """Write the sizes found by the last `look` into the stats page."""
        admission, row = self._admission, self._row
        disk = admission.disk
        if disk is not None:
            row.disk_free, row.disk_size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
            row.inodes_free, row.inodes_total = disk.f_favail, disk.f_files
        row.quota_used, row.quota_limit = admission.used, admission.quota

    def look(self) -> bool:
        """Look again, and return True if the refusal has changed."""
        code = self._admission.refusal() or self._durability.admission_name
        if not code and self._role is not None and self._role.refuses:
            code = "not_enough_replicas"
        refusal = refusals.reason(code).encode() if code else b""
        if refusal == self.refusal:
            return False
        self.refusal, self.lacks_room = refusal, code in ("disk_full", "quota")
        self._row.admission = ADMISSIONS.index(code)
        if code:
            self._log.warn("refusing", reason=code, effect="acknowledged producers are told, others wait")
        else:
            self._log.info("accepting_resumed")
        return True


_COUNTERS = {row.code.encode(): f"errs_{row.counted}" for row in refusals.table()}


def count_err(row: Row, refusal: bytes, n: int = 1) -> None:
    """Count `n` refused messages or connections, by class. `refusal`: the code, perhaps with its text."""
    counter = _COUNTERS.get(refusal.partition(b" ")[0], "errs_format")  # codes of a later release count as errs_format
    setattr(row, counter, getattr(row, counter) + n)
