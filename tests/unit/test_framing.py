"""From the text of the FIFO, and the ring it speaks of, to the lines of a block, and to the replies of producers."""

import random
import re

import pytest
from framing_steps import MAX, P, Steps, W, cuts_in, mine, one_by_one, random_traffic, randomly, source_of, table
from received_ends import ME, Way, joined, messages, plain

from kmq.framing import parser
from kmq.framing.blocks import LineBatch, cuts_of, encode_replies, endless, well_formed
from kmq.framing.parser import ReceivedLines
from kmq.links import layout
from kmq.links.layout import BlockLimits, Received
from kmq.message import record

SMALLEST = 64 << 10  # RB_BYTES
ROOMY = BlockLimits(2048, SMALLEST // 2 - layout.HEADER)
LONG = b"t.long|1|2|" + b"x" * 6000


def batch_of(*parts, known=None, next_seq=1, limits=ROOMY, max_line=MAX):
    """(batch, text): what one look at all of this makes of it."""
    way = Way()
    source = source_of(way)
    text = way.text(*parts)
    known = table() if known is None else known
    return parser.Parser(max_line, known, source, limits).batch(text, next_seq, 0), text


def lines_of(*parts):
    batch, text = batch_of(*parts)
    assert batch.used == len(text) and not batch.replies and not batch.more
    counts = [count for count, *_ in cuts_in(batch)]
    assert sorted({*counts, 0}) == list(range(len(batch.lines) + 1))
    return batch.lines


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: plain(*text.split(b"\n")[:-1])], ids=["FIFO", "ring"])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"t|||a\nt|||b\n", [b"t|||a", b"t|||b"]),
        (b"t|a\n", [b"t|a||"]),
        (b"\n", [b"dead.malformed||;reason=empty_line;len=0|"]),
        (b"u|||\nt|||\0\n", [b"u|||", record.malformed("nul", b"t|||\0", 5, MAX)]),
        (b"!b 1\n", [b"dead.malformed||;reason=control_byte;len=4|!b 1"]),
        (b"!x 1.2 3 4\n", [b"dead.malformed||;reason=control_byte;len=10|!x 1.2 3 4"]),
        (b"u|||\n-a minus\n", [b"u|||", b"dead.malformed||;reason=control_byte;len=8|-a minus"]),
        (b"+t|||a\n-b\n", [record.admit(b"+t|||a", MAX), record.admit(b"-b", MAX)]),
        (b"u|1|5;p=a|claimed\n", [b"u|1|5%3Bp=a|claimed"]),
        (LONG + b"\n", [LONG]),
        (b"t|||" + b"x" * (MAX - 4) + b"\n", [b"t|||" + b"x" * (MAX - 4)]),
        (b"!hello " + LONG + b"\n", [record.admit(b"!hello " + LONG, MAX)]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_text_becomes_lines_wherever_it_lies(wrap, text, lines):
    assert lines_of(wrap(text)) == lines == [record.admit(line, MAX) for line in text.split(b"\n")[:-1]]


@pytest.mark.parametrize("is_received", [False, True])
def test_plain_text_goes_through_in_one_piece_and_says_its_common_key(is_received):
    lines = [b"t.k|1|2|a", b"t.k|1|2|b"]
    batch, text = batch_of(plain(*lines) if is_received else joined(lines))
    assert (batch.lines, batch.cuts, batch.used, batch.key) == (lines, None, len(text), b"t.k")
    assert (batch.is_received, batch.begin, batch.position) == (is_received, 0, 20 if is_received else 0)
    assert well_formed(b"t.k|1|2|a\nno separator\n", 1) is None
    assert well_formed(b"t.k|1|2;p=x|a\n", 1) is None


def test_adjoining_pieces_go_through_as_one_and_with_an_empty_one_between():
    way = Way()
    source = source_of(way)
    text = way.text(plain(b"t|||1", b"t|||2"), plain(b"t|||3"))
    text += b"!r %d %d %d\n" % (way.writer.birth, way.writer.head, way.writer.head) + way.text(plain(b"t|||4"))
    batch = parser.Parser(MAX, table(), source, ROOMY).batch(text, 1, 0)
    assert batch.lines == [b"t|||%d" % n for n in range(1, 5)] and batch.cuts is None and batch.used == len(text)


def test_a_text_that_fills_an_area_without_an_end_is_one_refused_line():
    batch = endless(7, 12345, b"x" * 20_000, MAX)
    assert batch.lines == [record.malformed("too_long", b"x" * 20_000, 20_000, MAX)]
    assert (batch.next_seq, batch.used, batch.position, cuts_in(batch)) == (7, 20_000, 12345, [(1, 20_000, 12345)])


def random_parts(rng):
    """Lines of the FIFO and of the ring, good, long and bad ones; and what becomes of them."""
    parts, lines = [], []
    for _ in range(rng.randrange(1, 12)):
        more = []
        for _ in range(rng.randrange(1, 5)):
            kind = rng.randrange(8)
            if kind < 4:
                more.append(b"t.k|1|%d|x" % rng.randrange(1000))
            elif kind == 4:
                more.append(b"t.long|1|2|" + b"%d " % rng.randrange(1000) * rng.randrange(1, 1500))
            else:
                more.append(rng.choice([b"", b"no separator", b"t|pad", b"!x", b"-x", b"+x", b"../x|||", b"t|||!\xff"]))
        lines += [record.admit(line, MAX) for line in more]
        parts.append(plain(*more) if rng.randrange(2) else joined(more))
    return parts, lines


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_committing_any_prefix_and_framing_the_rest_gives_the_same_lines(seed):
    rng = random.Random(seed)
    for _ in range(100):
        parts, expected = random_parts(rng)
        way = Way()
        text = way.text(*parts)
        source = ReceivedLines(way.attach, Received(way.writer.birth, 0))
        batch = parser.Parser(MAX, table(), source, ROOMY).batch(text, 1, 0)
        assert batch.lines == expected
        places = cuts_in(batch)
        assert [end for _, end, _ in places] == sorted(end for _, end, _ in places)
        assert [position for *_, position in places] == sorted(position for *_, position in places)
        for done, end, position in places:
            source = ReceivedLines(way.attach, Received(way.writer.birth, position))
            way.spoil()
            rest = parser.Parser(MAX, table(), source, ROOMY).batch(text[end:], 1, 0).lines if end < len(text) else []
            assert batch.lines[:done] + rest == expected


def test_a_name_that_is_asked_for_is_answered_in_its_place_with_its_last_id():
    """`!l` is what ingress asks for a hello with last=?; the line is none of anybody's."""
    ask = b"!l 17.1 0 p=me\n"
    parts = ask, messages(mine(5, 6), 1, P), ask, b"u|||\n", ask, messages(mine(9), 3, P), b"!l 17.2 0 p=you\n!l 17.1\n"
    lines, replies = framed(*parts)
    wrapped = b"dead.malformed||;reason=control_byte;len=7|!l 17.1"
    assert lines == [*mine(5, 6, tag=b";p=me"), b"u|||", *mine(9, tag=b";p=me"), wrapped]
    assert replies == [b"0 !last 0", b"1 !ack 2 102", b"0 !last 6", b"0 !last 6", b"3 !ack 3 104", b"17.2 0 !last 0"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_matter_how_the_text_arrives(seed):
    rng = random.Random(seed)
    for _ in range(100):
        parts, expected = random_parts(rng)
        steps, at = Steps(table(), randomly(rng)), 0
        text = steps.way.text(*parts)
        while at < len(text):
            step = rng.choice([1, 3, 10, 50, 400])
            steps.read(text[at : at + step])
            at += step
        assert steps.lines == expected and not steps.waiting


# --- messages of connections that wait for replies --------------------------------------------------------------------


def framed(*parts, known=None, next_seq=101):
    """(stored lines, replies without their connection) where all of it goes into one block."""
    batch, text = batch_of(*parts, known=known, next_seq=next_seq)
    assert batch.used == len(text)
    return batch.lines, told(encode_replies(batch.replies, 0, next_seq))


def told(replies, conn=ME):
    return [line.removeprefix(conn + b" ") for line in replies.split(b"\n")[:-1]]


ERRORS = {
    b"": b"empty_line",
    b"no separator": b"no_separator",
    b"|1|2|x": b"empty_routing_key",
    b"a/b|1|2|x": b"bad_topic",
    b"append|1|2|x": b"reserved_topic",
    b"!x|1|2|": b"control_byte",
    b"-x|1|2|": b"control_byte",
    b"t|1|2|\0": b"nul",
    b"t|1|2|" + b"x" * MAX: b"too_long",  # ingress cuts it at MAX + 1
    b"x" * (MAX + 1): b"too_long",  # whatever was cut away may have had a separator
}
BAD_ID = b"bad_id a producer's ids are decimal numbers of at most 18 digits"
OWN_HEADER = b"bad_id the headers p= and w= are KMQ's own"


@pytest.mark.parametrize(
    ("sent", "tag", "lines", "replies"),
    [
        # neither producer nor window: stored as sent, as often as sent
        (mine(1, 2), b"", mine(1, 2), [b"1 !ack 2 102"]),
        (mine(b"", b"x;a=b", b"x;a=b"), b"", mine(b"", b"x;a=b", b"x;a=b"), [b"1 !ack 3 103"]),
        ([b"t|x", b"t|"], b"", [b"t|x||", b"t|||"], [b"1 !ack 2 102"]),
        (mine(b"1;p=you", b"2;a=b;w=x"), b"", mine(b"1%3Bp=you", b"2;a=b%3Bw=x"), [b"1 !ack 2 102"]),
        # a producer
        (mine(1), P, mine(1, tag=b";p=me"), [b"1 !ack 1 101"]),
        (mine(5, 6, 7), P, mine(5, 6, 7, tag=b";p=me"), [b"1 !ack 3 103"]),
        (mine(5, 7, 10**18 - 1), P, mine(5, 7, 10**18 - 1, tag=b";p=me"), [b"1 !ack 3 103"]),
        (mine(0, 1), P, mine(0, 1, tag=b";p=me"), [b"1 !ack 2 102"]),
        (mine(5, 5, 6), P, mine(5, 6, tag=b";p=me"), [b"1 !ack 1 101", b"2 !dup 2 101", b"3 !ack 3 102"]),
        (mine(5, 6, 7, 6, 5), P, mine(5, 6, 7, tag=b";p=me"), [b"1 !ack 3 103", b"4 !dup 4 102", b"5 !dup 5 101"]),
        (
            mine(5, 9, 7, 10),
            P,
            mine(5, 9, 10, tag=b";p=me"),
            [b"1 !ack 2 102", b"3 !err 3 id_too_old", b"4 !ack 4 103"],
        ),
        (
            mine(5, 4),
            P,
            mine(5, tag=b";p=me"),
            [b"1 !ack 1 101", b"2 !err 2 id_too_old"],
        ),
        (mine(b"1;a=b;c=d"), P, mine(b"1;p=me;a=b;c=d"), [b"1 !ack 1 101"]),
        (mine(b"1;p=me", b"2;a=b;p=me"), P, mine(b"1;p=me", b"2;p=me;a=b"), [b"1 !ack 2 102"]),
        ([b"t|x", b"t|1|7"], P, [b"t|1|7;p=me|"], [b"1 !err 1 " + BAD_ID, b"2 !ack 2 101"]),
        *[(mine(id, 1), P, mine(1, tag=b";p=me"), [b"1 !err 1 " + BAD_ID, b"2 !ack 2 101"]) for id in
          (b"", b"x", b"-1", b"+1", b"1.5", b" 1", b"1_0", b"1" * 19, "\u0661".encode(), b"9" * 4000, b"0" * 19 + b"x")],
        *[(mine(b"1" + header, 2), P, mine(2, tag=b";p=me"), [b"1 !err 1 " + OWN_HEADER, b"2 !ack 2 101"]) for header in
          (b";p=you", b";w=me", b";a=b;p=you", b";p=")],
        # a window
        (mine(b"b", b"a"), W, mine(b"b", b"a", tag=b";w=me"), [b"1 !ack 2 102"]),
        (mine(b"a", b"b", b"a"), W, mine(b"a", b"b", tag=b";w=me"), [b"1 !ack 2 102", b"3 !dup 3 101"]),
        (mine(b"a;c=d", b"a;e=f"), W, mine(b"a;w=me;c=d"), [b"1 !ack 1 101", b"2 !dup 2 101"]),  # one letter: KMQ's
        (mine(b"a;c=d", b"a;x=1;c=d;enc=b64;w=me"), W, mine(b"a;w=me;c=d"), [b"1 !ack 1 101", b"2 !dup 2 101"]),
        # known, and the same but for what a retry may change
        ([b"t.k|1|1|x", b"t.k|2|1|x", b"t.@3.k||1;p=me|x", b"t.@.k|9|01;n=5|x"], P, [b"t.k|1|1;p=me|x"],
         [b"1 !ack 1 101", b"2 !dup 2 101", b"3 !dup 3 101", b"4 !dup 4 101"]),
        ([b"t.@1|1|1|x", b"t|2|1|x", b"t.@|3|1|x", b"t.@.|3|1|x"], P, [b"t.@1|1|1;p=me|x"],
         [b"1 !ack 1 101", b"2 !dup 2 101", b"3 !dup 3 101", b"4 !err 4 id_reused 101"]),
        # known, and other content: topic, key, the user's headers, payload
        *[([b"t.k|1|1;aa=b|x", *mine(2), other], tag, [b"t.k|1|1;" + tag + b";aa=b|x", *mine(2, tag=b";" + tag)],
           [b"1 !ack 2 102", b"3 !err 3 id_reused 101"]) for tag in (P, W) for other in
          (b"u.k|1|1;aa=b|x", b"t.l|1|1;aa=b|x", b"t|1|1;aa=b|x", b"t.k|1|1|x", b"t.k|1|1;aa=c|x", b"t.k|1|1;aa=b;bb=|x",
           b"t.k|1|1;aa=b|y", b"t.k|1|1;aa=b|", b"t.k|1|1;aa=b|" + b"x" * 99, b"t.@alice.k|1|1;aa=b|x")],
        ([*mine(7, 8), b"t.k|1|7|y", *mine(9, 7)], P, mine(7, 8, 9, tag=b";p=me"),
         [b"1 !ack 2 102", b"3 !err 3 id_reused 101", b"4 !ack 4 103", b"5 !dup 5 101"]),
        (mine(b"a;w=me"), W, mine(b"a;w=me"), [b"1 !ack 1 101"]),
        (mine(b"a" * 256), W, mine(b"a" * 256, tag=b";w=me"), [b"1 !ack 1 101"]),
        *[(mine(id), W, [], [b"1 !err 1 bad_id a message in a window needs an id of 1 to 256 bytes"]) for id in
          (b"", b"a" * 257, b";a=b")],
        (mine(b"a;p=me", b"b;w=you"), W, [], [b"1 !err 1 " + OWN_HEADER, b"2 !err 2 " + OWN_HEADER]),
        # what is no message is refused in its place, and stores nothing
        *[([*mine(1), bad, *mine(2)], tag, mine(1, 2, tag=b";" + tag if tag else b""),
           [b"1 !ack 1 101", b"2 !err 2 " + reason, b"3 !ack 3 102"])
          for bad, reason in ERRORS.items() for tag in (b"", P, W)],
        ([b"", b""], P, [], [b"1 !err 1 empty_line", b"2 !err 2 empty_line"]),
        ([b"t|1|1|" + b"x" * 6000], P, [b"t|1|1;p=me|" + b"x" * 6000], [b"1 !ack 1 101"]),
        ([b"t|1|1|" + b"x" * (MAX - 6)], b"", [b"t|1|1|" + b"x" * (MAX - 6)], [b"1 !ack 1 101"]),
        ([b"t|1|1|" + b"x" * (MAX - 5)], b"", [], [b"1 !err 1 too_long"]),
        ([b"a/b|1|1|" + b"x" * 6000], P, [], [b"1 !err 1 bad_topic"]),
        ([b"+b|1|1|" + b"x" * 6000], P, [], [b"1 !err 1 control_byte"]),
        ([b"!e nul"], P, [], [b"1 !err 1 control_byte"]),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_messages_are_stored_and_answered_one_by_one(sent, tag, lines, replies):
    assert framed(messages(sent, tag=tag)) == (lines, replies)


def test_messages_among_other_lines_are_answered_and_they_are_not():
    parts = b"u|||a\n", messages(mine(5, 4, 6), tag=P), b"v|||b\nno separator\n", plain(b"w|||", b"no separator")
    batch, text = batch_of(*parts, next_seq=100)
    wrapped = b"dead.malformed||;reason=no_separator;len=12|no separator"
    assert batch.lines == [b"u|||a", *mine(5, 6, tag=b";p=me"), b"v|||b", wrapped, b"w|||", wrapped]
    assert told(encode_replies(batch.replies, 0, 100)) == [
        b"1 !ack 1 101",
        b"2 !err 2 id_too_old",
        b"3 !ack 3 102",
    ]
    assert batch.used == len(text)


def test_messages_of_many_connections_get_their_replies_and_consecutive_acks_merge():
    you = b"17.2"
    lines, replies = framed(
        messages(mine(1, 2), 1, P),
        messages(mine(3), 3, P),
        messages(mine(1), 1, b"p=you", you),
        messages(mine(4, 5), 4, P),
        messages(mine(2), 2, b"p=you", you),
        messages(mine(3), 3, b"p=you", you),
    )
    own, other = b";p=me", b";p=you"
    assert lines == mine(1, 2, 3, tag=own) + mine(1, tag=other) + mine(4, 5, tag=own) + mine(2, 3, tag=other)
    assert replies == [b"1 !ack 3 103", b"17.2 1 !ack 1 104", b"4 !ack 5 106", b"17.2 2 !ack 3 108"]


def test_two_connections_of_one_producer_share_its_ids():
    lines, replies = framed(messages(mine(1, 2), 1, P), messages(mine(2, 3), 1, P, b"17.2"))
    assert lines == mine(1, 2, 3, tag=b";p=me")
    assert replies == [b"1 !ack 2 102", b"17.2 1 !dup 1 102", b"17.2 2 !ack 2 103"]


def test_what_was_stored_before_is_answered_with_its_seq_and_not_stored_again():
    known = table()
    assert framed(messages(mine(1, 2, 3), tag=P), messages(mine(b"a"), tag=W), known=known, next_seq=7)[0]
    lines, replies = framed(
        messages(mine(2, 3, 4), 4, P), messages(mine(b"a", b"b"), 2, W, b"17.2"), known=known, next_seq=20
    )
    assert lines == [*mine(4, tag=b";p=me"), *mine(b"b", tag=b";w=me")]
    assert replies == [b"4 !dup 4 8", b"5 !dup 5 9", b"6 !ack 6 20", b"17.2 2 !dup 2 10", b"17.2 3 !ack 3 21"]


def test_a_full_table_refuses_new_names_and_serves_known_ones():
    parts = messages(mine(1), 1, P), messages(mine(1, 2), 1, b"p=you", b"17.2"), messages(mine(2), 2, P)
    lines, replies = framed(*parts, known=table(producers=1))
    full = b"producers_full KMQ_PRODUCERS names are remembered already"
    assert lines == mine(1, 2, tag=b";p=me")
    assert replies == [b"1 !ack 1 101", b"17.2 1 !err 1 " + full, b"17.2 2 !err 2 " + full, b"2 !ack 2 102"]
    parts = messages(mine(1), 1, b"p=k1000001.1.0"), messages(mine(1), 2, b"p=k1000001.1.1"), messages(mine(1), 3, P)
    full = b"producers_full KMQ_KAFKA_PRODUCERS names are remembered already"
    assert framed(*parts, known=table(kafka=1))[1] == [b"1 !ack 1 101", b"2 !err 2 " + full, b"3 !ack 3 102"]


@pytest.mark.parametrize(
    ("part", "is_quick"),
    [
        (b"u|||\n", True),
        (b"\n", False),
        (b"!x\n", False),
        (b"!l 17.1 0 p=me\n", False),
        (plain(b"u|||"), True),
        (plain(b"", b"u|"), False),
        (messages([b"", b""], 1, P), False),
        (messages(mine(3, 2, 1), 1, P), False),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("is_one_piece", [False, True])
def test_a_turn_looks_at_so_many_lines_and_leaves_the_rest_for_the_next(part, is_quick, is_one_piece):
    """Whatever is sent, the framer gives a sign of life after some thousand lines."""
    count = 25_000
    if isinstance(part, bytes):
        parts = [part * count]
    elif is_one_piece:
        parts = [part._replace(lines=part.lines * (count // len(part.lines)))]
    else:
        parts = [part] * (count // len(part.lines))
    steps, turns, done = Steps(table(), limits=ROOMY, way=Way(4 << 20)), 0, 0
    steps.waiting = steps.way.text(*parts)
    while steps.turn():
        turns += 1
        looked = len(steps.lines) + sum(
            b"!err" in reply or b"!dup" in reply or b"!last" in reply for reply in steps.replies
        )
        assert looked - done <= parser.TURN + 3 or is_quick
        done = looked
    assert done in (count, count // 3 * 3) and not steps.waiting
    assert turns == 1 if is_quick else turns >= 3  # lines that are well formed cost next to nothing


def test_messages_may_be_cut_where_a_part_of_them_ends_and_control_lines_go_with_their_last_message():
    parts = (
        messages(mine(1, 2), 1, P),
        messages(mine(2, 3, 4), 3, P),
        b"u|||\nv|||\n",
        messages([b""], 6, P),
        plain(b"w|||", b"x|||"),
    )
    batch, text = batch_of(*parts)
    first, second, third = (text.index(b"!c"), text.index(b"!c", 2), text.rindex(b"!c"))
    shell, last = text.index(b"u|||"), text.index(b"!r")
    assert (first, shell + 10) == (0, third)
    lengths = [len(joined(part.lines)) for part in parts if not isinstance(part, bytes)]
    one, two, three, four = (sum(lengths[: n + 1]) for n in range(4))
    message = len(mine(1)[0]) + 1
    assert batch.cuts == [
        (2, second, one),  # stored together: cut only at its end
        (2, second, one + message),  # the 2 is known, so each of these was looked at
        (3, second, one + 2 * message),
        (4, shell, two),
        (5, shell + 5, two),
        (6, third, two),
        (6, last, three),
        (7, last, three + 5),
        (8, len(text), four),
    ]


def test_replies_of_a_part_of_a_batch_have_the_seqs_of_its_block():
    """As when drop_oldest, or a full ring, lets the first block have other seqs than the second would follow from."""
    batch, _ = batch_of(b"u|||\n", messages(mine(1, 2), 1, P), messages(mine(3), 3, P), next_seq=101)
    replies = batch.replies
    assert told(encode_replies(replies, 0, 101)) == [b"1 !ack 3 104"]
    assert told(encode_replies(replies[:1], 1, 102)) == [b"1 !ack 2 103"]
    assert told(encode_replies(replies[1:], 3, 104)) == [b"3 !ack 3 104"]
    assert encode_replies([], 0, 1) == b""


def random_singles(rng, way):
    """Control lines of one message each, for pieces that adjoin, and some that a stranger might make up."""
    way.put([b"t|||" + b"x" * rng.choice([0, 700])] * rng.randrange(3))
    start, moved, text = way.writer.head, 0, b""
    for n in range(rng.randrange(2, 12)):
        room = way.writer.size - way.writer.head % way.writer.size
        to_the_end = [b"t|||" + b"x" * (room - 5)] if 5 <= room < 9000 else [b"t|||"]  # the next one lies at the start
        odd = rng.choice([[b""], [b"t|%d" % n], [b"t|||" + b"x" * 9000], [b"t||1;w=a|"], [b"t|||1", b"t|||2"]])
        at, end = way.put(rng.choice([[b"t.k|%d||x" % n]] * 20 + [to_the_end] * 9 + [odd]))
        birth = way.writer.birth + (not rng.randrange(60))
        at, moved = (
            at - moved,
            rng.choice([0] * 20 + [1, 2, end - at]),
        )  # the border between two pieces is no end of a line
        end -= moved
        at, end = rng.choice([(at, end)] * 40 + [(at, at), (at + 2, end), (at, end - 1), (start, end), (at, end + 50)])
        right = rng.choice([b""] * 40 + [b" reserved", b" p=me"])
        text += b"!c 17.%d %d 1 %d %d %d%b\n" % (n, n + 1, birth, at, end, right)
        text += rng.choice([b""] * 40 + [b"u|||\n", b"!l 17.1 0 p=me\n", b"!c 17.1 1 2 1 0 9\n"])
    return text


def test_messages_of_many_connections_are_taken_together_as_one_by_one(monkeypatch):
    rng, way, together, singles = random.Random(12), Way(1 << 16), [], parser.Parser._singles
    source = source_of(way)

    def counted(*arguments):
        together.append(singles(*arguments))
        return together[-1]

    monkeypatch.setattr(parser.Parser, "_singles", counted)
    for _ in range(3000):
        text, found = random_singles(rng, way), []
        for pattern in (parser.SINGLE, re.compile(b"(?!)")):
            with monkeypatch.context() as patched:
                patched.setattr(parser, "SINGLE", pattern)
                batch = parser.Parser(MAX, table(), source, ROOMY).batch(text, 1, 0)
            found.append((batch.lines, batch.replies, batch.cuts, batch.used, batch.position, batch.more))
        assert found[0] == found[1], text
        source.committed(Received(source.done.birth, way.writer.head))
        way.put([b"the ring is not empty, or it would be begun anew"])
    assert len(together) > len(list(filter(None, together))) > 1000


def test_a_bad_message_among_many_connections_costs_one_more_look_at_each_at_most(monkeypatch):
    """Of a stranger who sends one in every turn, so that the others' messages are looked at one by one."""

    class Counting:
        def __init__(self, pattern):
            self.match = lambda *where: (looks.append(where), pattern.match(*where))[1]

    looks = []
    monkeypatch.setattr(parser, "SINGLE", Counting(parser.SINGLE))
    sent = [[b"t|||%d" % n] for n in range(1000)]
    sent[990] = [b"no separator"]
    batch, _ = batch_of(*(messages(lines, 1, b"", b"17.%d" % n) for n, lines in enumerate(sent)))
    assert len(batch.lines) == 999 and len(batch.replies) == 1000 and len(looks) == 1001


# --- the same in the plainest words ------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_each_message_is_stored_once_with_its_own_seq_however_traffic_is_cut(seed):
    rng, kinds = random.Random(seed), set()
    for _ in range(100):
        parts, model = random_traffic(rng)
        steps = Steps(table(), randomly(rng), limits=rng.choice([ROOMY, BlockLimits(64, 8000), BlockLimits(1, 256)]))
        text, at = steps.way.text(*parts), 0
        while at < len(text):
            step = rng.choice([1, 20, 300, 5000])
            steps.read(text[at : at + step])
            at += step
        assert steps.lines == model.lines
        said = one_by_one(steps.replies)
        assert said == model.said
        kinds |= {reply.split()[0] if reply[:1] != b"e" else reply for reply in said.values()}
    assert kinds == {
        b"ack",
        b"dup",
        *(b"err " + k for k in (b"empty_line", b"no_separator", b"bad_id", b"id_too_old", b"id_reused")),
    }


# --- blocks ------------------------------------------------------------------------------------------------------------


def stops(batch, max_count=2048, max_bytes=ROOMY.nbytes):
    """Where the framer cuts a batch into blocks of a ring like that: the messages before each cut."""
    return [cuts_in(batch)[number] for number in cuts_of(batch, BlockLimits(max_count, max_bytes))]


def blocks(batch, max_count, max_bytes):
    """(messages, bytes) of each block, lines and replies as they will be."""
    start, replies = 0, batch.replies
    for number in cuts_of(batch, BlockLimits(max_count, max_bytes)):
        stop = cuts_in(batch)[number][0]
        lines = batch.lines[start:stop]
        block = record.number(lines, 10**18, b"1732190000.000000")[0] if lines else b""
        said = [reply for reply in replies if reply[0] <= number]
        replies = replies[len(said) :]
        yield len(lines), len(block) + len(encode_replies(said, start, 10**18))
        start = stop
    assert not replies


def counts(found):
    return [count for count, *_ in found]


@pytest.mark.parametrize(
    ("parts", "max_count", "found"),
    [
        ([b"t|||\n" * 5], 9, [5]),
        ([b"t|||\n" * 5], 5, [5]),
        ([b"t|||\n" * 5], 2, [2, 4, 5]),
        ([plain(*[b"t|||"] * 5)], 9, [5]),
        ([plain(*[b"t|||"] * 5)], 2, [2, 4, 5]),
        ([plain(b"x", b"y", b"z")], 2, [2, 3]),
        ([b"x\n", b"y\n"], 9, [2]),
        ([b"x\n", b"y\n"], 1, [1, 2]),
        ([messages([b"", b""])], 1, [0]),  # replies only
        ([messages(mine(1, 2, 3))], 2, [3]),  # never cut, whatever the ring would like: no part fits otherwise
        ([messages(mine(1, 2)), messages(mine(3), 3)], 2, [2, 3]),
        ([messages(mine(1, 2)), plain(b"t|||", b"t|||"), messages(mine(3), 3)], 3, [3, 5]),
    ],
)  # fmt: skip
def test_a_batch_is_cut_into_blocks_of_so_many_messages(parts, max_count, found):
    batch, text = batch_of(*parts)
    assert counts(stops(batch, max_count)) == found
    assert stops(batch, max_count)[-1] == (len(batch.lines), len(text), batch.position)
    assert cuts_of(LineBatch(1), BlockLimits(max_count, 1000)) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_are_cut_into_blocks_that_fit_and_are_not_too_small(seed):
    rng = random.Random(seed)
    cut = 0
    for _ in range(50):
        parts, _ = random_traffic(rng, rng.choice([5, 60, 300]))
        max_count, max_bytes = rng.choice([64, 2048]), rng.choice([10_000, SMALLEST // 2])
        batch, _ = batch_of(*parts, limits=BlockLimits(max_count, max_bytes))
        found = stops(batch, max_count, max_bytes)
        assert found[-1] == batch.cuts[-1] and set(found) <= set(batch.cuts)
        sizes = list(blocks(batch, max_count, max_bytes))
        assert all(count <= max_count and nbytes <= max_bytes for count, nbytes in sizes)
        total, total_bytes = map(
            sum, zip(*sizes, strict=True)
        )  # replies are reckoned longer than they are: ten, not two
        assert len(found) <= 2 + 2 * total // max_count + 10 * total_bytes // max_bytes
        cut += len(found) > 1
    assert cut > 20


@pytest.mark.parametrize("is_received", [False, True])
def test_plain_lines_of_every_length_are_cut_into_blocks_that_fit(is_received):
    rng = random.Random(8)
    for _ in range(100):
        lines = [b"t|||" + b"x" * rng.choice([0, 50, 4000]) for _ in range(rng.randrange(1, 300))]
        batch, _ = batch_of(plain(*lines) if is_received else joined(lines))
        done = batch.position if is_received else batch.used
        assert batch.cuts is None or done >= parser.TURN_BYTES
        found = stops(batch, 64)
        assert found[-1][0] == len(lines)
        assert all(count <= 64 and nbytes <= ROOMY.nbytes for count, nbytes in blocks(batch, 64, ROOMY.nbytes))


LONGEST_NAME, LONGEST_CONN = b"p=" + b"A" * 64, b"9" * 20 + b"." + b"9" * 20


@pytest.mark.parametrize(
    "sent",
    [
        mine(*range(1, 3001)),
        mine(*range(2, 6002, 2)),
        [id for n in range(2, 1002) for id in mine(n, n)],  # each is stored, then sent again
        [id for n in range(9, 1009) for id in mine(n, 1)],  # each is stored, then one out of order
        mine(*[b"x"] * 3000),
        [b""] * 3000,
        [b"t.k|1|%d|" % n + b"x" * 7000 for n in range(1, 30)],
    ],
    ids=["a run", "gaps", "duplicates", "out of order", "bad ids", "empty lines", "long ones"],
)
@pytest.mark.parametrize("max_count", [1, 64, 2048])
def test_a_large_piece_is_cut_into_blocks_of_the_smallest_ring(sent, max_count):
    """A part that did not fit would stop the framer for ever."""
    limits = BlockLimits(max_count, ROOMY.nbytes)
    batch, _ = batch_of(messages(sent, 10**17, LONGEST_NAME, LONGEST_CONN), limits=limits)
    sizes = list(blocks(batch, *limits))
    assert batch.replies and all(count <= max_count and nbytes <= ROOMY.nbytes for count, nbytes in sizes)
    assert sum(count for count, _ in sizes) == len(batch.lines)
