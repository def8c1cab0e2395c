"""What administrators and consoles ask of the Kafka port, by real clients against a real broker."""

import os
import re
import signal
import subprocess
import sys

import kafka.errors
import pytest
from brokers import PATIENCE_S, ROOT, Broker
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)
from kafka import KafkaAdminClient
from kafka.admin import ACLFilter, ACLOperation, ACLPermissionType, ACLResourcePatternType, ResourcePatternFilter
from kafka.admin import ResourceType as PythonResourceType
from kafka_client import KafkaClient

from kmq.gateway.kafka.wire import ErrorCode, Key
from kmq.log import topics

PAGE = (ROOT / "docs/kafka.md").read_text()
MOST_BYTES = str((1 << 20) * 3 // 4 - 4096)
FOREVER = str((1 << 63) - 1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("kafka-admin") / "b")
    made.env["KMQ_RETENTION_AGE"] = "7d"
    made.up()
    yield made
    made.close()


def port(broker):
    return int((broker.pipes / "kafka.port").read_text())


@pytest.fixture(scope="module")
def admin(broker):
    return AdminClient({"bootstrap.servers": f"localhost:{port(broker)}"})


@pytest.fixture
def raw(broker):
    with KafkaClient(port(broker)) as client:
        yield client


def done(futures):
    """The name of each error, or None, by topic or resource."""
    found = {}
    for key, future in futures.items():
        try:
            future.result(PATIENCE_S)
            found[key] = None
        except KafkaException as err:
            found[key] = err.args[0].name()
    return found


def create(admin, name, partitions=1, **config):
    config = {key.replace("_", "."): value for key, value in config.items()}
    return done(admin.create_topics([NewTopic(name, partitions, 1, config=config)]))[name]


def settings_of(admin, name, kind=ResourceType.TOPIC):
    resource = ConfigResource(kind, name)
    return admin.describe_configs([resource])[resource].result(PATIENCE_S)


def values_of(admin, name, kind=ResourceType.TOPIC):
    return {key: entry.value for key, entry in settings_of(admin, name, kind).items()}


def change(admin, name, validate_only=False, **changes):
    """Change settings of a topic; a pair has the operation first. Returns the error."""
    entries = []
    for key, value in changes.items():
        operation, text = value if isinstance(value, tuple) else (AlterConfigOpType.SET, value)
        key = key.replace("_", ".")
        entries.append(ConfigEntry(key, text, incremental_operation=operation))
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
    return done(admin.incremental_alter_configs([resource], validate_only=validate_only))[resource]


# --- topics ----------------------------------------------------------------------------------------------------------


def test_a_topic_is_made_in_force_and_deleted(broker, admin):
    assert create(admin, "made", 3, retention_ms="3600000", cleanup_policy="delete") is None
    declared = topics.read(str(broker.data), "made")
    assert (declared.partitions, declared.limits) == (3, {"retention_age": "3600000ms", "cleanup": "delete"})
    assert declared.from_seq is not None
    assert len(admin.list_topics(timeout=30).topics["made"].partitions) == 3
    assert create(admin, "made", 3) == "TOPIC_ALREADY_EXISTS"
    assert done(admin.delete_topics(["made", "none"])) == {"made": None, "none": "UNKNOWN_TOPIC_OR_PART"}
    assert "made" not in topics.names(str(broker.data))


def test_kafka_python_makes_changes_and_deletes_a_topic(broker):
    admin = KafkaAdminClient(bootstrap_servers=f"localhost:{port(broker)}")
    admin.create_topics({"python": {"num_partitions": 2, "configs": {"cleanup.policy": "compact"}}})
    assert "python" in admin.list_topics()
    admin.create_partitions({"python": 4})
    assert len(admin.describe_topics(["python"])[0]["partitions"]) == 4
    with pytest.raises(kafka.errors.TopicAlreadyExistsError):
        admin.create_topics({"python": {"num_partitions": 2}})
    admin.delete_topics(["python"])
    assert "python" not in admin.list_topics()
    admin.close()


@pytest.mark.parametrize("name", ["-x", ".x", "append", "dropped.x", "__own", "x" * 201, "a b", "ü", ""])
def test_a_name_that_a_topic_cannot_have_is_refused_with_the_rule(raw, name):
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": (), "configs": ()}
    answer = raw.ask(Key.CREATE_TOPICS, 4, topics=[topic]).topics[0]
    assert answer.error_code == ErrorCode.invalid_topic_exception
    assert "must match [A-Za-z0-9_]" in answer.error_message


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ({"num_partitions": 0}, ErrorCode.invalid_partitions),
        ({"num_partitions": 1025}, ErrorCode.invalid_partitions),
        ({"replication_factor": 3}, ErrorCode.invalid_replication_factor),
        ({"replication_factor": 0}, ErrorCode.invalid_replication_factor),
        ({"assignments": [{"partition_index": 0, "broker_ids": [0]}]}, ErrorCode.invalid_request),
        (
            {
                "num_partitions": -1,
                "replication_factor": -1,
                "assignments": [{"partition_index": 0, "broker_ids": [0, 1]}],
            },
            ErrorCode.invalid_replica_assignment,
        ),
        (
            {
                "num_partitions": -1,
                "replication_factor": -1,
                "assignments": [{"partition_index": 1, "broker_ids": [0]}],
            },
            ErrorCode.invalid_replica_assignment,
        ),
        ({"configs": [{"name": "retention.ms", "value": "soon"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "retention.ms", "value": "-2"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "retention.ms", "value": str(1 << 63)}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "segment.ms", "value": "-1"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "cleanup.policy", "value": "none"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "message.timestamp.type", "value": "Mine"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "max.message.bytes", "value": "1"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "min.insync.replicas", "value": "2"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "no.such", "value": "1"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "compression.type", "value": "lzma"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "min.cleanable.dirty.ratio", "value": "2"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "flush.ms", "value": "1;x=2"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "min.compaction.lag.ms", "value": "1000"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "unclean.leader.election.enable", "value": "true"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "remote.storage.enable", "value": "yes"}]}, ErrorCode.invalid_config),
        ({"configs": [{"name": "local.retention.ms", "value": "-3"}]}, ErrorCode.invalid_config),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_what_a_topic_cannot_be_is_refused_and_nothing_is_made(broker, raw, topic, code, validate_only):
    asked = {"name": "bad", "num_partitions": 1, "replication_factor": 1, "assignments": (), "configs": ()} | topic
    answer = raw.ask(Key.CREATE_TOPICS, 4, topics=[asked], validate_only=validate_only).topics[0]
    assert answer.error_code == code and answer.error_message
    assert "bad" not in topics.names(str(broker.data))


