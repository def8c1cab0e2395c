"""Are the queues what the WAL says? One stretch of the WAL against the stretches of all queues that belong to it.

Snapshot    taken once, in this order: what the router says it has routed, the ends of the queues, the end of the WAL, the
            routing table, dropped.log. So all that a queue shows is in the WAL that is judged; what the WAL shows beyond
            `routed` and beyond the end of its queue had not been routed yet: a note, no finding.
Stretches   the WAL is cut at ends of blocks, each queue at the first record with the seq of the cut. The queues' offsets are
            tiled without a hole whatever is in them (cuts never go back), so each record is judged once.
Exact       in a good stretch the bytes of a queue are those lines of the WAL that route there, one after another, and are
            compared as bytes, block by block, without Python per record. Only where they differ, lines are looked at one by
            one (numpy still): which is missing, doubled, out of order, altered, elsewhere, from nowhere.
Checked     every block read had its crc checked by the reader against the index. Damage is a finding; what lies in it, and
            what a damaged index hides, is not judged further and counted so.
Not judged  what belongs to a topic that was deleted. Queue records below the first seq that the WAL still has: only their
            crc, form and order. WAL records below the first that a queue still has. All are counted as notes. In a
            compacted queue the bare newlines between two records must be as many as the records missing there; which
            ones, nobody can say. Those at a cut count for both sides of it.
Limit       a block of the WAL that begins with a seq out of order leads lookups astray: it is found, but as a gap.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kmq import record
from kmq.log.damage import DamageError
from kmq.log.dropped import SeqRange, without
from kmq.routing import DELETED, Topic, lives, resolve, table
from kmq.spark.source.blocks import Lines
from kmq.spark.source.brokers import Broker
from kmq.spark.source.columns import Block, Numbers
from kmq.spark.source.options import WAL

Place = tuple[str, int]  # topic, partition
Span = tuple[int, int]  # offsets: first, behind the last

FINDINGS = {
    "gap": "seqs missing in the WAL that dropped.log does not name",
    "duplicate": "stored once more",
    "out_of_order": "stored behind a later one",
    "clock_back": "recv_ts before that of the record in front of it",
    "damage": "bytes that are not as they were written",
    "malformed": "not a stored line",
    "lost": "in the WAL, not in its queue",
    "wrong_queue": "in a queue where it does not belong",
    "altered": "other bytes than in the WAL",
    "foreign": "in a queue, not in the WAL",
    "undropped": "in the queue, although dropped.log names it",
    "blank": "bare newlines in a queue that is not compacted",
}
NOTES = {
    "dropped_framed": "seqs that dropped.log names for ring framed, or that a repair named as lost",
    "dropped_durable": "records that dropped.log names for ring durable",
    "compacted": "records that compaction took from their queue",
    "retained": "records that retention took from their queue: not judged",
    "deleted": "records of topics that were deleted",
    "older": "queue records from before the WAL's first seq: crc and order checked only",
    "unrouted": "durable, not routed yet",
    "unreadable": "records in or behind damage: not judged",
}
MAX_ROWS = 1000  # of one kind, queue and stretch; the rest is counted in one row more
_MAX_KEYS = 1 << 18  # routing keys remembered


class Row(NamedTuple):
    """Something seen. `what`: a finding, a note, `records` (of a topic and moment) or `queue` (records in a stretch)."""

    what: str
    topic: str = WAL
    partition: int = 0
    records: int = 1
    first_seq: int = 0  # 0: not known
    last_seq: int = 0
    offset: int = -1  # in the queue, -1: none
    time: int = 0  # µs since the epoch
    nbytes: int = 0
    path: str = ""
    byte: int = 0
    detail: str = ""


class Snapshot(NamedTuple):
    """A broker at one moment; of the topics those that are in force."""

    routed: int
    queues: dict[Place, Span]
    wal: Span
    topics: list[tuple[str, int, int]]  # name, partitions, from_seq
    compacted: list[str]
    dropped: dict[str, list[Span]]  # ring → seqs, first and last
    hidden: dict[str, tuple[str, int, str]]  # topics whose queues have no known end: path, byte and what of the damage
    marks_from: int = 0  # the first seq whose routing key may have a mark
    deleted: Sequence[tuple[str, int, int]] = ()  # topics that were: name, from_seq, last_seq


class Task(NamedTuple):
    """WAL seqs low…high-1 and the queues' offsets that belong to them; low = high: queue records older than the WAL."""

    low: int
    high: int
    spans: dict[Place, Span]


