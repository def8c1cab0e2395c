"""The line: every rule of it, and the two ways to judge a line give the same verdict."""

import random
from base64 import b64encode

import pytest

from kmq.message import record

MAX = 8192
LONG_TOPIC = b"A" * record.MAX_TOPIC


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        (b"t.k|1|2|x", b"t.k|1|2|x"),
        (b"t|||", b"t|||"),
        (b"t.k|x", b"t.k|x||"),
        (b"t|", b"t|||"),
        (b"t.k|1|2", b"t.k|1|2|"),
        (b"t|1|2|a|b||c|", b"t|1|2|a|b||c|"),
        (b"t|1|2|tab\tcr\r\xff\xfe", b"t|1|2|tab\tcr\r\xff\xfe"),
        (b"t.\xff\x01 key|1|2|", b"t.\xff\x01 key|1|2|"),
        (b"t.|||", b"t.|||"),
        (b"t./../../etc/passwd|||", b"t./../../etc/passwd|||"),  # the topic is t; a key names no path
        (b"_|||", b"_|||"),
        (b"9-x_|||", b"9-x_|||"),
        (b"append-x|||", b"append-x|||"),
        (b"appendix.append|||", b"appendix.append|||"),
        (b"_a__|||", b"_a__|||"),
        (LONG_TOPIC + b"|||", LONG_TOPIC + b"|||"),
        (LONG_TOPIC + b".k|||", LONG_TOPIC + b".k|||"),
        (b"t|||" + b"x" * (MAX - 4), b"t|||" + b"x" * (MAX - 4)),
    ],
)
def test_a_message_is_stored_as_sent_or_padded(sent, stored):
    assert record.refusal(sent) == ""
    assert record.admit(sent, MAX) == stored


REFUSED = [
    (b"", "empty_line"),
    (b"no separator", "no_separator"),
    (b"|1|2|x", "empty_routing_key"),
    (b"|", "empty_routing_key"),
    (b"!b 1|2|3|4", "control_byte"),
    (b"+t|1|2|x", "control_byte"),
    (b"-t|1|2|x", "control_byte"),
    (b"!", "control_byte"),
    (b"t|1|2|\0", "nul"),
    (b"\0t|1|2|", "nul"),
    (b"append|1|2|x", "reserved_topic"),
    (b"append.k|1|2|x", "reserved_topic"),
    (b"dropped|1|2|x", "reserved_topic"),
    (b"dropped.k|1|2|x", "reserved_topic"),
    (b"__consumer_offsets|1|2|x", "reserved_topic"),
    (b"__|", "reserved_topic"),
    (b"../../etc/passwd|1|2|x", "bad_topic"),
    (b"/etc/passwd|1|2|x", "bad_topic"),
    (b"a/b|1|2|x", "bad_topic"),
    (b"a\\b|1|2|x", "bad_topic"),
    (b"..|1|2|x", "bad_topic"),
    (b".|1|2|x", "bad_topic"),
    (b".hidden|1|2|x", "bad_topic"),
    (b"a b|1|2|x", "bad_topic"),
    (b"a\r|1|2|x", "bad_topic"),
    ("é|1|2|x".encode(), "bad_topic"),
    (b"\x1b[2J|1|2|x", "bad_topic"),
    (LONG_TOPIC + b"A|1|2|x", "bad_topic"),
    (b"t|||" + b"x" * (MAX - 3), "too_long"),
]


