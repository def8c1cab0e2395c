"""Archive: what is parsed, what is bad, and that every record is in the table once, or in its dead-letter topic once."""

import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import fixed_port
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import s3_server
from chaos.loopfs import disk_of
from deltalake import DeltaTable
from made_data import append, write_data
from pyiceberg.table import StaticTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row
from time_zone import tokyo

from kmq.cli.spark_options import Loss
from kmq.errors import EXIT_CONFIG, EXIT_RETRY, ConfigError
from kmq.log import topic_changes
from kmq.spark import failures, tables
from kmq.spark.pipelines import archive
from kmq.spark.pipelines.archive import READ, dead_letters, enrich, with_text
from kmq.spark.pipelines.payloads import infer, parse
from kmq.spark.sink.lines import to_lines

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

SCHEMA = "price double, user string, tags array<int>, at struct<x:int>, id bigint"
DRIVER = Path(__file__).with_name("archive_driver.py")
PATIENCE_S = 240.0


def rows(spark, payloads, **columns):
    """Rows as the source has them, one for each payload."""
    base = {"broker": "d", "topic": "orders", "partition": 0, "seq": 1, "recv_ts": None, "key": "k.1"}
    base |= {"routing_key": b"orders.k.1", "producer_ts": "1.5", "id": "7", "headers": {}} | columns
    made = [
        Row(**base, offset=offset, value=payload.encode() if isinstance(payload, str) else payload)
        for offset, payload in enumerate(payloads)
    ]
    names = [part.split()[0] for part in READ.split(", ")]
    return spark.createDataFrame([tuple(row[name] for name in names) for row in made], READ)


def read(path, format):
    """All rows, as others than Spark read them."""
    if format == "delta":
        return DeltaTable(path).to_pyarrow_table().to_pylist()
    if format == "iceberg":
        return StaticTable.from_metadata(path).scan().to_arrow().to_pylist()
    return ds.dataset(path, partitioning="hive").to_table().to_pylist()


# --- parse and enrich ------------------------------------------------------------------------------------------------

GOOD = ["{}", '{"price":1.5,"user":"u"}', ' {"price":1e3}\r', '{"tags":[1,2],"at":{"x":3}}', '{"price":null}']
GOOD += ['{"unknown":1}', '{"user":"a|b é"}', '{"user":"}{"}', '{"user":"]],[["}', '{"user":{"json":1}}']
REASONS = {
    "nope": "not_json",
    "": "not_json",
    "  ": "not_json",
    '{"price":1': "not_json",
    '{"price":1} more': "not_json",
    '{"price":1}{"price":2}': "not_json",
    '{"price":1},{"price":2}': "not_json",
    '{"price":1}}': "not_json",
    '{"price":1}]': "not_json",
    '{"price":1},"q":2': "not_json",
    '{"price":NaN}': "not_json",
    "{'price':1}": "not_json",
    "\ufeff{}": "not_json",
    "42": "not_object",
    '"text"': "not_object",
    "null": "not_object",
    "[]": "not_object",
    '[{"price":1},{"price":2}]': "not_object",
    b'{"user":"\xff"}': "not_utf8",
    b"\xfe": "not_utf8",
    '{"price":"x"}': "wrong_type: price",
    '{"user":"u","price":[1],"id":1.5}': "wrong_type: price,id",
    '{"at":7}': "wrong_type: at",
    '{"id":99999999999999999999}': "wrong_type: id",
}


def test_what_is_no_object_of_the_schema_is_told_with_its_reason(spark):
    payloads = [*GOOD, *REASONS]
    found = parse(rows(spark, payloads), SCHEMA).orderBy("offset").collect()
    told = dict(zip(payloads, (row.reason for row in found), strict=True))
    assert told == dict.fromkeys(GOOD) | REASONS


def test_fields_become_columns_beside_those_of_the_record(spark):
    payload = '{"price":2.5,"user":"u","tags":[1,2],"at":{"x":3},"id":8,"more":{"a":[1]},"Price":"other"}'
    row = parse(rows(spark, [payload, "{}"]), SCHEMA, rest=True).orderBy("offset").collect()[0]
    assert (row.price, row.user, row.tags, row.at.x, row.payload_id, row.id) == (2.5, "u", [1, 2], 3, 8, "7")
    assert row.rest == {"more": '{"a":[1]}', "Price": "other"}


