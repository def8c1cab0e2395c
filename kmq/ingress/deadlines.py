"""Connections that are late: they send nothing, do not finish what they have begun, or read no replies.

Clock       Counts only time in which producers could be heard: ingress sweeps when every connection that was ready has
            had its turn and the framer takes everything. So neither backpressure nor a stopped ingress makes a producer
            late.
Cost        Nothing per message: a sweep looks at each connection once a second. It is never early, and at most two
            seconds late.
"""

import select
import time
from collections.abc import Iterable

from kmq.ingress.connection import Connection

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
