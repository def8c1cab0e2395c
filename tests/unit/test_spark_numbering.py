"""The producer and the number of each row, of Arrow batches."""

import pyarrow as pa
import pytest

from kmq.spark.sink.lines import RowError
from kmq.spark.sink.sink import CountedIds, GivenIds, OriginIds, fitting_name

JOB = "s-0b9c2f4e-3f5e-4b61-9f6a-1f2f3a4b5c6d"


def rows(*origins, broker="a" * 32):
    topics, partitions, offsets = zip(*origins, strict=True)
    columns = {"origin_topic": topics, "origin_partition": partitions, "origin_offset": offsets}
    return pa.RecordBatch.from_pydict(columns | ({"origin_broker": [broker] * len(topics)} if broker else {}))


def named(numbering, batch, first_row=0):
    """(producer, id) of each row."""
    ids, owners = numbering(batch, first_row)
    found = [None] * batch.num_rows
    for name, places in owners:
        for place in range(batch.num_rows) if places is None else places:
            found[place] = name, int(ids[place])
    return found


def test_an_origin_gives_its_offset_and_a_producer_of_its_own():
    origins = [("t", 0, 3), ("t", 1, 3), ("u", 0, 0), ("t", 0, 4), ("t.0", 0, 9), ("t", 1, 7)]
    found = named(OriginIds(JOB, 12), rows(*origins))
    assert [id for _, id in found] == [offset + 1 for *_, offset in origins]
    assert len({name for name, _ in found}) == len({origin[:2] for origin in origins})
    assert all(name.startswith(f"{JOB}-") and name.endswith("-12") and len(name) <= 64 for name, _ in found)


def test_brokers_slices_jobs_and_topics_never_share_a_producer():
    names = {
        named(OriginIds(job, slice_), rows((topic, partition, 0), broker=broker))[0][0]
        for job in (JOB, "x" * 64, "y" * 64, "backfill")
        for slice_ in (0, 1, 11, 99_999)
        for topic, partition in (("t", 1), ("t", 11), ("t1", 1), ("t" * 200, 1))
        for broker in ("a" * 32, "b" * 32, "")
    }
    assert len(names) == 4 * 4 * 4 * 3 and max(map(len, names)) <= 64


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (("t", 0, 5), r"row 11 .*origin_offset: 5 comes after 5 of the same origin .*t, 0.*explode"),
        (("t", 0, 4), r"row 11 .*origin_offset: 4 comes after 5 of the same origin .*shuffle"),
        (("t", 0, None), r"row 11 .*origin_offset: None: must be an offset"),
        (("t", 0, -1), r"row 11 .*origin_offset: -1: must be an offset"),
        ((None, 0, 6), r"row 11 .*origin_topic: is null"),
        (("t", None, 6), r"row 11 .*origin_partition: is null"),
    ],
)
def test_rows_that_are_not_one_a_record_in_order_are_an_error(second, says):
    with pytest.raises(RowError, match=says):
        named(OriginIds(JOB, 0), rows(("t", 0, 5), second), first_row=10)


def test_an_origin_that_comes_again_in_the_next_arrow_batch_is_an_error():
    numbering = OriginIds(JOB, 0)
    named(numbering, rows(("t", 0, 5), ("u", 0, 9)))
    named(numbering, rows(("t", 0, 6)), 2)
    with pytest.raises(RowError, match=r"row 3 .*: 9 comes after 9"):
        named(numbering, rows(("u", 0, 9)), 3)


def test_numbers_of_a_place_rise_over_arrow_batches():
    numbering = CountedIds("s-q-0", 2 * 10**9)
    batch = pa.RecordBatch.from_pydict({"value": ["a", "b"]})
    assert named(numbering, batch) == [("s-q-0", 2 * 10**9), ("s-q-0", 2 * 10**9 + 1)]
    assert named(numbering, batch, 2) == [("s-q-0", 2 * 10**9 + 2), ("s-q-0", 2 * 10**9 + 3)]
    assert numbering.row(2 * 10**9 + 3) == 3


def test_given_numbers_must_rise_within_their_producer():
    numbering = GivenIds()
    assert named(numbering, pa.RecordBatch.from_pydict({"producer": ["a", "b", "a"], "id": [5, 1, 6]})) == [
        ("a", 5),
        ("b", 1),
        ("a", 6),
    ]
    with pytest.raises(RowError, match=r"row 4 .*id: 1 comes after 1 of the same producer b"):
        named(numbering, pa.RecordBatch.from_pydict({"producer": ["a", "b"], "id": [7, 1]}), 3)


def test_a_name_that_fits_is_left_as_it_is():
    assert fitting_name("x" * 62, "-0") == "x" * 62 + "-0"
    assert len(fitting_name("x" * 63, "-0")) == 34
