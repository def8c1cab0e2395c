"""What is wrong with --to, --checkpoint and --partition-by is one line, before a stream starts. No Spark: rows are a schema."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kmq.errors import ConfigError
from kmq.spark.tables import FORMATS, open_table, stores

QUERY = "b5c2ae0e-0000-0000-0000-000000000000"
TEXT, NUMBER = StringType(), LongType()
COLUMNS = {"topic": TEXT, "n": NUMBER, "at": TimestampType(), "headers": MapType(TEXT, TEXT), "small": ShortType()}


def schema(kinds):
    """That of rows with these columns."""
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def made(path, format):
    """A table without rows."""
    table = open_table(str(path), format, ["topic"])
    with table:
        table.create(stores.arrow_schema(schema(COLUMNS)))
    return table


@pytest.fixture
def checkpoint(tmp_path):
    """Makes what Spark makes: checkpoint(query, committed batches)."""

    def make(query, batches=()):
        (tmp_path / "ckpt" / "commits").mkdir(parents=True)
        (tmp_path / "ckpt" / "metadata").write_text(json.dumps({"id": query}))
        for number in batches:
            (tmp_path / "ckpt" / "commits" / str(number)).touch()
        return str(tmp_path / "ckpt")

    return make


@pytest.mark.parametrize("below", ["", "/table"])
def test_to_is_refused_when_it_or_what_is_above_it_is_a_file(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"^--to .*: {tmp_path}/file is a file; name a directory$"):
        open_table(f"{tmp_path}/file{below}", "parquet", []).__enter__()


def test_to_is_refused_when_nobody_may_write_there():
    with pytest.raises(ConfigError, match=r"^--to /proc/kmq/\.kmq: cannot be written: "):
        open_table("/proc/kmq", "parquet", []).__enter__()


def test_a_directory_whose_parents_do_not_exist_is_made(tmp_path):
    with open_table(str(tmp_path / "a/b/c"), "parquet", []):
        assert sorted(each.name for each in (tmp_path / "a/b/c/.kmq").iterdir()) == ["owner"]


@pytest.mark.parametrize("format", FORMATS)
def test_columns_that_differ_from_the_table_are_named(tmp_path, format):
    others = {**COLUMNS, "n": TEXT, "headers": MapType(TEXT, IntegerType()), "more": ArrayType(DoubleType())}
    del others["small"]
    with made(tmp_path / "t", format) as table:
        table.expect(schema(COLUMNS))
        with pytest.raises(ConfigError) as told:
            table.expect(schema(others))
    assert f"--to {tmp_path}/t: holds a table of other columns: " in str(told.value)
    assert "the table has no column more; the rows have no column small; n is bigint in the table" in str(told.value)
    assert "headers is map<string,string> in the table, map<string,int> in the rows" in str(told.value)


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_with_other_partitions_is_refused(tmp_path, format):
    made(tmp_path / "t", format)
    with open_table(str(tmp_path / "t"), format, ["topic", "n"]) as table, pytest.raises(ConfigError) as told:
        table.expect(schema(COLUMNS))
    assert "not by topic, n; name another --to" in str(told.value)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["topc"], "no such column; did you mean topic"),
        (["zzz"], "there are topic, n, at"),
        (["topic", "n", "at", "headers", "small"], "at least one must be left"),
    ],
)
def test_a_column_to_partition_by_that_is_not_there_is_named(tmp_path, names, what):
    with open_table(str(tmp_path / "t"), "parquet", names) as table, pytest.raises(ConfigError, match=what):
        table.expect(schema(COLUMNS))


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_files_that_are_no_table_of_ours_are_in_no_other_formats_way(tmp_path, format):
    pa.parquet.write_table(pa.table({"n": [1]}), tmp_path / "theirs.parquet")
    with pytest.raises(ConfigError, match=f"holds a parquet table, not {format}"):
        open_table(str(tmp_path), format, []).__enter__()


@pytest.mark.parametrize(
    ("table_has", "stream_has", "batches", "what"),
    [
        (QUERY, None, (), "is new, but the rows of --to"),
        (QUERY, "other", (0,), "belongs to another query than the rows of --to"),
        ("", "other", (0, 1), "has written batches to another table"),
    ],
)
def test_a_checkpoint_of_other_rows_is_refused(tmp_path, checkpoint, table_has, stream_has, batches, what):
    path = checkpoint(stream_has, batches) if stream_has else str(tmp_path / "ckpt")
    with open_table(str(tmp_path / "t"), "parquet", []) as table:
        if table_has:
            table.stream.bind(table_has, 0)
        with pytest.raises(ConfigError, match=what):
            table.stream.check_checkpoint(path)


@pytest.mark.parametrize(("table_has", "batches"), [(QUERY, (0, 1)), ("", ())])
def test_a_checkpoint_of_these_rows_or_of_none_is_taken(tmp_path, checkpoint, table_has, batches):
    with open_table(str(tmp_path / "t"), "parquet", []) as table:
        if table_has:
            table.stream.bind(table_has, 0)
        table.stream.check_checkpoint(checkpoint(QUERY, batches))


def test_a_checkpoint_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "metadata").write_text("no JSON")
    for path, what in ((tmp_path / "file", "is a file"), ("/proc/x", "cannot be written"), (tmp_path / "odd", "Spark")):
        with (
            open_table(str(tmp_path / "t"), "parquet", []) as table,
            pytest.raises(ConfigError, match=rf"^--checkpoint {path}: .*{what}"),
        ):
            table.stream.check_checkpoint(str(path))
