"""What the stages of a broker do with records that are not committed in its shard, and at a change of its role."""

import os

import pytest
from made_up import stored
from shard_parts import LEADING, STARTING, WAITING, first_register, play

from kmq.broker.stage import RoleChanged
from kmq.links.layout import Framed, Stamp, shm_path
from kmq.log import dedupe_file, wal
from kmq.log.committed import decode_epoch, encode_epoch
from stages import durability

B = "b" * 16
OLD = [encode_epoch(1, 1, "b", 1, b"0"), *(b"t|||%d" % n for n in (2, 3, 4))]


async def opens(shard, a, epoch=1):
    """Let `a` lead with open doors; return its follower, which has confirmed the record of the epoch."""
    a.promise(first_register(a.id, [a.id, B], epoch))
    await shard.until(lambda: a.leading is not None and a.leading.epoch_seq)
    b = await shard.peer(a)
    b.fetch(a.leading.epoch_seq, epoch)
    b.have(a.leading.epoch_seq)
    await shard.until(lambda: a.page.read().role == LEADING)
    return b


def replies(a):
    try:
        return os.read(a.framer.stage.acks, 1 << 16)
    except BlockingIOError:
        return b""


def frame(a, line, replies=b""):
    """Put a block into the ring as the framer does."""
    ring = a.framer.ring
    seq, lines = ring.last.next_seq, b"".join(stored([line], ring.last.next_seq)) if line else b""
    ring.append(Framed(lines, Stamp(seq, int(bool(line)), 0, ring.last.last_ts), replies))


def test_replies_and_the_router_wait_for_hw(tmp_path):
    async def scene(shard, a):
        b = await opens(shard, a)
        a.frames = False
        frame(a, b"t|||1", b"17.1 1 !ack 1 2\n")
        frame(a, b"", b"17.1 2 !dup 2 2\n")
        await shard.until(lambda: a.leading.synced == 2)
        await b.answered()
        await shard.until(lambda: len(a.durability.uncommitted) == 2)
        assert replies(a) == b"" and a.shown == [(1, 1)]
        assert a.framer.ring.first_waiting_seq() == 2  # not released
        b.have(2)
        await shard.until(lambda: a.shown == [(1, 1), (2, 2)])
        assert replies(a) == b"17.1 1 !ack 1 2\n17.1 2 !dup 2 2\n"
        assert not a.durability.uncommitted and a.framer.ring.first_waiting_seq() == 3

    play(tmp_path, scene, "a")


def test_a_reply_about_what_is_committed_waits_for_nothing_else(tmp_path):
    async def scene(shard, a):
        await opens(shard, a)
        a.frames, found = False, []
        frame(a, b"", b"17.1 1 !dup 1 1\n")
        await shard.until(lambda: found.append(replies(a)) or any(found))
        assert b"".join(found) == b"17.1 1 !dup 1 1\n"

    play(tmp_path, scene, "a")


def test_the_first_record_of_a_leader_is_that_of_its_epoch(tmp_path):
    async def scene(shard, a):
        a.send(b"t|||sent before")
        a.promise(register := first_register(a.id, [a.id, B], 2))
        await shard.until(lambda: a.leading is not None and a.leading.epoch_seq)
        assert a.leading.epoch_seq == 5
        found = decode_epoch(next(iter(wal.read(a.data, 5, 5))))
        assert found == (2, int(register.version.mark, 16), "a", found.level, 5)

    play(tmp_path, scene, "a", lines=OLD, routed=2)


