"""Commits: the numbered texts that say which objects count. Each number is created once, and never changes.

    kmq-tier 1 commit=184 writer=<id>@<host> start=<nonce of the claim> nonce=<of this try> ts=1714500000.000100
    wal first=8012 last=9001 ts=1714500000.000100-1714500360.000200 bytes=67108811 size=9120331 sha256=… crc=… key=wal/…
    file router.ckpt seq=9001 bytes=… size=… sha256=… key=files/…
    end crc32=1234567

    claim pod=<id>                                     alone in its commit: its writer writes from now on
    claim shard=s epoch=8                              the same of the leader of a shard, in its epoch
    claim pod=<id> origin=<lineage>                    the first one of a lineage that a restore has made of another one
    claim successor=<lineage>                          a restore takes over; no broker of this lineage writes any more
    begins successor=<lineage>                         that restore is whole
    table __kmq/0 life=1 base=0 end=12 seq=9001 …      a partition as a whole, up to offset `end`; `gaps=5-9+…`: without the
                                                       offsets 5…8, which no record has
    drop wal before=8012 why=retention                 rows that end there are no longer in force; the next may begin there
    drop orders/0 life=130 why=deleted                 this table or file is no longer in force
    add orders/3 life=130 base=1000 next=1512 …        a row of a partition (kmq/log/rows.py)
    drop orders/3 life=130 before=1512 why=retention   rows that end there are no longer in force; inside of a row: the
                                                       partition begins there; beyond the last row: the next one begins
                                                       there. why=deleted: the partition is gone
    gap orders/3 life=130 from=1512 to=9000 why=fork   offsets that no record has; the next row begins after them
    gone <key>                                         a dropped object was deleted

Owner       the process whose claim is the last one. It reads all commits, then claims; until its claim is made it
            writes nothing, and after another claim it writes nothing any more.
Invariant   Numbers begin with 1 and have no gap. A row of a log begins where the last one ends, or at a later `drop …
            before`. A text that breaks this raises DamagedError: nothing is guessed, and nothing is written.
Crash       An unknown answer to `create` is settled by reading the number: equal bytes are this writer's own.
State       state/<n>.gz has all lines in force after commit n, so that a start need not read a year of commits.
            Everybody would write the same bytes.
"""

import re
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kmq.errors import CorruptError, KmqError
from kmq.log import rows
from kmq.log.gaps import Gap, Gaps
from kmq.log.rows import TierFile
from kmq.tier import objects, store
from kmq.tier.store import MissingError, Store, StoreError

_VERSION = "kmq-tier 1"
_WORD = re.compile(r"[A-Za-z0-9_./@:+-]*")
_LINEAGE = re.compile(r"[0-9a-f]{32}")
_COMMIT = re.compile(r"[^/]+/commits/[0-9]{20}")
_STATE = re.compile(r"[^/]+/state/[0-9]{20}\.gz")
_STATE_COMMITS = 100  # a state is written after at least so many commits, and so many bytes as the last state has


class DamagedError(CorruptError):
    """The commits contradict themselves, or an object is not what they say."""


class AheadError(CorruptError):
    """The store has records that this directory does not have, or has other ones in their place."""


class StaleError(StoreError):
    """The commit was not made, because there are newer ones."""


class FencedError(KmqError):
    """Another process has claimed this lineage."""

    def __init__(self, claim: "Claim") -> None:
        super().__init__(f"{claim.writer} has claimed the copy, by commit {claim.number}")
        self.claim = claim


# --- lines -----------------------------------------------------------------------------------------------------------


