"""What the framer takes from the ring `received`: only what is there, each byte once, wherever a block ended before."""

import os
import random

import pytest
from framing_steps import MAX, P, Steps, W, mine, one_by_one, random_traffic, randomly, source_of, table
from received_ends import ME, Way, joined, messages, plain

from kmq.errors import RetryError
from kmq.framing import parser
from kmq.framing.blocks import frame
from kmq.framing.parser import Parser, ReceivedLines
from kmq.links import fifo
from kmq.links.layout import NOTHING_RECEIVED, BlockLimits, Received
from kmq.message import record

ROOMY = BlockLimits(2048, 1 << 16)


def control_byte(line):
    return b"dead.malformed||;reason=control_byte;len=%d|%b" % (len(line), line)


class KilledAt(Steps):
    """A framer that is killed behind these of its commits, with its table lost: no id counts, as of windows."""

    def __init__(self, commits, **options):
        super().__init__(table(), cut=range, **options)
        self.commits, self.count, self.stored = commits, 0, []

    def committed(self):
        self.count += 1
        if self.count not in self.commits:
            return False
        self.known = table()
        stamped = [b"%d|0.000001|%b" % (seq, line) for seq, line in enumerate(self.lines, start=1)]
        self.known.absorb(joined(stamped), 0)
        return True


TRAFFIC = (
    plain(b"u|||1", b"u|||2", b"u|||3"),
    plain(b"u|||4", b"no separator", b"u|||5"),
    plain(b"u|||6"),
    b"shell|||1\nshell\n",
    messages(mine(*range(1, 9)), 1, P),
    messages(mine(9, 8, 10, b"x", 11), 9, P),
    plain(b"u|||7", b"u|||" + b"8" * 6000),
    messages([b"t|||", b"", b"t|||2"], 1, b"", b"17.2"),
    messages(mine(b"a", b"b", b"a"), 1, W, b"17.3"),
    messages([b"t.k|1|12|" + b"x" * 6000], 14, P),
    b"!r 1 2 3\n",
    b"!l 17.1 0 p=me\n",
    plain(b"u|||9"),
    messages(mine(13, 14, 15, 16, 17, 18, 19), 15, P),
)


def expected():
    steps = Steps(table())
    steps.read(*TRAFFIC)
    return steps.lines, steps.replies


def test_the_traffic_below_is_what_it_should_be():
    lines, replies = expected()
    assert len(lines) == 9 + 2 + 1 + 8 + 3 + 2 + 2 + 1 + 1 + 7
    last = [reply for reply in replies if b"!last" in reply]
    replies = one_by_one([reply for reply in replies if b"!last" not in reply])
    assert last == [b"17.1 0 !last 12"] and len(replies) == 8 + 5 + 3 + 3 + 1 + 7
    assert replies[ME, 10] == b"dup 17" and replies[ME, 12] == b"err bad_id" and replies[b"17.3", 3] == b"dup 25"


@pytest.mark.parametrize("limits", [ROOMY, BlockLimits(16, 4096), BlockLimits(1, 256)], ids=["roomy", "small", "least"])
def test_a_framer_killed_behind_any_one_commit_goes_on_exactly_there(limits):
    """All of it is read at once, and cut wherever it may be: also inside a piece whose bytes are free and overwritten."""
    lines, replies = expected()
    commits = KilledAt((), limits=limits)
    commits.read(*TRAFFIC)
    assert (commits.lines, one_by_one_and_last(commits.replies)) == (lines, one_by_one_and_last(replies))
    assert commits.count > (20 if limits == ROOMY else 25)
    for kill in range(1, commits.count + 1):
        steps = KilledAt((kill,), limits=limits)
        steps.read(*TRAFFIC)
        assert steps.lines == lines, kill
        assert one_by_one_and_last(steps.replies) == one_by_one_and_last(replies), kill
        assert not steps.waiting and steps.count >= kill


def test_a_framer_killed_behind_every_commit_makes_the_same():
    lines, replies = expected()
    steps = KilledAt(range(1000), limits=BlockLimits(1, 256))
    steps.read(*TRAFFIC)
    assert steps.lines == lines and one_by_one_and_last(steps.replies) == one_by_one_and_last(replies)


