"""Changes of topics as records: when the framer numbers a request, and what the router and a repair make of a record."""

import os
import shutil
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room, write_wal

from kmq.framing.topics import TopicRequests
from kmq.links.layout import Block
from kmq.log import identity, topic_changes, topics
from kmq.log.segment import Limits
from kmq.log.topic_changes import TopicChange
from kmq.log.wal import Wal
from kmq.repair import heal
from kmq.router.queues import Queues


class Framer:
    """Who asks what is due, as often as it likes."""

    def __init__(self, data, numbered=None):
        self.routed, self.seq = 0, 10
        self.requests = TopicRequests(data, lambda: self.routed, numbered or {})

    def due(self):
        self.requests._due = self.requests._seen_ns = 0
        found = []
        for change in self.requests.due():
            self.seq += 1
            self.requests.numbered(change, self.seq)
            found.append((self.seq, change.verb, change.topic, change.incarnation))
        return found


@pytest.fixture
def data(tmp_path):
    identity.open_data(str(tmp_path / "data"))
    return str(tmp_path / "data")


def adopted(data, name, from_seq):
    topics.make(data, name, topics.Declaration(1, from_seq))


def carried_out(data, topic):
    for request in topic_changes.waiting(data):
        if request.topic == topic:
            request.remove()
            return


def test_a_request_is_numbered_once_and_the_next_of_its_topic_behind_it(data):
    framer = Framer(data)
    topics.declare(data, "a", 1)
    topic_changes.submit(data, topic_changes.GROW, "a", {"partitions": "3"})
    topics.declare(data, "b", 1)
    assert framer.due() == [(11, "create", "a", 0), (12, "create", "b", 0)]
    assert framer.due() == []
    adopted(data, "a", 11)
    carried_out(data, "a")
    assert framer.due() == [(13, "grow", "a", 11)], "whether or not the router has said that it is past the record"
    framer.routed = 12
    assert framer.due() == [(14, "create", "b", 0)], "it was dropped: the router is past it, and its request is there"


def test_a_change_waits_until_the_router_is_past_the_one_before_of_its_topic(data):
    adopted(data, "a", 5)
    framer = Framer(data)
    topic_changes.submit(data, topic_changes.SET, "a", {"segment_age": "1d"})
    topic_changes.submit(data, topic_changes.GROW, "a", {"partitions": "3"})
    assert framer.due() == [(11, "set", "a", 5)] and framer.due() == []
    framer.routed = 11
    carried_out(data, "a")
    assert framer.due() == [(12, "grow", "a", 5)]


def test_a_deletion_is_of_the_topic_that_was_seen_and_of_no_later_one(data):
    adopted(data, "a", 5)
    topic_changes.delete(data, "a", 5)
    topic_changes.delete(data, "a", 5)  # who waited in vain for the first asks again
    framer = Framer(data)
    assert framer.due() == [(11, "delete", "a", 5)]
    carried_out(data, "a")
    os.unlink(f"{data}/topics/a/topic.toml")
    os.rmdir(f"{data}/topics/a")
    adopted(data, "a", 12)  # by a message
    framer.routed = 11
    assert framer.due() == [(12, "delete", "a", 5)]


def test_a_start_knows_what_is_numbered_already(data):
    topics.declare(data, "a", 1)
    [request] = topic_changes.waiting(data)
    assert Framer(data, {request.name: 7}).due() == []
    framer = Framer(data, {request.name: 7})
    framer.routed = 7
    assert framer.due() == [(11, "create", "a", 0)]


def test_a_change_of_what_is_not_in_force_yet_waits_for_the_router(data):
    (Path(data) / "topics/by-hand").mkdir(parents=True)
    (Path(data) / "topics/by-hand/topic.toml").write_text("partitions = 2\n")
    topic_changes.submit(data, topic_changes.SET, "by-hand", {"segment_age": "1d"})
    topic_changes.submit(data, topic_changes.DELETE, "nobody", {})
    framer = Framer(data)
    assert framer.due() == [(11, "delete", "nobody", 0)]
    adopted(data, "by-hand", 9)
    assert framer.due() == [(12, "set", "by-hand", 9)]


def test_a_topic_that_is_made_again_is_numbered_again_whatever_inode_it_gets(data):
    framer = Framer(data)
    inodes = set()
    for life in range(1, 40):
        topics.declare(data, "again", life)
        inodes.add(os.stat(f"{data}/topics/again/topic.toml").st_ino)
        [(seq, verb, _, incarnation)] = framer.due()
        assert (verb, incarnation) == ("create", 0)
        framer.routed = seq
        carried_out(data, "again")
        os.unlink(f"{data}/topics/again/topic.toml")
        os.rmdir(f"{data}/topics/again")


