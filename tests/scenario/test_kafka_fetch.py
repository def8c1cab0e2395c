"""Fetch through the Kafka door of a real broker: what every client reads is what the files hold, whoever wrote it."""

import json
import os
import random
import resource
import signal
import struct
import time
from contextlib import closing
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import confluent_kafka
import confluent_kafka.admin
import cramjam
import grpc_client
import kafka
import pytest
from api_client import Api
from brokers import Broker
from consuls import free_ports
from kafka_batches import HEADER_BYTES, Sent, fetched, framed, records_of
from kafka_peer import Peer
from kafka_readers import READERS, Received, by_confluent
from kio.schema.errors import ErrorCode
from waiting import attempts

import kmq
from kmq.access import tokens
from kmq.log import identity, reader
from kmq.message import record
from kmq.message.message import messages

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

SEGMENT = 64 << 10
MANY = 3000
numbers = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("kafka-fetch") / "b")
    port = str(free_ports(1)[0])  # the same after each start, as consumers expect
    made.env |= {"KMQ_SEGMENT_BYTES": str(SEGMENT), "KMQ_LINE_DEADLINE": "5s", "KMQ_KAFKA_PORT": port}
    made.up()
    yield made
    made.close()


@pytest.fixture
def topic(broker):
    """The name of a topic of this test alone. Its first line makes it."""
    return f"t{next(numbers)}"


def port(broker):
    return int((broker.pipes / "kafka.port").read_text())


def end_of(broker, topic, partition=0):
    return reader.partition(str(broker.data), topic, partition).end_offset()


def send(broker, topic, lines, partition=0):
    """Store lines, and wait until they are in their partition."""
    before = end_of(broker, topic, partition) if (broker.data / "topics" / topic).exists() else 0
    broker.send_lines(lines)
    broker.wait(lambda: (broker.data / "topics" / topic).exists(), "the topic")
    broker.wait(lambda: end_of(broker, topic, partition) >= before + len(lines), "the records")


def in_files(broker, topic, partition=0):
    """The records of a partition, by what its lines say."""
    first, lines = reader.partition(str(broker.data), topic, partition).first_offset, b""
    for log in sorted((broker.data / "topics" / topic / str(partition)).glob("*.log")):
        lines += log.read_bytes()
    found = messages(topic, partition, first, lines, identity.marks_from(str(broker.data)))
    return [Received(m.offset, m.key, m.value, tuple(m.headers), m.timestamp_ms) for m in found]


def batches(row):
    """The batches of a row, read, with their codecs."""
    data, found = bytes(row.records or b""), []
    while data:
        length = 12 + struct.unpack_from(">i", data, 8)[0]
        module = (None, cramjam.gzip, None, cramjam.lz4, cramjam.zstd)[data[22] & 7]
        body = data[HEADER_BYTES:length]
        found.append(fetched(data[:length], None if module is None else bytes(module.decompress(body))))
        data = data[length:]
    return found


def rows_of(peer, topic, partition=0, offset=0, end=0):
    """(offset, record) of a partition up to its end, by as many fetches as it takes."""
    found = []
    while offset < end:
        got = batches(peer.fetch(topic, partition, offset))
        found += [row for batch in got for row in batch.records if row[0] >= offset]
        offset = got[-1].next_offset
    return found


def test_a_batch_that_is_on_its_way_does_not_delay_what_another_partition_has(broker, topic, peer):
    """A consumer that has read all of one partition would wait a moment for its next batch, again for each answer."""
    other = f"{topic}b"
    send(broker, topic, [b"%b||%d|x" % (topic.encode(), n) for n in range(40)])
    peer.make_topic(other)
    batch = framed(records_of([Sent(1000, None, b"x")], 1000), 1)
    assert peer.produce(other, 0, batch).error_code == ErrorCode.none

    def reads():
        """Seconds for a record an answer, as a consumer reads that has read all of the other partition."""
        begun = time.monotonic()
        for offset in range(40):
            peer.send_fetch({(topic, 0): offset, (other, 0): 1}, wait_ms=5000, partition_bytes=1)
            row = peer.read_fetched()[topic, 0]
            assert [at for each in batches(row) for at, _ in each.records] == [offset]
        return time.monotonic() - begun

    undisturbed = reads()
    with Peer.of(broker.pipes) as sender:
        durability = broker.pids()["durability"]
        os.kill(durability, signal.SIGSTOP)
        try:
            sender.send_batch(other, 0, batch)
            assert reads() < undisturbed + 1
        finally:
            os.kill(durability, signal.SIGCONT)
        assert sender.read_produced().base_offset == 1


