"""GET /api/overview of a gateway, by URL: for a broker elsewhere, and for what only the gateway of this one knows.

Bounded     An answer of more than _MOST bytes is refused; a gateway that does not answer is given up after _TIMEOUT_S.
"""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from kmq.cli.top.screen import clean
from kmq.cli.top.snapshot import Document
from kmq.errors import ConfigError, KmqError, RetryError

_TIMEOUT_S = 5.0
_MOST = 4 << 20
_LONGEST = 200  # characters of a reason that a server gives
_PATH = "/api/overview"
OLDER = f"this broker is older than kmq top: it has no {_PATH}"


class GatewayClient:
    """The gateway at a URL. Raises ConfigError if the URL is none."""

    def __init__(self, url: str, token: str = "", ca: str = "") -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--url {url!r}: must be http://<host>:<port> or https://<host>:<port>")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._where = parts.hostname, port or (443 if parts.scheme == "https" else 8082)
        self._path = parts.path.rstrip("/") + _PATH
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = ssl.create_default_context(cafile=ca or None) if parts.scheme == "https" else None
        self._open: http.client.HTTPConnection | None = None

    def overview(self) -> Document:
        """Return the overview. Raises RetryError if there is no answer, KmqError if there is another one."""
        try:
            status, text = self._get()
        except (OSError, http.client.HTTPException) as err:
            self.close()
            reason = getattr(err, "strerror", None) or str(err) or type(err).__name__
            raise RetryError(f"{self.url}: {clean(reason[:_LONGEST], False)}") from err
        if status in (401, 403):
            raise KmqError(f"{self.url}: {_message(text) or 'may not look'} ({status}); give a token with --token")
        if status in (404, 405):
            raise KmqError(f"{self.url}: {OLDER}")
        found = _parsed(text)
        if status != 200 or not found:
            raise RetryError(f"{self.url}: answered {status}, without an overview")
        return found

    def _get(self) -> tuple[int, bytes]:
        if self._open is None:
            host, port = self._where
            if self._tls is None:
                self._open = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
            else:
                self._open = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=self._tls)
        self._open.request("GET", self._path, headers=self._headers)
        response = self._open.getresponse()
        text = response.read(_MOST + 1)
        if len(text) > _MOST:
            raise http.client.HTTPException(f"the answer is larger than {_MOST >> 20} MiB")
        if response.will_close:
            self.close()
        return response.status, text

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _parsed(text: bytes) -> Document:
    """Return the object in an answer; {} if there is none, because a URL may lead to anything."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _message(text: bytes) -> str:
    """Return why a gateway refuses."""
    message = _parsed(text).get("message")
    return clean(message[:_LONGEST], False) if isinstance(message, str) else ""


class Asker:
    """Asks again and again, in a thread, so that a gateway that hangs does not stop the screen."""

    def __init__(self, find: Callable[[], GatewayClient], pause_s: float) -> None:
        """`find` returns the gateway to ask; it may raise KmqError."""
        self._find, self._pause_s = find, pause_s
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._document: Document | None = None
        self._problem, self._at = "", 0.0
        threading.Thread(target=self._run, name="kmq-top-ask", daemon=True).start()

    def last(self) -> tuple[Document | None, str, float]:
        """Return the last answer, why there is no newer one ("": there is), and the age of the answer in seconds."""
        with self._lock:
            return self._document, self._problem, time.monotonic() - self._at

    def close(self) -> None:
        self._end.set()

    def _run(self) -> None:
        gateway: GatewayClient | None = None
        while not self._end.wait(self._pause_s if self._at or self._problem else 0):
            try:
                gateway = gateway or self._find()
                document, problem = gateway.overview(), ""
            except KmqError as err:
                document, problem, gateway = None, str(err), None  # it may have another port when it is up again
            with self._lock:
                self._problem = problem
                if document is not None:
                    self._document, self._at = document, time.monotonic()