def one_by_one_and_last(replies):
    return one_by_one([reply for reply in replies if b"!last" not in reply]), [r for r in replies if b"!last" in r]


@pytest.mark.parametrize("turn", [1, 2, 3, 5])
def test_a_turn_that_ends_inside_a_piece_is_followed_by_one_that_begins_there(monkeypatch, turn):
    lines, replies = expected()
    monkeypatch.setattr(parser, "TURN", turn)
    for steps in (Steps(table()), KilledAt(range(0, 1000, 3))):
        steps.read(*TRAFFIC)
        assert steps.lines == lines and one_by_one_and_last(steps.replies) == one_by_one_and_last(replies)


@pytest.mark.parametrize("turn_bytes", [1, 20, 200])
def test_a_turn_that_has_taken_enough_bytes_leaves_the_rest(monkeypatch, turn_bytes):
    lines, replies = expected()
    monkeypatch.setattr(parser, "TURN_BYTES", turn_bytes)
    steps, turns = Steps(table()), 0
    steps.waiting = steps.way.text(*TRAFFIC)
    while steps.turn():
        turns += 1
    assert turns >= (3 if turn_bytes == 200 else 8)
    assert steps.lines == lines and one_by_one_and_last(steps.replies) == one_by_one_and_last(replies)


def test_the_n_of_replies_goes_on_after_a_cut_inside_a_piece_that_is_overwritten():
    way = Way()
    text = way.text(messages(mine(*range(101, 161)), 41, P))
    source = ReceivedLines(way.attach, Received(way.writer.birth, 0))
    batch = Parser(MAX, table(), source, BlockLimits(64, 4096)).batch(text, 1, 0)
    blocks = [framed for framed, _ in frame(batch, BlockLimits(8, 4096), 0, source.done.birth)]
    assert len(blocks) > 3
    known, n = table(), 41
    for framed in blocks:
        assert framed.replies.split(b"\n")[0].startswith(b"17.1 %d !ack " % n)
        known.absorb(framed.lines, 0)
        n += framed.stamp.count
        source.committed(framed.received)
        way.spoil()
        if n == 101:
            break
        seq = framed.stamp.first_seq + framed.stamp.count
        rest = Parser(MAX, known, ReceivedLines(way.attach, framed.received), BlockLimits(2048, 1 << 16)).batch(
            text, seq, 0
        )
        assert (rest.replies[0][3], rest.replies[-1][4], len(rest.lines)) == (n, 100, 101 - n)
        source = ReceivedLines(way.attach, framed.received)
        known = table()
        known.absorb(b"".join(each.lines for each in blocks[: blocks.index(framed) + 1]), 0)


# --- what a shell makes up ---------------------------------------------------------------------------------------------


def made_up(way):
    """Control lines that are none: of another ring, of bytes that are not there, of what is no whole line, malformed."""
    birth, head = way.writer.birth, way.writer.head
    pieces = [
        (birth + 1, 0, 6),
        (0, 0, 0),
        (birth, head - 1, head + 1),
        (birth, head + 1, head + 5),
        (birth, head + 1, head + 1),
        (birth, head, head - 6),
        (birth, head - 12, head - 7),  # not at the end of a line
        (birth, 0, 10**19 - 1),
        (birth, head - way.writer.size - 1, head),
    ]
    for piece in pieces:
        if min(piece) >= 0:
            yield b"!r %d %d %d" % piece
            yield b"!c 17.9 1 1 %d %d %d p=me" % piece
    good = birth, head - 6, head
    for form in (b"!r %d %d", b"!r %d %d %d ", b"!r  %d %d %d", b"!r %d %d %d 1", b"!R %d %d %d", b"!r %d -%d %d"):
        yield form % (good[: form.count(b"%d")])
    yield from (b"!c 17.9 1 %d %d %d %d" % (count, *good) for count in (0, 2, 3, 10**8))
    for form in (
        b"!c 17.9 1 1 %d %d %d p=",
        b"!c 17.9 1 1 %d %d %d p=a|b",
        b"!c 17.9 1 1 %d %d %d p=a;b",
        b"!c 17.9 1 1 %d %d %d x=me",
        b"!c 17.9 1 1 %d %d %d p=me w=me",
        b"!c 17.9 1 1 %d %d %d p=" + b"a" * 65,
        b"!c x 1 1 %d %d %d",
        b"!c 17.9 x 1 %d %d %d",
        b"!c 17.9 1 -1 %d %d %d",
        b"!c 17.9 1 99999999999 %d %d %d",
        b"!c 17.9 %d %d %d",
    ):
        yield form % good
    yield from (b"!", b"!r", b"!c 17.9", b"!l 17.1", b"!l 17.1 w=me", b"!l 17.1 0 p=me more", b"!b 1", b"!e nul", b"!x")


