"""The replies of the consumer port, each with its encoder and its decoder. kmq/wire/requests.py lists them.

Invariant   decode(encode(x)) == x for every reply. A line that is no such reply raises BadLine.
Not covered The stored lines after `!batch` and `!ok`: kmq/message/message.py reads those.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kmq.wire.requests import REQUESTS, BadLine, TopicPartition, offset_of, partition_of

_GENERATION = re.compile(r"\d{1,18}")
_CODE = re.compile(r"[a-z_]{1,64}")


class Started(NamedTuple):
    """The stored lines of a partition follow, from this offset on."""

    place: TopicPartition
    offset: int

    def encode(self) -> bytes:
        return f"!ok {self.place} offset={self.offset}\n".encode()


class Batch(NamedTuple):
    """`lines` stored lines follow, `nbytes` bytes, from `offset` on. place None: there are no records.

    `deliveries`: one redelivered message follows, delivered so often; 0: the messages are new.
    `overtaken`: so many messages before these were deleted before the group had read them.
    """

    place: TopicPartition | None
    offset: int = 0
    lines: int = 0
    nbytes: int = 0
    deliveries: int = 0
    overtaken: int = 0

    def encode(self) -> bytes:
        if self.place is None:
            return b"!batch -\n"
        if self.deliveries:
            return f"!batch again {self.place} {self.offset} 1 {self.nbytes} deliveries={self.deliveries}\n".encode()
        overtaken = f" overtaken={self.overtaken}" if self.overtaken else ""
        return f"!batch {self.place} {self.offset} {self.lines} {self.nbytes}{overtaken}\n".encode()


NO_RECORDS = Batch(None)


class Assigned(NamedTuple):
    """The partitions of this member from now on, each with the offset that is read next."""

    generation: int
    offsets: tuple[tuple[TopicPartition, int], ...]

    def encode(self) -> bytes:
        return " ".join([f"!assign {self.generation}", *(f"{p}@{n}" for p, n in self.offsets)]).encode() + b"\n"


class Revoke(NamedTuple):
    """The member must give these partitions up: commit, then `!revoked`."""

    partitions: tuple[TopicPartition, ...]

    def encode(self) -> bytes:
        return " ".join(["!revoke", *map(str, self.partitions)]).encode() + b"\n"


class Sought(NamedTuple):
    """The answer to `!seek`: the offset that is read next."""

    place: TopicPartition
    offset: int

    def encode(self) -> bytes:
        return f"!seek {self.place}@{self.offset}\n".encode()


class PartitionOffsets(NamedTuple):
    """The first offset, the end offset, the next offset to read, and the committed offset (None: not committed)."""

    place: TopicPartition
    start: int
    end: int
    next: int
    committed: int | None = None


class OffsetsReply(NamedTuple):
    """The answer to `!offsets`."""

    rows: tuple[PartitionOffsets, ...]

    def encode(self) -> bytes:
        words = ["!offsets"]
        for row in self.rows:
            committed = "-" if row.committed is None else row.committed
            words.append(f"{row.place} start={row.start} end={row.end} next={row.next} committed={committed}")
        return " ".join(words).encode() + b"\n"


class Committed(NamedTuple):
    """These next offsets are durable. `is_again`: it is durable that these redelivered messages are handled."""

    offsets: tuple[tuple[TopicPartition, int], ...]
    is_again: bool = False

    def encode(self) -> bytes:
        verb = "!committed again" if self.is_again else "!committed"
        return " ".join([verb, *(f"{place} {offset}" for place, offset in self.offsets)]).encode() + b"\n"


class Nacked(NamedTuple):
    """The answer to `!nack`. `letter`: the place of the message's dead letter; "": the message will be redelivered."""

    place: TopicPartition
    offset: int
    deliveries: int
    letter: str = ""

    def encode(self) -> bytes:
        letter = f" letter={self.letter}" if self.letter else ""
        return f"!nacked {self.place} {self.offset} deliveries={self.deliveries}{letter}\n".encode()


class Failed(NamedTuple):
    """A refusal. `request`: which `!<request>` it answers, or `consume`; "": it is the connection's last line.

    The text of `damaged` begins with the partition: `<topic>/<partition>: …`.
    """

    request: str
    code: str
    text: str

    @property
    def place(self) -> TopicPartition | None:
        """Return the partition that the text begins with."""
        try:
            return partition_of(self.text.partition(": ")[0])
        except BadLine:
            return None

    def encode(self) -> bytes:
        text = " ".join(self.text.split())  # one line, even if the exception's text has several
        return " ".join(filter(None, ["!err", self.request, self.code, text])).encode(errors="replace") + b"\n"


