"""Whether more may be accepted: the disk, and KMQ_DATA_QUOTA, must hold what is on the way already.

Links       ingress asks refusal() some times a second: acknowledged producers are told, others are not read. Durability
            asks must_wait() before each append, for a shell that writes into the FIFO asks nobody; the router before a
            message makes a topic, which takes far more than the message.
Owns        nothing; reads the sizes of what lies under KMQ_DATA, as `du` does.

Invariant   The bytes under KMQ_DATA stay below the quota: a group is appended only if both its copies (WAL and queue)
            fit, beside all that the router still has to copy. Refusing begins earlier, by what the links hold, so
            that what has been accepted becomes durable and is answered.
Mechanism   Usage is a walk over all files, plus an upper bound of what has come since it began: twice what the WAL has
            got, and the files of new topics. So walks are needed only to make the bound tighter, and to learn that
            something is gone (retention). They go in slices: nobody stands still for 10,000 topics. The free space of
            the file system cannot say it, for others write and delete there too.
Inodes      They run out as bytes do, and are refused for as bytes are. File systems that count none (btrfs) say 0: no limit.
Flapping    What is refused for is accepted again only when a quarter of the reserve more than that is free.
Not covered Seen by the next walk only: a queue that is rebuilt, a topic declared with hundreds of partitions, what XFS
            allocates ahead of a growing file.
"""

import os
import time
from collections.abc import Callable, Iterator
from math import inf

from kmq.links.fifo import CAPACITY
from kmq.links.staging import area_bytes
from kmq.settings import KIB, MIB, Settings

_COPIES = 2  # of each message: in the WAL and in its queue
_LONGER = 2  # so many times as long may a line in the FIFO be once it is stored; for shorter ones there is must_wait
TOPIC_INODES = 6  # of a topic with one partition: the same six
NEW_TOPIC = 24 * KIB  # two directories, topic.toml, log, index, a long symlink: a block each
_OLD_TOPIC = 8 * KIB  # what its log and index may take beyond their bytes: a last block each, provisional index lines
_OTHERS = 4 * MIB  # the WAL's index, dropped.log, checkpoints (twice while they are replaced)
_DISK_SHARE, _QUOTA_SHARE = 10, 4  # the reserve is at most such a part of the whole, so that small ones work too
_INODES, _INODE_SHARE = 4096, 20  # kept free for segments, checkpoints, topics on the way; at most such a part of all
_LOOK_S = 0.05  # an answer is at most so old
_WALK_S, _REWALK_S = 10.0, 0.5  # between walks while something comes; and while refusing: room is noticed within 2 s
_SLICE_S, _LONG_SLICE_S = 0.004, 0.05  # of a walk at once; and while refusing, when there is little else to do


class Usage:
    """An upper bound of the bytes that a data directory takes."""

    def __init__(self, data: str, appended: Callable[[], int]) -> None:
        """`appended`: how many bytes the WAL has got; only differences count. It may begin again at 0."""
        self.data, self._appended = data, appended
        self._last_appended = appended()
        self._growth = 0  # of the WAL, since the last walk began
        self._topics = self._topics_changed = 0
        self._begin_walk()
        self.walk(float("inf"))

    def bound(self) -> int:
        new_topics = max(0, self.topics() - self._walked_topics)
        return self._walked + _COPIES * self._wal_growth() + NEW_TOPIC * new_topics

    def _wal_growth(self) -> int:
        appended = self._appended()
        if (
            appended < self._last_appended
        ):  # a new durability counts from 0: what its predecessor did last we never heard
            self._last_appended = 0
            self._begin_walk()
        self._growth += appended - self._last_appended
        self._last_appended = appended
        return self._growth

    def topics(self) -> int:
        """How many there are; counted again when one has come or gone."""
        directory = f"{self.data}/topics"
        try:
            changed = os.stat(directory).st_mtime_ns
            if changed != self._topics_changed:
                self._topics, self._topics_changed = len(os.listdir(directory)), changed
        except FileNotFoundError:
            self._topics = 0
        return self._topics

    def walk_if_due(self, refusing: bool, headroom: int) -> None:
        """Go on with a walk; begin one when it is time, or what has come since the last may take half of what is left."""
        growth = self._wal_growth()
        if self._files is None:
            age = time.monotonic() - self._walked_at
            is_old = age > _REWALK_S if refusing else age > _WALK_S and growth
            if not is_old and _COPIES * growth < MIB + max(0, headroom) // 2:
                return
            self._begin_walk()
        self.walk(_LONG_SLICE_S if refusing else _SLICE_S)

    def _begin_walk(self) -> None:
        self._files: Iterator[int] | None = _sizes(self.data)
        self._sum, self._growth_before, self._topics_before = 0, self._growth, self.topics()

    def walk(self, seconds: float) -> None:
        """Go on for so long."""
        until = time.monotonic() + seconds
        for nbytes in self._files or ():
            self._sum += nbytes
            if time.monotonic() > until:
                return
        self._files, self._walked_at = None, time.monotonic()
        self._walked, self._walked_topics = self._sum, self._topics_before
        self._growth -= self._growth_before