@pytest.mark.parametrize(("sent", "reason"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_is_no_message_becomes_dead_malformed_with_its_reason_and_length(sent, reason):
    payload, mark = (b64encode(sent), b";enc=b64") if b"\0" in sent else (sent[:MAX], b"")
    expected = b"dead.malformed||;reason=%b;len=%d%b|%b" % (reason.encode(), len(sent), mark, payload)
    assert record.admit(sent, MAX) == expected


@pytest.mark.parametrize(("sent", "reason"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_dead_malformed_holds_is_itself_a_well_formed_line(sent, reason):
    line = record.admit(sent, MAX)
    assert record.good_prefix(line + b"\n") == len(line) + 1
    assert record.admit(line, MAX) == line  # as it comes out of the FIFO again when ingress made it


def test_every_reason_is_in_the_table():
    words = {"empty_line", "control_byte", "nul", "no_separator", "empty_routing_key", "reserved_topic", "bad_topic"}
    assert {reason for _, reason in REFUSED} == words | {"too_long"}


@pytest.mark.parametrize("original", [b"x" * (MAX + 1), b"\0" * (MAX + 1), b"\0" + b"x" * (3 * MAX)])
def test_a_payload_is_cut_at_the_limit_also_as_base64(original):
    line = record.malformed("too_long", original, 12345678, MAX)
    header, _, payload = line.rpartition(b"|")
    assert b";len=12345678" in header
    assert MAX - 4 <= len(payload) <= MAX
    assert len(line) <= MAX + record.MALFORMED_OVERHEAD


@pytest.mark.parametrize("name", ["a", "jobs.eu", "a.b.c", "_", "0", "A" * 200, "a.append"])
def test_a_legal_topic_may_be_declared(name):
    assert record.is_topic(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../a", ".a", "-a", "a b", "a\n", "é", "append", "append.x", "dropped", "__x", "A" * 201],
)
def test_an_illegal_or_reserved_topic_may_not_be_declared(name):
    assert not record.is_topic(name)


_WORDS = [b"t", b"Topic_9", b"append", b"dropped", b"__", b"dead.malformed", b".", b"..", b"/", b"|", b"|", b"|", b"|"]
_WORDS += [b"!", b"+", b"-", b"\0", b" ", b"\r", b"\t", b"\xc3\xa9", b"\xff", LONG_TOPIC, b""]


def random_line(rng):
    return b"".join(rng.choice(_WORDS) for _ in range(rng.randrange(9)))


def random_text(rng):
    """Lines with a bias to good ones, so that good prefixes get long."""
    kinds = rng.choices([b"t.k|1|2|x", b"t|||", None], [5, 3, rng.choice([0, 1, 8])], k=rng.randrange(1, 9))
    return [random_line(rng) if kind is None else kind for kind in kinds]


def test_good_prefix_ends_at_the_first_line_that_admit_would_change():
    rng = random.Random(21)
    ends = set()
    for _ in range(20_000):
        lines = random_text(rng)
        expected = 0
        for line in lines:
            if record.admit(line, 1 << 20) != line:
                break
            expected += len(line) + 1
        text = b"".join(line + b"\n" for line in lines)
        assert record.good_prefix(text) == expected, lines
        ends.add(expected == len(text))
    assert ends == {True, False}


def test_numbered_lines_are_split_exactly_if_all_are_well_formed_and_numbered():
    """One search says what a check, a split into lines and a split into fields would say."""
    rng, kinds = random.Random(3), set()
    parts = (
        b"t",
        b"t.k",
        b"append",
        b"a-b.c",
        b"__x",
        b"",
        b"t/",
        b"1",
        b"9" * 18,
        b"9" * 19,
        b"1;a=b",
        b"2;enc=b64;;pp=q",
        b"3;",
        b"4;a=b;p=me",
        b"5;w=",
        b";a=b",
        b"x|y",
        b"+",
        b"\r",
        b"\0",
    )
    for _ in range(20_000):
        lines = [
            b"%b|1|%b|%b" % (rng.choice(parts[:4] * 5 + parts), rng.choice(parts[7:13] * 9 + parts), rng.choice(parts))
            for _ in range(rng.randrange(1, 4))
        ]
        text = b"".join(line + b"\n" for line in lines)
        fields = [tuple(line.split(b"|", 3)) for line in lines]
        is_plain = record.good_prefix(text) == len(text) and 0 not in text
        is_numbered = is_plain and not record.claims(text)
        expected = []
        for key, ts, id_field, payload in fields if is_numbered else []:
            id, semicolon, headers = id_field.partition(b";")
            is_numbered = is_numbered and id.isdigit() and len(id) <= 18
            expected.append((b"|".join((key, ts, id)), key, id, semicolon + headers, payload))
        assert record.numbered(text) == (expected if is_numbered else None), text
        kinds.add((is_numbered, b";" in text))
    assert len(kinds) == 4


@pytest.mark.parametrize(
    ("routing_key", "headers", "payload", "is_same"),
    [
        (b"orders.eu", b";aa=b", b"x", True),
        (b"orders.@7.eu", b";aa=b", b"x", True),
        (b"orders.@.eu", b";p=me;aa=b;enc=b64;reason=r;len=9;z=", b"x", True),
        (b"orders.@alice.eu", b";aa=b", b"x", False),
        (b"orders.eu.@", b";aa=b", b"x", True),
        (b"orders.us", b";aa=b", b"x", False),
        (b"orders", b";aa=b", b"x", False),
        (b"orders.eu", b"", b"x", False),
        (b"orders.eu", b";aa=c", b"x", False),
        (b"orders.eu", b";aa=b;pp=q", b"x", False),
        (b"orders.eu", b";aa=b", b"y", False),
        (b"orders.eu", b";aa=b", b"", False),
    ],
)
def test_a_fingerprint_is_of_what_the_user_said(routing_key, headers, payload, is_same):
    assert (
        record.fingerprint(routing_key, headers, payload) == record.fingerprint(b"orders.eu", b";aa=b", b"x")
    ) is is_same


def test_remembered_starts_of_fingerprints_are_bounded_and_right():
    starts = record.Starts()
    for n in range(10_000):
        assert starts[b"t.%d" % n] == record.fingerprint_start(b"t.%d" % n) and len(starts) <= 4096
        assert starts[b"t.%d|;a=b;enc=b64" % n] == record.fingerprint_start(b"t.%d" % n, b";a=b")
    assert starts[b"k" * 4000] == record.fingerprint_start(b"k" * 4000) and b"k" * 4000 not in starts


def test_good_prefix_never_takes_a_line_without_its_newline():
    assert record.good_prefix(b"t|1|2|x\nt|1|2|x") == 8
    assert record.good_prefix(b"") == 0


def test_a_long_good_block_before_a_bad_line_is_judged_in_one_pass():
    text = b"t.k|1|2|x\n" * 100_000 + b"no separator\n"
    assert record.good_prefix(text) == len(text) - 13


@pytest.mark.parametrize(
    ("line", "stored"),
    [
        (b"t|1|7;p=me|x", b"t|1|7%3Bp=me|x"),
        (b"t|1|7;w=me|x", b"t|1|7%3Bw=me|x"),
        (b"t|1|;p=|x", b"t|1|%3Bp=|x"),
        (b"t|1|7;a=b;p=me;w=you|x", b"t|1|7;a=b%3Bp=me%3Bw=you|x"),
        (b"t|1|7;p=me;p=me|x;p=me", b"t|1|7%3Bp=me%3Bp=me|x;p=me"),
        (b"t|1|7;p=me", b"t|1|7%3Bp=me|"),
        (b"t|1|;;p=me|x", b"t|1|;%3Bp=me|x"),
    ],
)
def test_only_the_framer_says_whose_message_it_is(line, stored):
    """An id that claims a producer or a window would be taken for a message of it when the table is made anew."""
    assert record.claims(b"u|||\n" + line + b"\nv|||\n")
    assert record.admit(line, MAX) == stored and not record.claims(stored + b"\n")


@pytest.mark.parametrize(
    "line",
    [b"t|1|7|;p=me", b"t.k;p=me|1|7|x", b"t|;p=me|7|x", b"t|1|p=me|x", b"t|1|7;pp=me|x", b"t|1|7;P=me|x", b"t|1|7;p|x"],
)
def test_what_only_looks_like_a_claim_is_left_alone(line):
    assert not record.claims(line + b"\n" + b"|;p=me\n")
    assert record.admit(line, MAX) == line


def test_claims_and_disclaim_agree_on_random_lines():
    rng = random.Random(22)
    words = [b"t", b"|", b"|", b"|", b";p=", b";w=", b"p=", b";", b"me", b"%3B", b"="]
    found = 0
    for _ in range(20_000):
        line = b"".join(rng.choices(words, k=rng.randrange(12)))
        stored = record.disclaim(record.padded(line))
        assert (stored != record.padded(line)) == record.claims(line + b"\n"), line
        found += stored != record.padded(line)
    assert found > 1000


@pytest.mark.parametrize("first", [1, 7, 997, 999, 1000, 9_997, 99_999, 999_999, 10**12 - 2])
@pytest.mark.parametrize("count", [1, 2, 3, 999, 1001, 2500])
def test_number_counts_on_over_every_change_of_digits(first, count):
    lines = [b"t|1|%d|x" % i for i in range(count)]
    stamp = record.format_ts(1_700_000_000_000_001)
    block, added = record.number(lines, first, stamp)
    expected = [b"%d|%b|%b" % (first + i, stamp, line) for i, line in enumerate(lines)]
    assert block.split(b"\n") == [*expected, b""]
    assert len(block) - added == sum(len(line) + 1 for line in lines)


def test_common_key_is_exact():
    def common(*lines):
        return record.common_key(list(lines))

    assert common(b"t.k|1|2|x") == b"t.k"
    assert common(b"t.k|1|2|x", b"t.k|||") == b"t.k"
    assert common(b"t.k|1|2|x", b"t.kk|||", b"t.k|||") == b""
    assert common(b"t.k|1|2|x", b"t.k!|||", b"t.k|||") == b""  # sorts before
    assert common(b"t.k|1|2|x", b"a|t.k|t.k|", b"t.k|||") == b""
    assert common(b"t.k|1|2|x", b"a|||") == b""


@pytest.mark.parametrize("micros", [0, 1, 999_999, 1_000_000, 1_700_000_000_123_456])
def test_a_time_is_read_as_it_was_written(micros):
    field = record.format_ts(micros)
    assert record.parse_ts(field) == micros
    assert len(field.partition(b".")[2]) == 6


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"17|1700000000.000001|t.k|1|2|x|y", (17, 1_700_000_000_000_001)),
        (b"17|1700000000.000001|t.k|||", (17, 1_700_000_000_000_001)),
        (b"17|1700000000.000001|t.k||", None),
        (b"17|1700000000.00001|t.k|1|2|x", None),
        (b"17|1700000000.000001||1|2|x", None),
        (b"x|1700000000.000001|t|1|2|x", None),
        (b"17|1700000000.000001|t|1|2|\0", None),
        (b"7|17000", None),
        (b"", None),
    ],
)
def test_parse_stored_takes_only_whole_stored_lines(line, found):
    assert record.parse_stored(line) == found


@pytest.mark.parametrize(("count", "wanted"), [(0, b""), (1, b"a\rb\n"), (2, b"a\rb\nc\n"), (9, b"a\rb\nc\n")])
def test_only_a_newline_ends_a_line(count, wanted):
    assert record.first_lines(b"a\rb\nc\n", count) == wanted
