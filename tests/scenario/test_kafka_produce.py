"""Produce through the Kafka door: lines that tail shows, offsets that are right, and each batch of a producer once."""

import os
import signal
import time
from datetime import timedelta

import pytest
from brokers import Broker
from kafka_batches import Sent, framed, records_of
from kafka_peer import Peer
from kio.schema.errors import ErrorCode

EPOCH_IDS = 1 << 44
LAST_SEQUENCE = (1 << 31) - 1


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("kafka"))
    made.up(KMQ_MAX_LINE=65536, KMQ_KAFKA_PARTITIONS=2)
    yield made
    made.down()


def batch(values, producer=(-1, -1, -1), begin=1000, **more):
    """Records with a time each, from `begin` on."""
    rows = [Sent(begin + n, None, value) for n, value in enumerate(values)]
    more = {"base": begin, "latest": begin + len(rows) - 1} | more
    return framed(records_of(rows, begin), len(rows), producer=producer, **more)


def stored(broker, topic, partition=0):
    """The payloads of a partition, in order."""
    files = sorted((broker.data / "topics" / topic / str(partition)).glob("*.log"))
    return [line.split(b"|", 5)[5] for file in files for line in file.read_bytes().splitlines() if line]


def new_pid(peer):
    found = peer.ask(22, 1, transactional_id=None, transaction_timeout=timedelta(0))
    assert (found.error_code, found.producer_epoch) == (ErrorCode.none, 0)
    return found.producer_id


# --- batches without a producer id -----------------------------------------------------------------------------------


def test_a_batch_is_lines_of_its_partition_and_its_offset_is_that_of_the_first(broker, topic, peer):
    assert peer.produce(topic, 1, batch([b"a", b"b"])).base_offset == 0
    assert broker.kmq("produce", "--acks", f"{topic}.@1", text="by a shell\n").returncode == 0
    found = peer.produce(topic, 1, batch([b"c"]))
    assert (found.error_code, found.base_offset) == (ErrorCode.none, 3)
    assert stored(broker, topic, 1) == [b"a", b"b", b"by a shell", b"c"]
    assert stored(broker, topic, 0) == []


def test_every_version_of_produce_is_answered_in_its_form(broker, topic, peer):
    offsets = [peer.produce(topic, 0, batch([b"x"]), version=version).base_offset for version in range(3, 10)]
    assert offsets == [*range(7)]


def test_batches_that_are_sent_ahead_are_answered_in_order(broker, topic, peer):
    for number in range(200):
        peer.send_batch(topic, number % 2, batch([b"%d" % number] * 3))
    offsets = [peer.read_produced().base_offset for _ in range(200)]
    assert offsets == [number // 2 * 3 for number in range(200)]


def test_a_batch_over_many_units_has_one_offset(broker, topic, peer):
    values = [b"%d" % n * 4000 for n in range(9)] * 30  # some 1 MB, where a unit has at most 128 KiB
    assert peer.produce(topic, 0, batch([b"first"])).base_offset == 0
    assert peer.produce(topic, 0, batch(values)).base_offset == 1
    assert stored(broker, topic)[1:] == values


def test_acks_0_gets_no_response_and_a_refused_batch_ends_the_connection(broker, topic):
    with Peer.of(broker.pipes) as peer:
        peer.send_batch(topic, 0, batch([b"a"]), acks=0)
        assert peer.produce(topic, 0, batch([b"b"])).base_offset == 1
    with Peer.of(broker.pipes) as peer:
        peer.send_batch("nobody", 0, batch([b"a"]), acks=0)
        assert peer.read_raw() == b""


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"", ErrorCode.invalid_record),
        (None, ErrorCode.invalid_record),
        (batch([b"a"]) * 2, ErrorCode.invalid_record),
        (batch([b"a"])[:-1], ErrorCode.corrupt_message),
        (batch([b"a"])[:-1] + b"z", ErrorCode.corrupt_message),
        (batch([b"x" * 70_000]), ErrorCode.message_too_large),
        (batch([b"a"], attributes=16, producer=(1_000_000, 0, 0)), ErrorCode.invalid_producer_id_mapping),
        (batch([b"a"])[:16] + b"\1" + batch([b"a"])[17:], ErrorCode.unsupported_for_message_format),
    ],
    ids=["nothing", "null", "two", "cut", "altered", "long", "transactional", "old"],
)
def test_a_wrong_batch_is_refused_and_nothing_of_it_is_stored(broker, topic, peer, sent, code):
    assert peer.produce(topic, 0, sent).error_code == code
    assert stored(broker, topic) == []
    assert peer.produce(topic, 0, batch([b"good"])).base_offset == 0


