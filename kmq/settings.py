"""Every setting there is: name, default, unit, limits and reason, declared once.

Order of precedence: environment, then `kmq.toml` in the working directory, then the default. An unknown `KMQ_*` or
`RB_*` name is an error, because a typo that is ignored is a broker that runs with other limits than its owner
believes. The one exception is what Kubernetes injects for a Service named kmq (`service_links`).

Flags, `--help` texts and the README's table are all derived from `SETTINGS`.
"""

import os
import re
from collections.abc import Callable

from kmq.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

STAGES = ("ingress", "framer", "durability", "router")  # in the order a message passes them
PIPE_BUF = 4096  # bytes one FIFO write may have and still be atomic (Linux)
DRAIN_S = 10.0  # after SIGTERM a stage finishes queued work for at most this long
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


def _text(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must not be empty")
    return text


def _only(value: str, what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text.strip().lower() != value:
            raise ValueError(f"only {value!r} is available in this version ({what})")
        return value

    return check


class Setting:
    """One row of the table: `env` name, attribute of Settings, default as text, parser, one line of help."""

    def __init__(self, env: str, attribute: str, default: str, parse: Callable[[str], int | str], help: str) -> None:
        self.env, self.attribute, self.default, self.parse, self.help = env, attribute, default, parse, help


_PORT = _ranged(_parse_int, 0, 65535, "")
_BYTES = _ranged(parse_bytes, 64 * KIB, 64 * GIB, " bytes")
_POLICY = _one_of("block", "drop_oldest")

SETTINGS = (
    Setting("KMQ_DATA", "data", "./data", _text, "directory of the WAL and the queue files"),
    Setting("KMQ_PIPES", "pipes", "./pipes", _text, "directory of the FIFOs, port files and owner files"),
    Setting("KMQ_INSTANCE", "instance", "kmq", _instance, "name of the shared memory in /dev/shm; one per broker"),
    Setting("KMQ_HOST", "host", "127.0.0.1", _text, "address the listeners bind to"),
    Setting("KMQ_PORT", "port", "5673", _PORT, "lines in, one message a line; 0: any free port"),
    Setting("KMQ_EGRESS_PORT", "egress_port", "5674", _PORT, "lines out (gateway)"),
    Setting("KMQ_ACK_PORT", "ack_port", "5675", _PORT, "GET_ACK <seq>: is it durable? 0: any free port"),
    Setting("KMQ_STATUS_PORT", "status_port", "5676", _PORT, "GET_STATUS <seq>: is it processed? (gateway)"),
    Setting("KMQ_HTTP_PORT", "http_port", "8082", _PORT, "HTTP API (gateway)"),
    Setting("KMQ_GRPC_PORT", "grpc_port", "8080", _PORT, "gRPC API (gateway)"),
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
    Setting("KMQ_FSYNC", "fsync", "always", _only("always", "group commit"), "when the WAL is fsynced"),
    Setting("KMQ_SEGMENT_BYTES", "segment_bytes", "1 GiB", _BYTES, "reserved: a log is one segment in this version"),
    Setting("KMQ_DATA_QUOTA", "data_quota", "none", _only("none", "no quota"), "most bytes under KMQ_DATA"),
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
    policy: str
    policy_framed: str
    policy_durable: str
    ring_slots: int
    ring_bytes: int
    max_line: int
    fsync: str
    segment_bytes: int
    data_quota: str
    ignored: list[str]  # service links of Kubernetes that were passed over

    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__.update(values)

    def environment(self) -> dict[str, str]:
        """These values as environment variables, for a child process in any working directory."""
        values = {row.env: str(getattr(self, row.attribute)) for row in SETTINGS if getattr(self, row.attribute) != ""}
        values["KMQ_DATA"] = os.path.abspath(self.data)
        values["KMQ_PIPES"] = os.path.abspath(self.pipes)
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
    values: dict[str, object] = {"ignored": links}
    for row in SETTINGS:
        text = from_env.get(row.env, from_file.get(row.env, row.default))
        if text == "" and row.default == "":
            values[row.attribute] = ""
            continue
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
    """The settings as the README shows them; a test keeps the two alike."""
    rows = [f"| `{row.env}` | {f'`{row.default}`' if row.default else ''} | {row.help} |" for row in SETTINGS]
    return "\n".join(["| name | default | what |", "|---|---|---|", *rows])
