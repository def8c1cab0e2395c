"""Roles: what this broker does in its shard (wait, follow or lead), and the process that runs it.

    live        runs session and register (replica.py), port (wire.py) and role in one event loop
    Roles       runs Leading (lead.py) or Following (follow.py) for one epoch, until the promised register asks for
                another role

Between two roles the stages release everything (stages.py).
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kmq.broker.door import KAFKA_ADVERTISED, addresses, host_port
from kmq.broker.stats import REPLICA, Row, StatsPage
from kmq.broker.tls import certificates, client_context
from kmq.cluster.consul import Transport
from kmq.cluster.presence import Keys
from kmq.cluster.queue import Place
from kmq.config.settings import Settings
from kmq.errors import ConfigError, CorruptError, RetryError
from kmq.files import FULL, replace_file
from kmq.links.ownership import FileLock, describe
from kmq.links.role import LEADING, WAITING
from kmq.log import identity, segment, wal
from kmq.logfmt import Logger
from kmq.message.routing import LEVEL
from kmq.replica import bootstrap, compare, wire
from kmq.replica.files import ReplicaFiles
from kmq.replica.follow import Following, WentBack
from kmq.replica.lead import HUNG_S, Leading
from kmq.replica.replica import Duty, Replica, promise_version
from kmq.replica.shard import ShardKeys, ShardView, document, replaced_isr
from kmq.replica.stages import Stages

_BEAT_S = 0.5


class Office(Protocol):
    """Leading (lead.py) or Following (follow.py), in one epoch."""

    duty: Duty
    is_over: bool  # another epoch was promised: no more confirmations are sent or counted

    def update(self, duty: Duty) -> None:
        """Continue under a new duty of the same epoch: another version of its register, or another address."""

    async def run(self) -> None:
        """Play the role until cancelled."""

    def close(self) -> None:
        """Release everything."""


class Roles:
    """Keeps this broker in the role that its last promise asks for. Implements replica.Work."""

    def __init__(self, stages: Stages, files: ReplicaFiles, broker: str, secret: bytes) -> None:
        self.stages, self.files, self.settings = stages, files, stages.settings
        self._broker, self._secret, self._log = broker, secret, stages.log
        self._tls = client_context(self.settings) if self.settings.tls_cert else None
        self.leading: Leading | None = None
        self.following: Following | None = None
        self._duty: Duty | None = None
        self._duty_since = 0.0  # when the promised register first asked for this role
        self._changed = asyncio.Event()
        self._is_ending = self._went_back = False
        self._end = 0, 0  # epoch and seq of the end of the WAL, while no stage runs

    def publish(self, row: Row, view: ShardView | None) -> None:
        """Write the role of this broker into its row of the stats page. Call it after Replica.publish.

        A follower lags while it is out of the ISR, a leader while hw stands. `view`: the last answer of Consul.
        """
        page, leading, following, now = self.stages.page, self.leading, self.following, time.monotonic_ns()
        is_cut_off = following is not None and following.is_away
        role = WAITING if is_cut_off else page.read().role
        row.role, row.seq = 1 + role, page.hw if role != WAITING else row.seq or self.stages.shown()  # role 0: no value
        row.connections = len(leading.followers) if leading is not None else 0
        row.isr_replaced = int(view is not None and bool(replaced_isr(view)))
        self.stages.stats.publish_followers(self._followers(view))
        row.cut_records = self.stages.cut_records
        if leading is not None:
            row.behind_since = int((leading.stands_since or 0) * 1e9)
        else:
            row.behind_since = 0 if following is None or row.in_isr else row.behind_since or now

    def _followers(self, view: ShardView | None) -> list[tuple[str, dict[str, int]]]:
        """Return what a leader knows about each other broker of its shard."""
        leading = self.leading
        if leading is None or view is None:
            return []
        isr = {view.broker(replica) for replica in leading.register.isr}
        replicas = {view.broker(replica): replica for replica in leading.delays}
        replicas |= {follower.link.peer.broker: replica for replica, follower in leading.followers.items()}
        found = []
        for name in leading.register.brokers:
            replica = replicas.get(name, "")
            follower, delay = leading.followers.get(replica), leading.delays.get(replica)
            fields = {"in_isr": int(name in isr), "connected": int(follower is not None)}
            if follower is not None:
                fields["lag"] = max(0, leading.synced - follower.position)
            if delay is not None and delay.seconds is not None:
                fields["ack_delay_us"] = max(1, round(delay.seconds * 1e6))
                fields["slow_since"] = round((delay.slow_since or 0) * 1e9)
            if name != self._broker:
                found.append((name, fields))
        return found

    def me(self) -> wire.Me:
        """Return what this replica tells other replicas about itself."""
        lineage, settings = identity.lineage(self.stages.data), self.settings
        return wire.Me(settings.shard, lineage, self._broker, self.files.identity.id, LEVEL, settings.max_line)

    @property
    def role(self) -> Office | None:
        return self.leading or self.following

    async def run(self) -> None:
        """Change roles until `end`. Raises the error of a role that failed."""
        await self.stages.leave()
        while not self._is_ending:
            self._changed.clear()
            duty = self._duty
            if duty is None or not duty.register.leader:
                await self._changed.wait()
                continue
            if duty.register.leader == duty.me:
                self.leading = Leading(self.stages, duty, self.settings.replica_lag, self._log)
            else:
                self.following = Following(
                    self.stages, duty, self._call, partial(promise_version, self.files), self._log
                )
            await self._play(self.leading or self.following)  # type: ignore[arg-type]
            self.leading = self.following = None
            if not self._is_ending:
                await self.stages.leave()

    async def _play(self, role: Office) -> None:
        """Run a role until the duty asks for another one."""
        task = asyncio.ensure_future(role.run())
        try:
            while not self._is_ending and self._duty is not None and is_same(self._duty, role.duty):
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if task.done():
                    break
        finally:
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                if (ours := asyncio.current_task()) is not None and ours.cancelling():
                    raise  # if not, the end of the process would wait for ever
            except WentBack:
                self._duty, self._went_back = None, True
            finally:
                role.close()

    async def end(self) -> None:
        """End in order: a leader continues until its stages have drained, because they wait for hw."""
        if self.leading is not None:
            await self.stages.await_end()
        self._is_ending = True
        self._changed.set()

    # --- connections -------------------------------------------------------------------------------------------------

    async def _call(self, address: str) -> wire.Link:
        if self._tls is not None:
            with contextlib.suppress(ConfigError):  # only one file is replaced yet: the old ones stay in force
                self._tls = client_context(self.settings)
        return await wire.call(address, self.me(), self._secret, self._tls, self.settings.session_ttl)

    async def serve(self, link: wire.Link) -> None:
        """Serve a peer that has proved to be of the shard."""
        first = await link.read()
        if link.peer.replica == wire.NOBODY:
            before = self.stages.bootstraps
            await compare.answer(link, self.stages.data, first, lambda: self._is_replaced(before))
        elif self.leading is not None:
            await self.leading.serve(link, first)
        else:
            link.send(wire.RefusedText("not_leader"))

    def _is_replaced(self, bootstraps: int) -> bool:
        """Return True if a bootstrap is being put in place, or was since the count was `bootstraps`."""
        return self.stages.bootstraps != bootstraps or (
            self.following is not None and self.following.replaced is not None
        )

    # --- what the replica asks (replica.Work) ------------------------------------------------------------------------

    def act(self, duty: Duty | None) -> None:
        self.stages.show_doors(self._doors(duty))
        if duty is not None and (self._duty is None or not is_same(duty, self._duty)):
            self._duty_since = time.monotonic()
        self._duty = duty
        if self.role is not None:
            if duty is not None and is_same(duty, self.role.duty):
                self.role.update(duty)
            else:
                self.role.is_over = True
        self._changed.set()

    def _doors(self, duty: Duty | None) -> tuple[tuple[str, str], ...] | None:
        """Return the addresses that our doors pass clients to under this duty; see Stages.show_doors."""
        if duty is None or duty.register.leader == duty.me:
            return ()
        following = self.following if self.following is not None and is_same(duty, self.following.duty) else None
        if following is not None and following.is_away:
            return None
        return duty.doors if duty.is_open or (following is not None and following.has_agreed) else ()

    def stored(self) -> int:
        if self.following is not None and self.following.replaced is not None:
            return self.following.replaced
        return wal.last_stored(self.stages.data)[0]

    def position(self) -> tuple[int, int]:
        if self.leading is not None and self.leading.epoch_seq:
            return self.leading.epoch, self.leading.synced
        if self.following is not None and self.following.confirmed:
            return self.following.epochs.epoch_at(self.following.confirmed), self.following.confirmed
        end = self.stored()
        if end != self._end[1]:
            following = self.following
            epochs = self.stages.epochs() if following is None or following.replaced is None else following.epochs
            self._end = epochs.epoch_at(end), end
        return self._end

    def adopt(self, lineage: str) -> None:
        data = self.stages.data
        mine = identity.lineage(data)
        topics = [name for name in os.listdir(f"{data}/topics") if not name.startswith(".")]
        if wal.last_stored(data)[0] or topics:
            raise CorruptError(
                f"KMQ_DATA={data!r}: has records or topics of the lineage {mine}, the shard has {lineage}: it is no"
                " replica of this shard; nothing was changed"
            )
        segment.remove(segment.survey(f"{data}/append"))  # they are empty; their indexes name our lineage
        replace_file(f"{data}/lineage", f"{lineage}\n".encode())

    def doors(self) -> dict[str, str]:
        found = addresses(self.settings.pipes, advertised(self.settings))
        for is_tls, place in (self.settings.kafka_advertise or {}).items():
            found[KAFKA_ADVERTISED[is_tls]] = host_port(*place)
        return found

    def went_back(self) -> bool:
        went, self._went_back = self._went_back, False
        return went

    def opened(self) -> int:
        leading = self.leading
        return leading.epoch if leading is not None and self.stages.page.read().role == LEADING else 0

    def followed(self) -> int:
        following = self.following
        return following.epoch if following is not None and following.is_connected else 0

    def is_spent(self, epoch: int) -> bool:
        return self.leading is not None and self.leading.epoch == epoch and self.leading.is_spent

    def stands(self) -> bool:
        leading, duty = self.leading, self._duty
        if duty is None or duty.register.leader != duty.me:
            return False
        if leading is not None and is_same(duty, leading.duty):
            return leading.stands
        # A stage that hangs has not released the former role: another member of the ISR may be able to lead.
        return time.monotonic() - self._duty_since > HUNG_S

    def prepare_isr(self, isr: list[str]) -> None:
        if self.leading is not None:
            self.leading.prepare_isr(isr)

    def may_join(self, replica: str) -> bool:
        return self.leading is not None and self.leading.may_join(replica)

    def hears(self, replica: str) -> bool:
        return self.leading is not None and self.leading.hears(replica)

    def is_behind(self, replica: str) -> bool:
        return self.leading is not None and self.leading.is_behind(replica)

    def is_slow(self, replica: str) -> bool:
        return self.leading is not None and self.leading.is_slow(replica)


def is_same(duty: Duty, other: Duty) -> bool:
    """Return True if both ask for the same role in the same epoch."""
    mine, theirs = duty.register, other.register
    return (duty.me, mine.epoch, mine.leader) == (other.me, theirs.epoch, theirs.leader)


def bind_host(settings: Settings) -> str:
    """Return the address that the replica port binds to."""
    return settings.tls_host if settings.tls_cert else settings.host


def advertised(settings: Settings) -> str:
    """Return the host by which the other brokers of the shard reach this one."""
    host = bind_host(settings)
    return settings.advertise or (socket.gethostname() if host in ("0.0.0.0", "::") else host)


# --- the process -----------------------------------------------------------------------------------------------------


async def _beat(page: StatsPage, owner: FileLock, roles: Roles, publish: Callable[[Row], None]) -> None:
    """Keep the row of the replica up to date. Raises RetryError once a file that it holds was removed or replaced."""
    row = page.rows[REPLICA]
    while True:
        row.heartbeat = time.monotonic_ns()
        publish(row)
        await asyncio.sleep(_BEAT_S)
        page.keep_in_place(REPLICA)
        for held in (owner, roles.stages.page, roles.following.ring if roles.following is not None else None):
            if held is not None and not held.is_in_place():
                raise RetryError(f"{held.path}: was removed, or replaced, while the replica used it")


def _show(settings: Settings, found: dict[str, Any]) -> None:
    """Write Consul's answer for the gateway. It is not synced: after a crash it is written again at once."""
    path = f"{settings.pipes}/cluster.json"
    try:
        with open(f"{path}.new", "w", encoding="ascii") as file:
            file.write(json.dumps(found))  # json.dump would encode it in Python
        os.rename(f"{path}.new", path)
    except OSError as err:
        if err.errno not in FULL:  # on a full disk the old content stays, and its `as_of` tells its age
            raise


