"""Decide if more messages may be accepted: disk and KMQ_DATA_QUOTA must have space for all that were accepted before.

    Admission.refusal() → "": accept; "disk_full" or "quota": refuse

Links       Ingress asks refusal() at every turn of its loop. While it names a reason, acknowledged producers are
            refused and other producers are not read. Excepted are producers of KMQ itself whose few bytes free room
            (hello.py, reserved=spare). Durability asks must_wait() before each append, because a shell
            may write into the FIFO without asking. The router asks must_wait() before it makes a topic, which takes far
            more space than its first message. Code that copies a segment asks has_room(). Who deletes what KMQ_TIER has
            asks shortage(), which begins before refusal() does.
Owns        nothing; reads the sizes of the files under KMQ_DATA, as `du` does.

Invariant   The bytes under KMQ_DATA never exceed the quota: a group is appended only if both its copies (WAL and queue)
            fit beside everything that the router still has to copy. Refusing begins earlier, by as much as the links
            hold, so that accepted messages become durable and get their replies.
Mechanism   Usage is a walk over all files, plus an upper bound of the growth since it began: twice what was appended to
            the WAL, and the files of new topics. Walks are needed only to tighten the bound, and to notice what
            retention has deleted. A walk proceeds in slices, so that 10,000 topics never stop a stage. The free space
            of the file system is not used as a measure, because other programs write and delete there too.
Inodes      A lack of inodes counts as a lack of bytes: messages are refused. File systems without a count (btrfs)
            report 0, which means no limit.
Shortage    Begins at twice the reserve, so that room is made before any producer pauses.
Hysteresis  Once refusing, accept again only when free space exceeds the reserve by a quarter.
Not covered Until the next walk the bound lacks: a queue that is rebuilt, a topic declared with hundreds of partitions,
            what XFS allocates ahead of a growing file, and what other programs write there. So a message that was
            accepted may wait until there is room.
"""

import os
import time
from collections.abc import Callable, Iterator
from math import inf

from kmq.config.settings import Settings
from kmq.config.states import InForce
from kmq.config.values import KIB, MIB
from kmq.links.fifo import CAPACITY
from kmq.links.received import ring_bytes
from kmq.links.staging import area_bytes

_COPIES = 2  # of each message: in the WAL and in its queue
_LONGER = 2  # a stored line takes at most twice its bytes in the FIFO; must_wait covers short lines, which grow more
TOPIC_INODES = 6  # files and directories of a topic with one partition: those listed below
NEW_TOPIC = 24 * KIB  # two directories, topic.toml, log, index, a long symlink: one block each
OLD_TOPIC = 8 * KIB  # log and index may take this beyond their bytes: a last block each, provisional index lines
_NO_LIMIT = -(1 << 62)  # bytes that are lacking
_OTHERS = 4 * MIB  # the WAL's index, dropped.log, checkpoints (twice while they are replaced)
_DISK_SHARE, _QUOTA_SHARE = 10, 4  # the reserve is at most this part of the whole: small disks and quotas work too
_INODES, _INODE_SHARE = 4096, 20  # kept free for segments, checkpoints, new topics; at most this part of all
_LOOK_S = 0.005  # maximum age of a look at the disk: messages accepted until the next look use the reserve
_COUNT_S = 0.05  # maximum age of a look at the quota, which may take a slice of a walk
_WALK_S, _REWALK_S = 10.0, 0.5  # between walks while accepting; while refusing, so that space is noticed within 2 s
_SLICE_S, _LONG_SLICE_S = 0.004, 0.05  # time for one slice of a walk; longer while refusing, when little else is to do