class Hole(NamedTuple):
    """Offsets first…end-1 that cannot be read."""

    first: int
    end: int


class Judge:
    """Judges one task."""

    def __init__(self, broker: Broker, snapshot: Snapshot, task: Task, bucket_micros: int) -> None:
        self.broker, self.snapshot, self.task, self.bucket = broker, snapshot, task, bucket_micros
        self.low, self.high = task.low, task.high
        self.rows: list[Row] = []
        self._said: Counter[tuple[str, Place]] = Counter()
        self._more: dict[tuple[str, Place], Row] = {}
        self.table = table(snapshot.topics, lives(snapshot.deleted), snapshot.marks_from)
        changing = [topic for topic in self.table.values() if "." in topic.name or topic.lives]
        changes = {seq for topic in changing for seq in topic.bounds()}
        self.epochs = np.array(sorted(changes | {snapshot.marks_from}), np.int64)
        self.places: list[Place] = []
        self._number: dict[Place, int] = {}
        for name, partitions, _ in snapshot.topics:
            self._places_of(name, partitions)
        for name, partition in snapshot.queues:
            self._places_of(name, partition + 1)
        self.gone = self._places_of("(deleted)", 1) if snapshot.deleted else -1
        self._memo: defaultdict[int, dict[bytes, tuple[int, int]]] = defaultdict(dict)
        self.dropped = _Ranges(snapshot.dropped["durable"])
        self.holes: list[Span] = []  # seqs of the WAL that cannot be read
        self.malformed: defaultdict[Place, list[int]] = defaultdict(list)  # offsets

    def run(self) -> list[Row]:
        """What there is to say of the task."""
        if self.low == self.high:
            for place, span in self.task.spans.items():
                self._older(place, span)
        else:
            if self.task.low == self.snapshot.wal[0]:
                for topic, (path, byte, what) in self.snapshot.hidden.items():
                    self.say(Row("damage", topic, path=path, byte=byte, detail=what))
            bad = self._compare_all()
            if bad:
                self._look_at(bad)
            for (topic, partition), (start, end) in self.task.spans.items():
                if end > start:
                    self.rows.append(Row("queue", topic, partition, end - start))
        return [*self.rows, *self._more.values()]

    def say(self, row: Row) -> None:
        """One row; where there are very many of a kind, the rest becomes one."""
        key = row.what, (row.topic, row.partition)
        self._said[key] += 1
        if self._said[key] <= MAX_ROWS:
            self.rows.append(row)
            return
        more = self._more.get(key, Row(row.what, *key[1], 0, row.first_seq, detail="and more like these"))
        self._more[key] = more._replace(records=more.records + row.records, last_seq=max(more.last_seq, row.last_seq))

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, place: Place, span: Span, is_second: bool = False) -> Iterator["Block | Hole"]:
        """Blocks in order, and a Hole where some cannot be read. Goes on behind it if it can be told where."""
        topic, partition = place
        at, end = span
        resumed = at
        while at < end:
            led_back = False
            try:
                for lines in self.broker.blocks(topic, partition, at, end):
                    block = self._block(place, lines, is_second)
                    if topic != WAL:
                        at = lines.next_offset
                    elif block.count:
                        seqs = block.offsets()
                        led_back = at != resumed and int(seqs[0]) < at
                        if led_back:
                            break  # by a seq out of order at the end of the last read: not once more
                        at = max(at, int(seqs.max()) + 1)
                    yield block
            except DamageError as err:
                behind = err.next_offset if err.next_offset > at else end
                if not is_second:
                    self.say(Row("damage", topic, partition, path=err.path, byte=err.byte, detail=err.what))
                yield Hole(at, behind)
                at = behind
            else:
                if not led_back:
                    return
            resumed = at

    def _block(self, place: Place, lines: Lines, is_second: bool) -> Block:
        """Lines as a block; what is no stored line is named and left out: a crc only says that it was written so."""
        topic, partition = place
        try:
            block = Block.of(lines, topic, topic == WAL)
            if not block.count or _is_sound(block):
                return block
        except (IndexError, pa.ArrowInvalid):
            pass
        kept = []
        for number, line in enumerate(lines.data.split(b"\n")[:-1]):
            good = not line or record.parse_stored(line) is not None
            kept.append(line if good else b"")
            if not good and not is_second:
                at = -1 if topic == WAL else lines.offset + number
                self.malformed[place].append(at)
                self.say(Row("malformed", topic, partition, offset=at, detail=repr(line[:60])))
        return Block(b"\n".join([*kept, b""]), lines.offset, topic, topic == WAL)

    # --- routing -----------------------------------------------------------------------------------------------------

    def _places_of(self, topic: str, partitions: int) -> int:
        """Number of the first partition of a topic; those of one topic follow one another."""
        if (topic, partitions - 1) not in self._number:
            base = len(self.places)
            self.places += [(topic, number) for number in range(partitions)]
            self._number |= {(topic, number): base + number for number in range(partitions)}
        return self._number[topic, 0]

    def _route(self, block: Block, seqs: Numbers) -> Numbers:
        """The number of the place where each record belongs: each key is looked up once a block."""
        coded = block.field(2).dictionary_encode()
        keys, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy()
        epochs = np.searchsorted(self.epochs, seqs, "right")
        made = np.empty(len(seqs), np.int64)
        for epoch in np.unique(epochs).tolist() if len(self.epochs) else [0]:
            pairs = np.array([self._target(key, epoch) for key in keys], np.int64).reshape(-1, 2)
            chosen = epochs == epoch
            made[chosen] = pairs[codes[chosen], 0] + seqs[chosen] % pairs[codes[chosen], 1]
        return made

    def _target(self, key: bytes, epoch: int) -> tuple[int, int]:
        """(place, 1), or (first place, partitions) where the seq decides. `epoch`: how many of the epochs' seqs are reached."""
        memo = self._memo[epoch]
        if key in memo:
            return memo[key]
        seq = int(self.epochs[epoch - 1]) if epoch else 0
        route = resolve(self.table, key, seq)
        topic = self.table.get(route.topic) or Topic(route.topic.decode(errors="replace"), 1, 0)
        base = self.gone if route.topic == DELETED else self._places_of(topic.name, topic.partitions)
        found = (base, topic.partitions) if route.is_spread else (base + topic.partition_of(route, 0), 1)
        if len(memo) >= _MAX_KEYS:
            memo.clear()
        memo[key] = found
        return found

    # --- the quick way: bytes ------------------------------------------------------------------------------------------

    def _compare_all(self) -> list[int]:
        """Read the WAL's stretch and all queues beside it; numbers of the places whose bytes are not those of the WAL."""
        seen: list[Numbers] = []
        streams: dict[int, _Stream] = {}
        counts: Counter[tuple[str, int]] = Counter()
        sizes: Counter[tuple[str, int]] = Counter()
        before = 0  # recv_ts
        for block in self.read((WAL, 0), (self.low, self.high)):
            if isinstance(block, Hole):
                self.holes.append((block.first, block.end - 1))
                continue
            if not block.count:
                continue
            seqs, times = block.offsets(), block.recv_ts().cast(pa.int64()).to_numpy()
            targets = self._route(block, seqs)
            self._count(block, times, targets, counts, sizes)
            before = self._clock(seqs, times, before)
            for target, lines in self._by_target(block, seqs, targets):
                if target == self.gone:
                    mine = seqs[(targets == target) & (seqs >= self.low) & (seqs < self.high)]
                    self.say(Row("deleted", *self.places[target], len(mine), int(mine[0]), int(mine[-1])))
                    continue
                if self.places[target][0] in self.snapshot.hidden:
                    continue
                if target not in streams:
                    streams[target] = self._stream(self.places[target])
                streams[target].take(lines)
            seen.append(seqs)
        self._retention_moved(seen)
        self._order(np.concatenate(seen) if seen else np.empty(0, np.int64))
        for key, count in counts.items():
            if key[0] in self.snapshot.hidden:
                self.say(Row("unreadable", key[0], records=count))
            self.rows.append(Row("records", key[0], records=count, nbytes=sizes[key], time=key[1]))
        bad = {target for target, stream in streams.items() if not stream.ended()}
        for place, (start, end) in self.task.spans.items():
            if end > start and self._number[place] not in streams:
                bad.add(self._number[place])
        return sorted(bad)

    def _stream(self, place: Place) -> "_Stream":
        start, end = self.task.spans.get(place, (0, 0))
        return _Stream(self.broker.read(*place, start, end) if end > start else ())

    def _by_target(self, block: Block, seqs: Numbers, targets: Numbers) -> Iterator[tuple[int, pa.Buffer]]:
        """The bytes that each place should hold of a block."""
        dropped = self.dropped.hold(seqs)
        if dropped.any():
            self._note_dropped(seqs[dropped], targets[dropped])
        wanted = ~dropped & (seqs >= self.low) & (seqs < self.high)
        everything = bool(wanted.all())
        if everything and block.places is None and (targets == targets[0]).all():
            yield int(targets[0]), pa.py_buffer(block.lines)
            return
        lines = block.span(block.starts[0], block.ends[-1] + 1)  # with their newlines
        order = np.argsort(targets.astype(np.int16) if len(self.places) < 1 << 15 else targets, kind="stable")
        if not everything:
            order = order[wanted[order]]
        lines = lines.take(pa.array(order))
        offsets = np.frombuffer(lines.buffers()[1], np.int32)[: len(lines) + 1]
        each, firsts = np.unique(targets[order], return_index=True)
        for target, (low, high) in zip(each.tolist(), pairwise([*firsts.tolist(), len(order)]), strict=True):
            yield target, lines.buffers()[2].slice(int(offsets[low]), int(offsets[high] - offsets[low]))

    def _note_dropped(self, seqs: Numbers, targets: Numbers) -> None:
        for target in np.unique(targets).tolist():
            mine = seqs[targets == target]
            topic, partition = self.places[target]
            self.say(Row("dropped_durable", topic, partition, len(mine), int(mine[0]), int(mine[-1])))

    def _count(
        self, block: Block, times: Numbers, targets: Numbers, counts: Counter[Place], sizes: Counter[Place]
    ) -> None:
        """Records and bytes by topic and moment."""
        lengths = block.ends[-1] + 1 - block.starts[0]
        moments = times // self.bucket
        cuts = [0, *(np.flatnonzero(np.diff(moments)) + 1).tolist(), block.count]
        for low, high in pairwise(cuts):
            number = np.bincount(targets[low:high])
            nbytes = np.bincount(targets[low:high], lengths[low:high])
            for target in np.flatnonzero(number).tolist():
                key = self.places[target][0], int(moments[low]) * self.bucket
                counts[key] += int(number[target])
                sizes[key] += int(nbytes[target])

    # --- the WAL by itself -------------------------------------------------------------------------------------------

    def _clock(self, seqs: Numbers, times: Numbers, before: int) -> int:
        """Times never decrease."""
        back = np.flatnonzero(np.diff(times, prepend=before) < 0)
        self.say_runs("clock_back", (WAL, 0), seqs, back)
        return int(times.max(initial=before))

    def _retention_moved(self, seen: list[Numbers]) -> None:
        """What retention took from the WAL while we read is as if it had gone before."""
        first = int(seen[0][0]) if seen else self.high
        if first > self.low and not self.holes:
            gone = min(self.high, self.broker.bounds([WAL])[WAL, 0][0])
            self.low = max(self.low, gone)

    def _order(self, seqs: Numbers) -> None:
        """Gaps, duplicates and what is out of order."""
        if len(seqs) == self.high - self.low and (np.diff(seqs) == 1).all() and seqs[0] == self.low:
            return
        is_ours = (seqs >= self.low) & (seqs < self.high)
        first_time = np.zeros(len(seqs), bool)
        first_time[np.unique(seqs, return_index=True)[1]] = True
        is_late = seqs <= np.concatenate([[self.low - 1], np.maximum.accumulate(seqs)[:-1]])
        self.say_runs("duplicate", (WAL, 0), seqs, np.flatnonzero(~first_time))
        self.say_runs("out_of_order", (WAL, 0), seqs, np.flatnonzero(first_time & (is_late | ~is_ours)))
        present = np.concatenate([[self.low - 1], np.unique(seqs[is_ours]), [self.high]])
        holes, named = _Ranges(self.holes).ranges, _Ranges(self.snapshot.dropped["framed"]).ranges
        for at in np.flatnonzero(np.diff(present) > 1).tolist():
            for first, last in without(int(present[at]) + 1, int(present[at + 1]) - 1, holes):
                gaps = without(first, last, named)
                for low, high in gaps:
                    self.say(Row("gap", records=high - low + 1, first_seq=low, last_seq=high))
                count = last - first + 1 - sum(high - low + 1 for low, high in gaps)
                if count:
                    self.say(Row("dropped_framed", records=count, first_seq=first, last_seq=last))

    # --- the slow way: lines -------------------------------------------------------------------------------------------

    def _look_at(self, bad: list[int]) -> None:
        """Say what is wrong in these places."""
        expected, seqs, targets = self._expected(bad)
        belongs = _Map(seqs, targets)
        queues = [_Queue(self, target, *expected[target]) for target in bad]
        elsewhere: defaultdict[int, list[int]] = defaultdict(list)  # what was found in another queue is not lost
        for queue in queues:
            queue.classify(belongs, elsewhere)
        for queue in queues:
            queue.account(np.array(elsewhere[queue.target], np.int64))

    def _expected(self, bad: list[int]) -> tuple[dict[int, tuple[Numbers, pa.Array]], Numbers, Numbers]:
        """The WAL's stretch once more: (seqs, lines) of these places, each seq once; seqs and targets of all."""
        chosen = np.array(bad)
        parts: dict[int, list[tuple[Numbers, pa.Array]]] = {target: [] for target in bad}
        seen: list[tuple[Numbers, Numbers]] = []
        for block in self.read((WAL, 0), (self.low, self.high), is_second=True):
            if isinstance(block, Hole) or not block.count:
                continue
            seqs = block.offsets()
            targets = self._route(block, seqs)
            is_ours = (seqs >= self.low) & (seqs < self.high)
            seen.append((seqs[is_ours], targets[is_ours]))
            lines = block.line()
            for target in np.intersect1d(targets, chosen).tolist():
                mine = np.flatnonzero((targets == target) & is_ours)
                parts[target].append((seqs[mine], lines.take(pa.array(mine))))
        made = {}
        for target, pieces in parts.items():
            numbers = np.concatenate([each for each, _ in pieces] or [np.empty(0, np.int64)])
            texts = pa.chunked_array([each for _, each in pieces], pa.binary())
            once, at = np.unique(numbers, return_index=True)
            made[target] = once, texts.take(pa.array(at))
        seqs, targets = (np.concatenate([np.empty(0, np.int64), *(each[at] for each in seen)]) for at in (0, 1))
        return made, seqs, targets

    def _older(self, place: Place, span: Span) -> None:
        """Queue records that the WAL no longer has: their order."""
        count, before = 0, 0
        for block in self.read(place, span):
            if isinstance(block, Hole):
                continue
            seqs = block.seq().to_numpy() if block.count else np.empty(0, np.int64)
            late = np.flatnonzero(np.diff(seqs, prepend=before) <= 0)
            self.say_runs("out_of_order", place, seqs, late, block.offsets())
            before = int(seqs.max(initial=before))
            count += block.count
        if count:
            self.say(Row("older", *place, count))

    def say_runs(
        self,
        what: str,
        place: Place,
        seqs: Numbers,
        at: Numbers,
        offsets: Numbers | None = None,
        details: Sequence[str] = (),
    ) -> None:
        """A row for each run of `at`, positions in `seqs` that follow one another."""
        if not len(at):
            return
        starts = np.concatenate([[0], np.flatnonzero(np.diff(at) != 1) + 1])
        for low, high in zip(starts.tolist(), [*starts[1:].tolist(), len(at)], strict=True):
            mine = seqs[at[low:high]]
            offset = -1 if offsets is None else int(offsets[at[low]])
            detail = details[low] if details else ""
            first, last = int(mine.min()), int(mine.max())
            row = Row(what, place[0], place[1], high - low, first, last, offset, detail=detail)
            self.say(row)


