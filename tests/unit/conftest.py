"""What several unit tests need: rings of their own, a disk that never fills, WALs made of words."""

import itertools
import os

import pytest

from kmq import record
from kmq.links import layout, ring
from kmq.log.wal import Wal

_numbers = itertools.count()
FIRST_TS = 1_700_000_000_000_000  # µs: recv_ts of the first record of a made-up log


class Silent:
    """A Log that says nothing."""

    def info(self, event: str, **fields: object) -> None: ...

    warn = error = info


def no_room(path: str) -> None:
    raise AssertionError(f"{path}: nobody told the disk to be full")


def stored(lines: list[bytes], first_seq: int = 1) -> list[bytes]:
    """`lines` as sent → stored lines with their newlines, one microsecond apart."""
    return [
        record.number([line], seq, record.format_ts(FIRST_TS + seq))[0]
        for seq, line in enumerate(lines, start=first_seq)
    ]


def write_wal(data: str, lines: list[bytes], group: int = 7) -> Wal:
    """A WAL of `lines` (as sent), appended and synced in groups."""
    wal = Wal(data, no_room, 1 << 20)
    for at in range(0, len(lines), group):
        part = stored(lines[at : at + group], at + 1)
        wal.append([(b"".join(part), at + 1, len(part), FIRST_TS + at + len(part))])
        wal.sync()
    return wal


@pytest.fixture
def data(tmp_path):
    """An empty data directory."""
    for name in ("append", "topics"):
        (tmp_path / name).mkdir()
    return str(tmp_path)


@pytest.fixture
def rings():
    """Makes (writer, reader) pairs of a ring; all of them are gone afterwards."""
    made = []

    def make(slots=64, nbytes=1 << 16, policy="block", extra=0, first_seq=1):
        instance = f"unit-{os.getpid()}-{next(_numbers)}"
        identity = layout.make_identity("unit", slots, nbytes, extra, policy)
        writer = ring.RingWriter.open(instance, "framed", identity, "the writer", lambda: (first_seq, 0), Silent())
        made.append((instance, writer))
        reader = ring.RingReader.attach(instance, "framed", identity, "the reader")
        made.append((instance, reader))
        return writer, reader

    yield make
    for _, end in made:
        end.lock.release()
    for instance in {instance for instance, _ in made}:
        layout.remove(instance, "framed")
