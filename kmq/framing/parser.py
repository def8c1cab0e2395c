"""Parser: turns the text of the FIFO `raw`, and the bytes of `received` that it names, into a batch with replies.

Example: two lines `t|||x` that a shell wrote into the FIFO become a batch of two lines without replies.
kmq/links/fifo.py has the format of the text.

Well-formed lines without replies are added as a whole (blocks.well_formed), and so are the messages of a connection
(Acceptor.accept_all). Otherwise each line is checked alone: an invalid line is stored as dead.malformed, or refused.

The replies are made here, in order, as the text that durability writes to the FIFO `acks` once the block is on disk:

    <connection> <n of the first message it answers> !ack <n> <seq>      or !dup <n> <seq>, !err <n> <reason>
    <connection> <q> !last <id>                                          to question q, for the last id of a name

Invariant   A batch takes the text in order, from its start, and each cut records how much of it is done. Messages of a
            piece that an earlier block has are not taken again: a piece is read from `ReceivedLines.done` on, which
            the ring `framed` records. Bytes before it are never read, because ingress may have overwritten them, and
            a control line about them does nothing.
            A control line is obeyed only if it names the present ring and bytes that ingress has written there. Any
            other writer of the FIFO may have made it up.
            However much text waits, a call takes little more than TURN_BYTES, and checks at most about TURN lines one
            by one.
            The dedupe table includes the batch: the caller frames all of it, or the process ends.
Removed     If the ring `received` was deleted, the process that first notices writes it again (Stage.rewrite_rings).
            Until then a control line may name a ring that is not here, or bytes that only the new file has. It must not
            count as made up, because its lines would be lost. So we wait for the ring, or end and restart with it.
"""

import re
from collections import namedtuple
from collections.abc import Callable
from itertools import accumulate

from kmq.config.values import KIB
from kmq.errors import RetryError
from kmq.framing.blocks import ANY_TOPIC, Cut, LineBatch, ends_of_messages, well_formed
from kmq.framing.dedupe import FOLLOWS, Acceptor, DedupeTable
from kmq.links.fifo import CONTROL, LAST_ID, LINES, MESSAGES, SINGLE
from kmq.links.layout import NOTHING_RECEIVED, BlockLimits, Received
from kmq.links.received import ReceivedReader
from kmq.message import record
from kmq.message.routing import AnyTopic

# --- received --------------------------------------------------------------------------------------------------------


def _nothing() -> None:
    return None


class ReceivedLines:
    """The ring `received` as the framer sees it: which control lines are valid, and how far its lines are framed."""

    def __init__(
        self,
        attach: Callable[[], ReceivedReader | None] = _nothing,
        done: Received = NOTHING_RECEIVED,
        wait: Callable[[], None] = _nothing,
    ) -> None:
        """`attach` returns the ring, or None before ingress has made it. `done`: the position at the last commit.

        `wait` waits for the ring if a living ingress will make it, or write it again.
        """
        self._attach, self._wait = attach, wait
        self._ring: ReceivedReader | None = None
        self.done = done
        self.begin()

    def begin(self, text: bytes = b"") -> int:
        """Begin a batch of `text`, which was read before. Return the position up to which lines of the ring are framed.

        Ingress makes the ring before it writes a line about it. So the ring is looked for here, and not within a batch,
        where a new ring would change the position.
        """
        if self._ring is None and not self._look() and (text.startswith(CONTROL) or b"\n" + CONTROL in text):
            self._wait()
            self._look()
        position: int = self.done.position
        return position

    def _look(self) -> bool:
        ring = self._ring = self._attach()
        if ring is not None:
            self.committed(Received(ring.birth, self.done.position if ring.birth == self.done.birth else 0))
        return ring is not None

    def has(self, birth: int, start: int, end: int) -> bool:
        """Return True if whole lines lie, or lay and are framed, between these positions of the ring with this birth.

        Raises RetryError if they do not, but the ring was replaced by another file, which may have them.
        """
        ring = self._ring
        if ring is None:
            return False
        if (
            ring.birth == birth
            and ring.holds(start, end)
            and (end <= self.done.position or self._ends_line(start, end))
        ):
            return True
        if not ring.is_in_place():
            raise RetryError(f"{ring.path}: was removed, or replaced; read again")
        return False

    def _ends_line(self, start: int, end: int) -> bool:
        return start == end or self.text(end - 1, end) == b"\n"

    def text(self, start: int, end: int) -> bytes:
        """Return the text between two positions for which `has` is True."""
        assert self._ring is not None
        return self._ring.text(start, end)

    def committed(self, done: Received) -> None:
        """Release the bytes that are framed. Call after the commit in the ring `framed`."""
        self.done = done
        if self._ring is not None:
            self._ring.release(done.position)


