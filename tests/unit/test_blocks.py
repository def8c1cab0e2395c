"""From a batch to blocks: dense seqs, times that never go back, and exactly the bytes that the batch came from."""

import random

from framing_steps import MAX, group, mine, table

from kmq import record
from kmq.framing.batch import plain
from kmq.framing.blocks import frame
from kmq.framing.parser import Parser
from kmq.links.layout import BlockLimits
from kmq.links.raw import HEADER, LAST_ID, Sender, fragments, reassemble, whole

LATER = 1 << 60  # µs: a recv_ts beyond every clock


def blocks_of(batch, count=7, nbytes=4000):
    return list(frame(batch, BlockLimits(count, nbytes), LATER))


def check(batch, text):
    blocks = blocks_of(batch)
    seq = batch.next_seq
    for block in blocks:
        first_seq, count, key_length, recv_ts = block.stamp
        assert (first_seq, key_length, recv_ts) == (seq, len(batch.key), LATER) and count <= 7
        assert [record.seq_of(line) for line in block.lines.splitlines()] == list(range(seq, seq + count))
        assert block.consumed > 0
        seq += count
    assert seq == batch.next_seq + len(batch.lines)
    assert sum(block.consumed for block in blocks) == batch.used == len(text)
    return blocks


def test_a_plain_batch_becomes_blocks_that_cover_its_text():
    text = b"".join(b"t.k|1|%d|%b\n" % (n, b"x" * (n * 37 % 300)) for n in range(50))
    assert len(check(plain(text, 995), text)) > 7


def test_the_blocks_of_groups_bring_the_replies_of_their_own_messages():
    text = b"".join(group(mine(n, n + 1), n, b"p=me") for n in range(1, 30, 2)) + b"no separator\n"
    blocks = check(Parser(MAX, table()).parse(text, 100, 0), text)
    said = b"".join(block.replies for block in blocks).splitlines()
    assert [int(line.split()[1]) for line in said] == sorted(int(line.split()[1]) for line in said)
    last = [line.split()[3:] for line in said][-1]
    assert last == [b"30", b"129"] and len(said) == sum(bool(block.replies) for block in blocks)


def test_a_header_and_a_question_are_read_as_they_were_written():
    for tag, kind, name in ((b"", None, None), (b"p=me:1", b"p", b"me:1"), (b"w=a.b", b"w", b"a.b")):
        sender = Sender(b"1732190000.7", tag)
        sender.sent = 41
        header = HEADER.fullmatch(sender.header(128, 4000))
        assert header.groups() == (b"1732190000.7", b"42", b"128", b"4000", kind, name)
        assert len(header[0]) <= sender.header_room
    assert LAST_ID.fullmatch(Sender(b"1.2", b"p=me").question()[:-1]).groups() == (b"1.2", b"me")


def test_fragments_mixed_with_other_lines_are_put_back_together():
    rng = random.Random(4)
    for _ in range(50):
        line = b"t|||" + b"x" * rng.randrange(4096, 20_000)
        parts = fragments(line).splitlines(keepends=True)
        mixed = b"".join(part + b"other|||\n" * rng.randrange(2) for part in parts)
        text = reassemble(mixed)
        assert text.replace(b"other|||\n", b"") == b"".join(parts) and whole(text) == len(text)
        batch = Parser(1 << 15, table()).parse(text, 1, 0)
        assert sorted(batch.lines)[-1] == line and batch.used == len(text)
