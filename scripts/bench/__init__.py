"""Measurements of the broker: speed, memory, latency, startup. Never part of a test run. `make bench` runs them."""
