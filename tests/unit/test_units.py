"""Units: lines that are handed over as one piece, or not at all, however their bytes arrive and whatever they claim."""

import random

import pytest
from framing_steps import SMALL, P, Steps, messages, mine, randomly, table
from intake_wire import MAX, Wire, greeted, read
from received_ends import Way

from kmq.framing.parser import Parser
from kmq.ingress import connection as connection_module
from kmq.ingress.connection import CLOSING
from kmq.ingress.hello import UNIT_BYTES, Unit, parse_unit
from kmq.links.fifo import MESSAGES
from kmq.links.layout import Received
from kmq.links.received import ring_bytes
from kmq.message import record

DOOR = b"!hello acks=1 producer=__door reserved=1\n"


def unit(*lines, p=b"", count=None, nbytes=None):
    """A unit of these lines, which may lie about them."""
    body = b"".join(line + b"\n" for line in lines)
    count, nbytes = len(lines) if count is None else count, len(body) if nbytes is None else nbytes
    return b"!unit %d %d%b\n%b" % (count, nbytes, b" p=" + p if p else b"", body)


def said(wire, near, connection):
    """Everything that the connection was told, one entry a message or question."""
    for reply in wire.steps.replies:
        _, first, text = reply.split(b" ", 2)
        assert connection.replies.reply(int(first), text)
    connection.replies.write_refusals()
    assert connection.send_replies()
    told, n = [], 0
    for line in read(near).splitlines():
        word, number, *rest = line.decode().split(" ", 2)
        if word == "!last":
            told.append(f"last {number}")
            continue
        if word == "!ack":
            told += [f"ack {int(rest[0]) - ahead}" for ahead in range(int(number) - n - 1, -1, -1)]
        else:
            assert int(number) == n + 1, line
            told.append(f"{word[1:]} {rest[0].split(' ')[0]}")
        n = int(number)
    return told


def send(wire, near, connection, data, step=MAX):
    """Send until the connection is over; return whether it goes on."""
    for at in range(0, len(data), step):
        near.sendall(data[at : at + step])
        if not wire.receive(connection):
            return False
    return True


MIXED = [
    *(unit(*mine(1, 2), p=b"k1"), mine(7)[0] + b"\n", unit(*mine(1), p=b"k2"), unit(p=b"k1"), unit(p=b"k3")),
    *(unit(*mine(2, 3), p=b"k1"), b"t.k|1|8|" + b"y" * 600 + b"\n", unit(*mine(9)), unit(), unit(b"", b"no", p=b"k2")),
]
MIXED_SAID = [
    *("ack 1", "ack 2", "ack 3", "ack 4", "last 2", "last 0"),
    *("dup 2", "ack 5", "ack 6", "ack 7", "last 9", "err empty_line", "err no_separator"),
]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 20, 300, MAX])
def test_units_lines_and_questions_are_answered_in_their_order_however_they_arrive(wire, step):
    near, connection = greeted(wire, DOOR)
    assert send(wire, near, connection, b"".join(MIXED), step)
    assert said(wire, near, connection) == MIXED_SAID
    stored = "1;p=k1 2;p=k1 7;p=__door 1;p=k2 3;p=k1 8;p=__door 9;p=__door"
    assert [line.split(b"|")[2].decode() for line in wire.lines] == stored.split()
    pieces = [match.group(3, 8) for line in wire.text.splitlines(True) if (match := MESSAGES.match(line))]
    units = [b" ".join(piece) for piece in pieces if piece[1] != b"__door"]
    assert units == [b"2 k1", b"1 k2", b"2 k1", b"2 k2"]  # each of these with one control line
    assert wire.intake.partial_bytes == 0 and not connection.is_unfinished
    wire.finish(near, connection)


