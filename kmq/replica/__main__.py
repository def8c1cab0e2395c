"""`python -m kmq.replica [--with <pid>]`: this broker's replica of its shard, in the foreground.

Links       in, out: Consul, the replica port; on a follower out: ring `framed`, on a leader in: the same ring
Owns        pipes/replica.owner, the role page, KMQ_DATA/replica, register, committed; its row of the stats page
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys

from kmq.broker.data_directory import open_page
from kmq.broker.stats import REPLICA
from kmq.broker.supervisor import run_beside
from kmq.config.settings import Settings, load
from kmq.errors import EXIT_OK, ConfigError, KmqError, exit_code_of, pip_install
from kmq.links.ownership import FileLock, describe
from kmq.logfmt import Logger

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def _keep_heap() -> None:
    """Keep 4 MiB of free heap between two blocks. glibc would return it after each, and fault it in for the next."""
    with contextlib.suppress(AttributeError):  # another libc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 << 20)


def _run(settings: Settings, log: Logger, supervisor: int) -> None:
    if not settings.shard:
        raise ConfigError("KMQ_SHARD is not set: this broker is no replica of a shard")
    try:
        from kmq.replica.roles import live
    except ImportError as error:
        raise ConfigError(f"{error}; a shard needs: {pip_install('cluster')}") from error
    _keep_heap()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    page = open_page(REPLICA, settings, supervisor, log, lambda: bool(signals))
    os.makedirs(settings.pipes, exist_ok=True)
    owner = FileLock(f"{settings.pipes}/replica.owner")
    owner.acquire("the replica of this broker", describe(REPLICA, settings.data))
    row = page.rows[REPLICA]
    row.begin(supervisor)
    try:
        asyncio.run(live(settings, page, owner, lambda: bool(signals), log))
        row.end(EXIT_OK)
    except (KmqError, OSError) as error:
        row.end(exit_code_of(error))
        raise
    finally:
        owner.release()


def main() -> int:
    """Run the replica to its end and return its exit code."""
    return run_beside(
        REPLICA,
        "kmq.replica",
        lambda log, supervisor: _run(load(), log, supervisor),
        "Takes part in the elections of this broker's shard (KMQ_SHARD). `kmq up` starts it by itself where KMQ_SHARD is"
        " set.",
        "KMQ_SHARD=s KMQ_CLUSTER=dev KMQ_CONSUL=127.0.0.1:8500 python -m kmq.replica",
    )


if __name__ == "__main__":
    sys.exit(main())
