"""What has been stored already: the table alone, its file, and the table that a killed framer finds again."""

import errno
import random
import time
from array import array
from binascii import b2a_base64
from collections import OrderedDict
from itertools import pairwise

import pytest
from framing_steps import MAX, P, Steps, W, mine, one_by_one, random_traffic, randomly, table
from received_ends import messages
from waiting import until

import kmq.message.ids
from kmq.errors import RetryError
from kmq.framing import dedupe
from kmq.framing.blocks import ANY_TOPIC, LineBatch
from kmq.framing.dedupe import Acceptor, DedupeSaver, DedupeTable
from kmq.log import dedupe_file
from kmq.message import ids
from kmq.message.ids import NEW, PRINTS, TOO_OLD, KnownProducer
from kmq.message.record import fingerprint
from kmq.message.routing import AnyTopic

NOW = 1_700_000_000
FORGOTTEN = 0  # stored, but nobody knows as which seq


def state(known):
    """Everything a table knows, to be compared."""
    names = {
        name: (
            p.last_id,
            p.seconds,
            list(zip(p.firsts, p.lasts, strict=True)),
            list(zip(p.ids, p.seqs, p.counts, strict=True)),
        )
        for name, p in known.names.items()
    } | {b"prints": [list(p.prints[-PRINTS:]) for p in known.names.values()]}
    assert known.prints == sum(len(p.prints) for p in known.names.values())
    return names, list(known.window.ids.items()), known.runs


NOTHING = {b"prints": []}, [], 0


def with_runs(*runs):
    """A producer that stored (first id, seq, count)…"""
    producer = KnownProducer()
    for run in runs:
        producer.add(*run)
    return producer


# --- increasing ids ----------------------------------------------------------------------------------------------------

RUNS = (3, 101, 3), (8, 104, 1), (9, 110, 2)


@pytest.mark.parametrize(
    ("id", "found"),
    [
        (0, TOO_OLD),
        (2, TOO_OLD),
        (3, 101),
        (5, 103),
        (6, TOO_OLD),
        (7, TOO_OLD),
        (8, 104),
        (9, 110),
        (10, 111),
        (11, NEW),
        (10**18, NEW),
    ],
)
def test_an_id_is_found_as_its_seq_or_as_one_that_was_passed_over_or_is_new(id, found):
    assert with_runs(*RUNS).find(id) == found


def test_a_producer_that_stored_nothing_knows_nothing():
    assert KnownProducer().find(0) == KnownProducer().find(7) == NEW


@pytest.mark.parametrize(
    ("keep", "went", "answers"),
    [
        (3, 0, {0: TOO_OLD, 3: 101, 7: TOO_OLD, 8: 104, 9: 110}),
        (2, 1, {0: TOO_OLD, 3: FORGOTTEN, 5: FORGOTTEN, 6: TOO_OLD, 7: TOO_OLD, 8: 104, 9: 110, 11: NEW}),
        (1, 2, {3: FORGOTTEN, 6: TOO_OLD, 8: FORGOTTEN, 9: 110, 10: 111, 11: NEW}),
    ],
)
def test_what_is_trimmed_is_still_known_to_be_stored(keep, went, answers):
    """And what was passed over is not: its producer must hear that it is lost."""
    producer = with_runs(*RUNS)
    assert producer.trim(keep) == went
    assert {id: producer.find(id) for id in answers} == answers


def test_ids_that_follow_one_another_stay_known_however_many_runs_are_forgotten(monkeypatch):
    """As when many producers take turns: the client that sends again what had no reply must not hear that it is too old."""
    producer = KnownProducer()
    for id in range(5000):
        producer.add(id, 3 * id + 1, 1)
        producer.trim(8)
    assert (len(producer.ids), list(producer.firsts), list(producer.lasts)) == (8, [0], [4991])
    assert [producer.find(id) for id in (0, 2500, 4991, 4992, 5000)] == [0, 0, 0, 3 * 4992 + 1, NEW]
    monkeypatch.setattr(kmq.message.ids, "_RANGES", 1000)
    for id in range(5001, 15_000, 2):
        producer.add(id, 3 * id + 1, 1)
        producer.trim(8)
    assert len(producer.firsts) == len(producer.lasts) == 1000
    assert [producer.find(id) for id in (2500, 14_000, 14_001, 13_999)] == [TOO_OLD, TOO_OLD, 0, 0]


def test_ranges_are_bounded_in_all_and_idle_names_lose_theirs_first(monkeypatch):
    monkeypatch.setattr(dedupe, "MAX_RANGES", 1000)
    known = table(count=50, producers=200)
    for n in range(200):
        for id in range(0, 60, 2):
            known.remember(known.producer(b"%d" % n, n), id, 100 * id + 1, 1, n)
        assert known.ranges == sum(len(p.firsts) for p in known.names.values()) <= 1000
    found = [known.names[b"%d" % n].find(0) for n in range(200)]
    assert found[-1] == FORGOTTEN and TOO_OLD in found and found == sorted(found, key=lambda seq: seq == FORGOTTEN)


def test_the_content_of_the_last_ids_is_remembered():
    rng, producer, stored, id, seq = random.Random(2), KnownProducer(), [], 0, 0
    while len(stored) < 3 * PRINTS:
        id, seq, count = id + rng.choice([1, 1, 2]), seq + rng.choice([1, 1, 5]), rng.choice([1, 40])
        prints = [rng.randrange(1, 1 << 32) for _ in range(count)]
        producer.add(id, seq, count, prints)
        stored += enumerate(prints, id)
        id, seq = id + count - 1, seq + count - 1
    stored, forgotten = dict(stored[-PRINTS:]), stored[:-PRINTS]
    assert all(producer.print_of(number) == print for number, print in stored.items())
    assert not any(producer.print_of(number) for number, _ in forgotten)
    assert len(producer.prints) < 2 * PRINTS
    producer.trim(3)
    known = [number for number in stored if producer.find(number) > 0]
    assert known and all(producer.print_of(number) == stored[number] for number in known)
    assert not any(producer.print_of(number) for number in stored if producer.find(number) == 0)
    producer.add(id + 1, seq + 1, 1)  # nobody knows what that was
    assert not any(producer.print_of(number) for number in (*known, id + 1))


