"""Produce through the Kafka door: lines that tail shows, offsets that are right, and each batch of a producer once."""

import json
import os
import signal
from contextlib import suppress
from datetime import timedelta

import pytest
from brokers import Broker
from kafka_batches import Sent, framed, records_of
from kafka_peer import Peer
from kio.schema.errors import ErrorCode
from waiting import attempts

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


def test_a_line_with_its_newline_is_readable_and_every_reader_gives_the_newline_back(broker, topic, peer):
    sent = [b"a log line\n", b"text", b"\n", b"two\nlines\n"]
    assert peer.produce(topic, 0, batch(sent)).base_offset == 0
    assert stored(broker, topic) == [b"a log line", b"text", b"Cg==", b"dHdvCmxpbmVzCg=="]
    status, body = broker.get(f"/api/topics/{topic}/messages?limit=10&from=earliest")
    assert status == 200 and [row["value"] for row in json.loads(body)["messages"]] == [
        value.decode() for value in sent
    ]


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
    delete_records(peer, topic, 0, [b"x"])  # its ids may have been there: a producer may begin anywhere
    pid = new_pid(peer)
    around = batch([b"a", b"b", b"c"], (pid, 0, LAST_SEQUENCE - 1))
    assert peer.produce(topic, 0, around).base_offset == 1
    assert peer.produce(topic, 0, batch([b"d"], (pid, 0, 1))).base_offset == 4
    assert peer.produce(topic, 0, around).base_offset == 1
    assert peer.produce(topic, 0, batch([b"e"], (pid, 0, 3))).error_code == ErrorCode.out_of_order_sequence_number
    assert stored(broker, topic)[-4:] == [b"a", b"b", b"c", b"d"]


def delete_records(peer, topic, partition, values):
    """Produce records, and delete them: the partition begins behind them."""
    end = peer.produce(topic, partition, batch(values)).base_offset + len(values)
    topics = [{"name": topic, "partitions": [{"partition_index": partition, "offset": end}]}]
    found = peer.ask(21, 1, topics=topics, timeout=timedelta(seconds=30))
    assert found.topics[0].partitions[0].low_watermark == end


# --- a topic that is not in force yet --------------------------------------------------------------------------------


def test_metadata_shows_the_partitions_of_a_topic_once_batches_are_taken(broker, peer):
    asked = {"topics": [{"name": "made.late"}], "allow_auto_topic_creation": True}
    os.kill(broker.pids()["router"], signal.SIGSTOP)
    try:
        [made] = peer.ask(3, 4, **asked).topics
        assert (made.error_code, made.partitions) == (ErrorCode.leader_not_available, ())
    finally:
        os.kill(broker.pids()["router"], signal.SIGCONT)
    assert peer.make_topic("made.late") == 2
    assert peer.produce("made.late", 0, batch([b"a"])).error_code == ErrorCode.none


# --- a first batch that is refused -----------------------------------------------------------------------------------


def make(peer, topic):
    assert peer.make_topic(topic) == 2


def empty(peer, topic):
    """Make a topic whose start says that there were records."""
    make(peer, topic)
    delete_records(peer, topic, 0, [b"x"])


def grow(peer, topic):
    topics = [{"name": topic, "count": 3, "assignments": None}]
    found = peer.ask(37, 1, topics=topics, timeout=timedelta(seconds=30), validate_only=False)
    assert found.results[0].error_code == ErrorCode.none


def nothing(peer, topic):
    pass


