"""The ack port: one question in, one line out, from durability's cursor in the stats page.

    GET_ACK <seq> [token=<token>]     ACK (durable), PENDING, or ERR and why; a token is needed where KMQ_TOKENS is set

Memory      At most `most` connections, each with an unfinished question of at most MAX_QUESTION bytes. Replies are
            never kept: a connection whose kernel takes no more replies is closed.
Deadline    KMQ_LINE_DEADLINE from the connection, or from its last answer, to the next question that can be answered.
Full        A newcomer evicts the connection that has been without an answer for longest, so silent connections shut
            nobody out.
"""

import contextlib
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable

from kmq.broker.incidents import Strangers
from kmq.broker.stage import Stage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kmq.access.tokens import Tokens

MAX_QUESTION = 256  # bytes of a line: a token is at most 108
_RECEIVE_BYTES = 4096
_MAX_DIGITS = 20  # more than any seq has
_UNAUTHORIZED = b"ERR unauthorized: say GET_ACK <seq> token=<token>, with one that `kmq token new` has made\n"
_USAGE = b"ERR expected: GET_ACK <seq>\n"


def most_askers(descriptors: int) -> int:
    """Return how many connections the ack port may have if the process may have this many descriptors."""
    return min(256, max(8, descriptors // 16))


def answer(question: bytes, durable_seq: int, is_token: Callable[[bytes], object] | None = None) -> bytes:
    """Return the reply to one line. `is_token` checks a token; None: no token is required."""
    verb, _, rest = question.strip().partition(b" ")
    number, _, shown = rest.partition(b" ")
    name, _, token = shown.strip().partition(b"=")
    if verb != b"GET_ACK" or not number.isdigit() or (shown and name != b"token"):
        return _USAGE
    if is_token is not None and not is_token(token):
        return _UNAUTHORIZED
    return b"ACK\n" if len(number) <= _MAX_DIGITS and 0 < int(number) <= durable_seq else b"PENDING\n"


class Askers:
    """The connections of the ack port."""

    def __init__(self, stage: Stage, poll: select.epoll, tokens: "Tokens | None", strangers: Strangers) -> None:
        """`poll`: where the connections are registered; whoever waits for it calls `serve`."""
        self.most = most_askers(stage.most_files)
        self._poll, self._deadline_s = poll, stage.settings.line_deadline
        self._is_token = tokens.check if tokens is not None else None
        self._row, self._durability, self._strangers = stage.row, stage.page.rows["durability"], strangers
        self._unfinished: dict[int, bytes] = {}
        # Socket, peer, and since when it has had no answer; the longest first.
        self._waiting: OrderedDict[int, tuple[socket.socket, str, float]] = OrderedDict()

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    def take(self, sock: socket.socket, peer: str) -> None:
        """Serve a new connection, and evict another one for it if there are too many."""
        if len(self._waiting) >= self.most:
            oldest, (_, evicted, _) = next(iter(self._waiting.items()))
            self._row.turned_away += 1
            self._strangers.note("asker_evicted", evicted, f"{self.most} are open on the ack port")
            self._close(oldest)
        fd = sock.fileno()
        self._waiting[fd], self._unfinished[fd] = (sock, peer, time.monotonic()), b""
        self._poll.register(fd, select.EPOLLIN)
        self._row.askers = len(self._waiting)

    def serve(self, fd: int) -> None:
        """Answer what has arrived on this connection."""
        sock, peer, _ = self._waiting[fd]
        with contextlib.suppress(OSError):  # gone, or reads no replies: nothing may follow half a reply
            data = sock.recv(_RECEIVE_BYTES)
            *questions, rest = (self._unfinished[fd] + data).split(b"\n")
            self._unfinished[fd] = rest
            replies = [self._answer(question, peer) for question in questions]
            if replies:
                sock.sendall(b"".join(replies))
            if any(not reply.startswith(b"ERR") for reply in replies):
                self._waiting[fd] = (sock, peer, time.monotonic())
                self._waiting.move_to_end(fd)
            if data and len(rest) <= MAX_QUESTION:
                return
        self._close(fd)

    def _answer(self, question: bytes, peer: str) -> bytes:
        reply = answer(question, self._durability.seq, self._is_token)
        if reply is _UNAUTHORIZED:
            self._strangers.refuse(peer, "GET_ACK without a valid token")
        return reply

    def sweep(self) -> None:
        """Close the connections that have missed their deadline. Call about once a second."""
        latest = time.monotonic() - self._deadline_s
        for fd, (_, peer, since) in list(self._waiting.items()):
            if since > latest:
                break
            self._strangers.cut_off(peer, "no question on the ack port")
            self._close(fd)

    def _close(self, fd: int) -> None:
        sock, _, _ = self._waiting.pop(fd)
        del self._unfinished[fd]
        self._poll.unregister(fd)
        sock.close()
        self._row.askers = len(self._waiting)
