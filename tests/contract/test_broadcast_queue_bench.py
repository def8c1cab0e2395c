"""The benchmark of the Broadcast Queue against a real Consul: each figure has the bar that was promised."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_bq import parts as bq


def test_figures_of_broadcast_queue_have_the_bars_that_were_promised(consul, tmp_path):
    class OneServer:
        addresses = consul.address

    bench = bq.Bench(OneServer(), tmp_path, quick=True)
    bench.messages = bench.latencies = bench.waiting = 5
    bench.idle_s = 0.5
    parts = (bq.publish, bq.delivery, bq.catch_up, bq.idle)
    figures = [figure for part in parts for figure in part(bench)]
    assert [figure.bar for figure in figures] == ["≤ 3", "≤ 3", "≤ 20", "≥ 2000", "< 0.5"]
    assert all(figure.value is not None and figure.value >= 0 for figure in figures)
