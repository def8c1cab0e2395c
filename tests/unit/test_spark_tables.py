"""Tables without Spark: a batch is staged by pyarrow, and the writer dies at each thing that it does to a file."""

import contextlib
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from deltalake import DeltaTable
from made_tables import FORMATS, QUERY, Killed, add, count_steps, expected, read, stage, summaries
from pyiceberg.utils.config import Config

from kmq.errors import BusyError, ConfigError
from kmq.links import ownership
from kmq.spark.tables import base, iceberg, open_table, parquet_files, stores


@pytest.mark.sampled(1)
@pytest.mark.parametrize("half", [0, 1])  # every second step
@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_that_dies_at_any_step_leaves_each_row_once(tmp_path, monkeypatch, format, half):
    first, second = range(10), range(10, 20)

    path, template = str(tmp_path / "t"), str(tmp_path / "template")
    with open_table(path, format, ["topic"]) as table:
        add(table, 0, first)
    shutil.copytree(path, template)

    def attempt(stop_at=None):
        shutil.rmtree(path)
        shutil.copytree(template, path)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            steps = count_steps(patch, stop_at)
            with open_table(path, format, ["topic"]) as table:
                add(table, 1, second)
                if stop_at:
                    raise Killed
        return steps

    steps = attempt()
    assert read(path, format) == expected(range(20)) and len(steps) > 15
    begin = 1 if format == "parquet" else steps.index("replace_file")  # what is done before the seal is alike
    for number in range(begin + half, len(steps) + 2, 2):
        attempt(number)
        seen = read(path, format)  # before anybody has repaired anything
        assert len(set(seen)) == len(seen) and set(expected(first)) <= set(seen) <= set(expected(range(20)))
        with open_table(path, format, ["topic"]) as table:
            add(table, 1, second)
            add(table, 2, [20])
        assert read(path, format) == expected(range(21)), f"died before step {number} of {steps}"
        if format == "delta":  # made, and an entry for each batch: none was written again
            assert DeltaTable(path).version() == 3
        if format == "iceberg":
            assert summaries(path, f"{path}/.kmq") == [(QUERY, "0"), (QUERY, "1"), (QUERY, "2")]


@pytest.mark.parametrize("format", FORMATS)
def test_a_batch_that_comes_again_is_skipped_only_with_the_same_offsets(tmp_path, format):
    path = str(tmp_path / "t")
    with open_table(path, format, ["topic"]) as table:
        for batch in range(4):
            assert add(table, batch, range(10 * batch, 10 * batch + 10))
    with open_table(path, format, ["topic"]) as table:
        for batch in (3, 1):
            assert not add(table, batch, range(10 * batch, 10 * batch + 10))
        for batch in (3, 1):  # one batch back too: its number is the last one's
            told = rf"batch {batch} of the checkpoint is not in .*orders/0 99 now, {10 * batch + 10} in the table; was"
            with pytest.raises(ConfigError, match=told):
                add(table, batch, range(50, 99))
        assert add(table, 4, range(40, 50))
    assert read(path, format) == expected(range(50))


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_of_a_release_that_kept_no_offsets_goes_on_by_number(tmp_path, format):
    path = str(tmp_path / "t")
    with open_table(path, format, ["topic"]) as table:
        for batch in range(3):
            table.stream.bind(QUERY, batch)
            stage(table, [batch])
            table.commit(batch)
        assert not add(table, 2, [2]), "the last one, whose end Spark has not seen"
        with pytest.raises(ConfigError, match="which took a batch of this number long ago, and is at batch 2"):
            add(table, 1, [77])
        assert add(table, 3, [3])
        assert not add(table, 3, [3])
    assert read(path, format) == expected(range(4))


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_a_state_that_is_older_than_its_table_adds_no_batch_of_a_known_number(tmp_path, monkeypatch, format):
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", f"sqlite:///{tmp_path}/prod.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "sql")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    where = (str(tmp_path / "t"), format, ["topic"], "prod.sales.orders" if format == "iceberg" else "")
    with open_table(*where) as table:
        add(table, 0, [0])
    state, copy = tmp_path / "t/.kmq", tmp_path / "copy"
    shutil.copytree(state, copy)
    with open_table(*where) as table:
        add(table, 1, [1])
        add(table, 2, [2])
    shutil.rmtree(state)
    copy.rename(state)
    with open_table(*where) as table:
        for batch in (1, 2):
            with pytest.raises(ConfigError, match=f"batch {batch} of the checkpoint is not in the table"):
                add(table, batch, [77])
        assert not add(table, 2, [2]) and add(table, 3, [3])


