"""One producer's connection: what it may send, the line it has not finished, and its replies (replies.py).

    phase      reads it                           an unfinished line, when the connection ends
    GREETING   always                             is refused, and kept nowhere: it may be a hello with a token
    PLAIN      only while messages are accepted   becomes dead.malformed
    ACKED      always: refused messages are told  is refused: no_newline
    CLOSING    never; it only gets its replies    -

GREETING becomes PLAIN by a first line that is no hello, or by one with acks=0, and ACKED by a hello with acks=1. Every
phase becomes CLOSING when nothing more will be received. A `sender` numbers the messages: every connection has one
whose hello asked for replies or for deduplication.

Memory      A producer that leaves more than MAX_PENDING bytes of replies unread, or has more than MAX_UNANSWERED
            messages without a reply, is not read.
"""

import select
import socket

from kmq.config.values import MIB
from kmq.ingress.replies import Replies
from kmq.links.raw import Sender

TYPE_CHECKING = False
if TYPE_CHECKING:  # ssl would cost every stage some megabytes
    from kmq.broker.tls import TlsSocket

GREETING, PLAIN, ACKED, CLOSING = range(4)
MAX_UNANSWERED = 1 << 17  # messages of one connection without a reply: far more than the links hold
MAX_PENDING = MIB  # bytes of replies that a producer may leave unread


class Connection:
    """One producer."""

    __slots__ = (
        "interest",
        "length",
        "partial",
        "peer",
        "phase",
        "producer",
        "quiet_since",
        "replies",
        "sender",
        "sock",
        "tls",
        "unfinished_since",
        "was_active",
    )

    def __init__(self, sock: socket.socket, peer: str, tls: "TlsSocket | None" = None) -> None:
        self.sock, self.peer = sock, peer
        self.tls = tls  # the same socket, if it is a TLS socket
        self.phase = GREETING
        self.partial = bytearray()  # at most max_line + 1 bytes of the unfinished line
        self.length = 0  # of the unfinished line, with the bytes that are not kept
        self.sender: Sender | None = None
        self.producer = b""  # its name, if it has one
        self.replies = Replies()
        self.interest = select.EPOLLIN  # what the epoll of the producers waits for
        # For the deadlines (deadlines.py), by their clock:
        self.was_active = True  # has sent something, or taken a reply, since the last sweep
        self.quiet_since = 0.0
        self.unfinished_since = 0.0  # 0: no sweep has seen this line, or handshake, unfinished

    def may_receive(self, refusal: bytes) -> bool:
        """Return True if more may be read now. `refusal`: that of all connections (gate.py), b"" if there is none."""
        phase = self.phase
        if phase == CLOSING or (refusal and phase == PLAIN):
            return False
        replies = self.replies
        return len(replies.pending) <= MAX_PENDING and replies.taken - replies.answered <= MAX_UNANSWERED

    @property
    def is_unfinished(self) -> bool:
        """Return True if the rest of a line, a hello or a TLS handshake is still to come."""
        return self.length > 0 or (self.tls is not None and self.phase == GREETING and self.tls.is_shaking)

    @property
    def is_done(self) -> bool:
        """Return True if nothing more will be received and every reply is sent."""
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