Reply = Started | Batch | Assigned | Revoke | Sought | OffsetsReply | Committed | Nacked | Failed


def reply(line: bytes) -> Reply:
    """Return the reply in a line, given with or without its newline. Raises BadLine."""
    verb, _, rest = line.removesuffix(b"\n").decode("utf-8", "replace").partition(" ")
    decode = _REPLIES.get(verb)
    if decode is None:
        raise BadLine(f"{verb[:80]!r}: unknown reply; expected one of {', '.join(_REPLIES)}")
    try:
        return decode(rest) if verb == "!err" else decode(rest.split())
    except (ValueError, IndexError) as err:
        raise err if isinstance(err, BadLine) else BadLine(f"{verb}: {rest[:80]!r} does not belong there") from None


def _value(word: str, name: str) -> str:
    if not word.startswith(f"{name}="):
        raise BadLine(f"{word[:80]!r}: must be {name}=")
    return word[len(name) + 1 :]


def _started(words: list[str]) -> Started:
    place, offset = words
    return Started(partition_of(place), offset_of(_value(offset, "offset")))


def _batch(words: list[str]) -> Batch:
    if words == ["-"]:
        return NO_RECORDS
    if words[0] == "again":
        _, place, offset, lines, nbytes, deliveries = words
        if lines != "1":
            raise BadLine("!batch again: is one line")
        return Batch(partition_of(place), offset_of(offset), 1, offset_of(nbytes), _counted(deliveries, "deliveries"))
    place, offset, lines, nbytes, *more = words
    overtaken = sum(_counted(word, "overtaken") for word in more)
    if len(more) > 1:
        raise BadLine("!batch: says too much")
    return Batch(partition_of(place), offset_of(offset), offset_of(lines), offset_of(nbytes), overtaken=overtaken)


def _counted(word: str, name: str) -> int:
    count = offset_of(_value(word, name))
    if not count:
        raise BadLine(f"{name}=0: must be at least 1")
    return count


def _nacked(words: list[str]) -> Nacked:
    place, offset, deliveries, *letter = words
    if len(letter) > 1:
        raise BadLine("!nacked: says too much")
    where = _value(letter[0], "letter") if letter else ""
    return Nacked(partition_of(place), offset_of(offset), _counted(deliveries, "deliveries"), where)


def _at(word: str) -> tuple[TopicPartition, int]:
    place, _, offset = word.partition("@")
    return partition_of(place), offset_of(offset)


def _assigned(words: list[str]) -> Assigned:
    if not _GENERATION.fullmatch(words[0]):
        raise BadLine(f"{words[0][:80]!r}: must be a generation")
    return Assigned(int(words[0]), tuple(map(_at, words[1:])))


def _sought(words: list[str]) -> Sought:
    (word,) = words
    return Sought(*_at(word))


def _rows(words: Sequence[str]) -> OffsetsReply:
    rows = []
    for n in range(0, len(words), 5):
        start, end, following, committed = (
            _value(words[n + 1 + at], name) for at, name in enumerate(("start", "end", "next", "committed"))
        )
        offset = None if committed == "-" else offset_of(committed)
        rows.append(
            PartitionOffsets(partition_of(words[n]), offset_of(start), offset_of(end), offset_of(following), offset)
        )
    return OffsetsReply(tuple(rows))


def _committed(words: list[str]) -> Committed:
    is_again = words[:1] == ["again"]
    words = words[is_again:]
    pairs = zip(words[::2], words[1::2], strict=True)
    return Committed(tuple((partition_of(place), offset_of(offset)) for place, offset in pairs), is_again)


def _failed(rest: str) -> Failed:
    request, _, others = rest.partition(" ")
    if request not in (*REQUESTS, "consume"):
        request, others = "", rest
    code, _, text = others.partition(" ")
    if not _CODE.fullmatch(code):
        raise BadLine("!err: says no code")
    return Failed(request, code, " ".join(text.split()))


_REPLIES: dict[str, Callable[..., Reply]] = {
    "!ok": _started,
    "!batch": _batch,
    "!assign": _assigned,
    "!revoke": lambda words: Revoke(tuple(map(partition_of, words))),
    "!seek": _sought,
    "!offsets": _rows,
    "!committed": _committed,
    "!nacked": _nacked,
    "!err": _failed,
}
