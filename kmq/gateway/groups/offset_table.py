"""The rows of all groups (committed offsets and given-back messages): their records, and their table in memory.

    key etl.orders.0      payload offset=8 ts=1700000000.000 member=c1 generation=3 metadata=      → CommittedOffset
    key etl.orders.0.7    payload deliveries=1 due=1700000030.000 reason=timeout                   → NackRow

Invariant   Of two rows with one key the one with the higher seq stays, in whatever order they arrive.
Damage      A record that is not a valid row is skipped, counted and named in a log line: it may come from a restore of
            an older release, or from a later release. Damaged bytes raise DamageError, because they may hold all that
            a group has committed. A group that is not known begins anew: it reads everything again, or with `latest`
            skips the messages that wait for it.
Cost        The highest offset that any group has committed is known without a look at each group (`furthest`).
Memory      At most MAX_GROUPS groups and MAX_BYTES of rows (ROW_BYTES each, and its texts), and MAX_NACKS given-back
            messages in a partition; then `offsets_full`. Rows that were stored already are always accepted.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from kmq.config.values import MIB
from kmq.gateway.core.broker import RequestRefused
from kmq.log import gaps, reader
from kmq.log.gaps import Gaps
from kmq.logfmt import Logger
from kmq.message import routing

# --- records of topic `__consumer_offsets` ---------------------------------------------------------------------------
#     key      <group>.<topic>.<partition>             each part percent-encoded, its dots too
#     payload  offset=<n> ts=<unix> member=<m> generation=<g> metadata=<…>
#              epoch=<n>                               from a Kafka client: leader epoch of the record it read last
#              since=<seq>                             of a record that was written again: the seq of its first record
#              offset: the next to read. ts: seconds with three decimals. member, metadata: percent-encoded
#
#     key      <group>.<topic>.<partition>.<offset>    a message that a member gave back (nack)
#     payload  deliveries=<n> due=<unix> reason=<…>    how often it was delivered, when it may be delivered again;
#              first=<unix>                            when it was first given back
#              letter=<topic>/<partition>@<offset>     of a message that was put aside: where its dead letter is
#
# The empty payload is a tombstone: the key has no row any more. The last record of a key counts. Fields may
# be added at the end of a payload, and only there.

TOPIC = "__consumer_offsets"
MAX_OFFSET = (1 << 63) - 1
MAX_EPOCH = (1 << 31) - 1
_TEXT = rb"[A-Za-z0-9_~%-]*"
_FIELD = rb"[^ |\n]*"
_COMMIT = rb"offset=\d{1,19} ts=\d{1,11}\.\d{3} member=%b generation=-?\d{1,10} metadata=%b(?: [^\n]*)?" % (
    _FIELD,
    _FIELD,
)
_NACK = rb"deliveries=\d{1,9} due=\d{1,11}\.\d{3} reason=%b(?: [^\n]*)?" % _FIELD
_PAYLOAD = re.compile(
    r"offset=(\d+) ts=(\S+) member=(\S*) generation=(-?\d+) metadata=(\S*)(?: epoch=(\d{1,10})(?= |\Z))?"
    r"(?: since=(\d{1,19})(?= |\Z))?"
    r"|deliveries=(\d+) due=(\S+) reason=(\S*)(?: first=(\d{1,11}\.\d{3})(?= |\Z))?(?: letter=(\S+))?"
)
_PLAIN = re.compile(r"[A-Za-z0-9_~-]*")  # stands for itself; most names do
_PLACE = rb"%b\.%b\.\d{1,5}" % (_TEXT, rb"[A-Za-z0-9_~%-]+")
# seq, key and payload of a stored record: a commit, a nack or a tombstone.
_STORED = re.compile(
    rb"(?m)^(\d+)\|[^|\n]*\|%b\.(?:@\d*\.)?(?:(%b)\|[^|\n]*\|[^|\n]*\|(%b|)|(%b\.\d{1,19})\|[^|\n]*\|[^|\n]*\|(%b|))$"
    % (TOPIC.encode(), _PLACE, _COMMIT, _PLACE, _NACK)
)


class RowKey(NamedTuple):
    """The place of a row: a partition of a topic for one group, or, with an offset, one message of it."""

    group: str
    topic: str
    partition: int
    offset: int | None = None


class CommittedOffset(NamedTuple):
    """A committed offset: the next to read. `ts`: in seconds since the epoch. `seq`: of its WAL record; 0: no record.

    `leader_epoch`: of the last record read, as a Kafka client says; None: not said.
    `first_seq`: of its first record, if it was written again since; 0: it was not.
    """

    offset: int
    ts: float
    member: str = ""
    generation: int = 0
    metadata: str = ""
    seq: int = 0
    leader_epoch: int | None = None
    first_seq: int = 0

    @property
    def committed_seq(self) -> int:
        """Return the seq of the first record of this commit."""
        return self.first_seq or self.seq


DONE = "done"  # in place of a dead letter's place: handled without one


class NackRow(NamedTuple):
    """A message that a member gave back, or whose reader died. Times in seconds since the epoch.

    `due`: when it may be delivered again. `first`: when it was first given back; 0: not known. `letter`: it was put
    aside, or DONE: handled. Then it is not delivered any more, and the row goes once the group has committed past it.
    """

    deliveries: int
    due: float
    reason: str = ""
    seq: int = 0
    first: float = 0.0
    letter: str = ""


OffsetRow = CommittedOffset | NackRow


def encode_key(place: RowKey) -> bytes:
    """Return the key of a record. Raises UnicodeEncodeError for a name that is not valid Unicode."""
    parts = [encode_name(place.group), encode_name(place.topic), str(place.partition)]
    return ".".join(parts if place.offset is None else [*parts, str(place.offset)]).encode()


def decode_key(key: bytes) -> RowKey:
    """Return the place that a key names. Raises ValueError for any key that `encode_key` does not make."""
    group, topic, *numbers = key.decode("ascii").split(".")
    if not 1 <= len(numbers) <= 2:
        raise ValueError(f"key {key[:100]!r} must be <group>.<topic>.<partition>[.<offset>]")
    place = RowKey(decode_name(group), decode_name(topic), *map(int, numbers))
    if encode_key(place) != key:  # compaction would keep two keys of one place as two rows
        raise ValueError(f"key {key[:100]!r} is not encoded as KMQ does it")
    return place


def routing_key(place: RowKey) -> bytes:
    """Return the routing key of a record."""
    return routing.exact(TOPIC.encode(), encode_key(place))


def encode_payload(row: OffsetRow) -> bytes:
    """Return the payload of a record."""
    if isinstance(row, NackRow):
        text = f"deliveries={row.deliveries} due={row.due:.3f} reason={encode_name(row.reason)}"
        text += f" first={row.first:.3f}" if row.first else ""
        text += f" letter={row.letter}" if row.letter else ""
    else:
        text = (
            f"offset={row.offset} ts={row.ts:.3f} member={encode_name(row.member)}"
            f" generation={row.generation} metadata={encode_name(row.metadata)}"
        )
        text += "" if row.leader_epoch is None else f" epoch={row.leader_epoch}"
        text += f" since={row.first_seq}" if row.first_seq else ""
    return text.encode()


def decode_payload(payload: bytes, seq: int = 0) -> OffsetRow:
    """Return the row of a payload. Raises ValueError if it is damaged or empty."""
    match = _PAYLOAD.match(payload.decode("ascii"))
    if match is None:
        raise ValueError(f"payload {payload[:100]!r} is neither a commit nor a nack")
    offset, ts, member, generation, metadata, epoch, since, deliveries, due, reason, first, letter = match.groups()
    if deliveries is not None:
        return NackRow(int(deliveries), float(due), decode_name(reason), seq, float(first or 0), letter or "")
    if int(offset) > MAX_OFFSET:
        raise ValueError(f"offset {offset} is over {MAX_OFFSET}")
    leader_epoch = int(epoch) if epoch and int(epoch) <= MAX_EPOCH else None
    texts = decode_name(member), int(generation), decode_name(metadata)
    return CommittedOffset(int(offset), float(ts), *texts, seq, leader_epoch, int(since or 0))


def scan(lines: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (seq, key, payload) of the records among stored lines; b"" is a tombstone. Others are left out."""
    for seq, key, payload, nack_key, nack in _STORED.findall(lines):
        yield int(seq), key or nack_key, payload or nack


