"""Real servers of S3 and a directory keep what the tier needs of a store: create-if-absent, and reads that see it."""

import os
import threading

import pytest
import tier_stores

from kmq.tier import store
from kmq.tier.commits import CommitLog, DamagedError, line, lineages
from kmq.tier.store import MissingError, StoreError, clock_offset, open_store, probe

LINEAGE = "0123456789abcdef" * 2


@pytest.fixture(scope="module", params=["directory", *tier_stores.SERVERS])
def url(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    if request.param == "directory":
        yield f"file://{path}/kmq"
    else:
        with tier_stores.s3(request.param, path) as found:
            yield found


def test_it_passes_the_probe_which_leaves_nothing(url):
    probe(open_store(url), LINEAGE)
    assert list(open_store(url).names(f"{LINEAGE}/probe")) == []


def test_it_says_what_time_it_has_and_keeps_nothing(url):
    assert abs(clock_offset(open_store(url), LINEAGE)) < 60
    assert list(open_store(url).names(f"{LINEAGE}/probe")) == []


def test_a_key_is_made_once_and_read_in_pieces(url):
    place, key, content = open_store(url), f"{LINEAGE}/wal/1", os.urandom(3 << 20)
    assert place.create(key, content) and place.create(key, content) and not place.create(key, b"other")
    assert store.holds(place, key, content) and not store.holds(place, key, content[:-1])
    with pytest.raises(MissingError):
        store.get(place, f"{key}1")


def test_what_is_deleted_is_gone_and_what_is_not_there_is_no_error(url):
    place, key = open_store(url), f"{LINEAGE}/wal/2"
    place.create(key, b"x")
    place.delete([key, key])
    with pytest.raises(MissingError):
        store.get(place, key)


def test_in_each_of_four_races_of_sixteen_one_writer_has_made_the_key(url):
    place = open_store(url)
    for race in range(4):
        key, made, start = f"{LINEAGE}/race/{race}", [], threading.Barrier(16)

        def write(number, key=key, made=made, start=start):
            start.wait()
            try:
                made.append(place.create(key, b"%d" % number) and number + 1)
            except StoreError:  # "try again" is an answer, too
                made.append(0)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [number - 1 for number in made if number]
        assert len(made) == 16 and len(winners) == 1 and store.get(place, key) == b"%d" % winners[0]


def test_names_come_in_order_and_after_a_key(url):
    place, keys = open_store(url), [f"{LINEAGE}/list/{number:020d}" for number in range(30)]
    for key in reversed(keys):
        place.create(key, b"")
    assert list(place.names(f"{LINEAGE}/list")) == keys
    assert list(place.names(f"{LINEAGE}/list", keys[9])) == keys[10:]
    mixed = sorted(f"{LINEAGE}/mixed/{name}" for name in ("a", "a.b", "a0/b", "a0.c/d", "b/c/d", "b-c", "z"))
    for key in mixed:
        place.create(key, b"")
    assert list(place.names(f"{LINEAGE}/mixed")) == mixed
    assert list(place.names(f"{LINEAGE}/mixed", mixed[3])) == mixed[4:]


def test_commits_are_read_by_another_process_and_its_lineage_is_found(url):
    log = CommitLog(open_store(url), LINEAGE, "a@host")
    log.read()
    log.claim(line("claim", pod="a"), "11")
    log.commit([line("wal", first=1, last=9, key="wal/1")], "22")
    assert CommitLog(open_store(url), LINEAGE, "b@host").read().wal_end == 10
    assert LINEAGE in list(lineages(open_store(url)))


def test_names_that_are_no_commits_stop_nobody(url):
    place, lineage = open_store(url), "f" * 32
    log = CommitLog(place, lineage, "a@host")
    for name in ("é", "zz", "1", f"{3:020d}.old", f"{'٣' * 20}", "a b", "y" * 200):
        for kind in ("commits", "state", "wal"):
            assert place.create(f"{lineage}/{kind}/{name}", b"x") and place.create(f"{lineage}/{kind}/{name}.gz", b"x")
    log.read()
    log.claim(line("claim", pod="a"), "11")
    assert CommitLog(place, lineage, "b@host").read().number == 1
    assert place.create(f"{lineage}/commits/{3:020d}", b"x")  # a hole is damage
    with pytest.raises(DamagedError):
        CommitLog(place, lineage, "b@host").read()


@pytest.mark.parametrize("server", tier_stores.SERVERS)
def test_a_bucket_that_is_missing_is_an_error_and_no_empty_store(server, tmp_path):
    with tier_stores.s3(server, tmp_path):
        place = open_store("s3://no-such-bucket/kmq")
        for call in (
            lambda: list(place.names("")),
            lambda: store.get(place, "a"),
            lambda: place.create("a", b""),
        ):
            with pytest.raises(StoreError) as refusal:
                call()
            assert not isinstance(refusal.value, MissingError)
