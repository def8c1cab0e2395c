"""The options of format("kmq") for writing, checked. An error names the wrong option."""

import re
from collections.abc import Mapping
from dataclasses import replace

from kmq.errors import ConfigError
from kmq.message.ids import NAME_PATTERN
from kmq.spark.connections import TIMEOUT_S, TLS_OPTIONS, Access, duration
from kmq.spark.names import check_options
from kmq.spark.sink.targets import addresses
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import Directory, open_broker
from kmq.spark.source.options import places

_OPTIONS = (
    *("kmq.producers", "kmq.token", "kmq.producer", "kmq.timeout", "kmq.probe", *TLS_OPTIONS),
    *("topic", "usePartition", "path", "kmq.bootstrap.servers", "kmq.replay"),
)
_OF_SPARK = ("queryname", "checkpointlocation")  # Spark passes them to every sink of a stream
_TIMEOUT_S = 600.0
NAME = re.compile(NAME_PATTERN)  # a producer's name
STOP, AGAIN, TRUST = REPLAY = ("stop", "again", "trust")  # what happens to a row whose id is another row's


class WriteOptions:
    """The write options, checked; a ConfigError names the wrong option."""

    def __init__(self, given: Mapping[str, str]) -> None:
        options = {name.lower(): text for name, text in given.items()}
        check_options({name: text for name, text in options.items() if name not in _OF_SPARK}, _OPTIONS, "writer")
        self.access = Access.of(options)
        self.brokers = addresses("kmq.producers", options.get("kmq.producers", ""), self.access.tls is not None)
        if not self.brokers:
            raise ConfigError("kmq.producers: where to write to is missing: host:port of a broker's line protocol")
        self.probe = _flag("kmq.probe", options.get("kmq.probe", "true"))
        self.topic = options.get("topic", "")
        self.use_partition = _flag("usePartition", options.get("usepartition", "false"))
        self.producer = options.get("kmq.producer", "")
        if self.producer and not NAME.fullmatch(self.producer):
            raise ConfigError(f"kmq.producer={self.producer!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        self.timeout_s = duration(options, "kmq.timeout", _TIMEOUT_S)
        self.replay = options.get("kmq.replay", STOP).strip().lower()
        if self.replay not in REPLAY:
            raise ConfigError(f"kmq.replay={options['kmq.replay']!r}: must be one of {', '.join(REPLAY)}")
        self.servers, self.paths = places(options)
        if self.servers and self.paths:
            raise ConfigError(
                "give `path` (data directories) or `kmq.bootstrap.servers` (gateways) to compare with, one of them"
            )

    def check(self) -> None:
        """Raise ConfigError if a path to compare with is no data directory. Executors see the driver's paths."""
        for path in self.paths:
            Directory(path).identity()

    @property
    def has_logs(self) -> bool:
        """Return True if stored records can be read."""
        return bool(self.servers or self.paths)

    def logs(self, at: int) -> list[Broker]:
        """Return where stored records can be read; first the place listed for broker number `at`."""
        names = self.servers or self.paths
        names = names[at:] + names[:at] if len(names) == len(self.brokers) else names
        access = replace(self.access, timeout_s=TIMEOUT_S)  # kmq.timeout is for producers, not for reading
        return [open_broker(name, bool(self.paths), access) for name in names]


def _flag(name: str, text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ConfigError(f"{name}={text!r}: must be true or false")
    return text.strip().lower() == "true"
