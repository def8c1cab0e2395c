"""Routing: a pure function of the stored line and of the table in force at its seq."""

import time
import zlib

import pytest

from kmq.message.routing import DELETED, Route, Table, Topic, exact, key_behind, resolve

TABLE = Table(
    {name.encode(): Topic(name, 1, at) for name, at in {"a": 1, "a.b": 10, "a.b.c": 20, "x.y.z": 1}.items()},
    marks_from=5,
)


@pytest.mark.parametrize(
    ("routing_key", "seq", "topic", "key"),
    [
        (b"a", 1, b"a", None),
        (b"a.k", 1, b"a", b"k"),
        (b"a.", 1, b"a", None),
        (b"a.b", 9, b"a", b"b"),
        (b"a.b", 10, b"a.b", None),
        (b"a.b.k", 9, b"a", b"b.k"),
        (b"a.b.k", 10, b"a.b", b"k"),
        (b"a.bb.k", 10, b"a", b"bb.k"),
        (b"a.b.c.d.e", 19, b"a.b", b"c.d.e"),
        (b"a.b.c.d.e", 20, b"a.b.c", b"d.e"),
        (b"x.y.k", 1, b"x", b"y.k"),
        (b"x.y.z.k", 1, b"x.y.z", b"k"),
        (b"new", 1, b"new", None),
        (b"new.k.l", 1, b"new", b"k.l"),
        (b"new..l", 1, b"new", b".l"),
    ],
)
def test_the_longest_topic_in_force_wins(routing_key, seq, topic, key):
    assert resolve(TABLE, routing_key, seq) == (topic, key, None)


def test_a_topic_of_the_longest_name_is_still_found_under_a_long_key():
    name = "a." + "b" * 198
    table = Table({name.encode(): Topic(name, 1, 1)})
    assert resolve(table, name.encode() + b"." + b"k." * 1000, 1) == (name.encode(), b"k." * 1000, None)
    assert resolve(Table(), b"A" * 200 + b"." + b"k" * 1000, 1) == (b"A" * 200, b"k" * 1000, None)


def test_a_routing_key_of_a_megabyte_of_dots_does_not_hold_up_the_router():
    began = time.process_time()
    assert resolve(TABLE, b"a" + b"." * (1 << 20), 1)[0] == b"a"
    assert time.process_time() - began < 0.5


def test_the_same_key_always_goes_to_the_same_partition():
    topic = Topic("t", 5, 1)
    for key in (b"a", b"b", b"\xff" * 99):
        assert {topic.partition_of(Route(b"t", key), seq) for seq in range(50)} == {zlib.crc32(key) % 5}


def test_messages_without_a_key_are_spread_evenly_by_seq():
    topic = Topic("t", 4, 1)
    assert [topic.partition_of(Route(b"t", None), seq) for seq in range(100, 108)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_symlinks_of_one_and_of_many_partitions():
    assert Topic("t", 1, 1).log_names() == ["t.log"]
    assert Topic("t", 3, 1).log_names() == ["t-0.log", "t-1.log", "t-2.log"]


MARKS = [
    (b"a.@", (b"a", None, None)),
    (b"a.@.", (b"a", b"", None)),
    (b"a.@3", (b"a", None, 3)),
    (b"a.@3.", (b"a", b"", 3)),
    (b"a.@003.k", (b"a", b"k", 3)),
    (b"a.@.k.l", (b"a", b"k.l", None)),
    (b"a.@x", (b"a", b"@x", None)),
    (b"a.@3x", (b"a", b"@3x", None)),
    (b"a.@x.@.k", (b"a", b"@x.@.k", None)),  # behind what is no topic's name; no such line is taken any more
    (b"a.b.@.k", (b"a.b", b"k", None)),
    (b"n.e.w.@7.k", (b"n.e.w", b"k", 7)),
    (b"a.@.b.@.c", (b"a", b"b.@.c", None)),
    (b"a..@.k", (b"a.", b"k", None)),
    (b"a.b@.k", (b"a", b"b@.k", None)),
    (b"a.k.@1\r", (b"a", b"k.@1\r", None)),
    (b"a.@.k\r", (b"a", b"k\r", None)),
    (b"a.@" + b"9" * 5000, (b"a", None, 10**9)),
    (b"a." + b"x" * 200 + b".@.k", (b"a", b"x" * 200 + b".@.k", None)),  # too long for a name
]


@pytest.mark.parametrize(("routing_key", "route"), MARKS)
def test_the_first_mark_says_topic_partition_and_key(routing_key, route):
    assert resolve(TABLE, routing_key, 9) == route
    if route[0] in routing_key and len(route[0]) < 200:
        assert key_behind(route[0], routing_key) == route[1]


def test_a_record_that_was_stored_before_there_were_marks_stays_where_it_is():
    assert resolve(TABLE, b"a.@3.k", 4) == (b"a", b"@3.k", None)
    assert resolve(TABLE, b"a.@3.k", 5) == (b"a", b"k", 3)
    assert key_behind(b"a", b"a.@3.k", has_marks=False) == b"@3.k"


def test_a_mark_says_the_same_key_as_none():
    for key in (b"eu", b"a.b", b"@3", b"@", b".", b"\xff"):
        assert resolve(TABLE, exact(b"a", key), 9) == resolve(TABLE, b"a." + key, 4) == (b"a", key, None)
    assert (exact(b"a", None), exact(b"a.b", None), exact(b"a", b"")) == (b"a", b"a.b.@", b"a.@.")


def test_a_partition_that_was_asked_for_goes_before_the_key_and_an_empty_key_is_one():
    topic = Topic("t", 4, 1)
    table = Table({b"t": topic})
    places = {
        key: [topic.partition_of(resolve(table, key, seq), seq) for seq in range(4)] for key in (b"t.@2", b"t.@2.k")
    }
    assert set(map(tuple, places.values())) == {(2, 2, 2, 2)}
    assert [topic.partition_of(resolve(table, b"t.@", seq), seq) for seq in range(4)] == [0, 1, 2, 3]
    assert [topic.partition_of(resolve(table, b"t.", seq), seq) for seq in range(4)] == [0, 1, 2, 3]
    assert [topic.partition_of(resolve(table, b"t.@.", seq), seq) for seq in range(4)] == [0, 0, 0, 0]
    assert topic.partition_of(resolve(table, b"t.@7", 1), 1) == 3, "a line that is in the WAL has a place"


def test_a_deleted_topic_has_no_records_and_the_shorter_name_those_between_lives():
    topics = [
        Topic("a", 1, 1),
        Topic("a.b", 1, 40, [(10, 19), (25, 29)]),
        Topic.gone("gone", [(1, 30)]),
        Topic.gone("a.gone", [(5, 30)]),
    ]
    table = Table({topic.name.encode(): topic for topic in topics})
    names = {seq: resolve(table, b"a.b.k", seq)[0] for seq in (9, 10, 19, 20, 24, 25, 29, 30, 39, 40)}
    deleted = dict.fromkeys((10, 19, 25, 29), DELETED)
    assert names == dict.fromkeys((9, 20, 24, 30, 39), b"a") | deleted | {40: b"a.b"}
    assert [resolve(table, b"gone.k", seq)[0] for seq in (1, 30, 31)] == [DELETED, DELETED, b"gone"]
    assert [resolve(table, b"a.gone.k", seq)[0] for seq in (4, 5, 30, 31)] == [b"a", DELETED, DELETED, b"a"]
    assert [resolve(table, b"a.gone.@.k", seq)[0] for seq in (5, 30, 31)] == [DELETED, DELETED, b"a.gone"]
