"""Old records of topics that tasks get from the store themselves, and a lineage that is read without its broker."""

import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from itertools import pairwise

import pytest
from log_server import up
from made_up import FIRST_TS
from tiered import TieredBroker, cold_broker, lines, restored

from kmq.cli.spark_options import From
from kmq.config.settings import load
from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.log import gaps, rows, topics
from kmq.log.damage import DamageError
from kmq.log.reader import WAL
from kmq.log.segment import Limits
from kmq.spark.connections import Access
from kmq.spark.source import batches, planner, store
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import open_broker
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.plan import DataLossError, OffsetSpan
from kmq.spark.source.planner import QueryLogs
from kmq.spark.source.store import Lineage, StoreReader
from kmq.spark.sql import duckdb_engine, shell
from kmq.tier import objects

pytestmark = pytest.mark.usefixtures("small_blocks")

COUNT = 400
AT_ONCE = Access(patience_s=0.0)


@pytest.fixture
def made(tmp_path):
    return cold_broker(tmp_path, COUNT)


@pytest.fixture
def gateway(made):
    """Its gateway, which has no KMQ_TIER: nothing can come through its cache."""
    with up(made.data, synced=COUNT) as found:
        found.serve()
        yield f"127.0.0.1:{found.port}"


def url_of(made):
    return f"file://{made.store.root}"


@pytest.fixture(params=["path", "gateway", "lineage"])
def broker(request, made):
    """Each way to the old records that gets their objects from the store."""
    if request.param == "lineage":
        return open_broker(url_of(made), True)
    if request.param == "path":
        return open_broker(made.data, True, tier=url_of(made))
    return open_broker(request.getfixturevalue("gateway"), False, AT_ONCE, tier=url_of(made))


def stored(broker: Broker, start, end, topic="t"):
    blocks = [(lines.offset, lines.data) for lines in broker.blocks(topic, 0, start, end)]
    for (offset, data), (following, _) in pairwise(blocks):
        assert offset + data.count(b"\n") == following
    assert not blocks or blocks[0][0] == start
    return b"".join(data for _, data in blocks)


def test_records_are_those_of_the_partition_wherever_they_lie(made, broker):
    end = broker.bounds(["t"])["t", 0][1]
    assert broker.bounds(["t"])["t", 0][0] == 0 and end in (COUNT, made.rows()[-1][1])
    again = pickle.loads(pickle.dumps(broker)) if not hasattr(broker, "path") else broker
    assert stored(again, 0, end) == b"".join(made.sent[:end])
    base, following = made.rows()[1]
    for start, stop in [(base + 3, base + 7), (base - 1, following + 1), (end - 1, end), (base, following)]:
        assert stored(broker, start, stop) == b"".join(made.sent[start:stop])
    assert not os.path.exists(f"{made.data}/{rows.CACHE}")


def test_cuts_lie_between_objects(made, broker):
    bases = [base for base, _ in made.rows()]
    cuts = broker.cuts("t", 0, 0, bases[-1], 1)
    assert set(cuts) <= {*bases} and len(cuts) == len(bases) - 2


def test_a_time_or_a_seq_is_found_inside_of_an_object(made, broker):
    if isinstance(broker, Lineage) or hasattr(broker, "path"):  # a gateway finds it itself
        for seq in (1, 8, made.rows()[1][0] + 1, made.rows()[2][0] + 5):
            assert broker.offset_of_seq("t", 0, seq) == seq - 1 == broker.offset_of_time("t", 0, FIRST_TS + seq)
        assert broker.offset_of_time("t", 0, FIRST_TS + COUNT + 1) == broker.bounds(["t"])["t", 0][1]


def object_of(made, number):
    row = rows.of(made.directory()).rows[number]
    return row, f"{made.store.root}/{rows.full_key(made.copier.lineage, row.key)}"


