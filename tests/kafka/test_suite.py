"""A suite that knows nothing of KMQ: the integration tests of kafka-python, at a real broker as if it were Kafka 4.0."""

import os
import subprocess
from xml.etree import ElementTree

import pytest
from brokers import ROOT, Broker

NOT_SERVED = "its key is not served (docs/kafka.md)"
LEFT_OUT = {
    "test_create_describe_delete_acls": "there are no ACLs",
    "test_elect_leaders": NOT_SERVED,
    "test_alter_replica_log_dirs": NOT_SERVED,
    "test_describe_metadata_quorum": NOT_SERVED,
    "test_alter_partition_reassignments": NOT_SERVED,
    "test_list_partition_reassignments": NOT_SERVED,
    "test_describe_topic_partitions": NOT_SERVED,
    "test_describe_topic_partitions_pagination": NOT_SERVED,
    "test_describe_configs_broker_resource_returns_configs": "advertised.listeners: Metadata says where a client comes in",
    "test_kafka_version_infer": "from the versions of keys it takes us for Kafka 3.1",
    "test_group": "its session of less than 6 s: its own broker is configured to allow that",
}
OF_BROKERS = ("ssl", "sasl")  # they configure and start Kafka themselves


@pytest.mark.timeout(900)  # the suite is fetched, and takes a minute
def test_kafka_pythons_own_tests_pass_but_for_those_that_are_named(tmp_path):
    found = subprocess.run([ROOT / "scripts" / "kafka-clients", "kafka-python-suite"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    report = tmp_path / "report.xml"
    broker = Broker(tmp_path / "broker")
    try:
        broker.up(KMQ_KAFKA_PARTITIONS=4)
        port = (broker.pipes / "kafka.port").read_text().strip()
        # KAFKA_ROOT: any directory, nothing of it is started. An empty PYTEST_ADDOPTS: ours are not for it.
        env = os.environ | {
            "KAFKA_URI": f"kafka://127.0.0.1:{port}",
            "KAFKA_VERSION": "4.0.0",
            "KAFKA_ROOT": str(tmp_path),
        }
        options = ["-q", "-p", "foreign_service", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short"]
        options += ["-k", " and ".join(f"not {name}" for name in OF_BROKERS)]
        done = subprocess.run(
            [*found.stdout.split("\n")[:-1], *options],
            env=env | {"PYTEST_ADDOPTS": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    finally:
        broker.close()
    failed, passed = set(), set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name").partition("[")[0]
        if case.find("skipped") is None:
            (passed if case.find("failure") is None and case.find("error") is None else failed).add(name)
    assert failed <= LEFT_OUT.keys(), done.stdout[-6000:]
    assert len(passed) > 30 and {*LEFT_OUT} <= failed | passed
