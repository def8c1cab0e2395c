"""A data directory that was put back and forked: consumers that had read further skip nothing, no offset comes twice."""

import json
import shutil
import subprocess
from contextlib import closing, contextmanager

import pytest
from api_client import Api
from brokers import Broker
from confluent_kafka import Consumer, TopicPartition
from consuls import free_ports
from waiting import until

from kmq.log import gaps, reader


@pytest.fixture
def broker(tmp_path):
    made = Broker(tmp_path / "b")
    made.env["KMQ_KAFKA_PORT"] = str(free_ports(1)[0])  # the same after each start, as consumers expect
    try:
        yield made
    finally:
        made.close()


def send(broker, low, high, last_seq):
    broker.send_lines([b"orders|0|n%d|m%d" % (n, n) for n in range(low, high)])
    broker.wait_routed(last_seq)


def polled(consumer, count):
    """(offset, payload) of the next messages."""
    found = []

    def look():
        message = consumer.poll(0.5)
        if message is not None:
            assert message.error() is None, message.error()
            found.append((message.offset(), message.value()))
        return len(found) >= count

    until(look, f"{count} messages", lambda: found)
    return found


def grouped(api, count, commits=True):
    """(offset, payload) of the next messages of a group, by HTTP."""
    found = []

    def look():
        answer = api.get("/api/topics/orders/consume?group=g&format=text").value
        found.extend((message["offset"], message["value"].encode()) for message in answer["messages"])
        return len(found) >= count

    until(look, f"{count} messages of the group", lambda: found)
    if commits:
        body = {"group": "g", "offsets": [{"partition": 0, "offset": found[-1][0] + 1}]}
        assert api.post("/api/topics/orders/commit", body).status == 200
    return found


@contextmanager
def tailing(broker, *words):
    env = broker.env | {"KMQ_EGRESS_PORT": (broker.pipes / "egress.port").read_text().strip()}
    process = subprocess.Popen(["kmq", *words], env=env, cwd=broker.root, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def put_back(broker, copy):
    broker.down()
    shutil.rmtree(broker.data)
    shutil.copytree(copy, broker.data, symlinks=True)


def test_consumers_above_the_end_of_the_copy_read_every_new_message(broker, tmp_path):
    broker.up()
    send(broker, 0, 10, 10)
    with closing(Api(int((broker.pipes / "http.port").read_text()))) as api:
        broker.wait(lambda: api.get("/api/groups").status == 200, "groups")
        assert len(grouped(api, 10)) == 10
    broker.down()
    copy = tmp_path / "copy"
    shutil.copytree(broker.data, copy, symlinks=True)

    broker.up()
    settings = {"bootstrap.servers": f"127.0.0.1:{broker.env['KMQ_KAFKA_PORT']}", "group.id": "k"}
    consumer = Consumer(settings | {"auto.offset.reset": "error", "enable.auto.commit": False})
    consumer.assign([TopicPartition("orders", 0, 0)])
    send(broker, 10, 15, 16)  # the commit of the group is a record, too
    before = polled(consumer, 15)
    assert before == [(n, b"m%d" % n) for n in range(15)]
    busy = broker.kmq("tier", "fork", "--yes")
    assert busy.returncode == 69 and "the broker must be down" in busy.stderr

    put_back(broker, copy)
    would = broker.kmq("tier", "fork", "--dry-run")
    assert would.returncode == 0 and "nothing was changed" in would.stdout and not (broker.data / gaps.NAME).exists()
    done = broker.kmq("tier", "fork", "--yes")
    assert done.returncode == 0, done.stderr
    assert "orders" in done.stdout and "forked" in done.stdout

    broker.up()
    shown = broker.kmq("consume", "orders", "--from", "earliest")  # it ends, although no record follows the gap
    assert shown.returncode == 0 and shown.stdout.count("\n") == 10, shown.stderr
    (fork,) = gaps.forks(str(broker.data))
    sent = [b"new%d" % n for n in range(5)]
    broker.send_lines([b"orders|0|x%d|%b" % (n, value) for n, value in enumerate(sent)])
    after = polled(consumer, 5)
    assert [value for _, value in after] == sent and after[0][0] == fork.offset
    assert not {offset for offset, _ in before} & {offset for offset, _ in after}
    assert consumer.get_watermark_offsets(TopicPartition("orders", 0)) == (0, fork.offset + 5)
    consumer.close()
    with closing(Api(int((broker.pipes / "http.port").read_text()))) as api:
        broker.wait(lambda: api.get("/api/groups").status == 200, "groups")
        (row,) = api.get("/api/groups/g").value["partitions"]
        assert (row["committed"], row["lag"]) == (10, 5)
        assert [value for _, value in grouped(api, 5)] == sent
        (row,) = api.get("/api/groups/g").value["partitions"]
        assert row["lag"] == 0
    rows = json.loads(broker.get("/v1/logs?topic=orders")[1])
    assert rows[0]["gaps"] == [[10, fork.offset]]
    port = (broker.pipes / "http.port").read_text().strip()
    listed = json.loads(broker.kmq("--url", f"http://127.0.0.1:{port}", "topics", "list", "--json").stdout)["topics"]
    assert [row["messages"] for row in listed if row["topic"] == "orders"] == [15]
    for elsewhere in ([], ["--url", f"http://127.0.0.1:{port}"]):
        with tailing(broker, *elsewhere, "tail", "orders", "-n", "8") as tail:
            offsets = [int(tail.stdout.readline().split()[3]) for _ in range(8)]
        assert offsets == [7, 8, 9, *range(fork.offset, fork.offset + 5)]
    shown = broker.kmq("consume", "orders", "--from", "earliest", "-n", "15")
    assert shown.returncode == 0 and shown.stdout.count("\n") == 15, shown.stderr


def test_a_forked_directory_is_rebuilt_and_verified_like_any_other(broker, tmp_path):
    broker.gateway = False
    broker.up()
    send(broker, 0, 10, 10)
    broker.down()
    assert broker.kmq("tier", "fork", "--yes").returncode == 0
    broker.up()
    (fork,) = gaps.forks(str(broker.data))
    broker.send_lines([b"orders|0|x%d|y%d" % (n, n) for n in range(5)])

    def records():
        found = {}
        for first, lines in reader.partition(str(broker.data), "orders", 0).chunks(0):
            found |= dict(enumerate(lines.split(b"\n")[:-1], first))
        return found

    broker.wait(lambda: len(records()) == 15, "the records")
    before = records()
    assert [*before] == [*range(10), *range(fork.offset, fork.offset + 5)]
    broker.kill()
    shutil.rmtree(broker.data / "topics/orders/0")
    (broker.data / "router.ckpt").unlink(missing_ok=True)
    broker.up()
    broker.wait(lambda: records() == before, "the rebuilt records")
    broker.down()
    done = broker.kmq("verify")
    assert (done.returncode, done.stdout) == (0, "no damage\n")


def test_a_start_refuses_a_directory_whose_fork_has_not_finished(broker):
    broker.gateway = False
    broker.up()
    send(broker, 0, 3, 3)
    broker.down()
    (broker.data / "forking").write_text("torn")
    done = broker.kmq("up", "--no-gateway")
    assert done.returncode != 0 and "run kmq tier fork --yes again" in done.stderr + broker.log()
