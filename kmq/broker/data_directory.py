"""The data directory of a running broker: a restarted process waits for the same directory, and never makes another.

Invariant   If the directory of a running broker is moved, unmounted or made unreadable, nothing makes a new one at its
            path. Otherwise the broker would begin anew in an empty directory, and the old one could not return to its
            path.
Mechanism   The stats page names the directory and the id with which the broker runs. A process that waits says so in
            its row (state data_missing), and holds its FIFOs.
Not covered Processes of a pod that were all killed by SIGKILL before they could see that the directory had gone.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from kmq.broker.stats import ENDED, FRESH_S, StatsPage, peek
from kmq.config.settings import Settings
from kmq.errors import EXIT_OK, EXIT_RETRY, BusyError, ConfigError, Stopped
from kmq.files import replace_file
from kmq.links.ownership import FileLock, describe, field
from kmq.log.identity import DataMissingError, open_data
from kmq.logfmt import Logger, obey

STARTS = "gateway.starts"  # one line with the decimal number of the lives of gateways up to now
_MOST_DIGITS = 9
_LOOK_S = 0.25  # between two looks for the directory; each is a sign of life

AGAIN = "--again"  # argument of a process that has re-executed itself and keeps its row of the stats page


def known_id(settings: Settings, supervisor: int | None = None) -> str:
    """Return the id of the data directory with which this broker runs; "" if it does not run.

    `supervisor`: the pid of the supervisor that started the caller, and so runs; 0: something else started it. Then the
    caller may be the first restarted after all processes failed because the directory was missing. So the broker counts
    as running if one of them has ended with EXIT_RETRY. Processes that wait must not make each other wait.
    """
    page = peek(settings.instance)
    if page is None or not page.serves(settings.data):
        return ""
    rows = page.rows.values()
    if supervisor is None:
        runs = any(row.state_name == "data_missing" and row.age_s < FRESH_S for row in rows)
    else:
        runs = bool(supervisor) or any(row.exit_code == EXIT_RETRY and not row.supervisor for row in rows)
    return field(page.identity(), "data_id") if runs or page.is_in_use else ""


def open_page(
    name: str, settings: Settings, supervisor: int, log: Logger, is_stopping: Callable[[], bool]
) -> StatsPage:
    """Open the data directory and return the stats page; wait while the directory of the running broker is missing.

    Raises Stopped if the process is told to stop meanwhile.
    """
    obey(settings.log_format, settings.log_level, settings.log_bytes, settings.log_files)
    page = None
    while True:
        data_id = known_id(settings, supervisor)
        if settings.tier and not settings.shard and not data_id and not os.path.exists(f"{settings.data}/id"):
            raise ConfigError(
                f"KMQ_DATA={settings.data!r}: is empty, and KMQ_TIER may have a copy of it; make it with: kmq restore"
                " --if-empty"
            )
        try:
            return StatsPage(settings.instance, open_data(settings.data, data_id, settings.shard), settings.data)
        except DataMissingError as err:
            if page is None:
                log.error("data_missing", reason=err, effect="waits for it; nothing is made in its place")
                page = StatsPage(settings.instance, data_id, settings.data)
        row = page.rows[name]
        is_free = row.state_name in ENDED or row.age_s > FRESH_S  # else a living process of this name has the row
        if is_free:
            row.wait_for_data(supervisor)
        time.sleep(_LOOK_S)
        if is_stopping():
            if is_free:
                row.end(EXIT_OK)
            raise Stopped("told to stop while the data directory was missing")


def read_starts(data: str) -> int:
    """Return the number of starts of gateways; 0 if gateway.starts is missing or damaged."""
    try:
        with open(f"{data}/{STARTS}", "rb") as file:
            text = file.read(_MOST_DIGITS + 2).strip()
    except FileNotFoundError:
        return 0
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0


def write_starts(data: str, count: int) -> None:
    """Replace gateway.starts."""
    replace_file(f"{data}/{STARTS}", b"%d\n" % count)


@contextlib.contextmanager
def broker_is_down(data: str, pipes: str, stage: str = "cluster") -> Iterator[None]:
    """Hold the locks of a broker that is down, as `stage`. Raises BusyError, naming the holder, if it runs."""
    with contextlib.suppress(OSError):  # a Job has no place for pipes, and no broker beside it
        os.makedirs(pipes, exist_ok=True)
    paths = [f"{pipes}/{name}.owner" for name in ("supervisor", "replica") if os.path.isdir(pipes)]
    paths += [f"{data}/{name}/.owner" for name in ("append", "topics") if os.path.isdir(f"{data}/{name}")]
    with contextlib.ExitStack() as held:
        for lock in map(FileLock, paths):
            if not lock.try_acquire(describe(stage, data)):
                raise BusyError(f"{lock.path} is held by {lock.holder()}: the broker must be down; see: kmq down")
            held.callback(lock.release)
        yield
