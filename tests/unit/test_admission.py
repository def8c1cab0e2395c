"""Whether more may be accepted: answered early, by an upper bound, without standing still, and without flapping."""

import os
import subprocess
import tempfile
from types import SimpleNamespace

import pytest
from fake_logger import FakeLogger

from kmq.broker import admission
from kmq.broker.admission import Admission, Usage
from kmq.broker.stats import StatsPage
from kmq.config.settings import load
from kmq.config.values import GIB, MIB
from kmq.ingress.limits import Gate
from kmq.links.role import RolePage, remove


class Broker:
    """A data directory that somebody writes into, a clock that we move, a file system that has what we say."""

    def __init__(self, data, monkeypatch):
        self.data, self.appended, self.now, self.free, self.whole = data, 0, 1000.0, 64 * GIB, 64 * GIB
        self.inodes, self.free_inodes = 16_000_000, 15_000_000
        monkeypatch.setattr(admission.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(admission.os, "statvfs", lambda path: SimpleNamespace(**self._statvfs()))

    def _statvfs(self):
        inodes = {"f_files": self.inodes, "f_favail": self.free_inodes}
        return inodes | {"f_bavail": self.free // 4096, "f_blocks": self.whole // 4096, "f_frsize": 4096}

    def admission(self, quota="none"):
        return Admission(load({"KMQ_DATA": self.data, "KMQ_DATA_QUOTA": quota}, "none"), lambda: self.appended)

    def usage(self):
        return Usage(self.data, lambda: self.appended)

    def append(self, nbytes, topic="t"):
        """Into the WAL and one queue, as the broker does."""
        os.makedirs(f"{self.data}/topics/{topic}/0", exist_ok=True)
        for path in ("append/1.log", f"topics/{topic}/0/0.log"):
            with open(f"{self.data}/{path}", "ab") as file:
                file.write(bytes(nbytes))
        self.appended += nbytes

    def du(self):
        return int(subprocess.check_output(["du", "-s", "-B1", self.data]).split()[0])


@pytest.fixture
def data():
    """An empty data directory on a disk, whose directories take blocks: `scripts/unit` has `tmp_path` in memory."""
    with tempfile.TemporaryDirectory() as path:
        for name in ("append", "topics"):
            os.mkdir(f"{path}/{name}")
        yield path


@pytest.mark.parametrize("lacks", ["bytes", "inodes", "quota"])
def test_room_is_short_before_messages_are_refused(data, monkeypatch, lacks):
    broker = Broker(data, monkeypatch)
    asked = broker.admission("64MiB" if lacks == "quota" else "none")
    assert asked.shortage() <= 0 and not asked.refusal()
    while asked.shortage() <= 0:
        broker.now += 1
        if lacks == "bytes":
            broker.free = min(broker.free, 4 * asked.accepted_bytes) - MIB
        elif lacks == "inodes":
            broker.free_inodes = min(broker.free_inodes, 5 * 4096) - 1024
        else:
            broker.append(MIB // 2)
    assert not asked.refusal()


def test_what_was_deleted_is_no_shortage_any_more(data, monkeypatch):
    broker = Broker(data, monkeypatch)
    asked = broker.admission("64MiB")
    while asked.shortage() <= 0:
        broker.append(MIB)
        broker.now += 1
    for path in ("append/1.log", "topics/t/0/0.log"):
        os.truncate(f"{data}/{path}", 0)
    asked.recount()
    assert asked.shortage() <= 0
    while asked._usage.is_walking:
        broker.now += 1
        asked.refusal()
    assert asked.shortage() <= 0


def test_a_leader_that_hears_too_few_replicas_refuses_as_for_lack_of_room_until_it_hears_them(data):
    instance = f"admission-{os.getpid()}"
    stats, page = StatsPage(instance, "id", data), RolePage.make(instance, "id")
    try:
        row, log = stats.rows["ingress"], FakeLogger()
        gate = Gate(SimpleNamespace(row=row, log=log, role=page, page=stats, settings=load({"KMQ_DATA": data}, "none")))
        assert not gate.look() and gate.refusal == b""
        page.refuse(True)
        assert gate.look() and gate.refusal.startswith(b"not_enough_replicas ")
        assert row.admission_name == "not_enough_replicas" and not gate.look()
        page.refuse(False)
        assert gate.look() and gate.refusal == b"" and row.admission_name == ""
    finally:
        os.unlink(stats.path)
        remove(instance)


@pytest.fixture
def broker(data, monkeypatch):
    return Broker(data, monkeypatch)


def test_a_disk_too_small_for_what_is_on_the_way_is_refused_until_clearly_larger(broker):
    asked, answers = broker.admission(), []
    for free_mib in (1024, 44, 39, 44, 49, 51, 44):
        broker.free = free_mib * MIB
        broker.now += 1
        answers.append(asked.refusal())
    assert answers == ["", "", "disk_full", "disk_full", "disk_full", "", ""]


def test_a_disk_with_few_inodes_left_is_refused_until_there_are_clearly_more(broker):
    asked, answers = broker.admission(), []
    for broker.free_inodes in (9000, 4100, 4095, 4100, 5100, 5120, 4100):
        broker.now += 1
        answers.append(asked.refusal())
    assert answers == ["", "", "disk_full", "disk_full", "disk_full", "", ""]


def test_a_file_system_that_counts_no_inodes_is_not_refused(broker):
    broker.inodes = broker.free_inodes = 0
    assert broker.admission().refusal() == "" and admission.spare_inodes(broker.data) == float("inf")


def test_new_topics_leave_twice_the_inodes_that_end_admission(broker):
    broker.inodes, broker.free_inodes = 2000, 300
    assert broker.admission().refusal() == "" and admission.spare_inodes(broker.data) == 100


def test_a_small_disk_keeps_a_tenth_of_itself_free(broker):
    broker.whole, broker.free = 100 * MIB, 11 * MIB
    asked = broker.admission()
    assert asked.refusal() == ""
    broker.free, broker.now = 9 * MIB, broker.now + 1
    assert asked.refusal() == "disk_full"
    broker.free, broker.now = 13 * MIB, broker.now + 1
    assert asked.refusal() == ""


def test_an_answer_is_kept_for_a_moment(broker):
    asked = broker.admission()
    assert asked.refusal() == ""
    broker.free = 0
    assert asked.refusal() == ""
    broker.now += 0.1
    assert asked.refusal() == "disk_full"


def test_a_disk_that_fills_is_seen_before_much_more_is_accepted(broker):
    """300 MB a second, each stored twice: in 10 ms 6 MB of the reserve."""
    asked = broker.admission()
    assert asked.refusal() == ""
    broker.free = 0
    broker.now += 0.01
    assert asked.refusal() == "disk_full"


def test_without_a_quota_any_usage_is_fine(broker):
    asked = broker.admission()
    broker.appended = 1 << 50
    assert asked.refusal() == ""
    assert not asked.must_wait(1 << 40)


def test_usage_is_never_below_what_du_says(broker):
    usage = broker.usage()
    for n in range(200):
        broker.append(n * 37, f"t{n % 50}")
        broker.now += n % 7
        usage.walk_if_due(n % 3 == 0, 1 << 30)
        assert usage.bound() + 50 * admission.OLD_TOPIC >= broker.du()


def test_a_walk_makes_the_bound_tight(broker):
    usage = broker.usage()
    broker.append(MIB)
    os.truncate(f"{broker.data}/append/1.log", 0)  # as retention does
    assert usage.bound() > 2 * MIB
    broker.now += 60
    usage.walk_if_due(False, GIB)
    assert MIB <= usage.bound() <= broker.du() < 1.1 * MIB  # in memory a directory takes no block


def test_what_comes_during_a_walk_is_counted_on_top_of_it(broker, monkeypatch):
    broker.append(4096)
    usage = broker.usage()
    monkeypatch.setattr(admission, "_SLICE_S", -1.0)  # one file at a time
    broker.now += 60
    for _ in range(100):
        broker.append(MIB // 4, "late")
        usage.walk_if_due(False, 1 << 40)
        assert usage.bound() + admission.OLD_TOPIC >= broker.du()
        broker.now += 1


def test_a_durability_that_counts_from_zero_again_takes_nothing_off(broker):
    usage = broker.usage()
    broker.append(10 * MIB)
    before = usage.bound()
    broker.appended = 0
    assert usage.bound() >= before
    broker.appended = MIB
    assert usage.bound() >= before + 2 * MIB


def test_the_quota_refuses_early_then_waits_and_never_is_passed(broker):
    asked, refused_at = broker.admission("200 MiB"), 0
    group = MIB
    while not asked.must_wait(group):
        broker.append(group)
        broker.now += 0.1
        refused_at = refused_at or (broker.du() if asked.refusal() == "quota" else 0)
        assert broker.du() <= 200 * MIB
    assert 150 * MIB < refused_at <= broker.du() - asked.accepted_bytes + 4 * MIB, "what is on the way fits in between"
    assert broker.du() > 185 * MIB, "and no more than that is given away"


def test_space_under_the_quota_is_noticed_within_a_second_of_asking(broker):
    asked = broker.admission("100 MiB")
    broker.append(49 * MIB)
    broker.now += 1
    assert asked.refusal() == "quota"
    assert asked.must_wait(1)
    os.unlink(f"{broker.data}/append/1.log")
    answers = []
    for _ in range(10):
        broker.now += 0.1
        answers.append((asked.refusal(), asked.must_wait(1)))
    assert answers[0] == ("quota", True)
    assert answers[-1] == ("", False)


def test_a_copy_leaves_twice_what_may_be_accepted_on_the_disk_and_fits_the_quota(broker):
    asked = broker.admission("200 MiB")
    broker.free = 2 * asked.accepted_bytes + 10 * MIB
    assert asked.has_room(10 * MIB) and not asked.has_room(10 * MIB + 4096)
    broker.append(90 * MIB)
    assert not asked.has_room(10 * MIB) and asked.has_room(MIB)


def test_new_topics_count_before_a_walk_sees_them(broker):
    usage = broker.usage()
    for n in range(300):
        os.makedirs(f"{broker.data}/topics/t{n}/0")
        for name in ("topic.toml", "0/0.log", "0/0.idx"):
            with open(f"{broker.data}/topics/t{n}/{name}", "wb") as file:
                file.write(b"x")
    assert usage.bound() >= broker.du()


def test_files_that_vanish_during_a_walk_do_not_end_it(broker, monkeypatch):
    broker.append(4096, "a")
    usage = broker.usage()
    monkeypatch.setattr(admission, "_SLICE_S", -1.0)
    for n in range(50):
        broker.append(4096, f"b{n}")
    broker.now += 60
    usage.walk_if_due(False, GIB)
    subprocess.run(["rm", "-r", f"{broker.data}/topics"], check=True)
    for _ in range(400):
        usage.walk_if_due(False, GIB)
    assert usage.bound() < MIB


def test_a_walk_over_thousands_of_topics_goes_in_slices(data):
    for n in range(2_000):
        os.makedirs(f"{data}/topics/t{n}/0")
        for name in ("topic.toml", "0/0.log", "0/0.idx"):
            os.close(os.open(f"{data}/topics/t{n}/{name}", os.O_CREAT | os.O_WRONLY))
    usage = Usage(data, lambda: 0)
    usage.begin_walk()
    usage.walk(admission._SLICE_S)
    assert usage.is_walking, "10,000 files take longer than that"
    usage.walk(60)
    assert not usage.is_walking
