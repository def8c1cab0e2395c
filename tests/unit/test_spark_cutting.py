"""How ranges are cut into tasks: by bytes, by cores, and by what minPartitions and maxRecordsPerPartition ask."""

import pytest

from kmq.spark.source import plan
from kmq.spark.source.plan import LEAST_BYTES, SPLIT_BYTES, OffsetSpan, cut, cut_up

A, B, C = ("b1", "a", 0), ("b1", "b", 0), ("b1", "c", 0)
KIB = 1024  # of each record


def no_cuts(key, start, end, nbytes):
    return []


def kib_each(key, start, end, nbytes):
    return list(range(start + nbytes // KIB, end, nbytes // KIB))


def sizes(spans, edges):
    return [len(piece) for span in spans for piece in cut_up(span, edges.get(span.key, ()))]


@pytest.mark.parametrize("least", [0, 1, 2, 3, 7, 1000, 29_998, 50_000])
def test_tasks_cover_each_offset_once_and_are_as_many_as_asked(least):
    spans = [OffsetSpan(A, 5, 30_000), OffsetSpan(B, 0, 3)]
    edges = cut(spans, no_cuts, min_partitions=least)
    pieces = [piece for span in spans for piece in cut_up(span, edges.get(span.key, ()))]
    assert [(piece.key, n) for piece in pieces for n in range(piece.start, piece.end)] == [
        (span.key, n) for span in spans for n in range(span.start, span.end)
    ]
    assert len(pieces) == min(max(least, 2), 29_998)


def test_min_partitions_are_in_proportion_to_what_each_range_has():
    spans = [OffsetSpan(A, 0, 600), OffsetSpan(B, 0, 300), OffsetSpan(C, 0, 100)]
    edges = cut(spans, no_cuts, min_partitions=10)
    assert [len(edges.get(span.key, ())) + 1 for span in spans] == [6, 3, 1]


def test_no_task_has_more_records_than_asked():
    spans = [OffsetSpan(A, 0, 1001), OffsetSpan(B, 7, 17)]
    assert sizes(spans, cut(spans, no_cuts, max_records=250)) == [200, 200, 200, 200, 201, 10]


def test_few_records_are_one_task_without_a_look_at_the_index():
    def never(*given):
        raise AssertionError("few records are not worth a look")

    assert cut([OffsetSpan(A, 0, 900), OffsetSpan(B, 0, 900)], never, cores=64) == {}


@pytest.mark.parametrize(
    ("mib", "cores", "tasks"),
    [(3, 8, 1), (8, 8, 2), (32, 2, 4), (32, 8, 8), (56, 2, 4), (256, 2, 4), (1024, 2, 16), (1024, 64, 128)],
)
def test_cores_have_two_tasks_each_of_four_to_64_mib(mib, cores, tasks):
    spans = [OffsetSpan(A, 0, mib * KIB)]
    found = sizes(spans, cut(spans, kib_each, cores))
    assert len(found) == tasks
    assert all(LEAST_BYTES <= KIB * records <= SPLIT_BYTES for records in found) or mib < 4


def test_partitions_that_are_enough_for_the_cores_stay_whole():
    spans = [OffsetSpan(("b1", "a", number), 0, 5 * KIB) for number in range(8)]
    assert sizes(spans, cut(spans, kib_each, cores=2)) == [5 * KIB] * 8


def test_very_much_data_is_cut_into_a_bounded_number_of_tasks():
    spans = [OffsetSpan(A, 0, 4_000_000 * 64)]
    assert plan.MOST_TASKS // 2 < len(sizes(spans, cut(spans, kib_each, cores=2))) <= plan.MOST_TASKS + 1
