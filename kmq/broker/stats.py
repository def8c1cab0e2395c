"""The stats page: /dev/shm/<instance>.stats, where every process publishes its state, counters and times.

Layout      3: a line of text that names the data directory, then one row of 64 words of 8 bytes per process: first the
            words common to all, then its own. In layout 2 all processes had the same 64 words. A start that finds such
            a page converts and keeps it, once its processes have ended; readers convert a copy.
            After the rows of five come one histogram of 24 words for each of TIMED (histogram.py), and after these the
            row of the replica; then 8 words for each intake (KMQ_INTAKES), in their order: INTAKE_FIELDS; then 16 words
            for each other broker of a shard, while this one leads: FOLLOWER_FIELDS and the broker's name; then 2 words
            for each of TRENDS, which the gateway writes. The last row of the page is that of the tier's process, after a
            note of 256 bytes for each of NOTES.
Owners      Each word of a row is written by its process only, except `clock_trust` (`kmq clock`), `starts`, which
            `kmq up` resets, the words on damage, which `kmq verify` writes too, and the row of a gateway, agent or
            replica that has ended for good, which the supervisor completes. Readers: `kmq status`, the gateway, the
            probes, and ingress for GET_ACK.
Invariant   Durability's `seq` never names a record that is not on disk. A page of another data directory is always
            wiped before it is used. All other values are hints for people.
Roles       In a shard a row describes the role in force: each stage clears its words and times when its role ends.
Versions    Fields and states are only ever appended, and 0 always means no value, so a page of an older release reads
            as one without values there. Each layout has a name of its own, so a program of an older release finds
            another broker's page, not numbers in wrong places.
Memory      Incidents keep one case per event, and our source fixes the events; peer and reason are cut at _LONGEST
            characters.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kmq.broker.histogram import WORDS, Histogram
from kmq.config.intakes import MOST as MOST_INTAKES
from kmq.config.settings import OWNER_WAIT_S, SHM, STAGES
from kmq.errors import BusyError, ConfigError
from kmq.files import file_id

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.config.intakes import IntakePort

    Follower = tuple[str, dict[str, int]]  # a broker, and its FOLLOWER_FIELDS


# --- page ------------------------------------------------------------------------------------------------------------

_NAME, _NAME_2 = "kmq-stats3", "kmq-stats2"  # of the identity line; of that of layout 2
_DIRECTORY = " directory="  # of the identity line
_TEXT = 1024  # bytes of the identity line
_ROW = 64  # words of a row
_FILE_BYTES = 8192
AGENT, REPLICA, TIER = "agent", "replica", "tier"
_FRONT = (*STAGES, "gateway", AGENT)  # whose rows lie before the histograms
PROCESSES = (*_FRONT, REPLICA, TIER)
TIMED = {"ingress": "ack", "durability": "sync", "router": "routed"}  # process → what its histogram measures
_STARTS = {name: _TEXT // 8 + at * _ROW for at, name in enumerate(_FRONT)}  # process → the first word of its row
_HISTOGRAMS = _TEXT // 8 + len(_FRONT) * _ROW
_STARTS[REPLICA] = _HISTOGRAMS + len(TIMED) * WORDS
_STARTS[TIER] = _FILE_BYTES // 8 - _ROW  # at the end: TRENDS before it may grow
NOTES = (TIER, "gateway")  # processes with a note for people beside their words
_NOTE = 256  # bytes of a note
_POLL_S = 0.1
RESTARTED_S = 600  # a process that has lived for so long is not in a loop of restarts; the kubelet counts so, too
FRESH_S = 2.0  # a process without a heartbeat for longer is stopped, hung or dead

STATES = (
    *("", "starting", "waiting", "recovering", "ready", "disk_full", "draining", "stopped", "data_missing"),
    "following",  # in a shard: another broker leads, and this process has nothing to do
    "unled",  # in a shard: waits, because the replica knows no leader
)
ENDED = ("", "stopped", "data_missing")  # a predecessor's last state, if it was not killed while it had the row
ADMISSIONS = ("", "disk_full", "quota", "not_enough_replicas")
ROLES = ("", "waiting", "following", "starting", "leading")  # of a replica
PROBLEMS = ("", "register_went_back", "register_unreadable")  # of a replica
TIER_PROBLEMS = ("", "refused", "fenced", "ahead", "damaged")  # why the tier's process copies nothing
TIER_REQUESTS = (  # call to the store, answer
    *(("create", "ok"), ("create", "failed"), ("get", "ok"), ("get", "missing"), ("get", "failed")),
    *(("names", "ok"), ("names", "failed"), ("delete", "ok"), ("delete", "failed")),
)
_SHARED = (  # the first words of each row
    "pid",  # as its own container sees it
    "started",  # CLOCK_MONOTONIC, ns
    "heartbeat",  # CLOCK_MONOTONIC, ns
    "state",  # index into STATES
    "supervisor",  # pid of the supervisor that started it; 0: something else did
    "starts",  # of this process since the page was made, or since the last `kmq up`
    "unclean",  # 1: the predecessor of this process did not report its end, so it was killed or has crashed
    "unclean_ends",  # how often the process, since the page was made, did not report its end
    "restart_streak",  # restarts in a row, each within RESTARTED_S of the start before; `kmq up` begins at 0 again
    "exit_code",  # with what code the process has ended; 0: it runs, or has ended in order
    "messages",  # moved since start
    "bytes",  # moved since start
    "seq",  # framer: last numbered; durability: last on disk; router: last routed; replica: last that is committed
    "connections",  # open now; of a replica, those of other replicas
    "refused",  # lines that became dead.malformed here
    "dropped",  # messages named in dropped.log here
    "admission",  # index into ADMISSIONS: why ingress refuses new messages, what durability and the router wait for
    "damage",  # damaged blocks or files that this process found since the page was made
    "damage_at",  # unix seconds: when it found the last one
    "clock_offset",  # trusted time of day less CLOCK_MONOTONIC, ns, plus 2^62 (clock.py); it outlives the process
    "clock_suspect",  # CLOCK_MONOTONIC, ns, since when the present time of day is not trusted; 0: it is trusted
    "clock_trust",  # CLOCK_MONOTONIC, ns, when `kmq clock --trust` was last run
    "waits_since",  # CLOCK_MONOTONIC, ns: since when a block waits for room; agent, replica: since when Consul is gone
    "waited_at",  # CLOCK_MONOTONIC, ns: when the last of these waits ended
    "full_since",  # CLOCK_MONOTONIC, ns: the first of the waits that followed each other closely
)
_OWN_AT = 32  # the first word that is specific to the process
_SERVER = (  # of processes that listen to clients
    "port",  # where it listens
    "turned_away",  # connections and calls refused or ended because too many were open
    "cut_off",  # connections and calls ended by a deadline
    "unauthorized",  # connections and requests without a valid token
    "auth_missing",  # those of `unauthorized` without a token
    "auth_local",  # those of `unauthorized` that wanted reserved topics without the local token
    "tokens_missing",  # 1: the file KMQ_TOKENS is missing or cannot be read
)
_TLS = (
    "certificate_from",  # unix seconds from which the server's certificate chain is valid
    "certificate_until",  # and until which it is valid
    "client_ca_until",  # unix seconds until which client certificates can be valid
)
_OWN: dict[str, tuple[str, ...]] = {  # the words from _OWN_AT on
    "ingress": (
        *_SERVER,
        *_TLS,
        "askers",  # connections open on the ack port
        "unanswered",  # messages received that have no reply yet
        "disk_free",  # bytes; this and the next five: when it last looked
        "disk_size",
        "inodes_free",
        "inodes_total",  # 0: the file system does not count them
        "quota_used",  # an upper bound of the bytes under KMQ_DATA
        "quota_limit",  # KMQ_DATA_QUOTA
        "errs_auth",  # `!err` for a missing or wrong token
        "errs_format",  # `!err` for invalid messages and hellos, and for all that no other class has
        "errs_limit",  # `!err` because a limit is reached: disk, quota, connections, producers, topics
        "errs_order",  # `!err` because of earlier messages: fenced, id reused or too old, drop_oldest
    ),
    "framer": (
        "duplicates",  # messages that were stored before; the reply names the old seq
        "producers",  # producer names remembered
        "remembered",  # arbitrary message ids remembered
        "clock_behind",  # seconds that the time of day is behind the last record
        "kafka_producers",  # of `producers`, those of Kafka's clients
    ),
    "durability": (
        "synced",  # when the last sync returned, CLOCK_REALTIME, ns
        "last_record",  # unix ns at which the newest record was received that was there when it started
        "slow_syncs",  # how many of its last 16 syncs were slow (stage.py)
        "slow_sync_at",  # CLOCK_MONOTONIC, ns: when the last of them returned
        "oom_kills",  # processes of its cgroup that the kernel killed for lack of memory, as the kernel counts
        "oom_at",  # unix seconds when `oom_kills` last grew
        "oom_seen",  # the kernel's count at the last look, plus 1
    ),
    "router": (),
    "gateway": (
        *_SERVER,
        *_TLS,
        "failing",  # 1 while committed offsets cannot be read
        "doors_closed",  # a bit for each of ports.GATEWAY_DOORS that could not be opened
        "groups",  # consumer groups
        "groups_stalled",  # groups that have not moved for minutes although messages wait for them
        "group_stalled_lag",  # the lag of these groups, in messages
        "groups_crashing",  # groups whose members repeatedly die before they commit
        "letters_refused",  # messages whose dead letters are refused for good
        "nacked_waiting",  # nacked messages in partitions whose owners use Kafka's protocol
        "kafka_port",  # 0: it has no door for Kafka's clients
        "kafka_connections",  # open now
        "kafka_cached",  # batches sent to consumers as they were produced
        "kafka_rendered",  # batches made from stored lines
        "kafka_misdirected",  # clients that ask for the broker's address and never connect to it
        "full_in",  # seconds until the disk or the quota is full, at the rate of the last minutes; 0: not known
        "tier_failing_since",  # CLOCK_MONOTONIC, ns: since when readers wait for an object that the store does not give
        "cache_full_since",  # CLOCK_MONOTONIC, ns: since when an object waits for room in tier/cache
        "tier_damaged",  # objects of old records that were missing or altered; the note says which was the last
    ),
    AGENT: (
        "epoch",  # the last message of the Broadcast Queue that was processed
        "newest",  # the last message that it knows of
        "failing",  # 1 while a message cannot be processed
    ),
    REPLICA: (
        *_TLS,
        "role",  # index into ROLES; `epoch` and `version` are of the register that it has promised
        "epoch",
        "version",
        "problem",  # index into PROBLEMS
        "last",  # last seq in its WAL
        "brokers",  # of the shard
        "min_insync",
        "isr",  # how many replicas are in the ISR
        "in_isr",  # 1: it is one of them
        "isr_replaced",  # 1: all brokers of the ISR run with other directories (kmq/replica/shard.py)
        "elections",  # carried out by it
        "cut_records",  # cut from the end of its WAL
        "small_since",  # CLOCK_MONOTONIC, ns: since when a broker of the shard is not in the ISR
        "behind_since",  # CLOCK_MONOTONIC, ns: since when a follower is out of the ISR, or a leader's seq does not rise
    ),
    TIER: (
        "standing",  # index into TIER_PROBLEMS
        "oldest",  # unix seconds at which the oldest synced record was received that is not in the store; 0: all are
        "failing_since",  # CLOCK_MONOTONIC, ns: since when the store does not answer; 0: it does
        "commits",  # number of the last commit
        "objects",  # made since its start
        "behind_bytes",  # of old records that local limits would delete from the disk, and that are not in the store
        "due_since",  # CLOCK_MONOTONIC, ns: since when there are some without a break; it outlives the process
        "local_limit",  # bytes: the sum of local_retention_bytes over partitions with tier=on
        "rows",  # objects in force with old records of partitions
        "row_bytes",  # bytes of lines in them
        "orphans",  # objects deleted since its start, because no commit names them
        "received",  # bytes that came from the store since its start
        *(f"{call}_{answer}" for call, answer in TIER_REQUESTS),  # requests since its start
    ),
}
_FIELDS_2 = (  # the words of each row in layout 2
    *(
        "pid",
        "started",
        "heartbeat",
        "state",
        "messages",
        "bytes",
        "seq",
        "starts",
        "refused",
        "connections",
        "dropped",
    ),
    *("unanswered", "duplicates", "producers", "remembered", "synced", "port", "clock_offset", "clock_suspect"),
    *("clock_trust", "askers", "turned_away", "cut_off", "unauthorized", "supervisor", "admission", "certificate_from"),
    *("certificate_until", "client_ca_until", "epoch", "newest", "failing", "unclean", "oom_kills", "damage"),
    *("damage_at", "disk_free", "disk_size", "inodes_free", "inodes_total", "quota_used", "quota_limit", "errs_auth"),
    *("errs_format", "errs_limit", "groups", "groups_stalled", "group_stalled_lag", "tokens_missing", "last_record"),
    *("unclean_ends", "restart_streak", "waits_since", "waited_at", "full_since", "slow_syncs", "slow_sync_at"),
    *("clock_behind", "oom_at", "errs_order", "auth_missing", "auth_local", "oom_seen", "exit_code"),
)
INTAKE_FIELDS = (
    "port",  # where it listens; 0: it does not
    "lines",  # taken since ingress was started
    "bytes",  # of these lines
    "connections",  # open now
    "dropped",  # datagrams dropped by the kernel before ingress read them
    "refused",  # connections and datagrams from addresses outside KMQ_INTAKES_FROM
)
_INTAKE = 8  # words
FOLLOWER_FIELDS = (
    "connected",  # 1: it follows this leader
    "in_isr",  # 1: it is in the ISR
    "ack_delay_us",  # from a block that is sent to its confirmation, smoothed; 0: nothing was measured yet
    "slow_since",  # CLOCK_MONOTONIC, ns: since when its delay is a multiple of the others'; 0: it is not
    "lag",  # records on the leader's disk that it has not confirmed
)
_FOLLOWER, _FOLLOWER_NAME, _MOST_FOLLOWERS = 16, 8, 4  # words, words of the name, brokers of a shard except the leader
TRENDS = (  # what the gateway judges over minutes (kmq/gateway/core/trends.py); only ever appended
    *("flapping", "dropped", "refused", "errors", "unauthorized", "turned_away"),
    *("slow_acks", "slow_sync", "disk_fills", "quota_fills"),
    *("lag_grows", "compactor_behind", "agent_behind", "agent_disconnected"),
)
_TREND = 2  # words: the figures that the finding names; the first is 0 while the trend is not in force
_LASTING = (
    *("starts", "clock_offset", "clock_suspect", "clock_trust"),
    *("unclean", "unclean_ends", "damage", "damage_at"),
    *("restart_streak", "oom_kills", "oom_at", "oom_seen"),
    "due_since",
)
_OF_PROCESS = ("pid", "started", "heartbeat", "state", "supervisor")  # in a shard these outlive a role


class Row:
    """The words of one process, as attributes that read and write shared memory: the shared words, and its own.

    page.rows["framer"].producers = 3; `page.rows["router"].producers` is an AttributeError
    """

    __slots__ = ("_words", "times")
    _words: memoryview
    fields: dict[str, int]  # name → number of the word
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

    def copy_from(self, words: list[int]) -> None:
        """Copy the words of another row into this row."""
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
        """Report that this process waits for the data directory, before it may take its predecessor's row."""
        self.pid, self.supervisor = os.getpid(), supervisor
        self.heartbeat = time.monotonic_ns()
        self.state = STATES.index("data_missing")

    def end_of(self, pid: int, supervisor: int, exit_code: int) -> None:
        """Report the end of a process that could not do so itself, for example because it failed before its start."""
        if self.pid != pid:
            self.wipe()
            self.pid, self.supervisor = pid, supervisor
            self.started = self.heartbeat = time.monotonic_ns()
        self.end(exit_code)

    def _streak(self) -> int:
        """Return the number of quick restarts in a row, including this start."""
        is_soon = self.starts and self.started and time.monotonic_ns() - self.started < RESTARTED_S * 1_000_000_000
        return self.restart_streak + 1 if is_soon else 0

    def wipe(self, fields: Collection[str] = ()) -> None:
        """Forget everything of a predecessor except the fields that outlive a process, and those in `fields`."""
        lasting = {self.fields[name] for name in (*_LASTING, *fields) if name in self.fields}
        for at in range(_ROW):
            if at not in lasting:
                self._words[at] = 0
        if self.times is not None:
            self.times.wipe()

    def found_damage(self, count: int = 1) -> None:
        """Count damage, found now."""
        self.damage += count
        self.damage_at = int(time.time())


