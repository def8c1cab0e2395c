"""Options that say how brokers are connected to: what is wrong with one is said with its name before anything connects."""

import pickle
import ssl

import pytest

from kmq.errors import ConfigError
from kmq.spark.connections import Access, Tls
from kmq.spark.source.brokers import Remote
from kmq.spark.source.options import ReadOptions


def test_durations_have_units_and_bare_numbers_are_seconds():
    access = Access.of({"kmq.timeout": "500ms", "kmq.patience": "2m"})
    assert (access.timeout_s, access.patience_s) == (0.5, 120)
    assert Access.of({"kmq.timeout": "7"}).timeout_s == 7
    assert Access.of({}) == Access("", None, 30, 30)


def test_a_pickled_access_connects_with_the_same_files(authority):
    cert, key = authority.issue("a-client", b"secret")
    given = {
        "kmq.ssl.ca.location": str(authority.path),
        "kmq.ssl.certificate.location": str(cert),
        "kmq.ssl.key.location": str(key),
        "kmq.ssl.key.password": "secret",
    }
    access = pickle.loads(pickle.dumps(Access.of(given | {"kmq.token": "geheim"})))
    assert isinstance(access.tls.context(), ssl.SSLContext)
    assert "secret" not in repr(access) and "geheim" not in repr(access)


def test_a_server_without_a_scheme_has_tls_where_tls_options_are_given(authority):
    access = Access(tls=Tls(str(authority.path)))
    assert Remote("pod-1", access).describe() == "broker pod-1: https://pod-1:8443"
    with pytest.raises(ConfigError, match=r"'http://pod-1' has no TLS"):
        Remote("http://pod-1", access)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kmq.timeout": "soon"}, "kmq.timeout='soon': expected a whole number with ms"),
        ({"kmq.patience": "0s"}, "kmq.patience='0s': must be above 0"),
        ({"kmq.ssl.ca.location": "/nope.pem"}, "kmq.ssl.ca.location='/nope.pem': must be a PEM file"),
        ({"kmq.ssl.certificate.location": "/nope"}, "kmq.ssl.certificate.location='/nope': must be PEM files"),
        ({"kmq.ssl.key.location": "k"}, "kmq.ssl.key.location: needs the certificate that it belongs to"),
        ({"kmq.ssl.ca": "x"}, "unknown reader option kmq.ssl.ca='x'; did you mean kmq.ssl.ca.location"),
    ],
)
def test_a_wrong_option_of_a_connection_is_named(given, says):
    with pytest.raises(ConfigError, match=says):
        ReadOptions({"kmq.bootstrap.servers": "h:1", "subscribe": "a"} | given)


def test_a_key_that_its_password_does_not_open_is_an_error(authority):
    cert, key = authority.issue("b-client", b"secret")
    files = {"kmq.ssl.certificate.location": str(cert), "kmq.ssl.key.location": str(key)}
    for password in ({}, {"kmq.ssl.key.password": "wrong"}):
        with pytest.raises(ConfigError, match=r"must be PEM files of a certificate and its key"):
            Access.of(files | password)


@pytest.mark.parametrize("name", ["kmq.timeout", "kmq.Patience", "kmq.ssl.ca.location", "kmq.ssl.key.password"])
def test_options_of_connections_are_refused_where_there_is_none(name):
    with pytest.raises(ConfigError, match=rf"^{name.lower()}: `path` is read without a connection"):
        ReadOptions({"path": "data", "subscribe": "t", name: "30s"})
    ReadOptions({"path": "data", "subscribe": "t", "kmq.token": "t"})  # the archive's dead letters go back with it
