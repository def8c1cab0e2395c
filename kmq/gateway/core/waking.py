"""Readers that wait for new records are woken by the kernel: inotify on the directories of their partitions.

Owner       one inotify descriptor of the gateway, from the first wait on.
Invariant   A record that is written after `look` returned False wakes the waiter. Therefore a directory is watched
            before `look` is asked. A wake-up may come without news: the reader looks again.
Cost        A watch ends with its first event (IN_ONESHOT): a busy partition without waiting readers costs nothing. A
            reader that waits again keeps its Waiter: a directory that is still watched is not looked at again, so
            1,000 idle readers cost one look each every _LOOK_S.
Memory      At most _MOST_WATCHES directories; beyond that, or where the system has no watches left, waiters follow the
            router's watermark (feed.py), which is polled for all of them at once.
Not covered File systems that tell the kernel nothing of writes: there a look every _LOOK_S finds the records.
"""

import asyncio
import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable, Mapping

from kmq.gateway.core.feed import Watermark

_MOST_WATCHES = 8192
_LOOK_S = 15.0
_READ_BYTES = 1 << 16
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_ONLYDIR, _ONESHOT = 0x0100_0000, 0x8000_0000
_IGNORED = 0x8000
_MASK = _MODIFY | _MOVED_TO | _CREATE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _ONESHOT
_ALL = -1  # the watch of an event that says that events were lost

Looks = Mapping[str, Callable[[], bool]]  # directory → whether it has news


class Waiter:
    """What wakes one reader, in one wait after the other. `event`: it is set when the reader must look.

    Invariant   A directory that `is_quiet` is watched, had no news when its watch had begun, and has had no event since.
    """

    def __init__(self, event: asyncio.Event) -> None:
        self.event = event
        self.watches: dict[int, str] = {}  # → the directory
        self.quiet: set[str] = set()
        self.look_at = 0.0  # when all directories are looked at again

    def is_quiet(self, directory: str) -> bool:
        """Return True if there is no news, as far as the kernel's events have been read."""
        return directory in self.quiet

    def look_again(self, directory: str) -> None:
        """Look at the directory before the next wait: its reader has moved."""
        self.quiet.discard(directory)

    async def woken(self, seconds: float) -> bool:
        """Wait for the event; return False if it has not come after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.event.wait()
        except TimeoutError:
            return False
        return True


class Waking:
    """The waiting readers of the gateway."""

    def __init__(self, watermark: Watermark, most: int = _MOST_WATCHES) -> None:
        self.watermark, self._most = watermark, most
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        self._waiters: dict[int, set[Waiter]] = {}  # by watch

    @property
    def watches(self) -> int:
        return len(self._waiters)

    async def news(self, looks: Looks, seconds: float, interrupt: asyncio.Event | None = None) -> bool:
        """Wait until there may be news, or `interrupt` is set; return False if neither has come after `seconds`.

        Raises RequestRefused if the gateway stops while the watermark is followed.
        """
        waiter = Waiter(interrupt or asyncio.Event())
        try:
            return await self.next_news(waiter, looks, seconds)
        finally:
            self.forget(waiter)

    async def next_news(self, waiter: Waiter, looks: Looks, seconds: float) -> bool:
        """Do the same for a reader that will wait again. The caller forgets the waiter in the end."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            if now >= waiter.look_at:
                waiter.look_at = now + _LOOK_S
                waiter.quiet.clear()
            fresh = [directory for directory in looks if directory not in waiter.quiet]
            watched = [directory for directory in fresh if self._watch(waiter, directory)]
            if waiter.event.is_set() or any(looks[directory]() for directory in fresh):
                return True
            waiter.quiet.update(watched)
            if now >= until:
                return False
            left = min(until, waiter.look_at) - now
            if len(watched) < len(fresh):
                await self._moved(left)
            elif await waiter.woken(left):
                return True

    def close(self) -> None:
        """Close the descriptor, with all its watches."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def _moved(self, seconds: float) -> None:
        """Wait until the router has routed a record, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.watermark.passed(self.watermark.routed + 1)
        except TimeoutError:
            pass

    def _watch(self, waiter: Waiter, directory: str) -> bool:
        """Wake `waiter` at the next change in `directory`. Return False if the system has no watch for it."""
        if self._fd < 0 and not self._open():
            return False
        watch: int = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK)
        if watch < 0:
            # A directory that is gone is no longer waited for: the reader's look says that it has news.
            return ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR)
        if watch not in self._waiters and len(self._waiters) >= self._most:
            self._libc.inotify_rm_watch(self._fd, watch)
            return False
        self._waiters.setdefault(watch, set()).add(waiter)
        waiter.watches[watch] = directory
        return True

    def _open(self) -> bool:
        fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return False  # the system allows no more of them: the watermark is followed
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._read)
        return True

    def _read(self) -> None:
        """Wake those whose directories have changed."""
        try:
            events = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            watch, _, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            for ended in [*self._waiters] if watch == _ALL else [watch]:
                for waiter in self._waiters.pop(ended, ()):
                    waiter.look_again(waiter.watches.pop(ended))
                    waiter.event.set()

    def forget(self, waiter: Waiter) -> None:
        """Watch nothing more for a reader."""
        for watch in waiter.watches:
            waiters = self._waiters.get(watch, set())
            waiters.discard(waiter)
            if not waiters and self._waiters.pop(watch, None) is not None and self._fd >= 0:
                self._libc.inotify_rm_watch(self._fd, watch)