def test_a_field_that_must_be_there_is_missed(spark):
    found = parse(rows(spark, ['{"user":"u"}', '{"price":1}', "{}"]), "user string NOT NULL, price double NOT NULL")
    assert [row.reason for row in found.orderBy("offset").collect()] == [
        "missing: price",
        "missing: user",
        "missing: user,price",
    ]


def test_a_schema_is_inferred_from_objects_whatever_lies_among_them(spark):
    sample = ["nope", "[1]", '{"a":1,"b":"x"}', '{"a":2.5,"c":{"d":[1]}}', '{"A":1,"no name;":2}', "{'q':1}"]
    found = infer(rows(spark, sample))
    assert {field.name: field.dataType.simpleString() for field in found} in (
        {"a": "double", "b": "string", "c": "struct<d:array<bigint>>"},
        {"A": "bigint", "b": "string", "c": "struct<d:array<bigint>>"},
    )
    with pytest.raises(ConfigError, match="no JSON object"):
        infer(rows(spark, ["nope", "42"]))


def test_enrich_believes_headers_then_brokers_then_what_it_is_told(spark):
    told = enrich(rows(spark, ["x"]), "node-1", "pod-1").first()
    assert (told.host, told.pod) == ("node-1", "pod-1")
    remote = enrich(rows(spark, ["x"], broker="10.0.0.7:8082"), "node-1", "pod-1").first()
    assert (remote.host, remote.pod) == ("10.0.0.7", None)
    said = enrich(rows(spark, ["x"], broker="h:1", headers={"host": "n", "pod": "p"})).first()
    assert (said.host, said.pod) == ("n", "p")


def test_payloads_that_are_no_text_are_kept_as_bytes(spark):
    found = with_text(rows(spark, ["text é", b"\xff\0"])).orderBy("offset").collect()
    assert [(row.value_text, row.value) for row in found] == [("text é", None), (None, b"\xff\0")]


# --- dead letters ----------------------------------------------------------------------------------------------------


def test_a_dead_letter_keeps_payload_key_and_headers_and_says_where_it_is_from(spark):
    bad = parse(rows(spark, [b"\xff|"], routing_key=b"orders.k\xfe.1", headers={"h1": "1", "reason": "old"}), SCHEMA)
    letter = dead_letters(bad, "abc").first()
    assert (letter.routing_key, letter.value, letter.id, letter.producer_ts) == (
        b"orders.dlq.@.k\xfe.1",
        b"\xff|",
        1,
        "1.5",
    )
    assert letter.headers == {
        "h1": "1",
        "reason": "not_utf8",
        "from": "orders-0-0",
        "id": "7",
        "other": '{"reason":"old"}',
    }
    assert len(letter.producer) <= 64 and letter.producer.startswith("archive-abc-") and letter.producer.endswith("-0")
    for was, now in ((b"orders", b""), (b"orders.@", b""), (b"orders.@3.k", b".k"), (b"orders.@x", b".@x")):
        bad = parse(rows(spark, ["x"], routing_key=was), SCHEMA)
        assert dead_letters(bad, "a").first().routing_key == b"orders.dlq.@" + now


def test_a_dead_letter_that_fits_no_line_is_cut_and_says_how_long_it_was(spark):
    payloads = ["x" * 6000, b"\xff" * 6000, "x" * 900_000, b"\xff" * 5000]
    letters = dead_letters(parse(rows(spark, payloads), SCHEMA), "a", 1 << 13).orderBy("id")
    batch = letters.toArrow().combine_chunks().to_batches()[0]
    lengths = [len(value) for value in batch.column("value").to_pylist()]
    assert lengths == [6000, lengths[1], lengths[1], 5000] and 5000 < lengths[1] < 6000
    assert [dict(headers).get("len") for headers in batch.column("headers").to_pylist()] == [
        None,
        "6000",
        "900000",
        None,
    ]
    assert len(to_lines(batch, np.arange(4), 0.0, max_line=1 << 13)) == 4  # or RowError: too long


