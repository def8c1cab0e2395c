"""What an operator deletes from the front of a partition is gone at every door, whatever is killed or rebuilt afterwards."""

import json
import os
import shutil
import signal
from datetime import timedelta

import pytest
from brokers import PATIENCE_S
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka_client import KafkaClient
from line_client import ask

from kmq.gateway.kafka.wire import ErrorCode, Key
from kmq.log import identity, reader


@pytest.fixture
def broker(broker):
    broker.gateway = True
    broker.up()
    return broker


def address(broker):
    return {"bootstrap.servers": f"localhost:{(broker.pipes / 'kafka.port').read_text().strip()}", "log_level": 0}


def fill(broker, topic, numbers):
    before = len(broker.wal())
    broker.send_lines([b"%b.k|0||%d" % (topic.encode(), n) for n in numbers])
    broker.wait_routed(before + len(numbers))


def delete_before(broker, *starts):
    """Ask as Kafka's clients do: (topic, partition, offset), … Returns the low watermarks, or names of errors."""
    admin, found = AdminClient(address(broker)), {}
    futures = admin.delete_records([TopicPartition(*each) for each in starts], operation_timeout=20)
    for place, future in futures.items():
        try:
            found[place.topic, place.partition] = future.result(PATIENCE_S).low_watermark
        except KafkaException as err:
            found[place.topic, place.partition] = err.args[0].name()
    return [found[each[:2]] for each in starts]


def by_kafka(broker, topic, end):
    """(first offset, messages) for a consumer that begins at the beginning."""
    consumer = Consumer(address(broker) | {"group.id": "none", "enable.auto.commit": False})
    first, last = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=PATIENCE_S)
    assert last == end
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found = [] if first == last else [consumer.poll(PATIENCE_S)]
    while found and found[-1].offset() < end - 1:
        found.append(consumer.poll(PATIENCE_S))
    consumer.close()
    assert [each.offset() for each in found] == [*range(first, end)]
    return first, [int(each.value()) for each in found]


def by_lines(broker, topic):
    answer = ask(int((broker.pipes / "egress.port").read_text()), f"CONSUME {topic} raw")
    return [int(line.rsplit(b"|", 1)[1]) for line in answer.splitlines()]


def assert_all_see(broker, topic, first, numbers):
    """Kafka's clients, a shell, HTTP, the command line and a program that reads files."""
    numbers = [*numbers]
    end = first + len(numbers)
    assert by_kafka(broker, topic, end) == (first, numbers)
    assert [int(line.rsplit(b"|", 1)[1]) for line in broker.lines(topic)] == numbers
    code, body = broker.get(f"/api/admin/topics/{topic}")
    (row,) = json.loads(body)["partitions"]
    assert code == 200 and (row["startOffset"], row["endOffset"]) == (first, end)
    assert by_lines(broker, topic) == numbers
    assert [*map(int, broker.kmq("consume", topic).stdout.split())] == numbers
    assert reader.partition(str(broker.data), topic, 0).first_offset == first


def test_what_a_kafka_client_deletes_is_gone_at_every_door_after_kills_and_a_rebuild_too(broker):
    fill(broker, "orders", range(100))
    assert delete_before(broker, ("orders", 0, 42)) == [42]
    assert_all_see(broker, "orders", 42, range(42, 100))
    assert delete_before(broker, ("orders", 0, 42)) == delete_before(broker, ("orders", 0, 7)) == [42]
    assert len(broker.wal()) == 101, "what is there already needs no record"
    fill(broker, "orders", range(100, 120))
    broker.kill()
    broker.up()
    assert_all_see(broker, "orders", 42, range(42, 120))
    broker.down()
    shutil.rmtree(broker.data / "topics/orders/0")
    broker.up()
    assert_all_see(broker, "orders", 42, range(42, 120))
    broker.down()
    (broker.data / "router.ckpt").unlink()
    assert broker.kmq("verify").stdout.endswith("no damage\n")
    broker.up()
    assert_all_see(broker, "orders", 42, range(42, 120))
    broker.down()
    assert broker.kmq("verify").stdout.endswith("no damage\n")


def test_all_messages_are_deleted_and_the_offsets_go_on(broker):
    fill(broker, "orders", range(30))
    assert delete_before(broker, ("orders", 0, -1)) == [30]
    assert_all_see(broker, "orders", 30, [])
    broker.down()
    assert broker.kmq("verify").stdout.endswith("no damage\n")
    (broker.data / "router.ckpt").unlink()
    broker.up()
    assert_all_see(broker, "orders", 30, [])
    fill(broker, "orders", range(30, 40))
    assert_all_see(broker, "orders", 30, range(30, 40))
    broker.down()
    assert broker.kmq("verify", "--repair").returncode == 0
    broker.up()
    assert_all_see(broker, "orders", 30, range(30, 40))


def test_who_follows_and_who_produces_goes_on_when_all_is_deleted(broker):
    fill(broker, "orders", range(30))
    consumer = Consumer(address(broker) | {"group.id": "none", "enable.auto.commit": False})
    consumer.assign([TopicPartition("orders", 0, 28)])
    assert [consumer.poll(PATIENCE_S).offset() for _ in range(2)] == [28, 29]
    told = []
    producer = Producer(address(broker) | {"enable.idempotence": True})
    for number in range(30, 33):
        assert delete_before(broker, ("orders", 0, -1)) == [number]
        producer.produce("orders", b"%d" % number, partition=0, on_delivery=lambda _, row: told.append(row.offset()))
        producer.flush(PATIENCE_S)
        message = consumer.poll(PATIENCE_S)
        assert (message.error(), message.offset(), message.value()) == (None, number, b"%d" % number)
    assert told == [30, 31, 32]
    consumer.close()
    assert_all_see(broker, "orders", 32, [32])


