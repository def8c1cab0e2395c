"""Every reason for which a request is not served: one code, and what it means on each protocol.

    !err <n> <code> <text>            line protocol                    kmq/ingress, kmq/framing
    {"code": <code>, "message": …}    HTTP, with the status `http`     kmq/gateway/http
    <grpc>: "<code>: <text>"          gRPC, with the status `grpc`     kmq/gateway/grpc
    kmq.Refused.code                  Python clients                   kmq/client

Invariant   A code never changes its meaning. No code without a row here is ever sent (tests/unit/test_refusals.py).
Not covered How often a code was sent (kmq/gateway/core/metrics.py), and `reason` of stages that are not ready
            (kmq/broker/health.py): those describe a broker, not a request.
"""

from kmq.errors import EXIT_CONFIG, EXIT_CORRUPT, EXIT_FAILED, EXIT_RETRY

# What is refused.
MESSAGE = "message"  # one message: the connection continues; a plain line becomes a record of dead.malformed
CONNECTION = "connection"  # a connection, or all its later messages
REQUEST = "request"  # one request to the gateway
CLIENT = "client"  # found by the client, never sent by a broker: the client ends its connection

# The classes in which ingress counts refusals: words `errs_…` of its row of the stats page.
AUTH, FORMAT, LIMIT, ORDER = CLASSES = ("auth", "format", "limit", "order")

# Rows that agree in more than one column: gRPC status, HTTP status, exit code of a program that gives up, class.
_BAD = ("INVALID_ARGUMENT", 400, EXIT_FAILED, FORMAT)
_LONG = ("RESOURCE_EXHAUSTED", 413, EXIT_FAILED, FORMAT)
_MANY = ("RESOURCE_EXHAUSTED", 429, EXIT_FAILED, LIMIT)
_UNKNOWN = ("NOT_FOUND", 404, EXIT_FAILED, FORMAT)
_LATER = ("UNAVAILABLE", 503, EXIT_RETRY, LIMIT)
_ENDS = ("UNAVAILABLE", 503, EXIT_RETRY, ORDER)
_STALE = ("FAILED_PRECONDITION", 409, EXIT_FAILED, ORDER)
_EXISTS = ("ALREADY_EXISTS", 409, EXIT_FAILED, ORDER)
_NEVER = ("FAILED_PRECONDITION", 409, EXIT_CONFIG, ORDER)  # refused as long as the broker has these settings
_MAY_NOT = ("PERMISSION_DENIED", 403, EXIT_CONFIG, FORMAT)
_FULL = ("UNAVAILABLE", 507, EXIT_RETRY, LIMIT)
_BUG = ("INTERNAL", 500, EXIT_CONFIG, FORMAT)  # broker and client do not understand one another


class Refusal:
    """One row.

    `is_retryable`: the same request may be served later, so the sender repeats it unchanged. `counted`: one of CLASSES.
    """

    __slots__ = ("code", "counted", "exit_code", "grpc", "http", "is_retryable", "scope", "text")

    def __init__(
        self, scope: str, code: str, meaning: tuple[str, int, int, str], text: str, retry: bool = False
    ) -> None:
        self.scope, self.code, self.text, self.is_retryable = scope, code, text, retry
        self.grpc, self.http, self.exit_code, self.counted = meaning


