"""Parsers for the texts of settings, one for each kind of value. Each raises ValueError that says what it expects."""

import re
from collections.abc import Callable

TYPE_CHECKING = False  # stages do not import typing, because that takes longer than the rest of this module
if TYPE_CHECKING:
    from typing import TypeVar

    _T = TypeVar("_T")

PIPE_BUF = 4096  # maximum bytes of an atomic FIFO write (Linux)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FOREVER = float("inf")  # as an age or a time: no limit

_UNITS = {"": 1, "b": 1}
_UNITS |= {unit + b: size for unit, size in (("k", KIB), ("m", MIB), ("g", GIB)) for b in ("", "b", "ib")}
_BITS = ("Kb", "Mb", "Gb")
_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """`4 MiB`, `4194304`, `4m` → bytes. Raises ValueError on anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError("expected a number of bytes, optionally with KiB, MiB or GiB")
    if match[2] in _BITS:
        raise ValueError(f"{match[2]} are bits; write {match[2][0]}iB for bytes")
    return _bounded(int(match[1]) * _UNITS[match[2].lower()])


def parse_duration(text: str) -> float:
    """`500ms`, `30s`, `24h`, `30d` → seconds. Raises ValueError on anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*(ms|s|m|h|d)\s*", text)
    if not match:
        raise ValueError("expected a whole number with ms, s, m, h or d, such as 30s or 24h")
    return _bounded(int(match[1])) * _DURATIONS[match[2]]


def _bounded(number: int) -> int:
    if number >= 1 << 63:
        raise ValueError("is too large")
    return number


def duration(text: str) -> float:
    seconds = parse_duration(text)
    if not seconds:
        raise ValueError("must not be 0")
    return seconds


def _or(word: str, value: "_T", parse: "Callable[[str], _T]") -> "Callable[[str], _T]":
    """Return `parse` with one more text, `word`, that means `value`."""
    return lambda text: value if text.strip().lower() == word else parse(text)


def parse_fsync(text: str) -> float:
    """Return the seconds between two fsyncs: 0 for `always` (each group commit), FOREVER for `never`."""
    mode, _, millis = text.strip().partition(":")
    if mode == "interval" and millis.isdigit() and 1 <= int(millis) <= 60_000:
        return int(millis) / 1000
    if mode in ("always", "never") and not millis:
        return 0.0 if mode == "always" else FOREVER
    raise ValueError("must be always, never or interval:<ms> with 1 to 60000 ms")


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text):
        raise ValueError("expected a whole number")
    return int(text)


def _ranged(parse: Callable[[str], int], low: int, high: int, unit: str) -> Callable[[str], int]:
    def check(text: str) -> int:
        value = parse(text)
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}{unit}")
        return value

    return check


def one_of(*choices: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in choices:
            raise ValueError("must be " + " or ".join(choices))
        return text

    return check


def instance(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError("must be 1 to 64 of A-Z a-z 0-9 _ . - and begin with a letter, digit or _")
    return text


def topic(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", text) or text.startswith(("__", "append", "dropped")):
        raise ValueError("must be a topic name")
    return text


def non_empty(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must not be empty")
    return text


def path(text: str) -> str:
    return non_empty(text)


def addresses(text: str) -> str:  # may have a password in a URL
    return non_empty(text)


def advertised(text: str) -> dict[bool, tuple[str, int]]:
    """Return the addresses that Kafka's clients are told: {is it for TLS: (host, port)}."""
    found: dict[bool, tuple[str, int]] = {}
    for word in text.split(","):
        is_tls = word.strip().startswith("tls=")
        host, _, port = word.strip().removeprefix("tls=").rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535 or is_tls in found:
            raise ValueError("must be <host>:<port>[,tls=<host>:<port>]")
        found[is_tls] = host.strip("[]"), int(port)
    return found


_LOGIN = re.compile(r"[^:]+://[^@/]*:.*@.*")  # a secret key may have a slash


def store_url(text: str) -> str:
    if _LOGIN.fullmatch(text):
        raise ValueError("must have no login: credentials are those of the environment (AWS_…, files, roles)")
    if not re.fullmatch(r"file:///[^/\0].*|[a-z][a-z0-9]*://[^/\s]+.*", text) or text.startswith(
        "file://"
    ) != text.startswith("file:///"):
        raise ValueError("must be file:// with an absolute path, or s3://<bucket>/<prefix>")
    return text.rstrip("/")


def secret(text: str) -> str:  # no command ever shows it
    return non_empty(text)


PORT = _ranged(_parse_int, 0, 65535, "")
BYTES = _ranged(parse_bytes, 64 * KIB, 64 * GIB, " bytes")
POLICY = one_of("block", "drop_oldest")
COUNT = _ranged(_parse_int, 1, 10_000_000, "")
AGE = _or("never", FOREVER, duration)
EVERY: "Callable[[str], float | None]" = _or("off", None, duration)
LIMIT = _or("none", 0, _ranged(parse_bytes, MIB, 1 << 62, " bytes"))
SLOTS = _ranged(_parse_int, 4, 1 << 24, " messages")
CACHE = _ranged(parse_bytes, MIB, 1 << 62, " bytes")
OBJECT = _ranged(parse_bytes, MIB, 512 * MIB, " bytes")
LINE = _ranged(parse_bytes, PIPE_BUF, 256 * MIB, " bytes")
