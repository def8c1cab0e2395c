"""The framer's parser and table, driven step by step."""

import random
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from received_ends import Lines, Messages, Way, messages, plain

from kmq.framing import parser
from kmq.framing.blocks import ANY_TOPIC, Cut, LineBatch, encode_replies
from kmq.framing.dedupe import DedupeTable
from kmq.framing.parser import ReceivedLines
from kmq.links.layout import BlockLimits, Received
from kmq.message import record
from kmq.message.routing import AnyTopic

Part = bytes | Messages | Lines
MAX = 8192
SMALL = BlockLimits(64, 8000)  # blocks so small that they end inside what one receive brought


def table(
    producers: int = 1000, ttl: float = 1e6, count: int = 1000, age: float = 1e6, kafka: int = 1000
) -> DedupeTable:
    return DedupeTable(producers, ttl, count, age, kafka)


def source_of(way: Way) -> ReceivedLines:
    """The ring as a framer sees it that has framed everything up to now."""
    return ReceivedLines(way.attach, Received(way.writer.birth, way.writer.head))


def cuts_in(batch: LineBatch) -> list[Cut]:
    """Where a batch may be cut: (lines, bytes of the text, position in `received`)."""
    if batch.cuts is not None:
        return batch.cuts
    ends = list(accumulate(len(line) + 1 for line in batch.lines))
    if batch.is_received:
        cuts = [(count, 0, batch.begin + end) for count, end in enumerate(ends, 1)]
    else:
        cuts = [(count, end, batch.begin) for count, end in enumerate(ends, 1)]
    return [*cuts[:-1], (len(ends), batch.used, batch.position)]


def mine(*ids: int | bytes, tag: bytes = b"") -> list[bytes]:
    """Messages with these ids, as sent or, with a tag, as stored."""
    return [b"t.k|1|%b%b|x" % (id if isinstance(id, bytes) else b"%d" % id, tag) for id in ids]


P, W = b"p=me", b"w=me"


class Steps:
    """The framer's turns without its ring: what is read is framed as far as it goes, the rest is carried on.

    Whatever is framed is overwritten at once, as a busy ingress would.
    """

    def __init__(
        self,
        known: DedupeTable,
        cut: Callable[[int], Iterable[int]] = lambda count: [count - 1],
        max_line: int = MAX,
        way: Way | None = None,
        limits: BlockLimits = SMALL,
        topics: AnyTopic = ANY_TOPIC,
    ) -> None:
        """`cut` chooses at which of so many cuts a batch becomes blocks."""
        self.known, self.cut, self.max_line, self.limits, self.topics = known, cut, max_line, limits, topics
        self.way = Way() if way is None else way
        self.source = source_of(self.way)
        self.seconds = 0
        self.waiting = b""
        self.lines: list[bytes] = []
        self.replies: list[bytes] = []

    def read(self, *parts: Part) -> None:
        self.waiting += self.way.text(*parts)
        while self.turn():
            pass

    def turn(self) -> bool:
        text = self.waiting[: self.waiting.rfind(b"\n") + 1]
        if not text:
            return False
        made_by = parser.Parser(self.max_line, self.known, self.source, self.limits, self.topics)
        batch = made_by.batch(text, len(self.lines) + 1, self.seconds)
        assert batch.more == (batch.used < len(text))
        cuts, replies = cuts_in(batch), batch.replies
        assert cuts[-1] == (len(batch.lines), batch.used, batch.position)
        start, before = 0, (self.source.done.position, batch.used)
        for number in self.cut(len(cuts)):
            stop, end, position = cuts[number]
            said = encode_replies([reply for reply in replies if reply[0] <= number], start, len(self.lines) + 1)
            replies = [reply for reply in replies if reply[0] > number]
            self.lines += batch.lines[start:stop]
            self.replies += said.split(b"\n")[:-1]
            start = stop
            self.source.committed(Received(self.source.done.birth, position))
            self.way.spoil()
            if self.committed():
                self.source = ReceivedLines(self.way.attach, self.source.done)
                self.waiting = self.waiting[end:]
                return True
        assert before != (batch.position, 0)
        self.waiting = self.waiting[batch.used :]
        return True

    def committed(self) -> bool:
        """After each block; whether the framer was killed there."""
        return False


def one_by_one(replies: Iterable[bytes]) -> dict[tuple[bytes, int], bytes]:
    """Replies as {(connection, n): reply}; asserts that each message gets one, in order."""
    said, last = dict[tuple[bytes, int], bytes](), dict[bytes, int]()
    for line in replies:
        conn, first, kind, n, rest = line.split(b" ", 4)
        assert int(first) == last.get(conn, 0) + 1, f"no reply before {line!r}"
        last[conn] = int(n)
        for number in range(int(first), int(n) + 1):
            value = b"%d" % (int(rest) - int(n) + number) if kind == b"!ack" else rest.split(b" ")[0]
            said[conn, number] = kind[1:] + b" " + value
    return said


