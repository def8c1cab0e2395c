"""How far a micro-batch goes under its limits: to one time over all partitions, exactly as many records as asked."""

import random
from bisect import bisect_left
from math import inf

import pytest

from kmq.spark.source.plan import OffsetSpan, limited


class Logs:
    """Partitions as lists of recv_ts; None is a record that compaction took. Counts what is asked."""

    def __init__(self, partitions, size=100):
        self.times, self.size, self.asked, self.looked = partitions, size, 0, 0

    def offset_of_time(self, key, micros):
        self.asked += 1
        return next(
            (at for at, time in enumerate(self.times[key]) if time is not None and time >= micros), len(self.times[key])
        )

    def offsets_of_time(self, keys, micros):
        return {key: self.offset_of_time(key, micros) for key in keys}

    def time_at(self, key, start, end):
        self.looked += 1
        return next((time for time in self.times[key][start:end] if time is not None), None)

    def bytes_of(self, key, start, end):
        return self.size * (end - start)

    def cuts(self, spans, nbytes):
        step = max(1, nbytes // self.size)
        return {span.key: list(range(span.start + step, span.end, step)) for span in spans}

    def batches(self, max_offsets=0, max_bytes=0):
        """The ends of each batch until all is read."""
        begun = dict.fromkeys(self.times, 0)
        while begun != (ends := {key: len(times) for key, times in self.times.items()}):
            spans = [OffsetSpan(key, begun[key], end) for key, end in ends.items()]
            reached = begun | limited(spans, max_offsets, max_bytes, self.cuts, self)
            assert reached != begun and all(reached[key] >= begun[key] for key in begun)
            yield begun, reached
            begun = reached

    def check_one_time(self, reached):
        """Nothing in a batch was received after what is left in another partition."""
        latest = max((time for key, end in reached.items() for time in self.times[key][:end] if time is not None))
        left = [time for key, end in reached.items() for time in self.times[key][end:] if time is not None]
        assert latest <= min(left, default=inf)


def key(number):
    return ("b1", "t", number)


def random_logs(seed):
    """Partitions of very different size, with bursts at one time, pauses and what compaction took."""
    chance = random.Random(seed)
    partitions, now = {key(number): [] for number in range(chance.randint(1, 5))}, 1_700_000_000_000_000
    weights = [chance.random() ** 3 + 0.001 for _ in partitions]
    for _ in range(chance.randint(1, 60)):
        now += chance.choice([1, 1000, 10**6, 10**11])
        for part in chance.choices(list(partitions), weights, k=chance.choice([1, 3, 40])):
            partitions[part].append(None if chance.random() < 0.1 else now)
    return Logs(partitions)


@pytest.mark.parametrize("seed", range(30))
def test_batches_end_at_one_time_and_have_as_many_records_as_asked(seed):
    logs = random_logs(seed)
    most = random.Random(seed).choice([1, 2, 7, 50, 300])
    for begun, reached in logs.batches(max_offsets=most):
        logs.check_one_time(reached)
        count = sum(reached.values()) - sum(begun.values())
        is_compacted = any(None in times for times in logs.times.values())
        assert count == most or (
            count < most and (is_compacted or reached == {k: len(t) for k, t in logs.times.items()})
        )


@pytest.mark.parametrize("seed", range(30))
def test_bytes_limit_a_batch_about_and_never_stick(seed):
    logs = random_logs(seed)
    logs.size = 40_000
    for begun, reached in logs.batches(max_bytes=400_000):
        logs.check_one_time(reached)
        assert 40_000 * (sum(reached.values()) - sum(begun.values())) <= 800_000


def test_a_record_that_is_larger_than_the_limit_is_a_batch():
    logs = Logs({key(0): [1, 2, 3]}, size=1 << 20)
    assert [reached[key(0)] for _, reached in logs.batches(max_bytes=1)] == [1, 2, 3]


@pytest.mark.parametrize("spread", ["even", "random", "bursts"])
def test_the_end_of_a_batch_takes_few_lookups(spread):
    chance = random.Random(spread)
    sizes = [100_000, 10_000, 1_000]
    gap = {
        "even": lambda: 10,
        "random": lambda: chance.randint(1, 100),
        "bursts": lambda: chance.choice([0] * 50 + [10**9]),
    }
    partitions = {}
    for number, size in enumerate(sizes):
        now, times = 0, []
        for _ in range(size):
            now += gap[spread]() * 100_000 // size
            times.append(now)
        partitions[key(number)] = times
    logs = Sorted(partitions)
    ends = limited([OffsetSpan(each, 0, len(times)) for each, times in partitions.items()], 20_000, 0, logs.cuts, logs)
    assert sum(ends.values()) == 20_000
    assert logs.asked <= 20 * len(sizes) and logs.looked <= 20


class Sorted(Logs):
    """The same for many records without a gap."""

    def offset_of_time(self, key, micros):
        self.asked += 1
        return bisect_left(self.times[key], micros)


def test_no_limit_is_no_limit():
    logs = Logs({key(0): [1, 2], key(1): []})
    spans = [OffsetSpan(key(0), 0, 2), OffsetSpan(key(1), 0, 0)]
    assert limited(spans, 0, 0, logs.cuts, logs) == {key(0): 2} and not logs.asked
    assert limited(spans, 2, 1 << 20, logs.cuts, logs) == {key(0): 2} and not logs.asked