def _sizes(top: str) -> Iterator[int]:
    """The bytes each file and directory takes, as `du` counts them; what vanishes meanwhile is passed over."""
    waiting = [top]
    while waiting:
        try:
            entries = os.scandir(waiting.pop())
        except (FileNotFoundError, PermissionError):  # gone, or not ours: root's lost+found on a volume of its own
            continue
        with entries:
            for entry in entries:
                try:
                    blocks = entry.stat(follow_symlinks=False).st_blocks
                except FileNotFoundError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                yield 512 * blocks


class Admission:
    """The answers for one process; it looks itself, so nobody else needs to be alive."""

    def __init__(self, settings: Settings, appended: Callable[[], int]) -> None:
        self.data, self.quota = settings.data, settings.data_quota
        # With ingress and the framer, and in the links between: not stored yet. In `durable`: not in its queue yet.
        unframed = settings.max_line + CAPACITY + area_bytes(settings.max_line)
        self._accepted = _COPIES * (_LONGER * unframed + settings.ring_bytes)
        self._unrouted = settings.ring_bytes + _OTHERS
        self._usage = Usage(self.data, appended) if self.quota else None
        self._looked_at, self._reason, self._waiting = 0.0, "", False

    def refusal(self) -> str:
        """Why nothing more is to be accepted, "disk_full" or "quota"; "" while there is room."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            if self._disk_lacks(self._reason == "disk_full"):
                self._reason = "disk_full"
            else:
                reserve, refusing = min(self._accepted, self.quota // _QUOTA_SHARE), self._reason == "quota"
                self._reason = "quota" if self._quota_lacks(_hold_on(reserve, refusing), refusing) else ""
        return self._reason

    def must_wait(self, nbytes: int) -> bool:
        """Whether lines of `nbytes`, appended now, might pass the quota: of those who never asked, or grown on the way."""
        self._waiting = self._quota_lacks(_COPIES * nbytes, self._waiting)
        return self._waiting

    def _disk_lacks(self, refusing: bool) -> bool:
        disk = os.statvfs(self.data)
        reserve = min(self._accepted + self._unrouted, disk.f_blocks * disk.f_frsize // _DISK_SHARE)
        lacks_inodes = disk.f_files > 0 and disk.f_favail < _hold_on(_inode_reserve(disk), refusing)
        return lacks_inodes or disk.f_bavail * disk.f_frsize < _hold_on(reserve, refusing)

    def _quota_lacks(self, nbytes: int, refusing: bool) -> bool:
        usage = self._usage
        if usage is None:
            return False
        limit = self.quota - self._unrouted - _OLD_TOPIC * usage.topics() - nbytes
        usage.walk_if_due(refusing, limit - usage.bound())
        return usage.bound() > limit


def spare_inodes(path: str) -> float:
    """How many inodes new topics may take before anybody is refused for lack of them; infinity where none are counted."""
    disk = os.statvfs(path)
    return disk.f_favail - 2 * _inode_reserve(disk) if disk.f_files else inf


def _inode_reserve(disk: os.statvfs_result) -> int:
    return min(_INODES, disk.f_files // _INODE_SHARE)


def _hold_on(reserve: int, refusing: bool) -> int:
    """A reserve, and a quarter more to end a refusal."""
    return reserve * 5 // 4 if refusing else reserve
