"""Two different records under one seq: both copies are whole, but they differ.

That happens when a WAL has lost its end and its seqs were given out again (numbered.py refuses that today). Both
records may have been acknowledged, so both are kept. The record in the queue keeps its seq, because consumers may have
it and offsets must not change; it is written into the WAL under that seq. The record that the WAL had gets a new seq at
the end of the WAL, and the next start of the router brings it to its queue.

If the WAL lacks most records of a queue under their seqs, the queue was never written from this WAL: its segments are
set aside, and the queue is rebuilt.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from kmq import record, routing
from kmq.log import dropped, reader, segment, topics, wal
from kmq.log.disk import QUARANTINE
from kmq.log.lines import SEQ
from kmq.log.partition import directory_of
from kmq.repair.copies import Copies, Difference
from kmq.repair.directory import At
from kmq.repair.rewriting import Line, Patch, Rewriter


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
        """Keep both records of each seq; return True if anything changed and the logs must be healed again."""
        end = reader.wal(self.data).end_offset() - 1
        found: defaultdict[At, list[Difference]] = defaultdict(list)
        for difference in Copies(self.data, end, [], is_live=False, progress=self._progress).differences(routed=0):
            found[difference.topic, difference.partition].append(difference)
        kept: list[Difference] = []
        for at, differences in found.items():
            log = reader.partition(self.data, *at)
            if 2 * len(differences) > log.end_offset() - log.first_offset:
                self._set_aside(at)
            else:
                kept += differences
        if kept:
            self._keep_both([difference for difference in kept if difference.kind in ("differs", "unknown")])
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
            if logged is None or not logged.line.startswith(b"%d|" % seq) or self._is_in_its_queue(logged.line):
                edits[queued.path].append(_Edit(queued.byte, seq, queued.line, b"\n"))
                renumbered.append(queued.line)
            else:
                edits[logged.path].append(_Edit(logged.byte, seq, logged.line, queued.line + b"\n"))
                renumbered.append(logged.line)
        for path, changes in edits.items():
            self._edit(path, sorted(changes))
        self._append(sorted(renumbered, key=record.seq_of))

    def _is_in_its_queue(self, line: bytes) -> bool:
        table, seq = topics.table(self.data), record.seq_of(line)
        route = routing.resolve(table, record.routing_key_of(line), seq)
        topic = table.get(route.topic)
        if topic is None:
            return False
        log = reader.partition(self.data, topic.name, topic.partition_of(route, seq))
        found = log.find(seq, SEQ)
        return found is not None and found.line == line

    def _edit(self, path: str, edits: list[_Edit]) -> None:
        """Replace some lines of a segment."""
        by_seq = os.path.basename(os.path.dirname(path)) == "append"
        new = {edit.seq: edit.new for edit in edits}
        patches = [Patch(edit.byte, edit.byte + len(edit.old) + 1, edit.seq, edit.seq, []) for edit in edits]
        scan = self.rewriter.scans.of_segment(path, by_seq)
        self.rewriter.rewrite(scan, patches, lambda _, patch: iter([Line(patch.first_seq, new[patch.first_seq])]))

    def _append(self, lines: list[bytes]) -> None:
        """Append records to the WAL, each under a new seq."""
        seq, recv_ts = wal.last_stored(self.data)
        seq = max([seq, *(gap.last for gap in dropped.accounted(self.data))])
        stamp = record.format_ts(recv_ts)
        renumbered = [b"%d|%b|%b\n" % (seq + n, stamp, line.split(b"|", 2)[2]) for n, line in enumerate(lines, 1)]
        path = segment.listing(f"{self.data}/append")[-1][1]
        scan = self.rewriter.scans.of_segment(path, by_seq=True)
        end = Patch(scan.size, scan.size, seq + 1, seq + len(lines), [])
        self.rewriter.rewrite(scan, [end], lambda *_: (Line(seq + n, text) for n, text in enumerate(renumbered, 1)))
        seqs = f"seq {seq + 1} to {seq + len(lines)}"
        self.rewriter.report.add(path, f"{len(lines)} records had the seq of another one: they are {seqs} now")
