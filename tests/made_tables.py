"""Tables filled without Spark: a batch is staged by pyarrow; and a writer that dies before a step."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable

from kmq.spark.tables import Iceberg, Table, base, formats, stores, synced

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string()), ("topic", pa.string())])
QUERY = "b5c2ae0e-0000-0000-0000-000000000000"
# What a table does to files and to what names them: (owner, name). To die behind one is to die before the next.
STEPS: list[tuple[Any, str]] = [
    (base, "replace_file"),
    (base, "replace_file"),
    (base, "sync_directory"),
    (base, "sync_file"),
]
STEPS += [(stores, "sync_directory")]
STEPS += [(stores, "sync_file"), (formats, "sync_directory"), (os, "rename"), (os, "makedirs"), (shutil, "rmtree")]
STEPS += [(stores, "replace_file"), (stores, "sync_directory"), (synced, "sync_directory")]
STEPS += [(DeltaTable, "create_write_transaction"), (SqlCatalog, "commit_table")]
S3_STEPS = [
    *STEPS[-2:],
    (stores.S3, "_store"),
    (stores.S3, "replace"),
    (base, "replace_file"),
    (base, "replace_file"),
    (shutil, "rmtree"),
]
FORMATS = ["parquet", "delta", "iceberg"]


class Killed(BaseException):
    """In place of SIGKILL: nothing catches it."""


def stage(table: Table, numbers: Iterable[int]) -> None:
    """What Spark would write: a part for each topic, with a file in directories; and what else is left there."""
    parts = table.staging.begin_parts()
    os.makedirs(f"{parts}/of-a-task-that-failed/topic=a.b")
    pq.write_table(pa.table({"n": [-1], "text": ["twice"]}), f"{parts}/of-a-task-that-failed/topic=a.b/rows.parquet")
    for topic in ("a.b", "x%y"):
        copy = "of__" if isinstance(table, Iceberg) else ""
        directory = f"{parts}/{topic[0]}/{copy}topic={topic.replace('%', '%25')}"
        os.makedirs(directory)
        mine = [n for n in numbers if n % 2 == (topic == "a.b")]
        rows = pa.table({"n": mine, "text": [f"t{n}" for n in mine], "topic": [topic] * len(mine)}, schema=SCHEMA)
        if not copy:
            rows = rows.drop_columns("topic")
        pq.write_table(rows, f"{directory}/part-00000.zstd.parquet")
        open(f"{parts}/{topic[0]}/_SUCCESS", "w").close()
        table.staging.accept(topic[0])
    if table.known_columns() is None:
        table.create(SCHEMA)


def ends(numbers: Iterable[int]) -> list[str]:
    """Where a batch with these rows ends, as a stream's checkpoint says it."""
    return [json.dumps({"data": {"__id": "d", "orders": {"0": max(numbers, default=-1) + 1, "1": 7}}})]


def add(table: Table, batch: int, numbers: Iterable[int], offsets: list[str] | None = None) -> bool:
    """What a pipeline's foreachBatch does; False: the table had the batch. `offsets`: default: made of the rows."""
    table.stream.bind(QUERY, batch)
    offsets = ends(numbers) if offsets is None else offsets
    if table.has(batch, offsets):
        return False
    stage(table, numbers)
    table.commit(batch, offsets)
    return True


def read(path: str, format: str) -> list[tuple[int, str, str]]:
    """(n, text, topic) of all rows, as others read them."""
    on_s3 = path.startswith("s3://")
    if format == "delta":
        found = DeltaTable(path, storage_options={"AWS_ALLOW_HTTP": "true"}).to_pyarrow_table()
    elif format == "iceberg":
        at = {"s3.endpoint": os.environ["AWS_ENDPOINT_URL"]} if on_s3 else {}
        found = StaticTable.from_metadata(path, at).scan().to_arrow()
    elif on_s3:
        store = pa.fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"])
        found = ds.dataset(path.removeprefix("s3://"), partitioning="hive", filesystem=store).to_table()
    else:
        found = ds.dataset(path, partitioning="hive").to_table()
    return sorted((row["n"], row["text"], row["topic"]) for row in found.select(["n", "text", "topic"]).to_pylist())


def summaries(path: str, state: str) -> list[tuple[str, str]]:
    """(query, batch) of each snapshot of an Iceberg table."""
    at: dict[str, Any] = {"s3.endpoint": os.environ.get("AWS_ENDPOINT_URL")}
    with SqlCatalog("kmq", uri=f"sqlite:///{state}/catalog.db", **at) as catalog:
        table = catalog.load_table(f"kmq.{os.path.basename(path)}")
        found: list[Any] = [snapshot.summary or {} for snapshot in table.snapshots()]
        return [(summary["kmq.query"], summary["kmq.batch"]) for summary in found]


def expected(numbers: Iterable[int]) -> list[tuple[int, str, str]]:
    return sorted((n, f"t{n}", "a.b" if n % 2 else "x%y") for n in numbers)


def count_steps(
    monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None, of: Sequence[tuple[Any, str]] = STEPS
) -> list[str]:
    """Count the steps; die before number `stop_at`."""
    steps: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            steps.append(name)
            if len(steps) == stop_at:
                raise Killed
            return real(*args, **kwargs)

        return step

    for owner, name in of:
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    return steps
