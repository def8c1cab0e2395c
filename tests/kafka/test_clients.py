"""Kafka's clients as they are, at a real broker: each writes 54 nasty records, and each reads what all have written."""

from decimal import Decimal

import pytest
from brokers import Broker
from record_lines import Row
from zoo import CLIENTS, EVERYTHING, Client, Zoo, differences, need

NAMES = [*CLIENTS]
SPARK = Client("spark", not_read={"header null value": "Spark's source shows it as an empty one"})
SPARK_COLUMNS = (
    "topic string, partition int, offset bigint, producer_ts string, key_bytes binary, value binary, "
    "headers array<struct<key:string,value:binary>>"
)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    broker = Broker(tmp_path_factory.mktemp("zoo"))
    broker.up(KMQ_KAFKA_PARTITIONS=2)
    yield Zoo(broker)
    broker.close()


@pytest.mark.timeout(900)  # what is missing is fetched
@pytest.mark.parametrize("name", NAMES)
def test_the_client_can_be_had(name):
    need(CLIENTS[name], is_said=True)


def test_there_are_54_records_and_what_a_client_is_spared_is_among_them():
    assert len(EVERYTHING) == 54
    assert all({*client.not_written, *client.not_read} <= {*EVERYTHING} for client in CLIENTS.values())


@pytest.mark.parametrize("name", NAMES)
def test_each_record_of_a_client_is_one_line(zoo, name):
    client = CLIENTS[name]
    need(client)
    zoo.write_all()
    assert not zoo.written[name]
    stored = {codec: len(zoo.broker.lines(client.topic(codec))) for codec in client.codecs}
    assert stored == {codec: len(client.records(codec)) for codec in client.codecs}


@pytest.mark.parametrize("name", [name for name in NAMES if CLIENTS[name].is_kept])
def test_the_batches_of_a_client_are_kept_compressed_as_they_came(zoo, name):
    client = CLIENTS[name]
    need(client)
    zoo.write_all()
    codecs = {codec: zoo.codecs(client.topic(codec)) for codec in client.codecs}
    assert all(codec in found <= {codec, "none"} for codec, found in codecs.items()), codecs


@pytest.mark.sampled(70)
@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("reader", NAMES)
@pytest.mark.parametrize("source", ["memory", "lines"])
def test_a_client_reads_byte_for_byte_what_a_client_has_written(zoo, source, reader, writer):
    need(CLIENTS[reader])
    need(CLIENTS[writer])
    found = zoo.read(CLIENTS[reader], source)
    assert not zoo.written[writer]
    topics = [CLIENTS[writer].topic(codec) for codec in CLIENTS[writer].codecs]
    wrong = {
        topic: differences(zoo.sent()[topic], found[topic], CLIENTS[reader], zoo.times[topic])
        for topic in topics
        if topic in found
    }
    assert not zoo.errors[reader, source]
    assert wrong and not {topic: some for topic, some in wrong.items() if some}


@pytest.mark.parametrize("name", NAMES)
def test_after_a_restart_batches_are_made_of_lines(zoo, name):
    client = CLIENTS[name]
    need(client)
    zoo.write_all()
    zoo.restart()
    assert {codec for each in client.codecs for codec in zoo.codecs(client.topic(each))} == {"none"}


@pytest.mark.java
def test_spark_reads_byte_for_byte_what_every_client_has_written(zoo, spark):
    zoo.write_all()
    sent = zoo.sent()
    reader = spark.read.format("kmq").option("path", str(zoo.broker.data)).option("includeHeaders", "true")
    found = {topic: [] for topic in sent}
    for row in reader.option("subscribe", ",".join(sent)).schema(SPARK_COLUMNS).load().collect():
        key, value = (None if each is None else bytes(each) for each in (row.key_bytes, row.value))
        place = row.topic, row.offset
        found[row.topic].append(Row(row.partition, key, value, spark_headers(row), milliseconds(row), *place))
    wrong = {topic: differences(sent[topic], found[topic], SPARK, zoo.times[topic]) for topic in sent}
    assert not {topic: some for topic, some in wrong.items() if some}


def spark_headers(row):
    return tuple((each.key, None if each.value is None else bytes(each.value)) for each in row.headers or ())


def milliseconds(row):
    return int(Decimal(row.producer_ts) * 1000)
