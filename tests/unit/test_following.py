"""A follower over real sockets, rings and logs; its leader says by hand whatever a test wants."""

import os
import threading
from zlib import crc32

import pytest
from made_up import stored
from shard_parts import FOLLOWING, LINEAGE, SECRET, WAITING, Leader, first_register, play
from waiting import PATIENCE_S

from kmq.cluster.register import decode
from kmq.errors import CorruptError
from kmq.log.committed import EPOCH_KEY, encode_epoch, write_committed
from kmq.replica import compare, follow, wire
from kmq.replica.replica import Duty
from kmq.replica.wire import NextLog, WireError

A = "a" * 16
TWO_EPOCHS = [
    encode_epoch(1, 1, "a", 1, b"0"),
    *(b"t|||%d" % n for n in (2, 3)),
    encode_epoch(2, 2, "b", 1, b"0"),
    *(b"t|||%d" % n for n in (5, 6)),
]


def data(first, *lines, epoch=1, hw=0, key=b""):
    """What a leader sends: these lines as stored."""
    text = b"".join(stored([*lines], first))
    return wire.Data(epoch, first, first + len(lines) - 1, len(key), crc32(text), hw, text)


def follower(root, scene, epoch=1, lines=(), **options):
    """Run `scene(shard, b, leader)`: b follows, and has promised version 2."""

    async def whole(shard, b):
        async with Leader(first_register(A, [A, b.id], epoch)) as leader:
            b.promise(leader.register, leader.address)
            await scene(shard, b, leader)

    play(root, whole, "b", lines=lines, **options)


async def agree(shard, b, leader, hw=0):
    """Take the follower's connection, and agree; return it."""
    a, _ = await leader.accept()
    a.send(wire.Hw(hw))
    await a.read(wire.Have)
    assert b.page.read().role == FOLLOWING
    return a


async def asked(leader):
    """Return (end, its epoch) behind which the follower wants to go on over its next connection."""
    _, fetch = await leader.accept()
    return fetch.next - 1, fetch.last


async def is_told(a):
    """Let the follower say where it is, after all that was sent to it; return that."""
    a.send(wire.RegisterText(a.register.encode()))
    return (await a.read(wire.Have)).next - 1


def test_data_before_the_leader_has_compared_is_refused(tmp_path):
    async def scene(shard, b, leader):
        a, _ = await leader.accept()
        a.send(data(1, b"t|||x"))
        assert await asked(leader) == (0, 0)
        assert b.page.read().role == WAITING and b.end == 0

    follower(tmp_path, scene)


@pytest.mark.parametrize("epoch", [1, 3])
def test_data_of_another_epoch_is_refused(tmp_path, epoch):
    async def scene(shard, b, leader):
        a = await agree(shard, b, leader)
        a.send(data(1, b"t|||x", epoch=epoch, hw=1))
        assert await asked(leader) == (0, 0)
        assert b.end == b.page.hw == 0

    follower(tmp_path, scene, epoch=2)


@pytest.mark.parametrize("first", [1, 3])
def test_data_that_is_not_right_behind_is_refused(tmp_path, first):
    async def scene(shard, b, leader):
        a = await agree(shard, b, leader)
        a.send(data(1, encode_epoch(1, 1, "a", 1, b"0")))
        a.send(data(first, b"t|||x"))
        assert await asked(leader) == (1, 1)
        await shard.until(lambda: b.end == 1)
        assert b.following.received == 1

    follower(tmp_path, scene)


@pytest.mark.parametrize("key", [b"", EPOCH_KEY])
def test_an_epoch_is_noted_when_its_record_comes(tmp_path, key):
    async def scene(shard, b, leader):
        a = await agree(shard, b, leader)
        a.send(data(1, encode_epoch(1, 1, "a", 1, b"0"), key=key))
        a.send(data(2, b"t|||x", key=b"t"))
        await shard.until(lambda: b.end == 2)
        a.link.abort()
        assert await asked(leader) == (2, 1)

    follower(tmp_path, scene)


