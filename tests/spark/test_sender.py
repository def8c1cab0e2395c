"""The connections of a writing task: two attempts at a time, a broker that is away; without Spark."""

import threading
import time
from collections import Counter

import fixed_port
import pytest
from fixed_port import payloads, routed

from kmq.errors import RetryError
from kmq.sending.delivery import Delivery
from kmq.spark.sink import sender as senders
from kmq.spark.sink.targets import WriteOptions


def sender(*brokers, name="one", timeout="60", at=0, **options):
    given = {"kmq.producers": ",".join(map(fixed_port.address, brokers)), "kmq.timeout": timeout}
    given |= {key.replace("_", "."): text for key, text in options.items()}
    return senders.RowSender(name, WriteOptions(given), at)


def block(start, end, text=b""):
    return b"".join(b"t|0|%d|%b%d\n" % (n, text, n) for n in range(start, end))


def send(broker, lines, **options):
    """All of it by a sender of its own; how many of them had been stored before."""
    made = sender(broker, **options)
    try:
        made.send(lines)
        made.finish()
    finally:
        made.abort()
    return made.duplicates


def test_two_attempts_of_a_task_take_turns_and_each_row_is_stored_once(up, monkeypatch, caplog):
    monkeypatch.setattr(senders, "_TURNS_S", (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64))
    older = sender(up)
    older.send(block(0, 100))
    newer = sender(up)
    newer.send(block(0, 300))
    for start in range(100, 1000, 100):
        older.send(block(start, start + 100))
    older.finish()
    newer.send(block(300, 1000))
    newer.finish()
    routed(up, 1000)
    assert payloads(up, "t") == [b"%d" % n for n in range(1000)]
    assert "fenced" in caplog.text and older.duplicates + newer.duplicates >= 1000


def test_lines_queued_as_their_sender_is_fenced_are_sent_in_its_next_turn(up, monkeypatch):
    """The refusal may come between queuing them and looking at their replies."""
    monkeypatch.setattr(senders, "_TURNS_S", (0.01, 0.02, 0.04, 0.08, 0.16))
    older = sender(up)
    newer = sender(up)
    queue = older.producer.send_lines

    def queue_and_wait(lines):
        delivery = queue(lines)
        up.wait(lambda: delivery.done, "the refusal")
        return delivery

    monkeypatch.setattr(older.producer, "send_lines", queue_and_wait)
    older.send(block(0, 100))
    older.finish()
    newer.abort()
    routed(up, 100)
    assert payloads(up, "t") == [b"%d" % n for n in range(100)]


def test_rows_without_a_reply_are_sent_in_the_next_turn_whole_also_with_a_carriage_return(up, monkeypatch):
    monkeypatch.setattr(senders, "_TURNS_S", (0.01, 0.02, 0.04, 0.08, 0.16))
    lines = block(0, 5, b"a\rb")
    older = sender(up)
    half_answered = Delivery()
    half_answered.count, half_answered.answered = 5, 2
    older._sent.append((half_answered, lines))
    newer = sender(up)  # fences it
    newer.send(block(0, 2, b"a\rb"))
    newer.finish()
    older.send(b"t|0|5|last\n")
    older.finish()
    routed(up, 6)
    assert payloads(up, "t") == [*(b"a\rb%d" % n for n in range(5)), b"last"]


def test_an_attempt_that_has_had_all_its_turns_ends_with_the_reason(up, monkeypatch):
    monkeypatch.setattr(senders, "_TURNS_S", ())
    older = sender(up)
    newer = sender(up)
    with pytest.raises(RetryError, match=r"producer one at .*: refused by the broker: fenced"):
        older.send(block(0, 1))
        older.finish()
    newer.abort()


def test_a_broker_that_is_down_is_waited_for_and_then_named(broker, monkeypatch, caplog):
    address = fixed_port.up(broker)
    broker.down()
    monkeypatch.setattr(senders, "_SAY_S", 0.01)
    monkeypatch.setattr(senders, "_FIRST_S", 0.01)
    began = time.monotonic()
    with pytest.raises(RetryError, match=f"producer one at {address}: timed out.*nothing listens"):
        sender(broker, timeout="4")  # a busy machine takes some of it to try
    assert 0.5 < time.monotonic() - began < 60
    assert "not connected" in caplog.text  # it said so meanwhile
    late = threading.Timer(0.5, fixed_port.up, [broker])
    late.start()
    made = sender(broker)
    made.send(block(0, 10))
    made.finish()
    late.join()
    routed(broker, 10)


# --- what had been stored before -----------------------------------------------------------------------------------------


def remove_all_but_the_last(directory):
    """What retention takes in the end."""
    for path in sorted(directory.glob("*.log"))[:-1]:
        path.unlink()
        path.with_suffix(".idx").unlink()


