"""Who looks: at the broker of this directory (LocalReader), or by URL at one elsewhere (RemoteReader).

Both return the same document, that of GET /api/overview, with `notes` on what it lacks.
Invariant   A look never blocks on the network: the gateway is asked in a thread. The local reader needs no gateway,
            no running broker and no data directory.
"""

import time
from typing import Protocol

from kmq.broker import status as statuses
from kmq.broker.stats import peek
from kmq.broker.status import Status
from kmq.cli.top.changes import Changes
from kmq.cli.top.latencies import Latencies
from kmq.cli.top.overview import Asker, Gateway
from kmq.cli.top.rates import Meters
from kmq.cli.top.snapshot import Document, Snapshot, parse
from kmq.cli.top.topic_rates import TopicRates
from kmq.config.settings import Settings

_ASK_S = 1.0  # between two questions to a gateway
_SWEEP_S = 0.003  # of processor time, in each look
_OLD_S = 10.0  # what the gateway said is not shown for longer
_PATIENCE_S = 5.0  # for the first answer of a gateway, where nobody sees the next look
_MOST = 100  # topics


class Reader(Protocol):
    """One who looks."""

    def look(self) -> Document:
        """Return what is known now."""

    def snapshot(self) -> Snapshot:
        """Return the same as a value, with the problem if nothing newer can be known."""

    def measured(self, span_s: float) -> Document:
        """Return what is known after `span_s`, in which rates are measured. Raises KmqError if nothing can be known."""

    def close(self) -> None:
        """Look no more."""


class LocalReader:
    """Looks at the broker of these settings: stats page, links, files; groups and events from its gateway."""

    def __init__(self, settings: Settings, sweep_s: float = _SWEEP_S) -> None:
        self._settings, self._sweep_s = settings, sweep_s
        self._meters, self._changes, self._topics = Meters[tuple[str, str, int]](), Changes(), TopicRates(settings.data)
        self._latencies = Latencies()
        self._asker: Asker | None = None

    def look(self) -> Document:
        at = time.monotonic()
        found = statuses.collect(self._settings)
        status = statuses.as_json(found)
        self._changes.see(status)
        rates = self._rates(at, found)
        self._topics.sweep(self._sweep_s)
        document = {
            "as_of": status["as_of"],
            "status": status,
            "rates": rates,
            "latency": self._times(at),
            "topics": self._topics.rows(_MOST),
            "topics_total": self._topics.total,
        }
        has_gateway = found.gateway is not None and found.gateway.state not in ("down", "stopped", "dead")
        return document | self._from_gateway(has_gateway)

    def _rates(self, at: float, found: Status) -> Document:
        counts = {
            (stage.name, counter, stage.begun): int(getattr(stage, counter))
            for stage in found.processes
            for counter in ("messages", "bytes")
        }
        rates: Document = {}
        for (name, counter, _), rate in self._meters.feed(at, counts).items():
            rates.setdefault(name, {})[counter] = rate
        return rates

    def _times(self, at: float) -> Document:
        page = peek(self._settings.instance)
        return self._latencies.feed(at, page) if page is not None and page.serves(self._settings.data) else {}

    def _from_gateway(self, is_there: bool) -> Document:
        own = {"groups": [], "groups_total": 0, "events": list(self._changes.events)}
        since = "seen since kmq top was started"
        if not is_there:
            self.close()
            return own | {"notes": {"groups": "no gateway: it is what knows the groups", "events": since}}
        self._asker = self._asker or Asker(self._gateway, _ASK_S)
        told, problem, age_s = self._asker.last()
        if told is None or age_s > _OLD_S:
            return own | {"notes": {"groups": problem or "asking the gateway", "events": since}}
        notes = {"groups": f"{age_s:.0f} s old: {problem}", "events": since} if problem else {}
        names = ("groups", "groups_total", *(() if problem else ("events",)))
        return own | {name: told[name] for name in names if name in told} | {"notes": notes}

    def _gateway(self) -> Gateway:
        from kmq.access import tokens
        from kmq.client.lines import read_port

        settings = self._settings
        return Gateway(
            f"http://{settings.host}:{read_port(settings, 'http', settings.http_port)}", tokens.local(settings)
        )

    def snapshot(self) -> Snapshot:
        return parse(self.look())

    def measured(self, span_s: float) -> Document:
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

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asker: Asker | None = None

    def look(self) -> Document:
        return self._gateway.overview()

    def measured(self, span_s: float) -> Document:
        return self.look()

    def snapshot(self) -> Snapshot:
        self._asker = self._asker or Asker(lambda: self._gateway, _ASK_S / 2)
        told, problem, _ = self._asker.last()
        if told is None:
            return parse({}, problem or f"asking {self._gateway.url}")
        return parse(told, problem)

    def close(self) -> None:
        if self._asker is not None:
            self._asker.close()
