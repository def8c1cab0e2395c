"""A broker that wants TLS, a certificate of its clients and a token, and the options that open its door."""

from pathlib import Path

from brokers import Broker
from certificates import Authority

from kmq.access import tokens


class Secured:
    """`broker`, up. `options` are those of a writer that it takes messages from."""

    def __init__(self, broker: Broker, authority: Authority, directory: Path, gateway: bool = False) -> None:
        self.broker, self.directory = broker, directory
        cert, key = authority.issue("server")
        self.token = tokens.new(str(directory / "tokens"), "spark")
        broker.env |= {
            "KMQ_TLS_HOST": "127.0.0.1",
            "KMQ_TLS_PORT": "0",
            "KMQ_HTTPS_PORT": "0",
            "KMQ_GRPCS_PORT": "0",
            "KMQ_EGRESS_TLS_PORT": "0",
            "KMQ_TLS_CERT": str(cert),
            "KMQ_TLS_KEY": str(key),
            "KMQ_TLS_CLIENT_CA": str(authority.path),
            "KMQ_TOKENS": str(directory / "tokens"),
        }
        broker.gateway = gateway
        broker.up()
        client = authority.issue("client")
        self.ca, self.cert, self.key = (str(path) for path in (authority.path, *client))
        other = Authority(directory / "other", "other")
        self.other_ca, self.other_pair = str(other.path), [str(path) for path in other.issue("client")]
        self.producers = f"tls://localhost:{self.port('tls')}"
        tls = {
            "kmq.ssl.ca.location": self.ca,
            "kmq.ssl.certificate.location": self.cert,
            "kmq.ssl.key.location": self.key,
        }
        self.options = {"kmq.producers": self.producers, "kmq.token": self.token, **tls}

    def port(self, name: str) -> int:
        return int((self.broker.pipes / f"{name}.port").read_text())
