"""`python -m kmq.replica [--with <pid>]`: this broker's replica of its shard, in the foreground.

Links       in, out: Consul
Owns        pipes/replica.owner, KMQ_DATA/replica, KMQ_DATA/register, its row of the stats page, and pipes/cluster.json:
            the shard as it was last read from Consul, for the gateway, which does not ask Consul.
Invariant   The stages never wait for it, nor for Consul.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kmq.broker.data_directory import open_page
from kmq.broker.stats import REPLICA, Row, StatsPage, peek
from kmq.broker.supervisor import run_beside
from kmq.config.settings import Settings, load
from kmq.errors import EXIT_OK, ConfigError, KmqError, RetryError, exit_code_of, pip_install
from kmq.links.ownership import FileLock, describe
from kmq.log import identity, wal
from kmq.logfmt import Logger

_BEAT_S = 0.5


def _run(settings: Settings, log: Logger, supervisor: int) -> None:
    try:
        from kmq.cluster.consul import Transport
        from kmq.cluster.presence import Keys
        from kmq.cluster.queue import Place
        from kmq.replica.files import ReplicaFiles
        from kmq.replica.replica import Replica
        from kmq.replica.shard import ShardKeys, document
    except ImportError as error:
        raise ConfigError(f"{error}; a shard needs: {pip_install('cluster')}") from error
    if not settings.shard:
        raise ConfigError("KMQ_SHARD is not set: this broker is no replica of a shard")
    place = Place.of(settings)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: told.append(number))
    page = open_page(REPLICA, settings, supervisor, log, lambda: bool(told))
    os.makedirs(settings.pipes, exist_ok=True)
    owner = FileLock(f"{settings.pipes}/replica.owner")
    owner.acquire("the replica of this broker", describe(REPLICA, settings.data))
    replica = Replica(
        ReplicaFiles(settings.data, settings.shard),
        ShardKeys(Keys(place.cluster), settings.shard),
        place.broker,
        identity.lineage(settings.data),
        place.ttl_s,
        settings.replica_lag,
        read_stored=lambda: wal.last_stored(settings.data)[0],
        read_synced=lambda: _synced(settings),
        is_stopping=lambda: bool(told),
        log=log,
    )

    def publish(row: Row) -> None:
        replica.publish(row)
        if (seen := replica.seen) is not None:
            view, at = seen
            _show(settings, document(settings.shard, place.broker, view) | {"as_of": round(at, 3)})

    async def live() -> None:
        transport = Transport(place.address)
        try:
            await _until_one_ends(transport.run(replica.live()), _beat(page, owner, publish))
        finally:
            await transport.close()

    row = page.rows[REPLICA]
    row.begin(supervisor)
    try:
        asyncio.run(live())
        row.end(EXIT_OK)
    except (KmqError, OSError) as error:
        row.end(exit_code_of(error))
        raise
    finally:
        owner.release()


async def _until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Do all of it until one part ends, or fails."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _show(settings: Settings, found: dict[str, Any]) -> None:
    """Leave what Consul says for the gateway. Not synced: after a crash it is written again at once."""
    path = f"{settings.pipes}/cluster.json"
    with open(f"{path}.new", "w", encoding="ascii") as file:
        json.dump(found, file)
    os.rename(f"{path}.new", path)


async def _beat(page: StatsPage, owner: FileLock, publish: Callable[[Row], None]) -> None:
    """Keep the row of the replica up to date. Raises RetryError once nobody can find the lock any more."""
    row = page.rows[REPLICA]
    while True:
        row.heartbeat = time.monotonic_ns()
        publish(row)
        await asyncio.sleep(_BEAT_S)
        page.keep_in_place(REPLICA)
        if not owner.is_in_place():
            raise RetryError(f"{owner.path}: was removed, or replaced, while the replica used it")


def _synced(settings: Settings) -> int:
    """Return the seq of the last record that is surely on disk: while durability works, it knows better than the file."""
    page = peek(settings.instance)
    if page is not None and page.serves(settings.data) and not page.rows["durability"].silence():
        return page.rows["durability"].seq
    return wal.last_stored(settings.data)[0]


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
