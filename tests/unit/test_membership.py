"""Groups as doors use them, over committed offsets that a former life of the gateway has left. No broker is needed."""

import asyncio
import itertools
import json
import shutil
import time
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
from log_server import up
from made_data import write_data
from waiting import until_async

from kmq.broker.stats import STATES
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.core import Core
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.fetching import Limit
from kmq.gateway.core.partitions import Partitions
from kmq.gateway.groups import membership
from kmq.gateway.groups.admin import GroupAdmin, PartitionLag, StalledGroups
from kmq.gateway.groups.coordinator import GENERATIONS, LIVES
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offset_table import CommittedOffset, NackRow, RowKey, encode_payload, routing_key
from kmq.gateway.groups.offsets import OffsetCommit, OffsetStore
from kmq.gateway.groups.protocol import Assigned, Client, MemberOptions
from kmq.gateway.groups.reader import Reader, Turn
from kmq.gateway.http.groups import GroupCalls
from kmq.log import deletions, topics
from kmq.logfmt import Logger
from kmq.message.routing import Topic

PATIENCE_S = 100.0
ME = Client("test", "127.0.0.1")


def commit(group, offset, ts, topic="t", number=0):
    return b"%b|0|1|%b" % (routing_key(RowKey(group, topic, number)), encode_payload(CommittedOffset(offset, ts)))


