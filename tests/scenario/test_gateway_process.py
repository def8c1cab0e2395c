"""The gateway beside a real broker: it comes and goes, says how the broker is, and loses nothing on the way."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections import Counter
from pathlib import Path

import grpc
import pytest
from consuls import free_ports

from kmq.access import tokens
from kmq.broker.health import is_process
from kmq.gateway.grpc.schema import PODBUS

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = PODBUS.messages
CONFIG = 78


@pytest.fixture
def broker(new_broker):
    broker = new_broker()
    broker.up()
    return broker


@pytest.fixture
def bus(broker):
    """Calls of PodBus by name; wait_for_ready, so that a gateway that is just starting is waited for."""
    with grpc.insecure_channel(address(broker)) as channel:

        def call(method, **fields):
            declared = PODBUS.methods[method]
            request, response = MESSAGES[declared.input_type.name], MESSAGES[declared.output_type.name]
            invoke = channel.unary_unary(f"/{PODBUS.service}/{method}", request.SerializeToString, response.FromString)
            return invoke(request(**fields), wait_for_ready=True, timeout=30)

        yield call


def address(broker):
    return f"127.0.0.1:{(broker.pipes / 'grpc.port').read_text().strip()}"


@pytest.fixture
def fixed(new_broker):
    """A broker, up, whose gateway is found where it was when it comes back."""
    broker = new_broker()
    grpc_port, http_port = map(str, free_ports(2))
    broker.env |= {"KMQ_GRPC_PORT": grpc_port, "KMQ_HTTP_PORT": http_port}
    broker.up()
    return broker


def events(broker, event):
    return [line for line in broker.log().splitlines() if f"stage=gateway event={event}" in line]


# --- health and metrics ----------------------------------------------------------------------------------------------


def test_readyz_follows_what_a_write_needs_and_healthz_the_signs_of_life(broker, bus):
    offset = bus("Produce", message_id="1", record=b"x").offset
    for path in ("/healthz", "/readyz"):
        status, body = broker.get(path)
        report = json.loads(body)
        assert (status, report["ok"], report["last_durable_seq"]) == (200, True, offset)
        assert 0 <= report["last_durable_write_age_s"] < 60
    os.kill(broker.pids()["durability"], signal.SIGSTOP)
    broker.wait(lambda: broker.get("/healthz")[0] == 503, "a stage without heartbeat")
    status, body = broker.get("/readyz")
    assert (status, json.loads(body)["reason"][:18]) == (503, "silent: durability")
    os.kill(broker.pids()["durability"], signal.SIGCONT)
    broker.wait(lambda: broker.get("/readyz")[0] == 200, "ready again")


def test_metrics_count_what_has_been_produced(broker, bus):
    for number in range(10):
        bus("Produce", message_id=f"{number % 8}", record=b"x")
    broker.wait_routed(8)
    expected = {
        'kmq_seq{stage="router"} 8.0',
        "kmq_duplicates_total 2.0",
        "kmq_remembered_ids 8.0",
        'kmq_end_offset{partition="0",topic="podbus"} 8.0',
        'kmq_grpc_requests_total{code="OK",method="Produce"} 10.0',
        'kmq_grpc_seconds_count{method="Produce"} 10.0',
        'kmq_state{stage="gateway"} 4.0',
    }
    with contextlib.suppress(AssertionError):
        broker.wait(lambda: expected <= {*broker.get("/metrics")[1].splitlines()}, "the metrics")
    assert expected - {*broker.get("/metrics")[1].splitlines()} == set()


def test_the_port_for_metrics_says_how_the_broker_is_and_nothing_of_what_it_holds(new_broker):
    broker = new_broker()
    broker.up(KMQ_METRICS_HOST="127.0.0.1", KMQ_METRICS_PORT=0)
    answers = {
        path: broker.get(path, "metrics")[0]
        for path in ("/metrics", "/healthz", "/readyz", "/", "/v1/topics", "/v1/logs")
    }
    assert answers == {"/metrics": 200, "/healthz": 200, "/readyz": 200, "/": 404, "/v1/topics": 404, "/v1/logs": 404}
    assert broker.get("/v1/topics")[0] == 200
    assert "kmq_seq" in broker.get("/metrics", "metrics")[1]
    broker.down()


def test_the_port_for_metrics_wants_a_token_where_the_others_do(new_broker):
    broker = new_broker()
    tokens.new(str(broker.root / "tokens"), "prometheus")
    broker.up(KMQ_METRICS_HOST="127.0.0.1", KMQ_METRICS_PORT=0, KMQ_TOKENS=broker.root / "tokens")
    assert [broker.get(path, "metrics")[0] for path in ("/metrics", "/healthz")] == [401, 200]


# --- it comes and goes -----------------------------------------------------------------------------------------------


def test_a_gateway_that_is_killed_comes_back_and_still_knows_what_was_stored(fixed):
    broker = fixed
    with grpc.insecure_channel(address(broker)) as channel:
        produce = channel.unary_unary(
            f"/{PODBUS.service}/Produce",
            MESSAGES["ProduceRequest"].SerializeToString,
            MESSAGES["ProduceResponse"].FromString,
        )
        request = MESSAGES["ProduceRequest"](message_id="1", record=b"x")
        first = produce(request, wait_for_ready=True, timeout=30).offset
        broker.kill("gateway")

        def again():
            try:
                return produce(request, wait_for_ready=True, timeout=30)
            except grpc.RpcError as err:  # it left before the break was seen: every client has to send again then
                assert err.code() == grpc.StatusCode.UNAVAILABLE

        assert broker.wait(again, "an answer of the next gateway").offset == first
    assert broker.status()["gateway"]["restarts"] == "1"


def test_sigterm_answers_what_has_been_taken_and_exits_0(broker, bus):
    bus("Produce", message_id="0", record=b"x")
    pids = broker.pids()
    os.kill(pids["durability"], signal.SIGSTOP)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(bus("Produce", message_id="1", record=b"in flight").offset))
    asking.start()
    broker.wait(lambda: int(broker.status()["framer"]["seq"]) == 2, "the message on its way")
    os.kill(pids["gateway"], signal.SIGTERM)
    broker.wait(lambda: broker.status()["gateway"]["state"] == "draining", "the gateway draining")
    assert not answers
    os.kill(pids["durability"], signal.SIGCONT)
    asking.join(30)
    assert answers == [2]
    broker.wait(lambda: len(events(broker, "ready")) == 2, "the next gateway")
    assert events(broker, "stopped")[0].endswith("exit_code=0 reason=drained")


def test_sigterm_ends_a_stream_when_what_it_has_taken_is_answered(broker):
    in_flight, answered = threading.Semaphore(64), []
    requests = (MESSAGES["ProduceRequest"](message_id=f"{n}", record=b"%d" % n) for n in itertools.count())
    paced = (request for request in requests if in_flight.acquire(timeout=5))
    gateway = broker.pids()["gateway"]
    with grpc.insecure_channel(address(broker)) as channel:
        stream = channel.stream_stream(
            f"/{PODBUS.service}/ProduceStream",
            MESSAGES["ProduceRequest"].SerializeToString,
            MESSAGES["ProduceResponse"].FromString,
        )
        with pytest.raises(grpc.RpcError) as ended:
            for response in stream(paced, wait_for_ready=True, timeout=60):
                answered.append(response.offset)
                if len(answered) == 300:
                    os.kill(gateway, signal.SIGTERM)
                in_flight.release()
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert ended.value.details().startswith("stopping: ")
    broker.wait(lambda: events(broker, "stopped"), "its end")
    assert events(broker, "stopped")[0].endswith("exit_code=0 reason=drained")
    broker.wait_routed(answered[-1])
    assert [int(line.split(b"|")[0]) for line in broker.lines("podbus")] == answered


SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "kmq.gateway.server":
            sys.meta_path.remove(self)
            time.sleep(4)
sys.meta_path.insert(0, Slow())
"""


