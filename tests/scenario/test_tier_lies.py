"""A bucket behind a proxy that delays, repeats, cuts and lies: each row once, no record lost, nothing guessed."""

import contextlib
import gzip
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
import tier_stores
from fake_logger import FakeLogger
from made_data import append, write_data
from s3_proxy import FATES
from typer.testing import CliRunner

from kmq.cli.app import app
from kmq.config.settings import load
from kmq.errors import KmqError
from kmq.log import identity, reader, wal
from kmq.tier.commits import CommitLog
from kmq.tier.restore import Restore, find_source
from kmq.tier.store import StoreError, get, open_store
from kmq.tier.turn import Copier, TurnOptions, full_key

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

LINES = [b"orders.k%d|0|%d|%s" % (n % 5, n, b"x" * 200) for n in range(1, 101)]


@pytest.fixture(scope="module", params=tier_stores.SERVERS)
def bucket(request, tmp_path_factory):
    with tier_stores.s3_behind_proxy(request.param, tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def proxy(bucket):
    bucket[1].fate = lambda method, path: ""
    bucket[1].seen.clear()
    return bucket[1]


@pytest.fixture
def seeded():
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"CHAOS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def url(bucket, request):
    """A prefix of the test's own."""
    return f"{bucket[0]}/{abs(hash(request.node.nodeid))}"


def copier(data, url):
    return Copier(
        str(data), open_store(url), FakeLogger(), TurnOptions(1 << 14, 0, lambda: wal.last_stored(str(data))[0])
    )


def rows_of(data, url):
    """What the rows in force say and hold, as `zcat` shows it."""
    store, lineage = open_store(url), identity.lineage(str(data))
    rows = CommitLog(store, lineage, "reader@here").read().wal
    spans = [(row.number("first"), row.number("last")) for row in rows]
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(spans)), spans
    return b"".join(gzip.decompress(get(store, full_key(lineage, row.values["key"]))) for row in rows)


def local_wal(data):
    return b"".join(reader.read(str(data), 1, wal.last_stored(str(data))[0]))


def until_whole(copying):
    """Turn after turn until one has done all: what failed is tried again."""
    for _ in range(100):
        try:
            return copying.turn()
        except StoreError:
            continue
    raise AssertionError("no turn of a hundred came to its end")


@pytest.mark.parametrize("fate", FATES)
def test_whichever_request_has_this_fate_each_record_is_there_once(proxy, url, tmp_path, seeded, fate):
    """A turn after the other, in which one request has this fate; then one in which all is well."""
    made = write_data(tmp_path / "data", LINES[:10], closed=False)
    positions = seeded.sample(range(12), 1 if fate in ("silent", "mute") else 4)
    for at in positions:
        append(made, [b"orders|0|%d|later" % at] * 3)
        count = itertools.count()
        proxy.fate = lambda method, path, at=at, count=count: fate if next(count) == at else ""
        with contextlib.suppress(KmqError):
            copier(tmp_path / "data", url).turn()
        proxy.deliver()
        proxy.fate = lambda method, path: ""
        until_whole(copier(tmp_path / "data", url))
        assert rows_of(tmp_path / "data", url) == local_wal(tmp_path / "data"), at
    made[0].close()
    made[1].close()
    assert fate in [each[2] for each in proxy.seen]


def test_a_commit_that_arrives_after_the_next_claim_changes_nothing(proxy, url, tmp_path):
    made = write_data(tmp_path / "data", LINES, closed=False)
    zombie = copier(tmp_path / "data", url)
    until_whole(zombie)
    append(made, LINES)
    proxy.fate = lambda method, path: "late" if method == "PUT" and "/commits/" in path else ""
    with pytest.raises(StoreError):
        zombie.turn()
    proxy.fate = lambda method, path: ""
    until_whole(copier(tmp_path / "data", url))
    proxy.deliver()
    assert rows_of(tmp_path / "data", url) == local_wal(tmp_path / "data")
    with pytest.raises(KmqError, match="has claimed"):
        zombie.turn()
    made[0].close()
    made[1].close()


@pytest.mark.parametrize(("fate", "words"), [("denied", "AccessDenied"), ("throttled", "SlowDown"), ("done", "500")])
def test_a_refusal_is_said_in_the_words_of_the_store(proxy, url, tmp_path, fate, words):
    data = write_data(tmp_path / "data", LINES)
    proxy.fate = lambda method, path: fate
    with pytest.raises(StoreError, match=words) as refusal:
        copier(data, url).turn()
    assert "AKIASECRET" not in str(refusal.value) and "a token" not in str(refusal.value)
    proxy.fate = lambda method, path: ""
    until_whole(copier(data, url))


@pytest.mark.parametrize("fate", ["cut", "flipped", "denied", "lost"])
def test_a_restore_is_right_or_fails_whichever_object_is_read_wrongly(proxy, url, tmp_path, seeded, fate):
    data = write_data(tmp_path / "data", LINES, {"orders": 2})
    until_whole(copier(data, url))
    expected, failed = local_wal(data), 0
    for at in itertools.count(seeded.randrange(4), 4):
        count = itertools.count()
        proxy.fate = lambda method, path, at=at, count=count: fate if method == "GET" and next(count) == at else ""
        proxy.seen.clear()
        target = tmp_path / f"again{at}"
        try:
            settings = load({"KMQ_DATA": str(target)}, "none.toml")
            source = find_source(open_store(url), identity.lineage(data), "restore@here")
            assert source is not None
            Restore(open_store(url), source, settings, FakeLogger(), lambda nbytes: None).run(is_drill=True)
        except KmqError:
            failed += 1
            assert not (target / "id").exists()
            continue
        assert local_wal(target) == expected
        shutil.rmtree(target)
        if fate not in [each[2] for each in proxy.seen]:
            break
    assert failed


def test_verify_says_which_object_the_store_gives_back_altered(proxy, url, tmp_path, monkeypatch):
    data = write_data(tmp_path / "data", LINES)
    until_whole(copier(data, url))
    proxy.fate = lambda method, path: "flipped" if "/wal/" in path else ""
    env = {"KMQ_DATA": data, "KMQ_TIER": url}
    done = CliRunner().invoke(app, ["tier", "verify", "--deep"], env=env)
    assert done.exit_code == 1 and "/wal/" in done.output, done.output
    proxy.fate = lambda method, path: ""
    assert CliRunner().invoke(app, ["tier", "verify", "--deep"], env=env).exit_code == 0
    assert Path(data, "id").exists()
