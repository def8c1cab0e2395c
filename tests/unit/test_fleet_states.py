"""What a fleet says, and what a broker makes of it: formats, the files under KMQ_DATA/cluster, settings and tokens."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid

import pytest
from fake_logger import FakeLogger
from fleet_given import said
from waiting import until

from kmq.access import tokens
from kmq.broker.admission import Admission
from kmq.cluster import consul as consul_api
from kmq.cluster import fleet
from kmq.cluster.consul import ConsulAddress, KvOperation
from kmq.cluster.fleet import BrokerReport, CommandResult
from kmq.cluster.publisher import Message
from kmq.cluster.queue import BroadcastQueue, Place
from kmq.cluster.subscriber import Snapshot
from kmq.config import states
from kmq.config.settings import load
from kmq.config.states import InForce, States
from kmq.config.values import GIB, MIB
from kmq.errors import ConfigError
from kmq.fleet.agent import is_left_over
from kmq.fleet.applying import KEPT, Applier, Commands
from kmq.log import topic_changes, topics
from kmq.log.identity import open_data


@pytest.fixture
def environ(data, tmp_path):
    return {"KMQ_DATA": data, "KMQ_PIPES": str(tmp_path), "KMQ_CLUSTER": "unit", "KMQ_TOKENS": f"{tmp_path}/tokens"}


@pytest.fixture
def settings(environ):
    found = load(environ, "/nonexistent.toml")
    open_data(found.data)
    return found


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    """Files are looked at on each use instead of once a second."""
    monkeypatch.setattr("kmq.files._LOOK_S", 0.0)


def told(settings, epoch=1, **values):
    """Let the fleet have said this: `settings__retention_age="1d"`."""
    os.makedirs(f"{settings.data}/cluster", exist_ok=True)
    names = {name.replace("__", "/"): value for name, value in values.items()}
    with open(states.path_of(settings), "wb") as file:
        file.write(States("unit", epoch, names).encode())


# --- formats ----------------------------------------------------------------------------------------------------------


def test_states_are_the_same_after_writing_and_reading():
    values = {
        "topics/a": "partitions=2 cleanup=compact",
        "tokens/x.0a1b2c3d4e5f": "revoked",
        "settings/data_quota": "1GiB",
    }
    found = States.decode(States("prod", 17, values).encode())
    assert (found.cluster, found.epoch, found.values) == ("prod", 17, values)
    assert found.under("topics/") == {"a": "partitions=2 cleanup=compact"}


@pytest.mark.parametrize(
    "text", [b"", b"kmq-states\n", b"kmq-states 2 cluster=a epoch=1\n", b"x 1 cluster=a epoch=1\n", b"\xff"]
)
def test_a_file_of_another_version_or_kind_is_refused(text, settings):
    told(settings)
    with open(states.path_of(settings), "wb") as file:
        file.write(text)
    with pytest.raises(ConfigError, match="cluster/states"):
        states.read(settings)


def test_results_and_reports_are_bounded_and_readable_again():
    long = CommandResult("verify", "x" * 10_000, ["é" * 10_000] * 1000, 5.0)
    assert (
        len(long.encode()) <= fleet.RESULT_BYTES
        and 0 < len(CommandResult.decode(long.encode()).findings) <= fleet.MAX_FINDINGS
    )
    short = CommandResult("verify", "damage", ["a", "b"], 5.0)
    assert CommandResult.decode(short.encode()) == short and not short.is_ok
    report = BrokerReport("host/1", False, ["é" * 9000] * 50, ["b" * 9000] * 50, {"data_quota": "1GiB"})
    assert len(report.encode()) <= fleet.RESULT_BYTES and BrokerReport.decode(report.encode()).own == report.own
    assert CommandResult.decode(b"{}").outcome == "unreadable" and BrokerReport.decode(b"[]") is None


@pytest.mark.parametrize("payload", [b"", b"topics/a", b"shards/1 x", b"topics/ x", b"\xff/a b"])
def test_a_message_that_says_no_state_is_an_error(payload):
    with pytest.raises(ValueError, match="KMQ did not write it"):
        fleet.state_of(Message.new(fleet.STATE, payload))


# --- publishing, on a real Consul -------------------------------------------------------------------------------------


@pytest.fixture
def queue(consul):
    place = Place(ConsulAddress.of(consul.address), f"unit-{uuid.uuid4().hex[:12]}", "me", 2.0)
    with BroadcastQueue(place) as queue:
        yield queue


def test_a_state_and_its_message_are_published_together(queue):
    for value in ("1", "2"):
        queue.as_publisher(
            lambda publisher, value=value: fleet.publish_state(publisher, queue.keys, "topics/a", lambda _: value)
        )
    snapshot = next(iter(queue.receive()))
    assert isinstance(snapshot, Snapshot) and snapshot[:2] == (2, {"topics/a": b"2"})
    assert queue.run(fleet.read_states(queue.keys)) == {"topics/a": "2"}
    message = queue.run(consul_api.read(queue.keys.message(1)))
    assert fleet.state_of(Message.decode(message.value, 1)) == ("topics/a", "1")


def test_a_state_that_another_changed_meanwhile_is_decided_anew(queue):
    seen = []

    def decide(before):
        seen.append(before)
        if len(seen) == 1:  # another writes between our reading and our Txn
            queue.run(consul_api.txn([KvOperation("set", queue.keys.root + "topics/a", b"theirs")]))
        return f"{before}+ours"

    epoch = queue.as_publisher(lambda publisher: fleet.publish_state(publisher, queue.keys, "topics/a", decide))
    assert epoch == 1 and seen == ["", "theirs"]
    assert queue.run(fleet.read_states(queue.keys)) == {"topics/a": "theirs+ours"}


def test_a_state_that_is_too_long_or_a_command_that_is_unknown_is_refused(queue):
    with pytest.raises(ConfigError, match="at most"):
        queue.as_publisher(lambda p: fleet.publish_state(p, queue.keys, "topics/a", lambda _: "x" * 5000))
    with pytest.raises(ConfigError, match="unknown command 'reboot'"):
        queue.as_publisher(lambda p: fleet.publish_command(p, queue.keys, "reboot", 1))
    assert queue.status().epoch == 0


def test_results_older_than_a_day_go_with_the_next_command(queue):
    now = time.time()
    for number in range(70):
        age = 0 if number == 7 else 2 * 86_400
        queue.run(fleet.write_result(queue.keys, f"id{number}", "a", CommandResult("verify", "ok", [], now - age)))
    queue.as_publisher(lambda p: fleet.publish_command(p, queue.keys, "verify", 60))
    assert [entry.key for entry in queue.run(consul_api.watch(queue.keys.results, 0, 0)).entries] == [
        f"{queue.keys.results}id7/a"
    ]
    assert queue.run(fleet.read_results(queue.keys))["a"]["verify"].is_ok
    found, position = queue.run(fleet.watch_results(queue.keys, "id7", 0, 0))
    assert found["a"].type == "verify" and position > 0


# --- states here ------------------------------------------------------------------------------------------------------


def files(settings):
    """All that the fleet has led to, without the requests' names."""
    found = {name: topics.read(settings.data, name).text() for name in topics.names(settings.data)}
    asked = [row for row in topic_changes.waiting(settings.data) if row.verb != topic_changes.CREATE]
    waiting = [(row.topic, row.limits) for row in asked]
    with open(states.path_of(settings), "rb") as file:
        return found, waiting, file.read()


