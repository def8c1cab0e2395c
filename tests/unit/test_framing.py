"""From the text of the FIFO to the lines of a block: fragments, other writers' lines between them, restarts of ingress.

And the groups of acknowledged connections: what is stored of each message, and what its producer is told.
"""

import random
import re

import pytest
from framing_steps import MAX, ME, P, Steps, W, frame, group, mine, one_by_one, random_traffic, randomly, table

from kmq import record
from kmq.framing import parser
from kmq.framing.batch import Batch, plain
from kmq.framing.blocks import cuts_of, encode_replies
from kmq.links import layout
from kmq.links.raw import fragments, reassemble, whole
from kmq.settings import PIPE_BUF


def expected(text):
    """The same in the plainest words: each line where it is complete, long ones where their last piece stands."""
    lines, held = [], []
    for raw in text.split(b"\n")[:-1]:
        if raw.startswith(b"+"):
            held.append(raw[1:])
        elif raw.startswith(b"-") and held:
            lines.append(record.admit(b"".join([*held, raw[1:]]), MAX))
            held = []
        elif raw.startswith(b"!b "):
            held = []
        else:
            lines.append(record.admit(raw, MAX))
    return lines


LONG = b"t.long|1|2|" + b"x" * 6000
LONG_FRAGMENTS = fragments(LONG)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"t|||a\nt|||b\n", [b"t|||a", b"t|||b"]),
        (b"t|a\n", [b"t|a||"]),
        (b"\n", [b"dead.malformed||;reason=empty_line;len=0|"]),
        (b"+t|||a\n-b\n", [b"t|||ab"]),
        (b"+t|||a\n+b\n-c\nu|||\n", [b"t|||abc", b"u|||"]),
        (b"+t|||a\nu|||between\n-b\n", [b"u|||between", b"t|||ab"]),
        (b"+t|||a\n!b 1\nu|||\n", [b"u|||"]),
        (b"+t|||a\nu|||\n!b 1\n-b\n", [b"u|||", b"dead.malformed||;reason=control_byte;len=2|-b"]),
        (b"!b 1\n", []),
        (b"!x 1.2 3 4\n", [b"dead.malformed||;reason=control_byte;len=10|!x 1.2 3 4"]),
        (b"-no first piece\n", [b"dead.malformed||;reason=control_byte;len=15|-no first piece"]),
        (b"+t|||unfinished\n", []),
        (b"u|||\n+t|||unfinished\nv|||\n", [b"u|||", b"v|||"]),
        (LONG_FRAGMENTS, [LONG]),
        (fragments(b"!hello " + LONG), [record.admit(b"!hello " + LONG, MAX)]),
    ],
)
def test_text_becomes_lines(text, lines):
    assert frame(text)[0] == lines == expected(text)


def test_plain_text_goes_through_in_one_piece_and_says_its_common_key():
    batch = plain(b"t.k|1|2|a\nt.k|1|2|b\n", 1)
    assert (batch.lines, batch.cuts, batch.used, batch.key) == ([b"t.k|1|2|a", b"t.k|1|2|b"], None, 20, b"t.k")
    assert plain(b"t.k|1|2|a\nno separator\n", 1) is None


def test_what_is_unfinished_stays_unused():
    lines, text, ends, used = frame(b"u|||\n+t|||a\n")
    assert (lines, ends, used, text[used:]) == ([b"u|||"], [5], 5, b"+t|||a\n")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"t|||a\n",
        b"+t|||a\nt|||b\n",
        b"!c 1.2 1 2 l=12 p=x\nt||1|a\nt||2|",
        b"t|||a\n!c 1.2 1 2 l=14 p=x\nt||1|a\nt||2|b\n",
        b"!c 1.2 1 1\nt||1|a\n!c 1.2 2 2\nt||2|a\nt||3|a\n",
        b"!c 1.2 1 2 l=14\nt||1|a\nt||2|b\nt|||c\n",
        b"!c not ours\nt|||a\n",
    ],
)
def test_what_is_whole_ends_with_a_line_and_never_in_a_group(text):
    """Wherever it is cut: what is kept is what the lines and groups before the cut are."""
    ends, at = [0], 0
    while at < len(text):
        header = re.match(rb"!c [\d.]+ \d+ (\d+).*\n", text[at:])
        for _ in range(1 + int(header[1]) if header else 1):
            at = text.find(b"\n", at) + 1 or len(text) + 1
        ends.append(at)
    for cut in range(len(text) + 1):
        assert whole(text[:cut]) == max(end for end in ends if end <= cut)


