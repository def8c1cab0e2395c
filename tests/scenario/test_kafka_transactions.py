"""Transactions through the Kafka door, with a real client and with one that says what it is told to."""

import itertools
import json
import os
import re
import signal
from contextlib import suppress
from datetime import timedelta
from zlib import crc32

import pytest
from brokers import STAGES, Broker
from confluent_kafka import Consumer, KafkaException, TopicPartition
from consuls import free_ports
from kafka_peer import Peer
from kafka_transactions import Raw, address, committed, metadata_of, producer, stored, with_fail_points
from kio.schema.errors import ErrorCode
from waiting import attempts

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

INIT, PRODUCERS, DESCRIBE, LIST = 22, 61, 65, 66


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("kafka"))
    made.env["KMQ_KAFKA_PORT"] = str(free_ports(1)[0])  # clients find the next gateway there
    with_fail_points(made)
    made.up(KMQ_KAFKA_PARTITIONS=2, KMQ_KAFKA_TXN_BYTES="5 MiB", KMQ_MAX_LINE=65536)
    yield made
    made.down()


# --- a real client ---------------------------------------------------------------------------------------------------


def test_a_transaction_is_in_its_topics_when_it_is_committed_and_not_before(broker, topic):
    made = producer(broker, topic)
    made.begin_transaction()
    for number in range(100):
        made.produce(topic, b"%d" % number, key=b"k.%d" % number, partition=number % 2, headers={"n": b"%d" % number})
    assert made.flush(30) == 0
    assert stored(broker, topic, 0) == stored(broker, topic, 1) == []
    made.commit_transaction(30)
    assert stored(broker, topic, 0) == [b"%d" % number for number in range(0, 100, 2)]
    assert stored(broker, topic, 1) == [b"%d" % number for number in range(1, 100, 2)]
    made.begin_transaction()
    made.produce(topic, b"next", partition=0)
    made.commit_transaction(30)
    assert stored(broker, topic, 0)[-1] == b"next"
    reader = Consumer({"bootstrap.servers": address(broker), "group.id": topic, "isolation.level": "read_committed"})
    reader.assign([TopicPartition(topic, 0, 0)])
    found = reader.consume(51, 30)
    reader.close()
    assert [each.offset() for each in found] == [*range(51)]
    assert (found[3].key(), found[3].headers(), found[3].value()) == (b"k.6", [("n", b"6")], b"6")


def test_nothing_of_an_aborted_transaction_is_in_any_file_of_its_topic(broker, topic):
    made = producer(broker, topic)
    made.begin_transaction()
    made.produce(topic, b"never-to-be-seen", partition=0)
    assert made.flush(30) == 0
    made.abort_transaction(30)
    made.begin_transaction()
    made.produce(topic, b"seen", partition=0)
    made.commit_transaction(30)
    assert stored(broker, topic) == [b"seen"]
    files = [path for path in (broker.data / "topics" / topic).rglob("*") if path.is_file()]
    assert not any(b"never-to-be-seen" in path.read_bytes() for path in files)


def test_a_second_producer_with_the_id_fences_the_first_and_aborts_what_it_has_begun(broker, topic):
    first = producer(broker, topic)
    first.begin_transaction()
    first.produce(topic, b"of the first", partition=0)
    assert first.flush(30) == 0
    second = producer(broker, topic)
    with pytest.raises(KafkaException) as refused:
        first.commit_transaction(30)
    assert refused.value.args[0].fatal()
    second.begin_transaction()
    second.produce(topic, b"of the second", partition=0)
    second.commit_transaction(30)
    assert stored(broker, topic) == [b"of the second"]


def test_offsets_sent_to_a_transaction_are_committed_with_it(broker, topic):
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic(f"{topic}-out") == 2
    broker.send_lines([b"%b.@0|||%d" % (topic.encode(), number) for number in range(10)])
    settings = {"bootstrap.servers": address(broker), "group.id": topic, "auto.offset.reset": "earliest"}
    reader = Consumer(settings | {"enable.auto.commit": False})
    reader.subscribe([topic])
    made = producer(broker, topic)
    read = reader.consume(10, 30)
    assert len(read) == 10
    place = [TopicPartition(topic, 0)]
    for is_committed in (False, True):
        made.begin_transaction()
        for message in read:
            made.produce(f"{topic}-out", message.value(), partition=0)
        made.send_offsets_to_transaction([TopicPartition(topic, 0, 10)], reader.consumer_group_metadata(), 30)
        if is_committed:
            made.commit_transaction(30)
        else:
            made.abort_transaction(30)
            assert reader.committed(place, 30)[0].offset < 0
    assert reader.committed(place, 30)[0].offset == 10
    reader.close()
    assert stored(broker, f"{topic}-out") == [b"%d" % number for number in range(10)]


