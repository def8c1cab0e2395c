"""mirror: each message once at the target, whatever is killed; where it was is in its headers; copies are not copied on."""

import os
import signal
import subprocess
import threading
from base64 import b64decode
from pathlib import Path
from urllib.parse import unquote

import pytest
from made_data import append, write_data
from waiting import until

from kmq.errors import ConfigError
from kmq.log import identity, topics
from kmq.spark.pipelines import mirror
from kmq.spark.source.brokers import Directory

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

START_S = 240.0  # deadline for a process with a session to have sent something, on a busy machine
ODD = [b"", b"|", b"a|b", b"\xff\xfe", "é".encode(), b"%41", b" ", b"x" * 3000]


@pytest.fixture
def source(tmp_path):
    """A directory with topic orders (3 partitions), keys and payloads of every kind, and topic jobs."""
    lines = [b"orders.k%d|17%d|%d;h=%%25;p=old|%b" % (n % 17, n, n, ODD[n % len(ODD)]) for n in range(600)]
    lines += [b"orders|1|same|no key %d" % n for n in range(30)] + [b"jobs.a||x%d|j" % n for n in range(5)]
    return write_data(tmp_path / "source", lines, {"orders": 3})


def address(broker):
    return f"127.0.0.1:{(broker.pipes / 'ingress.port').read_text().strip()}"


def copy(spark, source, broker, checkpoint, **options):
    where = {"path": str(source), "subscribe": "orders,jobs"}
    return mirror.run(spark, where, address(broker), Directory(str(broker.data)), checkpoint=str(checkpoint), **options)


def partition(data, topic, number):
    """The stored lines of a partition, in order."""
    return b"".join(path.read_bytes() for path in sorted(Path(f"{data}/topics/{topic}/{number}").glob("*.log")))


def contents(data, topic="orders", partitions=3):
    """What producers meant: (routing key, producer_ts, payload) of each record with a key, partition by partition, in order."""
    found = []
    for number in range(partitions):
        fields = [line.split(b"|", 5) for line in partition(data, topic, number).split(b"\n")[:-1]]
        found.append([(key, ts, decoded(id, payload)) for _, _, key, ts, id, payload in fields if b"." in key])
    return found


def decoded(id, payload):
    return b64decode(payload) if b";enc=b64" in id else payload


def headers(line):
    own, *pairs = line.split(b"|", 5)[4].decode().split(";")
    return own, {name: unquote(value) for name, _, value in (pair.partition("=") for pair in pairs)}


def test_messages_keep_what_they_were_and_say_where(spark, source):
    rows = spark.read.format("kmq").schema(mirror.READ).option("path", source).option("subscribe", "orders").load()
    found = mirror.messages(rows, {source: "0123456789abcdef"}).collect()
    assert len(found) == 630
    by_id = {(row["producer"], row["id"]): row for row in found}
    assert len(by_id) == 630
    assert {producer for producer, _ in by_id} == {f"mirror-0123456789ab-orders-{n}" for n in range(3)}
    first = by_id["mirror-0123456789ab-orders-1", 1]
    line = partition(source, "orders", 1).split(b"\n")[0]
    was, had = headers(line)
    assert had["h"] == "%" and had["p"] == "old"  # made by hand: names of one letter are KMQ's own
    assert [(each.key, bytes(each.value)) for each in first["headers"]] == [
        ("mirror", b"0123456789abcdef"),
        ("mirror_partition", b"1"),
        ("mirror_offset", b"0"),
        ("mirror_seq", line.split(b"|")[0]),
        ("mirror_id", was.encode()),
    ]
    for row in found:
        assert row["routing_key"] + b"|" + row["producer_ts"] in line_of(source, row)


def line_of(source, row):
    place = {each.key: int(each.value) for each in row["headers"] if each.key in ("mirror_partition", "mirror_offset")}
    number, offset = place["mirror_partition"], place["mirror_offset"]
    return partition(source, "orders", number).split(b"\n")[offset]


def test_the_name_of_a_producer_is_short_enough_whatever_the_topic_is_called(spark):
    for topic in ("orders", "t" * 39, "t" * 40, "t" * 200):
        schema = "broker string, topic string, partition int, offset bigint, seq bigint, key binary, routing_key binary"
        schema += f", producer_ts binary, id string, headers {mirror.HEADERS}, value binary"
        rows = spark.createDataFrame([("b", topic, 1023, 6, 9, None, b"t", b"0", "", None, b"v")], schema)
        (row,) = mirror.messages(rows, {"b": "0123456789abcdef"}).collect()
        assert row["producer"] == mirror.producer_of("0123456789abcdef", topic, 1023) and len(row["producer"]) <= 64
        assert row["id"] == 7 and "mirror_id" not in [each.key for each in row["headers"]]


