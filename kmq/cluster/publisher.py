"""Publishing: each message gets the next epoch, in one Txn that only the holder of the lock `coordinator` can carry out.

Invariant   Epochs are dense, and each names one message for ever. A message is there if and only if `publish` has
            returned its epoch, or its publisher was killed, or was told that nobody knows.
            What a message says and the state keys that it changes are written together or not at all.
Crash       Killed before the Txn: nothing happened. Killed after it: the message is published, and nobody has been told.
            The answer was lost: the message's id under that epoch tells. The same Txn may still arrive later, but it
            cannot succeed once the epoch has changed, and until then a second one with the same message is the same.
            Deposed while the Txn was on its way: refused by the check of the session.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kmq.cluster import consul
from kmq.cluster.consul import Conflict, ConsulError, Operation, Pause, Steps, Unanswered, cas, check_session
from kmq.cluster.keys import Keys, encode_fields
from kmq.cluster.message import Message, check_size
from kmq.cluster.presence import Presence, holder_of
from kmq.cluster.trimming import trim
from kmq.errors import BusyError

_WATCH_S = 1.0  # while another publisher holds the lock: a watch of it ends at the latest after this time
_POLL_S = 0.1  # while nobody holds it, and it is not given out yet
_RETRY_S = 0.05  # between two questions after an unknown outcome
TRIM_EVERY = 16  # messages: so often what all have read is deleted


class Deposed(ConsulError):
    """Another publisher may have the lock: the message was not published."""


class StateChanged(ConsulError):
    """A state key was written by somebody else since it was read: decide anew. `key` names it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} has changed since it was read")
        self.key = key


class Change(NamedTuple):
    """A state key that a message changes; `version`: of the entry as it was read, 0: there was none."""

    key: str
    value: bytes
    version: int


class Publisher:
    """Takes the lock, publishes, gives it back."""

    def __init__(self, keys: Keys, presence: Presence, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._presence, self._who, self._clock = keys, presence, who, clock
        self._tried = 0  # the epoch of a Txn whose outcome is unknown

    def take(self, timeout_s: float) -> Steps[None]:
        """Take the lock, waiting at most so long. Raises BusyError that names who holds it."""
        key, until = self._keys.coordinator, self._clock() + timeout_s
        value = encode_fields(holder=self._who, since=f"{time.time():.6f}")
        while True:
            left = until - self._clock()
            try:
                holder = yield from self._presence.lock(key, value)
            except Unanswered:  # while Consul elects a leader; to take a lock twice is to take it once
                if left <= 0:
                    raise
                yield Pause(_RETRY_S)
                continue
            if holder is None:
                return
            if left <= 0:
                who = holder_of(holder) if holder.session else "nobody yet: its last holder died just now"
                raise BusyError(f"the lock {key} is held by {who}")
            if holder.session:
                yield from consul.watch(key, holder.version, min(left, _WATCH_S))
            else:
                yield Pause(min(left, _POLL_S))

    def give(self) -> Steps[None]:
        """Give the lock back."""
        yield from self._presence.unlock(self._keys.coordinator)

    def publish(self, message: Message, changes: Sequence[Change] = ()) -> Steps[int]:
        """Publish a message, and change these state keys with it. Returns its epoch. The lock must be held.

        Raises Unanswered if nobody knows whether it was published. After any other error it was not, and never will be:
        Deposed, StateChanged, ConfigError if the message is too long, and ConsulError for what Consul refuses.
        """
        check_size(message, {change.key: change.value for change in changes})
        self._tried = 0
        try:
            epoch = yield from self._until_known(message, changes)
        except (Deposed, StateChanged):
            raise
        except ConsulError as error:
            if self._tried:
                raise self._nobody_knows(message, str(error)) from error
            raise
        if epoch % TRIM_EVERY == 0:
            try:
                yield from trim(self._keys, self._presence.session)
            except ConsulError:
                pass  # the message is published; who publishes after us trims
        return epoch

    def _until_known(self, message: Message, changes: Sequence[Change]) -> Steps[int]:
        while True:
            found = yield from self._read_again(self._keys.epoch)
            last, version = (int(found.value), found.version) if found is not None else (0, 0)
            if (yield from self._is_published(message)):
                return self._tried
            try:
                yield from consul.txn(self._operations(message, changes, last + 1, version))
                return last + 1
            except Conflict as conflict:
                if (yield from self._is_published(message)):
                    return self._tried
                self._judge(conflict, changes)
            except Unanswered:
                self._tried = last + 1
                yield Pause(_RETRY_S)

    def _operations(self, message: Message, changes: Sequence[Change], epoch: int, version: int) -> list[Operation]:
        keys = self._keys
        return [
            check_session(keys.coordinator, self._presence.session),
            *(cas(change.key, change.value, change.version) for change in changes),
            cas(keys.epoch, b"%d" % epoch, version),
            Operation("set", keys.message(epoch), message.encode()),
        ]

    def _judge(self, conflict: Conflict, changes: Sequence[Change]) -> None:
        """Return if another message was first; otherwise raise what the conflict means."""
        if conflict.op_index == 0:
            raise Deposed(f"the lock {self._keys.coordinator} is not ours any more: {conflict}") from conflict
        if conflict.op_index <= len(changes):
            raise StateChanged(changes[conflict.op_index - 1].key) from conflict
        if conflict.op_index > len(changes) + 1:
            raise conflict

    def _is_published(self, message: Message) -> Steps[bool]:
        """Return True if this message lies under the epoch that was tried. Raises Unanswered if that was trimmed."""
        if not self._tried:
            return False
        epoch = yield from self._read_again(self._keys.epoch)
        last = int(epoch.value) if epoch is not None else 0
        if last < self._tried - 1:
            raise self._nobody_knows(message, "Consul was restored from an older backup meanwhile")
        if last < self._tried:
            return False
        found = yield from self._read_again(self._keys.message(self._tried))
        if found is None:
            raise self._nobody_knows(message, "it may have been deleted again")
        return Message.decode(found.value, self._tried).id == message.id

    def _nobody_knows(self, message: Message, why: str) -> Unanswered:
        return Unanswered(f"nobody knows whether message {message.id} was published as epoch {self._tried}: {why}")

    def _read_again(self, key: str) -> Steps[consul.Entry | None]:
        """Read until there is an answer. The lock's session bounds how long that makes sense."""
        until = self._clock() + 10 * self._presence.ttl_s
        while True:
            try:
                return (yield from consul.read(key))
            except Unanswered:
                if self._clock() > until:
                    raise
            yield Pause(_RETRY_S)
