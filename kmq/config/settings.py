"""Every setting there is, each declared once: name, type, default, limits and help are one line of `Settings`.

The environment wins over `kmq.toml` in the working directory, and that file wins over the default. An unknown `KMQ_*`
or `RB_*` name is an error: if a typo were ignored, the broker would run with other limits than its operator expects.
Names that Kubernetes injects for a Service named kmq are the one exception (`service_links`).

The table in docs/settings.md is made from the declarations (`table`).
"""

import os
import re
from collections.abc import Callable

from kmq.config import intakes as intakes_of
from kmq.config import values as kind
from kmq.config.intakes import TLS, UDP
from kmq.errors import ConfigError, quotation

TYPE_CHECKING = False  # stages do not import typing, because that takes longer than the rest of this module
if TYPE_CHECKING:
    from typing import TypeVar

    from kmq.config.intakes import IntakePort, Network

    _T = TypeVar("_T")

STAGES = ("ingress", "framer", "durability", "router")  # in the order a message passes them
_KAFKA_PORT = 9092
SHM = "/dev/shm"  # where Linux keeps POSIX shared memory
DRAIN_S = 10.0  # after SIGTERM a stage finishes queued work for at most this long
GRACE_S = DRAIN_S + 5.0  # then the supervisor or the kubelet (terminationGracePeriodSeconds) kills the stage
OWNER_WAIT_S = 2.0  # a second instance waits this long for the first to end before it gives up

_SERVICE_LINK = re.compile(r"KMQ_(?:.*_)?(?:SERVICE_(?:HOST|PORT)(?:_.*)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_.*)?)")
_LINK_VALUE = re.compile(r"(?:tcp|udp|sctp)://")


# --- declarations -----------------------------------------------------------------------------------------------------


class Setting:
    """One declaration: environment name, default as text ("": not set), parser, help and attribute of Settings."""

    attribute: str

    def __init__(self, env: str, default: str, parse: Callable[[str], object], help: str) -> None:
        self.env, self.default, self.parse, self.help = env, default, parse, help

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name


def _setting(env: str, default: str, parse: "Callable[[str], _T]", help: str) -> "_T":
    """Declare a setting. On an instance of Settings the attribute is what `parse` returns, and has its type."""
    return Setting(env, default, parse, help)  # type: ignore[return-value]