def encode_name(text: str) -> str:
    """Return a name as a part of a key: without dots, and printable."""
    return text if _PLAIN.fullmatch(text) else quote(text, safe="").replace(".", "%2E")


def decode_name(text: str) -> str:
    """Return the name that `encode_name` has encoded."""
    return unquote_to_bytes(text).decode() if "%" in text else text


def partition_lag(
    bounds: tuple[int, int], committed: int | None, waiting: Iterable[int], found: Gaps = ()
) -> tuple[int, int]:
    """Return how many messages of a partition a group has not done, and the offset of the first.

    `bounds`: start and end of the partition. `waiting`: offsets given back, before the committed offset. `found`: the
    gaps of the partition, which hold no messages.
    """
    start, end = bounds
    position = gaps.passed(found, start if committed is None else max(start, committed))
    again = [offset for offset in waiting if offset >= start]  # retention has deleted the others
    return max(0, end - position - gaps.count(found, position, end)) + len(again), min([position, *again])


# --- table -----------------------------------------------------------------------------------------------------------

MAX_GROUPS = 20_000
MAX_BYTES = 64 * MIB
ROW_BYTES = 450  # of memory that a row takes besides its texts
MAX_NACKS = 1000

Partition = tuple[str, int]  # topic, partition


class _Group:
    """The rows of a group."""

    __slots__ = ("commits", "nacks")

    def __init__(self) -> None:
        self.commits: dict[Partition, CommittedOffset] = {}
        self.nacks: dict[Partition, dict[int, NackRow]] = {}

    def __bool__(self) -> bool:
        return bool(self.commits or self.nacks)