async def _await_signal(was_signalled: Callable[[], bool]) -> None:
    """Return once a signal asks to end. `was_signalled`: whether one came before."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if not was_signalled():
        await stop.wait()


async def live(
    settings: Settings, page: StatsPage, owner: FileLock, was_signalled: Callable[[], bool], log: Logger
) -> None:
    """Take part in the shard until a signal asks to end. `was_signalled`: whether one came before."""
    place, has_ended = Place.of(settings), asyncio.Event()
    if bootstrap.settle(settings.data):  # no stage runs: they let go before it was begun
        log.info("bootstrap_finished", reason="a kill had interrupted it")
    files = ReplicaFiles(settings.data, settings.shard)
    stages = Stages(settings, page, describe(REPLICA, settings.data, settings.instance), log)
    secret = wire.read_secret(settings.replica_secret)
    roles = Roles(stages, files, place.broker, secret)
    replica = Replica(
        files,
        ShardKeys(Keys(place.cluster), settings.shard),
        place.broker,
        identity.lineage(settings.data),
        place.ttl_s,
        settings.replica_lag,
        roles,
        address=lambda: f"{advertised(settings)}:{port.port}",
        is_stopping=has_ended.is_set,
        log=log,
    )
    tls = certificates(settings, log, page.rows[REPLICA])
    context = tls.context() if tls is not None else None
    port = wire.ReplicaPort(roles.me, secret, context, replica.why_not, roles.serve, log)
    transport, shown = Transport(place.address), replica.seen

    def publish(row: Row) -> None:
        nonlocal shown
        replica.publish(row)
        roles.publish(row, replica.seen[0] if replica.seen is not None else None)
        if tls is not None:
            tls.look()
        if replica.seen is not None and replica.seen is not shown:
            view, at = shown = replica.seen
            _show(settings, document(settings.shard, place.broker, view) | {"as_of": round(at, 3)})

    async def end() -> None:
        await _await_signal(was_signalled)
        await roles.end()
        has_ended.set()

    lasting = asyncio.ensure_future(_beat(page, owner, roles, publish))
    tasks = [asyncio.ensure_future(each) for each in (transport.run(replica.live()), roles.run(), end())]
    try:
        await port.open(bind_host(settings), settings.replica_port)
        running = {lasting, *tasks}
        while not has_ended.is_set() or not tasks[0].done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (lasting, *tasks):
            task.cancel()
        await asyncio.gather(lasting, *tasks, return_exceptions=True)
        await port.close()
        await transport.close()
