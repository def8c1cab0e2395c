"""Each guard of elections, promises and identities, taken out; a walk must then break a promise."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shard_world import BROKERS, Broken, Edit, World, demand, load

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
        (("files", "        replace_file(f\"{self.data}/register\", _with_crc(text).encode())\n", ""),),
    ),
    Mutant(
        "a note speaks of a version before it is promised",
        (("replica", "        yield from self._promise(view)\n",
          "        if view.register is not None and self._note is not None:\n"
          "            yield from self._write_note(self._note._replace(version=view.register.version))\n"
          "        yield from self._promise(view)\n"),),
    ),
    Mutant(
        "a note speaks of a promise before the work for the one before ends",
        (("replica", "            self._act(view, register)\n", "            pass\n"),
         ("replica", "            yield from self._write_note(note)\n        if register is not None and",
          "            yield from self._write_note(note)\n        if register is not None:\n"
          "            self._act(view, register)\n        if register is not None and")),
    ),
    Mutant(
        "a spent epoch is led again",
        (("replica", "            if register.epoch == self._spent or", "            if"),),
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
        (("replica", "return identity.knows(member.note.start) and (version, self._work.stored()) >= self._noted(member)",
          "return True"),),
        "copy",
    ),
    Mutant(
        "an older state goes on under its id if it knows the mark",
        (("replica", " and (version, self._work.stored()) >= self._noted(member)", ""),),
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
         ("replica", "        if self._is_full or not self.files.identity.coming:  # no room: no session\n",
          "        if True:\n")),
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
        (("replica", "yield from self._presence.check()  # no lock is ever granted to a session that has ended", "pass"),),
    ),
    Mutant(
        "an ISR is changed by whoever likes",
        (("replica", "        if register.leader == me:\n", "        if True:\n"),),
    ),
    Mutant(
        "recover_no_hold: who has not promised the hold is elected",
        (("shard", "if each.session and each.note.version == held.version}", "if each.session and each.note.version}"),),
        "recover",
    ),
    Mutant(
        "recover_few: one replica is enough",
        (("shard", "    enough = len(base.brokers) - base.min_insync + 1\n", "    enough = 1\n"),),
        "recover",
    ),
    Mutant(
        "recover_any: any of them is elected",
        (("shard", "best = max(bound.values(), key", "best = min(bound.values(), key"),),
        "recover",
    ),
    Mutant(
        "recover_fork: promises of two branches are taken as one",
        (("shard", "    if others:\n", "    if False:\n"),),
        "recover fork",
    ),
    Mutant(
        "who comes back to an emptied Consul under a hold is a new replica",
        (("replica", "            return not identity.starts or (is_hold and promised is not None)\n",
          "            return not identity.starts\n"),),
        "recover late",
    ),
    Mutant(
        "a new replica counts as one of enough",
        (("shard", "if each.session and each.note.version}", "if each.session}"),),
        "recover new",
    ),
    Mutant(
        "recover_outside: nobody of the last known ISR is needed",
        (("shard", "    if not {*replicas} & {*base.isr}:", "    if False:"),),
        "recover outside",
    ),
    Mutant(
        "a register that is the newest is recovered",
        (("shard", "    if register is not None and register.leader and not newer:\n", "    if False:\n"),),
        "recover nothing",
    ),
    Mutant(
        "a hold is put over whatever is there",
        (("shard", "cas(keys.register, register.encode(), view.modified)",
          'KvOperation("set", keys.register, register.encode())'),),
        "recover twice",
    ),
]  # fmt: skip


def walk(edits: tuple[Edit, ...], root: Path, seed: int, kind: str) -> World:
    """Let things happen to a shard that works, then stop. Raises Broken."""
    root.mkdir(parents=True)
    world = World(load(edits), root, seed)
    world.begin()
    world.heal()
    if kind.startswith("recover"):
        RECOVERIES[kind](world)
        return world
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


# --- a register that was lost: what a has, all its ISR has; c has less -----------------------------------------------


def lose_register(world: World) -> None:
    """Let a and b commit ten records while c is away. Then Consul is emptied, and all but c are gone, too."""
    lose(world, "c")
    world.until("an ISR without c", lambda: len(world.register.isr) == 2, ["a", "b"])
    world.until("both promises", lambda: is_promised(world, "a") and is_promised(world, "b"), ["a", "b"])
    world.ends.update(a=10, b=10, c=5)
    for broker in ("a", "b"):
        lose(world, broker)
    empty_consul(world)
    world.start("c")
    await_shown(world, "c")


def is_promised(world: World, broker: str) -> bool:
    return bool(world.running[broker].replica.files.promised == world.register)


def lose(world: World, broker: str) -> None:
    process = world.running[broker]
    world.kill(broker)
    world.expire(process)


def empty_consul(world: World) -> None:
    empty = world.consul.snapshot()
    empty.pairs.clear()
    world.restore_consul(empty)


def await_shown(world: World, *brokers: str) -> None:
    """Wait until these are in Consul, with their promise."""

    def are_there() -> bool:
        view = world.run(world.code.shard.read_shard(world.keys))
        return all(
            view.is_alive(world.ids[each]) and (world.ids[each] in view.promises or is_promised(world, each))
            for each in brokers
        )

    world.until("what replicas know", are_there, brokers)


def attempt(world: World, meanwhile: Callable[[], None] = lambda: None, origin: str | None = None) -> str:
    """Run the command once. Return the broker that it elects; else what it says."""
    shard = world.code.shard

    def steps() -> Any:
        view = yield from shard.read_shard(world.keys)
        plan = shard.plan_recovery(world.keys, view, origin)
        return "nothing" if plan is None else (yield from shard.recover(world.keys, view, plan, 2.0))

    def go_on() -> None:
        meanwhile()
        for broker in BROKERS:
            for _ in range(20):
                if broker in world.running:
                    world.step(broker)

    try:
        return str(world.run(steps(), go_on))
    except KmqError as error:
        return str(error)


def recovers(world: World) -> None:
    lose_register(world)
    demand("1 of its replicas have promised it" in (said := attempt(world)), f"c alone: {said}")
    world.start("b")
    await_shown(world, "b", "c")
    consul, gone = world.code.shard.consul, world.keys.promise("0" * 16)  # shown by a replica that will not come back
    text = world.running["b"].replica.files.promised.encode()
    world.run(consul.txn([consul.KvOperation("set", gone, text)]))
    demand((said := attempt(world)) == "b", f"b has all, but: {said}")
    demand(gone not in world.consul.state.pairs, "a promise is shown for ever")
    world.ends["c"] = 10  # from b
    world.heal()


def finds_a_fork(world: World) -> None:
    """Where a has gone on in another branch than b and c, nobody is elected before a person has chosen."""
    former = world.consul.snapshot()
    lose(world, "c")
    world.until("an ISR without c", lambda: len(world.register.isr) == 2, ["a", "b"])
    world.until("a promise of a", lambda: is_promised(world, "a"), ["a", "b"])
    world.ends.update(a=10, b=10)
    lose(world, "b")
    newest = world.running["a"].replica.files.promised.version
    lose(world, "a")
    world.restore_consul(former)
    world.start("c")
    lost = world.register.epoch
    world.until("another leader", lambda: world.register.epoch > lost, ["c"])
    world.until("a promise of c", lambda: is_promised(world, "c"), ["c"])
    demand(not world.register.descends_from(newest), "the branches are one")
    world.start("a")
    world.start("b")
    await_shown(world, "a", "b", "c")
    demand("the promises fork" in (said := attempt(world)), f"in a fork: {said}")
    demand("first reset the others" in (said := attempt(world, origin="a")), f"with --from a: {said}")
    reset(world, "c")
    demand((said := attempt(world, origin="a")) in ("a", "b"), f"with --from a, c was reset: {said}")
    world.ends["c"] = 10
    world.heal()


def lets_a_late_one_vote(world: World) -> None:
    """Consul was emptied while a was away. It comes when b and c were asked already, and b has died under the hold."""
    lose_register(world)
    world.start("b")
    await_shown(world, "b", "c")
    shard = world.code.shard
    plan = shard.plan_recovery(world.keys, world.run(shard.read_shard(world.keys)))
    world.run(shard.write(world.keys, world.run(shard.read_shard(world.keys)), plan.base.hold()))
    lose(world, "b")
    world.start("a")
    await_shown(world, "a", "c")
    demand((said := attempt(world)) == "a", f"a knows all, and is here: {said}")
    world.ends["c"] = 10  # from a
    world.heal()


def reset(world: World, broker: str) -> None:
    """Give the broker an empty directory."""
    lose(world, broker)
    world.restored.add(broker)
    shutil.rmtree(world.root / broker)
    world.ends[broker] = 0
    world.start(broker)
    id = world.running[broker].replica.files.identity.id
    world.until("a new replica", lambda: world.keys.note(id) in world.consul.state.pairs)


def does_not_ask_new_ones(world: World) -> None:
    """The volume of b is lost. b and c know nothing of a's records, whatever b promises before a dies again."""
    lose_register(world)
    world.start("b")
    reset(world, "b")
    demand("1 of its replicas have promised it" in (said := attempt(world)), f"c and a new b: {said}")
    lose(world, "b")
    world.start("a")
    await_shown(world, "a", "c")
    has_died: list[bool] = []

    def a_dies() -> None:
        if not has_died:
            has_died.append(True)
            lose(world, "a")
            world.start("b")

    said = attempt(world, a_dies)
    demand("is held until this is run again" in said, f"a died under the hold: {said}")
    world.start("a")
    await_shown(world, "a", "c")
    demand((said := attempt(world)) == "a", f"a is here again: {said}")


