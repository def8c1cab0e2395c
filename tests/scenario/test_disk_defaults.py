"""The disk settings of k8s/overlays/dev, as they are, under a load that is more than its quota: producers never notice."""

import contextlib
import os
import re
from pathlib import Path

import pytest
from brokers import ROOT

from kmq.config.settings import load
from kmq.config.values import MIB

PARTITIONS = 12  # busy at once, as k8s/base/settings.env promises
LINE, BATCH = 2000, 2000  # so many bytes, so many lines of a partition at once


def settings_of_dev():
    """Name → text of the base's settings.env and of what the overlay has instead."""
    literals = re.findall(r"- (KMQ_\w+=.*)", (ROOT / "k8s/overlays/dev/kustomization.yaml").read_text())
    lines = [*(ROOT / "k8s/base/settings.env").read_text().splitlines(), *literals]
    found = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {name: text for name, text in found.items() if "_QUOTA" in name or "RETENTION" in name or "SEGMENT" in name}


def used(path):
    total = 0
    for file in Path(path).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # retention has taken it
            total += os.lstat(file).st_blocks * 512
    return total


@pytest.mark.timeout(280)  # refused for good, the load stands still
def test_steady_load_on_twelve_partitions_stays_under_the_quota(broker):
    given = settings_of_dev()
    limits = load(given, "/nonexistent.toml")
    broker.up(**given)
    rounds = 14 * limits.retention_bytes // 10 // (BATCH * LINE)
    peak = 0
    for number in range(rounds):
        for topic in range(PARTITIONS):
            broker.send_lines([b"t%d.k|%d|%d|%b" % (topic, number, n, b"x" * LINE) for n in range(BATCH)])
        peak = max(peak, used(broker.data))
        # Steady: no faster than it is routed and retained, on a machine of any speed.
        broker.wait(lambda: used(broker.data) < limits.data_quota * 8 // 10, "retention keeps pace")
    broker.wait_routed(rounds * PARTITIONS * BATCH)
    sizes = [used(broker.data / "topics" / f"t{n}") for n in range(PARTITIONS)]
    print(f"sent={rounds * PARTITIONS * BATCH * LINE // MIB} MiB peak={peak // MIB} MiB of {limits.data_quota // MIB}")
    assert min(sizes) > limits.retention_bytes - 2 * limits.segment_bytes, "the limits were not reached"
    assert peak < limits.data_quota
    assert "event=refusing" not in broker.log()