def _word(at: int) -> property:
    def get(row: Row) -> int:
        value: int = row._words[at]
        return value

    def put(row: Row, value: int) -> None:
        row._words[at] = value

    return property(get, put)


def _row_of(process: str) -> type[Row]:
    """Return the class of a process's row: with properties, because __getattr__ would take seven times as long."""
    fields = {name: at for at, name in enumerate(_SHARED)} | {
        name: _OWN_AT + at for at, name in enumerate(_OWN[process])
    }
    words = {name: _word(at) for name, at in fields.items()}
    return type(f"{process.capitalize()}Row", (Row,), {"__slots__": (), "fields": fields, **words})


ROWS = {process: _row_of(process) for process in PROCESSES}


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
                same = found[:_TEXT] == self._identity  # the same directory in layout 2
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
                row.copy_from(own_row)
                if row.times is not None:
                    row.times.copy_from(own_times)

    def _is_ours(self) -> bool:
        return self._mm[:_TEXT] == self._identity

    def copy(self) -> "StatsPage":
        """Return a read-only copy of the page as it is now, so that all values read from it agree."""
        page = _unmapped(self.path)
        page._lie_in(bytearray(self._mm))
        return page

    def _map(self, fd: int) -> None:
        self._lie_in(mmap.mmap(fd, _FILE_BYTES))

    def _lie_in(self, memory: mmap.mmap | bytearray) -> None:
        self._mm = memory
        words = memoryview(memory).cast("Q")
        for name, start in _STARTS.items():
            self.rows[name].lie_in(words[start : start + _ROW])
        for at, what in enumerate(TIMED.values()):
            self.histogram(what).lie_in(words[_HISTOGRAMS + at * WORDS : _HISTOGRAMS + (at + 1) * WORDS])
        start = _STARTS[REPLICA] + _ROW
        self._intakes = words[start : start + MOST_INTAKES * _INTAKE]
        start += MOST_INTAKES * _INTAKE
        self._followers = words[start : start + _MOST_FOLLOWERS * _FOLLOWER]
        start += _MOST_FOLLOWERS * _FOLLOWER
        self._trends = words[start : start + len(TRENDS) * _TREND]

    def leave_role(self, process: str) -> None:
        """In a shard, clear what a process published in a role that has ended: a row describes the role in force."""
        self.rows[process].wipe(_OF_PROCESS)
        if process == "ingress":
            self.publish_intakes([[0] * len(INTAKE_FIELDS)] * MOST_INTAKES)

    def publish_intakes(self, counts: Sequence[Sequence[int]]) -> None:
        """Write the counters of the intakes, for each the values of INTAKE_FIELDS. For ingress."""
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

    def publish_followers(self, found: "Sequence[Follower]") -> None:
        """Write what the leader of a shard knows of its other brokers. For the replica."""
        for at in range(_MOST_FOLLOWERS):
            name, values = found[at] if at < len(found) else ("", {})
            words = [values.get(field, 0) for field in FOLLOWER_FIELDS]
            words += [0] * (_FOLLOWER - _FOLLOWER_NAME - len(words))
            words += memoryview(name.encode().ljust(8 * _FOLLOWER_NAME, b"\0")).cast("Q").tolist()
            for word, value in enumerate(words):
                self._followers[at * _FOLLOWER + word] = value

    def followers(self) -> "list[Follower]":
        """Return name and FOLLOWER_FIELDS of each other broker of the shard that this one leads."""
        found = []
        for at in range(_MOST_FOLLOWERS):
            words = self._followers[at * _FOLLOWER : (at + 1) * _FOLLOWER]
            name = bytes(words[_FOLLOWER_NAME:]).rstrip(b"\0").decode(errors="replace")
            if name:
                found.append((name, dict(zip(FOLLOWER_FIELDS, words.tolist(), strict=False))))
        return found

    def tier_lacks(self) -> tuple[int, float]:
        """Return how many records KMQ_TIER lacks, and the age of the oldest in seconds. A follower copies nothing.

        A process `tier` that is silent or has ended says nothing: then these are the records since its last sign of life.
        """
        row, replica, last = self.rows[TIER], self.rows[REPLICA], self.rows["durability"].seq
        age_s = max(0.0, time.time() - row.oldest) if row.oldest else 0.0
        is_away = bool(row.silence()) or row.state_name == "stopped"
        if is_away and last > row.seq > 0 and (not replica.pid or replica.role_name == "leading"):
            age_s = max(age_s, row.age_s)
        return max(0, last - row.seq) if age_s else 0, age_s

    def write_note(self, process: str, text: str) -> None:
        """Write the note of one of NOTES; what does not fit is cut. For that process."""
        content = text.encode()[: _NOTE - 1].decode(errors="ignore").encode()
        at = self._note_at(process)
        self._mm[at : at + _NOTE] = content.ljust(_NOTE, b"\0")

    def note_of(self, process: str) -> str:
        """Return the note of one of NOTES. While it is being written it may be mixed: it is for people."""
        at = self._note_at(process)
        return bytes(self._mm[at : at + _NOTE]).partition(b"\0")[0].decode(errors="replace")

    def _note_at(self, process: str) -> int:
        return 8 * _STARTS[TIER] - _NOTE * (len(NOTES) - NOTES.index(process))

    def publish_trend(self, code: str, figure: int = 0, other: int = 0) -> None:
        """Write the figures of one of TRENDS; without figures the trend is not in force. For the gateway."""
        at = TRENDS.index(code) * _TREND
        self._trends[at], self._trends[at + 1] = figure, other

    def trends(self) -> dict[str, tuple[int, int]]:
        """Return the trends in force with their figures; {} without a running gateway."""
        row = self.rows["gateway"]
        if row.silence() or row.state_name == "stopped":
            return {}
        words = self._trends.tolist()
        found = {code: (words[at * _TREND], words[at * _TREND + 1]) for at, code in enumerate(TRENDS)}
        return {code: figures for code, figures in found.items() if figures[0]}

    def histogram(self, what: str) -> Histogram:
        """Return the histogram of one of the values of TIMED. Like a row, it follows the page to another file."""
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
        old = _converted(self._mm[:_FILE_BYTES])
        if old is None:
            return self
        page = _unmapped(self.path)
        page._lie_in(old)
        return page

    @property
    def is_in_use(self) -> bool:
        """Return True if a process of the page was alive a moment ago."""
        rows = self.rows.values()
        return any(row.heartbeat and row.age_s < OWNER_WAIT_S and row.state_name not in ENDED for row in rows)


