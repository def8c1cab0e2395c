"""One partition in the tier on random walks: kills, a store that lies, limits, new starts, lost files. A reader never sees
another record, a hole, or a start that nobody has moved."""

import contextlib
import os
import random
import shutil

import pytest
from tiered import TieredBroker, lines

from kmq.errors import KmqError
from kmq.log import reader, rows, segment
from kmq.log.rows import NotHereError
from kmq.log.segment import Limits
from kmq.router.tiering import Tiering
from kmq.tier import fetch
from kmq.tier.cache import TierCache
from kmq.tier.commits import line
from kmq.tier.partitions import PartitionCopier

pytestmark = pytest.mark.usefixtures("small_blocks")

STEPS, WALKS, MUTANT_WALKS = 60, 4, 30
SEGMENT = 1024
BLOCK_BYTES = 256  # of the index, see small_blocks


class Walk:
    def __init__(self, path, seed):
        self.rnd = random.Random(seed)
        self.made = TieredBroker(path, self._limits(), object_bytes=self.rnd.choice([1500, 4000, 1 << 26]))
        self.begin = 0  # for readers, as it was last
        self.may_move = False  # limits of the whole topic were in force since

    def _limits(self, total=0):
        local = self.rnd.choice([SEGMENT, 3 * SEGMENT, 0])
        return Limits(segment_bytes=SEGMENT, tier="on", retention_bytes=total, local_retention_bytes=local)

    def step(self):
        made, rnd = self.made, self.rnd
        what = rnd.choices(
            ["send", "turn", "tick", "copier", "restart", "kill", "limits", "start", "room", "lose", "fetch"],
            [30, 25, 10, 5, 5, 5, 8, 6, 4, 6, 6],
        )[0]
        if what == "send":
            made.send(*lines(rnd.randint(1, 40), begin=len(made.sent), size=rnd.choice([5, 60])))
        elif what == "turn":
            self._turn()
        elif what == "tick":
            made.tick()
        elif what == "copier":
            made.kill_copier()
        elif what == "restart":
            made.stop()
            made.start()
        elif what == "kill":
            made.kill()
            made.start()
        elif what == "limits":
            total = rnd.choice([0, 0, 4 * SEGMENT, 20 * SEGMENT])
            self.may_move |= bool(total)
            made.limits = self._limits(total)
            made.queues.use_limits(made.limits)
        elif what == "start" and made.sent:
            log = made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0)
            offset = rnd.randint(0, len(made.sent))
            made.queues.retention.begin_at([(log, offset)])
            made.tick()
            self.begin = max(self.begin, min(offset, len(made.sent)))
        elif what == "room":
            made.shortage = 0 if made.shortage else rnd.choice([1, SEGMENT, 1 << 30])
        elif what == "fetch":  # the router comes to it in some later tick
            planned = fetch.plan(made.data, "t", 0, rnd.choice([SEGMENT, 1 << 30]))
            fetch.fetch(made.data, made.store, planned[: rnd.randint(0, len(planned))], lambda nbytes: None)
        elif what == "lose":
            self._lose()
        self.check(what)

    def _turn(self):
        made, rnd = self.made, self.rnd
        made.checkpoint()
        made.store.plan = [rnd.choice(["", "", "", "", "lost", "done", "late"]) for _ in range(rnd.randint(0, 8))]
        with contextlib.suppress(KmqError):
            made.copier.turn()
        made.store.plan = []
        if rnd.random() < 0.3:
            made.store.deliver()
        if rnd.random() < 0.8:
            made.tick()

    def _lose(self):
        """Files are lost while the broker is down; the WAL has all."""
        made = self.made
        made.stop()
        kind = self.rnd.choice(["ckpt", "first", "all", "cache"])
        if kind == "ckpt":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{made.data}/router.ckpt")
        elif kind == "cache":
            shutil.rmtree(f"{made.data}/tier/cache", ignore_errors=True)
        else:
            listed = segment.listing(made.directory())
            for _, path in listed[:1] if kind == "first" else listed:
                os.unlink(path)
        made.start()

    def check(self, what):
        made = self.made
        if not made.sent:
            return
        log, cache = reader.partition(made.data, "t", 0), TierCache(made.data, made.store, 1 << 30)
        begin, end = log.first_offset, log.end_offset()
        assert end == len(made.sent), f"after {what}: ends with {end}"
        if what == "lose" and rows.of(made.directory()).end is None:
            self.begin = min(begin, self.begin)  # without rows a rebuild also brings what retention had deleted
        assert begin >= self.begin or not self.may_move, f"after {what}: begins with {begin} again, before {self.begin}"
        assert begin == self.begin or self.may_move, f"after {what}: begins with {begin}, not {self.begin}"
        self.begin = max(begin, self.begin)
        offset = begin
        while offset < end:
            try:
                first, text = log.read(offset, self.rnd.choice([1, 700, 1 << 20]))
            except NotHereError as err:
                cache.fetch(err.directory, err.life, err.row)
                continue
            count = text.count(b"\n")
            assert first == offset and text == b"".join(made.sent[first : first + count]), f"after {what}: at {offset}"
            offset += count

    def close(self):
        with contextlib.suppress(Exception):
            self.made.stop()


def walk(path, seed, steps=STEPS):
    made = Walk(path, seed)
    try:
        for _ in range(steps):
            made.step()
    finally:
        made.close()
    return made


@pytest.mark.parametrize("number", range(WALKS))
def test_readers_see_the_same_on_a_random_walk(tmp_path, number):
    seed = int(os.environ.get("MODEL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"MODEL_SEED={seed}")
    walk(tmp_path, seed)


def without_cover(monkeypatch):
    """Local limits do not ask what the file `tier` has."""
    monkeypatch.setattr(
        Tiering, "_due_here", lambda self, found, state, limits, now_s, most: min(most, len(state.sealed))
    )


def without_need(monkeypatch):
    """Rows are dropped whether or not readers need them."""

    def drops(self, state, found):
        return [
            line("drop", each.name, life=each.life, before=each.log.end, why="retention")
            for each in found
            if each.log.rows
        ]

    monkeypatch.setattr(PartitionCopier, "drops", drops)


def without_start(monkeypatch):
    """A new start does not reach the file `tier`."""
    monkeypatch.setattr(Tiering, "set_start", lambda self, name, number, offset: None)


MUTANTS = [without_cover, without_need, without_start]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_guard_that_is_missing_is_seen(tmp_path, monkeypatch, mutant):
    mutant(monkeypatch)
    for seed in range(MUTANT_WALKS):
        try:
            walk(tmp_path / str(seed), seed)
        except (AssertionError, KmqError):
            return
    raise AssertionError(f"nothing was seen in {MUTANT_WALKS} walks")