@asynccontextmanager
async def started(data, records, epoch=0, **settings):
    """The groups of a gateway that has just started, in a shard in this epoch."""
    with up(data, synced=records, **settings) as broker:
        broker.page.rows["router"].seq = records
        log = Logger("test")
        store = OffsetStore(broker.settings, Watermark(broker.page), log)
        groups = Groups(broker.settings, store, Partitions(data), log)
        groups.epoch = epoch
        await store.load()
        running = asyncio.create_task(groups.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await until_async(lambda: groups.is_ready)
                yield broker, groups
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await store.close()


def test_a_start_forgets_no_group_however_old_its_last_commit_is(tmp_path):
    """Its members come back in a moment: they have read a topic in which nothing happened for a month."""
    month_ago = time.time() - 30 * 86400
    data = write_data(tmp_path / "d", [b"t|0||a", commit("quiet", 1, month_ago)], {"t": 1})

    async def main():
        async with started(data, 2, KMQ_GROUP_RETENTION="7d") as (_, groups):
            assert groups.describe("quiet") is not None
            assert not groups.is_alive("quiet")  # so that the keeper forgets it if nobody comes
            heard = []
            member = await groups.join("quiet", None, ME, MemberOptions(("t",)), heard.append)
            assert groups.is_alive("quiet") and groups.committed("quiet")["t", 0].offset == 1
            groups.leave("quiet", member)
            assert groups.is_alive("quiet"), "its member has just left, perhaps for a new version of the program"

    asyncio.run(main())


def test_a_member_that_comes_back_before_the_first_rebalance_is_not_told_that_it_has_nothing(tmp_path):
    """It would give up what it has in hand, though nobody else was given that. Its connection broke twice in a failover."""
    data = write_data(tmp_path / "d", [b"t|0||a", commit("g", 0, time.time())], {"t": 1})

    async def main():
        async with started(data, 2) as (_, groups):
            heard = []
            for _ in range(2):  # before the members of a former life have been waited for
                await groups.join("g", "m", ME, MemberOptions(("t",)), heard.append, is_anew=True)
            await until_async(lambda: any(isinstance(event, Assigned) for event in heard))
        first = next(event for event in heard if isinstance(event, Assigned))
        assert [tuple(place) for place in first.partitions] == [("t", 0)]

    asyncio.run(main())


def test_generations_rise_over_the_brokers_of_a_shard_and_never_meet(tmp_path):
    """Each broker counts its starts in its own directory; the group has committed nothing that tells of them."""
    found = []

    async def live(broker, epoch, records):
        data = tmp_path / broker
        if not data.exists():
            write_data(data, records, {"t": 1})
        async with started(data, len(records), epoch) as (_, groups):
            heard = []
            await groups.join("g", "m", ME, MemberOptions(("t",)), heard.append)
            await until_async(lambda: heard)
            found.append(heard[-1].generation)

    def commits(generation):
        payload = encode_payload(CommittedOffset(0, time.time(), generation=generation))
        return b"%b|0|1|%b" % (routing_key(RowKey("other", "t", 0)), payload)

    async def main():
        for broker, epoch in (("a", 1), ("a", 1), ("b", 2), ("b", 2), ("a", 3), ("b", 7)):
            await live(broker, epoch, [b"t|0||a"])
        many_starts = 100 * GENERATIONS + 1  # on another broker, without its epochs telling of it
        await live("c", 8, [b"t|0||a", commits(many_starts)])
        assert found[-1] > many_starts

    asyncio.run(main())
    assert found == sorted(set(found))
    assert all(new - old > GENERATIONS // 2 for old, new in itertools.pairwise(found)), found


def test_no_life_of_a_gateway_in_a_shard_has_the_number_of_another_though_no_group_commits(tmp_path):
    """Producer ids are numbered by it: one that came twice would have its records taken for duplicates."""
    lives = []

    async def main():
        for broker, epoch in [("a", 7)] * (LIVES + 3) + [("b", 8)] * 2:
            data = tmp_path / broker
            if not data.exists():
                write_data(data, [b"t|0||a"], {"t": 1})
            async with started(data, 1, epoch) as (_, groups):
                lives.append(groups.life)

    asyncio.run(main())
    assert lives == sorted(set(lives))


def test_generations_go_on_above_those_of_offsets_that_come_while_the_groups_are_restored(tmp_path, monkeypatch):
    """A commit that a former life has decided stores its offsets then."""
    data, high = write_data(tmp_path / "d", [b"t|0||a"], {"t": 1}), 100 * GENERATIONS
    load, count_start, stores = OffsetStore.load, membership.count_start, []

    async def loaded(self):
        stores.append(self)
        await load(self)

    def counted(*args):
        stores[0].table.put(RowKey("g", "t", 0), CommittedOffset(0, time.time(), generation=high, seq=1))
        return count_start(*args)

    monkeypatch.setattr(OffsetStore, "load", loaded)
    monkeypatch.setattr(membership, "count_start", counted)

    async def main():
        async with started(data, 1) as (_, groups):
            heard = []
            await groups.join("g", "m", ME, MemberOptions(("t",)), heard.append)
            await until_async(lambda: heard)
            assert heard[-1].generation > high

    asyncio.run(main())


def test_a_group_begins_at_the_start_of_partitions_that_came_while_no_gateway_ran(tmp_path, monkeypatch, capfd):
    """Its members would begin there with their option `start`, and skip what has come meanwhile. Others have no offset there."""
    groups_of = {"both": (0, 1), "one": (0,), "all": (0, 1, 2)}  # → partitions in which they have committed
    commits = [commit(group, 0, time.time(), number=n) for group, numbers in groups_of.items() for n in numbers]
    data = write_data(tmp_path / "d", [b"t|0||a", *commits], {"t": 4})
    path = tmp_path / "d/topics/t/topic.toml"
    path.write_text(topics.with_growth(path.read_text(), Topic("t", 4, 1, (), [(2, 2), (3, 3)])))
    written, refused, is_down = [], [], True

    async def store(self, group, rows, *_):
        if is_down:
            refused.append(group)
            raise RequestRefused("busy")
        written.append((group, {number: row.offset for (_, number), row in rows.items()}))

    monkeypatch.setattr(OffsetStore, "commit", store)
    monkeypatch.setattr(membership, "_LOOK_S", 0.05)

    async def main():
        nonlocal is_down
        async with started(data, 1 + len(commits)) as (_, groups):
            heard = []
            member = await groups.join("new", None, ME, MemberOptions(("t",)), heard.append)
            await until_async(lambda: heard)
            assert [place.partition for place in heard[-1].partitions] == [0, 1], "the broker takes no commits yet"
            await until_async(lambda: len(refused) >= 3)
            is_down = False
            while len(heard[-1].partitions) < 4:
                groups.sync("new", member)
                await asyncio.sleep(0.01)
            assert written == [("all", {3: 0}), ("both", {2: 0, 3: 0})]
            assert capfd.readouterr().err.count("event=beginning_not_committed") == 1, (
                "said once, however often it is tried"
            )

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_group_begins_in_a_partition_that_comes_while_its_beginning_in_the_one_before_is_not_on_disk(
    tmp_path, monkeypatch
):
    """The gateway has just started, so the group's commits alone say that it has subscribed."""
    commits = [commit("late", 0, time.time(), number=n) for n in (0, 1)]
    data = write_data(tmp_path / "d", [b"t|0||a", *commits], {"t": 4})
    path = tmp_path / "d/topics/t/topic.toml"
    declared = path.read_text()

    def grow(count, grown):
        path.write_text(topics.with_growth(declared, Topic("t", count, 1, (), grown)))

    written, release = {}, asyncio.Event()

    async def store(self, group, rows, *_):
        await release.wait()
        written.update({number: row.offset for (_, number), row in rows.items()})

    monkeypatch.setattr(OffsetStore, "commit", store)

    async def main():
        grow(3, [(2, 2)])
        async with started(data, 1 + len(commits)) as (_, groups):
            grow(4, [(2, 2), (3, 3)])
            heard = []
            await groups.join("other", None, ME, MemberOptions(("t",)), heard.append)
            release.set()
            while len(groups.coordinator.assignment("other", heard[-1].member).partitions) < 4:
                groups.sync("other", heard[-1].member)
                await asyncio.sleep(0.01)
            assert written == {2: 0, 3: 0}

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_an_answer_over_http_shows_the_assignment_by_which_it_was_read(tmp_path, monkeypatch):
    """Partitions are revoked while it is read: it has their messages, so it must not say that the member lacks them."""
    data = write_data(tmp_path / "d", [b"t.@%d|0||a" % number for number in range(4)], {"t": 4})

    async def main():
        async with started(data, 4) as (broker, groups):
            core = Core(broker.settings, broker.page, Logger("test"))
            calls = GroupCalls(core, groups, None)
            poller = await calls._pollers.member("g", "one", ME, ["t"], lambda options: options)
            await poller.first_assignment(PATIENCE_S)

            async def turn(self, cursors, *_, **__):
                monkeypatch.undo()
                await groups.join("g", "two", ME, MemberOptions(("t",)), lambda event: None)
                await until_async(lambda: len(poller.assigned) != 4)
                return Turn([], cursors)

            monkeypatch.setattr(Reader, "turn", turn)
            call = SimpleNamespace(query={"format": "text"}, request=SimpleNamespace(headers={}))
            try:
                for count in (4, 0):
                    _, _, answer = await calls._read(call, poller, "t", Limit(10, 10_000))
                    answer = json.loads(answer.body)
                    places = {place["partition"] for place in answer["assignment"]}
                    assert len(answer["messages"]) == count
                    assert places >= {message["partition"] for message in answer["messages"]}, answer
                    poller.answer()
                assert len(places) == 2
            finally:
                await calls.close()
                core.stop()
                await core.close()

    asyncio.run(main())


def test_a_damaged_record_hides_the_lag_of_no_other_partition(tmp_path):
    """Else /metrics would answer nothing at all as long as a file is damaged."""
    lines = [b"bad|0||" + b"x" * 100, b"good|0||a"]
    commits = [commit("g", 0, time.time(), topic) for topic in ("bad", "good")]
    data = write_data(tmp_path / "d", [*lines, *commits], {"bad": 1, "good": 1})
    log = tmp_path / "d/topics/bad/0/00000000000000000000.log"
    log.write_bytes(log.read_bytes().replace(b"xxx", b"xyx", 1))

    async def main():
        async with started(data, 4) as (broker, groups):
            core = Core(broker.settings, broker.page, Logger("test"))
            try:
                rows = await GroupAdmin(groups, core.partitions, core.fetching).lags()
                assert [row[:4] for row in rows] == [("g", "bad", 0, 1), ("g", "good", 0, 1)]
            finally:
                core.stop()
                await core.close()

    asyncio.run(main())


@pytest.mark.parametrize("catches_up", [True, False])
def test_a_commit_ahead_of_the_files_is_judged_when_the_router_has_caught_up(tmp_path, monkeypatch, catches_up):
    """After a power cut a log may end earlier than a member has read. It is honest, and a later commit does not overtake it."""
    data = write_data(tmp_path / "d", [b"t|0||a", b"t|0||b", commit("g", 0, time.time())], {"t": 1})
    monkeypatch.setattr(membership, "_ROUTED_S", PATIENCE_S if catches_up else 0.2)

    async def main():
        async with started(data, 3) as (broker, groups):
            router, written = broker.page.rows["router"], []
            groups.store.commit = lambda group, rows, *_, **__: asyncio.sleep(0, written.append(rows["t", 0].offset))
            await groups.commit("g", None, {("t", 0): OffsetCommit(2)})
            router.state = STATES.index("recovering")
            early = asyncio.create_task(groups.commit("g", None, {("t", 0): OffsetCommit(3)}))
            await asyncio.sleep(0)
            late = asyncio.create_task(groups.commit("g", None, {("t", 0): OffsetCommit(1)}))
            if catches_up:
                await asyncio.sleep(0.1)
                assert not early.done() and not late.done()
                log = tmp_path / "d/topics/t/0/00000000000000000000.log"
                log.write_bytes(log.read_bytes() + b"4|1700000000.000004|t|0||c\n")
                router.state = STATES.index("ready")
                await early
            else:
                with pytest.raises(RequestRefused, match="commit again") as refused:
                    await early
                assert refused.value.code == "not_ready"
            await late
            assert written == ([2, 3, 1] if catches_up else [2, 1])
            router.state = STATES.index("ready")
            with pytest.raises(RequestRefused, match="offset 9 is beyond first=0 end=") as refused:
                await groups.commit("g", None, {("t", 0): OffsetCommit(9)})
            assert refused.value.code == "out_of_range"

    asyncio.run(main())


def test_a_member_that_waits_for_its_commit_is_alive(tmp_path):
    """Its session would end, and its heir begin in front of the commit, which the heir's own then takes back."""
    data = write_data(tmp_path / "d", [b"t|0||a", commit("g", 0, time.time())], {"t": 1})

    async def main():
        async with started(data, 2) as (_, groups):
            beats, is_stored, is_assigned = [], asyncio.Event(), asyncio.Event()
            await groups.join("g", "m", Client("m", ""), MemberOptions(("t",)), lambda event: is_assigned.set())
            async with asyncio.timeout(PATIENCE_S):
                await is_assigned.wait()
            groups.beat = lambda *member: beats.append(member)
            groups.store.commit = lambda *_, **__: is_stored.wait()
            asked = asyncio.create_task(groups.commit("g", "m", {("t", 0): OffsetCommit(1)}))
            await until_async(lambda: len(beats) >= 2)
            is_stored.set()
            await asked
            assert set(beats) == {("g", "m")}

    asyncio.run(main())


def test_a_group_may_commit_the_beginning_of_a_second_life(tmp_path):
    """It is where the first life ended, though nothing is there yet."""
    data = write_data(tmp_path / "d", [b"t|0||a", commit("g", 0, time.time())], {"t": 1})
    shutil.rmtree(f"{data}/topics/t/0")
    deletions.write(data, [deletions.Deletion("t", 1, 1, "1.000000", [9])], lambda _, action: action())

    async def main():
        async with started(data, 2) as (broker, groups):
            broker.page.rows["router"].state = STATES.index("ready")
            written = []
            groups.store.commit = lambda group, rows, *_, **__: asyncio.sleep(0, written.append(rows))
            await groups.commit("g", None, {("t", 0): OffsetCommit(9)})
            assert written == [{("t", 0): OffsetCommit(9)}]
            with pytest.raises(RequestRefused, match="first=9 end=9"):
                await groups.commit("g", None, {("t", 0): OffsetCommit(10)})

    asyncio.run(main())


def test_a_group_falls_behind_when_its_lag_only_grows_for_a_minute(tmp_path):
    """Not one whose lag swings between its commits, nor one whose oldest message is young."""
    places = [("behind", 0), ("swings", 0)]
    data = write_data(tmp_path / "d", [b"t|0||a", *(commit(name, at, time.time()) for name, at in places)], {"t": 1})

    async def main():
        async with started(data, 3) as (broker, groups):
            admin = SimpleNamespace(names=list, all_lags=None)
            watch = StalledGroups(broker.page, groups, admin, 300, Logger("test"))

            async def see(now, behind, swings, waits_s):
                seen = [("behind", 0, behind, waits_s), ("behind", 1, 5, 0.0), ("swings", 0, swings, 90.0)]
                rows = [
                    (name, PartitionLag("t", number, 0, 9, 1000, 99.0, 0, lag, age_s))
                    for name, number, lag, age_s in seen
                ]
                admin.all_lags = lambda: asyncio.sleep(0, rows)
                await watch.look(now)
                return broker.page.trends().get("lag_grows")

            row = broker.page.rows["gateway"]
            row.pid, row.heartbeat = 1, time.monotonic_ns() + 10**12
            for now in range(0, 100, 5):
                assert await see(1000 + now, 100 + now, now % 20, 59.0) is None, "its oldest message is young"
            assert await see(1100, 200, 3, 61.0) == (1, 205), "both partitions"
            for now in range(1105, 1160, 5):
                assert await see(now, 200, 3, 61.0) == (1, 205), "held for a minute after it grew last"
            for now in range(1160, 1200, 5):
                last = await see(now, 200, 3, 61.0)
            assert last is None

    asyncio.run(main())


def test_a_group_stands_still_when_messages_wait_and_its_commit_stays(tmp_path):
    """Not one that is behind for a moment, nor one that has read all and gave some back, nor one that goes on."""
    places = [("stuck", 0), ("done", 2), ("slow", 0)]
    row = NackRow(1, time.time() + 3600)
    given_back = b"%b|0|1|%b" % (routing_key(RowKey("done", "t", 0, 1)), encode_payload(row))
    data = write_data(
        tmp_path / "d",
        [b"t|0||a", b"t|0||b", *(commit(name, at, time.time()) for name, at in places), given_back],
        {"t": 1},
    )

    async def main():
        async with started(data, 6) as (broker, groups):
            core, row = Core(broker.settings, broker.page, Logger("test")), broker.page.rows["gateway"]
            admin = GroupAdmin(groups, core.partitions, core.fetching)
            try:
                stalled = StalledGroups(broker.page, groups, admin, 300, Logger("test"))
                assert [lag[:4] for lag in await admin.lags()] == [
                    *(("done", "t", 0, 1), ("slow", "t", 0, 2), ("stuck", "t", 0, 2))
                ], "what waits for its delay is lag"
                await stalled.look(1000)
                await stalled.look(1200)
                assert (row.groups, row.groups_stalled, row.group_stalled_lag) == (3, 0, 0)
                groups.store.committed("slow")["t", 0] = CommittedOffset(1, time.time())
                await stalled.look(1299)
                assert row.groups_stalled == 0
                await stalled.look(1300)
                assert (row.groups_stalled, row.group_stalled_lag) == (1, 2), "stuck alone"
                await stalled.look(1600)
                assert (row.groups_stalled, row.group_stalled_lag) == (2, 3), "slow has not moved since 1299"
                groups.store.committed("stuck")["t", 0] = CommittedOffset(2, time.time())
                await stalled.look(1601)
                assert (row.groups_stalled, row.group_stalled_lag) == (1, 1)
            finally:
                core.stop()
                await core.close()

    asyncio.run(main())