def test_only_what_is_on_disk_is_confirmed(tmp_path):
    async def scene(shard, b, leader):
        a = await agree(shard, b, leader)
        b.stores = False
        a.send(data(1, encode_epoch(1, 1, "a", 1, b"0"), b"t|||2"))
        assert await is_told(a) == 0
        b.stores = True
        await shard.until(lambda: b.end == 2)
        assert (await a.read(wire.Have)).next == 3

    follower(tmp_path, scene)


def test_hw_is_believed_only_up_to_what_was_received(tmp_path):
    async def scene(shard, b, leader):
        a = await agree(shard, b, leader)
        a.send(data(1, encode_epoch(1, 1, "a", 1, b"0"), b"t|||2"))
        a.send(wire.Hw(100))
        await is_told(a)
        assert b.page.hw == 2
        a.send(data(3, b"t|||3"))
        await is_told(a)
        assert b.page.hw == 2

    follower(tmp_path, scene)


def test_only_what_is_committed_is_shown(tmp_path):
    async def scene(shard, b, leader):
        a = await agree(shard, b, leader)
        a.send(data(1, encode_epoch(1, 1, "a", 1, b"0")))
        a.send(data(2, b"t|||2", b"t|||3"))
        await shard.until(lambda: b.end == 3)
        a.send(wire.Hw(1))
        await shard.until(lambda: b.shown)
        await is_told(a)
        assert b.shown == [(1, 1)]
        a.send(wire.Hw(3))
        await shard.until(lambda: b.shown == [(1, 1), (2, 3)])

    follower(tmp_path, scene)


def test_a_ring_full_of_what_is_not_committed_lets_hw_through(tmp_path):
    async def scene(shard, b, leader):
        a = await agree(shard, b, leader)
        a.send(data(1, encode_epoch(1, 1, "a", 1, b"0")))
        for seq in range(2, 40):
            a.send(data(seq, b"t|||" + b"x" * 4000))
        await shard.until(lambda: b.following.received == 39)
        assert b.end < 39
        a.send(wire.Hw(39))
        await shard.until(lambda: b.shown and b.shown[-1][1] == 39)
        await shard.until(lambda: b.following.confirmed == 39)

    follower(tmp_path, scene, env={"RB_BYTES": "65536"})


@pytest.mark.parametrize(
    ("epoch", "end", "agreed"),
    [(1, 2, (2, 1)), (1, 5, (3, 1)), (2, 4, (4, 2))],
    ids=["the leader's end", "the end of the epoch in our log", "within our last epoch"],
)
def test_a_log_is_cut_to_where_it_agrees(tmp_path, epoch, end, agreed):
    async def scene(shard, b, leader):
        a, fetch = await leader.accept()
        assert (fetch.next, fetch.last) == (7, 2)
        a.send(wire.Diverged(epoch, end, 7, 2))
        fetch = await a.read(wire.FetchText)
        assert (fetch.next - 1, fetch.last) == agreed == (b.end, b.following.epochs.epoch_at(b.end))
        [path] = (tmp_path / "b/data/cut").iterdir()
        assert path.read_bytes() == b"".join(stored(TWO_EPOCHS)[agreed[0] :])

    follower(tmp_path, scene, epoch=3, lines=TWO_EPOCHS)


def test_what_was_shown_is_never_cut(tmp_path):
    async def scene(shard, b, leader):
        write_committed(b.data, 5)
        a, _ = await leader.accept()
        a.send(wire.Diverged(1, 5, 7, 2))
        with pytest.raises(CorruptError, match="has shown seq 5, but its leader agrees up to 3 only"):
            await shard.until(lambda: b.end < 6)
        assert b.end == 6 and not (tmp_path / "b/data/cut").exists()

    follower(tmp_path, scene, epoch=3, lines=TWO_EPOCHS)


def test_an_answer_to_a_position_that_was_left_is_no_reason_to_cut(tmp_path):
    async def scene(shard, b, leader):
        a, _ = await leader.accept()
        a.send(wire.Diverged(1, 2, 6, 2))
        assert await asked(leader) == (6, 2)
        assert b.end == 6

    follower(tmp_path, scene, epoch=3, lines=TWO_EPOCHS)


