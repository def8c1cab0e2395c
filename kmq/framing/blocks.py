"""From a batch to blocks: cut at the ring's limits, the lines numbered and stamped, the replies made.

Invariant   The lines of a block have the seqs that the ring gives out next, without a gap. A block never has more
            messages or bytes than the ring takes. It is cut only where the batch may be cut.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from operator import itemgetter

from kmq import record
from kmq.framing.batch import Batch, Cut, Reply
from kmq.links.layout import BlockLimits, Framed, Stamp

_STAMP_BYTES = 40  # most that a seq and a time add to a line
_REPLY_BYTES = 120  # most that a reply takes beside its text

_end_of = itemgetter(0)


def frame(batch: Batch, limits: BlockLimits, last_ts: int) -> Iterator[Framed]:
    """Yield the blocks of `batch` one by one, each made when the caller has appended the block before it.

    `last_ts` is the recv_ts of the last record: times never go back.
    """
    cuts, replies, key_length, seq = cuts_of(batch, limits), batch.replies, len(batch.key), batch.next_seq
    start = end_before = replied = 0
    for number, (stop, end) in enumerate(cuts, 1):
        lines = batch.lines[start:stop] if len(cuts) > 1 else batch.lines
        last_ts = max(time.time_ns() // 1000, last_ts)
        text, added = record.number(lines, seq, record.format_ts(last_ts)) if lines else (b"", 0)
        if number == len(cuts):
            end = batch.used
        elif batch.cuts is None:
            end = end_before + len(text) - added
        reply_text = b""
        if replies:
            until = bisect_right(replies, end, lo=replied, key=_end_of)
            reply_text = encode_replies(replies[replied:until], start, seq)
            replied = until
        yield Framed(text, Stamp(seq, len(lines), key_length, last_ts), reply_text, end - end_before)
        seq += len(lines)
        start, end_before = stop, end


def cuts_of(batch: Batch, limits: BlockLimits) -> list[Cut]:
    """Return where the lines are cut into blocks that the ring takes; the bytes are 0 if `batch.cuts` is None."""
    count, max_count = len(batch.lines), limits.count
    reply_bytes = sum(_REPLY_BYTES + len(reply[-1]) for reply in batch.replies) if batch.replies else 0
    fits = sum(map(len, batch.lines)) + count * _STAMP_BYTES + reply_bytes <= limits.nbytes
    if batch.cuts is None:
        if fits:
            return [(stop, 0) for stop in (*range(max_count, count, max_count), count)] if count else []
        return _greedy([(at, 0) for at in range(1, count + 1)], batch, limits)
    return batch.cuts[-1:] if fits and count <= max_count else _greedy(batch.cuts, batch, limits)


def _greedy(cuts: list[Cut], batch: Batch, limits: BlockLimits) -> list[Cut]:
    """Return those of `cuts` that make each block as large as it may be."""
    max_count, max_bytes, lines = limits.count, limits.nbytes, batch.lines
    replies = deque(batch.replies)
    chosen: list[Cut] = []
    count = cost = at = 0  # of the block so far
    before = 0, 0
    for cut in cuts:
        more = sum(map(len, lines[at : cut[0]])) + (cut[0] - at) * _STAMP_BYTES
        while replies and replies[0][0] <= cut[1]:
            more += _REPLY_BYTES + len(replies.popleft()[-1])
        if before != (0, 0) and (cost + more > max_bytes or count + cut[0] - at > max_count):
            chosen.append(before)
            count = cost = 0
        count, cost, at, before = count + cut[0] - at, cost + more, cut[0], cut
    return [*chosen, cuts[-1]] if cuts else []


def encode_replies(replies: list[Reply], start: int, seq: int) -> bytes:
    """Return the text for the FIFO `acks`, in a block whose first line is number `start` of the batch and gets `seq`.

    Acks of one connection whose seqs follow one another become one reply.
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
