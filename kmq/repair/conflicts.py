"""Two different records under one seq: both copies are whole, but they differ.

That happens when a WAL has lost its end and its seqs were given out again (numbered.py refuses that today). Both
records may have been acknowledged, so both are kept. The record in the queue keeps its seq, because consumers may have
it and offsets must not change; it is written into the WAL under that seq. The record that the WAL had gets a new seq at
the end of the WAL, and the next start of the router brings it to its queue.

If the WAL lacks most records of a queue under their seqs, the queue was never written from this WAL: its segments are
set aside, and the queue is rebuilt.

Records in another queue than the topics in force give: a release that did not know the partitioner or the growth of the
topic has put them there. Offsets do not change here either:

    in no other queue      the record stays. In both copies its routing key gets a mark with that partition, so it
                           belongs there from now on
    in its queue too       the copy in the wrong queue leaves a bare newline. At the end of a queue the next record
                           would get the offset of a newline, so there the copy becomes a record of its own
    in no queue at all     a copy gets a new seq at the end of the WAL; quarantine/log names the old one

Crash       A queue is written before the WAL. So the next repair finds a record with a mark where the WAL has it without
            one, and writes the WAL.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from kmq.files import QUARANTINE
from kmq.log import checkpoint, dropped, reader, segment, topics, wal
from kmq.log.partition import directory_of
from kmq.log.segment import SEQ
from kmq.message import record, routing
from kmq.repair.copies import Copies, Difference
from kmq.repair.directory import At, Directory
from kmq.repair.rewriting import Line, Patch, Rewriter, ranges


class _Edit(NamedTuple):
    """A line of a log, and the line to replace it."""

    byte: int
    seq: int
    old: bytes  # without its newline
    new: bytes  # with its newline


class Conflicts:
    """One run over a directory whose blocks all match their indexes."""

    def __init__(self, data: str, rewriter: Rewriter, progress: Callable[[int], None]) -> None:
        self.data, self.rewriter, self._progress = data, rewriter, progress

    def settle(self) -> bool:
        """Keep every record, once; return True if anything changed and the logs must be healed again."""
        end = reader.wal(self.data).end_offset() - 1
        found: defaultdict[At, list[Difference]] = defaultdict(list)
        gaps = Directory(self.data).named_gaps("durable")
        compared = Copies(self.data, end, gaps, is_live=False, progress=self._progress)
        for difference in compared.differences(checkpoint.routed_seq(self.data)):
            found[difference.topic, difference.partition].append(difference)
        misrouted, missing = list[Difference](), list[Difference]()
        kept: list[Difference] = []
        for at, differences in found.items():
            log = reader.partition(self.data, *at)
            foreign = [each for each in differences if each.kind in ("differs", "unknown")]
            if 2 * len(foreign) > log.end_offset() - log.first_offset:
                self._set_aside(at)
                continue
            kept += foreign
            misrouted += [each for each in differences if each.kind == "misrouted"]
            if at not in compared.damaged:
                missing += [each for each in differences if each.kind == "missing"]
        if kept:
            self._keep_both(kept)
        placed, copied = self._keep_place(misrouted)
        self._send_again([each for each in missing if each.seq not in placed], copied)
        return bool(found)

    def _set_aside(self, at: At) -> None:
        directory = directory_of(self.data, *at)
        quarantine = self.rewriter.quarantine
        for _, log_path in segment.listing(directory):
            self.rewriter.scans.forget(log_path)
            for path in filter(os.path.exists, (log_path, segment.index_path(log_path))):
                quarantine.set_aside(path, f"{quarantine.flat(path)}.unknown")
        what = f"most of its records are not this WAL's: set aside in {QUARANTINE}/, and rebuilt"
        self.rewriter.report.add(directory, what)

    def _keep_both(self, differences: list[Difference]) -> None:
        wal_log = reader.wal(self.data)
        renumbered: list[bytes] = []  # records that get a new seq
        edits: defaultdict[str, list[_Edit]] = defaultdict(list)  # by path
        for seq, _, topic, partition, _ in differences:
            queued = reader.partition(self.data, topic, partition).find(seq, SEQ)
            logged = wal_log.find(seq, SEQ)
            assert queued is not None  # the difference was read there
            if logged is not None and _marked(logged.line, topic, partition) == queued.line:
                edits[logged.path].append(_Edit(logged.byte, seq, logged.line, queued.line + b"\n"))
            elif logged is None or not logged.line.startswith(b"%d|" % seq) or self._is_in_its_queue(logged.line):
                edits[queued.path].append(_Edit(queued.byte, seq, queued.line, b"\n"))
                renumbered.append(queued.line)
            else:
                edits[logged.path].append(_Edit(logged.byte, seq, logged.line, queued.line + b"\n"))
                renumbered.append(logged.line)
        for path, changes in edits.items():
            self._edit(path, sorted(changes))
        self._append(sorted(renumbered, key=record.seq_of))

    def _keep_place(self, differences: list[Difference]) -> tuple[set[int], set[int]]:
        """Give each record of another queue a mark, unless its own queue has it too.

        Return the seqs of those, and of the records that have a copy of their own now.
        """
        wal_log, table = reader.wal(self.data), topics.table(self.data)
        queue_edits: defaultdict[str, list[_Edit]] = defaultdict(list)  # by path
        wal_edits: defaultdict[str, list[_Edit]] = defaultdict(list)
        doubled: defaultdict[At, list[Difference]] = defaultdict(list)
        placed, kept, copied = defaultdict[At, list[int]](list), set[int](), set[int]()
        for difference in differences:
            seq, _, topic, partition, _ = difference
            at = topic, partition
            queued, logged = reader.partition(self.data, *at).find(seq, SEQ), wal_log.find(seq, SEQ)
            assert queued is not None and logged is not None  # they were compared
            line = _marked(queued.line, topic, partition)
            is_theirs = _place(table, line) == at and queued.line.split(b"|", 3)[2].startswith(topic.encode())
            if seq in kept or not is_theirs or self._is_in_its_queue(queued.line):
                doubled[at].append(difference)
            else:
                queue_edits[queued.path].append(_Edit(queued.byte, seq, queued.line, line + b"\n"))
                wal_edits[logged.path].append(_Edit(logged.byte, seq, logged.line, line + b"\n"))
                placed[at].append(seq)
                kept.add(seq)
        for path, changes in [*queue_edits.items(), *wal_edits.items()]:
            self._edit(path, sorted(changes))
        for at, seqs in placed.items():
            what = f"{len(seqs)} records belonged to another partition: they stay, and their routing keys say so now"
            self.rewriter.report.add(directory_of(self.data, *at), what)
        for at, extra in doubled.items():
            copied |= self._remove_doubles(at, extra)
        return kept, copied

    def _remove_doubles(self, at: At, doubled: list[Difference]) -> set[int]:
        """Remove records from a queue that is not theirs; return those that are records of their own now."""
        log = reader.partition(self.data, *at)
        offsets, end = {each.offset for each in doubled}, log.end_offset()
        while end - 1 in offsets:
            end -= 1
        found = [(each.offset, log.find(each.seq, SEQ)) for each in doubled]
        lines = {offset: place for offset, place in found if place is not None}
        last = [lines[offset] for offset in sorted(lines) if offset >= end]
        texts = {
            place.line: text
            for place, text in zip(last, self._append([_marked(place.line, *at) for place in last]), strict=True)
        }
        edits: defaultdict[str, list[_Edit]] = defaultdict(list)  # by path
        for place in lines.values():
            edit = _Edit(place.byte, record.seq_of(place.line), place.line, texts.get(place.line, b"\n"))
            edits[place.path].append(edit)
        for path, changes in edits.items():
            self._edit(path, sorted(changes))
        what = f"{len(lines)} records were in their own partition too: removed here, or records of their own"
        self.rewriter.report.add(directory_of(self.data, *at), what)
        return {record.seq_of(place.line) for place in last}

    def _send_again(self, missing: list[Difference], copied: set[int]) -> None:
        """Append records that no queue has to the WAL, under new seqs. `copied`: that was done already."""
        by_queue: defaultdict[At, list[int]] = defaultdict(list)
        lines = []
        for seq, _, topic, partition, _ in missing:
            logged = reader.wal(self.data).find(seq, SEQ)
            if logged is not None and record.seq_of(logged.line) == seq:
                by_queue[topic, partition].append(seq)
                lines += [] if seq in copied else [logged.line]
        self._append(sorted(lines, key=record.seq_of))
        for at, seqs in by_queue.items():
            directory = directory_of(self.data, *at)
            self.rewriter.quarantine.name_lost(f"{directory}/{segment.name(0)}", 0, ranges(sorted(seqs)))
            what = f"{len(seqs)} records were in no queue: they have new seqs, and {QUARANTINE}/log names the old ones"
            self.rewriter.report.add(directory, what)

    def _is_in_its_queue(self, line: bytes) -> bool:
        at = _place(topics.table(self.data), line)
        found = reader.partition(self.data, *at).find(record.seq_of(line), SEQ) if at else None
        return found is not None and found.line == line

    def _edit(self, path: str, edits: list[_Edit]) -> None:
        """Replace some lines of a segment."""
        by_seq = os.path.basename(os.path.dirname(path)) == "append"
        new = {edit.seq: edit.new for edit in edits}
        patches = [Patch(edit.byte, edit.byte + len(edit.old) + 1, edit.seq, edit.seq, []) for edit in edits]
        scan = self.rewriter.scans.of_segment(path, by_seq)
        self.rewriter.rewrite(scan, patches, lambda _, patch: iter([Line(patch.first_seq, new[patch.first_seq])]))

    def _append(self, lines: list[bytes]) -> list[bytes]:
        """Append records to the WAL, each under a new seq; return them as stored, with their newlines."""
        if not lines:
            return []
        seq, recv_ts = wal.last_stored(self.data)
        seq = max([seq, *(gap.last for gap in dropped.accounted(self.data))])
        stamp = record.format_ts(recv_ts)
        renumbered = [b"%d|%b|%b\n" % (seq + n, stamp, line.split(b"|", 2)[2]) for n, line in enumerate(lines, 1)]
        path = segment.listing(f"{self.data}/append")[-1][1]
        scan = self.rewriter.scans.of_segment(path, by_seq=True)
        end = Patch(scan.size, scan.size, seq + 1, seq + len(lines), [])
        self.rewriter.rewrite(scan, [end], lambda *_: (Line(seq + n, text) for n, text in enumerate(renumbered, 1)))
        seqs = f"seq {seq + 1} to {seq + len(lines)}"
        self.rewriter.report.add(path, f"{len(lines)} records could not keep their seqs: they are {seqs} now")
        return renumbered


def _place(table: routing.Table, line: bytes) -> At | None:
    """Return the queue in which a stored line belongs; None if in none."""
    seq = record.seq_of(line)
    route = routing.resolve(table, record.routing_key_of(line), seq)
    topic = table.get(route.topic)
    return None if topic is None else (topic.name, topic.partition_of(route, seq))


def _marked(line: bytes, topic: str, partition: int) -> bytes:
    """Return a stored line with a routing key that leads to this partition, whatever its key is."""
    seq, recv_ts, routing_key, rest = line.split(b"|", 3)
    key = routing.key_behind(topic.encode(), routing_key)
    mark = b"%b.@%d" % (topic.encode(), partition) + (b"" if key is None else b"." + key)
    return b"|".join((seq, recv_ts, mark, rest))
