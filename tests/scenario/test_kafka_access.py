"""Who may use the Kafka port: SASL and TLS by real clients, roles, and what happens to those who show nothing."""

import contextlib
import ssl
import time
from typing import Any

import confluent_kafka
import kafka
import kafka.errors
import pytest
from brokers import PATIENCE_S, Broker
from certificates import Authority
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka.net.sasl.scram import ScramClient
from kafka_client import KafkaClient, request
from waiting import attempts

from kmq.access import tokens
from kmq.gateway.kafka.wire import ErrorCode, Key

ROLES = {"boss": ["admin"], "writer": ["produce"], "reader": ["consume"]}
SCRAM = ("SCRAM-SHA-256", "SCRAM-SHA-512")
AUTHENTICATE_S = 10.0


class Guarded:
    """A broker that wants tokens, and over TLS a certificate too. `silent`: a client that has said nothing since `since`."""

    def __init__(self, broker: Broker, authority: Authority) -> None:
        self.broker, self.authority = broker, authority
        cert, key = authority.issue("server")
        path = str(broker.root / "tokens")
        self.tokens = {name: tokens.new(path, name, held) for name, held in ROLES.items()}
        self.proved = tokens.new(path, "proved", with_scram=True)  # can be shown without being sent
        broker.env |= {
            "KMQ_TOKENS": path,
            "KMQ_TLS_HOST": "127.0.0.1",
            "KMQ_TLS_PORT": "0",
            "KMQ_HTTPS_PORT": "0",
            "KMQ_GRPCS_PORT": "0",
            "KMQ_EGRESS_TLS_PORT": "0",
            "KMQ_TLS_CERT": str(cert),
            "KMQ_TLS_KEY": str(key),
            "KMQ_TLS_CLIENT_CA": str(authority.path),
        }
        assert broker.kmq("topics", "create", "orders").returncode == 0
        broker.up()
        self.since = time.monotonic()
        self.silent = KafkaClient(self.port("kafka"))
        self.cert, self.key = (str(path) for path in authority.issue("client"))

    def port(self, name: str) -> int:
        return int((self.broker.pipes / f"{name}.port").read_text())

    def sasl(self, password: str, mechanism: str = "PLAIN", user: str = "anybody") -> dict[str, str]:
        """Options of librdkafka for the plain port."""
        return {
            "bootstrap.servers": f"localhost:{self.port('kafka')}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password,
        }

    def options(self, password: str, mechanism: str = "PLAIN", user: str = "anybody") -> dict[str, Any]:
        """Options of kafka-python for the plain port."""
        return {
            "bootstrap_servers": f"localhost:{self.port('kafka')}",
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": mechanism,
            "sasl_plain_username": user,
            "sasl_plain_password": password,
        }

    def tls(self) -> dict[str, str]:
        """Options of librdkafka for TLS alone."""
        return {
            "bootstrap.servers": f"localhost:{self.port('kafka_tls')}",
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.authority.path),
            "ssl.certificate.location": self.cert,
            "ssl.key.location": self.key,
        }

    def known(self, name: str = "boss") -> KafkaClient:
        """A connection that has shown a token."""
        client = KafkaClient(self.port("kafka"))
        assert client.ask(Key.SASL_HANDSHAKE, 1, mechanism="PLAIN").error_code == ErrorCode.none
        shown = client.ask(Key.SASL_AUTHENTICATE, 2, auth_bytes=b"\0x\0" + self.tokens[name].encode())
        assert shown.error_code == ErrorCode.none
        return client


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, authority):
    made = Guarded(Broker(tmp_path_factory.mktemp("kafka-access") / "b"), authority)
    yield made
    made.silent.sock.close()
    made.broker.close()


@pytest.fixture
def client(guarded):
    with KafkaClient(guarded.port("kafka")) as made:
        yield made


def topics_of(options: dict[str, str]) -> list[str]:
    """The topics that librdkafka finds; raises KafkaException."""
    return [*AdminClient(options | {"log_level": "0"}).list_topics(timeout=30).topics]


def failure_of(options: dict[str, str]) -> confluent_kafka.KafkaError:
    """What librdkafka says first of a broker that does not let it in."""
    errors: list[confluent_kafka.KafkaError] = []
    client = AdminClient(options | {"error_cb": errors.append, "log_level": "0"})
    tries = attempts("an error", every_s=0)
    while not errors:
        next(tries)
        client.poll(0.1)
    return errors[0]


