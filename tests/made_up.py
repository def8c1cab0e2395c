"""A disk that never fills, blocks of stored lines, WALs."""

from kmq.links.layout import Block
from kmq.log.wal import Wal
from kmq.message import record

FIRST_TS = 1_700_000_000_000_000  # µs: recv_ts of the first record of a made-up log


def no_room(path: str) -> None:
    raise AssertionError(f"{path}: nobody told the disk to be full")


def stored(lines: list[bytes], first_seq: int = 1) -> list[bytes]:
    """`lines` as sent → stored lines with their newlines, one microsecond apart."""
    return [
        record.number([line], seq, record.format_ts(FIRST_TS + seq))[0]
        for seq, line in enumerate(lines, start=first_seq)
    ]


def block(lines: list[bytes], first_seq: int) -> Block:
    """`lines` as sent → the block of stored lines that durability hands to the router."""
    text = b"".join(stored(lines, first_seq))
    key = len(record.common_key(lines))
    return Block(text, 0, [len(text), first_seq, len(lines), key, FIRST_TS, 0, 0])


def write_wal(data: str, lines: list[bytes], group: int = 7) -> Wal:
    """A WAL of `lines` (as sent), appended and synced in groups."""
    wal = Wal(data, no_room, 1 << 20)
    for at in range(0, len(lines), group):
        part = stored(lines[at : at + group], at + 1)
        wal.append([(b"".join(part), at + 1, len(part), FIRST_TS + at + len(part))])
        wal.sync()
    return wal
