"""compact: of each key the latest record stays, in place, and what was killed in the middle is finished by the next run."""

import os
import random
import threading
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from made_data import append, write_data

from kmq.errors import ConfigError
from kmq.log import compaction, identity, reader, segment, topics
from kmq.message.routing import key_behind
from kmq.repair import verify
from kmq.router.queues import Queues
from kmq.spark.pipelines import compact

SMALL = 4000  # bytes of a segment: some 60 records
COMPACT = {"cleanup": "compact"}


def make(path, lines, partitions=1, closed=True, own=COMPACT):
    """A data directory with these lines, topic users declared to be compacted."""
    data = str(path)
    identity.open_data(data)
    topics.declare(data, "users", partitions, own)
    made = write_data(data, lines, segment_bytes=SMALL, group=50, closed=closed)
    return data if closed else (data, made)


def some(count, keys, seed=1):
    rng = random.Random(seed)
    return [b"users.%d|0|%d|value %d" % (rng.randrange(keys), n, n) for n in range(count)]


def records(data, partition=0, topic="users"):
    """{offset: line} of a partition; reading checks every crc."""
    log, offset, found = reader.partition(data, topic, partition), 0, {}
    while True:
        first, text = log.read(offset)
        if not text:
            return found
        for at, line in enumerate(text.split(b"\n")[:-1]):
            if line:
                found[first + at] = line
        offset = first + text.count(b"\n")


def key_of(line):
    return key_behind(b"users", line.split(b"|")[2])


def expected(before, data, partition=0):
    """What has to stay of `before`, computed the slow way."""
    active = segment.listing(f"{data}/topics/users/{partition}")[-1][0]
    edges = {edge for first, _ in segment.listing(f"{data}/topics/users/{partition}") for edge in (first, first - 1)}
    last = {key_of(line): offset for offset, line in before.items()}
    return {
        offset: line
        for offset, line in before.items()
        if offset >= active or offset in edges or key_of(line) is None or last[key_of(line)] == offset
    }


def run(spark, data, **options):
    return compact.run(spark, {"path": data, "subscribe": "users"}, **options)


def damages(data):
    return [str(each) for each in verify.Verifier(data, is_live=False).findings() if each.is_damage]


def test_the_latest_record_of_each_key_stays_at_its_offset_in_every_partition(spark, tmp_path):
    data = make(tmp_path, [*some(900, 20), *(b"users|0|%d|no key" % n for n in range(40)), *some(400, 20, 2)], 2)
    before = [records(data, number) for number in range(2)]
    wanted = [expected(before[number], data, number) for number in range(2)]
    found = run(spark, data)
    assert [each.done for each in found] == [True, True]
    assert [each.records for each in found] == [len(b) - len(w) for b, w in zip(before, wanted, strict=True)]
    assert [records(data, number) for number in range(2)] == wanted
    assert min(each.records for each in found) > 400 and damages(data) == []
    assert sorted(os.listdir(compaction.outbox(data))) == [".owner", ".wanted"]


def test_a_second_run_finds_nothing_and_changes_no_file(spark, tmp_path):
    data = make(tmp_path, some(900, 20))
    run(spark, data)
    files = {path: os.stat(path).st_ino for _, path in segment.listing(f"{data}/topics/users/0")}
    assert [(each.records, each.done) for each in run(spark, data, min_dirty=0)] == [(0, False)]
    assert {path: os.stat(path).st_ino for _, path in segment.listing(f"{data}/topics/users/0")} == files


def test_a_dry_run_says_what_would_go_and_changes_nothing(spark, tmp_path):
    data = make(tmp_path, some(900, 20))
    before, size = records(data), sum(each.size for each in segment.survey(f"{data}/topics/users/0"))
    (said,) = run(spark, data, dry_run=True)
    assert not said.done and records(data) == before
    (done,) = run(spark, data)
    assert done[:-1] == said[:-1] and done.done
    assert size - sum(each.size for each in segment.survey(f"{data}/topics/users/0")) == said.bytes


def test_a_partition_of_which_little_would_go_is_left_alone(spark, tmp_path):
    data = make(tmp_path, [b"users.%d|0|%d|v" % (n if n % 5 else 0, n) for n in range(600)])
    before = records(data)
    (said,) = run(spark, data)
    assert 0.1 < said.dirty < 0.5 and not said.done and records(data) == before
    assert run(spark, data, min_dirty=said.dirty)[0].done and len(records(data)) == len(before) - said.records