def test_reassemble_returns_the_same_object_when_nothing_is_mixed():
    for text in (b"t|||\n", LONG_FRAGMENTS, b"t|||\n" + LONG_FRAGMENTS + b"t|||\n", b"+t|||a\n"):
        assert reassemble(text) is text


def test_reassemble_moves_an_unfinished_line_to_the_end():
    assert reassemble(b"+a\nx|||\n+b\ny|||\n") == b"x|||\ny|||\n+a\n+b\n"


def test_fragments_without_end_are_kept_in_parts_as_too_long():
    piece = b"+" + b"x" * 4094 + b"\n"
    lines, _, _, used = frame(piece * 5)
    assert len(lines) == 1 and lines[0].startswith(b"dead.malformed||;reason=too_long;len=12282|xxx")
    assert used == 3 * len(piece)  # the fourth and fifth wait for what follows


def test_empty_fragments_do_not_fill_the_staging_area_for_ever():
    for line in (b"+\n", b"+x\n"):
        assert 0 < frame(line * 1000)[3] <= len(line) * 1000
        assert frame(line * 1000)[0][0].startswith(b"dead.malformed||;reason=too_long;")


def random_text(rng):
    """Whole lines and long ones in fragments, with lines of other writers and restarts of ingress between."""
    out = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(8)
        if kind < 3:
            out.append(b"t.k|1|%d|x\n" % rng.randrange(1000))
        elif kind == 3:
            out.append(rng.choice([b"\n", b"no separator\n", b"t|pad\n", b"!x\n", b"-x\n", b"../x|||\n", b"t|||\0\n"]))
        elif kind == 4:
            out.append(b"!b %d\n" % rng.randrange(1000))
        else:
            cuts = [b"t.long|1|2|"] + [b"%d " % rng.randrange(1000) for _ in range(rng.randrange(1, 5))]
            for cut in cuts[:-1]:
                out.append(b"+%b\n" % cut)
                out += [b"other|1|%d|y\n" % rng.randrange(1000)] * rng.choice([0, 0, 1, 2])
            if rng.randrange(6):
                out.append(b"-%b\n" % cuts[-1])
            else:
                out.append(b"!b 1\n")  # nobody but a new ingress begins another long line in the middle of one
    return b"".join(out)


def test_committing_any_prefix_and_framing_the_rest_gives_the_same_lines():
    rng = random.Random(4)
    for _ in range(1500):
        text = random_text(rng)
        lines, ordered, ends, used = frame(text)
        assert lines == expected(text)
        for done, end in enumerate(ends, start=1):
            assert end <= used
            rest = frame(ordered[end:])[0] if end < len(ordered) else []
            assert lines[:done] + rest == lines


def test_a_name_that_is_asked_for_is_answered_in_its_place_with_its_last_id():
    """`!l` is what ingress asks for a hello with last=?; the line is none of anybody's."""
    ask = b"!l 17.1 p=me\n"
    text = ask + group(mine(5, 6), 1, P) + ask + b"u|||\n" + ask + group(mine(9), 3, P) + b"!l 17.2 p=you\n!l 17.1\n"
    lines, replies = framed(text)
    wrapped = b"dead.malformed||;reason=control_byte;len=7|!l 17.1"
    assert lines == [*mine(5, 6, tag=b";p=me"), b"u|||", *mine(9, tag=b";p=me"), wrapped]
    assert replies == [b"0 !last 0", b"1 !ack 2 102", b"0 !last 6", b"0 !last 6", b"3 !ack 3 104", b"17.2 0 !last 0"]