# --- every record, by every client -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(broker):
    """A topic of several segments, with keys, headers, bytes, missing and odd times."""
    rng = random.Random(7)
    keys, values = ["", ".", ".eu", ".a%2Eb", ".%FF"], [b"", b"plain", b"\xc3\xbc", b"tab\tcr\r", b"x" * 400]
    headers = ["", ";trace=1", ";trace=1;trace=2;empty=;none", ";enc=b64"]
    lines = []
    for n in range(MANY):
        header = rng.choice(headers)
        value = b"AAH/Cg==" if "enc" in header else rng.choice(values)
        stamp = rng.choice(["", "1714500000", "1714500000.25", "1714500123.456789", "yesterday"])
        lines.append(f"mixed{rng.choice(keys)}|{stamp}|{n}{header}|".encode() + value)
    send(broker, "mixed", lines)
    assert len(list((broker.data / "topics" / "mixed" / "0").glob("*.log"))) > 5
    return in_files(broker, "mixed")


@pytest.mark.parametrize("client", READERS)
def test_each_client_reads_every_record_as_the_files_have_it(broker, mixed, client):
    assert READERS[client](port(broker), "mixed", 0, 0, MANY) == mixed
    assert READERS[client](port(broker), "mixed", 0, 2345, MANY) == mixed[2345:]


def test_small_limits_of_a_client_lose_nothing(broker, mixed):
    limits = {"fetch.message.max.bytes": 1000, "fetch.max.bytes": 1200, "message.max.bytes": 1100}
    assert by_confluent(port(broker), "mixed", 0, 0, MANY, **limits) == mixed


def test_a_record_of_900_kb_is_read_by_a_client_that_wants_a_byte(broker, topic):
    send(broker, topic, [b"%b|0||%b" % (topic.encode(), b"y" * 900_000), b"%b|0||z" % topic.encode()])
    for reads in READERS.values():
        small = {} if reads is by_confluent else {"max_partition_fetch_bytes": 1, "fetch_max_bytes": 1}
        got = reads(port(broker), topic, 0, 0, 2, **small)
        assert [(row.offset, len(row.value)) for row in got] == [(0, 900_000), (1, 1)]


def test_ends_and_times_are_those_of_the_files(broker, mixed):
    place = kafka.TopicPartition("mixed", 0)
    consumer = kafka.KafkaConsumer(bootstrap_servers=f"localhost:{port(broker)}")
    try:
        assert (consumer.beginning_offsets([place]), consumer.end_offsets([place])) == ({place: 0}, {place: MANY})
        found = consumer.offsets_for_times({place: 0})[place]
        assert (found.offset, found.timestamp) == (0, mixed[0].timestamp)
        assert consumer.offsets_for_times({place: 4_000_000_000_000})[place] is None
    finally:
        consumer.close()
    asked = confluent_kafka.Consumer({"bootstrap.servers": f"localhost:{port(broker)}", "group.id": "none"})
    try:
        assert asked.get_watermark_offsets(confluent_kafka.TopicPartition("mixed", 0), 30) == (0, MANY)
        (found,) = asked.offsets_for_times([confluent_kafka.TopicPartition("mixed", 0, 4_000_000_000_000)], 30)
        assert found.offset == confluent_kafka.OFFSET_END
    finally:
        asked.close()


@pytest.fixture(scope="module")
def odd_times(broker):
    """A topic of several segments. Its producers' clocks differ, and history was loaded after newer messages."""
    now, value = int(time.time()), "x" * 300
    stamps = [f"{now - 900_000 + n * 10}.{n:03d}" for n in range(600)]  # history
    stamps += ["" if n % 7 else str(now + 5 + n) for n in range(300)]  # a clock is ahead
    stamps += [str(now - 950_000 + n * 10) for n in range(300)]  # older history, loaded later
    lines = [f"odd|{stamp}||{value}".encode() for stamp in stamps]
    send(broker, "odd", lines)
    rows = in_files(broker, "odd")
    assert len(rows) == len(lines) and len([*(broker.data / "topics/odd/0").glob("*.log")]) > 3
    return rows


