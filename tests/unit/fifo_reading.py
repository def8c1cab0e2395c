"""All bytes that are in a FIFO."""

import contextlib
import os


def read_all(fd: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            data += os.read(fd, 1 << 20)
    return data