def test_a_state_twice_or_all_in_a_snapshot_leads_to_the_same(settings, tmp_path):
    applier = Applier(settings, FakeLogger())
    assert applier.epoch == -1
    items = [said("topics/a", "partitions=3 retention_age=1d", 1), said("tokens/x", "revoked", 2)]
    for item in (*items, items[1]):
        applier.apply(item)
    applier.apply(items[1])
    once = files(settings)
    found = {"topics/a": b"partitions=3 retention_age=1d", "tokens/x": b"revoked", "shards/1": b"?"}
    applier.apply(Snapshot(2, found, items[1].id))
    assert files(settings) == once and applier.findings() == []
    assert once[0] == {"a": b'partitions = 3\npartitioner = "murmur2"\nretention_age = "1d"\n'} and once[1] == []
    assert Applier(settings, FakeLogger()).states.values == applier.states.values


def test_in_a_shard_the_leader_alone_reaches_topics_and_all_whenever_it_begins_to_lead(environ):
    secret = f"{environ['KMQ_DATA']}-secret"
    with open(secret, "w", encoding="ascii") as file:
        file.write("0123456789" * 4)
    shard = {"KMQ_SHARD": "s", "KMQ_CONSUL": "127.0.0.1:1", "KMQ_BROKER": "b", "KMQ_REPLICA_SECRET": secret}
    settings, leads = load(environ | shard, "/nonexistent.toml"), [0]
    open_data(settings.data, shard="s")
    applier = Applier(settings, FakeLogger(), lambda: leads[0])
    applier.apply(said("topics/a", "partitions=3", 1))
    applier.apply(said("tokens/x", "revoked", 2))
    applier.lead()
    assert topics.names(settings.data) == [] and InForce(settings).revoked == {"x"} and applier.epoch == 2
    for generation in (7, 9):  # in between another one leads, and refuses what was not numbered
        leads[0] = generation
        applier.lead()
        [request] = topic_changes.waiting(settings.data)
        assert (request.verb, request.topic) == (topic_changes.CREATE, "a")
        request.remove()
        shutil.rmtree(f"{settings.data}/topics/a")
        applier.lead()
        assert topics.names(settings.data) == [], "once for each time that it leads"