def first_shown(rows, micros):
    """The offset of the first message that is shown with this time or a later one; None: there is none."""
    return next((row.offset for row in rows if row.timestamp * 1000 >= micros), None)


def some_times(rows):
    """Times in ms: of records, between them, before all and after all."""
    shown = sorted({row.timestamp for row in rows})
    picked = [*shown[:2], *shown[100::150], *shown[-6:], shown[0] - 5000, shown[-1] + 1]
    return [each + add for each in picked for add in (0, 1)]


def doors_by_time(broker, end):
    """Yield the name of each door that seeks by time, and a function that returns the offset of a time in ms, or None."""
    place = kafka.TopicPartition("odd", 0)
    with closing(kafka.KafkaConsumer(bootstrap_servers=f"localhost:{port(broker)}")) as consumer:
        yield "Kafka", lambda ms: getattr(consumer.offsets_for_times({place: ms})[place], "offset", None)

    def by_http(ms):
        found = api.get(f"/api/topics/odd/consume?timestamp={ms}&maxMessages=1").value["messages"]
        return found[0]["offset"] if found else None

    def by_seek(ms):
        body = {"group": "by-time", "to": {"timestamp": ms}}
        (row,) = api.post("/api/topics/odd/seek", body).value["offsets"]
        return row["offset"] if row["offset"] < end else None

    with closing(Api(int((broker.pipes / "http.port").read_text()))) as api:
        yield "HTTP consume", by_http
        yield "HTTP seek", by_seek

    def by_lines(ms):
        consumer.seek(("odd", 0), datetime.fromtimestamp(ms / 1000, UTC))
        offset = consumer.position(("odd", 0))
        return offset if offset < end else None

    with closing(kmq.Consumer(port=int((broker.pipes / "egress.port").read_text()))) as consumer:
        consumer.assign(("odd", 0))
        consumer.connect()
        yield "lines", by_lines
    with grpc_client.Client(int((broker.pipes / "grpc.port").read_text())) as client:

        def by_grpc(ms):
            found = client.fetch("odd", at={"timestamp": ms}, max_records=1).records
            return found[0].offset if found else None

        yield "gRPC", by_grpc

    def by_command(ms):
        at = datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
        reset = broker.kmq("groups", "reset", "by-time", "--topic", "odd", "--to", at, "--dry-run").stdout
        text = broker.kmq("consume", "odd", "--from", at, "--count", "1", "--json").stdout
        offset = json.loads(text)["offset"] if text else None
        assert f"-> {end if offset is None else offset}\n" in reset
        return offset

    yield "commands", by_command


def test_a_time_means_the_first_message_that_is_shown_with_it_at_every_door(broker, odd_times):
    times = some_times(odd_times)
    expected = {each: first_shown(odd_times, each * 1000) for each in times}
    assert None in expected.values() and len({*expected.values()}) > 5
    found = {}
    for door, at in doors_by_time(broker, len(odd_times)):
        found[door] = {each: at(each) for each in (times[6::9] if door == "commands" else times)}
    wrong = {door: {each: at for each, at in rows.items() if at != expected[each]} for door, rows in found.items()}
    assert not any(wrong.values()), wrong


