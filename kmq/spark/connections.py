"""How to connect to brokers on other machines: options of format("kmq"), for reading and writing.

kmq.token                      bearer token, if the brokers require one
kmq.ssl.ca.location            certificates (PEM) of the trusted authorities; default: those of this machine
kmq.ssl.certificate.location   certificate chain (PEM) of the client, if the brokers require one
kmq.ssl.key.location           private key (PEM) of that certificate; default: the certificate's file holds it
kmq.ssl.key.password           password of the private key
kmq.ssl.server.name            name in the brokers' certificates, if it differs from the name in their addresses
kmq.timeout                    how long a broker may be silent within a request: 500ms, 30s (default), 2m; a bare number
                               is seconds
kmq.patience                   how long a gateway may be unreachable before that is an error, for example while its pod
                               restarts (default 30s)

The names of the TLS options follow librdkafka. Files are opened where they are used, so executors on other machines
need them at the same paths.
"""

import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from kmq.config.values import parse_duration
from kmq.errors import ConfigError, RetryError, quotation

TIMEOUT_S = PATIENCE_S = 30.0
CA, CERTIFICATE, KEY = (f"kmq.ssl.{name}.location" for name in ("ca", "certificate", "key"))
PASSWORD = "kmq.ssl.key.password"
SERVER_NAME = "kmq.ssl.server.name"
TLS_OPTIONS = (CA, CERTIFICATE, KEY, PASSWORD, SERVER_NAME)
SECRETS = "(?i:kmq[.](?:token|ssl[.]key[.]password))"  # regular expression of options that Spark must never show
OPTIONS = ("kmq.token", "kmq.timeout", "kmq.patience", *TLS_OPTIONS)


@dataclass(frozen=True)
class Tls:
    """TLS files and names; "" means not given. Unlike an SSL context this can be pickled."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    password: str = field(default="", repr=False)
    server_name: str = ""

    def context(self) -> ssl.SSLContext:
        """Return a client's SSL context. Raises ConfigError naming the option whose file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except (OSError, ValueError) as err:
            raise ConfigError(f"{CA}={self.ca!r}: must be a PEM file of certificates: {err}") from None
        if self.certificate:
            try:
                # A callable, even without a password, because OpenSSL would prompt on the terminal otherwise.
                context.load_cert_chain(self.certificate, self.key or None, lambda: self.password)
            except (OSError, ValueError) as err:
                given = f"{CERTIFICATE}={self.certificate!r}" + (f", {KEY}={self.key!r}" if self.key else "")
                raise ConfigError(f"{given}: must be PEM files of a certificate and its key: {err}") from None
        if self.server_name:
            wrap = context.wrap_socket  # the standard library's clients accept no name other than the host
            context.wrap_socket = (  # type: ignore[method-assign]
                lambda sock, *args, **more: wrap(sock, *args, **(more | {"server_hostname": self.server_name}))
            )
        return context


@dataclass(frozen=True)
class Access:
    """Everything that a process needs to connect. Without `tls` only https:// addresses use TLS."""

    token: str = field(default="", repr=False)
    tls: Tls | None = None
    timeout_s: float = TIMEOUT_S
    patience_s: float = PATIENCE_S

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Access":
        """Return the access that the options describe; names are in lower case, unrelated options are ignored.

        Raises ConfigError.
        """
        if token := options.get("kmq.token", ""):
            from kmq.client.options import check_token  # here: most brokers require none

            check_token(token, "kmq.token")
        return cls(
            token,
            tls_of(options),
            duration(options, "kmq.timeout", TIMEOUT_S),
            duration(options, "kmq.patience", PATIENCE_S),
        )


PLAIN = Access()


def tls_of(options: Mapping[str, str]) -> Tls | None:
    """Return the TLS options, or None if none is given. Raises ConfigError, also if a file cannot be used here."""
    if not any(options.get(name) for name in TLS_OPTIONS):
        return None
    if not options.get(CERTIFICATE):
        for name in (KEY, PASSWORD):
            if options.get(name):
                raise ConfigError(f"{name}: needs the certificate that it belongs to; give {CERTIFICATE} too")
    tls = Tls(*(options.get(name, "") for name in TLS_OPTIONS))
    tls.context()
    return tls


def duration(options: Mapping[str, str], name: str, default: float) -> float:
    """Return a duration option in seconds. A bare number is seconds. Raises ConfigError unless it is above 0."""
    text = options.get(name)
    if text is None:
        return default
    try:
        seconds = float(text) if text.strip().replace(".", "", 1).isdecimal() else parse_duration(text)
    except ValueError as err:
        raise ConfigError(f"{name}={text!r}: {err}") from None
    if not 0 < seconds < 1e9:
        raise ConfigError(f"{name}={text!r}: must be above 0, such as 30s")
    return seconds


# --- addresses of gateways -------------------------------------------------------------------------------------------

_PORTS = {"http": 8082, "https": 8443}
_NAME = re.compile(r"(?:(https?)://)?([^\s/@:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")


