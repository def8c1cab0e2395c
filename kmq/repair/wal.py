"""Heals the WAL from the queues.

A record is trusted if it lies in a block with a right crc, or if both copies are the same. So damaged parts of the WAL
are written again from the queues. Bytes that no index line covers (the index was lost) are compared with the queues,
record by record. If the queues lack the records, the bytes are kept as they are and reported as not confirmed.
"""

import heapq
from collections.abc import Iterator

from kmq.files import replace_file
from kmq.log import dropped, reader, segment
from kmq.message import record
from kmq.repair.directory import Directory
from kmq.repair.evidence import Evidence, confirmed_lines
from kmq.repair.rewriting import Line, Patch, Rewriter
from kmq.repair.scan import Block, Scan


class WalHealer:
    """One run over the WAL."""

    def __init__(self, directory: Directory, rewriter: Rewriter) -> None:
        self.directory, self.rewriter, self.data = directory, rewriter, directory.data
        self._unwitnessed: list[int] = []  # seqs of the current segment that nothing else confirms

    def heal(self, known: int) -> None:
        """Rewrite each segment that is damaged or not indexed. `known`: the last seq in any other file."""
        log = self.directory.wal()
        if not log.segments() and known:
            replace_file(f"{self.data}/append/{segment.name(self._oldest())}", b"")
        scans = self.rewriter.scans.of_log(log)
        for number, scan in enumerate(scans):
            is_last = number + 1 == len(scans)
            until = max(known, scan.first - 1) if is_last else scans[number + 1].first - 1
            patches = self._patches(scan, until)
            if patches or scan.wrong or scan.unindexed:
                self._unwitnessed = []
                self.rewriter.rewrite(scan, patches, self._lines, unwitnessed=self._unwitnessed)

    def _oldest(self) -> int:
        """Return the first seq of a WAL of which nothing is left.

        That is 1, unless retention has deleted the first records of a queue.
        """
        logs = map(self.directory.queue, self.directory.queues())
        scans = [scan for log in logs for scan in self.rewriter.scans.of_log(log)[:1]]
        return min([scan.seq_from(0) or 1 for scan in scans], default=1) if any(scan.first for scan in scans) else 1

    def _patches(self, scan: Scan, until: int) -> list[Patch]:
        """Return the parts of a segment that must be written again: damaged or missing records.

        `until`: the last record of the segment has at least this seq.
        """
        patches: list[Patch] = []
        last_seq, bad = scan.first - 1, list[Block]()
        for block in [*scan.blocks, None]:
            if block is not None and not block.is_good:
                bad.append(block)
                continue
            position = block.position if block else scan.size - scan.torn
            # A damaged digit must not make the segment appear a million records longer.
            at_most = last_seq + sum(scan.read(damaged).count(b"\n") for damaged in bad) + 1
            last = block.first_seq - 1 if block else max(until, self._last_in(scan, bad, last_seq, at_most))
            if bad or (last > last_seq and self._unnamed(last_seq + 1, last)):
                start = bad[0].position if bad else position
                patches.append(Patch(min(start, scan.size), position, last_seq + 1, last, bad))
            if block is not None and not block.is_witnessed:
                first = max(last_seq + 1, block.first_seq)
                patches.append(Patch(position, block.end, first, block.last_seq, [block]))
            last_seq, bad = block.last_seq if block else last, []
        return patches

    def _last_in(self, scan: Scan, bad: list[Block], last_seq: int, at_most: int) -> int:
        """Return the last seq in a damaged end, as far as it can be read."""
        evidence = Evidence(scan, bad, last_seq + 1, 1 << 62)
        return max([last_seq, *evidence.proven, *(seq for seq in evidence.doubtful if seq <= at_most)])

    def _unnamed(self, first: int, last: int) -> list[dropped.SeqRange]:
        return dropped.without(first, last, self.directory.named_gaps())

    def _lines(self, scan: Scan, patch: Patch) -> Iterator[Line]:
        """Yield the records of a patch, in order."""
        low, high = patch.first_seq, patch.last_seq
        evidence = Evidence(scan, patch.blocks, low, high)
        logs = map(self.directory.queue, self.directory.queues())
        merged = self._merged(patch, heapq.merge(*(self._between(log, low, high) for log in logs)), evidence)
        if not patch.blocks:
            yield from merged
            return
        lines = list(merged)
        candidates = ((seq, text or evidence.doubtful.get(seq)) for seq, text in lines)
        confirmed = confirmed_lines(patch.blocks, patch.position, candidates)
        yield from (Line(seq, text or confirmed.get(seq)) for seq, text in lines)

    def _merged(self, patch: Patch, copies: Iterator[tuple[int, bytes, bool]], evidence: Evidence) -> Iterator[Line]:
        """Yield each record from its best remaining copy.

        `copies`: the records of the queues, as `_between` yields them.
        """
        copy, unsure = next(copies, None), evidence.unsure
        for first, last in self._unnamed(patch.first_seq, patch.last_seq):
            for seq in range(first, last + 1):
                text = evidence.proven.get(seq)
                while copy is not None and copy[0] <= seq:
                    if copy[0] == seq and (copy[2] or unsure.get(seq) == copy[1]):
                        text = copy[1]
                    copy = next(copies, None)
                if text is None and seq in evidence.unindexed:
                    text = evidence.unindexed[seq]
                    self._unwitnessed.append(seq)
                yield Line(seq, text)

    def _between(self, log: reader.LogReader, low: int, high: int) -> Iterator[tuple[int, bytes, bool]]:
        """Yield (seq, line, True if a checksum confirms it) of the records low…high of a queue, in order."""
        for scan in self.rewriter.scans.of_log(log):
            last_seq = 0
            for number, block in enumerate(scan.blocks):
                if block.is_good and (block.last_seq < low or block.first_seq > high):
                    last_seq = max(last_seq, block.last_seq)
                    continue
                ahead = scan.seq_from(number + 1) or 1 << 63
                if ahead <= low or last_seq >= high:
                    continue
                for line in scan.read(block).split(b"\n"):
                    stamp = record.parse_stored(line) if line else None
                    if stamp and last_seq < stamp[0] < ahead:
                        if low <= stamp[0] <= high:
                            yield stamp[0], line + b"\n", block.is_witnessed
                        last_seq = stamp[0]
