"""Segments of a live broker are compacted while a producer and a reader go on, and its router is killed again and again."""

import random
import time

from waiting import meanwhile

from kmq.log import compaction, reader

COUNT, KEYS = 4000, 40


def records(data):
    """{offset: line} of the topic; reading checks every crc."""
    log, offset, found = reader.partition(data, "users", 0), 0, {}
    while True:
        first, text = log.read(offset)
        if not text:
            return found
        found.update((at, line) for at, line in enumerate(text.split(b"\n")[:-1], first) if line)
        offset = first + text.count(b"\n")


def replaced(data, segments):
    """Offsets that may go: replaced by a later record, and neither the first nor the last of their segment."""
    lines = records(data)
    last = {line.split(b"|")[2]: offset for offset, line in lines.items()}
    inside = {offset for segment in segments for offset in range(segment.first + 1, segment.end - 1)}
    return [offset for offset, line in lines.items() if offset in inside and last[line.split(b"|")[2]] > offset]


def test_readers_see_every_kept_record_while_the_router_of_a_live_broker_is_killed(broker):
    broker.up()
    declared = broker.kmq("topics", "create", "users", "--set", "cleanup=compact", "--set", "segment_bytes=64KiB")
    assert declared.returncode == 0, declared.stderr
    broker.send_lines([b"users.%d|0|%d|%b" % (n % KEYS, n, b"v" * 200) for n in range(COUNT)])
    broker.wait_routed(1 + COUNT)  # the declaration, and they
    broker.down()  # a checkpoint, for which we would wait 30 s
    broker.up()
    data, sent, rounds = str(broker.data), [COUNT], [0]
    end = compaction.synced_ends(data)["users", 0]
    sealed = compaction.sealed(data, "users", 0, end)
    gone = replaced(data, sealed)
    kept = {offset: line for offset, line in records(data).items() if offset not in set(gone)}
    assert len(sealed) > 8 and len(gone) > 3000

    def produce():
        broker.send_lines([b"users.%d|0|%d|new" % (n % KEYS, n) for n in range(20)])
        sent[0] += 20

    def read():
        assert kept.items() <= records(data).items()
        rounds[0] += 1

    with meanwhile(produce, every_s=0.05) as unsent, meanwhile(read) as unread:
        rng = random.Random(7)
        for turn in range(5):
            with compaction.compactor(data) as where:
                for each in sealed:
                    compaction.lay_out(data, each, gone, where)
            if turn:
                time.sleep(rng.random() * 1.2)  # the router looks once a second: any moment of its swaps
            else:
                broker.wait(lambda: "event=segment_compacted" in broker.log(), "the router's first swap")
            broker.kill("router")
            broker.wait(lambda: not compaction.waiting(data), "the next router's swaps")
            assert not unsent + unread
    assert rounds[0] >= 3
    broker.wait_routed(1 + sent[0])
    found = records(data)
    assert {offset: line for offset, line in found.items() if offset < end} == kept
    assert sorted(found)[-1] == sent[0] - 1 and len(found) == len(kept) + sent[0] - COUNT
    broker.down()
    assert broker.kmq("verify").stdout.splitlines()[-1] == "no damage"
