"""Every setting there is: name, default, unit, limits and reason. `Settings` below gives their types.

Order of precedence: environment, then `kmq.toml` in the working directory, then the default. An unknown `KMQ_*` or
`RB_*` name is an error, because a typo that is ignored is a broker that runs with other limits than its owner
believes. The one exception is what Kubernetes injects for a Service named kmq (`service_links`).

Flags, `--help` texts and docs/settings.md are all derived from `SETTINGS`.
"""

import os
import re
from collections.abc import Callable

from kmq.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

STAGES = ("ingress", "framer", "durability", "router")  # in the order a message passes them
SHM = "/dev/shm"  # where Linux keeps POSIX shared memory
PIPE_BUF = 4096  # bytes one FIFO write may have and still be atomic (Linux)
DRAIN_S = 10.0  # after SIGTERM a stage finishes queued work for at most this long
GRACE_S = DRAIN_S + 5.0  # and is killed then: by our supervisor, and by the kubelet (terminationGracePeriodSeconds)
OWNER_WAIT_S = 2.0  # a second instance waits this long for the first to go before it gives up

_UNITS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kb": KIB,
    "kib": KIB,
    "m": MIB,
    "mb": MIB,
    "mib": MIB,
    "g": GIB,
    "gb": GIB,
    "gib": GIB,
}
_SERVICE_LINK = re.compile(r"KMQ_(?:.*_)?(?:SERVICE_(?:HOST|PORT)(?:_.*)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_.*)?)")
_LINK_VALUE = re.compile(r"(?:tcp|udp|sctp)://")


def parse_bytes(text: str) -> int:
    """`4 MiB`, `4194304`, `4m` → bytes. Raises ValueError on anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError("expected a number of bytes, optionally with KiB, MiB or GiB")
    return int(match[1]) * _UNITS[match[2].lower()]


_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """`500ms`, `30s`, `24h`, `30d` → seconds. Raises ValueError on anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*(ms|s|m|h|d)\s*", text)
    if not match:
        raise ValueError("expected a whole number with ms, s, m, h or d, such as 30s or 24h")
    return int(match[1]) * _DURATIONS[match[2]]


def _duration(text: str) -> float:
    seconds = parse_duration(text)
    if not seconds:
        raise ValueError("must not be 0")
    return seconds


def _or(word: str, value: int | float, parse: Callable[[str], int | float]) -> Callable[[str], int | float]:
    """`parse`, or `value` where the text is `word`."""
    return lambda text: value if text.strip().lower() == word else parse(text)


def parse_fsync(text: str) -> float:
    """Seconds between two fsyncs: 0 for `always` (each group commit), infinity for `never`, else of `interval:<ms>`."""
    mode, _, millis = text.strip().partition(":")
    if mode == "interval" and millis.isdigit() and 1 <= int(millis) <= 60_000:
        return int(millis) / 1000
    if mode in ("always", "never") and not millis:
        return 0.0 if mode == "always" else float("inf")
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


class Setting:
    """One row of the table: `env` name, attribute of Settings, default as text, parser, one line of help."""

    def __init__(
        self,
        env: str,
        attribute: str,
        default: str,
        parse: Callable[[str], int | float | str],
        help: str,
        is_used: bool = True,
    ) -> None:
        self.env, self.attribute, self.default, self.parse, self.help = env, attribute, default, parse, help
        self.is_used = is_used  # else its name is kept for later: whoever sets it is told that it does nothing


_PORT = _ranged(_parse_int, 0, 65535, "")
_BYTES = _ranged(parse_bytes, 64 * KIB, 64 * GIB, " bytes")
_POLICY = _one_of("block", "drop_oldest")
_COUNT = _ranged(_parse_int, 1, 10_000_000, "")
_AGE = _or("never", float("inf"), _duration)
_LIMIT = _or("none", 0, _ranged(parse_bytes, MIB, 1 << 62, " bytes"))