def test_fingerprints_are_bounded_in_all_and_idle_names_lose_theirs_first(monkeypatch):
    monkeypatch.setattr(dedupe, "MAX_PRINTS", 1000)
    known = table()
    for n in range(100):
        for name in (b"%d" % n, b"busy"):
            known.remember(known.producer(name, n), 20 * n, 1, 20, n, range(1, 21))
        assert known.prints == sum(len(p.prints) for p in known.names.values()) <= 1000
    assert known.names[b"99"].print_of(20 * 99) == known.names[b"busy"].print_of(20 * 99) == 1
    assert not known.names[b"0"].prints


def test_ids_and_seqs_that_follow_one_another_are_one_run():
    assert with_runs((1, 11, 2), (3, 13, 1)).ids == [1]
    assert with_runs((1, 11, 2), (4, 13, 1)).ids == [1, 4]  # an id was left out
    assert with_runs((1, 11, 2), (3, 14, 1)).ids == [1, 3]  # another's message came between


def test_every_id_of_a_random_history_is_found():
    rng = random.Random(1)
    for _ in range(200):
        producer, stored, id, seq = KnownProducer(), {}, -1, 0
        for _ in range(60):
            id += rng.choice([1, 1, 1, 2, 7])
            seq += rng.choice([1, 1, 1, 3])
            count = rng.choice([1, 1, 5])
            producer.add(id, seq, count)
            stored |= {id + n: seq + n for n in range(count)}
            id, seq = id + count - 1, seq + count - 1
        for number in range(id + 2):
            assert producer.find(number) == stored.get(number, TOO_OLD if number <= id else NEW)


def test_ids_that_are_stored_anew_are_found_by_their_new_seqs_and_all_others_as_before():
    """Whatever is trimmed between: an id whose seq is forgotten was stored at most as `most_forgotten` says."""
    rng = random.Random(5)
    for _ in range(150):
        producer, stored, id, seq = KnownProducer(), {}, -1, 0
        for _ in range(80):
            seq += rng.choice([1, 1, 3])
            if stored and rng.random() < 0.4:
                first = rng.choice([*stored])
                for number in range(first, min(first + rng.choice([1, 1, 5, 30]), id + 1)):
                    if number in stored:
                        print = rng.randrange(1, 1 << 32)
                        producer.renew(number, seq, print)
                        stored[number] = seq, print
                        seq += 1
            else:
                id += rng.choice([1, 1, 2, 7])
                count = rng.choice([1, 1, 5])
                prints = [rng.randrange(1, 1 << 32) for _ in range(count)]
                producer.add(id, seq, count, prints)
                stored |= {id + n: (seq + n, prints[n]) for n in range(count)}
                id, seq = id + count - 1, seq + count
            if rng.random() < 0.2:
                producer.trim(rng.choice([2, 5, 9]))
        assert producer.ids == sorted(producer.ids) and [*producer.firsts] == sorted(producer.firsts)
        for number in range(id + 2):
            found = producer.find(number)
            if number not in stored:
                assert found == (TOO_OLD if number <= id else NEW)
            elif found == FORGOTTEN:
                assert stored[number][0] <= producer.most_forgotten() and not producer.print_of(number)
            else:
                assert (found, producer.print_of(number)) == stored[number]


def test_runs_are_bounded_for_each_and_for_all_together(monkeypatch):
    monkeypatch.setattr(dedupe, "_RUNS", 32)
    known = table(count=200)
    for id in range(0, 4000, 2):  # no two of them follow one another
        for name in range(40):
            known.remember(known.producer(b"%d" % name, 0), id, 1 + id * 40 + name, 1, 0)
            assert known.runs <= 200 + 40 * dedupe.MIN_RUNS
        assert max(len(p.ids) for p in known.names.values()) <= 33
    assert known.runs == sum(len(p.ids) for p in known.names.values())
    assert all(p.find(p.last_id) > 0 and p.find(0) in (FORGOTTEN, TOO_OLD) for p in known.names.values())


def test_a_full_table_takes_a_new_name_once_an_idle_one_is_forgotten():
    known = table(producers=2, ttl=100)
    for name, seconds in ((b"a", 1000), (b"b", 1050)):
        known.remember(known.producer(name, seconds), 1, 1, 1, seconds)
    assert known.producer(b"c", 1100) is None  # a has been idle for just the time to live
    assert known.producer(b"c", 1101) is not None
    assert set(known.names) == {b"b", b"c"}
    assert known.runs == 1


def test_generated_names_are_evicted_from_a_full_table_and_only_there():
    known = table(producers=3, ttl=100_000)
    for name, seconds in ((b"auto-1", 1000), (b"till", 1000)):
        known.remember(known.producer(name, seconds), 1, 1, 1, seconds)
    known.forget_idle(2000)
    assert set(known.names) == {b"auto-1", b"till"}  # there is room: nobody gives way
    known.producer(b"auto-2", 1500)
    assert known.producer(b"new", 1600) is None  # it may still be running
    assert known.producer(b"new", 1601) is not None
    assert set(known.names) == {b"till", b"auto-2", b"new"}


K, AUTO, T = b"k1000001.7.%d", b"auto-k12.%d", b"t%d"  # of a Kafka client; of one without a pid; of a transaction


def test_names_of_kafka_producers_have_a_part_of_their_own_and_the_idle_ones_give_way_the_oldest_first():
    known = table(producers=2, kafka=3, ttl=100_000)
    for name, seconds in (
        (K % 0, 1000),
        (b"till", 1001),
        (AUTO % 0, 1002),
        (b"auto-1", 1003),
        (K % 1, 1004),
        (K % 0, 1005),
    ):
        known.remember(known.producer(name, seconds), seconds, seconds, 1, seconds)
    assert known.producer(K % 2, 1002 + 3600) is None  # nobody is idle for more than an hour
    assert known.producer(b"another", 1003) is None and known.producer(b"another", 1604) is not None  # as before
    assert known.producer(K % 2, 1003 + 3600) is not None
    assert set(known.names) == {b"till", b"another", K % 0, K % 1, K % 2}
    assert known.last_id(AUTO % 0) == 0 and known.last_id(K % 0) == 1005
    assert known.producer(AUTO % 1, 1004 + 3600) is None and known.producer(AUTO % 1, 1005 + 3600) is not None
    assert K % 1 not in known.names and (known.common.count, known.kafka.count) == (2, 3)
    known.forget_idle(300_000)
    assert not known.names and known.kafka.count == known.common.count == 0


