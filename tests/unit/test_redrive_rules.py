"""Redrive: which records, under which key, as which line; and at which pace."""

from types import SimpleNamespace

import pytest
from made_up import FIRST_TS, no_room, stored, write_wal

from kmq.deadletters import redrive, selection
from kmq.errors import ConfigError, KmqError
from kmq.log import dropped, identity, topics
from kmq.message import record

LINE = b"7|1700000000.000007|dead.k|12.5|m-1;a=b;p=me;enc=b64|a|b"


@pytest.mark.parametrize(
    ("template", "sql"),
    [
        ("test.recovered_{key}", "concat('test.recovered_', key)"),
        ("{routing_key}", "concat(routing_key)"),
        ("{topic}.x{key}", "concat(topic, '.x', key)"),
        ("{topic}.{key}", "exact"),
        ("it's\\{key}{{x}}", "concat('it\\'s\\\\', key, '{', 'x}')"),
        ("", "''"),
    ],
)
def test_a_template_is_a_shorthand_for_an_expression(template, sql):
    assert redrive.to_sql(template) == sql


@pytest.mark.parametrize(
    ("routing_key", "has_marks", "template", "new"),
    [
        (b"dead.@3.k", True, "test.{key}", b"test.k"),
        (b"dead.@", True, "test.{key}", b"test."),
        (b"dead.@3.k", True, "{routing_key}", b"dead.@3.k"),
        (b"dead.@3.k", True, "{topic}.{key}", b"dead.@.k"),
        (b"dead.k", True, "{topic}.{key}", b"dead.@.k"),
        (b"dead", True, "{topic}.{key}", b"dead"),
        (b"dead.@3.k", False, "test.recovered_{key}", b"test.recovered_@3.k"),
        (b"dead.@3.k", False, "{routing_key}", b"dead.@.@3.k"),
        (b"dead.@k", False, "{routing_key}", b"dead.@k"),
    ],
)
def test_a_mark_is_no_part_of_the_key_but_where_it_was_stored_as_one(routing_key, has_marks, template, new):
    assert redrive.rewrite(template, "dead", routing_key, has_marks) == new


@pytest.mark.parametrize("template", ["{nothing}", "{", "{}", "{key.x}", "{key!r}", "{key:>9}"])
def test_a_template_that_is_none_is_refused_as_an_expression_too(template):
    with pytest.raises(ConfigError, match=r"the fields are \{routing_key\}, \{topic\}, \{key\}"):
        redrive.to_sql(template)


def test_a_line_is_sent_again_without_who_sent_it_first():
    assert redrive.as_sent(LINE, b"test.k", 1) == b"test.k|12.5|1;a=b;enc=b64;orig_id=m-1;orig_seq=7|a|b\n"


def test_a_numbered_line_keeps_what_it_was_as_headers_also_when_redriven_again():
    once = redrive.as_sent(LINE, b"test.k", 8)
    assert once == b"test.k|12.5|8;a=b;enc=b64;orig_id=m-1;orig_seq=7|a|b\n"
    again = redrive.as_sent(record.number([once[:-1]], 99, b"1700000001.000000")[0][:-1], b"x", 3)
    assert again == b"x|12.5|3;a=b;enc=b64;orig_id=m-1;orig_seq=7|a|b\n"
    assert redrive.as_sent(b"5|1.000000|k|||", b"x", 3) == b"x||3;orig_seq=5|\n"


def test_the_producer_is_another_for_every_redrive_and_partition_and_a_legal_name():
    rows = [("dead", 0, "id", "a"), ("dead", 1, "id", "a"), ("dead", 0, "id2", "a"), ("dead", 0, "id", "b")]
    rows += [("x" * 200, 1023, "id", "a"), ("x" * 199 + "y", 1023, "id", "a"), ("__append", 0, "id", "a", "b")]
    found = [redrive.RedrivenPartition(data, log, number, tuple(which)).name() for log, number, data, *which in rows]
    assert len(set(found)) == len(rows)
    from kmq.ingress import hello

    assert all(hello.parse(f"!hello acks=1 producer={each}".encode()) for each in found)
    assert found[0] == "redrive-958be9991cd8-dead-0", "as every release names it"


# --- what was dropped ------------------------------------------------------------------------------------------------


@pytest.fixture
def dropping(data):
    """Thirty messages of three topics; 5…9 and 20…21 are in no queue, 31…40 not even in the WAL."""
    identity.open_data(data)
    write_wal(data, [b"t%d.k%d|0|%d|x" % (n % 3, n, n) for n in range(1, 31)]).close()
    for ring, first, last in (("durable", 5, 9), ("durable", 20, 21), ("framed", 31, 40)):
        dropped.append(data, ring, first, last, no_room)
    return data