class _Queue:
    """What lies in the stretch of one queue, beside what should (`seqs`, rising, and `lines`)."""

    def __init__(self, judge: Judge, target: int, seqs: Numbers, lines: pa.ChunkedArray) -> None:
        self.judge, self.target, self.place = judge, target, judge.places[target]
        self.expected, self.lines = seqs, lines
        self.first, self.end = judge.snapshot.queues.get(self.place, (0, 0))
        self.start, self.stop = judge.task.spans.get(self.place, (0, 0))
        self.holes: list[Span] = []
        self._read()

    def _read(self) -> None:
        seqs: list[Numbers] = []
        offsets: list[Numbers] = []
        lines: list[pa.Array] = []
        blanks: list[Numbers] = []
        at = self.start
        for block in self.judge.read(self.place, (self.start, self.stop)):
            if isinstance(block, Hole):
                at = min(block.end, self.stop)
                self.holes.append((block.first, at))
                continue
            if block.offset > at:  # retention was faster
                self.start = self.first = block.offset
            total = block.lines.count(b"\n")
            at = block.offset + total
            if block.places is not None:
                blanks.append(block.offset + np.setdiff1d(np.arange(total), block.places))
            if block.count:
                seqs.append(block.seq().to_numpy())
                offsets.append(block.offsets())
                lines.append(block.line())
        none = [np.empty(0, np.int64)]
        self.seqs, self.offsets = np.concatenate(seqs or none), np.concatenate(offsets or none)
        self.blanks = np.setdiff1d(np.concatenate(blanks or none), self.judge.malformed[self.place])
        self.found = pa.chunked_array(lines, pa.binary())

    def classify(self, belongs: "_Map", elsewhere: dict[int, list[int]]) -> None:
        """Name what is here and should not be, or not so; remember what is missing."""
        seqs, expected = self.seqs, self.expected
        at = np.searchsorted(expected, seqs)
        is_ours = np.zeros(len(seqs), bool)
        inside = at < len(expected)
        is_ours[inside] = expected[at[inside]] == seqs[inside]
        first_time = np.zeros(len(seqs), bool)
        first_time[np.unique(seqs, return_index=True)[1]] = True
        hits = np.flatnonzero(is_ours & first_time)
        self._say("duplicate", is_ours & ~first_time)

        is_late = np.zeros(len(seqs), bool)
        is_late[hits] = at[hits] < np.maximum.accumulate(at[hits])
        self._say("out_of_order", is_late)

        is_other = np.zeros(len(seqs), bool)
        here, there = self.found.take(pa.array(hits)), self.lines.take(pa.array(at[hits]))
        is_other[hits] = pc.not_equal(here, there).to_numpy()
        self._say("altered", is_other)
        dropped = self.judge.dropped.hold(seqs)
        self._say("undropped", is_ours & dropped)
        self._strangers(~is_ours, belongs, elsewhere)

        self.missing = np.ones(len(expected), bool)
        self.missing[at[hits]] = False
        self.missing &= ~self.judge.dropped.hold(expected)
        steady = hits[~is_late[hits]]
        self.marks, self.mark_offsets = at[steady], self.offsets[steady]

    def _strangers(self, chosen: Numbers, belongs: "_Map", elsewhere: dict[int, list[int]]) -> None:
        """Records that do not belong into this stretch of this queue."""
        judge, seqs = self.judge, self.seqs
        wal_first, wal_end = judge.snapshot.wal
        places = belongs.get(seqs)
        is_wrong = chosen & (places >= 0)
        where = np.flatnonzero(is_wrong)
        for seq, place in zip(seqs[where].tolist(), places[where].tolist(), strict=True):
            elsewhere[place].append(seq)
        names = ["belongs to {}/{}".format(*judge.places[place]) for place in places[where].tolist()]
        judge.say_runs("wrong_queue", self.place, seqs, where, self.offsets, names)
        rest = chosen & (places < 0)
        is_old = rest & (seqs < judge.low) & (judge.low == wal_first)
        is_old |= rest & (seqs < judge.low) & (judge.low > judge.task.low)  # the WAL's retention was faster
        is_hidden = rest & _Ranges(judge.holes).hold(seqs)
        in_wal = (seqs >= wal_first) & (seqs < wal_end)
        is_astray = rest & ~is_old & ~is_hidden & in_wal & ((seqs < judge.low) | (seqs >= judge.high))
        self._note("older", int(is_old.sum()))
        self._note("unreadable", int(is_hidden.sum()))
        self._say("out_of_order", is_astray)
        self._say("foreign", rest & ~is_old & ~is_hidden & ~is_astray)

    def account(self, elsewhere: Numbers) -> None:
        """Missing records, between each two that are here: excused, or lost.

        Compaction leaves a bare newline for each, damage hides as many as there are offsets in it: which ones, nobody can say.
        """
        expected = self.expected
        missing = self.missing & ~np.isin(expected, elsewhere)
        hidden = np.concatenate([np.empty(0, np.int64), *(np.arange(*hole) for hole in self.holes)])
        marks = np.concatenate([[-1], self.marks, [len(expected)]])
        edges = np.concatenate([[self.start - 1], self.mark_offsets, [self.stop]])
        sums = np.concatenate([[0], np.cumsum(missing)])
        gone = sums[marks[1:]] - sums[marks[:-1] + 1]
        blanks = np.diff(np.searchsorted(self.blanks, edges))
        if gone[0] and self.start > self.first:
            blanks[0] += self._blanks_before(int(gone[0]))
        holes = np.diff(np.searchsorted(hidden, edges))
        by_blank = np.minimum(gone, blanks)
        by_hole = np.minimum(gone - by_blank, holes)
        self._note("unreadable", int(by_hole.sum()))
        self._note("compacted" if self.place[0] in self.judge.snapshot.compacted else "blank", int(by_blank.sum()))
        self._note("blank", int((blanks - by_blank)[1:-1][holes[1:-1] == 0].sum()))
        lost = gone - by_blank - by_hole
        for at in np.flatnonzero(lost).tolist():
            inside = slice(int(marks[at]) + 1, int(marks[at + 1]))
            self._lost(
                at == 0, at == len(lost) - 1, expected[inside][missing[inside]], int(lost[at]), int(edges[at]) + 1
            )

    def _lost(self, is_first: bool, is_last: bool, seqs: Numbers, count: int, offset: int) -> None:
        """`count` of `seqs` have nothing to excuse them but where they are."""
        judge = self.judge
        if is_first and self.start == self.first > 0:
            self._note("retained", count, seqs)
            return
        if self._is_deleted_meanwhile():
            self._note("deleted", count, seqs)
            return
        if is_last and self.stop == self.end:
            late = seqs[seqs > judge.snapshot.routed]
            self._note("unrouted", len(late), late)
            seqs, count = seqs[: len(seqs) - len(late)], count - len(late)
        if count > 0:
            some = "" if count == len(seqs) else f"{count} of {len(seqs)}"
            span = int(seqs[0]), int(seqs[-1])
            judge.say(Row("lost", *self.place, count, *span, offset, detail=some))

    def _is_deleted_meanwhile(self) -> bool:
        """Whether nothing is left of what the snapshot saw here; a later topic of this name begins behind it."""
        if self.place not in self.judge.snapshot.queues:
            return False
        try:
            now = self.judge.broker.bounds([self.place[0]]).get(self.place)
        except DamageError:
            return False
        return now is None or now[0] >= self.end > self.first

    def _blanks_before(self, count: int) -> int:
        """How many bare newlines, up to `count`, lie in front of the stretch: it begins with a record that is there."""
        try:
            first = max(self.first, self.start - count)
            lines = b"".join(lines for _, lines in self.judge.broker.read(*self.place, first, self.start))
        except DamageError:
            return 0
        records = lines.rstrip(b"\n")
        return len(lines) - len(records) - bool(records)

    def _say(self, what: str, chosen: Numbers) -> None:
        self.judge.say_runs(what, self.place, self.seqs, np.flatnonzero(chosen), self.offsets)

    def _note(self, what: str, count: int, seqs: Numbers | None = None) -> None:
        if count > 0:
            span = (int(seqs[0]), int(seqs[-1])) if seqs is not None and len(seqs) else (0, 0)
            self.judge.say(Row(what, *self.place, count, *span))


