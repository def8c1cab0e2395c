"""A broker of a shard within one process: `replica` with its real roles, port and rings, and the stages turn by turn.

What plays the supervisor and the event loops of the stages is `Broker.turn`. A test stops a part by its flag, and lets
it go on. The other side of a connection may be a Peer, which says by hand what a replica would say.
"""

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from fake_logger import FakeLogger
from made_data import write_data
from made_up import FIRST_TS, block, no_room
from waiting import PATIENCE_S, until_async

from kmq.broker.clock import AgeClock
from kmq.broker.stage import Stage
from kmq.broker.stats import StatsPage
from kmq.cluster.register import Register, begin
from kmq.config.settings import load
from kmq.framing.recovery import open_ring
from kmq.links.layout import shm_path
from kmq.links.ownership import FileLock, describe
from kmq.links.ring import RingReader
from kmq.links.role import FOLLOWING, LEADING, STARTING, WAITING, RolePage
from kmq.links.staging import StagingAreas, area_bytes
from kmq.log import identity, wal
from kmq.message.routing import LEVEL
from kmq.replica import wire
from kmq.replica.files import ReplicaFiles
from kmq.replica.follow import Following
from kmq.replica.lead import Leading
from kmq.replica.replica import Duty
from kmq.replica.roles import Roles
from kmq.replica.stages import Stages
from stages import durability, framer

SECRET = b"a secret of a shard"
LINEAGE = "1" * 32
MAX_LINE = 4096
NAMES = ("a", "b", "c")


def first_register(leader: str, isr: Sequence[str], epoch: int = 1) -> Register:
    """Version 1 has the leader alone in the ISR, version 2 has `isr`."""
    return begin(LINEAGE, NAMES, 2, leader, epoch).with_isr(isr)


async def until(condition: Callable[[], object], *tasks: asyncio.Task[Any]) -> None:
    """Wait until it is true, or one of the tasks has failed."""
    await until_async(lambda: condition() or any(task.result() for task in tasks if task.done()))