@pytest.mark.parametrize("cut", range(1, len(unit(*mine(1, 2), p=b"k1"))))
def test_a_unit_that_is_cut_is_refused_wherever_that_is_and_nothing_of_it_is_stored(wire, cut):
    near, connection = greeted(wire, DOOR)
    whole = unit(*mine(1, 2), p=b"k1")
    assert send(wire, near, connection, mine(7)[0] + b"\n" + whole[:cut])
    assert connection.is_unfinished
    near.shutdown(1)
    assert not wire.receive(connection)
    wire.intake.finish(connection)
    connection.phase = CLOSING
    wire.drain()
    code = "err no_newline" if cut <= whole.index(b"\n") else "err bad_unit"
    count = 2 if code == "err bad_unit" else 1
    assert said(wire, near, connection) == ["ack 1", *[code] * count] and len(wire.lines) == 1
    assert connection.is_done and wire.intake.partial_bytes == 0


LIES = {
    "a line less": unit(*mine(1, 2), count=3),
    "a line more": unit(*mine(1, 2), count=1),
    "a byte less": unit(*mine(1, 2), nbytes=19),
    "a byte more": unit(*mine(1, 2), nbytes=21) + b"x",
    "a line of the next": unit(*mine(1, 2), nbytes=30) + mine(3)[0] + b"\n",
    "a newline too many": unit(*mine(1), nbytes=11) + b"\n",
    "no newline": b"!unit 1 9\nt.k|1|1|x",
    "more lines than bytes": unit(count=9, nbytes=8),
    "bytes without lines": unit(count=0, nbytes=1) + b"\n",
    "lines without bytes": unit(count=1, nbytes=0),
    "too large": unit(count=1, nbytes=MAX + UNIT_BYTES + 1),
    "very large": b"!unit 1 %d\n" % 10**20,
    "negative": b"!unit -1 10\n",
    "no numbers": b"!unit\n",
    "one number": b"!unit 1\n",
    "a word more": b"!unit 1 10 p=a b\n",
    "a window": b"!unit 1 10 w=a\n",
    "an empty name": b"!unit 1 10 p=\n",
    "a bad name": b"!unit 1 10 p=a/b\n",
    "a long name": b"!unit 1 10 p=%b\n" % (b"a" * 65),
    "other digits": "!unit ² 10\n".encode(),
    "another verb": b"!hello acks=1\n",
    "an id without a name": b"!unit 1 10 after=1\n",
    "no id": b"!unit 1 10 p=a after=\n",
    "no verb": b"!\n",
    "endless": b"!unit " + b"1" * 5000,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("step", [1, MAX])
def test_a_unit_that_is_not_what_it_says_ends_the_connection_and_nothing_of_it_is_stored(wire, lie, step):
    near, connection = greeted(wire, DOOR)
    assert not send(wire, near, connection, unit(*mine(8), p=b"k1") + LIES[lie] + unit(*mine(9), p=b"k1"), step)
    wire.intake.finish(connection)
    connection.phase = CLOSING
    first, *others = said(wire, near, connection)
    assert first == "ack 1" and set(others) == {"err bad_unit"} and len(others) <= 3
    assert wire.lines == mine(8, tag=b";p=k1") and wire.intake.partial_bytes == 0
    assert connection.is_done


def test_a_question_needs_a_name(wire):
    near, connection = greeted(wire, b"!hello acks=1 reserved=1\n")
    assert send(wire, near, connection, unit(p=b"k1") + unit(*mine(1, 1)))  # lines may do without
    assert not send(wire, near, connection, unit())
    assert said(wire, near, connection) == ["last 0", "ack 1", "ack 2", "err bad_unit"]


def test_only_a_connection_of_kmq_itself_may_send_units(wire):
    near, connection = greeted(wire)
    assert send(wire, near, connection, unit(*mine(1), p=b"k1"))
    assert said(wire, near, connection) == ["err control_byte", "ack 1"]
    assert wire.lines == mine(1, tag=b";p=me")


@pytest.mark.parametrize("step", [1000, 1 << 20])
def test_the_largest_unit_passes_and_its_lines_may_be_as_long_as_any(tmp_path, step):
    wire = Wire(tmp_path, ring_bytes(MAX))
    near, connection = greeted(wire, DOOR)
    lines = [b"t.k|1|%d|" % n + b"x" * (MAX - 8) for n in range(1, 9)]
    lines.append(b"t.k|1|9|" + b"x" * (UNIT_BYTES + MAX - 9 - sum(len(line) + 1 for line in lines)))
    whole = unit(*lines, p=b"k1")
    assert whole.startswith(b"!unit 9 %d p=k1\n" % (MAX + UNIT_BYTES))
    for at in range(0, len(whole), step):
        near.sendall(whole[at : at + step])
        while not connection.replies.taken and read_some(wire, connection):
            pass
    assert said(wire, near, connection) == [f"ack {n}" for n in range(1, 10)]
    assert sum(line.startswith(b"!c") for line in wire.text.splitlines()) == 1
    wire.finish(near, connection)
    wire.close()


def read_some(wire, connection):
    before = connection.length
    assert wire.receive(connection)
    return connection.length != before


def test_a_unit_is_refused_whole_unless_the_id_that_it_follows_is_stored(wire):
    near, connection = greeted(wire, DOOR)
    odd = unit(*mine(5), b"no separator", p=b"k1 after=9")
    assert send(wire, near, connection, unit(*mine(1), p=b"k1") + unit(*mine(3, 4), p=b"k1 after=2") + odd)
    assert send(wire, near, connection, unit(*mine(2), p=b"k1 after=1") + unit(*mine(3, 4), p=b"k1 after=2"))
    assert send(
        wire, near, connection, unit(*mine(2), p=b"k1 after=1") + unit(*mine(2), p=b"k2 after=1") + unit(p=b"k2")
    )
    assert send(
        wire, near, connection, unit(*mine(5, 7, 6, 6, 8), p=b"k1 after=4") + unit(*mine(7, 9), p=b"k1 after=6")
    )
    told = [
        "ack 1",
        *["err id_gap"] * 3,
        "err no_separator",
        "ack 2",
        "ack 3",
        "ack 4",
        "dup 2",
        "err id_gap",
        "last 0",
    ]
    told += ["ack 5", "err id_gap", "ack 6", "dup 6", "err id_gap", "ack 7", "err id_gap"]
    assert said(wire, near, connection) == told and len(wire.lines) == 7
    wire.finish(near, connection)


def test_what_was_refused_refuses_units_line_by_line_and_questions_too(wire):
    near, connection = greeted(wire, DOOR)
    assert send(wire, near, connection, unit(*mine(1), p=b"k1"))
    connection.replies.refusal = b"disk_full no room"
    assert send(wire, near, connection, unit(*mine(2, 3), p=b"k1") + unit(p=b"k1") + unit(*mine(4), p=b"k2"))
    assert said(wire, near, connection) == ["ack 1", *["err disk_full"] * 4] and len(wire.lines) == 1
    wire.finish(near, connection)


def test_what_follows_a_refused_unit_is_refused_too_when_more_is_accepted_again(wire):
    near, connection = greeted(wire, DOOR)
    replies = connection.replies
    assert send(wire, near, connection, unit(*mine(1), p=b"k1"))
    replies.follow(b"", b"quota reached")
    replies.follow(b"quota reached", b"")  # nothing was refused meanwhile
    assert send(wire, near, connection, unit(*mine(2), p=b"k1"))
    replies.follow(b"", b"quota reached")
    assert send(wire, near, connection, unit(*mine(3), p=b"k1"))
    replies.follow(b"quota reached", b"")
    replies.follow(b"", b"not_enough_replicas")
    replies.follow(b"not_enough_replicas", b"")
    assert send(wire, near, connection, unit(*mine(4), p=b"k1") + unit(p=b"k1") + unit(*mine(5), p=b"k2"))
    assert said(wire, near, connection) == ["ack 1", "ack 2", *["err quota"] * 4] and len(wire.lines) == 2
    wire.finish(near, connection)


def test_a_lost_reply_is_seen_on_both_sides_of_a_question(wire):
    near, connection = greeted(wire, DOOR)
    assert send(
        wire, near, connection, unit(*mine(1), p=b"k1") + unit(p=b"k1") + unit(p=b"k2") + unit(*mine(2), p=b"k1")
    )
    replies = connection.replies
    assert not replies.reply(0, b"!last 1")  # before the reply to message 1
    assert replies.reply(1, b"!ack 1 1") and replies.reply(1, b"!ack 1 1")
    assert not replies.reply(2, b"!ack 2 2") and not replies.reply(1, b"!last 0")
    assert all(replies.reply(0, b"!last 1") for _ in range(2))  # said again by a durability that was killed
    assert not replies.reply(2, b"!ack 2 2")
    assert replies.reply(1, b"!last 0") and replies.reply(2, b"!ack 2 2") and replies.reply(7, b"!last 5")
    assert connection.send_replies() and read(near) == b"!ack 1 1\n!last 1\n!last 0\n!ack 2 2\n"
    wire.finish(near, connection)


def test_questions_without_a_reply_are_bounded(wire, monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_UNANSWERED", 10)
    near, connection = greeted(wire, DOOR)
    assert send(wire, near, connection, unit(p=b"k1") * 10) and connection.may_receive(b"")
    assert send(wire, near, connection, unit(p=b"k1")) and not connection.may_receive(b"")
    wire.finish(near, connection)


def test_a_name_in_a_piece_that_waits_for_room_stays_its_own(wire):
    near, connection = greeted(wire, DOOR)
    told = []
    for n in range(1, 11, 2):
        lines = [b"t.k|1|%d|" % id + b"x" * 8000 for id in (n, n + 1)]
        near.sendall(unit(*lines, p=b"k%d" % n) + unit(p=b"k%d" % n))
        told += [f"ack {n}", f"ack {n + 1}", f"last {n + 1}"]
        while len(connection.replies.questions) < len(told) // 3:
            assert wire.intake.receive(connection)
    assert wire.handover.clogged
    wire.drain()
    assert said(wire, near, connection) == told
    wire.finish(near, connection)


def test_a_first_line_is_read_as_it_is_written():
    assert parse_unit(b"!unit 3 400 p=k5.1.0", 100) == Unit(3, 400, b"k5.1.0", b"k5.1.0")
    assert parse_unit(b"!unit 3 400 p=k5 after=17", 100) == Unit(3, 400, b"k5", b"k5 after=17")
    assert parse_unit(b"!unit 0 0\r", 100) == Unit(0, 0, b"", b"")
    assert parse_unit(b"!unit 1 %d" % (100 + UNIT_BYTES), 100).nbytes == 100 + UNIT_BYTES
    with pytest.raises(ValueError, match=f"at most {100 + UNIT_BYTES}"):
        parse_unit(b"!unit 1 %d" % (101 + UNIT_BYTES), 100)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(40))
def test_random_units_of_many_names_with_a_lie_now_and_then(tmp_path, seed):
    """Up to the first lie everything is as a model says, and nothing after it is taken."""
    rng, last, told, stored = random.Random(seed), {}, [], []
    wire = Wire(tmp_path, 1 << 17)
    data, lied = [], False
    for _ in range(60):
        name = rng.choice([b"", b"k1", b"k2", b"k3"])
        whose, kind = name or b"__door", rng.randrange(12)
        top = last.get(whose, 0)
        ids = [max(1, top - 1 + n) for n in range(rng.randrange(1, 9))] if kind > 2 else []
        lines = [b"t.k|1|%d|%b" % (id, b"x" * rng.choice([0, 5, 300])) for id in ids]
        if kind == 0:  # lines of the connection
            name, whose, ids = b"", b"__door", [last.get(b"__door", 0) + 1]
            lines = [b"t.k|1|%d|x" % ids[0]]
            data.append(lines[0] + b"\n")
        elif kind == 1 and rng.randrange(3) == 0:
            wrong, count, nbytes = rng.choice([-1, 1, 500]), 2, 20
            parts = [unit(*mine(1, 2), count=count + wrong), unit(*mine(1, 2), nbytes=nbytes + wrong), b"!unt 2 20\n"]
            data.append(rng.choice(parts))
            lied = True
            break
        else:
            data.append(unit(*lines, p=name))
        if not lines:
            told.append(f"last {top}")
        for id, line in zip(ids, lines, strict=True):
            if id <= last.get(whose, 0):
                told.append("known")
                continue
            stored.append(line.replace(b"|1|%d|" % id, b"|1|%d;p=%b|" % (id, whose)))
            told.append(f"ack {len(stored)}")
            last[whose] = id
    near, connection = greeted(wire, DOOR)
    sent = b"".join(data)
    went_on = send(wire, near, connection, sent, rng.choice([1, 3, 50, 1000, MAX]))
    wire.intake.finish(connection)
    heard = said(wire, near, connection)
    refused = heard[len(told) :]
    assert (went_on or lied) and bool(refused) is lied and set(refused) <= {"err bad_unit"}
    for each, expected in zip(heard, told, strict=not lied):
        assert each == expected or (expected == "known" and each.split(" ")[0] in ("dup", "err")), (each, expected)
    assert wire.lines == stored and wire.intake.partial_bytes == 0
    near.close()
    connection.sock.close()
    wire.close()


# --- the framer ---------------------------------------------------------------------------------------------------------


def test_the_framer_knows_that_it_is_within_a_unit_also_when_it_starts_anew():
    way = Way()
    steps = Steps(table(), lambda count: [0, count - 1], way=way)
    text = way.text(messages(mine(*range(1, 200)), 1, P), messages(mine(1), 1, b"p=you", b"17.2"))
    line, other = text.splitlines(keepends=True)
    birth, start, stop = map(int, MESSAGES.match(line).group(4, 5, 6))
    for position, begun in ((start, b""), (start + 10, line), (stop - 10, line), (stop, b"")):
        for birth_of in (birth, birth + 1):
            steps.source.done = Received(birth_of, position)
            expected = begun if birth_of == birth else b""
            assert Parser(MAX, steps.known, steps.source, SMALL).begun(text) == expected, position
    assert Parser(MAX, steps.known, steps.source, SMALL).begun(b"u|||\n" + other) == b""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(20))
