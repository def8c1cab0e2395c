"""`kmq produce`: blocks of lines in; out, what became of them."""

import os
from collections.abc import Iterable, Iterator

from kmq.client.delivery import Delivery
from kmq.client.failures import NotAnswered
from kmq.client.lines import LineSender
from kmq.client.producer import Producer
from kmq.client.waiting import STALL_S, Patience, say
from kmq.errors import KmqError, RetryError
from kmq.settings import KIB

PATIENCE_S = 60.0  # for replies, where the user says nothing else
_BLOCK_BYTES = 64 * KIB


def read_blocks(fd: int) -> Iterator[list[bytes]]:
    """The lines that come from `fd`, as many at a time as are there: what is typed, or comes slowly, is sent at once."""
    if os.isatty(fd):
        say("reading messages from the terminal, one per line; end with Ctrl-D")
    unfinished: list[bytes] = []
    while data := os.read(fd, _BLOCK_BYTES):
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            yield b"".join([*unfinished, head]).split(b"\n")
            unfinished = []
        unfinished.append(rest)
    if last := b"".join(unfinished):
        yield [last]


def send(blocks: Iterable[list[bytes]], sender: LineSender) -> str:
    """Send whole lines without acknowledgement, each block as soon as it is there."""
    try:
        with sender:
            for block in blocks:
                for line in block:
                    sender.send(line)
                sender.flush()
    except KeyboardInterrupt:
        say(f"interrupted: {sender.outcome()}")
        raise
    except RetryError as err:
        raise RetryError(f"{err}; {sender.outcome()}") from err
    return f"sent {sender.sent}"


class Stored:
    """What the replies add up to."""

    def __init__(self, patience: Patience) -> None:
        self.given = self.count = self.refused = self.last_seq = 0
        self.error: KmqError | None = None  # the first
        self._patience = patience

    def add(self, delivery: Delivery) -> None:
        if delivery.answered:
            self._patience.moved()
        self.error = self.error or delivery.error
        self.refused += len(delivery.refused)
        self.count += delivery.answered - len(delivery.refused)
        self.last_seq = max([self.last_seq, delivery.seq, *(seq + count - 1 for _, seq, count in delivery.runs)])

    def __str__(self) -> str:
        return f"stored {self.count}, last seq {self.last_seq}"

    def outcome(self) -> str:
        """With what has no reply yet."""
        return f"{self}; {self.given - self.count - self.refused} without a reply, which may or may not be stored"


def produce(
    blocks: Iterable[list[bytes]], producer: str, dedupe: bool, patience: Patience, timeout_s: float | None = None
) -> Stored:
    """Send whole lines, with ids of their own, and wait until they are stored. Raises KmqError naming what was refused."""
    stored = Stored(patience)
    sender = Producer.local(
        producer=producer,
        first_id=1 if producer else None,
        dedupe=dedupe,
        timeout_s=PATIENCE_S if timeout_s is None else timeout_s,
        stall_s=STALL_S,
        on_stall=lambda _: patience.stalled(),
    )
    try:
        with sender:
            for block in _of_a_size(blocks):
                stored.given += len(block)
                sender.send_lines(b"".join(block), callback=stored.add)
    except KeyboardInterrupt:
        say(f"interrupted: {stored.outcome()}")
        raise
    except NotAnswered as err:
        raise RetryError(f"{err}; {stored.outcome()}") from err
    if stored.error is not None:
        raise KmqError(f"{stored}; {stored.refused} refused, the first: {stored.error}")
    return stored


def _of_a_size(blocks: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """The same lines in the same order, no block much larger than `_BLOCK_BYTES`."""
    for lines in blocks:
        block: list[bytes] = []
        size = 0
        for line in lines:
            block.append(line)
            size += len(line)
            if size >= _BLOCK_BYTES:
                yield block
                block, size = [], 0
        if block:
            yield block
