"""The options of a topic as typed clients name them, and the limits of topic.toml behind them.

A number of -1 is no limit; None takes the topic's own limit away, so that the setting applies again. The names are
those of HTTP; the Kafka protocol writes retention.ms for retentionMs.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kmq.config.values import FOREVER
from kmq.errors import ConfigError
from kmq.gateway.core.refused import bad_field
from kmq.log.segment import Limits

UNLIMITED = -1
Value = int | str | None


class Option(NamedTuple):
    """`limit`: its name in topic.toml. `text`: value → text there. `value`: what Limits holds → value for a client."""

    limit: str
    text: Callable[[Value], str]
    value: Callable[[float | str], int | str]


def _age_text(milliseconds: Value) -> str:
    return "never" if milliseconds == UNLIMITED else f"{milliseconds}ms"


def _age(seconds: float | str) -> int:
    return UNLIMITED if seconds == FOREVER else round(float(seconds) * 1000)


def _count_text(count: Value) -> str:
    return "none" if count == UNLIMITED else str(count)


def _count(count: float | str) -> int:
    return int(count) or UNLIMITED


OPTIONS = {
    "retentionMs": Option("retention_age", _age_text, _age),
    "retentionBytes": Option("retention_bytes", _count_text, _count),
    "segmentMs": Option("segment_age", _age_text, _age),
    "segmentBytes": Option("segment_bytes", str, int),
    "cleanupPolicy": Option("cleanup", str, str),
    "deleteRetentionMs": Option("delete_retention", _age_text, _age),
    "maxDeliveries": Option("max_deliveries", _count_text, _count),
}


def limits_of(options: Mapping[str, Value]) -> dict[str, str]:
    """Return the texts of these options as limits of topic.toml; "" is none of its own. Raises RequestRefused."""
    limits = {}
    for name, value in options.items():
        option = OPTIONS[name]
        limits[option.limit] = "" if value is None else option.text(value)
        try:
            Limits().with_changes({option.limit: limits[option.limit]} if value is not None else {})
        except ConfigError as err:
            raise bad_field(name, str(err).partition(": ")[2]) from None
    return limits


def values_of(limits: Limits) -> dict[str, int | str]:
    """Return every option as it is in force."""
    return {name: option.value(getattr(limits, option.limit)) for name, option in OPTIONS.items()}
