"""The publisher's lock: held for a while, or taken and given back within one Txn.

Invariant   What `around` returns changes nothing unless nobody else holds the lock when it is carried out.
Crash       A holder that is killed loses the lock with its session (presence.py).
"""

import time
from collections.abc import Callable, Sequence

from kmq.cluster import consul
from kmq.cluster.consul import Entry, Operation, Pause, Steps, Unanswered, check_session
from kmq.cluster.keys import encode_fields
from kmq.cluster.presence import Presence, holder_of
from kmq.errors import BusyError

GUARDS = 2  # operations that `around` adds at most; the first of them is the first of all

_WATCH_S = 1.0  # while another holds the lock: a watch of it ends at the latest after this time
_POLL_S = 0.1  # while nobody holds it, and it is not given out yet
_RETRY_S = 0.05  # between two questions while there is no answer


class Lock:
    """One lock, and whether we hold it. `who`: what others are told of its holder."""

    def __init__(self, key: str, presence: Presence, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.key, self._presence, self._who, self._clock = key, presence, who, clock
        self.is_held = False

    @property
    def ttl_s(self) -> float:
        """How long a holder may be silent."""
        return self._presence.ttl_s

    def around(self, operations: Sequence[Operation]) -> list[Operation]:
        """Return a Txn that is refused at its first operation if another has the lock."""
        session = self._presence.session
        if self.is_held:
            return [check_session(self.key, session), *operations]
        taken = Operation("lock", self.key, self._value(), session=session)
        return [taken, *operations, Operation("unlock", self.key, session=session)]

    def take(self, timeout_s: float) -> Steps[None]:
        """Take the lock, waiting at most so long. Raises BusyError that names who holds it."""
        until = self._clock() + timeout_s
        while True:
            try:
                holder = yield from self._presence.lock(self.key, self._value())
            except Unanswered:  # while Consul elects a leader; to take a lock twice is to take it once
                if self._clock() >= until:
                    raise
                yield Pause(_RETRY_S)
                continue
            if holder is None:
                self.is_held = True
                return
            yield from self._wait(holder, until)

    def wait(self, until: float) -> Steps[None]:
        """Return when another may have given the lock back. Raises BusyError after `until`, and SessionLost."""
        holder = yield from self._presence.holder(self.key)
        if holder is not None:
            yield from self._wait(holder, until)

    def _wait(self, holder: Entry, until: float) -> Steps[None]:
        left = until - self._clock()
        if left <= 0:
            who = holder_of(holder) if holder.session else "nobody yet: its last holder died just now"
            raise BusyError(f"the lock {self.key} is held by {who}")
        if holder.session:
            yield from consul.watch(self.key, holder.version, min(left, _WATCH_S))
        else:
            yield Pause(min(left, _POLL_S))

    def give(self) -> Steps[None]:
        """Give the lock back."""
        self.is_held = False
        yield from self._presence.unlock(self.key)

    def _value(self) -> bytes:
        return encode_fields(holder=self._who, since=f"{time.time():.6f}")
