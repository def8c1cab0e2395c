"""The records of replicas compared: of directories, and of brokers over their replica ports, also hostile ones."""

import asyncio
import os
import shutil
from contextlib import asynccontextmanager
from functools import partial

import command_server
import pytest
from comparing import compared, run
from fake_logger import FakeLogger
from made_data import append, write_data
from shard_parts import LINEAGE, SECRET, Broker, Shard, first_register, signals_kept

from kmq.config.settings import load
from kmq.errors import ConfigError
from kmq.log import committed, identity, index, reader
from kmq.replica import compare, wire
from kmq.replica.compare import DirectoryLogs
from kmq.replica.shard import Member, Note, ShardView
from kmq.replica.wire import Hw, LogRange, NextLog, RefusedText, WireError

LINES = [b"t.%d|0||payload %d" % (n % 7, n) for n in range(300)]
PATIENCE_S = 60.0


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data", LINES, {"t": 2}, segment_bytes=2000, group=20)


@pytest.fixture
def small(monkeypatch):
    """Ranges of a few records."""
    monkeypatch.setattr(compare, "RANGE_BYTES", 500)


def with_wal(data, path, lines):
    """A copy of `data` with another WAL of whole blocks."""
    other = str(shutil.copytree(data, path, symlinks=True))
    shutil.rmtree(f"{other}/append")
    made = write_data(f"{path}-made", lines, {"t": 2})
    shutil.copytree(f"{made}/append", f"{other}/append")
    [name] = [name for name in os.listdir(f"{other}/append") if name.endswith(".idx")]
    index.relabel(f"{other}/append/{name}", identity.lineage(data))
    return other


def changed(*numbers):
    return [line.replace(b"payload", b"pAyload") if n in numbers else line for n, line in enumerate(LINES, 1)]


# --- directories -----------------------------------------------------------------------------------------------------


def test_replicas_with_other_segments_and_another_end_are_equal_as_far_as_both_have_the_records(data, tmp_path, small):
    other = write_data(tmp_path / "other", LINES[:250], {"t": 2}, segment_bytes=5000, group=10, closed=False)
    append(other, LINES[250:280])
    other[0].close()
    other[1].close()
    path = str(tmp_path / "other")
    shutil.copy(f"{data}/lineage", f"{path}/lineage")
    for top, _, names in os.walk(path):
        for name in names:
            if name.endswith(".idx"):
                index.relabel(f"{top}/{name}", identity.lineage(data))
    found = compared(data, path)
    assert {*found} >= {"append", "t/0", "t/1"}
    assert found["append"][1:] == (1, 280, "") and not any(each.difference for each in found.values())


@pytest.mark.parametrize("number", [1, 150, 300])
def test_the_first_record_that_differs_is_named_with_who_is_alone(data, tmp_path, small, number):
    other = with_wal(data, tmp_path / "other", changed(number, 299))
    third = str(shutil.copytree(data, tmp_path / "third", symlinks=True))
    found = compared(data, other, third)
    seq = min(number, 299)
    assert f"append: seq {seq} of {other} differs from {data}, {third};" in found["append"].difference
    assert not found["t/0"].difference, "the comparison goes on with the next log"


def test_directories_of_two_lineages_are_not_compared(data, tmp_path):
    other = write_data(tmp_path / "other", LINES)
    with pytest.raises(ConfigError, match="are of different lineages, so not of one shard"):
        compare.directories([data, other])


def test_the_command_says_what_is_equal_and_ends_with_1_where_something_differs(data, tmp_path):
    other = str(shutil.copytree(data, tmp_path / "other", symlinks=True))

    def verify(*directories):
        return command_server.run(["cluster", "verify", *directories], dict(os.environ), tmp_path, "", 60)

    equal = verify(data, other)
    assert equal.returncode == 0 and "append: 1 to 300 equal" in equal.stdout, equal.stderr
    one, none = verify(data), verify(data, str(tmp_path / "nothing"))
    assert one.returncode == 2 and "two or more directories" in one.stderr
    assert none.returncode == 78 and "nothing: is no data directory" in none.stderr
    third = with_wal(data, tmp_path / "third", changed(7))
    differs = verify(data, third)
    assert differs.returncode == 1 and "append: seq 7 of " in differs.stdout, differs
    damage(other, "t", 1)
    damaged = verify(data, other)
    assert damaged.returncode == 65 and f"{other}/topics/t/1/" in damaged.stderr, damaged