# --- SASL and TLS ----------------------------------------------------------------------------------------------------


def test_librdkafka_shows_its_token_as_a_password(guarded):
    assert topics_of(guarded.sasl(guarded.tokens["boss"])) == ["orders"]


def test_kafka_python_shows_its_token_as_a_password(guarded):
    client = kafka.KafkaAdminClient(**guarded.options(guarded.tokens["reader"]))
    assert client.list_topics() == ["orders"]
    client.close()


def test_over_tls_a_client_shows_its_token_too(guarded):
    options = guarded.sasl(guarded.tokens["boss"]) | guarded.tls() | {"security.protocol": "SASL_SSL"}
    assert topics_of(options) == ["orders"]
    client = kafka.KafkaAdminClient(
        **guarded.options(guarded.tokens["boss"])
        | {
            "bootstrap_servers": f"localhost:{guarded.port('kafka_tls')}",
            "security_protocol": "SASL_SSL",
            "ssl_cafile": str(guarded.authority.path),
            "ssl_certfile": guarded.cert,
            "ssl_keyfile": guarded.key,
        }
    )
    assert client.list_topics() == ["orders"]
    client.close()


def test_a_client_without_a_certificate_is_turned_away_from_the_tls_port(guarded):
    context = ssl.create_default_context(cafile=guarded.authority.path)
    with pytest.raises((ssl.SSLError, ConnectionError)), KafkaClient(guarded.port("kafka_tls"), context) as client:
        client.ask(Key.API_VERSIONS, 0)


def test_librdkafka_is_told_that_its_password_is_wrong(guarded):
    wrong = guarded.sasl(guarded.tokens["boss"] + "x")
    assert failure_of(wrong).code() == confluent_kafka.KafkaError._AUTHENTICATION


def test_kafka_python_is_told_that_its_password_is_wrong(guarded, caplog):
    with pytest.raises(kafka.errors.KafkaTimeoutError):
        kafka.KafkaAdminClient(**guarded.options("boss.wrong"), bootstrap_timeout_ms=300)
    assert "the password must be a token that `kmq token new` has made" in caplog.text


@pytest.mark.parametrize("mechanism", SCRAM)
def test_a_token_is_proved_without_being_sent(guarded, mechanism):
    assert topics_of(guarded.sasl(guarded.proved, mechanism, "proved")) == ["orders"]
    client = kafka.KafkaAdminClient(**guarded.options(guarded.proved, mechanism, "proved"))
    assert client.list_topics() == ["orders"]
    client.close()


@pytest.mark.parametrize("mechanism", SCRAM)
def test_over_tls_a_token_is_proved_too(guarded, mechanism):
    options = guarded.sasl(guarded.proved, mechanism, "proved") | guarded.tls() | {"security.protocol": "SASL_SSL"}
    assert topics_of(options) == ["orders"]


@pytest.mark.parametrize("mechanism", SCRAM)
@pytest.mark.parametrize("user", ["proved", "nobody", "boss"])
def test_a_token_that_cannot_be_proved_is_refused(guarded, mechanism, user):
    password = guarded.tokens["boss"] if user == "boss" else "wrong"
    refused = failure_of(guarded.sasl(password, mechanism, user))
    assert refused.code() == confluent_kafka.KafkaError._AUTHENTICATION


def test_an_exchange_that_is_not_finished_opens_nothing(guarded, client):
    client.ask(Key.SASL_HANDSHAKE, 1, mechanism="SCRAM-SHA-256")
    begun = client.ask(Key.SASL_AUTHENTICATE, 2, auth_bytes=b"n,,n=proved,r=nonce")
    assert begun.error_code == ErrorCode.none and begun.auth_bytes.startswith(b"r=nonce")
    client.say(request(Key.METADATA, 9, topics=None, allow_auto_topic_creation=True))
    assert client.is_over()