@pytest.mark.parametrize(
    ("name", "partitions", "config"),
    [
        ("connect-offsets", 25, {"cleanup_policy": "compact"}),
        ("_schemas", 1, {"cleanup_policy": "compact"}),
        # Debezium's history of a database's schemas: for ever.
        ("schema-history", 1, {"cleanup_policy": "delete", "retention_ms": FOREVER, "retention_bytes": "-1"}),
    ],
)
def test_topics_are_made_as_connect_registries_and_debezium_make_theirs(admin, name, partitions, config):
    assert create(admin, name, partitions, **config) is None
    found = values_of(admin, name)
    wanted = {key.replace("_", "."): value for key, value in config.items()}
    assert {key: found[key] for key in wanted} == wanted | ({"retention.ms": "-1"} if "retention_ms" in config else {})


# Settings of topics as products send them: those of their sources, or of their documentation's recipes.
OF_PRODUCTS = {
    "connect-offsets": {"cleanup.policy": "compact", "min.insync.replicas": "1"},
    "connect-source-topic-creation": {"cleanup.policy": "compact", "compression.type": "lz4"},
    "debezium-topic-creation": {
        "cleanup.policy": "delete",
        "retention.ms": "7776000000",
        "compression.type": "producer",
        "delete.retention.ms": "86400000",
        "file.delete.delay.ms": "60000",
        "max.compaction.lag.ms": FOREVER,
        "segment.bytes": "1073741824",
    },
    "debezium-compacted": {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "compression.type": "lz4"},
    "mirrormaker-offset-syncs": {"cleanup.policy": "compact"},
    "mirrormaker-copy-of-a-topic": {
        "compression.type": "zstd",
        "flush.messages": "10000",
        "index.interval.bytes": "8192",
        "message.downconversion.enable": "true",
        "message.timestamp.after.max.ms": "3600000",
        "message.timestamp.before.max.ms": FOREVER,
        "preallocate": "true",
        "segment.index.bytes": "1048576",
        "segment.jitter.ms": "1000",
        "leader.replication.throttled.replicas": "0:1,1:2",
        "follower.replication.throttled.replicas": "*",
    },
    "_schemas": {"cleanup.policy": "compact"},
    "karapace-schemas": {"cleanup.policy": "compact"},
    "streams-repartition": {
        "cleanup.policy": "delete",
        "segment.bytes": "52428800",
        "retention.ms": "-1",
        "message.timestamp.type": "CreateTime",
    },
    "streams-changelog": {"cleanup.policy": "compact", "message.timestamp.type": "CreateTime"},
    "streams-windowed-changelog": {
        "cleanup.policy": "compact,delete",
        "retention.ms": "172800000",
        "message.timestamp.type": "CreateTime",
    },
    "kafka-ui": {
        "cleanup.policy": "delete",
        "retention.ms": "604800000",
        "retention.bytes": "-1",
        "max.message.bytes": MOST_BYTES,
        "min.insync.replicas": "1",
        "unclean.leader.election.enable": "false",
    },
    "untiered": {"remote.storage.enable": "false", "local.retention.ms": "-2", "local.retention.bytes": "-2"},
    "tiered": {"remote.storage.enable": "true", "local.retention.ms": "3600000", "local.retention.bytes": "-1"},
}


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_a_topic_with_the_settings_that_a_product_sends_is_made_and_shows_them(broker, admin, name):
    given, name = OF_PRODUCTS[name], f"of-{name}"
    assert create(admin, name, **{key.replace(".", "_"): value for key, value in given.items()}) is None
    found = settings_of(admin, name)
    assert {key: found[key].value for key in given} == given
    for key in given.keys() & {"min.cleanable.dirty.ratio", "file.delete.delay.ms", "message.timestamp.after.max.ms"}:
        assert found[key].source == 1 and not found[key].is_read_only


