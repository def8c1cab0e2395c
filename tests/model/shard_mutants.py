"""Each guard of elections, promises and identities, taken out; a walk must then break a promise."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shard_world import Broken, Edit, World, demand, load

from kmq.errors import KmqError


class Mutant(NamedTuple):
    """The code without one of its guards. `kind`: of the walks that meet it."""

    name: str
    edits: tuple[Edit, ...]
    kind: str = ""


MUTANTS = [
    Mutant(
        "any register is promised",
        (
            ("replica", "return promised is None or (register is not None and register.descends_from(promised.version))",
             "return register is not None or promised is None"),
            ("files", "if before is not None and not register.descends_from(before.version):", "if False:"),
        ),
        "consul",
    ),
    Mutant(
        "a promise is not on disk",
        (("files", "        replace_file(f\"{self._data}/register\", _with_crc(text).encode())\n", ""),),
    ),
    Mutant(
        "a note speaks of a version before it is promised",
        (("replica", "        yield from self._promise(view)\n",
          "        if view.register is not None and self._note is not None:\n"
          "            yield from self._say(self._note._replace(version=view.register.version))\n"
          "        yield from self._promise(view)\n"),),
    ),
    Mutant(
        "a spent epoch is led again",
        (("replica", "            if register.epoch == self._spent:\n", "            if False:\n"),),
    ),
    Mutant(
        "a register is set, whatever was read",
        (("shard", "cas(keys.register, register.encode(), view.modified)",
          'KvOperation("set", keys.register, register.encode())'),),
    ),
    Mutant(
        "who is not in the ISR is elected",
        (("shard", "            if member.id in register.isr\n            and", "            if"),
         ("register", "        if leader not in self.isr:\n", "        if False:\n")),
    ),
    Mutant(
        "an election lets all leave who are not alive",
        (("register", "isr = [*living, *others[: max(0, self.least - len(living))]]", "isr = living"),),
    ),
    Mutant(
        "any directory goes on under its id",
        (("replica", "return identity.knows(member.note.start) and (version, self._read_stored()) >= self._noted(member)",
          "return True"),),
        "copy",
    ),
    Mutant(
        "an older state goes on under its id if it knows the mark",
        (("replica", " and (version, self._read_stored()) >= self._noted(member)", ""),),
        "older",
    ),
    Mutant(
        "a new id keeps the promise of the old one",
        (("files", "            self.promised = None\n        self.identity", "            pass\n        self.identity"),),
        "volume",
    ),
    Mutant(
        "each start has a new mark",
        (("files", "return self if self.coming else self._replace(coming=new_mark())",
          "return self._replace(coming=new_mark())"),
         ("replica", "        if not self.files.identity.coming:\n", "        if True:\n")),
    ),
    Mutant(
        "the mark of a start is in Consul before it is on disk",
        (("replica", "            self.files.save(self.files.identity.about_to_start())\n",
          "            self.files.identity = self.files.identity.about_to_start()\n"),),
    ),
    Mutant(
        "who finds that the register went back is asked for its mark",
        (("replica", "        if promised is not None and not _descends(view.register, promised):\n", "        if False:\n"),),
        "emptied",
    ),
    Mutant(
        "a session that has ended is not noticed while its key is awaited",
        (("replica", "yield from self._presence.check()  # no lock is ever given to a session that has ended", "pass"),),
    ),
    Mutant(
        "an ISR is changed by whoever likes",
        (("replica", "        if register.leader == me:\n", "        if True:\n"),),
    ),
]  # fmt: skip


def walk(edits: tuple[Edit, ...], root: Path, seed: int, kind: str) -> World:
    """Let things happen to a shard that works, then stop. Raises Broken."""
    root.mkdir(parents=True)
    world = World(load(edits), root, seed)
    world.begin()
    world.heal()
    empty = world.consul.snapshot()
    empty.pairs.clear()
    backup = {"consul": world.consul.snapshot(), "emptied": empty}.get(kind)
    before = dict(world.ids)
    if kind == "older":
        restore_an_older_state(world)
    elif kind == "copy":
        restore_a_state_before_another_start(world)
    else:
        world.walk(600, volumes=kind == "volume", backup=backup)
    if backup is None:
        world.heal()
    else:
        world.calm()
    if kind in ("older", "copy"):
        demand(world.ids["b"] != before["b"], "a directory that is older than its replica goes on under the id")
    return world


def restore_an_older_state(world: World) -> None:
    """The volume of b goes back behind a version that it has noted in the same start."""
    copy = world.copy("b")
    lost = world.running["c"]
    world.kill("c")
    world.expire(lost)
    before = world.register
    world.until("an ISR without c", lambda: len(world.register.isr) == 2, ["a", "b"])
    noted = lambda: world.judge.noted[world.ids["b"]] > before.version.number  # noqa: E731
    world.until("a note of b", noted, ["a", "b"])
    world.restore_volume("b", copy)


def restore_a_state_before_another_start(world: World) -> None:
    """The volume of b goes back behind its last start, and b has noted nothing since."""
    copy = world.copy("b")
    world.kill("b")
    world.start("b")
    started = lambda: not world.running["b"].replica.files.identity.coming  # noqa: E731
    world.until("another start of b", started)
    world.restore_volume("b", copy)


def find(mutant: Mutant, root: Callable[[int], Path], walks: int) -> str | None:
    """Return what is broken in the first walk that finds the guard missing; None if none does."""
    for seed in range(walks):
        try:
            walk(mutant.edits, root(seed), seed, mutant.kind)
        except (Broken, ValueError, KmqError) as error:
            return str(error)
    return None
