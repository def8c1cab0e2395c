"""Routing: a pure function of the stored line and of the table in force at its seq."""

import time
import zlib

import pytest

from kmq.routing import DELETED, Topic, resolve

TABLE = {name.encode(): Topic(name, 1, at) for name, at in {"a": 1, "a.b": 10, "a.b.c": 20, "x.y.z": 1}.items()}


@pytest.mark.parametrize(
    ("routing_key", "seq", "topic", "key"),
    [
        (b"a", 1, b"a", b""),
        (b"a.k", 1, b"a", b"k"),
        (b"a.", 1, b"a", b""),
        (b"a.b", 9, b"a", b"b"),
        (b"a.b", 10, b"a.b", b""),
        (b"a.b.k", 9, b"a", b"b.k"),
        (b"a.b.k", 10, b"a.b", b"k"),
        (b"a.bb.k", 10, b"a", b"bb.k"),
        (b"a.b.c.d.e", 19, b"a.b", b"c.d.e"),
        (b"a.b.c.d.e", 20, b"a.b.c", b"d.e"),
        (b"x.y.k", 1, b"x", b"y.k"),
        (b"x.y.z.k", 1, b"x.y.z", b"k"),
        (b"new", 1, b"new", b""),
        (b"new.k.l", 1, b"new", b"k.l"),
        (b"new..l", 1, b"new", b".l"),
    ],
)
def test_the_longest_topic_in_force_wins(routing_key, seq, topic, key):
    assert resolve(TABLE, routing_key, seq) == (topic, key)


def test_a_topic_of_the_longest_name_is_still_found_under_a_long_key():
    name = "a." + "b" * 198
    table = {name.encode(): Topic(name, 1, 1)}
    assert resolve(table, name.encode() + b"." + b"k." * 1000, 1) == (name.encode(), b"k." * 1000)
    assert resolve({}, b"A" * 200 + b"." + b"k" * 1000, 1) == (b"A" * 200, b"k" * 1000)


def test_a_routing_key_of_a_megabyte_of_dots_does_not_hold_up_the_router():
    began = time.process_time()
    assert resolve(TABLE, b"a" + b"." * (1 << 20), 1)[0] == b"a"
    assert time.process_time() - began < 0.5


def test_the_same_key_always_goes_to_the_same_partition():
    topic = Topic("t", 5, 1)
    for key in (b"a", b"b", b"\xff" * 99):
        assert {topic.partition_of(key, seq) for seq in range(50)} == {zlib.crc32(key) % 5}


def test_messages_without_a_key_are_spread_evenly_by_seq():
    topic = Topic("t", 4, 1)
    assert [topic.partition_of(b"", seq) for seq in range(100, 108)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_symlinks_of_one_and_of_many_partitions():
    assert Topic("t", 1, 1).log_names() == ["t.log"]
    assert Topic("t", 3, 1).log_names() == ["t-0.log", "t-1.log", "t-2.log"]


def test_a_deleted_topic_has_no_records_and_leaves_those_between_its_lives_to_the_shorter_name():
    table = {
        b"a": Topic("a", 1, 1),
        b"a.b": Topic("a.b", 1, 40, [(10, 19), (25, 29)]),
        b"gone": Topic.gone("gone", [(1, 30)]),
        b"a.gone": Topic.gone("a.gone", [(5, 30)]),
    }
    names = {seq: resolve(table, b"a.b.k", seq)[0] for seq in (9, 10, 19, 20, 24, 25, 29, 30, 39, 40)}
    deleted = dict.fromkeys((10, 19, 25, 29), DELETED)
    assert names == dict.fromkeys((9, 20, 24, 30, 39), b"a") | deleted | {40: b"a.b"}
    assert [resolve(table, b"gone.k", seq)[0] for seq in (1, 30, 31)] == [DELETED, DELETED, b"gone"]
    assert [resolve(table, b"a.gone.k", seq)[0] for seq in (4, 5, 30, 31)] == [b"a", DELETED, DELETED, b"a"]