class Settings:
    """The values in force, read once at the start of a process. Each line below declares one setting."""

    data: str = _setting("KMQ_DATA", "./data", kind.path, "directory of the WAL and the queue files")
    pipes: str = _setting("KMQ_PIPES", "./pipes", kind.path, "directory of the FIFOs, port files and owner files")
    instance: str = _setting(
        "KMQ_INSTANCE", "kmq", kind.instance, "name of the shared memory in /dev/shm; each broker has its own"
    )
    host: str = _setting("KMQ_HOST", "127.0.0.1", kind.non_empty, "address that the plain listeners bind to")
    port: int = _setting("KMQ_PORT", "5673", kind.PORT, "port for lines in, one message a line; 0: any free port")
    egress_port: int = _setting(
        "KMQ_EGRESS_PORT", "5674", kind.PORT, "port for lines out, to consumers (gateway); 0: any free port"
    )
    ack_port: int = _setting(
        "KMQ_ACK_PORT", "5675", kind.PORT, "port for GET_ACK <seq>: is this record durable? 0: any free port"
    )
    status_port: int = _setting(
        "KMQ_STATUS_PORT",
        "5676",
        kind.PORT,
        "port for GET_STATUS <seq>: has a consumer group processed this record? (gateway); 0: any free port",
    )
    http_port: int = _setting("KMQ_HTTP_PORT", "8082", kind.PORT, "port of the HTTP API (gateway)")
    grpc_port: int = _setting("KMQ_GRPC_PORT", "8080", kind.PORT, "port of the gRPC API (gateway)")
    kafka_port: int = _setting(
        "KMQ_KAFKA_PORT",
        "",
        kind.PORT,
        "port for Kafka's clients (gateway); 0: any free port; default: 9092 where kmq[kafka] is installed, else none",
    )
    metrics_host: str = _setting(
        "KMQ_METRICS_HOST",
        "",
        kind.non_empty,
        "address of a separate port for metrics and health; without it there is none, in a shard 127.0.0.1",
    )
    metrics_port: int = _setting(
        "KMQ_METRICS_PORT",
        "8083",
        kind.PORT,
        "the separate port for /metrics, /healthz, /readyz and /v1/cluster (gateway); needs KMQ_METRICS_HOST, or KMQ_SHARD",
    )
    metrics_topics: int = _setting(
        "KMQ_METRICS_TOPICS", "20", kind.COUNT, "maximum topics that the metrics name, those with the most messages"
    )
    policy: str = _setting(
        "RB_OVERFLOW_POLICY", "block", kind.POLICY, "what a full ring does: block its writer, or drop_oldest"
    )
    policy_framed: str = _setting(
        "RB_OVERFLOW_POLICY_FRAMED",
        "",
        kind.POLICY,
        "overflow policy of the ring `framed`; default: RB_OVERFLOW_POLICY",
    )
    policy_durable: str = _setting(
        "RB_OVERFLOW_POLICY_DURABLE",
        "",
        kind.POLICY,
        "overflow policy of the ring `durable`; default: RB_OVERFLOW_POLICY",
    )
    ring_slots: int = _setting("RB_SLOTS", "8192", kind.SLOTS, "maximum messages in a ring")
    ring_bytes: int = _setting("RB_BYTES", "4 MiB", kind.BYTES, "maximum bytes in a ring; at least 3 x KMQ_MAX_LINE")
    max_line: int = _setting(
        "KMQ_MAX_LINE", "1 MiB", kind.LINE, "maximum bytes of a message; a longer message becomes dead.malformed"
    )
    # Seconds between two fsyncs; 0: each group commit.
    fsync: float = _setting(
        "KMQ_FSYNC", "always", kind.parse_fsync, "when the WAL is fsynced: always, interval:<ms>, never"
    )
    segment_bytes: int = _setting("KMQ_SEGMENT_BYTES", "1 GiB", kind.BYTES, "size at which a log starts a new segment")
    segment_age: float = _setting(
        "KMQ_SEGMENT_AGE", "7d", kind.AGE, "age at which a log starts a new segment; or never"
    )
    retention_age: float = _setting(
        "KMQ_RETENTION_AGE",
        "never",
        kind.AGE,
        "age at which a segment is deleted; a topic may have its own (kmq topics set)",
    )
    retention_bytes: int = _setting(  # 0: no limit
        "KMQ_RETENTION_BYTES",
        "none",
        kind.LIMIT,
        "maximum bytes of the WAL, and of each partition; the oldest whole segments are deleted beyond it",
    )
    data_quota: int = _setting(  # 0: no quota
        "KMQ_DATA_QUOTA", "none", kind.LIMIT, "maximum bytes under KMQ_DATA; producers are refused before it is reached"
    )
    dedupe_count: int = _setting(
        "KMQ_DEDUPE_COUNT", "100000", kind.COUNT, "maximum arbitrary message ids that are remembered for deduplication"
    )
    dedupe_age: float = _setting(
        "KMQ_DEDUPE_AGE", "24h", kind.duration, "how long an arbitrary message id is remembered"
    )
    producers: int = _setting(
        "KMQ_PRODUCERS",
        "10000",
        kind.COUNT,
        "maximum producer names that are remembered; beyond it new names are refused",
    )
    kafka_producers: int = _setting(
        "KMQ_KAFKA_PRODUCERS",
        "20000",
        kind.COUNT,
        "the same for the producers of Kafka clients; those idle for an hour make room",
    )
    producer_ttl: float = _setting(
        "KMQ_PRODUCER_TTL", "30d", kind.duration, "idle time after which a producer name is forgotten"
    )
    max_topics: int = _setting(
        "KMQ_MAX_TOPICS",
        "10000",
        kind.COUNT,
        "maximum topics that messages may create; `kmq topics create` may add more",
    )
    auto_create_topics: str = _setting(
        "KMQ_AUTO_CREATE_TOPICS",
        "on",
        kind.one_of("on", "off"),
        "on: a message creates the topic that it names; off: only declared topics are accepted",
    )
    connections: int = _setting("KMQ_CONNECTIONS", "10000", kind.COUNT, "maximum simultaneous connections of producers")
    idle: float = _setting(
        "KMQ_IDLE", "never", kind.AGE, "idle time after which the connection of a producer is closed; or never"
    )
    line_deadline: float = _setting(
        "KMQ_LINE_DEADLINE",
        "60s",
        kind.AGE,
        "maximum time to complete a line, TLS handshake, request or GET_ACK, and to read replies; or never",
    )
    tls_cert: str = _setting(
        "KMQ_TLS_CERT", "", kind.path, "file of the certificate chain (PEM); with it the TLS listeners open"
    )
    tls_key: str = _setting("KMQ_TLS_KEY", "", kind.path, "file of the private key of KMQ_TLS_CERT (PEM)")
    tls_client_ca: str = _setting(
        "KMQ_TLS_CLIENT_CA",
        "",
        kind.path,
        "file of a certificate authority (PEM); with it TLS clients must show a certificate that it signed",
    )
    intakes: "tuple[IntakePort, ...]" = _setting(
        "KMQ_INTAKES",
        "",
        intakes_of.parse_intakes,
        "ports to which each raw line is a message of one topic: 5140=app 5141=audit:json 5142/udp=net 6514/tls=audit; 0: any"
        " free port",
    )
    intakes_from: "tuple[Network, ...]" = _setting(
        "KMQ_INTAKES_FROM",
        "",
        intakes_of.parse_sources,
        "addresses and networks that may send to KMQ_INTAKES; needed with KMQ_TOKENS where no client certificate is",
    )
    tls_host: str = _setting("KMQ_TLS_HOST", "0.0.0.0", kind.non_empty, "address that the TLS listeners bind to")
    tls_port: int = _setting("KMQ_TLS_PORT", "5443", kind.PORT, "port for lines in over TLS; 0: any free port")
    egress_tls_port: int = _setting(
        "KMQ_EGRESS_TLS_PORT", "5444", kind.PORT, "port for lines out over TLS (gateway); 0: any free port"
    )
    https_port: int = _setting("KMQ_HTTPS_PORT", "8443", kind.PORT, "port of the HTTP API over TLS (gateway)")
    grpcs_port: int = _setting("KMQ_GRPCS_PORT", "8444", kind.PORT, "port of the gRPC API over TLS (gateway)")
    kafka_tls_port: int = _setting(
        "KMQ_KAFKA_TLS_PORT", "9093", kind.PORT, "port for Kafka's clients over TLS (gateway); 0: any free port"
    )
    kafka_advertise: "dict[bool, tuple[str, int]]" = _setting(
        "KMQ_KAFKA_ADVERTISE",
        "",
        kind.advertised,
        "where Kafka's clients find this broker: <host>:<port>[,tls=<host>:<port>]; default: where they have reached it",
    )
    kafka_partitions: int = _setting(
        "KMQ_KAFKA_PARTITIONS", "1", kind.COUNT, "partitions of a topic that a Kafka client makes by naming it"
    )
    kafka_cache: int = _setting(
        "KMQ_KAFKA_CACHE", "32 MiB", kind.BYTES, "maximum bytes of produced batches that are kept for Kafka's consumers"
    )
    kafka_txn_bytes: int = _setting(
        "KMQ_KAFKA_TXN_BYTES", "1 GiB", kind.BYTES, "maximum bytes of a transaction of a Kafka client"
    )
    tokens: str = _setting(
        "KMQ_TOKENS", "", kind.path, "file of hashed bearer tokens; with it every listener requires a token"
    )
    console: str = _setting(
        "KMQ_CONSOLE",
        "loopback",
        kind.one_of("loopback", "on", "write", "off"),
        "the console where KMQ_TOKENS is not set: loopback: shown to this machine; on: to everybody; write: to this machine,"
        " which may also replay and reset; off: no console, with and without tokens (gateway)",
    )
    console_hosts: str = _setting(
        "KMQ_CONSOLE_HOSTS",
        "",
        kind.non_empty,
        "names, with commas, under which browsers may reach the gateway besides localhost and addresses",
    )
    log_format: str = _setting(
        "KMQ_LOG_FORMAT", "logfmt", kind.one_of("logfmt", "json"), "how log lines are written: logfmt or json"
    )
    log_level: str = _setting(
        "KMQ_LOG_LEVEL", "info", kind.one_of("info", "warn", "error"), "the least level of log lines that are written"
    )
    log_bytes: int = _setting(
        "KMQ_LOG_BYTES", "32 MiB", kind.BYTES, "size at which KMQ_PIPES/kmq.log is renamed to kmq.log.1 and begun anew"
    )
    log_files: int = _setting("KMQ_LOG_FILES", "3", kind.COUNT, "how many kmq.log.<n> are kept")
    podbus_topic: str = _setting(
        "KMQ_PODBUS_TOPIC", "podbus", kind.topic, "topic of the records that arrive over gRPC Produce (gateway)"
    )
    group_retention: float = _setting(
        "KMQ_GROUP_RETENTION",
        "7d",
        kind.AGE,
        "time after which a consumer group without members and commits is forgotten; or never",
    )
    group_stalled: float = _setting(
        "KMQ_GROUP_STALLED",
        "5m",
        kind.AGE,
        "time after which a consumer group that commits nothing while messages wait for it is a warning; or never",
    )
    compact: str = _setting(
        "KMQ_COMPACT",
        "on",
        kind.one_of("on", "off"),
        "on: topics with cleanup=compact are compacted in the background (gateway); off: only by kmq fleet run compact",
    )
    compact_rate: int = _setting(  # 0: no limit
        "KMQ_COMPACT_RATE",
        "32 MiB",
        kind.LIMIT,
        "maximum bytes that the compaction in the background reads and writes in a second; or none",
    )
    cluster: str = _setting(
        "KMQ_CLUSTER", "", kind.instance, "name of the fleet that this broker belongs to; without it: none"
    )
    broker: str = _setting(
        "KMQ_BROKER", "", kind.instance, "name of this broker in its cluster; default: the host name"
    )
    consul: str = _setting(
        "KMQ_CONSUL",
        "",
        kind.addresses,
        "addresses of Consul, with commas: host:port or URLs; best an agent of the same node",
    )
    consul_token: str = _setting("KMQ_CONSUL_TOKEN", "", kind.secret, "ACL token for Consul")
    consul_ca: str = _setting(
        "KMQ_CONSUL_CA", "", kind.path, "file of the certificate authority (PEM) of Consul's HTTPS"
    )
    session_ttl: float = _setting(
        "KMQ_SESSION_TTL",
        "2s",
        kind.duration,
        "time after which a process that Consul hears nothing of is taken for dead",
    )
    shard: str = _setting(
        "KMQ_SHARD", "", kind.instance, "name of the shard, within KMQ_CLUSTER, of which this broker is a replica"
    )
    replica_lag: float = _setting(
        "KMQ_REPLICA_LAG",
        "5s",
        kind.duration,
        "time after which the leader of a shard goes on without a replica that is away",
    )
    replica_secret: str = _setting(
        "KMQ_REPLICA_SECRET",
        "",
        kind.path,
        "file of the secret by which the brokers of a shard know each other: the same for all, at least 16 bytes",
    )
    replica_port: int = _setting(
        "KMQ_REPLICA_PORT",
        "5677",
        kind.PORT,
        "port for the other brokers of the shard, over TLS with KMQ_TLS_CERT; 0: any free port",
    )
    advertise: str = _setting(
        "KMQ_ADVERTISE",
        "",
        kind.non_empty,
        "host by which the other brokers of the shard reach this one; default: KMQ_HOST (with TLS KMQ_TLS_HOST), and the"
        " host name where that is 0.0.0.0, as in a pod",
    )

    tier: str = _setting(
        "KMQ_TIER",
        "",
        kind.store_url,
        "where a copy of the WAL is kept off this machine: s3://<bucket>/<prefix>, or file:///<directory>; without it: none",
    )
    tier_every: float | None = _setting(
        "KMQ_TIER_EVERY",
        "60s",
        kind.EVERY,
        "time after which new records are copied to KMQ_TIER; off: no copy of the WAL",
    )
    tier_object: int = _setting(
        "KMQ_TIER_OBJECT", "64 MiB", kind.OBJECT, "maximum bytes of lines in an object of KMQ_TIER"
    )
    tier_rate: int = _setting(  # 0: no limit
        "KMQ_TIER_RATE",
        "none",
        kind.LIMIT,
        "maximum bytes of topics, tables and small files that are copied to KMQ_TIER in a second; the WAL never waits",
    )
    tier_cache: int = _setting(
        "KMQ_TIER_CACHE",
        "1 GiB",
        kind.CACHE,
        "disk for old records that are fetched in from KMQ_TIER; 4 x KMQ_TIER_OBJECT if that is more",
    )
    tier_topics: str = _setting(
        "KMQ_TIER_TOPICS",
        "off",
        kind.one_of("off", "on"),
        "on: old records of topics go to KMQ_TIER, except where a topic says tier=off",
    )

    texts: dict[str, str]  # each setting as it was given, by its environment name
    given: set[str]  # attributes of the settings that were given: they do not just have their default
    ignored: list[str]  # names that Kubernetes injected (service_links)
    retired: list[str]  # names of RETIRED in the environment

    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__.update(values)

    def environment(self) -> dict[str, str]:
        """Return these values as environment variables, for a child process in any working directory."""
        values = dict(self.texts)
        for row in SETTINGS:
            if row.env not in values:
                continue
            value = getattr(self, row.attribute)
            if isinstance(value, int) and value:  # `4 MiB` as a number, so that a shell can calculate with it
                values[row.env] = str(value)
            if row.parse is kind.path:
                values[row.env] = os.path.abspath(values[row.env])
        if self.cluster:
            values |= {row.env: "" for name, row in SHARED.items() if name not in self.given}
        return values

    @property
    def in_cluster(self) -> bool:
        """Return True if this broker subscribes to a Broadcast Queue."""
        return bool(self.cluster and self.consul)

    @staticmethod
    def has_kafka() -> bool:
        """Return True if the extra kmq[kafka] is installed: then the gateway has a port for Kafka's clients."""
        from importlib.util import find_spec  # stages do not ask

        return find_spec("kio") is not None

    @property
    def kafka_number(self) -> int:
        """Return the number of the port for Kafka's clients, if that extra is installed."""
        return self.kafka_port if "kafka_port" in self.given else _KAFKA_PORT

    @property
    def own_host(self) -> str:
        """Return the address of the port for metrics and health; "": no port. A broker of a shard always has it.

        Its other ports lead to the leader while it follows.
        """
        return self.metrics_host or ("127.0.0.1" if self.shard else "")

    def with_shared(self, texts: dict[str, str]) -> "Settings":
        """Return these settings with `texts` (by attribute) in place of those of SHARED that were not given here."""
        values = {name: SHARED[name].parse(text) for name, text in texts.items() if name not in self.given}
        return Settings(self.__dict__ | values) if values else self