def test_a_kafka_producer_that_was_forgotten_is_told_from_one_that_has_stored_nothing(data):
    known, names = table(kafka=2), [b"k%d.1.0" % pid for pid in (3_000_005, 3_000_002, 3_000_006)]
    known.remember(known.producer(names[0], 1000), 7, 7, 1, 1000)
    known.remember(known.producer(names[1], 1001), 8, 8, 1, 1001)
    assert [known.ask(name, 1001) for name in names] == [7, 8, 0]
    assert known.producer(names[2], 1000 + 3601) is not None  # the oldest one gives way
    assert [known.ask(name, 5000) for name in (names[0], b"k3000004.1.0", b"k3000006.1.1")] == [
        ids.FORGOTTEN,
        ids.FORGOTTEN,
        0,
    ]
    write(data, saved(known, 9))
    again = table(kafka=2)
    assert again.load(data, 9) == 9 and dedupe_file.FORGOTTEN_NAME not in again.names
    assert [again.ask(name, 5000) for name in (names[0], names[1], b"k3000006.1.1", b"till")] == [
        ids.FORGOTTEN,
        8,
        0,
        0,
    ]


def test_a_file_of_a_release_before_does_not_say_which_kafka_producers_were_forgotten(data):
    rows = b"p|k3000002.1.0|7|1700000000||7:1:1|\n"
    write(data, b"9|%d|2\n%b" % (dedupe_file.checksum(9, rows), rows))
    known = table()
    assert known.load(data, 9) == 9
    asked = [known.ask(b"k%d.1.0" % pid, 1) for pid in (3_000_002, 3_000_009, 4_000_000)]
    assert asked == [7, ids.FORGOTTEN, 0]  # it may be any producer of that life of a gateway


def test_a_full_part_of_kafka_producers_refuses_their_new_names_and_nobody_else():
    known = table(producers=5, kafka=2)
    assert all(known.producer(K % n, 1000) for n in range(2))
    assert known.producer(K % 2, 1000) is None and known.producer(AUTO % 2, 1000) is None
    assert all(known.producer(name, 1000) for name in (b"a", b"k1", b"t5", b"__offsets", b"k1000001", K % 0))
    assert known.producer(T % 1000001, 1000) is not None and known.kafka.count == 2  # KMQ's own always has a place
    assert known.producer(K % 3, 9000) is not None and T % 1000001 in known.names  # and keeps it
    known.remember(known.producer(T % 1000001, 9000), 1, 1, 1, 9000)
    assert set(known.kafka.evictable) == {K % 1, K % 3}


def test_the_name_of_a_copier_is_forgotten_after_so_many_others_and_not_by_age(monkeypatch):
    monkeypatch.setattr(dedupe, "_MOST_COPIERS", 3)
    known = table(producers=5, ttl=100)
    for n in range(3):
        known.remember(known.producer(T % (1000001 + n), 1000), 1, 1, 1, 1000)
    known.remember(known.producer(b"till", 1001), 1, 1, 1, 1001)
    for now in (2000, 3000):
        known.forget_idle(now)
        assert sorted(known.names) == [T % (1000001 + n) for n in range(3)], now
    assert known.ask(T % 1000001, 3000) == 1  # its commit waits
    assert known.ask(T % 9999999, 3000) == 0 and known.ask(b"till", 3000) == 0
    assert known.producer(T % 1000004, 3001) is not None
    assert [known.last_id(T % (1000001 + n)) for n in range(3)] == [1, 0, 1]
    assert known.copiers.count == 3 and known.own.count == known.common.count == 0


def test_of_messages_that_must_follow_nothing_is_stored_without_its_beginning():
    """The table is full when the first ones come, and has room for a name when the others do, in a later turn."""
    known = table(producers=5, kafka=1, ttl=100_000)
    known.remember(known.producer(K % 0, 1000), 1, 1, 1, 1000)
    accept = Acceptor(1 << 20, known, ANY_TOPIC)
    batch = LineBatch(1)
    accept.begin(batch, 1000 + 3600)
    said = [accept.accept(b"t||%d|x" % id, id, b"p", K % 1, 0 if id == 1 else dedupe.FOLLOWS) for id in (1, 2)]
    assert [text.split()[2] for text in said] == [b"producers_full", b"id_gap"]
    accept.begin(batch, 1001 + 3600)
    assert not accept.accept_all(b"t||3|x\nt||4|x\n", b"p", K % 1, dedupe.FOLLOWS)
    assert accept.accept(b"t||3|x", 3, b"p", K % 1, dedupe.FOLLOWS).split()[2] == b"id_gap"
    assert accept.accept_all(b"t||1|x\nt||2|x\n", b"p", K % 1, 0), "sent again"
    assert accept.accept_all(b"t||3|x\nt||4|x\n", b"p", K % 1, dedupe.FOLLOWS) and len(batch.lines) == 4


def test_the_parts_of_the_table_are_the_same_after_a_start(data):
    known, again, small = table(kafka=3), table(kafka=3), table(kafka=1)
    for n, name in enumerate((K % 0, b"till", T % 1000001, AUTO % 0, K % 0)):
        known.remember(known.producer(name, 1000 + n), n + 1, n + 1, 1, 1000 + n)
    write(data, saved(known, 5))
    for loaded in (again, small):  # a lower limit forgets nothing that is stored, until it is idle
        assert loaded.load(data, 5) == 5
        assert (loaded.kafka.count, loaded.common.count, loaded.copiers.count) == (2, 1, 1)
        assert list(loaded.kafka.evictable) == [AUTO % 0, K % 0]
    absorbed = table(kafka=1)
    lines = [b"%d|1000.0|t|1|1;p=%b|x\n" % (n + 1, K % n) for n in range(3)]
    absorbed.absorb(b"".join(lines), 1000)
    assert absorbed.kafka.count == 3 and absorbed.producer(K % 9, 1001) is None
    assert absorbed.producer(K % 9, 9000) is not None and absorbed.kafka.count == 1


