"""The text of the FIFO `raw`: messages of writers in the pod, and control lines of ingress. Encoder and decoder.

    <message>                          a line from any writer in the pod, who gets no reply
    !r <birth> <start> <end>           lines of producers who wait for no reply lie in the ring `received`, from
                                       position <start> to <end>; also an empty piece: all before it is free
    !c <connection> <n> <k> <birth> <start> <end> [p=<producer>|w=<scope>] [reserved]
                                       there lie the k messages n… of an acknowledged connection; `reserved`: it has
                                       shown the pod's token, and may write to the topics of KMQ itself
    !l <connection> p=<producer>       asks for the last id stored of a producer

Invariant   A control line is written at once and is shorter than PIPE_BUF, so it is read whole or not at all. Its order
            among all lines of the FIFO is the order in which the messages get their seqs.
            <birth> names the ring (received.py). A control line that speaks of no such bytes is no control line, but a
            malformed message.
            A line from any other writer may not name a reserved topic. The FIFO cannot tell who wrote a line, so only
            what ingress says of a connection counts: a slip of the hand (`echo … > raw`) changes no group's offsets.
"""

import re

from kmq.message.ids import NAME_PATTERN

CONTROL = b"!"
_CONNECTION, _NAME, _NUMBER = rb"\d{1,20}\.\d{1,20}", NAME_PATTERN.encode(), rb"\d{1,19}"
_PIECE = rb"(%b) (%b) (%b)" % (_NUMBER, _NUMBER, _NUMBER)
LINES = re.compile(rb"!r %b\n" % _PIECE)  # birth, start, end
# connection, n, k, birth, start, end, `p` or `w`, producer or scope, ` reserved`
_COUNTED = rb"(%b) (\d{1,18}) (\d{1,9}) %b" % (_CONNECTION, _PIECE)
MESSAGES = re.compile(rb"!c %b(?: ([pw])=(%b))?( reserved)?\n" % (_COUNTED, _NAME))
LAST_ID = re.compile(rb"!l (%b) p=(%b)\n" % (_CONNECTION, _NAME))  # connection, producer


def lines(birth: int, start: int, end: int) -> bytes:
    """Return the control line for lines that nobody waits for."""
    return b"!r %d %d %d\n" % (birth, start, end)


class Sender:
    """Whom messages come from: the name that replies carry, and how many messages it has passed on."""

    __slots__ = ("name", "right", "sent", "tag")

    def __init__(self, name: bytes, tag: bytes = b"", reserved: bool = False) -> None:
        self.name = name
        self.right = b" reserved" if reserved else b""
        self.tag = b" " + tag if tag else b""  # ` p=<producer>` or ` w=<scope>`
        self.sent = 0  # messages announced in the FIFO, and so the n of the last message

    def messages(self, count: int, birth: int, start: int, end: int) -> bytes:
        """Return the control line for the next `count` messages."""
        first = self.sent + 1
        self.sent += count
        return b"!c %b %d %d %d %d %d%b%b\n" % (self.name, first, count, birth, start, end, self.tag, self.right)

    def question(self) -> bytes:
        """Return the line that asks the framer for the last id of this producer."""
        return b"!l %b%b\n" % (self.name, self.tag)
