"""A directory over the wire: what is linked, what is taken in, and each point at which it can be killed."""

import asyncio
import itertools
import os
import shutil
import zlib
from pathlib import Path

import pytest
from comparing import compared
from fake_logger import FakeLogger
from made_data import append, write_data
from made_up import no_room

from kmq.broker.admission import _sizes
from kmq.errors import CorruptError, RetryError
from kmq.log import checkpoint, identity, segment, wal
from kmq.log.segment import Limits
from kmq.log.wal import Wal
from kmq.replica import bootstrap, wire
from kmq.replica.bootstrap import Incoming, link_files, receive_files, send_files, settle
from kmq.replica.wire import FilesText, Me, PieceText, ReplicaPort, WireError, call
from kmq.router.queues import Queues

LINES = [b"t.k%d|0||%b" % (number, b"x" * 100) for number in range(3000)]
LEADER_ID, FOLLOWER_ID = "a" * 16, "b" * 16
PATIENCE_S = 100.0


@pytest.fixture
def leader(tmp_path):
    """A directory with several segments, two topics, and a torn end, as of a broker that runs."""
    made = write_data(tmp_path / "leader", LINES, {"t": 3, "other": 2}, 64 << 10, closed=False)
    append(made, [b"other.k|0||last"])
    data = tmp_path / "leader"
    for name, content in (("replica", b"of the leader"), ("register", b"of the leader"), ("dropped.log", b"")):
        (data / name).write_bytes(content)
    (data / "cut").mkdir()
    (data / "cut" / "1.log").write_bytes(b"x")
    (data / "topics" / ".new-x").mkdir()
    (data / "topics" / ".deleted-1").mkdir()
    (data / "topics" / ".deleted-1" / "topic.toml").write_bytes(b"")
    with open(segment.survey(f"{data}/append")[-1].path, "ab") as file:
        file.write(b"3002|1.000000|t|0|")
    yield str(data)
    made[0].close()


@pytest.fixture
def follower(tmp_path, leader):
    """Another replica of the shard, with an older end, a topic that is gone, and files of its own."""
    data = write_data(tmp_path / "follower", [b"gone|0||x", b"t.k|0||x"])
    Path(data, "lineage").write_text(identity.lineage(leader) + "\n")
    for name in ("replica", "register", "producers.ckpt"):
        Path(data, name).write_text("of the follower")
    Path(data, "append", ".owner").touch()
    Path(data, "topics", ".owner").touch()
    return data


def copied(leader, follower):
    """Carry the files over, and return how many bytes that were."""

    async def scene():
        served = asyncio.get_running_loop().create_future()

        async def serve(link):
            assert await link.read() == FilesText(0)
            served.set_result(await send_files(link, leader))
            link.send(wire.Hw(1))
            await link.read()

        me = Me("s", identity.lineage(leader), "a", LEADER_ID, 1, 1 << 20)
        port = ReplicaPort(lambda: me, b"secret of a shard", None, lambda peer: "", serve, FakeLogger())
        await port.open("127.0.0.1", 0)
        try:
            async with asyncio.timeout(PATIENCE_S):
                you = me._replace(broker="b", replica=FOLLOWER_ID)
                link = await call(f"127.0.0.1:{port.port}", you, b"secret of a shard", None, PATIENCE_S)
                nbytes = await receive_files(link, follower, identity.lineage(leader))
                assert await link.read() == wire.Hw(1), "the connection goes on"
                assert await served == nbytes
                link.abort()
                return nbytes
        finally:
            await port.close()

    return asyncio.run(scene())


def started(data):
    """What a start of durability and router makes of a directory: the last seq."""
    opened = Wal(data, no_room, 1 << 20)
    queues = Queues(data, no_room, FakeLogger(), Limits())
    queues.recover(opened.last_seq)
    queues.close()
    opened.close()
    return opened.last_seq


def tree(data):
    return {
        os.path.relpath(os.path.join(directory, name), data)
        for directory, _, names in os.walk(data)
        for name in names
        if not os.path.islink(os.path.join(directory, name))
    }