def test_settings_of_no_effect_are_changed_kept_and_taken_back(broker, admin, raw):
    assert create(admin, "kept", compression_type="lz4", flush_ms="1000") is None
    assert change(admin, "kept", compression_type="zstd", retention_ms="1000") is None
    kept = {"retention_age": "1000ms", "kafka_settings": "compression.type=zstd;flush.ms=1000"}
    assert topics.read(str(broker.data), "kept").limits == kept
    assert values_of(admin, "kept")["flush.ms"] == "1000"
    assert change(admin, "kept", flush_ms=(AlterConfigOpType.DELETE, None)) is None
    assert change(admin, "kept", compression_type="producer") is None
    assert topics.read(str(broker.data), "kept").limits == {"retention_age": "1000ms"}
    row = {"resource_type": 2, "resource_name": "kept", "configs": [{"name": "preallocate", "value": "true"}]}
    assert not raw.ask(Key.ALTER_CONFIGS, 1, resources=[row], validate_only=False).responses[0].error_code
    asked = [{"resource_type": 2, "resource_name": "kept", "configuration_keys": ["preallocate", "flush.ms"]}]
    more = {"include_synonyms": True, "include_documentation": True}
    (found,) = raw.ask(Key.DESCRIBE_CONFIGS, 4, resources=asked, **more).results
    rows = {row.name: row for row in found.configs}
    assert (rows["preallocate"].value, rows["preallocate"].documentation) == (
        "true",
        "taken and kept, of no effect in KMQ",
    )
    assert topics.read(str(broker.data), "kept").limits == {"kafka_settings": "preallocate=true"}