class _Stream:
    """The bytes of a queue, taken in order and compared; one difference and it is read no further."""

    def __init__(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        self._blocks = iter(blocks)
        self._rest = pa.py_buffer(b"")
        self._is_same = True

    def take(self, expected: pa.Buffer) -> None:
        """What comes next should be `expected`."""
        while self._is_same and expected.size:
            if not self._rest.size:
                self._rest = self._next()
            size = min(expected.size, self._rest.size)
            self._is_same = size > 0 and expected.slice(0, size).equals(self._rest.slice(0, size))
            expected, self._rest = expected.slice(size), self._rest.slice(size)

    def ended(self) -> bool:
        """Whether all was the same, and nothing is left."""
        return self._is_same and not self._rest.size and not self._next().size and self._is_same

    def _next(self) -> pa.Buffer:
        try:
            return pa.py_buffer(next(self._blocks, (0, b""))[1])
        except DamageError:
            self._is_same = False
            return pa.py_buffer(b"")


class _Ranges:
    """Ranges of seqs, first…last, in order and joined."""

    def __init__(self, spans: Iterable[Span]) -> None:
        joined: list[list[int]] = []
        for first, last in sorted(spans):
            if joined and first <= joined[-1][1] + 1:
                joined[-1][1] = max(joined[-1][1], last)
            else:
                joined.append([first, last])
        self.ranges = [SeqRange(first, last) for first, last in joined]
        self._firsts = np.array([each[0] for each in joined], np.int64)
        self._lasts = np.array([each[1] for each in joined], np.int64)

    def hold(self, seqs: Numbers) -> Numbers:
        """Which of the seqs lie in one of them."""
        if not self.ranges:
            return np.zeros(len(seqs), bool)
        at = np.searchsorted(self._firsts, seqs, "right") - 1
        held: Numbers = (at >= 0) & (seqs <= self._lasts[at])
        return held


class _Map:
    """seq → place, of many at once."""

    def __init__(self, seqs: Numbers, targets: Numbers) -> None:
        order = np.argsort(seqs, kind="stable")
        self._seqs, self._targets = seqs[order], targets[order]

    def get(self, seqs: Numbers) -> Numbers:
        """The place of each, -1 where there is none."""
        found = np.full(len(seqs), -1, np.int64)
        if len(self._seqs):
            at = np.minimum(np.searchsorted(self._seqs, seqs), len(self._seqs) - 1)
            same = self._seqs[at] == seqs
            found[same] = self._targets[at[same]]
        return found


def _is_sound(block: Block) -> bool:
    """Whether each line has its five bars, and a number in front."""
    block.seq()
    begins, ends = block.starts, block.ends
    return bool((begins[1] > begins[0]).all() and (begins[5] <= ends[5]).all())
