"""The commits of the tier: numbers that are created once, claims, what is in force, and stores that answer badly."""

import gzip
import os
import threading
from pathlib import Path

import pytest
from tier_stores import LyingStore, OverwritingStore

from kmq.errors import ConfigError
from kmq.tier import commits, objects, store
from kmq.tier.commits import CommitLog, DamagedError, FencedError, StaleError, decode, line
from kmq.tier.store import DirectoryStore, MissingError, RefusedError, StoreError, open_store, probe

LINEAGE = "0123456789abcdef" * 2


@pytest.fixture
def place(tmp_path):
    return LyingStore(str(tmp_path / "store"))


def claimed(place, writer="a@host"):
    log = CommitLog(place, LINEAGE, writer)
    log.read()
    log.claim(line("claim", pod=writer[0]), os.urandom(8).hex())
    return log


def wal(first, last):
    return line("wal", first=first, last=last, key=f"wal/{first}-{last}")


# --- the store -------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_its_maker_is_told_so_again(place):
    assert place.create("a/b/1", b"x") and place.create("a/b/1", b"x")
    assert not place.create("a/b/1", b"y") and store.get(place, "a/b/1") == b"x"
    with pytest.raises(MissingError):
        store.get(place, "a/b/2")
    place.delete(["a/b/1", "a/b/1"])
    assert list(place.names("")) == []


def test_names_are_in_order_and_begin_after_a_key(place):
    for key in ("a/2", "a/1", "b/1", "c"):
        place.create(key, b"")
    assert list(place.names("a")) == ["a/1", "a/2"] and list(place.names("a", "a/1")) == ["a/2"]
    assert list(place.names("", "a0")) == ["b/1", "c"] and list(place.names("nothing")) == []


