"""Reading what lies in the store: the same offsets, bytes and order as on the disk, by every way to read; and the cache."""

import asyncio
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_logger import FakeLogger
from log_server import up
from made_up import FIRST_TS
from tiered import TieredBroker, cold_broker, lines

from kmq.broker.admission import Admission
from kmq.broker.stats import Incidents, StatsPage, Strangers
from kmq.config.settings import load
from kmq.gateway.core import cold as cold_module
from kmq.gateway.core import partitions as partitions_module
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.cold import ColdReads
from kmq.gateway.core.core import Core
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.fetching import Cursor, Fetching, Limit, Waking
from kmq.gateway.core.metrics import Requests
from kmq.gateway.core.partitions import Partitions, Range
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import OffsetStore
from kmq.gateway.grpc.calls import Streams
from kmq.gateway.grpc.podbus import PodBus
from kmq.gateway.lines.door import Lines
from kmq.gateway.lines.service import Service
from kmq.gateway.server import Gateway
from kmq.log import reader, rows
from kmq.log.bounds import Bounds, measure
from kmq.log.damage import DamageError
from kmq.log.deleted_records import DeletedRecords
from kmq.log.identity import open_data
from kmq.log.rows import NotHereError
from kmq.log.segment import SEQ, Limits
from kmq.tier import cache as cache_module
from kmq.tier import store as store_module
from kmq.tier.cache import TierCache
from kmq.tier.objects import ObjectError, pack_file
from kmq.tier.store import DirectoryStore, StoreError
from kmq.wire.requests import Position

pytestmark = pytest.mark.usefixtures("small_blocks")

SEGMENT = 4096
ON = Limits(segment_bytes=SEGMENT, tier="on", local_retention_bytes=3 * SEGMENT)
COUNT = 400
ALL = Limit(100_000, 1 << 24, 0.0)


class Cold:
    """A directory whose old records lie in the store, read through the cache."""

    def __init__(self, broker, most_bytes=1 << 30):
        self.broker, self.data, self.sent = broker, broker.data, broker.sent
        self.cache = TierCache(broker.data, broker.store, most_bytes)
        self.fetched = []

    def get(self, do, *arguments):
        """What `do` returns, once everything that it needs is here."""
        while True:
            try:
                return do(*arguments)
            except NotHereError as err:
                assert len(self.fetched) < 1000
                self.fetched.append(err.row.base)
                self.cache.fetch(err.directory, err.life, err.row)

    def log(self, number=0):
        return reader.partition(self.data, "t", number)


@pytest.fixture
def broker(tmp_path):
    made = TieredBroker(tmp_path, ON, object_bytes=8192)
    made.send(*lines(COUNT))
    made.turn()
    made.tick()
    assert len(made.rows()) > 3 and made.rows()[0][0] == 0 and made.local()[0] > 100
    yield made
    made.kill()


@pytest.fixture
def cold(broker):
    return Cold(broker)


# --- the same bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 300, 5000, 1 << 20])
def test_every_record_is_read_once_and_in_order_wherever_it_lies(cold, nbytes):
    log, offset, found = cold.log(), 0, []
    while True:
        first, text = cold.get(log.read, offset, nbytes)
        if not text:
            break
        assert first == offset
        found += text.splitlines(keepends=True)
        offset = first + text.count(b"\n")
    assert found == cold.sent


@pytest.mark.parametrize("nbytes", [1, 300, 5000, 1 << 20])
def test_batches_and_ranges_have_the_same_bytes(cold, nbytes):
    partition = Partitions(cold.data).open("t", 0)
    for by_batch in (True, False):
        offset, found = 0, b""
        while offset < COUNT:
            if by_batch:
                batch = cold.get(partition.batch, offset, nbytes)
                assert batch.offset == offset
                found += batch.text or batch.span.read()
                if batch.segment is not None:
                    batch.segment.close()
                offset = batch.offset + batch.lines
            else:
                asked = cold.get(Range, cold.log(), offset, COUNT, nbytes)
                assert asked.first_offset == offset
                while span := asked.next_span():
                    found += span.read()
                asked.close()
                offset = asked.next_offset
        assert found == b"".join(cold.sent)


def test_a_range_ends_before_the_first_row_that_is_not_there(cold):
    row = rows.of(cold.broker.directory()).rows[1]
    with pytest.raises(NotHereError) as missing:
        Range(cold.log(), row.base, COUNT)
    assert missing.value.row == row
    cold.cache.fetch(missing.value.directory, missing.value.life, row)
    asked = Range(cold.log(), row.base + 3, COUNT)
    assert (asked.first_offset, asked.next_offset) == (row.base + 3, row.next)
    span = asked.next_span()
    assert span.read() == b"".join(cold.sent[row.base + 3 : row.next])
    asked.close()


