"""`kmq produce --acks`: lines in, how many are on disk out."""

import sys
from collections.abc import Iterable, Iterator

from kmq.client.producer import Producer
from kmq.client.protocol import Delivery
from kmq.errors import KmqError
from kmq.settings import KIB

_BLOCK_BYTES = 64 * KIB


class Stored:
    """What the replies add up to."""

    def __init__(self) -> None:
        self.count = self.refused = self.last_seq = 0
        self.error: KmqError | None = None  # the first

    def add(self, delivery: Delivery) -> None:
        self.error = self.error or delivery.error
        self.refused += len(delivery.refused)
        self.count += delivery.answered - len(delivery.refused)
        self.last_seq = max([self.last_seq, delivery.seq, *(seq + count - 1 for _, seq, count in delivery.runs)])

    def __str__(self) -> str:
        return f"stored {self.count}, last seq {self.last_seq}"


def produce(lines: Iterable[bytes], producer: str, dedupe: bool) -> Stored:
    """Send whole lines, with ids of their own, and wait until they are stored. Raises KmqError naming what was refused."""
    stored = Stored()
    first_id = 1 if producer else None
    with Producer.local(producer=producer, first_id=first_id, dedupe=dedupe, on_stall=_say) as sender:
        for block in _blocks(lines):
            sender.send_lines(block, callback=stored.add)
    if stored.error is not None:
        raise KmqError(f"{stored}; {stored.refused} refused, the first: {stored.error}")
    return stored


def _say(text: str) -> None:
    print(f"kmq: {text}", file=sys.stderr)


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= _BLOCK_BYTES:
            yield b"".join(block)
            block, size = [], 0
    if block:
        yield b"".join(block)