class GatewayAddress(NamedTuple):
    """Where a gateway listens."""

    scheme: str
    host: str
    port: int


def gateway_address(name: str, access: Access) -> GatewayAddress:
    """Return the address that a user's `name` means. Raises ConfigError."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[3] or 0) > 65535:
        raise ConfigError(f"kmq.bootstrap.servers: {quotation(name)} is not host:port, nor https://host:port")
    if match[1] == "http" and access.tls:
        raise ConfigError(f"kmq.bootstrap.servers: {name!r} has no TLS, which options kmq.ssl.* ask for: https://")
    scheme = match[1] or ("https" if access.tls else "http")
    return GatewayAddress(scheme, match[2], int(match[3] or _PORTS[scheme]))


def check_logins(names: Sequence[str]) -> None:
    """Raise ConfigError if a name has a login. Check this first: a password with commas looks like several names."""
    for name in names:
        if "@" in name:
            gateway_address(name, PLAIN)


class ShardDoors:
    """The shards that brokers have reported: the lineage of their records, and the addresses of all their brokers.

    Invariant   Two shards never count as one: copied directories have one lineage, but no address in common.
    """

    def __init__(self) -> None:
        self._doors: dict[str, set[tuple[str, int]]] = {}  # by lineage

    def add(self, lineage: str, doors: Iterable[str]) -> str:
        """Add a broker's report. Return the lineage; "" if a shard with copies of its records has used the lineage
        before.
        """
        new = {(host.strip("[]").lower(), port) for host, _, port in (door.rpartition(":") for door in doors)}
        numbered = {(host, int(port)) for host, port in new if port.isdecimal()}
        addresses = self._doors.setdefault(lineage, set())
        if addresses and numbered and addresses.isdisjoint(numbered):
            return ""
        addresses |= numbered
        return lineage

    def shard_at(self, host: str, port: int) -> str:
        """Return the lineage of the shard with this address; "" without a shard.

        `kmq-0.kmq` is `kmq-0.kmq.default.svc`: domains that are left out are those of this machine.
        """
        mine = f"{host.strip('[]').lower()}."
        for lineage, doors in self._doors.items():
            for other, its_port in doors:
                theirs = f"{other}."
                if port == its_port and (theirs.startswith(mine) or mine.startswith(theirs)):
                    return lineage
        return ""


# --- brokers that are away --------------------------------------------------------------------------------------------


class UnreachableError(RetryError):
    """A broker does not answer."""

    def __init__(self, broker: str, text: str) -> None:
        super().__init__(text)
        self.broker = broker


class ReplacedError(ConfigError):
    """A broker has another data directory than the one that was read."""

    def __init__(self, broker: str, expected: str, now: str) -> None:
        super().__init__(
            f"{broker} has another data directory (id {now}) than this checkpoint ({expected}); put the old volume back,"
            f" take this broker out with kmq pipeline reset CHECKPOINT --forget {broker}, which says what is lost,"
            " or start with a new checkpoint"
        )
        self.broker, self.now = broker, now


def have_one_address(name: str, other: str) -> bool:
    """Return True if two names of brokers have an address in common: `a:8082` and `a:8082,b:8082` of one shard."""
    return not {*name.split(",")}.isdisjoint(other.split(","))


# --- names of options ------------------------------------------------------------------------------------------------
# An unknown name is an error with its value and the nearest known name.

_ALIKE = 0.05  # names that differ by less from the best match are offered too


def check_options(
    given: Mapping[str, str], names: Iterable[str], kind: str, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ConfigError at the first unknown option of a `kind` (reader, writer); upper and lower case are the same.

    `elsewhere`: name of an option in other systems, in lower case → its name here.
    """
    own = {name.lower(): name for name in names}
    for name, value in given.items():
        if name.lower() not in own:
            ours = elsewhere.get(name.lower())
            advice = f"; did you mean {ours}?" if ours else nearest(name, own.values())
            said = "…" if _is_secret(name + advice) else quotation(str(value))  # a misspelt token is secret, too
            raise ConfigError(f"unknown {kind} option {name}={said}{advice}; expected one of {', '.join(own.values())}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean …?` with the most similar name, or several that are about equally similar; "" for none."""
    spelled = {each.lower(): each for each in names}
    # With and without the prefix, so that `token` finds kmq.token, and kmq.subscribe finds subscribe.
    short = {each.removeprefix("kmq."): each for each in spelled}
    wanted = name.lower()
    for text, among in ((wanted, {each: each for each in spelled}), (wanted.removeprefix("kmq."), short)):
        likeness = {each: SequenceMatcher(None, each, text).ratio() for each in get_close_matches(text, among)}
        best = [spelled[among[each]] for each, ratio in likeness.items() if ratio > max(likeness.values()) - _ALIKE]
        if best:
            return f"; did you mean {' or '.join(best)}?"
    return ""


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in ("token", "password", "secret"))
