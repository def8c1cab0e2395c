"""From the text of the FIFO to the lines of a block, and the replies that go with them.

A batch is the lines as they will be stored (without seq and time), and where the text may be cut, so that a block can be
committed together with exactly the bytes it came from. Well-formed lines of fire-and-forget producers go through in one
piece (`plain`); everything else is looked at by `Parser`.

A long line arrives as pieces, `+…` and at last `-…`. Lines of other writers may lie between the pieces; `untangle` moves
them in front, so that what is unfinished is always the end of the text and can be carried on as it is.

Lines of an acknowledged connection come as a group, all in one write: `!c <connection> <n> <k> l=<bytes>
[p=<producer>|w=<scope>]` and k lines (l= saves looking for their end). A group is never cut: its header says whom to answer.
What ingress must refuse itself is in its place, as `!e <reason>`. Replies are made here, in order, as the text that
durability writes to FIFO `acks` once the block is on disk:

    <connection> <n of the first message it answers> !ack <n> <seq>      or !dup <n> <seq>, !err <n> <reason>

`!l <connection> p=<producer>` asks, for ingress, for the last id of a name: `<connection> 0 !last <id>`.
"""

import re
from itertools import accumulate, islice
from operator import lt
from zlib import crc32

from kmq import record
from kmq.framing.dedupe import DedupeTable
from kmq.ids import MAX_ID_DIGITS, MAX_WINDOW_ID, NAME_PATTERN, NEW, TOO_OLD
from kmq.routing import AnyTopic
from kmq.settings import PIPE_BUF

# A long line from ingress is at most this much over max_line: it may be a dead.malformed with its header.
_OVER = record.MALFORMED_OVERHEAD
_SHORT_PIECES = 64  # of a long line, besides those as long as a write: or their marks alone could fill the staging area
MAX_GROUP = 128  # messages in a group: with their numbers, names and replies they fit a block of the smallest ring
# Messages, or other lines, that are looked at one by one in a turn: half a second's work of the slowest machine, so that
# the framer gives a sign of life whatever strangers send.
TURN = 8192
_GROUP = b"!c "
_HEADER = re.compile(
    rb"!c (\d{1,20}\.\d{1,20}) (\d{1,18}) (\d{1,3})(?: l=(\d{1,4}))?(?: ([pw])=(" + NAME_PATTERN.encode() + rb"))?\n"
)
_NEWLINE = 10
_REFUSED = b"!e "
_LAST = re.compile(rb"!l (\d{1,20}\.\d{1,20}) p=(" + NAME_PATTERN.encode() + rb")")


class Batch:
    """Lines ready to be numbered.

    cuts      (lines, bytes of the text) up to which the batch may be cut, in order; None where it may be cut after each line
              and each took its own length and a newline.
    answers   (bytes of the text, lines before it, connection, first n, last n, reply or b"" for an ack), in order.
    more      whether what follows the used bytes can be framed as it is: a turn has its limit.
    """

    __slots__ = ("answers", "cuts", "key", "lines", "more", "used")

    def __init__(self, lines: list[bytes], cuts: list[tuple[int, int]] | None, used: int, key: bytes) -> None:
        self.lines, self.cuts = lines, cuts
        self.used = used  # bytes of the text that are done when all lines are framed
        self.key = key  # the routing key that all lines share, or b""
        self.answers: list[Answer] = []
        self.more = False


Answer = tuple[int, int, bytes, int, int, bytes]
Whose = tuple[bytes, bytes, bytes]  # connection, `p`, `w` or nothing, producer or window


_ANY_TOPIC = AnyTopic()


def plain(text: bytes, topics: AnyTopic = _ANY_TOPIC, next_seq: int = 0) -> Batch | None:
    """The batch of a text that is well-formed lines and nothing else, or None: the way nearly everything goes.

    `next_seq` is what the first line will get.
    """
    if not topics.takes(text, next_seq) or record.claims(text):
        return None
    lines = text.split(b"\n")
    lines.pop()
    return Batch(lines, None, len(text), record.common_key(lines))


def replies(answers: list[Answer], start: int, next_seq: int) -> bytes:
    """The text for FIFO `acks` of these answers, in a block whose first line is number `start` of the batch, as `next_seq`.

    Acks of one connection whose seqs follow one another become one.
    """
    out: list[bytes] = []
    conn, first, last, line_end = b"", 0, 0, -1

    def acked() -> None:
        if conn:
            out.append(b"%b %d !ack %d %d\n" % (conn, first, last, next_seq + line_end - start - 1))

    for _, lines_before, whom, low, high, reply in answers:
        if not reply and whom == conn and low == last + 1 and lines_before == line_end:
            last, line_end = high, line_end + high - low + 1
            continue
        acked()
        if reply:
            conn = b""
            out.append(b"%b %d %b\n" % (whom, low, reply))
        else:
            conn, first, last, line_end = whom, low, high, lines_before + high - low + 1
    acked()
    return b"".join(out)