class CommitLine(NamedTuple):
    """One line: `wal first=1 last=9 key=…` is CommitLine("wal", "", {"first": "1", …})."""

    verb: str
    name: str
    values: dict[str, str]

    def number(self, name: str) -> int:
        return int(self.values[name])

    @property
    def what(self) -> str:
        """What the object of a row has: `orders/3 offsets 1000 to 1511`, `WAL seqs 1 to 9`, `file router.ckpt`."""
        values = self.values
        if self.verb == "wal":
            return f"WAL seqs {values['first']} to {values['last']}"
        if self.verb in ("add", "table"):
            end = values["next"] if self.verb == "add" else values["end"]
            return f"{self.name} offsets {values['base']} to {int(end) - 1}"
        return f"{self.verb} {self.name}"

    @property
    def gaps(self) -> Gaps:
        """Return the gaps of a table; no member of its object spans one."""
        pairs = (pair.split("-") for pair in self.values.get("gaps", "").split("+") if pair)
        return tuple(Gap(int(first), int(to)) for first, to in pairs)

    def __str__(self) -> str:
        return " ".join([self.verb, *filter(None, [self.name]), *(f"{k}={v}" for k, v in self.values.items())])


def line(verb: str, name: str = "", /, **values: object) -> CommitLine:
    return CommitLine(verb, name, {key: str(value) for key, value in values.items()})


def numbered(texts: Sequence[str]) -> list[CommitLine]:
    """Return the lines in texts that begin with the number of a commit."""
    return [_parse_line(text.partition(" ")[2]) for text in texts]


def _parse_line(text: str) -> CommitLine:
    """Return the line in a text. Raises ValueError if it is not one."""
    verb, *words = text.split(" ")
    name = words.pop(0) if words and "=" not in words[0] else ""
    values = dict(word.split("=", 1) for word in words)
    if not all(map(_WORD.fullmatch, (verb, name, *values.values()))):
        raise ValueError(f"{text[:60]!r} is no line of a commit")
    return CommitLine(verb, name, values)


class Claim(NamedTuple):
    """The claim in force: number and nonce of its commit, its writer, and for whom it was made."""

    number: int
    nonce: str
    writer: str
    values: dict[str, str]


_NOBODY = Claim(0, "", "nobody", {})


class TierCommit(NamedTuple):
    """A commit as text and as lines."""

    number: int
    writer: str
    start: str
    nonce: str
    ts: str
    lines: Sequence[CommitLine]

    def encode(self) -> bytes:
        head = (
            f"{_VERSION} commit={self.number} writer={self.writer} start={self.start} nonce={self.nonce} ts={self.ts}"
        )
        return _sealed([head, *map(str, self.lines)])


def _sealed(lines: Sequence[str]) -> bytes:
    text = "".join(f"{each}\n" for each in lines).encode("ascii")
    return text + b"end crc32=%d\n" % zlib.crc32(text)


def _unsealed(content: bytes) -> list[str]:
    """Return the lines of a sealed text without the last. Raises ValueError if it is cut or altered."""
    body = content[: content.rfind(b"\n", 0, -1) + 1]
    if not body or content != body + b"end crc32=%d\n" % zlib.crc32(body):
        raise ValueError("is cut or altered")
    return body.decode("ascii").splitlines()


def decode(content: bytes, number: int) -> TierCommit:
    """Return the commit of this number. Raises ValueError if it is damaged, or of an unknown version."""
    head, *lines = _unsealed(content)
    if not head.startswith(f"{_VERSION} commit={number} "):
        raise ValueError(f"{head[:60]!r} is not the head of commit {number}")
    values = _parse_line(f"head{head.removeprefix(_VERSION)}").values
    return TierCommit(
        number, values["writer"], values["start"], values["nonce"], values["ts"], [*map(_parse_line, lines)]
    )


# --- what is in force ------------------------------------------------------------------------------------------------


