"""Connections that keep us waiting: those that send nothing, do not finish what they have begun, or read no replies.

Clock       Counts only time in which producers could be heard: ingress sweeps when all that was ready has had its turn and the
            FIFO takes everything. So neither backpressure nor a stopped ingress makes a producer late.
Cost        Nothing per message: a sweep looks at each connection, once a second. It is never early, and up to two seconds late.
"""

import select
import time
from collections.abc import Iterable

from kmq.ingress.intake import Connection

SWEEP_S = 1.0
UNREAD = "reads no replies"
_ANYTHING = select.EPOLLIN | select.EPOLLOUT


class Deadlines:
    """KMQ_IDLE and KMQ_LINE_DEADLINE, in seconds; infinity for never."""

    def __init__(self, idle: float, line: float) -> None:
        self.idle, self.line = idle, line
        self.due = time.monotonic() + SWEEP_S  # of the next sweep
        self._now = 0.0  # of the clock above

    def late(self, connections: Iterable[Connection]) -> dict[Connection, str]:
        """Those whose time is over, and why. Call when `due`."""
        self.due = time.monotonic() + SWEEP_S
        self._now += SWEEP_S
        now, idle, line = self._now, self.idle, self.line
        found: dict[Connection, str] = {}
        for connection in connections:
            awaited = connection.awaited
            if connection.heard or connection.answered < connection.passed or not awaited & _ANYTHING:
                connection.heard, connection.quiet_since = False, now
            elif now - connection.quiet_since >= idle:
                found[connection] = "idle"
                continue
            elif connection.unsaid and now - connection.quiet_since >= line:
                found[connection] = UNREAD
                continue
            if not connection.is_unfinished:
                connection.unfinished_since = 0.0
            elif not connection.unfinished_since or not awaited & select.EPOLLIN:
                connection.unfinished_since = now
            elif now - connection.unfinished_since >= line:
                found[connection] = "unfinished"
        return found