_ROWS = (
    Refusal(MESSAGE, "empty_line", _BAD, "the line is empty"),
    Refusal(MESSAGE, "control_byte", _BAD, "the line begins with !, + or -"),
    Refusal(MESSAGE, "nul", _BAD, "the line holds a NUL"),
    Refusal(MESSAGE, "no_separator", _BAD, "the line has no |, so it has no fields"),
    Refusal(MESSAGE, "empty_routing_key", _BAD, "the routing key is empty"),
    Refusal(MESSAGE, "bad_topic", _BAD, "the topic's name must match [A-Za-z0-9_][A-Za-z0-9_.-]{0,199}"),
    Refusal(MESSAGE, "reserved_topic", _BAD, "append, dropped and names that begin with __ are KMQ's own"),
    Refusal(MESSAGE, "too_long", _LONG, "the line is over KMQ_MAX_LINE bytes"),
    Refusal(MESSAGE, "no_newline", _BAD, "the connection ended before the line did"),
    Refusal(MESSAGE, "not_json", _BAD, "the line came to an intake with :json, and is no JSON value"),
    Refusal(MESSAGE, "too_many_topics", _MANY, "KMQ_MAX_TOPICS topics exist, or no inodes are left for another one"),
    Refusal(MESSAGE, "unknown_topic", _UNKNOWN, "no such topic is declared, and KMQ_AUTO_CREATE_TOPICS is off"),
    Refusal(MESSAGE, "unknown_partition", _UNKNOWN, "the topic has no such partition"),
    Refusal(MESSAGE, "bad_id", _BAD, "the id is none that this connection may send"),
    Refusal(MESSAGE, "id_reused", _EXISTS, "the id was stored before with other content"),
    Refusal(MESSAGE, "id_too_old", _STALE, "the id is below the last one stored, and not known as stored itself"),
    Refusal(MESSAGE, "id_gap", _STALE, "the id that must be stored before this one is not"),
    Refusal(
        MESSAGE,
        "producers_full",
        _MANY,
        "as many names are remembered already as KMQ_PRODUCERS or KMQ_KAFKA_PRODUCERS says",
    ),
    Refusal(CONNECTION, "disk_full", _FULL, "the disk has no room for more; what is on the way will be stored", True),
    Refusal(CONNECTION, "quota", _FULL, "KMQ_DATA_QUOTA is reached; what is on the way will be stored", True),
    Refusal(
        CONNECTION, "not_enough_replicas", _LATER, "too few replicas answer; what is on the way will be stored", True
    ),
    Refusal(
        CONNECTION, "no_leader", _LATER, "no broker of the shard leads now, or none can be reached from here", True
    ),
    Refusal(CONNECTION, "stopping", _ENDS, "the process is stopping", True),
    Refusal(CONNECTION, "busy", _LATER, "too much waits for the broker already", True),
    Refusal(
        CONNECTION, "connections", _LATER, "KMQ_CONNECTIONS, or as many as ulimit -n allows, are open already", True
    ),
    Refusal(CONNECTION, "fenced", _STALE, "a newer connection, member or generation of the same name is in force"),
    Refusal(
        CONNECTION,
        "bad_hello",
        ("INVALID_ARGUMENT", 400, EXIT_CONFIG, FORMAT),
        "the first line is no !hello that ingress knows",
    ),
    Refusal(CONNECTION, "bad_unit", _BAD, "what came is not what !unit says"),
    Refusal(
        CONNECTION,
        "unauthorized",
        ("UNAUTHENTICATED", 401, EXIT_CONFIG, AUTH),
        "a token that `kmq token new` made is required",
    ),
    Refusal(CONNECTION, "forbidden", _MAY_NOT, "the token has no role for this, or nobody may do it here"),
    Refusal(CONNECTION, "session_timeout", _STALE, "the member gave no sign of life for its session timeout"),
    Refusal(CONNECTION, "poll_timeout", _STALE, "the member asked for no records for its max.poll.interval"),
    Refusal(CONNECTION, "rebalance_timeout", _STALE, "the member did not answer a rebalance in its rebalance timeout"),
    Refusal(CONNECTION, "drop_oldest", _NEVER, "the ring framed may drop messages, so none can be acknowledged"),
    Refusal(REQUEST, "bad_request", _BAD, "an argument is missing or wrong"),
    Refusal(
        REQUEST,
        "bad_field",
        ("INVALID_ARGUMENT", 422, EXIT_FAILED, FORMAT),
        "one field is missing, unknown or wrong; `field` names it",
    ),
    Refusal(
        REQUEST,
        "cross_site",
        _MAY_NOT,
        "a browser sent this for a page of another site, or under a name that is not this broker's",
    ),
    Refusal(REQUEST, "empty_id", _BAD, "message_id must not be empty: a retry is recognised by it"),
    Refusal(REQUEST, "bad_name", _BAD, "the name of a group or member is too long, or holds a space or a control"),
    Refusal(REQUEST, "bad_timeout", _BAD, "a timeout of a group's member is out of its limits"),
    Refusal(REQUEST, "unknown_assignor", _BAD, "no assignor has this name"),
    Refusal(REQUEST, "assignor_differs", _STALE, "the group's members have agreed on another assignor"),
    Refusal(
        REQUEST, "group_kind", _STALE, "one of the group's members assigns (kind kafka), or the broker does (kind kmq)"
    ),
    Refusal(
        REQUEST,
        "kafka_owner",
        _STALE,
        "a member by Kafka's protocol owns the partition, and what is given back does not come to it",
    ),
    Refusal(REQUEST, "unknown_member", _STALE, "the group has no such member now; join again"),
    Refusal(REQUEST, "unknown_group", _UNKNOWN, "no group of this name is known"),
    Refusal(REQUEST, "group_not_empty", _STALE, "the group has members"),
    Refusal(REQUEST, "too_many_groups", _MANY, "as many groups as may be known are known already"),
    Refusal(REQUEST, "too_many_members", _MANY, "the group, or all groups together, have as many members as they may"),
    Refusal(REQUEST, "subscription_too_large", _LONG, "a group's member subscribes to more than it may"),
    Refusal(REQUEST, "not_found", _UNKNOWN, "nothing is stored there"),
    Refusal(
        REQUEST,
        "method_not_allowed",
        ("UNIMPLEMENTED", 405, EXIT_FAILED, FORMAT),
        "this path is not served with this method",
    ),
    Refusal(REQUEST, "topic_exists", _EXISTS, "a topic of this name exists with another declaration"),
    Refusal(
        REQUEST,
        "out_of_range",
        ("OUT_OF_RANGE", 416, EXIT_FAILED, FORMAT),
        "the partition has no such offset; `first` and `end` say which it has",
    ),
    Refusal(REQUEST, "too_large", _LONG, "the request is over a limit of the gateway"),
    Refusal(REQUEST, "too_many", _MANY, "as many as may be open at a time are open already", True),
    Refusal(REQUEST, "offsets_full", _MANY, "the gateway holds as many groups, or committed offsets, as it may"),
    Refusal(
        REQUEST, "not_answered", _LATER, "the message may or may not be stored; the same id again stores it once", True
    ),
    Refusal(REQUEST, "not_routed", _LATER, "the record is on disk and not in its queue yet", True),
    Refusal(
        REQUEST,
        "stored_not_routed",
        ("DEADLINE_EXCEEDED", 504, EXIT_RETRY, FORMAT),
        "the message is on disk as `seq`, but not in its partition yet; the same id again stores it once",
        True,
    ),
    Refusal(REQUEST, "not_ready", _LATER, "the broker has not recovered yet", True),
    Refusal(REQUEST, "cold", _LATER, "the records lie in KMQ_TIER, and are not fetched in yet; ask again", True),
    Refusal(REQUEST, "damaged", ("DATA_LOSS", 500, EXIT_CORRUPT, FORMAT), "the files are damaged there"),
    Refusal(REQUEST, "internal", _BUG, "the broker or the gateway failed; its log says more"),
    Refusal(CLIENT, "not_kmq", _LATER, "what listens there does not answer !hello as KMQ does", True),
    Refusal(CLIENT, "protocol", _LATER, "the broker sent a reply that does not fit what it was sent", True),
)
_BY_CODE = {row.code: row for row in _ROWS}
_INTERNAL = _BY_CODE["internal"]
# Temporary refusals by a broker. They apply to the whole connection: reconnect later, and send the messages again.
RETRYABLE = frozenset(row.code for row in _ROWS if row.is_retryable and row.scope == CONNECTION)
# A member of a group that the broker has ended for one of these joins again.
REJOIN = frozenset({"session_timeout", "poll_timeout", "rebalance_timeout", "unknown_member"})
GONE = ("unknown_topic", "unknown_partition")  # the topic or partition does not exist, or was deleted


def table() -> tuple[Refusal, ...]:
    """Return all rows in reading order: messages, connections, requests, the client's own."""
    return _ROWS


def by_code(code: str) -> Refusal:
    """Return the row of `code`, which this version sends. Raises KeyError for any other."""
    return _BY_CODE[code]


def find(code: str) -> Refusal:
    """Return the row of `code` as received; a code of another version counts as `internal`."""
    return _BY_CODE.get(code, _INTERNAL)


def of_key(reason: str) -> str:
    """Return why a routing key is invalid. `reason`: of record.key_refusal, whose `separator` has no row here."""
    return "it must not hold | or a newline" if reason == "separator" else find(reason).text


def reason(code: str, text: str = "") -> str:
    """Return what follows `!err <n> `: the code and `text`, or the code and its own text."""
    return f"{code} {text or _BY_CODE[code].text}"