def check_is_a_copy(leader, follower):
    """The follower's directory is the leader's, but for what is its own, and starts."""
    assert Path(follower, "replica").read_text() == Path(follower, "register").read_text() == "of the follower"
    assert {"append/.owner", "topics/.owner"} <= tree(follower)
    assert not {"producers.ckpt", "topics/gone/topic.toml", "cut/1.log", "topics/.deleted-1/topic.toml"} & tree(
        follower
    )
    assert not [*Path(follower).glob("bootstrap*")] and os.path.exists(f"{follower}/append.log")
    assert started(follower) == wal.last_stored(leader)[0] == 3001
    found = compared(leader, follower)
    assert not [each.difference for each in found.values() if each.difference]
    assert {"append", "t/0", "t/1", "t/2", "other/0"} <= found.keys() and found["append"].first == 1
    assert checkpoint.queue_end(follower) == {"no queue": 0}


def test_a_copy_is_the_directory_of_the_leader_and_starts(leader, follower):
    before, inodes = tree(leader), bootstrap._survey(leader)
    nbytes = copied(leader, follower)
    assert nbytes >= sum(os.stat(f"{leader}/{name}").st_size for name in inodes)
    assert tree(leader) == before, "its links are gone"
    assert settle(follower) and not settle(follower)
    check_is_a_copy(leader, follower)


def test_an_empty_directory_becomes_a_copy(leader, follower):
    shutil.rmtree(follower)
    identity.open_data(follower)
    for name in ("lineage", "replica", "register", "append/.owner", "topics/.owner"):
        own = "of the follower" if name in ("replica", "register") else ""
        Path(follower, name).write_text(identity.lineage(leader) if name == "lineage" else own)
    copied(leader, follower)
    settle(follower)
    check_is_a_copy(leader, follower)


class Killed(BaseException):
    """As a kill: nothing of the code that follows runs, not even what handles errors."""


def test_a_kill_at_any_step_leaves_the_old_state_or_is_finished(leader, follower, tmp_path, monkeypatch):
    copied(leader, follower)
    steps = 0
    for at in range(1000):
        data = shutil.copytree(follower, tmp_path / f"at{at}", symlinks=True)
        left = at

        def step(real):
            def call(*arguments, **more):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return real(*arguments, **more)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "unlink", "rmdir", "symlink", "fsync"):
                patch.setattr(os, name, step(getattr(os, name)))
            try:
                settle(str(data))
            except Killed:
                steps += 1
            else:
                break
        settle(str(data))
        check_is_a_copy(leader, str(data))
        shutil.rmtree(data)
    assert steps > 20


def test_what_came_without_its_end_is_removed_and_nothing_else(leader, follower):
    before = tree(follower)
    incoming = Incoming(follower)
    incoming.write(PieceText("append/00000000000000000001.log", 0, 5, 0, b"1|1.000000|t|0||x\n"))
    incoming.close()
    assert not settle(follower) and tree(follower) == before


def test_a_directory_of_another_lineage_is_never_replaced(leader, follower):
    Path(follower, "lineage").write_text("f" * 32 + "\n")
    before = tree(follower)
    with pytest.raises(CorruptError, match="is of another lineage than the shard's"):
        copied(leader, follower)
    assert tree(follower) == before


@pytest.mark.parametrize(
    "name",
    [
        "id", "lineage", "replica", "register", "whole", "/etc/passwd", "../id", "append/../id", "append/x.log",
        "append/.owner", "topics/.owner", "topics/../id", "topics/t/../../id", "topics/.x/0/00000000000000000000.log",
        "topics/t/0/x", "topics/t/00000/00000000000000000000.log", "append/00000000000000000001.log/x", "cut/1.log",
        "quarantine/x", "topics/t/topic.toml\0",
    ],
)  # fmt: skip
def test_a_file_that_no_bootstrap_has_is_refused(follower, name):
    with pytest.raises(WireError, match="is no file that a bootstrap brings"):
        Incoming(follower).write(PieceText(name, 0, 1, 0, b"x"))
    assert [*Path(follower, "bootstrap").iterdir()] == []


