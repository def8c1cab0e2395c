"""What a consumer knows of the partitions it reads: where it is in each, and the records that wait for the application.

Invariant   A position only rises past a record that was given to the application, unless the application seeks.
Memory      `Buffer.has_room` is False while a whole batch waits, so at most two batches are kept, and their messages.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from itertools import islice
from typing import NamedTuple

from kmq.message.message import Message, RedeliveredMessage, each_message
from kmq.wire.requests import Position, TopicPartition


class Owned:
    """A partition that this consumer reads. `position`: the next offset for the application."""

    __slots__ = (
        "again",
        "committed",
        "is_damaged",
        "is_placed",
        "is_starting",
        "moving",
        "paused",
        "place",
        "position",
        "put_by",
        "revoked",
        "stale",
        "start",
    )

    def __init__(self, place: TopicPartition, position: int) -> None:
        self.place, self.position = place, position
        self.start: Position | None = None  # where to begin, if damage hides what offset that is
        self.committed = position  # the group's offset when it was assigned, or this member's last commit since
        self.moving = 0  # answers to come that say where the broker goes on reading
        self.stale = False  # the broker goes on elsewhere than at `position`
        self.is_placed = True  # `position` is known; without a commit the option `start` may have to find it
        self.is_starting = False  # the option `start` is being found, and committed
        self.paused = self.revoked = False
        self.is_damaged = False  # at `position`, so nobody asks for it until resume, a seek, or the next connection
        # Messages that came again: those that the application was given and has not committed, and those that wait
        # because the partition is paused.
        self.again: set[int] = set()
        self.put_by: list[Chunk] = []

    @property
    def next(self) -> Position:
        """Return where the broker is to go on: at `start` as long as nothing has come."""
        is_at_start = self.start is not None and self.position == self.committed
        return self.start if is_at_start and self.start else Position("offset", self.position)

    @property
    def is_settled(self) -> bool:
        """Return True if the next batch of this partition begins at `position`, or behind what waits here."""
        return not self.moving and not self.stale and self.is_placed

    @property
    def is_known(self) -> bool:
        """Return True unless `position` depends on an answer to come."""
        return not self.moving and self.is_placed

    def is_at(self, offsets: Mapping[TopicPartition, int], asked: Container[tuple[TopicPartition, int]]) -> bool:
        """Return True unless the group's offset is another one than this member has committed, or `asked` to commit."""
        at = offsets.get(self.place, self.committed)
        return at == self.committed or (self.place, at) in asked

    @property
    def is_wanted(self) -> bool:
        return self.is_settled and not self.paused and not self.revoked and not self.is_damaged


class Chunk:
    """A batch on its way to the application. `unread` yields each message once, whoever asks; dropped, none at all.

    `deliveries`: it is one message that comes again, for the so many-th time; 0: they are new, and move the position.
    """

    __slots__ = (
        "_body",
        "_lines",
        "_offset",
        "_unread",
        "deliveries",
        "end",
        "is_dropped",
        "nbytes",
        "owned",
    )

    def __init__(self, owned: Owned, offset: int, lines: int, body: bytes, deliveries: int = 0) -> None:
        self.owned, self.end, self.nbytes = owned, offset + lines, len(body)
        self._offset, self._body = offset, body
        self.deliveries = deliveries
        self._lines: list[bytes] = []
        self._unread: Iterator[Message] | None = None
        self.is_dropped = False

    @property
    def unread(self) -> Iterator[Message]:
        if self._unread is None:
            self._lines, self._body = self._body.split(b"\n")[:-1], b""
            place = self.owned.place
            if self.deliveries:
                line = self._lines[0]
                deliveries = max(2, self.deliveries)  # it was on its way before, if nothing else
                again = RedeliveredMessage(place.topic, place.partition, self._offset, line, deliveries)
                self._unread = iter([again])
                self.owned.again.add(self._offset)
            else:
                self._unread = each_message(place.topic, place.partition, self._offset, self._lines)
        return self._unread

    def take(self, count: int) -> list[Message]:
        """Return up to `count` messages, and move the position behind them."""
        taken = list(islice(self.unread, count))
        if not self.is_dropped and not self.deliveries:
            self.owned.position = taken[-1].offset + 1 if len(taken) == count else self.end
        return taken

    def drop(self) -> None:
        """Give out nothing more: a loop over `unread` ends."""
        self.is_dropped, self._body = True, b""
        self._lines.clear()


def _is_new_of(owned: Owned, chunk: Chunk) -> bool:
    """Return True for new messages of this partition, which a seek brings again. What was given back would not come."""
    return chunk.owned is owned and not chunk.deliveries


