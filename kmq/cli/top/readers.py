"""Who looks: at the broker of this directory (LocalReader), or by URL at one elsewhere (RemoteReader).

Both return the same document, that of GET /api/overview, with `notes` on what it lacks.
Invariant   A look never blocks on the network: the gateway is asked in a thread. The local reader needs no gateway,
            no running broker and no data directory.
Memory      At most _KEPT events. One Meter per counter, with at most _SAMPLES samples; `Meters` forgets a counter that is
            no longer fed. Of latencies one sample a second, for at most _LATENCY_S.
"""

import time
from collections import deque
from typing import Any, Generic, Protocol, TypeVar

from kmq.broker import stats
from kmq.broker import status as statuses
from kmq.broker.status import BrokerStatus
from kmq.cli.top.overview import Asker, GatewayClient
from kmq.cli.top.snapshot import Document, TopSnapshot, parse
from kmq.cli.top.topic_rates import TopicRates
from kmq.config.settings import Settings

_ASK_S = 1.0  # between two questions to a gateway
_SWEEP_S = 0.003  # of processor time, in each look
_OLD_S = 10.0  # what the gateway said is not shown for longer
_PATIENCE_S = 5.0  # for the first answer of a gateway, where nobody sees the next look
_MOST = 100  # topics
_KEPT = 100  # events
_WINDOW_S = 2.0  # of a rate: long enough to be readable, short enough to see a stop at once
_SAMPLES = 16
_LATENCY_S = 10
_SAMPLE_S = 1.0

_T = TypeVar("_T")


class TopReader(Protocol):
    """One who looks."""

    def look(self) -> Document:
        """Return what is known now."""

    def snapshot(self) -> TopSnapshot:
        """Return the same as a value, with the problem if nothing newer can be known."""

    def measured(self, span_s: float) -> Document:
        """Return what is known after `span_s`, in which rates are measured. Raises KmqError if nothing can be known."""

    def close(self) -> None:
        """Look no more."""


class LocalReader:
    """Looks at the broker of these settings: stats page, links, files; groups and events from its gateway."""

    def __init__(self, settings: Settings, sweep_s: float = _SWEEP_S) -> None:
        self._settings, self._sweep_s = settings, sweep_s
        self._meters, self._changes, self._topics = (
            Meters[tuple[str, str, int]](),
            EventWatcher(),
            TopicRates(settings.data),
        )
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

    def _rates(self, at: float, found: BrokerStatus) -> Document:
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
        page = stats.peek(self._settings.instance)
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

    def _gateway(self) -> GatewayClient:
        from kmq.access import tokens
        from kmq.client.lines import read_port

        settings = self._settings
        return GatewayClient(
            f"http://{settings.host}:{read_port(settings, 'http', settings.http_port)}", tokens.local(settings)
        )

    def snapshot(self) -> TopSnapshot:
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

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._asker: Asker | None = None

    def look(self) -> Document:
        return self._gateway.overview()

    def measured(self, span_s: float) -> Document:
        return self.look()

    def snapshot(self) -> TopSnapshot:
        self._asker = self._asker or Asker(lambda: self._gateway, _ASK_S / 2)
        told, problem, _ = self._asker.last()
        if told is None:
            return parse({}, problem or f"asking {self._gateway.url}")
        return parse(told, problem)

    def close(self) -> None:
        if self._asker is not None:
            self._asker.close()


# --- events ----------------------------------------------------------------------------------------------------------
# What differs between two looks, for a broker without a gateway.


class EventWatcher:
    """The events since this command was started, newest first."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._before: Document | None = None

    def see(self, status: Document) -> None:
        """Compare with the document of `kmq status` that was seen before."""
        before, self._before = self._before, status
        if before is None:
            return
        old = {stage["name"]: stage for stage in before["stages"]}
        for stage in status["stages"]:
            was = old.get(stage["name"])
            if was is not None:
                self._see_stage(was, stage)
        codes, now = ({(f["code"], f["about"]): f for f in each["findings"]} for each in (before, status))
        for key in now.keys() - codes.keys():
            found = now[key]
            kind = "warning" if found["severity"] == "warning" else "not_ready"
            self._add(kind, found["about"], f"{found['code']}: {found['why']}")
        for key in codes.keys() - now.keys():
            self._add("cleared", codes[key]["about"], key[0])
        if status["ready"] and not before["ready"]:
            self._add("ready", "broker", "messages are accepted again")

    def _see_stage(self, was: dict[str, Any], now: dict[str, Any]) -> None:
        name = now["name"]
        if now["restarts"] > was["restarts"]:
            self._add("restarted", name, f"restart {now['restarts']}, pid {now['pid']}")
        elif now["pid"] != was["pid"]:
            self._add("started", name, f"pid {now['pid']}")
        if now["state"] == "stopped" != was["state"]:
            self._add("stopped", name, "ended in order")
        for kind in ("refused", "dropped"):
            if now["pid"] == was["pid"] and now[kind] > was[kind]:
                self._add(kind, name, f"{now[kind] - was[kind]:,} messages")

    def _add(self, kind: str, about: str, text: str) -> None:
        self.events.appendleft({"at": time.time(), "kind": kind, "about": about, "text": text})


# --- rates -----------------------------------------------------------------------------------------------------------


class Meter:
    """One counter. It may begin again at 0: then its rate begins again, too."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def feed(self, at: float, count: int) -> float | None:
        """Add what the counter says at `at` (monotonic seconds); return its rate, None if it is not known yet."""
        samples = self._samples
        if samples and (count < samples[-1][1] or at <= samples[-1][0]):
            samples.clear()
        samples.append((at, count))
        while len(samples) > 2 and at - samples[1][0] >= _WINDOW_S:
            samples.popleft()
        if len(samples) < 2:
            return None
        first_at, first = samples[0]
        return (count - first) / (at - first_at)


class Meters(Generic[_T]):
    """The meters of many counters by name."""

    def __init__(self) -> None:
        self._meters: dict[_T, Meter] = {}

    def feed(self, at: float, counts: dict[_T, int]) -> dict[_T, float | None]:
        """Add what all counters say; return their rates. A counter that is missing here is forgotten."""
        self._meters = {name: self._meters.get(name) or Meter() for name in counts}
        return {name: self._meters[name].feed(at, count) for name, count in counts.items()}


# --- latencies -------------------------------------------------------------------------------------------------------


class Latencies:
    """p50 and p99 of the last _LATENCY_S seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, stats.HistogramSnapshot]]] = deque(maxlen=_LATENCY_S + 1)

    def feed(self, at: float, page: stats.StatsPage) -> Document:
        """Look at the page at `at` (monotonic seconds); return what /api/overview has as `latency`."""
        now = {what: page.histogram(what).snapshot() for what in stats.TIMED.values()}
        if not self._samples or at - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((at, now))
        before = self._samples[0][1]
        return {what: _quantiles(stats.difference(now[what], before[what])) for what in now}


def _quantiles(times: stats.HistogramSnapshot) -> Document | None:
    if not times.count:
        return None
    return {"p50": stats.quantile(times, 0.5), "p99": stats.quantile(times, 0.99), "count": times.count}
