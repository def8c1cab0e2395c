"""Dead letters on their way back to where they came from. What a letter says: kmq/message/letters.py.

Back        Topic and key of the origin, time, payload and the user's headers as stored. `replays` counts how often the
            message has gone back. A consumer or pipeline that fails again keeps this header in its new letter.
Stays       A letter that has come back `max_replays` times, and a letter whose payload was cut to fit into a line.
Once        The letters of a partition go back under one producer name, each numbered by its seq, so the broker knows
            which of them it has stored, whatever was selected before. A producer's numbers must rise: the broker refuses
            an older letter that another selection left out (`id_too_old`), and that one goes under the next name of the
            same partition. So a letter is sent to the names in the same order each time, and is found under the one
            that stored it. SentBack reads the same from the disk, so that a limit counts only letters that have not
            gone back, and a dry run says what the replay would do.
Not covered A name that was idle for KMQ_PRODUCER_TTL is forgotten, and so may be a name with very many gaps. The same
            replay then stores its letters again.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kmq.config.values import KIB
from kmq.errors import KmqError
from kmq.log import dedupe_file, identity, reader
from kmq.message import ids, record
from kmq.message.letters import Letter, parse_letter, stored_headers
from kmq.message.routing import exact, key_behind
from kmq.message.text import LETTER_HEADERS, REPLAYS, percent_encode

if TYPE_CHECKING:
    from kmq.client.producer import Producer

# --- pace ------------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 64 * KIB
_BLOCKS_PER_S = 10  # under a rate: blocks are small enough for an even flow and rare enough to sleep in between


class Pace:
    """An even flow of at most `rate` messages per second; 0: no limit."""

    def __init__(self, rate: float = 0) -> None:
        self.rate, self._due = rate, 0.0
        self.block_limit = max(1, int(rate / _BLOCKS_PER_S)) if rate else 1 << 30  # maximum messages in a block

    def wait(self, count: int) -> None:
        """Wait until the next `count` messages may be sent."""
        if self.rate:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = time.monotonic() + count / self.rate


def blocks(lines: Iterable[bytes], pace: Pace, nbytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the lines in blocks of about `nbytes`, each block as soon as `pace` allows it."""
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= nbytes or len(block) >= pace.block_limit:
            pace.wait(len(block))
            yield b"".join(block)
            block, size = [], 0
    if block:
        pace.wait(len(block))
        yield b"".join(block)


# --- which letters go back -------------------------------------------------------------------------------------------

MAX_REPLAYS = 3
_SPARK = ("reason", "from", "id", "len", "other")  # headers of a pipeline's letter
_SENDERS = ("p", "w")
_MOST_NAMES = 64  # of one partition: how many selections may each have left out older letters
_NAME_BYTES, _DIGITS = 64, 16
_NAMES = "dlq-"  # begins each name under which letters go back
_CLAIM = b";p=" + _NAMES.encode()
# hot loop: one search for all lines of a block
_WENT_BACK = re.compile(rb"^(\d+)\|[^|\n]*\|[^|\n]*\|[^|\n]*\|(\d+);p=(dlq-[^;|\n]+)", re.MULTILINE)
_REPLAY_BYTES = 1 << 20  # sent at once: each block waits for its replies


def stays(line: bytes, max_replays: int, only_letters: bool = False) -> str:
    """Return why a stored line must not be sent back; "" if it may. `only_letters`: nothing else may."""
    letter = parse_letter(line)
    if letter is None:
        return "it is no letter" if only_letters else ""
    return letter.obstacle(max_replays)


# --- as they go back -------------------------------------------------------------------------------------------------


def origin_key(line: bytes, topic: str, has_marks: bool = True) -> bytes | None:
    """Return the routing key under which a letter in `topic` goes back; None if it is no letter."""
    letter = parse_letter(line)
    if letter is None:
        return None
    return exact(letter.topic.encode(), key_behind(topic.encode(), record.routing_key_of(line), has_marks))


def headers_back(field: bytes, letter: Letter) -> list[bytes]:
    """Return the headers with which a letter goes back, as stored, given its id field."""
    old_id, *stored = field.split(b";")
    headers = stored_headers(field)
    is_ours = "origin_topic" in headers
    dropped = {*_SENDERS, REPLAYS, *(LETTER_HEADERS if is_ours else _SPARK)}
    kept = [header for header in stored if header.partition(b"=")[0].decode(errors="replace") not in dropped]
    if not is_ours:
        kept += [f"{name}={percent_encode(value)}".encode() for name, value in _odd(headers.get("other", ""))]
        old_id = percent_encode(headers.get("id", "")).encode()
        kept += [b"orig_id=" + old_id] if old_id and not _has(kept, b"orig_id") else []
    if letter.seq and not _has(kept, b"orig_seq"):
        kept.append(b"orig_seq=" + percent_encode(letter.seq).encode())
    return [*kept, b"%b=%d" % (REPLAYS.encode(), letter.replays + 1)]


