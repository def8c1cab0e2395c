"""/metrics of a real broker: Prometheus' own tool finds nothing to blame, and the numbers are those of what was done."""

import re
import socket
import subprocess

import pytest
from brokers import Broker
from promtools import program

BAD = (b"", b"bad", b"!x")  # an empty line, no separator, a control byte


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("metrics") / "broker")
    made.up(KMQ_DATA_QUOTA="1 GiB", KMQ_METRICS_TOPICS=2)
    yield made
    made.close()


def samples(broker):
    status, text = broker.get("/metrics")
    assert status == 200
    return {name: float(value) for name, value in re.findall(r"(?m)^([^#\s]\S*) (\S+)$", text)}


def send(broker, lines):
    """Send over one connection that wants replies; return them."""
    port = int((broker.pipes / "ingress.port").read_text())
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock, sock.makefile("rb") as replies:
        sock.sendall(b"!hello acks=1\n")
        assert replies.readline().startswith(b"!ok")
        found = []
        for line in lines:
            sock.sendall(line + b"\n")
            found.append(replies.readline())
        return found


@pytest.fixture(scope="module")
def used(broker):
    """What the metrics were before, after messages to four topics, three bad lines, and a connection without a hello."""
    before = samples(broker)
    replies = send(broker, [b"%b|x" % topic for topic in (b"a", b"b", b"b", b"c", b"c", b"c", b"other")] + [*BAD])
    assert [reply[:4] for reply in replies] == [b"!ack"] * 7 + [b"!err"] * 3
    port = int((broker.pipes / "ingress.port").read_text())
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(b"!helo\n")
        assert sock.makefile("rb").readline().startswith(b"!err 0 bad_hello")
    broker.wait_routed(7)
    assert broker.get("/api/admin/topics")[0] == 200
    expected = {
        'kmq_topic_messages_total{topic="c"}': 3,
        'kmq_errors_total{reason="format"}': 4,
        "kmq_ack_seconds_count": 10,
        "kmq_routed_seconds_count": 7,
    }
    broker.wait(lambda: expected.items() <= samples(broker).items(), "what was done in the metrics")
    return before, samples(broker)


def test_promtool_finds_nothing_to_blame(broker, used):
    text = broker.get("/metrics")[1]
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "_created" not in text


def test_histograms_count_what_was_acknowledged_synced_and_routed(used):
    before, after = used
    assert before["kmq_ack_seconds_count"] == before["kmq_routed_seconds_count"] == 0
    assert after["kmq_ack_seconds_count"] == 10  # each line waited for its reply, so each was a train
    assert after["kmq_routed_seconds_count"] == 7 and 1 <= after["kmq_sync_seconds_count"] <= 7 + 3
    for name in ("ack", "sync", "routed"):
        bounds = [value for key, value in after.items() if key.startswith(f"kmq_{name}_seconds_bucket")]
        assert len(bounds) == 21 and bounds == sorted(bounds) and bounds[-1] == after[f"kmq_{name}_seconds_count"]
        assert after[f"kmq_{name}_seconds_sum"] > 0


def test_the_topics_with_the_most_messages_are_named_and_the_rest_is_summed(used):
    _, after = used
    topics = {key: value for key, value in after.items() if key.startswith("kmq_topic_messages_total")}
    assert topics == {
        'kmq_topic_messages_total{topic="b"}': 2,
        'kmq_topic_messages_total{topic="c"}': 3,
        'kmq_topic_messages_total{topic="other"}': 2,
    }
    offsets = [key for key in after if key.startswith("kmq_end_offset")]
    assert offsets == ['kmq_end_offset{partition="0",topic="b"}', 'kmq_end_offset{partition="0",topic="c"}']


def test_links_disk_quota_and_the_process_itself_are_measured(used):
    _, after = used
    for link in ("raw", "received", "framed", "durable"):
        fill, capacity = (after[f'kmq_link_{what}{{link="{link}"}}'] for what in ("bytes", "capacity_bytes"))
        assert 0 <= fill <= capacity and capacity >= 1 << 16
        assert 0 <= after[f'kmq_link_fill{{link="{link}"}}'] <= 1
    assert 0 < after["kmq_disk_free_bytes"] < after["kmq_disk_size_bytes"]
    assert 0 < after["kmq_quota_used_bytes"] < after["kmq_quota_bytes"] == 1 << 30
    assert after["process_resident_memory_bytes"] > 0 and after["process_open_fds"] > 0
    assert [value for key, value in after.items() if key.startswith("kmq_build_info{")] == [1]
    assert after['kmq_http_request_seconds_count{operation="listTopics"}'] >= 1


def test_a_kill_is_an_unclean_end(broker, used):
    broker.kill("router")
    broker.wait(lambda: samples(broker)['kmq_unclean_ends_total{stage="router"}'] == 1, "the unclean end")
    assert samples(broker)['kmq_unclean_ends_total{stage="framer"}'] == 0
