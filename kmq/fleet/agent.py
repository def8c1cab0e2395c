"""The agent of a broker: it follows the Broadcast Queue, and applies the fleet's states and commands to this broker.

Example: the state `topics/orders partitions=4` makes it declare topic orders here. Then it marks the message.

Links       in: the Broadcast Queue, as the one subscriber of this broker   out: KMQ_DATA/cluster, declarations and
            requests of topics, `brokers/<broker>` and `results/…` in Consul
Owns        pipes/agent.owner, KMQ_DATA/cluster, its row of the stats page.

Invariant   The other processes never wait for the agent or for Consul. A state is marked only after it was applied, a
            command only after it was written to disk. While a message cannot be processed the broker is not ready.
Crash       Killed at any point: messages that were not marked are delivered again, and change nothing a second time.
            The next agent waits until Consul has ended the session of the killed one.
Threads     main: heartbeat, signals. follow: Consul and states. commands: commands. reporter: `brokers/<broker>`.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kmq.broker.data_directory import open_page
from kmq.broker.health import is_process, judge
from kmq.broker.stats import AGENT, STATES
from kmq.cluster import consul
from kmq.cluster.consul import ConsulError, KvOperation
from kmq.cluster.fleet import COMMANDS, BrokerReport, CommandResult, write_result
from kmq.cluster.following import Condition, follow
from kmq.cluster.presence import holder_of
from kmq.cluster.publisher import Mark
from kmq.cluster.queue import BroadcastQueue, Heart, Place, who_we_are
from kmq.cluster.subscriber import Item, Snapshot, Subscriber
from kmq.config.settings import SHARED, Settings
from kmq.errors import EXIT_OK, BusyError, KmqError, RetryError, exit_code_of
from kmq.fleet.applying import Applier, Commands
from kmq.links.ownership import FileLock, describe
from kmq.links.role import LEADING, RolePage
from kmq.logfmt import Logger

_BEAT_S = 0.5
_REPORT_S = 0.5  # between two checks whether the report has changed
_FINDINGS_S = 5.0  # between two comparisons of this broker with the fleet's states
_AGAIN_S = 5.0  # until the next try after Consul has refused us


def is_left_over(holder: str) -> bool:
    """Return True if this holder of our place is an agent on this host that has ended."""
    host, _, pid = holder.rpartition("/")
    if host != who_we_are().rpartition("/")[0] or not pid.isdecimal():
        return False
    return int(pid) == os.getpid() or not is_process(int(pid), AGENT)  # a restarted container may get the same pid


class _Queue(BroadcastQueue):
    """A queue whose subscriber begins with a snapshot unless Consul's messages continue the states of this broker.

    This broker may have fewer messages than it once marked, because its disk is new or an older one. It may have more
    or other messages than Consul, because Consul was restored while the agent was down.
    """

    def __init__(self, place: Place, applier: Applier, agent: "Agent") -> None:
        super().__init__(place)
        self._applier, self._agent = applier, agent

    @contextmanager
    def subscribed(
        self, start: int | None = None, stop: threading.Event | None = None
    ) -> Iterator[tuple[Subscriber, Heart]]:
        states = self._applier.states
        self._queue.last_processed = Mark(states.epoch, states.id, 0.0) if states is not None else None
        with super().subscribed(start, stop) as (subscriber, heart):
            if states is None:
                subscriber.done = None
            self._agent.hold(subscriber)
            try:
                yield subscriber, heart
            finally:
                self._agent.hold(None)


class Agent:
    """One running agent."""

    def __init__(self, settings: Settings, log: Logger, supervisor: int) -> None:
        self.settings, self.log = settings, log
        self._is_stopping = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._page = open_page(AGENT, settings, supervisor, log, lambda: self._is_stopping)
        place = Place.of(settings)
        os.makedirs(settings.pipes, exist_ok=True)
        self._owner = FileLock(f"{settings.pipes}/agent.owner")
        self._owner.acquire("the agent of this broker", describe(AGENT, settings.data))
        self._applier = Applier(settings, log, self._leads)
        self._queue = _Queue(place, self._applier, self)
        self._commands = Commands(settings, log, self._write_result)
        self._subscriber: Subscriber | None = None  # while we have the place in Consul
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._condition = Condition()
        # Last, because from here on an end without an exit code counts as a crash.
        self._row = self._page.rows[AGENT]
        self._row.begin(supervisor)

    def run(self) -> None:
        """Work until a signal. Raises BusyError if this broker has another subscriber, RetryError if our lock is gone."""
        self._state("waiting")
        self._row.epoch = self._row.newest = max(0, self._applier.epoch)
        self._row.failing = bool(self._applier.unreadable)
        following = threading.Thread(target=self._follow, name="kmq-follow", daemon=True)
        reporting = threading.Thread(target=self._keep_reporting, name="kmq-report", daemon=True)
        self._commands.start()
        following.start()
        reporting.start()
        try:
            while following.is_alive() and not self._is_stopping:
                time.sleep(_BEAT_S)
                self._beat()
        finally:
            self._stop.set()
            self._state("draining")
            self._commands.stop()
            following.join(5)
            self._row.end(EXIT_OK if self._error is None else exit_code_of(self._error))
            self._owner.release()
        if self._error is not None:
            raise self._error

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_stopping = True  # an Event must not be set here: the thread that was interrupted may hold its lock

    def _state(self, name: str) -> None:
        self._row.state = STATES.index(name)
        self._row.heartbeat = time.monotonic_ns()

    def _beat(self) -> None:
        self._row.heartbeat = time.monotonic_ns()
        self._page.keep_in_place(AGENT)
        if not self._owner.is_in_place():
            raise RetryError(f"{self._owner.path}: was removed, or replaced, while the agent used it")
        subscriber = self._subscriber
        if subscriber is not None:
            self._row.newest = max(subscriber.newest, self._row.epoch)

    def _leads(self) -> int:
        """Return the generation of the role in which this broker leads its shard with open ports, else 0."""
        page = RolePage.find(self.settings.instance, self._page.data_id) if self.settings.shard else None
        role = page.read() if page is not None else None
        return role.generation if role is not None and role.role == LEADING else 0

    # --- following ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                follow(self._queue, self._process, self._stop, self._on_change)
                return
            except BusyError as error:
                if not self._is_held_by_the_dead():
                    self._error = error
                    return
                self._on_change(Condition(lost=str(error)))
            except ConsulError as error:  # a missing or wrong token, which may be corrected in Consul
                self._on_change(Condition(lost=str(error)))
                self._stop.wait(_AGAIN_S)
            except BaseException as error:
                self._error = error
                return

    def _is_held_by_the_dead(self) -> bool:
        """Return True if our place is still held for a killed agent of this broker."""
        try:
            entry = self._queue.run(consul.read(self._queue.keys.subscriber(self._queue.place.broker)))
        except ConsulError:
            return True  # ask again
        if entry is None or not entry.session:
            return True
        return is_left_over(holder_of(entry))

    def hold(self, subscriber: Subscriber | None) -> None:
        """Note that we have the place in Consul now, or (None) have lost it."""
        self._subscriber = subscriber
        if subscriber is not None:
            self._row.waits_since = 0
        if not self._stop.is_set():
            self._state("ready" if subscriber is not None else "waiting")

    def _on_change(self, condition: Condition) -> None:
        before, self._condition = self._condition, condition
        self._row.failing = bool(condition.failing or self._applier.unreadable)
        if condition.lost and not before.lost:
            self._row.waits_since = time.monotonic_ns()
            effect = "the broker goes on as it is; what the fleet says is done later"
            self.log.warn("consul_lost", reason=condition.lost, effect=effect)
        elif before.lost and not condition.lost:
            self._row.waits_since = 0
            self.log.info("consul_found", epoch=self._row.epoch)
        if condition.failing and condition.failing != before.failing:
            effect = "not ready; nothing later is done; tried again"
            self.log.error("message_not_processed", reason=condition.failing, effect=effect)
        elif before.failing and not condition.failing:
            self.log.info("message_processed", epoch=self._row.epoch)

    def _process(self, item: Item) -> None:
        if not isinstance(item, Snapshot) and item.type in COMMANDS:
            self._commands.accept(item)
        self._applier.apply(item)
        self._row.epoch = item.epoch
        self._row.messages += 1
        self._row.failing = bool(self._condition.failing)

    # --- the report --------------------------------------------------------------------------------------------------

    def _write_result(self, id: str, result: CommandResult) -> None:
        self._queue.run(write_result(self._queue.keys, id, self._queue.place.broker, result))

    def _keep_reporting(self) -> None:
        said, session, findings, looked = b"", "", list[str](), -_FINDINGS_S
        epoch, failed = -1, ""
        key = self._queue.keys.brokers + self._queue.place.broker
        while not self._stop.wait(_REPORT_S):
            subscriber = self._subscriber
            try:
                self._applier.restore_file()
                self._applier.lead()
                if subscriber is None:
                    continue
                if time.monotonic() - looked >= _FINDINGS_S or epoch != self._applier.epoch:
                    epoch, looked = self._applier.epoch, time.monotonic()
                    findings = self._applier.findings()
                report = self._report(findings).encode()
                if (report, subscriber.session) != (said, session):
                    self._queue.run(consul.txn([KvOperation("lock", key, report, session=subscriber.session)]))
                    said, session = report, subscriber.session
            except (OSError, KmqError):
                continue  # the next round asks Consul again, and no longer looks at a topic that was just deleted
            except Exception as error:  # a fault in KMQ must not end the reports of this broker for ever
                reason = f"{type(error).__name__}: {error}"
                if reason != failed:
                    self.log.error("report_failed", reason=reason, effect="the fleet sees an older report; tried again")
                failed = reason

    def _report(self, findings: list[str]) -> BrokerReport:
        verdict = judge(self._page.copy(), self.settings)
        own = {name: self.settings.texts[row.env] for name, row in SHARED.items() if name in self.settings.given}
        reasons = [
            self._condition.failing or self._applier.unreadable or str(reason) if reason.about == AGENT else str(reason)
            for reason in verdict.reasons
        ]
        return BrokerReport(who_we_are(), verdict.ready, reasons, findings, own)
