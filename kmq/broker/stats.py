"""The stats page: /dev/shm/<instance>.stats, where every process publishes its state, counters and times.

Layout      2: a line of text that names the data directory, then one row of 64 words of 8 bytes per process, then one
            histogram of 24 words for each of TIMED. Layout 1 had rows of 32 words and no histograms. A page of it that
            is found at a start, when its processes have ended, is carried over; to look at it, it is converted.
            Behind the histograms lies the row of the replica, which came later: nothing before it has moved. Behind
            that lie 8 words for each intake (KMQ_INTAKES), in their order: INTAKE_FIELDS.
            A histogram has 21 counts, one per bucket; then the sum of all times in microseconds, their number, and a
            spare word. Bucket i has the times of at most 64 µs * 2^i that no smaller bucket has; the last one has all
            longer times.
Owners      Each word of a row is written by its process only, except `clock_trust` (`kmq clock`), `starts`, which
            `kmq up` resets, the words of damage, which `kmq verify` writes too, and the row of a gateway, agent or
            replica that has ended for good, which the supervisor completes. Readers: `kmq status`, the gateway, the probes, and
            ingress for GET_ACK.
Invariant   Durability's `seq` never names a record that is not on disk. A page of another data directory is always
            wiped before it is used. All other values are hints for people.
            A histogram has one writer, which writes the sum and the number last: a reader finds at most as many times
            in them as in the buckets.
Versions    Fields and states are only ever appended, and 0 always means no value, so a page of an older release reads
            as one without values there. Layout 2 calls the directory by another name than layout 1, so a program
            of an older release finds another broker's page, not numbers in wrong places.
Memory      Of incidents one case per event, and the events are names in our source; peer and reason are cut at
            _LONGEST characters.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kmq.config.intakes import MOST as MOST_INTAKES
from kmq.config.settings import OWNER_WAIT_S, SHM, STAGES
from kmq.errors import BusyError, ConfigError
from kmq.files import file_id

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.config.intakes import IntakePort


# --- histogram -------------------------------------------------------------------------------------------------------

_FIRST_US = 64
_SHIFT = 6  # log2 of _FIRST_US
BUCKETS = 21
WORDS = 24
_LAST = BUCKETS - 1
_SUM, _COUNT = BUCKETS, BUCKETS + 1
BOUNDS_S = tuple((_FIRST_US << at) / 1e6 for at in range(_LAST))  # upper bounds of all buckets except the last


class HistogramSnapshot:
    """A histogram at one instant. `counts`: by bucket, not cumulative."""

    __slots__ = ("count", "counts", "sum_s")

    def __init__(self, counts: tuple[int, ...], sum_s: float, count: int) -> None:
        self.counts, self.sum_s, self.count = counts, sum_s, count


class Histogram:
    """Times in buckets of doubling width: WORDS words of shared memory."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview | None = None) -> None:
        if words is not None:
            self.lie_in(words)

    def lie_in(self, words: memoryview) -> None:
        """Use these words from now on."""
        self._words = words

    def observe(self, seconds: float, n: int = 1) -> None:
        """Count `n` events that took this long each."""
        us = int(seconds * 1e6) if seconds > 0 else 0  # a clock that was set back takes no time
        at = ((us - 1) >> _SHIFT).bit_length() if us > 0 else 0
        words = self._words
        words[at if at < _LAST else _LAST] += n
        words[_SUM] += us * n
        words[_COUNT] += n

    def snapshot(self) -> HistogramSnapshot:
        """Return the counts as they are now."""
        sum_us, count = self._words[_SUM], self._words[_COUNT]
        return HistogramSnapshot(tuple(self._words[:BUCKETS].tolist()), sum_us / 1e6, count)

    def wipe(self) -> None:
        """Forget all times."""
        for at in range(WORDS):
            self._words[at] = 0

    def words(self) -> list[int]:
        """Return a copy of all words."""
        return self._words.tolist()

    def take(self, words: Sequence[int]) -> None:
        """Copy these words, which are those of another histogram."""
        for at, word in enumerate(words):
            self._words[at] = word


def quantile(snapshot: HistogramSnapshot, q: float) -> float | None:
    """Return the time in seconds that a share `q` of the events did not exceed; None without an event.

    Within a bucket the events are taken to be spread evenly. The last bucket has no upper bound: its lower one is
    given.
    """
    total = sum(snapshot.counts)
    if not total:
        return None
    rank, below = q * total, 0
    for at, count in enumerate(snapshot.counts):
        if count and below + count >= rank:
            low = BOUNDS_S[at - 1] if at else 0.0
            high = BOUNDS_S[at] if at < _LAST else low
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return BOUNDS_S[-1]


