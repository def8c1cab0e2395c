"""Leading: sends the records on our disk to the followers in one epoch, and decides what is committed.

Example: we have seq 120 on disk, the two followers in the ISR have confirmed 118 and 115; then hw is 115.

Begins      The framer makes the ring `framed` and appends the record of the epoch first. Once that is committed and
            routed the doors open. Before that this leader may know less than its predecessor has shown.
Invariant   Only records on our own disk are sent. A confirmed position counts only if it came over a connection of this
            epoch, after the logs were compared, and under the version of the register that is in force here.
            hw = min over the maximal ISR of what is on disk. The maximal ISR is the register's ISR and that of every
            change requested at its present version. A requested change counts until the register is read at another
            version, even if its write gets no answer.
            While the ISR is smaller than min_insync nothing is committed.
Spent       If durability was restarted in this epoch, nobody knows which records are in flight: it ends (is_spent).
Slow        A member of the ISR that takes a multiple of the others' time to confirm delays every acknowledgement. It
            leaves the ISR like a member that lags, and joins again once it has kept up for a while. Both are ordinary
            changes of the ISR: this module only decides when they are due.
Doors       They stay open while this replica can prove that it leads: by Consul, or by as many followers as could elect
            another leader. Without proof for one session TTL plus the lag they close, and clients go elsewhere. The
            epoch continues, and the doors open again with the next proof. A message that is read after this process was
            stopped proves nothing about the time after it was sent (FollowerLink.sent_after).
Memory      Blocks are sent from where they lie in the ring, and stay there until they are committed. So the ring has
            all blocks that a member of the ISR needs. A follower that lags further gets records from the WAL. Each
            follower is sent at most as much as it has room for.
"""

import asyncio
import os
import time
from bisect import bisect_right
from collections import defaultdict, deque
from statistics import median
from typing import NamedTuple
from zlib import crc32

from kmq.files import file_id
from kmq.links.ring import RingObserver
from kmq.links.role import LEADING, STARTING
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

_TICK_S = 0.25  # hw is computed at least this often, whatever arrives
_LOOK_S = 0.01  # between two looks whether the stages have begun
_READ_BYTES = 1 << 20  # read from the WAL at once, for a follower that lags
_START_LAGS = 3  # a new leader has this many lags to commit its first record
HUNG_S = 60.0  # a stage that takes longer to begin, or to let go, hangs
_BEAT_S = 0.5  # longest time between two messages to a follower
_SMOOTH = 8  # samples over which a follower's ack delay is smoothed; at most one each tick
_SLOW_SAMPLES = 4  # fewer samples prove nothing
_SLOW_TIMES, _SLOW_S = 5, 0.25  # slow: at least this multiple of the others' median delay, and at least this long
_SLOW_LAGS, _QUICK_LAGS = 2, 6  # in lags: how long slow before it leaves the ISR; how long quick before it may rejoin


class SentBlock(NamedTuple):
    """A block as it is sent. `position`: of the block in the ring; None: it was read from the WAL."""

    first: int
    last: int
    key: int
    crc: int
    lines: bytes | memoryview
    position: int | None = None