class Usage:
    """An upper bound of the bytes under a data directory."""

    def __init__(self, data: str, appended: Callable[[], int]) -> None:
        """`appended`: bytes appended to the WAL. Only differences count, and it may start again at 0."""
        self.data, self._appended = data, appended
        self._last_appended = appended()
        self._growth = 0  # of the WAL, since the last walk began
        self._topics = self._topics_changed = 0
        self.begin_walk()
        self.walk(float("inf"))

    def bound(self) -> int:
        new_topics = max(0, self.topics() - self._walked_topics)
        return self._walked + _COPIES * self._wal_growth() + NEW_TOPIC * new_topics

    def _wal_growth(self) -> int:
        appended = self._appended()
        if appended < self._last_appended:  # durability was restarted, and the last count before that is unknown
            self._last_appended = 0
            self.begin_walk()
        self._growth += appended - self._last_appended
        self._last_appended = appended
        return self._growth

    def topics(self) -> int:
        """Return how many topics there are; counted again only when one was added or deleted."""
        directory = f"{self.data}/topics"
        try:
            changed = os.stat(directory).st_mtime_ns
            if changed != self._topics_changed:
                self._topics, self._topics_changed = len(os.listdir(directory)), changed
        except FileNotFoundError:
            self._topics = 0
        return self._topics

    def walk_if_due(self, refusing: bool, headroom: int) -> None:
        """Continue a walk, or begin one: when it is time, or if the growth may take half of the headroom."""
        growth = self._wal_growth()
        if self._files is None:
            age = time.monotonic() - self._walked_at
            is_old = age > _REWALK_S if refusing else age > _WALK_S and growth
            if not is_old and _COPIES * growth < MIB + max(0, headroom) // 2:
                return
            self.begin_walk()
        self.walk(_LONG_SLICE_S if refusing else _SLICE_S)

    @property
    def is_walking(self) -> bool:
        return self._files is not None

    def begin_walk(self) -> None:
        """Begin a walk over all files; a walk that is still under way is given up."""
        self._files: Iterator[int] | None = _sizes(self.data)
        self._sum, self._growth_before, self._topics_before = 0, self._growth, self.topics()

    def walk(self, seconds: float) -> None:
        """Continue the walk for this long."""
        until = time.monotonic() + seconds
        for nbytes in self._files or ():
            self._sum += nbytes
            if time.monotonic() > until:
                return
        self._files, self._walked_at = None, time.monotonic()
        self._walked, self._walked_topics = self._sum, self._topics_before
        self._growth -= self._growth_before


def _sizes(top: str) -> Iterator[int]:
    """Yield the bytes of each file and directory, as `du` counts them; those that vanish meanwhile are skipped."""
    waiting = [top]
    while waiting:
        try:
            entries = os.scandir(waiting.pop())
        except (FileNotFoundError, PermissionError):  # deleted, or another user's: root's lost+found on a volume
            continue
        with entries:
            for entry in entries:
                try:
                    blocks = entry.stat(follow_symlinks=False).st_blocks
                except FileNotFoundError:
                    continue
                if entry.name.startswith("bootstrap-"):  # links of files that are counted where they are
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                yield 512 * blocks