def test_a_changed_limit_becomes_one_request_and_default_removes_it(settings):
    applier = Applier(settings, FakeLogger())
    applier.apply(said("topics/a", "partitions=1 retention_age=1d", 1))
    for _ in range(2):
        applier.apply(said("topics/a", "partitions=1 retention_age=default segment_age=2h", 2))
    [declared, request] = topic_changes.waiting(settings.data)
    assert (declared.verb, declared.topic) == (topic_changes.CREATE, "a")
    assert (request.topic, request.limits) == ("a", {"retention_age": "", "segment_age": "2h"})
    assert applier.findings() == []


def test_what_cannot_be_reached_is_a_finding_and_stops_nothing(settings):
    log = FakeLogger()
    applier = Applier(settings, log)
    topics.declare(settings.data, "mine", 2)
    for epoch, (key, value) in enumerate(
        [
            ("topics/mine", "partitions=3"),
            ("topics/append", "partitions=1"),
            ("topics/bad", "partitions=1 retention_age=soon"),
            ("settings/colour", "red"),
            ("settings/data_quota", "much"),
            ("topics/good", "partitions=1"),
        ],
        1,
    ):
        applier.apply(said(key, value, epoch))
    found = "\n".join(applier.findings())
    for word in (
        "topics/mine: has 2",
        "topics/append",
        "topics/bad",
        "settings/colour: unknown",
        "settings/data_quota",
    ):
        assert word in found
    assert "topics/good" not in found and topics.read(settings.data, "good").partitions == 1
    assert applier.epoch == 6 and topics.read(settings.data, "mine").partitions == 2


def test_a_limit_that_was_changed_here_afterwards_is_a_finding(settings):
    applier = Applier(settings, FakeLogger())
    applier.apply(said("topics/a", "partitions=1 retention_age=1d", 1))
    topic_changes.submit(settings.data, topic_changes.SET, "a", {"retention_age": "2d"})
    assert applier.findings() == ["topics/a: has retention_age=2d here"]


def test_an_error_of_the_disk_is_raised_and_the_state_not_noted(settings):
    applier = Applier(settings, FakeLogger())
    applier.apply(said("tokens/x", "revoked", 1))
    os.mkdir(f"{states.path_of(settings)}.new")
    with pytest.raises(OSError):
        applier.apply(said("tokens/y", "revoked", 2))
    assert applier.epoch == 1 and Applier(settings, FakeLogger()).epoch == 1


