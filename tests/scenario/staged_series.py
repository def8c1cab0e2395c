"""The series of a healthy broker, and for each alert those of the fault that it is about, as promtool plays them."""

import re
from collections.abc import Callable
from typing import Any

import alerting
from prometheus_client.parser import text_string_to_metric_families

HOURS = 9  # longer than any alert looks back and waits
BEGIN = 30  # minute in which a fault begins
TARGET = {"job": "kmq-pods", "instance": "10.0.0.7:8082", "namespace": "shop", "pod": "kmq-0"}
HEALTHY = {"kmq_ready": 1, "kmq_not_ready": 0, "kmq_warning": 0}  # whatever the machine of the tests is like
Values = Callable[[int], str]  # minutes → how promtool writes so many samples, one a minute

_FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'
_CODES = re.compile(r'(kmq_(?:not_ready|warning))\{reason="(\w+)"\}')


def steps(before: float, after: float) -> Values:
    """`before`, and from the fault on `after`."""
    return lambda minutes: f"{before}x{BEGIN - 1} {after}x{minutes - BEGIN}"


def grows(by: float) -> Values:
    """0, and from the fault on `by` more each minute."""
    return lambda minutes: f"0x{BEGIN - 1} 0{by:+}x{minutes - BEGIN}"


def ends(value: float) -> Values:
    """`value`, and from the fault on nothing."""
    return lambda minutes: f"{value}x{BEGIN - 1} stale"


# Alert → series that differ from those of a healthy broker. A series that the broker does not have is added; a selector
# without labels means every series of that metric.
FAULTS: dict[str, dict[str, Values]] = {
    rule["alert"]: {f'{found[1]}{{reason="{found[2]}"}}': steps(0, 1)}
    for rule in alerting.rules()
    if (found := _CODES.match(rule["expr"]))
} | {
    "KmqScrapeFails": {"up": steps(1, 0), "kmq_*": ends(1)},
    "KmqGone": {"up": ends(1), "kmq_*": ends(1)},
}


def _written(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}"


def _parsed(selector: str) -> tuple[str, dict[str, str]]:
    name, _, labels = selector.rstrip("}").partition("{")
    return name, dict(re.findall(r'(\w+)="([^"]*)"', labels))


def _minutes(wait: str) -> int:
    return int(wait[:-1]) * {"m": 1, "h": 60}[wait[-1]]


class Recorded:
    """The series of one scrape, of those metrics that alerts ask for: constant, and messages flow."""

    def __init__(self, text: str) -> None:
        asked = set().union(*(alerting.metrics(rule["expr"]) for rule in alerting.rules()))
        self._series: list[tuple[str, dict[str, str], Values]] = [("up", {}, steps(1, 1))]
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in asked:
                    value = HEALTHY.get(sample.name, sample.value)
                    flows = sample.name == "kmq_messages_total"
                    self._series.append((sample.name, sample.labels, grows(600) if flows else steps(value, value)))

    def healthy(self, hours: int) -> dict[str, Any]:
        """Return a test of promtool: nothing fires."""
        checks = [{"expr": _FIRING, "eval_time": f"{hour}h"} for hour in range(1, hours)]
        return self._test("healthy", {}, hours * 60, checks)

    def test_of(self, rule: dict[str, Any], fault: dict[str, Values]) -> dict[str, Any]:
        """Return a test of promtool: this rule fires, no other does, and none does before its time."""
        name, wait = rule["alert"], _minutes(rule.get("for", "0m"))
        early = BEGIN + wait - 1 if wait else BEGIN - 1
        late = BEGIN + wait + (60 * 2 if "h" in rule.get("for", "") else 20)
        fired = [{"labels": f'{{alertname="{name}"}}', "value": 1}]
        checks: list[dict[str, Any]] = [
            {"expr": _FIRING, "eval_time": f"{early}m"},
            {"expr": _FIRING, "eval_time": f"{late}m", "exp_samples": fired},
        ]
        return self._test(name, fault, late + 1, checks)

    def _test(self, name: str, fault: dict[str, Values], minutes: int, checks: list[dict[str, Any]]) -> dict[str, Any]:
        found = {_written(each, labels | TARGET): values(minutes) for each, labels, values in self._series}
        for selector, values in fault.items():
            wanted, labels = _parsed(selector)
            alike = [each for each, *_ in self._series if each.startswith(wanted[:-1])] if wanted.endswith("*") else []
            for each, own, _ in self._series:
                if each in alike:
                    found[_written(each, own | TARGET)] = values(minutes)
            if not alike:
                found[_written(wanted, labels | TARGET)] = values(minutes)
        series = [{"series": each, "values": values} for each, values in found.items()]
        return {"name": name, "interval": "1m", "input_series": series, "promql_expr_test": checks}
