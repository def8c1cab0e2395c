"""Old records that come back to the disk: which, byte for byte, what is refused, and what a kill at each step leaves."""

import os
import shutil

import pytest
from tiered import TieredBroker, lines

from kmq.config.settings import load
from kmq.errors import BusyError, ConfigError
from kmq.log import compaction, fetched, index, reader, rows, segment, topic_changes
from kmq.log.fetched import FETCHED
from kmq.log.segment import Limits
from kmq.tier import fetch as fetching
from kmq.tier.fetch import NoRoomError
from kmq.tier.objects import ObjectError

pytestmark = pytest.mark.usefixtures("small_blocks")

SEGMENT = 4096
COUNT = 400
LIMITED = Limits(segment_bytes=SEGMENT, tier="on", local_retention_bytes=3 * SEGMENT)
OFF = Limits(segment_bytes=SEGMENT)


@pytest.fixture
def made(tmp_path):
    """A broker whose topic was tier=on, and is off again."""
    broker = TieredBroker(tmp_path, LIMITED, object_bytes=3000)
    broker.send(*lines(COUNT))
    broker.turn()
    broker.tick()
    assert broker.rows()[0][0] == 0 and broker.local()[0] > COUNT // 4
    use(broker, OFF)
    yield broker
    broker.kill()


def use(broker, limits):
    broker.limits = limits
    broker.queues.use_limits(limits)


def settings_of(broker, **more):
    return load({"KMQ_DATA": broker.data, "KMQ_TIER": f"file://{broker.store.root}", **more}, "none")


def lay_out(broker, count=None):
    """What the command does before the router comes to it; only the `count` newest segments. Return their bytes."""
    sizes = []
    fetching.fetch(broker.data, broker.store, fetching.plan(broker.data, "t", 0, SEGMENT)[:count], sizes.append)
    return sum(sizes)


def local_lines(broker):
    return b"".join(text for _, text in reader.local(broker.data, "t", 0).chunks(broker.local()[0]))


def restart(broker):
    broker.kill()
    broker.start()
    broker.queues.use_limits(broker.limits)


def check_whole(broker):
    assert broker.local()[0] == broker.begin() == 0 and local_lines(broker) == b"".join(broker.sent)
    assert all(index.is_whole(path) for _, path in segment.listing(broker.directory()))
    assert compaction.waiting(broker.data, FETCHED) == []


def test_all_records_are_local_again_and_the_rows_stay(made):
    found, local = made.rows(), made.local()
    assert lay_out(made) == sum(map(len, made.sent[: local[0]]))
    assert made.local() == local, "the router alone puts them in place"
    made.tick()
    check_whole(made)
    assert made.local()[-len(local) :] == local and made.rows() == found
    assert fetching.plan(made.data, "t", 0, SEGMENT) == []
    restart(made)
    check_whole(made)
    os.unlink(f"{made.data}/router.ckpt")
    restart(made)
    check_whole(made)
    made.send(*lines(10, COUNT))
    made.turn()
    check_whole(made)
    assert made.logger.of("segment_fetched")


def test_a_segment_takes_as_many_rows_as_a_segment_may_have(made):
    spans = [(part.which.first, part.which.end, len(part.rows)) for part in fetching.plan(made.data, "t", 0, 7000)]
    assert spans[-1][0] == 0 and spans[0][1] == made.local()[0] and {2} <= {count for *_, count in spans} <= {1, 2, 3}
    assert [begin for begin, *_ in spans[:-1]] == [end for _, end, _ in spans[1:]]


def test_what_comes_back_begins_with_the_start_of_the_partition(made):
    log = made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0)
    made.queues.retention.begin_at([(log, 33)])
    made.tick()
    assert 33 not in [base for base, _ in made.rows()] and made.begin() == 33
    lay_out(made)
    made.tick()
    assert made.local()[0] == made.begin() == 33 and local_lines(made) == b"".join(made.sent[33:])
    restart(made)
    assert made.local()[0] == made.begin() == 33


def test_what_went_meanwhile_does_not_come_back(made):
    lay_out(made)
    log = made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0)
    made.queues.tiering.set_start("t", 0, 33)
    made.tick()
    assert made.begin() == 33 <= made.local()[0] and made.logger.of("fetched_discarded")
    lay_out(made)
    made.tick()
    assert made.local()[0] == 33
    made.queues.retention.begin_at([(log, COUNT)])
    made.tick()
    assert made.begin() == COUNT


def test_they_age_by_the_limits_of_the_topic_and_no_byte_counts_twice(made):
    lay_out(made)
    made.tick()
    size = sum(os.path.getsize(path) for _, path in segment.listing(made.directory()))
    use(made, Limits(segment_bytes=SEGMENT, retention_bytes=size))
    made.tick()
    check_whole(made)
    use(made, Limits(segment_bytes=SEGMENT, retention_bytes=size - SEGMENT))
    made.tick()
    assert 0 < made.local()[0] == made.begin() < 100
    made.turn()
    assert made.state.logs["t/0", rows.of(made.directory()).life].rows[0].next > made.begin()


