"""Where the sink writes: addresses at which ingress accepts lines, their permanent faults, and the options for writing.

    kmq.producers            [tls://|tcp://]host[:port], comma-separated. Without a scheme an address has TLS if options
                             of TLS (kmq/spark/connections.py) are given, as for gateways. Ports: 5673; with TLS 5443.
                             Which of them are addresses of one shard, the brokers say (`!hello shard=?`)

The options of format("kmq") for writing are described in sink.py. An error names the wrong option.

Fault       `check` tells permanent faults (an unknown host, a wrong certificate, an unknown token) from temporary ones
            (a broker that is down, slow, or refuses for now). An unknown host may be temporary too, because a pod has
            no name while it is being replaced: so call `check` only before a job begins, not while it runs.
"""

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from kmq.client.connection import local_address
from kmq.client.producer import Producer
from kmq.errors import ConfigError, RetryError, quotation
from kmq.message.ids import NAME_PATTERN
from kmq.sending.protocol import ERR, format_hello, read_greeting
from kmq.spark.connections import TIMEOUT_S, TLS_OPTIONS, Access, ShardDoors, Tls, check_options, duration, tls_of
from kmq.spark.paths import local_path
from kmq.spark.source.broker import Broker
from kmq.spark.source.brokers import Directory, open_broker, recognised
from kmq.spark.source.options import places
from kmq.wire.refusals import RETRYABLE

_PORT, _TLS_PORT = 5673, 5443
_TLS, _TCP = "tls://", "tcp://"
_DRIVER_TIMEOUT_S = 60.0  # of a producer outside of Spark's tasks
_AT_A_TIME = 8
_LOOK_S = 5.0  # timeout of a check; a slow broker is no fault
_MOST_DOORS = 64  # most addresses of a shard that are accepted
_LISTENED = 3  # connections that wait for a TLS alert
_ALERT = b"\x15\x03"  # the first bytes of the TLS alert with which a TLS listener replies to plain text
# OpenSSL's reasons when the broker refuses our certificate, or does not speak TLS.
_NO_TLS = ("TLSV1_ALERT_PROTOCOL_VERSION", "WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
_FOR_GOOD = re.compile(r"CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE_FAILURE|" + "|".join(_NO_TLS))


class Address(NamedTuple):
    """Where a broker accepts lines."""

    host: str
    port: int
    is_tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_TLS if self.is_tls else ''}{host}:{self.port}"


def addresses(option: str, text: str, has_tls: bool = False) -> list[Address]:
    """Return the addresses of a comma-separated list. Raises ConfigError, which names `option`.

    `has_tls`: addresses without a scheme have TLS.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return [_address(f"{option}={quotation(text if '@' in text else part)}", part, has_tls) for part in parts]


def _address(named: str, text: str, has_tls: bool) -> Address:
    scheme = next((scheme for scheme in (_TLS, _TCP) if text.lower().startswith(scheme)), "")
    is_tls, rest = scheme == _TLS or (has_tls and not scheme), text[len(scheme) :]
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]"):
        host, port = rest, str(_TLS_PORT if is_tls else _PORT)
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or re.search(r"[\s/@\[\]]", bare) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{named}: must be host:port, or tls://host:port")
    return Address(bare, int(port), is_tls)


# --- targets ---------------------------------------------------------------------------------------------------------


def producer(doors: Sequence[Address], access: Access, **options: Any) -> Producer:
    """Return a kmq.Producer with these `options` at this address, or at these of one shard."""
    tls = (access.tls or Tls()).context() if doors[0].is_tls else None
    return Producer(",".join(str(door).removeprefix(_TLS) for door in doors), token=access.token, tls=tls, **options)


class Destination(NamedTuple):
    """The brokers that a pipeline is to write to, as the user gave them."""

    producers: str = ""  # host:port for lines, comma-separated; "": the broker of this directory's settings
    connection: Mapping[str, str] | None = None  # the sink's options; None: as the pipeline reads

    def connection_like(self, token: str) -> dict[str, str]:
        """Return the options of the connection; if None were given, only the token with which the pipeline reads."""
        if self.connection is not None:
            return dict(self.connection)
        return {"kmq.token": token} if token else {}


class Target(NamedTuple):
    """The broker that a pipeline writes to: its address, or those of a shard, and the options of the connection."""

    addresses: list[Address]
    options: Mapping[str, str]  # options for the sink

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))

    @property
    def access(self) -> Access:
        return Access.of(self.options)

    @property
    def timeout_s(self) -> float:
        """The timeout of a producer outside of Spark's tasks."""
        return duration(self.options, "kmq.timeout", _DRIVER_TIMEOUT_S)

    @classmethod
    def of(cls, producers: str, connection: Mapping[str, str], option: str = "--producers") -> "Target":
        """Return the target at `producers`, host:port, or several of one shard; "": the broker of this directory's
        settings.

        `connection`: the sink's options for token, TLS and timeout; for our own broker only the timeout is used. Raises
        ConfigError.
        """
        if not producers:
            host, port, token = local_address()[:3]
            timeout = {name: text for name, text in connection.items() if name == "kmq.timeout"}
            connection, producers = timeout | ({"kmq.token": token} if token else {}), f"{_TCP}{host}:{port}"
        found = addresses(option, producers, tls_of(connection) is not None)
        if not found or len({address.is_tls for address in found}) > 1:
            raise ConfigError(f"{option} {producers!r}: must be host:port of one broker's lines")
        return cls(found, {**connection, "kmq.producers": producers})

    def check(self) -> None:
        """Raise ConfigError for a permanent fault, or if several addresses do not belong to one shard.

        Raises RetryError if the second is not known because a broker is silent.
        """
        shard_of = shards(self.addresses, self.access)
        check_all(self.addresses, self.access, shard_of)
        if len({shard_of.get(address, "") for address in self.addresses}) > 1 or (
            len(self.addresses) > 1 and not shard_of
        ):
            silent = [address for address in self.addresses if address not in shard_of]
            kind = RetryError if silent else ConfigError
            said = f"; {silent[0]} does not say of which shard it is" if silent else ""
            raise kind(f"{self}: must be the addresses of one shard{said}")


