"""What `replica` says of its WAL before a stage has started on it: also of a WAL as a power cut leaves it."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_data import write_data
from waiting import until

from kmq.broker.stats import StatsPage
from kmq.config.settings import load
from kmq.links.ownership import FileLock
from kmq.links.ring import RingObserver, RingWriter
from kmq.links.role import STARTING, RolePage, remove
from kmq.log import identity, wal
from kmq.log.committed import decode_epoch, encode_epoch, write_committed
from kmq.replica.stages import Stages

LINES = [encode_epoch(1, 0xC1D, "a", 1, b"0"), b"t|0||x", b"t|0||y"]


@pytest.fixture
def stages(tmp_path):
    """A function that begins the process `replica` on the directory; what it leaves in shared memory is removed."""
    instance = f"replica-{uuid.uuid4().hex[:8]}"
    paths = {"KMQ_DATA": f"{tmp_path}/data", "KMQ_PIPES": f"{tmp_path}/pipes"}
    (tmp_path / "pipes").mkdir()
    settings = load(paths | {"KMQ_INSTANCE": instance}, toml="")
    write_data(settings.data, LINES)

    def begin():
        page = StatsPage(instance, identity.open_data(settings.data), settings.data)
        return Stages(settings, page, "replica", FakeLogger())

    yield begin
    for path in Path("/dev/shm").glob(f"{instance}.*"):
        path.unlink()


def lose_what_was_not_synced(data):
    """No index, a hole of a page within the last record, empty queues, and `committed` as it was a second ago."""
    [log] = (data / "append").glob("*.log")
    for path in data.glob("*/**/*.idx"):
        path.write_bytes(b"")
    for path in data.glob("topics/*/*/*.log"):
        path.write_bytes(b"")
    last = log.read_bytes().splitlines(keepends=True)[-1]
    with log.open("ab") as file:
        file.write(last.replace(b"3|", b"4|", 1)[:9] + b"\0" * 4096 + b"ab|t|0||z\n5|1|t|0||z\n")
    write_committed(str(data), 3)


def test_after_a_power_cut_the_end_is_in_front_of_the_hole_and_the_epoch_is_known(stages, tmp_path):
    lose_what_was_not_synced(tmp_path / "data")
    begun = stages()
    assert wal.last_stored(begun.data)[0] == begun.shown() == 3
    assert begun.epochs().epoch_at(3) == 1


def test_a_wal_that_durability_writes_is_left_alone(stages, tmp_path):
    lose_what_was_not_synced(tmp_path / "data")
    [log] = (tmp_path / "data" / "append").glob("*.log")
    before, lock = log.read_bytes(), FileLock(f"{tmp_path}/data/append/.owner")
    assert lock.try_acquire("durability")
    stages()
    assert log.read_bytes() == before
    lock.release()


def test_an_epoch_begins_with_its_record_although_who_made_the_ring_was_killed_before_it(stages):
    begun = stages()
    settings, instance = begun.settings, begun.settings.instance
    RingWriter(instance, "framed", begun.ring, "framer", lambda: (4, 0), FakeLogger()).close()
    begun.page.enter(STARTING, 7, 0xC1D, 3)
    more = {"KMQ_SHARD": "s", "KMQ_BROKER": "b", "KMQ_CLUSTER": "c", "KMQ_CONSUL": "127.0.0.1:1"}
    more |= {"KMQ_REPLICA_SECRET": "/dev/null", "KMQ_INSTANCE": instance}
    more |= {"KMQ_DATA": settings.data, "KMQ_PIPES": settings.pipes}
    framer = subprocess.Popen([sys.executable, "-m", "stages.framer"], env=os.environ | more)
    try:
        ring = RingObserver.find(instance, "framed", begun.ring)
        os.write(begun.raw, b"t|0||before it\n")
        until(lambda: ring.committed().next_seq >= 6, "both records in the ring", process=framer)
        (_, first), (_, second) = ring.take()
        assert decode_epoch(bytes(first.data)).epoch == 7 and b"before it" in bytes(second.data)
    finally:
        framer.kill()
        framer.wait()


def test_a_role_page_is_mapped_again_only_once_another_has_its_name(stages):
    made = stages()
    instance, data_id = made.settings.instance, made.data_id
    page = RolePage.find(instance, data_id)
    assert page is not None and RolePage.find(instance, data_id, page) is page
    assert RolePage.find(instance, "another", page) is None
    remove(instance)
    assert RolePage.find(instance, data_id, page) is None
    again = stages().page
    found = RolePage.find(instance, data_id, page)
    again.enter(STARTING, 7, 0, 0)
    assert found is not None and found.read().epoch == 7