class FollowerLink:
    """The connection of one follower."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.position = 0  # last seq on its disk, confirmed under the version in force; 0: unknown
        self.sent = 0  # the last seq sent to it
        self.room = 0
        self.sent_hw = -1
        self.heard = self.reached = time.monotonic()  # when its last message was read; when it last had all
        self.sent_after = 0.0  # its last message was sent after this moment, however late it was read
        self.last_send = 0.0  # when a message was last sent to it
        self.snapshot = 0  # the seq of the producers.ckpt that it has
        self._on_the_way: deque[tuple[int, int, float]] = deque()  # last seq, bytes, time sent
        self._bytes = 0
        self._took, self._count = 0.0, 0  # of blocks confirmed since `ack_delay` was last called: seconds, number

    def has_room(self) -> bool:
        return self._bytes < self.room

    def note_sent(self, last: int, nbytes: int) -> None:
        """Record that a block of `nbytes` up to seq `last` was sent."""
        self.sent = last
        self._on_the_way.append((last, nbytes, time.monotonic()))
        self._bytes += nbytes

    def note_confirmed(self, seq: int) -> None:
        """Record that all blocks up to `seq` are on its disk."""
        now = time.monotonic()
        while self._on_the_way and self._on_the_way[0][0] <= seq:
            _, nbytes, sent_at = self._on_the_way.popleft()
            self._bytes -= nbytes
            self._took += now - sent_at
            self._count += 1

    def ack_delay(self, now: float, before: float) -> float | None:
        """Return the mean seconds from sending a block to its confirmation, since the last call; None: no news.

        A block that still waits counts once it has waited longer than `before`.
        """
        waits = now - self._on_the_way[0][2] if self._on_the_way else 0.0
        took = self._took / self._count if self._count else None
        self._took, self._count = 0.0, 0
        if took is None:
            return waits if waits > before else None
        return max(took, waits)


class AckDelay:
    """How long one replica takes to confirm a block, over all its connections in this epoch."""

    def __init__(self) -> None:
        self.seconds: float | None = None  # smoothed; None: not measured yet
        self.slow_since: float | None = None  # too slow for the ISR since then; None once it has been quick for a while
        self._slow_samples = 0  # slow samples in a row
        self._first_slow = self._last_slow = 0.0  # times of the first and the last of them

    def add(self, sample: float, others: list[float], now: float) -> None:
        """Add the sample of one tick. `others`: the delays of the other followers in the ISR."""
        self.seconds = sample if self.seconds is None else self.seconds + (sample - self.seconds) / _SMOOTH
        limit = max(_SLOW_S, _SLOW_TIMES * median(others)) if others else float("inf")
        if self.slow_since is not None:
            limit /= 2  # it must be clearly better before it may rejoin
        if self.seconds <= limit:
            self._slow_samples = 0
            return
        self._first_slow = self._first_slow if self._slow_samples else now
        self._slow_samples, self._last_slow = self._slow_samples + 1, now

    def judge(self, lag_s: float, now: float) -> None:
        if self.has_been_slow(lag_s):
            self.slow_since = self.slow_since or now
        elif now - self._last_slow > _QUICK_LAGS * lag_s:
            self.slow_since = None

    def has_been_slow(self, lag_s: float) -> bool:
        """Return True if all samples of the last _SLOW_LAGS lags were slow."""
        has_lasted = self._last_slow - self._first_slow >= _SLOW_LAGS * lag_s
        return has_lasted and self._slow_samples >= _SLOW_SAMPLES


class Leading:
    """One epoch as the leader."""

    def __init__(self, stages: Stages, duty: Duty, lag_s: float, log: Logger) -> None:
        self.stages, self.duty, self.me, self.lag_s, self.log = stages, duty, duty.me, lag_s, log
        self.register = duty.register
        self.epoch = duty.register.epoch
        self.is_spent = self.is_over = False
        self.hw, self.synced, self.numbered = 0, 0, 0
        self.epoch_seq = 0  # seq of the record of the epoch; 0: not numbered yet
        self.followers: dict[str, FollowerLink] = {}
        self.delays = defaultdict[str, AckDelay](AckDelay)  # by replica
        self._links: set[Link] = set()  # of followers, also of those whose logs were not compared yet
        self.stands_since: float | None = None  # since when hw has not reached the seqs numbered one lag before
        self._idles_since: float | None = time.monotonic()  # since when nothing can be numbered: see `_look`
        self._began = time.monotonic()
        self._ticks = self._began, self._began  # the last two; what is read now was sent after the first of them
        self._as_of = duty.as_of  # when Consul last confirmed that we lead
        self._sure_at = 0.0  # when enough followers were last heard to rule out another leader
        self._has_opened = False  # whether the doors were ever open in this epoch
        self._gone: dict[str, float] = {}  # by replica: until when it kept up, over connections that have ended
        self._failed: Exception | None = None
        self._snapshot: wire.FileText | None = None  # the present producers.ckpt
        self._snapshot_file: object = None  # identifies the file that it was read from
        self._is_too_large = False  # producers.ckpt is too large to send
        self._changed_at = 0.0  # when the version changed; hw may stand until all have promised the new one
        self._confirmed: dict[str, int] = {}  # the last confirmed position of each replica in this epoch
        self._pending_isrs: list[frozenset[str]] = []  # changes of the ISR requested at the present version
        self._ring: RingObserver | None = None
        self._epochs: Epochs | None = None
        self._blocks: dict[int, SentBlock] = {}  # blocks in the ring by first seq, the oldest first
        self._samples: deque[tuple[float, int, int]] = deque()  # time, synced, numbered; one each tick, for the lag
        self._wal = LogReader(f"{stages.data}/append", by_seq=True)

    # --- what the replica asks ---------------------------------------------------------------------------------------

    def update(self, duty: Duty) -> None:
        """Count under another version from now on. Each follower confirms again once it has promised that version."""
        self._as_of = max(self._as_of, duty.as_of)
        if duty.register == self.register:
            return
        self.duty, self.register, self._pending_isrs = duty, duty.register, []
        self._changed_at = time.monotonic()
        for follower in self.followers.values():
            follower.position = 0
            follower.link.send(wire.RegisterText(self.register.encode()))

    def prepare_isr(self, isr: list[str]) -> None:
        """Compute hw over this ISR too from now on, because it is about to be written."""
        self._pending_isrs.append(frozenset(isr))

    def may_join(self, replica: str) -> bool:
        """Return True if it has all committed records and the record of the epoch on disk, under this version."""
        follower, delay = self.followers.get(replica), self.delays.get(replica)
        if delay is not None and delay.slow_since is not None and self._keeps_up():
            return False
        least = max(self.hw, self.epoch_seq)
        return follower is not None and self.epoch_seq > 0 and self.synced >= least and follower.position >= least

    def _keeps_up(self) -> bool:
        """Return True if the ISR commits as it is. If not, a slow replica is better than too few."""
        others = [each for each in self.register.isr if each != self.me]
        return 1 + len(others) >= self.register.min_insync and not any(map(self.is_behind, others))

    def hears(self, replica: str) -> bool:
        follower = self.followers.get(replica)
        return follower is not None and time.monotonic() - follower.heard < self.lag_s

    def is_behind(self, replica: str) -> bool:
        """Return True if it is silent, or has not reached the seq that was on our disk one lag ago."""
        follower = self.followers.get(replica)
        since = min(follower.reached, follower.heard) if follower is not None else self._gone.get(replica, self._began)
        return time.monotonic() - since > self.lag_s

    def is_slow(self, replica: str) -> bool:
        """Return True if it has long taken a multiple of the others' time to confirm."""
        return replica in self.delays and self.delays[replica].has_been_slow(self.lag_s)

    @property
    def stands(self) -> bool:
        """Return True if for one lag no numbered record was committed, or no record could be numbered."""
        patience = self.lag_s * (1 if self._has_opened else _START_LAGS)  # at first all brokers have to change roles
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
        stages.page.enter(STARTING, self.epoch, int(register.version.mark, 16), self.hw)
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
                is_due = is_starting and 0 < self.epoch_seq <= min(self.hw, stages.routed_seq())
                if is_due and time.monotonic() < self._leads_until:
                    self._has_opened = True
                    stages.page.open_doors()
                    self.log.info("doors_opened", epoch=self.epoch, hw=self.hw)
                await asyncio.sleep(_LOOK_S if is_starting and not self._has_opened else _TICK_S)
            await asyncio.Event().wait()  # the replica requests another epoch (replica.py)
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
        self.followers.clear()  # the last messages of followers count only in this epoch
        self._blocks.clear()
        if self._ring is not None:
            self._ring.close()

    def _on_sync(self) -> None:
        try:
            os.read(self.stages.synced, 1 << 16)
            self._turn()
        except BlockingIOError:
            return
        except Exception as err:  # a callback cannot raise to anyone: `run` raises it
            self._failed = err

    def _look(self) -> None:
        """Take a turn, and check which followers keep up."""
        self._turn()
        self._sample()
        is_short = 1 + sum(map(self.hears, self.followers)) < self.register.min_insync
        self.stages.page.refuse(is_short)
        self._prove()
        is_idle = is_short or not self.epoch_seq  # then no numbered record is waiting
        self._idles_since = (self._idles_since or time.monotonic()) if is_idle else None

    def _prove(self) -> None:
        """Publish until when this broker surely leads, and close the doors after that time."""
        now, page, needed = time.monotonic(), self.stages.page, self.register.min_insync - 1
        sent_after = sorted((each.sent_after for each in self.followers.values()), reverse=True)
        if not needed:
            self._sure_at = now
        elif len(sent_after) >= needed:
            self._sure_at = max(self._sure_at, sent_after[needed - 1])
        self._ticks = self._ticks[1], now
        # No other broker is elected before our session has ended, which takes one TTL of silence.
        page.lead_until(self._sure_at + self.stages.settings.session_ttl, self._leads_until)
        if page.read().role == LEADING and now >= self._leads_until:
            page.close_doors()
            self.log.warn(
                "doors_closed",
                epoch=self.epoch,
                reason="neither Consul nor enough followers have answered for KMQ_SESSION_TTL and KMQ_REPLICA_LAG",
                effect="clients are sent to the other brokers; the doors open again when either answers",
            )

    @property
    def _leads_until(self) -> float:
        """When the doors close, unless leadership is proved again before."""
        return max(self._sure_at, self._as_of) + self.stages.settings.session_ttl + self.lag_s

    def _turn(self) -> None:
        """Send the blocks framed since the last turn that are synced, and compute hw."""
        ring = self._ring
        if ring is None:
            return
        # Look only at released blocks: if a follower delays the others, there are many more blocks.
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
        """Send producers.ckpt to the followers whenever it changes. It covers only committed records."""
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
        """Record how far we are, and which followers have reached an earlier sample."""
        now, samples = time.monotonic(), self._samples
        if not samples or now - samples[-1][0] >= _TICK_S:
            samples.append((now, self.synced, self.numbered))
            while now - samples[0][0] > 2 * self.lag_s + 1:
                samples.popleft()
            self._measure(now)
        for follower in self.followers.values():
            reached = bisect_right(samples, follower.position, key=lambda sample: sample[1])
            if reached:
                follower.reached = max(follower.reached, samples[reached - 1][0])
        reached = bisect_right(samples, self.hw, key=lambda sample: sample[2])
        if self.hw >= self.numbered:
            self.stands_since = None
        else:
            self.stands_since = samples[reached - 1][0] if reached else (self.stands_since or samples[0][0])

    def _measure(self, now: float) -> None:
        """Measure how long each follower took to confirm since the last tick, beside the others in the ISR."""
        isr = self.register.isr
        for replica, follower in self.followers.items():
            delay = self.delays[replica]
            sample = follower.ack_delay(now, delay.seconds or 0.0)
            others = [self.delays[each].seconds for each in isr if each != replica and each in self.delays]
            # A follower outside the ISR may have much to catch up on, so its delay says nothing about its disk.
            if sample is not None and (replica in isr or delay.slow_since is not None):
                delay.add(sample, [each for each in others if each is not None], now)
            delay.judge(self.lag_s, now)

    # --- counting ----------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Raise hw to the seq that every electable replica has on its disk."""
        register = self.register
        if self.is_over:
            return
        if len(register.isr) < register.min_insync:
            return self._send_hw()
        members = set(register.isr).union(*self._pending_isrs) - {self.me}
        positions = [self.followers[each].position if each in self.followers else 0 for each in members]
        hw = min([self.synced, *positions])
        if hw > self.hw:
            self.hw = hw
            if self.stages.page.raise_hw(hw) and self._ring is not None:
                self._ring.wake_reader()
        self._send_hw()

    def _send_hw(self) -> None:
        """Send hw to followers, unless data that soon follows carries it: a text costs each side as much as a block."""
        now = time.monotonic()
        for follower in self.followers.values():
            has_more = follower.sent < self.numbered and follower.has_room()  # more data is sent after our next sync
            if (follower.sent_hw < self.hw and not has_more) or now - follower.last_send > _BEAT_S:
                follower.sent_hw, follower.last_send = self.hw, now
                follower.link.send(wire.Hw(self.hw))

    # --- followers ---------------------------------------------------------------------------------------------------

    async def serve(self, link: Link, message: wire.Message) -> None:
        """Serve one follower's connection until it ends. `message`: the first one received."""
        replica = link.peer.replica
        follower = FollowerLink(link)
        if link.peer.max_line < self.stages.settings.max_line:
            return link.send(wire.RefusedText("max_line"))  # its ring may be too small for our lines
        self._links.add(link)
        try:
            while True:
                follower.heard, follower.sent_after = time.monotonic(), self._ticks[0]
                if isinstance(message, wire.FetchText) and self._begin(follower, message):
                    follower.reached = min(follower.reached, self._gone.pop(replica, follower.reached))
                    former, self.followers[replica] = self.followers.get(replica), follower
                    if former is not None and former is not follower:
                        former.link.close()
                    self._push(follower)
                elif isinstance(message, wire.Have):
                    if self.followers.get(replica) is not follower:
                        return  # its logs were not compared yet, or a newer connection has begun
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
        """Compare a follower's end with our log; return True if it may continue from there."""
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
        # An empty directory gets the files too, because routing may depend on facts without a record (bootstrap.py).
        if not position or fetch.next < wal.first_seq(self.stages.data):
            link.send(wire.Gone(wal.first_seq(self.stages.data)))
            return False
        end = min(epochs.end_of(fetch.last, self.synced), self.synced)
        if position > end or epochs.epoch_at(position) != fetch.last:
            link.send(wire.Diverged(epochs.epoch_at(end), end, fetch.next, fetch.last))
            return False
        follower.sent, follower.room = position, fetch.room
        follower.sent_hw, follower.last_send = self.hw, time.monotonic()
        link.send(wire.Hw(self.hw))
        return True

    def _have(self, follower: FollowerLink, have: wire.Have) -> None:
        position = have.next - 1
        follower.room = have.room
        if position > follower.sent:
            raise wire.WireError(f"confirms seq {position}, but has been sent up to {follower.sent} only")
        follower.note_confirmed(position)
        if have.version == self.register.version.number:
            follower.position = max(follower.position, position)
            replica = follower.link.peer.replica
            self._confirmed[replica] = max(self._confirmed.get(replica, 0), position)
        self._push(follower)
        self._count()

    def _push(self, follower: FollowerLink) -> None:
        """Send a follower the records that it lacks and has room for."""
        ring = self._ring
        while ring is not None and follower.has_room() and follower.sent < self.synced:
            chunk = self._blocks.get(follower.sent + 1)
            if chunk is None or not ring.has(chunk.position or 0):
                chunk = self._read(follower.sent + 1)
                if chunk is None or chunk.first != follower.sent + 1:
                    if chunk is not None:  # retention deleted the next records: it fetches again, and gets !gone
                        follower.link.close()
                    return
            elif chunk.last > self.synced:
                return
            follower.link.send(wire.Data(self.epoch, *chunk[:4], self.hw, chunk.lines))
            if chunk.position is not None and not ring.has(chunk.position):
                follower.link.close()  # released, perhaps overwritten, before all of it was sent: its crc is wrong
                return
            follower.note_sent(chunk.last, len(chunk.lines))
            follower.sent_hw, follower.last_send = self.hw, time.monotonic()

    def _read(self, low: int) -> SentBlock | None:
        """Return records from the WAL, up to the first block in the ring."""
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