class Parser:
    """Makes a batch of any whole, untangled lines: control lines are obeyed, what is no message is wrapped or refused."""

    def __init__(self, max_line: int, table: DedupeTable, topics: AnyTopic = _ANY_TOPIC) -> None:
        self.max_line, self.table, self.window, self.topics = max_line, table, table.window, topics
        self.duplicates = 0
        self._start_of = record.Starts().__getitem__

    def parse(self, text: bytes, next_seq: int, seconds: int) -> Batch:
        """`next_seq` is what the first line will get; `seconds` since the epoch is now. About TURN lines at a time.

        The dedupe table is taken to hold what is returned: the caller frames all of it, or the process ends.
        """
        self._text, self._next_seq, self._seconds = text, next_seq, seconds
        self._lines: list[bytes] = []
        self._cuts: list[tuple[int, int]] = []
        self._answers: list[Answer] = []
        self._pieces: list[bytes] = []
        self._held = 0  # bytes in `_pieces`
        self._looked = 0  # at so many lines
        at = used = 0
        while at < len(text) and not (self._looked >= TURN and used == at):
            self._looked += 1
            if text.startswith(_GROUP, at):
                end = self._groups(at)
                if not end:
                    break  # its rest has not been read yet
                at = end
                if not self._pieces:
                    used = at
            else:
                end = text.find(b"\n!c ", at) + 1 or len(text)
                at, used = self._unasked(at, end, used)
        batch = Batch(self._lines, self._cuts, used, record.common_key(self._lines) if self._lines else b"")
        batch.answers = self._answers
        batch.more = 0 < used == at < len(text)
        return batch

    # --- lines nobody asked to acknowledge ---------------------------------------------------------------------------

    def _unasked(self, at: int, end: int, used: int) -> tuple[int, int]:
        """text[at:end] is whole lines outside groups. Returns (end, used)."""
        text = self._text[at:end]
        lines, cuts = self._lines, self._cuts
        if not self._pieces:
            batch = plain(text, self.topics, self._seq())
            if batch is not None:
                ends = accumulate((len(line) + 1 for line in batch.lines), initial=at)
                cuts += zip(
                    range(len(lines) + 1, len(lines) + len(batch.lines) + 1), islice(ends, 1, None), strict=True
                )
                lines += batch.lines
                self._looked += len(batch.lines)
                return end, end
        for raw in text.split(b"\n")[:-1]:
            if self._looked >= TURN and not self._pieces:
                break
            self._looked += 1
            at += len(raw) + 1
            mark = raw[:1]
            if mark == b"+":
                self._pieces.append(raw[1:])
                self._held += len(raw) - 1
                if self._held <= self.max_line + _OVER and len(self._pieces) <= self.max_line // 1024 + _SHORT_PIECES:
                    continue
                # ingress never lets a line grow so long: whoever writes this gets it in parts
                line = record.malformed("too_long", self._joined(), self._held, self.max_line)
            elif mark == b"-" and self._pieces:
                line = self._admit(self._joined(raw[1:]))
            elif raw.startswith(b"!b "):
                self._forget_pieces()  # ingress started anew: an unfinished long line will not be finished
                used = at
                continue
            elif asked := _LAST.fullmatch(raw):
                self._say_last(at, *asked.groups())
                used = at
                continue
            else:
                line = self._admit(raw)
            self._forget_pieces()
            used = at
            lines.append(line)
            cuts.append((len(lines), at))
        return at, used

    def _say_last(self, at: int, conn: bytes, name: bytes) -> None:
        count = len(self._lines)
        self._answers.append((at, count, conn, 0, 0, b"!last %d" % self.table.last_id(name)))
        self._cuts.append((count, at))

    def _seq(self) -> int:
        """What the next line will get."""
        return self._next_seq + len(self._lines)

    def _admit(self, raw: bytes) -> bytes:
        line = record.admit(raw, self.max_line)
        reason = self.topics.refusal(line, self._seq())
        return record.malformed(reason, raw, len(raw), self.max_line) if reason else line

    def _joined(self, last: bytes = b"") -> bytes:
        return b"".join([*self._pieces, last])

    def _forget_pieces(self) -> None:
        self._pieces, self._held = [], 0

    # --- groups --------------------------------------------------------------------------------------------------------

    def _groups(self, at: int) -> int:
        """The groups from `at` on that follow one another. Returns where they end, 0 where not even the first is whole.

        A header that is none of ingress' is passed over: what follows is lines that nobody asked to acknowledge.
        """
        whose = b"", b"", b""
        first = count = done = 0
        bodies: list[bytes] = []
        ends: list[tuple[int, int]] = []  # (messages so far, bytes of the text)
        while self._text.startswith(_GROUP, at):
            start = self._text.index(b"\n", at) + 1
            try:
                n, k, end, here = self._header(at, start)
            except ValueError:
                if not ends:
                    return start
                break
            if not end or (ends and (n != first + count or here != whose)):
                break
            if not ends:
                first, whose = n, here
            at = done = end
            count += k
            self._looked += k
            bodies.append(self._text[start:end])
            ends.append((count, end))
            if self._looked >= TURN:
                break
        if ends:
            self._take(whose, first, b"".join(bodies), ends)
        return done

    def _header(self, at: int, start: int) -> tuple[int, int, int, Whose]:
        """(n, k, end of the group or 0 where it is not read yet, whose it is) of the header in text[at:start].

        Raises ValueError where it is none, or k whole lines do not follow as it says.
        """
        text = self._text
        match = _HEADER.match(text, at)
        if match is None:
            raise ValueError
        conn, n, k, nbytes, kind, name = match.groups()
        count, whose = int(k), (conn, kind or b"", name or b"")
        if nbytes:
            end = start + int(nbytes)
        else:
            end = start
            for _ in range(min(count, MAX_GROUP)):
                end = text.find(b"\n", end) + 1 or len(text) + 1
        if not 0 < count <= MAX_GROUP or not start < end <= at + PIPE_BUF:
            raise ValueError
        if end > len(text):
            return int(n), count, 0, whose
        if text[end - 1] != _NEWLINE or text.count(b"\n", start, end) != count:
            raise ValueError
        return int(n), count, end, whose

    def _take(self, whose: Whose, n: int, body: bytes, ends: list[tuple[int, int]]) -> None:
        """Messages n… in `body`, which may be cut after each of `ends` (messages, bytes of the text)."""
        conn, kind, name = whose
        base = len(self._lines)
        taken = self._all(body, kind, name)
        if taken is not None:
            self._lines += taken
            before = 0
            for count, end in ends:
                self._answers.append((end, base + before, conn, n + before, n + count - 1, b""))
                self._cuts.append((base + count, end))
                before = count
            return
        at, lines = 0, body.split(b"\n")
        for count, end in ends:
            for raw in lines[at:count]:
                reply = self._one(raw, n, kind, name)
                self._answers.append((end, len(self._lines) - (not reply), conn, n, n, reply))
                n += 1
            at = count
            self._cuts.append((len(self._lines), end))

    def _all(self, body: bytes, kind: bytes, name: bytes) -> list[bytes] | None:
        """These lines as they will be stored, where all of them are good and new; None where each must be looked at."""
        if not self.topics.takes(body, self._seq()):
            return None
        if not kind:
            return None if record.claims(body) else body.split(b"\n")[:-1]
        fields = record.numbered(body) if kind == b"p" else None
        if fields is None:
            return None
        numbers = [int(id) for _, _, id, _ in fields]
        first, count = numbers[0], len(numbers)
        producer = self.table.producer(name, self._seconds)  # only now: a name that stores nothing takes no place
        if producer is None or first <= producer.last_id:
            return None
        seq = self._seq()
        start_of = self._start_of
        prints = [crc32(payload, start_of(routing_key)) for routing_key, _, _, payload in fields]
        if numbers == list(range(first, first + count)):
            self.table.remember(producer, first, seq, count, self._seconds, prints)
        elif all(map(lt, numbers, numbers[1:])):
            for ahead, number in enumerate(numbers):
                self.table.remember(producer, number, seq + ahead, 1, self._seconds, prints[ahead : ahead + 1])
        else:
            return None
        mark = b";p=" + name
        return [b"|".join((routing_key, stamp, id + mark, payload)) for routing_key, stamp, id, payload in fields]

    def _one(self, raw: bytes, n: int, kind: bytes, name: bytes) -> bytes:
        """Message n: the reply where it is refused or a duplicate, b"" where it is new and has become the next line."""
        if raw.startswith(_REFUSED):
            return b"!err %d %b" % (n, raw[len(_REFUSED) :])
        if raw[:1] == b"-" and self._pieces:
            raw = self._joined(raw[1:])
            self._forget_pieces()
        reason = record.refusal(raw) or ("too_long" if len(raw) > self.max_line else "")
        if reason:
            return b"!err %d %b" % (n, reason.encode())
        seq = self._seq()
        if reason := self.topics.refusal(raw, seq):
            return b"!err %d %b" % (n, reason.encode())
        routing_key, ts, id_field, payload = record.padded(raw).split(b"|", 3)
        id, *headers = id_field.split(b";")
        rest = b"".join(b";" + header for header in headers if header != b"%b=%b" % (kind, name))
        if kind and record.claims(b"||%b|" % rest):
            return b"!err %d bad_id the headers p= and w= are KMQ's own" % n
        if not kind:
            self._lines.append(record.disclaim(record.padded(raw)))
            return b""
        print = crc32(payload, record.fingerprint_start(routing_key, rest) if rest else self._start_of(routing_key))
        if kind == b"p":
            reply = self._one_increasing(id, n, name, seq, print)
        else:
            reply = self._one_arbitrary(id, n, name, seq, print)
        if not reply:
            self._lines.append(b"%b|%b|%b;%b=%b%b|%b" % (routing_key, ts, id, kind, name, rest, payload))
        return reply

    def _one_increasing(self, id: bytes, n: int, name: bytes, seq: int, print: int) -> bytes:
        if not id.isdigit() or len(id) > MAX_ID_DIGITS:
            return b"!err %d bad_id a producer's ids are decimal numbers of at most %d digits" % (n, MAX_ID_DIGITS)
        producer = self.table.producer(name, self._seconds)
        if producer is None:
            return b"!err %d producers_full KMQ_PRODUCERS names are remembered already" % n
        number = int(id)
        found = producer.find(number)
        if found == NEW:
            self.table.remember(producer, number, seq, 1, self._seconds, (print,))
            return b""
        if found == TOO_OLD:
            return b"!err %d id_too_old" % n
        return self._known(n, found, print, producer.print_of(number))

    def _one_arbitrary(self, id: bytes, n: int, scope: bytes, seq: int, print: int) -> bytes:
        if not 0 < len(id) <= MAX_WINDOW_ID:
            return b"!err %d bad_id a message in a window needs an id of 1 to %d bytes" % (n, MAX_WINDOW_ID)
        found = self.window.find(scope, id, self._seconds)
        if found == NEW:
            self.window.add(scope, id, seq, self._seconds, print)
            return b""
        return self._known(n, found, print, self.window.print_of(scope, id))

    def _known(self, n: int, seq: int, print: int, print_then: int) -> bytes:
        """The reply to an id that is stored as `seq`, with the content of that `print_then`; 0: that is forgotten."""
        if print_then not in (0, print):
            return b"!err %d id_reused %d" % (n, seq)
        self.duplicates += 1
        return b"!dup %d %d" % (n, seq)


