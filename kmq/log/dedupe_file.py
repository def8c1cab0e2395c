"""producers.ckpt: the dedupe table as of one seq, with its encoder and decoder.

    <seq>|<crc32 of the seq and the rows>|<version>
    p|<name>|<last id>|<seconds>|<first>:<last>,…|<id>:<seq>:<count>,…|<fingerprints>      one row for each producer
    w|<scope>|<id>|<seq>|<seconds>|<fingerprint>                                           one row for each id of a
                                                                                           window

`<first>:<last>` are ranges of ids whose seqs are forgotten, `<id>:<seq>:<count>` are runs of ids that follow one
another. The fingerprints of a producer are base64 of 32-bit words, the lower byte first. Version 1 had no fingerprints
and no ranges. Fingerprints of Kafka's producers are not in the file: older files computed them from other bytes, and a
follower of the release before must be able to read this file. For the same reason the highest pid among forgotten Kafka
producers is stored as the last id of a producer, FORGOTTEN_NAME, a name that no connection has.

Owner       the framer writes the file (kmq/framing/dedupe.py). The start, retention and repair read it.
Invariant   The file is used as a whole or not at all: its crc covers the seq and all rows.
"""

import sys
import time
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator
from itertools import islice
from zlib import crc32

from kmq.message.ids import PRINTS, KnownProducer, WindowSnapshot, is_of_door, pack, unpack

_VERSION = 2
FORGOTTEN_NAME = b"__kafka-forgotten"
_ROWS_PER_PAUSE, _PAUSE_S = 256, 0.00005
ROWS_PER_BEAT = 1024  # rows between two signs of life, because the settings allow any number of rows

_Name = tuple[bytes, int, int, "array[int]", "array[int]", list[int], list[int], list[int], "array[int]"]
WindowRow = tuple[bytes, int]  # scope|id and its packed value


def path(data: str) -> str:
    return f"{data}/producers.ckpt"


def checkpoint_seq(data: str) -> int:
    """Return the seq that producers.ckpt covers; 0 if there is no file. Later records must stay in the WAL."""
    try:
        with open(path(data), "rb") as file:
            return int(file.readline().split(b"|")[0])
    except (FileNotFoundError, ValueError):
        return 0


class TableSnapshot:
    """A dedupe table at one moment, after record `seq`. Its text is made in a thread.

    The lists of a producer are copied by `copy`, some producers at a time, or by `add` before they change: to copy
    50,000 names at once takes a second. The ids of a window are not copied.
    """

    def __init__(self, seq: int, producers: Iterable[KnownProducer], window: WindowSnapshot, generation: int) -> None:
        self.seq = seq
        self._window = window
        self._generation = generation  # of producers that are copied, or newer than this snapshot
        self._left = list(producers)
        self._left.reverse()
        self._names: list[_Name] = []

    def add(self, p: KnownProducer) -> None:
        """Copy a producer of an older generation, and raise its generation."""
        lists = p.firsts[:], p.lasts[:], p.ids[:], p.seqs[:], p.counts[:], p.prints[-PRINTS:]
        self._names.append((p.name, p.last_id, p.seconds, *lists))
        p.generation = self._generation

    def copy(self, seconds: float) -> bool:
        """Copy producers for about `seconds`; return True once all are copied."""
        until = time.monotonic() + seconds
        while self._left:
            producer = self._left.pop()
            if producer.generation != self._generation:
                self.add(producer)
                if time.monotonic() >= until:
                    break
        return not self._left

    def _rows(self) -> Iterator[bytes]:
        for name, last_id, seconds, firsts, lasts, ids, seqs, counts, prints in self._names:
            ranges = b",".join(b"%d:%d" % ends for ends in zip(firsts, lasts, strict=True))
            runs = b",".join(b"%d:%d:%d" % run for run in zip(ids, seqs, counts, strict=True))
            if sys.byteorder == "big":
                prints.byteswap()
            fingerprints = b"" if is_of_door(name) else b2a_base64(prints, newline=False)
            yield b"p|%b|%d|%d|%b|%b|%b\n" % (name, last_id, seconds, ranges, runs, fingerprints)
        for key, value in self._window.rows():
            yield b"w|%b|%d|%d|%d\n" % (key, *unpack(value))

    def encode(self) -> list[bytes]:
        """Return the content of the file, in parts: to join a hundred megabytes takes long. All producers are copied."""
        parts, rows, crc = [b""], self._rows(), checksum(self.seq, b"")
        while part := b"".join(islice(rows, _ROWS_PER_PAUSE)):
            parts.append(part)
            crc = crc32(part, crc)
            time.sleep(_PAUSE_S)  # else the thread that frames waits for the interpreter 5 ms each time it asks
        parts[0] = b"%d|%d|%d\n" % (self.seq, crc, _VERSION)
        return parts


class Saved:
    """A producers.ckpt whose crc and version are right."""

    def __init__(self, content: bytes) -> None:
        """Check `content`. Raises ValueError if it is damaged, or of an unknown version."""
        head, _, self._text = content.partition(b"\n")
        self.seq, crc, version = (int(field) for field in (head + b"|1" * (head.count(b"|") == 1)).split(b"|"))
        if checksum(self.seq, self._text) != crc:
            raise ValueError("its crc does not match")
        if version not in (1, _VERSION):
            raise ValueError(f"format {version} is not known here")

    def rows(self, prefix: bytes = b"") -> Iterator[KnownProducer | WindowRow]:
        """Yield the producers and the ids of windows whose rows begin with `prefix`, in the order of the file."""
        return (_decode_row(row) for row in self._text.split(b"\n")[:-1] if row.startswith(prefix))


def read(data: str) -> Saved | None:
    """Return the content of producers.ckpt; None if there is no file. Raises ValueError if it cannot be used."""
    try:
        with open(path(data), "rb") as file:
            return Saved(file.read())
    except FileNotFoundError:
        return None


def fault(data: str) -> str:
    """Return why producers.ckpt cannot be used; "" if it can, or if there is no file."""
    try:
        saved = read(data)
        for _ in saved.rows() if saved is not None else ():
            pass
    except ValueError as err:
        return str(err)
    return ""


def checksum(seq: int, rows: bytes) -> int:
    """Return the crc of the first line."""
    return crc32(rows, crc32(b"%d" % seq))


def _decode_row(row: bytes) -> KnownProducer | WindowRow:
    kind, name, *fields = row.split(b"|")
    if kind == b"w":
        id, seq, seconds, print = fields if len(fields) == 4 else (*fields, b"0")
        return b"%b|%b" % (name, id), pack(int(seq), int(seconds), int(print))
    last_id, seconds, ranges, runs, prints = fields if len(fields) == 5 else (*fields[:2], b"", fields[3], b"")
    producer = KnownProducer(name, int(last_id), int(seconds))
    for ends in ranges.split(b",") if ranges else ():
        first, last = map(int, ends.split(b":"))
        producer.firsts.append(first)
        producer.lasts.append(last)
    for run in runs.split(b",") if runs else ():
        first_id, first_seq, count = map(int, run.split(b":"))
        producer.ids.append(first_id)
        producer.seqs.append(first_seq)
        producer.counts.append(count)
    producer.prints.frombytes(b"" if is_of_door(name) else a2b_base64(prints))
    if sys.byteorder == "big":
        producer.prints.byteswap()
    return producer
