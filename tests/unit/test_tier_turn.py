"""One turn of the copy: what goes up, in which order, and what a kill, a lie or another directory changes."""

import gzip
import itertools
import os
import shutil
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_data import append, write_data
from made_up import no_room
from tier_stores import LyingStore

from kmq.log import dedupe_file, reader, wal
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.router.queues import Queues
from kmq.tier import turn as turn_module
from kmq.tier.commits import AheadError, CommitLog, DamagedError, FencedError, line
from kmq.tier.store import DirectoryStore, StoreError, get
from kmq.tier.turn import Copier, TurnOptions, full_key

LINES = [b"orders.k%d|0|%d|%s" % (n % 5, n, b"x" * 400) for n in range(1, 501)]


@pytest.fixture
def place(tmp_path):
    return LyingStore(str(tmp_path / "store"))


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data", LINES, {"orders": 2})


def copier(data, place, object_bytes=1 << 26):
    return Copier(str(data), place, FakeLogger(), TurnOptions(object_bytes, 0, lambda: wal.last_stored(str(data))[0]))


def state(place, data):
    lineage = Path(data, "lineage").read_text().strip()
    return CommitLog(place, lineage, "reader@here").read()


def wal_of(place, data):
    lineage = Path(data, "lineage").read_text().strip()
    rows = state(place, data).wal
    return b"".join(gzip.decompress(get(place, full_key(lineage, row.values["key"]))) for row in rows)


def local_wal(data):
    return b"".join(reader.read(str(data), 1, wal.last_stored(str(data))[0]))


def test_the_whole_wal_is_in_the_store_byte_for_byte(data, place):
    copier(data, place).turn()
    assert wal_of(place, data) == local_wal(data)
    found = state(place, data)
    assert found.wal_end == 501 and found.files["router.ckpt"].number("seq") == 500
    assert {*found.files} >= {"router.ckpt", "format", "topics/orders/topic.toml"}
    assert wal.copied_seq(str(data)) == 500


def test_what_another_lineage_had_copied_counts_for_nothing(data, place):
    copier(data, place).turn()
    Path(data, "lineage").write_text(f"{'0' * 32}\n")
    assert wal.copied_seq(str(data)) == 0
    Path(data, "tier/wal").write_bytes(b"500")
    assert wal.copied_seq(str(data)) == 0


def test_where_the_wal_is_not_copied_nothing_but_the_claim_is_in_the_store(data, place):
    end = wal.last_stored(str(data))[0]
    copying = Copier(str(data), place, FakeLogger(), TurnOptions(1 << 26, 0, lambda: end, every=None))
    copying.turn()
    copying.turn()
    assert (state(place, data).number, state(place, data).rows()) == (1, [])
    copier(data, place).turn()
    assert wal_of(place, data) == local_wal(data)


def test_objects_end_where_they_are_large_enough_and_a_turn_copies_only_what_is_new(tmp_path, place):
    made = write_data(tmp_path / "data", LINES, closed=False)
    copying = copier(tmp_path / "data", place, object_bytes=1 << 16)
    copying.turn()
    rows = copying.commits.state.wal
    assert [row.number("first") for row in rows] == [1, *(row.number("last") + 1 for row in rows[:-1])]
    count, number = len(rows), copying.commits.state.number
    copying.turn()
    assert copying.commits.state.number == number
    append(made, [b"orders|0|1|later"] * 3)
    copying.turn()
    assert len(copying.commits.state.wal) == count + 1 and copying.copied == 503
    assert wal_of(place, tmp_path / "data") == local_wal(tmp_path / "data")
    made[0].close()
    made[1].close()


def test_nothing_in_the_store_is_ahead_of_the_rows_of_the_wal(data, place):
    """The WAL ends, for this turn, before what router.ckpt says: tables and files wait."""
    early = Copier(str(data), place, FakeLogger(), TurnOptions(1 << 26, 0, lambda: 200))
    early.turn()
    assert early.copied == 200 and not early.commits.state.files and not early.commits.state.tables
    copier(data, place).turn()
    assert "router.ckpt" in state(place, data).files


