"""Quix Streams, exactly once, at its default settings: it keeps the offsets that it is told of its changelog."""

import json
import subprocess
from collections import Counter

import pytest
from brokers import Broker
from confluent_kafka import Producer
from zoo import program

KEYS, RECORDS, RUNS = 3, 120, 3


@pytest.mark.timeout(900)  # it is fetched once
def test_a_program_that_counts_exactly_once_goes_on_over_restarts_and_lost_state(tmp_path):
    command = program("quix")
    broker = Broker(tmp_path / "broker")
    try:
        broker.up()
        address = f"127.0.0.1:{(broker.pipes / 'kafka.port').read_text().strip()}"
        made = Producer({"bootstrap.servers": address, "log_level": 0})
        for number in range(RECORDS):
            made.produce("words", b"%d" % number, key=b"k%d" % (number % KEYS))
        assert made.flush(60) == 0
        for run in range(RUNS):
            # The last run finds no state: it has to be in the changelog.
            state = tmp_path / ("state" if run < RUNS - 1 else "another")
            words = [*command, address, "words", "counts", state, str(RECORDS // RUNS)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        told = Counter(json.loads(line.split(b"|", 5)[5])["count"] for line in broker.lines("counts"))
    finally:
        broker.close()
    assert told == dict.fromkeys(range(1, RECORDS // KEYS + 1), KEYS)
