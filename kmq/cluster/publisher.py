"""Publishing: each message gets the next epoch, in one Txn that is refused while another publisher has the lock.

Example: if `kmq/dev/epoch` is 41, `publish(Message.new("greeting", b"hello"))` sets it to 42, writes the message to
`kmq/dev/bq/42` and returns 42.

Invariant   Epochs are dense, and each names one message for ever. A message whose epoch `publish` has returned is
            published. After Unanswered, or if the publisher was killed, it may be. After other errors it is not.
            A message and the state keys that it changes are written together or not at all.
            A message that a registered broker has not processed is never deleted, except in two cases. The broker has
            been away for ABSENT_S; or it has marked a message that a restored Consul has lost. It notices, and gets a
            snapshot. The last message that all have processed is never deleted, because by its id a broker checks
            that the messages are still the ones it knows (a restored Consul may have others).
            The mark of a broker that has been away for GONE_S is deleted, unless it marks meanwhile. If that broker
            returns, it is new and gets a snapshot first.
Crash       Killed before the Txn: nothing happened. Killed after it: the message is published, and no caller knows it.
            The answer was lost: the id of the message under that epoch shows whether it was published. The same Txn may
            still arrive later. It cannot succeed once the epoch has changed, and before that it does the same as a
            second Txn with the same message.
            Consul was restored before the id was read: the outcome is unknown, because the same id under the same epoch
            must not stand for two histories.
            Deposed while the Txn was on its way: refused by the check of the session.
Memory      Every watch brings all messages. So of the messages that all brokers have read only KEPT messages and
            KEPT_BYTES stay: for people to look at, and for subscribers that read again.
"""

import math
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kmq.cluster import consul
from kmq.cluster.consul import (
    MAX_OPERATIONS,
    Conflict,
    ConsulError,
    KvEntry,
    KvOperation,
    Pause,
    Steps,
    Unanswered,
    cas,
)
from kmq.cluster.presence import GUARDS, Keys, Lock, decode_fields, encode_fields
from kmq.config.values import KIB
from kmq.errors import BusyError, ConfigError

# --- message ---------------------------------------------------------------------------------------------------------
# Under `bq/<epoch>`: one header line, then the payload as it is.
#
#     id=<32 hex digits> type=<type> ts=<seconds> [expires=<seconds>]
#
# Times are seconds since the epoch of Unix, with six decimals.

MAX_BYTES = 380_000  # with the header and the changed state keys; as base64 that fits into a Txn
TYPE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")

SNAPSHOT = "snapshot"  # shown as the type of a snapshot; no message has this type


class Message(NamedTuple):
    """A message, as every subscriber gets it. `epoch` is 0 until it is published."""

    type: str
    payload: bytes
    id: str
    ts: float
    expires: float = 0.0  # a command is not carried out later; 0: it never expires
    epoch: int = 0

    @classmethod
    def new(cls, type: str, payload: bytes, lasts_s: float = 0.0) -> "Message":
        """Return a message made now. Raises ConfigError if the type is invalid."""
        if not TYPE.fullmatch(type):
            raise ConfigError(f"type {type!r}: must match {TYPE.pattern}")
        if type == SNAPSHOT:
            raise ConfigError(f"type {type!r}: is kept for snapshots; choose another name")
        now = round(time.time(), 6)
        return cls(type, payload, uuid.uuid4().hex, now, now + lasts_s if lasts_s else 0.0)

    def encode(self) -> bytes:
        """Return the value of its key."""
        expires = f"{self.expires:.6f}" if self.expires else ""
        return encode_fields(id=self.id, type=self.type, ts=f"{self.ts:.6f}", expires=expires) + b"\n" + self.payload

    @classmethod
    def decode(cls, value: bytes, epoch: int) -> "Message":
        """Return the message in the value of a key. Raises ValueError that names the epoch if it is not a message."""
        header, newline, payload = value.partition(b"\n")
        fields = decode_fields(header)
        try:
            if not newline:
                raise ValueError("no header line")
            return cls(
                fields["type"], payload, fields["id"], float(fields["ts"]), float(fields.get("expires", 0)), epoch
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"message {epoch} of the Broadcast Queue: {error!r}; KMQ did not write it") from None


