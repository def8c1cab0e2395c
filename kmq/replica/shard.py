"""A shard as Consul has it: its register, and what each replica says of itself. And who may write the register.

    replicas/<shard>/register         the register (kmq/cluster/register.py), changed by cas only
    replicas/<shard>/<replica id>     a note, locked by the session of its replica; it stays when the replica does not

Invariant   A register is only written over the one that was read: the cas lets one writer through. No lock is needed.
            Nobody is elected but a living member of the ISR that can promise the register.
Unknown     Nobody knows what came of a write that got no answer. The caller reads again, and decides anew.
"""

from typing import NamedTuple

from kmq.cluster import consul
from kmq.cluster.consul import Conflict, KvEntry, KvOperation, Steps, cas
from kmq.cluster.presence import NAME, Keys, decode_fields, encode_fields
from kmq.cluster.register import LEVEL, Register, UnreadableRegister, Version, begin, check_size, decode
from kmq.errors import ConfigError, CorruptError, RetryError


class ShardKeys:
    """The keys of one shard."""

    def __init__(self, keys: Keys, shard: str) -> None:
        if not NAME.fullmatch(shard) or shard == "register":
            raise ConfigError(f"KMQ_SHARD={shard!r}: must match {NAME.pattern}")
        self.shard = shard
        self.root = f"{keys.replicas}{shard}/"
        self.register = self.root + "register"

    def note(self, replica: str) -> str:
        return self.root + replica


class Note(NamedTuple):
    """What a replica says of itself. `version`: its promise; `epoch`, `end`: its last record on disk."""

    broker: str
    start: str  # mark of its last start
    version: Version | None = None
    epoch: int = 0
    end: int = 0
    level: int = LEVEL
    lineage: str = ""


def encode_note(note: Note) -> bytes:
    """Return the value of a replica's key."""
    return encode_fields(**note._replace(version=note.version or "")._asdict())  # type: ignore[arg-type]


def decode_note(value: bytes) -> Note:
    """Return the note that a key holds; of a text that KMQ did not write an empty one, which says nothing."""
    fields = decode_fields(value)
    try:
        epoch, end, level = (int(fields[name]) for name in ("epoch", "end", "level"))
    except (KeyError, ValueError):
        return Note("", "")
    version = Version.parse(fields.get("version", ""))
    return Note(
        fields.get("broker", ""), fields.get("start", ""), version, epoch, end, level, fields.get("lineage", "")
    )


class Member(NamedTuple):
    """A replica that has ever been let in. It is alive while a `session` has its key locked; "": none has."""

    id: str
    note: Note
    session: str
    modified: int  # version of its key


class ShardView(NamedTuple):
    """What was read in one Txn. `modified`: version of the register's key, 0: there is none; `unreadable`: why it is."""

    register: Register | None
    modified: int
    members: dict[str, Member]
    unreadable: str = ""

    def is_alive(self, replica: str) -> bool:
        """Return True if the key of this replica is locked."""
        return replica in self.members and self.members[replica].session != ""

    def broker(self, replica: str) -> str:
        """Return the broker of a replica; its id if nobody knows."""
        member = self.members.get(replica)
        return member.note.broker if member is not None and member.note.broker else replica

    def successor(self, without: str = "") -> str | None:
        """Return who may lead next: of the living members of the ISR the one that has most; None if there is none."""
        register = self.register
        if register is None:
            return None
        able = [
            member
            for member in self.members.values()
            if member.id in register.isr
            and member.id != without
            and member.session
            and member.note.level >= LEVEL
            and (member.note.version is None or register.descends_from(member.note.version))
        ]
        best = max(able, key=lambda member: (member.note.epoch, member.note.end, member.id), default=None)
        return best.id if best is not None else None


def read_shard(keys: ShardKeys) -> Steps[ShardView]:
    """Return register and notes as they are now."""
    entries = yield from consul.txn([KvOperation("get-tree", keys.root)])
    return view_of(keys, entries)


