"""`kmq topics delete`: what is deleted stays deleted, whatever is killed, restarted, rebuilt or looked at afterwards."""

import os
import pty
import shutil
import signal
import subprocess

import pytest

LINE = b"%b|0|%d|%d"


def send(broker, key, *numbers):
    before = len(broker.wal())
    broker.send_lines([LINE % (key.encode(), n, n) for n in numbers])
    broker.wait_routed(before + len(numbers))


def payloads(broker, topic):
    return [int(line.rsplit(b"|", 1)[1]) for line in broker.lines(topic)]


def offsets(broker, topic):
    shown = broker.kmq("log", "stat", topic, "--logfmt").stdout.split()
    return [int(field.split("=")[1]) for field in shown if field.startswith(("first=", "last="))]


def delete(broker, topic="orders"):
    done = broker.kmq("topics", "delete", topic, "--yes")
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_whole(broker):
    found = broker.kmq("verify")
    assert found.returncode == 0, found.stdout + found.stderr


def names(broker):
    """But the topic of the records of changes."""
    return sorted(
        path.name for path in (broker.data / "topics").iterdir() if path.name[0] != "." and path.name != "__kmq"
    )


def traces(broker, topic="orders"):
    """Everything that is left of a topic, but for what the ledger and the WAL say."""
    found = [(path, name) for path, folders, files in os.walk(broker.data) for name in (*folders, *files)]
    return [f"{path}/{name}" for path, name in found if name.startswith((topic, ".deleted-", ".request-"))]


def test_a_deleted_topic_is_gone_at_once_and_stays_so_over_a_kill(broker):
    broker.up()
    send(broker, "orders.k", *range(10))
    send(broker, "others", *range(5))
    said = delete(broker)
    assert "10 messages" in said and "WAL keeps the messages" in said
    assert names(broker) == ["others"] and not traces(broker)
    assert len(broker.wal()) == 15 + 1  # the record of the deletion
    check_whole(broker)
    broker.kill()
    check_whole(broker)
    broker.up()
    assert names(broker) == ["others"] and not traces(broker)
    assert payloads(broker, "others") == [*range(5)]
    check_whole(broker)
    refused = broker.kmq("topics", "delete", "orders", "--yes")
    assert refused.returncode == 78 and "did you mean others?" in refused.stderr


def test_a_message_makes_it_anew_and_its_offsets_go_on(broker):
    broker.up()
    send(broker, "orders.k", *range(10))
    delete(broker)
    send(broker, "orders.k", 10, 11)
    assert payloads(broker, "orders") == [10, 11]
    assert offsets(broker, "orders") == [10, 11]
    check_whole(broker)
    delete(broker)
    send(broker, "orders.k", 12)
    assert offsets(broker, "orders") == [12, 12]
    broker.kill()
    broker.up()
    assert (payloads(broker, "orders"), offsets(broker, "orders")) == ([12], [12, 12])
    check_whole(broker)


def test_queues_rebuilt_from_the_wal_alone_do_not_have_what_was_deleted(broker):
    broker.up()
    send(broker, "orders.k", *range(10))
    send(broker, "others", 1, 2)
    delete(broker)
    send(broker, "orders.k", 10, 11)
    send(broker, "gone", 1)
    delete(broker, "gone")
    broker.down()
    for loss in (["topics/others"], ["topics/orders"], ["topics", "router.ckpt"]):
        for name in loss:
            path = broker.data / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        broker.up()
        assert names(broker) == ["orders", "others"], loss
        assert (payloads(broker, "orders"), payloads(broker, "others")) == ([10, 11], [1, 2]), loss
        assert offsets(broker, "orders") == [10, 11], loss
        broker.down()
        check_whole(broker)


def test_another_number_of_partitions_after_a_deletion(broker):
    broker.up()
    broker.kmq("topics", "create", "jobs.eu", "--partitions", "4")
    send(broker, "jobs.eu.a", *range(20))
    send(broker, "jobs.us", 1)
    ends = {path.parent.name: path.read_bytes().count(b"\n") for path in broker.data.glob("topics/jobs.eu/*/*.log")}
    delete(broker, "jobs.eu")
    send(broker, "jobs.eu.a", 20)  # no longer declared: the shorter topic takes it
    assert payloads(broker, "jobs") == [1, 20]
    assert broker.kmq("topics", "create", "jobs.eu", "--partitions", "5").returncode == 0
    send(broker, "jobs.eu", *range(21, 41))
    firsts = {path.parent.name: int(path.stem) for path in broker.data.glob("topics/jobs.eu/*/*.log")}
    assert firsts == {**ends, "4": 0}
    broker.down()
    (broker.data / "router.ckpt").unlink()
    shutil.rmtree(broker.data / "topics/jobs.eu/0")
    shutil.rmtree(broker.data / "topics/jobs")
    broker.up()
    assert sorted(payloads(broker, "jobs.eu")) == [*range(21, 41)]
    assert payloads(broker, "jobs") == [1, 20]
    assert {path.parent.name: int(path.stem) for path in broker.data.glob("topics/jobs.eu/*/*.log")} == firsts
    check_whole(broker)


