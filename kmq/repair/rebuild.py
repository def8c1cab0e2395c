"""Healing: each record is on disk twice, in the WAL and in its queue, byte for byte the same.

In this order: what was deleted; who the directory is; segments that lie where others belong go to their places; checkpoints and
declarations; the WAL from the queues; the queues from the WAL; and where both copies of a seq are whole and yet differ,
both are kept.

What cannot be healed goes to `quarantine/<segment>.<byte>`, as it was found, and is named in `quarantine/log` by file,
byte and seqs. In a queue each such record leaves a bare newline, as compaction does, so every offset stays; in the WAL,
where a record brings its number, it leaves nothing. The alternative, to leave the block in place and have every reader
refuse it for ever, ends no incident: consumers stand still before it, a router that has to replay over it never starts.
So the loss is told once, by name, the bytes are kept, and the broker goes on.

Owner       the caller holds append/.owner and topics/.owner: the broker is down.
Crash       See rewriting.py and places.py: the next repair goes on with what is left.
"""

from collections.abc import Callable

from kmq.log import dedupe_file, deletions, reader
from kmq.repair.conflicts import Conflicts
from kmq.repair.places import Places
from kmq.repair.queues import QueueHealer
from kmq.repair.rewriting import Healed, Rewriter
from kmq.repair.small_files import SmallFiles
from kmq.repair.verify import Directory
from kmq.repair.wal import WalHealer


class Repair:
    """One run over a data directory."""

    def __init__(self, data: str, progress: Callable[[int], None] = lambda _: None) -> None:
        self.data, self._progress = data, progress

    def run(self) -> list[Healed]:
        """Heal everything; what was done, file by file."""
        directory, rewriter = Directory(self.data, is_live=False), Rewriter(self.data, self._progress)
        small = SmallFiles(directory, rewriter)
        small.heal_deletions()
        small.heal_identity()
        for path, what in Places(self.data, self._known(directory, rewriter), directory.load_checkpoint()[1]).tidy():
            rewriter.report(path, what)
        rewriter.forget()
        small.heal()
        small.heal_dropped()
        self._logs(directory, rewriter)
        conflicts = Conflicts(self.data, rewriter, self._progress)
        if conflicts.settle():
            self._logs(Directory(self.data, is_live=False), rewriter)
        return rewriter.healed

    def _logs(self, directory: Directory, rewriter: Rewriter) -> None:
        WalHealer(directory, rewriter).heal(self._known(directory, rewriter))
        for at in directory.queues():
            QueueHealer(directory, rewriter, *at).heal()

    def _known(self, directory: Directory, rewriter: Rewriter) -> int:
        """The last seq that anything but the WAL knows of."""
        routed, rows, _ = directory.load_checkpoint()
        queues = [rewriter.last_seq(reader.partition(self.data, *at)) for at in directory.queues()]
        deleted = deletions.last_seq(self.data)
        return max(
            [routed, deleted, dedupe_file.checkpoint_seq(self.data), *(row.last_seq for row in rows.values()), *queues]
        )