@pytest.mark.parametrize("fate", ["lost", "done", "late"])
def test_whichever_request_goes_wrong_each_record_is_there_once(data, place, fate):
    for at in range(40):
        copying = copier(data, place, object_bytes=1 << 16)
        place.plan = [""] * at + [fate]
        for _ in range(3):
            try:
                copying.turn()
            except StoreError:
                place.deliver()
                continue
            break
        assert wal_of(place, data) == local_wal(data)
        if place.plan:
            return
        shutil.rmtree(place.root)
        os.mkdir(place.root)
        shutil.rmtree(f"{data}/tier")
        place.plan = []
    raise AssertionError("the plan never ended")


def test_an_object_that_the_store_has_altered_is_named_by_no_commit(data, place):
    place.plan = ["", "", "", "altered"]  # two of the probe, the claim, the object
    copying = copier(data, place)
    with pytest.raises(StoreError, match="does not give back"):
        copying.turn()
    assert not state(place, data).wal
    copying.turn()
    assert wal_of(place, data) == local_wal(data)


def test_after_a_kill_behind_each_request_the_next_process_goes_on(data, place, monkeypatch):
    class Killed(BaseException):
        pass

    real, left = LyingStore.create, [0]

    def create(store, key, content):
        made = real(store, key, content)
        left[0] -= 1
        if not left[0]:
            raise Killed
        return made

    monkeypatch.setattr(LyingStore, "create", create)
    for at in range(1, 40):
        left[0] = at
        try:
            copier(data, place, object_bytes=1 << 16).turn()
        except Killed:
            left[0] = 0
            copier(data, place, object_bytes=1 << 16).turn()
            assert wal_of(place, data) == local_wal(data)
            shutil.rmtree(place.root)
            os.mkdir(place.root)
            shutil.rmtree(f"{data}/tier")
            continue
        return
    raise AssertionError("no turn without a kill")


def test_nothing_is_copied_to_the_disk_below_a_volume_that_is_not_mounted_for_a_while(tmp_path):
    """A commit there left a gap in the numbers of the volume: damage for good."""
    made = write_data(tmp_path / "data", LINES[:100], {"orders": 2}, closed=False)
    data, volume, away = str(tmp_path / "data"), tmp_path / "volume", tmp_path / "away"
    volume.mkdir()
    place = DirectoryStore(str(volume / "kmq"))
    copying = copier(data, place)
    copying.turn()
    append(made, LINES[100:200])
    volume.rename(away)
    volume.mkdir()
    with pytest.raises(StoreError, match="mount"):
        copying.turn()
    with pytest.raises(StoreError, match="mount"):
        list(place.names(""))
    assert not [*volume.iterdir()]
    volume.rmdir()
    away.rename(volume)
    copying.turn()
    assert wal_of(place, data) == local_wal(data)
    made[0].close()
    made[1].close()


def test_a_store_that_is_away_stops_nothing_and_what_was_missed_follows(data, place):
    copying = copier(data, place)
    place.is_away = True
    for _ in range(3):
        with pytest.raises(StoreError):
            copying.turn()
    place.is_away = False
    copying.turn()
    assert wal_of(place, data) == local_wal(data)


def test_a_second_process_of_the_same_directory_takes_over_and_the_first_writes_nothing_more(data, place):
    first, second = copier(data, place), copier(data, place)
    first.turn()
    second.turn()
    number = second.commits.state.number
    with pytest.raises(FencedError):
        first.turn()
    assert state(place, data).number == number


def test_a_clone_is_fenced_and_has_written_nothing(data, place, tmp_path):
    copier(data, place).turn()
    shutil.copytree(data, tmp_path / "clone")
    copier(data, place).turn()
    copier(data, place).turn()
    number = state(place, data).number
    with pytest.raises(FencedError):
        copier(tmp_path / "clone", place).turn()
    assert state(place, data).number == number


def test_a_claim_that_arrives_after_its_process_was_killed_is_known_as_its_own(data, place):
    copier(data, place).turn()
    place.plan = ["", "", "late"]  # two of the probe
    with pytest.raises(StoreError):
        copier(data, place).turn()
    place.deliver()
    copier(data, place).turn()
    assert wal_of(place, data) == local_wal(data)


def test_however_often_a_claim_fails_the_directory_keeps_its_right(data, place):
    copier(data, place).turn()
    for fate in ("lost", "late", "lost", "lost", "late"):
        place.plan = ["", "", fate]
        with pytest.raises(StoreError):
            copier(data, place).turn()
    place.deliver()
    copier(data, place).turn()


