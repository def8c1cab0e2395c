"""The file `tier` of a partition: which of its old records lie in the store, where it begins, and its gaps.

    topics/orders/3/tier
        kmq-tier 1 lineage=<hex> log=orders/3 life=130
        184 add orders/3 life=130 base=1000 next=1512 seq=8012-9001 ts=1714500000.000100-1714500360.000200 bytes=… key=…
        190 drop orders/3 life=130 before=1512 why=retention
        0 gap orders/3 life=130 from=1512 to=1001000000 why=fork
        start 1200

`add`, a row: the records 1000…1511 are an object of the store. `drop`: rows that end there are no longer in force. If it
lies inside of a row, the partition begins there. If it lies after the end of the last row, the next row begins there.
`gap`: offsets that no record has (gaps.py). `start`: readers find nothing before it. The number in front is that of the
commit (kmq/tier/commits.py). `life` is the from_seq of the topic.

Owner       the router. It takes lines of this life that follow the last row, syncs them, and only then counts them.
Invariant   Rows lie one after the other: a row begins where the last one ends, after the gap there, or at a later drop.
            So the file alone says which records a row has. `start` only rises.
Crash       Lines are appended and synced at once, or the file is replaced. A line without its end is not there yet.
Readers     see rows only below the first local segment, and from `start` on. Rows that do not lead up to the first local
            segment without a hole are not seen at all.
Damage      Nobody reads or begins before the first local segment, until the rows are laid out again. What lies on the disk
            is read as ever. The same where the file was lost: a start of the router writes one that says nothing.
Memory      The parsed files that were read last, some hundred bytes a row.
"""

import os
import re
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kmq.errors import RetryError
from kmq.files import replace_file
from kmq.log.damage import DamageError

FILE = "tier"  # in the directory of a partition
UNKNOWN = b"kmq-tier 1 unknown\n"  # the file was lost: read as damaged until its rows are laid out again
CACHE = "tier/cache"  # below the data directory: objects that were fetched in
_MOST_CACHED = 1000  # parsed files

_HEAD = re.compile(r"kmq-tier 1 lineage=([0-9a-f]*) log=([^ ]+) life=(\d{1,19})")
_LINE = re.compile(r"(\d{1,20}) (add|drop|gap) ([^ ]+) life=(\d{1,19}) (.+)")
_ADD = re.compile(
    r"base=(\d{1,19}) next=(\d{1,19}) seq=(\d{1,19})-(\d{1,19}) ts=(\d{1,12}\.\d{6})-(\d{1,12}\.\d{6})"
    r" bytes=(\d{1,19}) size=(\d{1,19}) sha256=([0-9a-f]{64}) last=(\d{1,10}) key=([^ ]+)"
)
_DROP = re.compile(r"before=(\d{1,19}) why=[a-z]+")
_GAP = re.compile(r"from=(\d{1,19}) to=(\d{1,19}) why=[a-z]+")
FULL_KEY = re.compile(r"[0-9a-f]{32}/")  # with the lineage in front: of an object of another lineage
_START = re.compile(r"start (\d{1,19})")


class NotHereError(RetryError):
    """A record lies in the store alone, in the object of `row`. The gateway fetches it in."""

    def __init__(self, directory: str, life: int, row: "TierRow") -> None:
        self.directory, self.life, self.row = directory, life, row
        where = "/".join(directory.split("/")[-2:])
        super().__init__(
            f"{where}: offsets {row.base} to {row.next - 1} lie in KMQ_TIER; read them through the gateway"
        )


