"""Replicas of one shard on a simulated Consul: a test decides who goes on, whose answer is lost, who is killed and when.

The code is the real one, with directories of its own on disk. `load` makes it anew, for a mutant with a guard taken out.
`Judge` looks at every write: of the register, of notes, of files.
"""

import random
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from consul_model import ConsulModel

from kmq.cluster.consul import Pause, Request, Response, Unanswered
from kmq.cluster.presence import Keys
from kmq.errors import KmqError

SHARD, BROKERS = "s", ("a", "b", "c")
TTL_S, LAG_S = 0.5, 1.0
# Each after what it imports.
MODULES = ("cluster.presence", "cluster.register", "replica.files", "replica.shard", "replica.replica")
HOUSE = Path(__file__).resolve().parents[2] / "kmq"
HEALED = 6_000  # steps without a fault within which the shard works again

Edit = tuple[str, str, str]  # module, what stands there (once), what is put in its place


class Broken(AssertionError):
    """A promise of the shard does not hold."""


class Killed(BaseException):
    """The process ends here, in the middle of what it does."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


class ReplicaCode(NamedTuple):
    """The modules, made anew."""

    presence: Any
    register: Any
    files: Any
    shard: Any
    replica: Any


def load(edits: Sequence[Edit] = ()) -> ReplicaCode:
    """Return the modules with these edits."""
    names = [f"kmq.{name}" for name in MODULES]
    others = {name: sys.modules.pop(name, None) for name in names}
    made = {}
    try:
        for name in MODULES:
            text = (HOUSE / f"{name.replace('.', '/')}.py").read_text()
            for _, old, new in [edit for edit in edits if edit[0] == name.partition(".")[2]]:
                if text.count(old) != 1:
                    raise ValueError(f"{name}.py: {old!r} stands there {text.count(old)} times; the mutant must follow")
                text = text.replace(old, new)
            module = made[name.partition(".")[2]] = types.ModuleType(f"kmq.{name}")
            sys.modules[module.__name__] = module
            exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    finally:
        for name, other in others.items():
            sys.modules.pop(name, None)
            if other is not None:
                sys.modules[name] = other
    return ReplicaCode(**made)


class Silent:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))

    warn = error = info


class Process:
    """One start of a replica on a directory."""

    def __init__(self, broker: str, directory: Path, steps: Iterator[Any], replica: Any, log: Silent) -> None:
        self.broker, self.directory, self.steps, self.replica, self.log = broker, directory, steps, replica, log
        self.asked: Any = None
        self.answer: Any = None  # a Response or an error that is on its way
        self.led: set[int] = set()  # epochs whose leader it was first promised to be in this start


class StillWork:
    """Stands in for roles.py where no data moves: who ends where the leader ends may join under its version."""

    def __init__(self, world: "World", broker: str) -> None:
        self.world, self.broker = world, broker
        self.duty: Any = None
        self.heard: dict[str, float] = {}

    def act(self, duty: Any) -> None:
        self.duty = duty

    def position(self) -> tuple[int, int]:
        for process in self.world.running.values():
            if process.broker == self.broker and self.duty is not None and process.replica.files.promised is not None:
                promised = process.replica.files.promised
                same = (self.duty.register.epoch, self.duty.register.leader) == (promised.epoch, promised.leader)
                demand(same, "it says where it stands under a promise, and still works under the one before")
        return 0, self.stored()

    def stored(self) -> int:
        return self.world.ends.get(self.broker, 0)

    def adopt(self, lineage: str) -> None:
        """All have the same."""

    def prepare_isr(self, isr: list[str]) -> None:
        demand(self.duty is not None, "the ISR is changed without a duty")

    def went_back(self) -> bool:
        return False

    def opened(self) -> int:
        return 0

    def followed(self) -> int:
        return 0

    def doors(self) -> dict[str, str]:
        return {}

    def is_spent(self, epoch: int) -> bool:
        return False

    def stands(self) -> bool:
        return False

    def may_join(self, replica: str) -> bool:
        for process in self.world.running.values():
            files, end = process.replica.files, self.world.ends.get(process.broker, 0)
            is_there = files.identity.id == replica and not files.identity.coming
            ours = self.duty.register if self.duty is not None else None
            if is_there and ours is not None and files.promised == ours and end == self.stored():
                self.heard[replica] = self.world.now
                return True
        return False

    def hears(self, replica: str) -> bool:
        return self.may_join(replica) or self.world.now - self.heard.setdefault(replica, self.world.now) < LAG_S

    def is_behind(self, replica: str) -> bool:
        return not self.hears(replica)

    def is_slow(self, replica: str) -> bool:
        return False


class Judge:
    """What an outside observer knows, and what must hold."""

    def __init__(self) -> None:
        self.registers: list[Any] = []  # all that were written, in order
        self.noted: dict[str, int] = {}  # replica → highest version that it has noted
        self.promised: dict[str, Any] = {}  # replica → its last promise on disk
        self.led: dict[int, Process] = {}  # epoch → the start in which its leader promised it
        self.is_recovered = False  # whether a hold has ended: who was away then may be a new replica
        self.is_restored = False  # whether Consul was: then numbers come again

    def on_register(self, old: Any, new: Any, who: Process | None) -> None:
        demand(new is not None, "the register was deleted")
        assert new is not None
        self.registers.append(new)
        if not new.leader:
            base = [one for one in self.promised.values() if one.marks == new.marks[:-1]]
            demand(bool(base) and new.epoch == base[0].epoch + 1, f"the hold {new.version} goes on from no promise")
            return
        if old is None:
            return
        demand(new.marks[:-1] == old.marks[-len(new.marks) + 1 :], f"{new} does not go on from {old}")
        demand(new.version.number == old.version.number + 1, "a write does not count the version up by one")
        if not old.leader:
            bound = [one for one in self.promised.values() if one.version == old.version]
            enough = len(old.brokers) - old.min_insync + 1
            demand(len(bound) >= enough, f"{new.leader} is chosen when {len(bound)} have promised the hold")
            self.is_recovered = True
            demand(new.isr == (new.leader,), f"after a hold the ISR begins with {new.isr}")
            return
        demand(len(new.isr) >= min(old.min_insync, len(old.isr)), f"the ISR shrank to {new.isr} from {old.isr}")
        if new.epoch == old.epoch:
            demand(new.leader == old.leader, f"epoch {new.epoch} changes its leader")
            demand(who is not None and who.replica.files.identity.id == new.leader, "the ISR is changed by no leader")
            demand(self.led.get(new.epoch) in (None, who) or self.is_restored, "a spent epoch is led again")
        else:
            demand(new.epoch == old.epoch + 1, "an epoch was left out")
            demand(new.leader in old.isr and set(new.isr) <= set(old.isr), f"{new.leader} is not of the ISR {old.isr}")

    def on_note(self, replica: str, version: int, on_disk: Any) -> None:
        known = on_disk.version.number if on_disk is not None else 0
        demand(version <= known, f"{replica} notes version {version}, on its disk is {known}")
        if not self.is_restored:
            demand(
                version >= self.noted.get(replica, 0),
                f"{replica} goes back from {self.noted.get(replica)} to {version}",
            )
        self.noted[replica] = max(version, self.noted.get(replica, 0))

    def on_promise(self, replica: str, register: Any, process: Process) -> None:
        before = self.promised.get(replica)
        demand(before is None or register.descends_from(before.version), f"the promise of {replica} went back")
        self.promised[replica] = register
        if register.leader == replica:
            self.led.setdefault(register.epoch, process)


class World:
    """Three brokers, one Consul, and what happens to them."""

    def __init__(self, code: ReplicaCode, root: Path, seed: int) -> None:
        self.code, self.root, self.random = code, root, random.Random(seed)
        self.now = 1000.0
        self.consul = ConsulModel(lambda: self.now)
        self.keys = code.shard.ShardKeys(Keys("dev"), SHARD)
        self.judge, self.trace = Judge(), list[str]()
        self.running: dict[str, Process] = {}
        self.may_kill = False  # in the middle of a file
        self.ends: dict[str, int] = {}  # by broker: seq of its last record
        self.restored: set[str] = set()  # brokers whose volume was
        self.ids: dict[str, str] = {}
        self.failed: list[KmqError] = []
        self.beats: dict[str, float] = {}  # by check: when it was last passed
        code.files.replace_file = self._replace
        code.register.secrets = types.SimpleNamespace(token_hex=lambda size: self.random.randbytes(size).hex())
        code.presence.time = types.SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start(self, broker: str) -> None:
        """Start a replica, unless it runs. The first letter of its name is its broker."""
        if broker in self.running:
            return
        directory, log = self.root / broker, Silent()
        directory.mkdir(exist_ok=True)
        files = self.code.files.ReplicaFiles(str(directory), SHARD)
        promised = files.promised
        if broker not in self.restored and files.identity.id in self.judge.promised:
            demand(promised == self.judge.promised[files.identity.id], f"{broker} has lost its promise")
        replica = self.code.replica.Replica(
            files, self.keys, broker[0], "0" * 32, TTL_S, LAG_S, StillWork(self, broker), lambda: f"{broker}:5677",
            lambda: False, log, lambda: self.now,
        )  # fmt: skip
        process = Process(broker, directory, replica.live(), replica, log)
        self.running[broker] = process
        self._note(f"{broker} starts")
        self._go_on(process, lambda: next(process.steps))

    def kill(self, broker: str) -> None:
        process = self.running.pop(broker, None)
        if process is not None:
            self._note(f"{broker} is killed")

    def expire(self, process: Process) -> None:
        """Consul has not heard of this process for too long."""
        self.consul.end_session(process.replica._presence.session)

    def _expire_the_silent(self) -> None:
        for name, session in [*self.consul.state.sessions.items()]:
            if any(self.now - self.beats.get(check, 0.0) > TTL_S for check in session.checks):
                self.consul.end_session(name)

    def step(self, broker: str, fate: str = "done") -> None:
        """Let a process go on: its request meets this fate, or it hears what came of the last one."""
        process = self.running[broker]
        if process.answer is None:
            process.answer = self._carry_out(process, fate)
            return
        answer, process.answer = process.answer, None
        if isinstance(answer, Unanswered):
            self._go_on(process, lambda: process.steps.throw(answer))  # type: ignore[attr-defined]
        else:
            self._go_on(process, lambda: process.steps.send(answer if isinstance(answer, Response) else None))  # type: ignore[attr-defined]

    def _go_on(self, process: Process, act: Callable[[], Any]) -> None:
        self._current = process
        try:
            process.asked = act()
        except Killed:
            self.kill(process.broker)
        except StopIteration:
            self.running.pop(process.broker, None)
        except KmqError as error:
            self._note(f"{process.broker} ends: {error}")
            self.running.pop(process.broker, None)
            self.failed.append(error)
            raise Broken(f"{process.broker} has ended: {error}") from error

    def _carry_out(self, process: Process, fate: str) -> object:
        asked = process.asked
        if isinstance(asked, Pause):
            self.now += asked.seconds
            return True
        assert isinstance(asked, Request)
        if asked.wait_s:
            self.now += min(asked.wait_s, 0.05)
        self._note(f"{process.broker} {asked.method} {asked.path.rpartition('/')[2]} {fate}")
        if fate == "unsent":
            return Unanswered("no answer")
        if "/check/pass/" in asked.path:
            self.beats[asked.path.rpartition("/")[2]] = self.now
        elif asked.path == "/v1/session/create":
            self.beats |= dict.fromkeys(self.consul.checks - self.beats.keys(), self.now)
        self._expire_the_silent()
        response = self.consul.answer(asked)
        for written in self.consul.journal:
            self._judge(written, process)
        return response if fate == "done" else Unanswered("no answer")

    def _judge(self, written: Any, process: Process | None) -> None:
        if written.key == self.keys.register:
            read = self.code.register.decode
            old, new = (read(one.value, "") if one else None for one in (written.before, written.after))
            self.judge.on_register(old, new, process)
        elif "/" in written.key.removeprefix(self.keys.root):
            pass  # the lock of a broker's name, or a promise that is shown
        elif written.after is not None and process is not None and written.after.session:
            note = self.code.shard.decode_note(written.after.value)
            replica = written.key.rpartition("/")[2]
            on_disk = self.judge.promised.get(replica)
            self.judge.on_note(replica, note.version.number if note.version else 0, on_disk)

    def _replace(self, path: str, *content: bytes) -> None:
        """Stands in for kmq.files.replace_file: a kill may come before or after it."""
        if self.may_kill and self.random.random() < 0.02:
            raise Killed
        making = Path(f"{path}.new")
        making.write_bytes(b"".join(content))
        making.rename(path)
        if path.endswith("/register"):
            text = b"".join(content)
            head, _, rest = text.partition(b"\n")
            register = self.code.register.decode(rest[: rest.rindex(b"crc32=")], path)
            self.judge.on_promise(head.removeprefix(b"replica=").decode(), register, self._current)
        if path.endswith("/replica"):
            self._judge_id(Path(path))
        if self.may_kill and self.random.random() < 0.02:
            raise Killed

    def _judge_id(self, path: Path) -> None:
        broker, id = path.parent.name, path.read_text().split(" ")[0]
        before = self.ids.get(broker, id)
        has_promise = before in self.judge.promised
        lost = (
            id != before
            and not self.judge.is_recovered
            and broker not in self.restored
            and (has_promise or not self.judge.is_restored)
        )
        demand(not lost, f"{broker}: the only directory of {before} has lost its id")
        self.ids[broker] = id

    def _note(self, line: str) -> None:
        self.trace.append(line)

    # --- the world ---------------------------------------------------------------------------------------------------

    def restore_consul(self, snapshot: Any) -> None:
        """Consul goes back: nobody's session is there any more."""
        self._note("Consul is restored")
        self.judge.is_restored = True
        self.consul.restore(snapshot)
        for session in [*self.consul.state.sessions]:
            self.consul.end_session(session)

    def restore_volume(self, broker: str, copy: Path) -> None:
        """The directory of a broker is an older one again."""
        self.kill(broker)
        self._note(f"{broker}: its volume is restored")
        self.restored.add(broker)
        shutil.rmtree(self.root / broker)
        shutil.copytree(copy, self.root / broker)

    def copy(self, broker: str) -> Path:
        """Return a copy of a directory as it is now."""
        place = self.root / f"{broker}-{len(self.trace)}"
        shutil.copytree(self.root / broker, place)
        return place

    @property
    def register(self) -> Any:
        pair = self.consul.state.pairs.get(self.keys.register)
        return self.code.register.decode(pair.value, self.keys.register) if pair is not None else None

    def run(self, steps: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Carry out a command's steps at once. `meanwhile`: what happens in each of its pauses."""
        answer = None
        try:
            while True:
                asked = steps.send(answer)
                if not isinstance(asked, Request):
                    meanwhile()
                    answer = None
                    continue
                answer = self.consul.answer(asked)
                for written in self.consul.journal:
                    self._judge(written, None)
        except StopIteration as end:
            return end.value

    def until(self, what: str, holds: Callable[[], bool], brokers: Sequence[str] = BROKERS, most: int = HEALED) -> None:
        """Let these processes go on in turn until something holds. Raises Broken."""
        for number in range(most):
            if holds():
                return
            broker = brokers[number % len(brokers)]
            if broker in self.running:
                self.step(broker)
        raise Broken(f"{what} never came; the register is {self.register}")

    def begin(self) -> None:
        """Start all brokers, and begin the shard with the command's code."""
        for broker in BROKERS:
            self.start(broker)
        entered = lambda: all(process.replica._start for process in self.running.values())  # noqa: E731
        self.until("an entry of all", entered)
        self.run(self.code.shard.init(self.keys, [*BROKERS], None, False))

    def works(self) -> bool:
        """Whether the register's leader leads, and all brokers are in its ISR, alive and under its version."""
        register = self.register
        if register is None or len(register.isr) < len(BROKERS) or len(self.running) < len(BROKERS):
            return False
        replicas = {process.replica.files.identity.id: process.replica for process in self.running.values()}
        return set(register.isr) == replicas.keys() and all(
            one.files.promised == register and not one.problem for one in replicas.values()
        )

    def is_calm(self) -> bool:
        """Whether all run, and each has promised the register, or says that it went back."""
        register, replicas = self.register, [process.replica for process in self.running.values()]
        return len(replicas) == len(BROKERS) and all(
            one.problem == self.code.replica.WENT_BACK or (register is not None and one.files.promised == register)
            for one in replicas
        )

    def calm(self) -> None:
        """Faults stop where Consul went back: all start again, and each knows where it stands."""
        self.may_kill = False
        self.restart_the_dead()
        self.until("a shard that knows where it stands", self.is_calm)

    def heal(self) -> None:
        """Faults stop: all start again, and the shard works."""
        self.may_kill = False
        self.restart_the_dead()
        self.until("a shard that works", self.works)

    def restart_the_dead(self) -> None:
        for broker in BROKERS:
            self.start(broker)

    # --- random walks ------------------------------------------------------------------------------------------------

    def walk(self, steps: int, volumes: bool = False, backup: Any = None) -> None:
        """Let things happen at random: `volumes`: one is restored; `backup`: Consul goes back to it."""
        copies: dict[str, Path] = {}
        self.may_kill = True
        for _ in range(steps):
            chance = self.random.random()
            broker = self.random.choice(BROKERS)
            process = self.running.get(broker)
            if chance < 0.01:
                self.kill(broker)
            elif chance < 0.02:
                self.start(broker)
            elif chance < 0.045 and process is not None:
                self._note(f"{broker}: its session ends")
                self.expire(process)
            elif chance < 0.05 and volumes and not self.restored:  # one of three: a member of each ISR is left
                if broker in copies:
                    self.restore_volume(broker, copies.pop(broker))
                else:
                    copies[broker] = self.copy(broker)
            elif chance < 0.055 and backup is not None and not self.judge.is_restored:
                self.restore_consul(backup)
            elif process is not None:
                self.step(broker, self.random.choice(("done",) * 18 + ("lost", "unsent")))