def test_a_directory_that_was_put_back_writes_nothing(tmp_path, place):
    made = write_data(tmp_path / "data", LINES[:100], closed=False)
    copier(tmp_path / "data", place).turn()
    shutil.copytree(tmp_path / "data", tmp_path / "older")
    append(made, LINES[100:200])
    copier(tmp_path / "data", place).turn()
    made[0].close()
    made[1].close()
    for name in ("claim", "cursor"):
        shutil.copy(tmp_path / "data/tier" / name, tmp_path / "older/tier" / name)
    number = state(place, tmp_path / "data").number
    with pytest.raises(AheadError, match="up to seq 200, this directory up to 100"):
        copier(tmp_path / "older", place).turn()
    older = str(tmp_path / "older")
    again = [Wal(older, no_room, 1 << 20), Queues(older, no_room, FakeLogger()), 101]
    again[1].recover(100)
    append(again, [b"orders|0|0|other"] * 150)
    again[0].close()
    again[1].close()
    with pytest.raises(AheadError, match="another record with seq 200"):
        copier(older, place).turn()
    assert state(place, tmp_path / "data").number == number


def test_another_store_in_the_place_of_the_one_that_had_the_commits_is_damage(data, place, tmp_path):
    copier(data, place).turn()
    with pytest.raises(DamagedError, match="it is another store"):
        copier(data, LyingStore(str(tmp_path / "empty"))).turn()


def test_a_store_that_is_another_one_since_the_last_turn_gets_no_commit(place, tmp_path):
    """A volume that is not mounted any more: its directory is there, and empty."""
    data = str(tmp_path / "data")
    made, process = write_data(data, LINES[:100], closed=False), copier(data, place)
    process.turn()
    number = state(place, data).number
    append(made, LINES[100:200])
    os.rename(place.root, tmp_path / "away")
    os.mkdir(place.root)
    with pytest.raises(DamagedError, match=f"commit {number} is not there any more: it is another store"):
        process.turn()
    assert not [key for key in place.names("") if "/commits/" in key]
    shutil.rmtree(place.root)
    os.rename(tmp_path / "away", place.root)
    copier(data, place).turn()
    assert wal_of(place, data) == local_wal(data) and state(place, data).wal_end == 201
    made[0].close()
    made[1].close()


def test_a_damaged_block_of_the_wal_is_not_copied(data, place):
    path = next(Path(data, "append").glob("*.log"))
    text = path.read_bytes()
    path.write_bytes(text[:100_000] + bytes([text[100_000] ^ 1]) + text[100_001:])
    with pytest.raises(Exception, match="crc"):
        copier(data, place).turn()
    kept = wal_of(place, data)
    assert local_wal_until_damage(text, kept)


def local_wal_until_damage(text, kept):
    return text.startswith(kept) and len(kept) < 100_000


def test_rows_of_the_wal_go_once_the_local_wal_and_the_files_do_without_them(tmp_path, place, monkeypatch):
    monkeypatch.setattr(turn_module, "_DELETE_S", 0.0)
    data = write_data(tmp_path / "data", LINES, {"orders": 2}, segment_bytes=1 << 16, group=50)
    Path(data, "producers.ckpt").write_bytes(b"500|%d|2\n" % dedupe_file.checksum(500, b""))
    copier(data, place, object_bytes=1 << 15).turn()
    segments = sorted(Path(data, "append").glob("*.log"))
    for path in segments[:3]:
        os.unlink(path)
        os.unlink(path.with_suffix(".idx"))
    first = int(segments[3].stem)
    copier(data, place).turn()
    assert state(place, data).wal_first == 1, "it went to make room, not by a limit: the store keeps it"
    expired = Limits(retention_age=3600.0)
    copying = Copier(
        data, place, FakeLogger(), TurnOptions(1 << 26, 0, lambda: wal.last_stored(data)[0], limits=lambda: expired)
    )
    copying.turn()
    found = copying.commits.state
    assert found.wal[0].number("first") <= first and found.wal[0].number("last") >= first - 1 and found.wal_first > 1
    assert not found.dropped
    keys = [key for key in place.names("") if "/wal/" in key]
    assert len(keys) == len(found.wal)