SETTINGS = tuple(row for row in vars(Settings).values() if isinstance(row, Setting))
# Parsers whose texts may hold a secret (kmq/cli/config.py); a value of any other parser cannot.
KINDS: dict[object, str] = {
    kind.path: "path",
    kind.non_empty: "text",
    kind.addresses: "addresses",
    kind.secret: "secret",
}
RETIRED = ("SLEEP_SHORT",)  # of an older KMQ, whose loops slept; no longer read
# Settings that a fleet may give all its brokers (states.py). The text "" means that this broker was not given the
# setting: so the processes of a supervisor know that as well as it does.
SHARED = {row.attribute: row for row in SETTINGS if row.attribute in ("retention_age", "retention_bytes", "data_quota")}


# --- reading ----------------------------------------------------------------------------------------------------------


def service_links(environ: dict[str, str]) -> list[str]:
    """Return the names that Kubernetes injected for a Service named kmq (or kmq-…). They are not settings.

    The value counts too: a port of that Service may be named like a setting of ours, but its value is then an address.
    """
    own = {row.env for row in SETTINGS}
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith("KMQ_") and (_LINK_VALUE.match(value) or (name not in own and _SERVICE_LINK.fullmatch(name)))
    )


def retired(environ: dict[str, str]) -> list[str]:
    """Return the names in `environ` that were settings once."""
    return [name for name in RETIRED if name in environ]


