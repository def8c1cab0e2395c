"""The committed part of a shard's WAL: its epochs, the seq that readers may see, and the cut of records the leader
lacks.

    __kmq.epoch|<ts>||epoch=8 mark=0c1d… broker=b level=2      the first record of an epoch; `mark`: of its register
    committed           `<seq> crc32=…`: up to this seq all replicas that can be elected have the records
    cut/<first seq>-<epoch>.log     records that were cut, as they were stored

A record belongs to the epoch of the last such line before it; before the first, to epoch 0. These lines are in the
queue `__kmq`, which retention never touches, and in the end of the WAL that is not routed yet.

Owner       the process `replica`. It cuts while no stage has the WAL open; the framer alone writes records of epochs.
Invariant   `committed` never says more than was committed. A record is never cut before it is on disk in cut/. Nothing
            that a queue, router.ckpt, producers.ckpt or `committed` covers is ever cut.
Crash       `committed` is replaced, and not synced: after a power cut it may name a lower seq, or be unreadable, which
            counts as 0. At any point of a cut the WAL is as it was, or ends earlier, after a whole record. Repeating
            the same cut finishes it, and reuses the file that the first attempt put into cut/.
Memory      An epoch takes some hundred bytes. A cut reads a MiB at once.
"""

import contextlib
import os
import re
import zlib
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from kmq.errors import CorruptError
from kmq.files import AppendFile, find_tail, give_up, make_directory, point_symlink, sync_directory, sync_file
from kmq.log import checkpoint, dedupe_file, dropped, reader, segment, topic_changes, wal
from kmq.log.damage import DamageError
from kmq.log.index import IndexWriter
from kmq.log.segment import Segment, is_stored
from kmq.message import record

# --- records of epochs -----------------------------------------------------------------------------------------------

EPOCH_KEY = b"__kmq.epoch"
_PAYLOAD = re.compile(rb"epoch=(\d{1,18}) mark=([0-9a-f]{16}) broker=([^ ]+) level=(\d{1,9})(?: .*)?")


class EpochRecord(namedtuple("EpochRecord", ("epoch", "mark", "broker", "level", "seq"))):
    """The first record of an epoch. `mark`: 64 bits that name the register by which its leader was elected."""

    __slots__ = ()


def encode_epoch(epoch: int, mark: int, broker: str, level: int, now: bytes) -> bytes:
    """Return the record as sent, without newline. `now`: its producer_ts."""
    return b"%b|%b||epoch=%d mark=%016x broker=%b level=%d" % (EPOCH_KEY, now, epoch, mark, broker.encode(), level)


def decode_epoch(line: bytes) -> EpochRecord:
    """Decode a stored record. Raises ValueError if it begins no epoch."""
    stored = record.fields(line.rstrip(b"\n"))
    match = _PAYLOAD.fullmatch(stored.payload)
    if stored.routing_key != EPOCH_KEY or match is None:
        raise ValueError(f"{line[:80]!r}: begins no epoch")
    return EpochRecord(int(match[1]), int(match[2], 16), match[3].decode(), int(match[4]), int(stored.seq))


# --- epochs of a log -------------------------------------------------------------------------------------------------


