"""`kmq.testing`, as the tests of an application use it: a broker of their own, and nothing of it stays."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest
from waiting import until

import kmq
from kmq import testing
from kmq.broker import status
from kmq.errors import ConfigError, KmqError

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def broker():
    with testing.broker() as made:
        yield made


def left(instance):
    return [path.name for path in SHM.glob(f"{instance}.*")]


def running(instance):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("KMQ_INSTANCE") == instance:
                found.append(process)
        except psutil.Error:
            pass
    return found


def test_messages_go_through_and_a_reset_leaves_nothing_of_them(broker):
    for text in (b"one", b"two"):
        with broker.producer() as producer:
            producer.send("orders", text, key="u7").result(30)
        with broker.consumer("orders", group_id="billing") as consumer:
            [message] = consumer.poll(timeout=30)
            assert (message.value, message.key) == (text, b"u7")
            consumer.commit()
        assert [line.split(b"|")[-1] for line in broker.lines("orders")] == [text]
        broker.reset()
        assert broker.lines("orders") == []
        with urllib.request.urlopen(f"{broker.http}/api/groups") as answer:
            assert answer.read() == b"[]"


def test_a_reset_says_that_a_consumer_is_still_open(broker):
    broker.reset()
    with broker.producer() as producer:
        producer.send("orders", b"x").result(30)
    with broker.consumer("orders", group_id="open") as consumer:
        assert consumer.poll(timeout=30)
        with pytest.raises(KmqError, match="open"):
            broker.reset()
    broker.reset()


def test_programs_reach_it_by_its_environment(broker):
    command = [sys.executable, "-m", "kmq", "produce", "orders", "-m", "hi"]
    result = subprocess.run(command, env=broker.env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [line.rpartition(b"|")[2] for line in broker.lines("orders")][-1:] == [b"hi"]


def test_the_worker_of_the_page_runs_as_it_stands_with_its_dead_letters(broker, capsys):
    """docs/work-queue.md, with the fixture's consumer in place of kmq.Consumer."""
    broker.reset()
    page = (Path(__file__).parents[2] / "docs/work-queue.md").read_text()
    worker = page.partition("## The worker")[2].partition("```python\n")[2].partition("```")[0]
    assert "kmq.Consumer(" in worker
    with broker.producer() as producer:
        for job in (b"welcome", b"broken", b"bye"):
            producer.send("mails", job, key="u7").result(30)
    exec(worker.replace("kmq.Consumer(", "broker.consumer("), {"broker": broker})
    assert capsys.readouterr().out == "[b'bye', b'welcome']\n"
    assert [line.rpartition(b"|")[2] for line in broker.lines("mails.dlq")] == [b"broken"]


def test_a_line_ends_at_its_newline_alone(broker):
    broker.reset()
    payloads = [b"one\rtwo", b"three\r", b"\x0bfour\x0c\x85\x1c"]
    with broker.producer() as producer:
        for payload in payloads:
            producer.send("odd", payload).result(30)
    assert [kmq.Message("odd", 0, at, line).value for at, line in enumerate(broker.lines("odd"))] == payloads


def test_clients_of_kafka_reach_it_at_its_kafka_port(broker):
    confluent_kafka = pytest.importorskip("confluent_kafka")
    broker.reset()
    producer = confluent_kafka.Producer({"bootstrap.servers": f"127.0.0.1:{broker.kafka_port}"})
    producer.produce("cups", b"coffee", key=b"eu")
    assert producer.flush(30) == 0
    assert [line.rpartition(b"|")[2] for line in broker.lines("cups")] == [b"coffee"]


@pytest.mark.parametrize(
    "look", [testing.TestBroker.lines, lambda broker, topic: broker.reset() or broker.lines(topic)]
)
def test_what_is_acknowledged_is_seen_however_slow_the_router_is(broker, look):
    broker.reset()
    [router] = [each.pid for each in status.collect(broker.settings).processes if each.name == "router"]
    goes_on = threading.Timer(0.5, os.kill, (router, signal.SIGCONT))
    os.kill(router, signal.SIGSTOP)
    try:
        with broker.producer() as producer:
            producer.send("slow", b"x").result(30)
        goes_on.start()
        found = look(broker, "slow")
    finally:
        os.kill(router, signal.SIGCONT)
        goes_on.join()
    assert len(found) == (look is testing.TestBroker.lines)
    with broker.producer() as producer:
        producer.send("later", b"y").result(30)
    assert len(broker.lines("later")) == 1
    assert broker.lines("slow") == found, "it came back"


def test_two_of_them_do_not_meet_and_leave_nothing():
    with testing.broker(gateway=False) as first, testing.broker(gateway=False, KMQ_MAX_LINE="64 KiB") as second:
        assert first.port != second.port and first.data != second.data
        with second.producer() as producer, pytest.raises(kmq.Refused):
            producer.send("orders", bytes(100_000)).result(30)
        with pytest.raises(ConfigError, match="gateway=False"):
            first.consumer("orders")
        seen = [first.settings.instance, second.settings.instance, *map(str, (first.root, second.root))]
        assert all(left(instance) for instance in seen[:2])
    assert [left(instance) + running(instance) for instance in seen[:2]] == [[], []]
    assert not any(Path(root).exists() for root in seen[2:])


LONG_RUN = """
import time
from kmq import testing
from kmq.broker import status
with testing.broker(gateway=False) as broker:
    print(broker.settings.instance, flush=True)
    time.sleep(600)
"""


def test_a_killed_test_run_takes_its_broker_along():
    with subprocess.Popen([sys.executable, "-c", LONG_RUN], stdout=subprocess.PIPE) as run:
        instance = run.stdout.readline().decode().strip()
        assert left(instance) and running(instance)
        run.send_signal(signal.SIGKILL)
    until(lambda: not running(instance), "the end of the broker")
    assert left(instance) == [f"{instance}.stats"]
    with testing.broker(gateway=False):
        assert left(instance) == []


def test_a_broker_that_cannot_start_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KmqError, match="KMQ_SEGMENT_BYTES"), testing.broker(gateway=False, KMQ_SEGMENT_BYTES="1"):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(KmqError, match=f"(?s)did not start.*{port}"), testing.broker(gateway=False, KMQ_PORT=port):
            pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="'port'"), testing.broker(port=1):
        pass


CONFTEST = 'pytest_plugins = ["kmq.testing"]\n'
TESTS = """
def test_one(kmq_broker):
    with kmq_broker.producer() as producer:
        producer.send("orders", b"a").result(30)
    assert len(kmq_broker.lines("orders")) == 1

def test_two(kmq_broker):
    assert kmq_broker.lines("orders") == []
"""


def test_as_a_fixture_each_test_has_a_broker_without_topics(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_app.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "2 passed" in result.stdout, result.stdout + result.stderr
