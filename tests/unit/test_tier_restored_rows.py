"""Partitions with rows after a restore and after a fork: history stays in the store, at its offsets, also a second time."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS
from tiered import TieredBroker, cold_broker, lines, opened, read_all, restored

from kmq.broker import admission
from kmq.config.settings import load
from kmq.errors import CorruptError
from kmq.gateway.core.partitions import Partitions
from kmq.log import gaps, identity, reader, rows, topics
from kmq.log.checkpoint import Checkpointer
from kmq.log.damage import DamageError
from kmq.log.partition import PartitionLog
from kmq.log.segment import Limits
from kmq.router import fork
from kmq.tier import fetch
from kmq.tier.fetch import NoRoomError
from kmq.tier.restore import Restore, find_source
from kmq.tier.store import StoreError, get

pytestmark = pytest.mark.usefixtures("small_blocks")

COUNT = 400


@pytest.fixture
def made(tmp_path):
    broker = cold_broker(tmp_path, COUNT)
    broker.copier.turn()  # all that the disk had
    return broker


def test_history_stays_in_the_store_at_its_offsets(made, tmp_path):
    again = restored(made, tmp_path / "again")
    assert read_all(again) == dict(enumerate(made.sent)) and again.begin() == 0
    assert again.local()[0] > 100 and not os.path.exists(f"{again.data}/tier/cache/t/1/0/{again.local()[0]}")
    end = gaps.read(again.directory())[-1].to
    again.send(*lines(5, begin=1000))
    assert [*read_all(again)] == [*range(COUNT), *range(end, end + 5)]
    again.stop()


def test_what_was_restored_goes_on_and_can_be_restored_itself(made, tmp_path):
    again = restored(made, tmp_path / "again")
    before = again.rows()
    again.send(*lines(200, begin=1000))
    for _ in range(3):
        again.turn()
    after = again.rows()
    assert after[: len(before)] == before and after[-1][0] >= gaps.read(again.directory())[-1].to
    whole = read_all(again)
    again.stop()
    third = restored(again, tmp_path / "third")
    assert read_all(third) == whole and third.begin() == 0
    third.stop()


@pytest.mark.parametrize("content", [None, b"odd\n"])
@pytest.mark.parametrize("are_all_cold", [False, True])
def test_a_lost_tier_of_a_restored_directory_is_laid_out_again_and_no_gap_is_invented(
    made, tmp_path, content, are_all_cold
):
    if are_all_cold:  # the first segment is the one after the gap
        made.start()
        made.limits = Limits(segment_bytes=4096, tier="on", local_retention_bytes=4096)
        made.object_bytes = 1 << 26
        made.kill_copier()
        made.turn()
        assert made.rows()[-1][1] == COUNT
        made.stop()
    again = restored(made, tmp_path / "again")
    again.send(*lines(200, begin=1000))
    assert (again.local()[0] > COUNT) == are_all_cold
    whole = read_all(again)
    again.stop()
    path = Path(rows.path_of(again.directory()))
    path.unlink() if content is None else path.write_bytes(content)
    again.start()
    log = reader.partition(again.data, "t", 0)
    for offset in (3, again.local()[0] - 1):
        with pytest.raises(DamageError):
            log.read(offset, 1)
    assert log.read(again.local()[0], 1)[0] == again.local()[0]
    for _ in range(3):
        again.turn()
    assert read_all(again) == whole and again.begin() == 0
    again.stop()


def test_a_gap_between_segments_is_known_though_tier_is_damaged(made, tmp_path):
    copy = str(tmp_path / "copy")
    shutil.copytree(made.data, copy, symlinks=True)
    fork.carry_out(copy, fork.plan(copy), load({"KMQ_DATA": copy}, "none.toml"), FakeLogger())
    again = opened(made, copy)
    again.send(*lines(5, begin=1000))
    [gap], local = gaps.read(again.directory()), again.local()[0]
    Path(rows.path_of(again.directory())).write_bytes(b"odd\n")
    again.stop()
    again.start()
    log = reader.partition(copy, "t", 0)
    assert gaps.read(again.directory()) == (gap,) and local < gap.first
    assert [*dict(offsets_of(log, local))] == [*range(local, COUNT), *range(gap.to, gap.to + 5)]
    with pytest.raises(DamageError):
        log.read(3, 1)
    again.stop()
    with pytest.raises(CorruptError, match="kmq verify --repair with KMQ_TIER set"):
        fork.plan(copy)


def offsets_of(log, offset):
    while (found := log.read(offset, 1))[1]:
        yield found
        offset = found[0] + 1


def test_a_partition_whose_records_all_lie_in_rows_comes_back_empty_at_their_end(tmp_path):
    broker = TieredBroker(tmp_path, Limits(segment_bytes=4096, tier="on", local_retention_bytes=4096))
    broker.send(*lines(100))
    broker.turn()
    broker.copier.turn()
    assert broker.rows()[-1][1] == 100
    broker.stop()
    again = restored(broker, tmp_path / "again")
    assert read_all(again) == dict(enumerate(broker.sent))
    partition = Partitions(again.data).open("t", 0)
    assert partition.highest_shown() == partition.first_shown(FIRST_TS // 1000)  # all within a millisecond
    again.stop()


def test_a_drill_names_the_objects_of_the_living_broker_and_writes_nothing(made, tmp_path):
    keys = sorted(made.store.names(""))
    again = restored(made, tmp_path / "drill", drill=True)
    assert sorted(made.store.names("")) == keys and read_all(again) == dict(enumerate(made.sent))
    again.stop()


@pytest.mark.parametrize("drill", [True, False])
def test_what_is_downloaded_is_read_without_the_store(made, tmp_path, drill):
    again = restored(made, tmp_path / "again", drill, downloads=True)
    assert again.begin() == 0
    again.queues.context.has_store = not drill
    again.queues.use_limits(Limits(segment_bytes=4096, tier="on", local_retention_bytes=0 if not drill else 4096))
    shutil.move(made.store.root, tmp_path / "away")
    again.queues.tick()
    again.queues.settle()
    assert again.local()[0] == 0 and again.begin() == 0
    found = dict(enumerate(b"".join(text for _, text in reader.local(again.data, "t", 0).chunks(0)).splitlines(True)))
    assert found == dict(enumerate(made.sent))
    again.kill()
    again.start()
    assert again.local()[0] == 0 and gaps.read(again.directory())
    end = gaps.read(again.directory())[-1].to
    again.send(*lines(5, begin=1000))
    assert b"".join(text for _, text in reader.local(again.data, "t", 0).chunks(end)).count(b"\n") == 5
    again.stop()


def test_what_has_no_room_is_not_begun(made, tmp_path, monkeypatch):
    monkeypatch.setattr(admission.Admission, "shortage", lambda self: -1000)
    keys = sorted(made.store.names(""))
    with pytest.raises(NoRoomError, match="and 1,000 are free"):
        restored(made, tmp_path / "again", downloads=True)
    assert sorted(made.store.names("")) == keys and os.listdir(tmp_path / "again") == []


def test_what_local_limits_would_delete_at_once_is_not_downloaded(made, tmp_path):
    settings = load({"KMQ_DATA": str(tmp_path / "again"), "KMQ_TIER_TOPICS": "on"}, "none.toml")
    again = Restore(
        made.store, find_source(made.store, "", "restore@here"), settings, FakeLogger(), lambda nbytes: None
    )
    limits = Limits(tier="on", local_retention_bytes=4096)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fetch, "limits_of", lambda settings, data, topic: limits)
        again.run(False, downloads=True)
    assert len(again.left) == 1 and "kmq topics set t local_retention_bytes=" in again.left[0]
    assert not os.path.exists(f"{settings.data}/topics/.fetched")


def test_a_forked_directory_keeps_its_rows_and_tells_its_new_lineage_of_them(made, tmp_path):
    copy = str(tmp_path / "copy")
    shutil.copytree(made.data, copy, symlinks=True)
    settings = load({"KMQ_DATA": copy}, "none.toml")
    fork.carry_out(copy, fork.plan(copy), settings, FakeLogger())
    again = opened(made, copy)
    assert read_all(again) == dict(enumerate(made.sent))
    keys = [row.key for row in rows.of(again.directory()).rows]
    assert all(key.startswith(f"{made.copier.lineage}/") for key in keys)
    shutil.rmtree(f"{copy}/tier", ignore_errors=True)
    again.send(*lines(200, begin=1000))
    for _ in range(3):
        again.turn()
    assert again.copier.lineage == identity.lineage(copy) != made.copier.lineage
    assert again.rows()[0][0] == 0 and again.rows()[-1][0] >= gaps.read(again.directory())[-1].to
    assert [row.key for row in again.state.logs["t/0", 1].rows][: len(keys)] == keys
    assert get(again.store, keys[0])
    again.stop()


# --- starts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [100, 10**6])
def test_a_start_inside_of_a_row_comes_back_with_a_restore(tmp_path, offset):
    """One that lies beyond the end deletes what there was, and nothing that came later."""
    broker = TieredBroker(tmp_path, Limits(segment_bytes=4096, tier="on", local_retention_bytes=4096), 8192)
    broker.send(*lines(200))
    broker.turn()
    broker.send(b"__kmq.start|1|;request=r|t incarnation=1 0=%d" % offset)
    broker.tick()
    begin = broker.begin()
    assert begin == min(offset, 200)
    broker.send(*lines(200, 200))
    for _ in range(3):
        broker.turn()
    whole = read_all(broker)
    broker.stop()
    assert [*whole] == [*range(begin, 400)]
    again = restored(broker, tmp_path / "again")
    assert read_all(again) == whole and again.begin() == begin
    again.stop()


def test_a_start_that_waits_for_room_stays_before_what_goes_to_the_store_meanwhile(tmp_path):
    """It was postponed while the topic had tier=off, so no file tier had it when the first row was made."""
    broker = TieredBroker(tmp_path, Limits(segment_bytes=4096))
    broker.send(*lines(200))
    broker.queues.context.has_room = lambda nbytes: False
    broker.send(b"__kmq.start|1|;request=r|t incarnation=1 0=100")
    broker.tick()
    assert broker.begin() < 100
    broker.limits = Limits(segment_bytes=4096, tier="on", local_retention_bytes=4096)
    broker.queues.use_limits(broker.limits)
    broker.tick()
    broker.kill_copier()
    broker.send(*lines(200, 200))
    for _ in range(3):
        broker.turn()
    broker.stop()
    again = restored(broker, tmp_path / "again")
    assert [*read_all(again)] == [*range(100, 400)]
    again.stop()


def test_a_gap_is_left_only_after_the_checkpoint_that_a_start_has_begun(tmp_path, monkeypatch):
    """It syncs the empty segment that goes with the gap."""
    broker = TieredBroker(tmp_path, Limits(segment_bytes=4096, tier="on", local_retention_bytes=4096))
    broker.send(*lines(50))
    broker.turn()
    broker.send(b"__kmq.start|1|;request=r|t incarnation=1 0=%d" % 10**6)
    broker.turn()
    broker.stop()
    has_gap, skip_to, run = threading.Event(), PartitionLog.skip_to, Checkpointer.run

    def skip(log, offset):
        skip_to(log, offset)
        has_gap.set()

    def run_late(checkpoint, *arguments):
        has_gap.wait(0.5)
        run(checkpoint, *arguments)

    monkeypatch.setattr(PartitionLog, "skip_to", skip)
    monkeypatch.setattr(Checkpointer, "run", run_late)
    again = restored(broker, tmp_path / "again")
    assert again.begin() >= 50 and not read_all(again)
    again.stop()


# --- a store that was away for too long -----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["off", "on"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_after_a_hole_in_the_copied_wal_each_record_comes_back_at_its_offset(tmp_path, tier, is_killed):
    """The local WAL went while the store was away. A topic in the tier still comes back whole, because the disk has it."""
    broker = TieredBroker(tmp_path, Limits(segment_bytes=4096, tier=tier))
    broker.send(*lines(100))
    broker.turn()
    broker.store.is_away = True
    broker.send(*lines(400, 100))
    with pytest.raises(StoreError):
        broker.turn()
    broker.lose_wal_before(361)
    broker.store.is_away = False
    if is_killed:
        broker.kill_copier()
    broker.turn()
    broker.stop()
    again = restored(broker, tmp_path / "again")
    begin = 0 if tier == "on" else 360
    assert read_all(again) == dict(enumerate(broker.sent[begin:], begin))
    again.stop()


def test_a_kill_between_the_objects_after_a_hole_leaves_what_was_there_before(tmp_path):
    broker = TieredBroker(tmp_path, Limits(segment_bytes=4096), 8192)
    broker.send(*lines(100))
    broker.turn()
    broker.send(*lines(400, 100))
    broker.checkpoint()
    broker.lose_wal_before(200)
    for fates in range(1, 20):
        broker.kill_copier()
        broker.store.plan = [""] * fates + ["lost"]
        try:
            broker.copier.turn()
        except StoreError:
            pass
        else:
            break
        broker.store.plan = []
        drill = restored(broker, tmp_path / f"drill{fates}", drill=True)
        found = read_all(drill)
        assert found == dict(enumerate(broker.sent[:100])) or found == dict(
            enumerate(broker.sent[min(found) :], min(found))
        )
        drill.stop()
    assert fates > 5
    broker.stop()


def test_a_table_has_its_offsets_after_a_gap_too_also_in_a_second_restore(tmp_path):
    """A compacted topic is copied as a whole; a restore gives its later records offsets above a gap."""
    made = TieredBroker(tmp_path, Limits(segment_bytes=4096))
    made.stop()
    topics.declare(made.data, "c", 1, limits={"cleanup": "compact"})
    made.start()
    made.kill_copier()
    made.send(*lines(50, topic=b"c"))
    made.turn()
    made.stop()
    again = restored(made, tmp_path / "again")
    again.send(*lines(50, 50, topic=b"c"))
    again.turn()
    [gap] = gaps.read(f"{again.data}/topics/c/0")
    whole = [*offsets_of(reader.partition(again.data, "c", 0), 0)]
    assert [*dict(whole)] == [*range(50), *range(gap.to, gap.to + 50)]
    again.stop()
    third = restored(again, tmp_path / "third")
    log = reader.partition(third.data, "c", 0)
    assert [*offsets_of(log, 0)] == whole and gaps.read(log.directory)[0] == gap and log.end_offset() > gap.to + 50
    third.stop()
