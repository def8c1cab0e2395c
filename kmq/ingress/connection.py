"""Connection: one producer's connection: its phase, its unfinished line, its replies, and its end.

Example: after `!hello acks=1` a connection is ACKED; its first message gets the reply `!ack 1 <seq>`.

    phase      is read                            an unfinished line, when the connection ends
    GREETING   always                             is refused and not kept: it may be a hello with a token
    PLAIN      only while messages are accepted   becomes dead.malformed
    ACKED      always: a refusal is a reply       is refused: no_newline
    CLOSING    never; it only gets its replies    -

GREETING becomes PLAIN at a first line that is not a hello, or at a hello with acks=0, and ACKED at a hello with acks=1.
A connection of an intake (intakes.py) is PLAIN from the start: its first line is an ordinary message. Every phase
becomes CLOSING when nothing more will be received. A `sender` numbers the messages. Every connection has one whose
hello asked for replies or for deduplication.

Invariant   Replies go out in the order of the messages, each once. After the first refused message every later one is
            refused too, so a producer that sends the rest again on a new connection stores nothing out of order.
            A connection ends in order only if each whole line that was read from it is in the FIFO, or was answered.
            Every other end is a reset, even if ingress is killed: SO_LINGER makes the kernel send one.
Memory      A producer that leaves more than MAX_PENDING bytes of replies unread, or has more than MAX_UNANSWERED
            messages without a reply, is not read. Refused messages are only counted. Their replies are written
            REFUSALS_BYTES at a time, as the producer reads them.
"""

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator

from kmq.config.values import KIB, MIB
from kmq.links.fifo import Sender

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage

if TYPE_CHECKING:
    from kmq.broker.tls import TlsSocket
    from kmq.ingress.hello import Hello, Unit
    from kmq.ingress.intakes import Frames, RawPort
    from kmq.wire.attempts import Attempt


# --- replies ---------------------------------------------------------------------------------------------------------

REFUSALS_BYTES = 16 * KIB  # of `!err` replies made in advance, before the producer reads the earlier ones
LAST = b"!last "  # begins the reply to a question for the last id of a name


class PendingReplies:
    """The replies that a producer got, and those that it is still owed.

    taken       messages received
    passed      of these, the messages that were handed over; the messages after them were refused here
    answered    messages whose reply is in `pending`, or was sent already: answered <= taken
    questions   the questions for a last id without a reply: for each, how many messages came before it
    """

    __slots__ = (
        *("acks", "answered", "counted", "passed", "pending", "questions", "questions_answered", "refusal", "taken"),
        *("train_at", "train_end"),
    )

    def __init__(self) -> None:
        self.acks = False  # the producer wants replies
        self.questions: deque[int] = deque()
        self.questions_answered = 0  # questions that have their reply
        self.taken = self.passed = self.answered = 0
        self.refusal = b""  # code and reason why messages are refused; b"": they are accepted
        self.pending = bytearray()  # replies that the socket has not taken yet
        # One train of messages at a time is timed: its last message, and when it was read; 0.0: no train.
        self.train_end, self.train_at = 0, 0.0
        self.counted = 0  # bytes of `pending` that the budget of all connections includes

    def expect(self, hello: "Hello") -> None:
        """Remember what the producer asked for."""
        self.acks = hello.acks
        if hello.asks_last:
            self.ask()

    def ask(self) -> int:
        """Expect a reply to a question for a last id; return the number of the question."""
        self.questions.append(self.taken)
        return self.questions_answered + len(self.questions) - 1

    def reply(self, first: int, text: bytes) -> bool:
        """Add the reply to the messages from `first` on, or to question `first`. Return False if an earlier one is missing."""
        is_last, done, questions = text.startswith(LAST), self.answered, self.questions
        if (first < self.questions_answered or not questions) if is_last else first <= done:
            return True  # sent again, because durability was killed in between
        if (len(questions) > 0 and questions[0] == done) is not is_last:
            return False
        if first != (self.questions_answered if is_last else done + 1):
            return False
        if is_last:
            questions.popleft()
            self.questions_answered += 1
        else:
            self.answered = int(text.split(b" ", 2)[1])
        if self.acks:
            self.pending += text + b"\n"
        return True

    def refuse(self, count: int) -> None:
        """Refuse `count` more messages. The producer gets the refusals after the replies to all earlier messages."""
        self.taken += count
        self.write_refusals()

    def write_refusals(self) -> None:
        """Write refusals once everything that was handed over is answered, as fast as the producer reads them."""
        if not self.refusal or self.answered < self.passed or self.questions:
            return
        if not self.acks:
            self.answered = self.taken
        while self.answered < self.taken and len(self.pending) < REFUSALS_BYTES:
            self.answered += 1
            self.pending += b"!err %d %b\n" % (self.answered, self.refusal)

    def follow(self, before: bytes, refusal: bytes) -> None:
        """Use a new refusal of the gate, unless messages were refused already: then the rest must be refused too."""
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
        return self.answered >= self.taken and not (self.pending or self.questions)