@pytest.mark.parametrize(
    ("begin", "partition", "altered", "code", "mend"),
    [
        (nothing, 0, b"", ErrorCode.unknown_topic_or_partition, make),
        (make, 2, b"", ErrorCode.unknown_topic_or_partition, grow),
        (make, 0, b"z", ErrorCode.corrupt_message, nothing),
        (empty, 0, b"z", ErrorCode.corrupt_message, nothing),
    ],
    ids=["topic", "partition", "crc", "crc-emptied"],
)
def test_what_follows_a_refused_first_batch_is_not_taken_for_the_first(
    broker, peer, request, begin, partition, altered, code, mend
):
    topic, pid = f"first-{request.node.callspec.id}", new_pid(peer)
    begin(peer, topic)
    first, second = (batch([b"%d" % n], (pid, 0, n)) for n in (0, 1))
    altered_first = first[: len(first) - len(altered)] + altered
    assert peer.produce(topic, partition, altered_first).error_code == code
    mend(peer, topic)
    tries = attempts("growth in force")
    while (found := peer.produce(topic, partition, second).error_code) == ErrorCode.unknown_topic_or_partition:
        next(tries)
    assert found == ErrorCode.out_of_order_sequence_number
    assert [peer.produce(topic, partition, each).error_code for each in (first, second)] == [ErrorCode.none] * 2
    assert stored(broker, topic, partition)[-2:] == [b"0", b"1"]


def test_while_a_batch_may_be_stored_its_client_is_told_of_no_gap(broker, topic, peer):
    """A client that is told of a gap begins an epoch, and sends again under it what has no answer."""
    pid, codes = new_pid(peer), []
    sent = [batch([b"%d" % n], (pid, 0, n)) for n in range(4)]
    assert peer.produce(topic, 0, sent[0]).error_code == ErrorCode.none
    durability = broker.pids()["durability"]
    os.kill(durability, signal.SIGSTOP)
    try:
        codes.append(peer.produce(topic, 0, sent[1]).error_code)  # is handed over
        codes.append(peer.produce(topic, 0, sent[2]).error_code)  # is not: the last id cannot be asked for
    finally:
        os.kill(durability, signal.SIGCONT)
    codes.append(peer.produce(topic, 0, sent[3]).error_code)
    assert codes == [ErrorCode.request_timed_out] * 3
    assert [peer.produce(topic, 0, each).base_offset for each in sent[1:]] == [1, 2, 3]
    assert stored(broker, topic) == [b"0", b"1", b"2", b"3"]


def test_other_content_under_a_sequence_is_refused(broker, topic, peer):
    pid = new_pid(peer)
    assert peer.produce(topic, 0, batch([b"a"], (pid, 0, 0))).error_code == ErrorCode.none
    assert peer.produce(topic, 0, batch([b"z"], (pid, 0, 0))).error_code == ErrorCode.invalid_record
    assert stored(broker, topic) == [b"a"]


def test_each_partition_has_sequences_of_its_own(broker, topic, peer):
    pid = new_pid(peer)
    assert [peer.produce(topic, number, batch([b"a"], (pid, 0, 0))).base_offset for number in (0, 1)] == [0, 0]


def restart_gateway(broker):
    """Kill the gateway, and wait until another one gives producer ids."""
    os.kill(broker.pids()["gateway"], signal.SIGKILL)
    for _ in attempts("the next gateway"):
        with suppress(OSError, AssertionError), Peer.of(broker.pipes) as again:
            return new_pid(again)


def test_no_producer_id_is_given_twice(broker, peer):
    found = [new_pid(peer) for _ in range(5)]
    found.append(restart_gateway(broker))
    with Peer.of(broker.pipes) as again:
        found += [new_pid(again) for _ in range(4)]
    assert len({*found}) == len(found) == 10


def test_a_producer_that_has_stored_nothing_begins_with_sequence_0_whatever_the_gateway_forgets(broker, topic, peer):
    pid = new_pid(peer)
    assert peer.produce(topic, 7, batch([b"0"], (pid, 0, 0))).error_code == ErrorCode.unknown_topic_or_partition
    restart_gateway(broker)
    with Peer.of(broker.pipes) as again:
        found = again.produce(topic, 0, batch([b"1"], (pid, 0, 1)))
        assert found.error_code == ErrorCode.out_of_order_sequence_number
        assert again.produce(topic, 0, batch([b"0"], (pid, 0, 0))).base_offset == 0
