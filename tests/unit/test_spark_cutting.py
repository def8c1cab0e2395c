"""How ranges are cut into tasks: by bytes, by cores, and by what minPartitions and maxRecordsPerPartition ask."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kmq.spark.source import plan
from kmq.spark.source.plan import LEAST_BYTES, SPLIT_BYTES, OffsetSpan, StreamPosition, cut, cut_up, shared, wanted

A, B, C = ("b1", "a", 0), ("b1", "b", 0), ("b1", "c", 0)
KIB = 1024  # of each record


def no_cuts(spans, nbytes):
    return {span.key: [] for span in spans}


def of_size(size):
    """Return what cuts ranges of records of `size` bytes each."""

    def cuts(spans, nbytes):
        step = max(1, nbytes // size)
        return {span.key: list(range(span.start + step, span.end, step)) for span in spans}

    return cuts


kib_each = of_size(KIB)


def sizes(spans, edges):
    return [len(piece) for span in spans for piece in cut_up(span, edges.at.get(span.key, ()))]


@pytest.mark.parametrize("least", [0, 1, 2, 3, 7, 1000, 29_998, 50_000])
def test_tasks_cover_each_offset_once_and_are_as_many_as_asked(least):
    spans = [OffsetSpan(A, 5, 30_000), OffsetSpan(B, 0, 3)]
    edges = cut(spans, no_cuts, min_partitions=least)
    pieces = [piece for span in spans for piece in cut_up(span, edges.at.get(span.key, ()))]
    assert [(piece.key, n) for piece in pieces for n in range(piece.start, piece.end)] == [
        (span.key, n) for span in spans for n in range(span.start, span.end)
    ]
    assert len(pieces) == min(max(least, 2), 29_998)


def test_min_partitions_are_in_proportion_to_what_each_range_has():
    spans = [OffsetSpan(A, 0, 600), OffsetSpan(B, 0, 300), OffsetSpan(C, 0, 100)]
    edges = cut(spans, no_cuts, min_partitions=10)
    assert [len(edges.at.get(span.key, ())) + 1 for span in spans] == [6, 3, 1]


@pytest.mark.parametrize(("least", "largest"), [(0, 70_318), (8, 35_003), (16, 14_064), (32, 6_762)])
def test_min_partitions_spread_a_partition_that_has_most_of_a_topic(least, largest):
    """One partition of 64 has 70,318 of 200,000 records: more than the tasks of the other ones together need."""
    spans = [OffsetSpan(("b1", "a", 17), 0, 70_318)]
    spans += [OffsetSpan(("b1", "a", n), 0, 2058 + (n < 28)) for n in range(64) if n != 17]
    spans.sort(key=lambda span: span.key)
    found = cut(spans, no_cuts, cores=2, min_partitions=least)
    tasks = shared((piece for span in spans for piece in cut_up(span, found.at.get(span.key, ()))), found.tasks)
    records = [sum(map(len, task)) for task in tasks]
    assert (sum(records), max(records)) == (199_999, largest)
    assert len(tasks) == max(least, 4)


def test_no_task_has_more_records_than_asked():
    spans = [OffsetSpan(A, 0, 1001), OffsetSpan(B, 7, 17)]
    assert sizes(spans, cut(spans, no_cuts, max_records=250)) == [200, 200, 200, 200, 201, 10]


def test_few_records_are_one_task_without_a_look_at_the_index():
    looked = []

    def cuts(spans, nbytes):
        looked.extend(spans)
        return no_cuts(spans, nbytes)

    assert cut([OffsetSpan(A, 0, 900), OffsetSpan(B, 0, 900)], cuts, cores=64) == ({}, {})
    assert not looked


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


# --- tasks that ranges share -----------------------------------------------------------------------------------------


def tasks_of(spans, found):
    return shared([piece for span in spans for piece in cut_up(span, found.at.get(span.key, ()))], found.tasks)


def small(count, records, broker="b1"):
    return [OffsetSpan((broker, "t", number), 7, 7 + records) for number in range(count)]


@pytest.mark.parametrize(
    ("partitions", "records", "cores", "tasks"),
    [(5, 10, 2, 1), (100, 10, 2, 1), (1000, 20, 2, 4), (1000, 20, 64, 20), (1000, 900, 2, 7), (3, 900, 2, 3)],
)
def test_small_ranges_share_two_tasks_a_core_of_a_thousand_records_or_more(partitions, records, cores, tasks):
    spans = small(partitions, records)
    assert len(tasks_of(spans, cut(spans, no_cuts, cores))) == tasks


def test_ranges_of_two_brokers_never_share_a_task():
    spans = small(3, 5) + small(3, 5, "b2")
    assert [len(task) for task in tasks_of(spans, cut(spans, no_cuts, cores=2))] == [3, 3]


def test_ranges_that_the_index_knows_to_be_large_share_nothing():
    spans = [OffsetSpan((f"b{at}", "t", 0), 0, records) for at, records in enumerate((5 * KIB, 100_000 * KIB, 3 * KIB))]
    spans = [OffsetSpan(("b1", "t", number), 0, len(span)) for number, span in enumerate(spans)]
    found = tasks_of([*spans, *spans[2:]], cut([*spans, *spans[2:]], kib_each, cores=1))
    assert {len(task) for task in found if task[0].key[2] < 2} == {1} and [len(task) for task in found][-1] == 2


_SLOW = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a loaded machine
RANGES = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 40), st.integers(0, 10**6), st.sampled_from([0, 1, 20, 999, 5000, 10**6])
    )
)


@_SLOW
@given(RANGES, st.integers(1, 64), st.integers(0, 300), st.sampled_from([0, 1, 50, 1000]), st.integers(1, 4 * KIB))
def test_tasks_read_every_offset_once_within_the_bounds_and_a_replay_the_same(ranges, cores, least, most, size):
    least = min(least, sum(records for *_, records in ranges))
    most = max(most, sum(records for *_, records in ranges) // 2000) if most else 0
    keys = sorted({(f"b{broker}", "t", number): (start, records) for broker, number, start, records in ranges}.items())
    spans = [OffsetSpan(key, start, start + records) for key, (start, records) in keys if records]
    found = cut(spans, of_size(size), cores, least, most)
    tasks = tasks_of(spans, found)
    assert all(len({piece.key[0] for piece in task}) == 1 for task in tasks)
    pieces = [piece for task in tasks for piece in task]
    joined = []
    for piece in pieces:
        if joined and joined[-1][0] == piece.key and joined[-1][2] == piece.start:
            joined[-1] = *joined[-1][:2], piece.end
        else:
            joined.append((piece.key, piece.start, piece.end))
    assert joined == [(span.key, span.start, span.end) for span in spans]
    assert len(tasks) >= min(least, sum(map(len, spans)))
    assert not most or all(sum(map(len, task)) <= most for task in tasks)
    assert all(len(task) == 1 or sum(map(len, task)) <= plan.MOST_SHARED for task in tasks)
    ends = StreamPosition(
        {span.key: span.end for span in spans}, {f"b{n}": str(n) for n in (1, 2, 3)}, {}, found.at, {}, found.tasks
    )
    ends = StreamPosition.of_json(json.loads(json.dumps(ends.to_json())))
    again = wanted({span.key: span.start for span in spans}, ends.offsets)
    replayed = shared([part for span in again for part in cut_up(span, ends.cuts.get(span.key, ()))], ends.tasks)
    assert [[(p.key, p.start, p.end) for p in task] for task in replayed] == [
        [(p.key, p.start, p.end) for p in task] for task in tasks
    ]


@_SLOW
@given(st.lists(st.integers(1, 999), min_size=1, max_size=400), st.integers(1, 64))
def test_many_small_ranges_have_at_most_two_tasks_a_core(sizes, cores):
    spans = [OffsetSpan(("b1", "t", number), 0, records) for number, records in enumerate(sizes)]
    tasks = tasks_of(spans, cut(spans, no_cuts, cores))
    assert len(tasks) <= max(2 * cores, sum(sizes) // (plan.MOST_SHARED // 2) + 1)
