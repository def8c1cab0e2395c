"""Spark that knows all brokers of a shard by address: the shard is read once, and goes on when its leader is killed."""

import json
import warnings
from collections import Counter

import httpx
import pytest
from consuls import free_ports
from pyspark.sql.types import StringType, StructField, StructType
from test_shard import BROKERS
from test_shard_clients import Whole
from waiting import PATIENCE_S, until

import kmq
from kmq.spark.sink.sender import Senders
from kmq.spark.sink.targets import Target, WriteOptions
from kmq.spark.source.batch_reader import BatchReader
from kmq.spark.source.group import GroupOffsets
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.stream_reader import StreamReader

MESSAGES = 200
VALUE = StructType([StructField("value_text", StringType())])


class Fixed(Whole):
    """Brokers at ports that are the same in every role, as users have them."""

    def __init__(self, address, root):
        super().__init__(address, root)
        numbers = map(str, free_ports(2 * len(BROKERS)))
        self.ports = {name: {"KMQ_PORT": next(numbers), "KMQ_HTTP_PORT": next(numbers)} for name in BROKERS}

    def kmq(self, name, *arguments, **more):
        return super().kmq(name, *arguments, **self.ports[name] | more)


@pytest.fixture
def shard(consul, tmp_path):
    made = Fixed(consul.address, tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def where(shard, *names):
    """The options that name these brokers, each by an address of its own."""
    return {"kmq.bootstrap.servers": shard.hosts("http", *names)}


def reading(shard, *names):
    return ReadOptions(where(shard, *names) | {"subscribe": "t", "startingOffsets": "earliest"})


def values(reader, tasks):
    return [text for task in tasks for batch in reader.read(task) for text in batch.column(0).to_pylist()]


class Stream:
    """What Spark does with a stream: plans of one process, and what goes through its checkpoint."""

    def __init__(self, options, begins=None):
        self.reader = StreamReader(VALUE, options)
        self.begins = begins or self._json(self.reader.initialOffset())

    def _json(self, offset):
        return json.loads(json.dumps(offset))

    def plan(self):
        """Plan a batch of all there is; `begins` is then the offset that goes to the checkpoint."""
        end = self._json(self.reader.latestOffset(self.begins, self.reader.getDefaultReadLimit()))
        tasks = self.reader.partitions(self.begins, end) if end != self.begins else []
        self.begins = end
        return tasks


def test_a_task_a_checkpoint_and_a_writer_go_on_when_the_leader_is_killed(shard):
    leader = shard.leader()
    others = [name for name in BROKERS if name != leader]
    to = {"kmq.producers": shard.hosts("ingress", leader, *others), "kmq.producer": "job", "topic": "t"}
    written = WriteOptions(to | where(shard, leader, *others))
    written.recognise()

    def lines(low):
        return b"".join(b"t.k%d|0|%d|%d\n" % (n % 5, n, n) for n in range(low, low + 100))

    def texts(low):
        return [f"{n}" for n in range(low, low + 100)]

    def await_routed(name, count):
        path = shard.root / name / "data" / "t.log"
        until(lambda: path.exists() and path.read_bytes().count(b"\n") == count, f"{count} records")

    with Senders(written, 0) as senders:
        senders.send("job", lines(1))
        senders.finish()
    await_routed(leader, 100)
    one = Stream(reading(shard, leader))
    assert values(one.reader, one.plan()) == texts(1)

    several = Stream(reading(shard, leader, *others), one.begins)
    with Senders(written, 0) as senders:
        senders.send("job", lines(101))
        await_routed(leader, 200)
        tasks = several.plan()
        shard.kill(leader)
        senders.send("job", lines(201))
        senders.finish()
    assert values(several.reader, tasks) == texts(101), "a task that was planned before goes on at another broker"
    await_routed(others[1], 300)
    assert values(several.reader, several.plan()) == texts(201)
    other = Stream(reading(shard, others[1]), one.begins)
    assert values(other.reader, other.plan()) == texts(101) + texts(201), "a checkpoint of the leader's address goes on"

    whole = reading(shard, leader, *others)
    assert whole.brokers == [shard.hosts("http", leader, *others)], "the others know whose address is silent"
    batch = BatchReader(VALUE, whole)
    assert values(batch, batch.partitions()) == texts(1) + texts(101) + texts(201), "each once"

    group = GroupOffsets("g", whole.servers, whole.access)
    group.commit({(whole.brokers[0], "t", 0): 300})
    url = f"http://{shard.hosts('http', others[0])}/api/groups/g"
    rows = httpx.get(url, trust_env=False, timeout=PATIENCE_S).json()["partitions"]
    assert [row["committed"] for row in rows] == [300]
    Target.of(to["kmq.producers"], {}).check()


@pytest.fixture(scope="module")
def spark():
    from kmq.spark.sessions import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = session("local[2]", "shard", {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"})
    yield made
    made.stop()


@pytest.mark.java
def test_a_leader_that_is_killed_in_mid_query_costs_source_and_sink_a_retry(spark, shard, tmp_path):
    sent = []

    def send():
        with kmq.Producer(shard.hosts("ingress"), timeout_s=PATIENCE_S) as producer:
            texts = [f"{n}" for n in range(len(sent), len(sent) + MESSAGES)]
            for text in texts:
                producer.send("t", text, key=f"k{text[-1]}")
        sent.extend(texts)

    def copied(name):
        """The payloads of the copies that are committed, as this broker's queue has them."""
        assert query.exception() is None, query.exception()
        path = shard.root / name / "data" / "copy.log"
        return (
            Counter(line.rpartition("|")[2] for line in path.read_text().splitlines()) if path.exists() else Counter()
        )

    send()
    rows = spark.readStream.format("kmq").schema("value binary").options(**where(shard))
    rows = rows.options(subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger="20").load()
    copies = rows.writeStream.format("kmq").options(
        **where(shard), topic="copy", checkpointLocation=f"{tmp_path}/spark"
    )
    query = copies.option("kmq.producers", shard.hosts("ingress")).start()
    try:
        leader = shard.leader()
        left = next(name for name in BROKERS if name != leader)
        until(lambda: copied(left), "copies")
        shard.kill(leader)
        send()  # what is left of the first messages, or at least these, goes through the next leader
        until(lambda: copied(left).total() >= len(sent), "all copies")
    finally:
        query.stop()
    assert copied(left) == Counter(sent), "each once"
