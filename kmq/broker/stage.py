"""What every stage has besides its job: settings, the stats row, signals, locks and rings, waiting, and its exit.

A signal handler only sets a flag; the loop acts on it. SIGTERM or SIGINT: drain from the front, for at most DRAIN_S,
and exit 0. A second signal ends the stage at once, which is as safe as SIGKILL.

Holds       Lock files, and ends of rings. Other processes find the stage by their names.
Invariant   A stage whose lock file, ring or bell was removed always ends (exit code 75). If it continued, no process
            could find it, and a second stage of its kind could start beside it.
            A stage that gives way to a lock ends (exit code 69) once another broker holds that lock. So if two brokers
            use one directory, one of them gets all of it. In a shard a stage works in one generation of the role page
            (kmq/links/role.py). When the generation changes, it releases everything and re-executes itself under the
            same pid; this does not count as a restart. One log line always says why the stage has ended.
Delays      The stage notes its delays on the stats page, so that one look at the page can judge it (health.py): waits
            for room in a ring, slow syncs, kills for lack of memory.
Not covered Kills before the stats page was made, and a kill that ends the whole container: its cgroup is gone then.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from kmq import files
from kmq.broker.data_directory import AGAIN, open_page
from kmq.broker.stats import ADMISSIONS, ENDED, FRESH_S, STATES, Row
from kmq.config.settings import DRAIN_S, Settings, load
from kmq.errors import EXIT_OK, BusyError, ConfigError, KmqError, Stopped, of_os_error
from kmq.files import keep_others_out
from kmq.links import received
from kmq.links.doorbell import RemovedError
from kmq.links.fifo import open_fifo
from kmq.links.layout import Identity, make_identity, shm_path
from kmq.links.ownership import LOOK_S, NOTICE_S, FileLock, describe, is_of_another_broker
from kmq.links.received import ReceivedReader, ReceivedWriter
from kmq.links.ring import RingReader, RingWriter
from kmq.links.role import FOLLOWING, LEADING, STARTING, SYNCED, RolePage
from kmq.links.staging import area_bytes
from kmq.log.damage import DamageError
from kmq.logfmt import Logger, obey

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from typing import TypeVar

    _End = TypeVar("_End", RingReader, ReceivedReader)

_SPACE_POLL_S = 0.25  # between two attempts to write to a full disk: well under the 2 s in which writing must resume
_PEER_POLL_S = 0.02  # between two looks for a missing peer
_ROLE_POLL_S = 0.1  # between two looks for work in a shard

# In a shard: in which roles of its broker a stage works.
_WORKS_IN = {
    "ingress": (LEADING,),
    "framer": (STARTING, LEADING),
    "durability": (FOLLOWING, STARTING, LEADING),
    "router": (FOLLOWING, STARTING, LEADING),
}


class RoleChanged(Exception):
    """The role of this broker in its shard has changed: the stage restarts."""


def _supervisor() -> int:
    """Return the pid of the supervisor that started this stage (argument `--with`); 0: something else started it."""
    return int(sys.argv[2]) if sys.argv[1:2] == ["--with"] else 0


def _is_any(pattern: str) -> bool:
    """Return True if a file fits the pattern."""
    from glob import iglob  # few starts need it

    return bool(pattern) and next(iglob(pattern), "") != ""


class Stage:
    """One running stage."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.log = Logger(name)
        obey(settings.log_format, settings.log_level, settings.log_bytes, settings.log_files)
        self.most_files = files.claim()
        self.stopping = False
        self.deadline = 0.0  # monotonic; set once the stage is told to stop
        if settings.ignored:
            self.log.info("service_links_ignored", names=",".join(settings.ignored))
        if settings.retired:
            effect = "nothing reads them any more, so they may be removed"
            self.log.warn("retired_settings_ignored", names=",".join(settings.retired), effect=effect)
        self.who = describe(name, settings.data, settings.instance)
        self.owns_row = AGAIN in sys.argv
        self.role: RolePage | None = None  # in a shard, once `await_role` has returned
        self.generation = 0
        self.leader: dict[str, str] | None = {}  # while it has no work: see RolePage.leader
        self._waits_on: RolePage | None = None  # while it has no work
        self._held: list[FileLock | RingWriter | RingReader | ReceivedWriter | ReceivedReader | RolePage] = []
        self._gives_way_to: FileLock | None = None
        self._synced: int | None = None  # the FIFO for `note_sync`
        self._check_held_at = 0
        # Readable after a signal. Register it in every poll: otherwise Python would resume the wait after the handler.
        self.signalled, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # `begin_anew` blocked them
        # Every stage keeps both FIFOs open, because a FIFO loses its content when its last end is closed.
        self.raw = open_fifo(settings.pipes, "raw")
        self.acks = open_fifo(settings.pipes, "acks")
        self.page = open_page(name, settings, _supervisor(), self.log, lambda: self.stopping)
        self.data_id, self.row = self.page.data_id, self.page.rows[name]

    def _on_signal(self, number: int, frame: object) -> None:
        if self.stopping:
            os._exit(128 + number)
        self.stopping = True
        self.deadline = time.monotonic() + DRAIN_S

    def own(self, path: str, what: str, traces: str = "") -> FileLock:
        """Take the lock that makes this stage the only one of its kind, then its row of the stats page.

        The order matters: a second stage, whose lock is refused, must not wipe the durable cursor of the first.
        `traces`: a pattern of files that a holder leaves behind. If such files exist without a lock file, the lock file
        may have been deleted under a living holder, which then needs time to notice.
        """
        owner = FileLock(path)
        try:
            owner.acquire(what, self.who)
        except BusyError as err:
            if not _supervisor() and self.row.state_name in ENDED:  # else a supervisor reports it, or the row is in use
                self.row.end_of(os.getpid(), 0, err.exit_code)
            raise
        self._held.append(owner)
        if owner.is_new and _is_any(traces):
            self.log.warn(
                "lock_file_missing", file=path, effect=f"waiting {NOTICE_S:g} s for a holder to notice that too"
            )
            until = time.monotonic() + NOTICE_S
            while time.monotonic() < until:  # without a heartbeat: the row is not ours yet
                time.sleep(_PEER_POLL_S)
                self._check_held()
        if not self.owns_row:
            self.owns_row = True
            self.row.begin(_supervisor())
        self._check_role()  # after the lock: `replica` looks at the locks after it has changed the generation
        return owner

    # --- the role in a shard -----------------------------------------------------------------------------------------

    def await_role(self, meanwhile: "Callable[[Stage], None] | None" = None) -> None:
        """In a shard, return once this stage has work in its broker's role. Raises Stopped.

        `meanwhile`: runs until `has_work` returns True.
        """
        if not self.settings.shard or self.has_work():
            return
        self.log.info("waiting", peer="work in the role of this broker, or a leader of the shard")
        if meanwhile is not None:
            meanwhile(self)
        while not self.has_work():
            time.sleep(_ROLE_POLL_S)

    def has_work(self) -> bool:
        """Return True if this stage has work in its broker's role, and begin the role. Else write a heartbeat."""
        page = self._waits_on = RolePage.find(self.settings.instance, self.data_id, self._waits_on)
        role = page.read() if page is not None else None
        if page is not None and role is not None and role.role in _WORKS_IN[self.name] and self._may_serve(page):
            if self.role is None:
                self.role, self.generation = page, role.generation
                self._held.append(page)
            return True
        self.leader = page.leader if page is not None else {}
        if not self.owns_row and (self.row.state_name in ENDED or self.row.age_s > FRESH_S):
            self.owns_row = True
            self.row.begin(_supervisor())
        if self.owns_row:
            self.state("following" if role is not None and role.role in (FOLLOWING, STARTING) else "unled")
        if self.stopping:
            raise Stopped("stopped while it had no work in the shard")
        return False

    def _check_role(self) -> None:
        """Raise RoleChanged if the role in which this stage began has ended."""
        role = self.role
        if role is not None and (role.generation != self.generation or not self._may_serve(role)):
            raise RoleChanged

    def _may_serve(self, page: RolePage) -> bool:
        """Return False for ingress unless the doors of this broker are open."""
        return self.name != "ingress" or page.leads

    @property
    def epoch(self) -> int | None:
        """The epoch in which this broker leads its shard; None without one."""
        return self.role.read().epoch if self.role is not None else None

    def begin_anew(self) -> None:
        """Re-execute this program in the same process, which releases all locks and rings. Raises Stopped."""
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))  # the next program receives them
        if self.stopping:
            raise Stopped("told to stop when the role of its broker in the shard ended")
        self.log.info("role_left")
        if self.owns_row:
            self.page.leave_role(self.name)
        self.state("unled")
        more = [] if AGAIN in sys.argv else [AGAIN]
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *more])

    @property
    def hw(self) -> int | None:
        """The seq up to which all is committed in the shard; None without a shard: all synced records are."""
        return self.role.hw if self.role is not None else None

    def note_sync(self) -> None:
        """Tell `replica` that more is on disk."""
        if self.role is not None:
            if self._synced is None:
                self._synced = open_fifo(self.settings.pipes, SYNCED)
            with contextlib.suppress(BlockingIOError):  # full: `replica` is awake anyway
                os.write(self._synced, b"s")

    def give_way(self, path: str) -> None:
        """From now on, end this stage once another broker holds the lock file `path`."""
        self._gives_way_to = FileLock(path)

    def _check_held(self) -> None:
        """Raise RemovedError if something was removed or replaced, BusyError if this stage has to give way."""
        lock = self._gives_way_to
        if lock is not None and is_of_another_broker(holder := lock.holder(), self.who) and lock.is_held():
            raise BusyError(f"{lock.path} is held by {holder}: one broker per directory")
        for held in self._held:
            if not held.is_in_place():
                raise RemovedError(
                    f"{held.path}: it, or a bell of it, was removed or replaced while this broker used it;"
                    " nothing acknowledged is lost"
                )

    def rewrite_rings(self) -> None:
        """Write removed rings again, with their messages, for the stages that start next.

        The removal may still be going on: systemd's RemoveIPC removes the semaphores first.
        """
        time.sleep(LOOK_S)
        for ring in self._held:
            if isinstance(ring, (FileLock, RolePage)) or os.path.exists(ring.path) or not ring.may_write_again():
                continue
            with contextlib.suppress(OSError, ConfigError):  # no space: acknowledged messages are in the WAL
                ring.write_again()
                self.log.warn("ring_written_again", ring=ring.name, reason="its file was removed")

    def open_ring(self, name: str, first_seq: Callable[[], tuple[int, int]]) -> RingWriter:
        """Return the writing end of a ring. `first_seq` gives the start of a new ring: next seq, last recv_ts (µs).

        While a stage still reads a ring whose name was removed, no new ring is made: both rings would continue from the
        same seq.
        """

        def make() -> tuple[int, int]:
            self._await_reader(name)
            return first_seq()

        ring = RingWriter(self.settings.instance, name, self.ring_identity(name), self.who, make, self.log)
        self._held.append(ring)
        return ring

    def open_received(self) -> ReceivedWriter:
        """Return the writing end of the ring `received`."""
        ring = ReceivedWriter(
            self.settings.instance,
            received.identity(self.data_id, self.settings.max_line),
            self.who,
            self.log,
            before_make=lambda: self._await_reader(received.NAME),
        )
        self._held.append(ring)
        return ring

    def _await_reader(self, name: str) -> None:
        reader = FileLock(self._reader_lock(name))
        if reader.is_held():
            what = f"the end of the stage that reads a removed ring {name}: {reader.holder()}"
            self.wait_for(what, lambda: None if reader.is_held() else True)

    def attach_ring(self, name: str) -> RingReader | None:
        """Return the reading end of a ring; None until its writer has made the ring."""
        return self._attach(
            name, lambda: RingReader.attach(self.settings.instance, name, self.ring_identity(name), self.who)
        )

    def attach_received(self) -> ReceivedReader | None:
        """Return the reading end of the ring `received`; None while ingress has not made it."""
        return self._attach(
            received.NAME, lambda: ReceivedReader.attach(self.settings.instance, self.data_id, self.who, self.acks)
        )

    def _attach(self, name: str, attach: "Callable[[], _End | None]") -> "_End | None":
        instance = self.settings.instance
        if not os.path.exists(shm_path(instance, name)):
            return None
        lock = FileLock(self._reader_lock(name))  # first: it tells the writer that the ring may have a reader
        lock.acquire(f"ring {instance}.{name} (reader)", self.who)
        ring = attach()
        if ring is None:
            lock.release()
        else:
            self._held += lock, ring
        return ring

    def _reader_lock(self, name: str) -> str:
        return f"{self.settings.pipes}/{name}.owner"

    def state(self, name: str) -> None:
        """Report a state (one of STATES) in the stats page, with a heartbeat."""
        self.row.state = STATES.index(name)
        self.row.heartbeat = time.monotonic_ns()

    def beat(self) -> None:
        """Write a heartbeat. Raises RemovedError if a lock file, a ring or a bell of this stage was removed."""
        self.row.heartbeat = now = time.monotonic_ns()
        self._check_role()
        if now >= self._check_held_at:
            self._check_held_at = now + int(LOOK_S * 1e9)
            self.page.keep_in_place(self.name)
            self._check_held()

    def check(self) -> None:
        """Write a heartbeat. Raises Stopped when the time to drain is over. Call in every wait."""
        self.beat()
        if self.stopping and time.monotonic() > self.deadline:
            raise Stopped("the time to drain is over; what is left stays in the rings and the FIFO")

    def pause(self, seconds: float) -> None:
        """Sleep, then `check`."""
        time.sleep(seconds)
        self.check()

    def wait_for(self, what: str, attempt: Callable[[], object]) -> object:
        """Call `attempt` until its result is not None, and return the result. Logs once that `what` is awaited."""
        result = attempt()
        if result is None:
            self.log.info("waiting", peer=what)
            self.state("waiting")
        while result is None:
            if self.stopping:
                raise Stopped(f"stopped while waiting for {what}")
            self.pause(_PEER_POLL_S)
            result = attempt()
        return result

    def wait_for_room(self, path: str, lacks: str = "disk_full") -> None:
        """Report that a write found no space, and wait briefly; the caller then retries. `lacks`: one of ADMISSIONS."""
        if self.row.state != STATES.index("disk_full"):
            self.log.warn("disk_full", file=path, lacks=lacks, effect="writing pauses, producers feel backpressure")
            self.state("disk_full")
        self.row.admission = ADMISSIONS.index(lacks)
        self.pause(_SPACE_POLL_S)

    def end_disk_full(self) -> None:
        """End what `wait_for_room` has reported. Call after every write that may have waited for space."""
        if self.row.state == STATES.index("disk_full"):
            self.log.info("disk_space_recovered")
            self.row.admission = 0
            self.state("draining" if self.stopping else "ready")

    def ready(self, **fields: object) -> None:
        """Report that the stage is in its loop; `fields` are for the log."""
        self.log.info("ready", pid=os.getpid(), **fields)
        self.row.admission = 0
        self.state("ready")

    def ring_identity(self, name: str) -> Identity:
        """Return what the ring `name` must look like under these settings."""
        return ring_identity(self.settings, self.data_id, name)


