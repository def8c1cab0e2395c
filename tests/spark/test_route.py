"""The route pipeline: one pod's queues byte by byte, many pods' as a table; broken off, run again, gone on."""

import os
import random
import shutil

import pytest
from made_data import append, write_data
from made_up import no_room, stored

from kmq.errors import ConfigError
from kmq.log import dropped, identity, topic_changes, topics
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.message.routing import key_behind, resolve
from kmq.repair import verify
from kmq.spark.pipelines import route

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

DECLARED = {"orders": 4, "orders.eu": 2, "jobs": 1}


def messages(count, seed=1):
    rng = random.Random(seed)
    keys = [
        b"orders.k%d",
        b"orders.eu.%d",
        b"orders",
        b"orders.eu",
        b"jobs.%d",
        b"new%d.x",
        b"jobs.\xff\xc3%d",
        b"a.b.%d",
        b"orders.@.eu",
        b"orders.@1.%d",
        b"orders.@0",
        b"new.eu.@.%d",
    ]
    return [
        b"%b|%d|%d|%b|%d" % (k % (n % 9) if b"%" in (k := rng.choice(keys)) else k, n, n, b"x" * rng.randint(0, 200), n)
        for n in range(count)
    ]


def files(data):
    """What a router has written: the logs and their indexes, symlinks."""
    found = {}
    for place, _, names in os.walk(data):
        for name in names:
            path = os.path.join(place, name)
            inside = os.path.relpath(path, data)
            if inside.startswith("topics/") and name.endswith((".log", ".idx", ".toml")) and os.path.getsize(path):
                with open(path, "rb") as file:
                    found[inside] = file.read()
            elif os.path.islink(path) and name != "append.log":
                found[inside] = os.readlink(path)
    return found


def damages(data):
    return [each for each in verify.Verifier(data, is_live=False).findings() if each.is_damage]


def same(pod, to):
    """The queues there are in `to` are those of the pod, byte for byte."""
    there, made = files(pod), files(to)
    lines = {path: text for path, text in there.items() if path.endswith(".log")}
    assert {path: text for path, text in made.items() if path.endswith(".log")}.keys() == lines.keys()
    for path, text in made.items():
        if path.endswith(".idx"):  # of several lines for a block, provisional ones, the last is in force
            ours, theirs = ({line.split(b"|")[0]: line for line in each.splitlines()} for each in (text, there[path]))
            assert ours == theirs, path
        else:
            assert text == there[path], path


def test_one_pods_queues_are_those_of_its_router_byte_by_byte(spark, tmp_path, capfd):
    pod = write_data(tmp_path / "pod", messages(5000), DECLARED, segment_bytes=1 << 16)
    for name in topics.names(pod):
        with open(topics.toml_path(pod, name), "a") as file:
            file.write("segment_bytes = 65536\n")
    to = str(tmp_path / "to")
    assert route.run(spark, {"path": pod}, to) == 5000
    same(pod, to)
    if "event=stream_restarted" not in capfd.readouterr().err:  # on a busy machine Spark may have had to begin anew
        assert all(text == files(pod)[path] for path, text in files(to).items())  # in one go the indexes too
    assert sum(path.endswith(".log") for path in files(to)) > 12  # several segments
    assert route.run(spark, {"path": pod}, to) == 0  # from its checkpoint
    shutil.rmtree(f"{to}/.kmq")
    assert route.run(spark, {"path": pod}, to) == 0  # without one
    same(pod, to)
    os.rmdir(f"{to}/append")
    shutil.copytree(f"{pod}/append", f"{to}/append")
    assert damages(to) == []


