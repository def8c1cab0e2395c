"""Fetch and its like over made files: each version in its form, batches as they were produced, and what is an error."""

import asyncio
import gc
import os
import random
import struct
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import cramjam
import pytest
from fake_logger import FakeLogger
from kafka_batches import HEADER_BYTES, Sent, fetched, framed, records_of
from kafka_peer import Peer
from kio.schema.errors import ErrorCode
from log_server import up
from made_data import FIRST_TS, append, write_data
from tiered import cold_broker
from waiting import until

from kmq.broker.stats import STATES, Incidents, Strangers
from kmq.gateway.core import times
from kmq.gateway.core.core import Core
from kmq.gateway.core.metrics import Requests
from kmq.gateway.core.partitions import Partition, Partitions
from kmq.gateway.kafka import fetching
from kmq.gateway.kafka.cache import MAX_BATCH, TailCache
from kmq.gateway.kafka.door import Cluster, Kafka
from kmq.gateway.kafka.fetching import FetchHandler
from kmq.gateway.kafka.records import encode, patched, read_batches, render
from kmq.gateway.kafka.topic_ids import TopicIds
from kmq.gateway.kafka.wire import Key
from kmq.log import rows, topics
from kmq.log.index import IndexWriter
from kmq.log.segment import index_path, remove, survey
from kmq.tier.store import DirectoryStore
from kmq.wire.requests import TopicPartition

CODECS = {0: None, 1: cramjam.gzip, 2: cramjam.snappy, 3: cramjam.lz4, 4: cramjam.zstd}


