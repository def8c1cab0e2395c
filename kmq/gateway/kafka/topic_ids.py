"""Topic ids (UUIDs), by which newer Kafka clients name topics.

    ids.of("orders")    → UUID("5a…"), and `topic` finds "orders" by it

Invariant   An id is made of the lineage of the records, the topic's name, and the seq from which on it is in force. So
            it is the same in every life of a gateway and in all replicas. A topic that is declared again has another
            id.
Memory      An id and a name for each topic that was named since the last look, or found by it.
"""

import asyncio
import time
from functools import cached_property, lru_cache
from uuid import UUID, uuid5

from kmq.gateway.core.partitions import Partitions
from kmq.log import identity, topics

_LOOK_S = 1.0  # between two looks at all topics for an unknown id, because clients may send any id


class TopicIds:
    """Topics by id, and ids by topic."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._topics: dict[UUID, str] = {}  # may also have former ids of topics that were declared again
        self._looking, self._not_before = asyncio.Lock(), 0.0

    @cached_property
    def _lineage(self) -> UUID:
        return UUID(identity.lineage(self._partitions.data))

    def of_life(self, topic: str, from_seq: int | None) -> UUID | None:
        """Return the id of a topic that is in force from this seq on; None while its declaration is pending."""
        return None if from_seq is None else _made(self._lineage, topic, from_seq)

    def of(self, topic: str) -> UUID | None:
        """Return the id of a topic; None while its declaration is pending. Raises RequestRefused if there is none."""
        id = self.of_life(topic, self._partitions.from_seq(topic))
        if id is not None:
            self._topics[id] = topic
        return id

    async def topic(self, id: UUID) -> str | None:
        """Return the name of the topic that has or had this id. The caller must check that it still has it."""
        if id not in self._topics:
            async with self._looking:
                if id not in self._topics and time.monotonic() >= self._not_before:
                    self._topics = await asyncio.to_thread(self._look)
                    self._not_before = time.monotonic() + _LOOK_S
        return self._topics.get(id)

    def _look(self) -> dict[UUID, str]:
        declared = self._partitions.declared_of(topics.names(self._partitions.data))
        ids = ((self.of_life(name, from_seq), name) for name, (_, from_seq) in declared.items())
        return {id: name for id, name in ids if id is not None}


@lru_cache(10_000)
def _made(lineage: UUID, topic: str, from_seq: int) -> UUID:
    return uuid5(lineage, f"{topic} {from_seq}")