def findings(broker, command):
    """code → finding, as `kmq status` or `kmq doctor` prints them."""
    return {found["code"]: found for found in json.loads(broker.kmq(command, "--json").stdout)["findings"]}


def test_a_port_that_is_taken_is_named_the_others_serve_and_it_opens_once_it_is_free(new_broker):
    broker = new_broker()
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        kafka, rpc = taken.getsockname()[1], other.getsockname()[1]
        broker.env |= {"KMQ_KAFKA_PORT": str(kafka), "KMQ_GRPC_PORT": str(rpc)}
        result = broker.kmq("up")
        assert result.returncode == 0 and result.stdout.startswith("kmq: up; lines in on")
        assert "HTTP on http://127.0.0.1:" in result.stdout
        assert "Kafka on" not in result.stdout and "gRPC on" not in result.stdout
        last = result.stderr.splitlines()[-1]
        assert last.startswith("kmq: door_closed: ") and f"KMQ_KAFKA_PORT={kafka}" in last
        assert f"KMQ_GRPC_PORT={rpc}" in last
        broker.send_lines([b"test.a|0|1|x"])
        assert broker.kmq("consume", "test", "--count", "1").returncode == 0
        assert broker.get("/readyz")[0] == 200
        for command in ("status", "doctor"):
            assert f"KMQ_KAFKA_PORT={kafka}" in findings(broker, command)["door_closed"]["why"]
    broker.wait(lambda: "door_closed" not in findings(broker, "status"), "the ports")
    for port in (kafka, rpc):
        socket.create_connection(("127.0.0.1", port)).close()
    broker.down()
    broker.up()
    assert findings(broker, "status") == {}


