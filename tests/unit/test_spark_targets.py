"""Addresses of the sink, and which faults of a connection no waiting mends."""

import contextlib
import socket
import ssl
import threading

import pytest

from kmq.errors import ConfigError, RetryError
from kmq.spark.connections import PLAIN
from kmq.spark.sink import targets
from kmq.spark.sink.targets import Address, addresses, check, has_begun


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("a", [("a", 5673, False)]),
        ("a:1, tls://b ,TLS://c:3", [("a", 1, False), ("b", 5443, True), ("c", 3, True)]),
        ("[::1]:7,tls://[::1]", [("::1", 7, False), ("::1", 5443, True)]),
        (",", []),
    ],
)
def test_addresses_are_read_and_written(text, made):
    found = addresses("x", text)
    assert found == [Address(*each) for each in made]
    assert addresses("x", ",".join(map(str, found))) == found


@pytest.mark.parametrize("text", ["a:b", "a:0", "a:65536", "https://a:1", "tls://", "a b:1", "tls://tls://a", ":5"])
def test_what_is_no_address_is_named_with_its_option(text):
    with pytest.raises(ConfigError, match="--producers='") as error:
        addresses("--producers", text)
    assert text in str(error.value)


def test_an_address_without_a_scheme_has_tls_where_options_of_tls_are_given():
    found = addresses("x", "a,b:1,tcp://c,tls://d", has_tls=True)
    assert found == [("a", 5443, True), ("b", 1, True), ("c", 5673, False), ("d", 5443, True)]


def test_a_host_that_is_not_known_is_a_fault_only_where_it_must_be_known():
    nowhere = Address("no-such-host.invalid", 5673)
    with pytest.raises(ConfigError, match=r"no-such-host.invalid:5673: this host is not known"):
        check(nowhere, PLAIN)
    check(nowhere, PLAIN, is_host_sure=True)


def test_a_broker_that_is_down_or_a_name_server_that_is_away_is_no_fault():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    check(Address("127.0.0.1", port), PLAIN)
    check(Address("127.0.0.1", port, True), PLAIN)
    assert not targets.fault(socket.gaierror(socket.EAI_AGAIN, "try again"))
    assert not targets.fault(ssl.SSLEOFError(8, "ended"))
    assert not targets.fault(TimeoutError())


class Lines:
    """A broker's port for lines: says the same to every connection."""

    def __init__(self, text):
        self._text, self._socket = text, socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._socket.getsockname())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(self._text)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


@pytest.fixture
def silent():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return Address(*taken.getsockname())


def test_which_addresses_are_one_shards_the_brokers_say(silent):
    alone, older = b"!ok max_line=9\n!shard\n", b"!err 0 bad_hello 'shard=?'\n"
    with Lines(b"!ok max_line=9\n!shard l %b\n" % str(silent).encode()) as a, Lines(alone) as b, Lines(older) as c:
        asked = [b.address, silent, a.address, c.address]
        assert targets.shards(asked, PLAIN) == {silent: "l", a.address: "l"}
        assert targets.shards([a.address], PLAIN) == {}, "one address is not asked"
        options = targets.WriteOptions({"kmq.producers": ",".join(map(str, asked))})
        options.recognise()
        assert [options.doors(at) for at in range(4)] == [
            [b.address],
            [silent, a.address],
            [a.address, silent],
            [c.address],
        ]


def test_a_target_of_several_addresses_must_be_one_shard(silent):
    with Lines(b"!ok max_line=9\n!shard l a:1\n") as a, Lines(b"!ok max_line=9\n!shard l a:1\n") as b:
        target = targets.Target.of(f"{a.address},{b.address}", {})
        target.check()
        assert target.addresses == [a.address, b.address]
        with pytest.raises(RetryError, match=f"must be the addresses of one shard; {silent} does not say of which"):
            targets.Target.of(f"{a.address},{silent}", {}).check()
        with Lines(b"!ok max_line=9\n!shard m a:1\n") as c, pytest.raises(ConfigError, match="addresses of one shard"):
            targets.Target.of(f"{a.address},{c.address}", {}).check()


def test_a_stream_has_begun_when_its_checkpoint_has_a_commit(tmp_path):
    for path in (str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}"):
        assert not has_begun({"checkpointLocation": path})
    tmp_path.joinpath("commits").mkdir()
    assert not has_begun({"checkpointLocation": str(tmp_path)})
    tmp_path.joinpath("commits", "0").touch()
    for path in (str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}", "s3a://b/c", ""):
        assert has_begun({"checkpointLocation": path})
