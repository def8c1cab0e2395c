"""Readers that wait are woken by writes, and by nothing else; nothing is watched for nobody."""

import asyncio
import os
import statistics
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from log_server import up

from kmq.gateway.core import fetching
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.fetching import Waiter, Waking

PATIENCE_S = 100.0


@pytest.fixture
def page(data):
    with up(data) as found:
        yield found.page


@pytest.fixture
def run(page):
    """Runs a coroutine function that is given a Waking; it must leave no watches."""

    def go(work, most=100):
        async def main():
            waking = Waking(Watermark(page), most)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await work(waking)
                assert waking.watches == 0
            finally:
                waking.close()

        asyncio.run(main())

    return go


class Log:
    """A directory with a file that grows."""

    def __init__(self, path):
        path.mkdir()
        self.directory, self.path = str(path), path / "0.log"
        self.path.write_bytes(b"")
        self.seen = 0

    def add(self):
        with open(self.path, "ab") as file:
            file.write(b"x")

    def has_news(self):
        return os.path.exists(self.path) is False or self.path.stat().st_size != self.seen

    @property
    def looks(self):
        return {self.directory: self.has_news}


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "a")


async def watching(waking, count=1):
    while waking.watches < count:
        await asyncio.sleep(0)


def test_what_is_there_already_wakes_at_once(run, log):
    async def work(waking):
        log.add()
        assert await waking.news(log.looks, PATIENCE_S)

    run(work)


def test_a_write_wakes_every_waiter_of_its_directory_and_no_other(run, log, tmp_path):
    other = Log(tmp_path / "b")

    async def work(waking):
        waiting = [asyncio.create_task(waking.news(log.looks, PATIENCE_S)) for _ in range(3)]
        elsewhere = asyncio.create_task(waking.news(other.looks, PATIENCE_S))
        await watching(waking, 2)
        log.add()
        assert await asyncio.gather(*waiting) == [True] * 3
        assert not elsewhere.done() and waking.watches == 1
        other.add()
        assert await elsewhere

    run(work)


def test_a_waiter_of_many_directories_is_woken_by_any(run, log, tmp_path):
    others = [Log(tmp_path / f"b{n}") for n in range(20)]

    async def work(waking):
        looks = log.looks
        for other in others:
            looks |= other.looks
        for other in (*others, log):
            waiting = asyncio.create_task(waking.news(looks, PATIENCE_S))
            await watching(waking, 21)
            other.add()
            assert await waiting
            other.seen = 1

    run(work)


def test_nothing_is_news_after_the_time_that_was_asked_for(run, log):
    async def work(waking):
        assert not await waking.news(log.looks, 0.02)
        assert not await waking.news(log.looks, 0)

    run(work)


def test_a_waiter_that_is_cancelled_leaves_the_watch_to_the_others(run, log):
    async def work(waking):
        first, second = (asyncio.create_task(waking.news(log.looks, PATIENCE_S)) for _ in range(2))
        await watching(waking)
        first.cancel()
        await asyncio.wait([first])
        assert waking.watches == 1
        log.add()
        assert await second

    run(work)


def test_an_interrupt_wakes_a_waiter(run, log):
    async def work(waking):
        interrupt = asyncio.Event()
        waiting = asyncio.create_task(waking.news(log.looks, PATIENCE_S, interrupt))
        await watching(waking)
        interrupt.set()
        assert await waiting
        assert await waking.news(log.looks, PATIENCE_S, interrupt)  # it stays set: at once

    run(work)


def test_a_directory_that_goes_away_wakes_its_waiter(run, log):
    async def work(waking):
        waiting = asyncio.create_task(waking.news(log.looks, PATIENCE_S))
        await watching(waking)
        log.path.unlink()
        os.rmdir(log.directory)
        assert await waiting
        assert await waking.news(log.looks, PATIENCE_S)

    run(work)


def test_a_directory_that_is_not_made_yet_wakes_its_waiter_once_it_is(run, tmp_path, monkeypatch):
    """A new topic is in force before the router has made the directories of all its partitions."""
    monkeypatch.setattr(fetching, "_LOOK_S", 0.01)
    directory = tmp_path / "later"

    async def work(waking):
        waiter = Waiter(asyncio.Event())
        looks = {str(directory): directory.exists}
        waiting = asyncio.create_task(waking.next_news(waiter, looks, PATIENCE_S))
        while not waking.watermark.is_polling:
            await asyncio.sleep(0)
        directory.mkdir()
        async with asyncio.timeout(10):
            assert await waiting
        waking.forget(waiter)

    run(work)


