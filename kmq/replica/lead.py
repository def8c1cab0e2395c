"""Leading, in one epoch: sends what is on disk to the followers, counts what they confirm, and says what is committed.

Begins      the framer makes the ring `framed` and puts the record of the epoch first. Once that is committed and routed,
            the doors open: until then this leader may know less than its predecessor has shown.
Invariant   Only what is on our own disk is sent. A position counts only if it was confirmed over a connection of this
            epoch, after comparing (compare), and under the version of the register that is in force here.
            hw = min over the maximal ISR of what is on disk. The maximal ISR is the register's and that of every change
            asked for at its present version. It counts until the register is read with another one: a missing answer
            changes nothing.
            While the ISR is smaller than min_insync nothing is committed.
Spent       If durability was started again in this epoch, what is on its way is not known any more: it ends (is_spent).
Memory      Blocks are sent from where they lie in the ring. They stay there until they are committed, so a member of the
            ISR never needs another one; whoever else is further behind is sent records of the WAL. To each follower at
            most what it has room for is on its way.
"""

import asyncio
import os
import time
from bisect import bisect_right
from collections import deque
from typing import NamedTuple
from zlib import crc32

from kmq.files import file_id
from kmq.links.ring import RingObserver
from kmq.links.role import STARTING
from kmq.log import dedupe_file, wal
from kmq.log.committed import Epochs
from kmq.log.damage import DamageError
from kmq.log.reader import LogReader
from kmq.log.segment import start_of
from kmq.logfmt import Logger
from kmq.message import record
from kmq.replica import wire
from kmq.replica.bootstrap import send_files
from kmq.replica.replica import Duty
from kmq.replica.stages import Stages
from kmq.replica.wire import Link

_TICK_S = 0.25  # hw is looked at at least this often, whatever was not heard
_LOOK_S = 0.01  # until the stages have begun
_READ_BYTES = 1 << 20  # of the WAL, for a follower that is behind
_START_LAGS = 3  # so many lags has a new leader until its first record is committed
HUNG_S = 60.0  # a stage that takes longer to begin, or to let go, hangs
_BEAT_S = 0.5  # a follower hears at least this often


class SentBlock(NamedTuple):
    """A block as it is sent. `position`: where it lies in the ring; None: it was read from the WAL."""

    first: int
    last: int
    key: int
    crc: int
    lines: bytes | memoryview
    position: int | None = None