class Broker:
    """One broker. `has_durability`, `stores`, `frames`, `routes`, `lets_go`: whether that part works."""

    def __init__(
        self, root: Path, name: str, lines: Iterable[bytes] = (), routed: int = 0, env: dict[str, str] | None = None
    ) -> None:
        """`lines`: of its WAL, as sent. The first `routed` of them are in queues."""
        self.name, self.log = name, FakeLogger()
        root.mkdir()
        (root / "secret").write_bytes(SECRET)
        (root / "pipes").mkdir()
        self.instance = f"shard-{name}-{uuid.uuid4().hex[:8]}"
        paths = {"KMQ_DATA": f"{root}/data", "KMQ_PIPES": f"{root}/pipes", "KMQ_REPLICA_SECRET": f"{root}/secret"}
        cluster = {"KMQ_CLUSTER": "c", "KMQ_CONSUL": "127.0.0.1:1", "KMQ_SHARD": "s", "KMQ_BROKER": name}
        limits = {"KMQ_INSTANCE": self.instance, "KMQ_MAX_LINE": str(MAX_LINE)}
        self.settings = load(paths | cluster | limits | (env or {}), toml="")
        self.data = self.settings.data
        self._make_data([*lines], routed)
        self.start_replica()
        self.id = self.files.identity.id
        self.shown: list[tuple[int, int]] = []  # (first, last seq) of the blocks that the router was shown
        self.has_durability = self.stores = self.frames = self.routes = self.lets_go = True
        self.durability: durability.Durability | None = None
        self.framer: framer.Framer | None = None
        self._router: RingReader | None = None
        self._stages: list[Stage] = []
        self._wakes: list[int] = []
        self.raw = os.open(f"{root}/pipes/raw", os.O_RDWR | os.O_NONBLOCK)

    def start_replica(self) -> None:
        """What a start of the process `replica` does."""
        page = StatsPage(self.instance, identity.open_data(self.data, shard="s"), self.data)
        self.files = ReplicaFiles(self.data, "s")
        self.stages = Stages(self.settings, page, describe("replica", self.data, self.instance), self.log)
        self.roles = Roles(self.stages, self.files, self.name, SECRET)
        self.page = self.stages.page

    def _make_data(self, lines: list[bytes], routed: int) -> None:
        identity.open_data(self.data)
        Path(self.data, "lineage").write_text(f"{LINEAGE}\n")
        if routed:
            write_data(self.data, lines[:routed])
        made = wal.Wal(self.data, no_room, 1 << 20)
        if rest := lines[routed:]:
            more = block(rest, routed + 1)
            made.append([(more.data, routed + 1, more.count, FIRST_TS + more.last_seq)])
            made.sync()
        made.close()

    @property
    def end(self) -> int:
        return wal.last_stored(self.data)[0]

    @property
    def leading(self) -> Leading | None:
        return self.roles.leading

    @property
    def following(self) -> Following | None:
        return self.roles.following

    def promise(self, register: Register, leader: str = "") -> None:
        """Promise it, on disk, and act on it. `leader`: its address."""
        self.files.promise(register)
        self.roles.act(Duty(register, self.id, leader, as_of=time.monotonic()))

    def send(self, *lines: bytes) -> None:
        """Write lines into the FIFO, as a shell does."""
        os.write(self.raw, b"".join(line + b"\n" for line in lines))

    # --- the stages

    def turn(self) -> None:
        """Let each stage do a turn of its work, if it has any in this role."""
        role = self.page.read()
        if self._stages and self._stages[0].generation != role.generation:
            if self.lets_go:
                self.let_go()
            return
        if role.role in (STARTING, LEADING) and self.framer is None:
            self._start_framer()
        is_due = role.role != WAITING and self.has_durability and self.durability is None
        if is_due and os.path.exists(shm_path(self.instance, "framed")):
            self._start_durability()
        if self.framer is not None and self.frames:
            self.framer.staging.read(self.raw)
            if not self.framer.turn():
                self.framer.rest()
        if self.durability is not None and self.stores:
            self.durability.turn()
        if self.durability is not None and self.routes:
            self._route(self.durability)

    def begin(self, name: str) -> Stage:
        stage = Stage(name, self.settings)
        self._wakes.append(signal.set_wakeup_fd(-1))  # of a process that is only this stage
        assert stage.has_work()
        self._stages.append(stage)
        return stage

    def _start_framer(self) -> None:
        stage = self.begin("framer")
        stage.own(f"{self.settings.pipes}/raw.owner", "FIFO")
        ring = open_ring(stage)
        areas = StagingAreas(ring, area_bytes(MAX_LINE))
        self.framer = framer.Framer(stage, ring, areas, AgeClock(stage.row, ring.last.last_ts, self.log))

    def _start_durability(self) -> None:
        stage = self.begin("durability")
        stage.own(f"{self.data}/append/.owner", "WAL")
        self.durability = durability.Durability(stage)

    def _route(self, job: durability.Durability) -> None:
        if self._router is None:
            wanted = job.stage.ring_identity("durable")
            self._router = RingReader.attach(self.instance, "durable", wanted, "router")
        if self._router is not None and (blocks := self._router.take()):
            self.shown += [(block.first_seq, block.last_seq) for block in blocks]
            self.stages.stats.rows["router"].seq = blocks[-1].last_seq
            self._router.release(blocks[-1])

    def let_go(self) -> None:
        """What the end of the stages' processes does."""
        if self.durability is not None:
            self.durability.wal.close()
            self.durability.uncommitted.clear()  # blocks are views of the ring
        if self._router is not None:
            self._router.close()
        self.durability = self.framer = self._router = None
        for stage in self._stages:
            for held in stage._held:
                if isinstance(held, FileLock):
                    held.release()
                elif not isinstance(held, RolePage) and held._fd != -1:  # a ring that is open
                    held.close()
            for fd in (stage.raw, stage.acks, stage.signalled, stage._synced):
                if fd is not None:
                    os.close(fd)
        for fd in self._wakes:
            os.close(fd)
        self._stages.clear()
        self._wakes.clear()

    def close(self) -> None:
        self.let_go()
        for fd in (self.raw, self.stages.raw, self.stages.synced):
            os.close(fd)
        for path in Path("/dev/shm").glob(f"{self.instance}.*"):
            path.unlink()


