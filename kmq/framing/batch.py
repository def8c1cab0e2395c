"""A batch: lines as they will be stored, without seq and time, and the replies to those who wait for one.

Every stage of a batch's way knows where the text it came from may be cut, so that a block is committed together with
exactly the bytes that it came from: bytes of the staged text, or of the ring `received`.
"""

from kmq.message import record
from kmq.message.routing import AnyTopic

# The number of the cut that ends it, the lines of the batch before it, the connection, the first and the last n that
# the reply is for, and its text, b"" for an ack. A plain tuple, because there is one for each piece or even each
# message.
Reply = tuple[int, int, bytes, int, int, bytes]
# (lines, bytes of the staged text, position in `received`) up to which a batch may be cut.
Cut = tuple[int, int, int]

ANY_TOPIC = AnyTopic()


class Batch:
    """Lines ready to be numbered.

    cuts       where the batch may be cut, in order; None if it may be cut after each line, and each took its length and
               a newline, all in one place: of `received` if `is_received`, else of the staged text.
    used       bytes of the staged text that are done when all lines are framed.
    begin      the position in `received` before the batch; `position` is that behind it.
    replies    in the order of the messages.
    more       whether there is text left that can be framed at once: a turn has its limit.
    """

    __slots__ = ("begin", "cuts", "is_received", "key", "lines", "more", "next_seq", "position", "replies", "used")

    def __init__(self, next_seq: int, position: int = 0) -> None:
        self.next_seq = next_seq  # what the first line will get
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
        """Return True if there is nothing to commit but what was used."""
        return not (self.lines or self.replies)


def well_formed(text: bytes, next_seq: int, topics: AnyTopic = ANY_TOPIC) -> list[bytes] | None:
    """Return the lines of a text that is well-formed lines and nothing else; None for any other text.

    Nearly all lines of producers who do not ask for replies go this way: checked as a whole.
    """
    if not topics.takes(text, next_seq) or record.claims(text):
        return None
    lines = text.split(b"\n")
    lines.pop()
    return lines


def single(next_seq: int, position: int, line: bytes) -> Batch:
    """Return the batch of one line of the framer's own, which takes nothing from the text."""
    batch = Batch(next_seq, position)
    batch.lines, batch.cuts = [line], [(1, 0, position)]
    batch.key = record.common_key(batch.lines)
    batch.more = True  # the text is as it was
    return batch


def endless(next_seq: int, position: int, text: bytes, max_line: int) -> Batch:
    """Return the batch of a text that fills a staging area without a newline: one refused line.

    No writer of whole lines does this. The bytes are kept as dead.malformed.
    """
    batch = Batch(next_seq, position)
    batch.lines = [record.malformed("too_long", text, len(text), max_line)]
    batch.cuts = [(1, len(text), position)]
    batch.used = len(text)
    return batch
