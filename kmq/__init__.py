"""KMQ: a message broker inside one pod, whose every message is a line in a text file.

import kmq
with kmq.Producer(port=5673) as producer:
    seq = producer.send("orders", b"one", key="42").result()
"""

__version__ = "0.1.0"

_EXPORTS = {
    "AsyncProducer": "kmq.client.aio",
    "Delivery": "kmq.client.producer",
    "Fenced": "kmq.client.protocol",
    "KmqError": "kmq.errors",
    "NotAnswered": "kmq.client.protocol",
    "Producer": "kmq.client.producer",
    "Refused": "kmq.client.protocol",
    "decode_bytes": "kmq.client.lines",
    "decode_payload": "kmq.client.lines",
}


def __getattr__(name: str) -> object:
    """Exports are imported when asked for: the stages import this package and need none of them."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kmq' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
