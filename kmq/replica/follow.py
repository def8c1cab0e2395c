"""Following: copies the leader's records into the ring `framed` during one epoch, and confirms what is on disk.

Example: the leader sends `!data … first=101 last=120`; once durability has synced them, we answer `!have` with seq 120.

Begins      The stages wait first. The leader compares our end with its log. Where they differ, our WAL is cut back to
            the point where they agree, and the leader is asked again. Only then durability and router start, and data
            flows.
Invariant   A record that was shown on this disk is never cut: the process ends with 65 instead. Cut records are kept
            under `cut/`.
            Data and hw are accepted only from the leader of our epoch, over the connection on which it compared our
            log. A block enters the ring only directly after the block before it.
            We confirm only what durability has synced, under the version that we have promised on disk.
Away        If the leader is silent for one session TTL plus the lag, or unreachable, other brokers may still reach it.
            Then the doors of this broker close and send clients elsewhere.
Memory      While the ring is full of uncommitted records we keep reading, because hw comes after the data. Records that
            do not fit into the ring wait here. The leader sends at most `room` bytes beyond what we have confirmed.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from kmq.cluster.register import Register, UnreadableRegister, decode
from kmq.errors import CorruptError, RetryError
from kmq.files import FULL, replace_file
from kmq.links.layout import Framed, Stamp
from kmq.links.ring import RingWriter
from kmq.links.role import FOLLOWING
from kmq.log import dedupe_file, topic_changes, wal
from kmq.log.checkpoint import agreed_end
from kmq.log.committed import cut_after
from kmq.logfmt import Logger
from kmq.message import record
from kmq.replica import wire
from kmq.replica.bootstrap import in_thread, receive_files, settle
from kmq.replica.replica import Duty
from kmq.replica.stages import Stages
from kmq.replica.wire import Link

_AGAIN_S = 0.2  # between two calls of the leader
_TICK_S = 0.25
_LOOK_S = 0.01  # between two looks whether durability has begun
_BEAT_S = 0.5  # longest time between two of our messages to the leader
_WAIT_S = 0.002  # between two tries while the ring is full
_BOOTSTRAP_AGAIN_S = 5.0  # after a failed bootstrap; retrying at once does not free a full disk


class WentBack(RetryError):
    """The leader knows that this replica once confirmed more than it has now: the directory is an older state."""


class Following:
    """One epoch as a follower."""

    def __init__(
        self,
        stages: Stages,
        duty: Duty,
        call: Callable[[str], Awaitable[Link]],
        promise: Callable[[Register], Register | None],
        log: Logger,
    ) -> None:
        """`call` connects to an address. `promise`: see replica.promise_version."""
        self.stages, self._call, self._promise, self.log = stages, call, promise, log
        self.duty, self.register = duty, duty.register
        self.epoch, self.leader = duty.register.epoch, duty.register.leader
        self.received = 0  # last seq received from the leader
        self.confirmed = 0
        self.hw = 0
        self.epochs = stages.epochs()
        self.ring: RingWriter | None = None
        self._backlog: deque[Framed] = deque()
        self._backlog_bytes = 0
        self._last_send = 0.0  # when our position was last sent to the leader
        self._link: Link | None = None
        self._is_agreed = self._is_filling = self.is_over = False
        self._silent_since: float | None = time.monotonic()  # since when we wait for the leader to say something
        self.is_away = False  # silent for too long
        self.has_agreed = False  # the leader has compared our logs, so it does lead this epoch
        self.replaced: int | None = None  # while our files are being replaced: the last seq that we had before
        self._reason = ""  # the last reason for having no connection
        self._snapshot: wire.FileText | None = None  # the leader's producers.ckpt, until our hw reaches it

    def update(self, duty: Duty) -> None:
        """Confirm under another version from now on, or connect to another address of the leader."""
        self.duty = duty
        if duty.register != self.register:
            self.register = duty.register
            self._have(is_due=True)

    @property
    def is_connected(self) -> bool:
        """Return False if the leader cannot be reached, or has been silent for too long."""
        return not self.is_away and (self.has_agreed or self._link is not None)

    @property
    def is_behind(self) -> bool:
        """Return True if our disk lacks records that the leader has, as far as we know."""
        return not self._is_agreed or self.confirmed < self.received

    # --- connections -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow until cancelled. Raises CorruptError, WentBack."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.stages.synced, self._on_sync)
        beat = asyncio.ensure_future(self._beat())
        beat.add_done_callback(lambda task: self._link.close() if self._link is not None else None)  # raise its error
        try:
            while True:
                try:
                    if self.duty.leader:
                        self._link = await self._call(self.duty.leader)
                        self._silent_since = None
                        self._report(await self._follow(self._link))
                except (OSError, wire.WireError, asyncio.IncompleteReadError, TimeoutError) as err:
                    self._report(str(err) or type(err).__name__)
                finally:
                    if self._link is not None:
                        self._link.close()
                    self._silent_since = self._silent_since or time.monotonic()
                    self._link, self._is_agreed = None, False
                if beat.done():
                    beat.result()
                await asyncio.sleep(_AGAIN_S)
        finally:
            beat.cancel()
            loop.remove_reader(self.stages.synced)

    def _report(self, reason: str) -> None:
        """Log why the leader is not followed, unless that was the last reason too."""
        if reason != self._reason:
            self.log.info("leader_not_followed", leader=self.duty.leader, reason=reason)
            self._reason = reason

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
            self.ring = None
        self._backlog.clear()
        self._backlog_bytes = 0

    async def _beat(self) -> None:
        """Send our position now and then."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.stages.drop_fifo()
            self.stages.refuse_requests()
            self.stages.note_hw()
            await self._take_snapshot()
            self._look_for_leader()
            self._have(is_due=time.monotonic() - self._last_send > _BEAT_S)

    def _look_for_leader(self) -> None:
        """Close the doors if the leader has been silent for too long."""
        since, settings = self._silent_since, self.stages.settings
        limit_s = settings.session_ttl + settings.replica_lag
        if since is None or self.is_away or self.is_over or time.monotonic() - since < limit_s:
            return
        self.is_away = True
        self.stages.show_doors(None)
        self.log.warn(
            "leader_silent",
            leader=self.duty.leader,
            seconds=f"{limit_s:g}",
            effect="connections that were passed on to it are reset; clients are sent to the other brokers",
        )

    # --- one connection ----------------------------------------------------------------------------------------------

    async def _follow(self, link: Link) -> str:
        """Follow over one connection; return why it ended."""
        position = self._fetch(link)
        while True:
            self._silent_since = time.monotonic()
            message = await link.read()
            self._silent_since = None
            if isinstance(message, wire.Data) and self._is_agreed:
                self._receive(message)
            elif isinstance(message, wire.Hw):
                if not self._is_agreed:
                    await self._start()
                    self._is_agreed, self._reason = True, ""
                    self.has_agreed, self.is_away = True, False
                    if not self.is_over:
                        self.stages.show_doors(self.duty.doors)
                    self.log.info("leader_followed", leader=link.peer.broker, epoch=self.epoch, next=self.received + 1)
                    self._have(is_due=True)
                self._raise_hw(message.seq)
            elif isinstance(message, wire.RegisterText):
                if not self._accept_register(bytes(message.text)):
                    return "its register does not descend from ours"
                if not self._is_agreed:
                    position = self._fetch(link)
                else:
                    self._have(is_due=True)
            elif isinstance(message, wire.Diverged):
                if (message.next, message.last) != position or self._is_agreed:
                    return "it answers to another position than ours"
                await self._cut(message)
                position = self._fetch(link)
            elif isinstance(message, wire.FileText):
                self._snapshot = message
            elif isinstance(message, wire.RefusedText) and message.reason == "went_back":
                raise WentBack("the leader remembers more of this replica than it has")
            elif isinstance(message, wire.Gone) and not self._is_agreed:
                await self._replace(link, message.first)
                position = self._fetch(link)
            elif isinstance(message, wire.RefusedText):
                return f"refused: {message.reason}"
            else:
                raise wire.WireError(f"{type(message).__name__} came where it has no place")

    def _fetch(self, link: Link) -> tuple[int, int]:
        """Ask for the records after our end; return that end."""
        end = self.received if self.ring is not None else wal.last_stored(self.stages.data)[0]
        last = self.epochs.epoch_at(end)
        link.send(wire.FetchText(self.register.version, self.epoch, end + 1, last, 0))
        return end + 1, last

    def _accept_register(self, text: bytes) -> bool:
        """Promise the version that the leader has sent. Return False if we may not promise it."""
        try:
            register = decode(text, "register")
        except UnreadableRegister as err:
            raise wire.WireError(str(err)) from err
        promised = self._promise(register)
        if promised is not None:
            self.register = promised
        return promised is not None

    async def _replace(self, link: Link, first: int) -> None:
        """Replace our files by the leader's. `first`: the first seq of its WAL."""
        stages, began, before = self.stages, time.monotonic(), wal.last_stored(self.stages.data)[0]
        self._snapshot = None
        self.log.info("bootstrap_begun", leader=link.peer.broker, end=before, first_seq=first)
        if self.ring is not None:
            self.close()
            await stages.leave()
        try:
            nbytes = await receive_files(link, stages.data, self.register.lineage)
        except OSError as err:
            self.log.warn("bootstrap_failed", reason=err, effect=f"it begins again after {_BOOTSTRAP_AGAIN_S:g} s")
            await asyncio.sleep(_BOOTSTRAP_AGAIN_S)
            raise
        self.replaced = before  # a mix of old and new files looks like a damaged WAL
        stages.bootstraps += 1
        await in_thread(settle, stages.data)
        self.replaced = None
        await stages.leave()  # this mends the end of the WAL, which grew while it was copied
        self.epochs = stages.epochs()
        end, seconds = wal.last_stored(stages.data)[0], round(time.monotonic() - began, 3)
        self.log.info("bootstrapped", leader=link.peer.broker, bytes=nbytes, end=end, seconds=seconds)

    async def _cut(self, diverged: wire.Diverged) -> None:
        """Cut our WAL to where it agrees with the leader's, while the stages hold nothing."""
        stages = self.stages
        if self.ring is not None:
            self.close()
            await stages.leave()
        end = wal.last_stored(stages.data)[0]
        last, keep = self.epochs.epoch_at(end), min(diverged.end, self.epochs.end_of(diverged.epoch, end))
        if keep < stages.shown():
            raise CorruptError(
                f"KMQ_DATA={stages.data!r}: has shown seq {stages.shown()}, but its leader agrees up to {keep} only:"
                " one of the two is damaged; compare them (kmq cluster verify), then reset this one"
            )
        count, path = cut_after(stages.data, keep, last)
        self.stages.cut_records += count
        self.epochs.cut(keep)
        self.log.warn("records_cut", first_seq=keep + 1, last_seq=end, kept_in=path, reason="they were not committed")

    async def _start(self) -> None:
        """Start durability and router after the end that the leader agrees with."""
        if self.ring is not None:
            return
        stages = self.stages
        seq, recv_ts = agreed_end(stages.data, ask_queues=True)
        self.ring = RingWriter(
            stages.settings.instance, "framed", stages.ring, stages.who, lambda: (seq + 1, recv_ts), self.log
        )
        self.received = self.confirmed = seq
        self.hw = stages.shown()
        stages.page.enter(FOLLOWING, self.epoch, int(self.register.version.mark, 16), self.hw)
        while self.ring.synced_seq is None:
            await asyncio.sleep(_LOOK_S)

    # --- data --------------------------------------------------------------------------------------------------------

    def _receive(self, data: wire.Data) -> None:
        if data.epoch != self.epoch or data.first != self.received + 1:
            raise wire.WireError(f"data of epoch {data.epoch} from seq {data.first}; expected {self.received + 1}")
        for framed in self._blocks(data):
            self._backlog.append(framed)
            self._backlog_bytes += len(framed.lines)
        self.received = data.last
        self._fill()
        self._raise_hw(data.hw)

    def _blocks(self, data: wire.Data) -> Iterator[Framed]:
        """Cut lines into blocks. KMQ's own records get a block each, with its key, because routing depends on that."""
        assert self.ring is not None
        limits, first, key, whole = self.ring.limits, data.first, data.key, bytes(data.lines)
        # Searching all lines for the framer's own records would cost as much as all other work here.
        may_be_own = not key or topic_changes.are_own(whole)
        for part, own in topic_changes.parts(whole) if may_be_own else ((whole, b""),):
            if own:
                key = len(own)
                self.epochs.absorb(part)
            while part:
                lines = part
                if len(part) > limits.nbytes:
                    lines = part[: part.rfind(b"\n", 0, limits.nbytes) + 1]
                # The lines were counted when they arrived (wire.py).
                count = lines.count(b"\n") if len(lines) < len(whole) else data.last - data.first + 1
                if count > limits.count:
                    count = limits.count
                    lines = b"\n".join(part.split(b"\n", count)[:count]) + b"\n"
                last_ts = record.stamp(wal.last_line(lines))[1]
                yield Framed(lines, Stamp(first, count, key, last_ts))
                first += count
                part = part[len(lines) :]
            key = data.key

    def _fill(self) -> None:
        """Append to the ring as much as fits."""
        ring = self.ring
        if self._is_filling or ring is None:
            return
        while self._backlog:
            framed = self._backlog[0]
            if not ring.has_room(len(framed.lines), framed.stamp.count):
                self._is_filling = True
                asyncio.get_running_loop().call_later(_WAIT_S, self._fill_again)
                return
            ring.append(framed)
            self._backlog.popleft()
            self._backlog_bytes -= len(framed.lines)

    def _fill_again(self) -> None:
        self._is_filling = False
        self._fill()

    def _raise_hw(self, seq: int) -> None:
        self.hw = max(self.hw, min(seq, self.received))
        if self.ring is not None and self.stages.page.raise_hw(self.hw):
            self.ring.wake_reader()

    async def _take_snapshot(self) -> None:
        """Load the leader's producers.ckpt once our log has all records that it covers."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.seq > min(self.hw, self.confirmed):
            return
        self._snapshot = None
        try:
            await asyncio.to_thread(replace_file, dedupe_file.path(self.stages.data), bytes(snapshot.content))
        except OSError as err:
            if err.errno not in FULL:
                raise
            self._snapshot = snapshot  # the old file stays, and retention keeps the records that it does not cover

    def _on_sync(self) -> None:
        try:
            os.read(self.stages.synced, 1 << 16)
        except BlockingIOError:
            return
        self._have()

    def _have(self, is_due: bool = False) -> None:
        """Confirm what is on our disk."""
        if self.ring is None or self._link is None or not self._is_agreed or self.is_over:
            return
        synced = self.ring.synced_seq
        if synced is None or (synced <= self.confirmed and not is_due):
            return
        self.confirmed, self._last_send = synced, time.monotonic()
        room = max(0, self.stages.settings.ring_bytes - self._backlog_bytes)
        self._link.send(wire.Have(self.register.version.number, synced + 1, room))
