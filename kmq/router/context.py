"""What every part of the router receives: the data directory, the logger, the clock, and how to wait for room.

Owner       the router process. All parts share one object, so no part needs another part just to wait or to log.
"""

import time
from collections.abc import Callable
from functools import partial

from kmq.files import WaitForRoom, replace_file, with_room
from kmq.log import spare
from kmq.log.damage import DamageError
from kmq.logfmt import Logger


class Context:
    """The values and callables that all parts of the router share."""

    __slots__ = (
        *("are_recorded", "check", "damaged", "data", "lacks_room", "logger", "make_room", "now_s"),
        *("wait_outside", "wal_is_synced"),
    )

    def __init__(self, data: str, wait_for_room: WaitForRoom, logger: Logger, wal_is_synced: bool) -> None:
        self.data, self.logger, self.wal_is_synced = data, logger, wal_is_synced
        self.wait_outside = wait_for_room
        # Do changes of topics come as records? The stage says so. Without a framer they are carried out as they are asked.
        self.are_recorded = False
        # Called while the disk is full. Retention replaces it when all logs are known: until then it must not delete.
        self.make_room: Callable[[], object] = partial(spare.release, data)
        self.check: Callable[[], None] = lambda: None  # a sign of life, called repeatedly during long work
        self.damaged: Callable[[DamageError], object] = lambda err: None  # is told of damage that is met
        self.lacks_room: Callable[[], bool] = lambda: False  # is the disk or the quota full? The stage knows
        self.now_s: Callable[[], float] = time.time  # for ages; the stage gives its trusted clock (kmq/broker/clock.py)

    def wait_for_room(self, path: str) -> None:
        """Make room, then wait, because the disk is full; perhaps in the middle of an append."""
        self.make_room()
        self.wait_outside(path)

    def replace(self, path: str, content: bytes) -> None:
        """Replace a file, waiting for room while the disk is full."""
        with_room(path, self.wait_for_room, lambda: replace_file(path, content))
