"""From the text of the FIFO to a batch: lines to be stored, and replies.

Well-formed lines of fire-and-forget producers go through as a whole (batch.plain). All other text is looked at here:
control lines are obeyed, what is no message is stored as dead.malformed or refused. raw.py has the format of the text.

Lines of other writers may lie between the fragments of a long line; raw.reassemble moves them in front. So what is
unfinished is always the end of the text, and can be staged again as it is.

The replies are made here, in order, as the text that durability writes to the FIFO `acks` once the block is on disk:

    <connection> <n of the first message it answers> !ack <n> <seq>      or !dup <n> <seq>, !err <n> <reason>
    <connection> 0 !last <id>                                            where ingress has asked for the last id of a
    name

Invariant   However much text there is, a call looks at no more than about TURN lines one by one.
            The dedupe table holds what a batch holds: the caller frames all of the batch, or the process ends.
"""

from itertools import accumulate, islice

from kmq import record
from kmq.framing.acceptor import Acceptor
from kmq.framing.batch import ANY_TOPIC, Batch, Cut, plain
from kmq.framing.dedupe import DedupeTable
from kmq.links import raw
from kmq.links.raw import GROUP, HEADER, LAST_ID, MAX_GROUP, REFUSED, STARTED
from kmq.routing import AnyTopic
from kmq.settings import PIPE_BUF

# A long line from ingress is at most this much over max_line: it may be a dead.malformed with its header.
_OVER = record.MALFORMED_OVERHEAD
_SHORT_FRAGMENTS = (
    64  # of a long line, besides those as long as a write: or their marks alone could fill the staging area
)
# Lines that are looked at one by one in a turn: half a second's work of the slowest machine, so that the framer gives a
# sign of life whatever strangers send.
TURN = 8192
_NEWLINE = 10
Origin = tuple[bytes, bytes, bytes]  # connection, `p`, `w` or nothing, producer or scope


