"""Which broker a command talks to: the one of this directory, or one elsewhere (`kmq --url`, `--host`, `--token`).

Elsewhere   Only what the network shows can be used, so commands that read files refuse the options. Messages go by the
            line ports of that host (KMQ_PORT and KMQ_EGRESS_PORT, over https:// KMQ_TLS_PORT and KMQ_EGRESS_TLS_PORT),
            everything else by its HTTP API. KMQ_HOST has no say in it: it is where a broker of this directory listens.
Bounded     An answer of more than _MOST bytes is refused.
"""

import http.client
import json
import ssl
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from kmq.cli.output import local_headers
from kmq.config.settings import load
from kmq.errors import ConfigError, KmqError, RetryError, quotation
from kmq.log import topics
from kmq.wire import refusals

# The commands that can ask a broker elsewhere.
ABLE = ("produce", "ship", "consume", "tail", "topics", "groups", "dlq", "top")
HTTP_PORT = 8082
_TIMEOUT_S = 30.0
_MOST = 64 << 20
_LINES_IN = (5673, 5443)  # without and with TLS, where the setting is 0
_LINES_OUT = (5674, 5444)


class GatewayClient:
    """The gateway at a URL. Raises ConfigError if the URL is none."""

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
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self.tls else HTTP_PORT)
        self._path = parts.path.rstrip("/")
        self._open: http.client.HTTPConnection | None = None

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        most: int = _MOST,
        timeout_s: float = _TIMEOUT_S,
    ) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises OSError, HTTPException; then the next call connects again."""
        if self._open is None and self.tls is None:
            self._open = http.client.HTTPConnection(self.host, self._port, timeout=timeout_s)
        elif self._open is None:
            self._open = http.client.HTTPSConnection(self.host, self._port, timeout=timeout_s, context=self.tls)
        own = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        sent = None if body is None else json.dumps(body).encode()
        self._open.request(method, self._path + path, sent, own | (headers or {}))
        response = self._open.getresponse()
        text = response.read(most + 1)
        if len(text) > most:
            raise http.client.HTTPException(f"the answer is larger than {most >> 20} MiB")
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
    """Keep what was given before the command. Raises ConfigError for a command that looks at this machine."""
    _chosen.set(None)
    if url and host:
        raise ConfigError("--url and --host exclude each other")
    if not url and not host:
        if token:
            raise ConfigError("--token needs --url or --host")
        return
    if command not in ABLE:
        able = ", ".join(ABLE)
        raise ConfigError(f"kmq {command}: looks at this machine, so it has no --url and no --host; these have: {able}")
    url = url or f"http://{f'[{host}]' if ':' in host else host}:{HTTP_PORT}"
    _chosen.set(GatewayClient(url, read_token(token)))


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
    """Return the gateway that --url or --host names; None: the broker of this directory is meant."""
    return _chosen.get()


def need_files(command: str) -> None:
    """Raise ConfigError if a broker elsewhere is meant, whose files this command would have to read."""
    if elsewhere() is not None:
        raise ConfigError(f"kmq {command}: reads the files of a broker, so it has no --url and no --host")


# --- the HTTP API ----------------------------------------------------------------------------------------------------


def ask(method: str, path: str, body: object = None, topic: str = "") -> Any:
    """Return the answer of the gateway, parsed; None if it has no body. Raises RetryError and KmqError.

    `topic`: the one that the request names, for the error that there is none.
    """
    gateway, headers = elsewhere(), dict[str, str]()
    if gateway is None:
        from kmq.client.lines import read_port

        settings = load()
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        gateway = GatewayClient(f"http://{host}:{read_port(settings, 'http', settings.http_port)}")
        headers = local_headers(settings)
    try:
        status, text = gateway.request(method, path, body, headers=headers)
    except (OSError, http.client.HTTPException) as err:
        reason = getattr(err, "strerror", None) or str(err) or type(err).__name__
        raise RetryError(f"{gateway.url}: {reason}; is the broker up, with its gateway? (kmq status)") from err
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
    error = KmqError(message)
    error.exit_code = refusals.find(code).exit_code
    raise error


def unknown_topic(name: str) -> ConfigError:
    """Return the error that the broker has no such topic, with the nearest of those that it has."""
    try:
        names = [row["name"] for row in ask("GET", "/api/topics")]
    except KmqError:  # a token for messages alone, for example: then there is no hint
        names = []
    return topics.unknown(name, names)