# --- connection ------------------------------------------------------------------------------------------------------

GREETING, PLAIN, ACKED, CLOSING = range(4)
MAX_UNANSWERED = 1 << 17  # messages and questions of one connection without a reply: far more than the links hold
MAX_PENDING = MIB  # bytes of replies that a producer may leave unread


class Connection:
    """One producer."""

    __slots__ = (
        "attempt",
        "by_lines",
        "frames",
        "interest",
        "length",
        "partial",
        "peer",
        "phase",
        "producer",
        "quiet_since",
        "raw",
        "replies",
        "sender",
        "sock",
        "spares",
        "speaks",
        "tls",
        "unfinished_since",
        "unit",
        "was_active",
    )

    def __init__(
        self, sock: socket.socket, peer: str, tls: "TlsSocket | None" = None, raw: "RawPort | None" = None
    ) -> None:
        self.sock, self.peer = sock, peer
        self.tls = tls  # the same socket, if it is a TLS socket
        self.raw = raw  # the intake that it connected to
        self.phase = GREETING if raw is None else PLAIN
        # From its first line: "" lines, or HTTP or TLS (kmq/wire/foreign.py), which is ended. None: not known yet.
        self.speaks: str | None = None
        self.by_lines = raw is None  # each message ends with a newline; at an intake the first bytes decide
        self.frames: Frames | None = None  # if not, how they end
        self.partial = bytearray()  # at most max_line + 1 bytes of the unfinished line
        self.length = 0  # of the unfinished line, including bytes that are not kept
        # The unit in progress: `partial` has its bytes so far, and `length` counts its first line too.
        self.unit: Unit | None = None
        self.sender: Sender | None = None
        self.producer = b""  # its name, if it has one
        self.attempt: Attempt | None = None  # which connection of its program this is, if it says so
        self.spares = False  # it may use the disk's reserve
        self.replies = PendingReplies()
        self.interest = select.EPOLLIN  # events for which the producers' epoll waits
        # For the deadlines, on their clock (limits.py):
        self.was_active = True  # has sent data or read a reply since the last sweep
        self.quiet_since = 0.0
        self.unfinished_since = 0.0  # 0: no sweep has seen this line, or handshake, unfinished

    def may_receive(self, refusal: bytes) -> bool:
        """Return True if more may be read now. `refusal`: the gate's (limits.py); b"" if there is none."""
        phase = self.phase
        if phase == CLOSING or (refusal and phase == PLAIN):
            return False
        replies = self.replies
        unanswered = replies.taken - replies.answered + len(replies.questions)
        return len(replies.pending) <= MAX_PENDING and unanswered <= MAX_UNANSWERED

    def begins_plain(self) -> bool:
        """Return True if the first byte is there and begins no hello. With TLS a byte cannot be peeked at."""
        if self.tls is not None:
            return False
        with contextlib.suppress(OSError):
            return self.sock.recv(1, socket.MSG_PEEK) not in (b"!", b"")
        return False

    @property
    def is_unfinished(self) -> bool:
        """Return True if the rest of a line, a hello or a TLS handshake is still to come."""
        if self.length or self.tls is None:
            return self.length > 0
        return (self.phase == GREETING or self.raw is not None) and self.tls.is_shaking

    @property
    def is_done(self) -> bool:
        """Return True if no more will be received and every reply is sent."""
        return self.phase == CLOSING and self.replies.is_complete

    def send_replies(self) -> bool:
        """Hand pending replies to the kernel. Returns False if the connection is broken."""
        replies = self.replies
        while True:
            if replies.refusal:
                replies.write_refusals()
            if not replies.pending:
                return True
            try:
                replies.send(self.sock)
                self.was_active = True
            except BlockingIOError:
                return True
            except OSError:
                return False