def test_a_letter_keeps_each_header_of_a_client_whatever_its_name(spark):
    bad = parse(rows(spark, ["nope"]), SCHEMA).drop("headers")
    odd = """map('h', '1', 'a b', '2', 'p', 'me', 'hh', null, 'id', 'own', 'other', 'x') headers"""
    batch = dead_letters(bad.selectExpr("*", odd), "a").toArrow().combine_chunks().to_batches()[0]
    sent = to_lines(batch, np.arange(1), 0.0, max_line=1 << 20).to_pylist()[0].decode()
    assert sent.endswith(
        ';%68=1;a%20b=2;%70=me;hh;reason=not_json;from=orders-0-0;id=7;other={"id":"own","other":"x"}|nope\n'
    )


# --- the pipeline ----------------------------------------------------------------------------------------------------


def lines(first, last, bad_every=0):
    """Lines as sent of orders first…last-1; every so many one is bad."""
    for n in range(first, last):
        payload = b"bad %d" % n if bad_every and n % bad_every == 0 else b'{"n":%d,"user":"u%d"}' % (n, n % 7)
        yield b"orders.k%d|%d|%d;hh=%d|%b" % (n % 5, n, n, n, payload)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", tables.FORMATS)
def test_each_run_adds_what_is_new_once(spark, tmp_path, format):
    made = write_data(tmp_path / "data", list(lines(0, 1000, 10)), {"orders": 3}, closed=False)
    arguments = {"where": {"path": str(tmp_path / "data"), "subscribe": "orders", "maxOffsetsPerTrigger": "400"}}
    arguments |= {"to": str(tmp_path / "t"), "format": format, "schema": "n bigint, user string", "bad": "keep"}
    if format == "parquet":
        arguments["checkpoint"] = f"file:{tmp_path}/c"
    done = archive.run(spark, **arguments)
    assert (done.rows, done.bad) == (1000, 100) and done.batches >= 3
    assert archive.run(spark, **arguments)[:3] == (0, 0, 0)
    append(made, list(lines(1000, 1200, 10)))
    assert archive.run(spark, **arguments)[:2] == (200, 20)
    found = sorted(read(arguments["to"], format), key=lambda row: row["seq"])
    assert [row["seq"] for row in found] == list(range(1, 1201))
    for n, row in enumerate(found):
        bad = n % 10 == 0
        assert (row["n"], row["user"]) == ((None, None) if bad else (n, f"u{n % 7}"))
        assert (row["reason"], row["value_text"]) == (("not_json", f"bad {n}") if bad else (None, None))
        assert (row["topic"], row["key"], row["id"], dict(row["headers"])) == (
            "orders",
            f"k{n % 5}",
            str(n),
            {"hh": str(n)},
        )
        assert row["recv_ts"].replace(tzinfo=None).isoformat().startswith(f"{row['date']}T{row['hour']:02}:")
    assert len({(row["partition"], row["offset"]) for row in found}) == 1200


def test_records_that_were_lost_before_they_were_archived_are_skipped_by_name_where_asked(spark, tmp_path, capfd):
    data = str(tmp_path / "data")
    made = write_data(data, list(lines(0, 20)), {"orders": 1}, closed=False)
    arguments = {"to": str(tmp_path / "t"), "schema": "n bigint", "bad": "keep"}
    where = {"path": data, "subscribe": "orders"}
    assert archive.run(spark, where, **arguments).rows == 20
    append(made, list(lines(20, 40)))
    topic_changes.begin_at(data, "orders", None, {0: 33})
    made[1].tick()
    made[1].settle()
    with pytest.raises(StreamingQueryException, match="orders/0: offsets 20 to 32 are gone"):
        archive.run(spark, where, **arguments)
    assert archive.run(spark, where | Loss("skip").options(), **arguments).rows == 7
    skipped = [line for line in capfd.readouterr().err.splitlines() if "event=records_skipped" in line]
    assert skipped and "topic=orders partition=0 first=20 last=32 count=13" in skipped[0]
    append(made, list(lines(40, 45)))
    assert archive.run(spark, where, **arguments).rows == 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", tables.FORMATS)