def stored(data, *changes):
    """Store these, each as a record; the blocks that the router gets."""
    wal, blocks = Wal(data, no_room, 1 << 20), []
    for seq, change in enumerate(changes, 1):
        sent = topic_changes.encode(change, b"1.000000") if isinstance(change, TopicChange) else change
        line = b"%d|1732190000.%06d|%b\n" % (seq, seq, sent)
        wal.append([(line, seq, 1, FIRST_TS + seq)])
        blocks.append(Block(line, 0, [len(line), seq, 1, sent.index(b"|"), FIRST_TS + seq, 0, 0]))
    wal.sync()
    wal.close()
    return blocks


def started(data, high=0, **options):
    """The queues of a router that is up."""
    queues = Queues(data, no_room, FakeLogger(), are_recorded=True, **options)
    queues.recover(high)
    return queues


def changed(data, *changes):
    """A broker that was sent these, each as a record, while its router was down; its queues."""
    return replayed(data, len(stored(data, *changes)))


def replayed(data, high):
    queues = started(data, high)
    queues.close()
    return queues


LINE = b"orders.k|0|1|x"
CREATE = TopicChange("create", "orders", 0, {"partitions": "2", "retention_age": "30d", "segment_bytes": "1 GiB"}, "r1")
CHANGES = (
    LINE,
    CREATE,  # too late: the line has made it
    TopicChange("delete", "orders", 1, {}, "r2"),
    CREATE._replace(request="r3"),
    TopicChange("set", "orders", 4, {"retention_age": "", "max_deliveries": "5"}, "r4"),
    TopicChange("delete", "orders", 1, {}, "r2"),  # numbered twice: it is for another life
    TopicChange("grow", "orders", 4, {"partitions": "4"}, "r5"),
    LINE,
    TopicChange("shrink", "orders", 4, {}, "r6"),
)
LIMITS = {"segment_bytes": "1 GiB", "max_deliveries": "5"}


def test_a_replay_carries_out_each_record_once_and_in_its_place(data):
    changed(data, *CHANGES)
    found = topics.read(data, "orders")
    assert (found.partitions, found.from_seq, found.grown, found.limits) == (4, 4, [(7, 2)], LIMITS)
    assert Path(data, "deletions").read_text().splitlines()[0] == "orders|1|3|1732190000.000003|1"
    assert Path(data, "__kmq.log").read_bytes().count(b"\n") == len(CHANGES) - 2
    before = Path(data, "topics/orders/topic.toml").read_bytes(), Path(data, "deletions").read_bytes()
    os.unlink(f"{data}/router.ckpt")  # so that all of them are looked at again
    replayed(data, len(CHANGES))
    assert (Path(data, "topics/orders/topic.toml").read_bytes(), Path(data, "deletions").read_bytes()) == before


def test_a_change_among_the_blocks_of_a_turn_is_carried_out_in_its_place(data):
    queues = started(data)
    queues.route(stored(data, *CHANGES))
    queues.close()
    found = topics.read(data, "orders")
    assert (found.partitions, found.from_seq, found.grown, found.limits) == (4, 4, [(7, 2)], LIMITS)
    assert Path(data, "deletions").read_text().splitlines()[0] == "orders|1|3|1732190000.000003|1"
    lines = b"".join(path.read_bytes() for path in Path(data, "topics/orders").glob("*/*.log"))
    assert lines == b"8|1732190000.000008|%b\n" % LINE, "the line before the deletion went with it"


def test_a_gap_that_is_read_from_the_wal_comes_behind_the_topics_that_wait(data):
    lines = [b"t%02d.k|0|1|x" % number for number in range(20)]  # more than are made at once
    create = TopicChange("create", "t19", 0, {"partitions": "4"}, "r1")
    blocks = stored(data, *lines, create, b"t19.k|0|2|y", b"t19.z|0|3|y")
    queues = started(data)
    queues.route(blocks[:20])
    queues.replay(21, 22)  # durability was killed before it showed them
    queues.route(blocks[22:])
    queues.close()
    found = topics.read(data, "t19")
    assert (found.partitions, found.from_seq) == (1, 20), "as a rebuild from the WAL has it"


def test_limits_that_were_edited_by_hand_outlive_a_replay(data):
    changed(data, *CHANGES)
    path = Path(data, "topics/orders/topic.toml")
    path.write_text(path.read_text().replace("max_deliveries = 5", "max_deliveries = 6"))
    os.unlink(f"{data}/router.ckpt")
    replayed(data, len(CHANGES))
    assert topics.read(data, "orders").limits["max_deliveries"] == "6"


def test_a_repair_takes_the_limits_of_a_damaged_declaration_from_the_records(data):
    changed(data, *CHANGES)
    path = Path(data, "topics/orders/topic.toml")
    whole = path.read_bytes()
    path.write_bytes(b"partit\0\0" + whole[8:40])
    heal.repair(data)
    found = topics.read(data, "orders")
    assert (found.partitions, found.from_seq, found.grown, found.limits) == (4, 4, [(7, 2)], LIMITS)


