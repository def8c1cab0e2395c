"""Transactions where something is at an end: ids, offsets, room on the disk, the longest line. Bounds are made small."""

import contextlib
import json
import re
import signal

import psutil
import pytest
from brokers import is_alive
from confluent_kafka import KafkaException
from consuls import free_ports
from kafka_peer import Peer
from kafka_transactions import Raw, committed, producer, stored, with_fail_points
from kio.schema.errors import ErrorCode

from kmq.config.values import MIB

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

INIT, TRANSACTIONS = 22, "kmq.gateway.kafka.transactions"
SMALL = {"RB_SLOTS": 1024, "RB_BYTES": 256 << 10, "KMQ_MAX_LINE": 64 << 10}  # little is on the way, and kept room for


@pytest.fixture
def make(new_broker):
    """A function that makes a broker of these limits and settings."""

    def made(*limits, **settings):
        broker = new_broker()
        with_fail_points(broker, *limits)
        broker.env["KMQ_KAFKA_PORT"] = str(free_ports(1)[0])  # clients find the next gateway there
        broker.env |= {name: str(value) for name, value in settings.items()}
        broker.up()
        return broker

    return made


def end_at(broker, point, raw):
    """Let the gateway be killed where the end of a transaction comes to this point, and all of the broker after it."""
    victims = {name: psutil.Process(pid) for name, pid in broker.pids().items()}
    # The supervisor first, so that there is no next gateway. What the gateway would do after that dies with it.
    (broker.root / "fail_point").write_text(f"{point} {victims['supervisor'].pid}")
    with pytest.raises(AssertionError, match="the connection has ended"):
        raw.end()
    broker.wait(lambda: not is_alive(victims["supervisor"]), "the end of the supervisor")
    for victim in victims.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    broker.wait(lambda: not any(map(is_alive, victims.values())), "the end of all")


def is_open(broker):
    """Whether the port is open: a broker without room is not up in time."""
    with contextlib.suppress(OSError, ValueError), Peer.of(broker.pipes):
        return True
    return False


def test_the_id_that_is_idle_the_longest_makes_room_for_another(make):
    broker = make(f"{TRANSACTIONS}:_MOST_IDS=3")
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
        first, second, third = (Raw(peer, id) for id in ("first", "second", "third"))
        assert first.send("t", 0, [b"a"]).error_code == ErrorCode.none
        assert first.end() == ErrorCode.none  # so the second is idle for longer
        fourth = Raw(peer, "fourth")
        assert second.send("t", 0, [b"x"]).error_code != ErrorCode.none
        assert second.end() == ErrorCode.invalid_producer_id_mapping
        broker.wait(lambda: "kafka_transactional_ids_evicted count=1 most=3" in broker.log(), "a word of it")
        for number, raw in enumerate((first, third, fourth)):
            assert raw.send("t", 0, [b"b"], 1 - min(1, number)).error_code == ErrorCode.none
        assert second.init().error_code == ErrorCode.coordinator_not_available, "all others are in use"
        assert third.end() == ErrorCode.none
        assert Raw(peer, "second").pid > fourth.pid
        assert [first.end(), fourth.end()] == [ErrorCode.none] * 2
    ids = [row["id"] for row in json.loads(broker.kmq("kafka", "transactions", "ls", "--json").stdout)]
    assert ids == ["first", "fourth", "second"]
    assert stored(broker, "t") == [b"a", b"b", b"b", b"b"]


def test_ids_keep_the_order_in_which_they_were_used_over_a_start(make):
    broker = make(f"{TRANSACTIONS}:_MOST_IDS=3")
    with Peer.of(broker.pipes) as peer:
        raws = [Raw(peer, id) for id in ("a", "b", "c")]
        assert raws[0].init().error_code == ErrorCode.none
    broker.down()
    broker.up()
    with Peer.of(broker.pipes) as peer:
        assert Raw(peer, "d").init().error_code == ErrorCode.none
    ids = [row["id"] for row in json.loads(broker.kmq("kafka", "transactions", "ls", "--json").stdout)]
    assert ids == ["a", "c", "d"]


def test_a_transaction_has_so_many_offsets_and_the_table_of_groups_so_much_room(make):
    broker = make(f"{TRANSACTIONS}:_MOST_OFFSETS=2", "kmq.gateway.groups.offset_table:MAX_GROUPS=2")
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
        raw, full = Raw(peer, "few"), ErrorCode.invalid_commit_offset_size
        codes = [raw.commit_offsets(group, "t", 0) for group in ("a", "b", "c")]
        assert codes == [ErrorCode.none, ErrorCode.none, full]
        assert raw.end() == ErrorCode.none
        raw = Raw(peer, "other")
        assert [raw.commit_offsets(group, "t", 0) for group in ("c", "b")] == [full, ErrorCode.none]
        assert raw.end() == ErrorCode.none
        assert [committed(peer, group, "t") for group in ("a", "b", "c")] == [(ErrorCode.none, n) for n in (0, 0, -1)]


