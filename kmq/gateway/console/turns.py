"""Turns that the broker takes, as events: processes that start, stop and come back, logs that roll.

Readiness and warnings are not here: the gateway follows them for its log, and tells both.
"""

from kmq.broker.stats import PROCESSES, StatsPage
from kmq.gateway.console.events import Events
from kmq.log import reader


class Turns:
    """What was seen last, for comparison."""

    def __init__(self, data: str, events: Events) -> None:
        self._data, self._events = data, events
        self._starts: dict[str, int] = {}
        self._states: dict[str, str] = {}
        self._segment: int | None = None

    def follow(self, page: StatsPage) -> None:
        """Note what has changed on the page. The first call only looks."""
        for name in PROCESSES:
            row = page.rows[name]
            starts, state = row.starts, row.state_name
            known = self._starts.get(name)
            before = self._states.get(name, state)
            if known is not None and starts > known and starts > 1:
                self._events.add("restarted", name, f"{name} was started again; {starts - 1} times since kmq up")
            elif known is not None and starts != known and starts:
                self._events.add("started", name, f"{name} was started, pid {row.pid}")
            if state == "stopped" != before:
                self._events.add("stopped", name, f"{name} has ended in order")
            self._starts[name], self._states[name] = starts, state

    def follow_files(self) -> None:
        """Note that the WAL has begun a new segment."""
        segments = reader.wal(self._data).segments()
        newest = segments[-1][0] if segments else None
        if self._segment is not None and newest is not None and newest != self._segment:
            self._events.add("rolled", "append.log", f"the WAL has begun a new segment at seq {newest}")
        self._segment = newest