SETTINGS = (
    Setting("KMQ_DATA", "data", "./data", _path, "directory of the WAL and the queue files"),
    Setting("KMQ_PIPES", "pipes", "./pipes", _path, "directory of the FIFOs, port files and owner files"),
    Setting("KMQ_INSTANCE", "instance", "kmq", _instance, "name of the shared memory in /dev/shm; one per broker"),
    Setting("KMQ_HOST", "host", "127.0.0.1", _text, "address the listeners bind to"),
    Setting("KMQ_PORT", "port", "5673", _PORT, "lines in, one message a line; 0: any free port"),
    Setting("KMQ_EGRESS_PORT", "egress_port", "5674", _PORT, "lines out (gateway); nobody listens yet", is_used=False),
    Setting("KMQ_ACK_PORT", "ack_port", "5675", _PORT, "GET_ACK <seq>: is it durable? 0: any free port"),
    Setting(
        "KMQ_STATUS_PORT",
        "status_port",
        "5676",
        _PORT,
        "GET_STATUS <seq>: is it processed? (gateway); nobody listens yet",
        is_used=False,
    ),
    Setting("KMQ_HTTP_PORT", "http_port", "8082", _PORT, "HTTP API (gateway)"),
    Setting("KMQ_GRPC_PORT", "grpc_port", "8080", _PORT, "gRPC API (gateway)"),
    Setting(
        "KMQ_METRICS_HOST", "metrics_host", "", _text, "address of a port for metrics and health alone; none without it"
    ),
    Setting("KMQ_METRICS_PORT", "metrics_port", "8083", _PORT, "that port: /metrics, /healthz, /readyz (gateway)"),
    Setting("RB_OVERFLOW_POLICY", "policy", "block", _POLICY, "full ring: block the writer, or drop_oldest"),
    Setting("RB_OVERFLOW_POLICY_FRAMED", "policy_framed", "", _POLICY, "the same for the ring `framed` only"),
    Setting("RB_OVERFLOW_POLICY_DURABLE", "policy_durable", "", _POLICY, "the same for the ring `durable` only"),
    Setting("RB_SLOTS", "ring_slots", "8192", _ranged(_parse_int, 4, 1 << 24, " messages"), "messages a ring holds"),
    Setting("RB_BYTES", "ring_bytes", "4 MiB", _BYTES, "bytes a ring holds; at least 3 x KMQ_MAX_LINE"),
    Setting(
        "KMQ_MAX_LINE",
        "max_line",
        "1 MiB",
        _ranged(parse_bytes, PIPE_BUF, 256 * MIB, " bytes"),
        "longest message; a longer one becomes dead.malformed",
    ),
    Setting("KMQ_FSYNC", "fsync", "always", parse_fsync, "when the WAL is fsynced: always, interval:<ms>, never"),
    Setting("KMQ_SEGMENT_BYTES", "segment_bytes", "1 GiB", _BYTES, "a log goes on in a new segment at this size"),
    Setting("KMQ_SEGMENT_AGE", "segment_age", "7d", _AGE, "and at this age; or never"),
    Setting(
        "KMQ_RETENTION_AGE", "retention_age", "never", _AGE, "segments are deleted at this age (topic.toml has its own)"
    ),
    Setting(
        "KMQ_RETENTION_BYTES",
        "retention_bytes",
        "none",
        _LIMIT,
        "most bytes of the WAL, and of each partition; whole segments",
    ),
    Setting(
        "KMQ_DATA_QUOTA",
        "data_quota",
        "none",
        _LIMIT,
        "most bytes under KMQ_DATA: producers are refused before it is reached",
    ),
    Setting("KMQ_DEDUPE_COUNT", "dedupe_count", "100000", _COUNT, "arbitrary message ids that are remembered"),
    Setting("KMQ_DEDUPE_AGE", "dedupe_age", "24h", _duration, "and for how long"),
    Setting(
        "KMQ_PRODUCERS",
        "producers",
        "10000",
        _COUNT,
        "producer names that are remembered; new ones are refused over it",
    ),
    Setting("KMQ_PRODUCER_TTL", "producer_ttl", "30d", _duration, "a producer idle for so long is forgotten"),
    Setting(
        "KMQ_MAX_TOPICS", "max_topics", "10000", _COUNT, "topics there may be before messages make no more of them"
    ),
    Setting(
        "KMQ_AUTO_CREATE_TOPICS",
        "auto_create_topics",
        "on",
        _one_of("on", "off"),
        "whether a message makes the topic that it names; off: only declared ones",
    ),
    Setting("KMQ_CONNECTIONS", "connections", "10000", _COUNT, "most connections of producers at a time"),
    Setting("KMQ_IDLE", "idle", "never", _AGE, "a producer's connection that sends nothing for so long is closed"),
    Setting(
        "KMQ_LINE_DEADLINE",
        "line_deadline",
        "60s",
        _AGE,
        "a line, TLS handshake, request or GET_ACK that was begun must be whole by then, and replies be read",
    ),
    Setting("KMQ_TLS_CERT", "tls_cert", "", _path, "certificate chain (PEM); with it the TLS listeners open"),
    Setting("KMQ_TLS_KEY", "tls_key", "", _path, "its private key (PEM)"),
    Setting("KMQ_TLS_CLIENT_CA", "tls_client_ca", "", _path, "with it TLS clients must show a certificate of this CA"),
    Setting("KMQ_TLS_HOST", "tls_host", "0.0.0.0", _text, "address the TLS listeners bind to"),
    Setting("KMQ_TLS_PORT", "tls_port", "5443", _PORT, "lines in over TLS; 0: any free port"),
    Setting("KMQ_HTTPS_PORT", "https_port", "8443", _PORT, "HTTP API over TLS (gateway)"),
    Setting("KMQ_GRPCS_PORT", "grpcs_port", "8444", _PORT, "gRPC API over TLS (gateway)"),
    Setting("KMQ_TOKENS", "tokens", "", _path, "file of bearer tokens, hashed; with it every listener wants one"),
    Setting("KMQ_PODBUS_TOPIC", "podbus_topic", "podbus", _topic, "where the records of gRPC Produce go (gateway)"),
)