# --- byte by byte ----------------------------------------------------------------------------------------------------


def test_offsets_that_are_told_in_transactions_are_those_of_the_commit_and_do_not_fall(broker, topic, peer):
    raw = Raw(peer, topic)
    sequences, told, lines = iter(range(0, 100, 2)), [], []

    def send(sequence=None):
        number = next(sequences) if sequence is None else sequence
        found = raw.send(topic, 0, [b"%d" % number, b"%d" % (number + 1)], number)
        assert found.error_code == ErrorCode.none
        return found.base_offset

    for number in range(5):
        assert raw.add(topic, 0) == [ErrorCode.none]
        found = [send(), send()]
        if number != 2:
            told += found
            lines += [b"%d" % each for each in range(4 * number, 4 * number + 4)]
        assert raw.end(committed=number != 2) == ErrorCode.none
    assert told == [*range(0, 16, 2)] and stored(broker, topic) == lines
    # Others write in between: a record is never told an offset beyond its own.
    assert raw.add(topic, 0) == [ErrorCode.none]
    assert broker.kmq("produce", "--acks", f"{topic}.@0", text="by another\n").returncode == 0
    assert [send(), send(20), send()] == [17, 17, 19]
    # The next gateway knows where the transaction began.
    os.kill(broker.pids()["gateway"], signal.SIGKILL)
    for _ in attempts("the next gateway"):
        with suppress(OSError, AssertionError), Peer.of(broker.pipes) as raw.peer:
            if raw.send(topic, 0, [b"22", b"23"], 22).error_code == ErrorCode.none:
                break
    raw.peer = later = Peer.of(broker.pipes)
    assert [send(20), send(22), send()] == [17, 19, 21]
    assert raw.end() == ErrorCode.none
    assert raw.add(topic, 0) == [ErrorCode.none] and send() == 23
    assert raw.end() == ErrorCode.none
    later.close()
    assert stored(broker, topic)[16:] == [b"by another", *(b"%d" % number for number in range(20, 28))]


def test_a_batch_that_comes_again_is_committed_once(broker, topic, peer):
    raw = Raw(peer, topic)
    for sequence in (0, 1, 1, 0, 2):
        assert raw.send(topic, 0, [b"%d" % sequence], sequence).error_code == ErrorCode.none
    assert [raw.end(), raw.end(), raw.end()] == [ErrorCode.none] * 3
    assert stored(broker, topic) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a_fenced_epoch_is_refused_at_every_key(broker, topic, peer, version):
    raw = Raw(peer, f"{topic}-{version}")
    raw.add(topic, 0)
    assert raw.send(topic, 0, [b"old"]).error_code == ErrorCode.none
    Raw(peer, raw.id)
    fenced = ErrorCode.producer_fenced if version >= 2 else ErrorCode.invalid_producer_epoch
    assert raw.add(topic, 0, version=version) == [fenced]
    assert raw.end(version=version) == fenced
    assert raw.add_offsets(topic) == ErrorCode.producer_fenced
    assert raw.commit_offsets(topic, topic, 1) == ErrorCode.invalid_producer_epoch
    assert raw.send(topic, 0, [b"late"], 1).error_code == ErrorCode.invalid_producer_epoch
    assert raw.init(pid=raw.pid, epoch=raw.epoch).error_code == ErrorCode.producer_fenced
    assert stored(broker, topic) == []


def test_a_foreign_id_is_refused(broker, topic, peer):
    mine, other = Raw(peer, topic), Raw(peer, f"{topic}-other")
    mine.send(topic, 0, [b"mine"])
    other.id = topic
    assert other.end() == ErrorCode.invalid_producer_id_mapping
    assert other.add(topic, 0) == [ErrorCode.invalid_producer_id_mapping]
    mine.pid, mine.epoch = 10**15, 0
    assert mine.end() == ErrorCode.invalid_producer_id_mapping
    assert stored(broker, topic) == []


def test_partitions_that_are_not_there_and_topics_of_the_broker_itself_are_refused(topic, peer):
    raw = Raw(peer, topic)
    assert raw.add(topic, 0, 7) == [ErrorCode.operation_not_attempted, ErrorCode.unknown_topic_or_partition]
    assert raw.add("__consumer_offsets", 0) == [ErrorCode.unknown_topic_or_partition]
    assert raw.send("__consumer_offsets", 0, [b"a"]).error_code != ErrorCode.none


