"""A topic that is larger than the disk, read by Spark: through the gateway, with objects from the store, and without a broker."""

import json
import os
import shutil
from pathlib import Path

import pytest
import tier_stores
from brokers import Broker
from pyspark.errors import PySparkException
from stream_runs import run_tasks
from tiered import cold_broker
from waiting import until

from kmq.errors import RetryError
from kmq.log import rows, segment
from kmq.spark.source.store import Lineage
from kmq.tier.store import get, open_store

COUNT = 20_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A topic of four MiB, of which one or two lie on the disk."""
    root = tmp_path_factory.mktemp("store")
    made = Broker(root / "b")
    made.env |= {
        "KMQ_TIER": f"file://{root}/kmq",
        "KMQ_TIER_EVERY": "100ms",
        "KMQ_TIER_OBJECT": "1 MiB",
        "KMQ_TIER_CACHE": "4 MiB",
        "KMQ_SEGMENT_BYTES": "128 KiB",
    }
    try:
        made.up()
        done = made.kmq("topics", "create", "orders", "--set", "tier=on", "--set", "local_retention_bytes=1MiB")
        assert done.returncode == 0, done.stderr
        produce(made, 0, COUNT)
        until(lambda: local(made) > COUNT // 2, "old segments leave the disk", made.log)
        yield made
    finally:
        made.close()


def produce(broker, low, high):
    text = "".join(f"{n} {'x' * 150}\n" for n in range(low, high))
    assert broker.kmq("produce", "orders", text=text).returncode == 0, broker.log()


def directory(broker):
    return f"{broker.data}/topics/orders/0"


def local(broker):
    """The first offset on the disk."""
    return segment.listing(directory(broker))[0][0]


def gateway(broker):
    return f"127.0.0.1:{(broker.pipes / 'http.port').read_text().strip()}"


def lines(broker):
    """The stored lines of the topic, as the WAL has them."""
    return [line for line in broker.wal() if line.split(b"|", 3)[2] == b"orders"]


def read(spark, schema="offset bigint, line binary", topic="orders", **options):
    reader = spark.read.format("kmq").schema(schema).option("subscribe", topic)
    return reader.options(**{name.replace("servers", "kmq.bootstrap.servers"): text for name, text in options.items()})


def stored(df):
    found = sorted((row.offset, bytes(row.line)) for row in df.load().collect())
    assert [offset for offset, _ in found] == [*range(found[0][0], found[0][0] + len(found))]
    return [line for _, line in found]


def cached(broker):
    return sorted(Path(broker.data, rows.CACHE).rglob("log"))


def test_old_and_new_records_are_the_same_bytes_by_each_way(spark, broker):
    expected, url = lines(broker), broker.env["KMQ_TIER"]
    assert len(expected) == COUNT
    assert stored(read(spark, servers=gateway(broker), tier=url)) == expected
    assert stored(read(spark, path=str(broker.data), tier=url)) == expected
    assert not cached(broker)  # the broker has fetched nothing
    assert stored(read(spark, servers=gateway(broker))) == expected
    assert cached(broker)


def test_a_data_directory_alone_names_the_offsets_and_what_to_set(spark, broker):
    with pytest.raises(PySparkException, match=r"orders/0: offsets 0 to \d+ lie in the store alone; set option tier"):
        read(spark, path=str(broker.data)).load().collect()
    begin = json.dumps({"orders": {"0": local(broker)}})
    found = stored(read(spark, path=str(broker.data), startingOffsets=begin))
    assert found == lines(broker)[-len(found) :]


def test_a_stream_goes_over_the_border_and_resumes_there(spark, broker, tmp_path):
    options = {"subscribe": "orders", "startingOffsets": "earliest", "tier": broker.env["KMQ_TIER"]}
    border = local(broker)
    first = run_tasks(spark, gateway(broker), tmp_path, maxOffsetsPerTrigger="7000", **options)
    produce(broker, COUNT, COUNT + 500)
    second = run_tasks(spark, gateway(broker), tmp_path, **options)
    assert len(first) == 3 and len(second) == 1 and border > 5000
    offsets = [offset for batch in first + second for task in batch.values() for _, offset in task]
    assert sorted(offsets) == [*range(len(lines(broker)))] and len({*offsets}) == len(offsets)


def object_of(broker, number):
    row = rows.of(directory(broker)).rows[number]
    lineage = (broker.data / "lineage").read_text().strip()
    return row, Path(broker.env["KMQ_TIER"].removeprefix("file://"), rows.full_key(lineage, row.key))


def test_an_altered_object_is_named_damage(spark, broker):
    row, path = object_of(broker, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(PySparkException, match=rf"{row.key}: damaged.*offset 0 to {row.next - 1}"):
        read(spark, servers=gateway(broker), tier=broker.env["KMQ_TIER"]).load().collect()
    path.write_bytes(whole)


def test_the_copy_is_read_when_the_broker_is_gone(spark, broker):
    expected, url = lines(broker), broker.env["KMQ_TIER"]
    until(lambda: json.loads(broker.kmq("tier", "status", "--json").stdout)["age"] == 0, "the copy is not behind")
    end = rows.of(directory(broker)).end
    broker.down()
    os.rename(broker.data, f"{broker.data}-gone")
    try:
        assert stored(read(spark, path=url)) == expected[:end]
        wal = read(spark, "offset bigint, routing_key string, line binary", "__append", path=url).load()
        assert [bytes(row.line) for row in wal.where("routing_key = 'orders'").orderBy("offset").collect()] == expected
        copy = spark.readStream.format("kmq").options(path=url, subscribe="orders").load()
        with pytest.raises(PySparkException, match=r"a copy is as of its last commit.*a stream needs a data directory"):
            copy.writeStream.format("noop").start().awaitTermination()
    finally:
        os.rename(f"{broker.data}-gone", broker.data)
        broker.up()


def test_what_a_truncation_has_dropped_after_the_plan_is_data_loss(spark, broker):
    where = {"servers": gateway(broker), "tier": broker.env["KMQ_TIER"]}
    strict, lenient = (read(spark, failOnDataLoss=fails, **where).load() for fails in ("true", "false"))
    assert strict.count() == lenient.count() == len(lines(broker))  # the plan of both is made
    (_, path), (second, _) = object_of(broker, 0), object_of(broker, 1)
    begin = second.base + 3
    done = broker.kmq("topics", "truncate", "orders", "--partition", "0", "--before", str(begin), "--yes")
    assert done.returncode == 0, done.stderr
    path.unlink()
    with pytest.raises(PySparkException, match=rf"orders/0: offsets 0 to {begin - 1} went.*retention"):
        strict.collect()
    assert sorted(row.offset for row in lenient.collect()) == [*range(begin, len(lines(broker)))]
    shutil.rmtree(f"{broker.data}/{rows.CACHE}", ignore_errors=True)


def test_a_command_reads_a_copy_in_a_bucket_with_the_credentials_of_its_environment(tmp_path, new_broker):
    made = cold_broker(tmp_path)
    with tier_stores.s3("moto", tmp_path / "s3") as bucket:
        here, there = made.store, open_store(bucket)
        for key in here.names(""):
            there.create(key, get(here, key))
        query = "select count(*), sum(offset) from t union all select count(*), sum(offset) from append"
        done = new_broker().run("kmq", "sql", "--engine", "spark", "--path", bucket, "--csv", query)
        assert done.returncode == 0, done.stderr
        end = made.rows()[-1][1]
        expected = [f"{end},{end * (end - 1) // 2}", f"400,{400 * 401 // 2}"]
        assert sorted(done.stdout.splitlines()[1:]) == sorted(expected)
        with pytest.raises(
            RetryError, match=r"path='s3://nowhere/kmq': the store .*: NoSuchBucket: The specified bucket"
        ):
            Lineage("s3://nowhere/kmq").identity()