def test_a_checkpoint_restored_from_an_older_copy_leaves_nothing_out(spark, tmp_path, format):
    made = write_data(tmp_path / "data", list(lines(0, 400)), {"orders": 1}, closed=False)
    where, checkpoint = {"path": str(tmp_path / "data"), "subscribe": "orders"}, tmp_path / "c"
    arguments = {"to": str(tmp_path / "t"), "format": format, "schema": "n bigint", "checkpoint": str(checkpoint)}

    def run(limit):
        return archive.run(spark, where | {"maxOffsetsPerTrigger": limit}, **arguments).rows

    def restore():
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / "copy", checkpoint)

    arguments["bad"] = "drop"
    assert run("200") == 400
    shutil.copytree(checkpoint, tmp_path / "copy")
    append(made, list(lines(400, 1000)))
    assert run("200") == 600
    restore()
    append(made, list(lines(1000, 2000)))
    with pytest.raises(StreamingQueryException) as told:
        run("300")
    cause = failures.explain(told.value)
    assert "batch 2 of the checkpoint is not in the table" in str(cause)
    assert "orders/0 700 now, 600 in the table" in str(cause) and cause.exit_code == EXIT_CONFIG
    assert sorted(row["n"] for row in read(arguments["to"], format)) == list(range(1000))
    restore()
    assert run("200") == 1000, "cut as before: what the table has is skipped"
    assert sorted(row["n"] for row in read(arguments["to"], format)) == list(range(2000))


def test_payloads_are_kept_as_text_where_no_schema_is_wanted(spark, tmp_path):
    data = write_data(
        tmp_path / "data", ["logs|1|1|line é".encode(), b"logs|1|2|\xff", b"other|1|3|x", b"logs.dlq|1|4|no"]
    )
    where = {"path": data, "subscribePattern": "l.*"}
    done = archive.run(spark, where, str(tmp_path / "t"), schema="none", partition_by=["topic", "date"])
    assert (done.rows, done.bad) == (3, 0)
    found = {row["id"]: row for row in read(str(tmp_path / "t"), "parquet")}
    assert (found["1"]["value_text"], found["1"]["value"]) == ("line é", None)
    assert (found["2"]["value_text"], found["2"]["value"]) == (None, b"\xff")


def test_a_pattern_takes_in_no_dead_letters_unless_they_are_named(spark, tmp_path):
    write_data(tmp_path / "data", [b"a|1|1|x", b"a.dlq|1|2|y"], {"a.dlq": 1})
    for number, (topics, ids) in enumerate([({"subscribePattern": ".*"}, ["1"]), ({"subscribe": "a.dlq"}, ["2"])]):
        to = str(tmp_path / f"t{number}")
        archive.run(spark, {"path": str(tmp_path / "data")} | topics, to, schema="none")
        assert [row["id"] for row in read(to, "parquet")] == ids


def test_a_table_or_checkpoint_that_does_not_fit_is_said_before_a_stream_starts(spark, tmp_path):
    data = write_data(tmp_path / "data", list(lines(0, 4)))
    arguments = {"where": {"path": data, "subscribe": "orders"}, "to": str(tmp_path / "t"), "bad": "drop"}
    assert archive.run(spark, **arguments, schema="n bigint").rows == 4
    (tmp_path / "t/.kmq/schema.json").unlink()  # else that is what is said
    with pytest.raises(ConfigError, match=r"the table has no column m; the rows have no column n; name another --to$"):
        archive.run(spark, **arguments, schema="m bigint")
    with pytest.raises(ConfigError, match=r"--checkpoint .*/new: is new, but the rows of --to"):
        archive.run(spark, **arguments, schema="n bigint", checkpoint=str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="--partition-by: unknown column dat"):
        archive.run(spark, **arguments, schema="n bigint", partition_by=["topic", "dat"])


@pytest.mark.root
def test_a_disk_that_fills_within_a_batch_is_one_line_and_the_rows_come_later(spark, tmp_path):
    noise = np.random.default_rng(1).integers(32, 127, (2000, 1000), dtype=np.uint8)
    data = write_data(tmp_path / "data", [b"logs|1|%d|%b" % (n, line.tobytes()) for n, line in enumerate(noise)])
    with ExitStack() as cleanup:
        disk = disk_of("ext4", 16 << 20, tmp_path, cleanup)
        arguments = {"where": {"path": data, "subscribe": "logs"}, "to": str(disk.path / "t"), "schema": "none"}
        arguments |= {"checkpoint": str(tmp_path / "c"), "partition_by": ["topic"]}
        ballast = disk.fill(256 << 10)
        with pytest.raises(StreamingQueryException) as told:
            archive.run(spark, **arguments)
        cause = failures.explain(told.value)
        assert "the disk is full; run again when there is room, nothing is lost" in str(cause)
        assert cause.exit_code == EXIT_RETRY and len(str(cause).splitlines()) == 1
        ballast.unlink()
        assert archive.run(spark, **arguments).rows == 2000
        assert sorted(int(row["id"]) for row in read(arguments["to"], "parquet")) == list(range(2000))