@pytest.mark.parametrize("partition", [2, -1, 10**9])
def test_a_partition_that_is_not_there_is_refused(broker, topic, peer, partition):
    assert peer.produce(topic, partition, batch([b"a"])).error_code == ErrorCode.unknown_topic_or_partition
    assert peer.produce("nobody", 0, batch([b"a"])).error_code == ErrorCode.unknown_topic_or_partition


# --- producers with ids ----------------------------------------------------------------------------------------------


def test_a_batch_that_comes_again_has_the_offset_that_it_had(broker, topic, peer):
    pid = new_pid(peer)
    sent = [batch([b"%d" % n, b"+"], (pid, 0, 2 * n)) for n in range(10)]
    first = [peer.produce(topic, 0, each).base_offset for each in sent]
    assert first == [*range(0, 20, 2)]
    assert [peer.produce(topic, 0, each).base_offset for each in reversed(sent)] == first[::-1]
    assert len(stored(broker, topic)) == 20


def test_a_part_of_a_batch_that_comes_again_is_no_gap(broker, topic, peer):
    pid = new_pid(peer)
    assert peer.produce(topic, 0, batch([b"a", b"b"], (pid, 0, 0))).base_offset == 0
    found = peer.produce(topic, 0, batch([b"b", b"c"], (pid, 0, 1), begin=1001))
    assert (found.error_code, found.base_offset) == (ErrorCode.none, 1)
    assert stored(broker, topic) == [b"a", b"b", b"c"]


def test_gaps_and_old_epochs_are_refused_and_a_new_epoch_begins_at_0(broker, topic, peer):
    pid = new_pid(peer)

    def code(epoch, sequence):
        return peer.produce(topic, 0, batch([b"%d-%d" % (epoch, sequence)], (pid, epoch, sequence))).error_code

    assert [code(0, 0), code(0, 2), code(1, 1)] == [
        ErrorCode.none,
        ErrorCode.out_of_order_sequence_number,
        ErrorCode.out_of_order_sequence_number,
    ]
    assert [code(0, 1), code(1, 0), code(0, 2)] == [ErrorCode.none, ErrorCode.none, ErrorCode.invalid_producer_epoch]
    assert stored(broker, topic) == [b"0-0", b"0-1", b"1-0"]


def test_sequences_begin_again_at_0_after_the_last_one(broker, topic, peer):
    pid = new_pid(peer)  # nothing is known of it: it may begin anywhere
    around = batch([b"a", b"b", b"c"], (pid, 0, LAST_SEQUENCE - 1))
    assert peer.produce(topic, 0, around).base_offset == 0
    assert peer.produce(topic, 0, batch([b"d"], (pid, 0, 1))).base_offset == 3
    assert peer.produce(topic, 0, around).base_offset == 0
    assert peer.produce(topic, 0, batch([b"e"], (pid, 0, 3))).error_code == ErrorCode.out_of_order_sequence_number
    assert stored(broker, topic) == [b"a", b"b", b"c", b"d"]


def test_other_content_under_a_sequence_is_refused(broker, topic, peer):
    pid = new_pid(peer)
    assert peer.produce(topic, 0, batch([b"a"], (pid, 0, 0))).error_code == ErrorCode.none
    assert peer.produce(topic, 0, batch([b"z"], (pid, 0, 0))).error_code == ErrorCode.invalid_record
    assert stored(broker, topic) == [b"a"]


def test_each_partition_has_sequences_of_its_own(broker, topic, peer):
    pid = new_pid(peer)
    assert [peer.produce(topic, number, batch([b"a"], (pid, 0, 0))).base_offset for number in (0, 1)] == [0, 0]


def test_no_producer_id_is_given_twice(broker, peer):
    found = [new_pid(peer) for _ in range(5)]
    pid = broker.pids()["gateway"]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while len(found) < 10 and time.monotonic() < deadline:
        try:
            with Peer.of(broker.pipes) as again:
                found += [new_pid(again) for _ in range(5)]
        except (OSError, AssertionError):
            time.sleep(0.05)
    assert len({*found}) == len(found) == 10