def test_of_a_commit_that_waits_for_room_over_a_start_the_other_groups_are_served(make):
    broker = make()
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
        broker.send_lines([b"t.@0|||%d" % number for number in range(5)])
        broker.wait(lambda: len(stored(broker, "t")) == 5, "the records")
        raw = Raw(peer, "id")
        for group, offset in (("mine", 2), ("other", 3)):
            assert raw.commit_offsets(group, "t", offset) == ErrorCode.none
            assert raw.end() == ErrorCode.none
        assert raw.send("t", 0, [b"sent"]).error_code == ErrorCode.none
        assert raw.commit_offsets("mine", "t", 5) == ErrorCode.none
        broker.send_lines([b"filler|||%b" % (b"x" * 60_000)] * 50)
        end_at(broker, "after_write_state_commit", raw)
    assert "quota" in broker.kmq("up", KMQ_DATA_QUOTA="1 MiB").stderr
    broker.wait(lambda: is_open(broker), "its port")
    with Peer.of(broker.pipes) as peer:
        broker.wait(lambda: committed(peer, "other", "t") == (ErrorCode.none, 3), "the other group")
        assert committed(peer, "mine", "t")[0] == ErrorCode.coordinator_load_in_progress
        assert committed(peer, "mine", "t", stable=False)[0] == ErrorCode.coordinator_load_in_progress
    reset = broker.kmq("groups", "reset", "mine", "--topic", "t", "--to", "earliest")
    assert "not stored yet" in reset.stderr
    broker.down()
    broker.up()
    with Peer.of(broker.pipes) as peer:
        broker.wait(lambda: committed(peer, "mine", "t") == (ErrorCode.none, 5), "the offset of the commit")
        assert committed(peer, "other", "t") == (ErrorCode.none, 3)
    assert stored(broker, "t")[5:] == [b"sent"]


def test_groups_are_served_though_a_ring_that_drops_messages_takes_no_transactions(make):
    broker = make()
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
        raw = Raw(peer, "id")
        assert raw.commit_offsets("g", "t", 0) == ErrorCode.none
        assert raw.end() == ErrorCode.none
    broker.down()
    broker.up(RB_OVERFLOW_POLICY="drop_oldest")
    with Peer.of(broker.pipes) as peer:
        broker.wait(lambda: committed(peer, "g", "t") == (ErrorCode.none, 0), "the group")
        raw.peer = peer
        assert raw.init().error_code == ErrorCode.coordinator_load_in_progress
    assert 'effect="transactions are not served; tried again"' in broker.log()


@pytest.fixture
def decided(make):
    """A broker that is down, and a producer whose transaction with a long record in the middle is decided."""
    broker = make(KMQ_MAX_LINE=65536)
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
        raw = Raw(peer, "id")
        for sequence, value in enumerate((b"first", b"x" * 50_000, b"last")):
            assert raw.send("t", 0, [value], sequence).error_code == ErrorCode.none
        end_at(broker, "after_write_state_commit", raw)
    assert broker.kmq("up", "--no-gateway").returncode == 0  # what is in the rings is stored first
    broker.down()
    return broker, raw


def test_a_record_that_a_former_life_has_left_out_stays_so_though_there_would_be_room_for_it_again(decided):
    broker, raw = decided
    assert broker.kmq("up", "--no-gateway", KMQ_MAX_LINE=20_000).returncode == 0
    (broker.root / "fail_point").write_text("after_copy")
    assert broker.kmq("gateway", KMQ_MAX_LINE=20_000).returncode == -signal.SIGKILL
    assert stored(broker, "t") == [b"first", b"last"]
    broker.down()
    broker.up()
    dropped = f"kafka_transaction_dropped id=id pid={raw.pid} records=1 "
    broker.wait(lambda: dropped in broker.log(), "a word of it")
    with Peer.of(broker.pipes) as peer:
        raw = Raw(peer, "id")
        assert raw.send("t", 0, [b"next"]).error_code == ErrorCode.none
        assert raw.end() == ErrorCode.none
    assert stored(broker, "t") == [b"first", b"last", b"next"]


