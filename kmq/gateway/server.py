"""The gateway process: opens its ports, serves, watches the broker, and drains.

Owns        KMQ_PIPES/gateway.owner, its row of the stats page, http.port, grpc.port, egress.port and status.port, with
            TLS https.port, grpcs.port and egress_tls.port, with kmq[kafka] kafka.port and kafka_tls.port, with
            KMQ_METRICS_HOST metrics.port.
End         SIGTERM: no new requests. Requests already accepted get their replies, streams end with UNAVAILABLE, so
            that their clients resume elsewhere or later; then exit 0. A second signal ends it at once.
Role        In a shard it serves while its broker leads with open doors. Otherwise it resets every connection, and
            begins anew in place (__main__.py). Clients send unanswered requests again to the new leader. It writes only
            through the ingress of its own epoch (core/ingress.py).
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kmq.access.tokens import open_tokens
from kmq.broker.overview import VerdictChanges
from kmq.broker.ports import mask_of, number_of, say_closed, say_opened
from kmq.broker.stats import STATES, Incidents, StatsPage, Strangers
from kmq.broker.tls import certificates
from kmq.config.settings import DRAIN_S, Settings
from kmq.errors import ConfigError, pip_install
from kmq.gateway.access import HttpAccess
from kmq.gateway.console.overview import ConsoleOverview
from kmq.gateway.core import ingress
from kmq.gateway.core.compactor import keep_compacted
from kmq.gateway.core.core import Core
from kmq.gateway.core.finding import SeqFinder
from kmq.gateway.core.metrics import Requests
from kmq.gateway.core.trends import Trends
from kmq.gateway.groups.admin import GroupAdmin, StalledGroups
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import OffsetKeeper, OffsetStore
from kmq.gateway.groups.redelivery import Redelivery
from kmq.gateway.grpc.calls import STREAMS, Calls, Streams
from kmq.gateway.grpc.kmq_v1 import KmqV1
from kmq.gateway.grpc.podbus import PodBus
from kmq.gateway.grpc.schema import KMQ, PODBUS
from kmq.gateway.grpc.service import HEALTH, Health, kmq_handler, podbus_handler
from kmq.gateway.http import request
from kmq.gateway.http.server import application, monitoring
from kmq.gateway.lines.door import Lines
from kmq.gateway.lines.service import Service as Consumers
from kmq.gateway.lines.service import StatusPort
from kmq.gateway.ports import Doors, DoorServers, follower_doors, grpc_server, listen, listen_metrics
from kmq.links.role import FOLLOWING, LEADING, STARTING, RolePage
from kmq.logfmt import Logger

_CHECK_S = 0.5  # between two checks of the broker; also the heartbeat
_ROLE_S = 0.05  # in a shard: between two looks at whether this broker still leads
_REPORT_S = 1.0  # between two log lines of one event
_NOTED = ("kafka_not_read", "letter_stored", "library", "request_failed")  # not refusals
_SERVICES = (PODBUS.service, KMQ.service)


class _Logfmt(logging.Handler):
    """Logs the warnings of libraries as events: one line per library and second."""

    def __init__(self, incidents: Incidents) -> None:
        super().__init__(logging.WARNING)
        self.incidents = incidents

    def emit(self, record: logging.LogRecord) -> None:
        reason = record.getMessage()
        if record.exc_info and record.exc_info[0]:  # the traceback may contain what a client has sent: a token, 28 KB
            reason = f"{record.exc_info[0].__name__}: {reason.splitlines()[0] if reason else ''}"
        self.incidents.note("library", record.name, reason)


class Gateway:
    def __init__(self, settings: Settings, page: StatsPage, log: Logger) -> None:
        self.settings, self.log = settings, log
        self.role: RolePage | None = None  # in a shard
        self.generation = 0  # of the role in which it serves
        self.incidents = Incidents(self._warn)
        self.page, self.row = page, page.rows["gateway"]
        self.page.write_note("gateway", "")
        self.strangers = Strangers(self.row, self.incidents)
        self.core = Core(settings, page, log, self.strangers, lambda: self.role is not None and self.role.is_unsure)
        self.broker = self.core.broker
        self.certificates = certificates(settings, log, self.row)
        self.tokens = open_tokens(settings, log.warn)
        self.health = Health()
        self.doors = Doors(settings, self.strangers)
        self.calls = Calls(settings, self.strangers)
        streams = Streams(STREAMS)
        heals = self.core.cold, self.core.partitions.removed_from_cache
        self.bus = PodBus(settings, self.core.watermark, log, streams, self.core.answers, *heals)
        self.offsets = OffsetStore(settings, self.core.watermark, log)
        self.groups = Groups(settings, self.offsets, self.core.partitions, log)
        self.keeper = OffsetKeeper(settings, self.row, self.offsets, log, self.groups.is_alive, self.groups.forgotten)
        self.admin = GroupAdmin(self.groups, self.core.partitions, self.core.fetching)
        self.trends = Trends(page, settings)
        self.stalled = StalledGroups(page, self.groups, self.admin, settings.group_stalled, log)
        self.requests = Requests(self.admin.lags, self.core.cold)
        self.consumers = Consumers(
            settings,
            self.core.waking,
            self.tokens,
            self.strangers,
            self.requests,
            self.core.partitions,
            self.core.fetching.damaged.note,
            self.core.cold,
        )
        self.redelivery = Redelivery(self.groups, self.core)
        self.kmq = KmqV1(self.core, self.groups, self.calls, streams, self.redelivery)
        self.overview = ConsoleOverview(self.core, self.groups)
        self.access = HttpAccess(settings, self.tokens, self.strangers, log, self.overview.events)
        self.changes = VerdictChanges(log, self.overview.events.add)
        self.lines = Lines(self.consumers, self.groups, self.redelivery)
        self.status = StatusPort(self.consumers, SeqFinder(settings.data, page), self.groups.has_committed)
        self.transactions: Any = None  # of Kafka's clients
        self.kafka = self._kafka()
        self.stopping = asyncio.Event()

    def _kafka(self) -> Any:
        """Return the door for Kafka's clients; None where its extra is not installed. Raises ConfigError if it is wanted."""
        try:
            from kmq.gateway.kafka.admin import AdminHandler
            from kmq.gateway.kafka.cache import TailCache
            from kmq.gateway.kafka.door import Cluster, Kafka
            from kmq.gateway.kafka.fetching import FetchHandler
            from kmq.gateway.kafka.groups import KafkaGroups
            from kmq.gateway.kafka.groups848 import ConsumerProtocol
            from kmq.gateway.kafka.producing import ProduceHandler
            from kmq.gateway.kafka.topic_ids import TopicIds
            from kmq.gateway.kafka.transactions import Transactions
            from kmq.gateway.kafka.units import Units
        except ImportError as err:
            if "kafka_port" not in self.settings.given:
                return None
            wanted = f"KMQ_KAFKA_PORT={self.settings.kafka_port}"
            raise ConfigError(f"{wanted}: {err}; the Kafka door needs: {pip_install('kafka')}") from err
        cache = TailCache(self.settings.kafka_cache)
        units = Units(self.settings, self.log)
        self.transactions = Transactions(self.settings, self.core, self.groups, units, self.log)
        producing = ProduceHandler(
            self.settings, self.core, lambda: self.groups.life, cache, units, self.transactions, self.log
        )
        ids = TopicIds(self.core.partitions)
        cluster = Cluster(self.settings, self.core, ids, lambda: self.groups.epoch)
        fetching = FetchHandler(self.core, ids, cache, self.requests, self.incidents, cluster.epoch)
        admin = AdminHandler(self.settings, self.core, self.tokens, cluster.nodes, self.transactions)
        consumers = ConsumerProtocol(self.groups, ids)
        groups = KafkaGroups(self.groups, self.admin, self.transactions, consumers.has)
        api_handlers = (self.transactions, producing, fetching, groups, consumers, admin)
        return Kafka(cluster, self.tokens, self.strangers, self.requests, self.log, api_handlers)

    @property
    def has_left(self) -> bool:
        """Return True if the role in which it serves is over."""
        return self.role is not None and (self.role.generation != self.generation or not self.role.leads)

    async def follow(self) -> None:
        """In a shard, pass clients to the leader until this broker leads, or a signal arrives. Health is our own."""
        self._begin()
        if self._leads() or self.stopping.is_set():
            return
        metrics = await self._runner(monitoring(self.broker, self.requests, self.core.answers))
        passing = follower_doors(self.settings, self.row, self.log, self._leader, self.kafka is not None)
        opened = passing.ports | listen_metrics(metrics.server, self.doors, self.settings)
        self.row.port, self.row.kafka_port = opened.get("http", 0), opened.get("kafka", 0)
        self._say_closed(passing.closed)
        self.log.info("doors_passed_on", **{f"{name}_port": port for name, port in sorted(opened.items())})
        trends = asyncio.ensure_future(self.trends.run())
        serving = asyncio.ensure_future(asyncio.to_thread(passing.serve, self._leads_or_ends))
        while not serving.done():
            self._open_closed(passing.closed)
            self.row.port, self.row.kafka_port = passing.ports.get("http", 0), passing.ports.get("kafka", 0)
            await asyncio.wait((serving,), timeout=_CHECK_S)
            self.doors.sweep()
            await self.core.answers.tidy()
            self.incidents.say()
            self.changes.follow(self.broker.verdict(), time.monotonic())
        trends.cancel()
        self.doors.close()
        await metrics.cleanup()
        await serving  # raises the error that ended it
        if self.stopping.is_set():
            await self.core.close()

    def _leader(self) -> dict[str, str] | None:
        return self.role.leader if self.role is not None else {}

    def _leads(self) -> bool:
        """Return True once this broker leads."""
        self.role = RolePage.find(self.settings.instance, self.page.data_id, self.role)
        role = self.role.read() if self.role is not None else None
        if self.role is None or role is None or role.role != LEADING or not self.role.leads:
            return False
        self.generation, self.groups.epoch = role.generation, role.epoch
        ingress.serve_in(role.epoch)
        return True

    def _leads_or_ends(self) -> bool:
        """Return True once this broker leads, or a signal has come; else write a heartbeat.

        The first one says that the doors are open: before, status would show none.
        """
        if self._leads():
            return True
        role = self.role.read() if self.role is not None else None
        self._state("following" if role is not None and role.role in (FOLLOWING, STARTING) else "unled")
        self.page.keep_in_place("gateway")
        return self.stopping.is_set()

    def _begin(self) -> None:
        logging.basicConfig(handlers=[_Logfmt(self.incidents)])
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self.core.cold.start()

    async def run(self) -> None:
        """Serve until a signal arrives, or the role of this broker is over."""
        self._begin()
        server = grpc_server(self.settings, self.tokens, self.strangers, self.calls, _SERVICES)
        counted = self.calls, self.requests, self.incidents
        server.add_generic_rpc_handlers((podbus_handler(self.bus, *counted), kmq_handler(self.kmq, *counted)))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        reflection.enable_server_reflection((*_SERVICES, HEALTH, reflection.SERVICE_NAME), server)
        runner = await self._runner(application(self.core, self.groups, self.requests, self.overview))
        metrics = await self._runner(monitoring(self.broker, self.requests, self.core.answers))
        loops = [loop.run() for loop in (self.keeper, self.overview, self.stalled, self.trends)] + [self._run_groups()]
        if self.transactions is not None:
            loops.append(self.transactions.run())
        keeping = asyncio.gather(keep_compacted(self.settings, self.log), *loops)
        try:
            servers = DoorServers(server, runner.server, metrics.server, self.lines, self.status, self.kafka)
            ports = listen(servers, self.calls, self.doors, self.settings, self.certificates)
            await server.start()
            self.row.port, self.row.kafka_port = ports.get("http", 0), ports.get("kafka", 0)
            self._say_closed()
            opened = {f"{name}_port": port for name, port in sorted(ports.items())}
            self.log.info("ready", pid=os.getpid(), host=self.settings.host, **opened)
            # Libraries and doors live as long as the process, and the garbage collector would take 20 ms and more to
            # walk them.
            gc.collect()
            gc.freeze()
            await self._watch(keeping)
        finally:
            if self.has_left:
                self._leave(keeping)
            else:
                await self._drain(server, runner, metrics, keeping)

    def _leave(self, keeping: asyncio.Future[Any]) -> None:
        """End every connection at once: another broker may lead, so nothing more is answered or written here."""
        self._state("unled")
        keeping.cancel()
        self.doors.close()
        self.doors.reset_on_close()
        self.incidents.say()

    async def _drain(self, server: Any, runner: Any, metrics: Any, keeping: asyncio.Future[Any]) -> None:
        """End in order: requests that were accepted get their replies."""
        self._state("draining")
        self.doors.close()
        self.core.stop()
        self.bus.stop()
        self.kmq.stop()
        self.lines.stop()
        self.status.stop()
        if self.kafka is not None:
            self.kafka.stop()
        self.health.stop()
        await asyncio.gather(server.stop(DRAIN_S / 2), runner.cleanup(), metrics.cleanup())
        await self.calls.drain()
        await self.lines.drain()
        if self.kafka is not None:
            await self.kafka.drain()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await self.redelivery.close()
        await self.offsets.close()
        await self.bus.close()
        self.consumers.close()
        self.overview.close()
        await self.core.close()
        self.incidents.say()

    async def _run_groups(self) -> None:
        """Serve groups, once the decided transactions of the last life are written: they contain offsets."""
        if self.transactions is not None:
            await self.transactions.may_serve_groups.wait()
        await self.groups.run()

    def _warn(self, event: str, **fields: object) -> None:
        """Log an event caused by clients, and tell the console."""
        self.log.warn(event, **fields)
        count, peer, reason = (
            int(str(fields.get("count", 1))),
            str(fields.get("peer", "")),
            str(fields.get("reason", "")),
        )
        self.overview.events.count("noted" if event in _NOTED else "refused", event, count, peer, reason)

    async def _runner(self, app: web.Application) -> web.AppRunner:
        """Return the runner of `app`, which counts connections and checks access."""
        app.middlewares.append(self.doors.middleware)
        app.middlewares.append(self.access.middleware)
        runner = web.AppRunner(app, **request.RUNNER, access_log=None, shutdown_timeout=DRAIN_S / 2)
        await runner.setup()
        return runner

    async def _watch(self, keeping: asyncio.Future[Any]) -> None:
        """Keep up the heartbeat and the health status until a signal comes.

        Raises the error that ended `keeping`: without it members of groups would wait for ever.
        """
        report_at = 0.0
        while not self.stopping.is_set():
            if self.has_left:
                return
            if keeping.done():
                await keeping
            self._state("ready" if self.offsets.is_loaded else "recovering")
            self.page.keep_in_place("gateway")
            self.doors.sweep()
            self.calls.sweep()
            await self.core.answers.tidy()
            self.row.connections = self.doors.connections
            self.core.cold.publish(self.page)
            if self.kafka is not None:
                self.requests.kafka_connections.set(self.kafka.connections)
                self.kafka.publish(self.row)
            if time.monotonic() >= report_at:
                report_at = time.monotonic() + _REPORT_S
                self.incidents.say()
                self._open_closed()
                if self.certificates is not None:
                    self.certificates.look()
            verdict = self.broker.verdict()
            for service in ("", *_SERVICES):
                self.health.set(service, verdict.ready)
            self.changes.follow(verdict, time.monotonic())
            await self._pause()

    async def _pause(self) -> None:
        """Wait until the next check is due, or until a signal comes, or the role is over."""
        until, step_s = time.monotonic() + _CHECK_S, _CHECK_S if self.role is None else _ROLE_S
        while not (self.has_left or self.stopping.is_set()) and (left_s := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(step_s, left_s)):
                    await self.stopping.wait()

    def _say_closed(self, passing: Iterable[str] = ()) -> None:
        """Log which ports another program uses. `passing`: those of the follower's doors, which say it themselves."""
        self.row.doors_closed = mask_of((*self.doors.closed, *passing))
        for name in self.doors.closed:
            say_closed(self.log, f"KMQ_{name.upper()}_PORT", number_of(self.settings, name))

    def _open_closed(self, passing: Iterable[str] = ()) -> None:
        """Open ports that other programs have released. `passing`: the follower's doors that are closed still."""
        for name, port in self.doors.open_closed(time.monotonic()).items():
            say_opened(self.log, f"KMQ_{name.upper()}_PORT", port)
            if name == "http":
                self.row.port = port
            elif name == "kafka":
                self.row.kafka_port = port
        self.row.doors_closed = mask_of((*self.doors.closed, *passing))

    def _state(self, name: str) -> None:
        self.row.state = STATES.index(name)
        self.row.heartbeat = time.monotonic_ns()

    def _on_signal(self, number: int) -> None:
        if self.stopping.is_set():
            os._exit(128 + number)
        self.stopping.set()
