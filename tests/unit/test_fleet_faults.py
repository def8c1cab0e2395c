"""A fleet's files, keys and values that are damaged, gone, or not KMQ's: what a broker and the commands make of them."""

import json
import os
import subprocess
import sys

import pytest
from fake_logger import FakeLogger
from fleet_given import said

from kmq.access import tokens
from kmq.cluster import fleet
from kmq.cluster.fleet import BrokerReport, CommandResult
from kmq.cluster.publisher import Message
from kmq.cluster.subscriber import Snapshot
from kmq.config import states
from kmq.config.settings import load
from kmq.config.states import InForce, States
from kmq.fleet.applying import CHILD, MOST, Applier, Commands, damage
from kmq.log import topic_changes, topics
from kmq.log.identity import open_data


@pytest.fixture
def settings(data, tmp_path):
    environ = {"KMQ_DATA": data, "KMQ_PIPES": str(tmp_path), "KMQ_CLUSTER": "unit", "KMQ_TOKENS": f"{tmp_path}/tokens"}
    found = load(environ, "/nonexistent.toml")
    open_data(found.data)
    return found


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    """Files are looked at on each use instead of once a second."""
    monkeypatch.setattr("kmq.files._LOOK_S", 0.0)


def write(settings, text):
    os.makedirs(f"{settings.data}/cluster", exist_ok=True)
    with open(states.path_of(settings), "wb") as file:
        file.write(text)


# --- the file of states -----------------------------------------------------------------------------------------------


def test_a_file_that_goes_leaves_in_force_what_was(settings):
    write(settings, States("unit", 1, {"tokens/x": "revoked", "settings/data_quota": "1GiB"}).encode())
    log = FakeLogger()
    now = InForce(settings, log.warn)
    os.unlink(states.path_of(settings))
    assert not now.changed() and not now.changed() and now.revoked == {"x"} and now.settings.data_quota
    assert log.names == ["states_kept"] and "is gone" in log.of("states_kept")[0]["reason"]


@pytest.mark.parametrize("text", [b"", b"garbage", b"kmq-states 1 cluster=unit epoch=1\ntokens/orders revo"])
def test_a_start_with_an_unreadable_file_accepts_no_token_until_it_is_made_again(settings, text):
    token = tokens.new(settings.tokens, "orders")
    write(settings, text)
    log = FakeLogger()
    checked = tokens.Tokens(settings, log.warn)
    assert checked.check(token.encode()) == "" and "no token" in log.of("states_kept")[0]["effect"]
    assert checked.check(tokens.local(settings).encode()) == "local"
    os.unlink(states.path_of(settings))
    assert checked.check(token.encode()) == "", "nobody knows yet what was revoked"
    write(settings, States("unit", 1, {}).encode())
    assert checked.check(token.encode()) == "orders"


@pytest.mark.parametrize("text", [None, b"", b"garbage"])
def test_the_agent_writes_a_file_again_that_has_gone_or_is_damaged(settings, text):
    log = FakeLogger()
    applier = Applier(settings, log)
    applier.apply(said("tokens/x", "revoked", 1))
    applier.restore_file()
    os.unlink(states.path_of(settings))
    if text is not None:
        write(settings, text)
    applier.restore_file()
    assert InForce(settings).revoked == {"x"} and log.names.count("states_made_again") == 1


def test_every_change_of_the_file_is_synced(settings, monkeypatch):
    applier = Applier(settings, FakeLogger())
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    applier.apply(Message.new("greeting", b"hello")._replace(epoch=1))
    assert synced


# --- what KMQ did not write -------------------------------------------------------------------------------------------

GOOD = {"type": "verify", "outcome": "ok", "findings": [], "ts": 1.0}
REPORT = {"holder": "h/1", "ready": True, "reasons": [], "findings": [], "own": {}}


@pytest.mark.parametrize("changes", [{"ts": 10**400}, {"ts": float("nan")}, {"findings": 5}, {"outcome": 5}])
def test_a_result_with_values_of_other_types_is_unreadable(changes):
    assert CommandResult.decode(json.dumps(GOOD | changes).encode()).outcome == "unreadable"
    assert CommandResult.decode(b"[" * 100_000).outcome == "unreadable"


@pytest.mark.parametrize("changes", [{"reasons": 5}, {"findings": [5]}, {"own": []}, {"holder": None}])
def test_a_report_with_values_of_other_types_is_none(changes):
    assert (
        BrokerReport.decode(json.dumps(REPORT).encode())
        and BrokerReport.decode(json.dumps(REPORT | changes).encode()) is None
    )
    assert BrokerReport.decode(b"[" * 100_000) is None
    "".join(BrokerReport.decode(json.dumps(REPORT | {"reasons": ["\ud800"]}).encode()).reasons).encode()