def test_keys_that_are_not_utf8_or_percent_encoded_are_told_apart(spark, tmp_path):
    keys = [b"\xff", b"\xfe", b"%2e", b".", b"a.b", b"a%2Eb", "é".encode(), b"\xef\xbf\xbd"]
    data = make(tmp_path, [b"users.%b|0|%d|%d" % (keys[n % len(keys)], n, n) for n in range(800)])
    wanted = expected(records(data), data)
    assert {key_of(line) for line in wanted.values()} == set(keys)
    run(spark, data)
    assert records(data) == wanted


def test_a_key_is_the_same_with_and_without_a_mark_and_an_empty_value_no_tombstone(spark, tmp_path):
    head = [
        b"users.eu|0|0|old",
        b"users.@.eu|0|1|new",
        b"users.@0.eu|0|2|newer",
        b"users.@|0|3|no key",
        b"users.@|0|4|none",
    ]
    head += [b"users.@.|0|5|empty key", b"users.@.|0|6|empty key again", b"users.|0|7|no key", b"users.|0|8|nor here"]
    head += [b"users.gone|0|9|x", b"users.@.gone|0|10|", b"users.is|0|11|", b"users.@.is|0|12;enc=b64|"]
    data = make(tmp_path, [b"users.first|0|0|x", *head, *(b"users.k%d|0|%d|" % (n, n) for n in range(200))])
    rows = spark.read.format("kmq").option("path", data).option("subscribe", "users").load()
    found = {row.key: bytes(row.value) for row in compact.latest(rows).where("offset < 14").collect()}
    assert found == {"first": b"x", "eu": b"newer", "": b"empty key again", "is": b""}
    before = records(data)
    wanted = expected(before, data)
    assert [offset - 1 for offset in wanted if 0 < offset < 14] == [2, 3, 4, 6, 7, 8, 10, 12]
    run(spark, data, min_dirty=0)
    assert records(data) == wanted
    read = spark.read.format("kmq").schema(compact.READ).option("path", data).option("subscribe", "users").load()
    gone = compact.replaced(read, datetime.now(UTC) + timedelta(days=9999), 1 << 62).where("offset < 14").collect()
    assert [row.offset for row in gone] == [11], "the tombstone, and not the empty value"


def test_a_tombstone_goes_last_and_only_when_the_wal_has_gone_past_it(spark, tmp_path, monkeypatch):
    head = [b"users.a|0|0|1", b"users.gone|0|1|x", b"users.gone;h=1|0|2|", b"users.gone|0|3|"]
    tail = [b"users.bar|0|%d|ends with a bar|" % n for n in range(200)]
    data = make(tmp_path, [*head, *tail])
    run(spark, data, tombstones_s=0, min_dirty=0)
    assert 1 not in records(data) and 3 in records(data)  # what it deletes has gone first
    run(spark, data, tombstones_s=0, min_dirty=0)
    assert 3 in records(data)  # the WAL still has it, and could bring it back
    segments = segment.listing(f"{data}/append")
    assert len(segments) > 2
    os.unlink(segments[0][1])
    run(spark, data, tombstones_s=1e9, min_dirty=0)
    assert 3 in records(data)  # too young
    with monkeypatch.context() as patched:
        patched.setattr(compact, "time", SimpleNamespace(time=lambda: 1e10))
        run(spark, data, tombstones_s=2 * 86400, min_dirty=0)
    assert 3 in records(data)  # a clock that is centuries ahead does not make it old
    run(spark, data, min_dirty=0)
    assert 3 not in records(data) and 0 in records(data)
    assert key_of(records(data)[max(records(data))]) == b"bar"


def test_what_was_laid_out_by_a_run_that_was_killed_is_installed_by_the_next(spark, tmp_path, monkeypatch):
    data = make(tmp_path, some(900, 20))
    wanted = expected(records(data), data)
    settle = compaction.settle
    calls = []

    def dies(data):
        calls.append(len(compaction.waiting(data)))
        if len(calls) == 2:
            raise SystemExit("killed")
        settle(data)

    monkeypatch.setattr(compaction, "settle", dies)
    with pytest.raises(SystemExit):
        run(spark, data)
    assert calls[1] > 3 and records(data) != wanted
    assert run(spark, data)[0].records == 0 and records(data) == wanted


