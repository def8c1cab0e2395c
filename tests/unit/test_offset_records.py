"""The records of __consumer_offsets: what is written is read again, and nothing else is taken for one."""

import random

import pytest
from fake_logger import FakeLogger

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups import group_records, offset_table
from kmq.gateway.groups.offset_table import (
    CommittedOffset,
    NackRow,
    OffsetTable,
    RowKey,
    decode_key,
    decode_payload,
    encode_key,
    encode_payload,
)
from kmq.message import record
from kmq.message.routing import Table, resolve

ODD = "a.b|c;d%e f\n\x00é/~-_@!+𝄞"
PLACES = [
    RowKey("g", "orders", 0),
    RowKey("g", "jobs.eu", 1023, 2**62),
    RowKey(ODD, "t", 7),
    RowKey(ODD, "x.y", 7, 0),
    RowKey("1", "2", 3),
]
ROWS = [
    CommittedOffset(0, 1700000000.125),
    CommittedOffset(offset_table.MAX_OFFSET, 0.0, ODD, -1, ODD),
    CommittedOffset(5, 1.5, "m", 2**31 - 1, ""),
    NackRow(1, 1700000000.0, ODD),
    NackRow(9, 0.5),
    CommittedOffset(5, 1.5, "m", 3, "a b", leader_epoch=2**31 - 1),
    CommittedOffset(5, 1.5, "m", 3, "a b", leader_epoch=7, first_seq=2**63 - 1),
    CommittedOffset(5, 1.5, first_seq=1),
]


def stored(key, payload, seq=7, mark=b".@."):
    return b"%d|1.000000|__consumer_offsets%b%b|1.5|3;p=__offsets|%b\n" % (seq, mark, key, payload)


@pytest.mark.parametrize("place", PLACES, ids=repr)
def test_a_key_is_read_as_it_was_written(place):
    key = encode_key(place)
    assert decode_key(key) == place
    assert key.count(b".") == (2 if place.offset is None else 3)


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_a_payload_is_read_as_it_was_written(row):
    payload = encode_payload(row)
    assert decode_payload(payload) == row
    assert decode_payload(payload + b" later=field", 9) == row._replace(seq=9)
    assert payload.decode().isprintable()


def test_a_commit_can_be_read_by_a_person():
    commit = CommittedOffset(42, 1700000000.125, "worker-1", 3, "a b")
    assert encode_payload(commit) == b"offset=42 ts=1700000000.125 member=worker-1 generation=3 metadata=a%20b"
    assert encode_key(RowKey("billing.eu", "orders", 2)) == b"billing%2Eeu.orders.2"


def test_a_field_that_only_looks_like_a_leaders_epoch_is_left_out():
    payload = encode_payload(CommittedOffset(5, 1.5, "m", 3, "a"))
    assert decode_payload(payload + b" epoch=").leader_epoch is None
    assert decode_payload(payload + b" epoch=7x").leader_epoch is None
    assert decode_payload(payload + b" epoch=2147483648").leader_epoch is None
    assert decode_payload(payload + b" later=1 epoch=7").leader_epoch is None, "fields are added at the end"
    assert decode_payload(payload + b" epoch=7 later=1").leader_epoch == 7


def test_records_are_found_among_stored_lines_with_and_without_a_mark():
    keys = [encode_key(place) for place in PLACES]
    rows = [ROWS[5], ROWS[3], ROWS[1], ROWS[4], ROWS[2]]
    lines = [stored(key, encode_payload(row), seq) for seq, (key, row) in enumerate(zip(keys, rows, strict=True), 1)]
    lines += [
        b"\n",
        stored(keys[0], b"", 9),
        stored(keys[1], b"", 10, mark=b"."),
        stored(keys[2], b"", 11, mark=b".@0."),
    ]
    found = list(offset_table.scan(b"".join(lines)))
    expected = [(seq, key, encode_payload(row)) for seq, (key, row) in enumerate(zip(keys, rows, strict=True), 1)]
    assert found == [*expected, (9, keys[0], b""), (10, keys[1], b""), (11, keys[2], b"")]


@pytest.mark.parametrize(
    "line",
    [
        stored(b"g.t.0", b"offset=7"),
        stored(b"g.t.0", b"offset=x ts=1.000 member= generation=0 metadata="),
        stored(b"g.t.0", b"offset=7 ts=1.000 member= generation=0 metadata=|"),
        stored(b"g.t", b"offset=7 ts=1.000 member= generation=0 metadata="),
        stored(b"g.t.0.5", b"offset=7 ts=1.000 member= generation=0 metadata="),
        stored(b"g.t.0", b"deliveries=7 due=1.000 reason="),
        stored(b"g.t.0.1.2", b""),
        stored(b"g t.u.0", b""),
        stored(b"g.t.0", b"", mark=b".@x."),
        b"7|1.000000|__consumer_offsets|1.5|3|offset=7\n",
        b"7|1.000000|orders.@.g.t.0|1.5|3|\n",
    ],
)
def test_what_is_no_such_record_is_left_out(line):
    good = stored(b"g.t.0", encode_payload(ROWS[0]))
    assert [seq for seq, *_ in offset_table.scan(good + line + good)] == [7, 7]