class OffsetTable:
    """The rows, by group and place."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._furthest: dict[Partition, tuple[int, str]] = {}  # partitions asked for → offset, its group
        self._bytes = 0

    def clear(self) -> None:
        self._groups.clear()
        self._furthest.clear()
        self._bytes = 0

    @property
    def groups(self) -> list[str]:
        """Return the names of the groups that have a row, in order."""
        return sorted(self._groups)

    @property
    def rows(self) -> int:
        """Return how many rows all groups have."""
        nacks = sum(len(given) for group in self._groups.values() for given in group.nacks.values())
        return nacks + sum(len(group.commits) for group in self._groups.values())

    def commits_of(self, group: str) -> Mapping[Partition, CommittedOffset]:
        found = self._groups.get(group)
        return found.commits if found else {}

    def nacks_of(self, group: str, at: Partition) -> Mapping[int, NackRow]:
        found = self._groups.get(group)
        return found.nacks.get(at, {}) if found else {}

    def has_nacks(self, group: str) -> bool:
        """Return True if a group has messages to deliver again, or messages that were put aside."""
        found = self._groups.get(group)
        return bool(found and found.nacks)

    def has_handled(self, group: str, at: Partition, offset: int) -> bool:
        """Return True if a group has committed past a message, and it is not to be delivered again."""
        found = self._groups.get(group)
        if found is None or at not in found.commits or found.commits[at].offset <= offset:
            return False
        row = found.nacks.get(at, {}).get(offset)
        return row is None or bool(row.letter)

    def waiting(self, group: str) -> dict[Partition, list[int]]:
        """Return the messages that a group has committed past and that are to be delivered again, in order."""
        found, waiting = self._groups.get(group), {}
        for at, rows in found.nacks.items() if found else ():
            end = found.commits[at].offset if found and at in found.commits else 0
            if offsets := sorted(offset for offset, row in rows.items() if offset < end and not row.letter):
                waiting[at] = offsets
        return waiting

    def is_handled(self, at: Partition, offset: int) -> bool:
        """Return True if any group has handled a message."""
        if self.furthest(at) <= offset:
            return False
        return self.has_handled(self._furthest[at][1], at, offset) or any(
            self.has_handled(group, at, offset) for group in self._groups
        )

    def furthest(self, at: Partition) -> int:
        """Return the highest offset that any group has committed in a partition; 0: no group has."""
        found = self._furthest.get(at)
        if found is None:  # search all groups: first call, or after the furthest group went back
            rows = ((group.commits[at].offset, name) for name, group in self._groups.items() if at in group.commits)
            found = self._furthest[at] = max(rows, default=(0, ""))
        return found[0]

    def _moved(self, group: str, at: Partition, offset: int) -> None:
        """Note that a group has committed this offset; 0: its commit is gone."""
        found = self._furthest.get(at)
        if found is None:
            return
        if offset >= found[0]:
            self._furthest[at] = offset, group
        elif found[1] == group:
            del self._furthest[at]

    def rows_of(self, group: str) -> list[tuple[RowKey, OffsetRow]]:
        """Return all rows of a group."""
        found = self._groups.get(group)
        if found is None:
            return []
        rows: list[tuple[RowKey, OffsetRow]] = [(RowKey(group, *at), row) for at, row in found.commits.items()]
        rows += [
            (RowKey(group, *at, offset), row) for at, given in found.nacks.items() for offset, row in given.items()
        ]
        return rows

    def row_at(self, place: RowKey) -> OffsetRow | None:
        group = self._groups.get(place.group)
        if group is None:
            return None
        at = place.topic, place.partition
        return group.commits.get(at) if place.offset is None else group.nacks.get(at, {}).get(place.offset)

    def put(self, place: RowKey, row: OffsetRow) -> None:
        """Put a row into the table, unless a newer one is there."""
        before = self.row_at(place)
        if before is not None and before.seq > row.seq:
            return
        group = self._groups.setdefault(place.group, _Group())
        at = place.topic, place.partition
        if isinstance(row, CommittedOffset):
            group.commits[at] = row
            self._moved(place.group, at, row.offset)
        elif place.offset is not None:
            group.nacks.setdefault(at, {})[place.offset] = row
        self._bytes += _weight(place, row) - (_weight(place, before) if before else 0)

    def drop(self, place: RowKey, seq: int) -> None:
        """Forget a row because of the tombstone `seq`, unless the row is newer."""
        group, before, at = self._groups.get(place.group), self.row_at(place), (place.topic, place.partition)
        if group is None or before is None or before.seq > seq:
            return
        self._bytes -= _weight(place, before)
        if place.offset is None:
            del group.commits[at]
            self._moved(place.group, at, 0)
        else:
            del group.nacks[at][place.offset]
            if not group.nacks[at]:
                del group.nacks[at]
        if not group:
            del self._groups[place.group]

    def check_room(self, group: str, rows: Mapping[RowKey, OffsetRow]) -> None:
        """Raise RequestRefused (offsets_full) if there is no room for these rows."""
        if group not in self._groups and len(self._groups) >= MAX_GROUPS:
            raise RequestRefused("offsets_full", f"{MAX_GROUPS:,} groups have committed offsets; delete some")
        new = {place: row for place, row in rows.items() if self.row_at(place) is None}
        if self._bytes + sum(_weight(place, row) for place, row in new.items()) > MAX_BYTES:
            raise RequestRefused("offsets_full", f"committed offsets take {MAX_BYTES // MIB} MiB; delete some groups")
        for place in new:
            at = place.topic, place.partition
            if place.offset is not None and len(self.nacks_of(group, at)) >= MAX_NACKS:
                waiting = f"{MAX_NACKS:,} messages of {place.topic}/{place.partition} wait to be delivered again"
                raise RequestRefused("offsets_full", f"{waiting}; commit or dead-letter some")


def _weight(place: RowKey, row: OffsetRow) -> int:
    texts = row.metadata + row.member if isinstance(row, CommittedOffset) else row.reason
    return ROW_BYTES + len(place.group) + len(place.topic) + len(texts)


# --- log -------------------------------------------------------------------------------------------------------------

_READ_BYTES = 4 * MIB
_REMOVED = re.compile(rb"(?m)^\n+")


Members = dict[str, tuple[int, bytes]]  # group → seq and payload of the record of its members
MembersScan = Callable[[bytes], Iterator[tuple[int, str, bytes]]]


def read_log(
    data: str, logger: Logger, scan_members: MembersScan
) -> tuple[list[tuple[RowKey, OffsetRow]], int, Members]:
    """Return the current rows, the number of records (with skipped ones), and the records of members.

    Call it in a thread. `scan_members`: of group_records.py. Raises DamageError.
    The current row of a key is its last one, unless a tombstone deleted it.
    """
    latest: dict[bytes, tuple[int, bytes]] = {}
    members: Members = {}
    records = skipped = 0
    example = ""
    for lines in _blocks(data):
        count = readable = lines.count(b"\n")
        found = [(key, (seq, payload)) for seq, key, payload in scan(lines)]
        latest.update(found)
        records += count
        if len(found) != count:
            of_members = [(group, (seq, payload)) for seq, group, payload in scan_members(lines)]
            members.update(of_members)
            readable = len(found) + len(of_members)
        if readable != count:
            skipped += count - readable
            example = example or _first_foreign(lines, scan_members)
    rows: list[tuple[RowKey, OffsetRow]] = []
    for key, (seq, payload) in latest.items():
        if not payload:
            continue
        try:
            place, row = decode_key(key), decode_payload(payload, seq)
        except ValueError as err:
            skipped += 1
            example = example or f"seq {seq}: {err}"
            continue
        if isinstance(row, NackRow) == (place.offset is not None):
            rows.append((place, row))
    if skipped:
        effect = "skipped: they are no commits of this release"
        logger.warn("offset_records_skipped", count=skipped, first=example[:200], effect=effect)
    return rows, records, {group: row for group, row in members.items() if row[1]}


def _blocks(data: str) -> Iterator[bytes]:
    """Yield the lines of the log, without the newlines of records that compaction removed."""
    if not os.path.isdir(f"{data}/topics/{TOPIC}"):
        return
    for _, lines in reader.partition(data, TOPIC, 0).chunks(0, _READ_BYTES):
        yield _REMOVED.sub(b"", lines)


def _first_foreign(lines: bytes, scan_members: MembersScan) -> str:
    """Return the first line that is not a valid record of this topic."""
    foreign = (line for line in lines.split(b"\n") if line and not [*scan(line), *scan_members(line)])
    return next(foreign, b"").decode(errors="replace")