class Admission:
    """The decisions of one process. Each process measures by itself, so it depends on no other process."""

    def __init__(self, settings: Settings, appended: Callable[[], int]) -> None:
        self._in_force, self._appended = InForce(settings), appended
        self.data = settings.data
        # Bytes on disk for messages that are accepted but not stored (in ingress, the framer and the links between),
        # and for messages that are stored but not in their queues.
        unframed = settings.max_line + CAPACITY + area_bytes(settings.max_line) + ring_bytes(settings.max_line)
        self.accepted_bytes = _COPIES * (_LONGER * unframed + settings.ring_bytes)
        self._unrouted = settings.ring_bytes + _OTHERS
        self._use_quota()
        self.disk: os.statvfs_result | None = None  # result of the last look
        self._looked_at = self._counted_at = 0.0
        self._lacks_disk = self._lacks_quota = self._waiting = False
        self._short_of_disk = self._short_of_quota = _NO_LIMIT

    def _use_quota(self) -> None:
        self.quota = self._in_force.settings.data_quota
        self._usage = Usage(self.data, self._appended) if self.quota else None

    def refusal(self) -> str:
        """Return why nothing more must be accepted, "disk_full" or "quota"; "" while there is room."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._lacks_disk = self._disk_lacks(self._lacks_disk)
        if now - self._counted_at > _COUNT_S:
            self._counted_at = now
            reserve = min(self.accepted_bytes, self.quota // _QUOTA_SHARE)
            self._lacks_quota = self._quota_lacks(_threshold(reserve, self._lacks_quota), self._lacks_quota)
            self._short_of_quota = _NO_LIMIT if self._usage is None else -self._quota_left(self._usage, 2 * reserve)
        return "disk_full" if self._lacks_disk else "quota" if self._lacks_quota else ""

    def shortage(self) -> int:
        """Return how many bytes to free so that messages will not soon be refused; 0 or less: so many may be written.

        A lack of inodes counts as a byte. After a deletion call `recount`.
        """
        self.refusal()
        is_known = self._usage is None or not self._usage.is_walking  # else what was just deleted still counts
        return max(self._short_of_disk, self._short_of_quota * is_known)

    def recount(self) -> None:
        """Look again at the disk, and count all files again, because some were deleted."""
        self._looked_at = 0.0
        if self._usage is not None:
            self._usage.begin_walk()

    def must_wait(self, nbytes: int) -> bool:
        """Return True if `nbytes` of lines, appended now, might exceed the quota."""
        self._waiting = self._quota_lacks(_COPIES * nbytes, self._waiting)
        return self._waiting

    def has_room(self, nbytes: int) -> bool:
        """Return True if disk and quota have room to copy `nbytes`, and still for all messages that may be accepted."""
        disk = os.statvfs(self.data)
        return disk.f_bavail * disk.f_frsize - nbytes >= 2 * self.accepted_bytes and not self.must_wait(nbytes)

    @property
    def used(self) -> int:
        """Return an upper bound of the bytes under the data directory; 0 without a quota, because nothing counts them."""
        return self._usage.bound() if self._usage is not None else 0

    def _disk_lacks(self, refusing: bool) -> bool:
        disk = self.disk = os.statvfs(self.data)
        reserve = min(self.accepted_bytes + self._unrouted, disk.f_blocks * disk.f_frsize // _DISK_SHARE)
        free, inodes = disk.f_bavail * disk.f_frsize, _inode_reserve(disk)
        self._short_of_disk = 2 * reserve - free
        if disk.f_files and disk.f_favail < 2 * inodes:
            self._short_of_disk = max(1, self._short_of_disk)
        lacks_inodes = disk.f_files > 0 and disk.f_favail < _threshold(inodes, refusing)
        return lacks_inodes or free < _threshold(reserve, refusing)

    def _quota_lacks(self, nbytes: int, refusing: bool) -> bool:
        if self._in_force.changed():  # the fleet's quota
            self._use_quota()
        usage = self._usage
        if usage is None:
            return False
        usage.walk_if_due(refusing, self._quota_left(usage, nbytes))
        return self._quota_left(usage, nbytes) < 0

    def _quota_left(self, usage: Usage, nbytes: int) -> int:
        return self.quota - self._unrouted - OLD_TOPIC * usage.topics() - nbytes - usage.bound()


def spare_inodes(path: str) -> float:
    """Return how many inodes new topics may take before messages are refused; infinity if inodes are not counted."""
    disk = os.statvfs(path)
    return disk.f_favail - 2 * _inode_reserve(disk) if disk.f_files else inf


def _inode_reserve(disk: os.statvfs_result) -> int:
    return min(_INODES, disk.f_files // _INODE_SHARE)


def _threshold(reserve: int, refusing: bool) -> int:
    """Return the reserve, and a quarter more to end a refusal."""
    return reserve * 5 // 4 if refusing else reserve
