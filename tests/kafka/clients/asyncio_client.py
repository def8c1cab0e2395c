"""aiokafka."""

import asyncio
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import record_lines
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from record_lines import PARTITIONS, PATIENCE_S, Row


async def produce(bootstrap: str, topics: dict[str, str]) -> None:
    rows = [*record_lines.read(sys.stdin)]
    for topic, codec in topics.items():
        compression = None if codec == "none" else codec
        settings = {"compression_type": compression, "max_request_size": 2_000_000, "linger_ms": 20}
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, **settings) as producer:
            sent = [await _send(producer, row._replace(topic=topic)) for row in rows]
            await asyncio.gather(*sent)


async def _send(producer: AIOKafkaProducer, row: Row) -> "asyncio.Future[Any]":
    place = row.partition, row.timestamp, [*row.headers]
    sent: asyncio.Future[Any] = await producer.send(row.topic, row.value, row.key, *place)
    return sent


def _consumer(bootstrap: str, **settings: Any) -> AIOKafkaConsumer:
    settings |= {"enable_auto_commit": False, "auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    return AIOKafkaConsumer(bootstrap_servers=bootstrap, **settings)


async def consume(bootstrap: str, topics: dict[str, str]) -> None:
    async with _consumer(bootstrap) as consumer:
        consumer.assign([TopicPartition(topic, number) for topic in topics for number in PARTITIONS])
        wanted, rows = sum(map(int, topics.values())), 0
        while rows < wanted:
            for found in (await consumer.getmany(timeout_ms=1000)).values():
                rows += len(found)
                sys.stdout.write(record_lines.write(_row(each) for each in found))


class Steps(ConsumerRebalanceListener):  # type: ignore[misc]
    """Those of record_lines.transact. The event loop has a thread of its own: heartbeats go on between two steps.

    It has no fence for members of groups: what was read must be in its topic before another member gets the partition.
    """

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._loop = asyncio.new_event_loop()
        self._idle = asyncio.Event()  # nothing that was read waits to be committed
        self._idle.set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def init(self, id: str) -> None:
        async def init() -> None:
            settings = {"transactional_id": id, "compression_type": "lz4", "max_request_size": 2_000_000}
            self._producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, **settings)
            await self._producer.start()

        self._run(init())

    def begin(self) -> None:
        self._run(self._producer.begin_transaction())

    def send(self, row: Row) -> None:
        self._run(_send(self._producer, row))

    def flush(self) -> None:
        self._run(self._producer.flush())

    def commit(self) -> None:
        self._run(self._producer.commit_transaction())
        self._loop.call_soon_threadsafe(self._idle.set)

    def abort(self) -> None:
        self._run(self._producer.abort_transaction())
        self._loop.call_soon_threadsafe(self._idle.set)

    def join(self, group: str, topic: str) -> None:
        async def join() -> None:
            self._consumer = _consumer(self._bootstrap, group_id=group, heartbeat_interval_ms=300)
            self._consumer.subscribe([topic], listener=self)
            await self._consumer.start()

        self._run(join())

    async def on_partitions_revoked(self, revoked: object) -> None:
        await self._idle.wait()

    async def on_partitions_assigned(self, assigned: object) -> None:
        pass

    def poll(self) -> list[Row]:
        rows: list[Row] = self._run(self._poll())
        self._offsets = record_lines.offsets_behind(rows)
        return rows

    async def _poll(self) -> list[Row]:
        polled = await self._consumer.getmany(timeout_ms=500, max_records=10)
        rows = [_row(each) for found in polled.values() for each in found]
        if rows:
            self._idle.clear()
        return rows

    def offsets(self) -> None:
        offsets = {TopicPartition(*place): offset for place, offset in self._offsets.items()}
        self._run(self._producer.send_offsets_to_transaction(offsets, self._consumer._group_id))

    def leave(self) -> None:
        self._run(self._consumer.stop())


def _row(found: Any) -> Row:
    return Row(
        *(found.partition, found.key, found.value, tuple(found.headers), found.timestamp, found.topic, found.offset)
    )


if __name__ == "__main__":
    asked = record_lines.asked()
    if asked.command == "transact":
        record_lines.transact(Steps(asked.bootstrap))
        sys.exit()
    work = {"produce": produce, "consume": consume}[asked.command](asked.bootstrap, asked.topics)
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))