def test_a_new_role_shows_what_is_behind_the_shown_once_it_is_committed(tmp_path):
    """The end of the WAL may not be committed: nothing of it is shown before the record of the epoch is."""

    async def scene(shard, a):
        a.promise(first_register(a.id, [a.id, B], 2))
        await shard.until(lambda: a.leading is not None and a.leading.epoch_seq)
        assert a.page.hw == 2 and a.durability.durable.last.next_seq == 3
        b = await shard.peer(a)
        b.fetch(4, 1)
        b.have(4)  # all of the WAL, and not the record of the epoch
        await b.answered()
        await shard.until(lambda: a.page.hw == 4)
        assert a.shown == [] and a.page.read().role == STARTING
        b.have(5)
        await shard.until(lambda: a.shown == [(5, 5)])  # the router reads 3 and 4 from the WAL
        assert a.stages.routed_seq() == 5

    play(tmp_path, scene, "a", lines=OLD, routed=2)


def test_producers_ckpt_speaks_of_nothing_that_is_not_committed(tmp_path):
    async def scene(shard, a):
        b = await opens(shard, a)
        a.send(b"t|||1")
        await shard.until(lambda: a.leading.synced == 2)
        a.frames = False
        a.framer.saver.begin_snapshot(2, a.framer.now)
        assert not a.framer.saver.finish(a.framer._lasting_seq) and a.framer.saver.pending
        a.framer.rest()
        assert a.framer.saver.pending and not dedupe_file.checkpoint_seq(a.data)
        b.have(2)
        await shard.until(lambda: a.page.hw == 2)
        await shard.until(lambda: a.framer.saver.finish(a.framer._lasting_seq))
        assert dedupe_file.checkpoint_seq(a.data) == 2

    play(tmp_path, scene, "a")


def test_what_was_numbered_and_not_stored_goes_with_the_role(tmp_path):
    async def scene(shard, a):
        await opens(shard, a)
        a.stores = False
        a.send(b"t|||1", b"t|||2")
        await shard.until(lambda: a.leading.numbered == 3)
        a.frames = False
        a.send(b"t|||3")
        a.promise(a.files.promised.elect(B, [a.id, B]))
        await shard.until(lambda: a.following is not None)
        assert a.end == 1 and not os.path.exists(shm_path(a.instance, "framed"))
        [told] = a.log.of("lines_dropped_with_role")
        assert (told["numbered"], told["lines"], a.stages.dropped) == (2, 1, 3)

    play(tmp_path, scene, "a")


def test_rings_stay_as_long_as_a_stage_holds_them(tmp_path):
    async def scene(shard, a):
        await opens(shard, a)
        a.lets_go, looks, held = False, [0], a.stages._held

        def look():
            looks[0] += 1
            return held()

        a.stages._held = look
        a.promise(a.files.promised.elect(B, [a.id, B]))
        await shard.until(lambda: looks[0] > 3)
        assert a.page.read().role == WAITING and a.leading is None and a.following is None
        assert os.path.exists(shm_path(a.instance, "framed"))
        a.lets_go = True
        await shard.until(lambda: a.following is not None)
        assert not os.path.exists(shm_path(a.instance, "framed"))

    play(tmp_path, scene, "a")


def test_a_stage_of_a_former_generation_lets_go_at_its_next_beat(tmp_path):
    async def scene(shard, a):
        await opens(shard, a)
        stage, a.lets_go = a.framer.stage, False
        stage.beat()
        a.page.leave()
        with pytest.raises(RoleChanged):
            stage.beat()
        with pytest.raises(RoleChanged):
            stage.own(f"{tmp_path}/a/pipes/other.owner", "something that it takes afterwards")

    play(tmp_path, scene, "a")


def test_durability_ends_in_order_with_records_that_are_not_committed(tmp_path):
    """The broker stops before its doors are open: nobody waits for a reply."""

    async def scene(shard, a):
        a.has_durability = False
        a.promise(first_register(a.id, [a.id, B]))
        await shard.until(lambda: a.framer is not None)
        shard.tasks.pop().cancel()  # the turns of the stages
        a.framer.ring.close()
        stage = a.begin("durability")
        stage.stopping, stage.deadline = True, 1e18
        durability.run(stage)

    play(tmp_path, scene, "a")