def random_messages(rng):
    """Messages with increasing ids, most of them good, with the odd bytes that a key, a header or a payload may hold."""
    keys = [b"t", b"t.k", b"t.;p=me", b"t.@", b"t.\xff\r", b"t.@0.k;a=b"]
    headers = [b"", b"", b";enc=b64", b";a=b", b";a=b;reason=r;p", b";", b";;w", b";\xffp=\t", b";P=1;len=2;;x=y"]
    payloads = [b"", b"x", b"eA==", b"a|b;p=me|", b";w=", b"\r", b"\xff" * 9]
    odd = [
        b"append|1|%d|x",
        b"|1|%d|x",
        b"t|1|%d",
        b"t|1|x%d|x",
        b"t|1|%d|\0",
        b"t|1|%d;p=me|x",
        b"t|1|%d;a;w=|x",
        b"t/|||",
    ]
    for id in sorted(rng.sample(range(3, 12), rng.randrange(1, 5)), reverse=not rng.randrange(20)):
        if not rng.randrange(20):
            line = rng.choice(odd)
            yield line % id if b"%d" in line else line
        else:
            yield b"%b|1.5|%d%b|%b" % (rng.choice(keys), id, rng.choice(headers), rng.choice(payloads))


def test_messages_that_are_taken_together_are_stored_and_remembered_as_one_by_one():
    rng, kinds = random.Random(33), set()
    for _ in range(5000):
        lines = list(random_messages(rng))
        ways = [(LineBatch(7), table()) for _ in range(2)]
        together, singly = (Acceptor(MAX, known, ANY_TOPIC) for _, known in ways)
        for acceptor, (batch, known) in zip((together, singly), ways, strict=True):
            known.remember(known.producer(b"me", NOW), 3, 4, 1, NOW, (5,))
            acceptor.begin(batch, NOW + 1)
        is_taken = together.accept_all(b"".join(line + b"\n" for line in lines), b"p", b"me")
        replies = [singly.accept(line, n, b"p", b"me") for n, line in enumerate(lines, 1)]
        if is_taken:
            assert ways[0][0].lines == ways[1][0].lines and state(ways[0][1]) == state(ways[1][1]), lines
        else:
            assert not ways[0][0].lines
        is_kept_as_sent = all(
            0 not in line and line.count(b"|") > 2 and b";p=me" not in line.split(b"|")[2] for line in lines
        )
        assert is_taken == (is_kept_as_sent and not any(replies)), lines
        kinds.add((is_taken, any(replies)))
    assert kinds == {(True, False), (False, False), (False, True)}


def test_lines_that_say_whose_they_are_are_stored_and_remembered_as_one_by_one():
    """The Kafka door's. Each is stored as it came, and its fingerprint is the same from the records."""
    rng, kinds, me = random.Random(34), set(), K % 1
    bad = [b"t|1|%d|x", b"t|1|%d;p=k1000009.1.0|x", b"t|1|%d;a=b;p=me|x", b"t|1|%d;p=me;w=s|x", b"t|1|x%d;p=me|x"]
    for _ in range(3000):
        first = rng.randrange(3, 6)
        lines = [
            b"t.%b|%d.5|%d;p=me%b|%b"
            % (
                rng.choice([b"@0", b"@1", b"@0.k"]),
                n,
                id,
                rng.choice([b"", b";a=b", b";enc=b64"]),
                rng.choice([b"", b"a;p=me|", b"x"]),
            )
            for n, id in enumerate(range(first, first + rng.randrange(1, 5)))
        ]
        is_good = first > 3 and bool(rng.randrange(4))
        if not is_good:
            at = rng.randrange(len(lines))
            lines[at] = rng.choice(bad) % (first + at)
        lines = [line.replace(b"p=me", b"p=" + me) for line in lines]
        ways = [(LineBatch(7), table()) for _ in range(3)]
        together, singly, foreign = (Acceptor(MAX, known, ANY_TOPIC) for _, known in ways)
        for acceptor, (batch, known) in zip((together, singly, foreign), ways, strict=True):
            known.remember(known.producer(me, NOW), 3, 4, 1, NOW, (5,))
            acceptor.begin(batch, NOW + 1)
        text = b"".join(line + b"\n" for line in lines)
        is_taken = together.accept_all(text, b"p", me, reserved=True)
        assert is_taken or not ways[0][0].lines
        assert not foreign.accept_all(text, b"p", me) or ways[2][0].lines != lines, (
            "only the pod's programs say whose it is"
        )
        assert is_taken or not is_good, lines
        if not is_taken:
            kinds.add(None)
            continue
        assert not any(singly.accept(line, n, b"p", me) for n, line in enumerate(lines, 1))
        assert ways[0][0].lines == ways[1][0].lines and state(ways[0][1]) == state(ways[1][1]), lines
        after = table()
        after.remember(after.producer(me, NOW), 3, 4, 1, NOW, (5,))
        after.absorb(
            b"".join(b"%d|%d.000001|%b\n" % (7 + n, NOW + 1, line) for n, line in enumerate(ways[0][0].lines)), NOW + 9
        )
        assert state(after) == state(ways[0][1])
        kinds.add(ways[0][0].lines == lines)
    assert kinds == {None, False, True}


def test_what_another_content_has_under_a_known_id_is_told_of_kafkas_producers_too():
    known = table()
    accept, batch = Acceptor(MAX, known, ANY_TOPIC), LineBatch(7)
    accept.begin(batch, NOW)
    line = b"t.@0|1.5|1;p=%b|x" % (K % 1)
    assert accept.accept_all(line + b"\n", b"p", K % 1, 0, reserved=True)
    gap = b"".join(b"t.@0|1.5|%d;p=%b|x\n" % (id, K % 1) for id in (2, 4))
    assert not accept.accept_all(gap, b"p", K % 1, 1, reserved=True)
    assert accept.accept(line, 1, b"p", K % 1) == b"!dup 1 7"
    assert accept.accept(line[:-1] + b"y", 1, b"p", K % 1) == b"!err 1 id_reused 7"
    assert accept.accept(line.replace(b"t.@0", b"t.@0.key"), 1, b"p", K % 1) == b"!err 1 id_reused 7"
    assert accept.accept(line.replace(b"1.5", b"2.5"), 1, b"p", K % 1) == b"!dup 1 7", "some clients set the time anew"


