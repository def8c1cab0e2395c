"""What is wrong only over time is a finding, too: messages that are refused, a group that falls behind.

How soon it comes and ends is in tests/unit/test_trends.py and test_membership.py.
"""

import json

import pytest
from waiting import meanwhile

PACE_S = 0.2


@pytest.fixture
def broker(new_broker):
    made = new_broker()
    made.up()
    return made


def everywhere(broker):
    """The codes that `kmq status`, /readyz, the metrics and the console's document have, if they agree; else none."""
    said = [{each["code"] for each in json.loads(broker.kmq("status", "--json").stdout)["findings"]}]
    said += [{each["code"] for each in json.loads(broker.get("/readyz")[1])["findings"]}]
    said += [{each["code"] for each in json.loads(broker.get("/api/overview")[1])["status"]["findings"]}]
    lines = broker.get("/metrics")[1].splitlines()
    said += [{line.split('"')[1] for line in lines if line.startswith("kmq_warning{") and line.endswith(" 1.0")}]
    return set.intersection(*said)


def test_refused_lines_and_a_group_that_falls_behind_are_findings_for_all_who_ask(broker):
    assert broker.kmq("topics", "create", "jobs").returncode == 0
    assert broker.kmq("produce", "jobs", text="one\n").returncode == 0
    assert broker.kmq("consume", "jobs", "--group", "mailers", "--count", "1").returncode == 0
    assert {"refused", "lag_grows"} & everywhere(broker) == set()
    with meanwhile(lambda: broker.send_lines([b"jobs|0||more", b"no message"]), every_s=PACE_S):
        broker.wait(lambda: "refused" in everywhere(broker), "the finding of refused lines")
        broker.wait(lambda: "lag_grows" in everywhere(broker), "the finding of a group that falls behind")
    assert "event=lag_grows group=mailers topic=jobs" in broker.log()
