"""A suite that knows nothing of KMQ: librdkafka's own tests, of Debian's source package, at a broker as if it were Kafka 4.0.

    RDKAFKA_TEST_CONF=… TESTS=0012_produce_consume test-runner -p1 -L -Q     one test; -Q: with fewer messages, and parts left out

A run has some of them (tests/sampling.py). What tries the library alone, at a broker in its own process, is not among them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokers import ROOT, Broker

_COMMITTED = "a topic has committed records alone, and no records that say commit or abort (docs/kafka-transactions.md)"
_FIRST = "the first member of a group gets all at once; a broker of Kafka waits 3 s for more members"
_LIBRARY = "a mock in the library serves it"
_MEASURED = "it measures times, which needs a quiet machine"
_NO_ACLS = "there are no ACLs (docs/kafka.md)"
_NO_SASL = "it needs SASL; kafka-python's own and ours have it"
_OPERATIONS = "what a client may do with a topic or broker is not told (authorized_operations)"
_RAPIDJSON = "its program is made without RapidJSON"
LEFT_OUT = {  # tests, or parts of them by what their names have
    "0011_produce_batch:record_fail": "it asks for cleanup.policy=compact,delete without a retention (docs/kafka.md)",
    "0028_long_topicnames": "librdkafka knows that it fails",
    "0047_partial_buf_tmout": "librdkafka knows that it fails",
    "0052_msg_timestamps": "half of it writes message format 1, which is refused (docs/kafka.md)",
    "0053_stats": _RAPIDJSON,
    "0055_producer_latency": _MEASURED,
    "0061_consumer_lag:with transactions": _COMMITTED,
    "0077_compaction": "it asks for segments of less than 64 KiB",
    "0081_admin:Acls": _NO_ACLS,
    "0081_admin:AlterConfigs": "it changes a setting of the broker (docs/kafka.md)",
    "0081_admin:with authorized": _OPERATIONS,
    "0081_admin:UserScram": "users are tokens, which clients cannot change (docs/security.md)",
    "0086_purge_remote": "it takes a batch back, and does not wait until that was sent",
    "0097_ssl_verify": "it needs TLS with certificates of its own making",
    "0098_consumer_txn": "it needs librdkafka's programs in Java",
    "0101_fetch_from_follower": "followers serve no fetches (docs/decisions/follower-reads.md)",
    "0102_static_group_rebalance": _FIRST,
    "0103_transactions:abort_control_message": _COMMITTED,
    "0103_transactions:wmark_isolation_level": _COMMITTED,
    "0110_batch_size": _RAPIDJSON,
    "0115_producer_auth": _NO_ACLS,
    "0118_commit_rebalance": _FIRST,
    "0119_consumer_auth": _NO_ACLS,
    "0126_oauthbearer_oidc": "there is no OAUTHBEARER",
    "0127_fetch_queue_backoff": _MEASURED,
    "0129_fetch_aborted_msgs": "it sets max.message.bytes of a topic (docs/kafka.md)",
    "0135_sasl_credentials": _NO_SASL,
    "0137_barrier_batch_consume:control_msgs": _COMMITTED,
    "0139_offset_validation_mock": _LIBRARY,
    "0142_reauthentication": _NO_SASL,
    "0150_telemetry_mock": _LIBRARY,
}
names = str.split
QUICK = names("""
    0001_multiobj 0002_unkpart 0003_msgmaxsize 0005_order 0007_autotopic 0008_reqacks 0011_produce_batch:test_single
    0011_produce_batch:partition_flag 0011_produce_batch:test_partitioner 0012_produce_consume 0013_null_msgs 0014_reconsume_191
    0015_offsets_seek 0016_client_swname 0017_compression 0020_destroy_hang 0021_rkt_destroy 0022_consume_batch
    0029_assign_offset 0030_offset_commit 0031_get_offsets 0033_regex_subscribe 0034_offset_reset 0035_api_version
    0036_partial_fetch 0038_performance 0039_event_dr 0040_io_event 0042_many_topics 0044_partition_cnt 0048_partitioner
    0049_consume_conn_close 0051_assign_adds 0054_offset_time 0056_balanced_group_mt 0057_invalid_topic 0059_bsearch
    0060_op_prio 0063_clusterid 0064_interceptors 0065_yield 0067_empty_topic 0068_produce_timeout 0069_consumer_add_parts
    0070_null_empty 0073_headers 0075_retry 0076_produce_retry 0083_cb_event 0084_destroy_flags 0085_headers
    0088_produce_metadata_timeout 0090_idempotence 0092_mixed_msgver 0093_holb_consumer
    0094_idempotence_msg_timeout 0099_commit_metadata 0109_auto_create_topics 0112_assign_unknown_part
    0114_sticky_partitioning 0123_connections_max_idle 0125_immediate_flush 0130_store_offsets
    0140_commit_metadata