def difference(new: HistogramSnapshot, old: HistogramSnapshot) -> HistogramSnapshot:
    """Return what was counted between two snapshots; all of `new` if the process was restarted in between."""
    counts = tuple(later - earlier for later, earlier in zip(new.counts, old.counts, strict=True))
    if new.count < old.count or min(counts) < 0:
        return new
    return HistogramSnapshot(counts, new.sum_s - old.sum_s, new.count - old.count)


# --- page ------------------------------------------------------------------------------------------------------------

_NAME, _DIRECTORY = "kmq-stats2", " directory="  # of the identity line
_NAME_1, _DIRECTORY_1 = "kmq-stats", " data="  # of that of layout 1
_TEXT = 1024  # bytes of the identity line
_ROW = 64  # words of a row
_FILE_BYTES = 8192
_ROW_1, _FILE_BYTES_1 = 32, 4096  # of layout 1
AGENT, REPLICA = "agent", "replica"
_FRONT = (*STAGES, "gateway", AGENT)  # whose rows lie before the histograms
PROCESSES = (*_FRONT, REPLICA)
TIMED = {"ingress": "ack", "durability": "sync", "router": "routed"}  # process → what its histogram measures
_POLL_S = 0.1
RESTARTED_S = 600  # a process that has lived for so long is not in a loop of restarts; the kubelet counts so, too
FRESH_S = 2.0  # a process without a heartbeat for longer is stopped, hung or dead

