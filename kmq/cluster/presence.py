"""The keys of a fleet, and the presence of a process in Consul: a check that needs heartbeats, a session, its locks.

Example: `Keys("dev").epoch` is `kmq/dev/epoch`. A Presence that misses its heartbeats loses `kmq/dev/coordinator`.

Invariant   A process without a heartbeat for `ttl_s` loses its session and all its locks. Another process gets them
            LOCK_DELAY_S later. Later requests under the old session change nothing, because every Txn of a publisher
            or subscriber begins with the check that its session holds the lock.
            A Txn made by `Lock.around` changes nothing if another process holds the lock when it is carried out.
Crash       A holder that is killed loses the lock with its session.
Not covered The check lives in the Consul agent that was asked. If that agent ends, the session ends too.
"""

import re
import time
import uuid
from collections.abc import Callable, Sequence

from kmq.cluster import consul
from kmq.cluster.consul import Conflict, ConsulError, KvEntry, KvOperation, Pause, Steps, Unanswered, check_session
from kmq.errors import BusyError, ConfigError

# --- keys ------------------------------------------------------------------------------------------------------------
# And the text format of most of their values.

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # of a cluster, of a broker
_EPOCH = re.compile(r"[0-9]{1,18}")  # 64 bits hold it
STATES = ("topics/", "tokens/", "settings/")  # keys that messages set, and that a snapshot holds


class Keys:
    """Every key is under `kmq/<cluster>/`."""

    def __init__(self, cluster: str) -> None:
        if not NAME.fullmatch(cluster):
            raise ConfigError(f"KMQ_CLUSTER={cluster!r}: must match {NAME.pattern}")
        self.root = f"kmq/{cluster}/"
        self.coordinator = self.root + "coordinator"  # the lock of the one publisher
        self.epoch = self.root + "epoch"  # of the last message
        self.messages = self.root + "bq/"  # with the slash: the other keys begin with bq- and are no messages
        self.delivered = self.root + "bq-delivered/"
        self.subscribers = self.root + "bq-subscriber/"
        self.brokers = self.root + "brokers/"
        self.results = self.root + "results/"
        self.replicas = self.root + "replicas/"

    def message(self, epoch: int) -> str:
        return f"{self.messages}{epoch}"

    def epoch_of(self, key: str) -> int | None:
        """Return the epoch of the message in a key under `messages`; None if it is not a key of KMQ."""
        number = key.removeprefix(self.messages)
        return int(number) if _EPOCH.fullmatch(number) else None

    def decode_epoch(self, value: bytes) -> int:
        """Return the epoch in a value of the key `epoch`. Raises ConsulError if KMQ did not write it."""
        text = value.decode(errors="replace")
        if not _EPOCH.fullmatch(text):
            raise ConsulError(f"key {self.epoch}: {text[:40]!r} is no epoch; KMQ did not write it")
        return int(text)

    def delivered_to(self, broker: str) -> str:
        """Return the key of this broker's mark: the last message that it has processed."""
        return self.delivered + broker

    def subscriber(self, broker: str) -> str:
        """Return the key that the one subscriber of this broker locks."""
        return self.subscribers + broker