def test_a_producer_of_transactions_sends_nothing_beside_them(broker, topic, peer):
    raw = Raw(peer, topic)
    assert raw.send(topic, 0, [b"a"], attributes=0).error_code == ErrorCode.invalid_txn_state
    assert stored(broker, topic) == []


def test_a_transaction_over_its_time_is_aborted_and_its_producer_fenced(broker, topic, peer):
    raw = Raw(peer, topic, timeout_ms=300)
    assert raw.send(topic, 0, [b"slow"]).error_code == ErrorCode.none
    broker.wait(lambda: f"kafka_transaction_aborted id={topic}" in broker.log(), "the end of the transaction")
    assert raw.end() == ErrorCode.producer_fenced
    found = raw.init(pid=raw.pid, epoch=raw.epoch)  # its own client may go on, under the next epoch
    assert (found.error_code, found.producer_epoch) == (ErrorCode.none, raw.epoch + 1)
    raw.epoch += 1
    assert raw.send(topic, 0, [b"quick"]).error_code == ErrorCode.none
    assert raw.end() == ErrorCode.none
    assert stored(broker, topic) == [b"quick"]


def test_a_transaction_over_its_size_is_aborted(broker, topic, peer):
    raw = Raw(peer, topic)
    codes = [raw.send(topic, 0, [b"x" * 60_000] * 12, 12 * n).error_code for n in range(10)]
    assert codes[:8] == [ErrorCode.none] * 8
    assert codes[8:] == [ErrorCode.invalid_producer_epoch] * 2
    broker.wait(lambda: f"kafka_transaction_aborted id={topic}" in broker.log(), "the end of the transaction")
    assert raw.end() == ErrorCode.producer_fenced
    assert stored(broker, topic) == []


@pytest.mark.parametrize("timeout_ms", [0, 900_001])
def test_a_time_that_is_too_long_is_refused(topic, peer, timeout_ms):
    raw = Raw(peer, topic)
    assert raw.init(timeout_ms).error_code == ErrorCode.invalid_transaction_timeout


def test_who_names_the_producer_id_of_before_gets_another_one_if_the_id_was_forgotten_and_nobody_has_it(topic, peer):
    asked = {"transactional_id": topic, "transaction_timeout": timedelta(seconds=60), "producer_epoch": 0}
    found = peer.ask(INIT, 4, **asked, producer_id=7)
    assert (found.error_code, found.producer_epoch) == (ErrorCode.none, 0) and found.producer_id > 7
    assert peer.ask(INIT, 4, **asked, producer_id=7).error_code == ErrorCode.producer_fenced
    assert peer.ask(INIT, 4, **asked, producer_id=found.producer_id).producer_epoch == 1


def test_groups_are_served_by_a_start_without_room_for_a_transaction(new_broker):
    made = new_broker()
    made.env["KMQ_KAFKA_PORT"] = str(free_ports(1)[0])
    made.up()
    first = producer(made, "t")
    first.begin_transaction()
    first.produce("t", b"committed", partition=0)
    first.commit_transaction(30)
    made.send_lines([b"filler|||%b" % (b"x" * 60_000)] * 50)
    made.down()
    assert "quota" in made.kmq("up", KMQ_DATA_QUOTA="1 MiB").stderr
    said = {"bootstrap.servers": address(made), "group.id": "g", "auto.offset.reset": "earliest", "log_level": 0}
    consumer = Consumer(said | {"enable.auto.commit": False})
    consumer.subscribe(["t"])
    found = []

    def read():
        message = consumer.poll(0.1)
        found.extend([message] if message is not None and not message.error() else [])
        return found

    made.wait(read, "the record")
    assert found[0].value() == b"committed" and "kafka_transactions_not_read" in made.log()
    consumer.close()


def test_an_offset_in_a_transaction_makes_a_stable_fetch_wait_until_its_end(broker, topic, peer):
    raw = Raw(peer, topic)
    broker.send_lines([b"%b.@0|||%d" % (topic.encode(), number) for number in range(5)])
    broker.wait(lambda: len(stored(broker, topic)) == 5, "the records")
    for sequence, is_committed in enumerate((True, False)):
        before = committed(peer, topic, topic)
        assert raw.add_offsets(topic) == ErrorCode.none
        assert raw.commit_offsets(topic, topic, 4 + sequence) == ErrorCode.none
        assert committed(peer, topic, topic)[0] == ErrorCode.unstable_offset_commit
        assert committed(peer, topic, topic, stable=False) == before
        assert raw.end(is_committed) == ErrorCode.none
        assert committed(peer, topic, topic) == (ErrorCode.none, 4)