def test_a_window_may_have_a_name_that_only_a_producer_must_not_have():
    known = table()
    accept, batch, name = Acceptor(MAX, known, ANY_TOPIC), LineBatch(7), AUTO % 1
    accept.begin(batch, NOW)
    assert not accept.accept(b"t|1.5|a|x", 1, b"w", name) and accept.accept(b"t|2.5|a|x", 2, b"w", name) == b"!dup 2 7"
    again = table()
    again.absorb(b"7|%d.000001|%b\n" % (NOW, batch.lines[0]), NOW)
    assert state(again) == state(known)


# --- arbitrary ids -----------------------------------------------------------------------------------------------------


def test_a_window_is_bounded_by_count_the_oldest_go_first():
    known = table(count=3)
    for seq, id in enumerate([b"a", b"b", b"c", b"a", b"d"], start=1):
        known.window.add(b"s", id, seq, 0)
    assert [known.window.find(b"s", id, 0) for id in (b"a", b"b", b"c", b"d")] == [4, NEW, 3, 5]


def test_a_window_is_bounded_by_age():
    known = table(age=10)
    known.window.add(b"s", b"a", 1, 100)
    assert known.window.find(b"s", b"a", 110) == 1
    assert known.window.find(b"s", b"a", 111) == NEW
    known.window.add(b"s", b"b", 2, 110)
    assert len(known.window) == 2
    known.window.add(b"s", b"c", 3, 111)
    assert list(known.window.ids) == [b"s|b", b"s|c"]  # what is too old also goes out of the memory


def cpu_s(work):
    started = time.process_time()
    work()
    return time.process_time() - started


def test_a_full_window_forgets_about_as_fast_as_it_learns():
    """A dict alone looks for its first key behind all that have gone: 20 µs each, in the framer, forty times the rest."""
    known = table(count=50_000)

    def learn(first):
        for seq in range(first, first + 50_000):
            known.window.add(b"s", b"%d" % seq, seq, 0)

    learning = cpu_s(lambda: learn(0))
    assert min(cpu_s(lambda first=first: learn(first)) for first in (50_000, 100_000)) < 10 * learning
    assert len(known.window) == 50_000


def test_ids_that_are_too_old_are_forgotten_some_at_a_time():
    """A million that came in one hour, and nothing in the next: the first message then does not wait for all."""
    known = table(count=50_000, age=10)
    for seq in range(10_000):
        known.window.add(b"s", b"%d" % seq, seq, 0)
    left = [len(known.window)]
    while left[-1] > 1 and len(left) < 100:
        known.window.add(b"s", b"9999", 10_000 + len(left), 11)
        assert known.window.find(b"s", b"9998", 11) == NEW
        assert known.window.find(b"s", b"9999", 11) == 10_000 + len(left)
        left.append(len(known.window))
    assert left[-1] == 1 and max(before - after for before, after in pairwise(left)) <= 1024


def test_the_same_id_in_two_scopes_is_two_messages():
    known = table()
    known.window.add(b"s", b"a", 1, 0)
    assert known.window.find(b"t", b"a", 0) == NEW


@pytest.mark.parametrize("seq", [1, 2**40, 10**18])
@pytest.mark.parametrize("seconds", [0, 1_700_000_000, (1 << 34) - 1])
def test_seq_and_time_share_a_number_without_mixing(seq, seconds):
    known = table(age=0)
    known.window.add(b"s", b"a", seq, seconds)
    assert known.window.find(b"s", b"a", seconds) == seq and known.window.find(b"s", b"a", seconds + 1) == NEW


# --- from the records --------------------------------------------------------------------------------------------------


def test_only_what_the_framer_says_in_the_first_header_is_taken_in():
    known = table()
    ids = [b"1;p=me", b"a;w=you", b"2;x=1;p=me", b"3%3Bp=me", b";reason=nul;p=me", b"x;p=old", b";p=old", b"-1;p=old"]
    lines = [b"%d|9.000001|t|1|%b|;p=me" % (seq, id) for seq, id in enumerate(ids, start=1)]
    known.absorb(b"\n".join([*lines, b"9|9.000001|t;p=me|4;p=me|x|7;p=me|"]) + b"\n", 9)
    print = fingerprint(b"t", b"", b";p=me")
    names = {b"me": (1, 9, [], [(1, 1, 1)]), b"prints": [[print]]}
    assert state(known) == (names, [(b"you|a", 2 << 66 | 9 << 32 | print)], 1)


def test_more_names_than_the_limit_are_taken_in_when_they_have_records():
    """The limit was lowered: whoever has stored something must not store it again."""
    known = table(producers=1)
    known.absorb(b"".join(b"%d|9.000001|t|1|1;p=%d|\n" % (seq, seq) for seq in range(1, 4)), 9)
    assert len(known.names) == 3 and known.producer(b"4", 9) is None


class Killed(Steps):
    """A framer that is killed behind some of its commits, and finds its table again in what is stored."""

    def __init__(self, make, cut, is_killed, data, topics):
        super().__init__(make(), cut, topics=topics)
        self.make, self.is_killed, self.data = make, is_killed, data
        self.kills = 0
        self.stamped = []  # the records, as the WAL has them

    def committed(self):
        for seq in range(len(self.stamped) + 1, len(self.lines) + 1):
            self.stamped.append(b"%d|%d.000001|%b\n" % (seq, self.seconds, self.lines[seq - 1]))
        if not self.is_killed():
            return False
        self.kills += 1
        self.known = self.make()
        seq = self.known.load(self.data, len(self.lines))
        self.known.absorb(b"".join(self.stamped[seq:]), self.seconds)
        return True

    def checkpoint(self):
        """As DedupeSaver does once all of it is synced."""
        with open(dedupe_file.path(self.data), "wb") as file:
            file.write(saved(self.known, len(self.lines)))