def test_a_late_answer_does_not_cut_what_has_come_since(tmp_path):
    async def scene(shard, b, leader):
        a, _ = await leader.accept()
        a.send(wire.Hw(0))
        await a.read(wire.Have)
        a.send(wire.Diverged(1, 2, 7, 2))
        assert await asked(leader) == (6, 2)
        assert b.end == 6

    follower(tmp_path, scene, epoch=3, lines=TWO_EPOCHS)


def test_after_a_cut_in_the_middle_of_following_it_goes_on_from_there(tmp_path):
    """The connection was lost with data on its way, and the leader has less by now."""

    async def scene(shard, b, leader):
        a = await agree(shard, b, leader)
        b.stores = False
        a.send(data(1, encode_epoch(1, 1, "a", 1, b"0"), b"t|||2"))
        a.send(data(3, b"t|||3"))
        await shard.until(lambda: b.following.received == 3)
        a.link.abort()
        a, fetch = await leader.accept()
        assert (fetch.next, fetch.last) == (4, 1)
        b.stores = True
        await shard.until(lambda: b.end == 3)
        a.send(wire.Diverged(1, 1, 4, 1))
        fetch = await a.read(wire.FetchText)
        assert (fetch.next, fetch.last, b.end) == (2, 1, 1)
        a.send(wire.Hw(1))
        await a.read(wire.Have)
        a.send(data(2, b"t|||other", hw=2))
        await shard.until(lambda: b.shown[-1:] == [(2, 2)])

    follower(tmp_path, scene)


def test_a_version_is_promised_on_disk_before_anything_is_answered_under_it(tmp_path):
    async def scene(shard, b, leader):
        a, _ = await leader.accept()
        newer = leader.register.with_isr([A, b.id])
        a.send(wire.RegisterText(newer.encode()))
        assert (await a.read(wire.FetchText)).version == newer.version
        assert f"marks={' '.join(map(str, newer.marks))}" in (tmp_path / "b/data/register").read_text()
        newest = newer.with_isr([A, b.id])
        a.send(wire.Hw(0))
        await a.read(wire.Have)
        a.send(wire.RegisterText(newest.encode()))
        assert (await a.read(wire.Have)).version == newest.version.number == b.files.promised.version.number
        assert str(newest.version) in (tmp_path / "b/data/register").read_text()

    follower(tmp_path, scene)


def test_a_register_that_does_not_descend_from_the_promise_is_not_followed(tmp_path):
    async def scene(shard, b, leader):
        a, _ = await leader.accept()
        before = b.files.promised
        other = first_register(A, [A, b.id]).with_isr([A, b.id])
        assert other.version.number > before.version.number
        a.send(wire.RegisterText(other.encode()))
        assert (await leader.accept())[1].version == before.version
        assert b.files.promised == before == decode(before.encode(), "")

    follower(tmp_path, scene)


def test_who_is_told_that_it_went_back_takes_another_id(tmp_path):
    async def scene(shard, b, leader):
        a, _ = await leader.accept()
        a.send(wire.RefusedText("went_back"))
        await shard.until(b.roles.went_back)
        assert not b.roles.went_back() and b.following is None

    follower(tmp_path, scene)


async def receive_none(link, data, lineage):
    """All files of the bootstrap are there already."""
    return 0


def put_half(data):
    """Put one file of a bootstrap in place, with which the WAL is a damaged one. Return its path."""
    later = f"{data}/append/{100:020}.log"
    with open(later, "wb") as file:
        file.write(stored([b"t|||x"], 100)[0])
    return later


def test_a_directory_that_is_being_replaced_is_asked_for_no_end(tmp_path, monkeypatch):
    """Its files come one by one: half of them are a damaged WAL, of which the process would end for good."""

    async def scene(shard, b, leader):
        seen = []

        def settle(data):
            later = put_half(data)
            seen.append(b.roles.position())
            os.unlink(later)

        monkeypatch.setattr(follow, "receive_files", receive_none)
        monkeypatch.setattr(follow, "settle", settle)
        before = b.roles.position()
        peer, _ = await leader.accept()
        peer.send(wire.Gone(1))
        await shard.until(lambda: seen and b.log.of("bootstrapped"))
        assert seen == [before]

    follower(tmp_path, scene, lines=[b"t|||%d" % n for n in range(1, 4)])