def test_a_function_of_the_user_sees_the_rows_before_they_are_stored(spark, tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text(
        "def double(rows):\n    return rows.selectExpr('*', 'n * 2 twice').where('n > 1')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = write_data(tmp_path / "data", list(lines(0, 4)))
    arguments = {"where": {"path": data, "subscribe": "orders"}, "to": str(tmp_path / "t"), "bad": "drop"}
    assert archive.run(spark, **arguments, schema="infer", enrich_with="of_mine:double").rows == 2
    assert sorted(row["twice"] for row in read(str(tmp_path / "t"), "parquet")) == [4, 6]
    for wrong in ("of_mine", "of_mine:none", "nowhere:double"):
        with pytest.raises(ConfigError, match="--enrich"):
            archive.run(spark, **arguments, enrich_with=wrong)


def test_an_inferred_schema_stays_and_what_it_does_not_know_is_kept(spark, tmp_path):
    made = write_data(tmp_path / "data", [b'a|1|1|{"x":1}'], closed=False)
    arguments = {"where": {"path": str(tmp_path / "data"), "subscribe": "a"}, "to": str(tmp_path / "t"), "bad": "drop"}
    assert archive.run(spark, **arguments).rows == 1
    append(made, [b'a|1|2|{"x":2,"new":true}', b'a|1|3|{"x":"text"}'])
    assert archive.run(spark, **arguments)[:2] == (1, 1)
    found = {row["id"]: row for row in read(str(tmp_path / "t"), "parquet")}
    assert (found["2"]["x"], found["2"]["rest"]) == (2, [("new", "true")])
    with pytest.raises(ConfigError, match=r"schema\.json has another one"):
        archive.run(spark, **arguments, schema="x string")


def test_an_archive_in_an_object_store_has_every_record_once(spark, tmp_path):
    made = write_data(tmp_path / "data", list(lines(0, 300)), closed=False)
    where = {"path": str(tmp_path / "data"), "subscribe": "orders", "maxOffsetsPerTrigger": "200"}
    arguments = {"where": where, "schema": "n bigint, user string", "bad": "drop", "checkpoint": str(tmp_path / "c")}
    arguments |= {"to": "s3://lake/orders", "format": "iceberg"}
    with s3_server.up(tmp_path / "log", "lake"):
        assert archive.run(spark, **arguments)[:3] == (300, 0, 2)
        append(made, list(lines(300, 400)))
        assert archive.run(spark, **arguments)[:3] == (100, 0, 1)
        table = StaticTable.from_metadata(arguments["to"], {"s3.endpoint": os.environ["AWS_ENDPOINT_URL"]})
        assert sorted(table.scan().to_arrow()["n"].to_pylist()) == list(range(400))
        one = table.scan(row_filter="topic == 'orders' and date < '1970-01-01'").plan_files()
        assert not list(one)  # values of partitions are dates, not texts


def test_what_appears_inside_objects_after_the_sample_is_kept(spark, tmp_path):
    made = write_data(tmp_path / "data", [b'a|1|1|{"at":{"x":1},"l":[{"y":1}]}'], closed=False)
    arguments = {"where": {"path": str(tmp_path / "data"), "subscribe": "a"}, "to": str(tmp_path / "t"), "bad": "drop"}
    assert archive.run(spark, **arguments).rows == 1
    later = [
        b'{"at":{"x":2,"zip":"1010"},"l":[{"y":1}]}',
        b'{"at":{"x":3},"l":[{"y":1},{"z":[2]}]}',
        b'{"at":{"x":1.5}}',
    ]
    append(made, [b"a|1|%d|%b" % (n, text) for n, text in enumerate(later, start=2)])
    assert archive.run(spark, **arguments)[:2] == (2, 1)
    found = {row["id"]: row for row in read(str(tmp_path / "t"), "parquet")}
    assert [found[id]["rest"] for id in "123"] == [
        None,
        [("at", '{"x":2,"zip":"1010"}')],
        [("l", '[{"y":1},{"z":[2]}]')],
    ]


def test_date_and_hour_are_utc_whatever_the_time_zone_of_the_session(spark, tmp_path):
    data = write_data(tmp_path / "data", list(lines(0, 3)))  # of 22:13 UTC, which is the next day in Tokyo
    with tokyo(spark):
        where, by = {"path": data, "subscribe": "orders"}, ["date", "hour", "recv_ts"]
        archive.run(spark, where, str(tmp_path / "t"), schema="n bigint", bad="drop", partition_by=by)
    place = next((tmp_path / "t").glob("date=*/*/*/*.parquet")).parent.relative_to(tmp_path / "t")
    assert str(place).startswith("date=2023-11-14/hour=22/recv_ts=2023-11-14 22%3A13%3A20.")


WRONG_STARTS = {
    "--partition-by: unknown column usr; did you mean user": {"partition_by": ["usr"]},
    "--partition-by: unknown column twise; did you mean twice": {"partition_by": ["twise"], "enrich_with": "mine:good"},
    "--partition-by: column headers is a map": {"partition_by": ["headers"]},
    "--enrich 'mine:drops': leaves out column date, which --partition-by names": {"enrich_with": "mine:drops"},
    "--enrich 'mine:fails': fails: AnalysisException: .*nowhere": {"enrich_with": "mine:fails"},
    "--enrich 'mine:raises': fails: KeyError": {"enrich_with": "mine:raises"},
    "--enrich 'mine:returns': must return a DataFrame, not NoneType": {"enrich_with": "mine:returns"},
    "--schema '.*mine.py': the file must hold DDL": {"schema": "mine.py"},
    "--schema 'price dubble': must be DDL": {"schema": "price dubble"},
}
MINE = """
def good(rows): return rows.selectExpr("*", "n * 2 twice")
def drops(rows): return rows.drop("date")
def fails(rows): return rows.select("nowhere")
def raises(rows): return {}["nothing"]
def returns(rows): rows.count()
"""


def test_what_cannot_be_archived_is_said_before_the_stream_starts(spark, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(archive, "follow", None)  # the stream
    where = {"path": write_data(tmp_path / "data", list(lines(0, 3))), "subscribe": "orders"}
    for message, wrong in WRONG_STARTS.items():
        arguments = {"schema": "n bigint, user string"} | wrong
        with pytest.raises(ConfigError, match=message) as told:
            archive.run(spark, where, str(tmp_path / "t"), bad="drop", **arguments)
        assert "\n" not in str(told.value)
    assert not list((tmp_path / "t" / ".kmq").glob("schema.json"))


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_small_files_become_few_and_the_rows_stay(spark, tmp_path, monkeypatch, format):
    monkeypatch.setattr(tables.base, "MERGE_FILES", 3)
    data = write_data(tmp_path / "data", list(lines(0, 300)))
    to, where = str(tmp_path / "t"), {"path": data, "subscribe": "orders", "maxOffsetsPerTrigger": "100"}
    done = archive.run(spark, where, to, format, schema="n bigint, user string", bad="drop")
    assert (done.rows, done.batches, done.merged) == (300, 3, 3)
    assert sorted(row["n"] for row in read(to, format)) == list(range(300))
    now = DeltaTable(to).file_uris() if format == "delta" else list(Path(to).glob("topic=*/*/*/*.parquet"))
    assert len(now) == 1


class Killed(BaseException):
    """In place of SIGKILL: nothing catches it."""


# Each with the call that matters: the one before tries whether it could, or clears the place.
@pytest.mark.parametrize(("step", "call"), [("sync_directory", 1), ("exchange", 2), ("rmtree", 2)])
def test_a_merge_that_dies_leaves_the_rows_once(spark, tmp_path, monkeypatch, step, call):
    to = str(tmp_path / "t")
    (tmp_path / "t" / "topic=a").mkdir(parents=True)
    for n in range(10):
        pq.write_table(pa.table({"n": [n]}), f"{to}/topic=a/{n:010}-0000.parquet")
    owner = {"sync_directory": tables.formats, "exchange": tables.stores, "rmtree": shutil}[step]
    real, calls = getattr(owner, step), []

    def dying(*args, **kwargs):
        calls.append(args)
        done = real(*args, **kwargs)
        if len(calls) == call:
            raise Killed
        return done

    with tables.open_table(to, "parquet", ["topic"]) as table, monkeypatch.context() as patch:
        patch.setattr(owner, step, dying)
        with pytest.raises(Killed):
            table.merge(spark, all=True)
    assert sorted(row["n"] for row in read(to, "parquet")) == list(range(10))
    with tables.open_table(to, "parquet", ["topic"]) as table:
        assert not os.path.exists(table.merging)
        assert table.merge(spark, all=True) == (10 if step == "sync_directory" else 0)
    assert sorted(row["n"] for row in read(to, "parquet")) == list(range(10))


def test_merged_files_that_are_still_small_are_merged_again_under_names_that_no_reader_has_listed(
    spark, tmp_path, monkeypatch
):
    monkeypatch.setattr(tables.base, "MERGE_FILES", 3)
    to = str(tmp_path / "t")
    (tmp_path / "t" / "topic=a").mkdir(parents=True)
    for n in range(16):  # the first four do not shrink when they are merged, the others do
        text = random.Random(n).randbytes(600) if n < 4 else b""
        pq.write_table(pa.table({"n": [n], "text": [text]}), f"{to}/topic=a/{n:010}-0000.parquet")
    sizes = [path.stat().st_size for path in Path(to).glob("topic=a/*")]
    monkeypatch.setattr(tables.base, "TARGET_BYTES", 2 * max(sizes) + 2)  # so that all of them are small
    seen = {path.name for path in Path(to).glob("topic=a/*")}
    with tables.open_table(to, "parquet", ["topic"]) as table:
        while table.merge(spark, all=True):
            left = {path.name for path in Path(to).glob("topic=a/*")}
            kept = {f"{15:010}-0000+0.parquet"} if len(seen) > 16 else set()
            assert left & seen == kept, (left, seen)
            seen |= left
    assert len(seen) > 16 + 4
    assert sorted(row["n"] for row in read(to, "parquet")) == list(range(16))


def test_merged_files_keep_rows_columns_and_the_types_that_only_spark_knows(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(tables.base, "MERGE_FILES", 3)
    monkeypatch.setattr(tables.base, "TARGET_BYTES", 6_000)  # so that there are several files
    to, made = f"{tmp_path}/t", f"{tmp_path}/made"
    os.makedirs(f"{to}/topic=a")
    by_spark = spark.range(0, 3000, 1, 3).selectExpr(
        *("id n", "parse_json(concat('[', id, ']')) v", "map('k', string(id)) headers", "timestamp_micros(id) recv_ts"),
        *(
            "array(named_struct('x', id, 'y', cast(id as decimal(20,3)))) l",
            "interval '3' day d",
            "cast(id % 100 as tinyint) b",
        ),
    )
    by_spark.write.parquet(made)
    for number, path in enumerate(Path(made).glob("*.parquet")):
        os.rename(path, f"{to}/topic=a/{number:010}-0000.parquet")
    by_task = pa.table({"n": [7000], "headers": pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string()))})
    pq.write_table(by_task, f"{to}/topic=a/{9:010}-0000.parquet", store_schema=False)
    largest = max(path.stat().st_size for path in Path(to).glob("topic=a/*"))
    monkeypatch.setattr(tables.base, "TARGET_BYTES", 2 * largest + 2)  # so that there are two files
    texts = ("n", "to_json(v) v", "headers", "recv_ts", "l", "d", "b")

    def rows():
        found = spark.read.option("mergeSchema", "true").parquet(to)
        return found.schema, sorted(map(str, found.selectExpr(*texts).collect()))

    before = rows()
    with tables.open_table(to, "parquet", ["topic"]) as table:
        assert table.merge(spark, all=True) == 4
    left = sorted(Path(to).glob("topic=a/*"))
    assert [path.name for path in left] == [f"{9:010}-0000+{n}.parquet" for n in (0, 1)]
    assert rows() == before
    assert len(before[1]) == 3001


# --- with a broker ---------------------------------------------------------------------------------------------------


@pytest.fixture
def up(broker):
    fixed_port.up(broker)
    return broker


def letters(broker):
    """(key, headers that matter, payload) of each dead letter."""
    found = []
    for line in broker.lines("orders.dlq"):
        _, _, routing_key, _, id, payload = line.split(b"|", 5)
        headers = dict(part.split(b"=", 1) for part in id.split(b";")[1:])
        found.append((routing_key, headers[b"reason"], headers[b"from"], headers[b"id"], payload))
    return found


def is_complete(broker, to, format, count, bad_every):
    """Every record is in the table or among the dead letters, once."""
    found = read(to, format)
    assert sorted(row["n"] for row in found) == [n for n in range(count) if n % bad_every]
    assert len({(row["partition"], row["offset"]) for row in found}) == len(found)
    dead = letters(broker)
    assert sorted(int(payload.split()[1]) for *_, payload in dead) == list(range(0, count, bad_every))
    assert {reason for _, reason, *_ in dead} == {b"not_json"}
    assert all(
        key == b"orders.dlq.@.k%d" % (int(id) % 5) and payload == b"bad %d" % int(id) for key, _, _, id, payload in dead
    )


def kill_at(point, batch, group, arguments, broker):
    """Run a driver that is killed there."""
    command = [sys.executable, str(DRIVER), point, str(batch), "group" if group else "alone", json.dumps(arguments)]
    driver = subprocess.run(
        command, env=broker.env, start_new_session=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert driver.returncode == -9, driver.stderr[-3000:]


def broken_off_and_gone_on(spark, broker, tmp_path, format, break_off):
    count, bad_every = 600, 10
    assert broker.kmq("topics", "create", "orders", "--partitions", "2").returncode == 0
    broker.send_lines(list(lines(0, count, bad_every)))
    broker.wait_routed(1 + count)  # the declaration, and they
    arguments = {"where": {"path": str(broker.data), "subscribe": "orders", "maxOffsetsPerTrigger": "200"}}
    arguments |= {"to": str(tmp_path / "t"), "format": format, "schema": "n bigint, user string"}
    arguments |= {"producers": fixed_port.address(broker)}
    break_off(arguments)
    archive.run(spark, **arguments)
    broker.wait(lambda: len(broker.lines("orders.dlq")) >= count // bad_every, "the dead letters")
    is_complete(broker, arguments["to"], format, count, bad_every)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_an_archive_that_fails_between_its_commit_and_sparks_has_every_record_once(
    spark, up, tmp_path, monkeypatch, format
):
    commit = tables.Table.commit

    def fail(table, batch_id, *args):
        done = commit(table, batch_id, *args)
        if batch_id == 1:
            raise OSError("as told")
        return done

    def break_off(arguments):
        with monkeypatch.context() as patch, pytest.raises(StreamingQueryException, match="as told"):
            patch.setattr(tables.Table, "commit", fail)
            archive.run(spark, **arguments)

    broken_off_and_gone_on(spark, up, tmp_path, format, break_off)


@pytest.mark.soak
@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("point", ["tasks", "accepted", "judged", "letters", "sealed", "moved", "committed"])
@pytest.mark.parametrize("format", tables.FORMATS)
def test_a_driver_that_is_killed_anywhere_leaves_every_record_once(spark, up, tmp_path, format, point, batch, group):
    kill = partial(kill_at, point, batch, group, broker=up)
    broken_off_and_gone_on(spark, up, tmp_path, format, kill)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", ["worker", "accepted"])
def test_a_task_or_a_driver_that_is_killed_while_tasks_write_leaves_every_record_once(spark, up, tmp_path, point):
    broken_off_and_gone_on(spark, up, tmp_path, "parquet", partial(kill_at, point, 0, False, broker=up))


def test_where_bad_records_could_not_go_is_said_at_the_start(spark, tmp_path):
    data = write_data(tmp_path / "data", list(lines(0, 3)))
    where, to = {"path": data, "subscribe": "orders"}, str(tmp_path / "t")
    with pytest.raises(ConfigError, match="is unknown; give --producers host:port for each, or --bad keep or drop"):
        archive.run(spark, where, to)
    with pytest.raises(ConfigError, match="a:1,b:2: a:1: this host is not known"):  # addresses of one shard, they say
        archive.run(spark, where, to, producers="a:1,b:2")
    other = write_data(tmp_path / "other", list(lines(0, 3)))
    with pytest.raises(ConfigError, match="there are 2 brokers"):
        archive.run(spark, where | {"path": f"{data},{other}"}, to, producers="a:1")
    with pytest.raises(ConfigError, match="--bad 'lose'"):
        archive.run(spark, where, to, bad="lose")
