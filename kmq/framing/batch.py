"""A batch: lines as they will be stored, without seq and time, and the replies to those who wait for one.

Every stage of a batch's way knows where the text it came from may be cut, so that a block is committed together with
exactly the bytes that it came from.
"""

from kmq import record
from kmq.routing import AnyTopic

# Up to which byte of the text and which line of the batch a message goes, the connection, the first and the last n that
# the reply is for, and its text, b"" for an ack. A plain tuple, because there is one for each group or even each
# message.
Reply = tuple[int, int, bytes, int, int, bytes]
# (lines, bytes of the text) up to which a batch may be cut.
Cut = tuple[int, int]

ANY_TOPIC = AnyTopic()


class Batch:
    """Lines ready to be numbered.

    cuts       where the batch may be cut, in order; None if it may be cut after each line, and each took its length and
               a newline.
    replies    in the order of the messages.
    more       whether the text behind the used bytes can be framed as it is: a turn has its limit.
    reordered  None, or the text in an order that can be parsed: it has to replace the text, and the batch is empty.
    """

    __slots__ = ("cuts", "key", "lines", "more", "next_seq", "reordered", "replies", "used")

    def __init__(self, next_seq: int, lines: list[bytes], cuts: list[Cut] | None, used: int = 0) -> None:
        self.next_seq = next_seq  # what the first line will get
        self.lines, self.cuts = lines, cuts
        self.used = used  # bytes of the text that are done when all lines are framed
        self.key = b""  # the routing key that all lines share, or b""
        self.replies: list[Reply] = []
        self.more = False
        self.reordered: bytes | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to commit but the used bytes."""
        return not self.lines and not self.cuts


def plain(text: bytes, next_seq: int, topics: AnyTopic = ANY_TOPIC) -> Batch | None:
    """Return the batch of a text that is well-formed lines and nothing else; None for any other text.

    Nearly all text goes this way: the lines of producers who do not ask for replies, checked as a whole.
    """
    if not topics.takes(text, next_seq) or record.claims(text):
        return None
    lines = text.split(b"\n")
    lines.pop()
    batch = Batch(next_seq, lines, None, len(text))
    batch.key = record.common_key(lines)
    return batch


def endless(next_seq: int, text: bytes, max_line: int) -> Batch:
    """Return the batch of a text that fills a staging area without a newline: one refused line.

    No writer of whole lines does this. The bytes are kept as dead.malformed.
    """
    line = record.malformed("too_long", text, len(text), max_line)
    return Batch(next_seq, [line], [(1, len(text))], len(text))
