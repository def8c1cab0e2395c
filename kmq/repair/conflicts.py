"""Where both copies of a seq are whole, and yet not the same: two records have been given one number.

That happens where a WAL has lost its end and its numbers were given out again (numbered.py refuses that today). Both
records may have been acknowledged, so both are kept. The one in the queue stays under its seq, because consumers may
have it, and offsets must not change; the WAL gets it there. The one that the WAL had gets a new seq, at the end: the
router brings it to its queue at the next start.

A queue most of whose records the WAL does not have under these seqs is another thing: it was never written from this
WAL. Its segments are set aside, and it is rebuilt.
"""

import os
from collections import defaultdict
from collections.abc import Callable

from kmq import record, routing
from kmq.log import dropped, reader, segment, topics, wal
from kmq.log.disk import QUARANTINE, sync_directory
from kmq.log.partition import directory_of
from kmq.repair import places
from kmq.repair.copies import Copies, Difference
from kmq.repair.rewriting import Line, Rewriter, Stretch

At = tuple[str, int]


class Conflicts:
    """One run over a directory whose blocks are all as their indexes say."""

    def __init__(self, data: str, rewriter: Rewriter, progress: Callable[[int], None]) -> None:
        self.data, self.rewriter, self._progress = data, rewriter, progress

    def settle(self) -> bool:
        """Whether anything had to be done, so that the logs have to be looked at again."""
        end = reader.wal(self.data).end_offset() - 1
        found: defaultdict[At, list[Difference]] = defaultdict(list)
        for each in Copies(self.data, end, [], is_live=False, progress=self._progress).differences(routed=0):
            found[each.topic, each.partition].append(each)
        kept: list[tuple[At, Difference]] = []
        for at, differences in found.items():
            log = reader.partition(self.data, *at)
            if 2 * len(differences) > log.end_offset() - log.first_offset:
                self._set_aside(at)
            else:
                kept += [(at, each) for each in differences]
        if kept:
            self._keep_both([each for each in kept if each[1].kind in ("differs", "unknown")])
        return bool(found)

    def _set_aside(self, at: At) -> None:
        directory = directory_of(self.data, *at)
        os.makedirs(f"{self.data}/{QUARANTINE}", exist_ok=True)
        for _, path in segment.listing(directory):
            self.rewriter.forget(path)
            for each in (path, segment.index_path(path)):
                if os.path.exists(each):
                    name = os.path.relpath(each, self.data).replace("/", ".")
                    os.rename(each, places.free_name(f"{self.data}/{QUARANTINE}/{name}.unknown"))
        sync_directory(directory)
        sync_directory(f"{self.data}/{QUARANTINE}")
        self.rewriter.report(
            directory, f"most of its records are not this WAL's: set aside in {QUARANTINE}/, and rebuilt"
        )

    def _keep_both(self, kept: list[tuple[At, Difference]]) -> None:
        in_wal = reader.wal(self.data)
        again: list[bytes] = []  # records that get a new seq
        edits: defaultdict[str, list[tuple[int, int, bytes, bytes]]] = defaultdict(list)  # path → (byte, seq, old, new)
        for at, each in kept:
            _, path, byte, line = reader.partition(self.data, *at).find(each.seq, 0)
            _, wal_path, wal_byte, wal_line = in_wal.find(each.seq, 0)
            if not wal_line.startswith(b"%d|" % each.seq) or self._stands_in_its_queue(wal_line):
                edits[path].append((byte, each.seq, line, b"\n"))
                again.append(line)
            else:
                edits[wal_path].append((wal_byte, each.seq, wal_line, line + b"\n"))
                again.append(wal_line)
        for path, changes in edits.items():
            self._edit(path, sorted(changes))
        self._append(sorted(again, key=record.seq_of))

    def _stands_in_its_queue(self, line: bytes) -> bool:
        table, seq = topics.table(self.data), record.seq_of(line)
        route = routing.resolve(table, record.routing_key_of(line), seq)
        topic = table.get(route.topic)
        if topic is None:
            return False
        log = reader.partition(self.data, topic.name, topic.partition_of(route, seq))
        return log.find(seq, 0)[3] == line

    def _edit(self, path: str, changes: list[tuple[int, int, bytes, bytes]]) -> None:
        """Put other lines in the place of some."""
        by_seq = os.path.basename(os.path.dirname(path)) == "append"
        new = {seq: text for _, seq, _, text in changes}
        stretches = [Stretch(byte, byte + len(old) + 1, seq, seq, []) for byte, seq, old, _ in changes]
        found = self.rewriter.scan_of(path, by_seq)
        self.rewriter.rewrite(
            found, stretches, lambda _, stretch: iter([Line(stretch.first_seq, new[stretch.first_seq])]), by_seq
        )

    def _append(self, lines: list[bytes]) -> None:
        """Give records a new seq each, at the end of the WAL."""
        seq, recv_ts = wal.last_stored(self.data)
        seq = max([seq, *(gone.last for gone in dropped.accounted(self.data))])
        stamp = record.format_ts(recv_ts)
        renumbered = [b"%d|%b|%b\n" % (seq + n, stamp, line.split(b"|", 2)[2]) for n, line in enumerate(lines, 1)]
        path = segment.listing(f"{self.data}/append")[-1][1]
        found = self.rewriter.scan_of(path, by_seq=True)
        end = Stretch(found.size, found.size, seq + 1, seq + len(lines), [])
        self.rewriter.rewrite(
            found, [end], lambda *_: (Line(seq + n, text) for n, text in enumerate(renumbered, 1)), by_seq=True
        )
        self.rewriter.report(
            path, f"{len(lines)} records had the seq of another one: they are seq {seq + 1} to {seq + len(lines)} now"
        )