class Buffer:
    """The chunks that wait for the application, in the order of their arrival."""

    def __init__(self, most_bytes: int) -> None:
        self.chunks: deque[Chunk] = deque()
        self._bytes, self._most = 0, most_bytes

    @property
    def has_room(self) -> bool:
        return self._bytes <= self._most

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self._bytes += chunk.nbytes

    def finish(self, chunk: Chunk) -> None:
        """Forget the first chunk once all of it was given out."""
        if self.chunks and self.chunks[0] is chunk:
            self.chunks.popleft()
            self._bytes -= chunk.nbytes
            if not chunk.deliveries:
                chunk.owned.position = chunk.end

    def drop(self, which: Callable[[Chunk], bool] = lambda _: True) -> None:
        """Drop some chunks."""
        for chunk in self.remove(which):
            chunk.owned.stale |= not chunk.deliveries
            chunk.drop()

    def remove(self, which: Callable[[Chunk], bool]) -> list[Chunk]:
        """Take some chunks out, whole."""
        gone = [chunk for chunk in self.chunks if which(chunk)]
        self.chunks = deque(chunk for chunk in self.chunks if not which(chunk))
        self._bytes -= sum(chunk.nbytes for chunk in gone)
        return gone

    def collect(self, count: int) -> list[Message]:
        """Return up to `count` messages, and move the positions behind them."""
        taken: list[Message] = []
        while self.chunks and len(taken) < count:
            chunk = self.chunks[0]
            taken += chunk.take(count - len(taken))
            if len(taken) < count:
                self.finish(chunk)
        return taken


class Kind(Enum):
    """What has happened to partitions."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"  # to be given up; they are this consumer's until `Holdings.surrender`
    LOST = "lost"  # they are another's already, or may be


class Event(NamedTuple):
    """Something for the application's thread. `connection`: the number of the connection that it belongs to."""

    kind: Kind
    places: tuple[TopicPartition, ...]
    connection: int = 0


class Holdings:
    """The partitions that are read, their records that wait, and what the application is still to be told of them."""

    def __init__(self, most_bytes: int) -> None:
        self.owned: dict[TopicPartition, Owned] = {}
        self.buffer = Buffer(most_bytes)
        self.events: deque[Event] = deque()

    def grant(self, offsets: dict[TopicPartition, int]) -> None:
        """Read these partitions too."""
        for place, offset in offsets.items():
            self.owned[place] = Owned(place, offset)
        if offsets:
            self.events.append(Event(Kind.ASSIGNED, tuple(offsets)))

    def lose(self, places: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions at once: they are no longer this consumer's."""
        gone = tuple(places)
        self._forget(gone)
        if gone:
            self.events.append(Event(Kind.LOST, gone))

    def have_left(self, places: Iterable[TopicPartition]) -> bool:
        """Return True if the application has not heard yet that one of these was lost, or was revoked and came back."""
        wanted, revoked = set(places), set[TopicPartition]()
        for event in self.events:
            found = wanted.intersection(event.places)
            if found and (event.kind is Kind.LOST or (event.kind is Kind.ASSIGNED and found & revoked)):
                return True
            if event.kind is Kind.REVOKED:
                revoked |= found
        return False

    def revoke(self, places: Iterable[TopicPartition], connection: int) -> None:
        """Give out no more records of these partitions, and tell the application to give them up."""
        mine = tuple(place for place in places if place in self.owned)
        for place in mine:
            self.owned[place].revoked = True
        self.buffer.drop(lambda chunk: chunk.owned.revoked)
        self.events.append(Event(Kind.REVOKED, mine, connection))

    def surrender(self, places: Iterable[TopicPartition]) -> None:
        """The application has given revoked partitions up."""
        self._forget(tuple(place for place in places if place in self.owned and self.owned[place].revoked))

    def _forget(self, places: tuple[TopicPartition, ...]) -> None:
        for place in places:
            self.owned.pop(place).revoked = True
        self.buffer.drop(lambda chunk: chunk.owned.revoked)

    def deliver(self, place: TopicPartition, offset: int, lines: int, body: bytes) -> None:
        """Keep a batch for the application, unless it is not wanted any more."""
        owned = self.owned.get(place)
        if owned is not None and owned.is_wanted:
            self.buffer.add(Chunk(owned, offset, lines, body))
        elif owned is not None and not owned.moving and not owned.is_starting:
            owned.stale = True

    def deliver_again(self, place: TopicPartition, offset: int, deliveries: int, body: bytes) -> None:
        """Keep a message that comes again. Where the partition is read next has nothing to do with it."""
        owned = self.owned.get(place)
        if owned is None or owned.revoked:
            return  # its next owner is given it
        chunk = Chunk(owned, offset, 1, body, deliveries)
        if owned.paused:
            owned.put_by.append(chunk)
        else:
            self.buffer.add(chunk)

    def pause(self, places: Iterable[TopicPartition]) -> None:
        """Give out no records of these partitions until `resume`. Raises KeyError for one that is not owned."""
        for place in places:
            self.owned[place].paused = True
        for chunk in self.buffer.remove(lambda chunk: chunk.owned.paused and bool(chunk.deliveries)):
            chunk.owned.put_by.append(chunk)
        self.buffer.drop(lambda chunk: chunk.owned.paused)

    def resume(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            owned = self.owned[place]
            if owned.is_damaged:  # a seek to the position lets the broker look again
                self.buffer.drop(partial(_is_new_of, owned))
                owned.stale = True
            owned.paused = owned.is_damaged = False
            for chunk in owned.put_by:
                self.buffer.add(chunk)
            owned.put_by.clear()

    def disconnected(self) -> None:
        """Drop what waits: the next connection reads from the positions on."""
        self.buffer.drop()
        for owned in self.owned.values():
            owned.moving, owned.stale, owned.is_starting, owned.is_damaged = 0, True, False, False
            owned.put_by.clear()
            owned.again.clear()  # they come once more


__all__ = ["Buffer", "Chunk", "Event", "Holdings", "Kind", "Owned"]
