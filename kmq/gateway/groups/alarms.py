"""When the next thing is due, over thousands of members: a heap that a sign of life does not touch.

Invariant   An alarm never rings later than it was set for; it rings at most once for each `set`.
Cost        `set` and a ring are O(log n). Whoever was postponed meanwhile (a member that beats) is found out when its
            alarm rings, and sets it anew: a member costs one ring in each of its timeouts, whatever it does.
Memory      At most two entries for each alarm that is set, and 64.
"""

from heapq import heapify, heappop, heappush

NEVER = float("inf")


class Alarms:
    """At most one alarm for each key: a group (name, ""), or a member (group, member)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[str, str]]] = []
        self._at: dict[tuple[str, str], float] = {}  # an entry of the heap that differs from this is void

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, key: tuple[str, str], at: float) -> None:
        """Ring for `key` at `at`, or earlier where an earlier alarm is set already."""
        if at >= self._at.get(key, NEVER):
            return
        self._at[key] = at
        heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, key) for key, at in self._at.items()]
            heapify(self._heap)

    def drop(self, key: tuple[str, str]) -> None:
        """Ring for `key` no more."""
        self._at.pop(key, None)

    def next(self) -> float:
        """Return when the next alarm rings; NEVER without one."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def pop(self, now: float) -> tuple[str, str] | None:
        """Return a key whose alarm rings at `now` or before; None if there is none."""
        if self.next() > now:
            return None
        _, key = heappop(self._heap)
        del self._at[key]
        return key