def test_it_does_not_matter_how_the_text_arrives():
    rng = random.Random(5)
    for _ in range(1500):
        text = random_text(rng)
        lines, waiting, at = [], b"", 0
        while at < len(text):
            step = rng.choice([1, 3, 10, 50, 400])
            waiting += text[at : at + step]
            at += step
            end = waiting.rfind(b"\n") + 1
            if end:
                framed, ordered, _, used = frame(waiting[:end])
                lines += framed
                waiting = ordered[used:] + waiting[end:]
        assert lines == expected(text)


# --- groups ----------------------------------------------------------------------------------------------------------


def framed(text, known=None, next_seq=101):
    """(stored lines, replies without their connection) where all of `text` goes into one block."""
    ordered = reassemble(text)
    batch = parser.Parser(MAX, table() if known is None else known).parse(ordered, next_seq, 0)
    assert batch.used == len(ordered)
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
    b"!e nul": b"nul",  # what ingress has refused itself
    b"!e too_long": b"too_long",
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
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_group_is_stored_and_answered_message_by_message(sent, tag, lines, replies):
    assert framed(group(sent, tag=tag)) == (lines, replies)


def without_length(text):
    """The header without `l=`, the length of the line."""
    return re.sub(rb"(?m)^(!c .*) l=\d+", rb"\1", text)


@pytest.mark.parametrize("change", [lambda text: text, without_length], ids=["l=", "no l="])
def test_a_group_among_other_lines_is_answered_and_they_are_not(change):
    text = b"u|||a\n" + change(group(mine(5, 4, 6), tag=P)) + b"v|||b\nno separator\n+t|||unfinished\n"
    batch = parser.Parser(MAX, table()).parse(text, 100, 0)
    wrapped = b"dead.malformed||;reason=no_separator;len=12|no separator"
    assert batch.lines == [b"u|||a", *mine(5, 6, tag=b";p=me"), b"v|||b", wrapped]
    assert told(encode_replies(batch.replies, 0, 100)) == [
        b"1 !ack 1 101",
        b"2 !err 2 id_too_old",
        b"3 !ack 3 102",
    ]
    assert text[batch.used :] == b"+t|||unfinished\n"


def test_each_group_of_many_connections_gets_its_reply_and_consecutive_acks_merge():
    you = b"17.2"
    text = b"".join(
        [
            group(mine(1, 2), 1, P),
            group(mine(3), 3, P),
            group(mine(1), 1, b"p=you", you),
            group(mine(4, 5), 4, P),
            group(mine(2), 2, b"p=you", you),
            group(mine(3), 3, b"p=you", you),
        ]
    )
    lines, replies = framed(text)
    own, other = b";p=me", b";p=you"
    assert lines == mine(1, 2, 3, tag=own) + mine(1, tag=other) + mine(4, 5, tag=own) + mine(2, 3, tag=other)
    assert replies == [b"1 !ack 3 103", b"17.2 1 !ack 1 104", b"4 !ack 5 106", b"17.2 2 !ack 3 108"]


def test_two_connections_of_one_producer_share_its_ids():
    lines, replies = framed(group(mine(1, 2), 1, P) + group(mine(2, 3), 1, P, b"17.2"))
    assert lines == mine(1, 2, 3, tag=b";p=me")
    assert replies == [b"1 !ack 2 102", b"17.2 1 !dup 1 102", b"17.2 2 !ack 2 103"]


