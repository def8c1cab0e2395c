"""What the sink finds wrong with the address of a real broker before it writes: what no waiting mends, and nothing else."""

import pytest
from secured import Secured

from kmq.errors import ConfigError
from kmq.spark.connections import Access
from kmq.spark.sink.targets import Target, addresses, check


@pytest.fixture
def secured(broker, authority, tmp_path):
    return Secured(broker, authority, tmp_path)


def look(options):
    access = Access.of(options)
    for address in addresses("kmq.producers", options["kmq.producers"], access.tls is not None):
        check(address, access)


def test_what_no_waiting_mends_is_told_from_what_passes(secured):
    look(secured.options)
    plain, port = f"localhost:{secured.port('ingress')}", secured.port("tls")
    look({"kmq.producers": f"tcp://{plain}", "kmq.token": secured.token})
    wrong_cert, wrong_key = secured.other_pair
    pair = ("kmq.ssl.certificate.location", "kmq.ssl.key.location")
    changes = {
        r"tls://localhost:\d+: its certificate is not trusted: .*; options kmq.ssl.ca.location": {
            "kmq.ssl.ca.location": secured.other_ca
        },
        r"tls://localhost:\d+: its certificate is not trusted: .*somewhere": {"kmq.ssl.server.name": "somewhere"},
        r"not take our certificate: .*; options kmq.ssl.certificate": dict(
            zip(pair, (wrong_cert, wrong_key), strict=True)
        ),
        r"not take our certificate: .*required": dict.fromkeys(pair, ""),
        r"refuses the connection: unauthorized .*; option kmq.token": {"kmq.token": "spark.wrong"},
        r"nothing there speaks TLS; write tcp://host:port": {"kmq.producers": plain},
        r"it speaks TLS only; write tls://localhost:\d+": {"kmq.producers": f"tcp://localhost:{port}"},
    }
    for says, change in changes.items():
        with pytest.raises(ConfigError, match=says) as error:
            look(secured.options | change)
        assert secured.token not in str(error.value)
    look(secured.options | {"kmq.producers": f"tls://127.0.0.1:{port}", "kmq.ssl.server.name": "localhost"})
    secured.broker.kill()
    look(secured.options)
    look(secured.options | {"kmq.producers": f"tcp://{plain}"})


def test_a_target_of_our_own_settings_is_plain_whatever_is_given_for_others(secured, monkeypatch):
    for name, value in secured.broker.env.items():
        if name.startswith("KMQ_"):
            monkeypatch.setenv(name, value)
    connection = {name: text for name, text in secured.options.items() if name != "kmq.producers"}
    target = Target.of("", connection | {"kmq.timeout": "5s"})
    assert not any(each.is_tls for each in target.addresses) and target.timeout_s == 5
    assert set(target.options) == {"kmq.producers", "kmq.token", "kmq.timeout"}
    target.check()