def of_environment(environ: dict[str, str]) -> dict[str, str]:
    """Return the settings in `environ`, also unknown ones, as text by name."""
    links = service_links(environ)
    return {n: v for n, v in environ.items() if n.startswith(("KMQ_", "RB_")) and n not in links}


def of_file(path: str) -> dict[str, str]:
    """Return the settings in a file, also unknown ones, as text by name; {} if there is no file."""
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
    from_env, from_file = of_environment(environ), of_file(toml)
    rows = {row.env: row for row in SETTINGS}
    for source, names in (("environment", from_env), (toml, from_file)):
        for name in sorted(set(names) - set(rows)):
            raise ConfigError(f"{source}: unknown setting {name}{suggest(name)}")
    texts: dict[str, str] = {}
    given: set[str] = set()
    values: dict[str, object] = {
        "ignored": service_links(environ),
        "retired": retired(environ),
        "texts": texts,
        "given": given,
    }
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
            raise ConfigError(f"{row.env}={quotation(text, is_path=True)}: {err}") from None
    settings = Settings(values)
    if settings.ring_bytes < 3 * settings.max_line:
        raise ConfigError(
            f"RB_BYTES={settings.ring_bytes}: must be at least 3 x KMQ_MAX_LINE ({3 * settings.max_line} bytes),"
            " so that the longest line fits beside another"
        )
    if settings.shard:
        _check_shard(settings)
    if settings.intakes:
        _check_intakes(settings)
    return settings