def test_what_was_stored_before_is_answered_with_its_seq_and_not_stored_again():
    known = table()
    assert framed(group(mine(1, 2, 3), tag=P) + group(mine(b"a"), tag=W), known, 7)[0]
    lines, replies = framed(group(mine(2, 3, 4), 4, P) + group(mine(b"a", b"b"), 2, W, b"17.2"), known, 20)
    assert lines == [*mine(4, tag=b";p=me"), *mine(b"b", tag=b";w=me")]
    assert replies == [b"4 !dup 4 8", b"5 !dup 5 9", b"6 !ack 6 20", b"17.2 2 !dup 2 10", b"17.2 3 !ack 3 21"]


def test_a_full_table_refuses_new_names_and_serves_known_ones():
    text = group(mine(1), 1, P) + group(mine(1, 2), 1, b"p=you", b"17.2") + group(mine(2), 2, P)
    lines, replies = framed(text, table(producers=1))
    full = b"producers_full KMQ_PRODUCERS names are remembered already"
    assert lines == mine(1, 2, tag=b";p=me")
    assert replies == [b"1 !ack 1 101", b"17.2 1 !err 1 " + full, b"17.2 2 !err 2 " + full, b"2 !ack 2 102"]


@pytest.mark.parametrize(
    ("unit", "lines"),
    [
        (b"u|||\n", 1),
        (b"\n", 1),
        (b"!b 1\n", 1),
        (group([b"", b""], 1, P), 2),
        (group(mine(3, 2, 1), 1, P), 3),
        (group(mine(1), 1, P) + b"u|\n", 2),
        (b"!c no header\nu|||\n", 2),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_turn_looks_at_so_many_lines_and_leaves_the_rest_for_the_next(unit, lines):
    """Whatever is sent, the framer gives a sign of life after some thousand lines."""
    text = unit * (25_000 // lines)
    known, done, turns = table(), 0, 0
    while done < len(text):
        batch = parser.Parser(MAX, known).parse(text[done:], 1, 0)
        assert batch.used and batch.more == (done + batch.used < len(text))
        assert text.count(b"\n", done, done + batch.used) <= 20_000 or unit == b"u|||\n"
        done, turns = done + batch.used, turns + 1
    assert turns == 1 if unit == b"u|||\n" else turns >= 3  # lines that are well formed cost next to nothing


LONG_GROUP = group([LONG], 5, P)


@pytest.mark.parametrize("between", [b"", b"other|||x\n"])
def test_a_long_line_and_its_group_are_one_wherever_a_read_cuts_them(between):
    """What has been read up to the last newline is framed, the rest waits, as in the framer."""
    first = LONG_GROUP.index(b"\n") + 1
    text = LONG_GROUP[:first] + between + LONG_GROUP[first:]
    for cut in range(1, len(text)):
        steps = Steps(table())
        steps.read(text[:cut])
        steps.read(text[cut:])
        seq = len(steps.lines)
        assert steps.lines == [*between.split(b"\n")[:-1], LONG.replace(b"|2|", b"|2;p=me|")], cut
        assert steps.replies == [b"17.1 5 !ack 5 %d" % seq] and not steps.waiting, cut


def test_a_group_waits_for_its_rest_and_what_stands_before_it_does_not():
    text = b"u|||\n" + group(mine(1, 2, 3), tag=P)
    for end in range(text.index(b"\n", 5) + 1, len(text)):
        batch = parser.Parser(MAX, table()).parse(text[: text.rindex(b"\n", 0, end) + 1], 1, 0)
        assert (batch.lines, batch.used, batch.replies) == ([b"u|||"], 5, [])


@pytest.mark.parametrize(
    "header",
    [
        b"!c 17.1 1 1 l=999999",  # longer than any write
        b"!c 17.1 1 3 l=%d",  # more lines than there are
        b"!c 17.1 1 1 l=%d",  # fewer
        b"!c 17.1 1 0 l=0",
        b"!c 17.1 1 0",
        b"!c 17.1 1 129 l=%d",
        b"!c 17.1 1 999999999999999999999",
        b"!c 17.1 1 2 l=1",  # no newline there
        b"!c 17.1 x 2 l=%d",
        b"!c 17.1 1 -2 l=%d",
        b"!c 17.1",
        b"!c ",
        b"!c 17.1 1 2 l=",
        b"!c 17.1 1 2 l=-5",
        b"!c x 1 2 l=%d",
        b"!c 17.1 1 2 l=%d p=",
        b"!c 17.1 1 2 l=%d p=%%s%%d",
        b"!c 17.1 1 2 l=%d p=a|b",
        b"!c 17.1 1 2 l=%d p=a;b",
        b"!c 17.1 1 2 l=%d x=me",
        b"!c 17.1 1 2 l=%d p=me w=me",
        b"!c 17.1 1 2 l=%d p=" + b"a" * 65,
    ],
)
def test_a_header_that_lies_is_passed_over_and_the_lines_are_those_of_nobody(header):
    """Any shell of the pod may write to the FIFO: it must not stop the framer, nor write what only the framer may say."""
    body = b"t|1|1|a\nt|1|2;p=me|b\n"
    text = (header % len(body) if b"%d" in header else header) + b"\n" + body
    known = table()
    batch = parser.Parser(MAX, known).parse(text, 1, 0)
    assert (batch.lines, batch.replies, batch.used) == ([b"t|1|1|a", b"t|1|2%3Bp=me|b"], [], len(text))
    assert not known


def test_the_lines_of_a_group_are_never_cut_apart():
    text = group(mine(1, 2), 1, P) + group(mine(2, 3, 4), 3, P) + b"u|||\nv|||\n" + group([b""], 6, P)
    batch = parser.Parser(MAX, table()).parse(text, 1, 0)
    ends = [text.index(b"!c", 2), text.index(b"u|||"), text.index(b"v|||"), text.rindex(b"!c"), len(text)]
    assert batch.cuts == list(zip([2, 4, 5, 6, 6], ends, strict=True))


def test_replies_of_a_part_of_a_batch_have_the_seqs_of_its_block():
    """As when drop_oldest, or a full ring, lets the first block have other seqs than the second would follow from."""
    text = b"u|||\n" + group(mine(1, 2), 1, P) + group(mine(3), 3, P)
    answers = parser.Parser(MAX, table()).parse(text, 101, 0).replies
    assert told(encode_replies(answers, 0, 101)) == [b"1 !ack 3 104"]
    assert told(encode_replies(answers[:1], 1, 102)) == [b"1 !ack 2 103"]
    assert told(encode_replies(answers[1:], 3, 104)) == [b"3 !ack 3 104"]
    assert encode_replies([], 0, 1) == b""


# --- the same in the plainest words ------------------------------------------------------------------------------------


def test_each_message_is_stored_once_with_its_own_seq_however_traffic_is_cut():
    rng, kinds = random.Random(6), set()
    for _ in range(400):
        text, model = random_traffic(rng)
        steps = Steps(table(), randomly(rng))
        at = 0
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

SMALLEST = 64 << 10  # RB_BYTES


def stops(batch, max_count=2048, max_bytes=SMALLEST // 2 - layout.HEADER):
    """Where the framer cuts a batch into blocks of a ring like that."""
    return cuts_of(batch, layout.BlockLimits(max_count, max_bytes))


def blocks(batch, found):
    """(messages, bytes) of each block, lines and replies as they will be."""
    start, answers = 0, batch.replies
    for stop, end in found:
        lines = batch.lines[start:stop]
        block = record.number(lines, 10**18, b"1732190000.000000")[0] if lines else b""
        said = [a for a in answers if a[0] <= end] if batch.cuts else []
        answers = answers[len(said) :]
        yield len(lines), len(block) + len(encode_replies(said, start, 10**18))
        start = stop


def a_batch(*texts):
    return parser.Parser(MAX, table()).parse(b"".join(texts), 1, 0)


@pytest.mark.parametrize(
    ("batch", "max_count", "found"),
    [
        (plain(b"t|||\n" * 5, 1), 9, [(5, 0)]),
        (plain(b"t|||\n" * 5, 1), 5, [(5, 0)]),
        (plain(b"t|||\n" * 5, 1), 2, [(2, 0), (4, 0), (5, 0)]),
        (Batch(1, [], None), 2, []),
        (a_batch(b"!b 1\n"), 2, []),
        (a_batch(b"x\n", b"y\n"), 9, [(2, 4)]),
        (a_batch(b"x\n", b"y\n"), 1, [(1, 2), (2, 4)]),
        (a_batch(group([b"", b""])), 1, [(0, len(group([b"", b""])))]),  # replies only
        (a_batch(group(mine(1, 2, 3))), 2, [(3, len(group(mine(1, 2, 3))))]),  # never cut, whatever the ring would like
        (a_batch(TWO := group(mine(1, 2)), ONE := group(mine(3), 3)), 2, [(2, len(TWO)), (3, len(TWO + ONE))]),
    ],
)  # fmt: skip
def test_a_batch_is_cut_into_blocks_of_so_many_messages(batch, max_count, found):
    assert stops(batch, max_count) == found


def test_random_batches_are_cut_into_blocks_that_fit_and_are_not_too_small():
    rng = random.Random(7)
    cut = 0
    for _ in range(200):
        text, _ = random_traffic(rng, rng.choice([5, 60, 300]))
        batch = parser.Parser(MAX, table()).parse(text, 1, 0)
        max_count, max_bytes = rng.choice([64, 2048]), rng.choice([10_000, SMALLEST // 2])
        found = stops(batch, max_count, max_bytes)
        assert found[-1] == batch.cuts[-1] and set(found) <= set(batch.cuts)
        sizes = list(blocks(batch, found))
        assert all(count <= max_count and nbytes <= max_bytes for count, nbytes in sizes)
        total, total_bytes = map(
            sum, zip(*sizes, strict=True)
        )  # replies are reckoned longer than they are: ten, not two
        assert len(found) <= 2 + 2 * total // max_count + 10 * total_bytes // max_bytes
        cut += len(found) > 1
    assert cut > 100


def test_plain_lines_of_every_length_are_cut_into_blocks_that_fit():
    rng = random.Random(8)
    for _ in range(100):
        lines = [b"t|||" + b"x" * rng.choice([0, 50, 4000]) for _ in range(rng.randrange(1, 300))]
        batch = plain(b"".join(line + b"\n" for line in lines), 1)
        found = stops(batch, 64)
        assert found[-1][0] == len(lines)
        assert all(count <= 64 and nbytes <= SMALLEST // 2 - layout.HEADER for count, nbytes in blocks(batch, found))


LONGEST_NAME, LONGEST_CONN = b"p=" + b"A" * 64, b"9" * 20 + b"." + b"9" * 20


@pytest.mark.parametrize(
    "sent",
    [
        mine(*range(1, 129)),
        mine(*range(2, 258, 2)),
        [id for n in range(2, 66) for id in mine(n, n)],  # each is stored, then sent again
        [id for n in range(9, 73) for id in mine(n, 1)],  # each is stored, then one out of order
        mine(*[b"x"] * 128),
        [b""] * 128,
    ],
    ids=["a run", "gaps", "duplicates", "out of order", "bad ids", "empty lines"],
)
def test_the_largest_group_fits_a_block_of_the_smallest_ring(sent):
    """It cannot be cut: one that did not fit would stop the framer for ever."""
    assert len(sent) == parser.MAX_GROUP
    text = group(sent, 10**17, LONGEST_NAME, LONGEST_CONN)
    assert len(text) <= PIPE_BUF
    batch = a_batch(text)
    [(_, nbytes)] = blocks(batch, stops(batch))
    assert batch.replies and nbytes <= SMALLEST // 2 - layout.HEADER