def check_broker(name: str) -> str:
    """Return the name of a broker. Raises ConfigError if it is invalid."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"KMQ_BROKER={name!r}: must match {NAME.pattern}")
    return name


_FIELD = re.compile(r"([a-z_][a-z0-9_]*)=(\S*)")


def encode_fields(**fields: object) -> bytes:
    """Return `a=1 b=2`. Values must not hold white space; an empty one is left out."""
    return " ".join(f"{name}={value}" for name, value in fields.items() if value != "").encode()


def decode_fields(text: bytes) -> dict[str, str]:
    """Return the fields of such a text. Skip words that are not fields."""
    return dict(_FIELD.findall(text.decode(errors="replace")))


# --- presence --------------------------------------------------------------------------------------------------------

_SYNC_TRIES, _SYNC_S = 100, 0.05  # until Consul's servers know a check that was just registered at the agent


class SessionLost(ConsulError):
    """The session has ended: Consul took this process for dead, and the process has lost its locks."""


class Presence:
    """One session. Call `beat` at least every third of `ttl_s`."""

    def __init__(self, ttl_s: float, keeps_keys: bool = False) -> None:
        """`keeps_keys`: locked keys stay, unlocked, when the session ends. Else they are deleted."""
        self.ttl_s, self._keeps_keys = ttl_s, keeps_keys
        self.session = ""  # "": none
        self.last_beat = time.monotonic()  # send time of the last beat that was answered

    def open(self) -> Steps[None]:
        """Begin a session."""
        self._name, self.last_beat = f"kmq-{uuid.uuid4()}", time.monotonic()
        yield from consul.register(self._name, self.ttl_s)
        for left in reversed(range(_SYNC_TRIES)):
            try:
                self.session = yield from consul.create_session(self._name, self._keeps_keys)
                return
            except Unanswered as error:  # "Missing check …": the servers do not know the check yet
                if not left or "check" not in str(error):
                    raise
            yield Pause(_SYNC_S)
            yield from consul.beat(self._name)

    def beat(self) -> Steps[None]:
        """Send a heartbeat. Raises SessionLost if the session has ended, or the agent no longer knows our check."""
        sent = time.monotonic()
        try:
            yield from consul.beat(self._name)
        except ConsulError as error:
            if error.status in (404, 500):
                raise SessionLost(f"this Consul agent does not know the check of our session: {error}") from error
            raise
        yield from self.check_if_late()
        self.last_beat = sent  # Consul counts from the arrival of a beat, which is not before its sending

    def check_if_late(self) -> Steps[None]:
        """Call `check` if the last heartbeat was not in time."""
        if time.monotonic() - self.last_beat > self.ttl_s:
            yield from self.check()

    def check(self) -> Steps[None]:
        """Raise SessionLost if Consul does not have the session any more."""
        if not (yield from self.is_alive()):
            raise SessionLost("our session in Consul has ended")

    def is_alive(self) -> Steps[bool]:
        """Return whether Consul still has the session."""
        return (yield from consul.has_session(self.session))

    def close(self) -> Steps[None]:
        """End the session, and remove its check."""
        session, self.session = self.session, ""
        if session:
            yield from consul.destroy_session(session)
            yield from consul.deregister(self._name)

    def lock(self, key: str, value: bytes) -> Steps[KvEntry | None]:
        """Take a lock, or write a new value into a lock that we hold. Return None, or the entry of the present holder.

        An entry without session: the lock is free, but Consul delays it because its last session was lost. Raises
        SessionLost.
        """
        try:
            yield from consul.txn([KvOperation("lock", key, value, session=self.session)])
            return None
        except Conflict:
            return (yield from self.holder(key))

    def holder(self, key: str) -> Steps[KvEntry | None]:
        """Return the entry of the holder that keeps us from a lock, as `lock` does."""
        holder = yield from consul.read(key)
        if holder is not None and holder.session:
            return None if holder.session == self.session else holder
        yield from self.check()
        return KvEntry(key, b"", 0, "")

    def unlock(self, key: str) -> Steps[None]:
        """Give a lock back. Do nothing if we have lost it."""
        try:
            yield from consul.txn([KvOperation("unlock", key, session=self.session)])
        except Conflict:
            pass


def holder_of(entry: KvEntry) -> str:
    """Return the name that the holder of a lock gave itself."""
    return decode_fields(entry.value).get("holder", "") or f"session {entry.session}"


# --- lock ------------------------------------------------------------------------------------------------------------
# The publisher's: held for a while, or taken and given back within one Txn.

GUARDS = 2  # most operations that `around` adds; one of them is always the first of the Txn

_WATCH_S = 1.0  # longest watch of a lock that another process holds
_POLL_S = 0.1  # between two attempts while the lock is free but delayed
_RETRY_S = 0.05  # between two attempts while Consul does not answer


class Lock:
    """One lock, and whether we hold it. `who`: our name as holder, which others see."""

    def __init__(self, key: str, presence: Presence, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.key, self._presence, self._who, self._clock = key, presence, who, clock
        self.is_held = False

    @property
    def ttl_s(self) -> float:
        """How long a holder may be silent."""
        return self._presence.ttl_s

    def around(self, operations: Sequence[KvOperation]) -> list[KvOperation]:
        """Return a Txn that is refused at its first operation if another process has the lock."""
        session = self._presence.session
        if self.is_held:
            return [check_session(self.key, session), *operations]
        taken = KvOperation("lock", self.key, self._value(), session=session)
        return [taken, *operations, KvOperation("unlock", self.key, session=session)]

    def take(self, timeout_s: float) -> Steps[None]:
        """Take the lock, waiting at most so long. Raises BusyError that names the holder."""
        until = self._clock() + timeout_s
        while True:
            try:
                holder = yield from self._presence.lock(self.key, self._value())
            except Unanswered:  # Consul elects a leader; a lock may be taken twice without harm
                if self._clock() >= until:
                    raise
                yield Pause(_RETRY_S)
                continue
            if holder is None:
                self.is_held = True
                return
            yield from self._wait(holder, until)

    def wait(self, until: float) -> Steps[None]:
        """Wait until the lock may be free. Raises BusyError after `until`, and SessionLost."""
        holder = yield from self._presence.holder(self.key)
        if holder is not None:
            yield from self._wait(holder, until)

    def _wait(self, holder: KvEntry, until: float) -> Steps[None]:
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
