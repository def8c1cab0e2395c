"""Two ways through all that may happen to the Broadcast Queue: many random walks, and every schedule up to a bound."""

import random
from collections.abc import Callable
from typing import NamedTuple

from bq_code import DAY_S, Code
from bq_ghost import demand
from bq_world import FATES, UNKNOWN, Broken, Process, World

DECISIVE = (b"check-session", b"check-index", b'"cas"')  # in the requests whose outcome matters most


class Walk(NamedTuple):
    """One random run. `seed` alone decides what happens."""

    seed: int
    steps: int = 400


def walk(code: Code, run: Walk) -> World:
    """Take a random walk, then stop the faults and see that all brokers come to the epoch. Raises Broken."""
    rng = random.Random(run.seed)
    code.publisher.KEPT = rng.choice([1, 3])
    world = World(code, rng)
    names = iter(range(10**6))
    wild = rng.choice([0.02, 0.1, 0.3])  # how much goes wrong
    restores = rng.random() < 0.4
    publishers = rng.randrange(1, 4)
    try:
        for _ in range(run.steps):
            _fill(world, publishers, names)
            _happen(world, rng, wild, restores)
        world.heal()
    except Broken as broken:
        tail = "\n".join(world.trace[-60:])
        raise Broken(f"seed {run.seed}: {broken}\n{tail}") from None
    return world


def _fill(world: World, publishers: int, names: "object") -> None:
    """Start again what was killed."""
    rng = world.rng
    if sum(not process.broker for process in world.processes) < publishers:
        world.publisher(f"p{next(names)}")  # type: ignore[call-overload]
    for broker in world.ghost.brokers:
        here = sum(process.broker == broker for process in world.processes)
        if (not here and rng.random() < 0.05) or (here == 1 and rng.random() < 0.002):
            world.subscriber(f"{broker}-{next(names)}", broker)  # type: ignore[call-overload]


def _happen(world: World, rng: random.Random, wild: float, restores: bool) -> None:
    """One thing: mostly that a process goes on."""
    if world.flying and rng.random() < 0.05:
        return world.land(rng.randrange(len(world.flying)))
    if rng.random() < wild / 4:
        return _accident(world, rng, restores)
    awake = [process for process in world.processes if process.sleeps_until <= world.steps]
    if not awake:
        return None
    if rng.random() < 0.3:
        world.beat(rng.choice(awake))
    process = rng.choice(awake)
    is_decisive = process.is_request and any(word in process.asked.body for word in DECISIVE)
    if is_decisive and rng.random() < wild:
        return _ambush(world, process, rng)
    fate = rng.choice(FATES) if rng.random() < wild / 2 else "done"
    if is_decisive and restores and world.saved and b'"delete"' in process.asked.body and rng.random() < 0.1:
        world.restore(-1)
    for _ in range(rng.choice([1, 1, 2, 8, 30])):  # a slow one is overtaken by many steps of another
        if process.acts is None:
            break
        world.step(process, fate)
        fate = "done"
    return None


def _ambush(world: World, process: Process, rng: random.Random) -> None:
    """The outcome is unknown, and before it is asked for, others go on; often the session has ended then."""
    session = process.presence.session
    world.step(process, rng.choice(UNKNOWN))
    if rng.random() < 0.5:
        process.sleeps_until = world.steps + rng.choice([10, 100, 400])
        world.expire(session)


def _accident(world: World, rng: random.Random, restores: bool) -> None:
    kind = rng.random()
    if kind < 0.4 and world.processes:
        world.kill(rng.choice(world.processes))
    elif kind < 0.8 and world.consul.state.sessions:
        world.expire(rng.choice(list(world.consul.state.sessions)))
    elif kind < 0.85:
        world.clock.wall += rng.choice([DAY_S, -3600.0])
        world.note("the wall clock jumps")
    elif restores and kind < 0.93:
        world.save()
    elif restores and world.saved:
        world.restore(rng.randrange(len(world.saved)))


# --- every schedule ---------------------------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """How far to go. `switches`: how often another process goes on though the first could."""

    switches: int
    faults: int


class Scheduler:
    """Runs one schedule: a list of choices, then always the first; it notes where others could have been made."""

    def __init__(self, make: Callable[[], World], bounds: Bounds, choices: list[int]) -> None:
        self.world, self._bounds, self._choices = make(), bounds, choices
        self.taken: list[int] = []
        self.others: list[int] = []  # how many choices there were at each point

    def run(self) -> World:
        world, left = self.world, self._bounds
        active = world.processes[0]
        while any(not process.broker for process in world.processes):
            options = self._options(active, left)
            choice = self._choose(len(options))
            process, fate, left = options[choice]
            waits = process.asked.wait_s > 0
            world.step(process, fate)
            if process.answer is not None:
                world.step(process)
            while process.acts is not None and not process.is_request:
                waits = waits or process.asked.seconds > 0
                world.step(process)
            # Where it waits, or has ended, another one goes on: that costs nothing.
            active = process
            if waits or process.acts is None:
                active = self._next(process)
                world.expire_the_dead()
            demand(world.steps < 3000, "all publishers come to their end")
        world.heal()
        return world

    def _next(self, active: Process) -> Process:
        processes = self.world.processes
        at = processes.index(active) + 1 if active in processes else 0
        return processes[at % len(processes)]

    def _options(self, active: Process, left: Bounds) -> list[tuple[Process, str, Bounds]]:
        options = [(active, "done", left)]
        if left.faults:
            fewer = left._replace(faults=left.faults - 1)
            options += [(active, fate, fewer) for fate in ("lost", "unheard", "flying")]
        if left.switches:
            others = [process for process in self.world.processes if process is not active]
            options += [(process, "done", left._replace(switches=left.switches - 1)) for process in others]
        return options

    def _choose(self, count: int) -> int:
        at = len(self.taken)
        choice = self._choices[at] if at < len(self._choices) else 0
        self.taken.append(choice)
        self.others.append(count)
        return choice


def every_schedule(make: Callable[[], World], bounds: Bounds) -> int:
    """Run every schedule within the bounds. Returns how many; raises Broken with the choices that lead there."""
    count, todo = 0, [list[int]()]
    while todo:
        prefix = todo.pop()
        scheduler = Scheduler(make, bounds, prefix)
        try:
            scheduler.run()
        except Broken as broken:
            raise Broken(f"choices {scheduler.taken}: {broken}\n" + "\n".join(scheduler.world.trace[-60:])) from None
        count += 1
        for at in range(len(prefix), len(scheduler.taken)):
            todo += [[*scheduler.taken[:at], other] for other in range(1, scheduler.others[at])]
    return count
