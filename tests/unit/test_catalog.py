"""Which topics a message may name, asked before it is numbered."""

import os

import pytest
from framing_steps import SMALL, source_of
from received_ends import Way, messages
from waiting import until

from kmq.framing import blocks, parser
from kmq.framing.dedupe import DedupeTable
from kmq.framing.topics import Catalog
from kmq.log import topics
from kmq.message import record

TEXT = b"%b|0|1|x\n"
PATIENCE_S = 100.0


class World:
    """A data directory and a router that has routed up to `routed`."""

    def __init__(self, data):
        self.data, self.routed = str(data), 0
        os.makedirs(f"{data}/topics")

    def catalog(self, most=3, may_create=True):
        return Catalog(self.data, most, may_create, lambda: self.routed)

    def make(self, name, from_seq=1):
        os.makedirs(f"{self.data}/topics/{name}")
        with open(topics.toml_path(self.data, name), "wb") as file:
            file.write(topics.Declaration(1, from_seq).text())


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def takes(catalog, *keys):
    return catalog.takes(b"".join(TEXT % key for key in keys), 1)


def test_messages_make_topics_up_to_the_limit_and_then_only_known_ones_pass(world):
    catalog = world.catalog(most=3)  # dead is one of them
    assert takes(catalog, b"a", b"b.key")
    assert not takes(catalog, b"a", b"c")
    assert catalog.refusal(b"c|0|1|x", 3) == "too_many_topics"
    assert takes(catalog, b"a.1", b"b", b"dead.malformed")
    assert catalog.refusal(b"b|0|1|x", 3) == ""


def test_what_the_kafka_door_holds_back_is_taken_as_a_whole_and_nobody_else_may_send_it(world):
    world.make("__transactions")
    catalog, door = world.catalog(), b"k1000000.1.0"
    held = b"__transactions.@0.1-0-1||%%d;p=%b|t.@0|1.5|;a=b|x\n" % door
    for turn in range(2):  # what was taken once is looked for first
        assert catalog.takes(b"".join(held % id for id in range(9)), 1 + 9 * turn, door)
        assert not catalog.takes(held % 1, 1)
        assert not catalog.takes(held.replace(b"__transactions", b"__append") % 1, 1, door)


def batch_of(catalog, *parts):
    """What the framer makes of these parts."""
    way = Way()
    source = source_of(way)
    return parser.Parser(8192, DedupeTable(9, 9, 9, 9, 9), source, SMALL, catalog).batch(way.text(*parts), 1, 0)


def test_a_block_that_would_pass_the_limit_is_let_through_up_to_it(world):
    catalog = world.catalog(most=3)
    batch = batch_of(catalog, TEXT % b"a" + TEXT % b"b" + TEXT % b"c")
    assert batch.lines[:2] == [b"a|0|1|x", b"b|0|1|x"]
    assert batch.lines[2] == b"dead.malformed||;reason=too_many_topics;len=7|c|0|1|x"


def test_without_creation_only_declared_topics_pass_as_soon_as_they_are_there(world):
    catalog = world.catalog(may_create=False)
    assert catalog.refusal(b"a.k|0|1|x", 1) == "unknown_topic"
    topics.declare(world.data, "a", 4)
    assert catalog.refusal(b"a.k|0|1|x", 1) == ""
    assert takes(catalog, b"a.k")
    assert catalog.refusal(b"dead|0|1|x", 1) == ""


def test_a_topic_with_a_dot_passes_once_in_force_and_its_first_label_never_does(world):
    world.make("a.b", from_seq=7)
    topics.declare(world.data, "a.c", 1)
    catalog = world.catalog(may_create=False)
    assert not catalog.takes(TEXT % b"a.b.key", 6), "it would be routed to topic a"
    assert catalog.takes(TEXT % b"a.b.key", 7)
    assert not catalog.takes(TEXT % b"a.c.key", 7)
    assert [catalog.refusal(key + b"|0|1|x", 7) for key in (b"a.b", b"a.c", b"a")] == [
        "",
        "unknown_topic",
        "unknown_topic",
    ]


def test_an_accepted_name_counts_until_the_router_is_past_it_without_making_it(world):
    catalog = world.catalog(most=2)
    assert catalog.refusal(b"a|0|1|x", 5) == ""
    assert world.catalog(most=2).refusal(b"b|0|1|x", 6) == ""
    assert catalog.refusal(b"b|0|1|x", 6) == "too_many_topics"
    world.routed = 5  # drop_oldest took it
    until(lambda: catalog.refusal(b"b|0|1|x", 6) == "", "the next listing")


def test_what_is_numbered_and_not_routed_counts_after_a_restart(world):
    catalog = world.catalog(most=3)
    catalog.absorb(b"1|1.000000|a.k|0|1|x\n2|1.000000|b|0|1|x\n")
    assert not takes(catalog, b"c") and takes(catalog, b"b", b"a")


@pytest.mark.parametrize("count", [1, 5, 32, 33, 100])
def test_a_block_is_judged_the_same_with_many_names_and_with_few(world, count):
    catalog = world.catalog(most=count + 1)
    names = [b"topic%d" % number for number in range(count)]
    for _ in range(3):
        assert takes(catalog, *names, *(name + b".k" for name in names))
        assert not takes(catalog, *names, b"another")
        assert not takes(catalog, *names, b"topic")
        assert not catalog.takes(TEXT % b"topic0" + b"topic0\n", 1)


