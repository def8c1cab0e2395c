"""kmq/gateway/kafka/records.py: Kafka's record batches as lines, and stored lines as batches."""

import gzip
import io
import struct
import time
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka_batches import (
    HEADER_BYTES,
    Sent,
    batch_of,
    fetched,
    framed,
    record_of,
    records_of,
    sized,
    varint,
    with_right_crc,
)
from kio.schema.errors import ErrorCode

from kmq.gateway.kafka.records import MAX_BATCH, MAX_TEXT, BatchRefused, encode, patched, read_batches, render
from kmq.message import record
from kmq.message.message import Message

NOW = 1_714_500_000_123
MAX_LINE = 1 << 20
FIRST_ID = 17_592_186_044_417
PRODUCER = b"k1000001.7.2"


def rendered(batch: bytes, topic="orders", partition=2, max_line=MAX_LINE, **more):
    [found] = read_batches(batch)
    return render(found, topic, partition, PRODUCER, FIRST_ID, max_line, **more)


def lines_of(batch: bytes, **more) -> list[bytes]:
    text = rendered(batch, **more).text
    assert text.endswith(b"\n")
    return text[:-1].split(b"\n")


def stored(lines: list[bytes], seq=1000, received=b"1714500001.654321") -> bytes:
    return b"".join(b"%d|%b|%b\n" % (seq + n, received, line) for n, line in enumerate(lines))


def refused(batch: bytes, **more) -> BatchRefused:
    with pytest.raises(BatchRefused) as caught:
        rendered(batch, **more)
    return caught.value


def code_of(batch: bytes, **more) -> str:
    return refused(batch, **more).code.name