def _rows() -> dict[str, Row]:
    return {name: row(Histogram() if name in TIMED else None) for name, row in ROWS.items()}


def _identity(data_id: str, data: str) -> bytes:
    return f"{_NAME} data_id={data_id}{_DIRECTORY}{os.path.abspath(data)}\n".encode()[:_TEXT].ljust(_TEXT, b"\0")


def _converted(page: bytes | bytearray) -> bytearray | None:
    """Convert a layout 2 page to layout 3: what has the same name in both. Return None for any other bytes."""
    if not page.startswith(f"{_NAME_2} ".encode()):
        return None
    made = bytearray(page.replace(_NAME_2.encode(), _NAME.encode(), 1))
    found, words = _unmapped(""), memoryview(page).cast("Q")
    found._lie_in(made)
    for name, at in _STARTS.items():
        old, row = dict(zip(_FIELDS_2, words[at : at + _ROW], strict=True)), found.rows[name]
        row.copy_from([0] * _ROW)
        for field, word in row.fields.items():
            row._words[word] = old.get(field, 0)
    return made


def _unmapped(path: str) -> StatsPage:
    page = StatsPage.__new__(StatsPage)
    page.path, page.rows = path, _rows()
    return page


def peek(instance: str, shm: str = SHM) -> StatsPage | None:
    """Return the page of an instance, read-only; None if it has no page. `shm`: the /dev/shm of another pod."""
    page = _unmapped(f"{shm}/{instance}.stats")
    try:
        fd = os.open(page.path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size < _FILE_BYTES:
            return None
        old = _converted(os.pread(fd, _FILE_BYTES, 0))
        if old is not None:
            page._lie_in(old)
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
        """Count an event, and keep peer and reason for its log line."""
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
        """Note an ended connection: it missed a deadline, read no responses, or spoke HTTP or TLS to a line port."""
        self._row.cut_off += 1
        self.note("cut_off", peer, reason)

    def refuse(self, peer: str, reason: str, without: str = "") -> None:
        """Note that a peer has no valid token. `without`: "token" without any token, "local" without the local one."""
        self._row.unauthorized += 1
        if without == "token":
            self._row.auth_missing += 1
        elif without == "local":
            self._row.auth_local += 1
        self.note("unauthorized", peer, reason)
