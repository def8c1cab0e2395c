"""Shard: the keys of a shard in Consul: its register, and a note of each replica. And the writes of the register.

    replicas/<shard>/register         the register (kmq/cluster/register.py), changed by cas only
    replicas/<shard>/<replica id>     a note, locked by the session of its replica; it outlives the replica
    replicas/<shard>/broker/<name>    locked by the session of the one replica of this broker; its value is the replica
    id
    replicas/<shard>/<replica id>/promise   the text of its promise, only while the register does not descend from it

Invariant   A register is only written over the version that was read: the cas lets one writer win, without a lock.
            Only a living member of the ISR that can promise the register is elected.
Recovery    The newest promise becomes a hold: a register without a leader. A leader is elected only when
            brokers - min_insync + 1 replicas have promised the hold, and one of the last known ISR is among them. It is
            the replica that has most. So the voters include a member of each ISR that ever committed, even if disks
            were replaced since, and none of them confirms anything more to a former leader.
Unknown     The outcome of a write without an answer is unknown. The caller reads again, and decides again.
"""

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kmq.broker.door import KAFKA_ADVERTISED, PORTS
from kmq.cluster import consul
from kmq.cluster.consul import Conflict, KvEntry, KvOperation, Pause, Steps, cas
from kmq.cluster.presence import NAME, Keys, decode_fields, encode_fields
from kmq.cluster.register import Register, UnreadableRegister, Version, begin, check_size, decode
from kmq.errors import ConfigError, CorruptError, KmqError, RetryError
from kmq.message.routing import LEVEL

_LOOK_S = 0.1  # between two looks at the notes of others


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

    def broker(self, name: str) -> str:
        return f"{self.root}broker/{name}"

    def promise(self, replica: str) -> str:
        return f"{self.root}{replica}/promise"


class Note(NamedTuple):
    """What a replica says about itself. `version`: its promise; `epoch`, `end`: its last record on disk.

    `opened`: the epoch in which it leads with open doors; 0: the doors are closed. `follows`: the epoch whose leader it
    is connected to; 0: not connected; None: an older release, which does not tell. `at`: when all this was true, unix
    seconds.
    """

    broker: str
    start: str  # mark of its last start
    version: Version | None = None
    epoch: int = 0
    end: int = 0
    level: int = LEVEL
    lineage: str = ""
    replica: str = ""  # host:port where other replicas reach it
    doors: tuple[tuple[str, str], ...] = ()  # where its clients reach it (kmq/broker/door.py): name, host:port
    opened: int = 0
    follows: int | None = None
    at: float | None = None


def encode_note(note: Note) -> bytes:
    """Return the value of a replica's key."""
    fields = note._asdict() | dict(note.doors)
    del fields["doors"]
    return encode_fields(**{name: "" if value is None else value for name, value in fields.items()})


def decode_note(value: bytes) -> Note:
    """Return the note that a key holds; an empty one if KMQ did not write the text."""
    fields = decode_fields(value)
    try:
        epoch, end, level = (int(fields[name]) for name in ("epoch", "end", "level"))
        opened = int(fields.get("opened", "0"))
        follows = int(fields["follows"]) if "follows" in fields else None
        at = float(fields["at"]) if "at" in fields else None
    except (KeyError, ValueError):
        return Note("", "")
    version, text = Version.parse(fields.get("version", "")), fields.get
    doors = tuple((name, fields[name]) for name in (*PORTS, *KAFKA_ADVERTISED.values()) if name in fields)
    return Note(
        text("broker", ""),
        text("start", ""),
        version,
        epoch,
        end,
        level,
        text("lineage", ""),
        text("replica", ""),
        doors,
        opened,
        follows,
        at,
    )


class Member(NamedTuple):
    """A replica that has ever entered. It is alive while a `session` has its key locked; "": it is not."""

    id: str
    note: Note
    session: str
    modified: int  # version of its key


