"""Places: moves misplaced segments: swapped, copied over one another, of another topic or broker, or of unknown origin.

A restore by hand causes that. A log file is identified by the index whose crcs match its blocks, wherever that index is
now. The index is identified by its label, or in format 1 by its place. Both files move to the place that the label
names. If that place has the right segment already, or the segment is of another lineage, the segment is set aside in
quarantine/, whole and under its old name. A log file without a matching index stays if its records may belong there,
and is compared with the other copy later. Otherwise it is set aside too. A place that has lost its file gets an empty
file, which is then filled from the other copy.
Crash       Everything that moves goes to quarantine/moving/ first, under the name of its target, and from there to its
            place. A repair begins by finishing what a crash left there.
"""

import os
import zlib
from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

from kmq.files import QUARANTINE, replace_file, sync_directory
from kmq.log import checkpoint, dropped, segment
from kmq.log.index import IndexEntry, lineage_of, parse_label, place_of, read_entries
from kmq.log.partition import EMPTY, directory_of
from kmq.log.segment import Segment
from kmq.log.segment_reader import SegmentReader
from kmq.message import record
from kmq.repair.directory import DataDirectory, Quarantine
from kmq.repair.scan import claimed

_ASIDE = "aside"
_SAMPLES = 4  # blocks of an index that are compared with a log, from each end
_BLOCK_BYTES = 1 << 20  # more than a block has, unless a single line is longer

Done = tuple[str, str]  # path, what was done


class _LogFile(NamedTuple):
    """A log file, and where it belongs."""

    path: str
    described_by: str  # the index whose crcs match it; "": there is none
    target: str  # the path where it belongs; "": outside this directory, or unknown

    @property
    def is_right(self) -> bool:
        return self.target == self.path and self.described_by == segment.index_path(self.path)