def damage(data, topic, number):
    [path] = [each for first, each in reader.partition(data, topic, number).segments() if not first]
    with open(path, "r+b") as file:
        text = file.read()
        file.seek(0)
        file.write(text.replace(b"payload", b"pAyload", 1))


def test_a_range_is_cut_by_its_records_alone(data, tmp_path, small):
    whole, end = write_data(tmp_path / "whole", LINES, {"t": 2}), 0
    for log in ("append", "t/0"):
        sides, at, end = [DirectoryLogs(each) for each in (data, whole)], 1, 0
        while at != end:
            at = end or 1
            ranges = [side.ask(LogRange(log, at, 121, 0)) for side in sides if side.ask(NextLog("-"))]
            assert ranges[0] == ranges[1] and ranges[0].first == at
            end = ranges[0].next
        assert end == 121


def test_what_retention_has_deleted_meanwhile_is_not_asked_for_again(data, tmp_path, small):
    other = str(shutil.copytree(data, tmp_path / "other", symlinks=True))
    logs, asked = DirectoryLogs(other), []

    async def ask(request):
        if isinstance(request, LogRange) and request.log == "append":
            asked.append(request)
            if len(asked) == 3:
                for first, path in logs._reader[1].segments()[:4]:
                    assert first < 200
                    os.unlink(path)
                    os.unlink(path.replace(".log", ".idx"))
        return logs.ask(request)

    found, lost = asyncio.run(run(compare.directories([data]) | {"other": ask}))
    first = reader.wal(other).first_offset
    assert not lost and found["append"][1:] == (first, 300, "") and first > 1


def test_only_what_is_committed_of_the_wal_is_compared(data, tmp_path):
    other = str(shutil.copytree(data, tmp_path / "other", symlinks=True))
    for each in (data, other):
        shutil.rmtree(f"{each}/topics")
        os.mkdir(f"{each}/topics")
        committed.write_committed(each, 200 if each == data else 100)
        for name in ("router.ckpt",):
            if os.path.exists(f"{each}/{name}"):
                os.unlink(f"{each}/{name}")
    assert compared(data, other)["append"][1:] == (1, 100, "")


# --- brokers ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def shard_of(tmp_path, lines):
    """Brokers with these lines by name, which wait for a register; their ports are open."""
    with signals_kept():
        made = [Broker(tmp_path / name, name, each, len(each)) for name, each in lines.items()]
        try:
            async with Shard(*made) as shard:
                yield shard
        finally:
            for broker in made:
                broker.close()


def view_of(addresses):
    """What Consul says of brokers that are alive at these addresses."""
    ids = {name: name * 16 for name in addresses}
    notes = {name: Note(name, "", replica=address) for name, address in addresses.items()}
    members = {ids[name]: Member(ids[name], note, "session", 1) for name, note in notes.items()}
    return ShardView(first_register("a" * 16, ["a" * 16]), 1, members)


@asynccontextmanager
async def called(tmp_path, addresses):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    settings = load({"KMQ_REPLICA_SECRET": str(path)}, toml="")
    async with compare.brokers(view_of(addresses), "s", "a", settings) as (sides, away):
        yield sides, away


def test_brokers_that_run_are_compared_over_their_replica_ports(tmp_path, small):
    async def scene():
        lines = dict.fromkeys("abc", LINES) | {"b": changed(123), "c": LINES[:250]}
        async with (
            shard_of(tmp_path, lines) as shard,
            called(tmp_path, {name: shard.address(name) for name in "abc"}) as (sides, away),
        ):
            found, lost = await run(sides)
            assert not away and not lost
            assert "append: seq 123 of b differs from a, c; kmq verify" in found["append"].difference
            assert "t/0: offset 122 of b differs from a, c;" in found["t/0"].difference

    asyncio.run(scene())


