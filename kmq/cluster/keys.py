"""The keys of a cluster in Consul, and the text that most of their values are."""

import re

from kmq.cluster.consul import ConsulError
from kmq.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # of a cluster, of a broker
_EPOCH = re.compile(r"[0-9]{1,18}")  # 64 bits hold it
STATES = ("shards/", "topics/", "tokens/", "settings/")  # what a message leads to, and a snapshot holds


class Keys:
    """Every key is under `kmq/<cluster>/`."""

    def __init__(self, cluster: str) -> None:
        if not NAME.fullmatch(cluster):
            raise ConfigError(f"KMQ_CLUSTER={cluster!r}: must match {NAME.pattern}")
        self.root = f"kmq/{cluster}/"
        self.coordinator = self.root + "coordinator"  # the lock of the one publisher
        self.epoch = self.root + "epoch"  # of the last message
        self.messages = self.root + "bq/"  # with the slash: the other keys begin with bq- and are no messages
        self.delivered = self.root + "bq-delivered/"
        self.subscribers = self.root + "bq-subscriber/"
        self.brokers = self.root + "brokers/"
        self.results = self.root + "results/"

    def message(self, epoch: int) -> str:
        return f"{self.messages}{epoch}"

    def epoch_of(self, key: str) -> int | None:
        """Return which message a key under `messages` holds; None if it is no key of KMQ's."""
        number = key.removeprefix(self.messages)
        return int(number) if _EPOCH.fullmatch(number) else None

    def decode_epoch(self, value: bytes) -> int:
        """Return what the key `epoch` holds. Raises ConsulError if KMQ has not written it."""
        text = value.decode(errors="replace")
        if not _EPOCH.fullmatch(text):
            raise ConsulError(f"key {self.epoch}: {text[:40]!r} is no epoch; KMQ did not write it")
        return int(text)

    def delivered_to(self, broker: str) -> str:
        """Return the key of the last message that this broker has processed."""
        return self.delivered + broker

    def subscriber(self, broker: str) -> str:
        """Return the key that the one subscriber of this broker has locked."""
        return self.subscribers + broker


def check_broker(name: str) -> str:
    """Return the name of a broker. Raises ConfigError if it is none."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"KMQ_BROKER={name!r}: must match {NAME.pattern}")
    return name


_FIELD = re.compile(r"([a-z_]+)=(\S*)")


def encode_fields(**fields: object) -> bytes:
    """Return `a=1 b=2`. Values must not hold white space; an empty one is left out."""
    return " ".join(f"{name}={value}" for name, value in fields.items() if value != "").encode()


def decode_fields(text: bytes) -> dict[str, str]:
    """Return the fields of such a text; what is none is passed over."""
    return dict(_FIELD.findall(text.decode(errors="replace")))
