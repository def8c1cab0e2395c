"""From the text of the FIFO to the lines of a block: pieces, other writers' lines between them, restarts of ingress."""

import random
from itertools import accumulate

import pytest

from kmq import framing, record
from kmq.links.fifo import pieces
from kmq.log.producers import Producers

MAX = 8192


def table(producers=1000, ttl=1e6, count=1000, age=1e6):
    return Producers(producers, ttl, count, age)


def frame(text):
    """What the framer does with whole lines: (lines, text that is not done yet, ends of the lines in the text, used)."""
    batch = framing.plain(text)
    if batch is None:
        text = framing.untangle(text)
        batch = framing.Parser(MAX, table()).parse(text, 1, 0)
        assert [count for count, _ in batch.cuts] == list(range(1, len(batch.lines) + 1)) and not batch.answers
        return batch.lines, text, [end for _, end in batch.cuts], batch.used
    return batch.lines, text, list(accumulate(len(line) + 1 for line in batch.lines)), batch.used


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
LONG_PIECES = pieces(LONG)


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
        (LONG_PIECES, [LONG]),
        (pieces(b"!hello " + LONG), [record.admit(b"!hello " + LONG, MAX)]),
    ],
)
def test_text_becomes_lines(text, lines):
    assert frame(text)[0] == lines == expected(text)


def test_plain_text_goes_through_in_one_piece_and_says_its_common_key():
    batch = framing.plain(b"t.k|1|2|a\nt.k|1|2|b\n")
    assert (batch.lines, batch.cuts, batch.used, batch.key) == ([b"t.k|1|2|a", b"t.k|1|2|b"], None, 20, b"t.k")
    assert framing.plain(b"t.k|1|2|a\nno separator\n") is None


def test_what_is_unfinished_stays_unused():
    lines, text, ends, used = frame(b"u|||\n+t|||a\n")
    assert (lines, ends, used, text[used:]) == ([b"u|||"], [5], 5, b"+t|||a\n")


def test_untangle_gives_back_the_same_object_where_nothing_is_tangled():
    for text in (b"t|||\n", LONG_PIECES, b"t|||\n" + LONG_PIECES + b"t|||\n", b"+t|||a\n"):
        assert framing.untangle(text) is text


def test_untangle_moves_an_unfinished_line_to_the_end():
    assert framing.untangle(b"+a\nx|||\n+b\ny|||\n") == b"x|||\ny|||\n+a\n+b\n"


def test_pieces_without_end_are_kept_in_parts_as_too_long():
    piece = b"+" + b"x" * 4094 + b"\n"
    lines, _, _, used = frame(piece * 5)
    assert len(lines) == 1 and lines[0].startswith(b"dead.malformed||;reason=too_long;len=12282|xxx")
    assert used == 3 * len(piece)  # the fourth and fifth wait for what follows


def random_text(rng):
    """Whole lines and long ones in pieces, with lines of other writers and restarts of ingress between."""
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
