"""Every setting there is, each declared once: name, type, default, limits and help are one line of `Settings`.

The environment wins over `kmq.toml` in the working directory, and that file wins over the default. An unknown `KMQ_*`
or `RB_*` name is an error: if a typo were ignored, the broker would run with other limits than its owner believes.
Names that Kubernetes injects for a Service named kmq are the one exception (`service_links`).

The table in docs/settings.md is made from the declarations (`table`).
"""

import os
import re
from collections.abc import Callable

from kmq.errors import ConfigError

TYPE_CHECKING = False  # stages do not import typing, because that takes longer than the rest of this module
if TYPE_CHECKING:
    from typing import TypeVar

    _T = TypeVar("_T")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

STAGES = ("ingress", "framer", "durability", "router")  # in the order a message passes them
SHM = "/dev/shm"  # where Linux keeps POSIX shared memory
PIPE_BUF = 4096  # maximum bytes of an atomic FIFO write (Linux)
DRAIN_S = 10.0  # after SIGTERM a stage finishes queued work for at most this long
GRACE_S = DRAIN_S + 5.0  # then the supervisor or the kubelet (terminationGracePeriodSeconds) kills the stage
FOREVER = float("inf")  # as an age or a time: no limit
OWNER_WAIT_S = 2.0  # a second instance waits this long for the first to end before it gives up

_UNITS = {"": 1, "b": 1}
_UNITS |= {unit + b: size for unit, size in (("k", KIB), ("m", MIB), ("g", GIB)) for b in ("", "b", "ib")}
_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SERVICE_LINK = re.compile(r"KMQ_(?:.*_)?(?:SERVICE_(?:HOST|PORT)(?:_.*)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_.*)?)")
_LINK_VALUE = re.compile(r"(?:tcp|udp|sctp)://")


# --- parsers ----------------------------------------------------------------------------------------------------------