def whole(text: bytes) -> int:
    """How many bytes from its start are whole lines, and groups that are there to their last line."""
    end = text.rfind(b"\n") + 1
    at = text.rfind(b"\n" + _GROUP, 0, end) + 1
    header = _HEADER.match(text, at)
    if header is None:
        return end
    count, nbytes = int(header[3]), int(header[4] or 0)
    there = header.end() + nbytes <= end if nbytes else text.count(b"\n", header.end()) >= count
    return end if there else at


def untangle(text: bytes) -> bytes:
    """`text` with the pieces of each long line side by side; the same object where they are already.

    Whole lines keep their order. A long line stands where its last piece stood, before the group header of that one; one without
    a last piece goes to the end, so that the caller can carry it on.
    """
    if b"+" not in text or (b"\n+" not in text and text[:1] != b"+"):  # looking for one byte is ten times faster
        return text
    tangled = False
    out: list[bytes] = []
    pieces: list[bytes] = []
    raws = text.split(b"\n")[:-1]
    for at, raw in enumerate(raws):
        mark = raw[:1]
        if mark == b"+":
            pieces.append(raw)
        elif mark == b"-" and pieces:
            out += pieces
            out.append(raw)
            pieces = []
        elif raw.startswith(b"!b ") and pieces:
            pieces, tangled = [], True
        elif raw.startswith(_GROUP) and pieces and (at + 1 == len(raws) or raws[at + 1].startswith(b"-")):
            out += pieces  # the last one follows, or has not been read yet
            out.append(raw)
            pieces = []
        else:
            tangled = tangled or bool(pieces)
            out.append(raw)
    if not tangled:
        return text
    out += pieces
    return b"\n".join(out) + b"\n" if out else b""