def test_the_offsets_of_the_last_batches_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "KEEP", 2)
    with open_table(str(tmp_path / "t"), "parquet", ["topic"]) as table:
        for batch in range(4):
            add(table, batch, [batch])
        assert sorted(os.listdir(f"{table.state}/offsets")) == ["0", "2", "3"], "0 says where the table begins"


@pytest.mark.parametrize("format", FORMATS)
def test_a_batch_without_rows_counts_as_added(tmp_path, format):
    path = str(tmp_path / "t")
    with open_table(path, format, ["topic"]) as table:
        add(table, 0, [1, 2])
        add(table, 1, [])
        assert table.has(1) and not table.has(2)
    assert read(path, format) == expected([1, 2])


def test_delta_counts_rows_and_values_of_partitions_by_its_log_alone(tmp_path):
    path = str(tmp_path / "t")
    with open_table(path, "delta", ["topic"]) as table:
        add(table, 0, range(10))
    actions = pa.table(DeltaTable(path).get_add_actions(flatten=True)).to_pylist()
    assert sorted((action["partition.topic"], action["num_records"]) for action in actions) == [("a.b", 5), ("x%y", 5)]
    assert DeltaTable(path).transaction_version(QUERY) == 0


def test_a_table_has_one_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "OWNER_WAIT_S", 0.1)  # how long the second writer waits for the first to go
    with open_table(str(tmp_path / "t"), "parquet", []), pytest.raises(BusyError, match="is held by pid="):
        open_table(str(tmp_path / "t"), "parquet", []).__enter__()


def test_another_checkpoint_is_refused_and_so_is_an_old_one_for_a_new_table(tmp_path):
    with open_table(str(tmp_path / "t"), "parquet", ["topic"]) as table:
        add(table, 0, range(3))
        with pytest.raises(ConfigError, match="of another checkpoint"):
            table.stream.bind("other", 0)
    with (
        open_table(str(tmp_path / "new"), "parquet", []) as table,
        pytest.raises(ConfigError, match="is new, but the checkpoint is not"),
    ):
        table.stream.bind(QUERY, 7)


@pytest.mark.parametrize(("first", "second"), [("parquet", "delta"), ("delta", "iceberg"), ("iceberg", "parquet")])
def test_a_table_of_the_other_format_is_refused(tmp_path, first, second):
    with open_table(str(tmp_path / "t"), first, ["topic"]) as table:
        add(table, 0, range(3))
    with pytest.raises(ConfigError, match=f"holds a {first} table, not {second}"):
        open_table(str(tmp_path / "t"), second, ["topic"]).__enter__()
    with open_table(str(tmp_path / "t"), first, ["topic"]) as table:  # whoever was refused let go of it
        assert table.has(0)


@pytest.mark.parametrize(
    ("to", "format", "what"),
    [("hdfs://x/y", "parquet", "--to"), ("s3://x/y", "delta", "--checkpoint"), ("/x", "orc", "--format")],
)
def test_what_cannot_be_a_table_is_named(to, format, what):
    with pytest.raises(ConfigError, match=what):
        open_table(to, format, [])


