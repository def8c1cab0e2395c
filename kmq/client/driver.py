"""The threads of a kmq.Producer: calling threads and one background thread take turns at the socket.

Turns       One of the callers that wait for replies attends to the socket. So a caller that sends and waits does both
            itself, without a switch of threads. The background thread makes connections, and attends to the socket when
            no caller does.
Locking     One lock guards the core and the channel; no thread waits while holding it. Callbacks and reports run
            without it. Callbacks run in the thread that attends, one after the other, in order.
"""

import threading
import time
from collections.abc import Callable

from kmq.client.connection import Address, Channel, Greeted, backoff, dial, logger
from kmq.client.failures import NotAnswered
from kmq.client.protocol import Core, Overdue
from kmq.errors import KmqError

_TICK_S = 0.002  # how long callers may leave the socket alone before the background thread attends to it
_REST_S = 0.05  # how long the background thread stays at the socket when nothing is left to wait for
_BUSY_TICK_S = 0.01  # the same while callers do attend: each check costs them a switch of threads
_LINGER_SLACK_S = 0.0005  # added to a wait for linger_ms, so that the time is surely up afterwards
_JOIN_S = 5.0  # longest time that an attempt to connect takes


class Unlocked:
    """`with unlocked:` releases a lock that the caller holds, and acquires it again afterwards."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, *error: object) -> None:
        self._lock.acquire()


class Driver:
    """Moves a core's bytes. `lock` must be held for everything except wait, end and the constructor."""

    def __init__(self, core: Core, address: Address) -> None:
        self.core, self.address = core, address
        self.lock = threading.Lock()
        self.closed = False
        self.resting = False  # the background thread waits for `_work`
        self.told = False  # an error was raised to a caller
        self._unlocked = Unlocked(self.lock)
        self._changed = threading.Condition(self.lock)  # for callers that wait
        self._work = threading.Condition(self.lock)  # for the background thread
        self._waiting = 0  # callers that wait for `_changed`
        self._attending = 0  # ident of the thread that attends to the socket; 0: none
        self._turns = 0  # how often callers have attended
        self._busy = False  # callers have attended lately
        self._channel = Channel(core)
        self._overdue = Overdue(core, logger().warning)
        self._thread = threading.Thread(target=self._run, name="kmq-producer", daemon=True)
        self._thread.start()

    # --- callers -----------------------------------------------------------------------------------------------------

    def queued(self) -> None:
        """Write the messages just queued, as far as they should go now."""
        self._write()
        if self.resting:
            self.resting = False
            self._work.notify()

    def wait_for_room(self, timeout: float | None) -> None:
        """Wait until a message or a list may be queued; the lock is released meanwhile."""
        core = self.core
        if core.window.is_full:
            self._wait_locked(lambda: core.window.is_half_free, timeout, "room among the messages in flight")
            core.pacing.filling = True
        if core.failed is not None:
            self.told = True
            raise core.failed
        if self.closed:
            raise KmqError("this producer is closed")

    def wait(self, is_ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until `is_ready`, or until the producer has ended. Raises NotAnswered when the time is up."""
        with self.lock:
            self._wait_locked(is_ready, timeout, what)

    def _wait_locked(self, is_ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait, attending to the socket unless another thread does."""
        if is_ready():
            return
        core, me = self.core, threading.get_ident()
        deadline = time.monotonic() + (core.options.timeout_s if timeout is None else timeout)
        while not is_ready() and core.failed is None and not self.closed:
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                raise NotAnswered(f"timed out waiting for {what}: {core.describe(now)}")
            if core.window.queue:
                core.pacing.hurry = True
                self._write()
            if self._channel.is_open and self._attending in (0, me):
                self._turns += 1
                self._attend(left)
            else:
                self._waiting += 1
                self._changed.wait(min(left, self._overdue.period_s))
                self._waiting -= 1
            if self._overdue.is_due(now):
                self._look()

    def end(self) -> None:
        """Close the connection; messages without a reply fail."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            if self.core.failed is None:
                self.core.fail(NotAnswered("the producer was closed before the reply came"))
            self._drop()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._call_back()

    # --- the socket --------------------------------------------------------------------------------------------------

    def _attend(self, timeout_s: float) -> None:
        """Read what arrives within that time, and run callbacks. The lock is released meanwhile."""
        before, self._attending = self._attending, threading.get_ident()
        channel = self._channel
        try:
            with self._unlocked:
                has_events = channel.poll(min(timeout_s, self._overdue.period_s))
            if has_events and channel.is_open:
                if why := channel.read():
                    self._lose(why)
                elif channel.has_output:
                    self._write()
            if self.core.outcomes.done:
                with self._unlocked:
                    self._call_back()
        finally:
            self._attending = before
            if self._waiting:
                self._changed.notify_all()

    def _call_back(self) -> None:
        """Call the callbacks of finished messages, in order. Only the thread that attends calls this."""
        done = self.core.outcomes.done
        while done:
            delivery = done.popleft()
            try:
                assert delivery.callback is not None
                delivery.callback(delivery)
            except Exception:
                logger().exception("a delivery callback failed")

    def _look(self) -> None:
        """Let expired messages fail, and report a stall."""
        if text := self._overdue.look():
            with self._unlocked:
                self._overdue.report(text)

    def _write(self) -> None:
        if why := self._channel.write():
            self._lose(why)

    def _lose(self, reason: str) -> None:
        self.core.lost(reason)
        self._drop()

    def _drop(self) -> None:
        """Drop the connection, and wake all waiting threads."""
        self._channel.drop()
        self.resting = False
        self._work.notify()
        self._changed.notify_all()

    # --- the background thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.lock:
            while not self.closed and self.core.failed is None:
                if self._channel.is_open:
                    self._help()
                else:
                    self._connect()
            self._changed.notify_all()
            while self._attending:  # the attending caller notices the end within _overdue.period_s
                self._changed.wait(self._overdue.period_s)
            self._channel.close()
        self._call_back()

    def _connect(self) -> None:
        """Make one attempt, and pause if it failed. The lock is released meanwhile."""
        greeted, reason = None, ""
        try:
            with self._unlocked:
                greeted = dial(self.address, self.core)
            if not self.closed:
                self.core.greeted(greeted.greeting)
        except KmqError as err:
            reason = str(err)
        if self.core.connected and greeted is not None:
            self._channel.open(greeted.sock)
            self._write()
            self._changed.notify_all()
        else:
            self._not_connected(greeted, reason)

    def _not_connected(self, greeted: Greeted | None, reason: str) -> None:
        if greeted is not None:
            greeted.sock.close()
        self.core.lost(reason)
        self._look()
        self._changed.notify_all()
        if self.core.outcomes.done:
            with self._unlocked:
                self._call_back()
        if not self.closed:
            self._work.wait(backoff(self._channel.attempts))
            self._channel.attempts += 1

    def _help(self) -> None:
        """Attend to the socket while no caller does. The lock is released meanwhile."""
        core, turns = self.core, self._turns
        if not core.window.unanswered and not self._busy:
            self.resting = True
            self._work.wait()
            return
        self._work.wait(_BUSY_TICK_S if self._busy else _TICK_S)
        self._busy = bool(self._attending) or turns != self._turns
        if core.pacing.filling and core.window.queue:  # the caller that was filling the window has stopped
            core.pacing.hurry = True
            self._write()
        if not self._busy:
            self._attend_alone()

    def _attend_alone(self) -> None:
        """Attend until no reply was awaited for _REST_S, or until a caller waits."""
        core = self.core
        until = time.monotonic() + _REST_S
        while self._channel.is_open and not self._waiting and not self.closed and not self._attending:
            now = time.monotonic()
            if core.window.unanswered:
                until = now + _REST_S
            elif now > until:
                return
            linger = core.linger_left(now)
            self._attend(_REST_S if linger is None else min(linger + _LINGER_SLACK_S, _REST_S))
            self._write()
            if self._overdue.is_due(now):
                self._look()


__all__ = ["Driver"]