def parse_bytes(text: str) -> int:
    """`4 MiB`, `4194304`, `4m` → bytes. Raises ValueError on anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError("expected a number of bytes, optionally with KiB, MiB or GiB")
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


def _duration(text: str) -> float:
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


def _one_of(*choices: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in choices:
            raise ValueError("must be " + " or ".join(choices))
        return text

    return check


def _instance(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError("must be 1 to 64 of A-Z a-z 0-9 _ . - and begin with a letter, digit or _")
    return text


def _topic(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", text) or text.startswith(("__", "append", "dropped")):
        raise ValueError("must be a topic name")
    return text


def _text(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must not be empty")
    return text


def _path(text: str) -> str:
    return _text(text)


_PORT = _ranged(_parse_int, 0, 65535, "")
_BYTES = _ranged(parse_bytes, 64 * KIB, 64 * GIB, " bytes")
_POLICY = _one_of("block", "drop_oldest")
_COUNT = _ranged(_parse_int, 1, 10_000_000, "")
_AGE = _or("never", FOREVER, _duration)
_LIMIT = _or("none", 0, _ranged(parse_bytes, MIB, 1 << 62, " bytes"))
_SLOTS = _ranged(_parse_int, 4, 1 << 24, " messages")
_LINE = _ranged(parse_bytes, PIPE_BUF, 256 * MIB, " bytes")


# --- declarations -----------------------------------------------------------------------------------------------------


class Setting:
    """One declaration: environment name, default as text ("": not set), parser, help and attribute of Settings."""

    attribute: str

    def __init__(self, env: str, default: str, parse: Callable[[str], int | float | str], help: str) -> None:
        self.env, self.default, self.parse, self.help = env, default, parse, help

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name


def _setting(env: str, default: str, parse: "Callable[[str], _T]", help: str) -> "_T":
    """Declare a setting. On an instance of Settings the attribute is what `parse` returns, and has its type."""
    return Setting(env, default, parse, help)  # type: ignore[arg-type, return-value]


class Settings:
    """The values in force, read once at the start of a process. Each line below declares one setting."""

    data: str = _setting("KMQ_DATA", "./data", _path, "directory of the WAL and the queue files")
    pipes: str = _setting("KMQ_PIPES", "./pipes", _path, "directory of the FIFOs, port files and owner files")
    instance: str = _setting(
        "KMQ_INSTANCE", "kmq", _instance, "name of the shared memory in /dev/shm; each broker has its own"
    )
    host: str = _setting("KMQ_HOST", "127.0.0.1", _text, "address that the plain listeners bind to")
    port: int = _setting("KMQ_PORT", "5673", _PORT, "port for lines in, one message a line; 0: any free port")
    egress_port: int = _setting(
        "KMQ_EGRESS_PORT", "5674", _PORT, "port for lines out, to consumers (gateway); 0: any free port"
    )
    ack_port: int = _setting(
        "KMQ_ACK_PORT", "5675", _PORT, "port for GET_ACK <seq>: is this record durable? 0: any free port"
    )
    status_port: int = _setting(
        "KMQ_STATUS_PORT",
        "5676",
        _PORT,
        "port for GET_STATUS <seq>: has a consumer group processed this record? (gateway); 0: any free port",
    )
    http_port: int = _setting("KMQ_HTTP_PORT", "8082", _PORT, "port of the HTTP API (gateway)")
    grpc_port: int = _setting("KMQ_GRPC_PORT", "8080", _PORT, "port of the gRPC API (gateway)")
    metrics_host: str = _setting(
        "KMQ_METRICS_HOST", "", _text, "address of a separate port for metrics and health; without it there is none"
    )
    metrics_port: int = _setting(
        "KMQ_METRICS_PORT",
        "8083",
        _PORT,
        "the separate port for /metrics, /healthz and /readyz (gateway); needs KMQ_METRICS_HOST",
    )
    policy: str = _setting(
        "RB_OVERFLOW_POLICY", "block", _POLICY, "what a full ring does: block its writer, or drop_oldest"
    )
    policy_framed: str = _setting(
        "RB_OVERFLOW_POLICY_FRAMED", "", _POLICY, "overflow policy of the ring `framed`; default: RB_OVERFLOW_POLICY"
    )
    policy_durable: str = _setting(
        "RB_OVERFLOW_POLICY_DURABLE", "", _POLICY, "overflow policy of the ring `durable`; default: RB_OVERFLOW_POLICY"
    )
    ring_slots: int = _setting("RB_SLOTS", "8192", _SLOTS, "maximum messages in a ring")
    ring_bytes: int = _setting("RB_BYTES", "4 MiB", _BYTES, "maximum bytes in a ring; at least 3 x KMQ_MAX_LINE")
    max_line: int = _setting(
        "KMQ_MAX_LINE", "1 MiB", _LINE, "maximum bytes of a message; a longer message becomes dead.malformed"
    )
    # Seconds between two fsyncs; 0: each group commit.
    fsync: float = _setting("KMQ_FSYNC", "always", parse_fsync, "when the WAL is fsynced: always, interval:<ms>, never")
    segment_bytes: int = _setting("KMQ_SEGMENT_BYTES", "1 GiB", _BYTES, "size at which a log starts a new segment")
    segment_age: float = _setting("KMQ_SEGMENT_AGE", "7d", _AGE, "age at which a log starts a new segment; or never")
    retention_age: float = _setting(
        "KMQ_RETENTION_AGE",
        "never",
        _AGE,
        "age at which a segment is deleted; a topic may have its own (kmq topics set)",
    )
    retention_bytes: int = _setting(  # 0: no limit
        "KMQ_RETENTION_BYTES",
        "none",
        _LIMIT,
        "maximum bytes of the WAL, and of each partition; the oldest whole segments are deleted beyond it",
    )
    data_quota: int = _setting(  # 0: no quota
        "KMQ_DATA_QUOTA",
        "none",
        _LIMIT,
        "maximum bytes under KMQ_DATA; producers are refused before it is reached",
    )
    dedupe_count: int = _setting(
        "KMQ_DEDUPE_COUNT", "100000", _COUNT, "maximum arbitrary message ids that are remembered for deduplication"
    )
    dedupe_age: float = _setting("KMQ_DEDUPE_AGE", "24h", _duration, "how long an arbitrary message id is remembered")
    producers: int = _setting(
        "KMQ_PRODUCERS", "10000", _COUNT, "maximum producer names that are remembered; beyond it new names are refused"
    )
    producer_ttl: float = _setting(
        "KMQ_PRODUCER_TTL", "30d", _duration, "idle time after which a producer name is forgotten"
    )
    max_topics: int = _setting(
        "KMQ_MAX_TOPICS", "10000", _COUNT, "maximum topics that messages may create; `kmq topics create` may add more"
    )
    auto_create_topics: str = _setting(
        "KMQ_AUTO_CREATE_TOPICS",
        "on",
        _one_of("on", "off"),
        "on: a message creates the topic that it names; off: only declared topics are accepted",
    )
    connections: int = _setting("KMQ_CONNECTIONS", "10000", _COUNT, "maximum simultaneous connections of producers")
    idle: float = _setting(
        "KMQ_IDLE", "never", _AGE, "idle time after which the connection of a producer is closed; or never"
    )
    line_deadline: float = _setting(
        "KMQ_LINE_DEADLINE",
        "60s",
        _AGE,
        "maximum time to complete a line, TLS handshake, request or GET_ACK, and to read replies; or never",
    )
    tls_cert: str = _setting(
        "KMQ_TLS_CERT", "", _path, "file of the certificate chain (PEM); with it the TLS listeners open"
    )
    tls_key: str = _setting("KMQ_TLS_KEY", "", _path, "file of the private key of KMQ_TLS_CERT (PEM)")
    tls_client_ca: str = _setting(
        "KMQ_TLS_CLIENT_CA",
        "",
        _path,
        "file of a certificate authority (PEM); with it TLS clients must show a certificate that it signed",
    )
    tls_host: str = _setting("KMQ_TLS_HOST", "0.0.0.0", _text, "address that the TLS listeners bind to")
    tls_port: int = _setting("KMQ_TLS_PORT", "5443", _PORT, "port for lines in over TLS; 0: any free port")
    egress_tls_port: int = _setting(
        "KMQ_EGRESS_TLS_PORT", "5444", _PORT, "port for lines out over TLS (gateway); 0: any free port"
    )
    https_port: int = _setting("KMQ_HTTPS_PORT", "8443", _PORT, "port of the HTTP API over TLS (gateway)")
    grpcs_port: int = _setting("KMQ_GRPCS_PORT", "8444", _PORT, "port of the gRPC API over TLS (gateway)")
    tokens: str = _setting(
        "KMQ_TOKENS", "", _path, "file of hashed bearer tokens; with it every listener requires a token"
    )
    podbus_topic: str = _setting(
        "KMQ_PODBUS_TOPIC", "podbus", _topic, "topic of the records that arrive over gRPC Produce (gateway)"
    )
    group_retention: float = _setting(
        "KMQ_GROUP_RETENTION",
        "7d",
        _AGE,
        "time after which a consumer group without members and commits is forgotten; or never",
    )
    compact: str = _setting(
        "KMQ_COMPACT",
        "on",
        _one_of("on", "off"),
        "on: topics with cleanup=compact are compacted in the background (gateway); off: by kmq pipeline run compact",
    )
    compact_rate: int = _setting(  # 0: no limit
        "KMQ_COMPACT_RATE",
        "32 MiB",
        _LIMIT,
        "maximum bytes that the compaction in the background reads and writes in a second; or none",
    )
    cluster: str = _setting(
        "KMQ_CLUSTER", "", _instance, "name of the cluster that this broker belongs to; without it: none"
    )
    broker: str = _setting("KMQ_BROKER", "", _instance, "name of this broker in its cluster; default: the host name")
    consul: str = _setting(
        "KMQ_CONSUL", "", _text, "addresses of Consul, with commas: host:port or URLs; best an agent of the same node"
    )
    consul_token: str = _setting("KMQ_CONSUL_TOKEN", "", _text, "ACL token for Consul")
    consul_ca: str = _setting("KMQ_CONSUL_CA", "", _path, "file of the certificate authority (PEM) of Consul's HTTPS")
    session_ttl: float = _setting(
        "KMQ_SESSION_TTL", "2s", _duration, "time after which a process that Consul hears nothing of is taken for dead"
    )

    texts: dict[str, str]  # each setting as it was given, by its environment name
    given: set[str]  # attributes of the settings that were given, and do not just have their default
    ignored: list[str]  # names that Kubernetes injected (service_links)

    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__.update(values)

    def environment(self) -> dict[str, str]:
        """Return these values as environment variables, for a child process in any working directory."""
        values = dict(self.texts)
        for row in SETTINGS:
            if row.env not in values:
                continue
            value = getattr(self, row.attribute)
            if isinstance(value, int) and value:  # `4 MiB` as a number, which a shell can calculate with
                values[row.env] = str(value)
            if row.parse is _path:
                values[row.env] = os.path.abspath(values[row.env])
        if self.cluster:
            values |= {row.env: "" for name, row in SHARED.items() if name not in self.given}
        return values

    @property
    def in_cluster(self) -> bool:
        """Return True if this broker subscribes to a Broadcast Queue."""
        return bool(self.cluster and self.consul)

    def with_shared(self, texts: dict[str, str]) -> "Settings":
        """Return these settings, with those of SHARED replaced that were not given here. `texts`: by attribute."""
        told = {name: SHARED[name].parse(text) for name, text in texts.items() if name not in self.given}
        return Settings(self.__dict__ | told) if told else self


SETTINGS = tuple(row for row in vars(Settings).values() if isinstance(row, Setting))
# What a fleet may set for all its brokers (states.py). "" as the text of one means that this broker was not given it:
# so the processes of a supervisor know as much as it does.
SHARED = {row.attribute: row for row in SETTINGS if row.attribute in ("retention_age", "retention_bytes", "data_quota")}


# --- reading ----------------------------------------------------------------------------------------------------------


def service_links(environ: dict[str, str]) -> list[str]:
    """Return the names that Kubernetes injected for a Service named kmq (or kmq-…). They are not settings.

    The value counts too: a port of that Service may be named like a setting of ours, but its value is then an address.
    """
    known = {row.env for row in SETTINGS}
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith("KMQ_")
        and (_LINK_VALUE.match(value) or (name not in known and _SERVICE_LINK.fullmatch(name)))
    )


def _from_file(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            import tomllib  # only if there is a file: the parser costs a megabyte in every stage

            table = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(f"{path}: {err}") from err
    for name, value in table.items():
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise ConfigError(f"{path}: {name} must be a string or a whole number")
    return {name: str(value) for name, value in table.items()}


def load(environ: dict[str, str] | None = None, toml: str = "kmq.toml") -> Settings:
    """Return the settings from environment, file and defaults. Raises ConfigError that names setting and limit."""
    environ = dict(os.environ) if environ is None else environ
    links = service_links(environ)
    from_env = {n: v for n, v in environ.items() if n.startswith(("KMQ_", "RB_")) and n not in links}
    from_file = _from_file(toml)
    known = {row.env: row for row in SETTINGS}
    for source, names in (("environment", from_env), (toml, from_file)):
        for name in sorted(set(names) - set(known)):
            raise ConfigError(f"{source}: unknown setting {name}{_suggest(name, known)}")
    texts: dict[str, str] = {}
    given: set[str] = set()
    values: dict[str, object] = {"ignored": links, "texts": texts, "given": given}
    for row in SETTINGS:
        text = from_env.get(row.env, from_file.get(row.env, row.default))
        if text == "" and row.attribute in SHARED:
            text = row.default
        elif row.env in from_env or row.env in from_file:
            given.add(row.attribute)
        if text == "" and row.default == "":
            values[row.attribute] = ""
            continue
        texts[row.env] = text
        try:
            values[row.attribute] = row.parse(text)
        except ValueError as err:
            raise ConfigError(f"{row.env}={text!r}: {err}") from None
    settings = Settings(values)
    if settings.ring_bytes < 3 * settings.max_line:
        raise ConfigError(
            f"RB_BYTES={settings.ring_bytes}: must be at least 3 x KMQ_MAX_LINE ({3 * settings.max_line} bytes),"
            " so that the longest line fits beside another"
        )
    return settings


def _suggest(name: str, known: dict[str, Setting]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def table() -> str:
    """Return the table in docs/settings.md; a test compares the two."""
    rows = [f"| `{row.env}` | {f'`{row.default}`' if row.default else ''} | {row.help} |" for row in SETTINGS]
    return "\n".join(["| name | default | meaning |", "|---|---|---|", *rows])