def _check_shard(settings: Settings) -> None:
    """Raise ConfigError for settings with which a replica could lose what it has confirmed, or has no Consul."""
    where = f"KMQ_SHARD={settings.shard}"
    for name, text in (("KMQ_CLUSTER", settings.cluster), ("KMQ_CONSUL", settings.consul)):
        if not text:
            raise ConfigError(f"{name} is not set; {where} needs it: Consul holds the register of a shard")
    if not settings.replica_secret:
        raise ConfigError(f"KMQ_REPLICA_SECRET is not set; {where} needs it: a file, the same for all of its brokers")
    if settings.fsync:
        raise ConfigError(f"KMQ_FSYNC={settings.texts['KMQ_FSYNC']}: must be always in a shard ({where})")
    for name in ("policy", "policy_framed", "policy_durable"):
        if getattr(settings, name) == "drop_oldest":
            env = next(row.env for row in SETTINGS if row.attribute == name)
            raise ConfigError(f"{env}=drop_oldest: must be block in a shard ({where})")


def _check_intakes(settings: Settings) -> None:
    """Raise ConfigError for an intake that lacks a certificate, is open to everybody, or whose port is used twice."""
    ports = {getattr(settings, row.attribute): f"{row.env} too" for row in SETTINGS if row.parse is kind.PORT}
    taken = {(number, False): name for number, name in ports.items()}
    for intake in settings.intakes:
        where, port = f"KMQ_INTAKES: {intake}", (intake.number, intake.kind == UDP)
        if intake.number and port in taken:
            raise ConfigError(f"{where}: port {intake.number} is {taken[port]}; give each its own")
        taken[port] = f"that of {intake} too"
        if intake.kind == TLS and not settings.tls_cert:
            raise ConfigError(f"{where}: TLS needs KMQ_TLS_CERT and KMQ_TLS_KEY; set them")
        if settings.tokens and not (settings.intakes_from or (intake.kind == TLS and settings.tls_client_ca)):
            raise ConfigError(
                f"{where}: with KMQ_TOKENS an intake must know its senders, who have no token to show; set KMQ_INTAKES_FROM,"
                " or take lines over /tls with KMQ_TLS_CLIENT_CA"
            )


def suggest(name: str) -> str:
    """Return the known name that is most like this one, as the end of a sentence; "" if no name is similar."""
    import difflib

    close = difflib.get_close_matches(name, (row.env for row in SETTINGS), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def table() -> str:
    """Return the table in docs/settings.md; a test compares the two."""
    rows = [f"| `{row.env}` | {f'`{row.default}`' if row.default else ''} | {row.help} |" for row in SETTINGS]
    return "\n".join(["| name | default | meaning |", "|---|---|---|", *rows])
