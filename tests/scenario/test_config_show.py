"""`kmq config show`: every setting with its value and where it came from, and never a secret."""

import json

import pytest
from typer.testing import CliRunner

from kmq.cli.app import app
from kmq.cli.config import HIDDEN, clean
from kmq.config import states
from kmq.config.settings import KINDS, SETTINGS

CONFIG = 78
TOKEN = "orders.Zk3vY8wq1nR5tB7mC0xL2pS6dF9gH4jK-aQ_eWrTyUi"  # as kmq token new prints one
LOCAL = f"local.{'0123456789abcdef' * 4}"
KEY = f"-----BEGIN PRIVATE KEY-----\n{'Ab3+' * 16}\n-----END PRIVATE KEY-----"


@pytest.fixture
def bare(broker):
    """A directory without a broker, and with the defaults."""
    broker.env = {name: text for name, text in broker.env.items() if not name.startswith("KMQ_")}
    return broker


def rows(result):
    return {row["name"]: row for row in json.loads(result.stdout)["settings"]}


def test_config_show_has_every_setting_with_its_value_and_where_it_came_from(bare):
    (bare.root / "kmq.toml").write_text('# ours\nKMQ_PORT = 9\nKMQ_IDLE = "90s"\nKMQ_DATA_QUOTA = "2 GiB"\n')
    result = bare.kmq("config", "show", "--json", KMQ_IDLE="1m", KMQ_FSYNC="never")
    found = rows(result)
    assert result.returncode == 0 and list(found) == [row.env for row in SETTINGS]
    assert [found["KMQ_PORT"][each] for each in ("value", "text", "from", "line")] == [9, "9", "kmq.toml", 2]
    assert [found["KMQ_IDLE"][each] for each in ("value", "text", "from", "line")] == [60.0, "1m", "environment", None]
    assert found["KMQ_DATA_QUOTA"]["value"] == 2 << 30 and found["KMQ_FSYNC"]["value"] is None
    assert [found["RB_BYTES"][each] for each in ("value", "text", "from")] == [4 << 20, "4 MiB", "default"]
    shown = bare.kmq("config", "show", "kmq_port").stdout.splitlines()
    assert [line.split() for line in shown] == [
        ["setting", "value", "from"],
        ["KMQ_PORT", "9", "kmq.toml", "line", "2"],
    ]
    assert sorted(path.name for path in bare.root.iterdir()) == ["kmq.toml"]  # it made no directory


def test_config_show_names_the_fleet_where_a_value_is_the_fleets(bare):
    place = bare.root / "data/cluster"
    place.mkdir(parents=True)
    told = {"settings/retention_age": "30d", "settings/data_quota": "5 GiB"}
    (place / "states").write_bytes(states.States("prod", 3, told).encode())
    found = rows(bare.kmq("config", "show", "--json", KMQ_CLUSTER="prod", KMQ_DATA_QUOTA="1 GiB"))
    assert [found["KMQ_RETENTION_AGE"][each] for each in ("value", "from")] == [30 * 86400.0, "fleet"]
    assert [found["KMQ_DATA_QUOTA"][each] for each in ("value", "from")] == [1 << 30, "environment"]


def test_config_show_shows_all_of_wrong_settings_and_ends_with_78(bare):
    result = bare.kmq("config", "show", KMQ_PORT="s3cr3t-word", KMQ_DATTA="another-s3cr3t", KMQ_ACK_PORT="7")
    assert result.returncode == CONFIG
    assert "unknown setting KMQ_DATTA; did you mean KMQ_DATA?" in result.stderr
    assert "KMQ_PORT: expected a whole number (environment)" in result.stderr
    assert "s3cr3t" not in result.stdout + result.stderr and "KMQ_ACK_PORT" in result.stdout
    unknown = bare.kmq("config", "show", "KMQ_DATTA")
    assert unknown.returncode == CONFIG and "did you mean KMQ_DATA?" in unknown.stderr
    (bare.root / "kmq.toml").write_text("KMQ_PORT = \n")
    cut = bare.kmq("config", "show", "--json")
    assert cut.returncode == CONFIG and "kmq.toml" in json.loads(cut.stdout)["problem"]


@pytest.mark.parametrize(
    "secret", [TOKEN, LOCAL, "http://me:hunter22@host:1", KEY], ids=["token", "local", "url", "key"]
)
def test_a_secret_typed_into_any_setting_is_not_shown(bare, monkeypatch, secret):
    monkeypatch.chdir(bare.root)
    for row in SETTINGS:
        monkeypatch.setenv(row.env, secret)
    for arguments in (["config", "show"], ["config", "show", "--json"]):
        result = CliRunner().invoke(app, arguments)
        said = result.output + result.stderr
        assert all(row.env in said for row in SETTINGS) and secret not in said
        assert not [part for part in (TOKEN[10:], LOCAL[10:], "hunter22", "Ab3+Ab3+") if part in said]


def test_every_setting_that_is_named_like_a_secret_is_one_or_a_path():
    named = {
        row.env: KINDS.get(row.parse)
        for row in SETTINGS
        if {"TOKEN", "TOKENS", "KEY", "SECRET"} & {*row.env.split("_")}
    }
    paths = dict.fromkeys(("KMQ_TLS_KEY", "KMQ_TOKENS", "KMQ_REPLICA_SECRET"), "path")
    assert named == paths | {"KMQ_CONSUL_TOKEN": "secret"}


def test_text_is_cleaned_of_secrets_and_of_nothing_else():
    log = "ts=1 level=info stage=ingress event=started data=/srv/kmq id=0f4be2a65d1c4f7e9a31c5b8d2e60f17"
    assert clean(log) == log
    assert clean("token=abc Authorization: Bearer abc.def x") == f"token={HIDDEN} Authorization: Bearer {HIDDEN} x"
    assert clean(f"a {TOKEN} b {LOCAL} c sha256$00$11$scram$4096$aa$bb d\n{KEY}\ne") == "\n".join(
        [f"a {HIDDEN} b {HIDDEN} c {HIDDEN} d", HIDDEN, "e"]
    )
    assert clean(f"{'Ab3+' * 16}\n-----END PRIVATE KEY-----\nrest") == f"{HIDDEN}\nrest"
    assert clean("known word", ["known"]) == f"{HIDDEN} word"