def test_a_topic_without_a_message_is_deleted_and_declared_anew(broker):
    broker.up()
    for partitions in ("3", "2"):
        assert broker.kmq("topics", "create", "orders", "--partitions", partitions).returncode == 0
        said = delete(broker)
        assert "0 messages" in said and not traces(broker)
        broker.kill()
        broker.up()
        assert names(broker) == [] and not traces(broker)
        check_whole(broker)


def test_a_deletion_while_the_broker_is_down_is_carried_out_by_its_start(broker):
    broker.up()
    send(broker, "orders.k", *range(10))
    broker.kill()
    said = delete(broker)
    assert "deleted when the router has adopted it: at the next kmq up" in said
    check_whole(broker)
    broker.up()
    broker.wait(lambda: not traces(broker), "the deletion")
    assert names(broker) == []
    check_whole(broker)


def test_a_router_killed_before_a_request_carries_it_out_when_it_is_back(broker):
    broker.up()
    send(broker, "orders.k", *range(10))
    os.kill(broker.pids()["router"], signal.SIGSTOP)
    assert "deleted when the router has adopted it" in delete(broker)
    assert names(broker) == ["orders"]
    broker.kill("router")
    broker.wait(lambda: not traces(broker), "the deletion")
    send(broker, "orders.k", 10)
    assert (payloads(broker, "orders"), offsets(broker, "orders")) == ([10], [10, 10])
    check_whole(broker)


def test_a_deletion_that_is_asked_for_twice_takes_nothing_that_came_between(broker):
    broker.up()
    send(broker, "orders.k", *range(3))
    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    for _ in range(2):  # as whoever got no answer
        assert "deleted when the router has adopted it" in delete(broker)
    os.kill(router, signal.SIGCONT)
    sent = []

    def is_decided():
        sent.append(len(sent))
        broker.send_lines([LINE % (b"orders.k", sent[-1], sent[-1])])
        return not list(broker.data.glob("topics/.request-*"))

    broker.wait(is_decided, "both requests")
    broker.wait(lambda: broker.lines("orders") and payloads(broker, "orders")[-1] == sent[-1], "the last message")
    assert payloads(broker, "orders") == sent
    check_whole(broker)


def test_with_auto_create_off_a_deleted_topic_is_refused(broker):
    broker.up(KMQ_AUTO_CREATE_TOPICS="off")
    broker.kmq("topics", "create", "orders")
    broker.kmq("topics", "create", "jobs.eu")
    send(broker, "orders", 1)
    send(broker, "jobs.eu.k", 1)
    delete(broker)
    delete(broker, "jobs.eu")
    for key in ("orders", "jobs.eu.k"):
        refused = broker.kmq("produce", key, "-m", "late", "--acks")
        assert refused.returncode != 0 and "unknown_topic" in refused.stderr, refused.stderr
    assert names(broker) == []


def test_nothing_is_deleted_without_a_yes(broker):
    broker.up()
    send(broker, "orders", 1)
    refused = broker.kmq("topics", "delete", "orders")
    assert refused.returncode == 78 and "--yes" in refused.stderr
    for answer, left in ((b"n\n", ["orders"]), (b"y\n", [])):
        ours, theirs = pty.openpty()
        asked = subprocess.Popen(
            ["kmq", "topics", "delete", "orders"],
            env=broker.env,
            cwd=broker.root,
            stdin=theirs,
            stdout=subprocess.DEVNULL,
        )
        os.write(ours, answer)
        assert asked.wait(60) == (1 if left else 0)
        os.close(ours)
        os.close(theirs)
        assert names(broker) == left
    refused = broker.kmq("topics", "delete", "__state", "--yes")
    assert refused.returncode == 78 and "belongs to KMQ itself" in refused.stderr


@pytest.mark.parametrize("damaged", ["deletions", "topics/.deletions"])
def test_either_copy_of_the_ledger_brings_the_other_back(broker, damaged):
    broker.up()
    send(broker, "orders", *range(5))
    delete(broker)
    send(broker, "orders", 5)
    broker.down()
    path = broker.data / damaged
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"orders", b"orderz"))
    found = broker.kmq("verify")
    assert found.returncode == 1 and f"{damaged}: " in found.stdout
    assert broker.kmq("verify", "--repair").returncode == 0
    assert path.read_bytes() == whole
    path.unlink()
    (broker.data / "router.ckpt").unlink()
    shutil.rmtree(broker.data / "topics/orders")
    broker.up()
    assert path.read_bytes() == whole
    assert (payloads(broker, "orders"), offsets(broker, "orders")) == ([5], [5, 5])
    check_whole(broker)