def check_size(message: Message, states: dict[str, bytes]) -> None:
    """Raise ConfigError if this message is too long to be published together with these state keys."""
    size, others = len(message.encode()), sum(len(key) + len(value) for key, value in states.items())
    if size + others > MAX_BYTES:
        beside = f" and {others:,} of the states that it changes" if others else ""
        raise ConfigError(
            f"message of type {message.type}: {size:,} bytes with its header{beside}; at most {MAX_BYTES:,}"
        )


# --- trimming --------------------------------------------------------------------------------------------------------
# Deletes the messages that every subscriber has read, except the last few.

KEPT = 100
KEPT_BYTES = 256 * KIB
ABSENT_S = 86_400.0
GONE_S = 30 * 86_400.0


class Mark(NamedTuple):
    """Mark of a broker: the epoch and id of the last message that it has processed, and when it marked (seconds)."""

    epoch: int
    id: str
    ts: float

    def encode(self) -> bytes:
        return encode_fields(epoch=self.epoch, id=self.id, ts=f"{self.ts:.6f}")

    @classmethod
    def decode(cls, value: bytes) -> "Mark":
        """Return the mark; NO_MARK if the text is not a valid mark."""
        fields = decode_fields(value)
        try:
            epoch, ts = int(fields["epoch"]), float(fields["ts"])
        except (KeyError, ValueError):
            return NO_MARK
        return cls(epoch, fields.get("id", ""), ts) if 0 <= epoch < 10**18 and math.isfinite(ts) else NO_MARK


NO_MARK = Mark(0, "", 0.0)


def slowest(keys: Keys, now: float) -> Steps[tuple[int | None, list[KvEntry]]]:
    """Return the last message that all registered brokers have processed, and the marks of brokers that are gone.

    None if there are no brokers. A mark with a time far in the future counts as old, too: its clock was wrong.
    """
    marks = yield from consul.watch(keys.delivered, 0, 0)
    present = yield from consul.watch(keys.subscribers, 0, 0)
    here = {entry.key.removeprefix(keys.subscribers) for entry in present.entries if entry.session}
    epochs, gone = [], []
    for entry in marks.entries:
        mark = Mark.decode(entry.value)
        if entry.key.removeprefix(keys.delivered) in here or abs(now - mark.ts) < ABSENT_S:
            epochs.append(mark.epoch)
        elif abs(now - mark.ts) > GONE_S:
            gone.append(entry)
    return min(epochs, default=None), gone


def superfluous(sizes: dict[int, int], read_by_all: int) -> list[int]:
    """Return which of these messages may be deleted, given their sizes in bytes; the oldest first."""
    read = sorted(epoch for epoch in sizes if epoch <= read_by_all)
    kept_bytes = 0
    for count, epoch in enumerate(reversed(read)):
        kept_bytes += sizes[epoch]
        if count and (count == KEPT or kept_bytes > KEPT_BYTES):
            return read[: len(read) - count]
    return []