def test_an_idle_reader_sleeps_through_each_of_its_waits_and_is_looked_for_all_the_same(run, log, monkeypatch):
    """As a thousand idle members do, whose fetches wait for 27 s each; a wait of minutes is no sleep through."""
    clock, sleeps, looks = [1000.0], [], []

    async def woken(waiter, seconds):
        sleeps.append(round(seconds))
        clock[0] += seconds
        return False

    async def work(waking):
        monkeypatch.setattr(fetching, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(Waiter, "woken", woken)
        waiter = Waiter(asyncio.Event())
        asked = {log.directory: lambda: looks.append(clock[0])}
        for _ in range(5):
            await waking.next_news(waiter, asked, 27)
        assert (sleeps, len(looks)) == ([27] * 5, 5)
        for _ in range(100):
            await waking.next_news(waiter, asked, 0.1)
        assert len(looks) <= 6, "of the waits that end soon nearly all look at nothing"
        await waking.next_news(waiter, asked, 300)
        assert max(b - a for a, b in pairwise(looks)) <= 30 + 10
        waking.forget(waiter)

    run(work)


def test_a_reader_that_waits_again_looks_only_where_something_has_happened(run, log, tmp_path):
    other, looks = Log(tmp_path / "b"), []

    def noted(each):
        return lambda: looks.append(each) or each.has_news()

    async def work(waking):
        asked = {each.directory: noted(each) for each in (log, other)}
        waiter = Waiter(asyncio.Event())
        for _ in range(5):
            assert not await waking.next_news(waiter, asked, 0)
        assert looks == [log, other]
        other.add()  # while nobody waits
        await waiter.event.wait()
        waiter.event.clear()
        assert await waking.next_news(waiter, asked, PATIENCE_S)
        assert looks == [log, other, other] and waiter.is_quiet(log.directory)
        other.seen = 1
        waiter.look_again(log.directory)  # as its reader has moved
        assert not await waking.next_news(waiter, asked, 0)
        assert {*looks[3:]} == {log, other}
        waking.forget(waiter)

    run(work)


def test_a_busy_directory_without_waiters_is_not_watched(run, log):
    async def work(waking):
        waiting = asyncio.create_task(waking.news(log.looks, PATIENCE_S))
        await watching(waking)
        log.add()
        assert await waiting
        for _ in range(100):
            log.add()
        log.seen = 101
        assert not await waking.news(log.looks, 0.02)  # nothing of what was written in between is left

    run(work)


def test_beyond_the_watches_the_watermark_is_followed(run, log, page):
    async def work(waking):
        waiting = asyncio.create_task(waking.news(log.looks, PATIENCE_S))
        await asyncio.sleep(0)
        assert waking.watches == 0
        log.add()
        page.rows["router"].seq += 1
        assert await waiting

    run(work, most=0)


def test_a_waiter_that_follows_the_watermark_is_told_that_the_gateway_stops(page, log):
    async def main():
        watermark = Watermark(page)
        waking = Waking(watermark, 0)
        waiting = asyncio.create_task(waking.news(log.looks, PATIENCE_S))
        await asyncio.sleep(0)
        watermark.stop()
        with pytest.raises(RequestRefused, match="stopping"):
            await waiting
        waking.close()

    asyncio.run(main())


@pytest.mark.soak
def test_a_waiter_is_woken_within_5_ms(run, log):
    """On an idle machine; prints the figures."""

    async def work(waking):
        took = []
        for n in range(2000):
            waiting = asyncio.create_task(waking.news(log.looks, PATIENCE_S))
            await watching(waking)
            begin = time.monotonic()
            log.add()
            assert await waiting
            took.append((time.monotonic() - begin) * 1000)
            log.seen = n + 1
        cuts = statistics.quantiles(took, n=100)
        print(f"woken after {cuts[49]:.3f} ms (p50), {cuts[98]:.3f} ms (p99)")
        assert cuts[98] < 5

    run(work)
