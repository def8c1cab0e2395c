"""Compacted topics go to the store as a whole, also under load, and no record of the WAL goes there before they have."""

import gzip

import pytest
from tiered import TieredBroker, lines

from kmq.log import dedupe_file, reader, topics
from kmq.log.segment import Limits
from kmq.tier.store import StoreError, get

pytestmark = pytest.mark.usefixtures("small_blocks")

SEGMENT = 4096


@pytest.fixture
def made(tmp_path):
    broker = TieredBroker(tmp_path, Limits(segment_bytes=SEGMENT), object_bytes=8192)
    topics.declare(broker.data, "c", 1, {"cleanup": "compact"})
    broker.stop()
    broker.start()
    yield broker
    broker.kill()


def table(made):
    """The lines of the table c/0 that the store has."""
    return gzip.decompress(get(made.store, f"{made.copier.lineage}/{made.state.tables['c/0'].values['key']}"))


def under_load(made, monkeypatch, most=40):
    """With each request that makes a key the router has a new checkpoint: a large table takes longer than that."""
    create, count = made.store.create, [0]

    def create_and_route(key, content):
        count[0] += 1
        assert count[0] < most, "the same objects are made for ever"
        made.send(*lines(1, made.next_seq))
        made.checkpoint()
        return create(key, content)

    monkeypatch.setattr(made.store, "create", create_and_route)


def test_tables_go_up_although_each_object_takes_longer_than_a_checkpoint(made, monkeypatch):
    made.send(*lines(50, topic=b"c.key"))
    made.checkpoint()
    under_load(made, monkeypatch)
    made.copier.turn()
    assert table(made) == b"".join(made.sent[:50])


def test_after_a_hole_the_copy_goes_on_although_each_object_takes_longer_than_a_checkpoint(made, monkeypatch):
    made.send(*lines(50, topic=b"c.key"))
    made.turn()
    made.store.is_away = True
    made.send(*lines(50, 50, topic=b"c.key"), *lines(200))
    with pytest.raises(StoreError):
        made.turn()
    made.lose_wal_before(250)
    made.store.is_away = False
    under_load(made, monkeypatch)
    made.copier.turn()
    state = made.state
    assert table(made) == b"".join(made.sent[:100]) and state.wal[-1].number("first") > 200
    assert state.tables["c/0"].number("seq") == state.files["router.ckpt"].number("seq") < state.wal_end


def expire(made):
    """The local WAL has gone by its limits, except for its end; the ids of producers are known up to there."""
    made.checkpoint()
    last = made.next_seq - 1
    with open(f"{made.data}/producers.ckpt", "wb") as file:
        file.write(b"%d|%d|2\n" % (last, dedupe_file.checksum(last, b"")))
    made.lose_wal_before(last)
    assert reader.first_seq(made.data) > 200
    made.limits = Limits(**{"segment_bytes": SEGMENT, "tier": made.limits.tier, "retention_bytes": 20_000})
    made.kill_copier()


def test_the_wal_stays_while_a_table_has_never_gone_up(made):
    """A damaged block holds the table up. Its records are in the WAL of the store, from which it is healed."""
    made.send(*lines(50, topic=b"c.key"))
    made.checkpoint()
    with open(f"{made.data}/topics/c/0/{0:020d}.log", "r+b") as file:
        file.seek(100)
        was = file.read(3)
        file.seek(100)
        file.write(b"\0\0\0")
    made.send(*lines(200))
    made.turn()
    expire(made)
    for _ in range(2):
        made.turn()
    assert "c/0" not in made.state.tables and made.state.wal_first == 1
    with open(f"{made.data}/topics/c/0/{0:020d}.log", "r+b") as file:
        file.seek(100)
        file.write(was)
    for _ in range(2):
        made.turn()
    assert table(made) == b"".join(made.sent[:50]) and made.state.wal_first > 1
