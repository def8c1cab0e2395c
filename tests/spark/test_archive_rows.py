"""The rows of an archive, record for record as the judge alone gives them: of payloads of every kind, in every format."""

import json
import random
from base64 import b64encode
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from made_data import write_data
from pyspark.sql import functions as F
from test_archive import read
from test_payloads import SCHEMA, document, mutant

from kmq.spark.pipelines import archive
from kmq.spark.pipelines.archive import READ, enrich, with_text
from kmq.spark.pipelines.payloads import parse

KIND = SCHEMA + ", d date, m decimal(9,2)"
WITHOUT_MAP = KIND.replace(", counts map<string,bigint>", "")
HEADERS = [b"", b";hh=1", b";host=n%201;pod=p", b";pod=", b";host=a;host=b", b";host;pod", b";xx;yy=%7C"]


def lines(count, seed):
    """Lines as sent: good objects, things done to them, text that is none; as they are, or as base64."""
    dice = random.Random(seed)
    for n in range(count):
        payload = document(dice) if dice.random() < 0.7 else mutant(dice)
        if dice.random() < 0.2 and payload.startswith(b"{") and payload != b"{}":
            odd = [b'"m":1.50,', b'"m":-0,', b'"m":1.005,', b'"d":"2024-02-29",', b'"d":"2024-02-30",', b'"x":-0.0,']
            payload = b"{" + dice.choice(odd) + payload[1:]
        headers = dice.choice(HEADERS)
        if b"\n" in payload or dice.random() < 0.05:
            payload, headers = b64encode(payload), headers + b";enc=b64"
        key = dice.choice([b"", b".k%d" % n, b".@3", b".a%7Cb"])
        yield b"orders%b|%d|%d%b|%b" % (key, n, n, headers, payload)


def judged(spark, data, schema, bad, rest):
    """The rows by the functions of DataFrames alone."""
    rows = spark.read.format("kmq").schema(READ).option("path", data).option("subscribe", "orders").load()
    parsed = parse(rows, schema, rest)
    if bad == "keep":
        rows = with_text(parsed.withColumn("value", F.when(F.col("reason").isNotNull(), F.col("value"))))
    else:
        rows = parsed.where("reason is null").drop("reason", "value")
    return enrich(rows.drop("routing_key"), "node", "pod").toArrow().to_pylist()


def by_seq(rows):
    """seq → the row as text, because 0.0 == -0.0. Formats have times of different zones."""
    return {
        row["seq"]: repr(
            {name: str(row[name])[:26] if name in ("date", "recv_ts") else row[name] for name in sorted(row)}
        )
        for row in rows
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("format", "schema", "bad", "rest", "by"),
    [
        ("parquet", WITHOUT_MAP, "keep", True, ("topic", "date", "hour")),
        ("delta", KIND, "drop", False, ("topic", "partition", "hour")),
        ("iceberg", WITHOUT_MAP, "drop", True, ("topic", "date")),
        ("parquet", WITHOUT_MAP, "drop", True, ("ok", "date")),  # `ok` of the payload: the driver reads the rows again
    ],
)
def test_an_archive_has_the_rows_that_the_judge_gives(spark, tmp_path, count, format, schema, bad, rest, by):
    data = write_data(tmp_path / "data", list(lines(count, 7)), {"orders": 2})
    options = {"schema": schema, "bad": bad, "rest": rest, "partition_by": by, "host": "node", "pod": "pod"}
    done = archive.run(spark, {"path": data, "subscribe": "orders"}, str(tmp_path / "t"), format, **options)
    # pyiceberg has a list of structs that is null as an empty one; its files have all columns.
    to = tmp_path / "t"
    rows = ds.dataset(to / "data").to_table().to_pylist() if format == "iceberg" else read(str(to), format)
    for row in rows if "ok" in by else ():
        row["ok"] = {"true": True, "false": False}.get(row["ok"])  # the reader takes the directory's name for a text
    found, wanted = by_seq(rows), by_seq(judged(spark, data, schema, bad, rest))
    assert found.keys() == wanted.keys() and done.rows == len(rows) == len(wanted) and 0 < done.bad < count
    for seq, row in wanted.items():
        assert found[seq] == row


def test_few_bad_payloads_do_not_send_the_others_to_the_judge(spark, tmp_path, monkeypatch):
    payloads = [b'{"n":1.5}' if n % 50 == 0 else b"nope" if n % 50 == 1 else b'{"n":%d}' % n for n in range(1000)]
    data = write_data(tmp_path / "data", [b"orders|1|%d|%b" % (n, payload) for n, payload in enumerate(payloads)])
    seen, real = [], archive.parse

    def watched(records, *args):
        seen.append(records.count())
        return real(records, *args)

    monkeypatch.setattr(archive, "parse", watched)
    where = {"path": data, "subscribe": "orders"}
    assert archive.run(spark, where, str(tmp_path / "t"), schema="n bigint", bad="drop")[:2] == (960, 40)
    assert seen == [40]
    status = json.loads((tmp_path / "t/.kmq/checkpoint/kmq-status.json").read_text())
    assert status["rows"] == 1000 and status["rows_per_s"] > 4, "records, not tasks"
    assert status["bytes"] == sum(log.stat().st_size for log in Path(data).glob("topics/orders/*/*.log"))
    table = pa.Table.from_pylist(read(str(tmp_path / "t"), "parquet"))
    assert sorted(table["n"].to_pylist()) == [n for n in range(1000) if n % 50 > 1]
