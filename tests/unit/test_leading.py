"""A leader over real sockets, rings and logs; its followers say by hand whatever a test wants."""

import asyncio

import pytest
from shard_parts import LEADING, STARTING, first_register, play

from kmq.files import file_id, replace_file
from kmq.log import dedupe_file
from kmq.log.committed import encode_epoch
from kmq.replica import lead, wire

B, C = "b" * 16, "c" * 16


async def leads(shard, a, *isr, epoch=1):
    """Let `a` lead with this ISR, until the record of its epoch is on its disk."""
    a.promise(first_register(a.id, [a.id, *isr], epoch))
    await shard.until(lambda: a.leading is not None and a.leading.epoch_seq)


async def stores(shard, a, *lines):
    """Let `a` number and store these lines; return the last seq."""
    wanted = a.end + len(lines)
    a.send(*lines)
    await shard.until(lambda: a.leading.synced == wanted)
    return wanted


def change(a, isr):
    """The register has another ISR; return it."""
    register = a.files.promised.with_isr(isr)
    a.promise(register)
    return register


def test_what_all_of_the_isr_have_is_committed(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B, C)
        b, c = await shard.peer(a, "b"), await shard.peer(a, "c")
        await b.joins(1, 1), await c.joins(1, 1)
        end = await stores(shard, a, b"t|||1", b"t|||2")
        b.have(end), c.have(end - 1)
        await b.answered(), await c.answered()
        assert a.leading.hw == end - 1 == a.page.hw
        c.have(end)
        await shard.until(lambda: a.page.hw == end)
        assert wire.Hw(end) in await b.answered()

    play(tmp_path, scene, "a")


def test_hw_is_told_with_the_data_that_follows_and_by_itself_where_none_does(tmp_path, monkeypatch):
    monkeypatch.setattr(lead, "_BEAT_S", 60.0)

    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        end = await stores(shard, a, b"t|||1")
        await b.read(wire.Data)
        a.stores = False
        a.send(b"t|||2")
        await shard.until(lambda: a.leading.numbered == end + 1)
        b.have(end)
        assert not await b.answered() and a.page.hw == end
        a.stores = True
        assert (await b.read(wire.Data)).hw == end
        b.have(end + 1)
        assert await b.read(wire.Hw) == wire.Hw(end + 1)
        a.stores = False
        a.send(b"t|||3")
        await shard.until(lambda: a.leading.numbered == end + 2)
        end = a.leading.synced
        a.stores = True
        await b.read(wire.Data)
        a.stores = False
        a.send(b"t|||4")
        await shard.until(lambda: a.leading.numbered == end + 2)
        b.send(wire.Have(b.register.version.number, end + 2, 0))  # it has no room for what follows
        assert await b.read(wire.Hw) == wire.Hw(end + 1)

    play(tmp_path, scene, "a")