def test_many_dropped_objects_are_deleted_in_parts_and_each_is_progress(tmp_path, place, monkeypatch):
    """A topic of a terabyte has 16,000: at once they took longer than the process may be silent, again and again."""
    monkeypatch.setattr(turn_module, "_DELETE_S", 0.0)
    monkeypatch.setattr(turn_module, "_DELETES_AT_ONCE", 4)
    data, seqs = write_data(tmp_path / "data", LINES[:100], {"orders": 2}), iter(range(10, 101, 10))
    early = Copier(data, place, FakeLogger(), TurnOptions(1 << 26, 0, lambda: next(seqs)))
    for _ in range(10):
        early.turn()
    early.commits.commit([line("drop", "wal", before=101, why="retention")], "n")
    before, calls, delete = len(early.commits.state.dropped), [], place.delete
    monkeypatch.setattr(place, "delete", lambda keys: calls.append("delete") or delete(keys))
    options = TurnOptions(1 << 26, 0, lambda: 100, lambda nbytes: calls.append("progress"))
    later = Copier(data, place, FakeLogger(), options)
    for part in (4, 8, 10):
        calls.clear()
        later.turn()
        assert before - len(later.commits.state.dropped) == part
        assert "delete delete delete" not in " ".join(calls)  # the probe deletes, too


def test_a_wal_that_went_before_it_was_copied_leaves_a_hole_that_is_named(tmp_path, place):
    data = write_data(tmp_path / "data", LINES, segment_bytes=1 << 16, group=50)
    early = Copier(data, place, FakeLogger(), TurnOptions(1 << 26, 0, lambda: 10))
    early.turn()
    segments = sorted(Path(data, "append").glob("*.log"))
    os.unlink(segments[0])
    copier(data, place).turn()
    assert [row.number("first") for row in state(place, data).wal][-1] == int(segments[1].stem)
    assert state(place, data).wal_end == 501


# --- all names -------------------------------------------------------------------------------------------------------


@pytest.fixture
def daily(monkeypatch):
    monkeypatch.setattr(turn_module, "_SWEEP_FIRST_S", 0.0)


def left_by_a_kill(data, place):
    """Objects of a process that was killed before its commits, and the key of one of them."""
    before = set(place.names(""))
    for kind in ("wal", "files", "tables"):
        place.plan = ["", "", "", "lost"]  # two of the probe, the claim, the object
        with pytest.raises(StoreError):
            copier(data, place).turn()
        claim = state(place, data).claim.number
        names = {"wal": f"1-9.{claim}.0123abcd.log.gz", "files": f"7.{claim}.0123abcd/router.ckpt"}
        name = names.get(kind, f"x.9.0123abcd/1/0/9.{claim}.0123abcd.log.gz")
        place.create(full_key(Path(data, "lineage").read_text().strip(), f"{kind}/{name}"), b"left")
    return {key for key in set(place.names("")) - before if "/commits/" not in key}


def test_what_no_commit_names_goes_and_what_one_names_stays(data, place, daily):
    left = left_by_a_kill(data, place)
    lineage = Path(data, "lineage").read_text().strip()
    others = {f"{lineage}/wal/readme", f"{lineage}/wal/1-9.x.0123abcd.log.gz", f"{'f' * 32}/wal/1-9.1.0123abcd.log.gz"}
    for key in others:
        place.create(key, b"not ours")
    copying = copier(data, place)
    copying.turn()
    names = set(place.names(""))
    assert len(left) == 3 and not left & names and others <= names
    assert wal_of(place, data) == local_wal(data) and not copying.missing


