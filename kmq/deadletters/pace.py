"""At which pace lines are sent: in blocks, evenly."""

import time
from collections.abc import Iterable, Iterator

from kmq.config.values import KIB

BLOCK_BYTES = 64 * KIB
_BLOCKS_PER_S = 10  # under a rate: blocks are small enough for an even flow and rare enough to sleep in between


class Pace:
    """An even flow of at most `rate` messages per second; 0: no limit."""

    def __init__(self, rate: float = 0) -> None:
        self.rate, self._due = rate, 0.0
        self.block_limit = max(1, int(rate / _BLOCKS_PER_S)) if rate else 1 << 30  # maximum messages in a block

    def wait(self, count: int) -> None:
        """Wait until the next `count` messages may be sent."""
        if self.rate:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = time.monotonic() + count / self.rate


def blocks(lines: Iterable[bytes], pace: Pace, nbytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the lines in blocks of about `nbytes`, each block as soon as `pace` allows it."""
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= nbytes or len(block) >= pace.block_limit:
            pace.wait(len(block))
            yield b"".join(block)
            block, size = [], 0
    if block:
        pace.wait(len(block))
        yield b"".join(block)