NOBODYS = [b"u|||plain", b"no separator", b"u|1|5;p=a|claimed", b"", b"u|x", b"-x", b"!hello"]
MADE_UP = [
    b"!r 5 0 10",
    b"!r 5 0 0",
    b"!c 17.1 1 1 5 0 10",
    b"!c 17.1 1 1 l=7",
    b"!e nul",
    b"!l 17.1 w=a",
    b"!b 1",
    b"!",
]


def random_traffic(rng: random.Random, count: int = 40) -> tuple[list[Part], "Model"]:
    """(parts for Way.text, what the model makes of it): many connections, resends, long lines, shells between."""
    model = Model()
    conns: list[list[Any]] = [[b"17.%d" % n, rng.choice([b"", b"p=a", b"p=b", b"w=a", b"w=b"]), 0] for n in range(1, 5)]
    at_once: dict[int, int] = {}
    out: list[Part] = []
    for _ in range(count):
        if not rng.randrange(4):
            line = rng.choice(NOBODYS + MADE_UP)
            out.append(line + b"\n")
            model.nobody(line)
            continue
        if not rng.randrange(4):
            lines = rng.choices([b"u|||of a producer", *NOBODYS], [20, *[1] * len(NOBODYS)], k=rng.choice([1, 2, 9]))
            if not rng.randrange(8):
                lines.append(b"u|1|2|" + b"x" * 5000)
            out.append(plain(*lines))
            for line in lines:
                model.nobody(line)
            continue
        if not rng.randrange(8):
            for number in rng.choices(range(1, 30), k=rng.choice([2, 5, 20])):  # one message of each, without a name
                at_once[number] = nth = at_once.get(number, 0) + 1
                line = rng.choice([b"t.k|1|%d|x" % nth, b"t.k|1||"] * 20 + [b"", b"t|1", b"t|1|1;p=me|"])
                out.append(messages([line], nth, b"", b"18.%d" % number))
                model.take(line, b"18.%d" % number, nth, b"")
            continue
        conn = rng.choice(conns)
        whose, tag, n = conn
        sent, top = list[bytes](), model.last.get(tag, 0)
        for _ in range(rng.choice([1, 1, 3, 8])):
            id = max(0, top + rng.choice([1, 1, 1, 1, 2, 5, 0, -1, -3]))
            top = max(top, id)
            good, with_header = b"t.k|1|%d|x" % id, b"t.k|1|%d;%b|x" % (id, rng.choice([b"enc=b64", b"a=b", b""]))
            odd = [b"", b"no separator", b"t|1|x|y", b"t|1|%d" % id, b"t.k|1|%d;a=b;p=you|x" % id]
            sent.append(rng.choice([good] * 6 + [with_header] * 6 + odd))
        if not rng.randrange(8):
            sent = [b"t.k|1|%d|" % top + b"x" * 5000]
        out.append(messages(sent, n + 1, tag, whose))
        for line in sent:
            conn[2] += 1
            model.take(line, whose, conn[2], tag)
    return out, model


def randomly(rng: random.Random) -> Callable[[int], list[int]]:
    """Cuts a batch into some blocks."""
    return lambda count: [at for at in range(count) if at + 1 == count or rng.randrange(2)]


class Model:
    """Who is told what, message by message: a dictionary that forgets nothing."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.said: dict[tuple[bytes, int], bytes] = {}  # (connection, n) → reply without n
        # (tag, id) → seq, (key, headers, payload)
        self.stored: dict[tuple[bytes, int | bytes], tuple[int, tuple[bytes, bytes, bytes]]] = {}
        self.last: dict[bytes, int] = {}  # tag → last id

    def take(self, line: bytes, conn: bytes, n: int, tag: bytes) -> None:
        self.said[conn, n] = self._store(line, tag) if record.refusal(line) == "" else b"err " + refusal(line)

    def _store(self, line: bytes, tag: bytes) -> bytes:
        key, ts, id, payload = record.padded(line).split(b"|", 3)
        id, semicolon, headers = id.partition(b";")
        headers = semicolon + headers
        content = key, record.user_headers(headers), payload
        if tag and record.claims(line + b"\n"):
            return b"err bad_id"
        if tag[:1] == b"p" and not id.isdigit():
            return b"err bad_id"
        known: tuple[bytes, Any] = tag, int(id) if tag[:1] == b"p" else id
        if tag and known in self.stored:
            seq, before = self.stored[known]
            return b"dup %d" % seq if content == before else b"err id_reused"
        if tag[:1] == b"p":
            if known[1] < self.last.get(tag, -1):
                return b"err id_too_old"
            self.last[tag] = known[1]
        line = b"|".join([key, ts, id + b";" + tag + headers if tag else id + headers, payload])
        self.lines.append(line if tag else record.disclaim(line))
        self.stored[known] = len(self.lines), content
        return b"ack %d" % len(self.lines)

    def nobody(self, line: bytes) -> None:
        self.lines.append(record.admit(line, MAX))


def refusal(line: bytes) -> bytes:
    return record.refusal(line).encode()
