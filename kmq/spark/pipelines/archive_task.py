"""A task of the archive: its range of records → Parquet files, in the Python worker. No record enters the JVM.

    spark.dataSource.register(source_of(job, cores))
    spark.readStream.format(FORMAT).options(…).load()    # one row for each task: see RESULT

A task reads its range in blocks, as format("kmq") does. Payloads become columns by pyarrow (json_columns.py). Records
whose payloads are not surely good are written as they are; the driver gives them to the judge (payloads.py).

Owner       The task owns <staging directory>/<part>/; `part` is a new name for each attempt:
                topic=a/date=…/hour=…/rows-000.parquet   rows of the table, if the job has a layout of directories
                rows-000.parquet                         else: rows that the driver reads again
                _unsure/rows-000.parquet                 records for the judge, with the columns READ
Invariant   A row of the result is always yielded after its files are complete and synced. Every record of the range is
            in one of the files, once.
Crash       Nothing reads the files of an attempt without a row: a task that failed, was killed, or ran twice. A task
            that outlives its driver finds its directory gone, because only the driver makes it.
Memory      One block, and at most GROUP_BYTES of rows of a file (parquet_files.py).
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext, cloudpickle
from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmq.spark.pipelines import json_columns
from kmq.spark.pipelines.json_columns import JsonColumns
from kmq.spark.source import columns
from kmq.spark.source.batches import Blocks
from kmq.spark.source.columns import Block, Numbers, Where
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.stream_reader import StreamReader
from kmq.spark.tables.parquet_files import ParquetFiles

FORMAT = "kmq-archive"
STAGING = "kmq.staging"  # the local property of Spark that names the directory for parts
UNSURE = "_unsure"
RESULT = "part string, rows bigint, unsure bigint, bytes bigint"  # bytes: of the lines read
DIRECT = frozenset(("broker", "topic", "partition", "date", "hour"))  # columns of which a task makes directories
_HOUR_US, _DAY_US = 3_600_000_000, 86_400_000_000
# What Spark writes as %XX in names of directories.
_ESCAPED = frozenset([*map(chr, range(1, 32)), *"\"#%'*/:=?\\\x7f{[]^"])


class ArchiveJob(NamedTuple):
    """The parameters that all tasks of an archive share."""

    json: JsonColumns | None  # None: payloads are stored as text
    names: Sequence[str]  # of the columns for its fields
    read: StructType  # the columns READ
    stored: StructType  # all columns of the rows
    partition_by: Sequence[str] | None  # columns that name directories; None: the driver reads the rows again
    keeps_partitions: bool  # the files have these columns too
    host: str  # of records that do not name a host
    pod: str | None


def source_of(job: ArchiveJob, cores: int) -> type[DataSource]:
    """Return the source for a job. A class made in a function is pickled by value, with its variables.

    The job is pickled separately: the planner of a stream is a new process each time, and need not unpickle the job.
    """
    read, task = job.read, cloudpickle.dumps(partial(write_part, job))  # type: ignore[no-untyped-call]

    class ArchiveSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return FORMAT

        def schema(self) -> str:
            return RESULT

        def streamReader(self, schema: StructType) -> StreamReader:
            options = ReadOptions(self.options)
            options.check_stream()
            options.cores = cores
            return StreamReader(read, options, task)

    return ArchiveSource


def write_part(job: ArchiveJob, blocks: Blocks) -> Iterator[pa.RecordBatch]:
    """Write the records of a task; yield one row of RESULT."""
    pa.set_cpu_count(1)  # there are as many tasks as cores
    part = uuid4().hex[:12]
    root = f"{TaskContext.get().getLocalProperty(STAGING)}/{part}"  # type: ignore[union-attr]
    os.mkdir(root)
    layout = list(job.partition_by or ())
    dropped = [] if job.keeps_partitions else layout
    schema = pa.schema([field for field in _arrow(job.stored) if field.name not in dropped])
    rows, unsure = ParquetFiles(schema), ParquetFiles(_arrow(job.read))
    nbytes = 0
    for block, where in blocks:
        nbytes += len(block.lines)
        good, hours, are_sure = _rows(job, block, where, schema)
        edges = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), len(hours)]
        for low, high in pairwise(edges) if len(hours) else ():
            rows.add(good.slice(low, high - low), "/".join([root, *_directories(layout, where, int(hours[low]))]))
        if not are_sure.all():
            unsure.add(_batch(block, where, job.read).filter(pa.array(~are_sure)), f"{root}/{UNSURE}")
    counts = [pa.array([count], pa.int64()) for count in (rows.close(), unsure.close(), nbytes)]
    yield pa.RecordBatch.from_arrays([pa.array([part]), *counts], names=["part", "rows", "unsure", "bytes"])


def _arrow(schema: StructType) -> pa.Schema:
    return to_arrow_schema(schema, timezone="UTC")


def _batch(block: Block, where: Where, schema: StructType) -> pa.RecordBatch:
    selection = columns.select((field.name, field.dataType.simpleString()) for field in schema)
    return columns.batch(block, where, *selection)


# --- rows ------------------------------------------------------------------------------------------------------------


def _rows(job: ArchiveJob, block: Block, where: Where, schema: pa.Schema) -> tuple[pa.RecordBatch, Numbers, Numbers]:
    """Return the rows of the sure records, the hour of each since the epoch, and a mask of the sure records."""
    found, are_sure = _payloads(job, block)
    wanted = set(schema.names).difference(job.names, ["value"]) | {"recv_ts"}
    rows = _batch(block, where, StructType([field for field in job.read if field.name in wanted]))
    for name, array in _places(job, block, where).items():
        rows = rows.append_column(name, array)
    if not are_sure.all():
        rows = rows.filter(pa.array(are_sure))
    arrays = dict(zip(rows.schema.names, rows.columns, strict=True)) | found
    micros = arrays["recv_ts"].cast(pa.int64()).to_numpy()
    hours: Numbers = micros // _HOUR_US
    arrays["date"] = pa.array((micros // _DAY_US).astype(np.int32)).cast(pa.date32())
    arrays["hour"] = pa.array((hours % 24).astype(np.int32))
    nothing = pa.nulls(len(hours))
    stored = [arrays.get(field.name, nothing).cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(stored, schema=schema), hours, are_sure


def _payloads(job: ArchiveJob, block: Block) -> tuple[dict[str, pa.Array], Numbers]:
    """Return the columns made of the sure payloads, and a mask of them."""
    if job.json is not None:
        batch, are_sure = json_columns.parse(job.json, block.value_lines())
        return dict(zip(job.names, batch.columns, strict=False)), are_sure
    payloads, are_sure = block.value, np.ones(block.count, bool)
    if block.ascii and not block.decoded:
        return {"value_text": payloads.view(pa.string())}, are_sure
    nothing, is_text = pa.scalar(None, pa.binary()), pa.array(~json_columns.not_utf8(payloads))
    texts = pc.if_else(is_text, payloads, nothing).view(pa.string())
    return {"value_text": texts, "value": pc.if_else(is_text, nothing, payloads)}, are_sure


def _places(job: ArchiveJob, block: Block, where: Where) -> dict[str, pa.Array]:
    """Return host and pod of each record, like archive.enrich."""
    remote = re.search(r"^([^/]+):\d+$", where.broker)
    host, pod = (remote[1], None) if remote else (job.host, job.pod)
    return {"host": _named(block, "host", host), "pod": _named(block, "pod", pod)}


def _directories(layout: Sequence[str], where: Where, hour: int) -> list[str]:
    """Return the names of the directories for these rows."""
    moment = time.gmtime(hour * 3600)
    values = {
        **{"broker": where.broker, "topic": where.topic, "partition": str(where.partition)},
        **{"date": time.strftime("%Y-%m-%d", moment), "hour": str(moment.tm_hour)},
    }
    return [f"{name}={escaped(values[name])}" for name in layout]


def _named(block: Block, header: str, default: str | None) -> pa.Array:
    """Return a header of each record, the first of its name; `default` without such a header."""
    found = pa.repeat(pa.scalar(default, pa.string()), block.count)
    if block.lines.find(b";") < 0 or block.lines.find(f";{header}=".encode()) < 0:
        return found
    headers = block.id[1]
    at = np.flatnonzero(pc.equal(headers.keys, header).to_numpy(zero_copy_only=False))
    owners, first = np.unique(np.searchsorted(headers.offsets.to_numpy(), at, side="right") - 1, return_index=True)
    chosen = np.zeros(block.count, bool)
    chosen[owners] = True
    named = pc.replace_with_mask(found, pa.array(chosen), headers.items.take(pa.array(at[first])))
    return named if default is None else named.fill_null(default)  # for a null header, like coalesce


def escaped(text: str) -> str:
    """Escape a value of a partition as Spark does in the name of a directory."""
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in text)
