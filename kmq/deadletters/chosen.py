"""Which dead letters a command means: those of a topic, narrowed by filters `<field>=<glob>`."""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from kmq.deadletters import letters, redrive
from kmq.errors import ConfigError
from kmq.log import identity, topics
from kmq.message import record
from kmq.message.letters import DLQ, Letter, is_dead_letters, parse_letter
from kmq.message.message import Message

_REASONS = 100  # a letter names a number in its reason, and anybody can write a letter
FIELDS = ("key", "value", "error", "group", "topic", "attempts", "replays")


class Found(NamedTuple):
    """A record of a dead letter topic. `letter` is None if it says nothing about an origin."""

    record: redrive.Record
    message: Message
    letter: Letter | None


class Filter(NamedTuple):
    """A field, or a header, and the glob that its text must match."""

    field: str
    glob: str

    @classmethod
    def parse(cls, text: str) -> "Filter":
        """Return the filter that a user typed. Raises ConfigError."""
        field, equals, glob = text.partition("=")
        if not (field and equals):
            fields = ", ".join(FIELDS)
            raise ConfigError(
                f"--filter {text!r}: must be <field>=<glob>; fields are {fields}, or the name of a header"
            )
        return cls(field, glob)

    def accepts(self, found: Found) -> bool:
        return any(fnmatchcase(text, self.glob) for text in self._texts(found))

    def _texts(self, found: Found) -> list[str]:
        """Return what the record says in this field; a header may come several times."""
        message, letter = found.message, found.letter
        if self.field in ("key", "value"):
            text = message.key if self.field == "key" else message.value
            return [] if text is None else [text.decode(errors="replace")]
        if letter is not None and self.field in FIELDS:
            named = {"error": letter.why, "topic": letter.topic, "replays": str(letter.replays)}
            return [named.get(self.field) or str(getattr(letter, self.field, ""))]
        return [(value or b"").decode(errors="replace") for name, value in message.headers if name == self.field]


def find_topic(data: str, name: str) -> str | None:
    """Return the dead letter topic that a user means by its own or its origin's name; None: there are no letters yet.

    Raises ConfigError if there is no topic of that name either.
    """
    known = topics.names(data)
    if not name.endswith(DLQ) and f"{name}{DLQ}" in known:
        return f"{name}{DLQ}"
    if name in known:
        return name if is_dead_letters(name) or any(each.letter for each in all_of(data, name)) else None
    raise ConfigError(f"topic {name!r} does not exist; kmq dlq ls shows all topics of dead letters")


def all_of(
    data: str, topic: str, filters: Sequence[Filter] = (), tick: Callable[[], None] = lambda: None
) -> Iterator[Found]:
    """Yield the records of a topic that all filters accept, partition by partition, in order.

    `tick` is called for each record, and may raise to end the search.
    """
    marks_from = identity.marks_from(data)
    for each in redrive.Queue(data, topic).records():
        tick()
        message = Message(topic, each.partition, each.offset, each.line, marks_from)
        found = Found(each, message, parse_letter(each.line))
        if all(filter.accepts(found) for filter in filters):
            yield found


class Replay:
    """The letters of a topic that have not gone back yet, each with its new routing key.

    Each iteration reads the topic again. After it `before` counts the letters that went back before, `stayed` has the
    reasons of letters that stay, and how often each, `strangers` counts records that are no letters, and `is_complete`
    says that the limit has left out none.
    """

    def __init__(
        self,
        data: str,
        topic: str,
        filters: Sequence[Filter] = (),
        most: int = 0,
        max_replays: int = letters.MAX_REPLAYS,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`most`: at most so many letters, the oldest of each partition first; 0: all.

        `tick` is called now and then, and may raise to end an iteration.
        """
        self._data, self._topic, self._filters = data, topic, filters
        self._most, self._max_replays, self._tick = most, max_replays, tick
        self.stayed: dict[str, int] = {}
        self.strangers = self.before = 0
        self.is_complete = False

    def __iter__(self) -> Iterator[tuple[redrive.Record, bytes]]:
        self.stayed, self.strangers, self.before, self.is_complete = {}, 0, 0, False
        partitions, _ = topics.load(self._data, self._topic)
        sent_back = letters.SentBack(self._data, self._topic, partitions, self._tick)
        count = 0
        for found in all_of(self._data, self._topic, self._filters, self._tick):
            if found.letter is None:
                self.strangers += 1
                continue
            if reason := found.letter.obstacle(self._max_replays):
                if len(self.stayed) >= _REASONS and reason not in self.stayed:
                    reason = "other reasons"
                self.stayed[reason] = self.stayed.get(reason, 0) + 1
                continue
            if sent_back.has(found.record.partition, record.seq_of(found.record.line)):
                self.before += 1
                continue
            if self._most and count >= self._most:
                return
            new_key = letters.origin_key(found.record.line, self._topic, found.record.has_marks)
            assert new_key is not None
            yield found.record, new_key
            count += 1
        self.is_complete = True
