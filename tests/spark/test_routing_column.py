"""The router and the columns agree on every routing key, whatever the table."""

import random
import string
import time

import pytest

from kmq.message import record
from kmq.message.routing import MURMUR2, Route, Table, Topic, resolve
from kmq.spark.sink.routing import Routing

ALPHABET = [bytes([byte]) for byte in b"ab-_9"]
TAILS = [b"", b".", b"..", b".\xff\xfe", b".k.\xc3", "·ü日".encode(), b"." + b"x" * 300, b"." * 5000, b".a;b %2E\t"]
MARKS = [
    "@",
    "@.",
    "@3",
    "@3.",
    "@3.k",
    "@.k.l",
    "@x",
    "@3x",
    "@.b.@.c",
    "b.@.k",
    "k@.k",
    "@\r",
    "@.k\u0085",
    "@x.@.k",
    "@003",
]
MARKS += ["@" + "9" * 30, "@1000000007.k", "@00000000000000000003", "@" + "." * 5000]
TAILS += [b"." + mark.encode() for mark in MARKS] + [b".@.\xff", b"@.k"]
TAILS += [b"." + key for key in b"a ab abc abcd abcde %41 %4a%C3%bc %4 %% %%41 %zz k%2E%25%32 \xff%ff%00x".split()]


def agree(spark, tables, rows):
    """`rows`: (broker, routing key, seq), each a key that the broker takes."""
    is_own = [record.refusal(key + b"|", reserved=True) == "" for _, key, _ in rows]
    assert all(own or record.good_prefix(key + b"|||\n") for own, (_, key, _) in zip(is_own, rows, strict=True))
    routing = Routing(tables)
    frame = spark.createDataFrame(rows, "broker string, routing_key binary, seq bigint")
    asked = ("routing_key", "seq")
    said = frame.select(routing.topic(*asked), routing.key(*asked), routing.partition(*asked)).collect()
    wrong = []
    for (broker, routing_key, seq), got in zip(rows, said, strict=True):
        table = tables.get(broker) or next(iter(tables.values()))
        route = resolve(table, routing_key, seq)
        partition = table.get(route.topic, Topic("", 1, seq)).partition_of(route, seq)
        if (got[0], got[1], got[2]) != (route.topic.decode(), route.key, partition):
            wrong.append((broker, routing_key, seq, (route, partition), tuple(got)))
    assert wrong == []


def table(*rows, marks_from=0):
    return Table(
        ((name.encode(), Topic(name, partitions, from_seq)) for name, partitions, from_seq in rows), marks_from
    )


def names(rng, count):
    """Topics that share their beginnings."""
    made = {b"a"}
    while len(made) < count:
        longer = rng.choice(sorted(made)) + rng.choice([b".", b"", b".."]) + rng.choice(ALPHABET)
        name = longer if rng.random() < 0.8 else rng.choice(ALPHABET[:2]) * rng.randint(1, 3)
        if record.is_topic(name.decode()):
            made.add(name)
    return sorted(made)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_router_and_columns_agree_on_random_tables_and_keys(spark, seed):
    rng = random.Random(seed)
    tables, rows = {}, []
    for broker in ("one", "two", "three")[: 1 + seed % 3]:
        declared = names(rng, 40)
        tables[broker] = table(
            *((name.decode(), rng.choice([1, 1, 3, 16, 1024]), rng.choice([1, 50, 500])) for name in declared[::2]),
            marks_from=rng.choice([0, 1, 300]),
        )
        for number, topic in enumerate(tables[broker].values()):
            if topic.partitions > 3:
                topic.grown = [(60, 1), (400, 7)][: number % 3]
        for topic in list(tables[broker].values())[1::2]:
            topic.partitioner = MURMUR2
        if seed % 2:  # some were deleted, once or twice, before they were in force again or for good
            for name, topic in list(tables[broker].items())[::3]:
                topic.lives = [(1, 20), (30, 40)][: rng.randint(1, 2)]
                topic.from_seq = max(topic.from_seq, 45)
                if rng.random() < 0.5:
                    tables[broker][name] = Topic.gone(topic.name, topic.lives)
            rows += [(broker, name, seq) for name in declared for seq in (19, 20, 21, 29, 30, 40, 41, 44, 45, 50)]
        for name in declared:  # half of them are not in the table
            rows += [(broker, name + tail, rng.randint(1, 1000)) for tail in TAILS]
            some = b"".join(rng.choices([*ALPHABET, b".", b"\xff"], k=rng.randint(1, 12)))
            some = some.replace(b"9", rng.choice([b"9", b".@", b".@."]))
            rows.append((broker, name + some, rng.choice([1, 49, 50, 51, 499, 500, (1 << 53) + 1, (1 << 63) - 1])))
    agree(spark, tables, [row for row in rows if record.good_prefix(row[1] + b"|||\n")])