STATES = (
    *("", "starting", "waiting", "recovering", "ready", "disk_full", "draining", "stopped", "data_missing"),
    "following",  # in a shard: another broker leads, and this process has nothing to do
    "unled",  # in a shard: it waits for the replica, which knows no leader
)
ENDED = ("", "stopped", "data_missing")  # a predecessor's last state, if it was not killed while it had the row
ADMISSIONS = ("", "disk_full", "quota", "not_enough_replicas")
ROLES = ("", "waiting", "following", "starting", "leading")  # of a replica
PROBLEMS = ("", "register_went_back", "register_unreadable")  # of a replica
_FIELDS = (
    "pid",  # as its own container sees it
    "started",  # CLOCK_MONOTONIC, ns
    "heartbeat",  # CLOCK_MONOTONIC, ns
    "state",  # index into STATES
    "messages",  # moved since start
    "bytes",  # moved since start
    "seq",  # framer: last numbered; durability: last on disk; router: last routed
    "starts",  # of this process since the page was made, or since the last `kmq up`
    "refused",  # lines that became dead.malformed here
    "connections",  # ingress: open now
    "dropped",  # messages named in dropped.log here
    "unanswered",  # ingress: messages received that have no reply yet
    "duplicates",  # framer: messages that were stored before; the reply names the old seq
    "producers",  # framer: producer names remembered
    "remembered",  # framer: arbitrary message ids remembered
    "synced",  # durability: when the last sync returned, CLOCK_REALTIME, ns
    "port",  # ingress, gateway: where it listens
    "clock_offset",  # trusted time of day less CLOCK_MONOTONIC, ns, plus 2^62 (clock.py); it outlives the process
    "clock_suspect",  # CLOCK_MONOTONIC, ns, since when the present time of day is not trusted; 0: it is trusted
    "clock_trust",  # CLOCK_MONOTONIC, ns, when `kmq clock --trust` was last run
    "askers",  # ingress: connections open on the ack port
    "turned_away",  # ingress, gateway: connections and calls refused or ended because too many were open
    "cut_off",  # ingress, gateway: connections and calls ended by a deadline
    "unauthorized",  # ingress, gateway: connections and requests without a valid token
    "supervisor",  # pid of the supervisor that started it; 0: something else did
    "admission",  # index into ADMISSIONS: why ingress refuses new messages, what durability and the router wait for
    "certificate_from",  # ingress, gateway, replica: unix seconds from which the server's certificate chain is valid
    "certificate_until",  # and until which it is valid
    "client_ca_until",  # ingress, gateway, replica: unix seconds until which client certificates can be valid
    "epoch",  # agent: the last message of the Broadcast Queue that was processed
    "newest",  # agent: the last message that it knows of
    "failing",  # agent: 1 while a message cannot be processed; gateway: 1 while committed offsets cannot be read
    "unclean",  # 1: the predecessor of this process did not report its end, so it was killed or has crashed
    "oom_kills",  # durability: processes of its cgroup that the kernel killed for lack of memory, as the kernel counts
    "damage",  # damaged blocks or files that this process found since the page was made
    "damage_at",  # unix seconds: when it found the last one
    "disk_free",  # bytes; this and the next five: ingress, when it last looked
    "disk_size",
    "inodes_free",
    "inodes_total",  # 0: the file system does not count them
    "quota_used",  # an upper bound of the bytes under KMQ_DATA
    "quota_limit",  # KMQ_DATA_QUOTA
    "errs_auth",  # ingress: `!err` for a missing or wrong token
    "errs_format",  # ingress: `!err` for messages and hellos that are none, and what no other class has
    "errs_limit",  # ingress: `!err` because a limit is reached: disk, quota, connections, producers, topics
    "groups",  # gateway: consumer groups
    "groups_stalled",  # gateway: those of them that have not moved for minutes though there are messages for them
    "group_stalled_lag",  # gateway: the messages that these have before them
    "tokens_missing",  # 1: the file KMQ_TOKENS is missing or cannot be read
    "last_record",  # durability: unix ns at which the newest record was received that was there when it started
    "unclean_ends",  # how often the process, since the page was made, did not report its end
    "restart_streak",  # restarts in a row, each within RESTARTED_S of the start before; `kmq up` begins at 0 again
    "waits_since",  # CLOCK_MONOTONIC, ns: since when a block waits for room; agent, replica: since when Consul is gone
    "waited_at",  # CLOCK_MONOTONIC, ns: when the last of these waits ended
    "full_since",  # CLOCK_MONOTONIC, ns: the first of the waits that followed each other closely
    "slow_syncs",  # durability: how many of its last 16 syncs were slow (stage.py)
    "slow_sync_at",  # CLOCK_MONOTONIC, ns: when the last of them returned
    "clock_behind",  # framer: seconds that the time of day is behind the last record
    "oom_at",  # durability: unix seconds when `oom_kills` last grew
    "errs_order",  # ingress: `!err` because of who sent before: fenced, id reused or too old, drop_oldest
    "auth_missing",  # ingress, gateway: of `unauthorized`, those that showed no token
    "auth_local",  # ingress: of `unauthorized`, those that wanted reserved topics without the local token
    "oom_seen",  # durability: the kernel's count at the last look, plus 1
    "exit_code",  # with what code the process has ended; 0: it runs, or has ended in order
)
_REPLICA_FIELDS = {  # the replica's own names for words; most of them have a meaning in the rows of others only
    "hw": "seq",  # last seq that is committed
    "last": "newest",  # last seq in its WAL
    "followers": "connections",  # replicas that are connected to it
    "problem": "failing",  # index into PROBLEMS
    "role": "askers",  # index into ROLES; `epoch` and `version` are of the register that it has promised
    "version": "duplicates",
    "isr": "producers",  # how many replicas are in the ISR
    "in_isr": "remembered",  # 1: it is one of them
    "min_insync": "groups",
    "brokers": "groups_stalled",  # of the shard
    "elections": "turned_away",  # that it has carried out
    "cut_records": "cut_off",  # that it has cut from the end of its WAL
    "small_since": "waited_at",  # CLOCK_MONOTONIC, ns: since when a broker of the shard is not in the ISR
    "behind_since": "full_since",  # CLOCK_MONOTONIC, ns: since when a follower is out of the ISR, or a leader's hw stands
}
_KAFKA_FIELDS = {  # the same for the gateway, of its door for Kafka's clients; `kafka_producers`: for the framer
    "kafka_port": "epoch",  # 0: it has no such door
    "kafka_connections": "askers",  # open now
    "kafka_cached": "duplicates",  # batches that consumers got as they were produced
    "kafka_rendered": "newest",  # and those that were made from lines
    "kafka_misdirected": "unanswered",  # clients that ask where the broker is and never come to the address they are told
    "kafka_producers": "askers",  # of `producers`, those of Kafka's clients
}
INTAKE_FIELDS = (
    "port",  # where it listens; 0: it does not
    "lines",  # taken since ingress was started
    "bytes",  # of these lines
    "connections",  # open now
    "dropped",  # datagrams that the kernel could not keep until ingress read them
    "refused",  # connections and datagrams of addresses that KMQ_INTAKES_FROM does not have
)
_INTAKE = 8  # words
_LASTING = (
    *("starts", "clock_offset", "clock_suspect", "clock_trust"),
    *("unclean", "unclean_ends", "damage", "damage_at"),
    *("restart_streak", "oom_kills", "oom_at", "oom_seen"),
)


