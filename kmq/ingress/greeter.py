"""The hello of a connection: who may send, and under which name its replies come back.

Invariant   With KMQ_TOKENS nothing is taken from a connection that has not shown a valid token with the role for it. A
            producer name belongs to the connection that said hello last: every older one is refused from then on
            (`fenced`).
            Only a connection that has shown the pod's local token is announced to the framer as one that may write to
            reserved topics.
"""

import time

from kmq.access.local_token import LocalToken
from kmq.access.roles import LINES_IN
from kmq.broker.incidents import Strangers
from kmq.broker.stage import Stage
from kmq.ingress.connection import ACKED, Connection
from kmq.ingress.gate import Gate
from kmq.ingress.hello import Refused, parse
from kmq.ingress.table import ConnectionTable
from kmq.links.raw import Sender
from kmq.wire import refusals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kmq.access.tokens import Tokens

UNAUTHORIZED = refusals.reason(
    "unauthorized", "say: !hello acks=0|1|all token=<token>, with one that `kmq token new` has made"
)
NOT_LOCAL = refusals.reason("unauthorized", "reserved=1 needs the token in KMQ_PIPES/local.token of the broker's pod")


class Greeter:
    """Answers hellos."""

    def __init__(
        self, stage: Stage, gate: Gate, tokens: "Tokens | None", table: ConnectionTable, strangers: Strangers
    ) -> None:
        self.tokens = tokens  # None: no token is required
        self._settings, self._gate, self._table, self._strangers = stage.settings, gate, table, strangers
        self._local = LocalToken(stage.settings)
        self._start = time.time_ns()  # replies meant for an earlier ingress must not reach a connection of ours
        self._greeted = 0

    def greet(self, connection: Connection, line: bytes) -> None:
        """Give the connection what its hello asks for. Raises Refused."""
        hello = parse(line)
        if self.tokens is not None:
            self._authorize(connection, hello.token, self.tokens)
        if hello.reserved and not self._local.matches(hello.token):
            self._strangers.refuse(connection.peer, "reserved topics without the local token", "local")
            raise Refused(NOT_LOCAL)
        if (self._settings.policy_framed or self._settings.policy) == "drop_oldest":
            raise Refused(refusals.reason("drop_oldest"))
        if self._gate.refusal:
            raise Refused(self._gate.refusal.decode())
        self._fence(hello.producer, connection.peer)
        if not (hello.acks or hello.tag):
            return  # as without a hello: refused lines become dead.malformed, because the producer wants no replies
        self._greeted += 1
        connection.replies.expect(hello)
        if hello.acks:
            connection.phase = ACKED
        sender = Sender(b"%d.%d" % (self._start, self._greeted), hello.tag, hello.reserved)
        self._table.give_name(connection, sender, hello.producer)

    def _authorize(self, connection: Connection, token: bytes, tokens: "Tokens") -> None:
        holder = tokens.find(token)
        if holder is None:
            self._strangers.refuse(connection.peer, "no valid token", "" if token else "token")
            raise Refused(UNAUTHORIZED)
        if not holder.may(LINES_IN):
            self._strangers.refuse(connection.peer, f"the token of {holder.name} may not produce")
            raise Refused(refusals.reason("forbidden", holder.refusal(LINES_IN)))

    def _fence(self, producer: bytes, newcomer: str) -> None:
        older = self._table.take_producer(producer)
        if older is not None:
            self._strangers.note("fenced", older.peer, f"producer={producer.decode()} by={newcomer}")
            older.replies.refusal = refusals.reason("fenced").encode()