def test_router_and_columns_agree_at_the_longest_names(spark):
    longest, odd = "a." + "b" * 198, "a" * 199 + "."
    deep = ".".join("ab" * 50)  # a hundred labels
    keys = [longest, f"{longest}.k", longest + "b.k", longest[:-1] + ".k", "a" * 200, "a" * 200 + ".k", odd, f"{odd}.k"]
    keys += [deep, f"{deep}.k", deep[:-1] + "x.k", deep[:-2], "a" + "." * 100_000]
    rows = [("one", key.encode(), seq) for key in keys for seq in (1, 9, 10)]
    agree(spark, {"one": table((longest, 4, 10), (odd, 5, 1), (deep, 6, 1), ("a", 7, 1))}, rows)


def test_router_and_columns_agree_on_topics_of_kmq_itself(spark):
    heads = [b"__consumer_offsets", b"__consumer_offsets.@", b"__consumer_offsets.@0", b"__other"]
    keys = [head + tail for head in heads for tail in (b"", b".", b".g.t.0", b".g%2Ex.t.0.17", b".@.g")]
    tables = {
        "one": table(("__consumer_offsets", 1, 5), ("orders", 4, 1)),
        "two": table(("orders", 4, 1), marks_from=7),
    }
    agree(spark, tables, [(broker, key, seq) for broker in tables for key in keys for seq in (1, 5, 9)])


def test_keyless_messages_spread_by_seq_and_an_undeclared_topic_has_one_partition(spark):
    seqs = [*range(1, 20), 63, 64, 127, 128, 6399, 6400]
    rows = [("one", key, seq) for key in (b"t", b"t.", b"u", b"new", b"new.k", b"t.k") for seq in seqs]
    topics = table(("t", 4, 1), ("u", 4, 1), ("one-partition", 1, 1))
    topics[b"u"].partitioner = MURMUR2
    agree(spark, {"one": topics}, rows)
    agree(spark, {"one": Table()}, rows)


def test_a_table_of_ten_thousand_topics_costs_what_one_of_ten_costs(spark):
    big = table(*((f"{letter}{number}.sub", 3, 1) for number in range(2500) for letter in string.ascii_lowercase[:4]))
    small = Table(list(big.items())[:10])
    frame = spark.range(400_000).selectExpr(
        "cast(concat('a', id % 2600, '.sub.k', id) as binary) routing_key", "id + 1 seq"
    )

    def seconds(routing):
        best = 1e9
        for _ in range(3):
            began = time.perf_counter()
            frame.select(routing.partition("routing_key", "seq")).write.format("noop").mode("overwrite").save()
            best = min(best, time.perf_counter() - began)
        return best

    assert (
        seconds(Routing({"one": big})) < 5 * seconds(Routing({"one": small})) + 2
    )  # looked through, it is hundreds of times
    agree(spark, {"one": big}, [("one", name + b".k", 7) for name in list(big)[::50]])


def test_text_columns_do_as_well(spark):
    routing = Routing({"one": table(("a.b", 5, 1))})
    frame = spark.createDataFrame([("a.b.ü", 1)], "routing_key string, seq bigint")
    asked = ("routing_key", "seq")
    got = frame.select(routing.topic(*asked), routing.key(*asked), routing.partition(*asked)).first()
    assert got[0] == "a.b" and bytes(got[1]) == "ü".encode()
    assert got[2] == Topic("a.b", 5, 1).partition_of(Route(b"a.b", "ü".encode()), 1)