def test_the_page_names_each_request_with_the_versions_that_clients_are_told(raw):
    told = raw.ask(Key.API_VERSIONS, 3, client_software_name="page", client_software_version="1").api_keys
    names = {Key(row.api_key).name.replace("_", "").replace("SCRAMUSERS", "USERSCRAMCREDENTIALS"): row for row in told}
    rows = re.findall(r"(?m)^\| (\d+) \| ([A-Za-z]+) \| (\d+)(?:-(\d+))? \|", PAGE)
    assert {(int(key), name.upper(), int(low), int(high or low)) for key, name, low, high in rows} == {
        (row.api_key, name, row.min_version, row.max_version) for name, row in names.items()
    }


def test_the_page_has_every_error_that_clients_are_given():
    sources = "".join(path.read_text() for path in (ROOT / "kmq/gateway/kafka").glob("*.py"))
    given = {name.upper() for name in re.findall(r"(?:ErrorCode|_LateCode)\.([a-z_]+)\b", sources)} - {"NONE"}
    _, _, table = PAGE.partition("## Errors")
    assert given == set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", re.sub(r"`[^`]*`", "", table)))


def test_a_topic_is_checked_without_being_made(broker, admin):
    assert done(admin.create_topics([NewTopic("tried", 2, 1)], validate_only=True)) == {"tried": None}
    assert "tried" not in topics.names(str(broker.data))


def test_a_topic_has_the_partitions_of_its_assignment_or_of_the_setting(broker, raw):
    rows = [{"partition_index": number, "broker_ids": [0]} for number in (2, 0, 1)]
    asked = {"num_partitions": -1, "replication_factor": -1, "configs": ()}
    named = [asked | {"name": "assigned", "assignments": rows}, asked | {"name": "default", "assignments": ()}]
    assert [each.error_code for each in raw.ask(Key.CREATE_TOPICS, 4, topics=named).topics] == [ErrorCode.none] * 2
    assert [topics.read(str(broker.data), name).partitions for name in ("assigned", "default")] == [3, 1]


def test_a_topic_that_is_named_twice_is_not_made(broker, raw):
    topic = {"name": "twice", "num_partitions": 1, "replication_factor": 1, "assignments": (), "configs": ()}
    answers = raw.ask(Key.CREATE_TOPICS, 4, topics=[topic, topic]).topics
    assert [each.error_code for each in answers] == [ErrorCode.invalid_request] * 2
    assert "twice" not in topics.names(str(broker.data))


def test_partitions_are_added_also_where_records_have_keys(broker, admin):
    assert create(admin, "grown") is None
    assert broker.kmq("produce", "grown.key", "-m", "x", "--acks").returncode == 0
    assert done(admin.create_partitions([NewPartitions("grown", 3)], validate_only=True)) == {"grown": None}
    assert topics.read(str(broker.data), "grown").partitions == 1
    assert done(admin.create_partitions([NewPartitions("grown", 3)])) == {"grown": None}
    assert topics.read(str(broker.data), "grown").partitions == 3
    for count in (2, 3, 1025):
        assert done(admin.create_partitions([NewPartitions("grown", count)])) == {"grown": "INVALID_PARTITIONS"}
    assert done(admin.create_partitions([NewPartitions("none", 3)])) == {"none": "UNKNOWN_TOPIC_OR_PART"}


def test_a_change_that_the_router_carries_out_later_has_timed_out(broker, admin, raw):
    assert create(admin, "gone-later") is None and create(admin, "grown-later") is None
    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    try:
        deleted = raw.ask(Key.DELETE_TOPICS, 5, topic_names=["gone-later"])
        grown = raw.ask(Key.CREATE_PARTITIONS, 3, topics=[{"name": "grown-later", "count": 2, "assignments": None}])
    finally:
        os.kill(router, signal.SIGCONT)
    # Whatever else would send a client to look for the leader of a partition.
    assert [deleted.responses[0].error_code, grown.results[0].error_code] == [ErrorCode.request_timed_out] * 2
    assert "carries it out" in grown.results[0].error_message
    broker.wait(lambda: "gone-later" not in topics.names(str(broker.data)), "the end of the topic")
    broker.wait(lambda: topics.read(str(broker.data), "grown-later").partitions == 2, "its partitions")


def test_topics_of_kmq_itself_are_shown_to_who_names_them_and_cannot_be_changed(admin):
    assert not [name for name in admin.list_topics(timeout=30).topics if name.startswith("__")]
    create(admin, "other")
    change(admin, "other", retention_ms="1000")
    assert len(admin.list_topics("__kmq", timeout=30).topics["__kmq"].partitions) > 0
    assert done(admin.delete_topics(["__kmq"])) == {"__kmq": "TOPIC_EXCEPTION"}
    assert done(admin.create_partitions([NewPartitions("__kmq", 3)])) == {"__kmq": "TOPIC_EXCEPTION"}
    assert change(admin, "__kmq", retention_ms="1000") == "TOPIC_EXCEPTION"


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_read_back_as_they_were_set(broker, admin):
    given = {
        "retention.ms": "86400000",
        "retention.bytes": "1073741824",
        "cleanup.policy": "compact,delete",
        "delete.retention.ms": "1000",
        "message.timestamp.type": "LogAppendTime",
        "segment.ms": "60000",
        "segment.bytes": "1048576",
    }
    same = {"max.message.bytes": MOST_BYTES, "min.insync.replicas": "1", "compression.type": "producer"}
    assert create(admin, "set", **{key.replace(".", "_"): value for key, value in (given | same).items()}) is None
    found = settings_of(admin, "set")
    assert {key: found[key].value for key in given | same} == given | same
    assert all(found[key].source == 1 and not found[key].is_read_only for key in given)
    assert all(found[key].source == 5 and found[key].is_read_only for key in same)
    assert topics.read(str(broker.data), "set").limits == {
        "retention_age": "86400000ms",
        "retention_bytes": "1073741824",
        "cleanup": "compact",
        "delete_retention": "1000ms",
        "message_timestamp_type": "LogAppendTime",
        "segment_age": "60000ms",
        "segment_bytes": "1048576",
    }


def test_a_value_is_that_of_the_topic_else_of_the_setting_else_the_default(admin):
    assert create(admin, "sources", segment_bytes="1048576") is None
    found = settings_of(admin, "sources")
    assert (found["retention.ms"].value, found["retention.ms"].source) == ("604800000", 4)
    assert [(each.name, each.value) for each in found["retention.ms"].synonyms.values()] == [
        ("log.retention.ms", "604800000")
    ]
    assert (found["retention.bytes"].value, found["retention.bytes"].source) == ("-1", 5)
    assert [*found["segment.bytes"].synonyms] == ["segment.bytes", "log.segment.bytes"]
    assert {"cleanup.policy", "min.insync.replicas", "message.format.version", "flush.messages"} <= {*found}


def test_settings_are_changed_one_by_one(broker, admin):
    assert create(admin, "changed") is None
    assert change(admin, "changed", retention_ms="1000", segment_bytes="2000000") is None
    assert change(admin, "changed", retention_ms="-1") is None
    assert change(admin, "changed", segment_bytes=(AlterConfigOpType.DELETE, None)) is None
    assert topics.read(str(broker.data), "changed").limits == {"retention_age": "never"}
    assert values_of(admin, "changed")["retention.ms"] == "-1"
    assert change(admin, "changed", segment_ms=FOREVER) is None
    assert values_of(admin, "changed")["segment.ms"] == FOREVER
    for changes in ({"retention_ms": "x"}, {"no_such": "1"}, {"min_insync_replicas": "2"}, {"segment_bytes": "0"}):
        assert change(admin, "changed", **changes) == "INVALID_CONFIG"
    assert change(admin, "changed", True, retention_ms="x") == "INVALID_CONFIG"
    assert change(admin, "changed", True, retention_ms="5") is None
    assert values_of(admin, "changed")["retention.ms"] == "-1"
    assert change(admin, "none", retention_ms="5") == "UNKNOWN_TOPIC_OR_PART"


def test_a_policy_says_what_retention_does_to_a_compacted_topic(admin):
    assert create(admin, "rows", cleanup_policy="compact", retention_ms="1000") == "INVALID_CONFIG"
    assert create(admin, "rows", cleanup_policy="compact,delete") == "INVALID_CONFIG"
    assert create(admin, "rows", cleanup_policy="compact", retention_ms="-1") is None
    assert values_of(admin, "rows")["cleanup.policy"] == "compact"
    assert change(admin, "rows", retention_ms="1000") == "INVALID_CONFIG"
    assert change(admin, "rows", retention_ms="1000", cleanup_policy=(AlterConfigOpType.APPEND, "delete")) is None
    assert values_of(admin, "rows")["cleanup.policy"] == "compact,delete"
    assert change(admin, "rows", retention_ms=(AlterConfigOpType.DELETE, None)) == "INVALID_CONFIG"
    assert change(admin, "rows", cleanup_policy=(AlterConfigOpType.SUBTRACT, "compact")) is None
    assert values_of(admin, "rows")["cleanup.policy"] == "delete"


def test_alter_configs_replaces_what_a_topic_has_of_its_own(broker, raw, admin):
    assert create(admin, "replaced", retention_ms="1000", segment_bytes="2000000") is None
    assert broker.kmq("topics", "set", "replaced", "max_deliveries=5").returncode == 0
    row = {"resource_type": 2, "resource_name": "replaced", "configs": [{"name": "segment.ms", "value": "60000"}]}
    for validate_only, limits in ((True, ["max_deliveries", "retention_age", "segment_bytes"]), (False, None)):
        answer = raw.ask(Key.ALTER_CONFIGS, 1, resources=[row], validate_only=validate_only).responses[0]
        assert answer.error_code == ErrorCode.none
        assert limits is None or sorted(topics.read(str(broker.data), "replaced").limits) == limits
    assert topics.read(str(broker.data), "replaced").limits == {"segment_age": "60000ms", "max_deliveries": "5"}


def test_settings_of_the_broker_are_read_and_not_changed(admin, raw):
    found = settings_of(admin, "0", ResourceType.BROKER)
    (node,) = admin.list_topics(timeout=30).brokers.values()
    expected = {
        "advertised.listeners": f"PLAINTEXT://{node.host}:{node.port}",
        "log.retention.ms": "604800000",
        "message.max.bytes": MOST_BYTES,
        "num.partitions": "1",
        "auto.create.topics.enable": "true",
        "inter.broker.protocol.version": "2.8-IV1",
        "broker.id": "0",
    }
    assert {key: found[key].value for key in expected} == expected
    assert found["log.retention.ms"].source == 4 and all(entry.is_read_only for entry in found.values())
    row = {"resource_type": 4, "resource_name": "0"}
    one = {"name": "log.retention.ms", "value": "1"}
    changed = raw.ask(Key.ALTER_CONFIGS, 1, resources=[row | {"configs": [one]}], validate_only=False).responses[0]
    assert changed.error_code == ErrorCode.invalid_request and "KMQ_" in changed.error_message


def test_what_has_no_settings_is_refused(raw):
    def asked(kind, name):
        row = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
        return raw.ask(Key.DESCRIBE_CONFIGS, 4, resources=[row]).results[0]

    assert asked(2, "none").error_code == ErrorCode.unknown_topic_or_partition
    assert asked(4, "1").error_code == ErrorCode.invalid_request
    assert asked(8, "0").error_code == ErrorCode.invalid_request
    assert (asked(4, "").error_code, asked(4, "").configs) == (ErrorCode.none, ())


def test_only_the_settings_that_were_asked_for_are_told(raw, admin):
    create(admin, "few")
    row = {"resource_type": 2, "resource_name": "few", "configuration_keys": ["retention.ms", "no.such"]}
    for version in (1, 2, 3, 4):
        found = raw.ask(Key.DESCRIBE_CONFIGS, version, resources=[row]).results[0]
        assert [(each.name, each.value, each.synonyms) for each in found.configs] == [("retention.ms", "604800000", ())]


# --- sizes, ACLs -----------------------------------------------------------------------------------------------------


def test_log_dirs_say_what_partitions_have_on_disk(broker, admin, raw):
    assert create(admin, "sized", 2) is None
    assert broker.kmq("produce", "sized", "-m", "x" * 1000, "--acks").returncode == 0
    found = raw.ask(Key.DESCRIBE_LOG_DIRS, 4, topics=None)
    (directory,) = found.results
    assert directory.log_dir == str(broker.data) and directory.total_bytes > directory.usable_bytes > 0
    sizes = {topic.name: [each.partition_size for each in topic.partitions] for topic in directory.topics}
    files = [sum(path.stat().st_size for path in (broker.data / "topics/sized" / n).glob("*.log")) for n in ("0", "1")]
    assert sizes["sized"] == files and sum(files) > 1000 and "__kmq" in sizes
    asked = [{"topic": "sized", "partitions": [1]}, {"topic": "none", "partitions": [0]}]
    (directory,) = raw.ask(Key.DESCRIBE_LOG_DIRS, 1, topics=asked).results
    assert [(topic.name, [each.partition_index for each in topic.partitions]) for topic in directory.topics] == [
        ("sized", [1])
    ]


def test_there_are_no_acls(broker):
    admin = KafkaAdminClient(bootstrap_servers=f"localhost:{port(broker)}")
    resource = ResourcePatternFilter(PythonResourceType.ANY, None, ACLResourcePatternType.ANY)
    with pytest.raises(kafka.errors.SecurityDisabledError, match="roles of tokens"):
        admin.describe_acls(ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, resource))
    admin.close()


# --- clients of other languages --------------------------------------------------------------------------------------


@pytest.mark.java
def client(name):
    """The command of a client's program; a client that cannot be had is skipped, and fails in CI."""
    environ = os.environ | {"PYTHON": sys.executable}
    told = subprocess.run([ROOT / "scripts/kafka-clients", name], stdout=subprocess.PIPE, text=True, env=environ)
    if told.returncode and "CI" not in os.environ:
        pytest.skip(f"no {name}: scripts/kafka-clients")
    assert not told.returncode
    return told.stdout.splitlines()


def test_the_admin_client_of_java_does_all_of_it(broker):
    answered = broker.run(*client("java-admin"), str(port(broker)))
    assert answered.stdout.splitlines() == [
        "nodes 1",
        "again TopicExistsException",
        "wrong InvalidReplicationFactorException",
        "partitions 5",
        "retention.ms 2000 DYNAMIC_TOPIC_CONFIG LONG false",
        "cleanup.policy compact,delete DYNAMIC_TOPIC_CONFIG LIST false",
        f"max.message.bytes {MOST_BYTES} DEFAULT_CONFIG INT true",
        "segment.ms 604800000 DEFAULT_CONFIG LONG false",
        "dirs 1",
        "topics true",
        "topics false",
    ], answered.stderr


def test_the_admin_client_of_kafkajs_does_all_of_it(broker):
    answered = broker.run(*client("kafkajs-admin"), str(port(broker)))
    assert answered.stdout.splitlines() == [
        "brokers 1",
        "made true",
        "again false",
        "partitions 3",
        "settings cleanup.policy=compact retention.ms=-1",  # tables are kept for ever
        "topics true",
        "topics false",
    ], answered.stderr
