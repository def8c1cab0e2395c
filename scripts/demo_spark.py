"""The demo's second half: Spark audits what was shipped, and archives it. One session for both.

The archive is read back: each source must have as many rows there as messages in its queue, and the same bytes.
"""

import os
import re
import shutil
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kmq.cli.spark_options import Job, running
from kmq.errors import EXIT_OK, ConfigError
from kmq.spark.sessions import find_java, require_spark


def missing() -> str:
    """Return what Spark lacks here and how to get it; "" if it can run."""
    try:
        require_spark()
        find_java()
    except ConfigError as error:
        return str(error)
    return ""


def analyse(data: str, run_id: str, since: float, sent: dict[str, int], out: Console) -> bool:
    """Audit the directory and archive what arrived since. Return True if both are right. `sent`: messages by source."""
    here = Path(f"{data.rstrip('/')}-demo")
    archived, report = here / "archive", here / "audit.html"
    shutil.rmtree(archived, ignore_errors=True)  # from the previous run
    here.mkdir(parents=True, exist_ok=True)
    out.print("\nspark      starting: audit and archive of what was shipped")
    with running("demo") as job:
        from kmq.spark.audit import audit

        begin = time.monotonic()
        is_good = audit.run(job.spark, {"path": data}, str(report), progress=job.progress) == EXIT_OK
        out.print(f"audit      {'good' if is_good else 'NOT good'}, in {time.monotonic() - begin:.1f} s")
        if sent:
            is_good = archive_new(job, data, archived, run_id, since, sent, out) and is_good
    return is_good


def archive_new(job: Job, data: str, to: Path, run_id: str, since: float, sent: dict[str, int], out: Console) -> bool:
    from pyspark.sql import functions as F

    from kmq.spark.pipelines import archive

    names = "|".join(map(re.escape, sent))  # and topics declared below them, which take some of their messages
    where = {
        "path": data,
        "subscribePattern": rf"(?:{names})(?:\..*)?",
        "startingTimestamp": str(int(since * 1000)),
    }
    begin = time.monotonic()
    done = archive.run(job.spark, where, str(to), schema=archive.NONE, progress=job.progress)
    seconds = time.monotonic() - begin
    ours = job.spark.read.parquet(str(to)).where(F.col("id").startswith(f"{run_id}-"))
    rows = ours.groupBy(F.substring_index("topic", ".", 1).alias("topic")).agg(
        F.count("*").alias("rows"),
        F.approx_count_distinct("key").alias("keys"),
        F.sum(F.octet_length("value_text")).alias("bytes"),
        F.date_format(F.min("recv_ts"), "HH:mm:ss.SSS").alias("first"),
        F.date_format(F.max("recv_ts"), "HH:mm:ss.SSS").alias("last"),
    )
    found = {row.topic: row for row in rows.collect()}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("archive", "rows", "keys", "bytes", "first (UTC)", "last (UTC)"):
        table.add_column(title, justify="right" if title in ("rows", "keys", "bytes") else "left", no_wrap=True)
    for topic, row in sorted(found.items()):
        table.add_row(topic, f"{row['rows']:,}", f"{row['keys']:,}", f"{row['bytes']:,}", row["first"], row["last"])
    out.print(table)
    wrong = [topic for topic, count in sent.items() if count != (found[topic]["rows"] if topic in found else 0)]
    out.print(
        f"archive    {done.rows:,} rows as Parquet in {os.path.relpath(to)}, in {seconds:.1f} s;"
        + (f" NOT as many as in the queues: {', '.join(wrong)}" if wrong else " as many as in the queues, each source"),
        markup=False,
    )
    return not wrong