class TierState:
    """What the commits 1…`number` say."""

    def __init__(self) -> None:
        self.number = 0
        self.ts = ""  # of the last commit
        self.claim: Claim | None = None
        self.origin = ""  # the lineage of which this one was restored
        self.successor = ""  # a lineage that goes on from here; it was begun
        self.wal: list[CommitLine] = []
        self.wal_before = 1  # the next row of the WAL may begin here
        self.tables: dict[str, CommitLine] = {}  # by topic/partition
        self.files: dict[str, CommitLine] = {}  # by name
        self.logs: dict[tuple[str, int], TierFile] = {}  # rows of partitions, by topic/partition and life
        self.dropped: dict[str, int] = {}  # keys of dropped objects, which are still there, by the number of the commit

    @property
    def wal_end(self) -> int:
        """Return the seq with which the next row of the WAL begins; 1 without any row."""
        return max(self.wal_before, self.wal[-1].number("last") + 1 if self.wal else 1)

    @property
    def wal_first(self) -> int:
        return self.wal[0].number("first") if self.wal else self.wal_end

    def apply(self, commit: TierCommit) -> None:
        """Take the next commit into account. Raises DamagedError if it does not follow."""
        where = f"commit {commit.number}"
        if commit.number != self.number + 1:
            raise DamagedError(f"{where}: does not follow commit {self.number}")
        if self.successor:
            raise DamagedError(f"{where}: this lineage has ended with its successor {self.successor}")
        try:
            for each in commit.lines:
                self._apply_line(each, commit)
        except (KeyError, ValueError) as err:
            raise DamagedError(f"{where}: {err}") from err
        self.number, self.ts = commit.number, commit.ts

    def _apply_line(self, each: CommitLine, commit: TierCommit) -> None:
        if each.verb == "claim":
            self.claim = Claim(commit.number, commit.nonce, commit.writer, each.values)
            self.origin = self.origin or each.values.get("origin", "")
        elif each.verb == "begins":
            self.successor = each.values["successor"]
        elif each.verb == "wal":
            if each.number("first") != self.wal_end or each.number("last") < each.number("first"):
                raise ValueError(f"a row of the WAL begins at {each.values['first']} instead of {self.wal_end}")
            self.wal.append(each)
        elif each.verb == "table":
            self._replace(self.tables, each, commit.number)
        elif each.verb == "file":
            self._replace(self.files, each, commit.number)
        elif each.verb in ("add", "gap") or (each.verb == "drop" and each.name != "wal" and "before" in each.values):
            self._apply_to_log(each, commit.number)
        elif each.verb == "drop" and each.name != "wal":
            self._drop(self.tables.pop(each.name, None) or self.files.pop(each.name, None), commit.number)
        elif each.verb == "drop":
            before = each.number("before")
            gone = [row for row in self.wal if row.number("last") < before]
            self.wal = self.wal[len(gone) :]
            self.wal_before = max(self.wal_before, before)
            for row in gone:
                self._drop(row, commit.number)
        elif each.verb == "gone":
            self.dropped.pop(each.name, None)
        else:
            raise ValueError(f"unknown line {each.verb!r}; a later release may have written it")

    def _replace(self, rows: dict[str, CommitLine], row: CommitLine, number: int) -> None:
        before = rows.get(row.name)
        if before is not None and before.values["key"] != row.values["key"]:
            self._drop(before, number)
        rows[row.name] = row

    def _apply_to_log(self, each: CommitLine, number: int) -> None:
        at = each.name, each.number("life")
        log = self.logs.setdefault(at, rows.empty("", *at))
        keys = [row.key for row in log.rows] if each.verb == "drop" else []
        if each.verb == "add" and not log.follows(each.number("base")):
            raise ValueError(f"a row of {each.name} begins at {each.values['base']} instead of {log.end}")
        if not log.apply(f"{number} {each}"):
            raise ValueError(f"{str(each)[:200]!r} is no line of a partition")
        if each.values.get("why") == "deleted":
            self.logs.pop(at)
            log = rows.empty("", *at)
        remaining = {row.key for row in log.rows} if keys else ()
        self.dropped |= {key: number for key in keys if key not in remaining}

    def _drop(self, row: CommitLine | None, number: int) -> None:
        if row is not None:
            self.dropped[row.values["key"]] = number

    def rows(self) -> list[CommitLine]:
        """Return all rows in force; each names an object by its `key`."""
        return [*self.wal, *self.tables.values(), *self.files.values(), *self.rows_of_logs()]

    def rows_of_logs(self) -> list[CommitLine]:
        """Return the rows of all partitions, each partition's in order."""
        return [
            _parse_line(f"add {name} life={life} {row.text()}")
            for (name, life), log in self.logs.items()
            for row in log.rows
        ]

    def lines_of_logs(self) -> list[str]:
        """Return what is in force of all partitions, each line with the number of its commit."""
        return [text for log in self.logs.values() for text in log.lines()]

    def encode(self) -> bytes:
        """Return the text of a state, from which `decode_state` makes an equal one."""
        lines = [f"{_VERSION} state={self.number} ts={self.ts}"]
        if self.claim is not None:
            lines.append(f"by number={self.claim.number} nonce={self.claim.nonce} writer={self.claim.writer}")
            lines.append(str(CommitLine("claim", "", self.claim.values)))
        if self.wal_before > 1:
            lines.append(f"drop wal before={self.wal_before}")
        lines += map(str, [*self.wal, *self.tables.values(), *self.files.values()])
        lines += [f"log {text}" for text in self.lines_of_logs()]
        lines += [f"dropped {key} number={number}" for key, number in self.dropped.items()]
        lines += [f"origin lineage={self.origin}"] if self.origin else []
        lines += [f"begins successor={self.successor}"] if self.successor else []
        return _sealed(lines)