# --- permanent faults ------------------------------------------------------------------------------------------------


def check_all(addresses: Sequence[Address], access: Access, replicated: Container[Address] = ()) -> None:
    """Run `check` on all addresses at the same time. `replicated`: those of a shard, whose hosts may be away."""
    with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
        list(pool.map(lambda address: check(address, access, address in replicated), dict.fromkeys(addresses)))


def check(address: Address, access: Access, is_host_sure: bool = False) -> None:
    """Connect once and say hello. Raises ConfigError for a permanent fault; all other errors are ignored.

    `is_host_sure`: an unknown host is a temporary fault, for example of a pod that is being replaced.
    """
    try:
        reply = _greeting(address, access)
    except OSError as err:
        why = fault(err)
        if why and not (is_host_sure and isinstance(err, socket.gaierror)):
            raise ConfigError(f"{address}: {why}") from None
        return
    if reply.startswith(_ALERT) or (not reply and not address.is_tls and _speaks_tls(address)):
        raise ConfigError(f"{address}: it speaks TLS only; write {_TLS}{address}")
    verb, refusal = read_greeting(reply)
    if verb == ERR and refusal.partition(" ")[0] not in RETRYABLE:
        raise ConfigError(f"{address}: the broker refuses the connection: {refusal}; option kmq.token")


def _greeting(address: Address, access: Access) -> bytes:
    """Return the broker's reply to hello; b"" if it only closes the connection."""
    hello = format_hello(acks=0, token=access.token)
    context = (access.tls or Tls()).context() if address.is_tls else None
    reply = b""
    with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
        reply = _reply(address, hello, context)
    # In TLS 1.3 the broker checks our certificate after our side of the handshake is done. If we have sent data by
    # then, it resets the connection and the alert is lost. So connect again, send nothing and wait for the alert.
    for _ in range(_LISTENED if context and not reply else 0):
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
            return _reply(address, b"", context)
    return reply