@pytest.mark.parametrize("killed", [False, True])
def test_a_control_line_that_a_shell_made_up_is_malformed_and_nothing_else_is_lost_or_doubled(killed):
    """It must not stop the framer, nor write what only the framer may say."""
    way = Way(1 << 16)
    way.put([b"x" * 100])
    steps = KilledAt(range(0, 1000, 2) if killed else (), way=way)
    stored, forms = [], len(list(made_up(way)))
    for n in range(1, forms + 1):
        first = way.text(plain(b"t|||%05d" % n, b"12345"), messages([b"t|1|%d|x" % n], n, P))
        rest = way.text(messages([b"t|1|%d|y" % n, b"?"], n, b"", b"17.2"), plain(b"u|||%05d" % n))
        lie = list(made_up(way))[n - 1]
        lines = [b"t|||%05d" % n, record.admit(b"12345", MAX), b"t|1|%d;p=me|x" % n, b"t|1|%d|y" % n, b"u|||%05d" % n]
        at = n % 2 * 3  # among the others: before all, or between
        steps.read(first + lie + b"\n" + rest if at else lie + b"\n" + first + rest)
        stored += [*lines[:at], control_byte(lie), *lines[at:]]
        assert steps.lines[-6:] == stored[-6:], lie
        steps.replies = [reply for reply in steps.replies if not reply.startswith(b"17.2 ")]
    assert steps.lines == stored
    assert not any(reply.startswith(b"17.9") for reply in steps.replies)
    assert one_by_one(steps.replies).keys() == {(ME, number) for number in range(1, forms + 1)}


def test_bytes_that_are_framed_already_are_never_framed_again():
    """A line that speaks of them once more changes nothing, whatever lies there by now."""
    way = Way()
    steps = Steps(table(), way=way)
    start, end = way.put([b"t|||1"])
    steps.read(fifo.lines(way.writer.birth, start, end), plain(b"t|||2"))
    again = [fifo.lines(way.writer.birth, start, end), b"!c 17.1 1 1 %d %d %d\n" % (way.writer.birth, start, end)]
    steps.read(*again, plain(b"t|||3"))
    assert steps.lines == [b"t|||1", b"t|||2", b"t|||3"] and not steps.replies


# --- the ring comes, goes, and is made anew -----------------------------------------------------------------------------


def test_an_empty_piece_frees_all_before_it():
    way = Way(8192)
    source = source_of(way)
    way.put([b"lost with its ingress" * 200])
    assert way.writer.put([b"x" * 5000], 5000) == -1
    text = fifo.lines(way.writer.birth, way.writer.head, way.writer.head)
    batch = Parser(MAX, table(), source, ROOMY).batch(text, 1, 0)
    assert batch.is_empty and batch.used == len(text) and batch.position == way.writer.head
    source.committed(Received(way.writer.birth, batch.position))
    assert way.writer.put([b"x" * 4000], 4000) >= 0


def test_a_ring_that_ingress_makes_later_is_read_from_its_start():
    """Also if the framer once read another ring that far: its position is none of this ring."""
    way, rings = Way(), []
    source = ReceivedLines(lambda: rings[0] if rings else None, Received(5, 100_000))
    batch = Parser(MAX, table(), source, ROOMY).batch(b"t|||shell\n", 1, 0)
    assert (batch.lines, batch.position) == ([b"t|||shell"], 100_000)  # it may still be the same ring that comes back
    text = way.text(plain(b"t|||1"), messages(mine(1), 1, P), plain(b"t|||2"))
    rings.append(way.attach())
    batch = Parser(MAX, table(), source, ROOMY).batch(text, 1, 0)
    assert batch.lines == [b"t|||1", *mine(1, tag=b";p=me"), b"t|||2"]
    [(framed, _)] = frame(batch, ROOMY, 0, source.done.birth)
    assert framed.received == (way.writer.birth, way.writer.head)