def test_an_altered_object_is_damage_that_names_it_and_its_offsets(made, broker):
    row, path = object_of(made, 1)
    with open(path, "r+b") as file:
        file.seek(row.size // 2)
        byte = file.read(1)
        file.seek(row.size // 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DamageError, match=rf"{row.key}.*offset {row.base} to {row.next - 1}.*not what its commit says"):
        stored(broker, 0, row.next)
    assert stored(broker, 0, row.base) == b"".join(made.sent[: row.base])


def test_an_object_that_is_missing_although_the_rows_name_it_is_damage(made, broker):
    row, path = object_of(made, 1)
    os.unlink(path)
    with pytest.raises(DamageError, match=rf"{row.key}.*is not there"):
        stored(broker, 0, row.next)


def begin_later(made, offset):
    """The partition begins later, and the copy says so."""
    made.start()
    made.kill_copier()
    log = made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0)
    made.queues.retention.begin_at([(log, offset)])
    made.turn()
    made.stop()


def test_what_was_dropped_after_the_plan_is_data_loss_as_by_retention(made, broker):
    name, span = broker.name, OffsetSpan((broker.name, "t", 0), 0, 300)
    if isinstance(broker, Lineage):
        broker = broker.only([span])
    (_, path), (second, _) = object_of(made, 0), object_of(made, 1)
    begin_later(made, second.base + 4)
    os.unlink(path)
    with pytest.raises(DataLossError, match=rf"{name} t/0: offsets 0 to {second.base + 3} went.*retention"):
        list(batches.blocks(broker, [span], ["value"]))
    found = [block for block, _ in batches.blocks(broker, [span], ["value"], fail_on_data_loss=False)]
    assert found[0].offset == second.base + 4
    assert b"".join(block.lines for block in found) == b"".join(made.sent[second.base + 4 : 300])


def test_a_segment_that_local_limits_delete_meanwhile_is_read_from_the_store(made):
    broker = open_broker(made.data, True, tier=url_of(made))
    reading = broker.blocks("t", 0, 0, COUNT)
    found = [next(reading).data]
    made.start()
    made.kill_copier()
    made.send(*lines(200, COUNT))
    for _ in range(3):
        made.turn()
    made.stop()
    assert made.local()[0] >= COUNT
    assert b"".join([*found, *(lines.data for lines in reading)]) == b"".join(made.sent[:COUNT])


def test_without_the_url_a_data_directory_refuses_old_records_by_name(made):
    broker = open_broker(made.data, True)
    local = made.local()[0]
    assert stored(broker, local, COUNT) == b"".join(made.sent[local:])
    said = r"t/0: offsets 0 to \d+ lie in the store alone; set option tier to the URL"
    for ask in (lambda: stored(broker, 0, 9), lambda: broker.offset_of_seq("t", 0, 5)):
        with pytest.raises(ConfigError, match=said):
            ask()


def test_another_store_is_no_damage(made, gateway, tmp_path):
    os.makedirs(tmp_path / "other")
    broker = open_broker(gateway, False, AT_ONCE, tier=f"file://{tmp_path}/other")
    with pytest.raises(ConfigError, match=r"tier=file://.*/other: has no copy of the lineage"):
        stored(broker, 0, 9)


def test_a_store_that_is_away_for_a_moment_is_asked_again(made, monkeypatch):
    reader = StoreReader(url_of(made))
    made.store.is_away = True
    monkeypatch.setattr(reader, "store", lambda: made.store)
    monkeypatch.setattr(store.time, "sleep", lambda _: setattr(made.store, "is_away", False))
    row = rows.of(made.directory()).rows[0]
    row = row._replace(key=rows.full_key(made.copier.lineage, row.key))
    assert b"".join(found.data for found in reader.lines(row, 0, 5)) == b"".join(made.sent[:5])


def test_a_plan_waits_for_the_store_although_it_leaves_out_a_broker_at_once(made, gateway, monkeypatch):
    monkeypatch.setattr(planner, "HOLD_S", 0.0)
    given = {"kmq.bootstrap.servers": gateway, "tier": url_of(made), "subscribe": "t", "onUnreachable": "hold"}
    logs = QueryLogs(ReadOptions(given))
    made.store.is_away = True
    monkeypatch.setattr(logs.brokers[gateway]._store, "store", lambda: made.store)
    monkeypatch.setattr(store.time, "sleep", lambda _: setattr(made.store, "is_away", False))
    assert logs.planned(lambda: logs.stamp_before((gateway, "t", 0), 0, 5)) == (5, FIRST_TS + 5)


# --- a lineage -------------------------------------------------------------------------------------------------------


def test_a_lineage_has_rows_tables_and_the_wal_and_its_tasks_only_what_they_read(made):
    made.start()
    made.send(*lines(20, COUNT), b"other|1|1|not in the tier", b"__own|1|1|a table")
    made.kill_copier()
    made.turn()
    made.stop()
    broker = Lineage(url_of(made))
    end = made.rows()[-1][1]
    assert broker.bounds(["t", "other", "__own", WAL]) == {
        ("t", 0): (0, end),
        ("__own", 0): (0, 1),
        (WAL, 0): (1, COUNT + 23),
    }
    assert {*broker.topics()} == {"t", "__own"}
    assert stored(broker, 1, COUNT + 23, WAL) == b"".join(made.sent)
    assert stored(broker, 0, 1, "__own") == made.sent[-1]
    assert broker.offset_of_time("__own", 0, 0) == 0 and broker.offset_of_seq(WAL, 0, 77) == 77
    assert broker.marks_from() == 1 and broker.identity() == made.copier.lineage
    span = OffsetSpan((broker.name, "t", 0), 3, made.rows()[0][1])
    [row] = broker.only([span])._read().logs["t", 0].rows
    assert (row.base, row.next) == made.rows()[0]


def test_a_lineage_begins_where_commits_say_inside_of_an_object_too(made):
    start = made.rows()[1][0] + 4
    begin_later(made, start)
    broker = Lineage(url_of(made))
    first, end = broker.bounds(["t"])["t", 0]
    assert first == start and stored(broker, first, end) == b"".join(made.sent[start:end])


def test_gaps_of_a_lineage_are_left_out_of_plans(tmp_path):
    made = cold_broker(tmp_path)
    made.start()
    made.fork(COUNT + 1, 1_000_000)
    made.kill_copier()
    made.send(*lines(COUNT, COUNT))
    for _ in range(2):
        made.turn()
    made.stop()
    logs = QueryLogs(ReadOptions({"path": url_of(made), "subscribe": "t"}))
    bounds = logs.bounds()
    [(key, (first, end))] = bounds.items()
    assert first == 0 and end > 1_000_000
    tasks = logs.tasks([OffsetSpan(key, first, end)])
    spans = [span for task in tasks for span in task.spans]
    assert not [span for span in spans if span.start < 1_000_000 and span.end > COUNT]
    found = b"".join(block.lines for task in tasks for block, _ in batches.blocks(task.open(), task.spans, ["value"]))
    assert found == b"".join(made.sent[: COUNT + end - 1_000_000])


def test_the_wal_of_a_restored_broker_has_a_gap_in_plans_too(made, tmp_path):
    made.copier.turn()
    again = restored(made, tmp_path / "again")
    again.next_seq = gaps.of_wal(again.data)[-1].to
    again.send(*lines(100, COUNT))
    for _ in range(2):
        again.turn()
    again.stop()
    logs = QueryLogs(ReadOptions({"path": url_of(made), "subscribe": WAL, "maxRecordsPerPartition": "100000"}))
    [(key, (first, end))] = logs.bounds().items()
    assert first == 1 and end > 1_000_000_000
    [(begin, gap_end)] = logs.gaps()[key]
    assert (begin, gap_end) == (COUNT + 1, end - 100)
    tasks = [pickle.loads(pickle.dumps(task)) for task in logs.tasks([OffsetSpan(key, first, end)])]
    assert len(tasks) < 10
    found = b"".join(block.lines for task in tasks for block, _ in batches.blocks(task.open(), task.spans, ["value"]))
    assert found == b"".join(again.sent)


def test_a_table_of_a_lineage_has_its_offsets_after_a_gap_too(tmp_path):
    made = TieredBroker(tmp_path, Limits(segment_bytes=4096))
    made.stop()
    topics.declare(made.data, "c", 1, limits={"cleanup": "compact"})
    made.start()
    made.send(*lines(50, topic=b"c"))
    made.fork(51, 1_000_000)
    made.kill_copier()
    made.send(*lines(50, 50, topic=b"c"))
    made.turn()
    made.stop()
    logs = QueryLogs(ReadOptions({"path": url_of(made), "subscribe": "c"}))
    [(key, (first, end))] = logs.bounds().items()
    assert (first, end) == (0, 1_000_050)
    tasks = [pickle.loads(pickle.dumps(task)) for task in logs.tasks([OffsetSpan(key, first, end)])]
    found = [found for task in tasks for span in task.spans for found in task.open().read("c", 0, span.start, span.end)]
    assert b"".join(text for _, text in found) == b"".join(made.sent)
    offsets = [offset + n for offset, text in found for n in range(text.count(b"\n"))]
    assert offsets == [*range(50), *range(1_000_000, 1_000_050)]
    for seq in (1, 50, 51, 100):
        assert Lineage(url_of(made)).offset_of_seq("c", 0, seq) == offsets[seq - 1]


def test_of_several_lineages_the_path_names_one(made, tmp_path):
    other = cold_broker(tmp_path / "other")
    shutil.copytree(f"{other.store.root}/{other.copier.lineage}", f"{made.store.root}/{other.copier.lineage}")
    with pytest.raises(ConfigError, match=r"has several lineages: .*last commit at.*choose one, as in path=file://"):
        Lineage(url_of(made)).identity()
    chosen = Lineage(f"{url_of(made)}/{other.copier.lineage}")
    assert chosen.identity() == other.copier.lineage and stored(chosen, 0, 9) == b"".join(other.sent[:9])


def test_what_is_no_copy_is_refused_by_name(made, tmp_path):
    (tmp_path / "empty").mkdir()
    for url, what in [
        (f"file://{tmp_path}/empty", "the store has no copy of a broker"),
        (f"{url_of(made)}/{'0' * 32}", f"the store has no lineage {'0' * 32}"),
    ]:
        with pytest.raises(ConfigError, match=f"path=.*{what}"):
            Lineage(url).identity()
    with pytest.raises(RetryError, match=r"path=.*the store does not answer, or refuses"):
        Lineage("file:///nowhere/at/all").identity()
    path = f"{made.store.root}/{made.copier.lineage}/commits/{2:020d}"
    with open(path, "ab") as file:
        file.write(b"rubbish\n")
    with pytest.raises(CorruptError, match=r"path=.*its commits are damaged: commit 2: is cut or altered"):
        Lineage(url_of(made)).identity()


def test_options_name_a_store_or_a_directory(made, tmp_path):
    def options(**given):
        return ReadOptions({"subscribe": "t", **given})

    url = url_of(made)
    assert options(path=f"{url}/").paths == [url] and options(path=f"file://{made.data}").paths == [made.data]
    assert options(path="s3://bucket/kmq").paths == ["s3://bucket/kmq"]
    assert options(path=made.data, tier=url).tier == url and options(path=made.data, tier="broker").tier == ""
    for given, what in [
        ({"path": url, "tier": url}, "tier: `path` is a store itself"),
        ({"path": made.data, "tier": "/mnt"}, "tier='/mnt': must be broker, or the URL of a store without a login"),
        ({"path": "hdfs://a/b"}, "is another file system"),
    ]:
        with pytest.raises(ConfigError, match=what):
            options(**given)
    with pytest.raises(ConfigError, match=r"path=.*spark.read reads it; a stream needs"):
        options(path=url).check_stream()
    with pytest.raises(ConfigError, match="a copy has records, and no accounts"):
        Lineage(url).ledger()
    logs = QueryLogs(options(path=url, subscribe="nope"))
    with pytest.raises(ConfigError, match=r"topic 'nope' does not exist at .*subscribe __append"):
        logs.starting(logs.bounds(), -2)


@pytest.mark.parametrize("url", ["s3://AKIA:SECRET@bucket/kmq", "s3://AKIA:SEC/RET@bucket"])
def test_the_url_of_a_store_has_no_login_because_columns_plans_and_errors_show_it(url):
    for given in ({"path": url}, {"kmq.bootstrap.servers": "a:8082", "tier": url}):
        with pytest.raises(ConfigError, match=r"must be .*a store without a login") as refused:
            ReadOptions({"subscribe": "t", **given})
        assert "RET" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"KMQ_TIER=… .*must have no login") as refused:
        load({"KMQ_TIER": url}, "none.toml")
    assert "RET" not in str(refused.value)


