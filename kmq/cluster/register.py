"""The register of a shard: one text in Consul that names the leader, and the replicas that may be elected next.

    lineage=<hex> level=2 brokers=a,b,c min_insync=2
    epoch=8 leader=<replica id> isr=<replica id>,<replica id>
    marks=1:9f3c… 2:77ab… … 31:0c1d…

Epoch       rises with every election. In an epoch only its leader numbers messages.
Version     rises with every write. It is a number and a random mark. A register that was restored from a backup of
            Consul continues from an old number; the mark tells the two histories apart.
Invariant   A write keeps all marks of the version that it replaces and adds one. So a register descends from another
            register exactly if it holds the other's version.
            A write never makes the ISR smaller than `min_insync`. If the ISR begins smaller (init, recovery), it never
            shrinks.
Level       Which records brokers may ask for. Level 2 also allows records of new start offsets (log/topic_changes.py).
            The leader raises the level once every broker is present and knows the next level. The level never falls. So
            an older release cannot return and skip records that it does not know: it cannot read the register.
Hold        While the register has no leader, no election happens. An operator writes it so (kmq cluster recover), and
            later names the leader. The ISR stays the last known one.
Strict      Every text that KMQ writes has exactly one form. `decode` refuses any other text, so no unknown field is
            ever ignored.
Memory      At most MARKS versions, about 25 KB.
"""

import re
import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kmq.cluster.consul import ConsulError
from kmq.cluster.presence import NAME
from kmq.errors import ConfigError
from kmq.message.routing import LEVEL

MARKS = 1000  # versions that are kept; a replica with an older version counts as new
SIZES = (1, 3, 5)  # brokers of a shard

_MARK = "[0-9a-f]{16}"
_VERSION = re.compile(rf"(0|[1-9][0-9]{{0,17}}):({_MARK})")
_REPLICA = re.compile(_MARK)
_TEXT = re.compile(
    r"lineage=([0-9a-f]{32}) level=([1-9][0-9]{0,8}) brokers=([^ \n]+) min_insync=([0-9]{1,3})\n"
    r"epoch=([1-9][0-9]{0,17}) leader=([^ \n]*) isr=([^ \n]*)\n"
    r"marks=([^\n]+)\n",
    re.ASCII,
)
_LEVEL = re.compile(rb"lineage=[0-9a-f]{32} level=([0-9]{1,9}) ")


class UnreadableRegister(ConsulError):
    """KMQ did not write this register, or a later release did. It is not used."""


class Version(NamedTuple):
    """One write of the register."""

    number: int
    mark: str

    def __str__(self) -> str:
        return f"{self.number}:{self.mark}"

    @classmethod
    def parse(cls, text: str) -> "Version | None":
        """Return the version that a text names; None for any other text."""
        match = _VERSION.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None


def new_mark() -> str:
    """Return a random mark of 64 bits, for a version, a start, or the id of a replica."""
    return secrets.token_hex(8)


class Register(NamedTuple):
    """Content of the register. `leader`: "" while an operator holds the shard; `marks`: the oldest first."""

    lineage: str
    brokers: tuple[str, ...]
    min_insync: int
    epoch: int
    leader: str
    isr: tuple[str, ...]
    marks: tuple[Version, ...]
    level: int = LEVEL

    @property
    def version(self) -> Version:
        return self.marks[-1]

    @property
    def least(self) -> int:
        """The smallest size to which a write may shrink the ISR."""
        return min(self.min_insync, len(self.isr))

    def descends_from(self, version: Version) -> bool:
        """Return True if this register has this version, or descends from the register with it."""
        return version in self.marks

    def encode(self) -> bytes:
        """Return the text."""
        return (
            f"lineage={self.lineage} level={self.level} brokers={','.join(self.brokers)} min_insync={self.min_insync}\n"
            f"epoch={self.epoch} leader={self.leader} isr={','.join(self.isr)}\n"
            f"marks={' '.join(map(str, self.marks))}\n"
        ).encode()

    # --- writes ------------------------------------------------------------------------------------------------------

    def with_isr(self, isr: Sequence[str]) -> "Register":
        """Return the register after a change of the ISR by its leader."""
        if self.leader not in isr or len(isr) < self.least:
            raise ValueError(f"isr={','.join(isr)}: must hold the leader and at least {self.least} replicas")
        return self._written(isr=tuple(sorted(isr)))

    def elect(self, leader: str, alive: Collection[str]) -> "Register":
        """Return the register after an election. Members that are not alive leave the ISR, as far as `least` allows."""
        if leader not in self.isr:
            raise ValueError(f"leader={leader}: must be of the ISR {','.join(self.isr)}")
        living = [member for member in self.isr if member in alive or member == leader]
        others = [member for member in self.isr if member not in living]
        isr = [*living, *others[: max(0, self.least - len(living))]]
        return self._written(epoch=self.epoch + 1, leader=leader, isr=tuple(sorted(isr)))

    def raised(self, level: int) -> "Register":
        """Return the register with this level, which every broker knows."""
        if level <= self.level:
            raise ValueError(f"level={level}: must be more than {self.level}, because it is never lowered")
        return self._written(level=level)

    def hold(self) -> "Register":
        """Return the register without a leader, as an operator writes it."""
        return self._written(epoch=self.epoch + 1, leader="")

    def end_hold(self, leader: str) -> "Register":
        """Return the register with a leader chosen by an operator, alone in the ISR."""
        if self.leader:
            raise ValueError(f"leader={self.leader}: the register is no hold")
        return self._written(epoch=self.epoch + 1, leader=leader, isr=(leader,))

    def _written(self, **changes: object) -> "Register":
        version = Version(self.version.number + 1, new_mark())
        return self._replace(marks=(*self.marks, version)[-MARKS:], **changes)  # type: ignore[arg-type]


