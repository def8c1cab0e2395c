"""Partitioners: the same partitions as Kafka's Java client, and turns without a key."""

import os
import random
import shutil
from collections import Counter
from urllib.parse import unquote_to_bytes

import pytest
from traced_broker import Broker

from kmq.errors import ConfigError
from kmq.log import checkpoint, topic_changes, topics
from kmq.log.segment import start_of
from kmq.message import record
from kmq.message.routing import CRC32, MURMUR2, RUN, Table, Topic, decoded, murmur2, resolve
from kmq.repair import heal

# From the tests of Kafka's Java client: signed numbers.
VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "number"), VECTORS.items())
def test_murmur2_is_that_of_kafkas_java_client(key, number):
    assert murmur2(key) == number & 0xFFFFFFFF
    assert MURMUR2.number(key) == number & 0x7FFFFFFF, "toPositive"
    topic = Topic("t", 7, 1, partitioner=MURMUR2)
    route = resolve(Table({b"t": topic}), b"t.@." + key, 1)
    assert topic.partition_of(route, 1) == (number & 0x7FFFFFFF) % 7


def test_murmur2_counts_the_bytes_of_a_key_and_not_their_encoding():
    assert MURMUR2.number(b"a%2Eb%C3%BC") == MURMUR2.number("a.bü".encode())
    assert CRC32.number(b"a%2Eb") != CRC32.number(b"a.b"), "stored records stay where they are"
    rng = random.Random(1)
    for _ in range(5000):
        key = bytes(rng.choices(b"%4aGf0\xff", k=rng.randint(0, 9)))
        assert decoded(key) == unquote_to_bytes(key)


def test_messages_without_a_key_take_turns_of_equal_length():
    topic = Topic("t", 4, 1, partitioner=MURMUR2)
    turns = [topic.turn_of(seq) for seq in range(RUN * 40)]
    assert turns[: RUN + 1] == [0] * RUN + [1] and set(Counter(turns).values()) == {RUN * 10}
    grown = Topic("t", 4, 1, grown=[(RUN * 6, 2)], partitioner=MURMUR2)
    assert [grown.turn_of(RUN * n) for n in range(4, 9)] == [0, 1, 2, 3, 0]


def test_records_with_consecutive_seqs_are_found_by_interpolation():
    rng = random.Random(2)
    for _ in range(500):
        first, count = rng.choice([1, 95, 9990, 10**6]), rng.randint(1, 60)
        sizes = [rng.choice([0, 5, 5, rng.randint(0, 3000)]) for _ in range(count)]
        lines = [b"%d|1.0|t|||%b\n" % (first + n, b"x" * size) for n, size in enumerate(sizes)]
        begins = [sum(map(len, lines[:n])) for n in range(count + 1)]
        low, wanted, high = sorted(rng.choices(range(count + 1), k=3))
        if low < high:
            marks = [(begins[n], first + n) for n in (low, high)]
            assert start_of(b"".join(lines), first + wanted, *marks) == begins[wanted]


def test_a_topic_keeps_its_partitioner_and_a_file_without_one_says_crc32(data):
    for name, partitioner in (("new", "murmur2"), ("old", "crc32")):
        topics.declare(data, name, 3, partitioner=partitioner)
        assert topics.read(data, name).partitioner == partitioner
    topics.declare(data, "default", 3)
    assert topics.read(data, "default").partitioner == "murmur2"
    assert topics.parse("partitions = 3\nfrom_seq = 1\n").topic("t").partitioner is CRC32
    with pytest.raises(ConfigError, match="partitioner 'md5': must be crc32 or murmur2"):
        topics.declare(data, "other", 3, partitioner="md5")


@pytest.mark.parametrize("line", ['partitioner = "murmur3"', 'partitionar = "murmur2"', "partitioner = 1"])
def test_a_damaged_partitioner_is_not_taken_for_another(line):
    with pytest.raises(ValueError, match="partitioner"):
        topics.parse(f"partitions = 3\n{line}\nfrom_seq = 1\n")


def test_the_checkpoint_knows_the_partitioner_if_the_file_does_not(data):
    table = [Topic("a", 2, 5, partitioner=MURMUR2), Topic("b", 1, 1), Topic("c", 2, 9, (), [(10, 1)], MURMUR2)]
    with open(f"{data}/router.ckpt", "wb") as file:
        file.write(checkpoint.text(17, {(each.name, n): checkpoint.EMPTY for each in table for n in (0, 1)}, table))
    since = checkpoint.load(data)[2]
    assert {name: known.partitioner.name for name, known in since.items()} == {
        "a": "murmur2",
        "b": "crc32",
        "c": "murmur2",
    }
    topics.declare(data, "a", 2, partitioner="crc32")
    text = topics.Declaration(2, 5).text()
    with open(topics.toml_path(data, "a"), "wb") as file:
        file.write(text)
    for number in (0, 1):
        os.makedirs(f"{data}/topics/a/{number}")
    assert topics.fault(data, "a", since["a"]) == "says partitioner crc32, but the topic has murmur2"


LOSSES = {
    "its logs and the checkpoint": ["topics/wide/0", "topics/wide/2", "router.ckpt"],
    "its directory": ["topics/wide"],
    "its declaration": ["topics/wide/topic.toml"],
    "its declaration and the checkpoint": ["topics/wide/topic.toml", "router.ckpt"],
}


CASES = [(loss, grows) for loss in LOSSES for grows in (False, True)]
CASES.remove(("its declaration and the checkpoint", True))  # then nothing says how it has grown


@pytest.mark.parametrize(("loss", "grows"), CASES)
def test_queues_of_a_murmur2_topic_come_back_byte_for_byte(tmp_path, loss, grows):
    broker = Broker(tmp_path / "data")
    topics.declare(broker.data, "wide", 3)
    broker.queues.tick()
    broker.send(*(b"wide|0|%d|x" % n for n in range(150)))
    broker.send(*(b"wide.k%%2E%d|0|%d|x" % (n % 9, n) for n in range(60)), b"wide.@.|0|1|x", b"wide.@2.k|0|1|x")
    if grows:
        broker.ask(topic_changes.GROW, "wide", partitions=5)
        assert topics.read(broker.data, "wide").partitioner == "murmur2"
    broker.send(*(b"wide|0|%d|y" % n for n in range(70)), *(b"wide.k%d|0|%d|y" % (n, n) for n in range(30)))
    broker.send(*(b"wide|0|%d|z" % n for n in range(400)))
    table = topics.table(broker.data)
    for name, content in broker.files().items():
        number = int(name.split("/")[2])
        lines = content.splitlines()
        routes = [(resolve(table, record.routing_key_of(line), record.seq_of(line)), line) for line in lines]
        assert {table[b"wide"].partition_of(route, record.seq_of(line)) for route, line in routes} == {number}
        assert [record.seq_of(line) for line in lines] == sorted(map(record.seq_of, lines))
    broker.queues.close()
    before, known = broker.files(), checkpoint.load(broker.data)[1]
    for number, content in enumerate(before[name] for name in sorted(before)):
        lines, state = content.splitlines(), known["wide", number]
        assert (state.end_offset, state.last_seq) == (len(lines), record.seq_of(lines[-1]))
    assert len(before) == (5 if grows else 3) and broker.findings() == []
    for lost in LOSSES[loss]:
        path = tmp_path / "data" / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if "declaration" in loss:
        heal.repair(broker.data)
        assert topics.read(broker.data, "wide").partitioner == "murmur2"
    after = Broker(broker.data, broker.seq)
    after.queues.close()
    assert after.files() == before and after.findings() == []
