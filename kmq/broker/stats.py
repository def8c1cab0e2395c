"""The stats page: /dev/shm/<instance>.stats, where every process publishes its state and counters.

Layout      a line of text that names the data directory, then one row of 8-byte words per process.
Owners      Each word of a row is written by its process only, except `clock_trust` (`kmq clock`) and `starts`, which
            `kmq up` resets. Readers: `kmq status`, the gateway, the probes, and ingress for GET_ACK.
Invariant   Durability's `seq` never names a record that is not on disk. A page of another data directory is always
            wiped before it is used. All other values are hints for people.
Versions    Fields and states are only ever appended, and 0 always means no value, so a page of an older release reads
            as one without values there.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kmq.errors import BusyError, ConfigError
from kmq.settings import OWNER_WAIT_S, SHM, STAGES
from kmq.watch import file_id

TYPE_CHECKING = False

_TEXT = 1024  # bytes of the identity line
_ROW = 32  # words of a row
_FILE_BYTES = 4096
AGENT = "agent"
PROCESSES = (*STAGES, "gateway", AGENT)
_POLL_S = 0.1
FRESH_S = 2.0  # a process without a heartbeat for longer is stopped, hung or dead

STATES = ("", "starting", "waiting", "recovering", "ready", "disk_full", "draining", "stopped")
ADMISSIONS = ("", "disk_full", "quota")
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
    "certificate_from",  # ingress, gateway: unix seconds from which the server's certificate chain is valid
    "certificate_until",  # and until which it is valid
    "client_ca_until",  # ingress, gateway: unix seconds until which client certificates can be valid
    "epoch",  # agent: the last message of the Broadcast Queue that was processed
    "newest",  # agent: the last message that it knows of
    "failing",  # agent: 1 while a message cannot be processed
)
_LASTING = ("starts", "clock_offset", "clock_suspect", "clock_trust")


class Row:
    """The words of one process: each of _FIELDS is an attribute that reads and writes shared memory."""

    __slots__ = ("_words",)
    _words: memoryview

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...
        def __setattr__(self, name: str, value: int) -> None: ...

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
        """Take the row for this process: forget its predecessor, and count the start."""
        self.wipe()
        self.starts += 1
        self.pid, self.supervisor = os.getpid(), supervisor
        self.started = self.heartbeat = time.monotonic_ns()
        self.state = STATES.index("starting")

    def wipe(self) -> None:
        """Forget everything of a predecessor except the fields that outlive a process."""
        for at, name in enumerate(_FIELDS):
            if name not in _LASTING:
                self._words[at] = 0


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


class StatsPage:
    """All rows of one instance."""

    def __init__(self, instance: str, data_id: str, data: str) -> None:
        """Open the page; make or wipe it if needed. Raises BusyError while another data directory uses the instance."""
        self.path = f"{SHM}/{instance}.stats"
        self._identity = f"kmq-stats data_id={data_id} data={os.path.abspath(data)}\n".encode()[:_TEXT]
        self.rows = {name: Row() for name in PROCESSES}
        with self._locked():
            if not self._is_ours():
                self._take_over(instance)
                self._mm[0:_FILE_BYTES] = self._identity.ljust(_TEXT, b"\0").ljust(_FILE_BYTES, b"\0")

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
        old_page, own_row = bytes(self._mm), self.rows[process].words()
        with self._locked():
            if not self.identity():
                self._mm[0:_FILE_BYTES] = old_page
            elif not self._is_ours():
                raise BusyError(f"{self.path} is in use by another data directory now ({self.identity()})")
            else:
                self.rows[process].take(own_row)

    def _is_ours(self) -> bool:
        return self._mm[:_TEXT] == self._identity.ljust(_TEXT, b"\0")

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
        for at, row in enumerate(self.rows.values()):
            start = _TEXT // 8 + at * _ROW
            row.lie_in(words[start : start + _ROW])

    def identity(self) -> str:
        return self._mm[:_TEXT].rstrip(b"\0").decode(errors="replace").strip()

    def serves(self, data: str) -> bool:
        """Return True if it is the page of this data directory, not of another broker."""
        return self.identity().endswith(f" data={os.path.abspath(data)}")

    def _take_over(self, instance: str) -> None:
        """Wait until all processes of the other directory have ended. Raises BusyError if they live on."""
        deadline = time.monotonic() + 2 * OWNER_WAIT_S
        while any(
            row.heartbeat and row.age_s < OWNER_WAIT_S and row.state_name != "stopped" for row in self.rows.values()
        ):
            if time.monotonic() > deadline:
                raise BusyError(
                    f"KMQ_INSTANCE={instance} is in use by another data directory ({self.identity()});"
                    " give this broker an instance name of its own"
                )
            time.sleep(_POLL_S)


def _unmapped(path: str) -> StatsPage:
    page = StatsPage.__new__(StatsPage)
    page.path, page.rows = path, {name: Row() for name in PROCESSES}
    return page


def peek(instance: str, shm: str = SHM) -> StatsPage | None:
    """Return the page of an instance, to be read only; None if there is none. `shm`: the /dev/shm of another pod."""
    page = _unmapped(f"{shm}/{instance}.stats")
    try:
        fd = os.open(page.path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(fd).st_size < _FILE_BYTES:
            return None
        page._map(fd)
    finally:
        os.close(fd)
    return page