class OftenDeleted(AnyTopic):
    """Topics of which each record with an even seq is deleted as soon as it is there."""

    def has_deleted(self, routing_key, seq, is_exact=True, is_same=True):
        return is_exact and not seq % 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trials", [80, pytest.param(300, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("limits", "topics"),
    [({}, ANY_TOPIC), ({"count": 12}, ANY_TOPIC), ({"age": 6}, ANY_TOPIC), ({}, OftenDeleted())],
    ids=["roomy", "few ids and runs", "young ids", "every other record deleted"],
)
def test_a_framer_killed_at_any_commit_gives_the_same_answers_and_stores_the_same(
    tmp_path, limits, topics, trials, monkeypatch
):
    monkeypatch.setattr(dedupe, "_RUNS", 16)
    rng, kills, kinds = random.Random(9), 0, set()
    for n in range(trials):
        data = tmp_path / str(n)
        data.mkdir()
        parts, _ = random_traffic(rng, count=60)
        undisturbed = Steps(table(**limits), topics=topics)
        killed = Killed(lambda: table(**limits), randomly(rng), lambda: not rng.randrange(4), str(data), topics)
        texts = [(steps, steps.way.text(*parts)) for steps in (undisturbed, killed)]
        at = 0
        while at < max(len(text) for _, text in texts):
            step = rng.choice([30, 300, 1000])
            for steps, text in texts:
                steps.read(text[at : at + step])
                steps.seconds += step % 7
            at += step
            if not rng.randrange(3):
                killed.checkpoint()
        assert killed.lines == undisturbed.lines
        said = one_by_one(killed.replies)
        assert said == one_by_one(undisturbed.replies)
        assert state(killed.known) == state(undisturbed.known)
        kills += killed.kills
        kinds |= {reply.split()[0] for reply in said.values()}
    assert kills > trials * 10 / 3 and kinds == {b"ack", b"dup", b"err"}


def test_a_name_that_stores_nothing_takes_no_place():
    """The table follows from the records, or a framer that was killed would give other answers than before."""
    known = table(producers=1)
    steps = Steps(known)
    for bad in (b"", b"x", b"1" * 19):
        steps.read(messages(mine(bad), 1, P))
    steps.read(messages([b"no separator"], 1, P), messages(mine(b"1;p=other"), 1, P))
    assert not known.names


# --- the file ----------------------------------------------------------------------------------------------------------


def filled():
    known = table(count=50)
    steps = Steps(known)
    steps.seconds = 1_700_000_000
    for n in range(60):
        steps.read(
            messages(mine(2 * n, 2 * n + 1), 1, P),
            messages(mine(3 * n), 1, b"p=you"),
            messages(mine(b"%d" % n), 1, W),
        )
    assert known.names[b"me"].firsts and len(known.window) == 50
    return known


def saved(known, seq):
    """What a checkpoint of the table says."""
    snapshot = known.snapshot(seq)
    while not known.copy(0):
        pass
    return b"".join(snapshot.encode())


def write(data, content):
    with open(dedupe_file.path(data), "wb") as file:
        file.write(content)


def test_what_is_written_is_what_is_read(data):
    known, again = filled(), table(count=50)
    write(data, saved(known, 240))
    assert again.load(data, 240) == 240 and state(again) == state(known)
    assert dedupe_file.checkpoint_seq(data) == 240


def test_the_first_version_of_the_file_is_read(data):
    """As release 1.0 wrote it: no fingerprints, and `1` where older runs had been forgotten."""
    body = b"p|me|9|1700|1|5:101:3,9:110:1\np|you|3|1600|0|1:1:3\nw|s|a|7|1500\n"
    write(data, b"240|%d\n%b" % (dedupe_file.checksum(240, body), body))
    known = table()
    assert known.load(data, 240) == 240 and list(known.names) == [b"you", b"me"]
    me = known.names[b"me"]
    assert [me.find(id) for id in (4, 5, 7, 8, 9, 10)] == [TOO_OLD, 101, 103, TOO_OLD, 110, NEW]
    assert me.print_of(5) == 0 and known.window.find(b"s", b"a", 1500) == 7 and known.window.print_of(b"s", b"a") == 0
    known.remember(me, 10, 111, 2, 1700, [3, 4])
    assert [me.print_of(id) for id in (9, 10, 11)] == [0, 3, 4]


def test_an_id_of_a_window_may_hold_any_byte_that_a_line_may(data):
    known, again = filled(), table(count=50)
    known.window.add(b"s", b"a\rb\x0b\x1c\x85", 240, 1_700_000_000)
    write(data, saved(known, 240))
    assert again.load(data, 240) == 240 and state(again) == state(known)


def test_a_version_that_is_not_known_is_passed_over_whole(data):
    write(data, saved(filled(), 7).replace(b"|2\n", b"|3\n", 1))
    with pytest.raises(ValueError, match=r"^format 3 is not known here$"):
        table().load(data, 7)


def test_fingerprints_of_kafkas_producers_are_neither_written_nor_taken_from_an_older_file(data):
    """There they are of other bytes: a batch that is sent again after an update would pass for another one."""
    known, prints = table(), b2a_base64(array("I", (5, 6)), newline=False)
    for name in (K % 0, b"me"):
        known.remember(known.producer(name, 1000), 1, 1, 2, 1000, (5, 6))
    text = saved(known, 4)
    body = text.partition(b"\n")[2]
    assert body.count(prints) == 1 and prints in next(row for row in body.splitlines() if b"|me|" in row)
    older = body.replace(b"1:1:2|\n", b"1:1:2|%b\n" % prints)
    assert older.count(prints) == 2
    for rows in (body, older):
        write(data, b"4|%d|2\n%b" % (dedupe_file.checksum(4, rows), rows))
        again = table()
        assert again.load(data, 4) == 4
        assert [again.names[name].find(2) for name in (K % 0, b"me")] == [2, 2]
        assert [again.names[name].print_of(2) for name in (K % 0, b"me")] == [0, 6]


def test_an_empty_table_is_worth_a_file_too(data):
    write(data, saved(table(), 7))
    assert table().load(data, 7) == 7


def test_a_snapshot_does_not_move_with_the_table(data):
    known = filled()
    for already in range(3):  # names are copied when the table goes on
        before, snapshot = saved(known, 240), known.snapshot(240)
        assert len(known.names) > 1 and not any(known.copy(0) for _ in range(already))
        known.remember(known.names[b"you"], 1000 + already, 5000, 1, 0)
        known.remember(known.names[b"me"], 1000 + 10 * already, 5000, 9, 0)
        known.remember(known.producer(b"new-%d" % already, 0), 1, 5010, 1, 0)
        known.window.add(b"me", b"more-%d" % already, 6000, 1_700_000_000)
        known.copy(60)
        assert sorted(b"".join(snapshot.encode()).splitlines()[1:]) == sorted(before.splitlines()[1:])