@pytest.mark.sampled(1, group="long")
def test_it_goes_on_where_it_was_and_mends_what_a_killed_run_left(spark, tmp_path):
    lines = messages(3000, 2)
    made = write_data(tmp_path / "pod", lines[:1000], DECLARED, closed=False)
    pod, to = str(tmp_path / "pod"), str(tmp_path / "to")
    assert route.run(spark, {"path": pod}, to, batch_bytes="32k") == 1000  # many batches
    same(pod, to)
    append(made, lines[1000:])
    # As a run leaves it that was killed in its batch: one log has some lines more, one a torn one, one is ahead of its index.
    for number, extra in enumerate([-1, -7, 0, -40]):
        with open(f"{pod}/topics/orders/{number}/{0:020}.log", "rb") as file:
            whole = file.read()
        path = f"{to}/topics/orders/{number}/{0:020}.log"
        at = whole.index(b"\n", os.path.getsize(path) + 300) + 1
        with open(path, "wb") as file:
            file.write(whole[: at + extra])
    assert route.run(spark, {"path": pod}, to) == 2000  # those that the killed run had written are of this batch
    same(pod, to)


def test_it_goes_on_after_a_topic_has_grown_and_with_a_partition_that_has_no_record(spark, tmp_path):
    lines = messages(400, 3)
    made = write_data(tmp_path / "pod", [*lines[:200], b"rare.k|0|1|x"], DECLARED | {"rare": 4}, closed=False)
    pod, to = str(tmp_path / "pod"), str(tmp_path / "to")
    assert route.run(spark, {"path": pod}, to) == 201
    for name, partitions in (("jobs", 3), ("orders", 6)):
        topic_changes.submit(pod, topic_changes.GROW, name, {"partitions": str(partitions)})
    made[1].tick()
    append(made, [*lines[200:], *(b"rare.k%d|0|1|x" % n for n in range(40))])
    assert route.run(spark, {"path": pod}, to) == 240
    same(pod, to)
    assert topics.load(to, "jobs") == topics.load(pod, "jobs") and "jobs-2.log" in files(to)


def test_records_stored_before_there_were_marks_go_where_their_router_put_them(spark, tmp_path):
    pod, to = str(tmp_path / "pod"), str(tmp_path / "to")
    identity.open_data(pod)
    (tmp_path / "pod/format").write_text(f"{identity.format_text(1, 400)}\n")
    write_data(pod, messages(800, 5), DECLARED)
    assert route.run(spark, {"path": pod}, to) == 800
    same(pod, to)
    assert identity.marks_from(to) == 400
    read = spark.read.format("kmq").option("path", to).option("subscribePattern", ".*")
    rows = read.schema("topic string, seq bigint, key binary, routing_key binary").load().collect()
    for row in rows:
        key = key_behind(row.topic.encode(), bytes(row.routing_key), row.seq >= 400)
        assert (row.key and bytes(row.key)) == key, row
    assert {bytes(row.key) for row in rows if row.key and row.seq < 400} > {b"@.eu", b"@0"}
    assert route.run(spark, {"path": pod}, str(tmp_path / "table"), "parquet") == 800
    places = "topic string, partition int, seq bigint"
    found = spark.read.parquet(str(tmp_path / "table")).select("topic", "partition", "seq").collect()
    assert sorted(found) == sorted(read.schema(places).load().collect())


def test_what_was_dropped_is_in_no_queue_here_either(spark, tmp_path):
    pod = write_data(tmp_path / "pod", messages(4000, 3), DECLARED)
    ranges = [(5, 5), (100, 899), (1000, 1001), (3990, 3999)]
    for first, last in ranges:
        dropped.append(pod, "durable", first, last, no_room)
    dropped.append(pod, "framed", 4001, 4010, no_room)
    to = str(tmp_path / "to")
    gone = {seq for first, last in ranges for seq in range(first, last + 1)}
    assert route.run(spark, {"path": pod}, to) == 4000 - len(gone)
    read = spark.read.format("kmq").option("path", to).option("subscribePattern", ".*").schema("seq bigint").load()
    assert sorted(row.seq for row in read.collect()) == sorted(set(range(1, 4001)) - gone)