def begin(
    lineage: str, brokers: Sequence[str], min_insync: int | None, leader: str, epoch: int = 1, level: int = LEVEL
) -> Register:
    """Return the first register of a shard: `leader` is alone in the ISR. Raises ConfigError that names the limit."""
    brokers = tuple(brokers)
    least = check_size(brokers, min_insync)
    return Register(lineage, brokers, least, epoch, leader, (leader,), (Version(1, new_mark()),), level)


def check_size(brokers: Sequence[str], min_insync: int | None) -> int:
    """Return min_insync; without one, a majority of the brokers. Raises ConfigError that names the limit."""
    text, count = ",".join(brokers), len(brokers)
    wrong = next((name for name in brokers if not NAME.fullmatch(name)), None)
    if wrong is not None:
        raise ConfigError(f"--brokers {text}: {wrong!r} must match {NAME.pattern}")
    if len(set(brokers)) < count:
        raise ConfigError(f"--brokers {text}: names a broker twice")
    if count not in SIZES:
        why = {2: "; with 2, one that fails stops the shard", 4: "; with 4, no more may fail than with 3"}.get(
            count, ""
        )
        raise ConfigError(f"--brokers {text}: a shard has 1, 3 or 5 brokers, not {count}{why}")
    majority = count // 2 + 1
    if min_insync is not None and not majority <= min_insync <= count:
        why = "two halves could commit apart" if min_insync < majority else "that many there never are"
        raise ConfigError(f"--min-insync {min_insync}: must be between {majority} and {count} of {count}; {why}")
    return min_insync if min_insync is not None else majority


def decode(text: bytes, key: str) -> Register:
    """Return the register that `key` holds. Raises UnreadableRegister that names the key and the first 40 bytes."""
    level = _LEVEL.match(text)
    if level is not None and int(level[1]) > LEVEL:
        raise UnreadableRegister(
            f"key {key}: {text[:40]!r} has level {int(level[1])}; this release understands {LEVEL}: install a later one"
        )
    found = _parse(text)
    if found is None or found.encode() != text:
        raise UnreadableRegister(f"key {key}: {text[:40]!r} is no register of a shard; KMQ did not write it")
    return found


def _parse(text: bytes) -> Register | None:
    """Return the register of a text with the right fields; None for any other text. The caller compares the form."""
    match = _TEXT.fullmatch(text.decode("latin-1"))
    if match is None:
        return None
    lineage, level, names, min_insync, epoch, leader, members, versions = match.groups()
    marks = [Version.parse(part) for part in versions.split(" ")]
    brokers, isr = tuple(names.split(",")), tuple(members.split(",")) if members else ()
    if not all(map(NAME.fullmatch, brokers)) or not all(map(_REPLICA.fullmatch, isr)) or [*isr] != sorted({*isr}):
        return None
    try:
        check_size(brokers, int(min_insync))
    except ConfigError:
        return None
    valid = tuple(mark for mark in marks if mark is not None)
    numbers = [mark.number for mark in valid]
    is_dense = numbers == [*range(numbers[0], numbers[0] + len(marks))] if numbers else False
    if not is_dense or not numbers[0] or len(marks) > MARKS or not isr or (leader and leader not in isr):
        return None
    return Register(lineage, brokers, int(min_insync), int(epoch), leader, isr, valid, int(level))