def test_other_messages_and_other_clusters_change_no_state(settings, environ):
    applier = Applier(settings, FakeLogger())
    applier.apply(said("tokens/x", "revoked", 1))
    applier.apply(Message.new("greeting", b"hello")._replace(epoch=2))
    assert Applier(settings, FakeLogger()).epoch == 2 and InForce(settings).revoked == {"x"}
    other = load(environ | {"KMQ_CLUSTER": "other"}, "/nonexistent.toml")
    alone = load({name: text for name, text in environ.items() if name != "KMQ_CLUSTER"}, "/nonexistent.toml")
    assert not InForce(other).revoked and not InForce(alone).revoked and Applier(other, FakeLogger()).epoch == -1


# --- settings and tokens in force -------------------------------------------------------------------------------------


def test_the_fleet_sets_what_this_broker_was_not_given_itself(environ):
    settings = load(environ | {"KMQ_RETENTION_AGE": "never"}, "/nonexistent.toml")
    open_data(settings.data)
    told(settings, settings__retention_age="1d", settings__retention_bytes="1GiB", settings__data_quota="default")
    now = InForce(settings)
    assert now.settings.retention_age == float("inf") and now.settings.retention_bytes == GIB
    assert now.settings.data_quota == 0 and not now.changed()
    told(settings, settings__retention_bytes="much")
    assert now.changed() and now.settings.retention_bytes == 0


def test_a_child_knows_what_its_supervisor_was_given(environ):
    parent = load(environ | {"KMQ_RETENTION_AGE": "never"}, "/nonexistent.toml")
    child = load(parent.environment(), "/nonexistent.toml")
    assert child.given & states.SHARED.keys() == parent.given & states.SHARED.keys() == {"retention_age"}
    assert child.retention_bytes == 0 and child.data_quota == 0
    alone = load({"KMQ_DATA": "x"}, "/nonexistent.toml")
    assert alone.environment()["KMQ_RETENTION_AGE"] == "never"


def test_a_file_that_cannot_be_read_changes_nothing_and_is_said_once(settings):
    told(settings, tokens__x="revoked")
    log = FakeLogger()
    now = InForce(settings, log.warn)
    with open(states.path_of(settings), "w") as file:
        file.write("garbage")
    assert not now.changed() and not now.changed() and now.revoked == {"x"}
    assert [event for event, *_ in log.events] == ["states_kept"]


def test_a_quota_of_the_fleet_is_in_force_at_once(settings):
    admission = Admission(settings, lambda: 0)
    assert not admission.must_wait(0)
    told(settings, settings__data_quota="1MiB")
    assert admission.must_wait(MIB) and admission.quota == MIB
    told(settings)
    assert not admission.must_wait(MIB)


def test_a_token_is_revoked_by_its_id_or_its_name(settings):
    old, new, other = (tokens.new(settings.tokens, name) for name in ("orders", "orders", "metrics"))
    first = tokens.read(settings.tokens)["orders"][0]
    checked = tokens.Tokens(settings, FakeLogger().warn)
    assert checked.check(old.encode()) == checked.check(new.encode()) == "orders"
    told(settings, **{f"tokens__{tokens.id_of('orders', first[1])}": "revoked"})
    assert (checked.check(old.encode()), checked.check(new.encode())) == ("", "orders")
    told(settings, tokens__orders="revoked", tokens__local="revoked")
    assert (checked.check(new.encode()), checked.check(other.encode())) == ("", "metrics")
    assert checked.check(tokens.local(settings).encode()) == "local", "the broker's own programs"


# --- commands ---------------------------------------------------------------------------------------------------------


class Told:
    """Where results go; while `fails`, Consul does not answer."""

    def __init__(self):
        self.results, self.fails = [], False

    def __call__(self, id, result):
        if self.fails:
            raise consul_api.Unanswered("no Consul")
        self.results.append((id, result.outcome))


@pytest.fixture
def commands(settings):
    """A function that makes the commands of a process."""
    made = []
    os.makedirs(f"{settings.data}/cluster", exist_ok=True)

    def make(write):
        made.append(Commands(settings, FakeLogger(), write))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop()


def command(type, epoch=1, lasts_s=60.0):
    return Message.new(type, b"", lasts_s)._replace(epoch=epoch)