def test_directories_change_places_at_once(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    stores.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    assert stores.can_exchange(str(tmp_path)) and sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(FileNotFoundError, match="cannot change places"):
        stores.exchange(str(tmp_path / "a"), str(tmp_path / "none"))


def test_an_iceberg_table_is_in_the_catalog_that_pyiceberg_knows_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", f"sqlite:///{tmp_path}/prod.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "sql")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # what it reads when it is imported
    for batch in range(2):
        with open_table(str(tmp_path / "t"), "iceberg", ["topic"], "prod.sales.orders") as table:
            add(table, batch, range(10 * batch, 10 * batch + 10))
    with pyiceberg.catalog.load_catalog("prod") as catalog:
        found = catalog.load_table("sales.orders")
        assert found.scan().to_arrow().num_rows == 20
        assert found.properties[f"kmq.{QUERY}.batch"] == "1"
        assert found.inspect.partitions().num_rows == 2 and found.scan("topic = 'x%y'").to_arrow().num_rows == 10
    elsewhere = open_table(str(tmp_path / "other"), "iceberg", ["topic"], "prod.sales.orders")
    with elsewhere, pytest.raises(ConfigError, match=f"its table sales.orders is at {tmp_path}/t; use that as --to"):
        elsewhere.known_columns()
    unknown = open_table(str(tmp_path / "other"), "iceberg", ["topic"], "none.sales.orders")
    with unknown, pytest.raises(ConfigError, match=r"^--catalog none: .*describe it in ~/.pyiceberg.yaml"):
        unknown.known_columns()


def test_an_iceberg_batch_is_known_after_its_snapshot_has_expired(tmp_path, monkeypatch):
    monkeypatch.setattr(iceberg, "KEEP_SNAPSHOTS", 2)
    monkeypatch.setattr(iceberg, "EXPIRE", 1)
    path = str(tmp_path / "t")
    with open_table(path, "iceberg", ["topic"]) as table:
        for batch in range(5):
            add(table, batch, [batch])
            table.merge(None)
        assert summaries(path, table.state) == [(QUERY, "3"), (QUERY, "4")]
        os.unlink(f"{table.state}/batch")
        assert table.has(4) and table.has(2) and not table.has(5)
    assert read(path, "iceberg") == expected(range(5))


@pytest.mark.parametrize("module", ["pyiceberg", "sqlalchemy"])
def test_how_to_install_iceberg_is_said_where_it_is_not(tmp_path, monkeypatch, module):
    monkeypatch.setattr(iceberg, "find_spec", lambda name: name != module)
    with pytest.raises(ConfigError, match=r"--format iceberg needs pyiceberg: pip install .*\[iceberg\]'"):
        open_table(str(tmp_path / "t"), "iceberg", [])


class Speculating:
    """Spark with speculation: when a task has ended, another attempt of it is killed in the middle."""

    def __init__(self, monkeypatch):
        self.sparkContext, self._monkeypatch = self, monkeypatch

    def parallelize(self, shares, count):
        self._shares = shares
        return self

    def flatMap(self, task):
        self._found = [each for share in self._shares for each in self._twice(task, share)]
        return self

    def collect(self):
        return self._found

    def _twice(self, task, share):
        found, real, added = task(share), parquet_files.ParquetFiles.add, []

        def dying(files, *rows):
            if added:
                raise Killed
            added.append(real(files, *rows))

        with self._monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(parquet_files.ParquetFiles, "add", dying)
            task(share)
        assert added, "it had begun its file"
        return found


def test_a_merge_takes_no_file_of_an_attempt_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "GROUP_BYTES", 1)
    path = str(tmp_path / "t")
    with open_table(path, "parquet", ["topic"]) as table:
        for batch in range(base.MERGE_FILES):
            add(table, batch, [2 * batch, 2 * batch + 1])  # of two topics
        assert table.merge(Speculating(monkeypatch), all=True) == 2 * base.MERGE_FILES
        assert not os.path.exists(table.merging)
    assert read(path, "parquet") == expected(range(2 * base.MERGE_FILES))
    assert len(list((tmp_path / "t").glob("topic=*/*.parquet"))) == 2


def test_a_merge_holds_few_large_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "GROUP_BYTES", 1 << 20)
    source, held = str(tmp_path / "large.parquet"), []
    pq.write_table(pa.table({"value": [os.urandom(100_000) for _ in range(100)]}), source)
    real = parquet_files.ParquetFiles.add

    def watched(files, rows, directory):
        held.append(rows.nbytes)
        real(files, rows, directory)

    monkeypatch.setattr(parquet_files.ParquetFiles, "add", watched)
    parquet_files.merge([source], str(tmp_path / "merged"))
    assert max(held) <= 1 << 20 and sum(held) > 100 * 100_000, held
