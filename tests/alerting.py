"""The alerts and the dashboard of k8s/components/alerts, as their tests read them."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ALERTS = Path(__file__).parents[1] / "k8s/components/alerts"
# A metric with its labels, as it stands in an expression. (No other word of PromQL begins so.)
_SELECTOR = re.compile(r"\b((?:kmq|process|up)(?:_\w+)?)(\{[^}]*\})?(?=[^\w(]|$)")


def groups() -> list[dict[str, Any]]:
    """Return the groups of rules."""
    found: list[dict[str, Any]] = yaml.safe_load((ALERTS / "rules.yaml").read_text())["spec"]["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    """Return all rules."""
    return [rule for group in groups() for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    found: dict[str, Any] = json.loads((ALERTS / "kmq.json").read_text())
    return found


def queries() -> dict[str, str]:
    """Return each expression of the dashboard by its panel and number, as Grafana sends it when nothing is chosen."""
    chosen = {"$job": ".*", "$instance": ".*", "$__rate_interval": "1m"}
    found = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = str(target["expr"])
            for variable, value in chosen.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression, expression
            found[f"{panel['title']}: {target['refId']}"] = expression
    return found


def selectors(expression: str) -> list[str]:
    """Return the series that an expression asks for, without the time."""
    return [name + labels for name, labels in _SELECTOR.findall(expression)]


def metrics(expression: str) -> set[str]:
    """Return the names of metrics in an expression."""
    return {name for name, _ in _SELECTOR.findall(expression)}