def test_a_command_is_done_once_also_over_a_restart(commands, settings):
    write, message = Told(), command("verify")
    first = commands(write)
    for _ in range(2):
        first.accept(message)
    until(lambda: write.results)
    first.stop()
    second = commands(write)
    second.accept(message)
    late = command("verify")._replace(expires=time.time() - 1)
    second.accept(late)
    until(lambda: len(write.results) > 1)
    assert write.results == [(message.id, "ok"), (late.id, "expired before this broker could begin")]


def test_a_result_that_consul_did_not_take_is_told_after_a_restart(commands, settings):
    write, message = Told(), command("verify")
    write.fails = True
    first = commands(write)
    first.accept(message)

    def is_done():
        with open(f"{settings.data}/cluster/commands") as file:
            return json.load(file)["commands"][message.id]["result"]

    until(is_done)
    first.stop()
    assert not write.results
    write.fails = False
    commands(write)
    until(lambda: write.results == [(message.id, "ok")])


def test_a_command_needs_no_directory_for_temporary_files(commands, monkeypatch):
    """A container whose root is read-only has none."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    write, message = Told(), command("verify")
    commands(write).accept(message)
    until(lambda: write.results == [(message.id, "ok")])


def test_what_the_system_does_not_allow_is_the_outcome_of_a_command(commands, settings):
    shutil.rmtree(f"{settings.data}/topics", ignore_errors=True)
    with open(f"{settings.data}/topics", "w"):
        pass
    write, message = Told(), command("retain")
    commands(write).accept(message)
    until(lambda: write.results)
    [(id, outcome)] = write.results
    assert id == message.id and "Not a directory" in outcome


def test_retain_is_a_request_to_the_router(commands, settings):
    write, message = Told(), command("retain")
    commands(write).accept(message)
    until(lambda: topic_changes.waiting(settings.data))
    [request] = topic_changes.waiting(settings.data)
    assert request.verb == topic_changes.RETAIN and not write.results
    request.remove()
    until(lambda: write.results == [(message.id, "ok")])


def test_an_end_does_not_wait_for_a_command_and_says_nothing_of_it(commands, settings):
    write, message = Told(), command("retain")
    first = commands(write)
    first.accept(message)
    until(lambda: topic_changes.waiting(settings.data))
    first.stop()
    assert not write.results and not [thread for thread in threading.enumerate() if thread.name == "kmq-commands"]
    topic_changes.waiting(settings.data)[0].remove()
    commands(write)
    until(lambda: topic_changes.waiting(settings.data))  # it is begun again
    topic_changes.waiting(settings.data)[0].remove()
    until(lambda: write.results == [(message.id, "ok")])


def test_what_is_remembered_of_commands_is_bounded(commands, settings):
    write = Told()
    one = commands(write)
    for epoch in range(KEPT + 20):
        one.accept(command("verify", epoch)._replace(expires=1.0))
    until(lambda: len(write.results) == KEPT + 20)
    one.accept(command("verify", 999)._replace(expires=1.0))
    until(lambda: len(write.results) == KEPT + 21)
    with open(f"{settings.data}/cluster/commands") as file:
        assert len(json.load(file)["commands"]) <= KEPT + 1


def test_a_damaged_list_of_commands_is_begun_anew(commands, settings):
    with open(f"{settings.data}/cluster/commands", "w") as file:
        file.write('{"version": 9}')
    write = Told()
    commands(write).accept(late := command("verify")._replace(expires=1.0))
    until(lambda: [id for id, _ in write.results] == [late.id])


# --- the agent --------------------------------------------------------------------------------------------------------


def test_the_place_of_a_dead_agent_of_this_host_is_waited_for_and_no_other():
    host = socket.gethostname()
    assert is_left_over(f"{host}/{os.getpid()}"), "a restarted container may get the same pid"
    assert is_left_over(f"{host}/1"), "that pid is another program's now"
    with subprocess.Popen(["python3", "-c", "import time; time.sleep(60)", "kmq.cluster.agent"]) as living:
        until(lambda: not is_left_over(f"{host}/{living.pid}"))
        living.kill()
    assert not is_left_over("elsewhere/1") and not is_left_over("session 4711") and not is_left_over(host)