def test_the_router_installs_while_it_goes_on_and_its_next_start_finds_everything(spark, tmp_path, monkeypatch):
    data, made = make(tmp_path, some(900, 20), closed=False)
    queues = made[1]
    queues.checkpoints.start()  # as every 30 s
    queues.settle()
    wanted = expected(records(data), data)
    settle = compaction.settle
    lock = compaction.FileLock(f"{data}/topics/.owner")
    assert lock.try_acquire("the router")

    def as_the_router_does(data):
        append(made, some(50, 20, 3))
        while compaction.waiting(data):
            queues.tick()
            queues.settle()
        settle(data, timeout_s=0)

    monkeypatch.setattr(compaction, "settle", as_the_router_does)
    assert run(spark, data)[0].done
    after = records(data)
    assert {offset: after[offset] for offset in wanted if offset < 900} == wanted
    assert sorted(after)[-100:] == list(range(900, 1000))
    made[0].close()
    queues.close()
    lock.release()
    again = Queues(data, queues.context.wait_for_room, queues.context.logger, queues.in_force.default_limits)
    again.recover(1000)
    assert again.logs.states["users", 0].values() == queues.logs.states["users", 0].values()
    assert records(data) == after and damages(data) == []


def test_what_is_not_declared_so_is_refused_by_name_and_left_out_by_pattern(spark, tmp_path):
    data = make(tmp_path, some(300, 5), own=None)
    before = records(data)
    with pytest.raises(ConfigError, match="users: not declared to be compacted"):
        run(spark, data)
    assert compact.run(spark, {"path": data, "subscribePattern": ".*"}, min_dirty=0) == []
    with pytest.raises(ConfigError, match="--path"):
        compact.run(spark, {"kmq.bootstrap.servers": "127.0.0.1:1", "subscribe": "users"})
    assert records(data) == before


def test_latest_is_a_topic_as_a_table(spark, tmp_path):
    data = make(tmp_path, [*some(300, 5), b"users.3|0|x|", b"users|0|x|no key"])
    rows = spark.read.format("kmq").option("path", data).option("subscribe", "users").load()
    found = {row["key"]: (row["offset"], row["value_text"]) for row in compact.latest(rows).collect()}
    lines = records(data)
    last = {key_of(line).decode(): offset for offset, line in lines.items() if key_of(line)}
    del last["3"]
    assert found == {key: (offset, lines[offset].split(b"|", 5)[5].decode()) for key, offset in last.items()}


def test_readers_see_every_kept_record_while_the_router_of_a_live_broker_is_killed(broker):
    """A producer goes on, a reader reads in a loop, and the router dies while it swaps. (No Spark: the plan is made here.)"""
    broker.up()
    declared = broker.kmq("topics", "create", "users", "--set", "cleanup=compact", "--set", "segment_bytes=64KiB")
    assert declared.returncode == 0, declared.stderr
    broker.send_lines([b"users.%d|0|%d|%b" % (n % 40, n, b"v" * 200) for n in range(4000)])
    broker.wait_routed(1 + 4000)  # the declaration, and they
    broker.down()  # a checkpoint, for which we would wait 30 s
    broker.up()
    data, stop, failed, sent, rounds = str(broker.data), threading.Event(), [], [4000], [0]
    ends = compaction.synced_ends(data)
    sealed = compaction.sealed(data, "users", 0, ends["users", 0])
    kept = expected(records(data), data)
    gone = [offset for offset in range(ends["users", 0]) if offset not in kept]
    assert len(sealed) > 8 and len(gone) > 3000

    def produce():
        while not stop.wait(0.05):
            broker.send_lines([b"users.%d|0|%d|new" % (n % 40, n) for n in range(20)])
            sent[0] += 20

    def read():
        while not stop.is_set():
            assert kept.items() <= records(data).items()
            rounds[0] += 1

    def guarded(work):
        try:
            work()
        except BaseException as err:
            failed.append(err)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (produce, read)]
    for thread in threads:
        thread.start()
    try:
        rng = random.Random(7)
        for turn in range(5):
            with compaction.compactor(data) as where:
                for each in sealed:
                    compaction.lay_out(data, each, gone, where)
            if turn:
                time.sleep(rng.random() * 1.2)  # the router looks once a second: any moment of its swaps
            else:  # once it must be the router that swaps: behind its death it is us
                broker.wait(lambda: "event=segment_compacted" in broker.log(), "the router's first swap")
            broker.kill("router")
            compaction.settle(data, timeout_s=60)
            assert not failed
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed and rounds[0] >= 3
    broker.wait_routed(1 + sent[0])
    found = records(data)
    assert {offset: line for offset, line in found.items() if offset < ends["users", 0]} == kept
    assert sorted(found)[-1] == sent[0] - 1 and len(found) == len(kept) + sent[0] - 4000
    broker.down()
    assert broker.kmq("verify").stdout.splitlines()[-1] == "no damage"
    assert "event=segment_compacted" in broker.log()
