"""Producing for typed doors (HTTP, gRPC): stores messages, and returns each one's partition and offset, or its refusal.

    await producing.produce("orders", [NewMessage(b"a", b"v")])    → [Stored(seq 501, partition 0, offset 17)]

Who sends   Neither id nor producer: at least once. `id` alone: any text, in a window of the topic's own. `producer`
            with `id`: decimal and rising. Each is stored exactly once, and a later line client of this name fences us.
Invariant   A message has a place only when it is durable and in its partition. A message that is durable but not there
            within ROUTED_S is refused as `stored_not_routed`, with its seq. Sending the same id again stores it once.
Connections One for each producer and for each topic's window, at most _MOST. The one that is idle longest makes room.
Memory      Messages until they are answered, bounded by the doors; and the results.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import NamedTuple

from kmq.client.producer_aio import AsyncProducer
from kmq.client.producer_core import Outgoing
from kmq.config.settings import Settings
from kmq.errors import KmqError
from kmq.gateway.core.broker import RequestRefused, refusal_of
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.finding import PlaceFinder, Places, StoredPlace
from kmq.gateway.core.ingress import own_address
from kmq.log.damage import DamageError
from kmq.logfmt import Logger
from kmq.message import record
from kmq.message.ids import MAX_NAME
from kmq.message.message import Message
from kmq.message.text import Headers, make_routing_key
from kmq.sending.delivery import Delivery
from kmq.sending.failures import Fenced, NotAnswered

ANSWER_S = 5.0  # longest wait for ingress' replies
ROUTED_S = 5.0  # longest wait for the router after that
_MOST = 128  # connections to ingress
_IDLE_S = 60.0  # after which a connection is closed when another is opened
_REPLACE_S = 1.0  # shortest time before a producer that ingress refused for good is replaced


class NewMessage(NamedTuple):
    """A message to be stored. `partition`: None lets the key decide. `timestamp`: in seconds; None: now."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    id: str | None = None
    timestamp: float | None = None


class Stored(NamedTuple):
    """A stored message. `seq` is 0 and the place is None if only the id of an old message is known."""

    seq: int
    partition: int | None
    offset: int | None
    timestamp_ms: int
    is_duplicate: bool


Outcome = Stored | RequestRefused


class _Sender:
    """A connection to ingress and how many requests use it."""

    def __init__(self, producer: AsyncProducer) -> None:
        self.producer, self.users, self.since = producer, 0, time.monotonic()

    @property
    def is_idle(self) -> bool:
        return not self.users and not self.producer.unanswered

    @property
    def is_spent(self) -> bool:
        """Return True if ingress has refused it for good, and it may be replaced now."""
        failed = self.producer.failed
        return failed is not None and (isinstance(failed, Fenced) or time.monotonic() - self.since > _REPLACE_S)


