"""What every stage has around its job: settings, the stats row, signals, waiting, and the way out.

A signal handler only sets a flag; the loop acts on it. SIGTERM or SIGINT: drain from the front, at most DRAIN_S, and exit
0. A second one means now, which is as safe as SIGKILL.
"""

import gc
import os
import signal
import time
from collections.abc import Callable

from kmq.errors import EXIT_OK, EXIT_RETRY, KmqError, Stopped
from kmq.links.fifo import open_fifo
from kmq.links.layout import Identity, make_identity
from kmq.links.ownership import FileLock, describe
from kmq.links.staging import area_bytes
from kmq.log.identity import open_data
from kmq.logfmt import Log
from kmq.settings import DRAIN_S, Settings, load
from kmq.stats import STATES, StatsPage

_ROOM_POLL_S = 0.25  # how often a full disk is tried again: well under the 2 s in which writing must resume
_PEER_POLL_S = 0.02  # how often a missing peer is looked for


class Stage:
    """One running stage."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.log = Log(name)
        self.stopping = False
        self._deadline = 0.0
        if settings.ignored:
            self.log.info("service_links_ignored", names=",".join(settings.ignored))
        self.data_id = open_data(settings.data)
        self.who = describe(name, settings.data)
        self.page = StatsPage(settings.instance, self.data_id, settings.data)
        self.row = self.page.rows[name]
        self.owns_row = False
        # Readable once a signal has come: register it in every poll, for Python goes on waiting after a handler.
        self.signalled, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # Held by every stage, so that what they hold lives while any stage lives (design 2.3).
        self.raw = open_fifo(settings.pipes, "raw")
        self.acks = open_fifo(settings.pipes, "acks")

    def _on_signal(self, number: int, frame: object) -> None:
        if self.stopping:
            os._exit(128 + number)
        self.stopping = True
        self._deadline = time.monotonic() + DRAIN_S

    def own(self, path: str, what: str) -> FileLock:
        """Take the lock that makes us the only one of our kind. Only then is the row of the stats page ours: a second
        instance that is about to be refused must not wipe the durable cursor of the first.
        """
        owner = FileLock(path)
        owner.acquire(what, self.who)
        self.owns_row = True
        self.row.wipe()
        self.row.pid, self.row.started = os.getpid(), time.monotonic_ns()
        self.state("starting")
        return owner

    def state(self, name: str) -> None:
        """Say how we are; also a heartbeat."""
        self.row.state = STATES.index(name)
        self.beat()

    def beat(self) -> None:
        self.row.heartbeat = time.monotonic_ns()

    def check(self) -> None:
        """Call in every wait: a heartbeat, and Stopped once the time to drain is over."""
        self.beat()
        if self.stopping and time.monotonic() > self._deadline:
            raise Stopped("the time to drain is over; what is left stays in the rings and the FIFO")

    def pause(self, seconds: float) -> None:
        """Wait a bounded time, as `check`."""
        time.sleep(seconds)
        self.check()

    def wait_for(self, what: str, attempt: Callable[[], object]) -> object:
        """Try until `attempt` gives something that is not None, saying once that we wait for `what`."""
        result = attempt()
        if result is None:
            self.log.info("waiting", peer=what)
            self.state("waiting")
        while result is None:
            if self.stopping:
                raise Stopped(f"stopped while waiting for {what}")
            self.pause(_PEER_POLL_S)
            result = attempt()
        return result

    def wait_for_room(self, path: str) -> None:
        """The disk is full: say so, wait a little, let the caller try again."""
        if self.row.state != STATES.index("disk_full"):
            self.log.warn("disk_full", file=path, effect="writing pauses, producers feel backpressure")
            self.state("disk_full")
        self.pause(_ROOM_POLL_S)

    def has_room(self) -> None:
        """Call after a write that may have waited for room."""
        if self.row.state == STATES.index("disk_full"):
            self.log.info("disk_has_room")
            self.state("draining" if self.stopping else "ready")

    def ready(self, **fields: object) -> None:
        self.log.info("ready", pid=os.getpid(), **fields)
        self.state("ready")

    def ring_identity(self, name: str) -> Identity:
        """What the ring `name` has to be like under these settings."""
        settings = self.settings
        policy = (settings.policy_framed if name == "framed" else settings.policy_durable) or settings.policy
        extra = 2 * area_bytes(settings.max_line) if name == "framed" else 0
        return make_identity(self.data_id, settings.ring_slots, settings.ring_bytes, extra, policy)


def main(name: str, run: Callable[[Stage], None]) -> int:
    """Run one stage to its end and return its exit code; every way out says why, in one log line."""
    log = Log(name)
    stage: Stage | None = None
    try:
        stage = Stage(name, load())
        # The start-up objects live as long as the process: keep the collector from walking them again and again.
        gc.freeze()
        run(stage)
        code, reason = EXIT_OK, "drained"
    except Stopped as err:
        code, reason = err.exit_code, str(err)
    except KmqError as err:
        code, reason = err.exit_code, str(err)
        log.error("failed", exit_code=code, reason=reason)
    except OSError as err:
        code, reason = EXIT_RETRY, str(err)
        log.error("failed", exit_code=code, reason=reason)
    if stage is not None and stage.owns_row:
        stage.state("stopped")
    log.info("stopped", exit_code=code, reason=reason)
    return code