def test_a_position_counts_only_after_comparing(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        b.have(1)
        assert await b.has_ended()
        b = await shard.peer(a)
        b.fetch(1, 7)
        assert await b.read(wire.Diverged) == wire.Diverged(1, 1, 2, 7)
        b.have(1)
        assert await b.has_ended()
        assert a.leading.hw == 0

    play(tmp_path, scene, "a")


def test_a_follower_of_another_epoch_is_refused(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        for epoch in (0, 2):
            b.fetch(1, 1, epoch=epoch)
            assert await b.read((wire.RefusedText, wire.Hw)) == wire.RefusedText("other_epoch")
        b.have(1)
        assert await b.has_ended()
        assert a.leading.hw == 0

    play(tmp_path, scene, "a")


def test_a_position_counts_only_under_the_version_in_force(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        before = b.register
        b.register = change(a, [a.id, B])
        b.have(1, before.version.number)
        await b.answered()
        assert a.leading.hw == 0
        b.have(1)
        await b.answered()
        assert a.leading.hw == 1

    play(tmp_path, scene, "a")


def test_what_was_confirmed_under_the_version_before_does_not_count(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B, C)
        b = await shard.peer(a)
        await b.joins(1, 1)
        b.have(1)
        await b.answered()
        b.register = change(a, [a.id, B])
        told = await b.answered()
        assert a.leading.hw == 0
        assert [bytes(each.text) for each in told if isinstance(each, wire.RegisterText)] == [b.register.encode()]
        b.have(1)
        await b.answered()
        assert a.leading.hw == 1

    play(tmp_path, scene, "a")


def test_who_has_promised_another_version_is_told_the_register_first(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        before, b.register = b.register, change(a, [a.id, B])
        b.fetch(0, 0, register=before)
        assert bytes((await b.read((wire.RegisterText, wire.Hw))).text) == b.register.encode()
        b.fetch(0, 0, register=first_register(a.id, [a.id, B]))
        assert await b.read((wire.RefusedText, wire.Hw)) == wire.RefusedText("forked")

    play(tmp_path, scene, "a")


def test_who_leaves_counts_until_the_register_says_so(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B, C)
        b = await shard.peer(a)
        await b.joins(1, 1)
        a.roles.prepare_isr([a.id, B])
        b.have(1)
        await b.answered()
        assert a.leading.hw == 0
        b.register = change(a, [a.id, B])
        b.have(1)
        await b.answered()
        assert a.leading.hw == 1

    play(tmp_path, scene, "a")


def test_who_joins_counts_at_once_and_as_long_as_nobody_knows_the_outcome(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        a.roles.prepare_isr([a.id, B, C])
        a.promise(a.files.promised)  # read again: the write has not come to Consul, or will
        b.have(1)
        await b.answered()
        assert a.leading.hw == 0
        b.register = change(a, [a.id, B])  # another write came first, so this one never will
        b.have(1)
        await b.answered()
        assert a.leading.hw == 1

    play(tmp_path, scene, "a")


def test_who_joins_has_all_that_is_committed_and_the_record_of_the_epoch(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B, epoch=2)
        assert (a.leading.hw, a.leading.epoch_seq) == (2, 4)
        c = await shard.peer(a, "c")
        await c.joins(2, 1)
        for position, may in ((2, False), (3, False), (4, True)):
            c.have(position)
            await c.answered()
            assert a.roles.may_join(C) == may
        assert not a.roles.may_join(B)

    play(tmp_path, scene, "a", lines=[encode_epoch(1, 1, "b", 1, b"0"), b"t|||1", b"t|||2"], routed=2)


def test_nothing_is_committed_while_the_isr_is_too_small(tmp_path):
    async def scene(shard, a):
        a.promise(first_register(a.id, [a.id]))
        await shard.until(lambda: a.leading is not None and a.leading.epoch_seq)
        b = await shard.peer(a)
        await b.joins(1, 1)
        b.have(1)
        await b.answered()
        assert a.leading.hw == 0 and a.roles.may_join(B)
        b.register = change(a, [a.id, B])
        b.have(1)
        await shard.until(lambda: a.page.hw == 1)

    play(tmp_path, scene, "a")


def test_nobody_is_served_before_the_record_of_the_epoch_is_on_disk(tmp_path):
    async def scene(shard, a):
        a.stores = False
        a.promise(first_register(a.id, [a.id, B]))
        await shard.until(lambda: a.leading is not None and a.leading.numbered == 1)
        b = await shard.peer(a)
        b.fetch(0, 0)
        assert await b.read((wire.RefusedText, wire.Hw)) == wire.RefusedText("not_ready")
        a.stores = True
        await shard.until(lambda: a.leading.epoch_seq)
        await b.joins(1, 1)

    play(tmp_path, scene, "a")


def test_only_what_is_on_disk_is_sent(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        a.stores = False
        a.send(b"t|||1")
        await shard.until(lambda: a.leading.numbered == 2)
        assert not [each for each in await b.answered() if isinstance(each, wire.Data)]
        a.stores = True
        assert (await b.read(wire.Data)).first == 2

    play(tmp_path, scene, "a")


def test_who_is_behind_gets_the_wal_and_then_the_blocks_without_a_seam(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        end = await stores(shard, a, *(b"t|||%d" % n for n in range(20)))
        b = await shard.peer(a)
        await b.joins(3, 1)
        end, got, at = await stores(shard, a, b"t|||end"), b"", 4
        while at <= end:
            data = await b.read(wire.Data)
            assert data.first == at
            got, at = got + bytes(data.lines), data.last + 1
        [log] = (tmp_path / "a/data/append").glob("*.log")
        assert log.read_bytes().endswith(got) and got.count(b"\n") == end - 3

    play(tmp_path, scene, "a")


def test_what_was_released_and_written_over_in_the_ring_is_sent_from_the_wal(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b, c = await shard.peer(a, "b"), await shard.peer(a, "c")
        await b.joins(1, 1)
        c.send(wire.FetchText(c.register.version, 1, 2, 1, 0))  # it has no room yet
        await c.read(wire.Hw)
        for end in range(1, 5):  # each but the first is written to the place of the one before
            b.have(end)
            await shard.until(lambda end=end: a.shown and a.shown[-1][1] == end)
            await stores(shard, a, b"t|||%d" % (end + 1))
        c.have(1)
        found = await c.read(wire.Data)
        assert found.first == 2 and bytes(found.lines).startswith(b"2|")

    play(tmp_path, scene, "a")


def test_what_is_not_committed_yet_is_not_looked_at_again_in_each_turn(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        for number in range(40):
            await stores(shard, a, b"t|||%d" % number)
        ring, looks = a.leading._ring, []
        ring.has = lambda position: looks.append(position) or type(ring).has(ring, position)
        a.leading._turn()
        assert len(a.leading._blocks) > 30 > 5 > len(looks)
        b.have(a.end)
        await shard.until(lambda: not a.leading._blocks)

    play(tmp_path, scene, "a")


def test_who_lacks_what_retention_has_just_deleted_is_let_go_and_harms_nobody(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        await stores(shard, a, *(b"t|||%d" % n for n in range(20)))
        a.leading._blocks.clear()
        read = a.leading._wal.read
        a.leading._wal.read = lambda low, most: read(low + 5, most)  # the segment went between two looks
        b = await shard.peer(a)
        await b.joins(3, 1)
        assert await b.has_ended()
        a.leading._wal.read = read
        again = await shard.peer(a)
        await again.joins(3, 1)
        assert (await again.read(wire.Data)).first == 4

    play(tmp_path, scene, "a")


def test_a_connection_that_breaks_makes_nobody_behind_before_the_lag_is_over(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        assert not a.roles.is_behind(B)  # it may still come
        b = await shard.peer(a)
        await b.joins(1, 1)
        b.have(1)
        await shard.until(lambda: a.leading.hears(B))
        b.link.close()
        await shard.until(lambda: B not in a.leading.followers)
        assert not a.roles.is_behind(B)
        await shard.until(lambda: a.roles.is_behind(B))

    play(tmp_path, scene, "a", env={"KMQ_REPLICA_LAG": "1s"})


def test_a_follower_that_confirms_late_is_slow_until_it_was_quick_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(lead, "_TICK_S", 0.01)
    monkeypatch.setattr(lead, "_SLOW_S", 0.05)
    monkeypatch.setattr(lead, "_SMOOTH", 2)

    async def scene(shard, a):
        await leads(shard, a, B, C)
        b, c = await shard.peer(a, "b"), await shard.peer(a, "c")
        await b.joins(1, 1), await c.joins(1, 1)
        b.have(1), c.have(1)
        await shard.until(lambda: a.leading.hw == 1)

        async def send(is_quick):
            seq = await stores(shard, a, b"t|||x")
            b.have(seq)
            if not is_quick:
                await asyncio.sleep(0.2)
            c.have(seq)
            await shard.until(lambda: a.leading.hw == seq)

        while not a.roles.is_slow(C):
            await send(is_quick=False)
        assert not a.roles.is_slow(B) and a.leading.delays[C].slow_since
        b.register = c.register = change(a, [a.id, B])
        await send(is_quick=True)
        assert not a.roles.may_join(C), "it would be slow again at once"
        b.link.close()
        await shard.until(lambda: a.roles.is_behind(B))
        await shard.until(lambda: a.roles.may_join(C))  # nothing is committed without it

        b = await shard.peer(a, "b")
        await b.joins(a.leading.hw, 1)
        b.have(a.leading.hw)
        await shard.until(lambda: not a.roles.is_behind(B))
        while a.leading.delays[C].slow_since:
            await send(is_quick=True)
        assert a.roles.may_join(C) and not a.roles.is_slow(C)

    play(tmp_path, scene, "a", env={"KMQ_REPLICA_LAG": "1s"})


def test_producers_that_are_too_many_for_followers_are_not_sent_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "FILE_BYTES", 100)

    def write(a, nbytes):
        replace_file(dedupe_file.path(a.data), b"1|0|2\n".ljust(nbytes, b"x"))

    async def scene(shard, a):
        await leads(shard, a, B)
        write(a, 101)
        await shard.until(lambda: a.log.of("producers_not_sent"))
        [said] = a.log.of("producers_not_sent")
        assert (said["bytes"], said["limit"]) == (101, 100) and "KMQ_DEDUPE_COUNT" in said["effect"]
        b = await shard.peer(a)
        await b.joins(1, 1)
        b.have(1)
        write(a, 102)
        await shard.until(lambda: a.leading._snapshot_file == file_id(dedupe_file.path(a.data)))
        assert not [each for each in await b.answered() if isinstance(each, wire.FileText)]
        write(a, 100)
        assert len((await b.read(wire.FileText)).content) == 100
        assert len(a.log.of("producers_not_sent")) == 1

    play(tmp_path, scene, "a")


def test_who_confirms_more_than_it_was_sent_is_let_go(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        b.have(2)
        assert await b.has_ended()
        assert a.leading.hw == 0

    play(tmp_path, scene, "a")


def test_who_has_confirmed_more_than_it_has_is_told_that_it_went_back(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B, C)
        await stores(shard, a, b"t|||1", b"t|||2")
        b = await shard.peer(a)
        await b.joins(3, 1)
        b.have(3)
        await b.answered()
        b = await shard.peer(a)
        b.fetch(2, 1)
        assert await b.read((wire.RefusedText, wire.Hw)) == wire.RefusedText("went_back")

    play(tmp_path, scene, "a")


def test_the_doors_open_when_the_record_of_the_epoch_is_committed_and_routed(tmp_path):
    async def scene(shard, a):
        turns, note = [0], a.stages.note_hw

        def count():
            turns[0] += 1
            note()

        async def some_turns():
            wanted = turns[0] + 3
            await shard.until(lambda: turns[0] >= wanted)

        a.stages.note_hw, a.routes = count, False
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        await some_turns()
        assert a.page.read().role == STARTING
        b.have(1)
        await b.answered()
        await some_turns()
        assert a.page.read().role == STARTING and not a.roles.opened()
        a.routes = True
        await shard.until(lambda: a.page.read().role == LEADING)
        assert a.roles.opened() == 1

    play(tmp_path, scene, "a")


def test_an_epoch_in_which_durability_was_started_again_is_spent(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        b.have(1)
        await shard.until(lambda: a.page.read().role == LEADING)
        assert not a.roles.is_spent(1)
        a.stages.stats.rows["durability"].starts += 1
        await shard.until(lambda: a.roles.is_spent(1))

    play(tmp_path, scene, "a")


def test_a_leader_whose_numbered_records_are_not_committed_for_the_lag_stands(tmp_path):
    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        b.have(1)
        await shard.until(lambda: a.page.read().role == LEADING)
        assert not a.roles.stands()
        a.send(b"t|||1")
        await shard.until(a.roles.stands)
        await b.read(wire.Data)
        b.have(2)
        await shard.until(lambda: not a.roles.stands())

    play(tmp_path, scene, "a", env={"KMQ_REPLICA_LAG": "1s"})


@pytest.mark.parametrize("answers", [True, False])
def test_new_messages_are_refused_while_too_few_replicas_answer(tmp_path, answers):
    async def scene(shard, a):
        await leads(shard, a, B)
        if answers:
            b = await shard.peer(a)
            await b.joins(1, 1)
        await shard.until(lambda: a.page.refuses is a.page.is_unsure is not answers)

    play(tmp_path, scene, "a")


def test_a_leader_that_heard_nobody_for_one_session_does_not_know_whether_it_leads(tmp_path):
    """Others may have elected another one, although it takes new messages until the lag is over."""

    async def scene(shard, a):
        await leads(shard, a, B)
        b = await shard.peer(a)
        await b.joins(1, 1)
        await shard.until(lambda: not a.page.is_unsure)
        await shard.until(lambda: a.page.is_unsure)  # b is silent from now on
        assert not a.page.refuses

    play(tmp_path, scene, "a", env={"KMQ_SESSION_TTL": "1s", "KMQ_REPLICA_LAG": "1h"})