class Settings:
    """The values in force. Read once at start; see SETTINGS for what each means."""

    data: str
    pipes: str
    instance: str
    host: str
    port: int
    egress_port: int
    ack_port: int
    status_port: int
    http_port: int
    grpc_port: int
    metrics_host: str  # "": no such port
    metrics_port: int
    policy: str
    policy_framed: str
    policy_durable: str
    ring_slots: int
    ring_bytes: int
    max_line: int
    fsync: float  # seconds between two fsyncs; 0: each group commit, infinity: never
    segment_bytes: int
    segment_age: float
    retention_age: float
    retention_bytes: int  # 0: no limit
    data_quota: int  # 0: none
    dedupe_count: int
    dedupe_age: float
    producers: int
    producer_ttl: float
    max_topics: int
    auto_create_topics: str  # on | off
    connections: int
    idle: float
    line_deadline: float
    tls_cert: str
    tls_key: str
    tls_client_ca: str
    tls_host: str
    tls_port: int
    https_port: int
    grpcs_port: int
    tokens: str
    podbus_topic: str
    texts: dict[str, str]  # each setting as it was given, by its environment name
    unused: list[str]  # settings that somebody has set and that do nothing
    ignored: list[str]  # service links of Kubernetes that were passed over

    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__.update(values)

    def environment(self) -> dict[str, str]:
        """These values as environment variables, for a child process in any working directory."""
        values = dict(self.texts)
        for row in SETTINGS:
            if row.env not in values:
                continue
            value = getattr(self, row.attribute)
            if isinstance(value, int) and value:  # `4 MiB` as a number, which a shell can calculate with
                values[row.env] = str(value)
            if row.parse is _path:
                values[row.env] = os.path.abspath(values[row.env])
        return values


def service_links(environ: dict[str, str]) -> list[str]:
    """Names that Kubernetes injected for a Service named kmq (or kmq-…), which are not settings.

    A Service port named like one of our settings must not turn an address into a setting, so the value decides too.
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
            import tomllib  # only where there is a file: the parser costs every stage a megabyte

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
    """Settings from the environment, the file and the defaults. Raises ConfigError naming setting and limit."""
    environ = dict(os.environ) if environ is None else environ
    links = service_links(environ)
    from_env = {n: v for n, v in environ.items() if n.startswith(("KMQ_", "RB_")) and n not in links}
    from_file = _from_file(toml)
    known = {row.env: row for row in SETTINGS}
    for source, names in (("environment", from_env), (toml, from_file)):
        for name in sorted(set(names) - set(known)):
            raise ConfigError(f"{source}: unknown setting {name}{_suggest(name, known)}")
    texts: dict[str, str] = {}
    unused = [row.env for row in SETTINGS if not row.is_used and (row.env in from_env or row.env in from_file)]
    values: dict[str, object] = {"ignored": links, "texts": texts, "unused": unused}
    for row in SETTINGS:
        text = from_env.get(row.env, from_file.get(row.env, row.default))
        if text == "" and row.default == "":
            values[row.attribute] = ""
            continue
        if row.is_used or row.env in unused:
            texts[row.env] = text
        try:
            values[row.attribute] = row.parse(text)
        except ValueError as err:
            raise ConfigError(f"{row.env}={text!r}: {err}") from None
    settings = Settings(values)
    if settings.ring_bytes < 3 * settings.max_line:
        raise ConfigError(
            f"RB_BYTES={settings.ring_bytes}: must be at least 3 x KMQ_MAX_LINE ({3 * settings.max_line} bytes),"
            " or the longest line would not fit beside another"
        )
    return settings


def _suggest(name: str, known: dict[str, Setting]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def table() -> str:
    """The settings as docs/settings.md shows them; a test keeps the two alike."""
    rows = [f"| `{row.env}` | {f'`{row.default}`' if row.default else ''} | {row.help} |" for row in SETTINGS]
    return "\n".join(["| name | default | what |", "|---|---|---|", *rows])