class TierRow(
    namedtuple(
        "TierRow",
        ("commit", "base", "next", "seqs", "times", "nbytes", "size", "sha256", "last", "key"),
    )
):
    """An object with the records base…next-1. `seqs`, `times` (µs): of the first and the last record.

    `nbytes` of lines, `size` as stored, `last`: crc32 of the last line.
    """

    __slots__ = ()

    def stamp_of(self, offset: int) -> tuple[int, int] | None:
        """Return (seq, recv_ts) of a record that begins or ends the row; None for the others."""
        stamps = {self.next - 1: (self.seqs[1], self.times[1]), self.base: (self.seqs[0], self.times[0])}
        return stamps.get(offset)

    def to_json(self) -> dict[str, int | str]:
        (low, high), (since, until) = self.seqs, self.times
        return {
            "base": self.base,
            "next": self.next,
            "first_seq": low,
            "last_seq": high,
            "first_ts": since,
            "last_ts": until,
            "bytes": self.nbytes,
            "size": self.size,
            "sha256": self.sha256,
            "last_crc32": self.last,
            "key": self.key,
            "commit": self.commit,
        }

    @classmethod
    def of_json(cls, found: dict[str, int | str]) -> "TierRow":
        """Raises KeyError, ValueError if a field is missing or wrong."""
        names = (
            "commit",
            "base",
            "next",
            "first_seq",
            "last_seq",
            "first_ts",
            "last_ts",
            "bytes",
            "size",
            "last_crc32",
        )
        commit, base, following, low, high, since, until, nbytes, size, last = (int(found[name]) for name in names)
        sha256, key = str(found["sha256"]), str(found["key"])
        return cls(commit, base, following, (low, high), (since, until), nbytes, size, sha256, last, key)

    def text(self) -> str:
        """Return what follows `add <log> life=<life> `."""
        (low, high), (since, until) = self.seqs, self.times
        return (
            f"base={self.base} next={self.next} seq={low}-{high} ts={_ts(since)}-{_ts(until)} bytes={self.nbytes}"
            f" size={self.size} sha256={self.sha256} last={self.last} key={self.key}"
        )


def _ts(micros: int) -> str:
    return f"{micros // 1_000_000}.{micros % 1_000_000:06d}"


def parse_row(commit: int, text: str) -> TierRow | None:
    """Return the row of `base=… next=… key=…`; None if it is not one."""
    found = _ADD.fullmatch(text)
    if found is None:
        return None
    base, following, low, high = map(int, found.groups()[:4])
    since, until = (int(found[at].replace(".", "")) for at in (5, 6))
    if not (base < following and low <= high):
        return None
    sizes = int(found[7]), int(found[8])
    return TierRow(commit, base, following, (low, high), (since, until), *sizes, found[9], int(found[10]), found[11])


def full_key(lineage: str, key: str) -> str:
    """Return where an object lies. Rows name objects of another lineage by their full keys."""
    return key if FULL_KEY.match(key) else f"{lineage}/{key}"


class LogRows(namedtuple("LogRows", ("life", "first_offset", "local_offset", "rows"))):
    """What a reader of the store needs of a log: its rows in force, by full keys.

    Readers find nothing before `first_offset`, and nothing from `local_offset` on in the rows.
    """

    __slots__ = ()


class ColdPart(namedtuple("ColdPart", ("local", "rows", "nbytes"))):
    """The rows below the first local offset, and their bytes there. Kept, because each read at the end asks for them."""

    __slots__ = ()