class SegmentLocator:
    """One run over a data directory.

    `last_seq`: the last seq in queues and checkpoints; `rows`: of router.ckpt.
    """

    def __init__(self, data: str, last_seq: int, rows: checkpoint.Rows) -> None:
        self.data, self.last_seq, self.rows = data, last_seq, rows
        self.done: list[Done] = []
        self._quarantine = Quarantine(data)
        self._moving = f"{data}/{QUARANTINE}/moving"

    def tidy(self) -> list[Done]:
        """Put every segment where it belongs; return what was done."""
        self._finish()
        files = [self._identify(path) for path in self._logs()]
        for file in files:
            if file.is_right and _by_seq(file.path):
                self.last_seq = max(self.last_seq, segment.last_seq(Segment(0, file.path, os.path.getsize(file.path))))
        moves = self._moves([self._by_records(file, files) for file in files])
        if moves:
            os.makedirs(self._moving, exist_ok=True)
            for path, target in moves.items():
                name = os.path.relpath(target or f"{self.data}/{_ASIDE}/{os.path.relpath(path, self.data)}", self.data)
                os.rename(path, f"{self._moving}/{name.replace('/', '|')}")
            sync_directory(self._moving)
            self._finish()
        self._fill({path for path in moves if path.endswith(".log")})
        return self.done

    def _directories(self) -> list[str]:
        """Return append/ and the directories of the partitions."""
        queues = DataDirectory(self.data).queues()
        return [f"{self.data}/append", *(directory_of(self.data, *at) for at in queues)]

    def _logs(self) -> list[str]:
        return [path for directory in self._directories() for _, path in segment.listing(directory)]

    @cached_property
    def _indexes(self) -> dict[bytes, list[str]]:
        """Return every index, by the time of the first record that it covers."""
        indexes: defaultdict[bytes, list[str]] = defaultdict(list)
        for directory in self._directories():
            for name in sorted(os.listdir(directory)):
                entries = read_entries(f"{directory}/{name}", 1 << 62) if name.endswith(".idx") else []
                if entries:
                    indexes[entries[0].recv_ts].append(f"{directory}/{name}")
        return indexes

    # --- where each file belongs -------------------------------------------------------------------------------------

    def _identify(self, path: str) -> _LogFile:
        own = segment.index_path(path)
        described_by = own if _describes(own, path) else self._other_index_of(path)
        if described_by:
            return _LogFile(path, described_by, self._place_by(described_by))
        return _LogFile(path, "", path)

    def _other_index_of(self, path: str) -> str:
        with open(path, "rb") as file:
            stamp = record.stamp(file.read(record.STAMP_BYTES).lstrip(b"\n"))
        candidates = self._indexes.get(record.format_ts(stamp[1]), []) if stamp[0] else []
        return next((index for index in candidates if _describes(index, path)), "")

    def _by_records(self, file: _LogFile, files: list[_LogFile]) -> _LogFile:
        """Place a log without a matching index by its records; they are compared with the other copy later."""
        if file.described_by:
            return file
        place = place_of(file.path)
        assert place is not None
        seq = self._first_seq(file.path)
        if _by_seq(file.path):
            return file._replace(target=self._wal_target(file.path, place[2], seq or place[2], files))
        if seq < 0 or not self._is_a_place(file.path):
            return file._replace(target="")
        # If several logs of one partition have no matching index, at least their records give the order.
        directory = os.path.dirname(file.path)
        lost = [other.path for other in files if os.path.dirname(other.path) == directory and not other.described_by]
        places = sorted(path for path in lost if self._first_seq(path) > 0)
        in_order = sorted(places, key=self._first_seq)
        return file._replace(target=places[in_order.index(file.path)] if file.path in in_order else file.path)

    def _wal_target(self, path: str, base: int, seq: int, files: list[_LogFile]) -> str:
        """Return the place of a WAL segment that begins with `seq`: its own if only named seqs are missing before."""
        if base <= seq <= self.last_seq + 1 and not dropped.without(base, seq - 1, dropped.accounted(self.data)):
            return path
        target = f"{os.path.dirname(path)}/{segment.name(seq)}"
        return target if target != path and any(file.path == target for file in files) else ""

    def _first_seq(self, path: str) -> int:
        """Return the seq of the first record; 0: no record can be read, -1: it belongs to another queue."""
        with SegmentReader(path, int(os.path.basename(path)[:20]), _by_seq(path), sealed=False, trust=True) as opened:
            opened.index.label = b""  # this index describes another file
            first = opened.first_record()
            is_elsewhere = not _by_seq(path) and opened.misplaced()
            return -1 if is_elsewhere else first.seq if first else 0

    def _place_by(self, index: str) -> str:
        """Return the place of the log that `index` describes; "" if it belongs to no place here."""
        log = index.removesuffix(".idx") + ".log"
        place = place_of(log)
        assert place is not None
        with open(index, "rb") as file:
            fields = parse_label(file.readline())
        if fields is None:
            return log  # of format 1, or damaged: only its place can identify it
        ours = (lineage_of(place[0]), *place[1:])
        if fields != ours and os.path.exists(log):
            first = next((entry.offset for entry in read_entries(index, 1 << 62)), -1)
            with SegmentReader(log, place[2], _by_seq(log), sealed=False, trust=True) as opened:
                fields = claimed(opened, first) or ours
        lineage, name, base = fields
        directory = f"{self.data}/append" if name == "append" else f"{self.data}/topics/{name}"
        return f"{directory}/{segment.name(base)}" if lineage == ours[0] and os.path.isdir(directory) else ""

    # --- moving ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _moves(files: list[_LogFile]) -> dict[str, str]:
        """Return path → target; "": set it aside. If two segments belong in one place, one of them gets it."""
        taken = {file.path for file in files if file.is_right}
        moves: dict[str, str] = {}
        for file in files:
            if file.is_right:
                continue
            target = "" if file.target in taken else file.target
            taken.add(target)
            own = segment.index_path(file.path)
            if target != file.path:
                moves[file.path] = target
            if target and file.described_by:
                moves[file.described_by] = segment.index_path(target)
            if own not in moves and target != file.path and os.path.exists(own):
                moves[own] = ""  # unless it describes another log, as found below
        for file in files:
            if file.is_right:
                moves.pop(file.described_by, None)
        for target in [target for path, target in moves.items() if target.endswith(".idx") and target != path]:
            if os.path.exists(target):
                moves.setdefault(target, "")  # it describes no log that is here
        return {path: target for path, target in moves.items() if path != target}

    def _finish(self) -> None:
        """Move everything in moving/ to its place, or aside if the place is taken."""
        if not os.path.isdir(self._moving):
            return
        for name in sorted(os.listdir(self._moving)):
            where = name.replace("|", "/")
            path = f"{self.data}/{where.removeprefix(f'{_ASIDE}/')}"
            if where.startswith(f"{_ASIDE}/") or os.path.exists(path):
                aside = self._quarantine.set_aside(f"{self._moving}/{name}", f"{self._quarantine.flat(path)}.misplaced")
                what = f"belongs elsewhere: set aside as {os.path.relpath(aside, self.data)}"
            else:
                os.rename(f"{self._moving}/{name}", path)
                sync_directory(os.path.dirname(path))
                what = "put back into its place"
            if path.endswith(".log"):
                self.done.append((path, what))
        os.rmdir(self._moving)
        sync_directory(f"{self.data}/{QUARANTINE}")

    # --- empty places ------------------------------------------------------------------------------------------------

    def _fill(self, vacated: set[str]) -> None:
        """Make an empty log where one was moved away, or where only its index is left; the healing fills it."""
        for directory in self._directories():
            for name in os.listdir(directory):
                log = f"{directory}/{name.removesuffix('.idx')}.log"
                if name.endswith(".idx") and name[:-4].isdigit() and self._place_by(f"{directory}/{name}") == log:
                    vacated.add(log)
        for log in sorted(vacated):
            if not os.path.exists(log) and self._is_a_place(log):
                replace_file(log, b"")
                self.done.append((log, "was missing"))

    def _is_a_place(self, log: str) -> bool:
        """Return True if a segment could begin there: not inside another one, nor after the last known record."""
        place = place_of(log)
        assert place is not None
        _, name, base = place
        others = [(first, path) for first, path in segment.listing(os.path.dirname(log)) if first != base]
        before = [path for first, path in others if first < base]
        entries = read_entries(segment.index_path(before[-1]), 1 << 62) if before else []
        if entries and entries[-1].offset >= base:
            return False
        if _by_seq(log):
            return base <= self.last_seq + 1
        topic, _, number = name.rpartition("/")
        end = max(self.rows.get((topic, int(number)), EMPTY).end_offset, self._recorded(topic, int(number)))
        is_known = base <= end or len(before) < len(others)
        return is_known or (bool(entries) and _end_offset(before[-1], entries[-1]) == base)

    def _recorded(self, topic: str, number: int) -> int:
        """Return the highest offset at which a recorded start let a partition begin: it had that many records."""
        mine = (starts for at, starts in self._starts.items() if (at[0], at[2]) == (topic, number))
        return max(map(checkpoint.highest, mine), default=0)

    @cached_property
    def _starts(self) -> dict[tuple[str, int, int], list[checkpoint.RecordedStart]]:
        return checkpoint.recorded_starts(self.data)