def test_an_acked_message_of_a_topic_too_many_is_refused_and_the_rest_is_stored(world):
    catalog = world.catalog(most=2)
    lines = [b"a|0|1|x", b"b|0|2|x", b"a|0|3|x"]
    batch = batch_of(catalog, messages(lines, 1, b"p=me", b"1.1"))
    assert batch.lines == [b"a|0|1;p=me|x", b"a|0|3;p=me|x"]
    assert blocks.encode_replies(batch.replies, 0, 1) == (
        b"1.1 1 !ack 1 1\n1.1 2 !err 2 too_many_topics\n1.1 3 !ack 3 2\n"
    )


def test_shapes_of_some_topics_match_what_the_shape_of_any_does():
    shape = record.Shape((rb"(?:a|ab\.c)(?=[.|])", b""))
    good = b"a|0|1|x\nab.c|0|1|x\na.k|0|1|x|y\n"
    assert shape.prefix(good) == len(good)
    assert shape.prefix(b"a|0|1|x\nab|0|1|x\n") == len(b"a|0|1|x\n")
    assert shape.prefix(b"a|0|1|\0\n") == 0


# --- marks -----------------------------------------------------------------------------------------------------------


def test_a_mark_names_its_topic_exactly_and_that_is_in_force_from_its_message_on(world):
    catalog = world.catalog(most=3)
    assert not takes(catalog, b"jobs.eu.@.k", b"jobs.eu.x"), "line by line where a topic comes"
    assert catalog.refusal(b"jobs.eu.@.k|0|1|x", 7) == ""
    assert catalog.takes(TEXT % b"jobs.eu.@.k" + TEXT % b"jobs.eu.x", 8)
    assert b"jobs" not in catalog.names
    assert catalog.refusal(b"a|0|1|x", 9) == ""
    assert [catalog.refusal(key + b"|0|1|x", 10) for key in (b"b.@.k", b"c.d.@", b"jobs.k", b"jobs.eu.k")] == [
        *["too_many_topics"] * 3,
        "",
    ]


def test_without_creation_a_mark_may_name_a_declared_topic_that_is_not_in_force_yet(world):
    topics.declare(world.data, "a.b", 2)
    catalog = world.catalog(may_create=False)
    assert catalog.refusal(b"a.b.k|0|1|x", 1) == "unknown_topic"
    assert [catalog.refusal(key + b"|0|1|x", 2) for key in (b"a.b.@1", b"a.@", b"a.b.@2", b"a.c.@0")] == [
        "",
        "unknown_topic",
        "unknown_partition",
        "unknown_topic",
    ]
    assert catalog.takes(TEXT % b"a.b.@1.k", 3) and not catalog.takes(TEXT % b"a.b.@2.k", 3)


def test_a_partition_must_be_there(world):
    topics.declare(world.data, "wide", 4)
    catalog = world.catalog(most=9)
    assert takes(catalog, b"wide.@3", b"wide.@0.k", b"wide.@", b"wide.@.k")
    odd = [b"wide.@4", b"wide.@" + b"9" * 5000, b"wide.@0000000000000000001"]
    assert not any(takes(catalog, b"wide.@3", key) for key in odd)
    assert {catalog.refusal(key + b"|0|1|x", 5) for key in [*odd, b"new.@1.k"]} == {"unknown_partition"}
    assert catalog.refusal(b"new.@0.k|0|1|x", 6) == ""
    topics.make(world.data, "wide", topics.Declaration(6, 1, None, [(5, 4)]))
    assert takes(catalog, b"wide.@5") and not takes(catalog, b"wide.@6")


@pytest.mark.parametrize("key", [b"t.\xc3\xbc.@.k", b"t./../x.@1", b"t" * 201 + b".@", b"t.@x.@.k", b"t.k .@"])
def test_a_mark_behind_what_is_no_topic_is_refused_and_no_line_beside_it(world, key):
    catalog = world.catalog()
    assert not takes(catalog, b"t.@.k", key) and record.refusal(key + b"|0|1|x") == "bad_topic"
    batch = batch_of(catalog, TEXT % b"t.@.k" + TEXT % key)
    assert batch.lines == [b"t.@.k|0|1|x", record.malformed("bad_topic", (TEXT % key)[:-1], len(TEXT % key) - 1, 8192)]


@pytest.mark.parametrize("key", [b"append.@.k", b"dropped.x.@", b"__t.@1"])
def test_a_mark_names_nothing_that_is_reserved(key):
    assert record.refusal(key + b"|0|1|x") == "reserved_topic"


def test_the_quick_way_through_a_block_takes_nothing_that_the_slow_one_refuses(world, monkeypatch):
    topics.declare(world.data, "wide", 4)
    world.make("a.b")
    keys = b"wide.@3 wide.@.k wide.k wide wide.@0. a.b.@ a.b.@.k a.b.k t.@.a@b t.@.k.@9 t.@0".split()
    odd = b"wide.@4 wide.@4.k wide.@33 a.b.@1 t.@1.k wide.k.@1 t.x.@ wide.\xff.@ wide.@x.@".split()
    catalog, fresh = world.catalog(most=9), world.catalog(most=9)
    assert catalog.refusal(b"t|0|1|x", 1) == fresh.refusal(b"t|0|1|x", 1) == ""
    assert all(takes(catalog, key) for key in keys * 200), "until all of them are in the pattern"
    with monkeypatch.context() as patched:
        patched.delattr(record, "good_prefix")  # with which the slow way begins
        assert takes(catalog, keys[0])
    for key in odd:
        assert not catalog.takes(b"".join(TEXT % each for each in (*keys, key)), 1), key
    for key in (b"t.a@b", b"t.@x", b"t.b.c@.d"):  # no mark
        assert takes(catalog, *keys, key) and takes(fresh, key)
