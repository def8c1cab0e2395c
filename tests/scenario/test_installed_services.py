"""What systemd, docker-compose and a kubelet would run: the command of each, with the environment that it is given.

The unit and the compose file are those of docs/installing.md, the arguments those of k8s/overlays/podbus, the repair that of
k8s/components/repair. Ports are any free ones.
"""

import configparser
import contextlib
import json
import re
import shutil
import socket
import subprocess

import pytest
import yaml
from brokers import PATIENCE_S, ROOT
from grpc_client import Client
from pages import text
from waiting import until


def block(language):
    [found] = re.findall(rf"```{language}\n(.*?)```", text("docs/installing.md"), re.DOTALL)
    return found


def unit():
    found = configparser.ConfigParser(interpolation=None)
    found.optionxform = str
    found.read_string(block("ini"))
    return found["Service"]


def of_containerfile(word):
    """The list behind ENTRYPOINT or CMD."""
    return json.loads(re.findall(rf"(?m)^{word} (\[.*\])$", (ROOT / "k8s/Containerfile").read_text())[-1])


@contextlib.contextmanager
def running(broker, *command, **env):
    """The command as the first process of a service, until it says that it is ready; SIGTERM to it alone at the end."""
    with open(broker.root / "said", "w") as said:
        process = subprocess.Popen(command, env=broker.env | env, cwd=broker.root, stderr=said, stdout=said)
        try:
            read = (broker.root / "said").read_text
            until(lambda: not broker.kmq("status").returncode, "a broker that is ready", read, process=process)
            yield process
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze (Debian: systemd) is missing")
    path = tmp_path / "kmq.service"

    def verify(unit):
        path.write_text(unit)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=60
        )
        return [line for line in (done.stdout + done.stderr).splitlines() if "kmq.service" in line]

    good = block("ini").replace("/opt/kmq/bin/kmq", shutil.which("true"))
    assert verify(good) == []
    assert verify(good.replace("TimeoutStopSec=30", "TimeoutStopSec=thirty")) != []
    assert verify(good.replace("StateDirectory=", "StateDirectorie=")) != []


def test_what_the_unit_starts_serves_and_drains_when_its_main_process_alone_is_told(new_broker):
    broker, service = new_broker(), unit()
    command = service["ExecStart"].split()
    given = dict(pair.split("=", 1) for pair in service["Environment"].split())
    places = {"/var/lib/kmq": broker.data.parent, "/run/kmq": broker.pipes.parent}
    moved = {n: str(places[p.rpartition("/")[0]] / p.rpartition("/")[2]) for n, p in given.items()}
    assert moved == {"KMQ_DATA": str(broker.data), "KMQ_PIPES": str(broker.pipes)}
    with running(broker, command[0].rpartition("/")[2], *command[1:], **moved) as process:
        assert broker.kmq("produce", "test", "-m", "hello", "--acks").returncode == 0
        assert process.pid == broker.pids()["supervisor"]
    assert [line.rpartition(b"|")[2] for line in broker.lines("test")] == [b"hello"]
    assert broker.processes() == []
    wrong = broker.run(command[0].rpartition("/")[2], *command[1:], **moved, KMQ_PORT="five")
    assert str(wrong.returncode) in service["RestartPreventExitStatus"].split(), wrong.stderr


def test_the_service_of_the_compose_file_is_healthy_by_its_own_check(new_broker):
    broker = new_broker()
    [service] = yaml.safe_load(block("yaml"))["services"].values()
    assert not {"command", "entrypoint"} & service.keys(), "the image's own"
    with running(broker, *of_containerfile("ENTRYPOINT"), *of_containerfile("CMD"), **service["environment"]):
        kind, *check = service["healthcheck"]["test"]
        assert kind == "CMD" and broker.run(*check).returncode == 0
        http, lines = ((broker.pipes / f"{name}.port").read_text().strip() for name in ("http", "ingress"))
        sent = broker.kmq("--url", f"http://127.0.0.1:{http}", "produce", "test.probe", "-m", "hello", KMQ_PORT=lines)
        assert sent.returncode == 0, sent.stderr
        assert broker.kmq("consume", "test").stdout == "hello\n"
    assert broker.run(*check).returncode != 0