""")
WHOLE = names("""
    0018_cgrp_term 0019_list_groups 0045_subscribe_update 0045_subscribe_update_topic_remove
    0045_subscribe_update_non_exist_and_partchange 0050_subscribe_adds 0061_consumer_lag:without_transactions
    0081_admin:CreateTopics 0081_admin:DeleteTopics 0081_admin:CreatePartitions
    0081_admin:DescribeConfigs 0081_admin:DeleteRecords 0081_admin:ListConsumerGroups 0081_admin:DescribeConsumerGroups
    0081_admin:without_authorized 0081_admin:DeleteGroups 0081_admin:DeleteConsumerGroupOffsets 0081_admin:ListOffsets
    0081_admin:AlterConsumerGroupOffsets 0081_admin:ListConsumerGroupOffsets 0081_admin:unclean_destroy 0082_fetch_max_bytes
    0103_transactions:misuse_txn 0103_transactions:fenced_txn 0103_transactions:empty_txn
    0103_transactions:fatal_idempo 0107_topic_recreate 0111_delay_create_topics
    0132_strategy_ordering 0137_barrier_batch_consume:consume_batch_with
    0137_barrier_batch_consume:store_offset
""")
# 20 s of CPU, or minutes in which a member must not be late.
LONG_QUICK = names("0041_fetch_max_bytes 0091_max_poll_interval_timeout 0113_cooperative_rebalance")
LONG_WHOLE = names(
    "0026_consume_pause 0089_max_poll_interval 0103_transactions:producer_txn 0122_buffer_cleaning_after_rebalance"
)
NO_AUTO_CREATE = ("0045_subscribe_update_", "0107_", "0111_")
KAFKA = "4.0.0.0"
OLDER = {"0109_auto_create_topics": "2.0.0.0"}  # what it does with ACLs is for brokers that are newer


@pytest.fixture(scope="module")
def runner() -> list[str]:
    found = subprocess.run([ROOT / "scripts" / "kafka-clients", "librdkafka-suite"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def address_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], str]]:
    """Start a broker on its first use: one that makes topics by themselves, or one that does not."""
    made: dict[bool, Broker] = {}

    def address(auto_create: bool) -> str:
        if auto_create not in made:
            made[auto_create] = broker = Broker(tmp_path_factory.mktemp("librdkafka") / "b")
            # A line that has room for Kafka's default message.max.bytes.
            settings = {"KMQ_AUTO_CREATE_TOPICS": "on" if auto_create else "off", "KMQ_KAFKA_PARTITIONS": 4}
            broker.up(**settings, KMQ_MAX_LINE="2 MiB", RB_BYTES="8 MiB")
        return f"localhost:{(made[auto_create].pipes / 'kafka.port').read_text().strip()}"

    yield address
    for broker in made.values():
        broker.close()


def check(runner: list[str], address_of: Callable[[bool], str], directory: Path, case: str) -> None:
    name, _, part = case.partition(":")
    creates = not name.startswith(NO_AUTO_CREATE)
    address = address_of(creates)
    settings = [f"bootstrap.servers={address}", "test.topic.random=true", "test.timeout.multiplier=3"]
    settings.append("enable.metrics.push=false")  # in this release a race makes it end a second late
    (directory / "test.conf").write_text("\n".join(settings) + "\n")
    (directory / "bin").mkdir()
    program = directory / "bin" / "kafka-topics.sh"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/kafka/clients/kafka_topics.py "$@"\n')
    program.chmod(0o755)
    env = os.environ | {
        "RDKAFKA_TEST_CONF": str(directory / "test.conf"),
        "TEST_KAFKA_VERSION": OLDER.get(name, KAFKA),
        "TEST_SCENARIO": "default" if creates else "noautocreate",
        "KAFKA_PATH": str(directory),
        "BROKERS": address,
        "TESTS": name,
        "SUBTESTS": part.replace("_transactions", " transactions").replace("_authorized", " authorized"),
        "CI": "true",  # patience, and no measurements
    }
    options = ["-p1", "-L", *["-Q"] * (case in [*QUICK, *LONG_QUICK])]
    done = subprocess.run([*runner, *options], env=env, cwd=directory, capture_output=True, text=True)
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert done.returncode == 0 and re.search(rf"^\| {name} +\| +PASSED ", said, re.MULTILINE), said[-6000:]


@pytest.mark.timeout(1200)  # the first one may have to fetch and compile them
@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [*QUICK, *WHOLE])
def test_librdkafkas_own_test_passes(runner, address_of, tmp_path, case):
    check(runner, address_of, tmp_path, case)


@pytest.mark.soak
@pytest.mark.parametrize("case", [*LONG_QUICK, *LONG_WHOLE])
def test_librdkafkas_own_long_test_passes(runner, address_of, tmp_path, case):
    check(runner, address_of, tmp_path, case)


@pytest.mark.timeout(1200)
def test_each_test_that_needs_a_broker_is_run_or_left_out_by_name(runner):
    text = (Path(runner[-1]).parent / "test.c").read_text()
    found = re.findall(r"^ +_TEST\((\w+),\s+([^,)]+)", text, re.MULTILINE)
    needing = {name for name, flags in found if "LOCAL" not in flags and "MANUAL" not in flags}
    run = [*QUICK, *WHOLE, *LONG_QUICK, *LONG_WHOLE]
    assert len(needing) > 100 and needing == {case.partition(":")[0] for case in [*run, *LEFT_OUT]}
    whole = {name for name in LEFT_OUT if ":" not in name}
    assert not whole & {case.partition(":")[0] for case in run}