# --- one record, one line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "line"),
    [
        (Sent(NOW, None, b"hello"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2|hello"),
        (Sent(NOW, b"", b"hello"), b"orders.@2.|1714500000.123|17592186044417;p=k1000001.7.2|hello"),
        (Sent(NOW, b"eu", b"hello"), b"orders.@2.eu|1714500000.123|17592186044417;p=k1000001.7.2|hello"),
        (
            Sent(NOW, b"a.b|c;d%\xff\n", b"x"),
            b"orders.@2.a%2Eb%7Cc%3Bd%25%FF%0A|1714500000.123|17592186044417;p=k1000001.7.2|x",
        ),
        (Sent(NOW, None, None), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2|"),
        (Sent(NOW, None, b""), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;enc=b64|"),
        (Sent(NOW, None, b"a|b;c%\t\r"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2|a|b;c%\t\r"),
        (Sent(NOW, None, "grün".encode()), "orders.@2|1714500000.123|17592186044417;p=k1000001.7.2|grün".encode()),
        (Sent(NOW, None, b"a\nb"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;enc=b64|YQpi"),
        (Sent(NOW, None, b"a|b\n"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;enc=lf|a|b"),
        (Sent(NOW, None, b"\n"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;enc=b64|Cg=="),
        (Sent(NOW, None, b"a\n\n"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;enc=b64|YQoK"),
        (Sent(NOW, None, b"\xff\n"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;enc=b64|/wo="),
        (Sent(NOW, None, b"a\0"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;enc=b64|YQA="),
        (Sent(NOW, None, b"\xff"), b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;enc=b64|/w=="),
        (Sent(-1, None, b"x"), b"orders.@2||17592186044417;p=k1000001.7.2|x"),
        (Sent(0, None, b"x"), b"orders.@2|0.000|17592186044417;p=k1000001.7.2|x"),
        (Sent(10**15 - 1, None, b"x"), b"orders.@2|999999999999.999|17592186044417;p=k1000001.7.2|x"),
        (
            Sent(NOW, None, b"x", ((b"trace", b"a b"), (b"trace", b""), (b"trace", None))),
            b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;trace=a%20b;trace=;trace|x",
        ),
        (
            Sent(NOW, None, b"", ((b"", b""), (b"", None), (b"", b"=;"))),
            b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;=;;==%3B;enc=b64|",
        ),
        (
            Sent(NOW, None, b"x", ((b"p", b"1"), (b"enc", b"b64"), (b"origin_topic", b"t"), (b"pp", b"1"))),
            b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;%70=1;%65nc=b64;%6Frigin_topic=t;pp=1|x",
        ),
        (
            Sent(NOW, None, b"x", ((b"a=b|\n", b"\0\xff"), ("ü".encode(), b"1"), (b"\xff", b"1"))),
            b"orders.@2|1714500000.123|17592186044417;p=k1000001.7.2;a%3Db%7C%0A=%00%FF;%C3%BC=1;%FF=1|x",
        ),
    ],
)
def test_a_record_is_this_line(sent, line):
    assert lines_of(batch_of([sent])) == [line]


def test_ids_rise_from_the_first_and_the_topic_may_have_dots():
    batch = batch_of([Sent(NOW + n, b"k", b"%d" % n) for n in range(2500)])
    lines = lines_of(batch, topic="a.b", partition=0)
    assert [line.split(b"|")[2] for line in lines] == [b"%d;p=%b" % (FIRST_ID + n, PRODUCER) for n in range(2500)]
    assert {line.split(b"|")[0] for line in lines} == {b"a.b.@0.k"}
    assert [line.split(b"|")[3] for line in lines] == [b"%d" % n for n in range(2500)]


# --- there and back --------------------------------------------------------------------------------------------------

ODD_TEXT = st.text("ab|;%=\n\0\r\t.@ü€\x7f", max_size=12).map(str.encode)
SOME_BYTES = st.one_of(st.binary(max_size=12), ODD_TEXT, st.binary(min_size=60, max_size=70))
OWN_NAMES = st.sampled_from([b"p", b"w", b"enc", b"reason", b"len", b"group", b"error", b"replays", b"origin_topic"])
HEADERS = st.lists(st.tuples(st.one_of(SOME_BYTES, OWN_NAMES), st.none() | SOME_BYTES), max_size=4).map(tuple)
VALUES = st.one_of(st.none(), SOME_BYTES, st.just(b"v" * 9000), st.just(b"\xfe" * 9000))
TIMES = st.one_of(st.integers(NOW - 100, NOW + 10_000), st.integers(0, 10**15 - 1), st.just(-1))
SENT = st.builds(Sent, TIMES, st.none() | SOME_BYTES, VALUES, HEADERS)


def as_shown(sent: Sent, received_ms: int) -> Sent:
    return sent._replace(timestamp=received_ms) if sent.timestamp == -1 else sent


def is_utf8(name: bytes) -> bool:
    return name.decode(errors="replace").encode() == name


def as_kafka_python_reads(batch: bytes) -> list[tuple[int, Sent]]:
    reader = DefaultRecordBatch(batch)
    assert reader.validate_crc() and reader.size_in_bytes == len(batch)
    return [
        (
            each.offset,
            Sent(each.timestamp, each.key, each.value, tuple((name.encode(), value) for name, value in each.headers)),
        )
        for each in reader
    ]


@settings(deadline=None, max_examples=300)
@given(st.lists(SENT, min_size=1, max_size=8), st.integers(0, 2**40))
def test_what_was_sent_comes_back_byte_for_byte(sent, first_offset):
    lines = lines_of(batch_of(sent))
    assert len(lines) == len(sent) and not any(record.refusal(line) for line in lines)
    assert record.good_prefix(b"\n".join([*lines, b""])) == sum(map(len, lines)) + len(lines)
    batch = encode("orders", 2, first_offset, stored(lines), leader_epoch=7)
    shown = [as_shown(each, 1714500001654) for each in sent]
    expected = list(enumerate(shown, first_offset))
    read = fetched(batch)
    assert read.records == expected
    assert read[:4] == (first_offset, first_offset + len(sent), 7, 0) and read.producer == (-1, -1, -1)
    assert read.max_timestamp == max(each.timestamp for each in shown)
    if all(is_utf8(name) for each in sent for name, _ in each.headers):
        assert as_kafka_python_reads(batch) == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(SENT, min_size=1, max_size=8), st.sampled_from([0, 1, 4]))
def test_batches_of_kafka_python_are_read(sent, codec):
    sent = [
        each._replace(headers=tuple(pair for pair in each.headers if is_utf8(pair[0])), timestamp=abs(each.timestamp))
        for each in sent
    ]
    builder = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 20)
    for delta, each in enumerate(sent):
        headers = [(name.decode(), value) for name, value in each.headers]
        assert builder.append(delta, each.timestamp, each.key, each.value, headers)
    batch = encode("orders", 2, 0, stored(lines_of(bytes(builder.build()))))
    assert [each for _, each in fetched(batch).records] == sent


# --- compression -----------------------------------------------------------------------------------------------------


def xerial(data: bytes, block=32 << 10) -> bytes:
    blocks = (pyarrow.compress(data[at : at + block], "snappy", asbytes=True) for at in range(0, len(data), block))
    return b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + b"".join(struct.pack(">i", len(each)) + each for each in blocks)


def streamed(data: bytes, codec: str) -> bytes:
    """Compressed piece by piece: the frame does not say how long the data are."""
    sink = io.BytesIO()
    with pyarrow.CompressedOutputStream(pyarrow.PythonFile(sink, "w"), codec) as stream:
        for at in range(0, len(data), 10_000):
            stream.write(data[at : at + 10_000])
        stream.flush()
        sink.close = lambda: None  # the stream closes it before it can be read
    return sink.getvalue()


CODECS = {
    "gzip": (1, gzip.compress),
    "snappy": (2, lambda data: pyarrow.compress(data, "snappy", asbytes=True)),
    "xerial": (2, xerial),
    "lz4": (3, lambda data: pyarrow.compress(data, "lz4", asbytes=True)),
    "lz4 streamed": (3, lambda data: streamed(data, "lz4")),
    "zstd": (4, lambda data: pyarrow.compress(data, "zstd", asbytes=True)),
    "zstd streamed": (4, lambda data: streamed(data, "zstd")),
}
SEVERAL = [Sent(NOW + n * 7, b"key %d" % (n % 50), b"value %d " % n * 20, ((b"n", b"%d" % n),)) for n in range(1500)]


@pytest.mark.parametrize("name", CODECS)
def test_a_compressed_batch_gives_the_lines_of_the_plain_one(name):
    codec, compress = CODECS[name]
    packed = compress(records_of(SEVERAL, NOW))
    batch = framed(packed, len(SEVERAL), attributes=codec, base=NOW, latest=NOW + 1499 * 7)
    assert read_batches(batch)[0].codec == codec
    assert rendered(batch) == rendered(batch_of(SEVERAL))


@pytest.mark.parametrize("name", CODECS)
def test_what_is_no_compressed_data_is_an_invalid_record(name):
    codec, compress = CODECS[name]
    packed = compress(records_of(SEVERAL[:3], NOW))
    cuts = [packed[:size] for size in range(len(packed))]
    broken = [packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :] for at in range(len(packed))]
    for data in [*cuts, packed + b"x", b"x" * 30]:
        assert code_of(framed(data, 3, attributes=codec, base=NOW)) in ("invalid_record", "message_too_large")
    for data in broken:  # a byte of a comment, or of a value, may be anything
        try:
            assert len(lines_of(framed(data, 3, attributes=codec, base=NOW))) == 3
        except BatchRefused as error:
            assert error.code.name in ("invalid_record", "message_too_large", "invalid_timestamp")


def test_the_largest_batch_is_read_and_one_byte_more_is_not():
    value = b"v" * (MAX_BATCH - len(record_of(Sent(NOW, None, b""), NOW, 0)) - 6)
    for codec, compress in [(0, bytes), *CODECS.values()]:
        for more, expected in ((b"", None), (b"v", "message_too_large")):
            records = record_of(Sent(NOW, None, value + more), NOW, 0)
            assert len(records) == MAX_BATCH + len(more)
            batch = framed(compress(records), 1, attributes=codec, base=NOW, latest=NOW)
            if expected:
                assert code_of(batch, max_line=1 << 30) == expected
            else:
                assert rendered(batch, max_line=1 << 30).text.endswith(b"|" + value + b"\n")


def zstd_with_window(log: int) -> bytes:
    """A frame that wants a window of 2^log bytes, with one block of three bytes."""
    return struct.pack("<IBB", 0xFD2FB528, 0, (log - 10) << 3) + (3 << 3 | 1).to_bytes(3, "little") + b"abc"


ZEROS = bytes(64 << 20)
BOMBS = {  # as much as 10 MB can hold: 2.5 GB of lz4, 10 GB of gzip and zstd
    "gzip": lambda: gzip.compress(ZEROS, 6) * 160,
    "snappy": lambda: varint(2**31 - 1) + pyarrow.compress(ZEROS[: 8 << 20], "snappy", asbytes=True)[4:],
    "xerial": lambda: xerial(ZEROS[: 32 << 20], 64 << 10) + xerial(ZEROS[: 32 << 20], 64 << 10)[16:] * 5,
    "lz4": lambda: pyarrow.compress(ZEROS, "lz4", asbytes=True) * 38,
    "zstd": lambda: pyarrow.compress(ZEROS, "zstd", asbytes=True) * 160,
    "zstd streamed": lambda: streamed(ZEROS, "zstd") * 160,
}


class Cost:
    """What a block takes: `memory`, the most bytes above what was in use before, and `seconds` of CPU."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.before, self.began = self.peak(), time.process_time()
        return self

    def __exit__(self, *_):
        self.seconds = time.process_time() - self.began
        self.memory = self.peak() - self.before

    @staticmethod
    def peak() -> int:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) << 10


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_neither_memory_nor_time(name):
    batch = framed(BOMBS[name](), 1000, attributes=CODECS[name][0], base=NOW)
    with Cost() as cost:
        error = refused(batch)
    assert error.code is ErrorCode.message_too_large and str(MAX_BATCH) in str(error)
    assert cost.memory < 3 * MAX_BATCH and cost.seconds < 2


@pytest.mark.parametrize("log", [26, 27, 28, 31, 41])
def test_a_zstd_frame_that_wants_a_huge_window_gets_no_memory(log):
    batch = framed(zstd_with_window(log), 1, attributes=4, base=NOW)
    with Cost() as cost:
        assert code_of(batch) == "invalid_record"
    assert cost.memory < 3 * MAX_BATCH


def test_a_count_that_would_be_too_many_lines_is_refused_before_it_is_decompressed():
    batch = framed(b"not even compressed", MAX_TEXT // 100, attributes=4, base=NOW)
    assert code_of(batch) == "message_too_large"


def test_as_many_tiny_records_as_may_be_take_a_bounded_memory():
    count = MAX_TEXT // (len("orders.@2") + 100)
    records = b"".join(sized(b"\0\0" + varint(n) + b"\1\1\0") for n in range(count))
    batch = framed(pyarrow.compress(records, "zstd", asbytes=True), count, attributes=4, base=NOW, latest=NOW)
    assert len(batch) < 2 << 20
    with Cost() as cost:
        assert rendered(batch).text.count(b"\n") == count
    assert cost.memory < 3 * MAX_TEXT


def test_headers_that_never_repeat_are_not_remembered_for_ever():
    def batch(start):
        return batch_of([Sent(NOW, None, b"x", ((b"trace", b"%060d" % n),)) for n in range(start, start + 9000)])

    first, *batches = map(batch, range(0, 36_000, 9000))  # made first: to trace it takes longer than all the rest

    def send(batch):
        encode("orders", 2, 0, stored(lines_of(batch)))

    send(first)
    tracemalloc.start()
    for each in batches:
        send(each)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 5 << 20


# --- what is refused -------------------------------------------------------------------------------------------------

FEW = [Sent(NOW, b"k", b"value"), Sent(NOW + 1, None, None, ((b"trace", b"a"), (b"n", None)))]
PLAIN = batch_of(FEW)


def test_a_cut_batch_is_corrupt_wherever_it_is_cut():
    assert read_batches(b"") == []
    for size in range(1, len(PLAIN)):
        assert code_of(PLAIN[:size]) == "corrupt_message"
        assert code_of(PLAIN + PLAIN[:size]) == "corrupt_message"


def test_a_flipped_bit_is_found_unless_it_is_of_the_place():
    for at in range(len(PLAIN)):
        for bit in (1, 0x10, 0x80):
            batch = PLAIN[:at] + bytes([PLAIN[at] ^ bit]) + PLAIN[at + 1 :]
            if at < 8 or 12 <= at < 16:  # base offset, leader epoch: a producer's have no meaning
                assert rendered(batch) == rendered(PLAIN)
            else:
                assert code_of(batch) in ("corrupt_message", "unsupported_for_message_format")


def test_a_batch_with_a_right_crc_is_refused_or_read_as_any_client_reads_it():
    """Each byte of the records becomes each of many others: never another exception, never another reading."""
    read = 0
    for at in range(HEADER_BYTES, len(PLAIN)):
        for byte in {0, 1, 2, 3, 12, 63, 64, 127, 128, 129, 255, PLAIN[at] ^ 1, PLAIN[at] + 2 & 255}:
            batch = with_right_crc(PLAIN[:at] + bytes([byte]) + PLAIN[at + 1 :])
            try:
                sent = [each for _, each in fetched(batch).records]
                offsets = [offset for offset, _ in fetched(batch).records]
                if offsets != [0, 1]:
                    raise ValueError("offsets")
            except ValueError:
                assert code_of(batch) == "invalid_record"
                continue
            again = fetched(encode("orders", 2, 0, stored(lines_of(batch))))
            assert [each for _, each in again.records] == sent
            read += 1
    assert read > 100


def test_every_number_of_a_header_that_lies_is_refused():
    for at, size in ((8, 4), (START_OF_COUNT, 4), (23, 4)):
        for value in (0, 1, 3, 48, len(PLAIN), 2**31 - 1, 2**31, 2**32 - 1):
            wrong = value.to_bytes(4)
            if PLAIN[at : at + size] == wrong:
                continue
            batch = with_right_crc(PLAIN[:at] + wrong + PLAIN[at + size :])
            assert code_of(batch) in ("corrupt_message", "invalid_record")


START_OF_COUNT = HEADER_BYTES - 4


@pytest.mark.parametrize("count", [1, 3, 4, 5, 2**18])
def test_a_count_that_lies_is_an_invalid_record(count):
    assert code_of(framed(records_of(FEW, NOW), count, base=NOW)) == "invalid_record"


OFFSET = b"<offset>"
ONE = b"\0\0" + OFFSET  # attributes, time


@pytest.mark.parametrize(
    "body",
    [
        b"",
        ONE,
        ONE + b"\1",
        ONE + b"\1\1",
        ONE + b"\1\1\0\0",  # a byte behind its headers
        ONE + b"\3\1\0",  # key of -2 bytes
        ONE + b"\1\3\0",  # value of -2 bytes
        ONE + b"\1\1\1",  # -1 headers
        ONE + b"\1\1\2",  # a header that is missing
        ONE + b"\1\1\2\1\1",  # a null name
        ONE + b"\1\1\2\0\3",  # value of a header of -2 bytes
        ONE + b"\1\1\2\2a\4b",  # ... of two bytes, of which one is there
        ONE + b"\1\1\xfe\xff\xff\xff\x0f",  # 2^31 - 1 headers
        ONE + b"\4k\1\0",  # key that reaches into what follows
        ONE + b"\1\x7e\0",
        ONE + b"\xfe\xff\xff\xff\x0f\1\0",
        ONE + b"\1\xfe\xff\xff\xff\x0f\0",
        ONE + b"\x81\x80\x80\x80\x80\0\1\0",  # a number of six bytes
        b"\1\0" + OFFSET + b"\1\1\0",  # attributes
        b"\x08\0" + OFFSET + b"\1\1\0",
        b"\0\0\6\1\1\0",  # offset delta 3
        b"\0\0\1\1\1\0",  # offset delta -1
        b"\0" + b"\x80" * 10 + b"\0" + OFFSET + b"\1\1\0",  # a time of eleven bytes
    ],
)
def test_a_record_whose_lengths_lie_is_invalid(body):
    good = [record_of(Sent(NOW, None, None), NOW, n) for n in range(3)]
    assert len(lines_of(framed(b"".join(good), 3, base=NOW))) == 3
    for index in range(3):
        bad = body.replace(OFFSET, varint(index))
        sizes = [len(bad), -1, len(bad) - 1, 2**31 - 1] + [len(bad) + 1] * (index == 2)
        for size in sizes:
            records = b"".join([*good[:index], varint(size) + bad, *good[index + 1 :]])
            error = refused(framed(records, 3, base=NOW))
            assert error.code is ErrorCode.invalid_record
            assert (
                error.index == index or (error.index or 3) > index
            )  # where the next record is looked for at a wrong place


def test_bytes_behind_the_last_record_are_invalid():
    assert code_of(framed(records_of(FEW, NOW) + b"\0", 2, base=NOW)) == "invalid_record"


def test_a_record_that_the_batch_ends_in_is_named():
    records = records_of([Sent(NOW, None, b"x")] * 1201, NOW)
    error = refused(framed(records[:-1], 1201, base=NOW))
    assert (error.code, error.index) == (ErrorCode.invalid_record, 1200) and "record 1200: " in str(error)


def test_a_block_of_snappy_that_is_not_all_there_is_invalid():
    records = records_of(SEVERAL, NOW)
    packed = xerial(records, len(records))
    longer = packed[:16] + struct.pack(">i", len(packed) - 20 + 1) + packed[20:]
    assert len(lines_of(framed(packed, 1500, attributes=2, base=NOW))) == 1500
    assert code_of(framed(longer, 1500, attributes=2, base=NOW)) == "invalid_record"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({"attributes": 5}, "unsupported_compression_type"),
        ({"attributes": 7}, "unsupported_compression_type"),
        ({"attributes": 0x20}, "invalid_record"),
        ({"attributes": 0x08}, "invalid_timestamp"),
        ({"attributes": 0x10}, "invalid_record"),
        ({"last_delta": 2}, "invalid_record"),
        ({"last_delta": -1}, "invalid_record"),
        ({"count": 0}, "invalid_record"),
        ({"count": -1}, "invalid_record"),
        ({"producer": (5, -1, 0)}, "invalid_record"),
        ({"producer": (5, 0, -1)}, "invalid_record"),
    ],
)
def test_what_no_producer_may_send_is_refused_by_its_header(header, code):
    with pytest.raises(BatchRefused) as caught:
        read_batches(framed(records_of(FEW, NOW), **{"count": 2, "base": NOW} | header))
    assert caught.value.code.name == code and caught.value.index is None


@pytest.mark.parametrize("magic", [0, 1])
def test_the_older_formats_are_refused_by_name(magic):
    message = struct.pack(">BBq", magic, 0, NOW)[: 2 + 8 * magic] + b"\xff\xff\xff\xff\0\0\0\1x"
    batch = struct.pack(">qiI", 0, len(message) + 4, 0) + message
    with pytest.raises(BatchRefused, match=f"magic {magic}: only batches of magic 2") as caught:
        read_batches(batch)
    assert caught.value.code is ErrorCode.unsupported_for_message_format


def test_the_header_of_each_batch_is_told():
    first = batch_of(FEW, base_offset=5)
    second = framed(records_of(FEW, NOW), 2, attributes=0x10, base=NOW, latest=NOW + 1, producer=(7, 3, 2**31 - 1))
    found = read_batches(memoryview(first + second))
    assert [bytes(each.data) for each in found] == [first, second]
    assert found[0][1:] == (0, False, NOW, NOW + 1, -1, -1, -1, 2)
    assert found[1][1:] == (0, True, NOW, NOW + 1, 7, 3, 2**31 - 1, 2)


@pytest.mark.parametrize("timestamp", [-2, -NOW, 10**15, 10**17, 2**63 - 1, -(2**63)])
def test_a_time_that_no_line_can_show_is_refused_with_its_record(timestamp):
    near = max(min(timestamp, 2**63 - 1 - NOW), NOW - 2**63)
    bases = [timestamp] if near != timestamp else [timestamp, NOW]
    for base in bases:
        records = record_of(Sent(base, None, b"x"), base, 0) + record_of(Sent(timestamp, None, b"x"), base, 1)
        error = refused(framed(records, 2, base=base))
        assert error.code is ErrorCode.invalid_timestamp and error.index == (0 if base == timestamp else 1)
        assert f"{timestamp};" in str(error)


def test_a_null_key_is_refused_where_a_key_is_required():
    batch = batch_of([Sent(NOW, b"", b"x")] * 1200 + [Sent(NOW, None, b"x")])
    assert len(lines_of(batch)) == 1201
    error = refused(batch, requires_key=True)
    assert (error.code, error.index) == (ErrorCode.invalid_record, 1200) and "key is null" in str(error)


@pytest.mark.parametrize("value", [b"v" * 500, b"\xfe" * 500])
@pytest.mark.parametrize("before", [0, 1500])
def test_a_line_may_be_as_long_as_the_limit_and_no_longer(value, before):
    batch = batch_of([Sent(NOW, None, b"short")] * before + [Sent(NOW, None, value)])
    longest = max(map(len, lines_of(batch)))
    assert len(lines_of(batch, max_line=longest)) == before + 1
    error = refused(batch, max_line=longest - 1)
    assert (error.code, error.index) == (ErrorCode.message_too_large, before)
    assert str(longest - 1) in str(error)


def test_a_batch_is_exact_if_its_times_are_what_its_lines_show():
    assert rendered(PLAIN).is_exact
    assert rendered(batch_of([Sent(NOW + 5, None, b"x"), Sent(NOW, None, b"x")])).is_exact
    assert not rendered(batch_of([Sent(-1, None, b"x")])).is_exact
    assert not rendered(batch_of([Sent(NOW, None, b"x"), Sent(-1, None, b"x")])).is_exact
    assert not rendered(framed(records_of(FEW, NOW), 2, base=NOW, latest=NOW)).is_exact


def test_a_batch_kept_as_it_came_is_served_with_another_place():
    batch = framed(gzip.compress(records_of(FEW, NOW)), 2, attributes=1, base=NOW, latest=NOW + 1, producer=(7, 0, 4))
    served = patched(memoryview(batch), 10**12, 9)
    read = fetched(served, records_of(FEW, NOW))
    assert (read.base_offset, read.leader_epoch, read.producer) == (10**12, 9, (7, 0, 4))
    assert as_kafka_python_reads(served) == [(10**12, FEW[0]), (10**12 + 1, FEW[1])]
    lines = stored(lines_of(batch))
    assert read.records == fetched(encode("orders", 2, 10**12, lines, leader_epoch=9)).records


# --- lines of others -------------------------------------------------------------------------------------------------

MARKS_FROM = 1005
FIELD = st.text("ab.@2;=%pü", max_size=8).map(str.encode)
ROUTING_KEYS = st.one_of(
    st.sampled_from([b"orders", b"orders.", b"orders.eu", b"orders.a%2Eb", b"orders.@", b"orders.@2", b"orders.@2."]),
    st.sampled_from(
        [b"orders.@02.k", b"orders.@3.k", b"orders.@2x", b"orders.@2.a.b", b"orders.@.k", b"orders.x.@2.k"]
    ),
    FIELD.map(lambda key: b"orders." + key),
)
ODD_TIMES = st.sampled_from([b"", b"now", b"12", b"12.", b"12.5", b"1714500000.123456", b"-1", b"1e9", b"9" * 13])
PAYLOADS = st.sampled_from([b"", b"text", b"a|b", b"YQ==", b"not base64!", b"YQ", "ü".encode()])
IDS = st.one_of(
    st.sampled_from([b"", b"7", b"x;enc=b64", b";enc=b64;p=k7.1.2", b"7;enc=b6", b"7;enc", b";p=k7.1.2", b";w=1;a;=;"]),
    st.sampled_from([b"7;%70=1", b"7;%65nc=b64", b"7;trace=a%20b;trace;enc=b64", "7;ü=1;üü=2".encode(), b"7;%zz=%"]),
    st.text("gz.@2;=%pü", max_size=8).map(str.encode),  # names in UTF-8, since a message has names of text
)
LINES = st.lists(st.tuples(ROUTING_KEYS, ODD_TIMES, IDS, PAYLOADS) | st.none(), min_size=1, max_size=12)


@settings(deadline=None, max_examples=300)
@given(LINES, st.sampled_from([0, MARKS_FROM, 10**6]))
def test_a_line_of_any_writer_is_shown_as_a_message_shows_it(lines, marks_from):
    rows = [
        b"%d|1714500001.%06d|%b" % (1000 + n, n * 999, b"|".join(fields)) if fields else b""
        for n, fields in enumerate(lines)
    ]
    block = b"\n".join([*rows, b""])
    shown = []
    for n, row in enumerate(rows):
        if row:
            message = Message("orders", 2, 50 + n, row, marks_from)
            headers = tuple((name.encode(), value) for name, value in message.headers)
            shown.append((n, Sent(message.timestamp_ms, message.key, message.value, headers)))
    times = [each.timestamp for _, each in shown] or [-1]
    slow = framed(
        records_of([each for _, each in shown], times[0], [n for n, _ in shown]),
        len(shown),
        base_offset=50,
        leader_epoch=3,
        last_delta=len(rows) - 1,
        base=times[0],
        latest=max(times),
    )
    assert encode("orders", 2, 50, block, marks_from=marks_from, leader_epoch=3) == slow


def test_blanked_lines_have_offsets_and_no_records():
    first, last = stored([b"orders.@2.a|1.000|1|x"]), stored([b"orders.@2.b|2.000|2|y"], seq=1009)
    batch = encode("orders", 2, 7, b"\n\n" + first + b"\n" + last + b"\n\n\n")
    assert [(offset, each.key) for offset, each in as_kafka_python_reads(batch)] == [(9, b"a"), (11, b"b")]
    assert fetched(batch).base_offset == 7 and fetched(batch).next_offset == 15


@pytest.mark.parametrize("log_append_time", [False, True])
def test_only_blanked_lines_are_a_batch_without_records(log_append_time):
    batch = encode("orders", 2, 7, b"\n\n\n", log_append_time=log_append_time)
    assert as_kafka_python_reads(batch) == []
    assert DefaultRecordBatch(batch).next_offset == 10 == fetched(batch).next_offset
    assert encode("orders", 2, 7, b"", log_append_time=log_append_time) == b""


def test_with_log_append_time_each_record_shows_when_it_was_received():
    received = [b"1.000999", b"1.000001", b"", b"1.001000", b"", b"1.001999", b"2.000000", b""]
    rows = [b"%d|%b|orders.@2|9.000|%d|x" % (n + 1, at, n) if at else b"" for n, at in enumerate(received)]
    data = encode("orders", 2, 100, b"\n".join([*rows, b""]), log_append_time=True, leader_epoch=4)
    found, next_offset = [], 100
    while data:
        size = 12 + int.from_bytes(data[8:12])
        batch, data = data[:size], data[size:]
        read = fetched(batch)
        assert (read.base_offset, read.attributes, read.leader_epoch) == (next_offset, 8, 4)
        next_offset = read.next_offset
        found += [(offset, each.timestamp) for offset, each in as_kafka_python_reads(batch)]
        assert [(offset, each.timestamp) for offset, each in read.records] == found[-len(read.records) :]
    assert found == [(100, 1000), (101, 1000), (103, 1001), (105, 1001), (106, 2000)] and next_offset == 108


def test_a_header_in_bytes_that_are_not_text_is_shown_as_it_is_stored():
    batch = encode("orders", 2, 0, stored([b"orders|1.000|7;a\xff=\xfe;\xff=hidden;b%FF=1|x"]))
    [(_, shown)] = fetched(batch).records
    assert shown.headers == ((b"a\xff", b"\xfe"), (b"b\xff", b"1"))