class ConnectionTable:
    """All open connections: by descriptor, by the name that their replies carry, by producer name.

    Iterating over the table gives every connection once.
    """

    def __init__(self) -> None:
        self._by_fd: dict[int, Connection] = {}
        self._by_sender: dict[bytes, Connection] = {}
        self._by_producer: dict[bytes, Connection] = {}

    def __len__(self) -> int:
        return len(self._by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._by_fd.values())

    def add(self, connection: Connection) -> None:
        """Add a new connection, which has no name yet."""
        self._by_fd[connection.sock.fileno()] = connection

    def give_name(
        self, connection: Connection, sender: Sender, producer: bytes, attempt: "Attempt | None" = None
    ) -> None:
        """Enter the connection under the name of its replies, and under its producer name unless that is b""."""
        connection.sender, connection.producer, connection.attempt = sender, producer, attempt
        self._by_sender[sender.name] = connection
        if producer:
            self._by_producer[producer] = connection

    def remove(self, connection: Connection) -> None:
        """Remove the connection with all its names. Its socket must still be open."""
        del self._by_fd[connection.sock.fileno()]
        if connection.sender is not None:
            del self._by_sender[connection.sender.name]
            if self._by_producer.get(connection.producer) is connection:
                del self._by_producer[connection.producer]

    def at(self, fd: int) -> Connection | None:
        """Return the connection with this descriptor."""
        return self._by_fd.get(fd)

    def of_sender(self, name: bytes) -> Connection | None:
        """Return the connection whose replies carry this name; None if it has ended, or was an earlier ingress's."""
        return self._by_sender.get(name)

    def later_attempt(self, hello: "Hello") -> "Attempt | None":
        """Return the attempt that has the producer name, if it is later than this hello's, and of the same run."""
        holder, this = self._by_producer.get(hello.producer), hello.attempt
        last = holder.attempt if holder is not None else None
        return last if this and last and this.is_before(last) else None

    def take_producer(self, producer: bytes) -> Connection | None:
        """Take the producer name from the connection that has it, and return that connection."""
        connection = self._by_producer.pop(producer, None)
        if connection is not None:
            connection.producer = b""
        return connection

    @property
    def unanswered(self) -> int:
        """Received messages without a reply."""
        return sum(each.replies.taken - each.replies.answered for each in self._by_sender.values())

    @property
    def owes_replies(self) -> bool:
        """Return True if a connection waits for a reply to a message or a question."""
        every = (connection.replies for connection in self._by_sender.values())
        return any(replies.answered < replies.taken or replies.questions for replies in every)


# --- end -------------------------------------------------------------------------------------------------------------

_RESET, _ORDERLY = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
_MOST_OPEN = 16  # refused sockets that stay open for a moment


def reset_on_close(sock: socket.socket) -> None:
    """Make every end of this connection a reset, until `close_in_order` is called."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def close_in_order(connection: Connection) -> None:
    """End a connection in order. All its whole lines must be in the FIFO."""
    if connection.tls is not None:
        connection.tls.say_end()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
    connection.sock.close()


class Farewells:
    """Refused connections that have their `!err` reply.

    Up to 16 of them stay open until the sweep after the next one. An immediate reset would discard the `!err` before
    the producer reads it.
    """

    def __init__(self) -> None:
        self._recent: list[socket.socket] = []  # since the last sweep
        self._older: list[socket.socket] = []

    def refuse(self, sock: socket.socket, reply: bytes) -> None:
        """Send `reply`, then reset the connection. An orderly end would mean that its lines were handed over."""
        with contextlib.suppress(OSError):
            sock.send(reply)
        if len(self._recent) < _MOST_OPEN:
            self._recent.append(sock)
        else:
            sock.close()

    def sweep(self) -> None:
        """Close the connections that were refused before the last sweep."""
        for sock in self._older:
            sock.close()
        self._older, self._recent = self._recent, []