@pytest.mark.sampled(1, group="long")
def test_many_pods_make_one_table_in_which_every_record_is_where_its_pods_table_says(spark, tmp_path):
    tables = [{"orders": 4}, {"orders": 2, "orders.eu": 3}, {}]
    pods = [write_data(tmp_path / f"p{n}", messages(800, n), declared) for n, declared in enumerate(tables)]
    dropped.append(pods[1], "durable", 10, 19, no_room)
    to = str(tmp_path / "table")
    where = {"path": ",".join(pods)}
    assert route.run(spark, where, to, "parquet", batch_bytes="100k") == 2390
    assert route.run(spark, where, to, "parquet") == 0
    rows = spark.read.parquet(to).collect()
    assert len({(row.broker, row.seq) for row in rows}) == len(rows) == 2390
    for row in rows:
        table = topics.table(row.broker)
        routing_key = bytes(row.line).split(b"|")[2]
        found = resolve(table, routing_key, row.seq)
        assert (row.topic, row.key and bytes(row.key)) == (found.topic.decode(), found.key)
        assert row.partition == table[found.topic].partition_of(found, row.seq)
    for file in (tmp_path / "table").glob("topic=orders/*/*.parquet"):
        held = [(row.broker, row.seq) for row in spark.read.parquet(str(file)).select("broker", "seq").collect()]
        assert held == sorted(held)


def test_another_table_may_take_the_place_of_the_pods_own(spark, tmp_path):
    pod = write_data(tmp_path / "pod", messages(500, 4), {"jobs": 2})
    other = write_data(tmp_path / "other", [], {"orders": 64, "a.b": 3})
    to = str(tmp_path / "table")
    route.run(spark, {"path": pod}, to, "parquet", table=other)
    rows = spark.read.parquet(to).select("topic", "partition").collect()
    assert max(row.partition for row in rows if row.topic == "orders") > 8
    assert {row.topic for row in rows} >= {"orders", "a.b", "jobs"}
    assert {row.partition for row in rows if row.topic == "jobs"} == {0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "text"}, "--as 'text': must be one of log, parquet, delta, iceberg"),
        ({"where": "two"}, "is for the WAL of one data directory"),
        ({"table": "."}, "--table: not with --as log"),
        ({"to": "other"}, "holds another pod's queues"),
    ],
)
def test_what_cannot_be_is_refused(spark, tmp_path, change, words):
    pods = [write_data(tmp_path / name, messages(10)) for name in ("one", "other")]
    given = {"where": {"path": pods[0]}, "to": str(tmp_path / "to"), "format": "log", "table": ""} | change
    if given["where"] == "two":
        given["where"] = {"path": ",".join(pods)}
    if given["to"] == "other":
        given["to"] = pods[1]
    with pytest.raises(ConfigError, match=words):
        route.run(spark, **given)


def test_a_wal_that_retention_has_shortened_is_refused(spark, tmp_path):
    pod = str(tmp_path / "pod")
    identity.open_data(pod)
    wal = Wal(pod, no_room, 1 << 20, Limits(segment_bytes=1000))
    for seq, line in enumerate(stored(messages(50)), 1):
        wal.append([(line, seq, 1, seq)])
        wal.sync()
    wal.close()
    for path in sorted((tmp_path / "pod" / "append").glob("0*"))[:4]:
        path.unlink()
    with pytest.raises(ConfigError, match="its WAL begins with seq"):
        route.run(spark, {"path": pod}, str(tmp_path / "to"))


def test_pods_are_routed_over_http_by_the_tables_they_tell(spark, broker, tmp_path):
    broker.gateway = True
    broker.up()
    broker.kmq("topics", "create", "orders.eu", "--partitions", "3")
    broker.send_lines(messages(300))
    broker.wait_routed(301)  # the declaration, which has a queue too, and they
    where = {"kmq.bootstrap.servers": f"127.0.0.1:{(broker.pipes / 'http.port').read_text().strip()}"}
    assert route.run(spark, where, str(tmp_path / "table"), "parquet") == 301
    rows = spark.read.parquet(str(tmp_path / "table")).select("topic", "partition", "seq", "line").collect()
    for name in topics.names(str(broker.data)):
        for partition in range(topics.load(str(broker.data), name)[0]):
            mine = sorted((r.seq, bytes(r.line)) for r in rows if (r.topic, r.partition) == (name, partition))
            path = broker.data / "topics" / name / str(partition) / f"{0:020}.log"
            assert [line for _, line in mine] == path.read_bytes().splitlines()