# --- parser ----------------------------------------------------------------------------------------------------------

# Connection; `p`, `w` or nothing; producer or scope; the id that must be stored before; whether it may write reserved
# topics
Origin = tuple[bytes, bytes, bytes, int | None, bool]

# Lines checked one by one in a turn: half a second's work on the slowest machine. So the framer gives a sign of life
# whatever clients send.
TURN = 8192
TURN_BYTES = 256 * KIB  # taken in a turn: fits the second-level cache
_NEWLINE = 10
_SINGLES = 1024  # single messages of this many connections are checked together
_LARGE_BYTES = 16 * KIB  # a run of lines this long is a batch by itself, which saves a cut for each line


class Parser:
    """Makes batches. Its only state between two calls is the dedupe table."""

    def __init__(
        self,
        max_line: int,
        table: DedupeTable,
        source: ReceivedLines,
        limits: BlockLimits,
        topics: AnyTopic = ANY_TOPIC,
    ) -> None:
        """`limits`: of the blocks that its batches will be cut into."""
        self.max_line, self.table, self.source, self.limits, self.topics = max_line, table, source, limits, topics
        self._acceptor = Acceptor(max_line, table, topics)
        self.refused = 0  # lines stored as dead.malformed, and messages refused

    @property
    def duplicates(self) -> int:
        """How many messages were already stored."""
        return self._acceptor.duplicates

    def batch(self, text: bytes, next_seq: int, seconds: int) -> LineBatch:
        """Return the batch of whole staged lines.

        `next_seq`: seq of its first line. `seconds`: the present time, since the epoch.
        """
        self._text, self._seconds = text, seconds
        batch = self._batch = LineBatch(next_seq, self.source.begin(text))
        self._cuts: list[Cut] = []
        self._looked = self._bytes = 0  # lines checked alone; bytes taken
        self._singly_until = 0  # up to here not all messages are valid, so each is checked alone
        self._stops = False  # True within a run or the messages of a connection, whose control lines are not done yet
        at, position = self._whole(batch) or (0, batch.begin)
        if not at:
            batch.cuts = self._cuts
            self._acceptor.begin(batch, seconds)
        while at < len(text) and not (self._stops or self._looked >= TURN or self._bytes >= TURN_BYTES):
            at, position = self._step(at, position)
        batch.used, batch.position = at, position
        batch.more = at < len(text)
        if batch.lines:
            batch.key = record.common_key(batch.lines)
        return batch

    def begun(self, text: bytes) -> bytes:
        """Return the control line at the start of `text` if some of its messages are framed already; else b"".

        The messages of one control line have consecutive seqs. So the framer numbers its own records after the rest of
        them.
        """
        match, done = MESSAGES.match(text), self.source.done
        if match is None:
            return b""
        birth, start, stop = map(int, match.group(4, 5, 6))
        return match[0] if birth == done.birth and start < done.position < stop else b""

    def _whole(self, batch: LineBatch) -> tuple[int, int] | None:
        """Make the batch of one run of well-formed lines, and return where it ends. Return None for any other text."""
        run = None if self._text.startswith(b"!c") else self._run(0, batch.begin)
        if run is None or not run.text or (run.end < len(self._text) and len(run.text) < _LARGE_BYTES):
            return None
        lines = well_formed(run.text, batch.next_seq, self.topics)
        if lines is None:
            return None
        batch.lines, batch.cuts, batch.is_received, batch.begin = lines, None, run.is_received, run.begin
        self._bytes = TURN_BYTES
        return run.end, run.position

    def _step(self, at: int, position: int) -> tuple[int, int]:
        """Add the lines at offset `at` of the text; return the next offset, and the next position in `received`."""
        text = self._text
        if match := MESSAGES.match(text, at):
            may_adjoin = match[3] == b"1" and match.end() < len(text) and at >= self._singly_until
            done = (self._singles(at, position) if may_adjoin else None) or self._messages(at, position, match)
            if done is not None:
                return done
        elif run := self._run(at, position):
            return self._add_run(run)
        elif match := LAST_ID.match(text, at):
            self._looked += 1
            connection, question, name = match.groups()
            reply = b"!last %d" % self.table.ask(name, self._seconds)
            self._reply(connection, int(question), 0, reply)
            self._cut(match.end(), position)
            return match.end(), position
        end = text.index(b"\n", at) + 1  # ingress did not write this line: it is a message from another writer
        return self._add_run(_LineRun(text[at:end], at, end, position, position, False))

    def _cut(self, at: int, position: int) -> None:
        self._cuts.append((len(self._batch.lines), at, position))

    def _reply(self, connection: bytes, low: int, high: int, text: bytes, lines_before: int = -1) -> None:
        """Add a reply. The next cut ends it."""
        before = len(self._batch.lines) if lines_before < 0 else lines_before
        self._batch.replies.append((len(self._cuts), before, connection, low, high, text))

    # --- lines that nobody waits for ---------------------------------------------------------------------------------

    def _run(self, at: int, position: int) -> "_LineRun | None":
        """Return the lines from `at` on that need no reply: of another writer, or adjoining pieces of `received`.

        None if there are no such lines.
        """
        text = self._text
        if not text.startswith(CONTROL, at):
            end = text.find(b"\n" + CONTROL, at) + 1 or len(text)
            return _LineRun(text[at:end], at, end, position, position, False)
        first, begin = at, position
        parts: list[bytes] = []
        taken = 0
        while taken < TURN_BYTES and (match := LINES.match(text, at)):
            birth, start, stop = map(int, match.groups())
            if not self.source.has(birth, start, stop) or (parts and start != position):
                break
            low = max(start, position)
            if low < stop:
                begin = begin if parts else low
                parts.append(self.source.text(low, stop))
                taken += stop - low
            position, at = max(position, stop), match.end()
        return _LineRun(b"".join(parts), first, at, begin, position, True) if at > first else None

    def _add_run(self, run: "_LineRun") -> tuple[int, int]:
        """Add these lines, as a whole or one by one; return the next offset, and the next position in `received`."""
        text, at, end, begin, position, is_received = run
        batch, cuts = self._batch, self._cuts
        lines = batch.lines
        self._bytes += len(text)
        good = well_formed(text, batch.next_seq + len(lines), self.topics) if text else []
        if good is not None:
            self._looked += len(good)
            ends = enumerate(accumulate(len(line) + 1 for line in good), len(lines) + 1)
            if is_received:
                cuts += [(count, at, begin + done) for count, done in ends]
            else:
                cuts += [(count, at + done, begin) for count, done in ends]
            lines += good
            done = len(text)
        else:
            done = self._add_one_by_one(run)
        if done < len(text):
            self._stops = True
            return (at, begin + done) if is_received else (at + done, position)
        if text and is_received:
            cuts.pop()  # the last line is done only with the control lines
        if not text or is_received:
            self._cut(end, position)
        return end, position

    def _add_one_by_one(self, run: "_LineRun") -> int:
        """Add as many of these lines as a turn allows; return their size in bytes."""
        done = 0
        for line in run.text.split(b"\n")[:-1]:
            if self._looked >= TURN:
                break
            self._looked += 1
            done += len(line) + 1
            self._batch.lines.append(self._admit(line))
            if run.is_received:
                self._cut(run.at, run.begin + done)
            else:
                self._cut(run.at + done, run.begin)
        return done

    def _admit(self, line: bytes) -> bytes:
        batch, stored = self._batch, record.admit(line, self.max_line)
        reason = self.topics.refusal(stored, batch.next_seq + len(batch.lines))
        if reason:
            stored = record.malformed(reason, line, len(line), self.max_line)
        if stored.startswith(record.MALFORMED) and not line.startswith(record.MALFORMED):
            self.refused += 1
        return stored

    # --- messages of a connection that waits for replies -------------------------------------------------------------

    def _messages(self, at: int, position: int, match: re.Match[bytes]) -> tuple[int, int] | None:
        """Add or refuse the messages of this control line; None if it names no valid messages."""
        connection, n, k, *piece, kind, name, after, right = match.groups()
        birth, start, stop = map(int, piece)
        first, count = int(n), int(k)
        if not self.source.has(birth, start, stop):
            return None
        low = max(start, position)
        if low >= stop:  # an earlier block has them all
            self._cut(match.end(), max(position, stop))
            return match.end(), max(position, stop)
        body = self.source.text(low, stop)
        left = record.count_lines(body)
        if left > count or (left < count and low == start):
            return None
        first, count = first + count - left, left  # the messages of an earlier block may be overwritten by now
        self._bytes += len(body)
        least = None if after is None else int(after) if first == int(n) else FOLLOWS
        origin = connection, kind or b"", name or b"", least, right is not None
        taken = self._accept(body, origin, (first, count), (at, low))
        if taken < len(body):
            self._stops = True
            return at, low + taken
        self._cuts.pop()  # the last message is done only with the control line
        self._cut(match.end(), stop)
        return match.end(), stop

    def _singles(self, at: int, position: int) -> tuple[int, int] | None:
        """Add adjoining messages in `received`, each of its own control line, together; None if not all are valid."""
        text, batch, end, low, ring = self._text, self._batch, at, position, b""
        found: list[tuple[bytes, int, int, int]] = []  # connection, n, end of its control line, end of its message
        while len(found) < _SINGLES and low - position < TURN_BYTES and (match := SINGLE.match(text, end)):
            connection, n, birth, start, stop = match.groups()
            if int(start) != low or int(stop) <= low or (found and birth != ring):
                break
            end, low, ring = match.end(), int(stop), birth
            found.append((connection, int(n), end, low))
        if len(found) < 2:
            return None
        self._singly_until = end
        body = self.source.text(position, low) if self.source.has(int(ring), position, low) else b""
        if record.count_lines(body) != len(found) or any(body[stop - position - 1] != _NEWLINE for *_, stop in found):
            return None
        lines, cuts = len(batch.lines), len(self._cuts)
        if not self._acceptor.accept_all(body, b"", b""):
            return None
        self._bytes += len(body)
        self._looked += len(found)
        batch.replies += [(cuts + i, lines + i, who, n, n, b"") for i, (who, n, _, _) in enumerate(found)]
        self._cuts += [(lines + i, used, stop) for i, (_, _, used, stop) in enumerate(found, 1)]
        return end, low

    def _accept(self, body: bytes, origin: Origin, messages: tuple[int, int], place: tuple[int, int]) -> int:
        """Add or refuse messages n… in `body`; return how many of its bytes are done."""
        (connection, kind, name, after, reserved), (n, count), (at, low) = origin, messages, place
        lines, base = self._batch.lines, len(self._batch.lines)
        if self._acceptor.accept_all(body, kind, name, after, reserved):
            self._looked += count
            before = 0
            for stop, end in ends_of_messages(body, lines[base:], self.limits):
                self._reply(connection, n + before, n + stop - 1, b"", base + before)
                self._cuts.append((base + stop, at, low + end))
                before = stop
            return len(body)
        done = 0
        for line in body.split(b"\n")[:-1]:
            if self._looked >= TURN:
                break
            self._looked += 1
            done += len(line) + 1
            before = len(lines)
            reply = self._acceptor.accept(line, n, kind, name, after, reserved)
            after = None if after is None else FOLLOWS
            self.refused += reply.startswith(b"!err")
            self._reply(connection, n, n, reply, before)
            self._cut(at, low + done)
            n += 1
        return done


class _LineRun(namedtuple("_LineRun", ("text", "at", "end", "begin", "position", "is_received"))):
    """Lines that need no reply. The staged text from `at` to `end` has them, or has the control lines that name them;
    then they lie in `received` from `begin` to `position`."""

    __slots__ = ()
