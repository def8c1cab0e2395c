"""One replica of a shard: its session in Consul, its promise, and its part in elections. roles.py moves the data.

Example: the register names us leader of epoch 8. We promise it on disk, write that into our note, and then lead.

    live          enter; then turn after turn, until told to stop
    enter         begin a session, find out who we are (identity), lock our key
    turn          wait for a change of register or notes; beat; promise; write our note; act; change the ISR, elect

Owner       The process kmq/replica/__main__.py. All of it is Steps, which the tests carry out in any order they like.
Invariant   A register is promised, on disk, before our note or any other write names its version.
            We promise only a register that descends from our promise. If it does not, we read it again from a majority
            of Consul's servers. If that says the same, the register went back: nothing is changed and nobody elected
            until it descends from our promise again.
            An epoch that this replica led before its start is never led again: the replica resigns.
            A change of the ISR counts for the leader before it is written (Work.prepare_isr).
Identity    Each session begins with a mark that is on our disk before it is in Consul. So we are the replica of our id,
            unless the key has a mark that this directory has not written, or its note reports more than our disk has.
            Then this directory is a copy, or an older state, and takes a new id without a promise. This is not checked
            where the register went back, nor where the note is this process's last one: then the process itself has cut
            the records that the directory lacks.
            A broker has at most one living replica, because its name is locked in the same Txn as the key of its
            replica. If another session holds our key, this directory is a copy. If another id holds our broker's name,
            this is a second machine under that name. Either ends the process with 69, but only after two TTLs. So a
            broker that was killed, or whose disk was wiped, enters once its former session is over. If Consul went
            back, or the holder has our own address, that session may last longer, and we wait for it.
Room        Without room for a promise or for our identity, we release our key and wait, as if we were not there.
Consul      A lost answer, a lost session or an overtaken write only costs time, because every decision begins with a
            read, and every write is a cas of the version that was read.
Waiting     A replica that has just entered, or has reached Consul again, elects nobody for one TTL, because others
            return in that time.
"""

import contextlib
import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kmq.broker.stats import PROBLEMS, STATES, Row
from kmq.cluster import consul
from kmq.cluster.consul import Conflict, ConsulError, KvOperation, Pause, Steps, check_session
from kmq.cluster.presence import Presence, SessionLost
from kmq.cluster.register import Register, UnreadableRegister, decode
from kmq.errors import BusyError
from kmq.files import FULL
from kmq.logfmt import Logger
from kmq.replica.files import ReplicaFiles, new_identity
from kmq.replica.shard import Member, Note, ShardKeys, ShardView, elect, encode_note, read_shard, view_of, write
from kmq.replica.wire import NOBODY, Peer

WENT_BACK, UNREADABLE = PROBLEMS[1:]

_TURNS = 4  # within the life of a session; each turn sends a beat
_AGAIN_S = 0.1  # between two tries while our key is held, or Consul does not grant its lock yet
_LOST_S = 0.5  # between two tries while Consul does not answer
_FORGOTTEN_S = 180.0  # an agent compares its state with Consul's servers every one to two minutes
_NOTE_S = 10.0  # between two notes whose only news is our position and the time


class Duty(NamedTuple):
    """What the promised register asks of the replica `me`. `leader`: the leader's address, "" if unknown.

    `doors`: the leader's broker, and its ports for clients. `is_open`: Consul knows that they are open in this epoch.
    `as_of`: when Consul was last known to say so (monotonic); it was asked no earlier.
    """

    register: Register
    me: str
    leader: str
    doors: tuple[tuple[str, str], ...] = ()
    is_open: bool = False
    as_of: float = 0.0