def test_rows_that_come_again_are_compared_in_the_wal_then_in_their_topic(broker):
    fixed_port.up(broker, KMQ_SEGMENT_BYTES="64KiB")
    path = str(broker.data)
    assert send(broker, block(0, 9000)) == 0
    assert send(broker, block(0, 9000), path=path) == 9000
    send(broker, block(9000, 12_000))
    routed(broker, 12_000)
    with pytest.raises(senders.ReplayError, match=r"id 17: stored is .*\|17'; came 't\|0\|17\|x17'.*kmq.replay=again"):
        send(broker, block(0, 17) + block(17, 18, b"x"), path=path)
    remove_all_but_the_last(broker.data / "append")
    assert send(broker, block(0, 9000), path=path) == 9000


def test_rows_whose_records_retention_took_are_stored_anew(broker):
    fixed_port.up(broker, KMQ_SEGMENT_BYTES="64KiB")
    send(broker, block(0, 9000))
    routed(broker, 9000)
    for log in ("append", "topics/t/0"):
        remove_all_but_the_last(broker.data / log)
    kept = int(max((broker.data / "topics/t/0").glob("*.log")).stem)
    assert send(broker, block(0, 9000), path=str(broker.data)) == 9000 - kept
    routed(broker, 9000 + kept)


def test_rows_whose_records_nobody_finds_stop_the_query_unless_the_broker_is_trusted(broker):
    fixed_port.up(broker, KMQ_SEGMENT_BYTES="64KiB")
    path = str(broker.data)
    send(broker, block(0, 9000))
    routed(broker, 9000)
    remove_all_but_the_last(broker.data / "append")
    lost = sorted((broker.data / "topics/t/0").glob("*.log"))[1]
    lost.unlink()  # from the middle: no deletion, which the broker would know
    lost.with_suffix(".idx").unlink()
    id = int(lost.stem)
    with pytest.raises(senders.ReplayError, match=f"id {id}: what is stored as seq {id + 1} is in no log"):
        send(broker, block(id, id + 100), path=path)
    assert send(broker, block(id, id + 100), path=path, kmq_replay="trust") == 100


def test_rows_whose_seq_the_broker_has_forgotten_are_found_by_their_id(broker, monkeypatch):
    fixed_port.up(broker, KMQ_DEDUPE_COUNT="16", KMQ_SEGMENT_BYTES="64KiB")
    one, two = sender(broker), sender(broker, name="two")
    for start in range(0, 3000, 60):  # in turns: many runs
        for each in (one, two):
            each.send(block(start, start + 60))
            each.producer.flush()
    one.finish()
    two.finish()
    monkeypatch.setattr(senders, "_STEP", 64)
    seqs = []
    find = senders.StoredRecords.find
    monkeypatch.setattr(
        senders.StoredRecords, "find", lambda *given: seqs.extend(each.seq for each in given[2]) or find(*given)
    )
    assert send(broker, block(0, 3000), path=str(broker.data)) == 3000
    assert seqs.count(0) > 2000
    with pytest.raises(senders.ReplayError, match=r"id 1000: stored is .*\|1000'; came .*\|x1000'"):
        send(broker, block(990, 1000) + block(1000, 1100, b"x"), path=str(broker.data))
    routed(broker, 6000)
    remove_all_but_the_last(broker.data / "append")
    assert send(broker, block(0, 3000), name="two", path=str(broker.data)) == 3000


def test_without_a_way_to_what_is_stored_rows_beyond_the_brokers_memory_stop(up):
    send(up, block(0, 10_000))
    assert send(up, block(6000, 10_000)) == 4000
    with pytest.raises(senders.ReplayError, match=r"id 5000: .*4,999 ids below the last one.*Give option path"):
        send(up, block(5000, 5001))
    with pytest.raises(senders.ReplayError, match=r"id 9000: stored is something else as seq 9001 \(id_reused\)"):
        send(up, block(9000, 9001, b"x"))


def test_the_logs_of_the_right_broker_are_read_through_paths_or_gateways(new_broker):
    brokers = [new_broker(), new_broker()]
    for number, each in enumerate(brokers):
        fixed_port.up(each)
        send(each, block(0, 50 * number + 1), name="before")  # so that seqs differ
        send(each, block(0, 500, b"of %d: " % number))
    paths = ",".join(str(each.data) for each in reversed(brokers))
    gateways = ",".join(f"127.0.0.1:{(each.pipes / 'http.port').read_text().strip()}" for each in reversed(brokers))
    for at in (0, 1):
        for where in ({"path": paths}, {"kmq_bootstrap_servers": gateways}):
            again = sender(*brokers, at=at, **where)
            again.send(block(0, 500, b"of %d: " % at))
            again.finish()
            assert again.duplicates == 500


def test_a_replay_of_a_replay_finds_each_row_where_it_was_stored(up):
    options = {"path": str(up.data), "kmq_replay": "again"}
    contents = [block(0, 5000), block(0, 2000, b"x") + block(2000, 6000), block(0, 3000, b"y") + block(3000, 6000)]
    for lines in (*contents, *contents, *reversed(contents)):
        send(up, lines, **options)
    found = Counter(payloads(up, "t"))
    assert set(found) == {line.rpartition(b"|")[2] for lines in contents for line in lines.splitlines()}
    assert max(found.values()) == 1
