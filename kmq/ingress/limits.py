"""What all connections together may keep in memory. Over that the largest are ended first."""

import select
import time
from collections.abc import Callable, Iterable

from kmq.broker.admission import Admission
from kmq.broker.stage import Stage
from kmq.broker.stats import ADMISSIONS
from kmq.config.values import MIB
from kmq.ingress.connection import Connection
from kmq.wire import refusals

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.broker.stats import Row


PARTIAL_BYTES = 64 * MIB  # of all unfinished lines together
UNREAD_BYTES = 32 * MIB  # of all replies that producers have not read


class PartialBudget:
    """Bytes of unfinished lines."""

    def __init__(self) -> None:
        self.bytes = 0

    def exceeded_by(self, connections: Iterable[Connection]) -> list[Connection]:
        """Return the connections to end because unfinished lines take too much memory."""
        if self.bytes <= PARTIAL_BYTES:
            return []
        return _largest(connections, self.bytes - PARTIAL_BYTES, lambda connection: len(connection.partial))


class UnreadBudget:
    """Bytes of replies that wait for their producers."""

    def __init__(self) -> None:
        self.bytes = 0

    def follow(self, connection: Connection) -> None:
        """Count the pending replies of a connection anew."""
        replies = connection.replies
        self.bytes += len(replies.pending) - replies.counted
        replies.counted = len(replies.pending)

    def forget(self, connection: Connection) -> None:
        """Count the replies of a connection no longer: it has ended."""
        self.bytes -= connection.replies.counted
        connection.replies.counted = 0

    def exceeded_by(self, connections: Iterable[Connection]) -> list[Connection]:
        """Return the connections to break because unread replies take too much memory."""
        if self.bytes <= UNREAD_BYTES:
            return []
        return _largest(connections, self.bytes - UNREAD_BYTES, lambda connection: connection.replies.counted)


def _largest(connections: Iterable[Connection], excess: int, size: Callable[[Connection], int]) -> list[Connection]:
    """Return as few connections as possible that together have `excess` bytes, the largest first."""
    chosen: list[Connection] = []
    for connection in sorted(connections, key=size, reverse=True):
        chosen.append(connection)
        excess -= size(connection)
        if excess <= 0:
            break
    return chosen


# --- deadlines -------------------------------------------------------------------------------------------------------
# Connections that are late: they send nothing, do not finish what they have begun, or read no replies.
#
# Clock       Counts only time in which producers could be heard: ingress sweeps when every connection that was ready has
#             had its turn and the framer takes everything. So neither backpressure nor a stopped ingress makes a producer
#             late.
# Cost        Nothing per message: a sweep looks at each connection once a second. It is never early, and at most two
#             seconds late.

SWEEP_S = 1.0
UNREAD = "reads no replies"
_ANYTHING = select.EPOLLIN | select.EPOLLOUT


class Deadlines:
    """KMQ_IDLE and KMQ_LINE_DEADLINE, in seconds; infinity: no deadline."""

    def __init__(self, idle: float, line: float) -> None:
        self.idle, self.line = idle, line
        self.due = time.monotonic() + SWEEP_S  # of the next sweep
        self._now = 0.0  # of the clock above

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
# Whether messages are accepted now: ingress measures disk and quota itself, and reads what durability waits for.


class Gate:
    """The refusal that holds for all producers; b"" while messages are accepted."""

    def __init__(self, stage: Stage) -> None:
        self.refusal = b""  # code and reason
        self._row, self._log = stage.row, stage.log
        durability = self._durability = stage.page.rows["durability"]
        self._admission = Admission(stage.settings, lambda: durability.bytes)

    def publish(self) -> None:
        """Write the sizes that the last looks found into the stats page."""
        admission, row = self._admission, self._row
        disk = admission.disk
        if disk is not None:
            row.disk_free, row.disk_size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
            row.inodes_free, row.inodes_total = disk.f_favail, disk.f_files
        row.quota_used, row.quota_limit = admission.used, admission.quota

    def look(self) -> bool:
        """Look again, and return True if the refusal has changed."""
        code = self._admission.refusal() or self._durability.admission_name
        refusal = refusals.reason(code).encode() if code else b""
        if refusal == self.refusal:
            return False
        self.refusal = refusal
        self._row.admission = ADMISSIONS.index(code)
        if code:
            self._log.warn("refusing", reason=code, effect="acknowledged producers are told, others wait")
        else:
            self._log.info("accepting_resumed")
        return True


# --- errs ------------------------------------------------------------------------------------------------------------
# How many `!err` replies ingress has sent or passed on, by class, in its row of the stats page.

_AUTH = (b"unauthorized",)
_LIMIT = (b"disk_full", b"quota", b"connections", b"producers_full", b"too_many_topics", b"busy")
_ORDER = (b"fenced", b"id_reused", b"id_too_old", b"drop_oldest", b"stopping")


class Errs:
    """The counts of one process. Without a row, nothing is counted."""

    def __init__(self, row: "Row | None" = None) -> None:
        self._row = row

    def count(self, refusal: bytes, n: int = 1) -> None:
        """Count `n` messages or connections that were refused. `refusal`: the code, perhaps with its text."""
        row, code = self._row, refusal.partition(b" ")[0]
        if row is None:
            return
        if code in _AUTH:
            row.errs_auth += n
        elif code in _LIMIT:
            row.errs_limit += n
        elif code in _ORDER:
            row.errs_order += n
        else:
            row.errs_format += n

    def count_reply(self, reply: bytes) -> None:
        """Count a reply of the framer: `!err <n> <code> <text>`."""
        self.count(reply.split(b" ", 2)[-1])
