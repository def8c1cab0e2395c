"""Topics in the tier of a shard: the leader makes rows, each replica takes them, and every one reads and leads alike."""

import os
import shutil

import pytest
from tiered import LINEAGE, TieredReplica, lines

from kmq.errors import ConfigError
from kmq.log import rows, segment, topic_changes, topics, wal
from kmq.log.segment import Limits
from kmq.tier import turn as turn_module
from kmq.tier.commits import AheadError, FencedError
from kmq.tier.store import StoreError
from kmq.tier.turn import FollowsError

pytestmark = pytest.mark.usefixtures("small_blocks")

SEGMENT = 4096


def limits(segment_bytes=SEGMENT, **more):
    return Limits(segment_bytes=segment_bytes, tier="on", local_retention_bytes=3 * SEGMENT, **more)


@pytest.fixture
def shard(tmp_path):
    """Two replicas whose segments have other borders; a leads."""
    found = [TieredReplica(tmp_path, "a", limits(), 8192), TieredReplica(tmp_path, "b", limits(3000), 8192)]
    found[0].lead(1)
    yield found
    for each in found:
        each.close()


def send(shard, *some):
    for each in shard:
        each.send(*some)


def turn(shard):
    for each in shard:
        each.turn()


def names(replica):
    return sorted(replica.store.names(""))


def rows_of(replica):
    """(base, next) of the rows that the commits have."""
    return [(row.base, row.next) for row in replica.state.logs["t/0", 1].rows]


def is_like(one, other):
    return rows.of(one.directory()).lines() == rows.of(other.directory()).lines()


def test_a_follower_takes_the_rows_and_deletes_its_own_segments_and_writes_nothing_to_the_store(shard):
    a, b = shard
    send(shard, *lines(400))
    a.turn()
    before, made = names(a), [*b.store.made]
    b.turn()
    assert names(a) == before and b.store.made == made == []
    assert a.rows() and is_like(a, b)
    assert a.local()[0] > 0 and b.local()[0] > 0 and a.local() != b.local()
    assert b.local()[0] <= b.rows()[-1][1]
    assert wal.copied_seq(b.data) == wal.copied_seq(a.data) == 400
    for each in shard:
        assert each.begin() == 0 and each.read() == b"".join(each.sent)
        with open(f"{each.data}/format") as file:
            assert file.read().startswith("5 ")


def test_a_follower_asks_for_the_next_number_alone_once_it_has_read_all(shard, monkeypatch):
    a, b = shard
    send(shard, *lines(400))
    a.turn()
    b.turn()
    calls, number = [], b.state.number

    def watched(call):
        real = getattr(b.store, call)

        def do(*arguments):
            calls.append((call, arguments[0]))
            return real(*arguments)

        return do

    for call in ("get", "names", "create", "delete"):
        monkeypatch.setattr(b.store, call, watched(call))
    b.turn()
    assert calls == [("get", f"{LINEAGE}/commits/{number + 1:020d}")]


def test_a_follower_that_is_behind_takes_the_rows_of_what_it_has(shard):
    a, b = shard
    b.send(*lines(200))
    a.send(*lines(400))
    a.turn()
    a.turn()
    b.turn()
    assert a.rows()[-1][1] > 200 >= b.rows()[-1][1] > 0
    assert [row for row in a.rows() if row[1] <= 200] == b.rows()
    b.stop()
    os.unlink(f"{b.data}/router.ckpt")
    for _, path in segment.listing(b.directory()):
        os.unlink(path)
    b.start()  # it begins after its rows
    assert b.local()[0] == b.rows()[-1][1] and b.read() == b"".join(b.sent)
    b.send(*lines(200, 200))
    b.turn()
    assert is_like(a, b) and b.read() == b"".join(a.sent)


def test_rows_that_no_checkpoint_of_the_follower_covers_wait_for_it(shard):
    a, b = shard
    send(shard, *lines(400))
    a.turn()
    with pytest.raises(FollowsError):
        b.copier.turn()  # it has the records, but its router.ckpt does not say so
    b.tick()
    assert not os.path.exists(rows.path_of(b.directory())) and b.local()[0] == 0
    b.turn()
    assert is_like(a, b)


def test_a_new_leader_goes_on_inside_a_segment_and_the_old_one_takes_its_rows(shard):
    a, b = shard
    send(shard, *lines(200))
    turn(shard)
    end = a.rows()[-1][1]
    assert end not in b.local() and end not in a.local()
    send(shard, *lines(200, 200))
    b.lead(2)
    b.turn()
    assert rows_of(b)[: len(a.rows())] == a.rows() and rows_of(b)[-1][1] > 300
    with pytest.raises(FencedError):  # it does not know that it was deposed
        a.copier.turn()
    a.kill_copier()
    with pytest.raises(FencedError):
        a.copier.turn()
    assert a.rows()[-1][1] == end
    a.follow(2)
    turn(shard)
    assert is_like(a, b) and a.local()[0] > 0
    assert a.read() == b.read() == b"".join(a.sent)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("at", "fate"), [(2, "late"), (3, "lost"), (3, "done"), (3, "late"), (5, "late")])
