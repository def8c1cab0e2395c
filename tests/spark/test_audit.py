"""The audit: every way in which queues can differ from the WAL is found and named, and nothing else is."""

import json
import os
import re
import subprocess
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from forked import forked, send
from log_server import up
from made_data import append, write_data
from made_up import no_room
from waiting import meanwhile

from kmq.errors import EXIT_FAILED, EXIT_OK
from kmq.log import index, segment, segment_reader, topic_changes, topics
from kmq.log.index import IndexWriter
from kmq.spark.audit import audit
from kmq.spark.audit.auditor import audit_task
from kmq.spark.audit.findings import FINDINGS, NOTES
from kmq.spark.audit.snapshot import plan, sources

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

COUNT = 600
MANY, ONE = 4096, 1 << 30  # bytes of a stretch


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, request):
    if "broker" in request.fixturenames:
        return  # its own are of the usual size
    for module in (index, segment_reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1024)


def line(n, key=""):
    return b"%b|0|%d|payload of %d | with a bar" % (key.encode() or KEYS[n % len(KEYS)], n, n)


KEYS = [b"test", b"orders.a", b"orders", b"jobs.eu.berlin", b"orders.b", b"jobs.us", b"jobs.eu", b"new.\xff\xfe"]


def make(path, lines=None, **how):
    """A clean history: partitions, keys, no keys, a topic that is declared when its messages have begun to come."""
    made = write_data(
        path, (lines or [line(n) for n in range(1, COUNT // 2 + 1)]), {"orders": 4}, closed=False, group=50, **how
    )
    if lines is None:
        topics.declare(str(path), "jobs.eu", 3)
        made[1].adopt_declarations()
        append(made, [line(n) for n in range(COUNT // 2 + 1, COUNT + 1)], 50)
    made[0].close()
    made[1].close()
    return str(path)


def judged(data, nbytes=ONE):
    """The rows of an audit, without Spark."""
    return judged_at({"path": data}, nbytes)


def judged_at(where, nbytes=ONE):
    [source] = sources(where)
    broker = source.open()
    return [
        row
        for task in plan(broker, source.snapshot, nbytes)
        for row in audit_task(broker, source.snapshot, task, source.bucket)
    ]


def found(rows):
    """finding → records."""
    sums = {}
    for row in rows:
        if row.what in FINDINGS:
            sums[row.what] = sums.get(row.what, 0) + row.records
    return sums


def noted(rows):
    """note → records."""
    sums = {}
    for row in rows:
        if row.what in NOTES:
            sums[row.what] = sums.get(row.what, 0) + row.records
    return sums


def place_of(row):
    return f"{row.topic}/{row.partition}"


def delete(made, data, *names):
    for name in names:
        topic_changes.submit(data, topic_changes.DELETE, name, {})
    made[1].tick()


@pytest.mark.parametrize("nbytes", [MANY, ONE])
def test_records_of_deleted_topics_are_a_note_and_nothing_else(tmp_path, nbytes):
    made = write_data(tmp_path, [line(n) for n in range(1, 301)], {"orders": 4, "jobs.eu": 2}, closed=False, group=50)
    data = str(tmp_path)
    delete(made, data, "orders", "jobs.eu", "new")
    append(made, [line(n) for n in range(301, 601)], 50)
    topics.declare(data, "jobs.eu", 3)
    made[1].tick()
    append(made, [line(n) for n in range(601, 901)], 50)
    made[0].close()
    made[1].close()
    rows = judged(data, nbytes)
    gone = [
        n for n in range(1, 301) if line(n).split(b"|")[0].split(b".k")[0].startswith((b"orders", b"jobs.eu", b"new"))
    ]
    assert found(rows) == {}
    assert noted(rows) == {"deleted": len(gone)}


def test_a_topic_deleted_while_it_is_judged_is_not_lost(tmp_path):
    made = write_data(tmp_path, [line(n) for n in range(1, 301)], {"orders": 4}, closed=False, group=50)
    data = str(tmp_path)
    [source] = sources({"path": data})
    broker = source.open()
    tasks = plan(broker, source.snapshot, ONE)
    delete(made, data, "orders")
    rows = [row for task in tasks for row in audit_task(broker, source.snapshot, task, source.bucket)]
    assert found(rows) == {}
    assert noted(rows)["deleted"] == sum(line(n).startswith(b"orders") for n in range(1, 301))


@pytest.mark.parametrize("nbytes", [MANY, ONE])
def test_records_are_looked_for_in_the_partitions_that_their_topic_had(tmp_path, nbytes):
    made = write_data(tmp_path, [line(n) for n in range(1, 301)], {"orders": 4}, closed=False, group=50)
    data = str(tmp_path)
    for name, partitions in (("orders", 6), ("test", 3)):
        topic_changes.submit(data, topic_changes.GROW, name, {"partitions": str(partitions)})
    made[1].tick()
    append(made, [line(n) for n in range(301, 601)], 50)
    made[0].close()
    made[1].close()
    assert all(seqs_in(data, f"orders/{number}") for number in (4, 5)) and seqs_in(data, "test/2")
    assert found(judged(data, nbytes)) == {} and noted(judged(data, nbytes)) == {}
    path = f"{data}/topics/orders/topic.toml"
    with open(path) as file:
        text = re.sub("(?m)^grown.*\n", "", file.read())
    with open(path, "w") as file:
        file.write(text)
    assert found(judged(data))["wrong_queue"] > 0  # so the audit does look at it


@pytest.mark.parametrize("nbytes", [MANY, ONE])
def test_a_forked_directory_has_a_gap_that_is_no_finding_and_a_loss_beside_it_is_one(tmp_path, nbytes):
    data = make(tmp_path)
    plan_of_fork, _ = forked(data)
    send(data, [line(n) for n in range(COUNT + 1, COUNT + 101)])
    with up(data, plan_of_fork.next_seq + 99) as served:
        served.serve()
        rows = judged_at({"kmq.bootstrap.servers": f"127.0.0.1:{served.port}"}, nbytes)
    assert found(rows) == {} and noted(rows) == {}
    assert found(judged(data, nbytes)) == {} and noted(judged(data, nbytes)) == {}
    rewrite(data, "test/0", lambda lines: lines.pop(3))
    assert found(judged(data, nbytes)) == {"lost": 1}


# --- how histories break: each of these writes what a faulty broker would have, with an index that is right -------------


def rewrite(data, log, change):
    """Let `change` have the lines of a log (append, or <topic>/<partition>), which becomes what it leaves of them."""
    by_seq = log == "append"
    directory = f"{data}/append" if by_seq else f"{data}/topics/{log}"
    segments = segment.listing(directory)
    lines = b"".join(Path(path).read_bytes() for _, path in segments).split(b"\n")[:-1]
    change(lines)
    text = b"".join(each + b"\n" for each in lines)
    for _, path in segments:
        os.unlink(path)
        Path(segment.index_path(path)).unlink(missing_ok=True)
    first, path = segments[0]
    with open(path, "wb") as file:
        file.write(text)
    writer = IndexWriter(segment.index_path(path), no_room, by_seq)
    with open(path, "rb") as file:
        writer.resume(file.fileno(), len(text), first)
    writer.seal()


def lines_of(data, log):
    """The lines of a queue, whatever is in them."""
    return b"".join(Path(path).read_bytes() for _, path in segment.listing(f"{data}/topics/{log}")).split(b"\n")[:-1]


def at(lines, seq):
    """Where in `lines` the record `seq` is."""
    return next(number for number, each in enumerate(lines) if each.startswith(b"%d|" % seq))


def seqs_in(data, log):
    return [int(each.split(b"|")[0]) for each in lines_of(data, log) if each]


def without(data, log, *seqs):
    rewrite(data, log, lambda lines: [lines.pop(at(lines, seq)) for seq in seqs])


def move(data, log, seq, behind):
    def change(lines):
        moved = lines.pop(at(lines, seq))
        lines.insert(at(lines, behind) + 1, moved)

    rewrite(data, log, change)


def again(data, log, seq, behind):
    rewrite(data, log, lambda lines: lines.insert(at(lines, behind) + 1, lines[at(lines, seq)]))


def alter(data, log, seq, old, new):
    def change(lines):
        lines[at(lines, seq)] = lines[at(lines, seq)].replace(old, new)

    rewrite(data, log, change)


def take_over(data, source, target, seq):
    """Record `seq` is in another queue than its own."""
    taken = []
    rewrite(data, source, lambda lines: taken.append(lines.pop(at(lines, seq))))

    def change(lines):
        lines.insert(sum(int(each.split(b"|")[0]) < seq for each in lines), taken[0])

    rewrite(data, target, change)


def put(data, log, behind, text):
    rewrite(data, log, lambda lines: lines.insert(at(lines, behind) + 1, text))


def blank(data, log, *seqs):
    def change(lines):
        for seq in seqs:
            lines[at(lines, seq)] = b""

    rewrite(data, log, change)


def flip(data, log, byte):
    """One bit on the disk; the index knows nothing of it."""
    directory = f"{data}/append" if log == "append" else f"{data}/topics/{log}"
    with open(segment.listing(directory)[0][1], "r+b") as file:
        file.seek(byte)
        old = file.read(1)
        file.seek(byte)
        file.write(bytes([old[0] ^ 1]))


def cut(data, log, nbytes):
    path = segment.listing(f"{data}/append" if log == "append" else f"{data}/topics/{log}")[-1][1]
    os.truncate(path, os.stat(path).st_size - nbytes)
    writer = IndexWriter(segment.index_path(path), no_room, log == "append")
    with open(path, "rb") as file:
        whole = file.read().rfind(b"\n") + 1
        writer.resume(file.fileno(), whole, int(os.path.basename(path)[:20]))


def name_dropped(data, ring, first, last):
    with open(f"{data}/dropped.log", "ab") as file:
        file.write(b"%b|%d|%d|%d|1700000000.000000\n" % (ring, first, last, last - first + 1))


# --- good histories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [ONE, MANY])
def test_a_clean_history_has_no_finding_and_each_record_is_counted(tmp_path, nbytes):
    data = make(tmp_path)
    rows = judged(data, nbytes)
    assert found(rows) == {} and noted(rows) == {}
    assert sum(row.records for row in rows if row.what == "records") == COUNT
    assert sum(row.records for row in rows if row.what == "queue") == COUNT
    assert sum(row.nbytes for row in rows if row.what == "records") == os.stat(f"{data}/append.log").st_size
    assert sum(row.records for row in rows if row.what == "records" and row.topic == "orders") == 3 * COUNT // 8


def test_many_stretches_are_as_good_as_one_and_tile_every_queue(tmp_path):
    [source] = sources({"path": make(tmp_path)})
    tasks = plan(source.open(), source.snapshot, MANY)
    assert len(tasks) > 10
    assert all(a.high == b.low for a, b in pairwise(tasks))
    for place, (first, end) in source.snapshot.queues.items():
        spans = [task.queues[place] for task in tasks]
        assert spans[0][0] == first and spans[-1][1] == end
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_a_declared_topic_with_dots_gets_its_messages_from_its_seq_on(tmp_path):
    data = make(tmp_path)
    first = min(min(seqs_in(data, f"jobs.eu/{number}"), default=COUNT) for number in range(3))
    assert first > COUNT // 2 and min(seqs_in(data, "jobs/0")) < COUNT // 2
    with open(f"{data}/topics/jobs.eu/topic.toml") as file:
        text = file.read()
    with open(f"{data}/topics/jobs.eu/topic.toml", "w") as file:
        file.write(re.sub(r"from_seq = \d+", "from_seq = 1", text))
    assert found(judged(data))["wrong_queue"] > 0  # so the audit does look at it


@pytest.mark.parametrize("nbytes", [ONE, MANY])
def test_what_retention_took_from_the_wal_is_not_judged_and_counted(tmp_path, nbytes):
    data = make(tmp_path, [line(n) for n in range(1, COUNT + 1)], segment_bytes=8192)
    segments = segment.listing(f"{data}/append")
    first = segments[3][0]
    for _, path in segments[:3]:
        os.unlink(path)
    rows = judged(data, nbytes)
    assert found(rows) == {}
    assert noted(rows) == {"older": first - 1}
    assert sum(row.records for row in rows if row.what == "records") == COUNT - first + 1


@pytest.mark.parametrize("nbytes", [ONE, MANY])
def test_what_retention_took_from_a_queue_is_not_judged_and_counted(tmp_path, nbytes):
    data = make(tmp_path, [line(n, "test.k") for n in range(1, COUNT + 1)], segment_bytes=8192)
    segments = segment.listing(f"{data}/topics/test/0")
    for _, path in segments[:2]:
        os.unlink(path)
    rows = judged(data, nbytes)
    assert found(rows) == {}
    assert noted(rows) == {"retained": segments[2][0]}


@pytest.mark.parametrize("nbytes", [ONE, MANY])
def test_ranges_that_dropped_log_names_are_notes(tmp_path, nbytes):
    data = make(tmp_path)
    gone = [seq for seq in seqs_in(data, "test/0") if 100 <= seq <= 120]
    for log in sorted({f"{name}/{number}" for name in ("test", "orders", "jobs", "new") for number in range(4)}):
        if os.path.isdir(f"{data}/topics/{log}"):
            without(data, log, *[seq for seq in seqs_in(data, log) if 100 <= seq <= 120])
    rewrite(data, "append", lambda lines: lines.__delitem__(slice(at(lines, 110), at(lines, 121))))
    name_dropped(data, b"durable", 100, 109)
    name_dropped(data, b"framed", 110, 120)
    rows = judged(data, nbytes)
    assert gone and found(rows) == {}
    assert noted(rows) == {"dropped_durable": 10, "dropped_framed": 11}


def test_what_is_durable_and_not_routed_yet_is_a_note(tmp_path):
    wal, queues, _ = made = write_data(tmp_path, [line(n) for n in range(1, 101)], {"orders": 4}, closed=False)
    queues.close()
    made[1] = type("Down", (), {"route": lambda *_: None, "tick": lambda *_: None})()
    append(made, [line(n) for n in range(101, 151)])
    wal.close()
    rows = judged(str(tmp_path))
    assert found(rows) == {} and noted(rows) == {"unrouted": 50}


def test_compaction_is_excused_record_by_record_where_the_topic_is_compacted(tmp_path):
    data = make(tmp_path)
    gone = [seq for at, seq in enumerate(seqs_in(data, "test/0")) if at % 10]  # so that most cuts lie among them
    blank(data, "test/0", *gone)
    assert found(judged(data, MANY))["blank"] == len(gone)  # nobody said that it is compacted
    with open(f"{data}/topics/test/topic.toml", "a") as file:
        file.write('cleanup = "compact"\n')
    for nbytes in (ONE, MANY):
        rows = judged(data, nbytes)
        assert found(rows) == {} and noted(rows) == {"compacted": len(gone)}
    without(data, "test/0", seqs_in(data, "test/0")[5])
    assert found(judged(data)) == {"lost": 1}  # a bare newline stands for one record, not for two


# --- broken histories: what was done → what must be found, where -----------------------------------------------------------


def q(data, number=30, log="test/0"):
    """The seq of some record of a queue."""
    return seqs_in(data, log)[number]


BROKEN = {
    "gap in the WAL": (
        lambda data: rewrite(data, "append", lambda lines: lines.__delitem__(slice(at(lines, 49), at(lines, 52)))),
        {"gap": 3, "foreign": 3},
        ("gap", "__append/0", 49),
    ),
    "twice in the WAL": (
        lambda data: again(data, "append", 60, 62),
        {"duplicate": 1, "clock_back": 1},
        ("duplicate", "__append/0", 60),
    ),
    "out of order in the WAL": (
        lambda data: move(data, "append", 60, 62),
        {"out_of_order": 1, "clock_back": 1},
        ("out_of_order", "__append/0", 60),
    ),
    "time goes back": (
        lambda data: alter(data, "append", 50, b".000050|", b".000001|"),
        {"clock_back": 1, "altered": 1},
        ("clock_back", "__append/0", 50),
    ),
    "lost in a queue": (lambda data: without(data, "test/0", q(data)), {"lost": 1}, ("lost", "test/0", 248)),
    "a run lost in a queue": (
        lambda data: without(data, "test/0", *seqs_in(data, "test/0")[30:33]),
        {"lost": 3},
        ("lost", "test/0", 248),
    ),
    "the end of a queue lost": (
        lambda data: without(data, "test/0", *seqs_in(data, "test/0")[-2:]),
        {"lost": 2},
        ("lost", "test/0", 592),
    ),
    "all of a queue lost": (
        lambda data: rewrite(data, "test/0", lambda lines: lines.clear()),
        {"lost": COUNT // 8},
        ("lost", "test/0", 8),
    ),
    "twice in a queue": (
        lambda data: again(data, "test/0", q(data), q(data, 31)),
        {"duplicate": 1},
        ("duplicate", "test/0", 248),
    ),
    "out of order in a queue": (
        lambda data: move(data, "test/0", q(data), q(data, 31)),
        {"out_of_order": 1},
        ("out_of_order", "test/0", 248),
    ),
    "in a wrong partition": (
        lambda data: take_over(data, f"orders/{zlib.crc32(b'a') % 4}", f"orders/{(zlib.crc32(b'a') + 1) % 4}", 201),
        {"wrong_queue": 1},
        ("wrong_queue", f"orders/{(zlib.crc32(b'a') + 1) % 4}", 201),
    ),
    "in a wrong topic": (
        lambda data: take_over(data, "test/0", "jobs/0", q(data)),
        {"wrong_queue": 1},
        ("wrong_queue", "jobs/0", 248),
    ),
    "an altered payload": (
        lambda data: alter(data, "test/0", q(data), b"payload", b"Payload"),
        {"altered": 1},
        ("altered", "test/0", 248),
    ),
    "an altered time": (
        lambda data: alter(data, "test/0", q(data), b".000248|", b".000249|"),
        {"altered": 1},
        ("altered", "test/0", 248),
    ),
    "a record from nowhere": (
        lambda data: put(data, "test/0", q(data), b"%d|1700000000.000241|test|0|1|x" % (COUNT + 50)),
        {"foreign": 1},
        ("foreign", "test/0", COUNT + 50),
    ),
    "a line that is no record": (
        lambda data: put(data, "test/0", q(data), b"what is this"),
        {"malformed": 1},
        ("malformed", "test/0", 0),
    ),
    "a topic that nothing routes to": (
        lambda data: write_queue(data, "stray", b"17|1700000000.000017|stray|0|17|x\n"),
        {"wrong_queue": 1},
        ("wrong_queue", "stray/0", 17),
    ),
    "dropped on the way to the WAL, not named": (
        lambda data: (name_dropped(data, b"framed", 49, 50), lose_everywhere(data, 49, 50, 51)),
        {"gap": 1},
        ("gap", "__append/0", 51),
    ),
    "dropped on the way to its queue, not named": (
        lambda data: (
            name_dropped(data, b"durable", 1, 247),
            name_dropped(data, b"durable", 249, 400),
            thin(data, 1, 400),
        ),
        {"lost": 1},
        ("lost", "test/0", 248),
    ),
    "named as dropped, and in its queue": (
        lambda data: name_dropped(data, b"durable", 248, 248),
        {"undropped": 1},
        ("undropped", "test/0", 248),
    ),
    "a flipped bit in a queue": (lambda data: flip(data, "test/0", 1500), {"damage": 1}, ("damage", "test/0", 0)),
    "a flipped bit in the WAL": (lambda data: flip(data, "append", 9000), {"damage": 1}, ("damage", "__append/0", 0)),
    "no index of a queue": (
        lambda data: Path(segment.index_path(segment.listing(f"{data}/topics/test/0")[0][1])).write_bytes(
            b"x|y\n" * 90
        ),
        {"damage": 1},
        ("damage", "test/0", 0),
    ),
    "no index of the WAL": (
        lambda data: Path(segment.index_path(segment.listing(f"{data}/append")[0][1])).write_bytes(b"x|y\n" * 90),
        {"damage": 1},
        ("damage", "__append/0", 0),
    ),
    "a torn queue": (lambda data: cut(data, "test/0", 5), {"lost": 1}, ("lost", "test/0", 600)),
    "a torn WAL": (lambda data: cut(data, "append", 5), {"foreign": 1}, ("foreign", "test/0", 600)),
}


def write_queue(data, name, text):
    os.makedirs(f"{data}/topics/{name}/0")
    with open(f"{data}/topics/{name}/topic.toml", "w") as file:
        file.write("partitions = 1\nfrom_seq = 1\n")
    with open(f"{data}/topics/{name}/0/{segment.name(0)}", "wb") as file:
        file.write(text)
    rewrite(data, f"{name}/0", lambda lines: None)


def logs_of(data):
    return [
        f"{name}/{number}"
        for name in os.listdir(f"{data}/topics")
        for number in os.listdir(f"{data}/topics/{name}")
        if number.isdigit()
    ]


def lose_everywhere(data, *seqs):
    for log in ["append", *logs_of(data)]:
        rewrite(
            data,
            log,
            lambda lines: lines.__setitem__(
                slice(None), [each for each in lines if int(each.split(b"|")[0]) not in seqs]
            ),
        )


def thin(data, low, high):
    """The queues lose low…high."""
    for log in logs_of(data):
        rewrite(
            data,
            log,
            lambda lines: lines.__setitem__(
                slice(None), [each for each in lines if not low <= int(each.split(b"|")[0]) <= high]
            ),
        )


@pytest.mark.parametrize("nbytes", [ONE, MANY])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_history_is_found_and_named(tmp_path, name, nbytes):
    do, findings, (what, where, seq) = BROKEN[name]
    data = make(tmp_path)
    do(data)
    rows = judged(data, nbytes)
    assert found(rows) == findings
    [row, *_] = [row for row in rows if row.what == what and place_of(row) == where]
    assert row.first_seq == seq


# --- a broker that is up -----------------------------------------------------------------------------------------------------


def test_a_broker_that_is_written_to_has_no_finding_by_files_or_over_http(broker):
    broker.gateway = True
    broker.up()
    broker.kmq("topics", "create", "orders", "--partitions", "4")
    address = f"127.0.0.1:{(broker.pipes / 'http.port').read_text().strip()}"
    sent = []

    def send():
        if len(sent) < 100:  # an end, or a slow machine never comes behind
            broker.send_lines([line(2000 * len(sent) + n) for n in range(2000)])
            sent.append(2000)

    with meanwhile(send, every_s=0.02):
        broker.wait_routed(2000)
        for where in ({"path": str(broker.data)}, {"kmq.bootstrap.servers": address}) * 2:
            rows = judged_at(where, 1 << 20)
            assert found(rows) == {}
            assert noted(rows).keys() <= {"unrouted"}
            assert sum(row.records for row in rows if row.what == "records") >= 2000
    broker.wait_routed(
        1 + sum(sent)
    )  # the declaration, and they; ingress has taken them all, which is less than durable
    rows = judged_at({"kmq.bootstrap.servers": address})
    assert (found(rows), noted(rows)) == ({}, {})
    [source] = sources({"kmq.bootstrap.servers": address})
    assert {topic.name for topic in source.snapshot.topics} == {"test", "orders", "jobs", "new", "__kmq"}
    assert source.snapshot.routed == 1 + sum(sent)


def test_what_is_wrong_is_seen_over_http_too(tmp_path):
    data = make(tmp_path / "data")
    without(data, "test/0", 248)
    alter(data, "orders/1", seqs_in(data, "orders/1")[3], b"payload", b"Payload")
    flip(data, "jobs/0", 1500)
    with up(data, COUNT) as served:
        served.serve()
        rows = judged_at({"kmq.bootstrap.servers": f"127.0.0.1:{served.port}"})
    assert found(rows) == {"lost": 1, "altered": 1, "damage": 1}
    assert found(judged(data)) == found(rows)


# --- with Spark ----------------------------------------------------------------------------------------------------------------


def test_an_audit_with_spark_says_of_two_brokers_what_there_is_to_say(spark, tmp_path, capsys):
    good, bad = make(tmp_path / "good"), make(tmp_path / "bad")
    without(bad, "test/0", 248)
    again(bad, "orders/1", *seqs_in(bad, "orders/1")[3:5])
    flip(bad, "jobs/0", 1500)
    page = tmp_path / "pages" / "audit.html"
    assert audit.run(spark, {"path": good}, "", False) == EXIT_OK
    assert f"audit: {COUNT:,} records, all good" in capsys.readouterr().out
    assert audit.run(spark, {"path": f"{good},{bad}"}, str(page), limit=2) == EXIT_FAILED
    said = capsys.readouterr().out
    assert "lost 1" in said and "duplicate 1" in said and "damage 1" in said and "the first 2" in said
    assert audit.run(spark, {"path": f"{good},{bad}"}, "", as_json=True) == EXIT_FAILED
    table = json.loads(capsys.readouterr().out)
    assert (table["result"], table["records"]) == ("fail", 2 * COUNT)
    assert table["findings"] == {"damage": 1, "duplicate": 1, "lost": 1}
    [lost] = [each for each in table["shown"] if each["what"] == "lost"]
    assert (lost["broker"], lost["first_seq"], lost["offset"]) == (bad, 248, 30)
    assert lost["file"] == "topics/test/0/00000000000000000000.log"
    [damage] = [each for each in table["shown"] if each["what"] == "damage"]
    assert damage["path"].startswith(bad) and damage["byte"] > 0
    text = page.read_text()
    assert text.count("<svg") == 3 and "lost" in text and "KMQ audit: 3 records with findings" in text
    assert not re.search(r"(src|href)=\"(?!#)", text) and "@import" not in text  # one file, no network


def test_stretches_make_no_difference_to_what_spark_adds_up(spark, tmp_path):
    data = make(tmp_path)
    without(data, "test/0", 248)
    one, many = (audit.audit(spark, sources({"path": data}), nbytes) for nbytes in (ONE, MANY))
    assert (one.findings, one.notes) == (many.findings, many.notes) == ({"lost": 1}, {})
    assert one.hours == many.hours and one.moments == many.moments
    assert sum(each.records for each in one.hours) == COUNT


def test_the_questions_of_an_audit_can_be_asked_of_any_frame(spark, tmp_path):
    data = make(tmp_path)
    lose_everywhere(data, 100, 101, 300)
    without(data, "test/0", 248)
    again(data, "orders/1", *seqs_in(data, "orders/1")[3:5])

    def read(**options):
        columns = "broker string, topic string, partition int, offset bigint, seq bigint"
        return spark.read.format("kmq").schema(columns).options(path=data, **options).load()

    wal, queues = read(subscribe="__append"), read(subscribePattern=".*")
    assert [(row.first_seq, row.last_seq) for row in audit.gaps(wal).orderBy("first_seq").collect()] == [
        (100, 101),
        (300, 300),
    ]
    assert [row.seq for row in audit.missing(wal, queues).collect()] == [248]
    [twice] = audit.duplicates(queues).collect()
    assert (twice.seq, twice.times) == (seqs_in(data, "orders/1")[3], 2)
    [late] = audit.out_of_order(queues).collect()
    assert (late.topic, late.partition, late.seq) == ("orders", 1, twice.seq)


def test_the_command_audits_the_broker_of_its_environment_and_exits_with_the_verdict(broker):
    broker.up()
    broker.send_lines([line(n) for n in range(200)])
    broker.wait_routed(200)
    broker.down()
    without(str(broker.data), "test/0", seqs_in(broker.data, "test/0")[2])
    command = ["kmq", "pipeline", "run", "audit", "--master", "local[1]", "--report", "page.html", "--json"]
    done = subprocess.run(command, env=broker.env, cwd=broker.root, capture_output=True, text=True, timeout=250)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert json.loads(done.stdout)["findings"] == {"lost": 1}
    assert "lost" in (broker.root / "page.html").read_text()
