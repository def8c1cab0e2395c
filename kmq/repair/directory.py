"""A data directory as verify and the repair read it: its logs, its checkpoint, and the seqs it names as missing."""

import os

from kmq.log import checkpoint, dropped, reader, topics
from kmq.log.growth import Since

At = tuple[str, int]  # topic, partition


class Directory:
    """A data directory. Nothing here changes it."""

    def __init__(self, data: str) -> None:
        self.data = data
        self._gaps: dict[str, list[dropped.SeqRange]] = {}  # by ring

    def queues(self) -> list[At]:
        """Return (topic, partition) of all partition logs."""
        return queues(self.data)

    def wal(self) -> reader.LogReader:
        return reader.wal(self.data)

    def queue(self, at: At) -> reader.LogReader:
        return reader.partition(self.data, *at)

    def logs(self) -> list[reader.LogReader]:
        """Return the WAL and all partition logs."""
        return [self.wal(), *map(self.queue, self.queues())]

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.data)

    def read(self, name: str) -> bytes:
        """Return the bytes of one file; a missing file reads as empty."""
        return read_file(f"{self.data}/{name}")

    def load_checkpoint(self) -> tuple[int, checkpoint.Rows, dict[str, Since]]:
        """Return what router.ckpt holds; a damaged checkpoint reads as empty."""
        try:
            return checkpoint.load(self.data)
        except (ValueError, LookupError):
            return 0, {}, {}

    def named_gaps(self, ring: str = "framed") -> list[dropped.SeqRange]:
        """Return the ranges of seqs that may be missing, in order: named as dropped, or named as lost for good.

        For the ring `framed` the WAL may lack them, for the ring `durable` a queue. A damaged line of dropped.log is
        skipped.
        """
        if ring not in self._gaps:
            lines = [line for line in self.read("dropped.log").split(b"\n")[:-1] if dropped.is_range(line)]
            rows = [line.split(b"|") for line in lines if line.startswith(ring.encode())]
            gaps = [dropped.SeqRange(int(row[1]), int(row[2])) for row in rows]
            gaps += dropped.quarantined(self.data, "append/" if ring == "framed" else "topics/")
            self._gaps[ring] = sorted(gaps, key=lambda gap: gap.first)
        return self._gaps[ring]


def queues(data: str) -> list[At]:
    """Return (topic, partition) of all partition logs."""
    entries = {topic: os.listdir(f"{data}/topics/{topic}") for topic in topics.names(data)}
    return [(topic, number) for topic in entries for number in sorted(map(int, filter(str.isdigit, entries[topic])))]


def read_file(path: str, nbytes: int = -1) -> bytes:
    """Return the bytes of a file, or its first `nbytes`; a missing file reads as empty."""
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except FileNotFoundError:
        return b""


def read_text(path: str) -> str:
    """Return the text of a file; a missing file reads as empty, bytes that are no UTF-8 are replaced."""
    return read_file(path).decode(errors="replace")