def test_sql_takes_the_store_from_the_setting_and_a_copy_as_a_path(made, monkeypatch, capsys):
    url = url_of(made)
    monkeypatch.setenv("KMQ_TIER", url)
    monkeypatch.setenv("KMQ_DATA", made.data)
    assert From().options() == {"path": made.data, "tier": url}
    assert From(path=url).options() == {"path": url}
    for where, count in [(From(), COUNT), (From(path=url), made.rows()[-1][1])]:
        with duckdb_engine.opened(where.options(), {}) as engine:
            shell.Shell(engine, where.options(), shell.as_csv).run("select count(*), sum(seq) from t where seq > 9")
        assert capsys.readouterr().out.splitlines()[1] == f"{count - 9},{count * (count + 1) // 2 - 45}"


def test_the_library_of_a_bucket_is_not_imported_before_a_task_needs_it():
    code = (
        "import sys, kmq.spark.format, kmq.spark.source.stream_reader, kmq.spark.source.store;"
        "assert not {'obstore', 'kmq.tier.store'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_object_is_in_memory_once_and_is_unpacked_without_copies_of_its_rest(tmp_path):
    lines = [b"%d|" % n + os.urandom(500).replace(b"\n", b" ") + b"\n" for n in range(32_000)]  # as large when packed
    packed = objects.pack(b"".join(lines[at : at + 2000]) for at in range(0, len(lines), 2000))
    (tmp_path / "object").write_bytes(packed.content)
    size = len(packed.content)
    row = rows.TierRow(1, 0, len(lines), (1, 9), (1, 9), packed.nbytes, size, packed.sha256, 0, "object")
    del packed
    tracemalloc.start()
    try:
        assert sum(len(found.newlines) for found in StoreReader(f"file://{tmp_path}").lines(row, 0, len(lines))) == len(
            lines
        )
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size + (6 << 20)
    finally:
        tracemalloc.stop()