def test_each_message_is_at_the_target_once_in_order_even_from_a_lost_checkpoint(spark, source, broker, tmp_path):
    broker.up()
    done = copy(spark, source, broker, tmp_path / "c1")
    assert (done.rows, done.skipped) == (635, 0)
    broker.wait_routed(635)
    assert contents(broker.data) == contents(source)
    assert contents(broker.data, "jobs", 1) == contents(source, "jobs", 1)
    assert len(broker.lines("orders")) == 630  # those without a key are spread anew
    copied, had = headers(next(line for line in broker.lines("orders") if b"mirror_offset=4;" in line))
    assert (
        copied == "5"
        and had["mirror"] == (tmp_path / "source/id").read_text().strip()
        and had["p"].startswith("mirror-")
    )
    wal = broker.wal()
    assert copy(spark, source, broker, tmp_path / "c1").rows == 0
    assert copy(spark, source, broker, tmp_path / "lost").rows == 635  # sent, and known
    assert broker.wal() == wal


def test_two_brokers_that_mirror_each_other_do_not_pass_messages_round(spark, new_broker, tmp_path):
    brokers = [new_broker(), new_broker()]
    for number, each in enumerate(brokers):
        each.gateway = False
        each.up()
        each.send_lines([b"orders.k%d|0|%d|from %d" % (n % 3, n, number) for n in range(20)])
        each.wait_routed(20)
    for round_ in range(2):
        found = []
        for here, there in (brokers, brokers[::-1]):
            where = {"path": str(here.data), "subscribe": "orders"}
            checkpoint = str(tmp_path / here.instance)
            target = Directory(str(there.data))
            found.append(mirror.run(spark, where, address(there), target, checkpoint=checkpoint)[:2])
            there.wait_routed(int(there.wal()[-1].split(b"|")[0]))
        assert found == ([(20, 0), (20, 20)] if not round_ else [(0, 20), (0, 0)])
    assert [len(each.wal()) for each in brokers] == [40, 40]


def test_a_continuous_mirror_carries_over_what_comes_until_its_stream_is_stopped(spark, broker, tmp_path):
    broker.up()
    lines = [b"orders.k%d|0|%d|%d" % (n % 5, n, n) for n in range(30)]
    made = write_data(tmp_path / "source", lines[:20], {"jobs": 1}, closed=False)
    source, done = str(tmp_path / "source"), []

    def follow():
        done.append(copy(spark, source, broker, tmp_path / "c", once=False, every="100 milliseconds"))

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        broker.wait_routed(20)
        append(made, lines[20:])
        broker.wait_routed(30)
        broker.wait((tmp_path / "c/commits/1").exists, "the end of the second batch")
    finally:
        for query in spark.streams.active:
            query.stop()
        thread.join()
    assert (done[0].rows, done[0].batches) == (30, 2)
    assert contents(broker.data, partitions=1) == contents(source, partitions=1)


def test_what_would_change_places_is_refused_before_anything_is_sent(spark, source, broker, tmp_path):
    where = {"path": source, "subscribe": "orders"}
    with pytest.raises(ConfigError, match="--to-path"):
        mirror.run(spark, where, "127.0.0.1:1")
    with pytest.raises(ConfigError, match="is the source"):
        mirror.run(spark, where, "127.0.0.1:1", Directory(source))
    other = write_data(tmp_path / "other", [b"orders.k|0|1|x"])
    with pytest.raises(ConfigError, match=r"topic orders: 3 partitions here, 1 at .*: keys would change places"):
        mirror.run(spark, where, "127.0.0.1:1", Directory(other))
    murmur = str(tmp_path / "murmur")
    identity.open_data(murmur)
    topics.declare(murmur, "orders", 3, partitioner="murmur2")
    with pytest.raises(ConfigError, match=r"partitioner crc32 here, murmur2 at .*: keys would change places"):
        mirror.run(spark, where, "127.0.0.1:1", Directory(murmur))
    with pytest.raises(ConfigError, match=r"3 partitions at .*, 1 elsewhere|1 partitions at .*, 3 elsewhere"):
        mirror.run(spark, {"path": f"{source},{other}", "subscribe": "orders"}, "127.0.0.1:1")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_kills_of_the_driver_and_of_the_targets_stages_lose_and_double_nothing(broker, tmp_path):
    """The command, as a process, killed while it sends; the target's stages killed while the next run goes on."""
    lines = [b"orders.k%d|0|%d|%d %b" % (n % 50, n, n, b"x" * 80) for n in range(30_000)]
    source = write_data(tmp_path / "source", lines, {"orders": 3}, group=5000)
    broker.up()
    command = ["kmq", "pipeline", "run", "mirror", "--path", source, "--topics", "orders", "--to", address(broker)]
    command += ["--to-path", str(broker.data), "--checkpoint", str(tmp_path / "checkpoint"), "--master", "local[2]"]

    def stored():
        return int(broker.status()["durability"]["seq"])

    driver = subprocess.Popen(command, env=broker.env, cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        until(stored, "the first records", seconds=START_S, process=driver)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    before = stored()
    driver = subprocess.Popen(command, env=broker.env, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE)
    try:
        more = min(before + 1, len(lines))
        until(lambda: stored() >= more or driver.poll() is not None, "another record", seconds=START_S)
        for stage in ("durability", "router", "framer"):
            broker.kill(stage)
        said, _ = driver.communicate(timeout=START_S)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    assert driver.returncode == 0, said
    assert b"mirrored" in said
    broker.wait(lambda: "router" in broker.status() and stored() >= len(lines), "all stored")
    broker.wait_routed(len(lines))
    assert stored() == len(lines)
    assert contents(broker.data) == contents(source)
