"""Verify: checks that all bytes on disk are as written. Yields the findings of `kmq verify`, on which `--repair` works.

Every segment of the WAL and of the queues is read block by block. Verify checks the place of the segment, the crc and
the index line of each block, the syntax of its lines, its seqs (dense in the WAL except for named gaps, rising in a
queue), and the offsets from segment to segment. It compares the end of the WAL with the last seqs in queues and
checkpoints, and the two copies of each record. Then it checks the small files.

Invariant   Verify never writes.
Live        On a live directory an incomplete index and a torn end are not reported: both are being written.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from kmq.errors import EXIT_CORRUPT, EXIT_FAILED, EXIT_OK, ConfigError
from kmq.files import QUARANTINE
from kmq.links.ownership import FileLock, describe
from kmq.log import checkpoint, deletions, dropped, gaps, identity, segment, topics
from kmq.log.reader import LogReader
from kmq.log.segment import seqs_of
from kmq.log.wal import RING_BYTES
from kmq.repair import copies, small_files
from kmq.repair.directory import At, DataDirectory
from kmq.repair.heal import repair
from kmq.repair.objects import NO_TIER, TierAccess
from kmq.repair.scan import Finding, Scan, ScannedBlock, scan_segment


class Verifier:
    """One run over a data directory. `is_live`: a broker may be writing meanwhile. `ring_bytes`: its RB_BYTES."""

    def __init__(
        self,
        data: str,
        is_live: bool,
        progress: Callable[[int], None] = lambda _: None,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self._directory, self._is_live, self._progress = DataDirectory(data), is_live, progress
        self._ring_bytes = ring_bytes

    def findings(self, only: Iterable[str] = ()) -> Iterator[Finding]:
        """Yield all findings, or only those that concern these topics (`append`: the WAL)."""
        directory, only = self._directory, set(only)
        ends: dict[At, int] = {}  # the last seq of each queue
        damaged: set[At] = set()
        routed, rows, _ = directory.load_checkpoint()
        for at in directory.queues():  # before the WAL, which is always ahead of the queues
            if only and at[0] not in only:
                continue
            ends[at] = 0
            for scan, findings in self._of_log(directory.queue(at)):
                yield from findings
                damaged |= {at for finding in findings if finding.is_damage}
                ends[at] = max(ends[at], scan.last_seq)
        wal_end = 0
        if not only or "append" in only:
            for scan, findings in self._of_log(directory.wal()):
                yield from findings
                wal_end = max(wal_end, scan.first - 1, scan.last_seq)
        if not only:
            cut = [*self._of_wal_end(routed, ends, wal_end), *self._of_queue_ends(rows, ends)]
            yield from cut
            damaged |= {at for at in ends if any(finding.path == f"topics/{at[0]}/{at[1]}" for finding in cut)}
            yield from self._of_copies(routed, wal_end, damaged)
            yield from small_files.faults(directory, self._is_live)

    # --- one log -----------------------------------------------------------------------------------------------------

    def _of_log(self, log: LogReader) -> Iterator[tuple[Scan, list[Finding]]]:
        """Yield each segment with its findings."""
        segments, found = log.segments(), log.gaps()
        last_seq = 0  # of the segments before
        next_offset: int | None = None  # where the next segment of a queue must begin; None: unknown
        for number, (first, path) in enumerate(segments):
            sealed = number + 1 < len(segments)
            try:
                scan = scan_segment(first, path, log.by_seq, sealed, self._progress, self._ring_bytes)
            except FileNotFoundError:  # retention has just deleted it, so the next one follows nothing
                last_seq, next_offset = 0, None
                continue
            if scan.misplaced:
                yield scan, [Finding.of_file(self._directory.relative(path), scan.misplaced)]
                next_offset = None
                continue
            findings = [*self._of_blocks(scan, last_seq), *self._of_index(scan, sealed)]
            if not log.by_seq and next_offset not in (None, first, *gaps.ends([first], found)):
                what = f"begins with offset {first}, not {next_offset}"
                findings.append(Finding.of_file(self._directory.relative(path), what))
            is_good = all(block.is_good for block in scan.blocks)
            next_offset = first + sum(block.records for block in scan.blocks) if is_good else None
            last_seq = max(last_seq, scan.last_seq)
            yield scan, findings

    def _of_blocks(self, scan: Scan, last_seq: int) -> Iterator[Finding]:
        """Yield what is wrong with the blocks of a segment. `last_seq`: of the segments before it."""
        path = self._directory.relative(scan.path)
        if scan.by_seq and scan.first > last_seq + 1 and last_seq:
            yield from self._gaps(path, 0, last_seq + 1, scan.first - 1)
        last_seq = max(last_seq, scan.first - 1) if scan.by_seq else last_seq
        is_after_bad = False
        for number, block in enumerate(scan.blocks):
            if not block.is_good:
                ahead = scan.seq_from(number + 1)
                seqs = last_seq + 1, max(ahead - 1, last_seq + 1) if ahead else 0
                yield Finding.of_records(path, block.what, seqs, block.position)
            elif block.first_seq:
                if block.first_seq <= last_seq:
                    seqs = block.first_seq, block.last_seq
                    yield Finding.of_records(path, f"follows seq {last_seq}", seqs, block.position)
                elif scan.by_seq and not is_after_bad and block.first_seq > last_seq + 1:
                    yield from self._gaps(path, block.position, last_seq + 1, block.first_seq - 1)
                if scan.by_seq and block.last_seq - block.first_seq + 1 != block.records:
                    yield from self._gaps_within(path, scan, block)
                last_seq = block.last_seq
            is_after_bad = not block.is_good

    def _gaps_within(self, path: str, scan: Scan, block: ScannedBlock) -> Iterator[Finding]:
        for before, after in pairwise(seqs_of(scan.read(block))):
            if after > before + 1:
                yield from self._gaps(path, block.position, before + 1, after - 1)

    def _gaps(self, path: str, byte: int, first: int, last: int) -> Iterator[Finding]:
        """Yield the seqs of first…last that dropped.log and quarantine/log do not name."""
        for gap in dropped.without(first, last, self._directory.named_gaps()):
            yield Finding.of_records(path, "missing, and not named in dropped.log", gap, byte)

    def _of_index(self, scan: Scan, sealed: bool) -> Iterator[Finding]:
        index_path = self._directory.relative(segment.index_path(scan.path))
        for byte, what in scan.wrong:
            yield Finding.of_file(index_path, what, byte)
        if scan.torn and not self._is_live:
            log_path = self._directory.relative(scan.path)
            yield Finding.of_file(
                log_path, "a torn end, which the next start cuts", scan.size - scan.torn, is_damage=False
            )
        if scan.unindexed and (sealed or not self._is_live):
            yield Finding.of_file(index_path, f"does not cover {scan.unindexed} bytes of its log", is_damage=sealed)

    # --- comparisons -------------------------------------------------------------------------------------------------

    def _of_wal_end(self, routed: int, ends: dict[At, int], wal_end: int) -> Iterator[Finding]:
        """Compare the last seq of the WAL with the last seqs in queues, router.ckpt and deletions."""
        directory = self._directory
        segments = directory.wal().segments()
        active = directory.relative(segments[-1][1]) if segments else "append"
        size = os.stat(f"{directory.data}/{active}").st_size
        had = max([routed, deletions.last_seq(directory.data), *ends.values()])
        for gap in dropped.without(wal_end + 1, had, directory.named_gaps()):
            yield Finding.of_records(active, "cut off: the queues, router.ckpt or deletions have had it", gap, size)

    def _of_queue_ends(self, rows: checkpoint.Rows, ends: dict[At, int]) -> Iterator[Finding]:
        """Compare the last seq of each queue with its row in router.ckpt."""
        current = self._directory.load_checkpoint()[1].keys()  # a topic may have been deleted meanwhile
        for (topic, number), row in rows.items():
            last_seq = ends.get((topic, number), 0)
            is_empty = row.start == row.end_offset  # a start has deleted all records that it had
            if (topic, number) in current and not is_empty and last_seq < row.last_seq:
                what = "cut off or missing: router.ckpt has had it"
                yield Finding.of_records(f"topics/{topic}/{number}", what, (last_seq + 1, row.last_seq))

    def _of_copies(self, routed: int, wal_end: int, damaged: set[At]) -> Iterator[Finding]:
        """Compare the two copies of each record.

        For `damaged` queues the lost records have been reported already.
        """
        seqs: dict[tuple[str, str, int], list[int]] = {}  # first, last, count
        upto = routed if self._is_live else wal_end
        gaps = self._directory.named_gaps("durable")
        compared = copies.Copies(self._directory.data, upto, gaps, self._is_live, self._progress)
        for difference in compared.differences(routed):
            key = difference.kind, difference.topic, difference.partition
            first, last, count = seqs.get(key, (difference.seq, difference.seq, 0))
            seqs[key] = [min(first, difference.seq), max(last, difference.seq), count + 1]
        for (kind, topic, partition), (first, last, count) in seqs.items():
            if kind != "lost" or (topic, partition) not in damaged:
                what = f"{count} records: {copies.WHAT[kind]}"
                yield Finding.of_records(f"topics/{topic}/{partition}", what, (first, last))


# --- the command -----------------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """The result of a check: the exit code, the number of damaged places, and whether everything was checked."""

    code: int
    damage: int
    is_complete: bool


def run(
    data: str,
    only: list[str],
    heal: bool,
    as_json: bool,
    progress: Callable[[int], None],
    ring_bytes: int,
    access: TierAccess = NO_TIER,
) -> Checked:
    """Check everything, or only some topics; heal if asked to, and print the findings. `access`: to KMQ_TIER.

    The exit code is 0 if all is good, 1 if not, 65 if something cannot be healed.
    """
    unknown = set(only) - {"append", *topics.names(data)}
    if unknown:
        raise topics.unknown(min(unknown), topics.names(data))
    if heal and only:
        raise ConfigError("--repair: takes no topics, because it heals each copy from the other; leave them out")
    if identity.is_unknown(data):  # by other rules good records look damaged, and a repair would move them
        text, what = identity.read(data, "format"), "repair" if heal else "check"
        raise ConfigError(f"{data}/format: {text!r} is of another release; {what} it with that release")
    if heal:
        return _heal(data, as_json, progress, ring_bytes, access)
    damage = _look(data, only, as_json, progress, ring_bytes)
    return Checked(EXIT_FAILED if damage else EXIT_OK, damage, not only)


def _look(data: str, only: list[str], as_json: bool, progress: Callable[[int], None], ring_bytes: int) -> int:
    """Print the findings; return how many of them are damage."""
    is_live = any(FileLock(f"{data}/{name}/.owner").is_held() for name in ("append", "topics"))
    count = 0
    for finding in Verifier(data, is_live, progress, ring_bytes).findings(only):
        count += finding.is_damage
        text = f"{'damage' if finding.is_damage else 'note'}: {finding}"
        print(json.dumps(finding._asdict()) if as_json else text, flush=True)
    if not as_json:
        print(f"{count} damaged places; kmq verify --repair heals them" if count else "no damage")
    return count


def _heal(data: str, as_json: bool, progress: Callable[[int], None], ring_bytes: int, access: TierAccess) -> Checked:
    locks = [(name, FileLock(f"{data}/{name}/.owner")) for name in ("append", "topics")]
    for name, lock in locks:
        lock.acquire(f"{data}/{name}: the broker must be down for a repair; it", describe("repair", data))
    try:
        done = repair(data, progress, ring_bytes, access)
        found = Verifier(data, False, progress, ring_bytes).findings()
        left = [finding for finding in found if finding.is_damage]
    finally:
        for _, lock in locks:
            lock.release()
    for healed in done:
        seqs = "".join(f"; lost: seq {first} to {last}" for first, last in healed.lost)
        seqs += "".join(
            f"; not confirmed by a second copy: seq {first} to {last}" for first, last in healed.unwitnessed
        )
        where = f", kept in {QUARANTINE}/" if healed.lost else ""
        print(json.dumps(healed._asdict()) if as_json else f"{healed.path}: {healed.what}{seqs}{where}")
    for finding in left:
        print(json.dumps(finding._asdict()) if as_json else f"still damaged: {finding}")
    if not as_json:
        print(f"{len(done)} file{'s' if len(done) != 1 else ''} healed" if done else "nothing to heal")
    is_lost = left or any(healed.lost for healed in done)
    if is_lost and not as_json and os.path.exists(f"{data}/replica"):
        print(
            "other replicas of the shard have what is lost here: kmq cluster reset, then kmq up copies all from the leader"
        )
    return Checked(EXIT_CORRUPT if is_lost else EXIT_OK, len(left), is_complete=True)