def test_a_ring_that_comes_back_is_read_on_where_the_framer_was():
    way, rings = Way(), []
    start, end = way.put([b"t|||1"])
    text = fifo.lines(way.writer.birth, start, end) + way.text(plain(b"t|||2"))
    source = ReceivedLines(lambda: rings[0] if rings else None, Received(way.writer.birth, end))
    rings.append(way.attach())
    assert Parser(MAX, table(), source, ROOMY).batch(text, 1, 0).lines == [b"t|||2"]


def test_without_a_ring_no_control_line_is_obeyed():
    source = ReceivedLines(lambda: None, NOTHING_RECEIVED)
    lines = [b"!r 1 0 0", b"!r 0 0 0", b"!c 17.1 1 1 1 0 5"]
    batch = Parser(MAX, table(), source, ROOMY).batch(joined(lines), 1, 0)
    assert batch.lines == [control_byte(line) for line in lines] and not batch.replies


@pytest.mark.parametrize("ahead", [0, 1], ids=["same birth", "another birth"])
def test_a_line_of_a_file_that_replaced_ours_ends_the_framer_which_reads_it_then(ahead):
    way = Way()
    source = source_of(way)
    text = b"!r %d 0 6\n" % (way.writer.birth + ahead)
    assert Parser(MAX, table(), source, ROOMY).batch(text, 1, 0).lines == [control_byte(text[:-1])]
    os.unlink(way.writer.path)
    with pytest.raises(RetryError, match="was removed, or replaced"):
        Parser(MAX, table(), source, ROOMY).batch(text, 1, 0)


@pytest.mark.parametrize(
    ("text", "waits"),
    [(b"t|||1\n", 0), (b"t|||!1\n", 0), (b"!x\n", 1), (b"t|||1\n!r 1 0 6\n", 1)],
)
def test_a_ring_that_is_not_there_is_waited_for_only_if_a_control_line_may_speak_of_it(text, waits):
    way, rings, waited = Way(), [], []

    def wait():
        waited.append(1)
        rings.append(way.attach())

    source = ReceivedLines(lambda: rings[0] if rings else None, NOTHING_RECEIVED, wait)
    Parser(MAX, table(), source, ROOMY).batch(text, 1, 0)
    assert len(waited) == waits
    more = way.text(plain(b"t|||2"))
    assert Parser(MAX, table(), source, ROOMY).batch(more, 1, 0).lines == [b"t|||2"] and len(waited) == 1


# --- the ring wraps ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_through_a_small_ring_is_the_models_however_it_is_cut_and_killed(seed):
    """Pieces are put as far as there is room, so they lie at both ends of the ring, at its very end and at its start."""
    rng, kills, wraps = random.Random(seed), 0, 0
    for _ in range(15):
        parts, model = random_traffic(rng, 120)
        way = Way(rng.choice([12 << 10, 20 << 10]))
        steps = KilledRandomly(rng, way=way, limits=BlockLimits(rng.choice([1, 8, 64]), rng.choice([256, 8000])))
        for part in parts:
            before = way.writer.head
            if not isinstance(part, bytes) and (not has_room(way, part) or not rng.randrange(4)):
                steps.read()
            text = way.text(part)
            wraps += way.writer.head // way.writer.size > before // way.writer.size
            steps.waiting += text
        steps.read()
        assert steps.lines == model.lines
        assert one_by_one(steps.replies) == model.said
        kills += steps.kills
    assert kills > 100 and wraps > 20


def has_room(way, part):
    return way.writer.has_room(len(joined(part.lines)))


class KilledRandomly(KilledAt):
    def __init__(self, rng, **options):
        super().__init__((), **options)
        self.cut, self.rng, self.kills = randomly(rng), rng, 0

    def committed(self):
        killed = not self.rng.randrange(4)
        self.commits = (self.count + 1,) if killed else ()
        self.kills += killed
        return super().committed()