def test_what_was_dropped_is_read_from_the_wal_and_what_never_came_there_is_counted(dropping):
    found = selection.Dropped(dropping)
    assert [each.offset for each in found.records()] == [5, 6, 7, 8, 9, 20, 21]
    assert {(each.log, each.partition) for each in found.records()} == {("__append", 0)}
    assert (found.never_stored, found.retired) == (10, 0)
    chosen = list(selection.Selection(found, "{topic}.again_{key}", lambda stored: stored.offset >= 9))
    assert [new for _, new in chosen] == [b"t0.again_k9", b"t2.again_k20", b"t0.again_k21"]


def test_what_was_dropped_of_one_topic_is_found_by_the_routing_table(dropping):
    found = selection.Dropped(dropping, "t0")
    assert [each.offset for each in found.records()] == [6, 9, 21]
    topics.declare(dropping, "t0.k9", 1)  # pending: not in force
    assert [each.offset for each in selection.Dropped(dropping, "t0.k9").records()] == []
    with open(topics.toml_path(dropping, "t0.k9"), "wb") as file:
        file.write(topics.Declaration(1, 3).text())
    assert [each.offset for each in selection.Dropped(dropping, "t0.k9").records()] == [9]


def test_what_retention_has_taken_from_the_wal_is_counted(data):
    from kmq.log.segment import Limits
    from kmq.log.wal import Wal

    identity.open_data(data)
    wal = Wal(data, no_room, 1 << 20, Limits(segment_bytes=200))
    lines = stored([b"t.k|0|%d|%s" % (n, b"x" * 50) for n in range(1, 21)])
    for seq, line in enumerate(lines, 1):
        wal.append([(line, seq, 1, FIRST_TS + seq)])
        wal.sync()
    wal.close()
    import os

    segments = sorted(name for name in os.listdir(f"{data}/append") if name.endswith(".log"))
    first = int(segments[2][:20])
    for name in segments[:2]:
        os.unlink(f"{data}/append/{name}")
        os.unlink(f"{data}/append/{name[:-4]}.idx")
    assert first > 3
    dropped.append(data, "durable", 2, first + 1, no_room)
    found = selection.Dropped(data)
    assert found.retired == first - 2
    assert [each.offset for each in found.records()] == [first, first + 1]


def test_numbers_rise_within_a_producer(dropping):
    chosen = selection.Selection(selection.Dropped(dropping), "{routing_key}")
    records = list(selection.to_send(chosen, dropping, ("x",)))
    assert len({partition.name() for partition, *_ in records}) == 1
    sent = [partition.as_sent(*each) for partition, *each in records]
    assert [line.split(b"|")[2].split(b";")[0] for line in sent] == [
        b"6",
        b"7",
        b"8",
        b"9",
        b"10",
        b"21",
        b"22",
    ]


# --- pace ------------------------------------------------------------------------------------------------------------


def test_blocks_are_those_lines_whatever_the_pace():
    lines = [b"%d\n" % n for n in range(1000)]
    assert b"".join(redrive.blocks(lines, redrive.Pace())) == b"".join(lines)
    assert len(list(redrive.blocks([b"x" * 600_000 + b"\n"] * 4, redrive.Pace()))) == 2
    assert list(redrive.blocks([], redrive.Pace())) == []


def test_a_pace_lets_so_many_go_a_second_and_no_more_after_a_pause(monkeypatch):
    now = 100.0
    slept = []

    def sleep(seconds):
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(redrive.time, "monotonic", lambda: now)
    monkeypatch.setattr(redrive.time, "sleep", sleep)
    flow = redrive.Pace(50)
    sizes = [block.count(b"\n") for block in redrive.blocks([b"x\n"] * 100, flow)]
    assert sizes == [5] * 20
    assert sum(slept) == pytest.approx(19 * 5 / 50)  # the first goes at once
    now += 60
    flow.wait(5)
    flow.wait(5)
    assert slept[-1] == pytest.approx(0.1)
    assert redrive.Pace(0.5).block_limit == 1


class FakeProducer:
    """A producer whose name has passed all ids, unless it is the last of `names`."""

    duplicates = 0

    def __init__(self, names, most, name):
        self.takes_it = len(names) == most - 1
        names.append(name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def flush(self):
        pass

    def send_lines(self, block, callback):
        refusal = SimpleNamespace(code="id_too_old", line=block[:-1])
        return SimpleNamespace(refused={} if self.takes_it else {0: refusal}, answered=1, count=1, error=None)


@pytest.mark.parametrize("most", [1, 64])
def test_a_record_is_sent_under_the_first_name_that_takes_it_up_to_the_last(most):
    names = []
    partition = redrive.RedrivenPartition("b", "t", 0, ("x",))
    again = redrive.send([(partition, 3, LINE, b"t")], connect=lambda name: FakeProducer(names, most, name))
    assert again == (0, 0, []) and len(set(names)) == most


def test_a_record_that_no_name_takes_is_an_error():
    names = []
    partition = redrive.RedrivenPartition("b", "t", 0, ("x",))
    with pytest.raises(KmqError, match="64 replays have left out older letters"):
        redrive.send([(partition, 3, LINE, b"t")], connect=lambda name: FakeProducer(names, 65, name))
    assert len(names) == 64
