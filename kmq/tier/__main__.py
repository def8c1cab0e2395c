"""`python -m kmq.tier [--with <pid>]`: copies the WAL of this broker to KMQ_TIER, in the foreground.

Each KMQ_TIER_EVERY one turn (kmq/tier/turn.py). `kmq up` starts this process where KMQ_TIER is set.

Links       in: the files of KMQ_DATA, and durability's row of the stats page   out: the store
Owns        KMQ_DATA/tier (lock tier/.owner), its row of the stats page
Promise     No stage waits for it. A store that is slow, full, away or wrong delays the copy, and nothing else.
Shard       Each broker of a shard has this process. That of the leader copies. The others read its commits every 10 s, and
            lay out the rows of topics for their own routers; they write nothing to the store until their broker leads.
Ends        by signals only, within a moment: an upload is abandoned. Fenced, refused or without rights it stays, does
            nothing, says why, and looks again each minute: an exit code would end it for good, and in a pod a container
            that ends takes its pod out of the Service. Without progress for five minutes it ends and is started again.
Mechanism   A thread makes the turns. The main thread gives signs of life and says how old the oldest missing record is.
"""

import contextlib
import os
import signal
import sys
import threading
import time

from kmq.broker.data_directory import open_page
from kmq.broker.stats import STATES, TIER, TIER_PROBLEMS, TIER_REQUESTS, StatsPage
from kmq.broker.supervisor import run_beside
from kmq.config.settings import Settings, load
from kmq.config.states import InForce
from kmq.errors import EXIT_OK, EXIT_RETRY, ConfigError, KmqError
from kmq.files import replace_file, sync_file
from kmq.links.ownership import FileLock, describe
from kmq.log import identity, reader, wal
from kmq.log.damage import DamageError
from kmq.log.segment import Limits
from kmq.logfmt import Logger
from kmq.tier.commits import AheadError, DamagedError, FencedError, StaleError
from kmq.tier.objects import ObjectError
from kmq.tier.store import CountedStore, RefusedError, StoreError, open_store
from kmq.tier.turn import DIRECTORY, Copier, FollowsError, Leadership, TurnOptions

_NICE = 10  # idle priority would starve on a full machine, and with it the promise of a minute
_LOOK_S = 60.0  # between two looks while it may not write, and the longest pause while the store is away
_FOLLOW_S = 10.0  # between two looks of a follower at the commits
_ROLE_S = 0.5  # between two looks at the role page
_PAUSE_S = 1.0  # after the first failed request; it doubles
_BEAT_S = 0.25
_HANGS_S = 300.0
_MOST_WORDS = 1000