class ShardView(NamedTuple):
    """What one Txn read. `modified`: version of the register's key, 0: no register. `unreadable`: why it cannot be
    read.

    `promises`: of replicas from whose promise the register does not descend.
    """

    register: Register | None
    modified: int
    members: dict[str, Member]
    unreadable: str = ""
    promises: Mapping[str, Register] = MappingProxyType({})

    def is_alive(self, replica: str) -> bool:
        """Return True if the key of this replica is locked."""
        return replica in self.members and self.members[replica].session != ""

    def is_following(self, member: Member) -> bool:
        """Return True if its note says that it is connected to the leader, or is of a release that does not tell."""
        follows, epoch = member.note.follows, self.register.epoch if self.register is not None else 0
        return follows is None or follows >= epoch  # a later epoch: the register went back

    def broker(self, replica: str) -> str:
        """Return the broker of a replica; its id if that is unknown."""
        member = self.members.get(replica)
        return member.note.broker if member is not None and member.note.broker else replica

    @property
    def known_level(self) -> int:
        """The level that every broker of the shard knows; 0 while one is away, because it may be of any release."""
        names = self.register.brokers if self.register is not None else ()
        living = [each.note for each in self.members.values() if each.session and each.note.broker in names]
        return min(note.level for note in living) if {note.broker for note in living} == {*names} else 0

    def successor(self, without: str = "") -> str | None:
        """Return the next leader: the living member of the ISR that has most; None if no member is alive."""
        register = self.register
        if register is None:
            return None
        able = [
            member
            for member in self.members.values()
            if member.id in register.isr
            and member.id != without
            and member.session
            and member.note.level >= register.level
            and (member.note.version is None or register.descends_from(member.note.version))
        ]
        best = max(able, key=lambda member: (member.note.epoch, member.note.end, member.id), default=None)
        return best.id if best is not None else None


def read_shard(keys: ShardKeys) -> Steps[ShardView]:
    """Return register and notes as they are now."""
    entries = yield from consul.txn([KvOperation("get-tree", keys.root)])
    return view_of(keys, entries)


def view_of(keys: ShardKeys, entries: list[KvEntry]) -> ShardView:
    """Return the view that these entries make."""
    members = {}
    promises: dict[str, Register] = {}
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
        elif name.endswith("/promise"):
            with contextlib.suppress(UnreadableRegister):  # of a later release: treat the note as empty
                promises[name.removesuffix("/promise")] = decode(entry.value, entry.key)
    return ShardView(register, modified, members, unreadable, promises)


ISR_REPLACED = "isr_replaced"
WAY_BACK = (
    "run kmq down on all brokers; kmq cluster detach on the one whose records count, and kmq cluster reset on the others;"
    " start all with a new KMQ_SHARD, then: kmq cluster init --shard <new name> --brokers {brokers} --from <that one>"
)


def replaced_isr(view: ShardView) -> list[str]:
    """Return the brokers of the ISR if all of them run, but each with another directory; else [].

    Then nobody can be elected any more. It happens when all volumes were restored from a backup, or emptied.
    """
    register = view.register
    if register is None or not register.leader or any(map(view.is_alive, register.isr)):
        return []
    living = {member.note.broker for member in view.members.values() if member.session}
    brokers = {view.broker(replica) for replica in register.isr}
    return sorted(brokers) if brokers <= living else []


def way_back(view: ShardView) -> str:
    """Return the advice for an operator after the ISR was replaced."""
    return WAY_BACK.format(brokers=",".join(view.register.brokers if view.register is not None else ()))


