"""What a token may do: one table for every door.

    produce    send messages
    consume    read messages; join groups, commit and move their offsets
    admin      everything, also topics, other people's groups, dead letters

Invariant   A door serves an act only if the token's roles allow it by `may`. An act without a row here is for admins
            alone, so that a forgotten act is refused, not open (tests/unit/test_roles.py knows all acts).
Not covered Which topics: a role is for all of them. Without KMQ_TOKENS there are no roles, and this table is not used.
"""

from collections import namedtuple

PRODUCE, CONSUME, ADMIN = "produce", "consume", "admin"
ROLES = (PRODUCE, CONSUME, ADMIN)
ALL = frozenset(ROLES)
ANY = "any"  # any valid token

LINES_IN, LINES_OUT, GET_ACK, GET_STATUS = "lines in", "lines out", "GET_ACK", "GET_STATUS"
_ACTS = {
    PRODUCE: (
        *(LINES_IN, "/podbus.v1.PodBus/Produce", "/podbus.v1.PodBus/ProduceStream", "/kmq.v1.Kmq/Produce"),
        "produce",
        *("Kafka.Produce", "Kafka.InitProducerId", "Kafka.AddPartitionsToTxn", "Kafka.AddOffsetsToTxn"),
        *("Kafka.EndTxn", "Kafka.TxnOffsetCommit", "Kafka.DescribeTransactions", "Kafka.ListTransactions"),
    ),
    CONSUME: (
        *(LINES_OUT, "/podbus.v1.PodBus/Consume", "/podbus.v1.PodBus/ConsumeStream"),
        *("/kmq.v1.Kmq/Fetch", "/kmq.v1.Kmq/Subscribe"),
        *("consume", "commit", "nack", "seek", "joinGroup", "heartbeat", "leaveGroup"),
        *("messages", "follow", "letters", "ledger", "findOffset", "cuts", "logRows", "records"),
        *("Kafka.Fetch", "Kafka.ListOffsets", "Kafka.OffsetForLeaderEpoch", "Kafka.DescribeProducers"),
        *("Kafka.OffsetCommit", "Kafka.OffsetFetch", "Kafka.FindCoordinator", "Kafka.JoinGroup", "Kafka.SyncGroup"),
        *("Kafka.Heartbeat", "Kafka.LeaveGroup", "Kafka.DescribeGroups", "Kafka.ListGroups"),
        *("Kafka.ConsumerGroupHeartbeat", "Kafka.ConsumerGroupDescribe"),
    ),
    ANY: (
        *(GET_ACK, GET_STATUS, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        *("listTopics", "topics", "describeTopic", "listGroups", "describeGroup", "overview", "history", "events"),
        *("overviewTopics", "cluster"),
        *("groupHistory", "session", "broker", "topicFiles", "logFiles", "console", "consoleFile", "pages", "docs"),
        *("openapi", "health", "readiness", "metrics"),
        *("Kafka.Metadata", "Kafka.DescribeCluster", "Kafka.DescribeConfigs", "Kafka.DescribeLogDirs"),
        "Kafka.DescribeAcls",
    ),
    ADMIN: (
        *("createTopic", "changeTopic", "deleteTopic", "deleteGroup", "replay", "resetGroup"),
        *("Kafka.CreateTopics", "Kafka.DeleteTopics", "Kafka.CreatePartitions", "Kafka.DeleteRecords"),
        *("Kafka.AlterConfigs", "Kafka.IncrementalAlterConfigs", "Kafka.DeleteGroups", "Kafka.OffsetDelete"),
        *("Kafka.DescribeScramUsers", "Kafka.AlterScramUsers"),
    ),
}
NEEDED = {act: role for role, acts in _ACTS.items() for act in acts}


class Holder(namedtuple("Holder", ("name", "roles"))):
    """The name and the roles of a token that was shown."""

    __slots__ = ()
    name: str
    roles: frozenset[str]

    def may(self, act: str) -> bool:
        """Return True if these roles allow it."""
        needed = NEEDED.get(act, ADMIN)
        return needed == ANY or needed in self.roles or ADMIN in self.roles

    def refusal(self, act: str) -> str:
        """Return the text of the refusal."""
        needed = NEEDED.get(act, ADMIN)
        has = f"the token of {self.name} has {text(self.roles)} and may not do {act}"
        return f"{has}; this needs {needed}: kmq token new <name> --role {needed}"


def parse(words: str) -> frozenset[str] | None:
    """Return the roles in `a,b`; None if one is unknown."""
    found = frozenset(words.split(","))
    return found if found <= ALL else None


def text(roles: frozenset[str]) -> str:
    """Return roles as the token file has them, in one order."""
    return ",".join(role for role in ROLES if role in roles)
