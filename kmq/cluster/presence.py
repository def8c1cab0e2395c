"""That a process is alive, as Consul sees it: a check that has to be beaten, a session that ends with it, its locks.

Invariant   A process that has not beaten for `ttl_s` loses its session and all its locks. Another process gets them
            after LOCK_DELAY_S more. What the first one still sends under that session changes nothing, because every
            Txn of a publisher or subscriber begins with the check that its session holds the lock.
Not covered The check lives in the agent that was asked. If that agent ends, the session ends too.
"""

import time
import uuid

from kmq.cluster import consul
from kmq.cluster.consul import Conflict, ConsulError, Entry, Operation, Pause, Steps, Unanswered
from kmq.cluster.keys import decode_fields

_SYNC_TRIES, _SYNC_S = 100, 0.05  # until Consul's servers know of a check that the agent has just been told of


class SessionLost(ConsulError):
    """The session has ended: this process was taken for dead, and holds no lock any more."""


class Presence:
    """One session. Call `beat` at least every third of `ttl_s`, from wherever there is time for it."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.session = ""  # "": none
        self._beaten = time.monotonic()  # when the last beat that was answered was sent

    def open(self) -> Steps[None]:
        """Begin a session."""
        self._name, self._beaten = f"kmq-{uuid.uuid4()}", time.monotonic()
        yield from consul.register(self._name, self.ttl_s)
        for left in reversed(range(_SYNC_TRIES)):
            try:
                self.session = yield from consul.create_session(self._name)
                return
            except Unanswered as error:  # "Missing check …": the servers do not know it yet
                if not left or "check" not in str(error):
                    raise
            yield Pause(_SYNC_S)
            yield from consul.beat(self._name)

    def beat(self) -> Steps[None]:
        """Stay alive. Raises SessionLost if the session has ended, or the agent does not know of us any more."""
        sent = time.monotonic()
        try:
            yield from consul.beat(self._name)
        except ConsulError as error:
            if error.status in (404, 500):
                raise SessionLost(f"this Consul agent does not know the check of our session: {error}") from error
            raise
        yield from self.check_if_late()
        self._beaten = sent  # Consul's clock begins when a beat arrives: not before it was sent

    def check_if_late(self) -> Steps[None]:
        """Look for the session, as `check` does, if we have not beaten in time."""
        if time.monotonic() - self._beaten > self.ttl_s:
            yield from self.check()

    def check(self) -> Steps[None]:
        """Raise SessionLost if Consul does not have the session any more."""
        if not (yield from self.is_alive()):
            raise SessionLost("our session in Consul has ended")

    def is_alive(self) -> Steps[bool]:
        """Return whether Consul still has the session."""
        return (yield from consul.has_session(self.session))

    def close(self) -> Steps[None]:
        """End the session, and take the check away."""
        session, self.session = self.session, ""
        if session:
            yield from consul.destroy_session(session)
            yield from consul.deregister(self._name)

    def lock(self, key: str, value: bytes) -> Steps[Entry | None]:
        """Take a lock, or write a new value into one that we hold. Returns None, or the entry of whoever holds it.

        An entry without session: nobody does, but the lock of a lost session is not given out again at once. Raises
        SessionLost.
        """
        try:
            yield from consul.txn([Operation("lock", key, value, session=self.session)])
            return None
        except Conflict:
            return (yield from self.holder(key))

    def holder(self, key: str) -> Steps[Entry | None]:
        """Return who kept us from a lock, as `lock` does."""
        holder = yield from consul.read(key)
        if holder is not None and holder.session:
            return None if holder.session == self.session else holder
        yield from self.check()
        return Entry(key, b"", 0, "")

    def unlock(self, key: str) -> Steps[None]:
        """Give a lock back; nothing happens if it is not ours any more."""
        try:
            yield from consul.txn([Operation("unlock", key, session=self.session)])
        except Conflict:
            pass


def holder_of(entry: Entry) -> str:
    """Return who holds a lock, as it has said itself."""
    return decode_fields(entry.value).get("holder", "") or f"session {entry.session}"
