"""Tables without Spark: a batch is staged by pyarrow, and the writer dies at each thing that it does to a file."""

import shutil

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema

from kmq.errors import BusyError, ConfigError
from kmq.spark import tables
from kmq.spark.tables import open_table

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string()), ("topic", pa.string())])
QUERY = "b5c2ae0e-0000-0000-0000-000000000000"
# What it does to files, in the module's namespace or of a module that it uses.
STEPS = ["replace_file", "sync_directory", "_sync", "os.rename", "os.makedirs", "shutil.rmtree"]


class Killed(BaseException):
    """In place of SIGKILL: nothing catches it."""


def stage(table, numbers):
    """What Spark would write: a file for each topic, in directories, and what else it leaves there."""
    table._attempt = f"{table._making}/attempt"
    for topic in ("a.b", "x%y"):
        directory = f"{table._attempt}/topic={topic.replace('%', '%25')}"
        tables.os.makedirs(directory)
        mine = [n for n in numbers if n % 2 == (topic == "a.b")]
        rows = pa.table({"n": mine, "text": [f"t{n}" for n in mine]}, schema=SCHEMA.remove(2))
        pq.write_table(rows, f"{directory}/part-0000{topic[0]}.zstd.parquet")
    open(f"{table._attempt}/_SUCCESS", "w").close()
    if isinstance(table, tables.Delta) and not tables.os.path.exists(f"{table.path}/_delta_log"):
        DeltaTable.create(table.path, Schema.from_arrow(SCHEMA), partition_by=["topic"])


def add(table, batch, numbers):
    """What a pipeline's foreachBatch does."""
    table.bind(QUERY, batch)
    if not table.has(batch):
        stage(table, numbers)
        table.commit(batch)


def read(path, format):
    """(n, text, topic) of all rows, as others read them."""
    if format == "delta":
        found = DeltaTable(path).to_pyarrow_table()
    else:
        found = ds.dataset(path, partitioning="hive").to_table()
    return sorted((row["n"], row["text"], row["topic"]) for row in found.select(["n", "text", "topic"]).to_pylist())


def expected(numbers):
    return sorted((n, f"t{n}", "a.b" if n % 2 else "x%y") for n in numbers)


def count_steps(monkeypatch, stop_at=None, after=False):
    """Count the steps; at number `stop_at` die before or after it."""
    steps = []

    def watched(name, real):
        def step(*args, **kwargs):
            steps.append(name)
            if len(steps) == stop_at and not after:
                raise Killed
            done = real(*args, **kwargs)
            if len(steps) == stop_at:
                raise Killed
            return done

        return step

    for name in STEPS:
        owner, attribute = (
            (tables, name) if "." not in name else (getattr(tables, name.split(".")[0]), name.split(".")[1])
        )
        monkeypatch.setattr(owner, attribute, watched(name, getattr(owner, attribute)))
    return steps


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_writer_that_dies_at_any_step_leaves_each_row_once(tmp_path, monkeypatch, format):
    first, second = range(10), range(10, 20)

    def attempt(name, stop_at=None, after=False):
        path = str(tmp_path / name)
        with open_table(path, format, ["topic"]) as table:
            add(table, 0, first)
        with monkeypatch.context() as patch:
            steps = count_steps(patch, stop_at, after)
            try:
                with open_table(path, format, ["topic"]) as table:
                    add(table, 1, second)
            except Killed:
                pass
        return path, steps

    path, steps = attempt("whole")
    assert read(path, format) == expected(range(20)) and len(steps) > 15
    for number in range(1, len(steps) + 1):
        for after in (False, True):
            path, _ = attempt("broken", number, after)
            seen = read(path, format)  # before anybody has repaired anything
            assert len(set(seen)) == len(seen) and set(expected(first)) <= set(seen) <= set(expected(range(20)))
            with open_table(path, format, ["topic"]) as table:
                add(table, 1, second)
                add(table, 2, [20])
            assert read(path, format) == expected(range(21)), f"died at step {number}: {steps[number - 1]}"
            if format == "delta":  # made, and an entry for each batch: none was written again
                assert DeltaTable(path).version() == 3
            shutil.rmtree(path)


@pytest.mark.parametrize("format", ["parquet", "delta"])
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


def test_a_table_has_one_writer(tmp_path):
    with open_table(str(tmp_path / "t"), "parquet", []), pytest.raises(BusyError, match="is held by pid="):
        open_table(str(tmp_path / "t"), "parquet", []).__enter__()


def test_another_checkpoint_is_refused_and_so_is_an_old_one_for_a_new_table(tmp_path):
    with open_table(str(tmp_path / "t"), "parquet", ["topic"]) as table:
        add(table, 0, range(3))
        with pytest.raises(ConfigError, match="of another checkpoint"):
            table.bind("other", 0)
    with open_table(str(tmp_path / "new"), "parquet", []) as table, pytest.raises(ConfigError, match="in the middle"):
        table.bind(QUERY, 7)


@pytest.mark.parametrize(("first", "second"), [("parquet", "delta"), ("delta", "parquet")])
def test_a_table_of_the_other_format_is_refused(tmp_path, first, second):
    with open_table(str(tmp_path / "t"), first, ["topic"]) as table:
        add(table, 0, range(3))
    with pytest.raises(ConfigError, match="of the other format"):
        open_table(str(tmp_path / "t"), second, ["topic"]).__enter__()
    with open_table(str(tmp_path / "t"), first, ["topic"]) as table:  # whoever was refused let go of it
        assert table.has(0)


@pytest.mark.parametrize(("to", "format", "what"), [("s3://x/y", "parquet", "--to"), ("/x", "orc", "--format")])
def test_what_cannot_be_a_table_is_named(to, format, what):
    with pytest.raises(ConfigError, match=what):
        open_table(to, format, [])


def test_directories_change_places_at_once(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    tables._exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    assert tables._can_exchange(str(tmp_path)) and sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(FileNotFoundError, match="cannot change places"):
        tables._exchange(str(tmp_path / "a"), str(tmp_path / "none"))