def test_a_deleted_topic_gets_nothing_back(made):
    lay_out(made)
    life = made.queues.in_force.table[b"t"].from_seq
    topic_changes.delete(made.data, "t", life)
    made.queues.adopt_declarations()
    while made.queues.changes.sweep():
        pass
    made.send(*lines(300))
    made.tick()
    assert made.local()[0] == COUNT and compaction.waiting(made.data, FETCHED) == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("point", ["downloaded", "laid out", "index", "log", "synced", "checkpoint"])
def test_a_kill_at_each_step_leaves_what_readers_had_and_the_next_call_completes_it(made, monkeypatch, point):
    def kill(*_, **__):
        raise Killed

    local, found = made.local(), made.rows()
    if point == "downloaded":
        monkeypatch.setattr(fetching, "hand_over", kill)
        with pytest.raises(Killed):
            lay_out(made)
    else:
        lay_out(made, count=2)
    renamed = []

    def rename(source, target, real=os.rename):
        if renamed and point == "index":
            raise Killed
        real(source, target)
        renamed.append(target)
        if len(renamed) == 2 and point == "log":
            raise Killed

    if point in ("index", "log"):
        monkeypatch.setattr(fetched.os, "rename", rename)
    elif point == "synced":
        monkeypatch.setattr(fetched.shutil, "rmtree", kill)
    elif point == "checkpoint":
        monkeypatch.setattr(made.queues.checkpoints, "start", kill)
    if point in ("downloaded", "laid out"):
        made.kill()
    else:
        with pytest.raises(Killed):
            made.queues.tick()
    monkeypatch.undo()
    restart(made)
    assert made.begin() == 0 and made.rows() == found and made.local()[-len(local) :] == local
    assert local_lines(made) == b"".join(made.sent[made.local()[0] :])
    made.tick()
    assert local_lines(made) == b"".join(made.sent[made.local()[0] :])
    lay_out(made)
    made.tick()
    check_whole(made)
    assert os.listdir(compaction.outbox(made.data, FETCHED)) == [".owner"]
    restart(made)
    check_whole(made)


def test_an_object_that_is_not_what_its_row_says_ends_the_command_and_nothing_of_it_comes_back(made):
    row = rows.of(made.directory()).rows[0]
    path = f"{made.store.root}/{made.copier.lineage}/{row.key}"
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        file.seek(40)
        file.write(b"XXXX")
    with pytest.raises(ObjectError):
        lay_out(made)
    made.tick()
    assert 0 < made.local()[0] <= row.next + 100 and made.begin() == 0
    assert local_lines(made) == b"".join(made.sent[made.local()[0] :])


def test_two_at_once_are_one(made):
    with compaction.box_writer(made.data, FETCHED, "fetch"), pytest.raises(BusyError, match="fetch is held by"):
        lay_out(made)


def test_without_room_nothing_is_written_and_it_says_how_much_is_lacking(made):
    settings = settings_of(made, KMQ_DATA_QUOTA="20MiB")
    with pytest.raises(NoRoomError, match=r"1,234,567,890 bytes are to be fetched, and .* are free"):
        fetching.check_room(settings, 1_234_567_890)
    with pytest.raises(NoRoomError):
        fetching.check_room(settings_of(made), 1 << 60)
    fetching.check_room(settings_of(made), 1 << 20)


def test_local_limits_that_would_delete_it_at_once_are_said(made):
    planned = fetching.plan(made.data, "t", 0, SEGMENT)

    def check(**limits):
        fetching.check_limits(made.data, "t", Limits(**{"tier": "on"} | limits), planned, made.now_s)

    with pytest.raises(ConfigError, match=r"kmq topics set t local_retention_bytes=\d+, or tier=off"):
        check(local_retention_bytes=SEGMENT)
    with pytest.raises(ConfigError, match="local_retention_age=2d, or"):
        check(local_retention_age=1e-6)
    check()
    check(tier="off", local_retention_bytes=SEGMENT)


def test_without_a_store_local_limits_delete_nothing(made):
    lay_out(made)
    made.tick()
    made.queues.context.has_store = False
    use(made, LIMITED)
    made.shortage = 1 << 30
    made.tick()
    check_whole(made)
    made.queues.context.has_store = True
    made.tick()
    assert made.local()[0] > 0 and made.begin() == 0
    shutil.rmtree(f"{made.data}/topics/{FETCHED}")  # no part of the directory's state
    restart(made)
    assert made.begin() == 0
