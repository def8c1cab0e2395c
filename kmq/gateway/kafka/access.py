"""Access of Kafka clients: SASL, and the roles of a client's token.

    SaslHandshake PLAIN, then SaslAuthenticate with user "any", password <token>    → error 0; may do what its role may

PLAIN       The password is a token of KMQ_TOKENS; the user's name may be any.
SCRAM       The user is a name of KMQ_TOKENS, the password its token. Only for tokens prepared for it
            (kmq/access/scram.py).
Steps       SaslHandshake names the mechanism. After its version 1 each step is a SaslAuthenticate request. After
            version 0, which old clients send, a step is only the length and bytes of SASL, and so is the answer.
Invariant   A client that fails is told so, and its connection ends: a connection has one try. A client that has shown
            its token cannot show another one on that connection.
Open        Without KMQ_TOKENS no token is needed, and every token is accepted: clients need no other configuration.
"""

from collections.abc import Mapping

from kmq.access import roles, scram
from kmq.access.tokens import Tokens
from kmq.broker.stats import Strangers
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.connection import ApiHandler, Call, Connection, Handler
from kmq.gateway.kafka.wire import ErrorCode, Fields, Key

BEFORE = (Key.API_VERSIONS, Key.SASL_HANDSHAKE, Key.SASL_AUTHENTICATE)  # served before a client has shown a token
_BY_HAND = (Key.PRODUCE, Key.FETCH)  # their handlers ask `may` themselves, and refuse each partition
_MECHANISMS = ("PLAIN", *scram.MECHANISMS)
_BARE = 0  # version of SaslHandshake after which no step has a header

_TOPIC, _GROUP = ErrorCode.topic_authorization_failed, ErrorCode.group_authorization_failed
_CLUSTER = ErrorCode.cluster_authorization_failed
_FORBIDDEN: Mapping[Key, ErrorCode] = {
    **dict.fromkeys((Key.LIST_OFFSETS, Key.OFFSET_FOR_LEADER_EPOCH, Key.DESCRIBE_PRODUCERS), _TOPIC),
    **dict.fromkeys((Key.CREATE_TOPICS, Key.DELETE_TOPICS, Key.CREATE_PARTITIONS, Key.DELETE_RECORDS), _TOPIC),
    **dict.fromkeys((Key.ALTER_CONFIGS, Key.INCREMENTAL_ALTER_CONFIGS), _TOPIC),
    **dict.fromkeys(
        (Key.OFFSET_COMMIT, Key.OFFSET_FETCH, Key.FIND_COORDINATOR, Key.JOIN_GROUP, Key.SYNC_GROUP), _GROUP
    ),
    **dict.fromkeys((Key.HEARTBEAT, Key.LEAVE_GROUP, Key.DESCRIBE_GROUPS, Key.LIST_GROUPS), _GROUP),
    **dict.fromkeys((Key.CONSUMER_GROUP_HEARTBEAT, Key.CONSUMER_GROUP_DESCRIBE), _GROUP),
    **dict.fromkeys((Key.DELETE_GROUPS, Key.OFFSET_DELETE), _GROUP),
}  # any other one: _CLUSTER
_TRANSACTIONS = 1  # key_type of FindCoordinator: what a producer asks for
_OF_TRANSACTIONS = (Key.ADD_PARTITIONS_TO_TXN, Key.DESCRIBE_TRANSACTIONS)  # these have the id in another field


class _NotKnown(Exception):
    """The client has not shown a valid token. The text may be sent to it."""


class _Dialog:
    """The state of a client's SASL exchange."""

    def __init__(self) -> None:
        self.mechanism = ""  # named by the client
        self.is_bare = False
        self.has_failed = self.is_done = False
        self.exchange: scram.ScramExchange | None = None  # once it has begun
        self.holders: list[roles.Holder] = []  # token holders that may be the client