def test_old_clients_prove_their_token_without_headers(guarded, client):
    proof = ScramClient("proved", guarded.proved, "SCRAM-SHA-256")
    assert client.ask(Key.SASL_HANDSHAKE, 0, mechanism="SCRAM-SHA-256").error_code == ErrorCode.none
    for said, heard in (
        (proof.first_message, proof.process_server_first_message),
        (proof.final_message, proof.process_server_final_message),
    ):
        step = said()
        client.say(len(step).to_bytes(4) + step)
        heard(client.frame())
    assert client.ask(Key.METADATA, 1, topics=None).topics[0].name == "orders"


def test_who_can_prove_a_token_is_told_and_nobody_is_added(guarded):
    admin = AdminClient(guarded.sasl(guarded.tokens["boss"]))
    found = admin.describe_user_scram_credentials().result(PATIENCE_S)
    assert {name: [each.iterations for each in row.scram_credential_infos] for name, row in found.items()} == {
        "proved": [4096, 4096]
    }
    add = UserScramCredentialUpsertion("new", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), b"secret")
    with pytest.raises(confluent_kafka.KafkaException, match="kmq token new <name> --scram"):
        admin.alter_user_scram_credentials([add])["new"].result(PATIENCE_S)


# --- steps that are out of order -------------------------------------------------------------------------------------


def test_nothing_but_sasl_is_served_before_the_token(client):
    versions = client.ask(Key.API_VERSIONS, 3, client_software_name="x", client_software_version="1")
    assert versions.error_code == ErrorCode.none
    client.say(request(Key.METADATA, 9, topics=None, allow_auto_topic_creation=True))
    assert client.is_over()


def test_an_unknown_mechanism_is_refused_with_those_there_are(client):
    answer = client.ask(Key.SASL_HANDSHAKE, 1, mechanism="GSSAPI")
    assert answer.error_code == ErrorCode.unsupported_sasl_mechanism and "PLAIN" in answer.mechanisms
    assert client.is_over()


def test_a_token_without_a_mechanism_is_refused(guarded, client):
    answer = client.ask(Key.SASL_AUTHENTICATE, 2, auth_bytes=b"\0x\0" + guarded.tokens["boss"].encode())
    assert answer.error_code == ErrorCode.illegal_sasl_state
    assert client.is_over()


@pytest.mark.parametrize("said", [b"", b"\0x", b"\0x\0", b"\0x\0boss", b"\0x\0y\0z", b"\xff" * 100])
def test_a_connection_has_one_try(client, said):
    client.ask(Key.SASL_HANDSHAKE, 1, mechanism="PLAIN")
    assert client.ask(Key.SASL_AUTHENTICATE, 2, auth_bytes=said).error_code == ErrorCode.sasl_authentication_failed
    assert client.is_over()


def test_who_is_known_shows_no_second_token(guarded):
    with guarded.known("writer") as client:
        assert client.ask(Key.SASL_HANDSHAKE, 1, mechanism="PLAIN").error_code == ErrorCode.illegal_sasl_state
        again = client.ask(Key.SASL_AUTHENTICATE, 2, auth_bytes=b"\0x\0" + guarded.tokens["boss"].encode())
        assert again.error_code == ErrorCode.illegal_sasl_state
        assert client.ask(Key.METADATA, 1, topics=None).topics[0].name == "orders"


def test_old_clients_show_their_token_without_a_header(guarded, client):
    assert client.ask(Key.SASL_HANDSHAKE, 0, mechanism="PLAIN").error_code == ErrorCode.none
    said = b"\0x\0" + guarded.tokens["boss"].encode()
    client.say(len(said).to_bytes(4) + said)
    assert client.frame() == b""
    assert client.ask(Key.METADATA, 1, topics=None).topics[0].name == "orders"


def test_old_clients_with_a_wrong_token_lose_the_connection(client):
    client.ask(Key.SASL_HANDSHAKE, 0, mechanism="PLAIN")
    client.say((16).to_bytes(4) + b"\0x\0boss.01234567")
    assert client.is_over()


def test_a_stranger_may_not_send_much(client):
    client.say((16 * 1024 + 1).to_bytes(4) + b"\0\x12\0\0")
    assert client.is_over()


# --- roles -----------------------------------------------------------------------------------------------------------