def test_a_row_that_reaches_into_the_segments_is_read_once(tmp_path):
    """The first local segment begins inside of the last row that is needed."""
    made = TieredBroker(tmp_path, Limits(segment_bytes=SEGMENT, tier="on", local_retention_bytes=SEGMENT))
    made.send(*lines(100))
    made.turn()
    made.send(*lines(COUNT - 100, begin=100))
    made.turn()
    made.tick()
    cold, local = Cold(made), made.local()[0]
    assert [base for base, following in cold.broker.rows() if base < local < following]
    partition = Partitions(cold.data).open("t", 0)
    for offset in range(local - 20, local + 5):
        first, text = cold.get(partition.read, offset, 1 << 20)
        assert first == offset and text == b"".join(cold.sent[offset : offset + text.count(b"\n")])
        asked = cold.get(partition.range, offset, offset + 40)
        found = asked.next_span().read()
        assert asked.first_offset == offset and found == b"".join(cold.sent[offset : asked.next_offset])
        asked.close()
    made.kill()


def test_a_read_before_the_start_begins_at_the_start(cold):
    broker = cold.broker
    log = broker.queues.logs.log_of(broker.queues.in_force.table[b"t"], 0)
    start = broker.rows()[1][0] + 7
    broker.queues.retention.begin_at([(log, start)])
    partition = Partitions(cold.data).open("t", 0)
    assert cold.get(partition.read, 0, 1)[0] == start == partition.start() == Bounds(cold.data).of("t", 0)[0]
    assert cold.get(partition.batch, 3, 1).offset == start
    asked = cold.get(partition.range, 0, COUNT)
    assert asked.first_offset == start and asked.next_span().read().startswith(cold.sent[start])
    asked.close()
    assert cold.get(cold.log().find, 1, SEQ).offset == start
    assert 0 not in cold.fetched  # the row before the start is not needed


# --- lookups ---------------------------------------------------------------------------------------------------------


def test_lookups_by_seq_and_time_find_each_record(cold):
    log = cold.log()
    for offset in [0, 1, 5, *range(10, COUNT, 17), COUNT - 1]:
        assert cold.get(log.offset_of_seq, offset + 1) == offset
        assert cold.get(log.offset_of_time, FIRST_TS + offset + 1) == offset
        assert cold.get(log.find, offset + 1, SEQ).line + b"\n" == cold.sent[offset]
    assert log.offset_of_time(0) == 0 and log.offset_of_time(FIRST_TS * 2) == COUNT
    assert cold.get(log.stamp_of, 3) == (4, FIRST_TS + 4)


def test_what_begins_a_row_is_found_without_it(cold):
    log = cold.log()
    for row in rows.of(cold.broker.directory()).rows[:-1]:
        assert log.offset_of_time(row.times[0]) == row.base and log.offset_of_seq(row.seqs[0]) == row.base
    assert not cold.fetched


def test_cuts_lie_between_objects_and_then_between_blocks(cold):
    found = cold.log().cuts(0, COUNT, 9000)
    local = cold.broker.local()[0]
    bases = [base for base, _ in cold.broker.rows()]
    assert found and found == sorted(set(found)) and all(cut in bases or cut >= local for cut in found)
    assert any(cut in bases for cut in found) and not cold.fetched


