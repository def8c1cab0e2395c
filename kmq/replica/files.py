"""What a replica remembers on its disk: who it is, and the last register that it has promised.

    replica    `<replica id> shard=<name> starts=<mark>,<mark>… coming=<mark> crc32=…`
    register   `replica=<replica id>`, the text of a register, `crc32=…`: the promise of this replica

Owner       The process `replica` of this directory, which holds the lock of pipes/replica.owner.
Invariant   A promise is on disk before anything is sent under its version. It never goes back: `promise` refuses a
            register that does not descend from the one before.
            A promise of another replica id is none. So a directory that takes a new id has lost its promise at the same
            instant, whenever it is killed.
Crash       Each file is replaced atomically and synced.
            `coming` is the mark of a start that may have reached Consul: the next start goes on with it.
Damage      A flipped bit ends the process with 65: without these files nobody knows what this replica has answered to.
"""

import re
import zlib
from typing import NamedTuple

from kmq.cluster.register import Register, UnreadableRegister, decode, new_mark
from kmq.errors import ConfigError, CorruptError
from kmq.files import replace_file

STARTS = 1000  # marks of starts that are kept

_MARK = "[0-9a-f]{16}"
_REPLICA = re.compile(
    rf"({_MARK}) shard=([^ ]+) starts=((?:{_MARK}(?:,{_MARK})*)?) coming=((?:{_MARK})?) crc32=\d{{1,10}}\n"
)
_PROMISE = re.compile(rf"replica=({_MARK})\n(.*\n)crc32=\d{{1,10}}\n", re.DOTALL)


class ReplicaIdentity(NamedTuple):
    """Who this directory is. `starts`: marks of the starts under this id, the newest last; `coming`: "" or one more."""

    id: str
    shard: str
    starts: tuple[str, ...] = ()
    coming: str = ""

    def about_to_start(self) -> "ReplicaIdentity":
        """Return the identity with the mark of a start; one that is there already is gone on with."""
        return self if self.coming else self._replace(coming=new_mark())

    def started(self) -> "ReplicaIdentity":
        """Return the identity once Consul has the mark `coming`."""
        return self._replace(starts=(*self.starts, self.coming)[-STARTS:], coming="")

    def knows(self, mark: str) -> bool:
        """Return True if this directory has written the mark itself."""
        return bool(mark) and (mark == self.coming or mark in self.starts)


def new_identity(shard: str) -> ReplicaIdentity:
    """Return the identity of a replica that has never been seen, about to start."""
    return ReplicaIdentity(new_mark(), shard, (), new_mark())


class ReplicaFiles:
    """Both files of one data directory."""

    def __init__(self, data: str, shard: str) -> None:
        """Read them, and begin `replica` if it is missing. Raises ConfigError for another shard, CorruptError."""
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
        """Make this the identity of the directory. Under a new id it has no promise."""
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
        except UnreadableRegister as error:  # of a later release
            raise ConfigError(str(error)) from error
        return register if match[1] == self.identity.id else None

    def promise(self, register: Register) -> None:
        """Answer under this register from now on. Raises ValueError if it does not descend from the last promise."""
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