def test_what_cannot_be_deleted_is_refused_partition_by_partition(broker):
    fill(broker, "orders", range(10))
    admin = AdminClient(address(broker))
    both = [
        ("rows", {"cleanup.policy": "compact"}),
        ("both", {"cleanup.policy": "compact,delete", "retention.ms": "1000000000"}),
    ]
    made = admin.create_topics([NewTopic("wide", 3), *(NewTopic(name, 1, config=config) for name, config in both)])
    for each in made.values():
        each.result(PATIENCE_S)
    fill(broker, "both", range(4))
    asked = [("orders", 0, 11), ("rows", 0, 0), ("both", 0, 2), ("wide", 2, -1)]
    assert delete_before(broker, *asked) == ["OFFSET_OUT_OF_RANGE", "POLICY_VIOLATION", 2, 0]
    assert len(broker.lines("orders")) == 10
    with KafkaClient(int((broker.pipes / "kafka.port").read_text())) as raw:
        rows = [{"partition_index": 0, "offset": offset} for offset in (-2, 3, -1, 5)]
        names = ("__kmq", "nobody")
        topics = [{"name": each, "partitions": [{"partition_index": 0, "offset": -1}]} for each in names]
        topics.append({"name": "orders", "partitions": [*rows, {"partition_index": 1, "offset": 0}]})
        found = raw.ask(Key.DELETE_RECORDS, 2, topics=topics, timeout=timedelta(seconds=20)).topics
        own, nobody, orders = ([(row.error_code, row.low_watermark) for row in each.partitions] for each in found)
        assert own == [(ErrorCode.invalid_topic_exception, -1)]
        assert nobody == [(ErrorCode.unknown_topic_or_partition, -1)] == orders[-1:]
        assert orders[:-1] == [(ErrorCode.offset_out_of_range, -1), *[(ErrorCode.none, 10)] * 3]


def test_a_client_that_does_not_wait_is_told_of_what_is_done_at_once(broker):
    fill(broker, "orders", range(10))
    with KafkaClient(int((broker.pipes / "kafka.port").read_text())) as raw:
        topics = [{"name": "orders", "partitions": [{"partition_index": 0, "offset": 4}]}]
        (row,) = raw.ask(Key.DELETE_RECORDS, 2, topics=topics, timeout=timedelta(0)).topics[0].partitions
    assert (row.error_code, row.low_watermark) == (ErrorCode.none, 4)


def test_a_request_that_the_router_cannot_carry_out_in_time_is_answered_and_carried_out_later(broker):
    fill(broker, "orders", range(10))
    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    try:
        with KafkaClient(int((broker.pipes / "kafka.port").read_text())) as raw:
            topics = [{"name": "orders", "partitions": [{"partition_index": 0, "offset": 4}]}]
            found = raw.ask(Key.DELETE_RECORDS, 1, topics=topics, timeout=timedelta(milliseconds=300))
        assert found.topics[0].partitions[0].error_code == ErrorCode.request_timed_out
    finally:
        os.kill(router, signal.SIGCONT)
    broker.wait(lambda: reader.partition(str(broker.data), "orders", 0).first_offset == 4, "the start")


def test_the_command_says_what_would_go_and_deletes_it(broker):
    fill(broker, "orders", range(50))
    assert broker.kmq("topics", "create", "wide", "--partitions", "3").returncode == 0
    broker.send_lines([b"wide.k%d|0||x" % key for key in range(30)])
    broker.wait_routed(81)
    planned = broker.kmq("topics", "truncate", "orders", "--before", "12", "--dry-run")
    assert planned.stdout == "topic orders: 12 messages before 12 in 1 partition(s) would be deleted\n"
    assert broker.kmq("topics", "truncate", "orders", "--before", "12").returncode == 78, "there is nobody to ask"
    assert len(broker.lines("orders")) == 50
    done = broker.kmq("topics", "truncate", "orders", "--before", "12", "--yes")
    assert done.stdout.startswith("topic orders: 12 messages before 12 in 1 partition(s): deleted."), done.stderr
    assert_all_see(broker, "orders", 12, range(12, 50))
    again = broker.kmq("topics", "truncate", "orders", "--before", "12", "--yes")
    assert again.stdout == "topic orders: 0 messages before 12 in 1 partition(s) are there; nothing is deleted\n"
    assert broker.kmq("topics", "truncate", "wide", "--before", "end", "--yes").returncode == 0
    assert broker.lines("wide") == []
    for arguments, why in (
        (("orders", "--before", "51"), "ends with offset 50"),
        (("orders", "--before", "x"), "must be an offset, or end"),
        (("wide", "--before", "1"), "give --partition"),
        (("wide", "--before", "1", "--partition", "3"), "there is no 3"),
        (("__kmq", "--before", "end"), "belongs to KMQ itself"),
        (("none", "--before", "end"), "none"),
    ):
        refused = broker.kmq("topics", "truncate", *arguments, "--yes")
        assert refused.returncode == 78 and why in refused.stderr, refused.stderr
    broker.down()
    done = broker.kmq("topics", "truncate", "orders", "--before", "20", "--yes")
    assert "deleted when the router has adopted it" in done.stdout
    broker.up()
    broker.wait(lambda: reader.partition(str(broker.data), "orders", 0).first_offset == 20, "the start")
    assert identity.version(str(broker.data))[0] == identity.STARTED
    assert "event=start_moved topic=orders partition=0 offset=20" in broker.log()