def test_times_that_consumers_see_are_found_in_rows_by_receipt(cold):
    partition = Partitions(cold.data).open("t", 0)
    target = (FIRST_TS + 5) // 1000 + 1  # all records are within a millisecond
    assert partition.first_shown(target) is None
    assert cold.get(partition.first_shown, FIRST_TS // 1000).offset == 0
    assert partition.highest_shown() is not None
    assert cold.get(partition.locate, Position("received", FIRST_TS + 8)) == 7


def test_sizes_and_bounds_count_what_lies_in_the_store(cold):
    [size] = measure(cold.data, "t", 1)
    assert (size.first_offset, size.end_offset, size.messages) == (0, COUNT, COUNT)
    bounds = Bounds(cold.data)
    assert bounds.of("t", 0) == (0, COUNT)
    cold.broker.queues.tiering.set_start("t", 0, 9)
    assert bounds.of("t", 0) == (9, COUNT)


def test_an_id_stays_known_and_the_framer_goes_on_where_the_rows_are_damaged(cold):
    with open(rows.path_of(cold.broker.directory()), "r+b") as file:
        file.write(b"x")
    known = DeletedRecords(cold.data, lambda: COUNT)
    assert not known.has("t", b"t", 1)


def test_an_id_whose_record_lies_in_the_store_stays_known(cold):
    known = DeletedRecords(cold.data, lambda: COUNT)
    assert not [seq for seq in range(1, COUNT + 1) if known.has("t", b"t", seq)]
    second = cold.broker.rows()[1][0]
    cold.broker.queues.tiering.set_start("t", 0, second)
    known.begin()
    assert known.has("t", b"t", second) and not known.has("t", b"t", second + 1)


def test_readers_of_the_disk_alone_see_no_row(cold):
    log = reader.local(cold.data, "t", 0)
    first = cold.broker.local()[0]
    assert log.first_offset == first and log.read(0)[0] == first


# --- a damaged file `tier` -------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(cold):
    """The first local offset of a partition whose file `tier` is damaged."""
    path = Path(f"{cold.broker.directory()}/tier")
    path.write_bytes(path.read_bytes().replace(b" add ", b" odd "))
    return cold.broker.local()[0]


def test_what_the_disk_has_is_read_as_ever_though_tier_is_damaged(cold, damaged):
    partitions = Partitions(cold.data)
    partition = partitions.open("t", 0)
    assert partition.bounds() == partitions.bounds("t", 0) == Bounds(cold.data).of("t", 0) == (damaged, COUNT)
    for offset in (damaged, damaged + 7, COUNT - 1):
        assert partition.read(offset, 1) == (offset, cold.sent[offset])
        assert partition.batch(offset, 1).offset == partition.locate(Position("offset", offset)) == offset
        assert partition.nearest(offset) == partition.first_left(offset) == partition.first_after(offset) == offset
    offset, found = damaged, b""
    while offset < COUNT:
        asked = partition.range(offset)
        while span := partition.next_span(asked):
            found += span.read()
        offset = asked.next_offset
        asked.close()
    assert found == b"".join(cold.sent[damaged:])
    assert partition.locate(Position("latest", 0)) == partition.nearest(COUNT + 9) == COUNT


@pytest.mark.parametrize(
    "ask",
    [
        lambda partition: partition.read(3, 1),
        lambda partition: partition.batch(3, 1),
        lambda partition: partition.range(3),
        lambda partition: partition.nearest(3),
        lambda partition: partition.first_left(3),
        lambda partition: partition.first_after(3),
        lambda partition: partition.locate(Position("offset", 3)),
        lambda partition: partition.locate(Position("earliest", 0)),
        lambda partition: partition.locate(Position("received", FIRST_TS + 8)),
    ],
)
def test_what_lies_before_the_disk_is_refused_while_tier_is_damaged(cold, damaged, ask):
    with pytest.raises(DamageError):
        ask(Partitions(cold.data).open("t", 0))


def test_no_consumer_is_moved_past_what_a_damaged_tier_hides(cold, damaged):
    async def scenario(fetching):
        partition = fetching.partitions.open("t", 0)
        for is_strict in (True, False):
            cursor = Cursor(partition, 3, is_strict=is_strict)
            with pytest.raises(RequestRefused) as refused:
                await fetching.read([cursor], ALL, values)
            assert (refused.value.code, cursor.offset, cursor.overtaken) == ("damaged", 3, range(0))
        found = await fetching.fetch([Cursor(partition, damaged, is_strict=True)], ALL, values, asyncio.Event())
        assert found[0] == (damaged, cold.sent[damaged][:-1])

    run(cold.data, scenario, f"file://{cold.broker.store.root}")


def test_lists_from_which_bulk_readers_begin_name_no_start_while_tier_is_damaged(cold, damaged):
    with pytest.raises(DamageError):
        Bounds(cold.data, is_strict=True).of("t", 0)
    for _ in range(4):  # it is laid out again; what was appended to the damaged file goes with it
        cold.broker.turn()
    assert Bounds(cold.data, is_strict=True).of("t", 0) == Partitions(cold.data).bounds("t", 0) == (0, COUNT)


# --- the cache -------------------------------------------------------------------------------------------------------


def paths(cold):
    return {Path(path).parts[-1] for path in cold.cache._sizes}


def fetch(cold, number):
    found = rows.of(cold.broker.directory())
    cold.cache.fetch(cold.broker.directory(), found.life, found.rows[number])


def test_the_cache_is_bounded_and_the_least_recently_used_object_goes(broker, monkeypatch):
    monkeypatch.setattr(cache_module, "_UNREAD_S", 0.0)
    cold = Cold(broker, most_bytes=40_000)
    for number in range(4):
        fetch(cold, number)
        os.utime(f"{cold.data}/tier/cache/t/1/0/{cold.broker.rows()[number][0]}", (number, number))
    os.utime(f"{cold.data}/tier/cache/t/1/0/0", (100, 100))
    fetch(cold, 4)
    gone = str(cold.broker.rows()[1][0])
    assert cold.cache.nbytes <= 40_000 and gone not in paths(cold) and "0" in paths(cold)
    assert not os.path.exists(f"{cold.data}/tier/cache/t/1/0/{gone}")


def test_what_a_reader_waits_for_stays_and_the_others_wait_their_turn(broker):
    cold = Cold(broker, most_bytes=4 * 9000)
    fetch(cold, 0)
    fetch(cold, 1)
    assert not cold.cache.make_room(9000)  # half of the cache is waited for
    reader.partition(cold.data, "t", 0).read(0, 1)
    assert cold.cache.make_room(9000)
    cold.cache.give_way()
    assert len(paths(cold)) == 1  # what nobody has read yet


def test_a_start_counts_what_is_there_and_removes_what_a_kill_has_left(cold):
    fetch(cold, 0)
    os.makedirs(f"{cold.data}/tier/cache/.making-x")
    again = TierCache(cold.data, cold.broker.store, 1 << 30)
    assert again.nbytes == cold.cache.nbytes > 0 and not os.path.exists(f"{cold.data}/tier/cache/.making-x")


def test_an_object_that_is_not_what_its_row_says_is_not_used(cold):
    row = rows.of(cold.broker.directory()).rows[0]
    path = f"{cold.broker.store.root}/{cold.broker.copier.lineage}/{row.key}"
    content = Path(path).read_bytes()
    text = b"".join(cold.sent[: row.next])
    other = pack_file(text.replace(b"|1111", b"|1112", 1)).content  # as long, with as many lines, and the same last one
    assert other != content
    for wrong in (content[:-1], content[:100] + b"x" + content[101:], content + content, b"", other):
        Path(path).write_bytes(wrong)
        with pytest.raises(ObjectError):
            fetch(cold, 0)
    assert not paths(cold) and not [name for name in os.listdir(f"{cold.data}/tier/cache") if name != "t"]


def test_a_cached_file_that_is_damaged_is_fetched_once_more_and_then_is_damage(cold):
    partition = Partitions(cold.data).open("t", 0)
    cold.get(partition.read, 0, 1)
    path = f"{cold.data}/tier/cache/t/1/0/0/log"
    for is_over in (False, True):
        with open(path, "r+b") as file:
            file.write(b"999")
        if is_over:
            with pytest.raises(DamageError):
                partition.read(0, 1)
        else:
            with pytest.raises(NotHereError):
                partition.read(0, 1)
            assert cold.get(partition.read, 0, 1)[1] == cold.sent[0]


def harm(cold, text=b"999", at=0):
    with open(f"{cold.data}/tier/cache/t/1/0/0/log", "r+b") as file:
        file.seek(at)
        file.write(text)


def whole_range(partition):
    """The bytes of the first object, as a consumer that catches up gets them."""
    asked, found = partition.range(0), b""
    try:
        while span := partition.next_span(asked):
            found += span.read()
    finally:
        asked.close()
    return found


WAYS = {
    "read": lambda partition: partition.read(0, 1)[0],
    "batch": lambda partition: partition.batch(0, 1).offset,
    "range": whole_range,
    "received": lambda partition: partition.locate(Position("received", FIRST_TS + 8)),
    "seq": lambda partition: partition.locate(Position("seq", 8)),
    "time": lambda partition: partition.first_shown(FIRST_TS // 1000).offset,
    "back": lambda partition: partition.back(20, 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_read_a_damaged_cached_object_has_it_fetched_once_more(cold, way):
    partition, directory = Partitions(cold.data).open("t", 0), f"{cold.data}/tier/cache/t/1/0/0"
    good = cold.get(WAYS[way], partition)
    for name in ("log", "log.idx"):
        Path(f"{directory}/{name}").write_bytes(b"9" * os.path.getsize(f"{directory}/{name}"))
    assert cold.get(WAYS[way], partition) == good and cold.fetched == [0, 0]


def test_damage_behind_a_good_span_of_a_range_is_fetched_once_more_too(cold):
    partition = Partitions(cold.data).open("t", 0)
    good = cold.get(whole_range, partition)
    harm(cold, at=len(good) - 10)
    with pytest.raises(FileNotFoundError):  # look again
        whole_range(partition)
    assert cold.get(whole_range, partition) == good


def test_damage_of_an_object_that_was_damaged_long_ago_is_mended_again(cold, monkeypatch):
    monkeypatch.setattr(partitions_module, "_DAMAGED_S", 0.0)
    partition = Partitions(cold.data).open("t", 0)
    cold.get(partition.read, 0, 1)
    for _ in range(3):
        harm(cold)
        assert cold.get(partition.read, 0, 1)[1] == cold.sent[0]
    assert cold.fetched == [0] * 4


def test_a_damaged_object_is_gone_at_once_with_its_index(cold, monkeypatch):
    partition = Partitions(cold.data).open("t", 0)
    cold.get(partition.read, 0, 1)
    harm(cold)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors=False: None)  # a kill before anything is deleted
    with pytest.raises(NotHereError):
        partition.read(0, 1)
    assert not os.path.exists(f"{cold.data}/tier/cache/t/1/0/0")


# --- waiting ---------------------------------------------------------------------------------------------------------


def run(data, scenario, url, has_settings=False, count=COUNT, most_bytes=1 << 30):
    with up(data, synced=count) as found:

        async def whole():
            partitions, waking = Partitions(data), Waking(Watermark(found.page))
            cold = ColdReads(data, waking.wake, url, most_bytes)
            fetching = Fetching(data, found.page, partitions, waking, cold=cold)
            try:
                await (scenario(found.settings, fetching) if has_settings else scenario(fetching))
            finally:
                fetching.close()
                cold.close()
                waking.close()

        asyncio.run(whole())


def values(found):
    return [(each.offset, each.line) for each in found]


def test_hot_partitions_are_read_while_a_cold_one_is_fetched_in(tmp_path):
    made = TieredBroker(tmp_path, ON, object_bytes=8192, partitions=2)
    made.send(*lines(COUNT))
    made.turn()
    made.tick()
    hot = made.queues.logs.states["t", 1].end_offset - 1
    made.stop()

    async def scenario(fetching):
        cursors = [Cursor(fetching.partitions.open("t", 0), 0), Cursor(fetching.partitions.open("t", 1), hot)]
        count, found = await fetching.read(cursors, ALL, values)
        assert count == 1 and found[0][0] == hot and cursors[0].cold is not None
        got = []
        while len(got) < made.queues.logs.states["t", 0].end_offset:
            got += await fetching.fetch(cursors, ALL._replace(wait_s=60.0), values, asyncio.Event())
        assert [offset for offset, _ in got] == [*range(len(got))]
        assert cursors[0].cold is None and fetching.cold.fetched > 1

    run(made.data, scenario, f"file://{made.store.root}")


def test_fifty_cold_consumers_share_a_cache_of_four_objects(tmp_path):
    """Each begins elsewhere and reads to the end; none is starved by what others have fetched in."""
    made = cold_broker(tmp_path, 1200)
    assert len(made.rows()) > 12
    largest = max(row.nbytes for row in rows.of(made.directory()).rows)

    async def scenario(fetching):
        partition = fetching.partitions.open("t", 0)

        async def read(begin):
            cursor, offset = Cursor(partition, begin), begin
            while offset < 1200:
                for at, line in await fetching.fetch([cursor], ALL._replace(wait_s=60.0), values, asyncio.Event()):
                    assert (at, line + b"\n") == (offset, made.sent[offset])
                    offset += 1

        async with asyncio.timeout(120):
            await asyncio.gather(*(read(17 * number) for number in range(50)))
        assert fetching.cold.nbytes <= 4 * (largest + 1024) and not fetching.cold.waiting

    run(made.data, scenario, f"file://{made.store.root}", count=1200, most_bytes=4 * (largest + 1024))


def test_a_store_that_is_away_is_told_from_an_end(cold):
    broker = cold.broker
    os.rename(broker.store.root, f"{broker.store.root}-away")

    async def scenario(fetching):
        cursor = Cursor(fetching.partitions.open("t", 0), 0)
        assert await fetching.run(cursor.partition.bounds) == (0, COUNT)
        with pytest.raises(RequestRefused) as refused:
            await fetching.fetch([cursor], ALL, values, asyncio.Event())
        assert refused.value.code == "cold" and refused.value.refusal.is_retryable
        assert await fetching.read([Cursor(cursor.partition, COUNT - 1)], ALL, values) == (
            1,
            [(COUNT - 1, broker.sent[-1][:-1])],
        )
        os.rename(f"{broker.store.root}-away", broker.store.root)
        found = await fetching.fetch([cursor], ALL._replace(wait_s=60.0), values, asyncio.Event())
        assert found[0] == (0, broker.sent[0][:-1])

    run(cold.data, scenario, f"file://{broker.store.root}")


def test_readers_who_wait_for_a_store_in_vain_are_counted_from_the_first(cold):
    broker = cold.broker
    os.rename(broker.store.root, f"{broker.store.root}-away")

    async def scenario(settings, fetching):
        page = StatsPage(settings.instance, open_data(cold.data), cold.data)
        row, cursor = page.rows["gateway"], Cursor(fetching.partitions.open("t", 0), 0)
        with pytest.raises(RequestRefused):
            await fetching.fetch([cursor], ALL, values, asyncio.Event())

        def is_said():
            fetching.cold.publish(page)
            return row.tier_failing_since

        await until(is_said, "the store fails")
        since = row.tier_failing_since
        assert is_said() == since and fetching.cold.store.requests["get", "missing"]
        os.rename(f"{broker.store.root}-away", broker.store.root)
        await fetching.fetch([cursor], ALL._replace(wait_s=60.0), values, asyncio.Event())
        await until(lambda: not is_said(), "no reader waits any more")
        assert fetching.cold.store.received > 0

    run(cold.data, scenario, f"file://{broker.store.root}", has_settings=True)


def test_damage_of_an_object_is_said_with_topic_and_offsets_until_it_can_be_read(cold):
    row = rows.of(cold.broker.directory()).rows[1]
    path = f"{cold.broker.store.root}/{cold.broker.copier.lineage}/{row.key}"
    os.rename(path, f"{path}-away")

    async def scenario(settings, fetching):
        page = StatsPage(settings.instance, open_data(cold.data), cold.data)
        partition = fetching.partitions.open("t", 0)
        for _ in range(2):
            with pytest.raises(RequestRefused):
                await fetching.run(partition.read, row.base, 1)
            fetching.cold.publish(page)
            assert page.rows["gateway"].tier_damaged == 1
            assert page.note_of("gateway").startswith(f"offsets {row.base} to {row.next - 1} of t/0: ")
        os.rename(f"{path}-away", path)
        await fetching.run(partition.read, row.base, 1)
        fetching.cold.publish(page)
        assert page.rows["gateway"].tier_damaged == 0

    run(cold.data, scenario, f"file://{cold.broker.store.root}", has_settings=True)


def test_damage_that_was_mended_or_whose_topic_is_gone_is_said_no_more(cold):
    first, second = rows.of(cold.broker.directory()).rows[:2]
    paths = [f"{cold.broker.store.root}/{cold.broker.copier.lineage}/{row.key}" for row in (first, second)]
    for path in paths:
        os.rename(path, f"{path}-away")

    async def scenario(settings, fetching):
        page = StatsPage(settings.instance, open_data(cold.data), cold.data)
        partition, row = fetching.partitions.open("t", 0), page.rows["gateway"]
        for each in (first, second):
            with pytest.raises(RequestRefused):
                await fetching.run(partition.read, each.base, 1)
        fetching.cold.publish(page)
        assert row.tier_damaged == 2 and page.note_of("gateway").startswith(f"offsets {second.base} to ")
        os.rename(f"{paths[1]}-away", paths[1])
        await fetching.run(partition.read, second.base, 1)
        fetching.cold.publish(page)
        assert row.tier_damaged == 1 and page.note_of("gateway").startswith(f"offsets {first.base} to ")
        os.rename(cold.broker.directory(), f"{cold.data}/gone")
        fetching.cold.publish(page)
        assert row.tier_damaged == 0 and page.note_of("gateway") == ""

    run(cold.data, scenario, f"file://{cold.broker.store.root}", has_settings=True)


def test_readers_who_wait_for_room_are_counted_from_the_first(cold, monkeypatch):
    monkeypatch.setattr(cold_module, "_FULL_S", 1e9)
    directory, found = cold.broker.directory(), rows.of(cold.broker.directory()).rows

    async def scenario(settings, fetching):
        page, reads = StatsPage(settings.instance, open_data(cold.data), cold.data), fetching.cold
        reads._open()._most = 2 * found[0].nbytes  # half of it: one object
        for row in found[:2]:
            reads.want(NotHereError(directory, 1, row))

        def is_said():
            reads.publish(page)
            return page.rows["gateway"].cache_full_since

        await until(is_said, "one of them has no room until the other one was read")
        since = is_said()
        here = []
        await until(
            lambda: (
                here.extend(row for row in found[:2] if os.path.exists(rows.cached_path(directory, 1, row))) or here
            ),
            "the other one is here",
        )
        assert fetching.partitions.open("t", 0).read(here[0].base, 1)[0] == here[0].base
        await until(lambda: not reads.waiting, "it has room")
        assert reads.cache_waits == 1 and is_said() == since
        monkeypatch.setattr(cold_module, "_FULL_S", 0.0)
        assert not is_said()

    run(cold.data, scenario, f"file://{cold.broker.store.root}", has_settings=True)


def test_an_object_that_is_gone_is_damage_and_neighbours_go_on(cold):
    found = rows.of(cold.broker.directory()).rows
    os.unlink(f"{cold.broker.store.root}/{cold.broker.copier.lineage}/{found[1].key}")

    async def scenario(fetching):
        partition = fetching.partitions.open("t", 0)
        with pytest.raises(RequestRefused) as refused:
            await fetching.run(partition.read, found[1].base, 1)
        assert refused.value.code == "damaged" and refused.value.fields["first_offset"] == found[1].base
        assert (await fetching.run(partition.read, found[0].base, 1))[0] == 0
        assert (await fetching.run(partition.read, found[2].base, 1))[0] == found[2].base
        cursor = Cursor(partition, found[1].base)
        with pytest.raises(RequestRefused):
            await fetching.fetch([cursor], ALL._replace(wait_s=60.0), values, asyncio.Event())

    run(cold.data, scenario, f"file://{cold.broker.store.root}")


def test_the_next_object_is_there_before_its_reader_asks(cold):
    async def scenario(fetching):
        partition = fetching.partitions.open("t", 0)
        await fetching.run(partition.read, 0, 1)
        second = cold.broker.rows()[1][0]
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{cold.data}/tier/cache/t/1/0/{second}/log"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert fetching.cold.waits == 1

    run(cold.data, scenario, f"file://{cold.broker.store.root}")


def test_without_a_store_old_records_are_refused_and_not_out_of_range(cold):
    async def scenario(fetching):
        cursor = Cursor(fetching.partitions.open("t", 0), 0, is_strict=True)
        with pytest.raises(RequestRefused) as refused:
            await fetching.fetch([cursor], ALL, values, asyncio.Event())
        assert refused.value.code == "cold"

    run(cold.data, scenario, "")


def test_who_comes_back_after_a_long_failure_asks_anew(cold, monkeypatch):
    """Nobody has asked for a while: the object was given up, and its reader is not left waiting for it."""
    is_away = True
    get = DirectoryStore.get

    def failing(self, key):
        if is_away and "/topics/" in key:
            raise StoreError("away")
        return get(self, key)

    monkeypatch.setattr(DirectoryStore, "get", failing)
    monkeypatch.setattr(cold_module, "_WANTED_S", 0.0)

    async def scenario(fetching):
        nonlocal is_away
        cursor = Cursor(fetching.partitions.open("t", 0), 0)
        await fetching.read([cursor], ALL, values)
        deadline = time.monotonic() + 60
        while not cursor.cold.is_given_up:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert not fetching.cold.waiting and cursor.has_news()
        is_away = False
        found = await fetching.fetch([cursor], ALL._replace(wait_s=60.0), values, asyncio.Event())
        assert found[0][0] == 0

    run(cold.data, scenario, f"file://{cold.broker.store.root}")


def test_a_store_that_fails_at_first_is_asked_again(cold, monkeypatch):
    failures = ["one", "two"]
    get = DirectoryStore.get

    def failing(self, key):
        if failures and "/topics/" in key:
            raise StoreError(failures.pop())
        return get(self, key)

    monkeypatch.setattr(DirectoryStore, "get", failing)

    async def scenario(fetching):
        assert (await fetching.run(fetching.partitions.open("t", 0).read, 0, 1))[0] == 0
        assert not failures

    run(cold.data, scenario, f"file://{cold.broker.store.root}")


def test_an_object_that_came_altered_once_is_fetched_again(cold, monkeypatch):
    get, altered = DirectoryStore.get, []

    def flip_once(self, key):
        content = b"".join(get(self, key))
        if "/topics/" in key and not altered:
            altered.append(key)
            content = content[:50] + bytes([content[50] ^ 4]) + content[51:]
        yield content

    monkeypatch.setattr(DirectoryStore, "get", flip_once)
    monkeypatch.setattr(cold_module, "_AGAIN_S", 0.01)

    async def scenario(fetching):
        assert (await fetching.run(fetching.partitions.open("t", 0).read, 0, 1))[0] == 0
        assert altered

    run(cold.data, scenario, f"file://{cold.broker.store.root}")


def test_podbus_has_a_damaged_cached_object_fetched_once_more(cold):
    async def scenario(fetching):
        fetching._router.seq = COUNT
        settings = load({"KMQ_DATA": cold.data, "KMQ_PODBUS_TOPIC": "t"}, "/nonexistent.toml")
        heals = fetching.cold, fetching.partitions.removed_from_cache
        bus = PodBus(settings, fetching.waking.watermark, FakeLogger(), Streams(9), None, *heals)
        first = await bus.consume(SimpleNamespace(offset=1), None)
        harm(cold)
        assert await bus.consume(SimpleNamespace(offset=1), None) == first and fetching.cold.fetched == 2

    run(cold.data, scenario, f"file://{cold.broker.store.root}")


@pytest.mark.parametrize("at", [0, 5000], ids=["at its start", "behind good records"])
def test_a_consumer_of_lines_that_catches_up_has_a_damaged_cached_object_fetched_once_more(cold, at):
    cold.get(cold.log().read, 0, 1)
    harm(cold, at=at)

    async def scenario(settings, fetching):
        strangers = Strangers(fetching._router, Incidents(lambda *_, **__: None))
        service = Service(
            settings, fetching.waking, None, strangers, Requests(), fetching.partitions, cold=fetching.cold
        )
        store = OffsetStore(settings, fetching.waking.watermark, FakeLogger())
        groups = Groups(settings, store, service.partitions, FakeLogger())
        lines = Lines(service, groups)
        server = await asyncio.get_running_loop().create_server(lines, "127.0.0.1", 0)
        got, sender = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            async with asyncio.timeout(60):
                sender.write(b"CONSUME t/0 from=0 raw\n")
                assert await got.readexactly(sum(map(len, cold.sent))) == b"".join(cold.sent)
        finally:
            sender.close()
            lines.stop()
            await lines.drain()
            server.close()
            service.close()

    run(cold.data, scenario, f"file://{cold.broker.store.root}", has_settings=True)


# --- room ------------------------------------------------------------------------------------------------------------


async def until(holds, what):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def test_what_lies_in_the_cache_at_a_start_gives_way_before_anything_is_read(cold, monkeypatch):
    monkeypatch.setattr(cold_module, "_TICK_S", 0.01)
    fetch(cold, 0)
    lacks_room = False

    async def scenario():
        nonlocal lacks_room
        again = ColdReads(
            cold.data, lambda _: None, f"file://{cold.broker.store.root}", 1 << 30, None, lambda: lacks_room
        )
        again.start()
        await until(lambda: again.nbytes == cold.cache.nbytes, "the objects from before are counted")
        lacks_room = True
        await until(lambda: not os.path.exists(f"{cold.data}/tier/cache/t/1/0/0"), "they give way")
        again.close()

    asyncio.run(scenario())


def test_the_cache_gives_way_as_early_as_segments_that_the_store_has(cold, tmp_path, monkeypatch):
    """Before any producer is refused: else hot records would leave the disk, and old ones stay on it."""
    monkeypatch.setattr(cold_module, "_TICK_S", 0.01)
    fetch(cold, 0)
    Path(cold.data, "filler").write_bytes(b"x" * (28 << 20))
    settings = {"KMQ_TIER": f"file://{cold.broker.store.root}", "KMQ_DATA_QUOTA": "64MiB", "KMQ_PIPES": str(tmp_path)}

    async def scenario(found):
        room = Admission(found.settings, lambda: 0)
        assert room.shortage() > 0 and not room.refusal()
        core = Core(found.settings, found.page, FakeLogger())
        core.cold.start()
        await until(lambda: not os.path.exists(f"{cold.data}/tier/cache/t/1/0/0"), "it gives way")
        await core.close()

    with up(cold.data, **settings) as found:
        asyncio.run(scenario(found))


def test_a_gateway_counts_its_cache_at_the_start_and_podbus_reads_and_heals_through_it(cold, tmp_path):
    fetch(cold, 1)
    ports = dict.fromkeys(("GRPC", "HTTP", "METRICS", "EGRESS", "STATUS", "KAFKA"), "0")
    settings = {f"KMQ_{name}_PORT": port for name, port in ports.items()} | {
        "KMQ_TIER": f"file://{cold.broker.store.root}",
        "KMQ_PODBUS_TOPIC": "t",
        "KMQ_PIPES": str(tmp_path),
    }

    async def scenario(found):
        gateway = Gateway(found.settings, found.page, FakeLogger())
        serving = asyncio.create_task(gateway.run())
        await until(lambda: gateway.core.cold.nbytes == cold.cache.nbytes, "what lies there from before is counted")
        assert not gateway.core.cold.fetched
        first = await gateway.bus.consume(SimpleNamespace(offset=1), None)
        harm(cold)
        assert await gateway.bus.consume(SimpleNamespace(offset=1), None) == first and gateway.core.cold.fetched == 2
        gateway.stopping.set()
        await serving

    with up(cold.data, synced=COUNT, **settings) as found:
        found.page.rows["router"].seq = COUNT
        asyncio.run(scenario(found))


def test_without_a_store_or_a_cache_a_start_does_nothing(cold):
    async def scenario():
        before = threading.active_count()
        for url in ("", f"file://{cold.broker.store.root}"):
            made = ColdReads(cold.data, lambda _: None, url, 1 << 30)
            made.start()
            assert made._ticking is None and threading.active_count() == before
            made.close()
            if not url:
                shutil.rmtree(f"{cold.data}/tier/cache")

    fetch(cold, 0)
    asyncio.run(scenario())


def test_an_object_that_takes_longer_than_a_tick_gives_way_too(cold, monkeypatch):
    monkeypatch.setattr(cold_module, "_TICK_S", 0.01)
    gate, ticks, tick, opened = threading.Event(), [], ColdReads._tick, store_module.open_store

    def slow(url):
        assert gate.wait(30)
        return opened(url)

    monkeypatch.setattr(store_module, "open_store", slow)
    monkeypatch.setattr(ColdReads, "_tick", lambda self: (ticks.append(1), tick(self)))
    row = rows.of(cold.broker.directory()).rows[0]

    async def scenario():
        made = ColdReads(cold.data, lambda _: None, f"file://{cold.broker.store.root}", 1 << 30, None, lambda: True)
        wanted = made.want(NotHereError(cold.broker.directory(), 1, row))
        await until(lambda: ticks, "a tick comes before the store is open")
        gate.set()
        await wanted.event.wait()
        assert cold.log().read(0, 1)[0] == 0
        await until(lambda: not os.path.exists(f"{cold.data}/tier/cache/t/1/0/0"), "it gives way once it was read")
        made.close()

    asyncio.run(scenario())
