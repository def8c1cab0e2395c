"""Three brokers of a shard and three servers of Consul, each in a network namespace of its own, and what befalls them.

Numbers in the network: Consul 1 to 3, the brokers a, b, c 11 to 13, their clones 21 to 23, clients 101. Brokers run as
users start them, by `kmq up`; ports are the default ones, as each has its own network. Each has an agent of Consul that it
asks first, the server 1 to 3.
"""

import contextlib
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from brokers import FREE_PORTS, Broker, is_alive
from waiting import until

from chaos.cluster.judge import Replica, load_replica
from chaos.cluster.witness import Witness
from chaos.consul_servers import ConsulServer, ConsulServers, consul_servers
from chaos.history import Healed
from chaos.loopfs import LoopFs, disk_of
from chaos.network import NET
from chaos.pod import remove_shared_memory
from chaos.wall_clock import WallClock

BROKERS = {"a": 11, "b": 12, "c": 13}
SERVERS = (1, 2, 3)
CLONE = 10  # from the number of a broker to that of its clone
DISK_BYTES = 1 << 30  # sparse; a soak stores a quarter of it
TTL_S = 2.0
REPLICA = "kmq.replica"  # module of the process `replica`
_FIELD = re.compile(r"(\w+)=(\S*)")


class Register(NamedTuple):
    epoch: int
    leader: str
    isr: list[str]