class FollowerLink:
    """One follower's connection."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.position = 0  # on its disk, confirmed under the version in force; 0: not known
        self.sent = 0  # the last seq that was sent to it
        self.room = 0
        self.sent_hw = -1
        self.heard = self.reached = time.monotonic()  # when it was last heard; when it last had all that was there then
        self.told = 0.0
        self.snapshot = 0  # up to which seq it has producers.ckpt
        self._on_the_way: deque[tuple[int, int]] = deque()  # last seq, bytes
        self._bytes = 0

    def has_room(self) -> bool:
        return self._bytes < self.room

    def is_sent(self, last: int, nbytes: int) -> None:
        self.sent = last
        self._on_the_way.append((last, nbytes))
        self._bytes += nbytes

    def confirms(self, seq: int) -> None:
        """All up to `seq` is on its disk."""
        while self._on_the_way and self._on_the_way[0][0] <= seq:
            self._bytes -= self._on_the_way.popleft()[1]


class Leading:
    """One epoch."""

    def __init__(self, stages: Stages, duty: Duty, lag_s: float, log: Logger) -> None:
        self.stages, self.duty, self.me, self.lag_s, self.log = stages, duty, duty.me, lag_s, log
        self.register = duty.register
        self.epoch = duty.register.epoch
        self.is_spent = self.is_over = False
        self.hw, self.synced, self.numbered = 0, 0, 0
        self.epoch_seq = 0  # of the record of the epoch; 0: not numbered yet
        self.followers: dict[str, FollowerLink] = {}
        self._links: set[Link] = set()  # of followers, of those too that were not compared yet
        self.stands_since: float | None = None  # since when hw has not reached what was numbered the lag before
        self._idles_since: float | None = time.monotonic()  # since when nothing can be numbered: see `_look`
        self._began = time.monotonic()
        self._gone: dict[str, float] = {}  # by replica: until when it kept up, over connections that have ended
        self._failed: Exception | None = None
        self._snapshot: wire.FileText | None = None  # producers.ckpt as it is now
        self._snapshot_file: object = None  # which file that was
        self._is_too_large = False  # producers.ckpt, for followers
        self._changed_at = 0.0  # when the version changed: hw may stand until all have promised it
        self._confirmed: dict[str, int] = {}  # the last position of each replica in this epoch
        self._asked: list[frozenset[str]] = []  # changes of the ISR at the present version
        self._ring: RingObserver | None = None
        self._epochs: Epochs | None = None
        self._blocks: dict[int, SentBlock] = {}  # of the ring, by first seq, the oldest first
        self._samples: deque[tuple[float, int, int]] = deque()  # time, synced, numbered; one each tick, for the lag
        self._wal = LogReader(f"{stages.data}/append", by_seq=True)

    # --- what the replica asks ---------------------------------------------------------------------------------------

    def take(self, duty: Duty) -> None:
        """Count under another version from now on: each follower confirms anew once it has promised it."""
        if duty.register == self.register:
            return
        self.duty, self.register, self._asked = duty, duty.register, []
        self._changed_at = time.monotonic()
        for follower in self.followers.values():
            follower.position = 0
            follower.link.send(wire.RegisterText(self.register.encode()))

    def asks(self, isr: list[str]) -> None:
        """A change of the ISR is about to be written."""
        self._asked.append(frozenset(isr))

    def may_join(self, replica: str) -> bool:
        """Return True if it has on disk all that is committed, and the record of the epoch, under this version."""
        follower = self.followers.get(replica)
        least = max(self.hw, self.epoch_seq)
        return follower is not None and self.epoch_seq > 0 and self.synced >= least and follower.position >= least

    def hears(self, replica: str) -> bool:
        return self._has_heard(replica, self.lag_s)

    def _has_heard(self, replica: str, within_s: float) -> bool:
        follower = self.followers.get(replica)
        return follower is not None and time.monotonic() - follower.heard < within_s

    def is_behind(self, replica: str) -> bool:
        """Return True if it is silent, or has not reached what was on our disk the lag ago."""
        follower = self.followers.get(replica)
        since = min(follower.reached, follower.heard) if follower is not None else self._gone.get(replica, self._began)
        return time.monotonic() - since > self.lag_s

    @property
    def stands(self) -> bool:
        """Return True if for the lag nothing was committed that was numbered, or nothing could be numbered."""
        is_starting = self.stages.page.read().role == STARTING
        patience = self.lag_s * (_START_LAGS if is_starting else 1)  # all have to change their roles first
        if not self.epoch_seq:
            patience = max(patience, HUNG_S)
        begins = [since for since in (self.stands_since, self._idles_since) if since is not None]
        return bool(begins) and time.monotonic() - max(min(begins), self._changed_at) > patience

    # --- the epoch ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Lead until cancelled."""
        stages, register = self.stages, self.register
        self._epochs = stages.epochs()
        self.hw = stages.shown()
        starts = stages.durability_starts()
        stages.page.take(STARTING, self.epoch, int(register.version.mark, 16), self.hw)
        self._ring = await self._find_ring()
        loop = asyncio.get_running_loop()
        loop.add_reader(stages.synced, self._on_sync)
        try:
            has_begun = False
            while not self.is_spent:
                if self._failed is not None:
                    raise self._failed
                self._look()
                stages.note_hw()
                await self._send_snapshot()
                if not has_begun and stages.has_wal() and self._ring.synced_seq is not None:
                    has_begun, starts = True, stages.durability_starts()
                if has_begun and stages.durability_starts() != starts:
                    self.is_spent = True
                is_starting = stages.page.read().role == STARTING
                if is_starting and 0 < self.epoch_seq <= min(self.hw, stages.routed_seq()):
                    stages.page.open_doors()
                    self.log.info("doors_opened", epoch=self.epoch, hw=self.hw)
                await asyncio.sleep(_LOOK_S if is_starting else _TICK_S)
            await asyncio.Event().wait()  # the replica asks for another epoch (replica.py)
        finally:
            loop.remove_reader(stages.synced)

    async def _find_ring(self) -> RingObserver:
        stages = self.stages
        while (ring := RingObserver.find(stages.settings.instance, "framed", stages.ring)) is None:
            await asyncio.sleep(_LOOK_S)
        return ring

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.followers.clear()  # what they have still said counts in this epoch only
        self._blocks.clear()
        if self._ring is not None:
            self._ring.close()

    def _on_sync(self) -> None:
        try:
            os.read(self.stages.synced, 1 << 16)
            self._turn()
        except BlockingIOError:
            return
        except Exception as err:  # a callback has nobody to tell: `run` raises it
            self._failed = err

    def _look(self) -> None:
        """Take a turn, and see who keeps up."""
        self._turn()
        self._sample()
        is_short = 1 + sum(map(self.hears, self.followers)) < self.register.min_insync
        # Nobody else is elected before our session has ended, which takes one TTL of silence.
        session_s = self.stages.settings.session_ttl
        is_unsure = 1 + sum(self._has_heard(each, session_s) for each in self.followers) < self.register.min_insync
        self.stages.page.refuse(is_short, is_unsure)
        is_idle = is_short or not self.epoch_seq  # nothing that was numbered stands then
        self._idles_since = (self._idles_since or time.monotonic()) if is_idle else None

    def _turn(self) -> None:
        """Take what was framed and synced since the last turn; send it, and count."""
        ring = self._ring
        if ring is None:
            return
        # Only those that were released are looked at: there are many more where a follower keeps the others waiting.
        while self._blocks and not ring.has(self._blocks[first := next(iter(self._blocks))].position or 0):
            del self._blocks[first]
        for at, block in ring.take():
            crc = crc32(block.data)
            if block.count and ring.has(at):
                found = SentBlock(block.first_seq, block.last_seq, block.key_length, crc, block.data, at)
                self._blocks[found.first] = found
        self.numbered = ring.committed().next_seq - 1
        self.synced = ring.synced_seq or 0
        if not self.epoch_seq and self.synced > ring.base_seq - 1:
            self.epoch_seq, self._idles_since = ring.base_seq, None
            assert self._epochs is not None
            self._epochs.add(self.epoch, self.epoch_seq)
        for follower in [*self.followers.values()]:
            self._push(follower)
        self._count()

    async def _send_snapshot(self) -> None:
        """Send producers.ckpt to the followers whenever it is another one: it speaks of committed records only."""
        path = dedupe_file.path(self.stages.data)
        file = file_id(path)
        if file is not None and file != self._snapshot_file:
            self._snapshot_file, size = file, os.path.getsize(path)
            if size > wire.FILE_BYTES and not self._is_too_large:
                effect = "followers keep the one that they have, and their WAL from there on; see KMQ_DEDUPE_COUNT"
                self.log.warn("producers_not_sent", bytes=size, limit=wire.FILE_BYTES, effect=effect)
            self._is_too_large = size > wire.FILE_BYTES
            content = b"" if self._is_too_large else await asyncio.to_thread(_read, path)
            if content and (seq := dedupe_file.checkpoint_seq(self.stages.data)):
                self._snapshot = wire.FileText("producers.ckpt", seq, crc32(content), content)
        for follower in self.followers.values():
            if self._snapshot is not None and follower.snapshot < self._snapshot.seq <= follower.position:
                follower.snapshot = self._snapshot.seq
                follower.link.send(self._snapshot)

    def _sample(self) -> None:
        """Note how far we are, and who has reached what was there before."""
        now, samples = time.monotonic(), self._samples
        if not samples or now - samples[-1][0] >= _TICK_S:
            samples.append((now, self.synced, self.numbered))
            while now - samples[0][0] > 2 * self.lag_s + 1:
                samples.popleft()
        for follower in self.followers.values():
            reached = bisect_right(samples, follower.position, key=lambda sample: sample[1])
            if reached:
                follower.reached = max(follower.reached, samples[reached - 1][0])
        reached = bisect_right(samples, self.hw, key=lambda sample: sample[2])
        if self.hw >= self.numbered:
            self.stands_since = None
        else:
            self.stands_since = samples[reached - 1][0] if reached else (self.stands_since or samples[0][0])

    # --- counting ----------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Raise hw to what every replica that can be elected has on its disk."""
        register = self.register
        if self.is_over:
            return
        if len(register.isr) < register.min_insync:
            return self._tell()
        members = set(register.isr).union(*self._asked) - {self.me}
        positions = [self.followers[each].position if each in self.followers else 0 for each in members]
        hw = min([self.synced, *positions])
        if hw > self.hw:
            self.hw = hw
            if self.stages.page.raise_hw(hw) and self._ring is not None:
                self._ring.wake_reader()
        self._tell()

    def _tell(self) -> None:
        """Tell followers hw, where no data that follows soon says it: a text costs each side as much as a block."""
        now = time.monotonic()
        for follower in self.followers.values():
            has_more = follower.sent < self.numbered and follower.has_room()  # it is sent after our next sync
            if (follower.sent_hw < self.hw and not has_more) or now - follower.told > _BEAT_S:
                follower.sent_hw, follower.told = self.hw, now
                follower.link.send(wire.Hw(self.hw))

    # --- followers ---------------------------------------------------------------------------------------------------

    async def serve(self, link: Link, message: wire.Message) -> None:
        """Serve one follower's connection to its end. `message`: the first that has come."""
        replica = link.peer.replica
        follower = FollowerLink(link)
        if link.peer.max_line < self.stages.settings.max_line:
            return link.send(wire.RefusedText("max_line"))  # its ring may be too small for our lines
        self._links.add(link)
        try:
            while True:
                follower.heard = time.monotonic()
                if isinstance(message, wire.FetchText) and self._begin(follower, message):
                    follower.reached = min(follower.reached, self._gone.pop(replica, follower.reached))
                    former, self.followers[replica] = self.followers.get(replica), follower
                    if former is not None and former is not follower:
                        former.link.close()
                    self._push(follower)
                elif isinstance(message, wire.Have):
                    if self.followers.get(replica) is not follower:
                        return  # before it was compared, or after a newer connection
                    self._have(follower, message)
                elif isinstance(message, wire.FilesText) and self.epoch_seq:
                    nbytes = await send_files(link, self.stages.data)
                    self.log.info("files_sent", broker=link.peer.broker, bytes=nbytes)
                elif not isinstance(message, wire.FetchText):
                    return
                message = await link.read()
        finally:
            self._links.discard(link)
            if self.followers.get(replica) is follower:
                del self.followers[replica]
                self._gone[replica] = min(follower.reached, follower.heard)
            link.close()

    def _begin(self, follower: FollowerLink, fetch: wire.FetchText) -> bool:
        """Compare a follower's end with our log; return True if it may go on from there."""
        link, register, position = follower.link, self.register, fetch.next - 1
        epochs = self._epochs
        if epochs is None or not self.epoch_seq or fetch.epoch != self.epoch:
            link.send(wire.RefusedText("not_ready" if fetch.epoch == self.epoch else "other_epoch"))
            return False
        if fetch.version != register.version:
            reply = (
                wire.RegisterText(register.encode())
                if register.descends_from(fetch.version)
                else wire.RefusedText("forked")
            )
            link.send(reply)
            return False
        if position < self._confirmed.get(link.peer.replica, 0):
            link.send(wire.RefusedText("went_back"))
            return False
        # An empty directory gets the files too: not all that routing depends on needs to have a record (bootstrap.py).
        if not position or fetch.next < wal.first_seq(self.stages.data):
            link.send(wire.Gone(wal.first_seq(self.stages.data)))
            return False
        end = min(epochs.end_of(fetch.last, self.synced), self.synced)
        if position > end or epochs.epoch_at(position) != fetch.last:
            link.send(wire.Diverged(epochs.epoch_at(end), end, fetch.next, fetch.last))
            return False
        follower.sent, follower.room = position, fetch.room
        follower.sent_hw, follower.told = self.hw, time.monotonic()
        link.send(wire.Hw(self.hw))
        return True

    def _have(self, follower: FollowerLink, have: wire.Have) -> None:
        position = have.next - 1
        follower.room = have.room
        if position > follower.sent:
            raise wire.WireError(f"confirms seq {position}, but has been sent up to {follower.sent} only")
        follower.confirms(position)
        if have.version == self.register.version.number:
            follower.position = max(follower.position, position)
            replica = follower.link.peer.replica
            self._confirmed[replica] = max(self._confirmed.get(replica, 0), position)
        self._push(follower)
        self._count()

    def _push(self, follower: FollowerLink) -> None:
        """Send what a follower lacks and has room for."""
        ring = self._ring
        while ring is not None and follower.has_room() and follower.sent < self.synced:
            chunk = self._blocks.get(follower.sent + 1)
            if chunk is None or not ring.has(chunk.position or 0):
                chunk = self._read(follower.sent + 1)
                if chunk is None or chunk.first != follower.sent + 1:
                    if chunk is not None:  # retention has deleted what comes next: it asks again, and hears so
                        follower.link.close()
                    return
            elif chunk.last > self.synced:
                return
            follower.link.send(wire.Data(self.epoch, *chunk[:4], self.hw, chunk.lines))
            if chunk.position is not None and not ring.has(chunk.position):
                follower.link.close()  # it was released, perhaps written over, before all of it was sent: the crc is wrong
                return
            follower.is_sent(chunk.last, len(chunk.lines))
            follower.sent_hw, follower.told = self.hw, time.monotonic()

    def _read(self, low: int) -> SentBlock | None:
        """Return records from the WAL, up to where the tail goes on."""
        high = min(self.synced, next((first - 1 for first in self._blocks if first > low), self.synced))
        try:
            first, lines = self._wal.read(low, _READ_BYTES)
        except DamageError as err:
            if not self.is_spent:
                self.log.error("damaged", file=err.path, reason=err, effect="this leader resigns")
            self.is_spent = True
            return None
        if not lines:
            return None
        last = record.seq_of(wal.last_line(lines))
        if last > high:
            lines = lines[: start_of(lines, high + 1, (0, first), (len(lines), last + 1))]
            last = high
        return SentBlock(first, last, 0, crc32(lines), lines) if lines else None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