def ring_identity(settings: Settings, data_id: str, name: str) -> Identity:
    """Return what the ring `name` of this data directory must look like."""
    policy = (settings.policy_framed if name == "framed" else settings.policy_durable) or settings.policy
    extra = 2 * area_bytes(settings.max_line) if name == "framed" else 0
    return make_identity(data_id, settings.ring_slots, settings.ring_bytes, extra, policy)


# --- delays ----------------------------------------------------------------------------------------------------------

SLOW_NS = 1_000_000_000  # of a sync: a disk for a database takes 1 to 30 ms, a network disk up to 100
_PAUSE_NS = 2_000_000_000  # a ring that had room for so long is not full any more
_LAST_SYNCS = (1 << 16) - 1
_CGROUP = "/sys/fs/cgroup"
_OOM_LOOK_S = 10.0


def wait_for_ring(row: Row, check: Callable[[], None], ring: RingWriter, nbytes: int, count: int) -> None:
    """Return when a block of this size fits into the ring, and note the wait in the row. Call only if it does not fit.

    `waits_since`: when the wait for this block began. `waited_at`: when the last wait ended. `full_since`: when the
    first wait began of a series of waits in close succession.
    """
    row.waits_since = now = time.monotonic_ns()
    if now - row.waited_at > _PAUSE_NS:
        row.full_since = now
    ring.wait_for_room(nbytes, count, check)
    row.waits_since, row.waited_at = 0, time.monotonic_ns()


