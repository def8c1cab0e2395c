"""The framer's own steps over real memory and a real FIFO, killed between any two of them: nothing is lost or doubled."""

import os
import random

import pytest
from fake_logger import FakeLogger
from framing_steps import MAX, one_by_one, random_traffic, table
from received_ends import Lines, Way, joined

from kmq.framing import blocks as batches
from kmq.framing.blocks import frame
from kmq.framing.parser import Parser, ReceivedLines
from kmq.links import layout
from kmq.links import ring as ring_module
from kmq.links.fifo import Sender, open_fifo, waiting_bytes
from kmq.links.layout import Received
from kmq.links.received import Handover
from kmq.links.ring import RingReader, RingWriter
from kmq.links.staging import StagingAreas, area_bytes


class Killed(Exception):
    pass


class World:
    """What outlives a framer: both rings, the FIFO, ingress, and durability with what it has stored."""

    def __init__(self, rng, raw, slots, ring_bytes, received_bytes):
        self.rng, self.raw = rng, raw
        self.way = Way(received_bytes)
        self.hand = Handover(raw, self.way.writer)
        self.senders = {}
        self.area = area_bytes(MAX)
        self.identity = layout.make_identity("unit", slots, ring_bytes, 2 * self.area, "block")
        self.kills, self.blocks, self.armed = 0, 0, False
        self.framer = Framer(self)
        self.reader = RingReader.attach(self.way.instance, "framed", self.identity, "durability")
        self.stored, self.replies = [], []

    def ring(self):
        return RingWriter(self.way.instance, "framed", self.identity, "framer", lambda: (1, 0), FakeLogger())

    def store(self):
        """Let durability store what waits."""
        armed, self.armed = self.armed, False
        for block in self.reader.take():
            self.stored += bytes(block.data).splitlines(keepends=True)
            self.replies += block.replies.split(b"\n")[:-1]
            self.blocks += 1
            self.reader.release(block)
        self.armed = armed

    def die(self):
        if self.armed and not self.rng.randrange(12):
            raise Killed

    def turn(self):
        """Let the framer work, or be killed and start again; return False if there is nothing to do."""
        try:
            self.armed = True
            return self.framer.turn()
        except Killed:
            self.kills += 1
            self.armed = False
            self.framer.ring.close()
            self.framer = Framer(self)
            return True
        finally:
            self.armed = False

    def put(self, part):
        """Hand a part over as ingress does, or write it as a shell does."""
        if isinstance(part, bytes):
            self.flush()
            os.write(self.raw, part)
            return
        sender = None
        if not isinstance(part, Lines):
            sender = self.senders.setdefault(part.conn, Sender(part.conn, part.tag))
        self.hand.put([joined(part.lines)], sender, len(part.lines) if sender is not None else 0)
        if self.hand.clogged or not self.rng.randrange(3):
            self.flush()

    def flush(self):
        self.hand.flush()
        while self.hand.clogged:
            self.turn()
            self.store()
            self.hand.flush()

    def close(self):
        for end in (self.framer.ring, self.reader):
            end.close()
        layout.remove(self.way.instance, "framed")


class Framer:
    """One life. The steps of stages/framer.py, each with a chance to be the last before it or behind it."""

    def __init__(self, world):
        self.world = world
        self.ring = ring = world.ring()
        self.staging = StagingAreas(ring, world.area)
        self.known = table()
        if hasattr(world, "stored"):
            self.known.absorb(b"".join(world.stored), 0)
            for block in ring.waiting():
                self.known.absorb(bytes(block.data), 0)
        self.source = ReceivedLines(world.way.attach, Received(ring.last.birth, ring.last.position))
        self.parser = Parser(MAX, self.known, self.source, ring.limits)
        for owner, steps in (
            (self.staging, ("read", "copy_rest", "adopt")),
            (ring, ("append", "commit")),
            (self.source, ("committed",)),
        ):
            for step in steps:
                setattr(owner, step, self._deadly(getattr(owner, step)))

    def _deadly(self, step):
        def deadly(*args):
            self.world.die()
            result = step(*args)
            self.world.die()
            return result

        return deadly

    def turn(self):
        ring, staging, source = self.ring, self.staging, self.source
        read = staging.read(self.world.raw)
        text = staging.lines()
        if text:
            batch = self.parser.batch(text, ring.last.next_seq, 0)
        elif not staging.make_room() and staging.is_full:
            batch = batches.endless(ring.last.next_seq, source.done.position, staging.unfinished(), MAX)
        else:
            return read > 0
        for framed, is_last in frame(batch, ring.limits, ring.last.last_ts, source.done.birth):
            while not ring.has_room(len(framed.lines) + len(framed.replies), framed.stamp.count):
                self.world.store()
            staging.append(framed, swaps=is_last and not batch.more)
            source.committed(framed.received)
            self.world.way.spoil()
        if batch.is_empty:
            done = Received(source.done.birth, batch.position)
            staging.swap_areas(staging.consumed + batch.used, done)
            source.committed(done)
        return True


@pytest.fixture
def worlds(tmp_path):
    made, raw = [], open_fifo(str(tmp_path), "raw")

    def make(*args):
        made.append(World(args[0], raw, *args[1:]))
        return made[-1]

    yield make
    for world in made:
        world.close()
    os.close(raw)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_traffic_of_many_connections_is_the_models_whenever_the_framer_is_killed(worlds, monkeypatch, seed):
    rng, kills, blocks = random.Random(seed), 0, 0
    for slots, ring_bytes, received_bytes in (
        (16, 64 << 10, 16 << 10),
        (64, 1 << 18, 40 << 10),
        (2048, 1 << 18, 1 << 20),
    ):
        world = worlds(rng, slots, ring_bytes, received_bytes)
        die, ring_fence = world.die, ring_module.fence
        monkeypatch.setattr(ring_module, "fence", lambda die=die: die())  # also inside a commit, before and behind it
        parts, model = random_traffic(rng, 250)
        for part in parts:
            world.put(part)
            if not rng.randrange(6):
                world.turn()
            if not rng.randrange(9):
                world.store()
        world.flush()
        while world.turn() or waiting_bytes(world.raw):
            world.store()
        world.store()
        monkeypatch.setattr(ring_module, "fence", ring_fence)
        stored = [line.split(b"|", 2) for line in world.stored]
        assert [int(seq) for seq, *_ in stored] == list(range(1, len(model.lines) + 1))
        assert [line.rstrip(b"\n") for *_, line in stored] == model.lines
        assert one_by_one(world.replies) == model.said
        assert world.way.writer.cells[layout.TAIL] == world.way.writer.head
        kills, blocks = kills + world.kills, blocks + world.blocks
    assert kills > 100 and blocks > 100
