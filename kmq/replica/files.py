"""Replica files: what a replica keeps on its disk about itself: its identity, and the last register it has promised.

    replica    `<replica id> shard=<name> starts=<mark>,<mark>… coming=<mark> crc32=…`
    register   `replica=<replica id>`, the text of a register, `crc32=…`: the promise of this replica

Owner       The process `replica` of this directory, which holds the lock of pipes/replica.owner.
Invariant   A promise is on disk before anything is sent under its version. It never goes back: `promise` refuses a
            register that does not descend from the one before.
            A promise of another replica id does not count. So a directory that takes a new id loses its promise at the
            same instant, whenever it is killed.
Crash       Each file is replaced atomically and synced.
            `coming` is the mark of a start that may have reached Consul. The next start uses the same mark.
Damage      A flipped bit ends the process with 65: without these files it is unknown what this replica has promised.
"""

import re
import zlib
from typing import NamedTuple

from kmq.cluster.register import Register, UnreadableRegister, decode, new_mark
from kmq.errors import ConfigError, CorruptError
from kmq.files import replace_file

STARTS = 1000  # most marks of starts that are kept

_MARK = "[0-9a-f]{16}"
_REPLICA = re.compile(
    rf"({_MARK}) shard=([^ ]+) starts=((?:{_MARK}(?:,{_MARK})*)?) coming=((?:{_MARK})?) crc32=\d{{1,10}}\n"
)
_PROMISE = re.compile(rf"replica=({_MARK})\n(.*\n)crc32=\d{{1,10}}\n", re.DOTALL)


class ReplicaIdentity(NamedTuple):
    """The identity of a directory. `starts`: marks of its starts, the newest last; `coming`: "" or the next mark."""

    id: str
    shard: str
    starts: tuple[str, ...] = ()
    coming: str = ""

    def about_to_start(self) -> "ReplicaIdentity":
        """Return the identity with the mark of a coming start. A mark that is there already is kept."""
        return self if self.coming else self._replace(coming=new_mark())

    def started(self) -> "ReplicaIdentity":
        """Return the identity after Consul got the mark `coming`."""
        return self._replace(starts=(*self.starts, self.coming)[-STARTS:], coming="")

    def knows(self, mark: str) -> bool:
        """Return True if this directory itself has written the mark."""
        return bool(mark) and (mark == self.coming or mark in self.starts)


def new_identity(shard: str) -> ReplicaIdentity:
    """Return a new identity, about to start."""
    return ReplicaIdentity(new_mark(), shard, (), new_mark())


class ReplicaFiles:
    """The two files of one data directory."""

    def __init__(self, data: str, shard: str) -> None:
        """Read both files. Create `replica` if it is missing. Raises ConfigError for another shard, CorruptError."""
        self.data = data
        self.identity = self._read_identity(shard)
        self.promised = self._read_promise()

    # --- identity ----------------------------------------------------------------------------------------------------

    def _read_identity(self, shard: str) -> ReplicaIdentity:
        text = self._read("replica")
        if text is None:
            if self._read("register") is not None:
                raise CorruptError(f"{self.data}/register: is there without `replica`, which says whose promise it is")
            made = new_identity(shard)
            replace_file(f"{self.data}/replica", _identity_text(made).encode())
            return made
        match = _REPLICA.fullmatch(text)
        if match is None:
            raise CorruptError(f"{self.data}/replica: {text[:40]!r} names no replica; it is damaged")
        id, name, starts, coming = match.groups()
        found = ReplicaIdentity(id, name, tuple(starts.split(",")) if starts else (), coming)
        if _identity_text(found) != text:
            raise CorruptError(f"{self.data}/replica: its crc32 does not fit; it is damaged")
        if name != shard:
            raise ConfigError(f"KMQ_SHARD={shard}: KMQ_DATA={self.data!r} is a replica of the shard {name}")
        return found

    def save(self, identity: ReplicaIdentity) -> None:
        """Make this the identity of the directory. A new id has no promise."""
        replace_file(f"{self.data}/replica", _identity_text(identity).encode())
        if identity.id != self.identity.id:
            self.promised = None
        self.identity = identity

    # --- promise -----------------------------------------------------------------------------------------------------

    def _read_promise(self) -> Register | None:
        text = self._read("register")
        if text is None:
            return None
        path = f"{self.data}/register"
        match = _PROMISE.fullmatch(text)
        if match is None or _with_crc(text.rpartition("crc32=")[0]) != text:
            raise CorruptError(f"{path}: {text[:40]!r} is no promise, or damaged; nobody knows what was answered to")
        try:
            register = decode(match[2].encode("latin-1"), path)
        except UnreadableRegister as error:  # it is of a later release
            raise ConfigError(str(error)) from error
        return register if match[1] == self.identity.id else None

    def promise(self, register: Register) -> None:
        """Promise this register and its version. Raises ValueError unless it descends from the last promise."""
        before = self.promised
        if before is not None and not register.descends_from(before.version):
            raise ValueError(f"version {register.version} does not descend from the promised {before.version}")
        text = f"replica={self.identity.id}\n{register.encode().decode()}"
        replace_file(f"{self.data}/register", _with_crc(text).encode())
        self.promised = register

    def _read(self, name: str) -> str | None:
        try:
            with open(f"{self.data}/{name}", encoding="latin-1", newline="") as file:
                return file.read()
        except FileNotFoundError:
            return None


def _identity_text(identity: ReplicaIdentity) -> str:
    starts = ",".join(identity.starts)
    text = f"{identity.id} shard={identity.shard} starts={starts} coming={identity.coming}"
    return f"{text} crc32={zlib.crc32(text.encode())}\n"


def _with_crc(text: str) -> str:
    return f"{text}crc32={zlib.crc32(text.encode('latin-1'))}\n"