class ShardBroker(Broker):
    """One broker in its namespace. Commands run there too."""

    def __init__(
        self, root: Path, name: str, inside: Sequence[str], settings: dict[str, str], data: Path | None = None
    ) -> None:
        super().__init__(root, data)
        self.name, self.inside = name, inside
        for port in FREE_PORTS:
            del self.env[port]
        address = f"{NET}.{BROKERS[name]}"
        self.env |= {"KMQ_HOST": "0.0.0.0", "KMQ_ADVERTISE": address, "KMQ_BROKER": name} | settings

    def signal(self, number: int, module: str = "") -> list[psutil.Process]:
        """Send a signal to all its processes, or to that of one module; return them."""
        found = [process for process in self.processes() if not module or module in _words(process)]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return found

    def begin(self) -> subprocess.Popen[bytes]:
        """Run `kmq up`, and do not wait for it."""
        words = [*self.inside, "kmq", "up", *([] if self.gateway else ["--no-gateway"])]
        with (self.root / "up.log").open("ab") as out:
            return subprocess.Popen(words, env=self.env, cwd=self.root, stdout=out, stderr=out)

    def kill_all(self) -> None:
        """SIGKILL all of it at once, until nothing is left: a supervisor may have started a stage just now."""
        while killed := self.signal(signal.SIGKILL):
            self.wait(lambda killed=killed: not any(map(is_alive, killed)), f"the end of {self.name}")

    def cost_s(self) -> float:
        """The seconds since each of its processes began in which it computed, or waited for a core that others had."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for task in Path(f"/proc/{process.pid}/task").iterdir():
                    total += sum(map(int, (task / "schedstat").read_text().split()[:2]))
        return total / 1e9

    def log(self) -> str:
        """What its starts have printed, and its log."""
        paths = [path for path in (self.root / "up.log", self.pipes / "kmq.log") if path.exists()]
        return "".join(path.read_text(errors="replace") for path in paths)


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


class Shard:
    """The brokers by name, Consul, the witness of their WALs. `healed`: when which fault was over."""

    def __init__(self, root: Path, consul: ConsulServers, disks: dict[str, LoopFs], **settings: object) -> None:
        self.root, self.consul, self.network, self.disks = root, consul, consul.network, disks
        self.cluster = f"s{uuid.uuid4().hex[:8]}"
        secret = root / "secret"
        secret.write_text(uuid.uuid4().hex)
        secret.chmod(0o600)
        common = {
            "KMQ_SHARD": "s",
            "KMQ_CLUSTER": self.cluster,
            "KMQ_REPLICA_SECRET": str(secret),
            "KMQ_SESSION_TTL": f"{TTL_S:g}s",
            "KMQ_REPLICA_LAG": "2s",
        } | {name: str(value) for name, value in settings.items()}
        self.brokers: dict[str, ShardBroker] = {}
        self.clocks: dict[str, WallClock] = {}
        self._settings: dict[str, dict[str, str]] = {}  # by broker
        for name, number in BROKERS.items():
            self.network.add(number)
            self.clocks[name] = WallClock(root / f"{name}.clock")
            servers = sorted(consul.servers, key=lambda server: server is not self.agent(name))
            self._settings[name] = common | self.clocks[name].env | {"KMQ_CONSUL": consul.addresses_of(servers)}
            where = root / name, name, self.network.inside(number)
            self.brokers[name] = ShardBroker(*where, self._settings[name], disks[name].path / "data")
        self._ballast: list[Path] = []
        self._starts: list[subprocess.Popen[bytes]] = []
        self._traces: list[subprocess.Popen[bytes]] = []
        self._clones: list[ShardBroker] = []
        self._went_back = False  # what Consul holds
        self.paused: set[str] = set()
        self.healed: list[Healed] = []
        self.faults_ended = 0.0
        self.witness = Witness(root / "witness", {name: broker.data for name, broker in self.brokers.items()})

    # --- the shard ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start all brokers and the shard; return when all of them are in the ISR."""
        self.up(*self.brokers)
        self._succeed("init", "--shard", "s", "--brokers", ",".join(self.brokers))
        self.witness.start()
        self.wait_whole()

    def _succeed(self, *arguments: str) -> None:
        """Repeat a command of `kmq cluster` until it succeeds."""
        said: list[str] = []

        def is_done() -> bool:
            done = self.brokers["a"].kmq("cluster", *arguments)
            said.append(done.stdout + done.stderr)
            return done.returncode == 0

        self.wait(is_done, f"kmq cluster {arguments[0]}", lambda: said[-1])

    def up(self, *names: str) -> None:
        """Start brokers, side by side. A start may find no leader, or no Consul: that is no failure of the command."""
        self._starts = [start for start in self._starts if start.poll() is None]
        self._starts += [self.brokers[name].begin() for name in names]

    def register(self) -> Register:
        """What the register in Consul says, with replicas as their brokers."""
        entries = self.consul.entries(f"kmq/{self.cluster}/replicas/s/")
        fields = dict(_FIELD.findall(entries.get("register", b"").decode()))
        broker = {id: dict(_FIELD.findall(note.decode())).get("broker", "") for id, note in entries.items()}
        isr = sorted(broker.get(id, id) for id in fields.get("isr", "").split(",") if id)
        return Register(int(fields.get("epoch", 0)), broker.get(fields.get("leader", ""), ""), isr)

    def agent(self, name: str) -> ConsulServer:
        """Return the agent of Consul that this broker asks first."""
        return self.consul.servers[sorted(BROKERS).index(name)]

    def leader(self) -> str:
        """Return the broker that leads by the register, once one does."""
        self.wait(lambda: self.register().leader, "a leader")
        return self.register().leader

    def others(self, leader: str) -> list[str]:
        return [name for name in self.brokers if name != leader]

    def wait_whole(self) -> None:
        """Wait until there is a leader, and every broker in the ISR."""

        def is_whole() -> bool:
            register = self.register()
            return bool(register.leader) and register.isr == sorted(self.brokers)

        self.wait(is_whole, "every broker in the ISR")

    def wait(self, condition: Callable[[], object], what: str, instead: Callable[[], object] = str) -> None:
        until(condition, what, lambda: f"{instead()}\n{self.tail()}")

    def tail(self) -> str:
        """The register, and the end of each broker's log."""
        logs = [f"--- {name}\n{broker.log()[-3000:]}" for name, broker in self.brokers.items()]
        return "\n".join([str(self.register()), *logs])

    # --- faults ------------------------------------------------------------------------------------------------------

    def number(self, name: str) -> int:
        return BROKERS[name]

    def cut_off(self, name: str, consul: bool = True) -> None:
        """No broker reaches this one any more; with `consul` no server of Consul does. Clients do."""
        others = [BROKERS[other] for other in self.others(name)]
        self.network.split([BROKERS[name]], [*others, *(SERVERS if consul else ())])

    def cut_from_consul(self, *names: str) -> None:
        self.network.split([BROKERS[name] for name in names], SERVERS)

    def kill(self, *names: str) -> None:
        """Kill all of these brokers at once: what a power cut leaves behind, but for the page cache."""
        for name in names:  # first all that they have, so that nobody lives to see the others die
            self.brokers[name].signal(signal.SIGKILL)
        for name in names:
            self.brokers[name].kill_all()

    def pause(self, name: str) -> None:
        self.brokers[name].signal(signal.SIGSTOP)
        self.paused.add(name)

    def wipe(self, name: str) -> None:
        """Kill a broker, and give it an empty directory: a new machine, which has nothing in its memory either."""
        self.kill(name)
        self.witness.look()
        remove_shared_memory(self.brokers[name].instance)
        shutil.rmtree(self.brokers[name].data)
        self.witness.forget(name)  # not before, or a look in between notes what is being removed
        self._sync(name)

    def _sync(self, name: str) -> None:
        """What was done to this disk is there after a power cut, too."""
        subprocess.run(["sync", "-f", self.disks[name].path], check=True)

    def restore(self, name: str) -> None:
        """Kill a broker, and give it its directory as `copy` found it."""
        self.wipe(name)
        shutil.copytree(self._copy_of(name), self.brokers[name].data, symlinks=True)
        self._sync(name)

    def clone(self, name: str) -> None:
        """Start a copy of its directory on another machine, beside the broker itself, which starts anew."""
        self.copy(name)
        number, root = BROKERS[name] + CLONE, self.root / f"{name}.clone"
        self.network.add(number)
        shutil.copytree(self._copy_of(name), root / "data", symlinks=True)
        settings = self._settings[name] | {"KMQ_ADVERTISE": f"{NET}.{number}"}
        self._clones.append(ShardBroker(root, name, self.network.inside(number), settings))
        self._starts.append(self._clones[-1].begin())

    def copy(self, name: str) -> None:
        """Kill a broker, keep a copy of its directory, and start it again."""
        self.kill(name)
        shutil.rmtree(self._copy_of(name), ignore_errors=True)
        shutil.copytree(self.brokers[name].data, self._copy_of(name), symlinks=True)
        self.up(name)

    def _copy_of(self, name: str) -> Path:
        return self.brokers[name].root / "copy"

    def fill(self, name: str) -> None:
        """Leave no room on a broker's disk."""
        self._ballast.append(self.disks[name].fill(0))

    def cut_power(self, *names: str) -> None:
        """Cut the power of these brokers at once; it is back, and they have on disk what they had synced.

        The network goes first: what is said while a file system goes down does not count (chaos/test_power.py).
        """
        self.witness.look()
        for name in names:
            self.network.cut_off(BROKERS[name])
        for name in names:
            self.disks[name].cut_power()
        self.kill(*names)
        for name in names:
            remove_shared_memory(self.brokers[name].instance)
            self.disks[name].power_on()
            self.witness.forget(name)

    def fail_syncs(self, name: str, module: str, strace: str) -> None:
        """From now on each sync fails of the process of this module that runs now; what it has not synced stays cached."""
        calls = "fdatasync,fsync"
        words = [strace, "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO"]
        for process in self.brokers[name].signal(0, module):
            self._traces.append(subprocess.Popen([*words, "-p", str(process.pid)], stderr=subprocess.DEVNULL))

    def restore_consul(self, name: str) -> None:
        """To before the kill of a broker that is back: so to before an election, or a change of the ISR."""
        before = self.register()
        self.consul.snapshot("save", self.root / "consul.snapshot")
        self.kill(name)
        if name == before.leader:
            self.wait(lambda: self.register().epoch > before.epoch and self.register().leader, "another leader")
        else:
            self.wait(lambda: name not in self.register().isr, f"an ISR without {name}")
        self.up(name)
        self.wait_whole()
        self.consul.snapshot("restore", self.root / "consul.snapshot")
        self._went_back = True

    def empty_consul(self) -> None:
        """Kill all servers; they come back with nothing."""
        for server in self.consul.servers:
            server.kill()
            shutil.rmtree(self.consul.root / f"{server.number}.data")
        self.consul.repair()
        self._went_back = True

    def _recover(self) -> None:
        """Give Consul its register back, as an operator does."""
        self._succeed("recover", "--shard", "s", "--yes")
        self._went_back = False

    def _end_traces(self) -> None:
        while self._traces:
            trace = self._traces.pop()
            trace.terminate()  # it lets go of what it traces
            trace.wait()

    def _end_clones(self) -> None:
        while self._clones:
            clone = self._clones.pop()
            clone.kill_all()
            (self.root / f"{clone.name}.clone.log").write_text(clone.log())
            clone.close()

    def heal(self, what: str) -> None:
        """End all faults: the network, Consul, those who are paused, those who were killed.

        Healed is at the end of the faults and of the seconds that the starts computed, or waited for a core, or once all
        have started: what else a start waits for counts. So a machine that has more to do does not fail the test.
        """
        self._end_traces()
        self._end_clones()
        for clock in self.clocks.values():
            clock.set(0)
        self.consul.repair()
        for name in sorted(self.paused):
            self.brokers[name].signal(signal.SIGCONT)
        self.paused.clear()
        while self._ballast:
            self._ballast.pop().unlink(missing_ok=True)  # a power cut may have taken it
        dead = [broker for broker in self.brokers.values() if not broker.processes()]
        self.up(*(broker.name for broker in dead))
        if self._went_back:
            self._recover()
        self.faults_ended = time.monotonic()
        self.wait(lambda: all(start.poll() is not None for start in self._starts), "the end of all starts")
        cost_s = sum(broker.cost_s() for broker in dead)
        self.healed.append(Healed(what, min(self.faults_ended + cost_s, time.monotonic())))

    # --- the end -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Kill everything: what was acknowledged is on disk, and what is shown is committed."""
        self.kill(*self.brokers)
        self.witness.finish()

    def replicas(self) -> list[Replica]:
        return [load_replica(name, broker.data) for name, broker in self.brokers.items()]

    def close(self) -> None:
        self.witness.finish()
        self._end_traces()
        self._end_clones()
        for start in self._starts:
            start.kill()
            start.wait()
        for name in sorted(self.paused):
            self.brokers[name].signal(signal.SIGCONT)
        for name, broker in self.brokers.items():
            (self.root / f"{name}.log").write_text(broker.log())  # its directory goes
            broker.close()


@contextlib.contextmanager
def open_shard(root: Path, **settings: object) -> Iterator[Shard]:
    """A shard that has begun, for a with block; without Consul or namespaces: skipped, in CI failed, with the reason."""
    (root / "consul").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        consul = stack.enter_context(consul_servers(root / "consul"))
        disks = {}
        for name in BROKERS:
            (root / f"{name}.disk").mkdir()
            disks[name] = disk_of("ext4", DISK_BYTES, root / f"{name}.disk", stack)
        shard = Shard(root, consul, disks, **settings)
        stack.callback(shard.close)
        shard.begin()
        yield shard
