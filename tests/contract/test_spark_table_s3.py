"""Tables in an object store: moto's S3 server, a process of its own; the writer dies at each thing that it does."""

import contextlib
import shutil

import pyarrow.fs
import pytest
import s3_server
from made_tables import FORMATS, QUERY, S3_STEPS, Killed, add, count_steps, expected, read, summaries

from kmq.errors import ConfigError, RetryError
from kmq.spark.tables import open_table

BUCKET = "lake"
FIRST, SECOND = range(10), range(10, 20)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """An S3 server with a bucket; the environment says where it is."""
    with s3_server.up(tmp_path_factory.mktemp("s3") / "log", BUCKET) as store:
        yield store


def opened(to, format, state):
    return open_table(to, format, ["topic"], checkpoint=str(state))


def attempt(to, format, state, monkeypatch, stop_at=None):
    """A batch, and a second one whose writer dies before a step; returns the steps of the second."""
    shutil.rmtree(state, ignore_errors=True)
    with opened(to, format, state) as table:
        add(table, 0, FIRST)
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        steps = count_steps(patch, stop_at, S3_STEPS)
        with opened(to, format, state) as table:
            add(table, 1, SECOND)
            if stop_at:
                raise Killed
    return steps


def died_before(to, format, state, monkeypatch, number):
    attempt(to, format, state, monkeypatch, number)
    seen = read(to, format)  # before anybody has repaired anything
    assert len(set(seen)) == len(seen) and set(expected(FIRST)) <= set(seen) <= set(expected(range(20)))
    with opened(to, format, state) as table:
        add(table, 1, SECOND)
        add(table, 2, [20])
    assert read(to, format) == expected(range(21))
    if format == "iceberg":
        assert summaries(to, f"{state}/.kmq") == [(QUERY, "0"), (QUERY, "1"), (QUERY, "2")]


@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_to_s3_that_dies_around_its_commit_leaves_each_row_once(s3, tmp_path, monkeypatch, format):
    to, state = f"s3://{BUCKET}/{format}", tmp_path / "ckpt"
    steps = attempt(f"{to}/whole", format, state, monkeypatch)
    assert read(f"{to}/whole", format) == expected(range(20))
    commit = next((name for name in steps if name in ("create_write_transaction", "commit_table")), "_store")
    at = steps.index(commit) + 1
    for number in (at, at + 1):  # of plain files, where nothing commits: before each of the two
        died_before(f"{to}/t{number}", format, state, monkeypatch, number)


@pytest.mark.soak
@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_to_s3_that_dies_at_any_step_leaves_each_row_once(s3, tmp_path, monkeypatch, format):
    to, state = f"s3://{BUCKET}/soak/{format}", tmp_path / "ckpt"
    for number in range(1, len(attempt(f"{to}/whole", format, state, monkeypatch)) + 2):
        died_before(f"{to}/t{number}", format, state, monkeypatch, number)


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_checkpoint_restored_from_an_older_copy_changes_nothing_on_s3(s3, tmp_path, format):
    to, state, copy = f"s3://{BUCKET}/{format}/restored", tmp_path / "ckpt", tmp_path / "copy"
    with opened(to, format, state) as table:
        add(table, 0, FIRST)
    shutil.copytree(state, copy)
    with opened(to, format, state) as table:
        add(table, 1, SECOND)
        add(table, 2, [20])
    shutil.rmtree(state)
    copy.rename(state)
    with opened(to, format, state) as table:
        for batch in (1, 2):
            with pytest.raises(ConfigError, match=f"batch {batch} of the checkpoint is not in the table"):
                add(table, batch, [77])
        assert not add(table, 2, [20]) and add(table, 3, [21])
    assert read(to, format) == expected(range(22))


def test_a_table_on_s3_of_another_checkpoint_or_format_is_refused(s3, tmp_path):
    to = f"s3://{BUCKET}/owned"
    with open_table(to, "delta", ["topic"], checkpoint=str(tmp_path / "a")) as table:
        add(table, 0, range(3))
    other, refused = open_table(to, "delta", ["topic"], checkpoint=str(tmp_path / "b")), "of another checkpoint; name"
    with other, pytest.raises(ConfigError, match=refused):
        other.stream.bind("other", 0)
    with pytest.raises(ConfigError, match="holds a delta table, not iceberg"):
        open_table(to, "iceberg", ["topic"], checkpoint=str(tmp_path / "c")).__enter__()


def test_a_store_that_cannot_be_used_is_one_line(s3, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^--to s3://none/t: .*NO_SUCH_BUCKET.*; see AWS_ACCESS_KEY_ID"):
        open_table("s3://none/t", "parquet", [], checkpoint=str(tmp_path)).__enter__()
    with pytest.raises(ConfigError, match="must be s3://bucket/prefix"):
        open_table("s3://bucket", "parquet", [], checkpoint=str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RetryError, match="nothing is lost"):
        open_table(f"s3://{BUCKET}/t", "parquet", [], checkpoint=str(tmp_path)).__enter__()


def test_keys_of_a_store_are_written_nowhere(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-indeed")
    for format in FORMATS:
        with open_table(f"s3://{BUCKET}/keys-{format}", format, ["topic"], checkpoint=f"{tmp_path}/{format}") as table:
            add(table, 0, range(3))
    found = [each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()]
    for each in s3.get_file_info(pyarrow.fs.FileSelector(BUCKET, recursive=True)):
        if each.is_file and "/keys-" in each.path:
            found.append(s3.open_input_file(each.path).read())
    assert len(found) > 10 and not any(b"very-secret" in content for content in found)