def test_offsets_in_a_transaction_are_fenced_by_generation_and_member(broker, topic, peer):
    raw = Raw(peer, topic)
    assert raw.commit_offsets(topic, topic, 0, "nobody", 3) == ErrorCode.unknown_member_id
    assert committed(peer, topic, topic) == (ErrorCode.none, -1)


@pytest.mark.parametrize("is_made_again", [False, True])
def test_records_for_a_topic_that_was_deleted_meanwhile_are_left_out(broker, topic, peer, is_made_again):
    gone = f"{topic}-gone"
    assert peer.make_topic(gone) == 2
    raw = Raw(peer, topic)
    assert raw.send(topic, 0, [b"first"]).error_code == ErrorCode.none
    assert raw.send(gone, 1, [b"lost"]).error_code == ErrorCode.none
    assert raw.send(topic, 0, [b"second"], 1).error_code == ErrorCode.none
    assert broker.kmq("topics", "delete", gone, "--yes").returncode == 0
    if is_made_again:
        assert peer.make_topic(gone) == 2
    assert raw.end() == ErrorCode.none
    assert stored(broker, topic) == [b"first", b"second"]
    assert stored(broker, gone, 1) == []
    assert f"kafka_transaction_dropped id={topic} pid={raw.pid} records=1" in broker.log()


def test_what_is_open_is_described_and_listed(topic, peer):
    raw = Raw(peer, topic)
    raw.add(topic, 0, 1)
    raw.send(topic, 0, [b"a"])
    (found,) = peer.ask(DESCRIBE, 0, transactional_ids=(topic,)).transaction_states
    assert (found.transaction_state, found.producer_id, found.topics[0].partitions) == ("Ongoing", raw.pid, (0, 1))
    rows = peer.ask(LIST, 0, state_filters=(), producer_id_filters=(raw.pid,)).transaction_states
    assert [(row.transactional_id, row.transaction_state) for row in rows] == [(topic, "Ongoing")]
    raw.end()
    assert peer.ask(LIST, 0, state_filters=("Ongoing",), producer_id_filters=(raw.pid,)).transaction_states == ()
    rows = peer.ask(LIST, 0, state_filters=("CompleteCommit",), producer_id_filters=()).transaction_states
    assert topic in [row.transactional_id for row in rows]


def test_the_producers_of_a_partition_are_described(broker, topic, peer):
    raw, other = Raw(peer, topic), Raw(peer, f"{topic}-other")
    raw.send(topic, 0, [b"a", b"b"])
    raw.send(topic, 0, [b"c"], 2)
    other.send(topic, 1, [b"d"])
    parts = [{"name": topic, "partition_indexes": (0, 1, 2)}, {"name": f"{topic}-no", "partition_indexes": (0,)}]
    of_topic, of_none = peer.ask(PRODUCERS, 0, topics=parts).topics
    assert [row.error_code for row in (*of_topic.partitions, *of_none.partitions)] == [
        *(ErrorCode.none, ErrorCode.none),
        *(ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_or_partition),
    ]
    found = [
        [(row.producer_id, row.producer_epoch, row.last_sequence, row.last_timestamp) for row in part.active_producers]
        for part in of_topic.partitions
    ]
    assert found == [[(raw.pid, 0, 2, 1000)], [(other.pid, 0, 0, 1000)], []]
    (row,) = of_topic.partitions[0].active_producers
    assert (row.coordinator_epoch, row.current_txn_start_offset) == (-1, -1)


def test_what_no_transaction_needs_any_more_is_deleted(broker, topic):
    made, held = producer(broker, topic), crc32(topic.encode()) % 8
    other = next(name for name in (f"{topic}-{n}" for n in itertools.count()) if crc32(name.encode()) % 8 == held)
    with Peer.of(broker.pipes) as peer:
        raw = Raw(peer, other)
        assert raw.send(topic, 1, [b"open for long"]).error_code == ErrorCode.none
        for _ in range(20):
            made.begin_transaction()
            for _ in range(100):
                made.produce(topic, b"x" * 40_000, partition=0)
            made.commit_transaction(60)
        directory = broker.data / "topics" / "__transactions" / str(held)
        assert len([*directory.glob("*.log")]) > 3
        first = min(directory.glob("*.log"))
        assert raw.end() == ErrorCode.none
    assert stored(broker, topic, 1) == [b"open for long"]
    broker.wait(lambda: len([*directory.glob("*.log")]) <= 2 and not first.exists(), "the end of what is over")
    made.begin_transaction()
    made.produce(topic, b"goes on", partition=1)
    made.commit_transaction(30)
    assert stored(broker, topic, 1) == [b"open for long", b"goes on"]
    assert not broker.kmq("verify").returncode


# --- commands --------------------------------------------------------------------------------------------------------