def test_whichever_request_of_a_leader_goes_wrong_the_next_one_goes_on(shard, at, fate):
    a, b = shard
    send(shard, *lines(200))
    a.turn()
    send(shard, *lines(200, 200))
    a.store.plan = [""] * at + [fate]
    with pytest.raises(StoreError):
        a.turn()
    b.lead(2)
    b.turn()
    a.store.deliver()
    a.follow(2)
    send(shard, *lines(100, 400))
    turn([b, a])
    found = rows_of(b)
    assert [row[0] for row in found] == [0, *(row[1] for row in found[:-1])] and found[-1][1] > 400
    assert is_like(a, b) and a.read() == b.read() == b"".join(a.sent)


def test_a_new_leader_whose_records_are_others_adds_no_row(shard):
    a, b = shard
    for each in shard:  # the WAL would say it first
        each.copier._options = each.options()._replace(every=None)
    a.send(*lines(200))
    a.turn()
    b.send(*lines(400, 1000))
    b.lead(2)
    b.checkpoint()
    with pytest.raises(AheadError, match=r"another record \d+ of t/0: it went on elsewhere"):
        b.copier.turn()
    assert rows_of(a) == a.rows()


def test_a_new_leader_whose_checkpoint_is_older_than_the_last_row_waits_for_the_next_one(shard):
    a, b = shard
    b.send(*lines(200))
    b.checkpoint()
    a.send(*lines(400))
    a.turn()
    b.send(*lines(200, 200))
    b.lead(2)
    b.copier.turn()
    assert rows_of(b) == rows_of(a) and rows_of(a)[-1][1] > 200
    send(shard, *lines(200, 400))
    b.turn()
    assert rows_of(b)[-1][1] > 400 and b.read() == b"".join(b.sent)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("harm", ["lost", "damaged", "cut"])
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_follower_whose_file_is_lost_or_damaged_gets_it_again(shard, harm, has_checkpoint):
    a, b = shard
    send(shard, *lines(400))
    turn(shard)
    path = rows.path_of(b.directory())
    b.stop()
    if not has_checkpoint:
        os.unlink(f"{b.data}/router.ckpt")
    if harm == "lost":
        os.unlink(path)
    else:
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) - 5) if harm == "cut" else file.write(b"x")
    b.start()
    b.kill_copier()
    b.turn()
    assert is_like(a, b) and b.read() == b"".join(b.sent)
    send(shard, *lines(200, 400))
    b.lead(2)
    b.turn()
    assert rows_of(b)[-1][1] > 400 and b.read() == b"".join(b.sent)


def test_a_follower_that_is_killed_between_layout_and_install_takes_the_rows_at_its_next_start(shard):
    a, b = shard
    send(shard, *lines(400))
    a.turn()
    b.checkpoint()
    with pytest.raises(FollowsError):
        b.copier.turn()
    assert os.listdir(f"{b.data}/topics/.tiered") == ["t-0"]
    b.kill()
    b.start()
    assert b.begin() == 0
    b.tick()
    assert is_like(a, b) and b.local()[0] > 0 and b.read() == b"".join(b.sent)


def test_a_store_that_is_away_stops_no_follower(shard):
    a, b = shard
    send(shard, *lines(400))
    a.turn()
    b.store.is_away = True
    for _ in range(2):
        with pytest.raises(StoreError):
            b.turn()
        b.tick()
    assert b.local()[0] == 0 and b.read() == b"".join(b.sent)
    b.store.is_away = False
    b.turn()
    assert is_like(a, b)


# --- starts, limits, deletion ----------------------------------------------------------------------------------------


def test_a_start_holds_on_each_replica_and_the_leader_drops_the_rows(shard, monkeypatch):
    a, b = shard
    send(shard, *lines(400))
    turn(shard)
    gone = a.rows()[0][1]
    send(shard, b"__kmq.start|1|;request=r|t incarnation=1 0=%d" % (gone + 1))
    turn(shard)
    assert a.begin() == b.begin() == gone + 1
    b.lead(2)
    a.follow(2)
    turn([b, a])
    assert rows_of(b)[0][0] == gone and is_like(a, b)
    monkeypatch.setattr(turn_module, "_DELETE_S", 0.0)
    b.turn()
    assert not b.state.dropped
    rest = b"".join(a.sent[gone + 1 : 400])
    assert a.read(gone + 1) == b.read(gone + 1) == rest


def test_a_start_of_the_leader_waits_on_a_follower_that_has_not_come_so_far(shard):
    a, b = shard
    b.send(*lines(100))
    a.send(*lines(400))
    a.turn()
    a.queues.retention.begin_at([(a.queues.logs.log_of(a.queues.in_force.table[b"t"], 0), 300)])
    a.turn()
    a.turn()
    assert a.copier.commits.state.logs["t/0", 1].before == a.begin() == 300
    b.turn()
    assert b.begin() == 0 and b.read() == b"".join(b.sent)
    b.send(*lines(300, 100))
    b.turn()
    assert b.begin() == 300 and b.read(300) == a.read(300)