class SlowSyncs:
    """Remembers which of the last syncs were slow."""

    def __init__(self, row: Row) -> None:
        self._row, self._slow = row, 0

    def observe(self, seconds: float) -> None:
        """Count one sync."""
        is_slow = seconds * 1e9 > SLOW_NS
        self._slow = (self._slow << 1 | is_slow) & _LAST_SYNCS
        self._row.slow_syncs = self._slow.bit_count()
        if is_slow:
            self._row.slow_sync_at = time.monotonic_ns()


def _oom_counts(proc: str, top: str) -> Iterator[str]:
    """Yield the files that may have the kernel's count of kills, the nearest first.

    Version 2 of cgroups counts in memory.events, version 1 in memory.oom_control. A container sees its cgroup at the
    top.
    """
    with contextlib.suppress(OSError), open(f"{proc}/self/cgroup", encoding="ascii", errors="replace") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            path = path.rstrip("/")
            if not controllers:
                yield f"{top}{path}/memory.events"
            elif "memory" in controllers.split(","):
                yield f"{top}/memory{path}/memory.oom_control"
    yield f"{top}/memory.events"
    yield f"{top}/memory/memory.oom_control"


def _kills_in(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


class OomKills:
    """How often the kernel has killed a process of this cgroup: the words `oom_kills`, `oom_at`, `oom_seen` of a row.

    `look` reads one small file, at most once in 10 s.
    """

    def __init__(self, row: Row, proc: str = "/proc", top: str = _CGROUP) -> None:
        self._row, self._due = row, 0.0
        self._path = next((path for path in _oom_counts(proc, top) if _kills_in(path) is not None), "")

    def look(self) -> None:
        """Bring the row up to the kernel's count. The kernel begins at 0 again with a new container."""
        now = time.monotonic()
        if not self._path or now < self._due:
            return
        self._due = now + _OOM_LOOK_S
        count, row = _kills_in(self._path), self._row
        if count is None:
            return
        seen = row.oom_seen - 1 if row.oom_seen else count  # the first look only takes the kernel's count
        new = count - seen if count >= seen else count
        if new:
            row.oom_kills += new
            row.oom_at = int(time.time())
        row.oom_seen = count + 1


# --- running ---------------------------------------------------------------------------------------------------------


def main(name: str, run: Callable[[Stage], None], meanwhile: Callable[[Stage], None] | None = None) -> int:
    """Run one stage to its end and return its exit code. One log line always says why the stage has ended.

    `meanwhile`: runs in a shard while the stage has no work in its broker's role (Stage.await_role).
    """
    keep_others_out()
    log = Logger(name)
    stage: Stage | None = None
    try:
        stage = Stage(name, load())
        # The objects made so far live as long as the process, so the garbage collector need not walk them.
        gc.freeze()
        try:
            stage.await_role(meanwhile)
            run(stage)
        except RoleChanged:
            stage.begin_anew()
        code, reason = EXIT_OK, "drained"
    except Stopped as err:
        code, reason = err.exit_code, str(err)
    except (KmqError, OSError) as err:
        error = of_os_error(err) if isinstance(err, OSError) else err
        code, reason = error.exit_code, str(error)
        log.error("failed", exit_code=code, reason=reason)
        if isinstance(err, RemovedError) and stage is not None:
            stage.rewrite_rings()
        if isinstance(err, DamageError) and stage is not None and stage.owns_row and not stage.row.damage:
            stage.row.found_damage()  # once, although each start finds it again
    if stage is not None and stage.owns_row:
        stage.row.heartbeat = time.monotonic_ns()
        stage.row.end(code)
    log.info("stopped", exit_code=code, reason=reason)
    return code