def test_pieces_that_do_not_follow_one_another_are_refused(follower):
    first, second = (f"append/{segment.name(number)}" for number in (1, 9))
    for pieces in (
        [(first, 1)],
        [(first, 0), (first, 2)],
        [(first, 0), (first, 0)],
        [(first, 0), (second, 1)],
        [(first, 0), (second, 0), (first, 1)],
        [(first, 0), (second, 0), (first, 0)],
    ):
        incoming = Incoming(follower)
        *good, bad = [PieceText(name, offset, 9, 0, b"x") for name, offset in pieces]
        for piece in good:
            incoming.write(piece)
        with pytest.raises(WireError, match=r"came twice|does not follow what came before"):
            incoming.write(bad)


def test_files_that_are_no_data_directory_or_of_a_later_release_never_count_as_whole(follower):
    log, later = "append/00000000000000000001.log", b"6 from_seq=1 marks_from=1 crc32=1"
    unknown = "have no `format` that this release knows; install the leader's release"
    for files, said in (
        ({log: b"1"}, unknown),
        ({"format": later, log: b"1"}, unknown),
        ({"format": b"1"}, "came without a WAL"),
    ):
        incoming = Incoming(follower)
        for name, content in files.items():
            incoming.write(PieceText(name, 0, 0, 0, content))
        with pytest.raises(WireError, match=said):
            incoming.finish()
        assert not settle(follower)


def test_files_that_change_meanwhile_are_linked_again(leader, tmp_path, monkeypatch):
    place, real, done = str(tmp_path / "links"), os.link, []

    def link(source, target):
        real(source, target)
        if target.endswith("/topics/other/topic.toml") and len(done) < 3:  # a checkpoint, retention
            os.rename(shutil.copy(f"{leader}/format", f"{leader}/format.new"), f"{leader}/format")
            for suffix in ("log", "idx"):
                os.unlink(segment.listing(f"{leader}/append")[0][1].replace("log", suffix))
            done.append(1)

    monkeypatch.setattr(os, "link", link)
    files = link_files(leader, place)
    assert len(done) == 3 and {each.name for each in files} == {*bootstrap._survey(leader)} == tree(place)
    assert os.stat(f"{place}/format").st_ino == os.stat(f"{leader}/format").st_ino
    order = [each.name for each in files]
    assert order.index("append/" + segment.name(segment.listing(f"{leader}/append")[-1][0])) == len(order) - 1
    inodes = itertools.count()
    monkeypatch.setattr(bootstrap, "_survey", lambda data: {"format": next(inodes)})
    with pytest.raises(RetryError, match="its files changed 50 times"):
        link_files(leader, place)


def test_links_are_not_counted_as_use_of_the_disk(leader):
    before = sum(_sizes(leader))
    link_files(leader, f"{leader}/bootstrap-{FOLLOWER_ID}")
    assert sum(_sizes(leader)) < before + (64 << 10)


@pytest.mark.parametrize("got", [0, 9, 99])
def test_a_follower_that_confirms_what_was_not_sent_is_cut_off(leader, got):
    async def scene():
        ended = asyncio.get_running_loop().create_future()

        async def serve(link):
            try:
                await send_files(link, leader)
            except WireError as error:
                ended.set_result(str(error))

        me = Me("s", identity.lineage(leader), "a", LEADER_ID, 1, 1 << 20)
        port = ReplicaPort(lambda: me, b"secret of a shard", None, lambda peer: "", serve, FakeLogger())
        await port.open("127.0.0.1", 0)
        try:
            async with asyncio.timeout(PATIENCE_S):
                you = me._replace(broker="b", replica=FOLLOWER_ID)
                link = await call(f"127.0.0.1:{port.port}", you, b"secret of a shard", None, PATIENCE_S)
                link.send(FilesText(got))
                assert "came while files were sent" in await ended
                pieces = 0
                while isinstance(await link.read(), PieceText):
                    pieces += 1
                    if pieces == bootstrap.WINDOW:
                        break
                link.abort()
        finally:
            await port.close()

    asyncio.run(scene())
    assert not [*Path(leader).glob("bootstrap*")]


def test_a_large_file_goes_in_pieces(leader, follower):
    path = Path(leader, "quarantine", "log")
    path.parent.mkdir()
    path.write_bytes(bytes(range(256)) * 10_000)
    copied(leader, follower)
    settle(follower)
    assert zlib.crc32(Path(follower, "quarantine", "log").read_bytes()) == zlib.crc32(path.read_bytes())
