"""The replies that one producer is owed, in the order of its messages.

    taken       messages received
    passed      of these, the messages that were handed over; those behind them were refused here
    answered    messages whose reply is in `pending`, or was sent already: answered <= taken

Invariant   Replies go out in the order of the messages, each once. After the first refused message every later one is
            refused too, so a producer that sends the rest again on a new connection stores nothing out of order.
Memory      Refused messages are only counted; their replies are written REFUSALS_BYTES at a time, as the producer reads
            them.
"""

import socket

from kmq.config.values import KIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kmq.ingress.hello import Hello

REFUSALS_BYTES = 16 * KIB  # of `!err` replies that are made before the producer reads those before them
LAST = b"!last "  # begins the reply to a hello with last=?, which comes before the reply to message 1


class Replies:
    """What a producer was told about its messages, and what it still has to be told."""

    __slots__ = (
        *("acks", "answered", "asks_last", "counted", "passed", "pending", "refusal", "taken"),
        *("train_at", "train_end"),
    )

    def __init__(self) -> None:
        self.acks = False  # the producer wants replies
        self.asks_last = False  # it was not told yet which id of its name is the last
        self.taken = self.passed = self.answered = 0
        self.refusal = b""  # code and reason why nothing more is taken; b"": messages are taken
        self.pending = bytearray()  # replies that the socket has not taken yet
        # One train of messages at a time is timed: its last message, and when it was read; 0.0: none is.
        self.train_end, self.train_at = 0, 0.0
        self.counted = 0  # how many bytes of `pending` the budget of all connections knows of

    def expect(self, hello: "Hello") -> None:
        """Remember what the producer asked for."""
        self.acks, self.asks_last = hello.acks, hello.asks_last

    def reply(self, first: int, text: bytes) -> bool:
        """Add the reply to the messages from `first` on, or the last id. Returns False if an earlier one is missing."""
        if self.asks_last:
            if not text.startswith(LAST):
                return False
            self.asks_last = False
            self.pending += text + b"\n"
            return True
        if first <= self.answered:
            return True  # repeated by a durability that was killed in between
        if first != self.answered + 1:
            return False
        self.answered = int(text.split(b" ", 2)[1])
        if self.acks:
            self.pending += text + b"\n"
        return True

    def refuse(self, count: int) -> None:
        """Refuse `count` more messages; the producer is told when all messages before them have their replies."""
        self.taken += count
        self.write_refusals()

    def write_refusals(self) -> None:
        """Write refusals once everything that was passed on is answered, as fast as the producer reads them."""
        if not self.refusal or self.answered < self.passed or self.asks_last:
            return
        if not self.acks:
            self.answered = self.taken
        while self.answered < self.taken and len(self.pending) < REFUSALS_BYTES:
            self.answered += 1
            self.pending += b"!err %d %b\n" % (self.answered, self.refusal)

    def follow(self, before: bytes, refusal: bytes) -> None:
        """Take over a change of the admission, unless messages were refused already: the rest must be refused too."""
        if (self.acks and not self.refusal) or (self.refusal == before and self.taken == self.passed):
            self.refusal = refusal

    def send(self, sock: socket.socket) -> int:
        """Hand pending replies to the kernel and return how many bytes it took, or raise BlockingIOError."""
        count = sock.send(self.pending)
        del self.pending[:count]
        return count

    @property
    def is_complete(self) -> bool:
        """Return True if every message was answered and every reply is sent."""
        return self.answered >= self.taken and not (self.pending or self.asks_last)