class Row:
    """The words of one process: each of _FIELDS is an attribute that reads and writes shared memory."""

    __slots__ = ("_words", "times")
    _words: memoryview
    times: Histogram | None  # of a process in TIMED

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...
        def __setattr__(self, name: str, value: int) -> None: ...

    def __init__(self, times: Histogram | None = None) -> None:
        self.times = times

    def lie_in(self, words: memoryview) -> None:
        """Use these words from now on."""
        self._words = words

    @property
    def age_s(self) -> float:
        """Return the seconds since the last heartbeat."""
        return (time.monotonic_ns() - self.heartbeat) / 1e9

    def silence(self, longest_s: float = FRESH_S) -> str:
        """Return a text on the missing heartbeat if the last one is older than `longest_s`; else ""."""
        if not self.pid:
            return "has not been started"
        age_s = self.age_s
        return f"has given no sign of life for {age_s:.1f} s" if age_s > longest_s else ""

    @property
    def restarts(self) -> int:
        """Return how often the process was restarted, by whatever starts it."""
        return max(0, self.starts - 1)

    @property
    def state_name(self) -> str:
        return STATES[self.state] if self.state < len(STATES) else "?"

    @property
    def role_name(self) -> str:
        return ROLES[self.role] if self.role < len(ROLES) else ""

    @property
    def problem_name(self) -> str:
        return PROBLEMS[self.problem] if self.problem < len(PROBLEMS) else "?"

    @property
    def admission_name(self) -> str:
        return ADMISSIONS[self.admission] if self.admission < len(ADMISSIONS) else ""

    def words(self) -> list[int]:
        """Return a copy of all words."""
        return self._words.tolist()

    def take(self, words: list[int]) -> None:
        """Copy these words, which are those of another row, into this row."""
        for at, word in enumerate(words):
            self._words[at] = word

    def begin(self, supervisor: int) -> None:
        """Take the row for this process: forget its predecessor except how it ended, and count the start."""
        self.unclean = int(self.state_name not in ENDED)
        self.unclean_ends += self.unclean
        before = self._streak()
        self.wipe()
        self.restart_streak = before
        self.starts += 1
        self.pid, self.supervisor = os.getpid(), supervisor
        self.started = self.heartbeat = time.monotonic_ns()
        self.state = STATES.index("starting")

    def end(self, exit_code: int) -> None:
        """Report the end of the process."""
        self.exit_code = exit_code
        self.state = STATES.index("stopped")

    def wait_for_data(self, supervisor: int) -> None:
        """Say that this process waits for the data directory, before it may take the row of its predecessor."""
        self.pid, self.supervisor = os.getpid(), supervisor
        self.heartbeat = time.monotonic_ns()
        self.state = STATES.index("data_missing")

    def end_of(self, pid: int, supervisor: int, exit_code: int) -> None:
        """Report the end of a process that could not do so itself, for example because it has ended before it began."""
        if self.pid != pid:
            self.wipe()
            self.pid, self.supervisor = pid, supervisor
            self.started = self.heartbeat = time.monotonic_ns()
        self.end(exit_code)

    def _streak(self) -> int:
        """Return how often the process, with this start, was restarted soon after a start."""
        is_soon = self.starts and self.started and time.monotonic_ns() - self.started < RESTARTED_S * 1_000_000_000
        return self.restart_streak + 1 if is_soon else 0

    def wipe(self) -> None:
        """Forget everything of a predecessor except the fields that outlive a process."""
        for at, name in enumerate(_FIELDS):
            if name not in _LASTING:
                self._words[at] = 0
        if self.times is not None:
            self.times.wipe()

    def found_damage(self, count: int = 1) -> None:
        """Count damage that was found now."""
        self.damage += count
        self.damage_at = int(time.time())


def _word(at: int) -> property:
    def get(row: Row) -> int:
        value: int = row._words[at]
        return value

    def put(row: Row, value: int) -> None:
        row._words[at] = value

    return property(get, put)


# Properties: every stage reads and writes some words in each turn, and __getattr__ would take seven times as long.
for _at, _name in enumerate(_FIELDS):
    setattr(Row, _name, _word(_at))
for _name, _same in (_REPLICA_FIELDS | _KAFKA_FIELDS).items():
    setattr(Row, _name, _word(_FIELDS.index(_same)))