def document(shard: str, broker: str, view: ShardView) -> dict[str, Any]:
    """Return the document that `kmq cluster status --json` prints and the gateway reads from pipes/cluster.json."""
    register = view.register
    brokers: dict[str, Any] = dict.fromkeys(register.brokers) if register is not None else {}
    isr = register.isr if register is not None else ()
    # Of several replicas of a broker show the living one, and of two of those the one in the ISR.
    for member in sorted(view.members.values(), key=lambda member: (bool(member.session), member.id in isr)):
        promised, problem = member.note.version, ""
        if member.session and promised is not None and (register is None or not register.descends_from(promised)):
            problem = "register_went_back"
        role = "following" if promised is not None and view.is_following(member) else "waiting"
        if register is not None and register.leader == member.id:
            role = "leading" if member.note.opened >= register.epoch else "starting"  # later: the register went back
        brokers[member.note.broker] = {
            "replica": member.id,
            "alive": bool(member.session),
            "host": member.note.replica.rpartition(":")[0],
            "role": role if member.session else "",
            "version": promised.number if promised is not None else None,
            "end": member.note.end,
            "as_of": member.note.at,
            "problem": problem,
            "doors": dict(member.note.doors),
        }
    problem = next((each["problem"] for each in brokers.values() if each is not None and each["problem"]), "")
    if view.unreadable:
        problem = view.unreadable
    elif register is None:
        problem = problem or "not begun"
    elif not view.is_alive(register.leader):
        problem = problem or (ISR_REPLACED if replaced_isr(view) else "no_leader")
    ours = brokers.get(broker)
    return {
        "shard": shard,
        "broker": broker,
        "role": ours["role"] if ours is not None else "",
        "leader": view.broker(register.leader) if register is not None and register.leader else None,
        "isr": sorted(map(view.broker, register.isr)) if register is not None else [],
        "epoch": register.epoch if register is not None else 0,
        "version": register.version.number if register is not None else 0,
        "members": list(register.brokers) if register is not None else [],
        "min_insync": register.min_insync if register is not None else 0,
        "lineage": register.lineage if register is not None else "",
        "problem": problem,
        "brokers": brokers,
    }


def shortage(view: ShardView) -> str:
    """Return what a shard with a living leader lacks, and what that means; "" if Consul knows of no shortage."""
    register = view.register
    if register is None or not view.is_alive(register.leader):
        return ""
    living = {member.note.broker for member in view.members.values() if member.session}
    in_isr = {view.broker(replica) for replica in register.isr if view.is_alive(replica)}
    away = [name for name in register.brokers if name not in living]
    behind = [name for name in register.brokers if name in living and name not in in_isr]
    others = [each for each in view.members.values() if each.session and each.id != register.leader]
    cut_off = sorted(each.note.broker for each in others if not view.is_following(each))
    found = []
    if len(in_isr) < register.min_insync:
        found.append(
            f"not_enough_replicas: nothing is committed, because {len(in_isr)} of the ISR live and {register.min_insync}"
            " must have a message"
        )
    if view.members[register.leader].note.opened < register.epoch:
        found.append(f"doors_closed: {view.broker(register.leader)} leads and its ports are not open")
    if away:
        found.append(f"broker_away: {', '.join(away)}")
    if behind:
        found.append(f"not_in_isr: {', '.join(behind)}")
    if cut_off:
        found.append(f"not_following: {', '.join(cut_off)} (no connection to the leader)")
    return "; ".join(found)


# --- writes ----------------------------------------------------------------------------------------------------------


def write(keys: ShardKeys, view: ShardView, register: Register, also: Sequence[KvOperation] = ()) -> Steps[bool]:
    """Write a register over the one that was read. Return False if another writer was first."""
    try:
        yield from consul.txn([cas(keys.register, register.encode(), view.modified), *also])
    except Conflict:
        return False
    return True


def elect(keys: ShardKeys, view: ShardView, leader: str) -> Steps[bool]:
    """Elect this replica. Return False if another writer was first."""
    assert view.register is not None
    alive = [member.id for member in view.members.values() if member.session]
    return (yield from write(keys, view, view.register.elect(leader, alive)))


def init(
    keys: ShardKeys, brokers: list[str], min_insync: int | None, dry_run: bool, origin: str | None = None
) -> Steps[tuple[Register, str]]:
    """Create a shard once all its brokers are present. Return the register, and the broker that leads first.

    `origin`: the broker whose records the shard begins with; None: the only one that has records. Raises ConfigError,
    RetryError if brokers are missing, and CorruptError if several have records, or another one than `origin`.
    """
    check_size(brokers, min_insync)
    if origin is not None and origin not in brokers:
        raise ConfigError(f"--from {origin}: must be one of --brokers {','.join(brokers)}")
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
    if full and origin is not None and full != [origin]:
        raise CorruptError(f"shard {keys.shard}: not {origin}, but {full[0]} has records; nothing was changed")
    first = origin or (full[0] if full else brokers[0])
    note = replicas[first].note  # a directory that has left another shard has the epochs of that shard
    level = min(LEVEL, *(member.note.level for member in replicas.values()))
    register = begin(note.lineage, brokers, min_insync, replicas[first].id, note.epoch + 1, level)
    if not dry_run and not (yield from write(keys, view, register)):
        raise ConfigError(f"shard {keys.shard}: was begun by somebody else just now; see: kmq cluster status")
    return register, first