def needs_the_isr(world: World) -> None:
    """The volume of b is lost, and its new replica has promised that a and the lost one are the ISR."""
    lose(world, "c")
    world.until("an ISR without c", lambda: len(world.register.isr) == 2, ["a", "b"])
    for broker in ("a", "b"):
        world.until("a promise", lambda broker=broker: is_promised(world, broker), ["a", "b"])  # type: ignore[misc]
    world.ends.update(a=10, b=10, c=5)
    lose(world, "b")
    reset_b = world.root / "b"
    shutil.rmtree(reset_b)
    world.restored.add("b")
    world.ends["b"] = 0
    world.start("b")
    world.start("c")
    for broker in ("b", "c"):
        world.until("a promise", lambda broker=broker: is_promised(world, broker), ["b", "c"])  # type: ignore[misc]
    for broker in BROKERS:
        lose(world, broker)
    empty_consul(world)
    world.start("b")
    world.start("c")
    await_shown(world, "b", "c")
    demand("none of the last known ISR is here" in (said := attempt(world)), f"without a: {said}")


def changes_nothing_needlessly(world: World) -> None:
    before = world.register
    demand((said := attempt(world)) == "nothing", f"with a register that is the newest: {said}")
    demand(world.register == before, "a register that is the newest was changed")


def lets_one_win(world: World) -> None:
    """Two commands at once: the one that was overtaken writes nothing."""
    lose_register(world)
    world.start("b")
    await_shown(world, "b", "c")
    shard = world.code.shard
    view = world.run(shard.read_shard(world.keys))
    plan = shard.plan_recovery(world.keys, view)
    demand(attempt(world) == "b", "the first one fails")
    try:
        world.run(shard.recover(world.keys, view, plan, 0.1))
    except shard.RetryError:
        return
    raise Broken("the second one writes over the first one's")


RECOVERIES: dict[str, Callable[[World], None]] = {
    "recover": recovers,
    "recover fork": finds_a_fork,
    "recover late": lets_a_late_one_vote,
    "recover new": does_not_ask_new_ones,
    "recover outside": needs_the_isr,
    "recover nothing": changes_nothing_needlessly,
    "recover twice": lets_one_win,
}


def find(mutant: Mutant, root: Callable[[int], Path], walks: int) -> str | None:
    """Return what is broken in the first walk that finds the guard missing; None if none does."""
    load(mutant.edits)  # raises ValueError for a mutant that the code has outgrown: that is no broken promise
    for seed in range(walks):
        try:
            walk(mutant.edits, root(seed), seed, mutant.kind)
        except (Broken, ValueError, KmqError) as error:
            return str(error)
    return None
