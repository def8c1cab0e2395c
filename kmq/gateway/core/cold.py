"""Cold reads: records that lie in KMQ_TIER alone are fetched in, while readers wait and others go on.

    partition.read(17, MIB)       → NotHereError: the object with the records 0…511 is not here
    await cold.wait(err, 20.0)    → it is here: read again

Invariant   A reader that waits is never told that the log ends before it does, nor that its offset is out of range. An
            object is requested once, however many readers wait for it. A waiting reader holds no thread, no open file
            and no share of the answers' budget. Hot reads need nothing of this module.
Store away  The request is repeated while somebody waits; `failure` says why it takes so long.
Damage      An object that is missing, or twice not what its row says, is damage of its records: `damage`, for each reader
            once.
Ahead       A reader that has read one object gets the next one before it asks.
Room        What was fetched in gives way while the disk lacks room, also what lies there when the gateway starts.
Cost        Two threads, from the first cold read on. At a start the cache, if there is one, is listed once.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kmq.broker.stats import StatsPage
from kmq.errors import ConfigError, KmqError
from kmq.gateway.core.broker import RequestRefused
from kmq.log import rows, segment
from kmq.log.damage import EXAMINE_COPY, DamageError
from kmq.log.rows import NotHereError, TierRow
from kmq.logfmt import Logger

if TYPE_CHECKING:  # a gateway without cold reads does not load the tier
    from kmq.tier.cache import TierCache
    from kmq.tier.store import CountedStore

WAIT_S = 20.0  # longest wait of a request that must answer
_THREADS = 2
_AGAIN_S = 2.0  # after a failure
_WANTED_S = 60.0  # a failed object that nobody has asked for since is given up
_TICK_S = 1.0
_FULL_S = 5.0  # waits for room that follow each other so closely are one
_MOST_DAMAGED = 1000


class ColdObject:
    """A row that is fetched in. `is_here`: it can be read now. `failure`: what the store said last; `damage`: for good.

    `is_given_up`: the store was away, and nobody has asked for a while. The next read asks for it anew.
    """

    def __init__(self, err: NotHereError) -> None:
        self.err, self.path = err, os.path.dirname(rows.cached_path(err.directory, err.life, err.row))
        self.event = asyncio.Event()
        self.failure, self.is_given_up, self.is_in_doubt = "", False, False
        self.damage: DamageError | None = None
        self.wanted_at = time.monotonic()

    @property
    def is_here(self) -> bool:
        return self.event.is_set()

    def has_news(self) -> bool:
        """Return True if a reader should read again. It still wants this object."""
        self.wanted_at = time.monotonic()
        return self.is_here or self.is_given_up or self.damage is not None


class ColdReads:
    """Fetches in what readers of the gateway need. Use it in the event loop only."""

    def __init__(
        self,
        data: str,
        wake: Callable[[str], None],
        url: str = "",
        most_bytes: int = 0,
        log: Logger | None = None,
        lacks_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """`wake` wakes the readers that wait for a directory. `url`: KMQ_TIER."""
        self._data, self._wake, self._url, self._most, self._log = data, wake, url, most_bytes, log
        self._lacks_room = lacks_room
        self._objects: dict[str, ColdObject] = {}  # that are not here yet, by path
        self._ahead: dict[str, tuple[ColdObject, float]] = {}  # fetched in: once it is read, the next one is wanted
        self._queue: SimpleQueue[ColdObject | None] = SimpleQueue()
        self._has_threads, self._opening = False, threading.Lock()
        self._cache: TierCache | None = None
        self._store: CountedStore | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self.fetched = self.waits = 0  # for the metrics
        self._damaged: dict[str, tuple[NotHereError, str]] = {}  # objects that were missing or altered, by path; why
        self._note = ""  # of the last of them, on the page

    @property
    def nbytes(self) -> int:
        """Return how many bytes lie in the cache."""
        return 0 if self._cache is None else self._cache.nbytes

    @property
    def store(self) -> "CountedStore | None":
        """Return the store; None before the first cold read."""
        return self._store

    @property
    def cache_waits(self) -> int:
        """Return how many objects had to wait for room in the cache."""
        return 0 if self._cache is None else self._cache.waits

    def publish(self, page: StatsPage) -> None:
        """Write to the gateway's row what an operator must know of cold reads. Call it about once a second."""
        row, now = page.rows["gateway"], time.monotonic_ns()
        is_failing = any(found.failure for found in self._objects.values())
        row.tier_failing_since = (row.tier_failing_since or now) if is_failing else 0
        full_at = self._cache.full_at if self._cache is not None else None
        is_full = full_at is not None and time.monotonic() - full_at < _FULL_S
        row.cache_full_since = (row.cache_full_since or now) if is_full else 0
        self._forget_damage()
        note = next((why for _, why in reversed(self._damaged.values())), "")
        if (row.tier_damaged, self._note) != (len(self._damaged), note):
            page.write_note("gateway", note)
            row.tier_damaged, self._note = len(self._damaged), note

    def _forget_damage(self) -> None:
        """Forget objects that nobody needs any more: retention has dropped them, or the disk has their records again."""
        cold_rows = cache(_cold_rows)
        for path, (err, _) in [*self._damaged.items()]:
            with suppress(DamageError, OSError):
                if err.row not in cold_rows(err.directory, err.life):
                    del self._damaged[path]

    @property
    def waiting(self) -> int:
        """Return how many objects are waited for."""
        return len(self._objects)

    def start(self) -> None:
        """Count in a thread what lies in the cache from before, so that it can give way."""
        if self._url and os.path.isdir(f"{self._data}/{rows.CACHE}"):
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._count, args=(loop,), name="cold", daemon=True).start()

    def want(self, err: NotHereError, is_ahead: bool = False) -> ColdObject:
        """Have a row fetched in, and return it at once."""
        found = ColdObject(err)
        existing = self._objects.get(found.path)
        if existing is not None:
            existing.wanted_at = time.monotonic()
            return existing
        self.waits += not is_ahead
        self._objects[found.path] = found
        self._fetch(found)
        self._arm()
        return found

    async def wait(self, err: NotHereError, seconds: float = WAIT_S) -> None:
        """Return once the row can be read. Raises DamageError; RequestRefused (cold) after `seconds`."""
        found = self.want(err)
        deadline = time.monotonic() + seconds
        while not found.has_news():
            left = deadline - time.monotonic()
            if left <= 0:
                raise refusal(found)
            try:
                async with asyncio.timeout(min(left, _TICK_S)):
                    await found.event.wait()
            except TimeoutError:
                pass
        if found.damage is not None:
            raise found.damage

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._cache is not None:
            self._cache.is_closed = True
        for _ in range(_THREADS):
            self._queue.put(None)

    # --- fetching in -------------------------------------------------------------------------------------------------

    def _fetch(self, found: ColdObject) -> None:
        if not self._has_threads:
            self._has_threads, loop = True, asyncio.get_running_loop()
            for _ in range(_THREADS):  # the end of the process does not wait for a request that hangs
                threading.Thread(target=self._serve, args=(loop,), name="cold", daemon=True).start()
        self._queue.put(found)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fetch in the objects of the queue, until it has None."""
        while (found := self._queue.get()) is not None:
            error: Exception | None = None
            try:
                self._work(found.err)
            except Exception as err:  # what it means is decided in the loop
                error = err
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._done, found, error)

    def _work(self, err: NotHereError) -> None:
        if not self._url:
            raise ConfigError("KMQ_TIER is not set, so nothing can be fetched from there")
        self._open().fetch(err.directory, err.life, err.row)

    def _open(self) -> "TierCache":
        from kmq.tier.cache import TierCache
        from kmq.tier.store import CountedStore, open_store

        with self._opening:
            if self._cache is None:
                self._store = CountedStore(open_store(self._url))
                self._cache = TierCache(self._data, self._store, self._most)
            return self._cache

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(KmqError, OSError, RuntimeError):  # the first cold read says what is wrong; the loop has ended
            self._open()
            loop.call_soon_threadsafe(self._arm)

    def _done(self, found: ColdObject, err: Exception | None) -> None:
        from kmq.tier.objects import ObjectError
        from kmq.tier.store import MissingError

        if err is None:
            self.fetched += 1
            found.failure = ""
            self._objects.pop(found.path, None)
            self._damaged.pop(found.path, None)
            self._ahead[found.path] = found, time.monotonic()
            found.event.set()
        elif isinstance(err, MissingError) or (isinstance(err, ObjectError) and found.is_in_doubt):
            self._objects.pop(found.path, None)
            found.damage = damage_of(found, err)
            self._note_damage(found, err)
        else:
            found.is_in_doubt = isinstance(err, ObjectError)  # of what came: the store is asked once more
            self._failed(found, err)
        self._wake(found.err.directory)

    def _note_damage(self, found: ColdObject, err: Exception) -> None:
        row, (log, _) = found.err.row, rows.label_of(found.err.directory)
        self._damaged.pop(found.path, None)
        if len(self._damaged) < _MOST_DAMAGED:
            self._damaged[found.path] = found.err, f"offsets {row.base} to {row.next - 1} of {log}: {err}"
        if self._log is not None:
            names = {"topic": log.rpartition("/")[0], "first_offset": row.base, "last_offset": row.next - 1}
            self._log.error("tier_object_damaged", **names, reason=err, effect="these records cannot be read")

    def _failed(self, found: ColdObject, err: Exception) -> None:
        if not found.failure and self._log is not None:
            effect = "readers of old records wait, or are told to retry; nothing else does"
            self._log.warn("tier_read_failed", reason=err, effect=effect)
        found.failure = str(err) if isinstance(err, KmqError | OSError) else repr(err)
        if time.monotonic() - found.wanted_at < _WANTED_S:
            asyncio.get_running_loop().call_later(_AGAIN_S, self._again, found)
        else:
            found.is_given_up = True
            self._objects.pop(found.path, None)

    def _again(self, found: ColdObject) -> None:
        if self._objects.get(found.path) is found:
            self._fetch(found)

    # --- ahead, and room ---------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """Look after the cache, again and again while there is something in it or on its way."""
        self._ticking = None
        if self._cache is not None:
            self._look_after(self._cache)
        if self._objects or self._ahead or self.nbytes:
            self._arm()

    def _look_after(self, cache: "TierCache") -> None:
        """Fetch ahead of the readers. Give room back while the disk lacks it."""
        if self._lacks_room():
            cache.give_way()
        for path, (found, since) in [*self._ahead.items()]:
            if cache.was_read(path):
                del self._ahead[path]
                if os.path.exists(f"{path}/log"):
                    self._want_next(found.err)
            elif time.monotonic() - since > _WANTED_S:
                del self._ahead[path]

    def _want_next(self, err: NotHereError) -> None:
        try:
            after = [row for row in _cold_rows(err.directory, err.life) if row.base >= err.row.next]
        except (DamageError, OSError):
            return
        if after and not os.path.exists(rows.cached_path(err.directory, err.life, after[0])):
            self.want(NotHereError(err.directory, err.life, after[0]), is_ahead=True)


def _cold_rows(directory: str, life: int) -> list[TierRow]:
    """Return the rows whose records lie in KMQ_TIER alone; none if the topic has another life, or is gone."""
    listed, found = segment.listing(directory), rows.of(directory)
    return found.cold(listed[0][0]) if listed and found.life == life else []


def refusal(found: ColdObject) -> RequestRefused:
    """Return the refusal of a request whose records are not here yet."""
    why = f": {found.failure}" if found.failure else ""
    return RequestRefused("cold", f"{found.err}; they are being fetched, ask again{why}")


def damage_of(found: ColdObject, err: BaseException) -> DamageError:
    row = found.err.row
    return DamageError(f"{found.path}/log", 0, row.nbytes, row.base, row.next, str(err), EXAMINE_COPY)