class StatsPage:
    """All rows of one instance."""

    def __init__(self, instance: str, data_id: str, data: str) -> None:
        """Open the page; make or wipe it if needed. Raises BusyError while another data directory uses the instance."""
        self.path = f"{SHM}/{instance}.stats"
        self.data_id = data_id
        self._identity = _identity(data_id, data)
        self.rows = _rows()
        with self._locked():
            if not self._is_ours():
                self._take_over(instance)
                found = self._as_found()._mm
                same = found[:_TEXT] == self._identity  # the same directory in layout 1
                self._mm[0:_FILE_BYTES] = bytes(found if same else self._identity.ljust(_FILE_BYTES, b"\0"))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Map the file, made if it is missing, and keep other processes from taking it over meanwhile."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        except PermissionError:
            raise ConfigError(f"{self.path}: belongs to another user; use another KMQ_INSTANCE") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, _FILE_BYTES)
            self._map(fd)
            self._file = file_id(self.path)
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # the mapping keeps a duplicate of fd, so closing alone would keep the lock
            os.close(fd)

    def keep_in_place(self, process: str) -> None:
        """Continue in a new file if the file was removed, because no reader sees a removed file. Raises BusyError.

        The first process that notices copies all rows into the new file; every later process copies only its own row.
        `process`: the row of the caller.
        """
        if file_id(self.path) == self._file:
            return
        row = self.rows[process]
        old_page, own_row = bytes(self._mm), row.words()
        own_times = row.times.words() if row.times is not None else []
        with self._locked():
            if not self.identity():
                self._mm[0:_FILE_BYTES] = old_page
            elif not self._is_ours():
                raise BusyError(f"{self.path} is in use by another data directory now ({self.identity()})")
            else:
                row.take(own_row)
                if row.times is not None:
                    row.times.take(own_times)

    def _is_ours(self) -> bool:
        return self._mm[:_TEXT] == self._identity

    def copy(self) -> "StatsPage":
        """Return a read-only copy of the page as it is now, so that several questions get answers that agree."""
        page = _unmapped(self.path)
        page._lie_in(bytearray(self._mm))
        return page

    def _map(self, fd: int) -> None:
        self._lie_in(mmap.mmap(fd, _FILE_BYTES))

    def _lie_in(self, memory: mmap.mmap | bytearray) -> None:
        self._mm = memory
        words = memoryview(memory).cast("Q")
        start = _TEXT // 8
        for name in _FRONT:
            self.rows[name].lie_in(words[start : start + _ROW])
            start += _ROW
        for what in TIMED.values():
            self.histogram(what).lie_in(words[start : start + WORDS])
            start += WORDS
        self.rows[REPLICA].lie_in(words[start : start + _ROW])
        self._intakes = words[start + _ROW : start + _ROW + MOST_INTAKES * _INTAKE]

    def publish_intakes(self, counts: Sequence[Sequence[int]]) -> None:
        """Write what the intakes have counted: for each of them the values of INTAKE_FIELDS. Ingress does that."""
        for at, values in enumerate(counts):
            for word, value in enumerate(values):
                self._intakes[at * _INTAKE + word] = value

    def intakes(self, specs: "Sequence[IntakePort]") -> list[dict[str, int | str]]:
        """Return kind, topic and INTAKE_FIELDS of each entry of KMQ_INTAKES."""
        rows = (self._intakes[at * _INTAKE : (at + 1) * _INTAKE].tolist() for at in range(MOST_INTAKES))
        return [
            {"kind": spec.kind, "topic": spec.topic, **dict(zip(INTAKE_FIELDS, row, strict=False))}
            for spec, row in zip(specs, rows, strict=False)
        ]

    def histogram(self, what: str) -> Histogram:
        """Return the histogram of one of the values of TIMED. As a row, it stays when the page moves to another file."""
        times = next(self.rows[name].times for name in TIMED if TIMED[name] == what)
        assert times is not None
        return times

    def identity(self) -> str:
        return self._mm[:_TEXT].rstrip(b"\0").decode(errors="replace").strip()

    @property
    def directory(self) -> str:
        """The data directory that the page belongs to."""
        return self.identity().partition(_DIRECTORY)[2]

    def serves(self, data: str) -> bool:
        """Return True if it is the page of this data directory, not of another broker."""
        return self.identity().endswith(f"{_DIRECTORY}{os.path.abspath(data)}")

    def _take_over(self, instance: str) -> None:
        """Wait until all processes of the other directory or layout have ended. Raises BusyError if they live on."""
        deadline = time.monotonic() + 2 * OWNER_WAIT_S
        while (found := self._as_found()).is_in_use:
            if time.monotonic() > deadline:
                where = f"another data directory ({found.identity()}); give this broker an instance name of its own"
                if found._mm[:_TEXT] == self._identity:
                    where = "processes of an older release; end them first"
                raise BusyError(f"KMQ_INSTANCE={instance} is in use by {where}")
            time.sleep(_POLL_S)

    def _as_found(self) -> "StatsPage":
        """Return the page as this release understands it."""
        old = _converted(self._mm[:_FILE_BYTES_1])
        if old is None:
            return self
        page = _unmapped(self.path)
        page._lie_in(old)
        return page

    @property
    def is_in_use(self) -> bool:
        """Return True if a process of it was alive a moment ago."""
        rows = self.rows.values()
        return any(row.heartbeat and row.age_s < OWNER_WAIT_S and row.state_name not in ENDED for row in rows)