@pytest.mark.parametrize("is_late", [False, True])
def test_who_compares_hears_of_a_bootstrap_in_its_middle_or_since_and_not_of_damage(tmp_path, monkeypatch, is_late):
    begun, go_on, real = threading.Event(), threading.Event(), follow.settle

    def settle(data):
        later = put_half(data)
        begun.set()
        go_on.wait(PATIENCE_S)
        os.unlink(later)
        return real(data)

    monkeypatch.setattr(follow, "receive_files", receive_none)
    monkeypatch.setattr(follow, "settle", settle)

    async def scene(shard, b, leader):
        me = wire.Me("s", LINEAGE, "a", wire.NOBODY, 1, 4096)
        link = await wire.call(shard.address("b"), me, SECRET, None, PATIENCE_S)
        shard.links.append(link)
        assert (await compare._ask_broker(link, NextLog("-"))).log == "append"
        peer, _ = await leader.accept()
        peer.send(wire.Gone(1))
        await shard.until(begun.is_set)
        if is_late:
            go_on.set()
            await shard.until(lambda: b.log.of("bootstrapped"))
        with pytest.raises(WireError, match="a bootstrap is being put in place; ask again"):
            await compare._ask_broker(link, NextLog("append"))
        go_on.set()
        await shard.until(lambda: b.log.of("bootstrapped"))

    try:
        follower(tmp_path, scene, lines=[b"t|||%d" % n for n in range(1, 4)])
    finally:
        go_on.set()


def test_lines_in_the_fifo_of_a_follower_never_come_up_again(tmp_path):
    async def scene(shard, b, leader):
        await agree(shard, b, leader)
        b.send(b"t|||1", b"!c 17.1 1 3 l=7", b"t|||2")
        await shard.until(lambda: b.stages.dropped == 5)
        with pytest.raises(BlockingIOError):
            os.read(b.raw, 1)
        assert [each["count"] for each in b.log.of("fifo_lines_dropped")] == [5]

    follower(tmp_path, scene)


def test_doors_lead_to_a_leader_only_once_it_has_led_in_our_epoch_so_two_followers_make_no_circle(tmp_path):
    async def scene(shard, b):
        register = first_register("a" * 16, ["a" * 16, b.id])
        doors = (("broker", "a"), ("lines", "127.0.0.1:1"))
        async with Leader(register) as leader:
            b.files.promise(register)
            b.roles.act(Duty(register, b.id, leader.address, doors))
            peer, _ = await leader.accept()
            assert b.page.leader == {}, "it may follow us, by an older register"
            peer.send(wire.Hw(0))
            await shard.until(lambda: b.page.leader == dict(doors))
            b.roles.act(Duty(register, b.id, leader.address, doors))
            assert b.page.leader == dict(doors)
            later = register.elect("a" * 16, ["a" * 16, b.id])
            b.files.promise(later)
            b.roles.act(Duty(later, b.id, leader.address, doors))
            assert b.page.leader == {}, "of this epoch nothing is known yet"
            b.roles.act(Duty(later, b.id, leader.address, doors, is_open=True))
            assert b.page.leader == dict(doors), "Consul knows that it has opened its doors"

    play(tmp_path, scene, "b")


def test_who_hears_nothing_of_its_leader_for_a_session_and_the_lag_does_not_follow(tmp_path):
    async def scene(shard, b, leader):
        assert b.roles.followed() == 0
        await agree(shard, b, leader)
        assert b.roles.followed() == 1
        await shard.until(lambda: b.roles.followed() == 0)  # the leader says nothing more
        b.roles.publish(b.stages.stats.rows["replica"], None)
        assert b.stages.stats.rows["replica"].role_name == "waiting"

    follower(tmp_path, scene, env={"KMQ_SESSION_TTL": "1s", "KMQ_REPLICA_LAG": "1s"})
