"""Directories of a shard that an operator resets, detaches and compares while their brokers are down."""

import os
import shutil

import pytest
from made_data import write_data

from kmq.broker.data_directory import broker_is_down
from kmq.cluster.register import begin
from kmq.errors import BusyError, ConfigError
from kmq.links.ownership import FileLock
from kmq.log import committed, identity, reader
from kmq.repair.verify import Verifier
from kmq.replica import disks
from kmq.replica.files import ReplicaFiles

SHARD = "s"
LINES = [b"t.%d|0||payload %d" % (n % 7, n) for n in range(300)]


class Killed(BaseException):
    """The process ends here."""


def made_replica(path):
    """A replica with records in several segments, which has promised a register in whose ISR it is."""
    data = write_data(path, LINES, {"t": 2}, segment_bytes=2000, group=20)
    files = ReplicaFiles(data, SHARD)
    files.save(files.identity.about_to_start().started())
    files.promise(begin(identity.lineage(data), ["a"], None, files.identity.id))
    return data


@pytest.fixture
def data(tmp_path):
    return made_replica(tmp_path / "data")


def damage(data):
    return [str(finding) for finding in Verifier(data, False).findings() if finding.is_damage]


def records(data):
    return b"".join(lines for _, lines in reader.wal(data).chunks(1))


def contents(directory):
    """Path and bytes of all files in it."""
    found = {}
    for top, _, names in os.walk(directory):
        for path in (f"{top}/{name}" for name in names):
            if not os.path.islink(path):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, directory)] = file.read()
    return found


def killed_at(number, monkeypatch, act, data):
    """Reset or detach, and kill it before the change of a file or directory with this number. Return False at its end."""
    left = iter(range(number))

    def guarded(call):
        def change(*arguments):
            if next(left, None) is None:
                raise Killed
            return call(*arguments)

        return change

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "mkdir"):
            patch.setattr(os, name, guarded(getattr(os, name)))
        try:
            act(data, disks.look(data, SHARD))
        except Killed:
            return True
        return False


def test_a_reset_directory_begins_anew_and_nothing_of_it_is_lost(data):
    before, id = contents(data), identity.read(data, "id")
    place = disks.reset(data, disks.look(data, SHARD))
    assert contents(place) == before
    assert os.listdir(data) == [os.path.basename(place)]
    assert identity.open_data(data, shard=SHARD) != id
    assert ReplicaFiles(data, SHARD).promised is None
    again = disks.reset(data, disks.look(data, SHARD))
    assert again != place and contents(place) == before, "what was moved aside first stays there"


def test_a_reset_that_is_killed_anywhere_is_refused_at_a_start_and_finished_by_another_one(data, tmp_path, monkeypatch):
    before, number = contents(data), 0
    del before["replica"]
    while True:
        copy = shutil.copytree(data, tmp_path / f"copy{number}", symlinks=True)
        was_killed = killed_at(number, monkeypatch, disks.reset, copy)
        is_whole = all(contents(copy).get(name) == content for name, content in before.items())
        if was_killed and not is_whole:
            for shard in ("", SHARD):
                with pytest.raises(ConfigError, match="may not be finished"):
                    identity.open_data(str(copy), shard=shard)
        if was_killed:
            disks.reset(copy, disks.look(copy, SHARD))
        [place] = {name for name in os.listdir(copy) if len(contents(f"{copy}/{name}")) > 1}
        moved = contents(f"{copy}/{place}")
        assert {name: moved.get(name) for name in before} == before
        assert not os.path.exists(f"{copy}/replica") and not os.path.exists(f"{copy}/append")
        if not was_killed:
            break
        number += 1
    assert number > 8


def test_a_detached_directory_is_a_broker_of_its_own_with_all_its_records(data):
    held, id, lineage = records(data), identity.read(data, "id"), identity.lineage(data)
    committed.write_committed(data, 100)
    made = disks.detach(data, disks.look(data, SHARD))
    assert made == identity.lineage(data) != lineage and identity.read(data, "id") not in (id, lineage)
    assert identity.open_data(data) == identity.read(data, "id")
    assert records(data) == held and damage(data) == []
    assert not {"replica", "register", "committed"} & {*os.listdir(data)}


def test_a_detach_that_is_killed_anywhere_is_refused_at_a_start_and_finished_by_another_one(
    data, tmp_path, monkeypatch
):
    held, number, lineage = records(data), 0, identity.lineage(data)
    while True:
        copy = shutil.copytree(data, tmp_path / f"copy{number}", symlinks=True)
        was_killed = killed_at(number, monkeypatch, disks.detach, copy)
        if not was_killed:
            break
        if identity.lineage(copy) != lineage or damage(copy):
            for shard in ("", SHARD):
                with pytest.raises(ConfigError, match="may not be finished"):
                    identity.open_data(str(copy), shard=shard)
        disks.detach(copy, disks.look(copy, SHARD))
        assert damage(copy) == [] and records(copy) == held
        number += 1
        shutil.rmtree(copy)
    assert number > 10


def test_a_detach_that_was_begun_is_not_gone_on_with_as_a_reset(data, monkeypatch):
    assert killed_at(3, monkeypatch, disks.detach, data)
    with pytest.raises(ConfigError, match="detaching it was interrupted; run that again first"):
        disks.reset(data, disks.look(data, SHARD))


def test_what_is_no_replica_of_the_shard_and_what_runs_is_left_alone(data, tmp_path):
    plain = write_data(tmp_path / "plain", LINES)
    with pytest.raises(ConfigError, match="is no replica of a shard"):
        disks.look(plain, SHARD)
    with pytest.raises(ConfigError, match="is a replica of the shard s"):
        disks.look(data, "other")
    for path in (f"{data}/append/.owner", f"{tmp_path}/pipes/replica.owner"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock = FileLock(path)
        lock.acquire("it", "somebody")
        with (
            pytest.raises(BusyError, match="is held by somebody: the broker must be down"),
            broker_is_down(data, f"{tmp_path}/pipes"),
        ):
            pass
        lock.release()
    with broker_is_down(data, f"{tmp_path}/pipes"):
        assert FileLock(f"{data}/append/.owner").is_held()


def test_an_operator_is_told_what_a_directory_knows(data):
    text = disks.look(data, SHARD).text
    assert "records up to seq 300, all committed; in the ISR of version 1, epoch 1" in text
    files = ReplicaFiles(data, SHARD)
    files.save(files.identity._replace(id="0" * 16))
    assert "it was never let in" in disks.look(data, SHARD).text