def test_a_start_takes_the_limits_of_a_damaged_declaration_from_the_records(data):
    changed(data, *CHANGES)
    path = Path(data, "topics/orders/topic.toml")
    whole = path.read_bytes()
    for damaged in (whole.replace(b"=", b"<", 1), None):
        path.write_bytes(damaged) if damaged else path.unlink()
        queues = replayed(data, len(CHANGES))
        assert path.read_bytes() == whole
        assert queues.in_force.limits_of("orders").segment_bytes == 1 << 30


def test_a_change_of_a_topic_whose_declaration_is_damaged_is_carried_out(data):
    changed(data, *CHANGES)
    queues, framer = started(data, len(CHANGES)), Framer(data)
    path = Path(data, "topics/orders/topic.toml")
    path.write_text(path.read_text().replace('"1 GiB"', "1 GiB"))  # by hand, without the quotes
    topic_changes.delete(data, "orders", topics.from_seq_of(data, "orders"))
    assert framer.due() == []
    queues.tick()
    assert framer.due() == [(11, "delete", "orders", 4)] and queues.context.logger.of("topic_mended")
    queues.close()


BAD_REQUESTS = {
    "nothing": b"",
    "no topic": b"create \n",
    "a path": b"create a/b\npartitions=1\n",
    "another verb": b"shrink orders\n",
    "a name that is none": "set äö\nsegment_age=1d\n".encode(),
    "the topic of these records": b"delete __kmq\n",
    "an unknown limit": b"set orders\nnonsense=1\n",
    "a limit that is a pattern": b"set orders\n(=1\n",
    "more than a record may hold": b"set orders\nsegment_age=" + b"1" * 70_000 + b"\n",
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_a_bad_request_is_refused_once_and_removed(data, what):
    changed(data, *CHANGES)
    queues, framer = started(data, len(CHANGES)), Framer(data)
    before = Path(data, "topics/orders/topic.toml").read_bytes()
    path = Path(data, "topics/.request-00000000000000000001-1")
    path.write_bytes(BAD_REQUESTS[what])
    for _ in range(2):
        queues.tick()
        framer.requests._due = framer.requests._seen_ns = 0
        for change in framer.requests.due():
            queues.changes.apply(b"99|1732190000.000001|" + topic_changes.encode(change, b"1.0") + b"\n")
    assert not path.exists() and len(queues.context.logger.of("request_refused")) == 1
    assert Path(data, "topics/orders/topic.toml").read_bytes() == before
    queues.close()


def test_what_is_no_request_stops_neither_framer_nor_router(data):
    changed(data, *CHANGES)
    where = f"{data}/topics/.request-"
    os.mkdir(where + "00000000000000000001-1")
    os.symlink(where + "00000000000000000002-1", where + "00000000000000000002-1")
    os.mkfifo(where + "00000000000000000003-1")
    for name in ("1-1.new", "00000000000000000004-1|x", "00000000000000000004-1\n9|1|a", "\udcff"):
        Path(where + name).write_text("create nova\npartitions=1\n")
    queues = started(data, len(CHANGES))
    queues.tick()
    assert Framer(data).due() == []
    queues.close()


def test_thousands_of_new_topics_cost_no_look_at_all_others(data, monkeypatch):
    looks = []
    monkeypatch.setattr(topic_changes, "asks_to_create", lambda *names: looks.append(names))
    queues = started(data)
    queues.route(stored(data, *(b"t%d|0|1|x" % number for number in range(50))))
    queues.make_topics()
    queues.close()
    assert topics.load(data, "t49") == (1, 50) and not looks


def test_a_lower_limit_of_a_topic_that_is_only_declared_waits_for_its_declaration(data):
    queues = started(data, lacks_room=lambda: True)
    topics.declare(data, "nova", 4)
    topic_changes.submit(data, topic_changes.SET, "nova", {"retention_bytes": "1MiB"})
    queues.tick()
    assert topics.load(data, "nova") == (4, None)
    queues.close()


def test_retention_keeps_the_records_of_changes(data):
    changed(data, *CHANGES)
    queues = Queues(data, no_room, FakeLogger(), Limits(segment_bytes=300, retention_bytes=400))
    queues.recover(len(CHANGES))
    for _ in range(3):
        queues.tick()
        queues.settle()
    queues.close()
    kept = sorted(Path(data, "topics/__kmq/0").glob("*.log"))
    assert len(kept) > 1, "it was sealed by its size, or this shows nothing"
    assert b"".join(path.read_bytes() for path in kept).count(b"\n") == len(CHANGES) - 2


def test_a_lower_limit_is_in_force_before_its_record_while_there_is_no_room_for_that(data):
    changed(data, *CHANGES)
    lacks_room = []
    queues = started(data, len(CHANGES), lacks_room=lambda: bool(lacks_room))
    topic_changes.submit(data, topic_changes.SET, "orders", {"retention_bytes": "1MiB"})
    queues.tick()
    assert topics.read(data, "orders").limits == LIMITS
    lacks_room.append(True)
    queues.tick()
    queues.tick()
    assert topics.read(data, "orders").limits == LIMITS | {"retention_bytes": "1MiB"}
    assert len(queues.context.logger.of("topic_limits_set")) == 1 and topic_changes.waiting(data)
    queues.close()


# --- in a shard ------------------------------------------------------------------------------------------------------


def laid(data, text, *beside):
    path = Path(data, "topics/orders/topic.toml")
    for name in ("", *beside):
        (path.parent / name).mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def partitions_of(queues):
    topic = queues.in_force.table.get(b"orders")
    return topic.partitions if topic else 0


def test_a_topic_that_is_laid_by_hand_is_adopted(data):
    alone = started(data)
    laid(data, "partitions = 3\n")
    alone.tick()
    assert partitions_of(alone) == 3 and not alone.context.logger.of("request_refused")
    alone.close()


@pytest.mark.parametrize("beside", [(), ("0",)])
def test_in_a_shard_a_topic_that_is_laid_by_hand_is_refused(data, beside):
    shard = started(data, in_shard=True)
    path = laid(data, "partitions = 3\n", *beside)
    for _ in range(2):
        shard.tick()
    assert partitions_of(shard) == 0 and path.exists() == bool(beside)
    [said] = shard.context.logger.of("request_refused")
    assert said["file"] == str(path) and said["topic"] == "orders" and "kmq topics create" in said["reason"]
    shard.route([block([b"orders.k|1|1|x"], 1)])
    assert partitions_of(shard) == 1 and topics.load(data, "orders") == (1, 1)
    assert len(shard.context.logger.of("request_refused")) == 1
    shard.close()


def test_a_message_does_not_wait_for_the_next_look_at_what_is_laid_by_hand(data):
    shard = started(data, in_shard=True)
    shard.changes.carry_out()
    laid(data, "partitions = 3\nfrom_seq = 1\n")
    shard.route([block([b"orders.k|1|1|x"], 1)])
    assert partitions_of(shard) == 1 and len(shard.context.logger.of("request_refused")) == 1
    shard.close()


@pytest.mark.parametrize("from_seq", [0, 1, 2, 3])
def test_a_start_takes_no_file_for_a_topic_that_its_checkpoint_would_know(data, from_seq):
    write_wal(data, [b"a|1|1|x", b"a|1|2|x", b"orders.k|1|1|x"]).close()
    first = started(data, 2, in_shard=True)
    first.close()
    path = laid(data, f"partitions = 3\nfrom_seq = {from_seq}\n")
    alone = str(Path(data).parent / "alone")
    shutil.copytree(data, alone, symlinks=True)
    assert partitions_of(started(alone, 2)) == 3
    shard = started(data, 2, in_shard=True)
    if from_seq == 3:  # as after a kill behind the record of a declaration, which the replay carries out again
        assert partitions_of(shard) == 3
        return
    assert partitions_of(shard) == 0 and len(shard.context.logger.of("request_refused")) == 1 and path.exists()
    shard.replay(3, 3)
    assert topics.load(data, "orders") == (1, 3)
    shard.close()
    assert partitions_of(started(data, 3, in_shard=True)) == 1


def test_the_record_of_a_declaration_counts_whatever_was_laid_by_hand(data):
    stored(data, CREATE)
    shard = started(data, in_shard=True)
    laid(data, "partitions = 5\nfrom_seq = 1\n")
    shard.replay(1, 1)
    assert partitions_of(shard) == 2 and topics.load(data, "orders") == (2, 1)
    shard.close()


def test_what_a_follower_is_asked_is_refused_and_only_retain_is_carried_out(data):
    log = FakeLogger()
    topic_changes.refuse_requests(data, log)
    shard = started(data, in_shard=True)
    topics.declare(data, "orders", 3)
    topic_changes.submit(data, topic_changes.SET, "a", {"segment_age": "1d"})
    topic_changes.submit(data, topic_changes.RETAIN, "", {})
    topic_changes.refuse_requests(data, log)
    assert [said["topic"] for said in log.of("request_refused")] == ["orders", "a"]
    assert [request.verb for request in topic_changes.waiting(data)] == [topic_changes.RETAIN]
    shard.tick()
    assert topic_changes.waiting(data) == [] and partitions_of(shard) == 0
    assert not os.path.exists(f"{data}/topics/orders"), "a message would find it"
    shard.close()