@pytest.mark.parametrize(
    "key", [b"g.t", b"g.t.x", b"g.t.0.0.0", b"%67.t.0", b"g.t.00", b"g.%.0", b"%FF.t.0", b"g%2et.t.0", "ü.t.0".encode()]
)
def test_a_key_in_another_form_is_none(key):
    with pytest.raises(ValueError):
        decode_key(key)


@pytest.mark.parametrize(
    "payload", [b"", b"offset=7", b"offset=9999999999999999999 ts=1.000 member= generation=0 metadata=", b"\xff"]
)
def test_a_payload_in_another_form_is_none(payload):
    with pytest.raises(ValueError):
        decode_payload(payload)


def test_any_damage_to_a_line_is_survived():
    rng = random.Random(7)
    line = stored(encode_key(PLACES[0]), encode_payload(ROWS[1]))
    for _ in range(2000):
        cut = bytearray(line * 2)
        for _ in range(rng.randrange(1, 4)):
            cut[rng.randrange(len(cut))] = rng.randrange(256)
        for _, key, payload in offset_table.scan(bytes(cut)):
            try:
                assert decode_key(key) and (not payload or decode_payload(payload))
            except ValueError:
                pass  # read_log counts these


def test_a_record_lies_in_its_topic_and_any_name_is_a_legal_line():
    for place in PLACES:
        key = offset_table.routing_key(place)
        assert resolve(Table(), key, 1)[:2] == (b"__consumer_offsets", encode_key(place))
        assert record.refusal(key + b"|1|1|x", reserved=True) == ""


# --- the table ----------------------------------------------------------------------------------------------------------


def put(table, group, seq, offset=1, partition=0):
    table.put(RowKey(group, "t", partition), CommittedOffset(offset, 1.0, seq=seq))


def test_the_row_with_the_higher_seq_stays_in_whatever_order_rows_come():
    table = OffsetTable()
    for seq, offset in ((5, 50), (9, 90), (7, 70)):
        put(table, "g", seq, offset)
    assert table.commits_of("g")["t", 0].offset == 90
    table.drop(RowKey("g", "t", 0), 8)
    assert table.groups == ["g"]
    table.drop(RowKey("g", "t", 0), 9)
    assert table.groups == [] and table.rows == 0


def test_rows_of_groups_are_counted_and_gone_groups_leave_nothing():
    table = OffsetTable()
    put(table, "a", 1)
    put(table, "b", 2)
    table.put(RowKey("a", "t", 0, 17), NackRow(1, 2.0, seq=3))
    assert table.groups == ["a", "b"] and table.rows == 3
    assert [place for place, _ in table.rows_of("a")] == [RowKey("a", "t", 0), RowKey("a", "t", 0, 17)]
    for place, row in [*table.rows_of("a"), *table.rows_of("b")]:
        table.drop(place, row.seq)
    assert table.groups == [] and vars(table)["_bytes"] == 0


def test_a_full_table_refuses_what_is_new_and_takes_what_is_known(monkeypatch):
    monkeypatch.setattr(offset_table, "MAX_GROUPS", 2)
    table = OffsetTable()
    put(table, "a", 1)
    put(table, "b", 2)
    with pytest.raises(RequestRefused, match="2 groups") as refused:
        table.check_room("c", {RowKey("c", "t", 0): ROWS[0]})
    assert refused.value.code == "offsets_full"
    monkeypatch.setattr(offset_table, "MAX_BYTES", 2 * (offset_table.ROW_BYTES + 2))
    table.check_room("a", {RowKey("a", "t", 0): ROWS[2]})
    with pytest.raises(RequestRefused, match="delete some groups"):
        table.check_room("a", {RowKey("a", "t", 1): ROWS[0]})


def test_a_partition_keeps_so_many_messages_that_were_given_back(monkeypatch):
    monkeypatch.setattr(offset_table, "MAX_NACKS", 1)
    table = OffsetTable()
    table.put(RowKey("g", "t", 0, 17), NackRow(1, 2.0, seq=3))
    table.check_room("g", {RowKey("g", "t", 0, 17): ROWS[4], RowKey("g", "t", 1, 17): ROWS[4]})
    with pytest.raises(RequestRefused, match="wait to be delivered again"):
        table.check_room("g", {RowKey("g", "t", 0, 18): ROWS[4]})


def test_the_log_of_a_directory_without_offsets_is_empty(tmp_path):
    assert offset_table.read_log(str(tmp_path), FakeLogger(), group_records.scan) == ([], 0, {})
