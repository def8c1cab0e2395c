"""Publishing: each message gets the next epoch, in one Txn that is refused while another publisher has the lock.

Invariant   Epochs are dense, and each names one message for ever. A message is there if and only if `publish` has
            returned its epoch, or its publisher was killed, or was told that nobody knows.
            What a message says and the state keys that it changes are written together or not at all.
Crash       Killed before the Txn: nothing happened. Killed after it: the message is published, and nobody has been told.
            The answer was lost: the message's id under that epoch tells. The same Txn may still arrive later, but it
            cannot succeed once the epoch has changed, and until then a second one with the same message is the same.
            Consul was restored before that was asked: nobody knows, because the same id under the same epoch must not
            stand for two histories.
            Deposed while the Txn was on its way: refused by the check of the session.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kmq.cluster import consul
from kmq.cluster.consul import Conflict, ConsulError, Operation, Pause, Steps, Unanswered, cas
from kmq.cluster.keys import Keys
from kmq.cluster.lock import Lock
from kmq.cluster.message import Message, check_size
from kmq.cluster.trimming import trim
from kmq.errors import BusyError

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
    """Publishes, under a lock that is held (`lock.take`) or else is taken and given back with each message."""

    def __init__(self, keys: Keys, lock: Lock, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = lock
        self._keys, self._clock = keys, clock
        self._tried = 0  # the epoch of a Txn whose outcome is unknown
        self._before = 0  # the version that the epoch's key had then
        self._last: tuple[int, int] | None = None  # epoch and version of its key after our last message

    def publish(self, message: Message, changes: Sequence[Change] = (), timeout_s: float = 0.0) -> Steps[int]:
        """Publish a message, and change these state keys with it. Returns its epoch.

        While another publisher holds the lock it waits, at most `timeout_s`. Raises Unanswered if nobody knows whether
        the message was published. After any other error it was not, and never will be: BusyError that names who holds
        the lock, Deposed if we held it, StateChanged, ConfigError if the message is too long, and ConsulError for what
        Consul refuses.
        """
        check_size(message, {change.key: change.value for change in changes})
        self._tried = 0
        try:
            epoch = yield from self._until_known(message, changes, self._clock() + timeout_s)
        except (Deposed, StateChanged):
            raise
        except (ConsulError, BusyError) as error:
            if self._tried:
                raise self._nobody_knows(message, str(error)) from error
            raise
        if epoch % TRIM_EVERY == 0:
            try:
                yield from trim(self._keys, self.lock)
            except ConsulError:
                pass  # the message is published; who publishes after us trims
        return epoch

    def _until_known(self, message: Message, changes: Sequence[Change], until: float) -> Steps[int]:
        while True:
            last, version = self._last or (yield from self._read_epoch())
            self._last = None
            if (yield from self._is_published(message)):
                return self._tried
            try:
                written = yield from consul.txn(self._operations(message, changes, last + 1, version))
                self._last = last + 1, next(entry.version for entry in written if entry.key == self._keys.epoch)
                return last + 1
            except Conflict as conflict:
                if (yield from self._is_published(message)):
                    return self._tried
                self._judge(conflict, changes)
                if conflict.op_index == 0:
                    yield from self.lock.wait(until)
            except Unanswered:
                self._tried, self._before = last + 1, version
                yield Pause(_RETRY_S)

    def _read_epoch(self) -> Steps[tuple[int, int]]:
        found = yield from self._read_again(self._keys.epoch)
        return (self._keys.decode_epoch(found.value), found.version) if found is not None else (0, 0)

    def _operations(self, message: Message, changes: Sequence[Change], epoch: int, version: int) -> list[Operation]:
        return self.lock.around(
            [
                *(cas(change.key, change.value, change.version) for change in changes),
                cas(self._keys.epoch, b"%d" % epoch, version),
                Operation("set", self._keys.message(epoch), message.encode()),
            ]
        )

    def _judge(self, conflict: Conflict, changes: Sequence[Change]) -> None:
        """Return if another message was first, or the lock is to be waited for; else raise what the conflict means."""
        if conflict.op_index == 0:
            if self.lock.is_held:
                raise Deposed(f"the lock {self.lock.key} is not ours any more: {conflict}") from conflict
        elif conflict.op_index <= len(changes):
            raise StateChanged(changes[conflict.op_index - 1].key) from conflict
        elif conflict.op_index > len(changes) + 1:
            raise conflict

    def _is_published(self, message: Message) -> Steps[bool]:
        """Return True if this message lies under the epoch that was tried. Raises Unanswered if that was trimmed."""
        if not self._tried:
            return False
        last, version = yield from self._read_epoch()
        if last < self._tried and version != self._before:
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
        until = self._clock() + 10 * self.lock.ttl_s
        while True:
            try:
                return (yield from consul.read(key))
            except Unanswered:
                if self._clock() > until:
                    raise
            yield Pause(_RETRY_S)
