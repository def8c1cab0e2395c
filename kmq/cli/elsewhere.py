"""Which broker a command talks to: the one of this directory, or one elsewhere (`kmq --url`, `--host`, `--token`).

Elsewhere   Only the network interfaces can be used, so commands that read files refuse the options. Messages go through
            the line ports of that host (KMQ_PORT and KMQ_EGRESS_PORT, over https:// KMQ_TLS_PORT and
            KMQ_EGRESS_TLS_PORT), everything else through its HTTP API. KMQ_HOST is not used: it is the address at which
            a broker of this directory listens.
Bounded     A response of more than _MOST bytes is refused.
"""

import json
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kmq.config.settings import Settings, load
from kmq.errors import ConfigError, KmqError, RetryError, quotation
from kmq.wire import refusals

if TYPE_CHECKING:
    import http.client
    import ssl

# The commands that work with a broker elsewhere.
ABLE = ("produce", "ship", "consume", "tail", "topics", "groups", "dlq", "top")
HTTP_PORT = 8082
_TIMEOUT_S = 30.0
_MOST = 64 << 20
_LINES_IN = (5673, 5443)  # without and with TLS, where the setting is 0
_LINES_OUT = (5674, 5444)


class GatewayClient:
    """The gateway at a URL. Raises ConfigError for an invalid URL."""

    def __init__(self, url: str, token: str = "") -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {quotation(url)}: must be http://<host>:<port> or https://<host>:<port>")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self.token = token
        self.host = parts.hostname
        self.tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            from ssl import create_default_context

            self.tls = create_default_context()
        self._port = port or (443 if self.tls else HTTP_PORT)
        self._path = parts.path.rstrip("/")
        self._open: http.client.HTTPConnection | None = None

    def request(
        self, method: str, path: str, body: object = None, *, most: int = _MOST, timeout_s: float = _TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Return status and body of the response. Raises RetryError without one; then the next call connects again."""
        import http.client

        if self._open is None and self.tls is None:
            self._open = http.client.HTTPConnection(self.host, self._port, timeout=timeout_s)
        elif self._open is None:
            self._open = http.client.HTTPSConnection(self.host, self._port, timeout=timeout_s, context=self.tls)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            self._open.request(method, self._path + path, None if body is None else json.dumps(body).encode(), headers)
            response = self._open.getresponse()
            text = response.read(most + 1)
            if len(text) > most:
                raise http.client.HTTPException(f"the answer is larger than {most >> 20} MiB")
        except (OSError, http.client.HTTPException) as err:
            self.close()
            reason = getattr(err, "strerror", None) or str(err) or type(err).__name__
            raise RetryError(f"{self.url}: {reason}") from err
        if response.will_close:
            self.close()
        return response.status, text

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    # --- the line ports of its broker --------------------------------------------------------------------------------

    @property
    def lines_in(self) -> int:
        """Return the port for producers."""
        settings = load()
        own = settings.tls_port if self.tls else settings.port
        return own or _LINES_IN[self.tls is not None]

    @property
    def lines_out(self) -> int:
        """Return the port for consumers."""
        settings = load()
        own = settings.egress_tls_port if self.tls else settings.egress_port
        return own or _LINES_OUT[self.tls is not None]


# --- the options -----------------------------------------------------------------------------------------------------

_chosen: ContextVar[GatewayClient | None] = ContextVar("elsewhere", default=None)


def choose(command: str | None, url: str, host: str, token: str) -> None:
    """Keep the options given before the command. Raises ConfigError for a command that needs this machine's files."""
    if url and host:
        raise ConfigError("--url and --host exclude each other")
    if not url and not host:
        raise ConfigError("--token needs --url or --host")
    if command not in ABLE:
        able = ", ".join(ABLE)
        raise ConfigError(f"kmq {command}: looks at this machine, so it has no --url and no --host; these have: {able}")
    url = url or _url_of(host)
    _chosen.set(GatewayClient(url, read_token(token)))


def _url_of(host: str) -> str:
    """Return the URL that `--host` stands for. Raises ConfigError."""
    from ipaddress import IPv6Address

    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return f"http://[{IPv6Address(name)}]:{HTTP_PORT}"
    except ValueError:
        pass
    if re.fullmatch(r"[^\s/:@?#\[\]]+", name) is None:
        raise ConfigError(
            f"--host {quotation(host)}: must be a host name or an address, without a port; for another port than"
            f" {HTTP_PORT}: --url http://<host>:<port>"
        )
    return f"http://{name}:{HTTP_PORT}"


def forget() -> None:
    """Use the broker of this directory again."""
    _chosen.set(None)


def read_token(given: str) -> str:
    """Return a token, given as it is or as @<file>. Raises ConfigError."""
    if not given.startswith("@"):
        return given
    try:
        with open(given[1:], encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError) as err:
        raise ConfigError(f"--token {given}: {getattr(err, 'strerror', None) or 'is not text'}") from None


def elsewhere() -> GatewayClient | None:
    """Return the gateway that --url or --host names; None for the broker of this directory."""
    return _chosen.get()


def need_files(command: str) -> None:
    """Raise ConfigError if --url or --host is given, because this command reads files of the broker."""
    if elsewhere() is not None:
        raise ConfigError(f"kmq {command}: reads the files of a broker, so it has no --url and no --host")


# --- the HTTP API ----------------------------------------------------------------------------------------------------


def of_directory(settings: Settings) -> GatewayClient:
    """Return the gateway of the broker of this directory, with the local token if the broker asks for one."""
    from kmq.access import tokens
    from kmq.client.lines import read_port

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    port = read_port(settings, "http", settings.http_port)
    return GatewayClient(f"http://{host}:{port}", tokens.local(settings))


def ask(method: str, path: str, body: object = None, topic: str = "", group: str = "") -> Any:
    """Return the parsed response of the gateway; None if it has no body. Raises RetryError and KmqError.

    `topic`, `group`: the one in the request, for the error that it does not exist.
    """
    gateway = elsewhere() or of_directory(load())
    try:
        status, text = gateway.request(method, path, body)
    except RetryError as err:
        raise RetryError(f"{err}; is the broker up, with its gateway? (kmq status)") from err
    finally:
        gateway.close()
    try:
        answer: Any = json.loads(text) if text else None
        code, message = (answer["code"], answer["message"]) if status >= 400 else ("", "")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KmqError(f"{gateway.url}: answered {status}, but not as a broker does; is that its HTTP port?") from None
    if not code:
        return answer
    if code == "unknown_topic" and topic:
        raise unknown_topic(topic)
    if code == "unknown_group" and group:
        raise unknown_group(group)
    error = KmqError(message)
    error.exit_code = refusals.find(code).exit_code
    raise error


def unknown_topic(name: str) -> ConfigError:
    """Return the error that the broker has no such topic, with the nearest existing name."""
    try:
        names = [row["name"] for row in ask("GET", "/api/topics")]
    except KmqError:  # for example because the token is only for messages: then there is no hint
        names = []
    from kmq.log import topics

    return topics.unknown(name, names)


def unknown_group(name: str) -> ConfigError:
    """Return the error that the broker has no such group, with the nearest existing name."""
    from kmq.log import topics

    return topics.unknown(name, [row["group"] for row in ask("GET", "/api/groups")], "group")