def _end_offset(log: str, last: IndexEntry) -> int:
    """Return the offset after the last record of a queue's segment; `last`: the entry of its last block."""
    with open(log, "rb") as file:
        file.seek(last.position)
        return last.offset + sum(data.count(b"\n") for data in iter(lambda: file.read(_BLOCK_BYTES), b""))


def _by_seq(path: str) -> bool:
    place = place_of(path)
    return place is not None and place[1] == "append"


def _describes(index: str, path: str) -> bool:
    """Return True if some blocks of a log match an index."""
    entries = read_entries(index, os.path.getsize(path))
    pairs = list(zip(entries, [*(entry.position for entry in entries[1:]), 0], strict=False))
    with open(path, "rb") as file:
        for entry, end in [*pairs[:_SAMPLES], *pairs[_SAMPLES:][-_SAMPLES:]]:
            file.seek(entry.position)
            data = file.read(end - entry.position if end else _BLOCK_BYTES)
            if data and (zlib.crc32(data) == entry.crc or (not end and _begins_with(data, entry.crc))):
                return True
    return False


def _begins_with(data: bytes, crc: int) -> bool:
    """Return True if the first lines of `data` have this crc: an index may cover only a part of an open block."""
    found = 0
    for line in data.split(b"\n")[:-1]:
        found = zlib.crc32(b"\n", zlib.crc32(line, found))
        if found == crc:
            return True
    return False