class Producing:
    """All doors' producers. `stop` refuses later messages; `close` ends the connections."""

    def __init__(self, settings: Settings, watermark: Watermark, log: Logger) -> None:
        self._watermark, self._log = watermark, log
        self._finder = PlaceFinder(settings.data)
        self._max_line = settings.max_line
        self._senders: OrderedDict[tuple[str, str], _Sender] = OrderedDict()  # least recently used first
        self._background: set[asyncio.Task[None]] = set()  # that no caller awaits

    async def close(self) -> None:
        await asyncio.gather(*self._background)
        senders = [sender.producer for sender in self._senders.values()]
        self._senders.clear()
        await asyncio.gather(*map(_end, senders))
        self._finder.close()

    # --- producing ---------------------------------------------------------------------------------------------------

    async def produce(self, topic: str, messages: Sequence[NewMessage], producer: str = "") -> list[Outcome]:
        """Store messages of one topic. Return the outcome of each, in order. Raises RequestRefused for all."""
        outgoing = self._format(topic, messages)
        delivery = await self._send(topic, outgoing, producer)
        seqs = delivery.seqs
        refused = _refusals(delivery)
        repeated = {place for place, _ in delivery.duplicates}
        wanted = [(outgoing[n][0], seq) for n, seq in enumerate(seqs) if seq and n not in refused]
        found = await self.places(topic, wanted)
        outcomes: list[Outcome] = []
        for n, seq in enumerate(seqs):
            if n in refused:
                outcomes.append(refused[n])
            elif (place := found.get(seq)) is not None:
                stamp = _timestamp_ms(topic, place) if n in repeated else round(outgoing[n][4] * 1000)
                outcomes.append(Stored(seq, place.partition, place.offset, stamp, n in repeated))
            elif n in repeated and seq <= self._watermark.routed:  # stored long ago, and removed since
                outcomes.append(Stored(seq, None, None, round(outgoing[n][4] * 1000), True))
            else:
                outcomes.append(RequestRefused("stored_not_routed", self._where(seq), seq=seq))
        return outcomes

    def send(self, topic: str, messages: Sequence[NewMessage], producer: str, over: Callable[[], None]) -> None:
        """Send messages of a request that does not wait. `over` is called after the broker's reply, or its deadline."""

        async def work() -> None:
            try:
                await self._send(topic, self._format(topic, messages), producer)
            except RequestRefused:
                pass  # no caller awaits it
            finally:
                over()

        self._in_background(work())

    async def write_dead_letters(self, topic: str, values: Sequence[bytes]) -> None:
        """Store the beginnings of values that are too long for a message as dead letters. Raises RequestRefused."""
        letters = [record.long_letter(topic, value, len(value), self._max_line) + b"\n" for value in values]
        delivery = await self._through(("letters", ""), lambda sender: sender.send_lines(letters))
        for refused in _refusals(delivery).values():
            raise refused

    def _format(self, topic: str, messages: Sequence[NewMessage]) -> list[Outgoing]:
        now = time.time()
        try:
            plain = make_routing_key(topic)
            return [
                (
                    plain if key is None and partition is None else make_routing_key(topic, key, partition),
                    value,
                    id,
                    headers or None,
                    now if timestamp is None else timestamp,
                )
                for key, value, headers, partition, id, timestamp in messages
            ]
        except ValueError as err:
            raise RequestRefused("bad_topic", str(err)) from None

    async def _send(self, topic: str, outgoing: Sequence[Outgoing], producer: str) -> Delivery:
        has_ids = any(message[2] is not None for message in outgoing)
        kind = ("producer", producer) if producer else ("window", topic) if has_ids else ("", "")
        return await self._through(kind, lambda sender: sender.send_each(outgoing))

    async def _through(self, kind: tuple[str, str], send: Callable[[AsyncProducer], Awaitable[Delivery]]) -> Delivery:
        sender = self._sender(*kind)
        sender.users += 1
        try:
            return await send(sender.producer)
        except KmqError as err:
            raise refusal_of(err) from err
        finally:
            sender.users -= 1

    async def places(self, topic: str, wanted: Sequence[tuple[bytes, int]]) -> Places:
        """Return the places of these records, once the router has passed all of them, or after ROUTED_S."""
        if not wanted:
            return {}
        last = max(seq for _, seq in wanted)
        self._watermark.expect(last)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUTED_S):
                await self._watermark.passed(last)
        routed = self._watermark.routed
        try:
            return await self._finder.find(topic, [each for each in wanted if each[1] <= routed])
        except DamageError as err:
            raise RequestRefused("damaged", f"the messages are stored, but {err}") from err

    async def place_of(self, topic: str, routing_key: bytes, seq: int) -> tuple[int, int] | None:
        """Return partition and offset of a stored message; None: it was removed. Raises RequestRefused."""
        place = (await self.places(topic, [(routing_key, seq)])).get(seq) if seq else None
        if place is None and seq > self._watermark.routed:
            raise RequestRefused("stored_not_routed", self._where(seq), seq=seq)
        return (place.partition, place.offset) if place else None

    def _where(self, seq: int) -> str:
        routed = self._watermark.routed
        if routed < seq:
            return f"seq {seq} is on disk, but the router is at seq {routed}: the router is down, or behind"
        return f"seq {seq} is on disk, but not in its partition: see dropped.log, or kmq verify"

    # --- connections -------------------------------------------------------------------------------------------------

    def _sender(self, kind: str, name: str) -> _Sender:
        """Return the connection of a producer or of a topic's window; open it if there is none."""
        key = kind, name
        sender = self._senders.pop(key, None)
        if sender is not None and sender.is_spent:
            self._end(sender)
            sender = None
        if sender is None:
            self._make_room()
            sender = _Sender(self._open(kind, name))
        self._senders[key] = sender
        sender.since = time.monotonic() if sender.producer.failed is None else sender.since
        return sender

    def _open(self, kind: str, name: str) -> AsyncProducer:
        def stalled(text: str) -> None:
            self._log.warn("produce_stalled", waiting=text)

        return AsyncProducer.local(
            own_address,
            producer=name if kind == "producer" else "",
            first_id=1 if kind == "producer" else None,
            window=window_of(name) if kind == "window" else "",
            dedupe=kind != "letters",  # these lines have no ids
            retry=frozenset(),  # report a refusal at once: only the client knows how long to retry
            delivery_timeout_s=ANSWER_S,
            timeout_s=2 * ANSWER_S,
            on_stall=stalled,
        )

    def _make_room(self) -> None:
        """End connections that are idle too long, and one more if there are too many. Raises RequestRefused."""
        idle = [key for key, sender in self._senders.items() if sender.is_idle]
        old = [key for key in idle if time.monotonic() - self._senders[key].since > _IDLE_S]
        if len(self._senders) - len(old) >= _MOST:
            old = old or idle[:1]
        for key in old:
            self._end(self._senders.pop(key))
        if len(self._senders) >= _MOST:
            raise RequestRefused("too_many", f"{_MOST} producers and topics with ids are being served already")

    def _end(self, sender: _Sender) -> None:
        self._in_background(_end(sender.producer))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _end(producer: AsyncProducer) -> None:
    with contextlib.suppress(KmqError):
        await producer.close(ANSWER_S)


def window_of(topic: str) -> str:
    """Return the name of the window in which ids of this topic are unique: `http:<topic>`, cut if it is long."""
    name = f"http:{topic}"
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 33]}:{hashlib.sha256(topic.encode()).hexdigest()[:32]}"


def _refusals(delivery: Delivery) -> dict[int, RequestRefused]:
    """Return the refusals of messages without a seq, by their index in the list."""
    refused = {place: refusal_of(error) for place, error in delivery.refused.items()}
    if delivery.answered < delivery.count:
        error = delivery.error
        if error is None or error in delivery.refused.values():
            error = NotAnswered("the broker ended the connection before it had replied to this message")
        refused |= {place: refusal_of(error) for place in range(delivery.answered, delivery.count)}
    return refused


def _timestamp_ms(topic: str, place: StoredPlace) -> int:
    return Message(topic, place.partition, place.offset, place.line).timestamp_ms