def _rows() -> dict[str, Row]:
    return {name: Row(Histogram() if name in TIMED else None) for name in PROCESSES}


def _identity(data_id: str, data: str) -> bytes:
    return f"{_NAME} data_id={data_id}{_DIRECTORY}{os.path.abspath(data)}\n".encode()[:_TEXT].ljust(_TEXT, b"\0")


def _converted(page: bytes | bytearray) -> bytearray | None:
    """Convert a layout 1 page to layout 2. Return None for any other bytes."""
    text = page[:_TEXT]
    if not text.startswith(f"{_NAME_1} ".encode()):
        return None
    text = text.replace(_NAME_1.encode(), _NAME.encode(), 1).replace(_DIRECTORY_1.encode(), _DIRECTORY.encode(), 1)
    made = bytearray(text[:_TEXT].ljust(_FILE_BYTES, b"\0"))
    for at in range(len(_FRONT)):
        old, new = _TEXT + at * 8 * _ROW_1, _TEXT + at * 8 * _ROW
        made[new : new + 8 * _ROW_1] = page[old : old + 8 * _ROW_1]
    return made


def _unmapped(path: str) -> StatsPage:
    page = StatsPage.__new__(StatsPage)
    page.path, page.rows = path, _rows()
    return page


def peek(instance: str, shm: str = SHM) -> StatsPage | None:
    """Return the page of an instance, to be read only; None if there is none. `shm`: the /dev/shm of another pod."""
    page = _unmapped(f"{shm}/{instance}.stats")
    try:
        fd = os.open(page.path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size < _FILE_BYTES_1:
            return None
        old = _converted(os.pread(fd, _FILE_BYTES_1, 0))
        if old is not None:
            page._lie_in(old)
        elif size < _FILE_BYTES:
            return None
        else:
            page._map(fd)
    finally:
        os.close(fd)
    return page


# --- incidents -------------------------------------------------------------------------------------------------------

_LONGEST = 200


class Incidents:
    """Events that clients cause: per event and sweep at most one short log line, so that nobody can fill the log."""

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._noted: dict[str, tuple[int, str, str]] = {}  # event → how often; last peer and reason

    def note(self, event: str, peer: str, reason: str) -> None:
        """Count an event, and keep this case for its log line."""
        count = self._noted[event][0] if event in self._noted else 0
        self._noted[event] = (count + 1, peer[:_LONGEST], reason[:_LONGEST])

    def say(self) -> None:
        """Write the log lines. Call once a sweep."""
        for event, (count, peer, reason) in self._noted.items():
            self._warn(event, count=count, peer=peer, reason=reason)
        self._noted.clear()


class Strangers:
    """Counts the peers that a listener does not serve in its row of the stats page, and notes them for the log."""

    def __init__(self, row: "Row", incidents: Incidents) -> None:
        self._row, self.note = row, incidents.note

    def turn_away(self, peer: str, reason: str) -> None:
        """Note that a peer was refused because too many are connected."""
        self._row.turned_away += 1
        self.note("turned_away", peer, reason)

    def cut_off(self, peer: str, reason: str) -> None:
        """Note that a peer's connection was ended, because it missed a deadline or does not read its responses."""
        self._row.cut_off += 1
        self.note("cut_off", peer, reason)

    def refuse(self, peer: str, reason: str, without: str = "") -> None:
        """Note that a peer has no valid token. `without`: "token" if it showed none, "local" if it lacks the local one."""
        self._row.unauthorized += 1
        if without == "token":
            self._row.auth_missing += 1
        elif without == "local":
            self._row.auth_local += 1
        self.note("unauthorized", peer, reason)