def test_a_role_is_needed_to_write(guarded):
    for name, error in (("writer", None), ("reader", kafka.errors.TopicAuthorizationFailedError)):
        producer = kafka.KafkaProducer(**guarded.options(guarded.tokens[name]), enable_idempotence=False)
        sent = producer.send("orders", b"x")
        with pytest.raises(error) if error else contextlib.nullcontext():
            assert sent.get(PATIENCE_S).topic == "orders"
        producer.close()


def test_a_role_is_needed_to_read(guarded):
    refused = (
        confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED,
        confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED,
    )
    for name, codes in (("reader", (None,)), ("writer", refused)):
        options = guarded.sasl(guarded.tokens[name]) | {"group.id": "g", "auto.offset.reset": "earliest"}
        consumer = confluent_kafka.Consumer(options)
        consumer.assign([confluent_kafka.TopicPartition("orders", 0, 0)])
        message = consumer.poll(PATIENCE_S)
        consumer.close()
        assert (message.error() and message.error().code()) in codes


def test_a_role_is_needed_to_administer(guarded):
    for name, codes in (
        ("writer", ["TOPIC_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"]),
        ("boss", [None, None]),
    ):
        admin = AdminClient(guarded.sasl(guarded.tokens[name]))
        asked = [
            *admin.create_topics([NewTopic("administered", 1, 1)]).values(),
            *admin.delete_topics(["administered"]).values(),
        ]
        assert [error_of(each) for each in asked] == codes
        described = admin.describe_configs([ConfigResource(ResourceType.TOPIC, "orders")])
        assert all("cleanup.policy" in each.result(PATIENCE_S) for each in described.values())


def error_of(future):
    try:
        future.result(PATIENCE_S)
    except confluent_kafka.KafkaException as err:
        return err.args[0].name()
    return None


def test_a_transaction_is_aborted_by_the_command_where_tokens_and_certificates_are_wanted(guarded):
    made = confluent_kafka.Producer(guarded.sasl(guarded.tokens["writer"]) | {"transactional.id": "t", "log_level": 0})
    made.init_transactions(PATIENCE_S)
    made.begin_transaction()
    made.produce("orders", b"never")
    assert made.flush(PATIENCE_S) == 0
    done = guarded.broker.kmq("kafka", "transactions", "abort", "t", "--yes")
    assert (done.returncode, done.stdout) == (0, "t: nothing is open; its producer is fenced\n")
    with pytest.raises(confluent_kafka.KafkaException):
        made.commit_transaction(PATIENCE_S)


def test_only_who_may_consume_is_told_of_producers(guarded):
    with guarded.known("reader") as reader, guarded.known("writer") as writer:
        asked = {"topics": [{"name": "orders", "partition_indexes": (0,)}]}
        for client, code in ((reader, ErrorCode.none), (writer, ErrorCode.topic_authorization_failed)):
            (topic,) = client.ask(Key.DESCRIBE_PRODUCERS, 0, **asked).topics
            assert (topic.name, topic.partitions[0].error_code) == ("orders", code)


def test_only_who_may_write_makes_a_topic_by_naming_it(guarded):
    with guarded.known("reader") as reader, guarded.known("writer") as writer:
        asked = {"topics": [{"name": "new"}], "allow_auto_topic_creation": True}
        assert reader.ask(Key.METADATA, 4, **asked).topics[0].error_code == ErrorCode.topic_authorization_failed
        assert writer.ask(Key.METADATA, 4, **asked).topics[0].error_code == ErrorCode.none


def test_a_coordinator_is_for_who_consumes_and_for_transactions_who_produces(guarded):
    with guarded.known("reader") as reader, guarded.known("writer") as writer:
        for kind, allowed, other, code in (
            (0, reader, writer, ErrorCode.group_authorization_failed),
            (1, writer, reader, ErrorCode.transactional_id_authorization_failed),
        ):
            asked = {"key": "g", "key_type": kind}
            assert allowed.ask(Key.FIND_COORDINATOR, 3, **asked).error_code == ErrorCode.none
            refused = other.ask(Key.FIND_COORDINATOR, 3, **asked)
            assert (refused.error_code, refused.node_id) == (code, -1)
            assert "kmq token new" in refused.error_message


# --- last, because it takes its time ---------------------------------------------------------------------------------


def test_who_shows_no_token_is_cut_off(guarded):
    assert guarded.silent.is_over()
    assert time.monotonic() - guarded.since > AUTHENTICATE_S - 1
