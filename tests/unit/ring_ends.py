"""Both ends of a ring, as tests use them."""

from kmq.links.layout import Framed, Stamp
from kmq.links.ring import RingReader, RingWriter


def put(writer: RingWriter, data: bytes, count: int = 1) -> bool:
    """Append a block if it fits; return True if it did."""
    if not writer.has_room(len(data), count):
        return False
    writer.append(Framed(data, Stamp(writer.last.next_seq, count, 0, 5)))
    return True


def taken(reader: RingReader) -> list[tuple[bytes, int, int]]:
    blocks = reader.take()
    found = [(bytes(block.data), block.first_seq, block.count) for block in blocks]
    if blocks:
        reader.release(blocks[-1])
    return found