GARBAGE = [
    "wal",  # a key where all others have a directory
    "walrus/1-9.1.0123abcd.log.gz",
    "wal/1-9.1.0123abcd.log.gz.bak",
    "wal/\u0661-\u0669.\u0661.0123abcd.log.gz",
    f"wal/1-9.{'9' * 100}.0123abcd.log.gz",
    f"wal/{'x' * 250}",
    "wal/deep/1-9.1.0123abcd.log.gz",
    "files/7.1.0123abcd",
    "files",
    "topics/orders/1-9.1.0123abcd.log.gz",
    "topics/a b/1/0/0-9.1.0123abcd.log.gz",
    "tables/é\udcff/1/0/9.1.0123abcd.log.gz",
    "state/newest.gz",
    f"state/{9:020d}",
    "commits/00000000000000000099.tmp",
    "commits/last",
]


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.sampled(6)
def test_a_name_that_is_no_objects_harms_nothing_and_stays(data, place, daily, name):
    lineage = Path(data, "lineage").read_text().strip()
    key = f"{lineage}/{name}"
    if "/" in name:
        copier(data, place).turn()
    path = Path(f"{place.root}/{key}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if name in ("wal", "files"):  # in a bucket a key may have the name of a directory
        real = place.names
        place.names = lambda prefix, after="": [*real(prefix, after), *([key] if prefix == key else [])]
    else:
        path.write_bytes(b"garbage")
    copying = copier(data, place)
    for _ in range(2):
        copying.turn()
    assert name in ("wal", "files") or path.read_bytes() == b"garbage"
    assert not copying.missing and wal_of(place, data) == local_wal(data)


def test_an_object_under_another_name_is_not_deleted_as_an_orphan(data, place, daily):
    copier(data, place).turn()
    victim = next(Path(place.root).glob("*/wal/*"))
    first, claim, rest = victim.name.split(".", 2)
    other = victim.rename(victim.with_name(f"{first}.{int(claim) - 1}.{rest}"))
    copying = copier(data, place)
    copying.turn()
    assert other.exists() and [row.values["key"] for row in copying.missing] == [f"wal/{victim.name}"]
    other.rename(victim)


def test_a_process_that_was_overtaken_deletes_nothing_of_the_next_one(data, place, daily):
    """It does not know of the next claim yet; the next process has made an object, and no commit of it."""
    old, new = copier(data, place), copier(data, place)
    old.claim()
    new.claim()
    key = full_key(new.lineage, f"{new._key('wal/1-9')}.log.gz")
    place.create(key, b"made before its commit")
    old._look_at_names()
    assert key in set(place.names(""))


def test_all_names_are_looked_at_in_parts_and_a_missing_object_is_said_while_the_copy_goes_on(
    tmp_path, place, daily, monkeypatch
):
    made = write_data(tmp_path / "data", LINES, closed=False)
    data = tmp_path / "data"
    copier(data, place, object_bytes=1 << 15).turn()
    victim = next(Path(place.root).glob("*/wal/*"))
    victim.unlink()
    monkeypatch.setattr(turn_module, "_NAMES_AT_ONCE", 3)
    copying = copier(data, place, object_bytes=1 << 15)
    turns = 0
    while not copying.missing:
        append(made, [b"orders|0|1|later"])
        copying.turn()
        turns += 1
        assert turns < 50
    assert turns > 1 and [row.values["key"] for row in copying.missing] == [f"wal/{victim.name}"]
    first, last = victim.name.partition(".")[0].split("-")
    assert copying.missing[0].what == f"WAL seqs {first} to {last}"
    assert copying.copied == wal.last_stored(str(data))[0]
    made[0].close()
    made[1].close()


def test_what_a_broken_list_did_not_show_is_not_missing(data, place, daily, monkeypatch):
    copier(data, place, object_bytes=1 << 15).turn()
    real = LyingStore.names

    def names(store, prefix, after=""):
        yield from itertools.islice(real(store, prefix, after), 2 if "/wal" in prefix else None)
        if "/wal" in prefix:
            raise StoreError("the connection ended")

    copying = copier(data, place)
    monkeypatch.setattr(LyingStore, "names", names)
    with pytest.raises(StoreError):
        copying.turn()
    monkeypatch.setattr(LyingStore, "names", real)
    copying.turn()
    assert copying.missing == []


def test_the_rate_holds_up_small_files_only_and_says_that_it_is_at_work(data, place, monkeypatch):
    """The lines of the WAL go up with what explains their holes, at once, however large that is."""
    Path(data, "quarantine").mkdir(exist_ok=True)
    Path(data, "quarantine/log").write_bytes(b"x" * 1_000_000)
    slept, said = [], []
    monkeypatch.setattr("kmq.tier.turn.time.sleep", slept.append)
    clock = itertools.count(1000.0, 0.25)
    monkeypatch.setattr("kmq.tier.turn.time.monotonic", lambda: next(clock))
    high = wal.last_stored(str(data))[0]
    copying = Copier(str(data), place, FakeLogger(), TurnOptions(1 << 26, 100, lambda: high, said.append))
    copying.claim()
    copying._copy_wal(high)
    assert copying.copied == high and not slept
    copying._rest(1000)  # 10 s at this rate
    assert max(slept) <= 1.0 and len(slept) > 5 and said.count(0) > len(slept)