def test_the_highest_time_is_found_as_a_client_asks_for_it(broker, odd_times):
    highest = max(row.timestamp for row in odd_times)
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": f"localhost:{port(broker)}"})
    place = confluent_kafka.TopicPartition("odd", 0)
    found = admin.list_offsets({place: confluent_kafka.admin.OffsetSpec.max_timestamp()})[place].result(30)
    assert (found.offset, found.timestamp) == (first_shown(odd_times, highest * 1000), highest)


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_line_wakes_a_fetch_that_waits(broker, topic, peer):
    assert broker.kmq("topics", "create", topic, "--partitions", "3").returncode == 0
    peer.send_fetch({(topic, number): 0 for number in range(3)}, wait_ms=300_000)
    broker.send_lines([b"%b.@2|0||first" % topic.encode()])
    rows = peer.read_fetched()
    assert [len(bytes(rows[topic, number].records)) > 0 for number in range(3)] == [False, False, True]
    for number in range(1, 30):
        peer.send_fetch({(topic, 2): number, (topic, 0): 0}, wait_ms=300_000)
        broker.send_lines([b"%b.@2|0||%d" % (topic.encode(), number)])
        assert [offset for offset, _ in batches(peer.read_fetched()[topic, 2])[0].records] == [number]


def test_a_fetch_that_waits_ends_with_its_time_with_its_connection_and_with_the_gateway(broker, topic, peer):
    send(broker, topic, [b"%b|0||first" % topic.encode()])
    began = time.monotonic()
    row = peer.fetch(topic, 0, 1, wait_ms=300)
    assert time.monotonic() - began >= 0.3
    assert (row.error_code, row.high_watermark, bytes(row.records)) == (ErrorCode.none, 1, b"")
    with Peer.of(broker.pipes) as gone:
        gone.send_fetch({(topic, 0): 1}, wait_ms=300_000)
    with Peer.of(broker.pipes) as waiting:
        waiting.send_fetch({(topic, 0): 1}, wait_ms=300_000)
        os.kill(broker.pids()["gateway"], 15)
        assert waiting.read_raw() == b""
    broker.wait(lambda: serves(broker), "the next gateway")


def serves(broker):
    try:
        with Peer.of(broker.pipes) as peer:
            return peer.ask(3, 1, topics=[]).controller_id == 0
    except (OSError, AssertionError, ValueError):
        return False


def test_a_consumer_goes_on_when_the_gateway_is_killed(broker, mixed):
    options = {"bootstrap.servers": f"localhost:{port(broker)}", "group.id": "none", "fetch.message.max.bytes": 5000}
    consumer = confluent_kafka.Consumer(options | {"enable.auto.commit": False, "auto.offset.reset": "error"})
    consumer.assign([confluent_kafka.TopicPartition("mixed", 0, 0)])
    got, kills = [], [500, 1500]
    tries = attempts(f"{MANY} records", lambda: len(got), every_s=0)
    while len(got) < MANY:
        next(tries)
        got += [message.offset() for message in consumer.consume(10, 0.5) if not message.error()]
        if kills and len(got) >= kills[0]:
            kills.pop(0)
            broker.kill("gateway")
    assert got == [*range(MANY)]
    consumer.close()


# --- batches from memory ---------------------------------------------------------------------------------------------


def metric(broker, source):
    lines = broker.get("/metrics")[1].splitlines()
    name = f'kmq_kafka_batches_total{{source="{source}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_produced_batches_come_from_memory_and_say_what_their_lines_say(broker, topic, peer):
    rng, codecs = random.Random(3), ("none", "gzip", "lz4", "zstd")
    sent = []
    for codec in codecs:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": f"localhost:{port(broker)}", "compression.type": codec, "linger.ms": 50}
        )
        for _ in range(300):
            headers = [(f"name{n}", rng.choice([b"", b"v", b"\xff|;", None])) for n in range(rng.randrange(3))]
            row = rng.choice([None, b"", b"a.b", b"\0"]), rng.choice([None, b"", b"text\n", b"\xff" * 9]), headers
            sent.append(row)
            producer.produce(topic, row[1], row[0], partition=0, headers=headers, timestamp=rng.randrange(10**12))
        assert producer.flush(60) == 0
    end = len(sent)
    before = metric(broker, "cache"), metric(broker, "lines")
    kept = rows_of(peer, topic, end=end)
    after = metric(broker, "cache"), metric(broker, "lines")
    assert after[0] >= before[0] + len(codecs) and after[1] == before[1]
    assert [(row.key, row.value, len(row.headers)) for _, row in kept] == [(k, v, len(h)) for k, v, h in sent]
    assert READERS["confluent"](port(broker), topic, 0, 0, end) == READERS["aiokafka"](port(broker), topic, 0, 0, end)
    broker.kill("gateway")
    broker.wait(lambda: serves(broker), "the next gateway")
    with Peer.of(broker.pipes) as later:
        assert rows_of(later, topic, end=end) == kept
    assert metric(broker, "cache") == 0 < metric(broker, "lines")