class TierFile:
    """What a file `tier` says. `rows`: in force, in order. `end`: where the next row begins; None without any row.

    `before`: of the last drop. `gaps`: pairs of offsets. `count`: lines of the file.
    """

    __slots__ = (
        *("before", "count", "drop", "end", "gaps", "head", "last_seq", "life", "log", "rows", "start"),
        "_cold",
    )

    def __init__(self, head: str, log: str, life: int) -> None:
        self.head, self.log, self.life = head, log, life
        self.rows: list[TierRow] = []
        self.end: int | None = None
        self.before = self.start = self.last_seq = self.count = 0
        self.drop = ""  # the line of the last drop
        self.gaps: tuple[tuple[int, int], ...] = ()
        self._cold = ColdPart(-1, [], 0)  # of the last call

    def copy(self) -> "TierFile":
        """Return a copy that may be changed, because others may hold this file."""
        made = TierFile(self.head, self.log, self.life)
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        made.rows, made._cold = [*self.rows], ColdPart(-1, [], 0)
        return made

    @property
    def lineage(self) -> str:
        return self.head.partition(" lineage=")[2].partition(" ")[0]

    def relabelled(self, lineage: str) -> "TierFile":
        """Return this file for another lineage. Its rows name objects of this lineage, so by full keys."""
        made = self.copy()
        made.head = self.head.replace(f"lineage={self.lineage} ", f"lineage={lineage} ", 1)
        made.rows = [row._replace(key=full_key(self.lineage, row.key)) for row in self.rows]
        return made

    def lines(self) -> list[str]:
        """Return the lines in force, each with the number of its commit, as another `tier` file takes them."""
        return [line for line in self.text().decode().splitlines()[1:] if not _START.fullmatch(line)]

    def apply(self, line: str) -> bool:
        """Apply a line. Return False if it is damaged, of another log, or does not follow."""
        self.count += 1
        self._cold = ColdPart(-1, [], 0)
        if start := _START.fullmatch(line):
            self.start = max(self.start, int(start[1]))
            return True
        found = _LINE.fullmatch(line)
        if found is None or (found[3], int(found[4])) != (self.log, self.life):
            return False
        if found[2] == "gap":
            return self._apply_gap(found[5])
        if found[2] == "add":
            return self._apply_row(parse_row(int(found[1]), found[5]))
        drop = _DROP.fullmatch(found[5])
        if drop is not None and int(drop[1]) > self.before:
            self.drop = line
            self._apply_drop(int(drop[1]))
        return drop is not None

    def _apply_row(self, row: TierRow | None) -> bool:
        if row is not None and self.end is not None and row.next <= self.end:
            return True  # applied before
        if row is None or not self.follows(row.base):
            return False
        self.rows.append(row)
        self.end, self.last_seq = row.next, row.seqs[1]
        self._begin_inside()
        return True

    def _apply_drop(self, before: int) -> None:
        self.before = before
        self.rows = [row for row in self.rows if row.next > before]
        self.end = max(before, self.end or 0)
        self._begin_inside()

    def _begin_inside(self) -> None:
        """Begin at the last drop if it lies inside of the first row: a file made from commits alone has no `start`."""
        if self.rows and self.rows[0].base < self.before:
            self.start = max(self.start, self.before)

    def _apply_gap(self, text: str) -> bool:
        found = _GAP.fullmatch(text)
        if found is None or int(found[1]) >= int(found[2]):
            return False
        self.gaps = tuple(sorted({*self.gaps, (int(found[1]), int(found[2]))}))
        return all(a[1] <= b[0] for a, b in pairwise(self.gaps))

    def follows(self, base: int) -> bool:
        """Return True if a row that begins with `base` follows the rows that there are. A drop may end inside of it."""
        if self.end is None or base == self.end or (self.end, base) in self.gaps:
            return True
        return not self.rows and base <= self.end == self.before

    def covers(self, first: int, end: int) -> bool:
        """Return True if each of the records first…end-1 is in a row, or was in one, or was dropped.

        A replica of a shard may have records before the first row, which the leader did not have.
        """
        begin = self.rows[0].base if self.rows else self.before
        is_before_rows = first < begin and self.before < min(begin, end)
        return end <= (self.end or 0) and not is_before_rows

    def cold(self, local: int) -> list[TierRow]:
        """Return the rows that readers need, given the first local offset: [] if a hole lies between. Do not change it."""
        found: list[TierRow] = self._part(local).rows
        return found

    def cold_bytes(self, local: int) -> int:
        """Return the bytes of lines that readers need of these rows, before the first local offset."""
        nbytes: int = self._part(local).nbytes
        return nbytes

    def _part(self, local: int) -> "ColdPart":
        part = self._cold
        if part.local != local:
            found = self._find_cold(local)
            nbytes = nbytes_before(found, local) - nbytes_before(found[:1], self.start)
            part = self._cold = ColdPart(local, found, nbytes)
        return part

    def _find_cold(self, local: int) -> list[TierRow]:
        if not self.rows or self.rows[0].base >= local or self.start >= local:
            return []
        found = [row for row in self.rows if row.base < local and row.next > self.start]
        is_hole = bool(found) and found[-1].next < local and (found[-1].next, local) not in self.gaps
        return [] if is_hole else found

    def begin(self, local: int) -> int:
        """Return the offset at which the partition begins for readers. `local`: its first local offset."""
        found = self.cold(local)
        return max(self.start, found[0].base if found else local)

    def text(self) -> bytes:
        """Return the file's content with what is in force only."""
        where = f"{self.log} life={self.life}"
        lines = [self.head, *(f"0 gap {where} from={first} to={to} why=fork" for first, to in self.gaps)]
        lines += [self.drop] if self.drop else []
        lines += [f"{row.commit} add {where} {row.text()}" for row in self.rows]
        lines += [f"start {self.start}"] if self.start else []
        return "".join(f"{line}\n" for line in lines).encode()


def empty(lineage: str, log: str, life: int) -> TierFile:
    """Return the content of a file without any row."""
    return TierFile(f"kmq-tier 1 lineage={lineage} log={log} life={life}", log, life)


