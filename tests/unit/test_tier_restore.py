"""A data directory that is made of the copy: byte for byte what the broker had, and nothing that starts before it is whole."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_data import LETTERS, ORDERS, append, write_data
from made_up import no_room
from tier_stores import LyingStore

from kmq.cli.restore import restore_if_empty
from kmq.config.settings import load
from kmq.errors import ConfigError, CorruptError, DataExistsError, KmqError
from kmq.log import checkpoint, identity, reader, wal
from kmq.log.wal import Wal
from kmq.repair import verify
from kmq.router.queues import Queues
from kmq.tier import restore as restore_module
from kmq.tier.commits import FencedError
from kmq.tier.restore import Restore, check_target, find_source, settle
from kmq.tier.store import StoreError
from kmq.tier.turn import Copier, TurnOptions

LINES = [b"orders.k%d|0|%d|%s" % (n % 5, n, b"x" * 200) for n in range(1, 301)]
TOPICS = {"orders": 3, "jobs.eu": 1}


class Killed(BaseException):
    pass


@pytest.fixture
def place(tmp_path):
    return LyingStore(str(tmp_path / "store"))


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data", LINES + ORDERS + LETTERS, TOPICS)


def copy(data, place, object_bytes=1 << 26):
    copying = Copier(
        str(data), place, FakeLogger(), TurnOptions(object_bytes, 0, lambda: wal.last_stored(str(data))[0])
    )
    copying.turn()
    return copying


def restored(place, path, drill=False, lineage=""):
    settings = load({"KMQ_DATA": str(path), "KMQ_SEGMENT_BYTES": "64 KiB"}, "none.toml")
    check_target(str(path))
    if settle(str(path)):
        return None
    source = find_source(place, lineage, "restore@here")
    assert source is not None
    made = Restore(place, source, settings, FakeLogger(), lambda nbytes: None)
    made.run(drill)
    return made


def queues(data):
    """The lines of the WAL and of each partition, with the offsets of their first records."""
    names = sorted(str(path.relative_to(data)) for path in Path(data, "topics").glob("*/[0-9]*"))
    found = {"append": b"".join(reader.read(str(data), 1, wal.last_stored(str(data))[0]))}
    for name in names:
        topic, number = name.removeprefix("topics/").split("/")
        log = reader.partition(str(data), topic, int(number))
        found[name] = (log.first_offset, b"".join(lines for _, lines in log.chunks(log.first_offset)))
    return found


def test_everything_comes_back_byte_for_byte_under_a_new_id(data, place, tmp_path):
    copy(data, place, object_bytes=1 << 20)
    made = restored(place, tmp_path / "again")
    assert queues(tmp_path / "again") == queues(data) and len(queues(data)) == 6
    assert identity.read(str(tmp_path / "again"), "id") == made.id != identity.read(data, "id")
    assert identity.open_data(str(tmp_path / "again")) == made.id
    assert {*os.listdir(tmp_path / "again")} >= {"id", "lineage", "format", "append", "topics", "append.log", "tier"}
    assert not (tmp_path / "again/restoring").exists()
    assert checkpoint.routed_seq(str(tmp_path / "again")) == made.last_seq == 313


def test_verify_finds_no_damage_in_what_was_restored(data, place, tmp_path, capsys):
    copy(data, place)
    restored(place, tmp_path / "again")
    verify.run(str(tmp_path / "again"), [], False, False, lambda nbytes: None, 4 << 20)
    assert capsys.readouterr().out.endswith("no damage\n")


def test_records_behind_the_checkpoint_and_a_changed_table_come_back(tmp_path, place):
    made = write_data(tmp_path / "data", LINES[:100], TOPICS, closed=False)
    copy(tmp_path / "data", place)
    append(made, LINES[100:] + LETTERS)
    early = Copier(str(tmp_path / "data"), place, FakeLogger(), TurnOptions(1 << 20, 0, lambda: 250))
    early.turn()
    restored(place, tmp_path / "again")
    here, there = queues(tmp_path / "data"), queues(tmp_path / "again")
    assert there["append"].count(b"\n") == 250 and here["append"].startswith(there["append"])
    assert all(here[name][1].startswith(found[1]) for name, found in there.items() if name != "append")
    made[0].close()
    made[1].close()


def test_the_old_broker_is_fenced_and_the_new_lineage_can_be_restored_itself(data, place, tmp_path):
    old = copy(data, place)
    first = restored(place, tmp_path / "one")
    with pytest.raises(FencedError):
        old.turn()
    with pytest.raises(KmqError):
        copy(data, place)
    with pytest.raises(CorruptError, match=f"went on as {first.id}"):
        restored(place, tmp_path / "two", lineage=identity.lineage(data))
    again = copy(tmp_path / "one", place)
    assert again.commits.state.wal_end == 314
    second = restored(place, tmp_path / "two")
    assert queues(tmp_path / "two") == queues(data) and second.id != first.id


def test_a_drill_changes_nothing_in_the_store(data, place, tmp_path):
    copying = copy(data, place)
    before = sorted(place.names(""))
    restored(place, tmp_path / "drill", drill=True)
    assert sorted(place.names("")) == before and queues(tmp_path / "drill") == queues(data)
    copying.turn()


def test_the_lives_of_the_gateway_go_far_ahead(data, place, tmp_path):
    Path(data, "gateway.starts").write_text("7\n")
    copy(data, place)
    restored(place, tmp_path / "again")
    assert (tmp_path / "again/gateway.starts").read_text() == "1007\n"


def test_only_an_empty_directory_is_restored_into(data, place, tmp_path):
    copy(data, place)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    with pytest.raises(DataExistsError, match="is not empty"):
        restored(place, tmp_path / "full")
    with pytest.raises(DataExistsError):
        restored(place, data)
    (tmp_path / "empty/lost+found").mkdir(parents=True)
    restored(place, tmp_path / "empty")


@pytest.mark.parametrize("name", ["zz", "0", "lost+found/zz", "g/commits/1", "é"])
def test_what_else_lies_in_the_directory_hides_no_copy(data, place, tmp_path, name):
    copy(data, place)
    place.create(name, b"x")
    with pytest.raises(CorruptError, match="kmq restore --yes"):
        restore_if_empty(load({"KMQ_DATA": str(tmp_path / "new")}, "none.toml"), f"file://{place.root}")
    assert not os.path.exists(tmp_path / "new/id")


def test_a_store_that_cannot_be_listed_is_not_taken_for_an_empty_one(place):
    Path(place.root).write_text("a file in the place of the directory")
    with pytest.raises(StoreError, match="Not a directory"):
        find_source(place, "", "restore@here")


def test_of_several_lineages_one_has_to_be_chosen(data, place, tmp_path):
    copy(data, place)
    copy(write_data(tmp_path / "other", LINES[:9]), place)
    with pytest.raises(CorruptError, match="several lineages"):
        restored(place, tmp_path / "again")
    restored(place, tmp_path / "again", lineage=identity.lineage(data))
    assert queues(tmp_path / "again") == queues(data)
    assert find_source(LyingStore(str(tmp_path / "nothing")), "", "w") is None


@pytest.mark.parametrize("name", ["wal", "files"])
def test_an_object_that_is_missing_cut_or_altered_is_never_restored(data, place, tmp_path, name):
    copy(data, place)
    path = next(path for path in Path(place.root).glob(f"*/{name}/**/*") if path.is_file())
    text = path.read_bytes()
    for bad in (None, text[:-3], text[:30] + bytes([text[30] ^ 4]) + text[31:]):
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        with pytest.raises(KmqError):
            restored(place, tmp_path / "again", drill=True)
        with pytest.raises(ConfigError, match="has not finished"):
            identity.open_data(str(tmp_path / "again"))
        path.write_bytes(text)
    restored(place, tmp_path / "again")
    assert queues(tmp_path / "again") == queues(data)


def test_a_kill_at_each_step_leaves_nothing_that_starts_and_the_next_restore_is_whole(
    data, place, tmp_path, monkeypatch
):
    """The store is as before each time: of the claim and the commits of a killed restore the next one knows by reading."""
    copy(data, place)
    shutil.copytree(place.root, tmp_path / "before")
    expected, left = queues(data), [0]

    def counted(real):
        def call(*arguments):
            if threading.current_thread() is threading.main_thread():  # not that of a checkpoint
                left[0] -= 1
                if not left[0]:
                    raise Killed
            return real(*arguments)

        return call

    for owner, name in ((os, "rename"), (os, "mkdir"), (LyingStore, "create"), (restore_module, "sync_directory")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    steps, at = 0, 1
    while True:
        target = tmp_path / f"again{at}"
        left[0] = at
        try:
            restored(place, target)
        except Killed:
            steps += 1
        else:
            break
        finally:
            left[0] = 0
        if not (target / "id").exists():
            if target.exists() and (target / "restoring").exists():
                with pytest.raises(ConfigError, match="has not finished"):
                    identity.open_data(str(target))
            restored(place, target)
        assert queues(target) == expected and identity.open_data(str(target)), at
        shutil.rmtree(place.root)
        shutil.copytree(tmp_path / "before", place.root)
        shutil.rmtree(target, ignore_errors=True)
        at += 5
    assert steps > 10


def test_a_restore_that_lost_its_claim_does_not_begin(data, place, tmp_path, monkeypatch):
    copy(data, place)
    real = Restore._recover

    def recover(self):
        real(self)
        monkeypatch.setattr(Restore, "_recover", real)
        restored(place, tmp_path / "winner")

    monkeypatch.setattr(Restore, "_recover", recover)
    with pytest.raises(FencedError):
        restored(place, tmp_path / "loser")
    assert not (tmp_path / "loser/id").exists() and queues(tmp_path / "winner") == queues(data)


def test_no_offset_and_no_seq_that_was_given_out_is_given_again(data, place, tmp_path):
    copy(data, place)
    path = str(tmp_path / "again")
    restored(place, path)
    ends = {at: state.end_offset for at, state in checkpoint.load(path)[1].items() if not at[0].startswith("__")}
    assert len(ends) >= 4 and min(ends.values()) > 10**9
    made = [Wal(path, no_room, 1 << 20), Queues(path, no_room, FakeLogger()), wal.last_numbered(path)[0] + 1]
    assert made[2] > 10**9
    made[1].recover(made[0].last_seq)
    append(made, [b"orders.k1|0|1|new", b"young|0|1|of a topic that is made later"])
    made[0].close()
    made[1].close()
    again = copy(path, place)
    assert again.copied == made[2] - 1
    found = reader.partition(path, "young", 0)
    assert found.first_offset > 10**9 and found.read(found.first_offset)[1].endswith(b"made later\n")
    restored(place, tmp_path / "twice")
    here, there = queues(path), queues(tmp_path / "twice")
    assert here["append"] == there["append"] and {
        name: each[0] for name, each in there.items() if name != "append"
    } == {name: each[0] for name, each in here.items() if name != "append"}
    assert verify.run(str(tmp_path / "twice"), [], False, False, lambda nbytes: None, 4 << 20).code == 0
