"""KMQ: a message broker inside one pod. Every message is a line in a text file.

import kmq
with kmq.Producer(port=5673) as producer:
    seq = producer.send("orders", b"one", key="42").result()
with kmq.Consumer("orders", group_id="billing") as consumer:
    for message in consumer:
        print(message.key, message.value)
        consumer.commit()
"""

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would slow down the start of every stage
if TYPE_CHECKING:  # tells type checkers what __getattr__ returns
    from kmq.client.consumer import Consumer as Consumer
    from kmq.client.consumer_aio import AsyncConsumer as AsyncConsumer
    from kmq.client.handling import Backoff as Backoff
    from kmq.client.handling import Permanent as Permanent
    from kmq.client.producer import Delivery as Delivery
    from kmq.client.producer import Producer as Producer
    from kmq.client.producer_aio import AsyncProducer as AsyncProducer
    from kmq.cluster.queue import AsyncBroadcastQueue as AsyncBroadcastQueue
    from kmq.cluster.queue import BroadcastQueue as BroadcastQueue
    from kmq.errors import KmqError as KmqError
    from kmq.message.message import Message as Message
    from kmq.message.text import decode_bytes as decode_bytes
    from kmq.message.text import decode_payload as decode_payload
    from kmq.sending.failures import Fenced as Fenced
    from kmq.sending.failures import NotAnswered as NotAnswered
    from kmq.sending.failures import Refused as Refused
    from kmq.wire.requests import TopicPartition as TopicPartition

__version__ = "0.2.0"  # written here only: pyproject.toml reads it, a test compares the manifests

_EXPORTS = {
    "AsyncBroadcastQueue": "kmq.cluster.queue",
    "AsyncConsumer": "kmq.client.consumer_aio",
    "AsyncProducer": "kmq.client.producer_aio",
    "Backoff": "kmq.client.handling",
    "BroadcastQueue": "kmq.cluster.queue",
    "Consumer": "kmq.client.consumer",
    "Delivery": "kmq.client.producer",
    "Fenced": "kmq.sending.failures",
    "KmqError": "kmq.errors",
    "Message": "kmq.message.message",
    "NotAnswered": "kmq.sending.failures",
    "Permanent": "kmq.client.handling",
    "Producer": "kmq.client.producer",
    "Refused": "kmq.sending.failures",
    "TopicPartition": "kmq.wire.requests",
    "decode_bytes": "kmq.message.text",
    "decode_payload": "kmq.message.text",
}


__all__ = sorted(_EXPORTS)


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTS]


def __getattr__(name: str) -> object:
    """Import an export at its first use, because the stages import this package and need no export."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kmq' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