class Work(Protocol):
    """The data side: moves the data (roles.py), and answers questions for elections and the ISR."""

    def act(self, duty: Duty | None) -> None:
        """Do what this duty asks from now on. None: stop, because this directory has another id now."""

    def stored(self) -> int:
        """Return the seq of the last record in the WAL."""

    def position(self) -> tuple[int, int]:
        """Return (epoch, seq) of the last record that survives a power cut."""

    def adopt(self, lineage: str) -> None:
        """Take the lineage of the shard, for a directory without records. Raises CorruptError."""

    def doors(self) -> dict[str, str]:
        """Return the addresses of our ports for clients, as other machines reach them."""

    def went_back(self) -> bool:
        """Return True once, if the leader knows that we once had more than we have now."""

    def opened(self) -> int:
        """Return the epoch in which we lead with open doors; 0: the doors are closed."""

    def followed(self) -> int:
        """Return the epoch whose leader we are connected to; 0: not connected."""

    def is_spent(self, epoch: int) -> bool:
        """Return True if we lead this epoch and cannot continue."""

    def stands(self) -> bool:
        """Return True if we lead, and no numbered record has been committed for the lag."""

    def prepare_isr(self, isr: list[str]) -> None:
        """Wait for the members of this ISR too from now on, because it is about to be written."""

    def may_join(self, replica: str) -> bool:
        """Return True if this replica has on disk all that an elected leader needs, under our version."""

    def hears(self, replica: str) -> bool:
        """Return True if this replica has answered within the last lag."""

    def is_behind(self, replica: str) -> bool:
        """Return True if this replica was silent for the lag, or lacks a record that was on our disk that long ago."""

    def is_slow(self, replica: str) -> bool:
        """Return True if this replica delays every acknowledgement to a multiple of the others' time."""