def _has(headers: list[bytes], name: bytes) -> bool:
    return any(header.startswith(name + b"=") for header in headers)


def _odd(text: str) -> list[tuple[str, str]]:
    """Return headers whose names only raw lines can have: names as stored, values decoded."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return []
    if not isinstance(found, dict):
        return []
    return [(name, str(value)) for name, value in found.items() if not re.search(r"[|;=\s\0]", name)]


def producer_name(broker: str, topic: str, partition: int, number: int = 0) -> str:
    """Return a name under which the letters of a partition go back. `broker`: the id of its data directory."""
    return f"{_NAMES}{_digest(broker, topic, partition)}-{number}-{topic}"[:_NAME_BYTES]


def _digest(broker: str, topic: str, partition: int) -> str:
    return sha256("\0".join((broker, topic, str(partition))).encode()).hexdigest()[:_DIGITS]


# --- which have gone back --------------------------------------------------------------------------------------------


class SentBack:
    """The letters of a topic that the broker knows as stored where they came from.

    Read from producers.ckpt and from the WAL after it: a broker that was asked (`!hello … last=?`) would fence a replay
    that is going on, and it tells the last id of a name, not those that were left out before.
    """

    def __init__(self, data: str, topic: str, partitions: int, tick: Callable[[], None] = lambda: None) -> None:
        """Read what is there now. `tick` is called now and then, and may raise to end it."""
        broker = identity.read(data, "id")
        self._partitions = {_digest(broker, topic, number).encode(): number for number in range(partitions)}
        self._names: dict[int, dict[bytes, ids.Producer]] = {number: {} for number in range(partitions)}
        try:
            saved = dedupe_file.read(data)
        except ValueError:  # damaged: the framer, too, reads the whole WAL instead
            saved = None
        for row in saved.rows(b"p|" + _NAMES.encode()) if saved is not None else ():
            if isinstance(row, ids.Producer) and (names := self._names_like(row.name)) is not None:
                names[row.name] = row
        log = reader.wal(data)
        first = max(log.first_offset, saved.seq + 1 if saved is not None else 0)
        for lines in reader.read(data, first, log.end_offset() - 1):
            tick()
            for match in _WENT_BACK.finditer(lines) if _CLAIM in lines else ():
                seq, id, name = match.groups()
                if (names := self._names_like(name)) is not None:
                    names.setdefault(name, ids.Producer(name)).add(int(id), int(seq), 1)

    def _names_like(self, name: bytes) -> "dict[bytes, ids.Producer] | None":
        """Return the names of the partition whose letters went back under this one; None: it is not of this topic."""
        number = self._partitions.get(name[len(_NAMES) : len(_NAMES) + _DIGITS])
        return None if number is None else self._names[number]

    def has(self, partition: int, seq: int) -> bool:
        """Return True if the letter with this seq has gone back."""
        return any(producer.find(seq) >= 0 for producer in self._names[partition].values())


# --- sending ---------------------------------------------------------------------------------------------------------


class LetterOrigin(NamedTuple):
    """A partition whose letters go back together."""

    broker: str
    topic: str
    partition: int


def send(lines: Iterable[tuple[LetterOrigin, bytes]], connect: "Callable[[str], Producer]", pace: Pace) -> int:
    """Send letters back and wait until all are stored. Returns how many of them were stored before.

    The lines of a place follow one another, in order of their ids. Raises KmqError at the first refusal.
    """
    repeated = 0
    for place, group in groupby(lines, itemgetter(0)):
        with ExitStack() as stack:
            names = _Names(place, connect, stack)
            for block in blocks((line for _, line in group), pace, _REPLAY_BYTES):
                repeated += names.send(block)
    return repeated


class _Names:
    """The producers of one partition, in their order; opened when they are needed."""

    def __init__(self, place: LetterOrigin, connect: "Callable[[str], Producer]", stack: ExitStack) -> None:
        self._place, self._connect, self._stack = place, connect, stack
        self._open: list[Producer] = []

    def send(self, block: bytes) -> int:
        """Store lines under the first name that takes each. Returns how many were stored before."""
        repeated = 0
        for number in range(_MOST_NAMES):
            producer = self._producer(number)
            before = producer.duplicates
            delivery = producer.send_lines(block, callback=_seen)
            producer.flush()
            repeated += producer.duplicates - before
            refused = list(delivery.refused.values())
            for error in refused:
                if error.code != "id_too_old":
                    raise error
            if not refused:
                return repeated
            block = b"".join(error.line + b"\n" for error in refused)
        where = f"{self._place.topic}/{self._place.partition}"
        raise KmqError(f"{where}: {_MOST_NAMES} replays have left out older letters; no further one can be told apart")

    def _producer(self, number: int) -> "Producer":
        if number == len(self._open):
            self._open.append(self._stack.enter_context(self._connect(producer_name(*self._place, number))))
        return self._open[number]


def _seen(delivery: object) -> None:
    """Take note of a delivery; its errors are looked at where it was sent."""
