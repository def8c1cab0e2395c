"""What kmq.Consumer and kmq.AsyncConsumer share: every call, the search for partitions, and attempts to connect.

Waiting     A call that waits is a coroutine here; its `Mover` does the waiting. The Mover of kmq.AsyncConsumer suspends
            the coroutine. The Mover of kmq.Consumer blocks inside it, so `at_once` runs such a coroutine to its end
            without a loop, in the calling thread.
Invariant   Auto-commit never commits the message that is being handled, or one whose handler raised: only messages
            after which the application has called again.
Memory      At most _MOST_CALLBACKS commits wait for their callbacks.
"""

import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from kmq.client.connection import CONNECT_S, Address, ServerAddress, open_socket
from kmq.client.consumer_options import Start, logger, to_place, to_position, to_topic
from kmq.client.consumer_protocol import ConsumerCore, Phase
from kmq.client.consumer_state import Chunk, Kind, Owned, PartitionEvent, Pending
from kmq.client.lines import no_connection
from kmq.config.values import KIB
from kmq.errors import ConfigError, KmqError
from kmq.message.message import Message
from kmq.message.text import whole_number, wrong_type
from kmq.sending.failures import Fenced, NotAnswered, Refused
from kmq.wire.refusals import find
from kmq.wire.replies import Failed, Nacked, PartitionOffsets, Started, reply
from kmq.wire.requests import (
    LATEST,
    MAX_DELAY_MS,
    MAX_REASON,
    BadLine,
    Consume,
    Nack,
    TopicPartition,
)

SLICE_S = 1.0  # longest wait before a consumer checks its timers
LEAVE_S = 1.0  # longest wait until the broker has taken the last requests
_LAST_COMMIT_S = 10.0  # longest wait until the broker has read the last requests
_FOR_EVER_S = 3600.0  # one wait of an iteration, which repeats it
_MOST_CALLBACKS = 10_000

Offsets = Mapping[tuple[str, int], int]
OnCommit = Callable[[dict[TopicPartition, int], KmqError | None], object]
OnPlaces = Callable[[list[TopicPartition]], object]


Result = TypeVar("Result")