class Epochs:
    """Where each epoch of a log begins."""

    def __init__(self) -> None:
        self._epochs: list[int] = []  # both rise
        self._firsts: list[int] = []

    @classmethod
    def load(cls, data: str, routed_seq: int = 0) -> "Epochs":
        """Return the epochs of a data directory, from the queue `__kmq` and from the WAL after `routed_seq`.

        `routed_seq`: of router.ckpt. If the queue is damaged, or ends before the seq in router.ckpt, the WAL is read
        from there. Raises CorruptError if both lack a record.
        """
        epochs, log, last = cls(), reader.partition(data, topic_changes.TOPIC, 0), 0
        try:
            for _, lines in log.chunks(log.first_offset):
                epochs.absorb(lines)
                last = record.seq_of(wal.last_line(lines))
            is_whole = last >= _noted_seq(data)
        except DamageError:  # at the end of the queue a power cut may cause it
            is_whole = False
        begin = max(routed_seq if is_whole else 0, last) + 1
        if not is_whole and begin < wal.first_seq(data):
            raise CorruptError(
                f"{log.directory}: its records after seq {last} are lost, and the WAL no longer has them: nobody knows"
                " where the epochs begin; run kmq verify --repair, or kmq cluster reset"
            )
        for lines in wal.read(data, begin, wal.last_stored(data)[0]):
            epochs.absorb(lines)
        return epochs

    def absorb(self, lines: bytes) -> None:
        """Note the epochs that begin in whole stored lines. Raises CorruptError if an epoch's record is damaged."""
        for line, key in topic_changes.parts(lines):
            if key == EPOCH_KEY:
                try:
                    found = decode_epoch(line)
                    self.add(found.epoch, found.seq)
                except ValueError as err:
                    raise CorruptError(f"record {record.seq_of(line)} of {EPOCH_KEY.decode()}: {err}") from err

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, seq of its first record), in order."""
        return zip(self._epochs, self._firsts, strict=True)

    @property
    def last(self) -> int:
        """Return the epoch of the end of the log; 0 if no epoch has begun."""
        return self._epochs[-1] if self._epochs else 0

    def epoch_at(self, seq: int) -> int:
        """Return the epoch of record `seq`; 0 before the first epoch."""
        at = bisect_right(self._firsts, seq)
        return self._epochs[at - 1] if at else 0

    def end_of(self, epoch: int, end: int) -> int:
        """Return the last seq whose record is of `epoch` or of an earlier one. `end`: the last seq of the log."""
        at = bisect_right(self._epochs, epoch)
        return self._firsts[at] - 1 if at < len(self._epochs) else end

    def add(self, epoch: int, seq: int) -> None:
        """Note that `epoch` begins with record `seq`, perhaps again. Raises ValueError unless both rise."""
        at = bisect_right(self._epochs, epoch)
        if at and (self._epochs[at - 1], self._firsts[at - 1]) == (epoch, seq):
            return
        if epoch <= self.last or (self._firsts and seq <= self._firsts[-1]):
            raise ValueError(
                f"epoch {epoch} from seq {seq} on is not after epoch {self.last}, from {self._firsts[-1:]}"
            )
        self._epochs.append(epoch)
        self._firsts.append(seq)

    def cut(self, seq: int) -> None:
        """Forget the epochs that begin after `seq`."""
        at = bisect_right(self._firsts, seq)
        del self._epochs[at:], self._firsts[at:]


def _noted_seq(data: str) -> int:
    """Return the last seq of the queue `__kmq` by router.ckpt; 0 if router.ckpt has no row for it."""
    try:
        row = checkpoint.load(data)[1].get((topic_changes.TOPIC, 0))
    except (ValueError, LookupError):
        return 0
    return row.last_seq if row else 0


# --- what is committed -----------------------------------------------------------------------------------------------

_COMMITTED = re.compile(rb"(\d{1,19}) crc32=(\d{1,10})\n")


def read_committed(data: str) -> int:
    """Return up to which seq the log is known to be committed; 0 if the file is missing or not whole."""
    try:
        with open(f"{data}/committed", "rb") as file:
            match = _COMMITTED.fullmatch(file.read(64))
    except FileNotFoundError:
        return 0
    return int(match[1]) if match and int(match[2]) == zlib.crc32(match[1]) else 0


def write_committed(data: str, seq: int) -> None:
    """Note up to which seq the log is committed. A kill leaves the old file or the new one; nothing is synced."""
    text = b"%d" % seq
    with open(f"{data}/committed.new", "wb") as file:
        file.write(b"%b crc32=%d\n" % (text, zlib.crc32(text)))
    os.rename(f"{data}/committed.new", f"{data}/committed")


def shown_seq(data: str) -> int:
    """Return the last seq that a queue, router.ckpt or `committed` has: readers may have seen it, so it is committed.

    The WAL never ends before it: a file with a later seq is refused by its owner (`checkpoint.agreed_end`).
    """
    return min(wal.last_stored(data)[0], max(_shown(data).values()))


def readable_seq(data: str) -> int | None:
    """Return the seq up to which readers may see the WAL; None: to its end, because the directory is not in a shard.

    The end of the WAL of a shard may yet be cut.
    """
    return shown_seq(data) if os.path.exists(f"{data}/replica") else None


def _shown(data: str) -> dict[str, int]:
    others = {"committed": read_committed(data), "router.ckpt": checkpoint.routed_seq(data)}
    return others | checkpoint.queue_end(data)


# --- the cut ---------------------------------------------------------------------------------------------------------
# In this order, each step on disk before the next one:
#
#     copy        the records are in a file of cut/
#     link        append.log leads to the segment that will be active
#     remove      the segments after it, the newest first: whatever is left has no gap
#     index, log  of that segment; the index first, because a log that is shorter than its index is damage

KEPT = 16  # files in cut/
_NAME = re.compile(r"\d{20}-\d+(?:\.\d+)?\.log")
_CHUNK = 1 << 20


class Piece(namedtuple("Piece", ("path", "begin", "end"))):
    """The bytes begin…end-1 of a file."""

    __slots__ = ()


def cut_after(data: str, seq: int, epoch: int) -> tuple[int, str | None]:
    """Cut every record after `seq` from the WAL. Return how many there were, and the file that has them.

    No other process may have the WAL open. `epoch` becomes part of the file's name. Cuts nothing and raises CorruptError
    if the WAL begins after `seq` + 1 or lacks `seq`, or if a record after it was shown or is in producers.ckpt; raises
    OSError if the disk has no room for the copy.
    """
    directory = f"{data}/append"
    wal.settle(directory)
    segments = segment.survey(directory)
    if not segments or seq >= wal.last_stored(data)[0]:
        return 0, None
    _check_may_cut(data, seq, segments[0].first)
    at = max(number for number, part in enumerate(segments) if part.first <= max(seq, segments[0].first))
    active, *newer = segments[at:]
    keep = _end_in(data, active, seq)
    pieces = [Piece(part.path, keep if part is active else 0, _whole(part)) for part in segments[at:]]
    copy, records = _copy(data, f"{seq + 1:020d}-{epoch}", pieces)
    point_symlink(f"{data}/append.log", os.path.relpath(active.path, data))
    sync_directory(data)
    for part in reversed(newer):
        segment.remove([part])
    _truncate(active, keep)
    _forget_old(f"{data}/cut")
    return records, copy


def _check_may_cut(data: str, seq: int, first: int) -> None:
    """Raise CorruptError if a record after `seq` must stay. `first`: the first record of the WAL."""
    if seq < first - 1:  # else an empty segment still tells the next seq
        raise CorruptError(
            f"{data}/append: cannot be cut after seq {seq}: it begins with seq {first}; the log of its"
            " leader has nothing in common with it; run kmq cluster reset"
        )
    seqs = _shown(data) | {"producers.ckpt": dedupe_file.checkpoint_seq(data)}
    name, later = max(seqs.items(), key=lambda item: item[1])
    if later > seq:
        raise CorruptError(
            f"{data}/append: cannot be cut after seq {seq}: {name} has seq {later}, which was committed;"
            " the log of its leader lacks it; run kmq cluster reset on one of the two"
        )


def _end_in(data: str, part: Segment, seq: int) -> int:
    """Return the byte at which record `seq` ends in its segment. Raises CorruptError if the segment lacks it."""
    reader.check_place(part.path, part.first, by_seq=True)  # before its index is rewritten
    with open(part.path, "rb") as file:
        end = wal.end_of(seq, segment.index_path(part.path), file.fileno(), part.size)
        last = record.seq_of(find_tail(file.fileno(), end, is_stored).last or b"%d|" % (part.first - 1))
    if last != seq and dropped.without(last + 1, seq, dropped.accounted(data)):
        raise CorruptError(
            f"{part.path}: ends with seq {last} before byte {end}, where seq {seq} was expected;"
            " run kmq verify --repair"
        )
    return end


def _whole(part: Segment) -> int:
    """Return where the records of a segment end, without what a kill or a power cut has left torn."""
    with open(part.path, "rb") as file:
        return find_tail(file.fileno(), part.size, is_stored).size


def _copy(data: str, name: str, pieces: Sequence[Piece]) -> tuple[str, int]:
    """Copy the records that are cut into a file of cut/; return its path and the number of records.

    If a file has them all, a cut that was killed has left it. It may have more records, and stays as it is.
    """
    make_directory(f"{data}/cut")
    for number in count():
        path = f"{data}/cut/{name}.{number}.log" if number else f"{data}/cut/{name}.log"
        if not os.path.exists(path):
            break
        with open(path, "rb") as file:
            if all(file.read(len(chunk)) == chunk for chunk in _chunks(pieces)):
                return path, sum(chunk.count(b"\n") for chunk in _chunks(pieces))
    records = 0
    with open(f"{path}.new", "wb") as file:
        for chunk in _chunks(pieces):
            file.write(chunk)
            records += chunk.count(b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)
    sync_directory(f"{data}/cut")
    sync_directory(data)
    return path, records


def _chunks(pieces: Iterable[Piece]) -> Iterator[bytes]:
    for path, begin, end in pieces:
        with open(path, "rb") as file:
            file.seek(begin)
            for at in range(begin, end, _CHUNK):
                yield file.read(min(_CHUNK, end - at))


def _truncate(part: Segment, size: int) -> None:
    """Cut a segment, whose index may be sealed, to `size` bytes; it becomes the active one."""
    index = segment.index_path(part.path)
    writer = IndexWriter(index, give_up, by_seq=True)
    writer.cut(size)
    sync_file(index)
    sync_directory(os.path.dirname(index))
    file = AppendFile(part.path, give_up)
    try:
        file.truncate(size)
        file.sync()
        writer.resume(file.fd, size, part.first)
        sync_file(index)
    finally:
        file.close()


def _forget_old(directory: str) -> None:
    """Remove all files of cuts except the newest, and files that a kill has left."""
    names = os.listdir(directory)
    found = sorted((os.stat(f"{directory}/{name}").st_mtime_ns, name) for name in names if _NAME.fullmatch(name))
    for name in [*(name for _, name in found[:-KEPT]), *(name for name in names if name.endswith(".log.new"))]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{directory}/{name}")