class Replica:
    """The replica of one data directory, while its process lives."""

    def __init__(
        self,
        files: ReplicaFiles,
        keys: ShardKeys,
        broker: str,
        lineage: str,
        ttl_s: float,
        lag_s: float,
        work: Work,
        address: Callable[[], str],
        is_stopping: Callable[[], bool],
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lag_s`: after it the ISR continues without an absent replica. `address`: where other replicas reach us."""
        self.files, self.keys, self.log = files, keys, log
        self._broker, self._lineage, self._ttl_s, self._lag_s = broker, lineage, ttl_s, lag_s
        self._work, self._address = work, address
        self._is_stopping, self._clock = is_stopping, clock
        self.problem = ""  # WENT_BACK, UNREADABLE, or ""
        self.seen: tuple[ShardView, float] | None = None  # what Consul said in the last turn, and when (unix seconds)
        self._presence = Presence(ttl_s, keeps_keys=True)
        self._position = 0  # index of the watch on the register
        self._found = ""  # the last former session of ours that held our key
        self._start = ""  # the mark of our session's start
        self._lock = ""  # the session that last locked our key
        self._note: Note | None = None  # the last note that we wrote
        self._noted_at = 0.0
        self._reached: float | None = None  # since when Consul answers
        self._is_lost = False  # Consul does not answer, and that was logged
        self._is_full = False  # a file that must be written before we continue found no room
        self._elections = 0
        self._resigned = -math.inf  # when we last resigned because hw stood still
        promised = files.promised
        self._spent = promised.epoch if promised is not None and promised.leader == files.identity.id else 0

    @property
    def role(self) -> str:
        """waiting: without a promise; else following or leading, in the epoch of the promise."""
        promised = self.files.promised
        if promised is None:
            return "waiting"
        return "leading" if promised.leader == self.files.identity.id else "following"

    def publish(self, row: Row) -> None:
        """Write the state of this replica into its row of the stats page."""
        promised, is_waiting = self.files.promised, self._reached is None and self._is_lost
        state = "ready" if self._reached is not None else "waiting" if is_waiting else "starting"
        row.state = STATES.index("disk_full" if self._is_full else state)
        row.problem = PROBLEMS.index(self.problem)
        row.last, row.elections = self._work.position()[1], self._elections
        if promised is not None:
            row.epoch, row.version = promised.epoch, promised.version.number
            row.isr, row.in_isr = len(promised.isr), int(self.files.identity.id in promised.isr)
            row.min_insync, row.brokers = promised.min_insync, len(promised.brokers)
        is_small = self.role == "leading" and row.isr < row.brokers
        now = time.monotonic_ns()
        row.small_since = (row.small_since or now) if is_small else 0
        row.waits_since = (row.waits_since or now) if is_waiting else 0

    def live(self) -> Steps[None]:
        """Take part until told to stop. Raises BusyError if another process has our id, CorruptError."""
        has_entered = False
        while not self._is_stopping():
            try:
                if self._work.went_back():
                    self._take_new_id("the leader remembers that it has confirmed more than it has")
                    has_entered = False
                if not has_entered:
                    yield from self._enter()
                    has_entered = True
                yield from self._turn()
                if self._is_full:
                    self.log.info("disk_space_recovered")
                    self._is_full = False
            except OSError as error:
                if error.errno not in FULL:
                    raise
                yield from self._wait_for_room(error)
                has_entered = False
            except SessionLost as error:
                self._on_consul_lost(str(error))
                has_entered = False
                yield Pause(_AGAIN_S)
            except ConsulError as error:
                self._on_consul_lost(str(error))
                yield Pause(_LOST_S)
        yield from self._leave(has_entered)

    def _on_consul_lost(self, reason: str) -> None:
        if not self._is_lost:
            effect = "nobody is elected from here; what was promised holds"
            self.log.warn("replica_consul_lost", reason=reason, effect=effect)
            self._is_lost = True
        self._reached, self._position = None, 0

    def _wait_for_room(self, error: OSError) -> Steps[None]:
        """Release our key and do nothing for a while: a replica that cannot promise can neither lead nor be elected."""
        if not self._is_full:
            effect = "this broker leaves its shard until there is room"
            self.log.warn("disk_full", file=error.filename or self.files.data, lacks="disk_full", effect=effect)
            self._is_full = True
        self._work.act(None)
        self._reached = None
        with contextlib.suppress(ConsulError):  # then the session ends by itself
            yield from self._presence.close()
        yield Pause(_LOST_S)

    def _leave(self, has_entered: bool) -> Steps[None]:
        """Write our last note, and release our key."""
        try:
            if has_entered and self._lock == self._presence.session:  # if not, another may have written the key
                yield from self._write_note(self._new_note())
            yield from self._presence.close()
        except ConsulError as error:
            self.log.warn("replica_not_signed_off", reason=error, effect="others notice after KMQ_SESSION_TTL")

    # --- entering ----------------------------------------------------------------------------------------------------

    def _enter(self) -> Steps[None]:
        """Begin a session, find out who we are, and lock our key."""
        held_since: float | None = None
        if self._is_full or not self.files.identity.coming:  # no room: no session
            self.files.save(self.files.identity.about_to_start())
        yield from self._presence.open()
        while not self._is_stopping():
            yield from self._presence.beat()
            identity, asked_at = self.files.identity, self._clock()  # the answer may be older than it looks
            view = yield from read_shard(self.keys)
            member, holder = view.members.get(identity.id), self._holder(view)
            if holder is not None:
                held_since = self._clock() if held_since is None else held_since
                if holder.note.start in identity.starts[:-1] or holder.session == self._lock:
                    self._report_former_session(holder, "it is ended, and the replica goes on")
                    yield from consul.destroy_session(holder.session)
                elif not _descends(view.register, self.files.promised):
                    pass  # Consul went back: a dead session of ours may be back for some minutes
                elif asked_at - held_since > 2 * self._ttl_s:  # a dead session of ours would be over by now
                    if holder.note.replica != self._address() or asked_at - held_since > _FORGOTTEN_S:
                        raise BusyError(self._held_by(holder))
                    self._report_former_session(holder, "the replica enters once Consul has noticed that it ended")
                yield Pause(_AGAIN_S)
            elif not self._is_ours(view, member):
                why = "another directory has started under the id" if member is not None else "Consul has no note of it"
                if member is not None and identity.knows(member.note.start):
                    why = f"version and end are less than noted: {self._noted(member)}"
                self._take_new_id(why)
                held_since = None
            elif (yield from self._take_key(member)):
                self.log.info("replica_entered", id=identity.id, shard=identity.shard, role=self.role)
                return
            else:
                yield Pause(_AGAIN_S)

    def _holder(self, view: ShardView) -> Member | None:
        """Return the living replica that keeps us from entering: the one with our id, or else the one of our broker."""
        living = [each for each in view.members.values() if each.session not in ("", self._presence.session)]
        same = [each for each in living if each.id == self.files.identity.id]
        return next(iter(same or [each for each in living if each.note.broker == self._broker]), None)

    def _held_by(self, holder: Member) -> str:
        """Return why this replica cannot enter beside the living one."""
        identity, note = self.files.identity, holder.note
        if holder.id == identity.id:
            who = f"broker {note.broker}, session {holder.session}, at {note.replica}"
            return f"replica {identity.id} is held by another process ({who}): this directory is a copy"
        return (
            f"broker {note.broker} of the shard {identity.shard} runs already (replica {holder.id}, at {note.replica});"
            " give this one a KMQ_BROKER of its own, or end that one first"
        )

    def _report_former_session(self, member: Member, effect: str) -> None:
        """Log that a former session of ours holds our key, because Consul was restored or we ask another agent now.

        After a restore the agent does not know the session's check, which passes until the agent compares its state
        with Consul's servers. If we have written a later mark since, or this process began the session, it is certainly
        ours and can be ended.
        """
        if member.session != self._found:
            self.log.warn("replica_own_session_found", session=member.session, start=member.note.start, effect=effect)
            self._found = member.session

    def _is_ours(self, view: ShardView, member: Member | None) -> bool:
        """Return True if we are the replica of our id, as far as Consul can tell."""
        identity, promised = self.files.identity, self.files.promised
        if promised is not None and not _descends(view.register, promised):
            return True  # the register went back, and the notes with it: they prove nothing
        if member is None:  # under a hold Consul was emptied: a missing key proves nothing, a promise gives a vote
            is_hold = view.register is not None and not view.register.leader
            return not identity.starts or (is_hold and promised is not None)
        if member.note == self._note:
            return True
        version = promised.version.number if promised is not None else 0
        return identity.knows(member.note.start) and (version, self._work.stored()) >= self._noted(member)

    def _take_new_id(self, why: str) -> None:
        """Continue as another replica, without a promise."""
        before, new = self.files.identity, new_identity(self.files.identity.shard)
        self.log.warn("replica_new_id", before=before.id, id=new.id, reason=why, effect="it joins as a new one")
        self._work.act(None)
        self.files.save(new)
        self._spent = 0

    def _noted(self, member: Member) -> tuple[int, int]:
        return member.note.version.number if member.note.version is not None else 0, member.note.end

    def _take_key(self, member: Member | None) -> Steps[bool]:
        """Write the mark of this start into our key, and lock our key and our broker's name.

        Return False if the key has changed, or a lock is not granted: another replica of our broker may have been
        faster.
        """
        identity = self.files.identity
        key, note = self.keys.note(identity.id), self._new_note(identity.coming)
        unchanged = KvOperation("check-not-exists", key)
        if member is not None:
            unchanged = KvOperation("check-index", key, version=member.modified)
        session = self._presence.session
        ours = KvOperation("lock", key, encode_note(note), session=session)
        name = KvOperation("lock", self.keys.broker(self._broker), identity.id.encode(), session=session)
        try:
            yield from consul.txn([unchanged, ours, name])
        except Conflict:
            yield from self._presence.check()  # no lock is ever granted to a session that has ended
            return False
        self.files.save(identity.started())
        self._start, self._note, self._noted_at = identity.coming, note, self._clock()
        self._lock = self._presence.session
        return True

    # --- a turn ------------------------------------------------------------------------------------------------------

    def _turn(self) -> Steps[None]:
        watched = yield from consul.watch(self.keys.root, self._position, self._ttl_s / _TURNS)
        self._position = watched.position
        yield from self._presence.beat()  # after the wait: a process stopped meanwhile must not use what it read
        view = view_of(self.keys, watched.entries)
        self.seen = view, time.time()
        ours = view.members.get(self.files.identity.id)
        if ours is None or ours.session != self._presence.session:  # a session also ends with its node
            raise SessionLost("our key in Consul is not locked by us any more")
        if self._reached is None:
            self._reached, self._is_lost = self._clock(), False
        yield from self._promise(view)
        register = view.register if not self.problem and view.register == self.files.promised else None
        if register is not None:  # before the note says so: then nothing is confirmed or counted that it lacks
            self._act(view, register)
        yield from self._show_promise(view)
        note, noted = self._new_note(), ours.note  # as Consul has it; a restored one is older
        is_due = note != noted._replace(epoch=note.epoch, end=note.end, at=note.at)
        is_due |= note.end < noted.end  # after a cut: a later start that has less than the note says is another replica
        if is_due or self._clock() - self._noted_at >= _NOTE_S:
            yield from self._write_note(note)
        if register is not None and register == self.files.promised:
            yield from self._decide(view, register)

    def _act(self, view: ShardView, register: Register) -> None:
        leader, duty = view.members.get(register.leader), Duty(register, self.files.identity.id, "")
        duty = duty._replace(as_of=self._presence.last_beat)
        if leader is not None:
            doors = (("broker", leader.note.broker), *leader.note.doors)
            duty = duty._replace(leader=leader.note.replica, doors=doors, is_open=leader.note.opened == register.epoch)
        # The outcome of an epoch that it led before its start is unknown.
        is_spent = register.leader == duty.me and register.epoch == self._spent
        self._work.act(None if is_spent else duty)

    def why_not(self, peer: Peer) -> str:
        """Return why a peer is not accepted as this replica of this broker; "" if Consul knows it as alive.

        A peer that only compares is always accepted (compare.py).
        """
        if peer.replica == NOBODY:
            return ""
        member = self.seen[0].members.get(peer.replica) if self.seen is not None else None
        if member is None or not member.session:
            return "not_registered"
        return "" if member.note.broker == peer.broker else "another_broker"

    def _promise(self, view: ShardView) -> Steps[None]:
        """Promise the register if allowed; else find out what is wrong with it."""
        promised, register = self.files.promised, view.register
        if view.unreadable:
            self._set_problem(UNREADABLE, view.unreadable)
        elif register is None and promised is None:
            self._set_problem("")
        elif not _descends(register, promised):
            again = yield from self._read_again()
            if not _descends(again, promised):
                self._set_problem(WENT_BACK, _difference(again, promised))
        else:
            self._set_problem("")
            if register is not None and register != promised:
                if register.lineage != self._lineage:
                    self._work.adopt(register.lineage)
                    self._lineage = register.lineage
                before = self.role, promised.epoch if promised is not None else 0
                self.files.promise(register)
                if before != (self.role, register.epoch):
                    leader = view.broker(register.leader) if register.leader else "nobody"
                    self.log.info("replica_role", role=self.role, epoch=register.epoch, leader=leader)

    def _show_promise(self, view: ShardView) -> Steps[None]:
        """Write our promise to Consul while the register went back, for `kmq cluster recover`."""
        me = self.files.identity.id
        shown, wanted = view.promises.get(me), self.files.promised if self.problem == WENT_BACK else None
        if shown == wanted:
            return
        key = self.keys.promise(me)
        change = KvOperation("set", key, wanted.encode()) if wanted is not None else KvOperation("delete", key)
        try:
            yield from consul.txn([check_session(self.keys.note(me), self._presence.session), change])
        except Conflict as error:
            raise SessionLost(f"our key is not ours any more: {error}") from error

    def _read_again(self) -> Steps[Register | None]:
        """Return the register as a majority of Consul's servers has it."""
        entry = yield from consul.read(self.keys.register)
        try:
            return decode(entry.value, entry.key) if entry is not None else None
        except UnreadableRegister:
            return None

    def _set_problem(self, problem: str, reason: str = "") -> None:
        if problem == self.problem:
            return
        effect = "nothing is promised and nobody elected; the broker goes on under its promise"
        if problem == WENT_BACK:
            self.log.error("register_went_back", reason=reason, effect=effect)
        elif problem == UNREADABLE:
            self.log.error("register_unreadable", reason=reason, effect=effect)
        else:
            self.log.info("register_found_again", was=self.problem)
        self.problem = problem

    def _new_note(self, start: str = "") -> Note:
        promised = self.files.promised
        version = promised.version if promised is not None else None
        epoch, end = self._work.position()
        found = Note(self._broker, start or self._start, version, epoch, end, lineage=self._lineage)
        found = found._replace(replica=self._address(), doors=tuple(self._work.doors().items()))
        at = round(time.time(), 3)
        return found._replace(opened=self._work.opened(), follows=self._work.followed(), at=at)

    def _write_note(self, note: Note) -> Steps[None]:
        """Write our note. Raises SessionLost if we no longer hold the lock of our key."""
        key = self.keys.note(self.files.identity.id)
        try:
            yield from consul.txn([KvOperation("lock", key, encode_note(note), session=self._presence.session)])
        except Conflict as error:
            raise SessionLost(f"our key is not ours any more: {error}") from error
        self._note, self._noted_at = note, self._clock()

    # --- leading and electing ----------------------------------------------------------------------------------------

    def _decide(self, view: ShardView, register: Register) -> Steps[None]:
        """Do the work of our role under the promised register."""
        me = self.files.identity.id
        if register.leader == me:
            other = view.successor(without=me)
            if register.epoch == self._spent or self._work.is_spent(register.epoch):
                alone = me if self._has_waited() else None
                yield from self._elect(view, other or alone, "its leader was started anew")
            elif (yield from self._change_isr(view, register)):
                return
            elif other is not None and self._work.stands() and self._clock() - self._resigned >= 2 * self._lag_s:
                self._resigned = self._clock()
                yield from self._elect(view, other, "what its leader has numbered is not committed")
            elif register.level < (level := view.known_level) and (
                yield from write(self.keys, view, register.raised(level))
            ):
                self.log.info("replica_level", was=register.level, now=level)
        elif register.leader and not view.is_alive(register.leader) and self._has_waited():
            yield from self._elect(view, view.successor(), "its leader is gone")

    def _has_waited(self) -> bool:
        """Return True once Consul has answered for one TTL without a gap."""
        return self._reached is not None and self._clock() - self._reached >= self._ttl_s

    def _elect(self, view: ShardView, leader: str | None, reason: str) -> Steps[None]:
        """Elect `leader`, if it is not None. The first writer wins, and all obey it."""
        if leader is not None and view.register is not None and (yield from elect(self.keys, view, leader)):
            epoch = view.register.epoch + 1
            self._elections += 1
            self.log.info("replica_elected", leader=view.broker(leader), epoch=epoch, reason=reason)

    def _change_isr(self, view: ShardView, register: Register) -> Steps[bool]:
        """As the leader, add replicas that have what we have, remove absent ones. Return True if a change was due."""
        me, work = self.files.identity.id, self._work
        for member in view.members.values():
            if member.session and _may_join(view, register, member) and work.may_join(member.id):
                yield from self._write_isr(view, register, _joined(view, register.isr, member), "in", member.id)
                return True
        for away in register.isr:
            rest = [member for member in register.isr if member != away]
            is_heard = all(work.hears(member) for member in rest if member != me)
            if away == me or len(rest) < register.min_insync or not is_heard:
                continue
            if work.is_behind(away) or work.is_slow(away):
                why = "behind" if work.is_behind(away) else "slow"
                yield from self._write_isr(view, register, rest, "out", away, reason=why)
                return True
        return False

    def _write_isr(
        self, view: ShardView, register: Register, isr: list[str], what: str, who: str, **why: str
    ) -> Steps[None]:
        self._work.prepare_isr(isr)
        if (yield from write(self.keys, view, register.with_isr(isr))):
            brokers = ",".join(map(view.broker, isr))
            self.log.info("replica_isr", isr=brokers, broker=view.broker(who), change=what, **why)


def promise_version(files: ReplicaFiles, register: Register) -> Register | None:
    """Promise a version of our epoch that its leader has sent. Return the promised register; None if not allowed."""
    promised = files.promised
    if promised is None or (promised.epoch, promised.leader) != (register.epoch, register.leader):
        return None
    if register.descends_from(promised.version):
        if register != promised:
            files.promise(register)
        return register
    return promised if promised.descends_from(register.version) else None  # Consul was faster


def _descends(register: Register | None, promised: Register | None) -> bool:
    """Return True if a replica with this promise may promise the register."""
    return promised is None or (register is not None and register.descends_from(promised.version))


def _difference(register: Register | None, promised: Register | None) -> str:
    found = f"has version {register.version}" if register is not None else "is gone, or cannot be read"
    return f"the register {found}; promised is {promised.version if promised is not None else 'nothing'}"


def _may_join(view: ShardView, register: Register, member: Member) -> bool:
    """Return True if it belongs to a broker of the shard that has no other living replica in the ISR."""
    is_taken = any(view.is_alive(each) and view.broker(each) == member.note.broker for each in register.isr)
    return member.id not in register.isr and member.note.broker in register.brokers and not is_taken


def _joined(view: ShardView, isr: tuple[str, ...], member: Member) -> list[str]:
    """Return the ISR with a new member, which replaces the former replica of its broker."""
    others = [each for each in isr if each not in view.members or view.broker(each) != member.note.broker]
    return [*others, member.id]