def test_equal_brokers_are_equal_and_who_is_away_is_named(tmp_path, small):
    async def scene():
        async with shard_of(tmp_path, dict.fromkeys("ab", LINES)) as shard:
            addresses = {name: shard.address(name) for name in "ab"}
            async with called(tmp_path, addresses) as (sides, away):
                found, lost = await run(sides)
                assert found["append"][1:] == (1, 300, "") and not found["t/0"].difference and not lost
                assert {name: str(error) for name, error in away.items()} == {"c": "is not there; start it"}

    asyncio.run(scene())


def test_who_compares_takes_no_replica_its_connection_and_is_served_nothing_else(tmp_path):
    async def scene():
        async with shard_of(tmp_path, {"a": LINES}) as shard:
            me = wire.Me("s", LINEAGE, "a", wire.NOBODY, 1, 4096)
            for message in (Hw(1), LogRange("../../etc/0", 0, 9, 0), LogRange("t/1", 0, 9, 0), NextLog("t/99999")):
                link = await wire.call(shard.address("a"), me, SECRET, None, PATIENCE_S)
                link.send(message)
                with pytest.raises(ConnectionError):
                    await link.read()
                link.abort()

    asyncio.run(scene())


def test_damage_on_a_broker_is_said_and_the_others_are_compared_on(tmp_path, small):
    async def scene():
        async with shard_of(tmp_path, dict.fromkeys("abc", LINES)) as shard:
            addresses = {name: shard.address(name) for name in "abc"}
            damage(shard.brokers[1].data, "t", 0)
            async with called(tmp_path, addresses) as (sides, _):
                found, lost = await run(sides)
                assert found["t/0"][1:] == (0, 299, "")
                assert "t/0 from 0 on is damaged there; run kmq verify there" in str(lost["b"])

    asyncio.run(scene())


async def silent(link):
    await link.read()
    await asyncio.Event().wait()


async def endless(link):
    """Say that there is one more log, for ever."""
    number = 0
    while True:
        await link.read()
        number += 1
        link.send(LogRange(f"a{number:020}/0" if number > 1 else "append", 0, 0, 0))


async def replies(message, link):
    while True:
        await link.read()
        link.send(message)


async def floods(link):
    await link.read()
    link.write("x" * 5000)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (silent, "has not answered for 3 s"),
        (partial(replies, LogRange("append", 1, 1 << 50, 0)), "is no answer to !range log=append first=1 next=51"),
        (partial(replies, LogRange("append", 9, 60, 0)), "is no answer to !range log=append first=9 next=51"),
        (partial(replies, LogRange("append", 9, 5, 0)), "is no answer to !next log=-"),
        (partial(replies, LogRange("t/0", 0, 5, 0)), "is no answer to !next log=-"),
        (partial(replies, RefusedText("no_reason")), "refused: no_reason"),
        (partial(replies, Hw(1)), "Hw came in place of an answer"),
        (endless, "has more than 50 logs that others lack"),
        (floods, "a text of more than 1024 bytes"),
    ],
)
def test_a_peer_that_is_silent_or_lies_is_left_out_and_named(tmp_path, monkeypatch, serve, reason):
    monkeypatch.setattr(compare, "_MOST_ALONE", 50)
    monkeypatch.setattr(wire, "DEAD_S", 3 if serve is silent else wire.DEAD_S)

    async def scene():
        me = wire.Me("s", LINEAGE, "c", "c" * 16, 1, 4096)
        port = await wire.ReplicaPort(lambda: me, SECRET, None, lambda peer: "", serve, FakeLogger()).open(
            "127.0.0.1", 0
        )
        try:
            async with shard_of(tmp_path, dict.fromkeys("ab", LINES[:50])) as shard:
                addresses = {name: shard.address(name) for name in "ab"} | {"c": f"127.0.0.1:{port.port}"}
                async with called(tmp_path, addresses) as (sides, away):
                    found, lost = await run(sides)
            assert {*lost} == {"c"} and reason in str(lost["c"]) and isinstance(lost["c"], WireError) and not away
            assert found["t/0"][1:] == (0, 49, "")
        finally:
            await port.close()

    asyncio.run(scene())
