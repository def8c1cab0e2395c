"""A real pod with the components `tls` and `tokens`: outside there is nothing in clear, inside everything works as before."""

import http.client
import json
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from play import ROOT, Pod

import kmq
from kmq.access import tokens

LINES, HTTPS, GRPCS = 5443, 8443, 8444
PLAIN = (5673, 5675, 8080, 8082, 9092)


def secret(name: str, **files: Path) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {key.replace("_", "."): path.read_text() for key, path in files.items()},
    }


class Secured:
    """The pod, and what a client of it has."""

    def __init__(self, pod: Pod, trust: ssl.SSLContext, token: str, certificate: Path) -> None:
        self.pod, self.trust, self.token, self.certificate = pod, trust, token, certificate

    def producer(self, **options: object) -> kmq.Producer:
        mine = {"tls": self.trust, "server_hostname": "localhost", "token": self.token} | options
        return kmq.Producer(self.pod.ip, LINES, **mine)

    def get(self, path: str, token: str = "") -> int:
        """The status of GET `path` over HTTPS."""
        sock = self.trust.wrap_socket(socket.create_connection((self.pod.ip, HTTPS), 60), server_hostname="localhost")
        connection = http.client.HTTPSConnection(self.pod.ip, HTTPS)
        connection.sock = sock
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def secured(play_once: Callable[..., Pod], authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Secured:
    """The dev overlay with both components, and the Secrets that a user makes for them."""
    directory = tmp_path_factory.mktemp("secured")
    parts = {kind: os.path.relpath(ROOT / "k8s", directory) + f"/{kind}" for kind in ("overlays/dev", "components")}
    kustomization = {
        "resources": [parts["overlays/dev"]],
        "components": [f"{parts['components']}/tls", f"{parts['components']}/tokens"],
    }
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
    token = tokens.new(str(directory / "tokens"), "orders")
    certificate, key = authority.issue("server")
    secrets = [secret("kmq-tls", tls_crt=certificate, tls_key=key), secret("kmq-tokens", tokens=directory / "tokens")]
    trust = ssl.create_default_context(cafile=str(authority.path))
    return Secured(play_once(directory, *secrets), trust, token, certificate)


def test_lines_over_tls_with_a_token_are_stored(secured: Secured) -> None:
    with secured.producer() as producer:
        seq = producer.send("secret", b"over TLS").result()
    records = (secured.pod.volume("data") / "append.log").read_bytes().split(b"\n")
    assert [record for record in records if record.startswith(b"%d|" % seq) and record.endswith(b"|over TLS")]


def test_a_stranger_is_refused(secured: Secured) -> None:
    """Without a token; and he who does not know the authority does not talk to us either."""
    producer = secured.producer(token="")
    with pytest.raises(kmq.Refused, match="unauthorized"):
        producer.connect(timeout=60)
    producer.abort()
    unknown = ssl.create_default_context()
    with (
        socket.create_connection((secured.pod.ip, LINES), 5) as sock,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        unknown.wrap_socket(sock, server_hostname="localhost")


def test_https_and_grpc_answer_with_the_certificate(secured: Secured, authority: Authority) -> None:
    assert secured.get("/readyz") == 200  # health is open to all
    assert secured.get("/metrics") == 401
    assert secured.get("/metrics", secured.token) == 200
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
    named = (("grpc.ssl_target_name_override", "localhost"),)
    with grpc.secure_channel(f"{secured.pod.ip}:{GRPCS}", credentials, named) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_monitor_that_trusts_the_tls_crt_of_the_secret_needs_no_ca(secured: Secured) -> None:
    """As the ServiceMonitor of `monitoring` and `tls`: `kubectl create secret tls` makes no ca.crt."""
    pinned = ssl.create_default_context(cafile=str(secured.certificate))
    pinned.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # what Go's verifier does always: one in the pool is trusted
    monitor = Secured(secured.pod, pinned, secured.token, secured.certificate)
    assert monitor.get("/metrics", secured.token) == 200


@pytest.mark.parametrize("port", PLAIN)
def test_plain_ports_are_on_loopback_only(secured: Secured, port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((secured.pod.ip, port), 5)
    script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('open')"
    assert secured.pod.exec("gateway", "python", "-c", script).stdout == "open\n"


def test_every_probe_still_passes(secured: Secured) -> None:
    kinds = ("liveness", "readiness")  # that of the startup asks what liveness asks
    answers = {(name, kind): secured.pod.probe(name, kind) for name in secured.pod.containers for kind in kinds}
    assert not {place: why for place, why in answers.items() if why}


def test_commands_inside_need_no_token(secured: Secured) -> None:
    answer = secured.pod.exec("gateway", "kmq", "produce", "inside", input="from a shell\n")
    assert answer.returncode == 0, answer