def test_the_seqs_of_a_unit_follow_one_another_over_turns_and_kills(monkeypatch, seed):
    """Whatever the framer numbers of its own comes before or after a unit."""
    monkeypatch.setattr("kmq.framing.parser.TURN", 20)
    rng = random.Random(seed)
    steps = Steps(table(), randomly(rng))

    def committed():
        if rng.randrange(3):
            return False
        steps.known = table()
        steps.known.absorb(record.number(steps.lines, 1, b"1.000000")[0], 0)
        return True

    steps.committed = committed
    parts, count = [], {}
    for n in range(1, 30):
        name, size = b"u%d" % n, rng.choice([1, 3, 70])
        odd = rng.choice([b"t.k", b"no separator", b"t.k|1|1|x"])  # the last is there already: each is looked at
        parts.append(messages([*mine(*range(1, size + 1)), odd], 1, b"p=" + name, b"17.%d" % n))
        parts.append(b"u|||\n" * rng.randrange(3))
        count[name] = size
    steps.waiting = steps.way.text(*parts)
    within = []
    while steps.waiting:
        within.append(Parser(MAX, steps.known, steps.source, steps.limits).begun(steps.waiting) != b"")
        if not within[-1]:
            steps.lines.append(b"__kmq.topic|||")
        steps.turn()
    assert {True, False} <= set(within)
    names = [line.partition(b";p=")[2].partition(b"|")[0] for line in steps.lines]
    for name, size in count.items():
        first = names.index(name)
        assert names[first : first + size] == [name] * size and names.count(name) == size