def test_what_total_limits_of_the_leader_took_is_never_copied_and_no_follower_waits_for_it(shard):
    a, b = shard
    send(shard, *lines(200))
    turn(shard)
    a.limits = limits(retention_bytes=4 * SEGMENT)
    a.queues.use_limits(a.limits)
    a.store.is_away = True
    send(shard, *lines(400, 200))
    a.checkpoint()
    a.tick()
    begin = a.begin()
    assert begin > a.rows()[-1][1] and b.begin() == 0
    a.store.is_away = False
    a.turn()
    send(shard, *lines(200, 600))
    turn(shard)
    assert rows_of(a)[0][0] >= begin and is_like(a, b)
    assert b.read(b.begin()) == b"".join(b.sent[b.begin() :])
    b.lead(2)
    b.turn()
    assert b.read(b.begin()) == b"".join(b.sent[b.begin() :])


def test_records_before_the_first_row_stay_on_a_replica_whose_total_limits_have_room_for_them(shard):
    """The leader has lost them, or deleted them by limits of its own. No object has them."""
    a, b = shard
    a.limits = limits(retention_bytes=2 * SEGMENT)
    a.queues.use_limits(a.limits)
    a.store.is_away = True
    send(shard, *lines(200))
    a.checkpoint()
    a.tick()
    a.limits = limits()
    a.queues.use_limits(a.limits)
    a.store.is_away = False
    send(shard, *lines(400, 200))
    turn(shard)
    first = a.rows()[0][0]
    assert first == a.begin() > 0 and is_like(a, b)
    assert b.local()[0] == b.begin() == 0 and b.read() == b"".join(b.sent)
    assert a.local()[0] > first and a.read(first) == b"".join(a.sent[first:])


def test_a_deleted_topic_leaves_no_row_on_any_replica_and_a_second_life_has_its_own(shard):
    a, b = shard
    send(shard, *lines(300))
    turn(shard)
    for each in shard:
        topic_changes.delete(each.data, "t", 1)
        each.queues.adopt_declarations()
        while each.queues.changes.sweep():
            pass
    b.lead(2)
    a.follow(2)
    turn([b, a])
    assert not b.state.logs and b.state.dropped
    send(shard, *lines(300))
    turn([b, a])
    [(_, life)] = b.state.logs
    assert life > 1 and a.rows()[0][0] == b.rows()[0][0] == 300 and is_like(a, b)
    assert a.read(300) == b.read(300) == b"".join(a.sent[300:])


def test_a_topic_that_grows_has_rows_of_its_new_partitions_on_each_replica(shard):
    a, b = shard
    send(shard, *lines(100))
    turn(shard)
    for each in shard:
        topic_changes.submit(each.data, topic_changes.GROW, "t", {"partitions": "2"})
        each.queues.adopt_declarations()
    send(shard, *[line.replace(b"t|", b"t.k%d|" % n, 1) for n, line in enumerate(lines(500, 100))])
    turn(shard)
    assert b.rows(0) == a.rows(0) and b.rows(1) == a.rows(1) != []
    b.lead(2)
    b.turn()
    assert all(a.read(number=number) == b.read(number=number) for number in (0, 1))


# --- a new replica, an older release ---------------------------------------------------------------------------------


def test_a_new_replica_has_the_rows_by_the_leaders_files(shard, tmp_path):
    """Bootstrap brings topics, the WAL and router.ckpt; nothing of the store."""
    a, b = shard
    send(shard, *lines(400))
    turn(shard)
    b.stop()
    a.stop()
    for name in ("topics", "append", "router.ckpt", "format"):
        path = f"{b.data}/{name}"
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        (shutil.copytree if os.path.isdir(f"{a.data}/{name}") else shutil.copy)(f"{a.data}/{name}", path)
    shutil.rmtree(f"{b.data}/tier")
    a.start()
    b.start()
    b.kill_copier()
    assert b.local()[0] == a.local()[0] > 0 and b.begin() == 0 and is_like(a, b)
    send(shard, *lines(200, 400))
    b.lead(2)
    b.turn()
    assert rows_of(b)[-1][1] > 400 and b.read() == b"".join(a.sent)


def test_while_a_broker_may_be_of_an_older_release_no_row_is_made_and_tier_on_is_refused(shard):
    a, b = shard
    for each, level in ((a, 2), (b, 3)):
        with open(f"{each.data}/register", "w") as file:
            file.write(f"lineage={LINEAGE} level={level} brokers=a,b,c min_insync=2\n")
    with pytest.raises(ConfigError, match="tier: not on while a broker of the shard is away, or of an older release"):
        topics.check_tier(a.data, "t", {"tier": "on"}, {"tier": "on"})
    topics.check_tier(b.data, "t", {"tier": "on"}, {"tier": "on"})
    send(shard, *lines(400))
    turn(shard)
    assert not a.state.logs and a.local()[0] == 0
    shutil.copy(f"{b.data}/register", f"{a.data}/register")
    turn(shard)
    assert rows_of(a) and is_like(a, b)
