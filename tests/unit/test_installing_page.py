"""docs/installing.md: the unit of systemd and the compose file agree with the code that they start."""

import configparser
import re
import tomllib

import yaml
from pages import text
from typer.testing import CliRunner

from kmq.cli.app import app
from kmq.config.settings import GRACE_S, load
from kmq.errors import NO_RESTART

PAGE = text("docs/installing.md")


def block(language):
    [found] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def test_the_unit_of_systemd_starts_drains_and_gives_up_as_the_broker_means_it():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(block("ini"))
    service = unit["Service"]
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == NO_RESTART
    assert int(service["TimeoutStopSec"]) > GRACE_S and service["KillMode"] == "mixed"
    command = service["ExecStart"].split()[1:]
    assert "--foreground" in CliRunner().invoke(app, [command[0], "--help"], env={"COLUMNS": "80"}).stdout
    settings = load(dict(pair.split("=") for pair in service["Environment"].split()), toml="")
    assert settings.data.startswith(f"/var/lib/{service['StateDirectory']}/")
    assert settings.pipes.startswith(f"/run/{service['RuntimeDirectory']}/")


def test_the_compose_file_opens_the_ports_that_a_broker_has():
    [service] = yaml.safe_load(block("yaml"))["services"].values()
    settings = load(service["environment"], toml="")
    ports = {int(each.split(":")[2]) for each in service["ports"]}
    assert ports == {settings.port, settings.egress_port, settings.http_port, settings.kafka_number}
    told = load(service["environment"], toml="").kafka_advertise
    assert told == {False: ("localhost", settings.kafka_number)}
    assert all(each.startswith("127.0.0.1:") for each in service["ports"])
    assert int(service["stop_grace_period"].removesuffix("s")) > GRACE_S
    assert int(service["shm_size"].removesuffix("m")) << 20 >= 4 * settings.ring_bytes


def test_every_extra_that_users_want_is_named():
    extras = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \|", PAGE))))
    declared = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    assert extras == declared.keys() - {"dev"}