def test_a_record_that_is_too_long_since_is_left_out_and_the_rest_is_committed(decided):
    broker, raw = decided
    broker.up(KMQ_MAX_LINE=20_000)
    dropped = rf"kafka_transaction_dropped id=id pid={raw.pid} records=1 effect=\"KMQ_MAX_LINE"
    broker.wait(lambda: re.search(dropped, broker.log()), "a word of it")
    broker.wait(lambda: stored(broker, "t") == [b"first", b"last"], "the rest")
    with Peer.of(broker.pipes) as peer:
        assert Raw(peer, "id").epoch == raw.epoch + 1
    assert stored(broker, "t") == [b"first", b"last"]


def test_a_transaction_over_its_time_is_aborted_and_frees_what_it_holds_on_a_full_disk(make):
    broker = make(
        "kmq.gateway.kafka.transaction_log:LIMITS.__transactions.segment_bytes=1048576",
        KMQ_DATA_QUOTA=40 * MIB,
        **SMALL,
    )
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
        raw, sequence = Raw(peer, "id", timeout_ms=10_000), 0
        while (code := raw.send("t", 0, [b"x" * 60_000] * 10, 10 * sequence).error_code) == ErrorCode.none:
            sequence += 1
        assert code == ErrorCode.kafka_storage_error
    broker.wait(lambda: "kafka_transaction_aborted id=id" in broker.log(), "the abort")
    broker.wait(lambda: "accepting_resumed" in broker.log(), "room")
    with Peer.of(broker.pipes) as peer:
        raw = Raw(peer, "id")
        assert raw.send("t", 0, [b"next"]).error_code == ErrorCode.none
        assert raw.end() == ErrorCode.none
    assert stored(broker, "t") == [b"next"]


def test_states_are_written_again_and_what_lies_before_them_is_deleted(make):
    segments = [f"kmq.gateway.kafka.transaction_writer:_{name}=2" for name in ("MOST_SEGMENTS", "RECENT_SEGMENTS")]
    broker = make("kmq.gateway.kafka.transaction_log:LIMITS.__transaction_state.segment_bytes=65536", *segments)
    directory = broker.data / "topics" / "__transaction_state" / "0"
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
        idle, is_open = Raw(peer, "idle"), Raw(peer, "open")
        assert is_open.send("t", 0, [b"kept"]).error_code == ErrorCode.none
        assert is_open.commit_offsets("g", "t", 0) == ErrorCode.none
        first, busy = directory / f"{0:020d}.log", Raw(peer, "busy" * 50)
        assert first.exists()
        while len([*directory.glob("*.log")]) <= 3:
            assert busy.init().error_code == ErrorCode.none
        broker.wait(lambda: not first.exists(), "the end of what is over")
    broker.kill()
    broker.up()
    rows = json.loads(broker.kmq("kafka", "transactions", "ls", "--json").stdout)
    assert [(row["id"], row["pid"]) for row in rows if row["id"] in ("idle", "open")] == [
        ("idle", idle.pid),
        ("open", is_open.pid),
    ]
    with Peer.of(broker.pipes) as peer:
        for raw in (idle, is_open):
            raw.peer = peer
        assert is_open.end() == ErrorCode.none
        assert idle.send("t", 0, [b"again"]).error_code == ErrorCode.none
        assert idle.end() == ErrorCode.none
        assert committed(peer, "g", "t") == (ErrorCode.none, 0)
    assert stored(broker, "t") == [b"kept", b"again"]
    assert not broker.kmq("verify").returncode


def test_a_client_of_an_evicted_id_begins_anew(make):
    broker = make(f"{TRANSACTIONS}:_MOST_IDS=1")
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
    evicted, other = producer(broker, "evicted"), producer(broker, "other")
    evicted.begin_transaction()
    evicted.produce("t", b"never", partition=0)
    with pytest.raises(KafkaException) as refused:
        evicted.commit_transaction(30)
    assert refused.value.args[0].txn_requires_abort() and not refused.value.args[0].fatal()
    evicted.abort_transaction(30)
    for made, value in ((evicted, b"x"), (other, b"never")):
        made.begin_transaction()
        made.produce("t", value, partition=0)
        with contextlib.nullcontext() if made is evicted else pytest.raises(KafkaException):
            made.commit_transaction(30)
    assert stored(broker, "t") == [b"x"]


def test_a_client_of_an_evicted_id_that_a_newer_one_has_is_fenced(make):
    broker = make(f"{TRANSACTIONS}:_MOST_IDS=1")
    with Peer.of(broker.pipes) as peer:
        assert peer.make_topic("t") == 1
    older, _, _ = (producer(broker, id) for id in ("same", "other", "same"))
    older.begin_transaction()
    older.produce("t", b"never", partition=0)
    with pytest.raises(KafkaException):
        older.commit_transaction(30)
    with pytest.raises(KafkaException) as refused:
        older.abort_transaction(30)
    assert refused.value.args[0].fatal()
    assert stored(broker, "t") == []
