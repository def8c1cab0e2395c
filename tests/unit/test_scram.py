"""Proof of a token by SCRAM: the vectors of RFC 7677, a client of another library, and every way to fail."""

import base64
import os

import pytest
from fake_logger import FakeLogger
from kafka.net.sasl.scram import ScramClient

from kmq.access import scram, tokens
from kmq.access.roles import ALL
from kmq.access.scram import ScramError, ScramExchange, ScramUser, make_keys
from kmq.config.settings import load
from kmq.errors import ConfigError

SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
NONCE = b"rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
LAST = b"c=biws,r=" + NONCE + b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="


def pencil(user):
    """The user of RFC 7677."""
    assert user == "user"
    return ScramUser(SALT, 4096, [make_keys("sha256", "pencil", SALT)])


def exchange():
    return ScramExchange("sha256", pencil, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")


@pytest.fixture
def settings(tmp_path):
    return load({"KMQ_TOKENS": str(tmp_path / "tokens"), "KMQ_PIPES": str(tmp_path)}, "/nonexistent.toml")


def opened(settings):
    return tokens.Tokens(settings, FakeLogger().warn)


def proved(known, name, token, mechanism="SCRAM-SHA-256"):
    """Whose token kafka-python proves to have."""
    client = ScramClient(name, token, mechanism)
    user, holders = known.find_scram(name, scram.MECHANISMS[mechanism])
    made = ScramExchange(scram.MECHANISMS[mechanism], lambda _: user)
    client.process_server_first_message(made.first(client.first_message()))
    client.process_server_final_message(made.last(client.final_message()))
    return holders[made.found]


def test_the_exchange_is_that_of_the_standard():
    made = exchange()
    assert made.first(FIRST) == b"r=" + NONCE + b",s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    assert made.last(LAST) == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert (made.user, made.found) == ("user", 0)


@pytest.mark.parametrize("mechanism", [*scram.MECHANISMS])
def test_a_client_of_another_library_proves_its_token(settings, mechanism):
    token = tokens.new(settings.tokens, "orders", ["consume"], with_scram=True)
    known = opened(settings)
    assert proved(known, "orders", token, mechanism) == ("orders", {"consume"})
    assert known.check(token.encode()) == "orders"
    for name, wrong in (("orders", token + "x"), ("nobody", token)):
        with pytest.raises(ScramError, match="unknown, or has another token"):
            proved(known, name, wrong, mechanism)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"n,,n=user",
        b"p=tls-unique,,n=user,r=x",
        b"n,,m=1,n=user,r=x",
        b"n,a=other,n=user,r=x",
        b"n,,n=us=er,r=x",
        b"n,,n=,r=x",
        b"n,,r=x,n=user",
        b"n,,n=user,r=\xff",
        b"\xff" * 9,
    ],
)
def test_a_first_message_that_is_wrong_is_refused(said):
    with pytest.raises(ScramError):
        exchange().first(said)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        LAST[:-1],
        LAST.replace(b"biws", b"eSws"),
        LAST.replace(b"hNlF$k0", b"hNlF$k1"),
        LAST.replace(b"dHzb", b"dHzc"),
        LAST.partition(b",p=")[0],
        LAST.partition(b",p=")[0] + b",p=",
        LAST.partition(b",p=")[0] + b",p=AAAA",
        LAST.partition(b",p=")[0] + b",p=" + base64.b64encode(bytes(32)),
        LAST.partition(b",p=")[0] + b",p=" + base64.b64encode(bytes(64)),
        LAST + b"x",
    ],
)
def test_a_last_message_that_is_wrong_proves_nothing(said):
    made = exchange()
    made.first(FIRST)
    with pytest.raises(ScramError):
        made.last(said)
    assert made.found == -1


def test_a_name_with_an_escaped_comma_is_read():
    seen = []
    made = ScramExchange("sha256", lambda user: seen.append(user) or ScramUser(SALT, 4096, ()))
    made.first(b"y,a=a=2Cb=3D,n=a=2Cb=3D,r=x,ext=1")
    assert seen == ["a,b="]


def test_both_tokens_of_a_name_are_proved_and_each_has_its_own_roles(settings):
    held = ["produce"], ["consume"]
    made = [tokens.new(settings.tokens, "orders", roles, with_scram=True) for roles in held]
    tokens.new(settings.tokens, "orders", ["admin"])
    known = opened(settings)
    assert [proved(known, "orders", token).roles for token in made] == [{"produce"}, {"consume"}]


def test_a_revoked_token_cannot_be_proved(settings):
    token = tokens.new(settings.tokens, "orders", with_scram=True)
    known = opened(settings)
    assert proved(known, "orders", token)
    known._in_force.revoked = frozenset({"orders"})
    with pytest.raises(ScramError):
        proved(known, "orders", token)


def test_a_token_without_keys_is_as_it_was_and_cannot_be_proved(settings):
    token = tokens.new(settings.tokens, "old")
    with open(settings.tokens) as file:
        assert "scram" not in file.read()
    known = opened(settings)
    assert known.find(token.encode()) == ("old", ALL) and known.scram_names() == {}
    with pytest.raises(ScramError):
        proved(known, "old", token)


def test_an_unknown_name_always_gets_the_same_salt(settings):
    tokens.new(settings.tokens, "orders", with_scram=True)
    known = opened(settings)
    salts = [known.find_scram(name, "sha256")[0].salt for name in ("a", "a", "b", "orders")]
    assert salts[0] == salts[1] and len({*salts}) == 3 and {*map(len, salts)} == {16}


def test_the_file_has_keys_that_do_not_show_the_token(settings):
    token = tokens.new(settings.tokens, "orders", ["consume"], with_scram=True)
    with open(settings.tokens) as file:
        line = file.read().strip()
    assert line.startswith("orders@consume:sha256$") and line.split("$")[3:5] == ["scram", "4096"]
    assert token.partition(".")[2] not in line
    for cut in (line[:-1], line.rpartition("$")[0], line + "$00", line.replace("$4096$", "$1$")):
        with open(settings.tokens, "w") as file:
            file.write(cut + os.linesep)
        with pytest.raises(ConfigError, match="line 1 is not"):
            tokens.read(settings.tokens)