def test_commands_list_show_and_abort_what_is_open(broker, topic, peer):
    raw = Raw(peer, topic)
    assert broker.kmq("kafka", "transactions", "show", topic).stdout.startswith(f"{topic}: idle, producer id {raw.pid}")
    raw.send(topic, 1, [b"a", b"b"])
    raw.commit_offsets("readers", topic, 0)
    rows = json.loads(broker.kmq("kafka", "transactions", "ls", "--json").stdout)
    (row,) = [row for row in rows if row["id"] == topic]
    assert (row["state"], row["held"], row["partitions"]) == ("open", 3, [f"{topic}/1"])
    assert row["offsets"] == [f"readers: {topic}/0"]
    shown = broker.kmq("kafka", "transactions", "ls", COLUMNS="200").stdout
    assert re.search(rf"^{topic} +open +{raw.pid} +0 +3 ", shown, re.MULTILINE)
    done = broker.kmq("kafka", "transactions", "abort", topic, "--yes")
    assert (done.returncode, done.stdout) == (0, f"{topic}: nothing is open; its producer is fenced\n")
    assert raw.end() == ErrorCode.producer_fenced
    assert broker.kmq("kafka", "transactions", "show", topic).stdout.startswith(f"{topic}: aborted")
    refused = broker.kmq("kafka", "transactions", "abort", "nobody", "--yes")
    assert (refused.returncode, "is not known" in refused.stderr) == (78, True)
    assert stored(broker, topic, 1) == []


# --- kills -----------------------------------------------------------------------------------------------------------


def ended(call):
    """Ask until it is done: the client says when asking again is right."""
    for _ in attempts("the end of a transaction", every_s=0):
        try:
            return call(10)
        except KafkaException as err:
            assert err.args[0].retriable(), err


@pytest.mark.parametrize("victims", [("gateway",), (*STAGES, "gateway")])
def test_an_open_transaction_is_as_it_was_after_a_kill(broker, topic, victims):
    made = producer(broker, topic)
    made.begin_transaction()
    made.produce(topic, b"before", partition=0)
    assert made.flush(30) == 0
    broker.kill(*victims)
    made.produce(topic, b"after", partition=0)
    assert made.flush(60) == 0
    assert stored(broker, topic) == []
    ended(made.commit_transaction)
    assert stored(broker, topic) == [b"before", b"after"]


POINTS = [
    *("before_init", "before_write_state_empty", "after_init", "before_hold_offsets", "after_hold_offsets"),
    *("before_write_state_commit", "after_write_state_commit", "copy_sent", "copy_stored", "after_copy"),
    *("before_store_offsets", "after_store_offsets", "after_write_state_empty", "after_write_state_abort"),
]
_VICTIMS = (False, "gateway"), (True, "all")
KILLS = [  # each step with one kind of kill; the other one in the soak
    pytest.param(point, is_all, id=f"{point}-{name}", marks=[pytest.mark.soak] if at % 2 == is_all else [])
    for at, point in enumerate(POINTS)
    for is_all, name in _VICTIMS
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("point", "is_all"), KILLS)
def test_a_kill_at_any_step_leaves_each_record_of_a_commit_once_and_none_of_an_abort(broker, topic, point, is_all):
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic(f"{topic}-in") == 2
    broker.send_lines([b"%b-in.@0|||%d" % (topic.encode(), number) for number in range(10)])
    armed = broker.root / "fail_point"
    is_first = point in ("before_init", "after_init")
    made = None if is_first else producer(broker, topic)
    pids = broker.pids()
    armed.write_text(" ".join([point, *(str(pids[name]) for name in (*STAGES, "gateway") if is_all)]))
    made = made or producer(broker, topic)
    values = [b"%d-" % number + b"x" * 1000 for number in range(500)]  # several units
    for is_committed in (True, False, True):
        made.begin_transaction()
        for number, value in enumerate(values):
            made.produce(topic, value, partition=number % 2)
        assert made.flush(60) == 0
        place = [TopicPartition(f"{topic}-in", 0, 5 if is_committed else 7)]
        ended(lambda s, place=place: made.send_offsets_to_transaction(place, metadata_of(topic), s))
        ended(made.commit_transaction if is_committed else made.abort_transaction)
    assert not armed.exists(), "nobody came there"
    for partition in range(2):
        assert stored(broker, topic, partition) == values[partition::2] * 2
    with Peer.of(broker.pipes) as peer:
        broker.wait(lambda: committed(peer, topic, f"{topic}-in")[0] == ErrorCode.none, "offsets")
        assert committed(peer, topic, f"{topic}-in") == (ErrorCode.none, 5)