def trim(keys: Keys, lock: Lock) -> Steps[None]:
    """Delete messages and marks that are not needed any more. `lock`: the publisher's.

    Once the epoch has been written again, delete nothing more and raise Conflict: the marks that were read may be from
    before a restore of Consul. The next publisher trims.
    """
    last = yield from consul.read(keys.epoch)
    if last is None:
        return
    newest = keys.decode_epoch(last.value)  # a key above it is not a message of KMQ
    guard = KvOperation("check-index", keys.epoch, version=last.version)
    read_by_all, left = yield from slowest(keys, time.time())
    there = (yield from consul.watch(keys.messages, 0, 0)).entries
    epochs = {entry.key: keys.epoch_of(entry.key) for entry in there}
    sizes = {epoch: len(entry.value) for entry in there if (epoch := epochs[entry.key]) is not None and epoch <= newest}
    if not sizes:
        return
    gone = superfluous(sizes, max(sizes) if read_by_all is None else read_by_all)
    deletions = [KvOperation("delete", keys.message(epoch)) for epoch in gone]
    deletions += [KvOperation("delete-cas", entry.key, version=entry.version) for entry in left]
    room = MAX_OPERATIONS - GUARDS - 1
    for at in range(0, len(deletions), room):
        yield from consul.txn(lock.around([guard, *deletions[at : at + room]]))


# --- publisher -------------------------------------------------------------------------------------------------------

_RETRY_S = 0.05  # between two reads after an unknown outcome
TRIM_EVERY = 16  # messages from one trimming to the next


class Deposed(ConsulError):
    """Another publisher may have the lock: the message was not published."""


class StateChanged(ConsulError):
    """Another publisher has written the state key `key` since it was read. Compute the new value again."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} has changed since it was read")
        self.key = key


class KeyChange(NamedTuple):
    """A state key that a message changes. `version`: of the entry when it was read; 0: there was no entry."""

    key: str
    value: bytes
    version: int


class Publisher:
    """Publishes under a lock that is held (`lock.take`), or else taken and given back with each message."""

    def __init__(self, keys: Keys, lock: Lock, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = lock
        self._keys, self._clock = keys, clock
        self._tried = 0  # the epoch of a Txn whose outcome is unknown
        self._before = 0  # the version that the epoch's key had then
        self._last: tuple[int, int] | None = None  # epoch and version of its key after our last message

    def publish(self, message: Message, changes: Sequence[KeyChange] = (), timeout_s: float = 0.0) -> Steps[int]:
        """Publish a message, and change these state keys with it. Return its epoch.

        While another publisher holds the lock, wait at most `timeout_s`. Raises Unanswered if it is unknown whether the
        message was published. After any other error it was not, and never will be: BusyError names the holder of the
        lock; Deposed: we have lost the lock; StateChanged; ConfigError: the message is too long; ConsulError: Consul
        refused.
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
                pass  # the message is published; the next publisher trims
        return epoch

    def _until_known(self, message: Message, changes: Sequence[KeyChange], until: float) -> Steps[int]:
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

    def _operations(
        self, message: Message, changes: Sequence[KeyChange], epoch: int, version: int
    ) -> list[KvOperation]:
        return self.lock.around(
            [
                *(cas(change.key, change.value, change.version) for change in changes),
                cas(self._keys.epoch, b"%d" % epoch, version),
                KvOperation("set", self._keys.message(epoch), message.encode()),
            ]
        )

    def _judge(self, conflict: Conflict, changes: Sequence[KeyChange]) -> None:
        """Return if another message was first, or if the lock is taken; else raise what the conflict means."""
        if conflict.op_index == 0:
            if self.lock.is_held:
                raise Deposed(f"the lock {self.lock.key} is not ours any more: {conflict}") from conflict
        elif conflict.op_index <= len(changes):
            raise StateChanged(changes[conflict.op_index - 1].key) from conflict
        elif conflict.op_index > len(changes) + 1:
            raise conflict

    def _is_published(self, message: Message) -> Steps[bool]:
        """Return True if this message is under the epoch that was tried. Raises Unanswered if that was trimmed."""
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

    def _read_again(self, key: str) -> Steps[consul.KvEntry | None]:
        """Read until there is an answer, for at most ten times `ttl_s` of the lock."""
        until = self._clock() + 10 * self.lock.ttl_s
        while True:
            try:
                return (yield from consul.read(key))
            except Unanswered:
                if self._clock() > until:
                    raise
            yield Pause(_RETRY_S)