def at_once(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never suspends, because its Mover blocks instead."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration):  # raised by a callback: a coroutine may not raise it
            raise error.__cause__ from None
        raise
    raise AssertionError("a blocking consumer has suspended")


class ConsumerCalls:
    """The calls of a consumer. A partition is given as (topic, number)."""

    def __init__(
        self, driver: "Mover", on_assign: OnPlaces | None, on_revoke: OnPlaces | None, on_lost: OnPlaces | None
    ) -> None:
        self.options = driver.core.options
        self._core, self._driver, self._lock = driver.core, driver, driver.lock
        self._callbacks = {Kind.ASSIGNED: on_assign, Kind.REVOKED: on_revoke, Kind.LOST: on_lost or on_revoke}
        self._given: Message | list[Message] | None = None  # what the application is working on
        self._committed: deque[tuple[OnCommit, Pending]] = deque()  # commits whose callbacks are to be called
        self._commit_at = time.monotonic() + self.options.auto_commit_s  # time of the next auto-commit

    @property
    def member(self) -> str:
        """Return the name by which the group knows this consumer."""
        return self._core.member

    @property
    def failed(self) -> KmqError | None:
        """Return the error that ended this consumer; None while it works."""
        return self._core.failed

    def describe(self) -> str:
        """Return a sentence on what the consumer waits for."""
        return self._core.describe(time.monotonic())

    @property
    def closed(self) -> bool:
        return self._driver.closed

    @property
    def connected(self) -> bool:
        return self._core.phase is not Phase.AWAY

    def subscribe(self, *topics: str) -> None:
        """Read these topics instead of the previous ones: with a group its share of them, else all partitions."""
        if not topics:
            raise ConfigError("subscribe: give the names of topics, each an argument of its own")
        topics = tuple(dict.fromkeys(to_topic(topic, "subscribe") for topic in topics))
        with self._lock:
            self._core.choose(topics if self.options.group_id else ())
            self._driver.discovers = () if self.options.group_id else topics
            self._driver.drop("subscribed to other topics")

    def assign(self, *places: tuple[str, int], start: Start | None = None) -> None:
        """Read these partitions, (topic, number), without the group's assignment. `start`: the default is the
        option.
        """
        if not places:
            raise ConfigError("assign: give at least one partition, as (topic, number)")
        position = self._core.start if start is None else to_position(start)
        wanted = [(to_place(place, "assign"), position) for place in places]
        with self._lock:
            self._core.choose((), wanted)
            self._driver.discovers = ()
            self._driver.drop("other partitions were assigned")

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that this consumer reads now."""
        with self._lock:
            return [place for place, owned in self._core.holdings.owned.items() if not owned.revoked]

    def seek(self, place: tuple[str, int], position: Start) -> None:
        """Continue at an offset, `earliest`, `latest`, or the first message with that timestamp or a later one."""
        owned = self._find(place)
        with self._lock:
            self._core.seek(owned.place, to_position(position), time.monotonic())
            self._driver.write()

    def seek_to_beginning(self, *places: tuple[str, int]) -> None:
        """Continue at the first message of these partitions; without arguments, of all partitions."""
        for place in places or self.assignment():
            self.seek(place, "earliest")

    def seek_to_end(self, *places: tuple[str, int]) -> None:
        """Continue after the last message of these partitions; without arguments, of all partitions."""
        for place in places or self.assignment():
            self.seek(place, "latest")

    def pause(self, *places: tuple[str, int]) -> None:
        """Hand out no messages of these partitions until `resume`; the consumer keeps the partitions."""
        owned = [self._find(place).place for place in places]
        with self._lock:
            self._core.holdings.pause(owned)

    def resume(self, *places: tuple[str, int]) -> None:
        """Hand out messages of these partitions again."""
        owned = [self._find(place).place for place in places]
        with self._lock:
            self._core.holdings.resume(owned)
            self._core.is_dry = False

    def paused(self) -> list[TopicPartition]:
        """Return the partitions that are paused, by `pause` or because the broker's files are damaged there."""
        with self._lock:
            return [place for place, owned in self._core.holdings.owned.items() if owned.paused or owned.is_damaged]

    def overtaken(self) -> dict[TopicPartition, int]:
        """Return how many messages were deleted before the group had read them, as far as the broker has reported
        it.
        """
        with self._lock:
            return dict(self._core.holdings.overtaken)

    def _find(self, place: tuple[str, int]) -> Owned:
        wanted = to_place(place, "partition")
        with self._lock:
            owned = self._core.holdings.owned.get(wanted)
        if owned is None:
            raise KmqError(f"{wanted}: not assigned to this consumer; see assignment()")
        return owned

    # --- commits -----------------------------------------------------------------------------------------------------

    def commit_async(self, offsets: Message | Offsets | None = None, callback: OnCommit | None = None) -> None:
        """Commit without waiting. A later poll calls `callback` with the offsets, and the error or None."""
        if len(self._committed) >= _MOST_CALLBACKS:
            raise KmqError(f"commit_async: {_MOST_CALLBACKS:,} callbacks wait already; call poll, which runs them")
        pending = self._begin_commit(offsets)
        if callback is not None:
            self._committed.append((callback, pending))

    def _begin_commit(self, offsets: Message | Offsets | None) -> Pending:
        if isinstance(offsets, Message) and offsets.deliveries > 1:
            return self._ask_commit((), [(TopicPartition(offsets.topic, offsets.partition), offsets.offset)])
        pairs = tuple(self._offsets(offsets))
        with self._lock:
            if offsets is not None and self._core.holdings.have_left(place for place, _ in pairs):
                pending = Pending(b"", time.monotonic(), pairs)
                pending.finish(
                    error=Fenced("fenced another member may have read on meanwhile; poll says what is assigned")
                )
                return pending
        return self._ask_commit(pairs, self._again(()) if offsets is None else ())

    def _ask_commit(
        self, offsets: Iterable[tuple[TopicPartition, int]], again: Iterable[tuple[TopicPartition, int]]
    ) -> Pending:
        """Request a commit of these next offsets, and of these redelivered messages."""
        with self._lock:
            self._must_have_group("commit")
            pending = self._core.commit(offsets, time.monotonic(), again)
            self._driver.write()
        return pending

    def _commit_handled(self, places: Iterable[TopicPartition]) -> Pending:
        """Request a commit of what was handled of these partitions, before other members read them."""
        working = [self._given] if isinstance(self._given, Message) else self._given or []
        offsets, wanted = dict(self._offsets(None)), set(places)
        for message in reversed(working):
            if message.deliveries == 1:
                offsets[TopicPartition(message.topic, message.partition)] = message.offset
        handled = [(place, offsets[place]) for place in wanted if place in offsets]
        return self._ask_commit(handled, [each for each in self._again(working) if each[0] in wanted])

    def _again(self, working: Collection[Message]) -> list[tuple[TopicPartition, int]]:
        """Return the redelivered messages that were handed out, without those that the application is working on."""
        busy = {(message.topic, message.partition, message.offset) for message in working}
        return [
            (place, offset)
            for place, owned in self._core.holdings.owned.items()
            for offset in sorted(owned.again)
            if (*place, offset) not in busy
        ]

    def _must_have_group(self, what: str) -> None:
        if not self.options.group_id:
            raise KmqError(f"{what}: this consumer has no group that could remember it; give group_id=")
        if self._core.failed is not None:
            raise self._core.failed

    def _offsets(self, offsets: Message | Offsets | None) -> Iterable[tuple[TopicPartition, int]]:
        if isinstance(offsets, Message):
            return [(TopicPartition(offsets.topic, offsets.partition), offsets.offset + 1)]
        if offsets is not None:
            if not isinstance(offsets, Mapping):
                raise wrong_type("offsets", offsets, "a message, or a mapping of (topic, number) to next offsets")
            pairs = offsets.items()
            return [(to_place(place, "commit"), whole_number(offset, "offset")) for place, offset in pairs]
        return [(place, owned.position) for place, owned in self._core.holdings.owned.items() if owned.is_known]

    # --- records -----------------------------------------------------------------------------------------------------

    async def _poll(self, max_records: int | None = None, timeout: float = 1.0) -> list[Message]:
        """Return up to `max_records` messages as soon as there are any, or none after `timeout` seconds."""
        if isinstance(max_records, float):
            raise TypeError(
                f"max_records={max_records}: must be a whole number; seconds to wait are timeout={max_records}"
            )
        count = self.options.max_poll_records if max_records is None else max_records
        if count < 1:
            raise ValueError(f"max_records={count}: must be at least 1")
        deadline = time.monotonic() + timeout
        while True:
            if self._driver.closed:
                raise KmqError("this consumer is closed")
            await self._came_back()
            with self._lock:
                if taken := self._core.holdings.collect(count):
                    self._given = taken
                    moved = [(owned, owned.position) for owned in self._core.holdings.moved]
                    self._core.hand_out(moved, time.monotonic())
                    self._ask_for_more()
                    return taken
            if not await self._wait_for_records(deadline - time.monotonic()):
                return []

    async def _next_chunk(self) -> Chunk | None:
        """Wait for records without a limit, and return the first chunk of them; None once the consumer is closed."""
        while not self._driver.closed:
            await self._came_back()
            if chunks := self._core.holdings.chunks:
                return chunks[0]
            await self._wait_for_records(_FOR_EVER_S)
        return None

    def _hand_out(self, owned: Owned, offset: int) -> None:
        """Tell the broker that the application gets messages of a partition, up to this next offset."""
        with self._lock:
            self._core.hand_out([(owned, offset)], time.monotonic())
            self._driver.write()

    def _ask_for_more(self) -> None:
        """Request the next batch, so that it arrives while the application works on this one."""
        self._core.fetch(time.monotonic(), 0.0)
        self._driver.write()

    async def _wait_for_records(self, timeout_s: float) -> bool:
        self._must_read()
        return await self._driver.wait(self._has_news, max(timeout_s, 0.0), fetches=True)

    def _must_read(self) -> None:
        if not self._core.has_something_to_read and not self._driver.discovers:
            raise KmqError("nothing to read: name topics, or call subscribe() or assign()")

    def _has_news(self) -> bool:
        """Return True if there are records, events or errors for the application."""
        core = self._core
        return bool(core.holdings.chunks or core.holdings.events or core.errors)

    # --- what happens between records --------------------------------------------------------------------------------

    async def _came_back(self) -> None:
        """The application calls again: run callbacks, and auto-commit if that is due."""
        self._given = None
        core, now = self._core, time.monotonic()
        self._driver.use(now)
        with self._lock:
            self._ask_for_more()
        if self.options.auto_commit and now >= self._commit_at:
            self._commit_at = now + self.options.auto_commit_s
            self.commit_async(callback=_report)
        while self._committed and self._committed[0][1].done:
            callback, pending = self._committed.popleft()
            callback(dict(pending.offsets), pending.error)
        while core.holdings.events:
            await self._handle(core.holdings.events.popleft())
        if core.errors:
            raise core.errors.popleft()

    async def _handle(self, event: PartitionEvent) -> None:
        """Call the application's callback for an event of partitions; then give up those that are revoked."""
        try:
            if event.places:
                await self._notify(event.kind, event.places)
        finally:
            if event.kind is Kind.REVOKED:
                if self.options.auto_commit:
                    await self._commit_last(event.places)
                with self._lock:
                    self._core.revoked(event, time.monotonic())
                    self._driver.write()

    async def _notify(self, kind: Kind, places: Iterable[TopicPartition]) -> None:
        if callback := self._callbacks[kind]:
            await self._driver.finish(callback(list(places)))

    async def _close(self) -> None:
        if self._driver.closed:
            return
        try:
            held = tuple(self._core.holdings.owned)
            if held and self.options.group_id:
                if self.options.auto_commit and self._core.failed is None:
                    await self._commit_last(held)
                await self._notify(Kind.REVOKED, held)
        finally:
            await self._driver.end()

    # --- calls that wait ---------------------------------------------------------------------------------------------
    # Each waits at most `timeout` seconds, by default the option timeout_s, and then raises NotAnswered.

    async def _wait_for(self, is_ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        if not await self._driver.wait(is_ready, self.options.timeout_s if timeout is None else timeout):
            raise NotAnswered(f"timed out waiting for {what}: {self.describe()}")

    async def _answer(self, pending: Pending, timeout: float | None, what: str) -> Any:
        """Wait for the reply to a request and return it. Raises the error if the reply is one."""
        await self._wait_for(lambda: pending.done, timeout, what)
        if pending.error is not None:
            raise pending.error
        return pending.value

    async def _connect(self, timeout: float | None = None) -> list[TopicPartition]:
        """Wait until the broker has said which partitions this consumer reads, and return them."""
        self._must_read()
        await self._wait_for(lambda: self._core.phase is Phase.READING, timeout, "an assignment")
        return self.assignment()

    async def _position(self, place: tuple[str, int], timeout: float | None = None) -> int:
        """Return the offset of the next message of a partition. Waits while the broker looks for it."""
        owned = self._find(place)
        await self._wait_for(lambda: owned.is_known, timeout, f"the position in {owned.place}")
        return owned.position

    async def _ask(self, places: Iterable[tuple[str, int]], timeout: float | None) -> list[PartitionOffsets]:
        """Return the offsets of these partitions, in this order."""
        wanted = [self._find(place).place for place in places]
        if not wanted:
            return []
        with self._lock:
            pending = self._core.offsets(tuple(wanted), time.monotonic())
            self._driver.write()
        rows = {row.place: row for row in await self._answer(pending, timeout, "the offsets")}
        if missing := next((place for place in wanted if place not in rows), None):
            raise Refused(f"damaged {missing}: its offsets cannot be told; ask for it alone to hear why")
        return [rows[place] for place in wanted]

    async def _commit(self, offsets: Message | Offsets | None = None, timeout: float | None = None) -> None:
        """Commit and wait until that is durable: all that was given out, or up to a message, or the next offsets.

        Raises Refused: `fenced` if the partition is no longer this member's, so another one handles its records.
        """
        await self._answer(self._begin_commit(offsets), timeout, "the commit")

    async def _commit_last(self, places: Iterable[TopicPartition]) -> None:
        """Commit what was handled of these partitions, before other members read them."""
        pending = self._commit_handled(places)
        try:
            await self._answer(pending, _LAST_COMMIT_S, "the commit")
        except KmqError as err:
            logger().warning("not committed, so it is delivered again: %s", err)

    async def _nack(
        self, message: Message, delay: float = 0.0, reason: str = "", timeout: float | None = None
    ) -> Nacked:
        """Give a message back, as Consumer.nack does."""
        if not isinstance(message, Message):
            raise wrong_type("message", message, "a message")
        if not isinstance(reason, str):
            raise wrong_type("reason", reason, "str")
        if not isinstance(delay, int | float):
            raise wrong_type("delay", delay, "a number of seconds")
        if not 0 <= delay <= MAX_DELAY_MS / 1000:
            raise ValueError(f"delay={delay}: must be 0 to {MAX_DELAY_MS // 1000} seconds")
        with self._lock:
            self._must_have_group("nack")
            place, text = to_place((message.topic, message.partition), "nack"), reason[:MAX_REASON]
            text = text.encode(errors="replace").decode()  # the text of an error may contain anything
            request = Nack(place, message.offset, round(delay * 1000), text)
            pending = self._core.nack(request, time.monotonic())
            self._driver.write()
        nacked: Nacked = await self._answer(pending, timeout, "the answer to a nack")
        return nacked


def _report(offsets: dict[TopicPartition, int], error: KmqError | None) -> None:
    if error is not None:
        logger().warning("not committed, so it is delivered again unless a later commit succeeds: %s", error)


# --- the partitions of a topic ---------------------------------------------------------------------------------------
# A consumer without a group reads all partitions of its topics, and `latest` means their ends.
#
# `CONSUME <topic> from=latest` is answered by `!ok <topic>/<partition> offset=<end>` for each partition, and no record.
# A damaged partition may be missing or refused. It counts as a partition too: reading it reports the damage.

_DISCOVER_S = 10.0  # between two looks for new partitions
_NOT_YET = frozenset({"unknown_topic", "not_found"})


def discover(
    topics: Iterable[str], host: str, port: int, token: str, tls: ssl.SSLContext | None, server_hostname: str | None
) -> dict[TopicPartition, int | None]:
    """Return partition → end for these topics. The end is None if damage hides it. A missing topic has no partitions.

    Raises OSError, Refused.
    """
    found: dict[TopicPartition, int | None] = {}
    for topic in topics:
        with open_socket(host, port, tls, server_hostname) as sock:
            sock.sendall(Consume(topic, None, LATEST, token=token).encode())
            ends = _read(sock)
        for number in range(max((place.partition + 1 for place in ends), default=0)):
            place = TopicPartition(topic, number)
            found[place] = ends.get(place)
    return found


def _read(sock: socket.socket) -> dict[TopicPartition, int | None]:
    found: dict[TopicPartition, int | None] = {}
    unfinished, deadline = b"", time.monotonic() + CONNECT_S
    while data := sock.recv(64 * KIB):
        *whole, unfinished = (unfinished + data).split(b"\n")
        for line in whole:
            if line.startswith(b"!"):  # other lines are records that arrived while the broker answered
                _note(line, found)
        if time.monotonic() > deadline:
            raise TimeoutError("the broker has not named the partitions in time")
    return found


def _note(line: bytes, found: dict[TopicPartition, int | None]) -> None:
    """Add the partition of a reply. Only its first reply counts: a second one follows if retention deleted records."""
    try:
        answer = reply(line)
    except BadLine as err:
        raise Refused(f"protocol the broker's reply does not fit: {err}") from None
    if isinstance(answer, Failed) and answer.code not in (*_NOT_YET, "damaged"):
        raise Refused(f"{answer.code} {answer.text}")
    if isinstance(answer, Started):
        found.setdefault(answer.place, answer.offset)
    elif isinstance(answer, Failed) and answer.place is not None:
        found.setdefault(answer.place, None)


# --- connections -----------------------------------------------------------------------------------------------------


class Mover(ABC):
    """Moves bytes between a core and its connections, one after the other. Subclasses decide how to wait."""

    def __init__(self, core: ConsumerCore, address: Address, lock: AbstractContextManager[object]) -> None:
        self.core, self.address, self.lock = core, address, lock
        self.closed = False
        self.used_at = time.monotonic()  # when the application last asked for records
        self.discovers: tuple[str, ...] = ()  # without a group: topics of which all partitions are read
        self._discover_at = 0.0
        self._is_resting = False  # no member of the group, because the application has not called for too long

    @abstractmethod
    async def wait(self, is_ready: Callable[[], bool], timeout_s: float, fetches: bool = False) -> bool:
        """Wait until `is_ready`; return False when the time is up. `fetches`: the caller waits for records.

        Raises the error that has ended the consumer.
        """

    @abstractmethod
    async def finish(self, returned: object) -> None:
        """Wait for the result of an application's callback, if that may be a coroutine."""

    @abstractmethod
    async def aside(self, work: Callable[[], Result]) -> Result:
        """Do blocking work without blocking other tasks."""

    @abstractmethod
    async def end(self) -> None:
        """Leave the group and close the connection."""

    @abstractmethod
    async def _open(self, server: ServerAddress, timeout_s: float) -> None:
        """Connect, and write the opening."""

    @abstractmethod
    def use(self, now: float) -> None:
        """Note that the application has called again."""

    @abstractmethod
    def write(self) -> None:
        """Write the requests."""

    @abstractmethod
    def drop(self, reason: str, is_written: bool = False) -> None:
        """Close the connection; another one will be opened. `is_written`: pending output is still sent."""

    async def _attempt(self, timeout_s: float) -> bool:
        """Make one attempt to connect. Returns True if there is a connection."""
        where, reason = "the broker", ""
        try:
            server = self.address()
            where, self.core.has_others = str(server), bool(server.among)
            if self.discovers or self.core.lacks_ends:
                await self._discover(server)
            if self.core.has_something_to_read:
                await self._open(server, timeout_s)
                return True
            reason = f"no partitions of {', '.join(self.discovers) or 'any topic'} yet"
        except Refused as err:
            reason = str(err)
            if not find(err.code).is_retryable:
                self.core.fail(err)
        except (OSError, KmqError) as err:
            reason = str(err) if isinstance(err, KmqError) else no_connection(where, err)
        with self.lock:
            self.core.lost(reason)
        return False

    async def _discover(self, server: ServerAddress) -> bool:
        """Look up partitions and their ends. Return True if some of the partitions are not read yet."""
        options, topics = self.core.options, self.discovers or self.core.topics
        host, port, token = server.host, server.port, options.token or server.token
        found = await self.aside(lambda: discover(topics, host, port, token, options.tls, options.server_hostname))
        self._discover_at = time.monotonic() + _DISCOVER_S
        with self.lock:
            return self.core.discovered(found)

    async def _look_for_partitions(self) -> None:
        with suppress(OSError, KmqError):
            if await self._discover(self.address()):
                with self.lock:
                    self.drop("there are new partitions")

    def keep_alive(self, now: float) -> None:
        """Replace a connection on which the broker does not answer; else beat if that is due, and write."""
        if why := self.core.overdue(now):
            self.drop(why)
        self.core.beat(now)
        self.write()

    def _rest_if_idle(self, now: float) -> bool:
        """Leave the group if the application has not called within max_poll_interval_s: other members may be
        quicker.
        """
        most_s = self.core.options.max_poll_interval_s
        if not self.core.is_managed or now - self.used_at <= most_s:
            return False
        self._is_resting = True
        if self.core.phase is not Phase.AWAY:
            logger().warning("left the group: no poll for %g s", most_s)
            self.core.leave(now)
            self.write()
            self.core.holdings.lose(tuple(self.core.holdings.owned))
            self.drop("left the group: no poll within max_poll_interval_s", is_written=True)
        return True