def test_arguments_without_a_command_are_those_of_the_broker(new_broker):
    broker = new_broker()
    [pod] = [d for d in yaml.safe_load_all((ROOT / "k8s/overlays/podbus/pod.yaml").read_text()) if d["kind"] == "Pod"]
    [container] = [each for each in pod["spec"]["containers"] if each["name"] == "kmq"]
    assert "command" not in container
    assert container["args"] == ["--listen-addr=:8080", "--data-dir=/data"]
    args = ["--listen-addr=:0", f"--data-dir={broker.data}"]
    elsewhere = {"KMQ_DATA": str(broker.root / "elsewhere"), "KMQ_GRPC_PORT": "1"}
    with running(broker, *of_containerfile("ENTRYPOINT"), *args, **elsewhere):
        with Client(int((broker.pipes / "grpc.port").read_text())) as client:
            client.produce("orders", b"one")
        assert broker.kmq("consume", "orders").stdout == "one\n"
    assert broker.lines("orders") and not (broker.root / "elsewhere").exists()


def test_the_entry_point_runs_another_command_as_it_is(new_broker):
    said = new_broker().run(*of_containerfile("ENTRYPOINT"), "sh", "-c", 'echo "$0 and $1"; exit 7', "a b", "-c")
    assert (said.returncode, said.stdout) == (7, "a b and -c\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data-dir=d"], "are for --foreground"),
        (["--foreground", "--listen-addr=8080"], "--listen-addr=8080: must be [host]:port"),
        (["--foreground", "--listen-addr=:65536"], "with a port up to 65535"),
        (["--foreground", "--listen-addr="], "--listen-addr=: must be [host]:port"),
        (["--foreground", "--data-dir="], "--data-dir=: is empty; give a directory"),
        (["--data-dir="], "are for --foreground"),
        (["--foreground", "--listen-addr=[::]:8080"], "--listen-addr=[::]:8080: the probes look at KMQ_HOST=127.0.0.1"),
        (["--foreground", "--listen-addr=10.0.0.5:8080"], "set KMQ_HOST=10.0.0.5 in env"),
        (["--foreground", "--listen-addr=localhost:8080"], "leave the host out"),
    ],
)
def test_an_option_of_a_container_that_cannot_be_meant_is_named(new_broker, options, said):
    done = new_broker().kmq("up", *options)
    assert done.returncode == 78 and said in done.stderr


@pytest.mark.parametrize(
    ("host", "env", "reached"),
    [
        ("", {}, "127.0.0.1"),
        ("127.0.0.1", {}, "127.0.0.1"),
        ("0.0.0.0", {}, "127.0.0.2"),
        ("127.0.0.2", {"KMQ_HOST": "127.0.0.2"}, "127.0.0.2"),
        ("0.0.0.0", {"KMQ_HOST": "127.0.0.2"}, "127.0.0.1"),
    ],
)
def test_the_probes_of_a_container_reach_each_address_that_its_arguments_may_name(new_broker, host, env, reached):
    broker = new_broker()
    broker.env |= env  # of the container: its probes have it too, and not its arguments
    with running(broker, *of_containerfile("ENTRYPOINT"), f"--listen-addr={host}:0", f"--data-dir={broker.data}"):
        for kind in ("live", "ready"):
            probe = ("python", "-m", "kmq.probe", kind, "gateway")
            until(lambda probe=probe: broker.run(*probe).returncode == 0, kind, lambda probe=probe: broker.run(*probe))
        port = int((broker.pipes / "ingress.port").read_text())
        socket.create_connection((reached, port), timeout=30).close()


@pytest.mark.parametrize(("host", "env"), [("0.0.0.0", "::1"), ("127.0.0.1", "127.0.0.2")])
def test_an_address_that_does_not_cover_the_one_of_the_environment_is_refused(new_broker, host, env):
    done = new_broker().kmq("up", "--foreground", f"--listen-addr={host}:0", KMQ_HOST=env)
    assert done.returncode == 78 and f"the probes look at KMQ_HOST={env}" in done.stderr


def test_the_init_container_of_a_repair_heals_the_volume_and_never_holds_up_a_start(new_broker):
    broker = new_broker()
    patch = yaml.safe_load((ROOT / "k8s/components/repair/broker.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["initContainers"]
    broker.up()
    assert broker.kmq("produce", "orders", text="".join(f"order {n}\n" for n in range(200))).returncode == 0
    broker.down()
    before = broker.lines("orders")
    log = max((broker.data / "topics/orders").glob("*/*.log"), key=lambda path: path.stat().st_size)
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    assert broker.kmq("verify").returncode == 1
    done = broker.run(*container["command"])
    assert done.returncode == 0 and "orders" in done.stdout and "ended with" not in done.stderr
    assert broker.lines("orders") == before and broker.kmq("verify").returncode == 0
    done = broker.run(*container["command"], KMQ_DATA=broker.root / "new")
    assert done.returncode == 0 and "repair: ended with 78" in done.stderr
