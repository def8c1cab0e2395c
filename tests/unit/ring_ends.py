"""Both ends of a ring, as tests use them."""

from kmq.links.layout import Framed, Stamp


def put(writer, data, count=1):
    """Append a block if it fits; whether it did."""
    if not writer.has_room(len(data), count):
        return False
    writer.append(Framed(data, Stamp(writer.last.next_seq, count, 0, 5)))
    return True


def taken(reader):
    blocks = reader.take()
    found = [(bytes(block.data), block.first_seq, block.count) for block in blocks]
    if blocks:
        reader.release(blocks[-1])
    return found
