"""Alerts and dashboard: they ask for metrics that are there, and each alert says what to do and where it is written."""

import os
import re
import shutil
import subprocess
from collections import Counter

import alerting
import pytest
import yaml
from brokers import ROOT

from kmq.broker import health
from kmq.gateway.core import metrics

RULES = alerting.rules()
BASE = "https://kmq.example.com/docs/operations.md"
_OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")


def declared(name):
    """Whether /metrics has it; `up` is Prometheus' own, process_* that of its client."""
    names = {row[0] for row in metrics.DECLARED}
    return name in names or _OF_HISTOGRAMS.sub("", name) in names or name == "up" or name.startswith("process_")


def named(code):
    return "Kmq" + "".join(part.title() for part in code.split("_"))


def kustomize(path):
    if not shutil.which("kubectl"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("kubectl renders it, and there is none")
    done = subprocess.run(["kubectl", "kustomize", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_every_metric_that_a_rule_or_a_panel_asks_for_is_declared():
    expressions = [*(rule["expr"] for rule in RULES), *alerting.queries().values()]
    asked = set().union(*map(alerting.metrics, expressions))
    assert len(asked) > 30
    assert [name for name in sorted(asked) if not declared(name)] == []


def test_every_reason_and_every_warning_is_an_alert_of_its_own():
    of_codes = {
        rule["alert"]: rule["expr"] for rule in RULES if re.fullmatch(r"kmq_(not_ready|warning)\{.*", rule["expr"])
    }
    expected = {named(code): f'kmq_not_ready{{reason="{code}"}} == 1' for code in health.REASONS}
    expected |= {named(code): f'kmq_warning{{reason="{code}"}} == 1' for code in health.ALL_WARNINGS}
    assert of_codes == expected
    others = {rule["alert"] for rule in RULES} - of_codes.keys()
    assert others == {"KmqScrapeFails", "KmqGone"}, "one list: only what a broker cannot say of itself is no finding"
    sections = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in RULES if rule["alert"] in of_codes}
    assert sections == {named(code): f"{BASE}#{code}" for code in (*health.REASONS, *health.ALL_WARNINGS)}


def test_every_alert_has_a_severity_a_summary_and_a_runbook():
    assert [name for name, count in Counter(rule["alert"] for rule in RULES).items() if count > 1] == []
    for rule in RULES:
        said = rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule
        assert set(said) == {"summary", "description", "runbook_url"}, rule
        assert said["description"].endswith(".") and not said["summary"].endswith("."), rule
        assert len(said["summary"]) < 130 and said["runbook_url"].startswith(f"{BASE}#"), rule


def test_an_alert_without_a_wait_looks_back_or_is_about_what_is_over():
    """Otherwise one bad scrape would wake somebody."""
    for rule in RULES:
        assert "for" in rule or re.search(r"(increase|changes)\(\w+\[\d+m\]\)", rule["expr"]), rule


def test_the_runbook_has_another_address_as_the_page_says(tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.S)
    (block,) = [block for block in blocks if "runbook_url" in block]
    (tmp_path / "kustomization.yaml").write_text(block.replace("../kmq", os.path.relpath(ROOT, tmp_path.resolve())))
    (rendered,) = [document for document in kustomize(tmp_path) if document["kind"] == "PrometheusRule"]
    page = "https://wiki.example.com/kmq/operations"
    expected = [rule["annotations"]["runbook_url"].replace(BASE, page) for rule in RULES]
    found = [rule["annotations"]["runbook_url"] for group in rendered["spec"]["groups"] for rule in group["rules"]]
    assert found == expected and all(url.startswith(f"{page}#") for url in found)


def test_the_dashboard_is_one_that_grafana_reads():
    board = alerting.dashboard()
    panels = board["panels"]
    assert [number for number, count in Counter(panel["id"] for panel in panels).items() if count > 1] == []
    assert [title for title, count in Counter(panel["title"] for panel in panels).items() if count > 1] == []
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["targets"] and panel["datasource"]["uid"] == "${datasource}")
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "job", "instance"}


def test_grafana_finds_the_dashboard_by_its_label(tmp_path):
    there = os.path.relpath(ROOT / "k8s", tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(f"components: [{there}/components/alerts]\nnamespace: monitoring\n")
    (board,) = [document for document in kustomize(tmp_path) if document["kind"] == "ConfigMap"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert board["data"] == {"kmq.json": (alerting.ALERTS / "kmq.json").read_text()}


def test_the_page_names_every_alert_that_is_no_code():
    page = (ROOT / "docs/kubernetes.md").read_text()
    codes = {named(code) for code in (*health.REASONS, *health.ALL_WARNINGS)}
    others = {rule["alert"] for rule in RULES} - codes
    assert {name for name in others if f"`{name}`" not in page} == set()
    assert set(re.findall(r"`(Kmq\w+)`", page)) <= others | codes
