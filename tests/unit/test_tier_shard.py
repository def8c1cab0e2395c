"""The copy of a shard: the leader alone makes it, up to the high watermark; a deposed one adds nothing that is wrong."""

import gzip
import os
import shutil
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_data import append, write_data
from made_up import no_room
from tier_stores import LyingStore

from kmq.cli import restore as restore_command
from kmq.config.settings import load
from kmq.links import role
from kmq.links.role import FOLLOWING, STARTING, RolePage
from kmq.log import checkpoint, committed, identity, reader, wal
from kmq.log.committed import Epochs, encode_epoch
from kmq.log.wal import Wal
from kmq.router.queues import Queues
from kmq.tier.commits import CommitLog, FencedError, line
from kmq.tier.restore import Restore, find_source
from kmq.tier.store import StoreError, get
from kmq.tier.turn import Copier, FollowsError, Leadership, TurnOptions, full_key

LINES = [b"orders.k%d|0|%d|%s" % (n % 5, n, b"x" * 200) for n in range(1, 301)]
FAR = 1e9  # of the monotonic clock


class ShardReplica:
    """One directory of a shard, with a role page of its own. The copier of a process is made by `copier`."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.data = name, str(path)
        self.instance = f"tiershard-{os.getpid()}-{name}"
        self.page_id = identity.read(self.data, "id")
        self.page = RolePage.make(self.instance, self.page_id)

    def lead(self, epoch: int, hw: int) -> None:
        self.page.leave()
        self.page.enter(STARTING, epoch, 7, hw)
        self.page.lead_until(FAR, FAR)
        self.page.open_doors()

    def follow(self, epoch: int, hw: int) -> None:
        self.page.leave()
        self.page.enter(FOLLOWING, epoch, 7, hw)
        self.page.show_leader({"broker": "z"})

    def copier(self, place, shard="s", object_bytes=1 << 26):
        leadership = Leadership(self.instance, self.page_id, shard)
        options = TurnOptions(object_bytes, 0, leadership.committed, leadership=leadership)
        return Copier(self.data, place, FakeLogger(), options)

    def append(self, lines):
        made = [Wal(self.data, no_room, 1 << 20), Queues(self.data, no_room, FakeLogger())]
        made[1].recover(made[0].last_seq)
        made.append(made[0].last_seq + 1)
        append(made, lines)
        made[0].close()
        made[1].close()


@pytest.fixture
def place(tmp_path):
    return LyingStore(str(tmp_path / "store"))


@pytest.fixture
def shard(tmp_path):
    """Two replicas with the same 300 records."""
    data = write_data(tmp_path / "a", LINES, {"orders": 2})
    shutil.copytree(data, tmp_path / "b")
    found = [ShardReplica(tmp_path / name, name) for name in ("a", "b")]
    yield found
    for each in found:
        role.remove(each.instance)


def state(place, replica):
    return CommitLog(place, identity.lineage(replica.data), "reader@here").read()


def copied(place, replica):
    lineage = identity.lineage(replica.data)
    rows = state(place, replica).wal
    return b"".join(gzip.decompress(get(place, full_key(lineage, row.values["key"]))) for row in rows)


def local(replica, last=0):
    return b"".join(reader.read(replica.data, 1, last or wal.last_stored(replica.data)[0]))


def test_a_leader_copies_up_to_the_high_watermark_only(shard, place):
    a, _ = shard
    a.lead(8, 200)
    copying = a.copier(place)
    copying.turn()
    assert copied(place, a) == local(a, 200)
    claim = state(place, a).claim
    assert claim is not None and claim.values == {"shard": "s", "epoch": "8"}
    a.page.raise_hw(300)
    copying.turn()
    assert copied(place, a) == local(a) and "router.ckpt" in state(place, a).files


def test_a_follower_writes_nothing_and_goes_on_when_it_leads(shard, place):
    a, b = shard
    a.lead(8, 200)
    a.copier(place).turn()
    before = sorted(place.names(""))
    b.follow(8, 200)
    copying = b.copier(place)
    for _ in range(3):
        with pytest.raises(FollowsError, match="broker z leads the shard s"):
            copying.turn()
    assert sorted(place.names("")) == before
    b.lead(9, 300)
    copying.turn()
    assert copied(place, b) == local(b)
    assert [row.number("first") for row in state(place, b).wal] == [1, 201]


def test_a_leader_that_was_deposed_in_mid_copy_is_fenced_and_never_claims_again(shard, place):
    """It does not know it: its role page still says that it leads, as that of a broker whose replica hangs."""
    a, b = shard
    a.lead(8, 100)
    zombie = a.copier(place, object_bytes=1 << 14)
    zombie.turn()
    a.page.raise_hw(300)
    real, left = LyingStore.create, [2]

    def create(store, key, content):
        left[0] -= 1
        if not left[0]:
            b.lead(9, 300)
            b.copier(place).turn()
        return real(store, key, content)

    place.create = create.__get__(place)
    with pytest.raises((FencedError, StoreError)):
        zombie.turn()
    del place.create
    number = state(place, b).number
    for _ in range(2):
        with pytest.raises(FencedError, match="has claimed"):
            zombie.turn()
        with pytest.raises(FencedError):
            a.copier(place).turn()
    assert state(place, b).number == number and copied(place, b) == local(b)


def test_a_commit_of_the_deposed_leader_that_arrives_late_is_right(shard, place):
    a, b = shard
    a.lead(8, 100)
    zombie = a.copier(place)
    zombie.turn()
    a.page.raise_hw(250)
    place.plan = ["", "late"]  # the object, its commit
    with pytest.raises(StoreError):
        zombie.turn()
    place.deliver()
    b.lead(9, 300)
    b.copier(place).turn()
    assert copied(place, b) == local(b)
    assert [row.number("last") for row in state(place, b).wal] == [100, 250, 300]


def test_a_new_leader_does_not_replace_later_checkpoints_by_its_own(shard, place):
    """The WAL that the older ones need may have gone since."""
    a, b = shard
    with open(f"{a.data}/router.ckpt", "rb") as file:
        older = file.read()
    a.append(LINES)
    end = wal.last_stored(a.data)[0]
    a.lead(8, end)
    a.copier(place).turn()
    known = state(place, a).files["router.ckpt"]
    assert known.number("seq") == end
    shutil.rmtree(b.data)
    shutil.copytree(a.data, b.data)
    for name, content in (("id", f"{b.page_id}\n".encode()), ("router.ckpt", older)):
        with open(f"{b.data}/{name}", "wb") as file:
            file.write(content)
    b.lead(9, end)
    b.copier(place).turn()
    assert state(place, b).files["router.ckpt"] == known
    b.append(LINES[:9])
    b.page.raise_hw(end + 9)
    b.copier(place).turn()
    assert state(place, b).files["router.ckpt"].number("seq") == end + 9


def test_a_leader_whose_doors_close_stops_and_one_that_leads_again_claims_anew(shard, place):
    a, _ = shard
    a.lead(8, 100)
    copying = a.copier(place)
    copying.turn()
    a.page.close_doors()
    with pytest.raises(FollowsError):
        copying.turn()
    a.page.open_doors()
    copying.turn()
    assert state(place, a).number == copying.commits.state.number
    a.lead(11, 300)
    copying.turn()
    claim = state(place, a).claim
    assert claim is not None and claim.values["epoch"] == "11" and copied(place, a) == local(a)


def test_the_leader_takes_the_copy_over_from_the_pod_whose_directory_has_become_a_shard(shard, place):
    a, b = shard
    end = wal.last_stored(a.data)[0]
    pod = Copier(a.data, place, FakeLogger(), TurnOptions(1 << 26, 0, lambda: end))
    pod.turn()
    b.lead(1, 300)
    b.copier(place).turn()
    claim = state(place, b).claim
    assert claim is not None and claim.values == {"shard": "s", "epoch": "1"}
    with pytest.raises(FencedError):
        pod.turn()
    with pytest.raises(FencedError):  # a pod never takes over from a shard by itself
        Copier(a.data, place, FakeLogger(), TurnOptions(1 << 26, 0, lambda: end)).turn()


@pytest.mark.parametrize(
    "claim", [line("claim", shard="s", epoch=9), line("claim", shard="t", epoch=1), line("claim", successor="f" * 32)]
)
def test_a_higher_epoch_another_shard_and_a_restore_are_never_overruled(shard, place, claim):
    a, _ = shard
    log = CommitLog(place, identity.lineage(a.data), "other@host")
    log.read()
    log.claim(claim, "99")
    a.lead(8, 300)
    with pytest.raises(FencedError):
        a.copier(place).turn()
    assert state(place, a).number == 1


def test_what_is_restored_of_a_shard_begins_a_new_one_above_its_last_epoch(tmp_path, place):
    """Of the claims the restored directory has none but a pod's, so the leader of the new shard takes it over."""
    lines = [encode_epoch(8, 7, "a", 1, b"0"), *LINES, encode_epoch(12, 7, "b", 1, b"0")]
    made = write_data(tmp_path / "a", lines[:1], {"orders": 2}, closed=False)
    append(made, lines[1:-1])
    append(made, lines[-1:])
    made[0].close()
    made[1].close()
    a = ShardReplica(tmp_path / "a", "c")
    try:
        a.lead(12, 302)
        a.copier(place).turn()
        settings = load({"KMQ_DATA": str(tmp_path / "again")}, "none.toml")
        source = find_source(place, "", "restore@here")
        assert source is not None
        Restore(place, source, settings, FakeLogger(), lambda nbytes: None).run(is_drill=False)
        again = str(tmp_path / "again")
        epochs = Epochs.load(again, checkpoint.routed_seq(again))
        assert epochs.epoch_at(wal.last_stored(again)[0]) == 12
        assert not os.path.exists(f"{again}/replica") and committed.readable_seq(again) is None
        with pytest.raises(FencedError):
            a.copier(place).turn()
    finally:
        role.remove(a.instance)
    new = ShardReplica(tmp_path / "again", "d")
    try:
        new.lead(13, wal.last_stored(again)[0])
        new.copier(place, shard="s2").turn()
        claim = state(place, new).claim
        assert claim is not None and claim.values == {"shard": "s2", "epoch": "13"}
    finally:
        role.remove(new.instance)


def test_an_empty_replica_is_never_restored_by_itself(tmp_path, place):
    a = write_data(tmp_path / "a", LINES[:9])
    Copier(a, place, FakeLogger(), TurnOptions(1 << 26, 0, lambda: 9)).turn()
    (tmp_path / "secret").write_text("x")
    env = {"KMQ_DATA": str(tmp_path / "b"), "KMQ_TIER": f"file://{place.root}", "KMQ_SHARD": "s"}
    env |= {"KMQ_CLUSTER": "c", "KMQ_CONSUL": "127.0.0.1:1", "KMQ_REPLICA_SECRET": str(tmp_path / "secret")}
    settings = load(env, "none.toml")
    restore_command.restore_if_empty(settings, settings.tier)
    assert not (tmp_path / "b").exists()
