"""The WAL from the queues.

A record is believed when a block with a right crc holds it, or when both copies say the same. So what of the WAL is not
good is written again from the queues. What no index line speaks of (the index was lost) is compared with the queues,
record by record; where they have nothing, it is kept as it is, and said to have no second witness.
"""

import heapq
from collections.abc import Iterator

from kmq import record
from kmq.log import dropped, reader, segment
from kmq.log.disk import replace_file
from kmq.repair.evidence import Evidence, agreed, bytes_of
from kmq.repair.rewriting import Line, Rewriter, Stretch
from kmq.repair.scan import Part, Scan
from kmq.repair.verify import Directory


class WalHealer:
    """One run over the WAL."""

    def __init__(self, directory: Directory, rewriter: Rewriter) -> None:
        self.directory, self.rewriter, self.data = directory, rewriter, directory.data
        self._alone: list[int] = []  # seqs of the segment at hand that are kept on its own word alone

    def heal(self, had: int) -> None:
        """`had`: the last seq that anything else on disk knows of."""
        log = reader.wal(self.data)
        if not log.segments() and had:
            replace_file(f"{self.data}/append/{segment.name(self._oldest())}", b"")
        scans = self.rewriter.scan(log)
        for number, found in enumerate(scans):
            is_last = number + 1 == len(scans)
            until = max(had, found.first - 1) if is_last else scans[number + 1].first - 1
            stretches = self._stretches(found, until)
            if stretches or found.wrong or found.unindexed:
                self._alone = []
                self.rewriter.rewrite(found, stretches, self._lines, by_seq=True, unwitnessed=self._alone)

    def _oldest(self) -> int:
        """Where a WAL of which nothing is left begins: with the first record, unless retention has taken that from a queue."""
        scans = [
            scan for at in self.directory.queues() for scan in self.rewriter.scan(reader.partition(self.data, *at))[:1]
        ]
        firsts = [next((part.first_seq for part in scan.parts if part.first_seq), 1) for scan in scans]
        return min(firsts, default=1) if any(scan.first for scan in scans) else 1

    def _stretches(self, found: Scan, until: int) -> list[Stretch]:
        """What of a segment has to be written again: what is not good, and what is missing, up to seq `until` at its end."""
        stretches: list[Stretch] = []
        before, bad = found.first - 1, list[Part]()
        for part in [*found.parts, None]:
            if part is not None and not part.is_good:
                bad.append(part)
                continue
            position = part.position if part else found.size - found.torn
            # A damaged digit must not say that there were a million more.
            at_most = before + sum(bytes_of(found, each).count(b"\n") for each in bad) + 1
            last = part.first_seq - 1 if part else max(until, self._last_in(found, bad, before, at_most))
            if bad or (last > before and self._unnamed(before + 1, last)):
                start = bad[0].position if bad else position
                stretches.append(Stretch(min(start, found.size), position, before + 1, last, bad))
            if part is not None and not part.is_witnessed:
                stretches.append(Stretch(position, part.end, max(before + 1, part.first_seq), part.last_seq, [part]))
            before, bad = part.last_seq if part else last, []
        return stretches

    def _last_in(self, found: Scan, bad: list[Part], before: int, at_most: int) -> int:
        """The last seq that a damaged end speaks of, as far as that can be read."""
        evidence = Evidence(found, bad, before + 1, 1 << 62)
        return max([before, *evidence.own, *(seq for seq in evidence.doubtful if seq <= at_most)])

    def _unnamed(self, first: int, last: int) -> list[dropped.SeqRange]:
        return dropped.without(first, last, self.directory.named_gaps())

    def _lines(self, found: Scan, stretch: Stretch) -> Iterator[Line]:
        """The records of a stretch, in order."""
        low, high = stretch.first_seq, stretch.last_seq
        evidence = Evidence(found, stretch.parts, low, high)
        logs = [reader.partition(self.data, *at) for at in self.directory.queues()]
        merged = self._merged(stretch, heapq.merge(*(self._between(log, low, high) for log in logs)), evidence)
        if not stretch.parts:
            yield from merged
            return
        lines = list(merged)
        more = agreed(
            stretch.parts, stretch.position, ((seq, text or evidence.doubtful.get(seq)) for seq, text in lines)
        )
        yield from (Line(seq, text or more.get(seq)) for seq, text in lines)

    def _merged(
        self, stretch: Stretch, others: Iterator[tuple[int, bytes, bool]], evidence: Evidence
    ) -> Iterator[Line]:
        following, unsure = next(others, None), evidence.unsure
        for first, last in self._unnamed(stretch.first_seq, stretch.last_seq):
            for seq in range(first, last + 1):
                text = evidence.own.get(seq)
                while following is not None and following[0] <= seq:
                    if following[0] == seq and (following[2] or unsure.get(seq) == following[1]):
                        text = following[1]
                    following = next(others, None)
                if text is None and seq in evidence.unindexed:
                    text = evidence.unindexed[seq]
                    self._alone.append(seq)
                yield Line(seq, text)

    def _between(self, log: reader.Log, low: int, high: int) -> Iterator[tuple[int, bytes, bool]]:
        """(seq, line, whether a checksum vouches for it) of the records low…high of a queue, in order."""
        for found in self.rewriter.scan(log):
            before = 0
            for number, part in enumerate(found.parts):
                if part.is_good and (part.last_seq < low or part.first_seq > high):
                    before = max(before, part.last_seq)
                    continue
                ahead = next((each.first_seq for each in found.parts[number + 1 :] if each.first_seq), 1 << 63)
                if ahead <= low or before >= high:
                    continue
                for line in bytes_of(found, part).split(b"\n"):
                    stamp = record.parse_stored(line) if line else None
                    if stamp and before < stamp[0] < ahead:
                        if low <= stamp[0] <= high:
                            yield stamp[0], line + b"\n", part.is_witnessed
                        before = stamp[0]
