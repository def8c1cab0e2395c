"""From a batch to blocks: dense seqs, times that never go back, and exactly the bytes that the batch came from."""

import pytest
from framing_steps import MAX, cuts_in, mine, source_of, table
from received_ends import Way, joined, messages, plain

from kmq.config.values import PIPE_BUF
from kmq.framing.blocks import ends_of_messages, frame
from kmq.framing.parser import Parser
from kmq.links import fifo
from kmq.links.fifo import LAST_ID, LINES, MESSAGES, Sender
from kmq.links.layout import BlockLimits
from kmq.message import record

LATER = 1 << 60  # µs: a recv_ts beyond every clock
LIMITS = BlockLimits(7, 4000)


def made_of(*parts, next_seq=100):
    """(batch, text, end of the ring)"""
    way = Way()
    source = source_of(way)
    text = way.text(*parts)
    return Parser(MAX, table(), source, LIMITS).batch(text, next_seq, 0), text, way.writer.head


def check(batch, text, head):
    blocks = list(frame(batch, LIMITS, LATER, 1732190000))
    assert [is_last for _, is_last in blocks] == [False] * (len(blocks) - 1) + [True]
    seq, lines, used, position = batch.next_seq, 0, 0, batch.begin
    places = {(count, end, at) for count, end, at in cuts_in(batch)}
    for block, _ in blocks:
        first_seq, count, key_length, recv_ts = block.stamp
        assert (first_seq, key_length, recv_ts) == (seq, len(batch.key), LATER) and count <= 7
        assert [record.seq_of(line) for line in block.lines.splitlines()] == list(range(seq, seq + count))
        assert len(block.lines) + len(block.replies) <= LIMITS.nbytes
        assert block.consumed >= 0 and block.received.birth == 1732190000 and block.received.position >= position
        seq, lines, used, position = seq + count, lines + count, used + block.consumed, block.received.position
        assert (lines, used, position) in places
    assert seq == batch.next_seq + len(batch.lines)
    assert (used, position) == (batch.used, batch.position) == (len(text), head)
    return [block for block, _ in blocks]


LINES_OF_ALL_LENGTHS = [b"t.k|1|%d|%b" % (n, b"x" * (n * 37 % 300)) for n in range(50)]


@pytest.mark.parametrize(
    "parts",
    [
        (joined(LINES_OF_ALL_LENGTHS),),
        (plain(*LINES_OF_ALL_LENGTHS),),
        (plain(*LINES_OF_ALL_LENGTHS[:20]), plain(*LINES_OF_ALL_LENGTHS[20:])),
    ],
    ids=["of the FIFO", "in one piece", "in adjoining pieces"],
)
def test_well_formed_lines_become_blocks_that_cover_what_they_came_from(parts):
    batch, text, head = made_of(*parts, next_seq=995)
    assert batch.cuts is None and batch.is_received == (not isinstance(parts[0], bytes))
    assert len(check(batch, text, head)) > 7


def test_mixed_lines_become_blocks_that_cover_both_of_what_they_came_from():
    parts = []
    for n in range(30):
        parts += [b"shell|||%d\n" % n, plain(b"t|||%d" % n, b"x", b"t|||y"), messages(mine(n), n + 1, b"p=me")]
    batch, text, head = made_of(*parts)
    assert len(check(batch, text, head)) > 150 // 7


def test_the_blocks_of_messages_bring_the_replies_of_their_own_messages():
    parts = [messages(mine(n, n + 1), n, b"p=me") for n in range(1, 30, 2)]
    blocks = check(*made_of(*parts, b"no separator\n"))
    said = b"".join(block.replies for block in blocks).splitlines()
    assert [int(line.split()[1]) for line in said] == sorted(int(line.split()[1]) for line in said)
    last = [line.split()[3:] for line in said][-1]
    assert last == [b"30", b"129"] and len(said) == sum(bool(block.replies) for block in blocks)


def test_one_piece_of_many_messages_becomes_blocks_that_bring_their_own_replies():
    blocks = check(*made_of(messages(mine(*range(1, 101)), 1, b"p=me")))
    assert len(blocks) > 100 // 7
    for block in blocks:
        first, count = block.stamp.first_seq - 99, block.stamp.count
        assert block.replies == b"17.1 %d !ack %d %d\n" % (first, first + count - 1, first + count + 98)


@pytest.mark.parametrize("limits", [BlockLimits(1, 10), BlockLimits(64, 8000), BlockLimits(2048, 1 << 20)])
@pytest.mark.parametrize("sizes", [[1], [5000] * 3, list(range(1, 400)), [1] * 3000, [5000, *[1] * 40, 5000]])
def test_messages_may_be_cut_where_a_part_is_small_enough(limits, sizes):
    body = joined([b"x" * (size - 1) for size in sizes])
    ends, before, most = ends_of_messages(body, body.split(b"\n")[:-1], limits), (0, 0), max(1, limits.count // 8)
    for count, nbytes in ends:
        assert nbytes == sum(sizes[:count]) and count > before[0]
        assert count - before[0] == 1 or (count - before[0] <= most and nbytes - before[1] <= limits.nbytes // 8)
        before = count, nbytes
    assert before == (len(sizes), len(body))


def test_control_lines_are_read_as_they_were_written():
    piece = b"1732190000", b"4000", b"5000"
    for tag, kind, name in ((b"", None, None), (b"p=me:1", b"p", b"me:1"), (b"w=a.b", b"w", b"a.b")):
        for right in (None, b" reserved"):
            sender = Sender(b"1732190000.7", tag, right is not None)
            sender.sent = 41
            line = MESSAGES.fullmatch(sender.messages(128, 1732190000, 4000, 5000))
            assert line.groups() == (b"1732190000.7", b"42", b"128", *piece, kind, name, None, right)
            assert sender.sent == 169
            line = MESSAGES.fullmatch(sender.messages(1, 1732190000, 4000, 5000, b"k7 after=0"))
            assert line.groups() == (b"1732190000.7", b"170", b"1", *piece, b"p", b"k7", b"0", right)
    assert LAST_ID.fullmatch(Sender(b"1.2", b"p=me").question(3)).groups() == (b"1.2", b"3", b"me")
    assert LINES.fullmatch(fifo.lines(1732190000, 7, 7)).groups() == (b"1732190000", b"7", b"7")


def test_the_longest_control_lines_are_atomic_writes_and_are_read():
    most = 10**19 - 1
    sender = Sender(b"9" * 20 + b"." + b"9" * 20, b"p=" + b"A" * 64, reserved=True)
    sender.sent = 10**18 - 2
    line = sender.messages(10**9 - 1, most, most, most)
    assert MESSAGES.fullmatch(line) and len(line) < PIPE_BUF
    assert LINES.fullmatch(fifo.lines(most, most, most)) and LAST_ID.fullmatch(sender.question(0))