def test_a_gateway_that_ends_before_it_has_begun_is_listed_and_up_does_not_wait_for_it(new_broker):
    broker = new_broker()
    (broker.pipes / "gateway.owner").mkdir(parents=True)
    begin = time.monotonic()
    result = broker.kmq("up")
    assert result.returncode == CONFIG and "gateway.owner: Is a directory" in result.stderr, result
    assert "the gateway could not start" in result.stderr and time.monotonic() - begin < 40
    assert broker.status()["gateway"]["state"] == "stopped"
    assert findings(broker, "status")["stopped"]["about"] == "gateway"
    broker.down()
    (broker.pipes / "gateway.owner").rmdir()
    broker.up()
    assert broker.status()["gateway"]["state"] == "ready" and findings(broker, "status") == {}


def test_a_start_that_failed_leaves_no_word_of_a_crash(new_broker):
    """What a supervisor tells to stop while it loads its modules has ended in order."""
    broker = new_broker()
    (broker.root / "sitecustomize.py").write_text(SLOW_IMPORT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failed = broker.kmq("up", PYTHONPATH=broker.root, KMQ_PORT=taken.getsockname()[1])
    assert failed.returncode == CONFIG and "could not start" in failed.stderr
    broker.up()
    assert findings(broker, "status") == {}


def test_a_gateway_that_takes_long_to_start_is_starting_and_not_silent(new_broker):
    """On a busy machine its modules alone take seconds; told that it is silent, an operator would kill it again."""
    broker = new_broker()
    (broker.root / "sitecustomize.py").write_text(SLOW_IMPORT)
    up = subprocess.Popen(["kmq", "up"], env=broker.env | {"PYTHONPATH": str(broker.root)}, cwd=broker.root)
    seen = Counter()
    try:
        while up.poll() is None:
            seen[broker.status().get("gateway", {}).get("state")] += 1
    finally:
        up.wait()
    # One look may fall into a moment in which a busy machine gave the process no time. Without a heartbeat most do.
    assert seen["starting"] > 2 * seen["silent"] and not seen["dead"], seen


def test_a_second_gateway_names_the_first_and_leaves(broker, bus):
    result = broker.kmq("gateway")
    assert result.returncode == 69
    assert f"the gateway of this broker is held by pid={broker.pids()['gateway']} " in result.stderr


def test_without_the_gateway_there_are_four_stages_and_one_can_be_run_by_hand(new_broker):
    broker = new_broker()
    result = broker.kmq("up", "--no-gateway")
    assert (result.returncode, result.stderr, "gRPC" in result.stdout) == (0, "", False)
    assert "gateway" not in broker.status()
    with subprocess.Popen(["kmq", "gateway"], env=broker.env, cwd=broker.root, stderr=subprocess.PIPE) as process:
        broker.wait(lambda: broker.status().get("gateway", {}).get("state") == "ready", "the gateway")
        assert broker.get("/readyz")[0] == 200
        process.terminate()
        assert process.wait(30) == 0


def test_a_killed_supervisor_takes_the_gateway_with_it_and_the_next_broker_has_one(fixed):
    broker, before = fixed, fixed.pids()["gateway"]
    broker.kill()
    broker.up()
    broker.wait(lambda: not is_process(before, "gateway"), "the end of the gateway that lost its supervisor")
    assert broker.get("/readyz")[0] == 200


def test_the_gateway_waits_for_a_broker_that_is_not_there(new_broker):
    broker = new_broker()
    with subprocess.Popen(["kmq", "gateway"], env=broker.env, cwd=broker.root, stderr=subprocess.PIPE) as process:
        broker.wait((broker.pipes / "http.port").exists, "its port")
        status, body = broker.get("/readyz")
        assert (status, json.loads(body)["reason"].partition(":")[0]) == (503, "down")
        with grpc.insecure_channel(address(broker)) as channel:
            produce = channel.unary_unary(f"/{PODBUS.service}/Produce", MESSAGES["ProduceRequest"].SerializeToString)
            with pytest.raises(grpc.RpcError) as failed:
                produce(MESSAGES["ProduceRequest"](message_id="1", record=b"x"), wait_for_ready=True, timeout=30)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "is the broker up?" in failed.value.details()
        process.terminate()
        assert process.wait(30) == 0


def test_producer_that_retries_stores_each_record_once_over_kills_of_anything(fixed):
    broker = fixed
    count, offsets = 4000, {}
    victims = iter(("gateway", "ingress", "gateway", "durability"))
    with grpc.insecure_channel(address(broker)) as channel:
        stream = channel.stream_stream(
            f"/{PODBUS.service}/ProduceStream",
            MESSAGES["ProduceRequest"].SerializeToString,
            MESSAGES["ProduceResponse"].FromString,
        )
        while len(offsets) < count:
            numbers = [number for number in range(count) if number not in offsets]
            in_flight = threading.Semaphore(64)  # or all are answered before the kill
            requests = (MESSAGES["ProduceRequest"](message_id=f"{n}", record=b"%d" % n) for n in numbers)
            paced = (request for request in requests if in_flight.acquire(timeout=60))
            with contextlib.suppress(grpc.RpcError):
                for number, response in zip(numbers, stream(paced, wait_for_ready=True, timeout=60), strict=False):
                    offsets[number] = response.offset
                    if len(offsets) % 700 == 0 and (victim := next(victims, None)):
                        broker.kill(victim)
                    in_flight.release()
    assert next(victims, None) is None, "it was over before everybody had been killed"
    broker.wait_routed(max(offsets.values()))
    stored = {int(line.split(b"|")[0]): line.split(b"|", 5)[5] for line in broker.lines("podbus")}
    assert stored == {offset: b"%d" % number for number, offset in offsets.items()}


# --- the example consumer --------------------------------------------------------------------------------------------


def test_the_example_consumer_gets_each_record_at_least_once_over_kills_of_all(fixed, tmp_path):
    broker = fixed
    offset_file, records_file = tmp_path / "offset.txt", tmp_path / "records.txt"
    argv = [
        sys.executable,
        str(ROOT / "scripts" / "podbus-consumer"),
        address(broker),
        str(offset_file),
        str(records_file),
    ]
    count = 600

    def produce(numbers):
        with grpc.insecure_channel(address(broker)) as channel:
            stream = channel.stream_stream(
                f"/{PODBUS.service}/ProduceStream",
                MESSAGES["ProduceRequest"].SerializeToString,
                MESSAGES["ProduceResponse"].FromString,
            )
            requests = [MESSAGES["ProduceRequest"](message_id=f"{n}", record=b"%d\0" % n) for n in numbers]
            assert len(list(stream(iter(requests), wait_for_ready=True, timeout=60))) == len(requests)

    def processed():
        text = records_file.read_bytes() if records_file.exists() else b""
        return [b64decode(line.split(b" ")[1]) for line in text.splitlines()]

    def consumer():
        return subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.DEVNULL)

    running = consumer()
    try:
        for part in range(4):
            produce(range(part * count // 4, (part + 1) * count // 4))
            before = part * count // 4
            broker.wait(lambda before=before: len(set(processed())) > before + 20, "the consumer at work")
            running.kill()
            running.wait(30)
            if part == 1:
                broker.kill("gateway")
                broker.wait(lambda: len(events(broker, "ready")) == 2, "the gateway back")
            if part == 2:
                broker.kill()
                broker.up()
            argv[2] = address(broker)
            running = consumer()
        broker.wait(lambda: len(set(processed())) == count, "every record")
    finally:
        running.kill()
        running.wait(30)
    found = processed()
    assert set(found) == {b"%d\0" % n for n in range(count)}
    assert list(dict.fromkeys(found)) == [b"%d\0" % n for n in range(count)]  # in order, but for what comes again
    assert all(times <= 5 for times in Counter(found).values())  # once, and once more for each kill at the most