def decode_state(content: bytes, number: int) -> TierState:
    """Return the state after commit `number`. Raises ValueError if it is damaged, or of an unknown version."""
    head, *texts = _unsealed(content)
    if not head.startswith(f"{_VERSION} state={number} "):
        raise ValueError(f"{head[:60]!r} is not the head of state {number}")
    found, by = TierState(), Claim(0, "", "", {})
    for text in texts:
        if text.startswith("log "):
            _, at, text = text.split(" ", 2)
            found._apply_to_log(_parse_line(text), int(at))
            continue
        each = _parse_line(text)
        if each.verb == "by":
            by = Claim(each.number("number"), each.values["nonce"], each.values["writer"], {})
        elif each.verb == "claim":
            found.claim = by._replace(values=each.values)
        elif each.verb == "dropped":
            found.dropped[each.name] = each.number("number")
        elif each.verb == "origin":
            found.origin = each.values["lineage"]
        elif each.verb == "wal":
            found.wal.append(each)
        else:
            found._apply_line(each, TierCommit(number, "", "", "", "", ()))
    found.number, found.ts = number, head.rpartition(" ts=")[2]
    return found


# --- the log of commits ----------------------------------------------------------------------------------------------


def _commit_key(lineage: str, number: int) -> str:
    return f"{lineage}/commits/{number:020d}"