class Shard:
    """Brokers at work in one event loop, each with its port."""

    def __init__(self, *brokers: Broker) -> None:
        self.brokers, self.ports = brokers, dict[str, wire.ReplicaPort]()
        self.tasks, self.links = list[asyncio.Task[None]](), list[wire.Link]()

    async def __aenter__(self) -> Self:
        for broker in self.brokers:
            self.ports[broker.name] = await self._port(broker).open("127.0.0.1", 0)
            self.tasks.append(asyncio.create_task(broker.roles.run()))
        self.tasks.append(asyncio.create_task(self._turns()))
        return self

    async def __aexit__(self, *error: object) -> None:
        for link in self.links:
            link.abort()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for port in self.ports.values():
            await port.close()

    async def _turns(self) -> None:
        while True:
            for broker in self.brokers:
                broker.turn()
            await asyncio.sleep(0.001)

    def _port(self, broker: Broker) -> wire.ReplicaPort:
        async def serve(link: wire.Link) -> None:
            await broker.roles.serve(link)

        return wire.ReplicaPort(lambda: broker.roles.me(), SECRET, None, lambda peer: "", serve, broker.log)

    async def restart(self, broker: Broker) -> None:
        """End the process `replica` of this broker, and start it again; the stages live on."""
        at = self.brokers.index(broker)
        self.tasks[at].cancel()
        await asyncio.gather(self.tasks[at], return_exceptions=True)
        for fd in (broker.stages.raw, broker.stages.synced):
            os.close(fd)
        broker.start_replica()
        self.tasks[at] = asyncio.create_task(broker.roles.run())

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name].port}"

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, *self.tasks)

    async def peer(self, broker: Broker, name: str = "b") -> "Peer":
        """Return the connection of a replica that is played by hand."""
        me = wire.Me("s", LINEAGE, name, name * 16, LEVEL, MAX_LINE)
        link = await wire.call(self.address(broker.name), me, SECRET, None, PATIENCE_S)
        self.links.append(link)
        assert broker.files.promised is not None
        return Peer(link, broker.files.promised)


class Peer:
    """One side of a connection, by hand."""

    def __init__(self, link: wire.Link, register: Register) -> None:
        self.link, self.register = link, register

    def send(self, message: wire.Message) -> None:
        self.link.send(message)

    def fetch(self, end: int, last: int, epoch: int | None = None, register: Register | None = None) -> None:
        """Ask for what is behind `end`, whose record is of epoch `last`."""
        register = register or self.register
        epoch = register.epoch if epoch is None else epoch
        self.send(wire.FetchText(register.version, epoch, end + 1, last, 1 << 20))

    def have(self, seq: int, version: int | None = None) -> None:
        self.send(wire.Have(version or self.register.version.number, seq + 1, 1 << 20))

    async def read(self, kind: Any) -> Any:
        """Return the next message of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(message := await self.link.read(), kind):
                pass
            return message

    async def has_ended(self) -> bool:
        """Return True once the other side has closed it."""
        with contextlib.suppress(ConnectionError):
            await self.read(())
        return True

    async def answered(self) -> list[wire.Message]:
        """Wait until a leader has taken all that was sent to it; return the messages that came meanwhile."""
        self.fetch(0, 0, epoch=10**6)
        found = []
        async with asyncio.timeout(PATIENCE_S):
            while (message := await self.link.read()) != wire.RefusedText("other_epoch"):
                found.append(message)
        return found

    async def joins(self, seq: int, last: int) -> None:
        """Begin behind `seq`, be compared, and confirm nothing yet."""
        self.fetch(seq, last)
        await self.read(wire.Hw)


class Leader:
    """A leader that is played by hand: its port, and the connections of its follower in order."""

    def __init__(self, register: Register) -> None:
        self.register = register
        self.me = wire.Me("s", LINEAGE, "a", register.leader, LEVEL, MAX_LINE)
        self._came: asyncio.Queue[wire.Link] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self.port = wire.ReplicaPort(lambda: self.me, SECRET, None, lambda peer: "", self._serve, FakeLogger())
        await self.port.open("127.0.0.1", 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.port.close()

    async def _serve(self, link: wire.Link) -> None:
        await self._came.put(link)
        await asyncio.Event().wait()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port.port}"

    async def accept(self) -> tuple[Peer, wire.FetchText]:
        """Return the next connection of the follower, and the position that it asks for."""
        async with asyncio.timeout(PATIENCE_S):
            link = await self._came.get()
        peer = Peer(link, self.register)
        return peer, await peer.read(wire.FetchText)


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Stages take over the signals of their process; give them back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def play(root: Path, scene: Callable[..., Awaitable[None]], *names: str, **options: Any) -> None:
    """Run `scene(shard, *brokers)` with brokers of these names."""
    with signals_kept():
        brokers = [Broker(root / name, name, **options) for name in names]

        async def whole() -> None:
            async with Shard(*brokers) as shard:
                await scene(shard, *brokers)

        try:
            asyncio.run(whole())
        finally:
            for broker in brokers:
                broker.close()


__all__ = ["FOLLOWING", "LEADING", "LINEAGE", "STARTING", "WAITING", "Leader", "first_register", "play", "until"]