class Watched(dict):
    """Says how many of its keys and values somebody has looked at without their names."""

    looked_at = 0

    def __iter__(self):
        return self.watched(super().__iter__())

    def values(self):
        return self.watched(super().values())

    def watched(self, each):
        for one in each:
            self.looked_at += 1
            yield one


def test_no_id_of_a_window_is_copied_between_two_batches_of_lines(data):
    """A million took 20 to 160 ms: all producers waited for that."""
    known = table(count=5000)
    known.window.ids = Watched()
    for seq in range(1, 5001):
        known.window.add(b"s", b"%d" % seq, seq, NOW)
    saver = DedupeSaver(data, known)
    saver.begin_snapshot(5000, NOW)
    saver.framed(1, 5001, 4999, NOW)
    assert saver.pending and not known.window.ids.looked_at
    until(lambda: saver.finish(5000))
    again = table(count=5000)
    assert again.load(data, 5000) == 5000 and again.window.ids == known.window.ids


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_of_a_window_does_not_move_with_it(seed):
    """Whatever is forgotten or comes again before and while it is read."""
    rng = random.Random(seed)
    known = table(count=rng.choice([5, 3000]), age=100)
    seq = seconds = 0

    def go_on(count):
        nonlocal seq, seconds
        for _ in range(count):
            seq, seconds = seq + 1, seconds + (rng.random() < 0.02) * rng.randrange(60)
            known.window.add(b"s", b"%d" % rng.randrange(4000), seq, seconds)

    for _ in range(4):
        go_on(rng.randrange(4000))
        before, rows = dict(known.window.ids), known.window.snapshot().rows()
        go_on(rng.randrange(3000))
        read = []
        for row in rows:
            read.append(row)
            if rng.random() < 0.01:
                go_on(rng.randrange(200))
        assert len(read) == len(before) and dict(read) == before
        assert [value >> 66 for _, value in read] == sorted(value >> 66 for value in before.values())


def test_many_names_are_copied_some_at_a_time(data, monkeypatch):
    """Between two batches of lines, or all producers would wait for the copy of 50,000 names."""
    monkeypatch.setattr(dedupe, "_COPY_S", 0)  # one
    known, copied = table(), []
    for n in range(100):
        known.remember(known.producer(b"%d" % n, NOW), 1, n + 1, 1, NOW)
    monkeypatch.setattr(
        dedupe_file.TableSnapshot, "add", lambda *args, add=dedupe_file.TableSnapshot.add: copied.append(add(*args))
    )
    saver = DedupeSaver(data, known)
    saver.begin_snapshot(100, NOW)
    for turn in range(1, 100):
        saver.framed(1, 101, 100, NOW)
        assert len(copied) == turn and saver.pending
    while not saver.finish(100):
        pass
    again = table()
    assert again.load(data, 100) == 100 and list(again.names) == list(known.names)


def test_a_large_table_is_saved_less_often_than_a_small_one(data):
    """Or a million ids of a window are written again for each 32 MiB of lines: more than the lines."""
    write(data, b"x" * 3 * dedupe.CHECKPOINT_BYTES)
    known = filled()
    large, small = DedupeSaver(data, known), DedupeSaver(f"{data}/none", known)
    for saver in (large, small):
        saver.framed(dedupe.CHECKPOINT_BYTES, 241, 0, NOW)
    assert small.pending and not large.pending
    large.framed(5 * dedupe.CHECKPOINT_BYTES, 241, 0, NOW)
    assert large.pending


def test_no_file_is_no_fault(data):
    assert table().load(data, 7) == 0 and dedupe_file.checkpoint_seq(data) == 0


def test_a_file_that_is_damaged_anywhere_is_passed_over_whole(data):
    whole = saved(filled(), 240)
    damaged = [whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :] for at in range(len(whole))]
    damaged += [whole[:at] for at in (*range(0, len(whole), 50), len(whole) - 1)]
    damaged += [b"", b"\0" * len(whole), whole + b"x", whole[:200] + bytes(100) + whole[300:]]
    for content in damaged:
        write(data, content)
        again = table()
        with pytest.raises(ValueError, match=r".") as refused:
            again.load(data, 10**9)
        assert state(again) == NOTHING and dedupe_file.fault(data) == str(refused.value), content[:40]


def test_a_file_that_speaks_of_more_than_there_is_is_passed_over_whole(data):
    write(data, saved(filled(), 240))
    again = table()
    with pytest.raises(ValueError, match=r"^it speaks of seq 240, the WAL ends at 239$"):
        again.load(data, 239)
    assert state(again) == NOTHING


def seq_on_disk(data):
    return dedupe_file.checkpoint_seq(data)


def test_a_checkpoint_waits_until_all_that_it_speaks_of_is_synced(data):
    saver = DedupeSaver(data, filled())
    saver.begin_snapshot(240, NOW)
    for synced in (None, 0, 239):
        saver.framed(1, 250, synced, NOW)
        assert saver.pending and not saver.finish(synced) and not saver.busy
    saver.framed(1, 250, 240, NOW)
    until(lambda: saver.finish(240))
    assert seq_on_disk(data) == 240 and table().load(data, 240) == 240


@pytest.mark.parametrize(("make", "times"), [(filled, 1), (table, dedupe._EMPTY_TIMES)])
def test_a_checkpoint_is_taken_every_so_many_bytes(data, make, times):
    saver, most = DedupeSaver(data, make()), times * dedupe.CHECKPOINT_BYTES
    saver.framed(most - 1, 250, 0, NOW)
    assert not saver.pending
    saver.framed(1, 251, 0, NOW)
    assert saver.pending
    until(lambda: saver.finish(250))
    assert seq_on_disk(data) == 250
    saver.framed(most - 1, 260, 260, NOW)
    assert not saver.pending


def test_a_checkpoint_forgets_idle_producers(data):
    known = table(ttl=10)
    known.remember(known.producer(b"gone", 0), 1, 1, 1, NOW - 12)
    known.remember(known.producer(b"here", 0), 1, 2, 1, NOW)
    DedupeSaver(data, known).begin_snapshot(2, NOW)
    assert set(known.names) == {b"here"}