class CommitLog:
    """The commits of one lineage, as one process sees and writes them."""

    def __init__(self, store: Store, lineage: str, writer: str) -> None:
        self.store, self.lineage, self._writer = store, lineage, writer
        self.state = TierState()
        self.start = ""  # nonce of this process's claim; "": it has none
        self._state_bytes = self._since_bytes = self._since = 0

    def read(self) -> TierState:
        """Read all commits, from the last state on. Raises DamagedError, StoreError."""
        for key in reversed(self._states()):
            number = int(key.rpartition("/")[2].removesuffix(".gz"))
            try:
                content = b"".join(objects.unpack(self.store.get(key), key))
                self.state = decode_state(content, number)
                self._state_bytes = len(content)
                break
            except (ValueError, objects.ObjectError, MissingError):
                continue  # the one before it, or all commits, say the same
        self.catch_up()
        after = _commit_key(self.lineage, self.state.number)
        beyond = [key for key in self.store.names(f"{self.lineage}/commits", after) if _COMMIT.fullmatch(key)]
        if beyond:
            self.catch_up()  # another process may have made them meanwhile
            if any(key > _commit_key(self.lineage, self.state.number) for key in beyond):
                raise DamagedError(f"commit {self.state.number + 1} is missing, although there are later ones")
        return self.state

    def catch_up(self) -> None:
        """Read the commits that are new."""
        while True:
            number = self.state.number + 1
            try:
                content = store.get(self.store, _commit_key(self.lineage, number))
            except MissingError:
                return
            self._apply(content, number)

    def _apply(self, content: bytes, number: int) -> None:
        try:
            commit = decode(content, number)
        except (ValueError, KeyError) as err:
            raise DamagedError(f"commit {number}: {err}") from err
        self.state.apply(commit)
        self._since += 1
        self._since_bytes += len(content)

    def commit(self, lines: Sequence[CommitLine], nonce: str) -> None:
        """Make these lines the next commit. Raises FencedError if another process has claimed the lineage meanwhile.

        `nonce`: new for each commit. Raises StaleError if there are newer commits than `state` had: the lines may not
        follow from them. Raises StoreError if it is not known whether the commit was made: `catch_up` finds out.
        """
        before = self.state.number
        self.catch_up()
        if self.start:
            self.check_claim()
        if self.state.successor:
            raise FencedError(self.state.claim or _NOBODY)
        number = before + 1
        if self.state.number == before:
            self._check_last()
            content = TierCommit(number, self._writer, self.start or nonce, nonce, timestamp(), lines).encode()
            if self.store.create(_commit_key(self.lineage, number), content):
                self._apply(content, number)
                return
        raise StaleError(f"commit {number} was made meanwhile")

    def _check_last(self) -> None:
        """Raise DamagedError if the last commit is not there any more: after one that follows a hole nothing can be read."""
        try:
            if self.state.number:
                store.get(self.store, _commit_key(self.lineage, self.state.number))
        except MissingError:
            raise DamagedError(
                f"commit {self.state.number} is not there any more: it is another store, it is not mounted, or commits were"
                " deleted"
            ) from None

    def check_claim(self) -> None:
        """Raise FencedError unless the claim of this process is the last one."""
        claim = self.state.claim
        if claim is None or claim.nonce != self.start:
            raise FencedError(claim or _NOBODY)

    def claim(self, line: CommitLine, nonce: str) -> None:
        """Claim the lineage for this process. The nonce has to be on the disk of the caller before."""
        self.start = ""
        self.commit([line], nonce)
        self.start = nonce
        self.check_claim()

    def write_state(self) -> None:
        """Write a state if one is due, and keep two."""
        if self._since < _STATE_COMMITS or self._since_bytes < self._state_bytes:
            return
        content = self.state.encode()
        key = f"{self.lineage}/state/{self.state.number:020d}.gz"
        self.store.create(key, objects.pack_file(content).content)
        self._state_bytes, self._since, self._since_bytes = len(content), 0, 0
        self.store.delete(self._states()[:-2])

    def _states(self) -> list[str]:
        """Return the keys of all states, in order. Other names there count for nothing."""
        return sorted(key for key in self.store.names(f"{self.lineage}/state") if _STATE.fullmatch(key))


def lineages(store: Store) -> Iterator[str]:
    """Yield the lineages that the store has."""
    after = ""
    while (key := next(store.names("", after), None)) is not None:
        lineage = key.partition("/")[0]
        if _LINEAGE.fullmatch(lineage):
            yield lineage
        after = f"{lineage}0"  # after all keys of that lineage


class CopySource(NamedTuple):
    """A lineage in the store, and what its commits say."""

    lineage: str
    commits: CommitLog

    @property
    def state(self) -> TierState:
        return self.commits.state

    @property
    def nbytes(self) -> int:
        return sum(row.number("bytes") for row in self.state.rows())


def copies(store: Store, writer: str = "", lineage: str = "") -> list[CopySource]:
    """Return the lineages without a successor, or only this one, whether it has one or not.

    Of a restore that was killed before it began its lineage the commits do not count. Raises DamagedError, StoreError.
    """
    sources: dict[str, CopySource] = {}
    for name in [lineage] if lineage else lineages(store):
        commits = CommitLog(store, name, writer)
        if commits.read().number:
            sources[name] = CopySource(name, commits)

    def is_left_over(each: CopySource) -> bool:
        origin = sources.get(each.state.origin)
        return origin is not None and origin.state.successor != each.lineage

    return [each for each in sources.values() if lineage or not (each.state.successor or is_left_over(each))]


def timestamp() -> str:
    return f"{time.time():.6f}"
