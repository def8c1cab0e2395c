"""Blocks: cuts a batch of lines into blocks that fit the ring, numbers and stamps the lines, and makes the replies.

Example: line `t|||x` of a batch becomes `42|1700000000.5|t|||x` in a block whose first seq is 42.

A batch has lines as they will be stored, without seq and time, and the replies to clients that wait for one. It also
knows where the source text may be cut. So a block is committed together with exactly the bytes that it came from: bytes
of the staged text, or of the ring `received`.

Invariant   The lines of a block have the next seqs of the ring, without a gap. A block never has more messages or bytes
            than the ring allows. A batch is cut only where it may be cut.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter

from kmq.links.layout import BlockLimits, Framed, Received, Stamp
from kmq.message import record
from kmq.message.routing import AnyTopic

# --- batch -----------------------------------------------------------------------------------------------------------

# (number of the cut that ends it, lines of the batch before it, connection, first n, last n, text). The reply is for
# the messages first n to last n; its text is b"" for an ack. A plain tuple, because there is one for each piece or
# message.
Reply = tuple[int, int, bytes, int, int, bytes]
# (lines, bytes of the staged text, position in `received`) up to which a batch may be cut.
Cut = tuple[int, int, int]

ANY_TOPIC = AnyTopic()


class LineBatch:
    """Lines ready to be numbered.

    cuts       where the batch may be cut, in order. None: after each line. Then each line took its length and a newline
               from one source: from `received` if `is_received`, else from the staged text.
    used       bytes of the staged text that are done when all lines are framed.
    begin      the position in `received` before the batch; `position` is the position after it.
    replies    in the order of the messages.
    more       whether text is left that can be framed at once, because a turn has its limit.
    """

    __slots__ = ("begin", "cuts", "is_received", "key", "lines", "more", "next_seq", "position", "replies", "used")

    def __init__(self, next_seq: int, position: int = 0) -> None:
        self.next_seq = next_seq  # the seq of the first line
        self.lines: list[bytes] = []
        self.cuts: list[Cut] | None = []
        self.used = 0
        self.begin = self.position = position
        self.is_received = False
        self.key = b""  # the routing key that all lines share, or b""
        self.replies: list[Reply] = []
        self.more = False

    @property
    def is_empty(self) -> bool:
        """Return True if nothing has to be committed except the use of the text."""
        return not (self.lines or self.replies)


def well_formed(text: bytes, next_seq: int, topics: AnyTopic = ANY_TOPIC) -> list[bytes] | None:
    """Return the lines of a text if all are well-formed; None for any other text.

    Nearly all lines of producers that do not ask for replies are checked this way, as a whole.
    """
    if not topics.takes(text, next_seq) or record.claims(text):
        return None
    lines = text.split(b"\n")
    lines.pop()
    return lines


def single(next_seq: int, position: int, line: bytes) -> LineBatch:
    """Return the batch of one line that the framer made itself. It uses up no text."""
    batch = LineBatch(next_seq, position)
    batch.lines, batch.cuts = [line], [(1, 0, position)]
    batch.key = record.common_key(batch.lines)
    batch.more = True  # the text is still there
    return batch


def endless(next_seq: int, position: int, text: bytes, max_line: int) -> LineBatch:
    """Return the batch for a text that fills a staging area without a newline: one refused line.

    No writer of whole lines causes this. The bytes are stored as dead.malformed.
    """
    batch = LineBatch(next_seq, position)
    batch.lines = [record.malformed("too_long", text, len(text), max_line)]
    batch.cuts = [(1, len(text), position)]
    batch.used = len(text)
    return batch


# --- blocks ----------------------------------------------------------------------------------------------------------

_STAMP_BYTES = 40  # most bytes that a seq and a time add to a line
_REPLY_BYTES = 120  # most bytes of a reply without its text
_MESSAGE_BYTES = 256  # most bytes that a block needs for an acknowledged message, without the message

_end_of = itemgetter(0)


def frame(batch: LineBatch, limits: BlockLimits, last_ts: int, birth: int = 0) -> Iterator[tuple[Framed, bool]]:
    """Yield each block of `batch`, and True with the last one. Append a block before you ask for the next.

    `last_ts`: recv_ts of the last record, because times never go back. `birth`: of the ring `received`.
    """
    lines, cuts, replies, key_length, seq = batch.lines, batch.cuts, batch.replies, len(batch.key), batch.next_seq
    chosen = [] if batch.is_empty else cuts_of(batch, limits)
    start = replied = used = taken = 0  # taken: bytes of the text, if it may be cut after each line
    for number, at in enumerate(chosen, 1):
        is_last = number == len(chosen)
        stop = cuts[at][0] if cuts is not None else at + 1
        block = lines if len(chosen) == 1 else lines[start:stop]
        last_ts = max(time.time_ns() // 1000, last_ts)
        text, added = record.number(block, seq, record.format_ts(last_ts)) if block else (b"", 0)
        taken += len(text) - added
        if is_last:
            end, position = batch.used, batch.position
        elif cuts is not None:
            _, end, position = cuts[at]
        else:
            end, position = (0, batch.begin + taken) if batch.is_received else (taken, batch.begin)
        reply_text = b""
        if replies:
            until = bisect_right(replies, at, lo=replied, key=_end_of)
            reply_text = encode_replies(replies[replied:until], start, seq)
            replied = until
        stamp = Stamp(seq, len(block), key_length, last_ts)
        yield Framed(text, stamp, reply_text, end - used, Received(birth, position)), is_last
        seq += len(block)
        start, used = stop, end


def cuts_of(batch: LineBatch, limits: BlockLimits) -> list[int]:
    """Return the numbers of the cuts that end blocks the ring takes; numbers of lines if `batch.cuts` is None."""
    if batch.cuts and len(batch.cuts) == 1:
        return [0]
    count, max_count = len(batch.lines), limits.count
    reply_bytes = sum(_REPLY_BYTES + len(reply[-1]) for reply in batch.replies) if batch.replies else 0
    fits = sum(map(len, batch.lines)) + count * _STAMP_BYTES + reply_bytes <= limits.nbytes
    if batch.cuts is None:
        if fits:
            return [stop - 1 for stop in (*range(max_count, count, max_count), count)] if count else []
        return _greedy([(at, 0, 0) for at in range(1, count + 1)], batch, limits)
    if fits and count <= max_count:
        return [len(batch.cuts) - 1] if batch.cuts else []
    return _greedy(batch.cuts, batch, limits)


def _greedy(cuts: list[Cut], batch: LineBatch, limits: BlockLimits) -> list[int]:
    """Return the numbers of the `cuts` that make each block as large as allowed."""
    max_count, max_bytes, lines = limits.count, limits.nbytes, batch.lines
    replies = deque(batch.replies)
    chosen: list[int] = []
    count = cost = done = 0  # of the block so far
    for number, (stop, _, _) in enumerate(cuts):
        more = sum(map(len, lines[done:stop])) + (stop - done) * _STAMP_BYTES
        while replies and replies[0][0] <= number:
            more += _REPLY_BYTES + len(replies.popleft()[-1])
        if (count or cost) and (cost + more > max_bytes or count + stop - done > max_count):
            chosen.append(number - 1)
            count = cost = 0
        count, cost, done = count + stop - done, cost + more, stop
    return [*chosen, len(cuts) - 1] if cuts else []


def ends_of_messages(body: bytes, lines: list[bytes], limits: BlockLimits) -> list[tuple[int, int]]:
    """Return where acknowledged messages may be cut, as (messages, bytes). Each part fits into a block with others.

    A part has at most an eighth of a block, or one message. `lines`: as they will be stored, so they may be longer than
    in `body`.
    """
    count = len(lines)
    most, most_bytes = min(limits.count, limits.nbytes // _MESSAGE_BYTES) // 8, limits.nbytes // 8
    if count <= most and len(body) <= most_bytes:
        return [(count, len(body))]
    if sum(map(len, lines)) + count != len(body):
        lines = body.split(b"\n")
    lengths = [0, *accumulate(map(len, lines))]  # of the first n messages, without their newlines
    ends, at = [], 0
    while at < count:
        fit = bisect_right(lengths, lengths[at] + most_bytes) - 1
        at = max(at + 1, min(at + most, count, fit))
        ends.append((at, lengths[at] + at))
    return ends


def encode_replies(replies: list[Reply], start: int, seq: int) -> bytes:
    """Return the text for the FIFO `acks`. The block's first line is number `start` of the batch, and has seq `seq`.

    Acks of one connection with consecutive seqs become one reply.
    """
    out: list[bytes] = []
    connection, first, last, line_end = b"", 0, 0, -1

    def end_ack() -> None:
        if connection:
            out.append(b"%b %d !ack %d %d\n" % (connection, first, last, seq + line_end - start - 1))

    for _, lines_before, whom, low, high, text in replies:
        if not text and whom == connection and low == last + 1 and lines_before == line_end:
            last, line_end = high, line_end + high - low + 1
            continue
        end_ack()
        if text:
            connection = b""
            out.append(b"%b %d %b\n" % (whom, low, text))
        else:
            connection, first, last, line_end = whom, low, high, lines_before + high - low + 1
    end_ack()
    return b"".join(out)