def test_idle_producers_are_forgotten_some_at_a_time():
    known = table(producers=5000, ttl=10)
    for n in range(3000):
        known.remember(known.producer(b"%d" % n, 0), 1, n + 1, 1, NOW - 12)
    known.remember(known.producer(b"here", 0), 1, 3001, 1, NOW)
    left = [len(known.names)]
    while left[-1] > 1 and len(left) < 10:
        known.forget_idle(NOW)
        left.append(len(known.names))
    assert set(known.names) == {b"here"} and max(before - after for before, after in pairwise(left)) <= 1024


def test_a_full_disk_leaves_the_old_file_and_goes_on(data, monkeypatch):
    saver = DedupeSaver(data, filled())
    saver.begin_snapshot(240, NOW)
    until(lambda: saver.finish(240))

    def full(path, *content):
        with open(f"{path}.new", "wb") as file:
            file.write(b"".join(content)[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dedupe, "replace_file", full)
        saver.begin_snapshot(250, NOW)
        until(lambda: saver.finish(250))
    assert seq_on_disk(data) == 240
    with pytest.raises(FileNotFoundError):
        open(f"{dedupe_file.path(data)}.new", "rb")
    saver.begin_snapshot(260, NOW)
    until(lambda: saver.finish(260))
    assert seq_on_disk(data) == 260


@pytest.mark.parametrize("why", ["no room", "a start that had to read the WAL"])
def test_a_checkpoint_that_is_owed_comes_though_nobody_writes(data, monkeypatch, why):
    """Until then what it does not speak of has to stay in the WAL, on a full disk as well."""
    is_behind = why != "no room"
    saver = DedupeSaver(data, filled(), is_behind=is_behind)
    if not is_behind:

        def full(path, *content):
            raise OSError(errno.ENOSPC, "No space left on device", path)

        with monkeypatch.context() as patch:
            patch.setattr(dedupe, "replace_file", full)
            saver.begin_snapshot(250, NOW)
            until(lambda: saver.finish(250))
    saver.framed(0, 251, 250, NOW)
    assert not saver.pending and not seq_on_disk(data), "not at once"
    now = time.monotonic() + 10.1
    monkeypatch.setattr(dedupe.time, "monotonic", lambda: now)
    saver.framed(0, 251, 250, NOW)
    monkeypatch.undo()
    until(lambda: saver.finish(250))
    assert seq_on_disk(data) == 250


def test_a_disk_that_fails_ends_the_framer(data, monkeypatch):
    def broken(path, *content):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(dedupe, "replace_file", broken)
    saver = DedupeSaver(data, filled())
    saver.begin_snapshot(240, NOW)
    with pytest.raises(RetryError, match=r"producers\.ckpt: cannot be written"):
        until(lambda: saver.finish(240))


def largest_table():
    """As large as the default settings let it become."""
    known = DedupeTable(10_000, 1e6, 100_000, 1e6, 10_000)
    for n in range(10_000):
        producer = known.producer(b"producer-%d" % n, 5)
        for run in range(10):
            known.remember(producer, 100 * run, 1000 * run * n + 1, 50, 5)
    for n in range(100_000):
        known.window.add(b"podbus", b"message-%032d" % n, n, 5)
    return known


def test_the_largest_table_is_read_about_as_fast_as_it_was_filled(data):
    """A start reads it before anything else: nothing in that may be worse than a step for each name, run and id.

    Ten times the time of filling it would be some seconds.
    """

    known, beats = None, []

    def fill():
        nonlocal known
        known = largest_table()

    def read():
        again = DedupeTable(10_000, 1e6, 100_000, 1e6, 10_000)
        assert again.load(data, 10**9, lambda: beats.append(1)) == 10**9
        assert state(again) == state(known)

    filling = cpu_s(fill)
    write(data, saved(known, 10**9))
    assert min(cpu_s(read) for _ in range(2)) < 10 * filling
    assert len(beats) >= 2 * 110_000 // 1024  # and nobody takes the stage for dead meanwhile


def test_a_name_that_is_not_known_is_refused_without_a_look_at_all_those_that_are():
    """Any stranger can ask this with every line, 72 s long: it must cost as much with 10,000 names as with ten."""

    class Order(OrderedDict):
        looks = 0

        def items(self):
            for item in super().items():
                Order.looks += 1
                yield item

        def values(self):
            for value in super().values():
                Order.looks += 1
                yield value

    known = table(producers=2000, ttl=100)
    known.names, known.common.evictable = Order(), Order()
    for n in range(2000):
        known.remember(known.producer(b"auto-%d" % n if n % 2 else b"%d" % n, 1000), 1, n + 1, 1, 1000)
    Order.looks = 0
    for _ in range(100):
        assert known.producer(b"stranger", 1100) is None
    assert Order.looks <= 400
    assert known.producer(b"stranger", 1101) is not None  # and those that are idle go, a thousand at a time
    known.forget_idle(1101)
    assert set(known.names) == {b"stranger"} and not known.common.evictable and known.runs == 0


def test_names_keep_the_order_of_their_last_messages_over_a_file(data):
    known, again = table(producers=3, ttl=100), table(producers=3, ttl=100)
    for name, seconds in ((b"a", 1000), (b"auto-b", 1001), (b"c", 1002), (b"a", 1003)):
        known.remember(known.producer(name, seconds), seconds, seconds, 1, seconds)
    write(data, saved(known, 2000))
    assert again.load(data, 2000) == 2000 and list(again.names) == list(known.names) == [b"auto-b", b"c", b"a"]
    assert again.producer(b"new", 1102) is not None and list(again.names) == [b"c", b"a", b"new"]


def test_a_record_from_a_clock_that_was_ahead_makes_no_other_id_old():
    """recv_ts never goes back: after one such record all have that time."""
    month = 31 * 86_400
    known = table(age=86_400, ttl=10 * 86_400, producers=2)
    records = [b"1|%d.0|t|1|a;w=me|x", b"2|%d.0|t|1|1;p=me|x", b"3|%d.0|t|1|b;w=me|x", b"4|%d.0|t|1|1;p=you|x"]
    times = NOW, NOW, NOW + month, NOW + month
    known.absorb(b"".join(line % at + b"\n" for line, at in zip(records, times, strict=True)), NOW + 5)
    assert known.window.find(b"me", b"a", NOW + 5) == 1 and known.names[b"me"].find(1) == 2
    assert known.producer(b"new", NOW + 6) is None
    assert known.window.find(b"me", b"b", NOW + 86_406) == NEW