def test_a_topic_with_log_append_time_shows_when_its_records_came(broker, topic):
    sets = ("--set", "message_timestamp_type=LogAppendTime")
    assert broker.kmq("topics", "create", topic, *sets).returncode == 0
    producer, told = confluent_kafka.Producer({"bootstrap.servers": f"localhost:{port(broker)}", "linger.ms": 0}), []
    for _ in range(20):
        producer.produce(topic, b"x", timestamp=1000, on_delivery=lambda _, message: told.append(message.timestamp()))
        assert producer.flush(60) == 0
    lines = broker.lines(topic)
    came = [(confluent_kafka.TIMESTAMP_LOG_APPEND_TIME, record.parse_ts(line.split(b"|")[1]) // 1000) for line in lines]
    assert told == came
    for reads in READERS.values():
        assert [row.timestamp for row in reads(port(broker), topic, 0, 0, 20)] == [at for _, at in came]
    asked = confluent_kafka.Consumer({"bootstrap.servers": f"localhost:{port(broker)}", "group.id": "none"})
    try:
        for at in (came[0][1], came[12][1]):
            (found,) = asked.offsets_for_times([confluent_kafka.TopicPartition(topic, 0, at)], 30)
            assert found.offset == next(offset for offset, (_, shown) in enumerate(came) if shown >= at)
    finally:
        asked.close()


# --- gaps, starts, topics that go ------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", READERS)
def test_a_compacted_topic_is_read_to_its_end(broker, compacted, client):
    topic, left, end = compacted
    assert READERS[client](port(broker), topic, 0, 0, end) == left
    blank = next(n for n in range(end) if n not in {row.offset for row in left})
    assert READERS[client](port(broker), topic, 0, blank, end) == [row for row in left if row.offset > blank]


@pytest.fixture(scope="module")
def compacted(broker):
    """(a compacted topic, its records, its end): almost all of its sealed segments is blank."""
    topic, end = "compacted", 2500
    sets = ("--set", "cleanup=compact", "--set", "segment_bytes=64KiB")
    assert broker.kmq("topics", "create", topic, *sets).returncode == 0
    send(broker, topic, [b"%b.k%d|0||%d %b" % (topic.encode(), n % 3, n, b"x" * 100) for n in range(end)])
    broker.down()  # what a checkpoint says to be on disk may be compacted
    broker.up()
    *_, active = sorted((broker.data / "topics" / topic / "0").glob("*.log"))
    most = active.read_bytes().count(b"\n") + 10
    broker.wait(lambda: len(in_files(broker, topic)) <= most, "the gateway's compactor")
    return topic, in_files(broker, topic), end


def test_a_start_above_0_is_told_and_found(broker, topic, peer):
    send(broker, topic, [b"%b|0||%d %b" % (topic.encode(), n, b"z" * 100) for n in range(MANY)])
    assert batches(peer.fetch(topic, 0, 0, max_bytes=1))[0].base_offset == 0
    for log in sorted((broker.data / "topics" / topic / "0").glob("*.log"))[:2]:  # as retention does
        log.unlink()
        log.with_suffix(".idx").unlink()
    first = reader.partition(str(broker.data), topic, 0).first_offset
    row = peer.fetch(topic, 0, 5)
    found = row.error_code, row.log_start_offset, row.high_watermark
    assert found == (ErrorCode.offset_out_of_range, first, MANY) and first > 100
    for reads, option in (("confluent", "auto.offset.reset"), ("kafka-python", "auto_offset_reset")):
        got = READERS[reads](port(broker), topic, 0, 5, MANY, **{option: "earliest"})
        assert [row.offset for row in got] == [*range(first, MANY)]


def test_a_topic_that_is_deleted_and_made_again_never_shows_what_it_had(broker, topic, peer):
    with Peer.of(broker.pipes) as other:
        send(broker, topic, [b"%b|0||old %d" % (topic.encode(), n) for n in range(100)])
        assert len(batches(peer.fetch(topic, 0, 0))[0].records) == 100
        other.send_fetch({(topic, 0): 100}, wait_ms=300_000)
        assert broker.kmq("topics", "delete", topic, "--yes").returncode == 0
        assert other.read_fetched()[topic, 0].error_code == ErrorCode.unknown_topic_or_partition
        assert peer.fetch(topic, 0, 50).error_code == ErrorCode.unknown_topic_or_partition
        send(broker, topic, [b"%b|0||new" % topic.encode()])
        broker.wait(lambda: end_of(broker, topic, 0) == 101, "the record of the new topic")
        for each in (peer, other):
            row = each.fetch(topic, 0, 50)
            assert (row.error_code, row.log_start_offset) == (ErrorCode.offset_out_of_range, 100)
            ((offset, record),) = batches(each.fetch(topic, 0, 100))[0].records
            assert (offset, record.value) == (100, b"new")


def test_many_partitions_are_read_in_one_fetch_and_only_the_new_ones_again(broker, topic, peer):
    assert broker.kmq("topics", "create", topic, "--partitions", "300").returncode == 0
    some = random.Random(1).sample(range(300), 20)
    broker.send_lines([b"%b.@%d|0||%d" % (topic.encode(), number, number) for number in some])
    offsets = {(topic, number): 0 for number in range(300)}
    got = {}
    while len(got) < len(some):
        peer.send_fetch(offsets, wait_ms=60_000)
        for (_, number), row in peer.read_fetched().items():
            assert row.error_code == ErrorCode.none
            for batch in batches(row):
                got[number] = [record.value for _, record in batch.records]
                offsets[topic, number] = batch.next_offset
    assert got == {number: [b"%d" % number] for number in some}


# --- clients that are slow, or may not -------------------------------------------------------------------------------


def resident(broker):
    statm = Path(f"/proc/{broker.pids()['gateway']}/statm").read_text()
    return int(statm.split()[1]) * resource.getpagesize()


def test_consumers_that_do_not_read_cost_little_memory_and_starve_nobody(broker, topic, mixed):
    send(broker, topic, [b"%b|0||%b" % (topic.encode(), b"y" * 900_000) for _ in range(10)])
    most = {"max_bytes": 2**31 - 1, "partition_bytes": 2**31 - 1}
    with Peer.of(broker.pipes) as peer:
        peer.fetch(topic, 0, 0, **most)
        before = resident(broker)
        slow = [Peer.of(broker.pipes) for _ in range(60)]
        for each in slow:
            each.send_fetch({(topic, 0): 0}, **most)
        assert len(rows_of(peer, topic, end=10)) == 10
        assert by_confluent(port(broker), "mixed", 0, 0, MANY) == mixed
        assert resident(broker) - before < 100 << 20  # of 4 MiB for each that would read
        for each in slow:
            each.close()


def test_who_may_not_consume_is_told_so_for_each_partition(new_broker):
    broker = new_broker()
    path = str(broker.root / "tokens")
    shown = {role: tokens.new(path, role, [role]) for role in ("consume", "produce")}
    broker.up()
    broker.send_lines([b"t|0||x"])
    broker.wait(lambda: (broker.data / "topics" / "t").exists() and broker.lines("t"), "the record")
    broker.down()
    broker.up(KMQ_TOKENS=path)
    for role, code in (("consume", ErrorCode.none), ("produce", ErrorCode.topic_authorization_failed)):
        with Peer.of(broker.pipes) as peer:
            peer.ask(17, 1, mechanism="PLAIN")
            peer.ask(36, 1, auth_bytes=b"\0anybody\0" + shown[role].encode())
            assert peer.fetch("t", 0, 0).error_code == code
            parts = [{"partition_index": 0, "timestamp": -1}]
            found = peer.ask(2, 4, replica_id=-1, isolation_level=0, topics=[{"name": "t", "partitions": parts}])
            assert found.topics[0].partitions[0].error_code == code
    with Peer.of(broker.pipes) as peer:
        peer.send_fetch({("t", 0): 0})
        assert peer.read_raw() == b""
