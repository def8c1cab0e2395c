"""The data directory of a broker that runs: moved, unmounted or unreadable for a while, and there again."""

import json
import shutil
import subprocess
import sys
import threading

import pytest
from brokers import PATIENCE_S

import kmq

RETRY = 75


def reasons(broker):
    return [reason["code"] for reason in json.loads(broker.kmq("status", "--json").stdout)["reasons"]]


def port(broker, name):
    return int((broker.pipes / f"{name}.port").read_text())


@pytest.fixture
def sending(new_broker):
    """A broker, and a producer that sends acknowledged messages all the time, until `stop` returns what it has sent."""
    broker = new_broker()
    broker.up()
    producer = kmq.Producer(port=lambda: port(broker, "ingress"), producer="all-the-time", timeout_s=2 * PATIENCE_S)
    sent, is_over = [], threading.Event()

    def send():
        while not is_over.wait(0.002):
            sent.append(producer.send("orders", str(len(sent))))

    thread = threading.Thread(target=send)

    def stop():
        is_over.set()
        thread.join()
        return [delivery.result(PATIENCE_S) for delivery in sent]

    thread.start()
    yield broker, stop
    is_over.set()
    thread.join()
    producer.close(0)


@pytest.mark.parametrize("is_mount_point", [False, True], ids=["moved", "not mounted"])
def test_a_broker_waits_for_its_data_directory_and_makes_no_other(sending, is_mount_point):
    broker, stop = sending
    away = broker.root / "away"
    with kmq.Consumer("orders", port=lambda: port(broker, "egress"), group_id="readers") as consumer:
        read = [int(message.value) for message in consumer.poll(timeout=10)]
        broker.data.rename(away)
        if is_mount_point:
            broker.data.mkdir()
        broker.wait(lambda: reasons(broker) == ["data_missing"], "the reason that names the data directory")
        shown = broker.kmq("status")
        assert shown.returncode == 1 and f"KMQ_DATA={broker.data}" in shown.stdout and "put it back" in shown.stdout
        for command in ("up", "topics create others", "topics list"):
            refused = broker.kmq(*command.split())
            assert refused.returncode != 0 and "put it back" in refused.stderr
        if is_mount_point:
            made = {path.name for path in broker.data.iterdir()}  # a file that was just being replaced, at most
            assert not made & {"id", "format", "lineage", "append", "append.log", "topics"}, made
            shutil.rmtree(broker.data)
        assert not broker.data.exists()
        away.rename(broker.data)
        broker.wait(lambda: reasons(broker) == [], "a broker that goes on by itself")
        stored = stop()
        while len(read) < len(stored):
            messages = consumer.poll(timeout=PATIENCE_S)
            assert messages, "not all messages came"
            read += [int(message.value) for message in messages]
    assert read == list(range(len(stored)))
    assert stored == sorted(set(stored))  # commits of the group have seqs too
    broker.down()


def test_a_broker_that_waits_for_its_data_directory_can_be_stopped(broker):
    broker.up()
    broker.data.rename(broker.root / "away")
    broker.wait(lambda: reasons(broker) == ["data_missing"], "the reason that names the data directory")
    broker.kill("framer")  # it had not noticed; now all wait
    broker.wait(lambda: broker.status()["framer"]["state"] == "data_missing", "a framer that waits too")
    assert broker.kmq("topics", "create", "others").returncode == RETRY
    broker.down()
    assert reasons(broker) == ["down"] and not broker.data.exists()
    broker.up()  # a start by hand begins anew where no broker runs
    assert reasons(broker) == []


def test_stages_without_a_supervisor_wait_for_their_data_directory_too(broker):
    names = ("ingress", "framer", "durability", "router")
    broker.pipes.mkdir()
    running = {}

    def start(name):
        with (broker.pipes / "kmq.log").open("ab") as log:
            command = [sys.executable, "-m", f"stages.{name}"]
            running[name] = subprocess.Popen(command, env=broker.env, cwd=broker.root, stderr=log)

    try:
        for name in names:
            start(name)
        broker.wait(lambda: reasons(broker) == [], "stages that are ready")
        broker.data.rename(broker.root / "away")
        for name in ("ingress", "durability", "router"):
            assert running[name].wait(60) == RETRY
        running["framer"].kill()  # now nobody is left who could tell
        running["framer"].wait()
        for name in names:
            start(name)
        broker.wait(lambda: reasons(broker) == ["data_missing"], "the reason that names the data directory")
        assert not broker.data.exists()
        (broker.root / "away").rename(broker.data)
        broker.wait(lambda: reasons(broker) == [], "stages that are ready")
    finally:
        for process in running.values():
            process.kill()
            process.wait()
