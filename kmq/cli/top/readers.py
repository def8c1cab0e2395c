"""Read the state of a broker for `kmq top`: LocalReader that of this directory, RemoteReader one elsewhere by its URL.

Both return the document of GET /api/overview, with `notes` on what it lacks.
Invariant   `look` never blocks on the network: a thread asks the gateway. The local reader needs no gateway,
            no running broker and no data directory.
Bounded     A response of more than _MOST bytes is refused; after _TIMEOUT_S a request to the gateway is given up.
"""

import json
import threading
import time
from collections.abc import Callable

from kmq.broker import status
from kmq.broker.overview import Overview, VerdictChanges
from kmq.broker.status import BrokerStatus
from kmq.cli.elsewhere import GatewayClient, of_directory
from kmq.cli.top.screen import clean
from kmq.cli.top.snapshot import Document, TopSnapshot, parse
from kmq.config.settings import Settings
from kmq.errors import KmqError, RetryError

# --- a gateway -------------------------------------------------------------------------------------------------------

_MOST = 4 << 20
_LONGEST = 200  # characters of a reason that a server gives
_TIMEOUT_S = 5.0
_PATH = "/api/overview"
OLDER = f"this broker is older than kmq top: it has no {_PATH}"


def ask_overview(gateway: GatewayClient) -> Document:
    """Return the overview. Raises RetryError without a response, KmqError for an unexpected one."""
    try:
        status, text = gateway.request("GET", _PATH, most=_MOST, timeout_s=_TIMEOUT_S)
    except RetryError as err:
        raise RetryError(clean(str(err)[: len(gateway.url) + _LONGEST], False)) from err
    if status in (401, 403):
        raise KmqError(f"{gateway.url}: {_message(text) or 'may not look'} ({status}); give a token with --token")
    if status in (404, 405):
        raise KmqError(f"{gateway.url}: {OLDER}")
    found = _parsed(text)
    if status != 200 or not found:
        raise RetryError(f"{gateway.url}: answered {status}, without an overview")
    return found


def _parsed(text: bytes) -> Document:
    """Return the JSON object in a response; {} for anything else, because a URL may lead to any server."""
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
    """Asks a gateway repeatedly, in a thread, so that a gateway that hangs does not stop the screen."""

    def __init__(self, find: Callable[[], GatewayClient], pause_s: float) -> None:
        """`find` returns the gateway to ask; it may raise KmqError."""
        self._find, self._pause_s = find, pause_s
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._document: Document | None = None
        self._problem, self._at = "", 0.0
        threading.Thread(target=self._run, name="kmq-top-ask", daemon=True).start()

    def last(self) -> tuple[Document | None, str, float]:
        """Return the last response, why there is no newer one ("" if there is), and the age of the response in
        seconds.
        """
        with self._lock:
            return self._document, self._problem, time.monotonic() - self._at

    def close(self) -> None:
        self._end.set()

    def _run(self) -> None:
        gateway: GatewayClient | None = None
        while not self._end.wait(self._pause_s if self._at or self._problem else 0):
            try:
                gateway = gateway or self._find()
                document, problem = ask_overview(gateway), ""
            except KmqError as err:
                document, problem, gateway = None, str(err), None  # after a restart the gateway may have another port
            with self._lock:
                self._problem = problem
                if document is not None:
                    self._document, self._at = document, time.monotonic()


# --- readers ---------------------------------------------------------------------------------------------------------

_ASK_S = 1.0  # between two requests to a gateway
_SWEEP_S = 0.003  # processor time for each look
_OLD_S = 10.0  # a gateway's response is not shown for longer
_PATIENCE_S = 5.0  # for the first response of a gateway, if there is only one look
_TOPICS = 100


class LocalReader:
    """Looks at the broker of these settings: stats page, links, files; groups and events from its gateway."""

    def __init__(self, settings: Settings, sweep_s: float = _SWEEP_S) -> None:
        self._settings, self._sweep_s = settings, sweep_s
        self._overview = Overview(settings)
        self._changes = VerdictChanges(None, self._overview.events.add)
        self._losses: dict[tuple[str, str, int], int] | None = None  # (stage, what, its start time) → messages
        self._asker: Asker | None = None

    def look(self) -> Document:
        """Return the current state."""
        self._overview.look(self._sweep_s)
        found = status.collect(self._settings)
        self._follow(found)
        gateway = found.gateway
        has_gateway = gateway is not None and gateway.state not in ("down", "stopped", "dead")
        return self._overview.document(found, _TOPICS) | self._from_gateway(has_gateway)

    def _follow(self, found: BrokerStatus) -> None:
        """Note the changes since the last look: those that a gateway notes as events, and lost messages."""
        losses = {
            (stage.name, what, stage.begun): int(getattr(stage, what))
            for stage in found.stages
            for what in ("refused", "dropped")
        }
        if self._losses is None:
            self._changes.begin(found.verdict)
        else:
            self._changes.follow(found.verdict, time.monotonic())
            for (name, what, begun), count in losses.items():
                if (more := count - self._losses.get((name, what, begun), count)) > 0:
                    self._overview.events.add(what, name, f"{more:,} messages")
        self._losses = losses

    def _from_gateway(self, is_there: bool) -> Document:
        own: Document = {"groups": [], "groups_total": 0}
        since = "seen since kmq top was started"
        if not is_there:
            self.close()
            return own | {"notes": {"groups": "no gateway: it is what knows the groups", "events": since}}
        self._asker = self._asker or Asker(lambda: of_directory(self._settings), _ASK_S)
        answer, problem, age_s = self._asker.last()
        if answer is None or age_s > _OLD_S:
            return own | {"notes": {"groups": problem or "asking the gateway", "events": since}}
        notes = {"groups": f"{age_s:.0f} s old: {problem}", "events": since} if problem else {}
        names = ("groups", "groups_total", *(() if problem else ("events",)))
        return own | {name: answer[name] for name in names if name in answer} | {"notes": notes}

    def snapshot(self) -> TopSnapshot:
        """Return the same as a value, with the problem if the state cannot be read now."""
        return parse(self.look())

    def measured(self, span_s: float) -> Document:
        """Return the state after `span_s`, in which rates are measured. Raises KmqError if it cannot be read."""
        began, document = time.monotonic(), self.look()
        while (spent_s := time.monotonic() - began) < span_s or (self._is_asking() and spent_s < _PATIENCE_S):
            time.sleep(span_s / 5)
            document = self.look()
        return document

    def _is_asking(self) -> bool:
        return self._asker is not None and self._asker.last()[:2] == (None, "")

    def close(self) -> None:
        if self._asker is not None:
            self._asker.close()
            self._asker = None


class RemoteReader:
    """Asks the gateway of a broker elsewhere."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._asker: Asker | None = None

    def look(self) -> Document:
        return ask_overview(self._gateway)

    def measured(self, span_s: float) -> Document:
        return self.look()

    def snapshot(self) -> TopSnapshot:
        self._asker = self._asker or Asker(lambda: self._gateway, _ASK_S / 2)
        answer, problem, _ = self._asker.last()
        if answer is None:
            return parse({}, problem or f"asking {self._gateway.url}")
        return parse(answer, problem)

    def close(self) -> None:
        if self._asker is not None:
            self._asker.close()


TopReader = LocalReader | RemoteReader
