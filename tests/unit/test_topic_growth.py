"""A topic that gets more partitions: each record stays where it is, whatever is killed, lost, rebuilt or repaired."""

import os
import shutil
from pathlib import Path

import pytest
from traced_broker import Broker, kill_at

from kmq.log import checkpoint, topic_changes, topics
from kmq.message.routing import Route, Topic
from kmq.repair import heal
from kmq.router.queues import Queues

TRACED = {"_carry_out", "_grow", "_sync_wal", "replace_file", "relink", "use", "open", "drop_single_link", "remove"}


@pytest.fixture
def broker(tmp_path):
    made = Broker(tmp_path / "data")
    made.send(*(b"orders.k%d|0|%d|x" % (n, n) for n in range(12)), b"orders.late|0|12|x", b"others|0|1|y")
    return made


def grow(broker, partitions, topic="orders"):
    broker.ask(topic_changes.GROW, topic, partitions=partitions)


def test_a_record_stays_in_the_partition_that_its_topic_had_at_its_seq():
    topic = Topic("t", 8, 1, (), [(10, 1), (20, 3)])
    spread = Route(b"t", None)
    assert [topic.partition_of(spread, seq) for seq in (9, 10, 19, 20, 23)] == [0, 1, 1, 4, 7]
    assert topic.partition_of(Route(b"t", None, 7), 19) == 1 and topic.partition_of(Route(b"t", None, 7), 20) == 7
    assert topic.changes() == [1, 10, 20]


def test_a_grown_topic_has_other_links_and_keeps_its_records(broker):
    before = broker.files()["topics/orders/0/00000000000000000000.log"]
    assert "orders.log" in broker.links()
    grow(broker, 4)
    assert broker.log.of("topic_grown")[0]["removed"] == "orders.log"
    broker.send(*(b"orders.k%d|0|%d|y" % (n, n) for n in range(12)), b"orders|0|1|z", b"others|0|2|y")
    assert sum(broker.segments("orders").values()) == 13 + 13 and len(broker.segments("orders")) == 4
    assert broker.files()["topics/orders/0/00000000000000000000.log"].startswith(before)
    assert sorted(broker.links()) == ["append.log", *(f"orders-{n}.log" for n in range(4)), "others.log"]
    grow(broker, 6)
    broker.send(*(b"orders|0|%d|z" % n for n in range(12)))
    broker.queues.close()
    assert broker.findings() == []
    assert topics.read(broker.data, "orders").grown == [(15, 1), (29, 4)]


LOSSES = {
    "its logs": ["topics/orders/0", "topics/orders/2"],
    "its declaration": ["topics/orders/topic.toml"],
    "the links": ["orders-0.log", "orders-2.log"],
    "the directory": ["topics/orders"],
    "logs and the checkpoint": ["topics/orders/0", "topics/orders/1", "router.ckpt"],
}
LEFT_TO_A_START = ("the directory", "logs and the checkpoint")


def lose(data, names):
    for name in names:
        path = Path(data, name)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("is_repaired", [False, True])
def test_queues_of_a_grown_topic_come_back_byte_for_byte(broker, loss, is_repaired):
    grow(broker, 3)
    broker.send(*(b"orders.k%d|0|%d|y" % (n, n) for n in range(12)))
    grow(broker, 5)
    broker.send(*(b"orders|0|%d|z" % n for n in range(12)))
    broker.queues.close()
    before, links = broker.files(), broker.links()
    lose(broker.data, LOSSES[loss])
    if is_repaired:
        heal.repair(broker.data)
        assert broker.findings() == [] or loss in LEFT_TO_A_START
    after = Broker(broker.data, broker.seq)
    after.queues.close()
    assert (after.files(), after.links()) == (before, links)
    assert after.findings() == []


# A sample of all lines leaves out what is wrong between two of them: of the growth itself every line is tried.
@pytest.mark.parametrize(
    ("losses", "functions", "step"),
    [
        pytest.param([], TRACED, 5, marks=pytest.mark.sampled(1)),
        pytest.param(["router.ckpt"], TRACED, 5, marks=pytest.mark.sampled(1)),
        (["router.ckpt"], {"_grow"}, 1),
        pytest.param([], TRACED, 1, marks=pytest.mark.soak),
        pytest.param(["router.ckpt"], TRACED, 1, marks=pytest.mark.soak),
    ],
)
def test_a_kill_at_any_line_leaves_it_grown_and_each_record_once(broker, losses, functions, step):
    broker.queues.close()
    data, before = broker.data, f"{broker.data}-before"
    shutil.copytree(data, before, symlinks=True)
    nth = 1
    while kill_at(data, broker.seq, nth, functions, topic_changes.GROW, "orders", partitions=4):
        lose(data, losses)
        after = Broker(data, broker.seq)
        assert topics.load(data, "orders") == (4, 1), nth
        assert not [name for name in os.listdir(f"{data}/topics") if name.startswith(".request")], nth
        assert sorted(after.links()) == ["append.log", *(f"orders-{n}.log" for n in range(4)), "others.log"], nth
        after.send(*(b"orders|0|%d|z" % n for n in range(8)), b"others|0|2|y")
        after.queues.close()
        assert after.segments("orders") == {"0/0": 15, "1/0": 2, "2/0": 2, "3/0": 2}, nth
        assert after.segments("others") == {"0/0": 2} and after.findings() == [], nth
        shutil.rmtree(data)
        shutil.copytree(before, data, symlinks=True)
        nth += step
    assert nth > (50 if functions == TRACED else 15)