def _speaks_tls(address: Address) -> bool:
    """Return True if a TLS handshake succeeds there, whatever the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((address.host, address.port), timeout=_LOOK_S) as plain:
            context.wrap_socket(plain).close()
    except OSError:
        return False
    return True


def shards(addresses: Sequence[Address], access: Access) -> dict[Address, str]:
    """Return address → lineage for the addresses that belong to a shard, if there are several.

    A silent address is known if its shard advertises it at another address.
    """
    found: dict[Address, str] = {}
    doors = ShardDoors()
    with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
        answers = list(pool.map(lambda address: _shard_at(address, access), addresses if len(addresses) > 1 else ()))
    for address, (lineage, advertised) in zip(addresses, answers, strict=False):
        if lineage and doors.add(lineage, advertised):
            found[address] = lineage
    for address, (said, _) in zip(addresses, answers, strict=False):
        if not said and (lineage := doors.shard_at(address.host, address.port)):
            found[address] = lineage
    return found


def _shard_at(address: Address, access: Access) -> tuple[str, list[str]]:
    """Return (lineage, addresses) of the shard at an address; ("", []) without a shard, or if the broker does not
    reply.
    """
    hello = format_hello("shard=?", acks=0, token=access.token)
    context, said = (access.tls or Tls()).context() if address.is_tls else None, b""
    with contextlib.suppress(OSError):
        said = _reply(address, hello, context, lines=2)
    greeting, _, shard = said.decode(errors="replace").partition("\n")
    verb, *words = shard.split()[: _MOST_DOORS + 2] or [""]
    if not greeting.startswith("!ok") or verb != "!shard" or not words:
        return "", []
    return words[0], words[1:]


def _reply(address: Address, hello: bytes, context: ssl.SSLContext | None, lines: int = 1) -> bytes:
    """Return the first bytes of the reply, up to 4 KiB, with at least so many `lines` unless the connection ends."""
    with socket.create_connection((address.host, address.port), timeout=_LOOK_S) as plain:
        sock = context.wrap_socket(plain, server_hostname=address.host) if context else plain
        with sock:
            if hello:
                sock.sendall(hello)
            found = data = sock.recv(4096)
            while data and lines > found.count(b"\n") and len(found) < 4096:
                found += (data := sock.recv(4096))
            return found


def fault(err: OSError) -> str:
    """Return the permanent fault that `err` shows and what to do about it; "" if waiting may help."""
    if isinstance(err, socket.gaierror):
        return "" if err.errno == socket.EAI_AGAIN else "this host is not known; is the name right?"
    if isinstance(err, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {err.verify_message}; options kmq.ssl.ca.location, kmq.ssl.server.name"
    reason: str = getattr(err, "reason", None) or ""
    if isinstance(err, ssl.SSLError) and _FOR_GOOD.search(reason):
        if reason in _NO_TLS:
            return "nothing there speaks TLS; write tcp://host:port, or give the port that does"
        options = "options kmq.ssl.certificate.location, kmq.ssl.key.location"
        return f"the broker does not take our certificate: {reason.lower()}; {options}"
    return ""


# --- options ---------------------------------------------------------------------------------------------------------

OPTIONS = (
    *("kmq.producers", "kmq.token", "kmq.producer", "kmq.timeout", "kmq.probe", *TLS_OPTIONS),
    *("topic", "usePartition", "path", "kmq.bootstrap.servers", "kmq.replay"),
)
_OF_SPARK = ("queryname", "checkpointlocation")  # Spark passes them to every sink of a stream
_TASK_TIMEOUT_S = 600.0
NAME = re.compile(NAME_PATTERN)  # a producer's name
STOP, AGAIN, TRUST = REPLAY = ("stop", "again", "trust")  # what happens to a row whose id belongs to another row


class WriteOptions:
    """The write options, checked; a ConfigError names the wrong option."""

    def __init__(self, given: Mapping[str, str]) -> None:
        options = {name.lower(): text for name, text in given.items()}
        check_options({name: text for name, text in options.items() if name not in _OF_SPARK}, OPTIONS, "writer")
        self.access = Access.of(options)
        self._reading = replace(self.access, timeout_s=TIMEOUT_S)  # kmq.timeout is for producers
        self.brokers = addresses("kmq.producers", options.get("kmq.producers", ""), self.access.tls is not None)
        if not self.brokers:
            raise ConfigError("kmq.producers: where to write to is missing: host:port of a broker's line protocol")
        self.shards: dict[Address, str] = {}  # by address, found by `recognise`
        self.probe = _flag("kmq.probe", options.get("kmq.probe", "true"))
        self.topic = options.get("topic", "")
        self.use_partition = _flag("usePartition", options.get("usepartition", "false"))
        self.producer = options.get("kmq.producer", "")
        if self.producer and not NAME.fullmatch(self.producer):
            raise ConfigError(f"kmq.producer={self.producer!r}: must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        self.timeout_s = duration(options, "kmq.timeout", _TASK_TIMEOUT_S)
        self.replay = options.get("kmq.replay", STOP).strip().lower()
        if self.replay not in REPLAY:
            raise ConfigError(f"kmq.replay={options['kmq.replay']!r}: must be one of {', '.join(REPLAY)}")
        self.servers, self.paths = places(options)
        self._logs: list[str] | None = None  # names of the brokers with logs; one of them may be a shard
        if self.servers and self.paths:
            raise ConfigError(
                "give `path` (data directories) or `kmq.bootstrap.servers` (gateways) to compare with, one of them"
            )

    def recognise(self) -> None:
        """Find out which addresses, of lines and of gateways, belong to a shard. Earlier results are kept."""
        self.shards |= shards(self.brokers, self.access)
        if self._logs is None:
            self._logs = recognised(self.servers, self._reading, waits=False) if self.servers else self.paths

    def doors(self, at: int) -> list[Address]:
        """Return where broker number `at` accepts lines: its own address first, then the others of its shard."""
        first = self.brokers[at]
        shard = self.shards.get(first)
        others = [each for each in self.brokers if shard and self.shards.get(each) == shard and each != first]
        return [first, *(each for each in others if each.is_tls == first.is_tls)]

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
        given = self.servers or self.paths
        first = given[at] if len(given) == len(self.brokers) else given[0]
        names = sorted(self._logs or given, key=lambda name: first not in (name, *name.split(",")))
        return [open_broker(name, bool(self.paths), self._reading) for name in names]


def _flag(name: str, text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ConfigError(f"{name}={text!r}: must be true or false")
    return text.strip().lower() == "true"


def has_begun(options: Mapping[str, str]) -> bool:
    """Return True if a stream with these options has committed a batch, or if its checkpoint is not on this machine."""
    path = local_path({name.lower(): text for name, text in options.items()}.get("checkpointlocation", ""))
    try:
        return not path or bool(os.listdir(f"{path}/commits"))
    except OSError:
        return False