def test_a_limit_with_hundreds_of_digits_is_refused():
    assert "too large" in states.fault("retention_age", "9" * 310 + "d")
    assert "too large" in states.fault("data_quota", "9" * 310)


@pytest.mark.parametrize("value", [b"30d\ntokens/till revoked", b"\xff"])
def test_a_state_that_is_not_readable_is_a_finding_and_stops_no_other(settings, value):
    by_snapshot, log = Applier(settings, FakeLogger()), FakeLogger()
    states_read = dict.fromkeys(("settings/retention_age", "topics/bad", "tokens/x"), value)
    by_snapshot.apply(Snapshot(3, {"topics/good": b"partitions=1", **states_read}))
    assert topics.names(settings.data) == ["good"] and InForce(settings).revoked == {"x"}
    applier = Applier(settings, log)
    for epoch, key in enumerate(states_read, 4):
        applier.apply(Message.new(fleet.STATE, key.encode() + b" " + value)._replace(epoch=epoch))
    assert applier.states.values == by_snapshot.states.values and applier.findings() == by_snapshot.findings()
    assert len(applier.findings()) == 3 and all("publish it anew" in line for line in applier.findings())
    assert log.names.count("state_not_applied") == 2


def test_a_message_that_says_no_state_is_a_finding_until_one_does(settings):
    log = FakeLogger()
    applier = Applier(settings, log)
    applier.apply(Message.new(fleet.STATE, b"\xff")._replace(epoch=1))
    assert applier.epoch == 1 and "passed over" in applier.findings()[0] and log.names == ["state_not_applied"]
    applier.apply(said("tokens/x", "revoked", 2))
    assert applier.findings() == []


def test_a_damaged_declaration_of_a_topic_does_not_stop_the_findings(settings):
    applier = Applier(settings, FakeLogger())
    applier.apply(said("topics/a", "partitions=2", 1))
    with open(topics.toml_path(settings.data, "a"), "w") as file:
        file.write("partitions = [1]\n")
    assert "has 1 partition(s) here" in applier.findings()[0]


# --- topics -----------------------------------------------------------------------------------------------------------


def test_limits_are_compared_by_what_they_mean(settings):
    topics.declare(settings.data, "a", 1, {"retention_bytes": "10 GiB", "retention_age": "240h"})
    applier = Applier(settings, FakeLogger())
    applier.apply(said("topics/a", "partitions=1 retention_bytes=10GiB retention_age=10d", 1))
    assert applier.findings() == [] and [each.verb for each in topic_changes.waiting(settings.data)] == ["create"]


def test_directories_are_listed_once_a_pass_and_not_for_each_topic(settings, monkeypatch):
    applier = Applier(settings, FakeLogger())
    many = {f"topics/t{number}": b"partitions=1" for number in range(50)}
    applier.apply(Snapshot(1, many))
    listed, real = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (listed.append(path), real(path))[1])
    names, found = [], topics.names
    monkeypatch.setattr(topics, "names", lambda data: (names.append(data), found(data))[1])
    applier.apply(Snapshot(2, many))
    assert applier.findings() == [] and len(names) == 2 and len(listed) < 20


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(settings):
    os.makedirs(f"{settings.data}/cluster", exist_ok=True)
    return Commands(settings, FakeLogger(), lambda id, result: None)


def test_notes_do_not_take_the_place_of_damage(commands, monkeypatch):
    row = '{"path": "a", "byte": 1, "what": "w", "is_damage": %s}'
    script = f"for i in range(30): print('{row % 'false'}')\nprint('{row % 'true'}')"
    monkeypatch.setattr("kmq.fleet.applying.CHILD", script)
    assert commands._run_module(damage, "kmq", "verify")[1] == ["a: byte 1: w"]


def test_a_command_ends_with_its_agent_and_is_not_begun_after_its_end(commands):
    with subprocess.Popen(["sleep", "60"]) as other:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(other.pid), "kmq", "no-such-command"], capture_output=True
        )
        assert done.returncode == 0, "it was not started by this process, so its starter is gone"
        other.kill()
    commands._stop.set()
    assert commands._run_module(str, "kmq", "verify") == (-1, [], "the agent ends")


def test_results_that_consul_never_takes_are_bounded(commands):
    row = {"type": "verify", "epoch": 1, "expires": 0, "result": {}, "told": False}
    commands._rows = {str(number): dict(row) for number in range(MOST)}
    commands.accept(Message.new("verify", b"", 60.0))
    assert len(commands._rows) == MOST and "0" not in commands._rows
