"""Healing: each record is on disk twice, in the WAL and in its queue, byte for byte the same.

The order is: the list of deleted topics; id, lineage and format; misplaced segments; checkpoints and declarations; the
WAL from the queues; the queues from the WAL. If both copies of a seq are whole but differ, both are kept.

Bytes that cannot be healed go to `quarantine/<segment>.<byte>`, as they were found, and their records are named in
`quarantine/log` by file, byte and seqs. In a queue each lost record leaves a bare newline, as compaction does, so every
offset stays; in the WAL, where a record carries its seq, it leaves nothing. The alternative is to leave the block in
place and have every reader refuse it for ever: consumers would stop before it, and a router that must replay it would
never start. So the loss is reported once, by name, the bytes are kept, and the broker runs.

Owner       The caller holds append/.owner and topics/.owner: the broker is down.
Crash       The next repair continues with what is left; see rewriting.py and places.py.
"""

from collections.abc import Callable

from kmq.log import dedupe_file, deletions
from kmq.log.wal import RING_BYTES
from kmq.repair.conflicts import Conflicts
from kmq.repair.directory import Directory
from kmq.repair.places import Locator
from kmq.repair.queues import QueueHealer
from kmq.repair.rewriting import Healed, Rewriter
from kmq.repair.small_files import SmallFiles
from kmq.repair.wal import WalHealer


class Repair:
    """One run over a data directory. `ring_bytes`: RB_BYTES of its broker."""

    def __init__(
        self, data: str, progress: Callable[[int], None] = lambda _: None, ring_bytes: int = RING_BYTES
    ) -> None:
        self._directory, self._rewriter = Directory(data), Rewriter(data, progress, ring_bytes)
        self._conflicts = Conflicts(data, self._rewriter, progress)

    def run(self) -> list[Healed]:
        """Heal everything; return what was done, file by file."""
        report, scans = self._rewriter.report, self._rewriter.scans
        small = SmallFiles(self._directory, report)
        small.heal_deletions()
        small.heal_identity()
        for path, what in Locator(self._directory.data, self._known(), self._directory.load_checkpoint()[1]).tidy():
            report.add(path, what)
        scans.forget_all()
        small.heal()
        small.heal_dropped()
        self._heal_logs()
        if self._conflicts.settle():
            self._heal_logs()
        return report.healed

    def _heal_logs(self) -> None:
        # A new object, because it caches the named gaps, and the steps before may have named more.
        directory = Directory(self._directory.data)
        WalHealer(directory, self._rewriter).heal(self._known())
        for topic, number in directory.queues():
            QueueHealer(directory, self._rewriter, topic, number).heal()

    def _known(self) -> int:
        """Return the last seq in any file except the WAL."""
        directory = self._directory
        routed, rows, _ = directory.load_checkpoint()
        others = [routed, deletions.last_seq(directory.data), dedupe_file.checkpoint_seq(directory.data)]
        queues = [self._rewriter.scans.last_seq(directory.queue(at)) for at in directory.queues()]
        return max([*others, *(row.last_seq for row in rows.values()), *queues])