class CopyProcess:
    """The turns of one process, and what it says of them."""

    def __init__(self, settings: Settings, page: StatsPage, log: Logger) -> None:
        self._settings, self._page, self._row, self._log = settings, page, page.rows[TIER], log
        self._in_force = InForce(settings)
        self._store: CountedStore | None = None
        self._copier: Copier | None = None
        self._leadership = Leadership(settings.instance, page.data_id, settings.shard) if settings.shard else None
        self._stopping = threading.Event()
        self._progress_at = time.monotonic()
        self._is_at_work = False
        self._words = ""  # why nothing is copied
        page.write_note(TIER, "")
        self._seen = -1  # the copied seq for which `oldest` was found
        self._row.seq = wal.copied_seq(settings.data)  # of the process before: the store may be away

    def run(self, signals: list[int]) -> None:
        """Copy until a signal has come."""
        threading.Thread(target=self._work, daemon=True).start()
        self._row.state = STATES.index("ready")
        looked = 0.0
        while not signals:
            self._row.heartbeat = time.monotonic_ns()
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                self._page.keep_in_place(TIER)
                self._note_oldest()
                self._note_requests()
                if self._is_at_work and looked - self._progress_at > _HANGS_S:
                    self._log.error(
                        "tier_hangs", seconds=int(_HANGS_S), effect="this process ends and is started again"
                    )
                    self._row.end(EXIT_RETRY)
                    os._exit(EXIT_RETRY)
            time.sleep(_BEAT_S)
        self._stopping.set()

    # --- the turns ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause = _PAUSE_S
        while not self._stopping.is_set():
            self._progress_at, self._is_at_work = time.monotonic(), True
            wait = self._settings.tier_every or _LOOK_S
            try:
                if self._turn():
                    wait = 0.0
                pause = _PAUSE_S
            except StaleError:
                wait = 0.0
            except FollowsError as err:
                wait = self._follow(err)
            except StoreError as err:
                wait, pause = pause, min(2 * pause, _LOOK_S)
                self._store_is_away(str(err))
            except (RefusedError, ConfigError) as err:
                wait = self._stand("refused", err)
            except FencedError as err:
                is_deposed = self._leadership is not None and self._leadership.epoch() is None
                wait = self._follow(err) if is_deposed else self._stand("fenced", err)
            except AheadError as err:
                wait = self._stand("ahead", err)
            except (DamagedError, ObjectError, DamageError) as err:
                wait = self._stand("damaged", err)
            except (KmqError, OSError) as err:  # of this machine
                wait, pause = pause, min(2 * pause, _LOOK_S)
                self._log.warn("tier_turn_failed", reason=err, effect="tried again")
            self._is_at_work = False
            self._rest(wait)

    def _turn(self) -> bool:
        """Make a turn; return True if the next one is due at once."""
        settings, leadership = self._settings, self._leadership
        if self._store is None:
            self._store = CountedStore(open_store(settings.tier))
        if self._copier is None or self._copier.lineage != identity.lineage(settings.data):
            if leadership is not None and not leadership.follows():
                leadership.check()  # before it has a role a directory may take another lineage
            durable = self._durable if leadership is None else leadership.committed
            rates = settings.tier_object, settings.tier_rate
            options = TurnOptions(*rates, durable, self._progressed, self._limits, settings.tier_every, leadership)
            self._copier = Copier(settings.data, self._store, self._log, options)
        copier = self._copier
        try:
            is_more = copier.turn()
        finally:
            self._note_totals(copier)
        missing = copier.missing
        some = "; ".join(f"{row.what} ({row.values['key']})" for row in missing[:3])
        self._say(f"damaged: {len(missing)} objects are missing, such as {some}" if missing else "")
        self._row.standing = TIER_PROBLEMS.index("damaged") if missing else 0
        return is_more

    def _limits(self) -> Limits:
        self._in_force.changed()
        return Limits.of(self._in_force.settings)

    def _rest(self, seconds: float) -> None:
        """Wait so long; in a shard not longer than until the role of this broker changes."""
        leadership = self._leadership
        if leadership is None:
            self._stopping.wait(seconds)
            return
        until, led = time.monotonic() + seconds, leadership.epoch()
        while (left := until - time.monotonic()) > 0 and not self._stopping.wait(min(left, _ROLE_S)):
            if leadership.epoch() != led:
                return

    def _durable(self) -> int:
        """Return the last seq on disk. Where KMQ_FSYNC does not sync each commit, this process syncs."""
        if self._settings.fsync == 0:
            return self._page.rows["durability"].seq
        seq, _ = wal.last_stored(self._settings.data)
        segments = reader.wal(self._settings.data).segments()
        for _, path in segments[-2:]:  # it may have rolled since
            sync_file(path)
        return seq

    def _progressed(self, nbytes: int) -> None:
        self._progress_at = time.monotonic()
        if nbytes:
            self._row.bytes += nbytes
            self._row.objects += 1
        if self._copier is not None and self._copier.is_claimed:
            self._row.seq, self._row.commits = self._copier.copied, self._copier.commits.state.number

    # --- what it says ------------------------------------------------------------------------------------------------

    def _stand(self, problem: str, err: Exception) -> float:
        """Say why nothing is copied, once; begin anew with the claim at the next look. Return how long to wait."""
        self._copier = None
        is_news = self._say(f"{problem}: {err}")
        self._row.standing = TIER_PROBLEMS.index(problem)
        if is_news:
            effect = "nothing is copied to KMQ_TIER; it looks again each minute"
            self._log.error("tier_stands", problem=problem, reason=err, effect=effect)
        return _LOOK_S

    def _follow(self, err: KmqError) -> float:
        """Say once that another broker leads. Nothing is wrong: it makes the copy. Return how long to wait."""
        is_news = self._say(f"follows: {err}")
        self._row.standing = self._row.oldest = 0
        self._row.behind_bytes = self._row.due_since = (
            0  # what the leader's segments have not filled yet waits here, too
        )
        if is_news:
            self._log.info("tier_follows", reason=err)
        return _FOLLOW_S

    def _store_is_away(self, words: str) -> None:
        self._say(f"away: {words}", is_away=True)
        if not self._row.failing_since:
            self._row.failing_since = time.monotonic_ns()
            self._log.warn("tier_store_away", reason=words, effect="copying waits; nothing else does")

    def _say(self, words: str, is_away: bool = False) -> bool:
        """Write tier/status, which `kmq tier status` shows, before the log says so. Return True if it is news."""
        words = " ".join(words.split())[:_MOST_WORDS]
        is_news = words != self._words
        if is_news:
            self._words = words
            self._page.write_note(TIER, words)
            replace_file(f"{self._settings.data}/{DIRECTORY}/status", f"{words}\n".encode())
        if not words:
            self._row.standing = 0
        if not is_away and self._row.failing_since:
            self._row.failing_since = 0
            self._log.info("tier_store_back")
        return is_news

    def _note_totals(self, copier: Copier) -> None:
        """Note what the store has of partitions, and since when old records wait for it."""
        row = self._row
        row.orphans = copier.orphans
        with contextlib.suppress(OSError, KmqError):
            if (found := copier.totals()) is None:
                return
            row.rows, row.row_bytes, row.behind_bytes, row.local_limit = found
            row.due_since = (row.due_since or time.monotonic_ns()) if found.behind_bytes else 0

    def _note_requests(self) -> None:
        if (store := self._store) is not None:
            self._row.received = store.received
            for call, answer in TIER_REQUESTS:
                setattr(self._row, f"{call}_{answer}", store.requests[call, answer])

    def _note_oldest(self) -> None:
        """Note when the oldest record was received that is on disk and not in the store."""
        copied, durable = self._row.seq, self._page.rows["durability"].seq
        if self._leadership is not None:
            durable = self._leadership.committed() if self._leadership.epoch() is not None else 0
        if durable <= copied or self._settings.tier_every is None:
            self._row.oldest, self._seen = 0, -1
        elif self._seen != copied:
            log = reader.wal(self._settings.data)
            stamp = log.stamp_of(max(copied + 1, log.first_offset))
            self._row.oldest, self._seen = (stamp[1] // 1_000_000 if stamp else int(time.time())), copied


def _run(settings: Settings, log: Logger, supervisor: int) -> None:
    if not settings.tier:
        raise ConfigError("KMQ_TIER is not set: there is no copy to make")
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    page = open_page(TIER, settings, supervisor, log, lambda: bool(signals))
    os.makedirs(f"{settings.data}/{DIRECTORY}", exist_ok=True)
    owner = FileLock(f"{settings.data}/{DIRECTORY}/.owner")
    owner.acquire("the copy of this directory", describe(TIER, settings.data))
    os.nice(_NICE)
    row = page.rows[TIER]
    row.begin(supervisor)
    CopyProcess(settings, page, log).run(signals)
    row.end(EXIT_OK)


def main() -> int:
    """Run the process to its end and return its exit code."""
    return run_beside(
        TIER,
        "kmq.tier",
        lambda log, supervisor: _run(load(), log, supervisor),
        "Copies the WAL of this broker to KMQ_TIER. `kmq up` starts it by itself where KMQ_TIER is set.",
        "KMQ_TIER=file:///mnt/nfs/kmq python -m kmq.tier",
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a request of the thread may still wait for its answer