def test_a_kill_between_two_calls_leaves_nothing_that_is_listed(place, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", killed)
    with pytest.raises(KeyboardInterrupt):
        place.create("a/1", b"x")
    assert list(place.names("")) == []


def test_of_sixteen_writers_one_has_made_the_key(place):
    made = []
    start = threading.Barrier(16)

    def write(number):
        start.wait()
        made.append(DirectoryStore(place.root).create("a/1", b"%d" % number) and number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number in made if number]
    assert len(winners) == 1 and store.get(place, "a/1") == b"%d" % winners[0]


def test_where_no_volume_is_mounted_no_copy_begins(tmp_path):
    with pytest.raises(StoreError):
        DirectoryStore(str(tmp_path / "mnt" / "kmq")).create("a/1", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["file://a/b", "file:a", "nothing", "ftp://a/b", "s3:/b"])
def test_a_url_that_names_no_store_is_refused(url):
    with pytest.raises(ConfigError, match="KMQ_TIER="):
        open_store(url)


def test_a_store_that_overwrites_is_refused_and_a_good_one_keeps_nothing_of_the_probe(place):
    with pytest.raises(RefusedError):
        probe(OverwritingStore(), LINEAGE)
    probe(place, LINEAGE)
    assert list(place.names("")) == []


@pytest.mark.parametrize("offset", [-90, 0, 90])
def test_a_clock_that_differs_is_told_by_what_the_store_says_of_a_new_key(place, offset):
    real = place.written_at
    place.written_at = lambda key: real(key) + offset
    assert abs(store.clock_offset(place, LINEAGE) - offset) < 60
    assert list(place.names("")) == []


# --- objects ---------------------------------------------------------------------------------------------------------


def test_an_object_is_what_zcat_reads_and_comes_back_in_pieces_of_any_size():
    blocks = [b"".join(b"%d|0|t|0||%d\n" % (n, n) for n in range(k, k + 500)) for k in range(0, 2000, 500)]
    blocks.insert(2, b"\n\n")
    packed = objects.pack(blocks)
    text = b"".join(blocks)
    assert gzip.decompress(packed.content) == text and packed.nbytes == len(text)
    assert packed.last == b"1999|0|t|0||1999\n"
    for size in (1, 7, 1000, 1 << 20):
        pieces = [packed.content[at : at + size] for at in range(0, len(packed.content), size)]
        assert b"".join(objects.unpack(pieces, "k")) == text


def test_an_object_that_is_cut_or_altered_is_damage():
    content = objects.pack([b"1|0|t|0||x\n" * 1000]).content
    for bad in (content[:-1], content[:20], content[:40] + bytes([content[40] ^ 1]) + content[41:]):
        with pytest.raises(objects.ObjectError):
            list(objects.unpack([bad], "k"))
    good = objects.pack([b"x\n"])
    with pytest.raises(objects.ObjectError):
        list(objects.CheckedPieces([good.content], "k", len(good.content), "0" * 64))
    assert list(objects.CheckedPieces([good.content], "k", len(good.content), good.sha256)) == [good.content]


# --- commits ---------------------------------------------------------------------------------------------------------


def test_a_commit_says_what_it_was_made_of(place):
    log = claimed(place)
    log.commit([wal(1, 9), line("file", "router.ckpt", seq=9, key="files/1/router.ckpt")], "77")
    text = store.get(place, f"{LINEAGE}/commits/{2:020d}")
    assert (
        text.startswith(b"kmq-tier 1 commit=2 writer=a@host start=") and b"\nwal first=1 last=9 key=wal/1-9\n" in text
    )
    assert decode(text, 2).encode() == text
    again = CommitLog(place, LINEAGE, "b@host").read()
    assert again.number == 2 and again.wal_end == 10 and again.files["router.ckpt"].number("seq") == 9


def test_a_commit_that_is_cut_flipped_or_of_another_number_is_damage(place):
    log = claimed(place)
    log.commit([wal(1, 9)], "77")
    path = Path(place.root, LINEAGE, "commits", f"{2:020d}")
    text = path.read_bytes()
    rows = text.splitlines(keepends=True)
    for bad in (b"", text[:-1], rows[0] + rows[2], text.replace(b"last=9", b"last=8"), text.replace(b"=2", b"=3", 1)):
        path.write_bytes(bad)
        with pytest.raises(DamagedError):
            CommitLog(place, LINEAGE, "b@host").read()


def test_a_commit_that_is_missing_is_never_made_again(place):
    log = claimed(place)
    for first in range(1, 40, 10):
        log.commit([wal(first, first + 9)], "77")
    os.unlink(f"{place.root}/{LINEAGE}/commits/{3:020d}")
    with pytest.raises(DamagedError, match="commit 3 is missing"):
        CommitLog(place, LINEAGE, "b@host").read()


@pytest.mark.parametrize("rows", [[(2, 9)], [(1, 9), (11, 12)], [(1, 9), (9, 12)], [(5, 4)]])
def test_rows_that_do_not_follow_are_damage(place, rows):
    log = claimed(place)
    with pytest.raises(DamagedError):
        for first, last in rows:
            log.commit([wal(first, last)], "77")


def test_after_a_drop_the_next_row_may_begin_later(place):
    log = claimed(place)
    log.commit([wal(1, 9)], "77")
    log.commit([line("drop", "wal", before=21, why="retention"), wal(21, 30)], "77")
    assert log.state.wal_end == 31 and log.state.wal_first == 21 and log.state.dropped == {"wal/1-9": 3}
    log.commit([line("gone", "wal/1-9")], "77")
    assert not log.state.dropped


def test_a_later_claim_fences_the_one_before(place):
    old = claimed(place, "a@one")
    claimed(place, "b@two")
    with pytest.raises(FencedError, match="b@two has claimed the copy, by commit 2"):
        old.commit([wal(1, 9)], "77")
    assert CommitLog(place, LINEAGE, "c@three").read().wal == []


@pytest.mark.parametrize("fate", ["lost", "done", "late"])
def test_an_answer_that_does_not_arrive_leaves_each_row_once(place, fate):
    log = claimed(place)
    place.plan = [fate]
    try:
        log.commit([wal(1, 9)], "77")
    except StoreError:
        place.deliver()
        log.catch_up()
        if not log.state.wal:
            log.commit([wal(1, 9)], "78")
    assert [row.number("last") for row in log.state.wal] == [9]
    assert CommitLog(place, LINEAGE, "b@host").read().wal == log.state.wal


def test_rows_that_were_computed_before_a_late_commit_are_not_made(place):
    log = claimed(place)
    place.plan = ["late"]
    with pytest.raises(StoreError):
        log.commit([wal(1, 9)], "77")
    place.deliver()
    with pytest.raises(StaleError):
        log.commit([wal(1, 12)], "78")
    assert log.state.wal_end == 10


def test_a_put_that_arrives_after_the_next_claim_changes_nothing(place):
    old = claimed(place, "a@one")
    place.plan = ["late"]
    with pytest.raises(StoreError):
        old.commit([wal(1, 9)], "77")
    new = claimed(place, "b@two")
    place.deliver()
    new.commit([wal(1, 5)], "78")
    assert [row.number("last") for row in CommitLog(place, LINEAGE, "c@three").read().wal] == [5]


def test_of_sixteen_claims_the_last_one_is_in_force_and_no_number_is_made_twice(place):
    logs, start = [], threading.Barrier(16)

    def claim(number):
        log = CommitLog(DirectoryStore(place.root), LINEAGE, f"w{number}@host")
        start.wait()
        while True:
            try:
                log.catch_up()
                log.claim(line("claim", pod=f"w{number}"), os.urandom(8).hex())
            except StaleError:
                continue
            break
        logs.append(log)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    living = []
    for log in logs:
        try:
            log.catch_up()
            log.check_claim()
            living.append(log)
        except FencedError:
            continue
    assert len(logs) == 16 and len(living) == 1 and living[0].state.number == 16


def test_a_lineage_with_a_successor_ends(place):
    log = claimed(place)
    log.claim(line("claim", successor="f" * 32), "99")
    log.commit([line("begins", successor="f" * 32)], "77")
    assert CommitLog(place, LINEAGE, "b@host").read().successor == "f" * 32
    with pytest.raises(FencedError):
        log.commit([wal(1, 9)], "78")
    assert list(commits.lineages(place)) == [LINEAGE]


def test_a_state_says_what_all_commits_say(place, monkeypatch):
    monkeypatch.setattr(commits, "_STATE_COMMITS", 5)
    log = claimed(place)
    for first in range(1, 300, 10):
        log.commit([wal(first, first + 9), line("file", "router.ckpt", seq=first, key=f"files/{first}")], "77")
        if first == 101:
            log.commit([line("drop", "wal", before=41, why="retention")], "77")
        log.write_state()
    states = list(place.names(f"{LINEAGE}/state"))
    assert len(states) == 2
    found = CommitLog(place, LINEAGE, "b@host").read()
    assert found.encode() == log.state.encode()
    with open(f"{place.root}/{states[-1]}", "r+b") as file:
        file.truncate(20)
    assert CommitLog(place, LINEAGE, "b@host").read().encode() == log.state.encode()
    for each in states:
        os.unlink(f"{place.root}/{each}")
    assert CommitLog(place, LINEAGE, "b@host").read().encode() == log.state.encode()