class Door:
    """The Kafka door on a data directory, without the stages. `page`: their state, as it is believed."""

    def __init__(self, found, cache, *api_handlers):
        self._api_handlers = api_handlers
        self.page, self.cache, self.said = found.page, cache, []
        self.incidents = Incidents(lambda event, **fields: self.said.append((event, fields["count"], fields["reason"])))
        self._settings, self._port, self._is_up = found.settings, 0, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._is_up.wait(60)

    async def _serve(self):
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        strangers = Strangers(self.page.rows["gateway"], self.incidents)
        self.core, counts = Core(self._settings, self.page, FakeLogger(), strangers), Requests()
        ids = TopicIds(self.core.partitions)
        self._fetching = FetchHandler(self.core, ids, self.cache, counts, self.incidents, lambda: 0)
        cluster = Cluster(self._settings, self.core, ids, lambda: 0)
        kafka = Kafka(cluster, None, strangers, counts, FakeLogger(), (self._fetching, *self._api_handlers))
        server = await self._loop.create_server(kafka, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._over.wait()
        server.close()
        kafka.stop()
        await kafka.drain()
        await self.core.close()

    def hear_no_events(self):
        """From now on those of the kernel come later than any request."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (self._loop.remove_reader(self.core.waking._fd), done.set()))
        assert done.wait(60)

    @contextmanager
    def watched(self):
        """A list of the longest time for which the loop has served nobody, once the block has ended.

        As in a gateway, the garbage collector does not walk what was there before: here, all that pytest has imported.
        """
        longest = [0.0]
        gc.collect()
        gc.freeze()

        async def look():
            while True:
                begun = time.monotonic()
                await asyncio.sleep(0.001)
                longest[0] = max(longest[0], time.monotonic() - begun)

        looking = asyncio.run_coroutine_threadsafe(look(), self._loop)
        yield longest
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self._loop).result(60)  # it has looked once more
        looking.cancel()

    def remembered(self):
        """The partitions that are remembered."""
        return [view for consumer in self._fetching._consumers.values() for view in consumer.views]

    def close(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


@contextmanager
def opened(data, cache_bytes=1 << 20, api_handlers=(), **settings):
    """(a door, a client of it)"""
    with up(data, synced=1 << 40, **settings) as found:
        found.page.rows["gateway"].state = STATES.index("ready")
        door = Door(found, TailCache(cache_bytes), *api_handlers)
        try:
            with Peer(door.port) as peer:
                yield door, peer
        finally:
            door.close()


def batches(row):
    """The batches of a row, read."""
    data, found = bytes(row.records or b""), []
    while data:
        length = 12 + struct.unpack_from(">i", data, 8)[0]
        codec = data[22] & 7
        found.append(fetched(data[:length], decompressed(codec, data[HEADER_BYTES:length]) if codec else None))
        data = data[length:]
    return found


def values(row):
    return [(offset, sent.value) for batch in batches(row) for offset, sent in batch.records]


def decompressed(codec, data):
    module = CODECS[codec]
    return bytes(module.decompress_raw(data) if codec == 2 else module.decompress(data))


def compressed(codec, data):
    module = CODECS[codec]
    return data if module is None else bytes(module.compress_raw(data) if codec == 2 else module.compress(data))


def produced(rows, codec=0, producer=(7, 1, 5)):
    """A batch as a producer sends it."""
    base, latest = rows[0].timestamp, max(row.timestamp for row in rows)
    records = compressed(codec, records_of(rows, base))
    more = {"attributes": codec, "base": base, "latest": latest, "producer": producer}
    return framed(records, len(rows), last_delta=len(rows) - 1, **more)


def lines_of(count, topic="t", start=0):
    return [b"%b.@0|%d.%03d||%d" % (topic.encode(), n, n, n) for n in range(start, start + count)]


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_from_the_cache_says_what_its_lines_say_field_by_field(codec):
    rng = random.Random(codec)
    pool = [None, b"", b"x", "ü".encode(), b"\0\xff|;\n", b"a|b;c%d", b"k" * 300]
    for first in (0, 5, 10**12):
        rows = []
        for n in range(rng.randrange(1, 60)):
            headers = tuple((b"h%d" % i, rng.choice(pool)) for i in range(rng.randrange(3)))
            rows.append(Sent(1714500000000 + rng.randrange(-9, 9) * n, rng.choice(pool), rng.choice(pool), headers))
        data = produced(rows, codec)
        (batch,) = read_batches(data)
        rendered = render(batch, "t", 0, b"k1000001.1.0", 1, 1 << 20)
        assert rendered.is_exact
        stored = b"".join(
            b"%d|1714599999.000001|%b\n" % (n, line) for n, line in enumerate(rendered.text.split(b"\n")[:-1], 1)
        )
        cached = patched(data, first, 3)
        from_cache = fetched(cached, decompressed(codec, cached[HEADER_BYTES:]) if codec else None)
        from_lines = fetched(encode("t", 0, first, stored, leader_epoch=3))
        assert from_cache.records == from_lines.records == [*enumerate(rows, first)]
        assert from_cache[:3] == from_lines[:3] and from_cache.max_timestamp == from_lines.max_timestamp


def test_the_cache_finds_a_batch_by_each_of_its_offsets_and_by_no_other():
    cache = TailCache(1 << 20)
    for first, last in ((10, 19), (30, 30), (20, 25)):
        cache.put("t", 0, first, last, b"%d" % first * 12, 7)
    found = {offset: cache.find("t", 0, offset, 7) for offset in range(40)}
    assert {offset: batch.first for offset, batch in found.items() if batch} == (
        dict.fromkeys(range(10, 20), 10) | dict.fromkeys(range(20, 26), 20) | {30: 30}
    )
    assert cache.find("t", 1, 10, 7) is None and cache.find("u", 0, 10, 7) is None
    assert cache.find("t", 0, 10, 8) is None and cache.find("t", 0, 10, None) is None  # the topic was made again


def test_the_cache_drops_what_was_put_first_and_takes_nothing_too_large():
    cache, data = TailCache(10_000), b"x" * 1600  # 2,000 with what an entry takes besides
    for number in range(7):
        cache.put("t", number % 2, 100 - number, 100 - number, data, 1)
    assert [cache.find("t", n % 2, 100 - n, 1) is not None for n in range(7)] == [False] * 2 + [True] * 5
    cache.put("t", 0, 200, 200, b"x" * 9700, 1)
    assert cache.find("t", 0, 200, 1) is None and cache.find("t", 0, 94, 1) is not None
    large = TailCache(1 << 30)
    large.put("t", 0, 0, 0, b"x" * (MAX_BATCH + 1), 1)
    assert large.find("t", 0, 0, 1) is None
    nothing = TailCache(0)
    nothing.put("t", 0, 0, 0, b"x", 1)
    assert nothing.find("t", 0, 0, 1) is None


def test_a_consumer_waits_for_the_batch_that_is_coming_and_for_no_other():
    """It waits behind the last batch, while another one comes, until that is there or has failed, and not for long."""
    place, cache = TopicPartition("t", 0), TailCache(1 << 20)

    async def coming(event, first=None):
        await event.wait()
        if first is not None:
            cache.put("t", 0, first, first + 9, b"x" * 100, 1)

    async def waits(offset):
        waiting = asyncio.ensure_future(cache.wait([(TopicPartition("u", 0), 0), (place, offset)], 60))
        for _ in range(5):
            await asyncio.sleep(0)
        return waiting

    async def work():
        events = [asyncio.Event() for _ in range(3)]
        assert (await waits(0)).done(), "nothing is coming"
        for event, first in zip(events, (0, 10, None), strict=True):
            cache.expect(place, asyncio.ensure_future(coming(event, first)))
        assert (await waits(0)).done(), "nothing is there that it could follow"
        events[0].set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert (await waits(3)).done() and (await waits(30)).done(), "it is there, or lies far behind"
        waiting = await waits(10)
        assert not waiting.done()
        events[1].set()
        await asyncio.wait_for(waiting, 30)
        waiting = await waits(20)
        events[2].set()
        await asyncio.wait_for(waiting, 30)
        assert cache.find("t", 0, 20, 1) is None, "the batch has failed"
        held = asyncio.ensure_future(coming(asyncio.Event()))
        cache.expect(place, held)
        began = time.monotonic()
        await cache.wait([(place, 20)], 60)
        assert 0.04 < time.monotonic() - began < 30, "what is held up is not waited for"
        held.cancel()

    asyncio.run(work())


@pytest.fixture
def tail(tmp_path):
    """A directory with ten records, and the batches of 0-4 and 5-9."""
    rows = [Sent(1000 * n + n, None, b"%d" % n) for n in range(10)]
    return write_data(tmp_path, lines_of(10), {"t": 1}), [(0, produced(rows[:5])), (5, produced(rows[5:]))]


def keep(door, tail_batches, from_seq=None):
    life = topics.read(str(door.core.settings.data), "t").from_seq if from_seq is None else from_seq
    for first, data in tail_batches:
        door.cache.put("t", 0, first, first + 4, data, life)


def sources(row):
    """(first offset, producer id) of each batch: -1 if it was made of lines."""
    return [(batch.base_offset, batch.producer[0]) for batch in batches(row)]


def test_batches_are_served_as_they_were_produced_also_from_inside(tail):
    data, kept = tail
    with opened(data) as (door, peer):
        keep(door, kept)
        assert sources(peer.fetch("t", 0, 0)) == [(0, 7), (5, 7)]
        row = peer.fetch("t", 0, 7)
        assert sources(row) == [(5, 7)] and [offset for offset, _ in values(row)] == [5, 6, 7, 8, 9]
        assert values(peer.fetch("t", 0, 0)) == [(n, b"%d" % n) for n in range(10)]
        assert {batch.leader_epoch for batch in batches(row)} == {0}


def test_who_follows_is_served_as_produced_without_a_file_until_there_is_something_else(tmp_path):
    """A thread that reads files gets its turn late where much is produced: then a consumer falls behind the cache."""
    made = write_data(tmp_path, lines_of(10), {"t": 2}, closed=False)
    rows = [Sent(1000 * n + n, None, b"%d" % n) for n in range(20)]
    both = {("t", 0): 5, ("t", 1): 0}
    with opened(str(tmp_path)) as (door, peer):
        peer.send_fetch(both, wait_ms=1)
        assert sources(peer.read_fetched()["t", 0]) == [(5, -1)]
        run, door.core.fetching.run = door.core.fetching.run, None
        keep(door, [(5, produced(rows[5:10]))])
        peer.send_fetch(both, wait_ms=60_000)
        assert sources(peer.read_fetched()["t", 0]) == [(5, 7)]
        append(made, lines_of(5, start=10))
        keep(door, [(10, produced(rows[10:15]))])
        row = peer.fetch("t", 0, 5)
        assert sources(row) == [(5, 7), (10, 7)] and row.high_watermark == 15
        door.core.fetching.run = run
        append(made, [b"t.@1|||new"])
        peer.send_fetch(both, wait_ms=60_000)
        found = peer.read_fetched()
        assert [values(found["t", 1]), len(values(found["t", 0]))] == [[(0, b"new")], 10]
    for each in made[:2]:
        each.close()


def test_a_partition_for_which_there_is_no_room_is_no_reason_to_read_files(tmp_path, monkeypatch):
    made = write_data(tmp_path, [*lines_of(5), *(line.replace(b"@0", b"@1") for line in lines_of(5))], {"t": 2})
    rows = [Sent(1000 * n + n, None, b"%d" % n) for n in range(5)]
    with opened(made) as (door, peer):
        peer.send_fetch({("t", 0): 5, ("t", 1): 5}, wait_ms=1)
        peer.read_fetched()
        for number in (0, 1):
            door.cache.put("t", number, 0, 4, produced(rows), topics.read(made, "t").from_seq)
        door.core.fetching.run = None
        peer.send_fetch({("t", 0): 0, ("t", 1): 0}, max_bytes=len(produced(rows)) + 10)
        found = peer.read_fetched()
        assert sources(found["t", 0]) == [(0, 7)] and not found["t", 1].records and found["t", 1].high_watermark == 5


def test_who_waits_for_more_than_there_is_reads_it_once_however_much_larger_its_lines_are(tmp_path):
    made = write_data(tmp_path, lines_of(2000), {"t": 1}, closed=False)
    with opened(str(tmp_path)) as (_, peer):
        assert values(peer.fetch("t", 0, 1000, partition_bytes=1))
        reads, read = [], Partition.read
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Partition, "read", lambda *asked: reads.append(asked) or read(*asked))
            append(made, lines_of(2000, start=2000))
            assert len(values(peer.fetch("t", 0, 1000, min_bytes=60_000, wait_ms=500))) == 3000
        assert len(reads) <= 3
    for each in made[:2]:
        each.close()


def test_a_high_watermark_is_never_below_what_is_told_and_does_not_fall(tmp_path):
    made = write_data(tmp_path, lines_of(10), {"t": 1}, closed=False)
    rows = [Sent(1000 * n + n, None, b"%d" % n) for n in range(30)]
    with opened(str(tmp_path)) as (door, peer):
        assert peer.fetch("t", 0, 0, partition_bytes=1).high_watermark == 10
        append(made, lines_of(20, start=10))
        keep(door, [(0, produced(rows[:5])), (25, produced(rows[25:]))])
        assert peer.fetch("t", 0, 0, partition_bytes=1).high_watermark == 30
        row = peer.fetch("t", 0, 6)
        assert row.high_watermark == 30 and values(row)[-1][0] == 29
    for each in made[:2]:
        each.close()


def test_a_small_limit_gives_one_produced_batch_and_a_large_one_all(tail):
    data, kept = tail
    with opened(data) as (door, peer):
        keep(door, kept)
        assert sources(peer.fetch("t", 0, 0, max_bytes=1)) == [(0, 7)]
        assert sources(peer.fetch("t", 0, 0, partition_bytes=1)) == [(0, 7)]


def test_batches_that_begin_before_the_start_are_read_from_lines(tmp_path):
    made = write_data(tmp_path, lines_of(2000), {"t": 1}, segment_bytes=1 << 16, group=100)
    logs = sorted((tmp_path / "topics" / "t" / "0").glob("*.log"))
    rows = [Sent(1000 * n + n, None, b"%d" % n) for n in range(2000)]
    first = int(logs[1].stem)
    with opened(made) as (door, peer):
        keep(door, [(first - 2, produced(rows[first - 2 : first + 3]))])
        assert sources(peer.fetch("t", 0, first))[0] == (first - 2, 7)
        logs[0].unlink()
        logs[0].with_suffix(".idx").unlink()
        row = peer.fetch("t", 0, first)
        assert sources(row)[0] == (first, -1) and row.log_start_offset == first


def test_batches_of_a_topic_that_was_deleted_are_not_served(tail):
    data, kept = tail
    with opened(data) as (door, peer):
        keep(door, kept, from_seq=99)
        assert sources(peer.fetch("t", 0, 0)) == [(0, -1)]


def test_a_compacted_topic_is_read_from_its_lines(tail):
    data, kept = tail
    with opened(data) as (door, peer):
        keep(door, kept)
        assert sources(peer.fetch("t", 0, 0)) == [(0, 7), (5, 7)]
        with open(topics.toml_path(data, "t"), "r+") as file:
            text = topics.with_limits(file.read(), {"cleanup": "compact"})
            file.seek(0)
            file.write(text)
        assert sources(peer.fetch("t", 0, 0)) == [(0, -1)]


def test_a_batch_whose_end_the_files_do_not_have_is_not_served(tail):
    data, kept = tail
    with opened(data) as (door, peer):
        keep(door, [(7, kept[1][1])])  # 7 to 11
        assert [offset for offset, _ in values(peer.fetch("t", 0, 7))] == [7, 8, 9]


def test_a_client_that_does_not_know_zstd_gets_lines(tail):
    data, _ = tail
    rows = [Sent(1000 * n + n, None, b"%d" % n) for n in range(5)]
    with opened(data) as (door, peer):
        keep(door, [(0, produced(rows, 4))])
        assert sources(peer.fetch("t", 0, 0, 9)) == [(0, -1)]
        assert sources(peer.fetch("t", 0, 0, 10))[0] == (0, 7)


# --- versions, limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(4, 13))
def test_each_version_is_answered_in_its_form(tmp_path, version):
    data = write_data(tmp_path, lines_of(3), {"t": 2})
    with opened(data) as (_, peer):
        peer.send_fetch({("t", 0): 1, ("t", 1): 0, ("t", 2): 0, ("none", 0): 0}, version)
        rows = peer.read_fetched()
    assert values(rows["t", 0]) == [(1, b"1"), (2, b"2")]
    assert (rows["t", 0].high_watermark, rows["t", 0].last_stable_offset) == (3, 3)
    assert [rows[place].error_code for place in (("t", 1), ("t", 2), ("none", 0))] == [
        ErrorCode.none,
        *[ErrorCode.unknown_topic_or_partition] * 2,
    ]
    assert bytes(rows["t", 1].records) == b"" and rows["t", 0].aborted_transactions is None


def test_a_record_is_given_however_large_it_is(tmp_path):
    long = b"t.@0|||" + b"x" * 900_000
    data = write_data(tmp_path, [long, long, b"u.@0|||a", b"u.@0|||b"], {"t": 1, "u": 1})
    with opened(data) as (_, peer):
        for limits in ({"max_bytes": 1}, {"partition_bytes": 1}, {"max_bytes": 0, "partition_bytes": -5}):
            assert [offset for offset, _ in values(peer.fetch("t", 0, 0, **limits))] == [0]
        peer.send_fetch({("u", 0): 0, ("t", 0): 0}, max_bytes=1000)
        rows = peer.read_fetched()
        assert values(rows["u", 0]) == [(0, b"a"), (1, b"b")] and bytes(rows["t", 0].records) == b""


def test_an_answer_is_bounded_whatever_a_client_asks_for(tmp_path):
    lines = [b"t.@%d|||%b" % (n % 4, b"x" * 100_000) for n in range(200)]
    data = write_data(tmp_path, lines, {"t": 4})
    most = 2**31 - 1
    with opened(data) as (_, peer):
        peer.send_fetch({("t", n): 0 for n in range(4)}, max_bytes=most, partition_bytes=most, min_bytes=most)
        rows = peer.read_fetched().values()
        sizes = [len(row.records) for row in rows]
        assert 3_500_000 < sum(sizes) <= 4 << 20
        assert all(row.high_watermark == 50 for row in rows)
        assert all(len(batch.records) <= 11 for row in rows for batch in batches(row))


def test_all_records_come_once_in_order_over_segments_and_small_answers(tmp_path):
    lines = [b"t.@0|||%d %b" % (n, b"x" * random.Random(n).randrange(300)) for n in range(3000)]
    data = write_data(tmp_path, lines, {"t": 1}, segment_bytes=1 << 16, group=50)
    with opened(data) as (_, peer):
        for size in (3_000, 20_000, 70_000, 1 << 20):
            found = []
            while len(found) < 3000:
                found += values(peer.fetch("t", 0, len(found), partition_bytes=size))
            assert found == [(n, line.split(b"|", 3)[3]) for n, line in enumerate(lines)]


def test_an_answer_with_too_little_waits_for_more_and_comes_at_the_latest_when_its_time_is_up(tmp_path):
    made = write_data(tmp_path, lines_of(10), {"t": 1}, closed=False)
    with opened(str(tmp_path)) as (_, peer):
        assert len(values(peer.fetch("t", 0, 0, min_bytes=100_000, wait_ms=50))) == 10
        peer.send_fetch({("t", 0): 0}, min_bytes=3000, wait_ms=60_000)
        for n in range(10, 400, 10):
            append(made, lines_of(10, start=n))
        assert 200 < len(values(peer.read_fetched()["t", 0])) <= 400
        peer.send_fetch({("t", 0): 400}, wait_ms=60_000)
        append(made, lines_of(1, start=400))
        assert values(peer.read_fetched()["t", 0]) == [(400, b"400")]


def test_what_came_in_a_wait_for_more_is_given_when_the_time_is_up(tmp_path):
    made = write_data(tmp_path, lines_of(10), {"t": 1}, closed=False)
    with opened(str(tmp_path)) as (door, peer):
        peer.send_fetch({("t", 0): 10}, min_bytes=100_000, wait_ms=2000)
        until(lambda: door.core.waking.watches)
        append(made, lines_of(1, start=10))
        assert values(peer.read_fetched()["t", 0]) == [(10, b"10")]
    for each in made[:2]:
        each.close()


def test_a_record_that_a_client_knows_of_is_read_before_its_event_has_come(tmp_path):
    """The partition is quiet, as far as events have been read: without a look the offset would be out of range."""
    made = write_data(tmp_path, lines_of(3), {"t": 1}, closed=False)
    with opened(str(tmp_path)) as (door, peer):
        assert bytes(peer.fetch("t", 0, 3, wait_ms=1).records) == b""
        door.hear_no_events()
        append(made, lines_of(2, start=3))
        row = peer.fetch("t", 0, 5)
        assert (row.error_code, row.high_watermark) == (ErrorCode.none, 5)
    for each in made[:2]:
        each.close()


def test_partitions_of_those_who_were_served_longest_ago_are_forgotten_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "_MOST_VIEWS", 25)
    monkeypatch.setattr(fetching, "_SPARE_WATCHES", 2)
    made = write_data(tmp_path, [b"t.@%d|0||%d" % (n, n) for n in range(40)], {"t": 40}, closed=False)
    with opened(str(tmp_path)) as (door, peer), Peer(door.port) as second, Peer(door.port) as third:
        for turn in range(9):
            for number, each in enumerate((peer, second, third)):
                first = (number * 7 + turn * 11) % 30
                each.send_fetch({("t", place): 0 for place in range(first, first + 10)}, wait_ms=10)
                rows = each.read_fetched()
                assert all(values(row) == [(0, b"%d" % place)] for (_, place), row in rows.items())
                each.send_fetch({("t", place): 1 for place in range(first, first + 10)}, wait_ms=1)
                assert not any(values(row) for row in each.read_fetched().values())
                assert len(door.remembered()) <= 25 and door.core.waking.watches <= 36
        peer.send_fetch({("t", place): 1 for place in range(10)}, wait_ms=60_000)
        began = time.monotonic()
        append(made, [b"t.@5|0||again"])
        assert values(peer.read_fetched()["t", 5]) == [(1, b"again")]
        assert time.monotonic() - began < 20  # it was woken
    assert door.core.waking.watches == 0 and not door.remembered()
    for each in made[:2]:
        each.close()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_offset_that_is_not_there_is_told_with_start_and_end(tmp_path):
    data = write_data(tmp_path, lines_of(2000), {"t": 1}, segment_bytes=1 << 16, group=100)
    logs = sorted((tmp_path / "topics" / "t" / "0").glob("*.log"))
    first = int(logs[1].stem)
    with opened(data) as (_, peer):
        assert values(peer.fetch("t", 0, 5, max_bytes=1))[0][0] == 5
        assert bytes(peer.fetch("t", 0, 2000, wait_ms=1).records) == b""  # from now on only an event is looked for
        logs[0].unlink()
        logs[0].with_suffix(".idx").unlink()
        for offset in (5, -1, 2001, 2**62):
            row = peer.fetch("t", 0, offset)
            found = row.error_code, row.log_start_offset, row.high_watermark
            assert found == (ErrorCode.offset_out_of_range, first, 2000)
        assert values(peer.fetch("t", 0, first, max_bytes=1))[0][0] == first


def test_an_error_is_told_at_once_and_then_with_what_there_is(tmp_path):
    data = write_data(tmp_path, lines_of(3), {"t": 1})
    with opened(data) as (_, peer):
        for offsets in ({("none", 0): 0, ("t", 0): 3}, {("t", 0): 4}):
            began = time.monotonic()
            peer.send_fetch(offsets, wait_ms=60_000)
            peer.read_fetched()
            assert time.monotonic() - began < 20
            began = time.monotonic()
            peer.send_fetch(offsets, wait_ms=300)
            assert {row.error_code for row in peer.read_fetched().values()} - {ErrorCode.none}
            assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize(("stage", "state"), [("router", "recovering"), ("gateway", "recovering")])
def test_no_offset_is_out_of_range_while_the_router_or_the_gateway_starts(tmp_path, stage, state):
    data = write_data(tmp_path, lines_of(3), {"t": 1})
    with opened(data) as (door, peer):
        door.page.rows[stage].state = STATES.index(state)
        assert peer.fetch("t", 0, 4).error_code == ErrorCode.not_leader_or_follower
        assert len(values(peer.fetch("t", 0, 0))) == 3
        door.page.rows[stage].state = STATES.index("ready")
        assert peer.fetch("t", 0, 4).error_code == ErrorCode.offset_out_of_range


def test_leader_epochs_that_are_not_ours_are_refused(tmp_path):
    data = write_data(tmp_path, lines_of(3), {"t": 1})
    with opened(data) as (_, peer):
        for version in (9, 12):
            codes = [peer.fetch("t", 0, 0, version, epoch=epoch).error_code for epoch in (-1, 0, 1, -2)]
            none, later, older = ErrorCode.none, ErrorCode.unknown_leader_epoch, ErrorCode.fenced_leader_epoch
            assert codes == [none, none, later, older]


def test_a_damaged_partition_is_an_error_and_the_others_are_served(tmp_path, monkeypatch):
    lines = [b"%b.@0|||%d %b" % (topic, n, b"x" * 100) for n in range(3000) for topic in (b"t", b"u")]
    data = write_data(tmp_path, lines, {"t": 1, "u": 1})
    (log,) = (tmp_path / "topics" / "t" / "0").glob("*.log")
    monkeypatch.setattr(fetching, "_REST_S", 3600)
    with open(log, "r+b") as file:
        file.seek(200_000)
        whole = file.read(2)
        file.seek(200_000)
        file.write(b"\xff\xff")
    with opened(data) as (door, peer):
        offset = 0
        while True:
            peer.send_fetch({("t", 0): offset, ("u", 0): 0}, wait_ms=60_000)
            rows = peer.read_fetched()
            assert rows["u", 0].error_code == ErrorCode.none and values(rows["u", 0])
            if rows["t", 0].error_code != ErrorCode.none:
                break
            offset = values(rows["t", 0])[-1][0] + 1
        assert rows["t", 0].error_code == ErrorCode.kafka_storage_error and 500 < offset < 2000
        door.incidents.say()
        assert [said[:2] for said in door.said] == [("kafka_not_read", 1)] and "t/0: " in door.said[0][2]
        with open(log, "r+b") as file:  # it is mended, which is found out after a while, or elsewhere
            file.seek(200_000)
            file.write(whole)
        assert peer.fetch("t", 0, offset).error_code == ErrorCode.kafka_storage_error
        assert values(peer.fetch("t", 0, offset - 1))[-1][0] > offset
        assert peer.fetch("t", 0, offset).error_code == ErrorCode.none


def test_a_session_that_another_broker_has_begun_is_refused_and_a_new_one_is_not_begun(tmp_path):
    data = write_data(tmp_path, lines_of(3), {"t": 1})
    with opened(data) as (_, peer):
        for session, code in (((5, 1), 70), ((5, -1), 0), ((0, 0), 0)):
            peer.send_fetch({("t", 0): 0}, session=session)
            found = peer.read()
            assert (found.error_code, found.session_id, len(found.responses)) == (code, 0, int(not code))


# --- ListOffsets, OffsetForLeaderEpoch -------------------------------------------------------------------------------


def asked(peer, timestamp, version=6, topic="t", partition=0, **more):
    parts = [{"partition_index": partition, "timestamp": timestamp} | more]
    more = {"isolation_level": 0} if version >= 2 else {}
    found = peer.ask(2, version, replica_id=-1, topics=[{"name": topic, "partitions": parts}], **more)
    return found.topics[0].partitions[0]


@pytest.mark.parametrize("version", range(1, 8))
def test_offsets_are_listed_in_each_version(tmp_path, version):
    data = write_data(tmp_path, lines_of(3), {"t": 1})
    with opened(data) as (_, peer):
        found = [asked(peer, time, version) for time in (-2, -1)]
        assert [(row.error_code, row.timestamp, row.offset) for row in found] == [(0, -1, 0), (0, -1, 3)]
        assert version < 4 or {row.leader_epoch for row in found} == {0}
        missing = [asked(peer, -1, version, *place) for place in (("t", 1), ("t", -1), ("none", 0))]
        assert {row.error_code for row in missing} == {ErrorCode.unknown_topic_or_partition}
        assert {row.offset for row in missing} == {-1}


def test_a_time_is_found_by_what_records_show(tmp_path):
    came = FIRST_TS // 1_000_000  # in seconds; each record a microsecond after the one before
    shown = [came - 100, came - 90, came + 50, came - 70, came + 90]
    data = write_data(tmp_path, [b"t.@0|%d||x" % second for second in shown], {"t": 1})
    with opened(data) as (_, peer):

        def found(second):
            row = asked(peer, second * 1000)
            return row.offset, row.timestamp // 1000

        assert [found(came + after) for after in (-1000, -100, -95, -80, 0, 51)] == [
            *[(0, came - 100)] * 2,
            (1, came - 90),
            *[(2, came + 50)] * 2,
            (4, came + 90),
        ]
        assert asked(peer, (came + 91) * 1000).offset == -1
        highest = asked(peer, -3, 7)
        assert (highest.offset, highest.timestamp) == (4, (came + 90) * 1000)
        assert asked(peer, -4).error_code == ErrorCode.invalid_request


def test_a_search_by_time_that_takes_too_long_is_repeated_and_goes_on(tmp_path, monkeypatch):
    lines = [b"t.@0|5||%b" % (b"x" * 900)] * 4000 + [b"t.@0|6||x"]
    data = write_data(tmp_path, lines, {"t": 1})
    monkeypatch.setattr(times, "READ_S", 0.0)  # each request reads one run
    with opened(data) as (_, peer):
        found = [asked(peer, 6000) for _ in range(5)]
        assert [row.error_code for row in found[:2]] == [ErrorCode.not_leader_or_follower] * 2
        assert (found[-1].error_code, found[-1].offset, found[-1].timestamp) == (0, 4000, 6000)


@pytest.mark.parametrize("size", [1, 3000])
def test_times_are_those_of_all_records_after_compaction_retention_and_appends(tmp_path, size):
    rng = random.Random(size)
    made = write_data(tmp_path, [b"t.@0|5||x"], {"t": 1}, segment_bytes=20 * size + 20_000, group=100, closed=False)
    partition = Partitions(str(tmp_path)).open("t", 0)
    shown = {0: 5000}

    def check():
        for target in range(0, 5_200_000, 200_500):
            expected = next((row for row in sorted(shown.items()) if row[1] >= target), None)
            found = partition.first_shown(target)
            assert (found and (found.offset, found.timestamp)) == expected
        highest = partition.highest_shown()
        assert (highest.offset, highest.timestamp) == max(shown.items(), key=lambda row: (row[1], -row[0]))

    for _ in range(4):
        seconds = [rng.randrange(5000) for _ in range(500)]
        shown |= {len(shown) + n: second * 1000 for n, second in enumerate(seconds)}
        append(made, [b"t.@0|%d||%b" % (second, b"x" * size) for second in seconds], 100)
        check()
    made[0].close()
    made[1].close()
    oldest, other, third, *_ = survey(f"{tmp_path}/topics/t/0")
    remove([oldest])  # as retention does it
    shown = {at: ms for at, ms in shown.items() if at >= other.first}
    check()
    rows = Path(other.path).read_bytes().split(b"\n")[:-1]  # as compaction does it
    Path(other.path).write_bytes(b"\n".join([b"" if n % 3 else row for n, row in enumerate(rows)] + [b""]))
    Path(index_path(other.path)).unlink()
    IndexWriter.complete(other.path, other.first, lambda *_: None)
    shown = {at: ms for at, ms in shown.items() if not (at - other.first) % 3 or at >= third.first}
    check()


def test_the_end_of_an_epoch_up_to_ours_is_the_end_of_the_partition(tmp_path):
    data = write_data(tmp_path, lines_of(3), {"t": 1})
    with opened(data) as (_, peer):
        for version in (2, 3, 4):
            rows = {}
            for current, epoch in ((-1, 0), (0, 0), (-1, 1), (-1, -1), (1, 0)):
                part = {"partition": 0, "current_leader_epoch": current, "leader_epoch": epoch}
                more = {"replica_id": -1} if version >= 3 else {}
                found = peer.ask(23, version, topics=[{"topic": "t", "partitions": [part]}], **more)
                (row,) = found.topics[0].partitions
                rows[current, epoch] = row.error_code, row.leader_epoch, row.end_offset
            assert rows == {
                (-1, 0): (0, 0, 3),
                (0, 0): (0, 0, 3),
                (-1, 1): (0, -1, -1),
                (-1, -1): (0, -1, -1),
                (1, 0): (ErrorCode.unknown_leader_epoch, -1, -1),
            }


# --- what strangers send ---------------------------------------------------------------------------------------------


def test_a_fetch_that_lies_ends_its_connection_and_takes_no_memory(tmp_path):
    data = write_data(tmp_path, lines_of(3), {"t": 1})
    rng = random.Random(1)
    with opened(data) as (door, peer):
        for version in range(4, 13):
            with Peer(door.port) as honest:
                honest.send_fetch({("t", 0): 0, ("u", 3): 5}, version)
                assert honest.read_fetched()
                whole = honest.last_request
            bad = [whole[:cut] for cut in range(12, len(whole), 3)] + [whole + b"\0"]
            for _ in range(30):
                at, size = rng.randrange(12, len(whole)), rng.choice((1, 2, 4))
                bad.append(whole[:at] + rng.choice((b"\xff", b"\x7f", b"\x80", b"\0")) * size + whole[at + size :])
            for request in bad:
                with Peer(door.port) as liar:
                    liar.send_raw(request)
                    liar.sock.shutdown(1)
                    liar.read_raw()  # an answer, or nothing
        assert values(peer.fetch("t", 0, 0)) == [(n, b"%d" % n) for n in range(3)]


def test_a_fetch_of_too_many_partitions_ends_its_connection(tmp_path):
    data = write_data(tmp_path, lines_of(3), {"t": 1})
    with opened(data) as (door, peer):
        with Peer(door.port) as many:
            many.send_fetch({("t", number): 0 for number in range(9_000)})
            rows = many.read_fetched()
            assert len(rows) == 9_000 and len(values(rows["t", 0])) == 3
        with Peer(door.port) as many:
            many.send_fetch({("t", number): 0 for number in range(10_001)})
            assert many.read_raw() == b""
        assert len(values(peer.fetch("t", 0, 0))) == 3


class LargeGroup:
    """An API handler that says of each group that it has so many members."""

    def __init__(self, members):
        self.handlers, self._members = {Key.DESCRIBE_GROUPS: self._describe}, members

    async def _describe(self, call):
        texts = ("member_id", "group_instance_id", "client_id", "client_host")
        member = dict.fromkeys(texts, "m") | dict.fromkeys(("member_metadata", "member_assignment"), b"x")
        row = {"error_code": ErrorCode.none, "group_state": "Stable", "protocol_type": "consumer", "protocol_data": ""}
        return {
            "groups": [row | {"group_id": group, "members": [member] * self._members} for group in call.body.groups]
        }

    def forget(self, connection):
        pass

    async def close(self):
        pass


def test_an_answer_with_many_entries_in_an_entry_holds_up_nobody_else(tmp_path):
    """The loop of the gateway serves every door."""
    with opened(write_data(tmp_path, lines_of(1)), api_handlers=(LargeGroup(40_000),)) as (door, peer):
        with door.watched() as longest:
            begun = time.monotonic()
            peer.send(15, 4, groups=["g"], include_authorized_operations=False)
            assert len(peer.read_raw()) > 40_000 * 10
            took = time.monotonic() - begun
        assert longest[0] < took / 2, (longest, took)


# --- what lies in the store ------------------------------------------------------------------------------------------


def test_old_records_come_from_the_store_in_order_and_hot_partitions_do_not_wait(tmp_path):
    made = cold_broker(tmp_path, partitions=2)
    ends = {number: made.queues.logs.states["t", number].end_offset for number in (0, 1)}
    with opened(made.data, KMQ_TIER=f"file://{made.store.root}") as (_, peer):
        peer.send_fetch({("t", 0): 0, ("t", 1): ends[1] - 1}, wait_ms=60_000)
        rows = peer.read_fetched()
        assert [offset for offset, _ in values(rows["t", 1])] == [ends[1] - 1]
        cold = rows["t", 0]
        assert (cold.error_code, cold.log_start_offset, cold.high_watermark) == (0, 0, ends[0]) and not values(cold)
        found = []
        while len(found) < ends[0]:
            row = peer.fetch("t", 0, len(found), wait_ms=60_000, partition_bytes=5000)
            assert row.error_code == ErrorCode.none and row.high_watermark == ends[0]
            found += [offset for offset, _ in values(row)]
            assert found == [*range(len(found))]


def test_a_store_that_is_away_is_a_storage_error_once_the_wait_is_over_and_never_out_of_range(tmp_path):
    made = cold_broker(tmp_path)
    os.rename(made.store.root, f"{made.store.root}-away")
    with opened(made.data, KMQ_TIER=f"file://{made.store.root}") as (_, peer):
        row = peer.fetch("t", 0, 0)
        assert row.error_code in (ErrorCode.none, ErrorCode.kafka_storage_error) and not values(row)
        row = peer.fetch("t", 0, 0, wait_ms=3000)
        assert (row.error_code, row.high_watermark) == (ErrorCode.kafka_storage_error, 400) and not values(row)
        assert [offset for offset, _ in values(peer.fetch("t", 0, 399))] == [399]
        os.rename(f"{made.store.root}-away", made.store.root)
        until(lambda: values(peer.fetch("t", 0, 0, wait_ms=1000)), "the store is asked again")


def test_a_damaged_cached_object_is_fetched_once_more_and_then_its_offsets_alone_are_a_storage_error(tmp_path):
    made = cold_broker(tmp_path)
    [damaged, lost, good] = rows.of(made.directory()).rows[:3]
    cached = Path(rows.cached_path(made.directory(), 1, damaged))
    Path(f"{made.store.root}/{made.copier.lineage}/{lost.key}").unlink()
    with opened(made.data, KMQ_TIER=f"file://{made.store.root}") as (_, peer):

        def fetch(offset):
            row = peer.fetch("t", 0, offset, wait_ms=60_000)
            assert (row.log_start_offset, row.high_watermark) == (0, 400)
            return row.error_code, [offset for offset, _ in values(row)][:1]

        assert fetch(0) == (ErrorCode.none, [0])
        for is_again in (False, True):
            cached.write_bytes(b"999" + cached.read_bytes()[3:])
            assert fetch(3) == ((ErrorCode.kafka_storage_error, []) if is_again else (ErrorCode.none, [3]))
        assert fetch(lost.base) == (ErrorCode.kafka_storage_error, [])
        assert fetch(good.base) == (ErrorCode.none, [good.base])


def test_times_and_ends_are_those_of_the_whole_partition(tmp_path):
    made = cold_broker(tmp_path)
    with opened(made.data, KMQ_TIER=f"file://{made.store.root}") as (_, peer):

        def at(timestamp):
            asked = [{"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}]
            topics = [{"name": "t", "partitions": asked}]
            [topic] = peer.ask(Key.LIST_OFFSETS, 5, replica_id=-1, isolation_level=0, topics=topics).topics
            return topic.partitions[0].offset

        assert (at(-2), at(-1)) == (0, 400)
        assert at(FIRST_TS // 1000) == 0


def test_times_of_two_cold_partitions_are_looked_up_beside_each_other(tmp_path, monkeypatch):
    made = cold_broker(tmp_path, partitions=2)
    both, get = threading.Barrier(2), DirectoryStore.get

    def slow(self, key):
        if "/topics/" in key:  # it answers once both were asked for
            both.wait(10)
        return get(self, key)

    monkeypatch.setattr(DirectoryStore, "get", slow)
    with opened(made.data, KMQ_TIER=f"file://{made.store.root}") as (_, peer):
        asked = [
            {"partition_index": number, "timestamp": FIRST_TS // 1000, "current_leader_epoch": -1} for number in (1, 0)
        ]
        topics = [{"name": "t", "partitions": asked}]
        [topic] = peer.ask(Key.LIST_OFFSETS, 5, replica_id=-1, isolation_level=0, topics=topics).topics
        found = [(row.partition_index, row.error_code, row.offset) for row in topic.partitions]
        assert found == [(1, 0, 0), (0, 0, 0)]


def test_a_damaged_tier_hides_only_what_lies_before_the_disk_and_is_never_out_of_range(tmp_path):
    made = cold_broker(tmp_path)
    path, local = Path(f"{made.directory()}/tier"), made.local()[0]
    path.write_bytes(path.read_bytes().replace(b" add ", b" odd "))
    with opened(made.data, KMQ_TIER=f"file://{made.store.root}") as (_, peer):

        def at(timestamp):
            asked = [{"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}]
            topics = [{"name": "t", "partitions": asked}]
            [topic] = peer.ask(Key.LIST_OFFSETS, 5, replica_id=-1, isolation_level=0, topics=topics).topics
            return topic.partitions[0].error_code, topic.partitions[0].offset

        for offset in (local, 399):
            row = peer.fetch("t", 0, offset)
            assert (row.error_code, row.high_watermark) == (0, 400) and values(row)[0][0] == offset
        assert at(-1) == (0, 400) and at(-2) == (ErrorCode.kafka_storage_error, -1)
        assert peer.fetch("t", 0, local - 1).error_code == ErrorCode.kafka_storage_error
        assert peer.fetch("t", 0, 401).error_code == ErrorCode.offset_out_of_range
