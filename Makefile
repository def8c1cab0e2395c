# What to type. Everything works on a fresh clone with only python3 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SHELL := /bin/bash
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help

help:  ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml scripts/setup
	@scripts/setup $(PYTHON) $(VENV)
	@touch $@

setup: $(STAMP)  ## make the environment in .venv

dist: $(STAMP)  ## wheel and sdist in dist/, to install without a checkout
	@scripts/dist

demo: $(STAMP)  ## set up, ship this machine's logs through the broker (or INPUT="file …"), read them with a group, audit and archive them
	@scripts/demo $(INPUT)

cluster-demo: $(STAMP)  ## two pods and a Spark cluster on this machine: audit and archive over both, by HTTP
	@$(BIN)/python scripts/cluster_demo.py

shard-demo: $(STAMP)  ## a shard of three brokers and a Consul on this machine: a leader is killed, a broker cut off, a disk wiped
	@$(BIN)/python scripts/shard_demo.py

image: $(STAMP)  ## build the image localhost/kmq:dev (TAG=…, BASE=…, BUILDER=podman or docker)
	@scripts/image broker $(TAG)

image-spark: $(STAMP)  ## build localhost/kmq-spark:dev, driver and executors of k8s/overlays/spark, out of the image before
	@scripts/image spark $(TAG)

pod: $(STAMP)  ## a real pod on this machine, from k8s/overlays/dev, until Ctrl-C or SIGTERM (OVERLAY=fleet: three and a Consul; cluster-dev: a shard); root on Debian
	@eval "$$(scripts/pod-setup)" && scripts/image broker && exec $(BIN)/python scripts/play $(OVERLAY)

pod-test: $(STAMP)  ## the scenarios and faults against real pods: sets up podman, builds the image; root on Debian
	@$(BIN)/python -m pytest tests/pod

test: $(STAMP)  ## set up and run all the tests
	@scripts/test

lint: $(STAMP)  ## lint and types: seconds
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

unit: $(STAMP)  ## the unit tests, on two cores
	@scripts/unit

check: lint unit  ## lint, types, unit tests

scenario-1: $(STAMP)  ## resume: 500 messages, SIGKILL of the whole pod, 500 more
	@scripts/scenario-1
scenario-2: $(STAMP)  ## routing: 100 messages into four queues
	@scripts/scenario-2
scenario-3: $(STAMP)  ## drop_oldest: router stopped, 20,000 messages, every loss is named
	@scripts/scenario-3
scenario-3-block: $(STAMP)  ## block: router stopped, the sender feels it, zero loss
	@scripts/scenario-3-block
scenario-4: $(STAMP)  ## dead letters replayed, dead.log untouched
	@scripts/scenario-4
scenario-5: $(STAMP)  ## acks: 20,000 messages or more while stages are killed, the client retries, zero lost, zero twice
	@scripts/scenario-5
scenarios: scenario-1 scenario-2 scenario-3 scenario-3-block scenario-4 scenario-5  ## all of them

bench: $(STAMP)  ## speed, latency, memory, start-up: a table and JSON (ARGS="--quick acked redis": some parts)
	@$(BIN)/python scripts/bench $(ARGS)

bench-spark: $(STAMP)  ## the data pipeline: read, archive, what each pipeline costs, beside Spark's text source
	@$(BIN)/python scripts/bench_spark $(ARGS)

bench-pod: $(STAMP)  ## what a real pod takes at a rate of messages: CPU, memory, disk; root on Debian
	@eval "$$(scripts/pod-setup)" && scripts/image broker >/dev/null && $(BIN)/python scripts/bench_pod.py $(ARGS)

bench-bq: $(STAMP)  ## the Broadcast Queue on three Consul servers: publish, delivery, catch-up, what watches cost Consul
	@$(BIN)/python scripts/bench_bq $(ARGS)

bench-shard: $(STAMP)  ## three brokers that replicate, beside one: throughput, CPU, latency, failover, idle
	@$(BIN)/python scripts/bench_shard $(ARGS)

bench-kafka: $(STAMP)  ## the Kafka door: librdkafka produces and consumes, beside acknowledged lines
	@$(BIN)/python scripts/bench_kafka.py $(ARGS)

bench-consumers: $(STAMP)  ## consumers in Python, and the consumer port
	@$(BIN)/python scripts/bench_consumers $(ARGS)

bench-tier: $(STAMP)  ## the tier: CPU of copies and fetches, cold reading, hot traffic beside uploads, idle partitions, a large restore
	@$(BIN)/python scripts/bench_tier.py $(ARGS)

console-shots: $(STAMP)  ## docs/console.png: the console of a broker with load, by Chromium (ARGS="--all DIR": every page, light, dark, narrow)
	@$(BIN)/python scripts/console_shots.py $(ARGS)

soak: $(STAMP)  ## the full counts of kills and damages that CI samples
	@$(BIN)/python -m pytest -m 'soak or sampled' --timeout 3600 -s

clean:  ## remove the environment and what runs leave (not ./data)
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

.PHONY: help setup dist demo cluster-demo shard-demo image image-spark pod pod-test test unit lint check scenario-1 scenario-2 scenario-3 scenario-3-block scenario-4 scenario-5 scenarios bench bench-spark bench-pod bench-bq bench-shard bench-kafka bench-consumers bench-tier console-shots soak clean