def view_of(keys: ShardKeys, entries: list[KvEntry]) -> ShardView:
    """Return what these entries say."""
    members = {}
    register, modified, unreadable = None, 0, ""
    for entry in entries:
        name = entry.key.removeprefix(keys.root)
        if entry.key == keys.register:
            modified = entry.version
            try:
                register = decode(entry.value, entry.key)
            except UnreadableRegister as error:
                unreadable = str(error)
        elif "/" not in name:
            members[name] = Member(name, decode_note(entry.value), entry.session, entry.version)
    return ShardView(register, modified, members, unreadable)


# --- writes ----------------------------------------------------------------------------------------------------------


def write(keys: ShardKeys, view: ShardView, register: Register) -> Steps[bool]:
    """Put a register in the place of the one that was read. Return False if another writer was first."""
    try:
        yield from consul.txn([cas(keys.register, register.encode(), view.modified)])
    except Conflict:
        return False
    return True


def elect(keys: ShardKeys, view: ShardView, leader: str) -> Steps[bool]:
    """Elect this replica. Return False if another writer was first."""
    assert view.register is not None
    alive = [member.id for member in view.members.values() if member.session]
    return (yield from write(keys, view, view.register.elect(leader, alive)))


def init(keys: ShardKeys, brokers: list[str], min_insync: int | None, dry_run: bool) -> Steps[tuple[Register, str]]:
    """Begin a shard once all of its brokers are there and wait. Return the register, and the broker that leads first.

    Raises ConfigError, RetryError if brokers are missing, and CorruptError if more than one has records.
    """
    check_size(brokers, min_insync)
    view = yield from read_shard(keys)
    _check_is_new(keys, view)
    found = {name: [m for m in view.members.values() if m.session and m.note.broker == name] for name in brokers}
    missing = [name for name, members in found.items() if not members]
    if missing:
        raise RetryError(
            f"shard {keys.shard}: not there: {', '.join(missing)}; start each of its brokers with"
            f" KMQ_SHARD={keys.shard} and its own KMQ_BROKER (kmq up), then run this again"
        )
    twice = next((name for name, members in found.items() if len(members) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"broker {twice}: two replicas say that they are it; give each broker a KMQ_BROKER of its own"
        )
    replicas = {name: members[0] for name, members in found.items()}
    full = [name for name, member in replicas.items() if member.note.end]
    if len(full) > 1:
        raise CorruptError(
            f"shard {keys.shard}: the directories of {' and '.join(full)} have records; only one of its brokers may"
        )
    first = full[0] if full else brokers[0]
    register = begin(replicas[first].note.lineage, brokers, min_insync, replicas[first].id)
    if not dry_run and not (yield from write(keys, view, register)):
        raise ConfigError(f"shard {keys.shard}: was begun by somebody else just now; see: kmq cluster status")
    return register, first


def _check_is_new(keys: ShardKeys, view: ShardView) -> None:
    """Raise ConfigError if the shard was begun before."""
    if view.modified:
        raise ConfigError(view.unreadable or f"shard {keys.shard}: is there already; see: kmq cluster status")
    for member in view.members.values():
        if member.note.version is not None:
            raise ConfigError(
                f"shard {keys.shard}: broker {member.note.broker} has promised version {member.note.version.number} of a"
                " register that is not there: Consul was emptied, or restored; bring its data back"
            )


def resign(keys: ShardKeys, broker: str) -> Steps[str | None]:
    """If this broker leads, let it hand its office to another member of the ISR, and return that one's broker.

    Returns None if it does not lead. Raises RetryError if no other member of the ISR is alive.
    """
    while True:
        view = yield from read_shard(keys)
        leader = view.register.leader if view.register is not None else ""
        if not leader or view.broker(leader) != broker:
            return None
        successor = view.successor(without=leader)
        if successor is None:
            raise RetryError(f"shard {keys.shard}: no other member of the ISR is alive; {broker} goes on leading")
        if (yield from elect(keys, view, successor)):
            return view.broker(successor)