class AccessHandler(ApiHandler):
    """Knows the token holder of each connection."""

    def __init__(self, tokens: Tokens | None, strangers: Strangers) -> None:
        self._tokens, self._strangers = tokens, strangers
        self._dialogs: dict[Connection, _Dialog] = {}
        self.handlers: dict[Key, Handler] = {
            Key.SASL_HANDSHAKE: self._handshake,
            Key.SASL_AUTHENTICATE: self._authenticate,
        }

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._dialogs.pop(connection, None)

    # --- roles -------------------------------------------------------------------------------------------------------

    def refusal(self, call: Call) -> Fields | None:
        """Return the refusal of a request that this client may not send; None if it may."""
        key = Key(call.header.key)
        needed = key
        if key == Key.FIND_COORDINATOR and getattr(call.body, "key_type", 0) == _TRANSACTIONS:
            needed = Key.INIT_PRODUCER_ID
        if key in (*BEFORE, *_BY_HAND) or call.holder is None or call.may(needed):
            return None
        self._strangers.refuse(call.connection.peer, f"{key.act}: the token of {call.holder.name} may not")
        code = _FORBIDDEN.get(key, _CLUSTER)
        if needed != key or key in _OF_TRANSACTIONS or getattr(call.body, "transactional_id", None) is not None:
            code = ErrorCode.transactional_id_authorization_failed
        call.errors.append(code)
        return wire.refusal(call.header, call.body, code, call.holder.refusal(needed.act))

    # --- SASL --------------------------------------------------------------------------------------------------------

    def has_failed(self, connection: Connection) -> bool:
        """Return True for a client that was refused: no more data is received from it."""
        dialog = self._dialogs.get(connection)
        return dialog is not None and dialog.has_failed

    def is_bare(self, connection: Connection) -> bool:
        """Return True if the next frame has no header."""
        dialog = self._dialogs.get(connection)
        return dialog is not None and dialog.is_bare and not dialog.is_done

    async def _handshake(self, call: Call) -> Fields:
        dialog = self._dialogs.setdefault(call.connection, _Dialog())
        code = ErrorCode.none
        if dialog.mechanism:
            code, dialog.has_failed = ErrorCode.illegal_sasl_state, not dialog.is_done
        elif call.body.mechanism not in _MECHANISMS:
            code, dialog.has_failed = ErrorCode.unsupported_sasl_mechanism, True
        else:
            dialog.mechanism, dialog.is_bare = call.body.mechanism, call.version == _BARE
        return {"error_code": code, "mechanisms": _MECHANISMS}

    async def _authenticate(self, call: Call) -> Fields:
        dialog = self._dialogs.setdefault(call.connection, _Dialog())
        if not dialog.mechanism or dialog.is_done:
            dialog.has_failed = not dialog.is_done
            text = "the token was shown before" if dialog.is_done else "say SaslHandshake first"
            return {"error_code": ErrorCode.illegal_sasl_state, "error_message": text}
        reply, refused = self._step(call.connection, dialog, call.body.auth_bytes)
        code = ErrorCode.sasl_authentication_failed if refused else ErrorCode.none
        return {"error_code": code, "error_message": refused or None, "auth_bytes": reply}

    def bare(self, connection: Connection, frame: bytes) -> bytes:
        """Return the answer to a step without a header. Raises ConnectionAbortedError if it fails, as Kafka does."""
        reply, refused = self._step(connection, self._dialogs[connection], frame)
        if refused:
            raise ConnectionAbortedError(refused)
        return len(reply).to_bytes(4) + reply

    def _step(self, connection: Connection, dialog: _Dialog, said: bytes) -> tuple[bytes, str]:
        """Return the answer to a step, and why the client is refused; "" if it is not."""
        try:
            if dialog.mechanism == "PLAIN":
                reply = self._plain(connection, said)
            elif dialog.exchange is None:
                return self._begin_scram(dialog, said), ""
            else:
                reply = self._end_scram(connection, dialog, dialog.exchange, said)
        except (_NotKnown, scram.ScramError) as err:
            dialog.has_failed = True
            return b"", str(err)
        dialog.is_done = connection.is_known = True
        return reply, ""

    def _plain(self, connection: Connection, said: bytes) -> bytes:
        words = said.split(b"\0")
        if len(words) != 3:
            raise _NotKnown("PLAIN is: authorization, user and password, with a zero byte between them")
        if self._tokens is not None:
            connection.holder = self._tokens.find(words[2])
            if connection.holder is None:
                self._strangers.refuse(connection.peer, "Kafka without a valid token", "" if words[2] else "token")
                raise _NotKnown("the password must be a token that `kmq token new` has made")
        return b""

    def _begin_scram(self, dialog: _Dialog, said: bytes) -> bytes:
        hash = scram.MECHANISMS[dialog.mechanism]

        def find(user: str) -> scram.ScramUser:
            if self._tokens is None:
                raise _NotKnown("this broker has no tokens (KMQ_TOKENS): use PLAIN, or no SASL")
            found, dialog.holders = self._tokens.find_scram(user, hash)
            return found

        dialog.exchange = scram.ScramExchange(hash, find)
        return dialog.exchange.first(said)

    def _end_scram(self, connection: Connection, dialog: _Dialog, exchange: scram.ScramExchange, said: bytes) -> bytes:
        try:
            reply = exchange.last(said)
        except scram.ScramError:
            self._strangers.refuse(connection.peer, f"Kafka with {dialog.mechanism} without a valid token")
            raise
        connection.holder = dialog.holders[exchange.found]
        return reply