def _check_is_new(keys: ShardKeys, view: ShardView) -> None:
    """Raise ConfigError if the shard was created before."""
    if view.modified:
        raise ConfigError(view.unreadable or f"shard {keys.shard}: is there already; see: kmq cluster status")
    for member in view.members.values():
        if member.note.version is not None:
            raise ConfigError(
                f"shard {keys.shard}: broker {member.note.broker} has promised version {member.note.version.number} of a"
                " register that is not there: Consul was emptied, or restored; bring its data back, or run"
                " kmq cluster recover"
            )


def resign(keys: ShardKeys, broker: str) -> Steps[str | None]:
    """If this broker leads, hand the leadership to another member of the ISR, and return that member's broker.

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


def await_open(keys: ShardKeys, broker: str, patience_s: float) -> Steps[str]:
    """Return the leader with open doors, once that is no longer `broker`.

    Raises RetryError if that takes longer than `patience_s`, or if `broker` leads again.
    """
    until, why = time.monotonic() + patience_s, "nobody leads"
    while time.monotonic() < until:
        view = yield from read_shard(keys)
        register = view.register
        if register is not None and register.leader:
            leader = view.broker(register.leader)
            if leader == broker:
                raise RetryError(f"shard {keys.shard}: {broker} leads again; see: kmq cluster status")
            if view.is_alive(register.leader) and view.members[register.leader].note.opened == register.epoch:
                return leader
            why = f"the doors of {leader} are not open"
        yield Pause(_LOOK_S)
    raise RetryError(f"shard {keys.shard}: after {patience_s:g} s {why}; {broker} does not lead any more")


# --- a register that was lost ----------------------------------------------------------------------------------------

_AWAITED_S = 30.0  # time for living replicas to promise a hold
_MOST = 60  # shown promises deleted in one Txn, including those of replicas that will not return


class CannotRecover(KmqError):
    """Too few replicas are present, or their promises fork. Nothing was changed. The text ends with a table."""


class RecoveryPlan(NamedTuple):
    """What recovery would do. `base`: the newest promise; the promises of all `brokers` are its ancestors, or equal.

    `enough`: the number of replicas that must promise the hold before one of them is elected.
    """

    base: Register
    brokers: tuple[str, ...]
    enough: int


def plan_recovery(keys: ShardKeys, view: ShardView, origin: str | None = None) -> RecoveryPlan | None:
    """Return how to recover the register; None if it is the newest of all promises. `origin`: the broker whose branch
    counts.

    Raises CannotRecover, RetryError if a replica has not shown its promise yet, ConfigError for an unreadable register.
    """
    if view.unreadable:
        raise ConfigError(f"{view.unreadable}; nothing was changed")
    register = view.register
    promised = {each.id: each.note.version for each in view.members.values() if each.session and each.note.version}
    newer = {id: v for id, v in promised.items() if register is None or not register.descends_from(v)}
    if register is not None and register.leader and not newer:
        if brokers := replaced_isr(view):
            raise CannotRecover(
                f"shard {keys.shard}: the register is the newest promise, but no replica of its ISR is there:"
                f" {', '.join(brokers)} run with other directories, restored ones or new ones, so nobody can be elected"
                f" and nobody knows what is missing. {way_back(view)}\n{_table(view)}"
            )
        if not any(map(view.is_alive, register.isr)):
            away = ", ".join(sorted(map(view.broker, register.isr)))
            raise CannotRecover(
                f"shard {keys.shard}: the register is the newest promise, but none of its ISR is here; start one of"
                f" {away}. If their disks are lost for good: {way_back(view)}\n{_table(view)}"
            )
        return None
    texts = {text.version: text for id, text in view.promises.items() if text.version == promised.get(id)}
    hidden = sorted(view.broker(id) for id, version in newer.items() if version not in texts)
    if hidden:
        raise RetryError(f"shard {keys.shard}: {', '.join(hidden)} did not show its promise yet; run this again")
    if register is not None and (register.version in promised.values() or not register.leader):
        texts[register.version] = register
    if origin is not None:
        own = next((version for id, version in promised.items() if view.broker(id) == origin), None)
        if own is None:
            raise CannotRecover(f"--from {origin}: no living replica of this broker has a promise\n{_table(view)}")
        texts = {version: text for version, text in texts.items() if text.descends_from(own)}
    if not texts:
        raise CannotRecover(f"shard {keys.shard}: no living replica has a promise\n{_table(view)}")
    base = texts[max(texts)]
    others = sorted(view.broker(id) for id, version in promised.items() if not base.descends_from(version))
    if others:
        choose = "choose the broker whose records count, with --from <broker>, and" if origin is None else "first"
        raise CannotRecover(
            f"shard {keys.shard}: the promises fork: version {base.version} does not go on from that of"
            f" {', '.join(others)}; {choose} reset the others (kmq down, kmq cluster reset, kmq up)\n{_table(view)}"
        )
    enough = len(base.brokers) - base.min_insync + 1
    if origin is not None:  # a replica that was reset has no promise, so nobody waits for it
        fresh = [each for each in view.members.values() if each.session and each.note.version is None]
        enough = max(1, enough - len(fresh))
    if what := _missing(view, base, promised.keys(), enough):
        raise CannotRecover(f"shard {keys.shard}: {what}\n{_table(view)}")
    return RecoveryPlan(base, tuple(sorted(map(view.broker, promised))), enough)


def _missing(view: ShardView, base: Register, replicas: Collection[str], enough: int) -> str:
    """Return why these replicas may not know every committed record; "" if they do."""
    count = len({*map(view.broker, replicas)} & {*base.brokers})
    if count < enough:
        return f"{count} of its replicas have promised it, {enough} are needed: another may know more. Start the others"
    if not {*replicas} & {*base.isr}:
        return f"none of the last known ISR is here; start one of {', '.join(map(view.broker, base.isr))}"
    return ""


def _table(view: ShardView) -> str:
    rows = [("broker", "replica", "promised", "epoch", "end", "")]
    for each in sorted(view.members.values(), key=lambda each: (each.note.broker, each.id)):
        version, here = each.note.version, "here" if each.session else "away"
        rows.append((each.note.broker, each.id, str(version or "-"), str(each.note.epoch), str(each.note.end), here))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def recover(keys: ShardKeys, view: ShardView, plan: RecoveryPlan, patience_s: float = _AWAITED_S) -> Steps[str]:
    """Carry out a plan made from this view, and return the broker that leads.

    Raises CannotRecover if too few replicas promise the hold: the next run continues from there. Raises RetryError if
    another writer was first.
    """
    held = view.register
    if held != plan.base or held.leader:
        held = plan.base.hold()
        if not (yield from write(keys, view, held)):
            raise RetryError(f"shard {keys.shard}: somebody else wrote the register just now; run this again")
    for _ in range(max(1, int(patience_s / _LOOK_S))):
        view = yield from read_shard(keys)
        if view.register != held:
            raise RetryError(f"shard {keys.shard}: somebody else wrote the register just now; run this again")
        bound = {each.id: each for each in view.members.values() if each.session and each.note.version == held.version}
        what = _missing(view, held, bound.keys(), plan.enough)
        if not what:
            best = max(bound.values(), key=lambda each: (each.note.epoch, each.note.end, each.id))
            shown = [KvOperation("delete", keys.promise(id)) for id in view.promises][:_MOST]
            if (yield from write(keys, view, held.end_hold(best.id), shown)):
                return best.note.broker
        yield Pause(_LOOK_S)
    raise CannotRecover(
        f"shard {keys.shard}: is held until this is run again, and nobody leads: {what}\n{_table(view)}"
    )