class Parser:
    """Makes batches. What it holds between two calls is the dedupe table."""

    def __init__(self, max_line: int, table: DedupeTable, topics: AnyTopic = ANY_TOPIC) -> None:
        self.max_line, self.table, self.topics = max_line, table, topics
        self._acceptor = Acceptor(max_line, table, topics)
        self._max_fragments = max_line // 1024 + _SHORT_FRAGMENTS

    @property
    def duplicates(self) -> int:
        """How many messages were known as stored."""
        return self._acceptor.duplicates

    def batch(self, text: bytes, next_seq: int, seconds: int) -> Batch:
        """Return the batch of any whole lines, or the order in which they have to be staged again first.

        `next_seq` is what the first line will get; `seconds` since the epoch is now.
        """
        batch = plain(text, next_seq, self.topics)
        if batch is None:
            ordered = raw.reassemble(text)
            if ordered is text:
                return self.parse(text, next_seq, seconds)
            batch = Batch(next_seq, [], None)
            batch.reordered = ordered
        return batch

    def parse(self, text: bytes, next_seq: int, seconds: int) -> Batch:
        """Return the batch of reassembled text, as `batch` does, by looking at each line."""
        self._text = text
        self._cuts: list[Cut] = []
        batch = self._batch = Batch(next_seq, [], self._cuts)
        self._acceptor.begin(batch, seconds)
        self._fragments: list[bytes] = []
        self._held = 0  # bytes in `_fragments`
        self._looked = 0  # at so many lines
        at = 0
        while at < len(text) and not (self._looked >= TURN and batch.used == at):
            self._looked += 1
            if text.startswith(GROUP, at):
                end = self._groups(at)
                if not end:
                    break  # the rest of the group has not been read yet
                at = end
                if not self._fragments:
                    batch.used = at
            else:
                at = self._lines(at, text.find(b"\n!c ", at) + 1 or len(text))
        if batch.lines:
            batch.key = record.common_key(batch.lines)
        batch.more = 0 < batch.used == at < len(text)
        return batch

    # --- lines outside groups ----------------------------------------------------------------------------------------

    def _lines(self, at: int, end: int) -> int:
        """Add text[at:end], whole lines that nobody waits for; return where this stopped."""
        text, batch = self._text[at:end], self._batch
        lines, cuts = batch.lines, self._cuts
        if not self._fragments and self._all_lines(text, at):
            batch.used = end
            return end
        used = batch.used
        for line in text.split(b"\n")[:-1]:
            if self._looked >= TURN and not self._fragments:
                break
            self._looked += 1
            at += len(line) + 1
            mark = line[:1]
            if mark == b"+":
                self._fragments.append(line[1:])
                self._held += len(line) - 1
                if self._held <= self.max_line + _OVER and len(self._fragments) <= self._max_fragments:
                    continue
                # Ingress never lets a line grow so long. Another writer who does this gets the line stored in parts.
                stored = record.malformed("too_long", self._joined(), self._held, self.max_line)
            elif mark == b"-" and self._fragments:
                stored = self._admit(self._joined(line[1:]))
            elif line.startswith(STARTED):
                self._forget_fragments()  # ingress started anew: an unfinished long line will not be finished
                used = at
                continue
            elif question := LAST_ID.fullmatch(line):
                self._reply_last_id(at, *question.groups())
                used = at
                continue
            else:
                stored = self._admit(line)
            self._forget_fragments()
            used = at
            lines.append(stored)
            cuts.append((len(lines), at))
        batch.used = used
        return at

    def _all_lines(self, text: bytes, at: int) -> bool:
        """Add whole lines, the first of them at `at`, if all are well formed."""
        lines = self._batch.lines
        checked = plain(text, self._batch.next_seq + len(lines), self.topics)
        if checked is None:
            return False
        added = checked.lines
        ends = accumulate((len(line) + 1 for line in added), initial=at)
        self._cuts += zip(range(len(lines) + 1, len(lines) + len(added) + 1), islice(ends, 1, None), strict=True)
        lines += added
        self._looked += len(added)
        return True

    def _reply_last_id(self, at: int, connection: bytes, name: bytes) -> None:
        count = len(self._batch.lines)
        self._batch.replies.append((at, count, connection, 0, 0, b"!last %d" % self.table.last_id(name)))
        self._cuts.append((count, at))

    def _admit(self, line: bytes) -> bytes:
        batch, stored = self._batch, record.admit(line, self.max_line)
        reason = self.topics.refusal(stored, batch.next_seq + len(batch.lines))
        return record.malformed(reason, line, len(line), self.max_line) if reason else stored

    def _joined(self, last: bytes = b"") -> bytes:
        return b"".join([*self._fragments, last])

    def _forget_fragments(self) -> None:
        self._fragments, self._held = [], 0

    # --- groups ------------------------------------------------------------------------------------------------------

    def _groups(self, at: int) -> int:
        """Add the groups from `at` on that continue one another; return where they end, 0 if the first is not whole
        yet.

        A header that ingress cannot have written is skipped: the lines behind it are lines outside groups.
        """
        origin = b"", b"", b""
        first = count = done = 0
        bodies: list[bytes] = []
        ends: list[Cut] = []  # (messages so far, bytes of the text)
        while self._text.startswith(GROUP, at):
            start = self._text.index(b"\n", at) + 1
            try:
                n, k, end, sender = self._header(at, start)
            except ValueError:
                if not ends:
                    return start
                break
            if not end or (ends and (n != first + count or sender != origin)):
                break
            if not ends:
                first, origin = n, sender
            at = done = end
            count += k
            self._looked += k
            bodies.append(self._text[start:end])
            ends.append((count, end))
            if self._looked >= TURN:
                break
        if ends:
            self._take(origin, first, b"".join(bodies), ends)
        return done

    def _header(self, at: int, start: int) -> tuple[int, int, int, Origin]:
        """Return (n, k, end of the group or 0 if it is not read yet, sender) of the header text[at:start].

        Raises ValueError if it is no header, or if it is not followed by k whole lines as it says.
        """
        text = self._text
        match = HEADER.match(text, at)
        if match is None:
            raise ValueError
        connection, n, k, nbytes, kind, name = match.groups()
        count, origin = int(k), (connection, kind or b"", name or b"")
        if nbytes:
            end = start + int(nbytes)
        else:
            end = start
            for _ in range(min(count, MAX_GROUP)):
                end = text.find(b"\n", end) + 1 or len(text) + 1
        if not 0 < count <= MAX_GROUP or not start < end <= at + PIPE_BUF:
            raise ValueError
        if end > len(text):
            return int(n), count, 0, origin
        if text[end - 1] != _NEWLINE or text.count(b"\n", start, end) != count:
            raise ValueError
        return int(n), count, end, origin

    def _take(self, origin: Origin, n: int, body: bytes, ends: list[Cut]) -> None:
        """Add or refuse messages n… in `body`, which may be cut after each of `ends` (messages, bytes of the text)."""
        (connection, kind, name), batch = origin, self._batch
        lines, replies, base = batch.lines, batch.replies, len(batch.lines)
        if self._acceptor.accept_all(body, kind, name):
            before = 0
            for count, end in ends:
                replies.append((end, base + before, connection, n + before, n + count - 1, b""))
                self._cuts.append((base + count, end))
                before = count
            return
        at, messages, accept = 0, body.split(b"\n"), self._acceptor.accept
        for count, end in ends:
            for line in messages[at:count]:
                if line.startswith(REFUSED):
                    reply = b"!err %d %b" % (n, line[len(REFUSED) :])
                elif line[:1] == b"-" and self._fragments:
                    reply = accept(self._joined(line[1:]), n, kind, name)
                    self._forget_fragments()
                else:
                    reply = accept(line, n, kind, name)
                replies.append((end, len(lines) - (not reply), connection, n, n, reply))
                n += 1
            at = count
            self._cuts.append((len(lines), end))
