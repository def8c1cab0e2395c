"""`python -m kmq.replica [--with <pid>]`: this broker's replica of its shard, in the foreground.

Links       in, out: Consul   Owns: pipes/replica.owner, KMQ_DATA/replica, KMQ_DATA/register
Invariant   The stages never wait for it, nor for Consul.
"""

import asyncio
import os
import signal
import sys

from kmq.broker.data_directory import known_id
from kmq.broker.stats import peek
from kmq.broker.supervisor import run_beside
from kmq.config.settings import Settings, load
from kmq.errors import ConfigError, pip_install
from kmq.links.ownership import FileLock, describe
from kmq.log import identity, wal
from kmq.logfmt import Logger

REPLICA = "replica"


def _run(settings: Settings, log: Logger) -> None:
    try:
        from kmq.cluster.consul import Transport
        from kmq.cluster.presence import Keys
        from kmq.cluster.queue import Place
        from kmq.replica.files import ReplicaFiles
        from kmq.replica.replica import Replica
        from kmq.replica.shard import ShardKeys
    except ImportError as error:
        raise ConfigError(f"{error}; a shard needs: {pip_install('cluster')}") from error
    if not settings.shard:
        raise ConfigError("KMQ_SHARD is not set: this broker is no replica of a shard")
    place = Place.of(settings)
    identity.open_data(settings.data, known_id(settings), settings.shard)
    os.makedirs(settings.pipes, exist_ok=True)
    owner = FileLock(f"{settings.pipes}/replica.owner")
    owner.acquire("the replica of this broker", describe(REPLICA, settings.data))
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: told.append(number))
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

    async def live() -> None:
        transport = Transport(place.address)
        try:
            await transport.run(replica.live())
        finally:
            await transport.close()

    try:
        asyncio.run(live())
    finally:
        owner.release()


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
        lambda log, supervisor: _run(load(), log),
        "Takes part in the elections of this broker's shard (KMQ_SHARD). `kmq up` starts it by itself where KMQ_SHARD is"
        " set.",
        "KMQ_SHARD=s KMQ_CLUSTER=dev KMQ_CONSUL=127.0.0.1:8500 python -m kmq.replica",
    )


if __name__ == "__main__":
    sys.exit(main())