def test_a_start_believes_a_growth_that_the_checkpoint_does_not_know_yet(broker):
    broker.queues.close()
    path = Path(broker.data, "router.ckpt")
    old = path.read_bytes()
    grow(broker, 4)
    broker.send(*(b"orders|0|%d|z" % n for n in range(8)))
    broker.queues.settle()
    path.write_bytes(old)
    after = Broker(broker.data, broker.seq)
    assert not after.log.of("topic_mended")
    after.queues.close()
    assert after.segments("orders") == {"0/0": 15, "1/0": 2, "2/0": 2, "3/0": 2} and after.findings() == []


def test_a_second_life_of_a_grown_topic_knows_nothing_of_its_growth(broker):
    grow(broker, 4)
    broker.send(*(b"orders|0|%d|z" % n for n in range(8)))
    broker.delete()
    assert sorted(broker.links()) == ["append.log", "others.log"]
    broker.send(b"orders.k|0|1|a", b"orders.l|0|2|b")
    broker.queues.close()
    assert broker.segments("orders") == {"0/15": 2} and broker.findings() == []
    lose(broker.data, ["topics/orders", "router.ckpt"])
    after = Broker(broker.data, broker.seq)
    after.queues.close()
    assert after.segments("orders") == {"0/15": 2} and topics.read(broker.data, "orders").grown == ()
    grow(after, 2)
    after.send(b"orders|0|3|c", b"orders|0|4|d")
    after.queues.close()
    assert after.segments("orders") == {"0/15": 3, "1/2": 1} and after.findings() == []


@pytest.mark.parametrize(
    ("topic", "partitions", "said"),
    [
        ("orders", 1025, "between 1 and 1024"),
        ("more", 2, "can never have fewer"),
        ("nobody", 2, "does not exist"),
        ("others", 2, "others-1.log exists and leads to another queue"),
        ("orders", "many", "invalid literal"),
    ],
)
def test_a_growth_that_cannot_be_is_refused_and_changes_nothing(broker, topic, partitions, said):
    topics.declare(broker.data, "more", 3)
    broker.send(b"others-1|0|1|x")
    broker.queues.tick()
    before = broker.links()
    grow(broker, partitions, topic)
    assert said in str(broker.log.of("request_refused")[0]["reason"])
    assert broker.links() == before and not broker.log.of("topic_grown")


def test_a_topic_that_grows_while_its_first_lines_wait_keeps_them_in_one_partition(broker):
    broker.send(*(b"new-%d|0|1|x" % n for n in range(40)), b"late.a|0|1|x", b"late.b|0|1|x", b"late.c|0|1|x")
    assert broker.queues.sorter.newcomers
    grow(broker, 3, "late")
    broker.send(*(b"late|0|%d|x" % n for n in range(6)))
    broker.queues.close()
    assert broker.segments("late") == {"0/0": 5, "1/0": 2, "2/0": 2} and broker.findings() == []


@pytest.mark.parametrize("at", range(4))
def test_a_damaged_growth_is_found_and_repaired_from_the_checkpoint(broker, at):
    grow(broker, 4)
    broker.send(*(b"orders|0|%d|z" % n for n in range(8)))
    broker.queues.close()
    path = Path(topics.toml_path(broker.data, "orders"))
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    digits = [number for number, letter in enumerate(lines[at]) if letter.isdigit()]
    lines[at] = lines[at][: digits[-1]] + str((int(lines[at][digits[-1]]) + 1) % 10) + lines[at][digits[-1] + 1 :]
    path.write_text("".join(lines))
    assert any("topic.toml" in each for each in broker.findings())
    heal.repair(broker.data)
    assert path.read_text() == whole and broker.findings() == []
    path.write_text("".join(lines))
    Broker(broker.data, broker.seq).queues.close()
    assert path.read_text() == whole and broker.findings() == []


@pytest.mark.parametrize("text", ["1", "1:", "a:1", "5:1,5:1", "9:1,5:2", "5:3,9:2", "1:1;2:2", "1:99999"])
def test_a_text_that_is_no_growth_is_refused(text):
    with pytest.raises(ValueError, match=r"must|digits|rise"):
        topics.decode_growth(text)


def test_a_checkpoint_and_a_declaration_are_read_as_they_were_written(broker):
    grow(broker, 2)
    grow(broker, 7)
    broker.queues.close()
    assert topics.read(broker.data, "orders").topic("orders").grown == [(15, 1), (15, 2)]
    assert checkpoint.load(broker.data)[2]["orders"][:2] == (1, [(15, 1), (15, 2)])
    assert (
        topics.decode_growth(topics.encode_growth([(15, 1), (15, 2)])) == [(15, 1), (15, 2)]
        and topics.decode_growth("") == ()
    )


def test_only_a_topic_whose_records_have_keys_is_said_to_have_them(broker):
    assert topics.has_keys(broker.data, "orders", 1) and not topics.has_keys(broker.data, "others", 1)
    broker.send(b"others.@|0|1|x", b"plain|0|1|x", b"plain.@0|0|1|x")
    assert not topics.has_keys(broker.data, "others", 1) and not topics.has_keys(broker.data, "plain", 1)
    broker.send(b"plain.@0.k|0|1|x")
    assert topics.has_keys(broker.data, "plain", 1)


def test_growth_survives_limits_and_limits_survive_growth(broker):
    broker.ask(topic_changes.SET, retention_age="30d")
    grow(broker, 2)
    broker.ask(topic_changes.SET, retention_bytes="1GiB")
    declared = topics.read(broker.data, "orders")
    assert declared.limits == {"retention_age": "30d", "retention_bytes": "1GiB"}
    assert (declared.partitions, declared.grown) == (2, [(15, 1)])
    assert isinstance(broker.queues, Queues) and broker.queues.in_force.table[b"orders"].partitions == 2