def parse(content: bytes, log: str = "") -> TierFile | None:
    """Parse the content of a file `tier`. Return None if it is damaged, or of another partition than `log`."""
    head, *lines = content.decode("ascii", errors="replace").split("\n")
    label = _HEAD.fullmatch(head)
    if label is None or not lines or log not in ("", label[2]):
        return None
    found = TierFile(head, label[2], int(label[3]))
    lines.pop()  # without its end it is not there yet
    gaps = [line for line in lines if " gap " in line]
    for line in [*gaps, *(line for line in lines if " gap " not in line)]:  # rows may follow them
        if not found.apply(line):
            return None
    return found


# --- files -----------------------------------------------------------------------------------------------------------

_NOTHING = TierFile("", "", 0)
_cache: dict[str, tuple[tuple[int, int, int], TierFile]] = {}  # by path: inode, mtime and size, and what it says


def path_of(directory: str) -> str:
    return f"{directory}/{FILE}"


def may_exist(data: str) -> bool:
    """Return True if kmq.tier has run in a data directory, so that partitions may have rows."""
    return os.path.isdir(f"{data}/tier")


def is_known(directory: str) -> bool:
    """Return False if the file of a partition is damaged, or was lost."""
    try:
        of(directory)
    except DamageError:
        return False
    return True


def label_of(directory: str) -> tuple[str, str]:
    """Return (`<topic>/<partition>`, the data directory) of a partition's directory."""
    topic_directory, number = os.path.split(os.path.abspath(directory))
    topics, topic = os.path.split(topic_directory)
    return f"{topic}/{number}", os.path.dirname(topics)


def content_of(directory: str) -> bytes | None:
    """Return the content of a partition's file; None without one."""
    try:
        with open(path_of(directory), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def of(directory: str) -> TierFile:
    """Return the rows in the file of a partition; without a file, no row. Do not change the result: it is cached.

    Raises DamageError if the file is damaged: the first offset of the partition is unknown then.
    """
    path = path_of(directory)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return _NOTHING
    seen = status.st_ino, status.st_mtime_ns, status.st_size
    cached = _cache.get(path)
    if cached is None or cached[0] != seen:
        content = content_of(directory)
        if content is None:
            return _NOTHING
        found = parse(content, label_of(directory)[0])
        if found is None:
            raise DamageError(path, 0, len(content), 0, 0, "does not say which records lie in the store")
        if len(_cache) >= _MOST_CACHED:
            _cache.clear()
        cached = _cache[path] = seen, found
    return cached[1]


def append(directory: str, before: TierFile, lines: Sequence[str], is_new: bool) -> TierFile:
    """Add lines to the file of a partition, and return what it says then; it is on disk when this returns.

    `before`: what it said; not changed. `is_new`: replace the file, because it is missing or damaged. It is also
    replaced if half of it would no longer be in force. Raises ValueError if a line does not follow.
    """
    after = before.copy()
    for line in lines:
        if not after.apply(line):
            raise ValueError(f"{line[:200]!r}: does not follow")
    after.count = before.count + len(lines)
    path = path_of(directory)
    if is_new or after.count > 2 * (len(after.rows) + len(after.gaps) + 2) or not _is_whole(path):
        replace_file(path, content := after.text())
        after.count = content.count(b"\n") - 1
        return after
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        text = "".join(f"{line}\n" for line in lines).encode()
        if os.write(fd, text) != len(text):
            raise RetryError(f"{path}: was written in part only")  # the next call cuts it
        os.fsync(fd)
    finally:
        os.close(fd)
    return after


def _is_whole(path: str) -> bool:
    """Return True if the last line of a file has its end; False if the file is empty, or was removed."""
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
    except OSError:
        return False


# --- objects that were fetched in ------------------------------------------------------------------------------------


def cached_path(directory: str, life: int, row: TierRow) -> str:
    """Return where the lines of a row lie once they were fetched in: a segment, with an index beside it."""
    log, data = label_of(directory)
    topic, _, number = log.rpartition("/")
    return f"{data}/{CACHE}/{topic}/{life}/{number}/{row.base}/log"


def holding(found: Sequence[TierRow], offset: int) -> TierRow | None:
    """Return the row with the record at `offset`, or the one after it; None if it lies after all of these rows."""
    at = max(0, bisect_right(found, offset, key=lambda row: row.base) - 1)
    return next((row for row in found[at : at + 2] if offset < row.next), None)


def nbytes_before(found: Iterable[TierRow], end: int) -> int:
    """Return the bytes of lines that rows have before offset `end`; of a row across it, its share by offsets."""
    total = 0
    for row in found:
        count = min(row.next, end) - row.base
        total += row.nbytes * max(0, count) // (row.next - row.base)
    return total
