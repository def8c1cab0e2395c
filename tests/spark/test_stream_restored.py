"""A stream of a data directory that was restored from an older copy: no record is passed over without a word."""

import shutil
from pathlib import Path

import made_data
import made_up
import pytest
from log_server import up
from made_data import FIRST_TS, append, write_data
from pyspark.errors import StreamingQueryException
from stream_runs import ids, orders, run

RESTORED = "restored from an older copy"
COPIED, READ = 100, 250  # records there were when it was copied, and when it was read


@pytest.fixture
def restore(tmp_path, monkeypatch):
    """restore(count): in place of `data`, its copy of COPIED records, that has got `count` others since then."""
    data = Path(write_data(tmp_path / "data", orders(0, READ), {"orders": 2}))

    def come_back(count):
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("id", "lineage"):
            shutil.copy(data / name, copy)
        made = write_data(copy, orders(0, COPIED), {"orders": 2}, closed=False)
        for module in (made_up, made_data):
            monkeypatch.setattr(module, "FIRST_TS", FIRST_TS + 3_600_000_000)
        append(made, orders(1000, 1000 + count))
        shutil.rmtree(data)
        copy.rename(data)

    return come_back


@pytest.mark.parametrize(("topic", "count"), [("orders", 250), ("__append", 50)])
def test_a_restored_copy_stops_its_stream_or_is_read_from_what_is_new(spark, tmp_path, restore, topic, count):
    data = str(tmp_path / "data")
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100"}
    run(spark, data, tmp_path, **options)
    restore(count)
    with pytest.raises(StreamingQueryException, match=RESTORED):
        run(spark, data, tmp_path, **options)
    run(spark, data, tmp_path, failOnDataLoss="false", **options)
    assert ids(spark, tmp_path) == [*range(READ), *range(1000, 1000 + count)]
    assert run(spark, data, tmp_path, **options) == []


def test_a_restored_copy_stops_its_stream_over_http(spark, tmp_path, restore):
    options = {"subscribe": "orders", "startingOffsets": "earliest"}
    with up(tmp_path / "data", READ) as broker:
        broker.serve()
        run(spark, f"127.0.0.1:{broker.port}", tmp_path, **options)
    restore(250)
    with up(tmp_path / "data", COPIED + 250) as broker:
        broker.serve()
        # The name of a broker is free to change; the data id says which it is.
        with pytest.raises(StreamingQueryException, match=RESTORED):
            run(spark, f"127.0.0.1:{broker.port}", tmp_path, **options)
