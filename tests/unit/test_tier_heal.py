"""Damage of a partition whose old records lie in the store: it is healed from the objects, or left and named, never guessed."""

import copy
import gzip
import json
import os
import shutil
import urllib.request
from pathlib import Path

import pytest
import tiered
from fake_logger import FakeLogger
from log_server import up
from made_up import stored
from tier_stores import LyingStore
from tiered import cold_broker, lines
from typer.testing import CliRunner

from kmq.cli import tier
from kmq.cli.app import app
from kmq.config.settings import load
from kmq.errors import CorruptError
from kmq.gateway.core.partitions import Partitions
from kmq.log import reader, rows, segment
from kmq.log.damage import DamageError
from kmq.repair.heal import repair
from kmq.repair.verify import Verifier
from kmq.tier.cache import TierCache
from kmq.tier.commits import DamagedError
from kmq.wire.requests import Position

pytestmark = pytest.mark.usefixtures("small_blocks")

COUNT = 400


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Rows 0…377, segments from 320 on: what lies between lies in both."""
    broker = cold_broker(tmp_path_factory.mktemp("original"), COUNT)
    assert broker.local()[0] < broker.rows()[-1][1] < COUNT
    return broker


@pytest.fixture
def made(original, tmp_path):
    for name in ("data", "store"):
        shutil.copytree(Path(original.data).parent / name, tmp_path / name, symlinks=True)
    broker = copy.copy(original)
    broker.sent = [*original.sent]
    broker.data, broker.store, broker.logger = str(tmp_path / "data"), LyingStore(str(tmp_path / "store")), FakeLogger()
    return broker


def access(made):
    return tier.access(load({"KMQ_DATA": made.data, "KMQ_TIER": f"file://{made.store.root}"}, "none.toml"))


def heal(made):
    """What a repair did, by path."""
    return {each.path: each for each in repair(made.data, access=access(made))}


def damage_of(made):
    return [each for each in Verifier(made.data, False).findings() if each.is_damage]


def logs(directory):
    return {path.name: path.read_bytes() for path in Path(directory).glob("*.log")}


def lose_wal(made):
    """Retention takes all of the WAL but its last segment."""
    for _, path in segment.listing(f"{made.data}/append")[:-1]:
        os.unlink(path)
        os.unlink(segment.index_path(path))


def path_of(made, number=0):
    return segment.listing(made.directory())[number][1]


def spoil(path, at=None, text=b"\0\0\0\0\0"):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2 if at is None else at)
        file.write(text)


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def lose_index(path):
    os.unlink(segment.index_path(path))
    spoil(path)


HARMS = {
    "altered": spoil,
    "first line": lambda path: spoil(path, 0),
    "cut": cut,
    "emptied": lambda path: os.truncate(path, 0),
    "all of it": lambda path: Path(path).write_bytes(b"\0" * os.path.getsize(path)),
    "with its index": lose_index,
    "lost": os.unlink,
}


@pytest.mark.parametrize("wal", ["whole", "gone"])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.sampled(5)
def test_a_damaged_local_block_is_healed_from_the_wal_or_else_from_its_object(made, harm, wal):
    before = logs(made.directory())
    if wal == "gone":
        lose_wal(made)
    HARMS[harm](path_of(made))
    heal(made)
    after = logs(made.directory())
    if harm == "lost" and made.local()[0] > int(min(before)[:20]):
        before.pop(min(before))  # it lies in the store alone now
    assert after == before and not damage_of(made)
    assert made.begin() == 0 and not os.path.exists(f"{made.data}/quarantine/log")


def object_with(made, offset):
    """The path of the object that has a record."""
    row = rows.holding(rows.of(made.directory()).rows, offset)
    return Path(f"{made.store.root}/{made.copier.lineage}/{row.key}")


def test_while_the_store_is_away_the_block_stays_and_the_report_says_why(made):
    before = logs(made.directory())
    lose_wal(made)
    spoil(path_of(made))
    spoil(path_of(made, 2))  # the WAL has it: it does not wait for the store
    damaged = logs(made.directory())
    os.rename(made.store.root, f"{made.store.root}-away")
    what = heal(made)[f"topics/t/0/{min(before)}"].what
    assert what.startswith("not healed: ") and what.endswith("or is not mounted")
    assert logs(made.directory()) == damaged | {max(before): before[max(before)]}
    assert repair(made.data)[0].what == "not healed: KMQ_TIER is not set, and what is lost here lies there: set it"
    os.rename(f"{made.store.root}-away", made.store.root)
    heal(made)
    assert logs(made.directory()) == before and not damage_of(made)


def test_the_command_says_what_waits_for_the_store_and_heals_it_later(made):
    lose_wal(made)
    spoil(path_of(made))
    environment = {
        "KMQ_DATA": made.data,
        "KMQ_TIER": f"file://{made.store.root}",
        "KMQ_INSTANCE": f"heal-{os.getpid()}",
    }
    os.rename(made.store.root, f"{made.store.root}-away")
    done = CliRunner().invoke(app, ["verify", "--repair"], env=environment)
    assert done.exit_code == 65 and "not healed: the store has no commit of this broker" in done.stdout
    os.rename(f"{made.store.root}-away", made.store.root)
    assert CliRunner().invoke(app, ["verify", "--repair"], env=environment).exit_code == 0
    done = CliRunner().invoke(app, ["verify"], env=environment)
    assert done.exit_code == 0 and done.stdout.endswith("no damage\n")


def test_what_the_gateway_has_left_in_the_cache_is_not_believed(made):
    before = logs(made.directory())
    lose_wal(made)
    row = rows.holding(rows.of(made.directory()).rows, made.local()[0])
    TierCache(made.data, made.store, 1 << 30).fetch(made.directory(), 1, row)
    cached = Path(rows.cached_path(made.directory(), 1, row))
    cached.write_bytes(cached.read_bytes().replace(b"|t|1|", b"|t|2|"))
    spoil(path_of(made))
    heal(made)
    assert logs(made.directory()) == before


@pytest.mark.parametrize("harm", [os.unlink, spoil, cut])
def test_what_no_copy_has_any_more_stays_as_it_is_without_a_hole(made, harm):
    lose_wal(made)
    spoil(path_of(made))
    harm(object_with(made, made.local()[0]))
    damaged = logs(made.directory())
    assert heal(made)[f"topics/t/0/{min(damaged)}"].what.startswith("not healed: ")
    assert logs(made.directory()) == damaged and damage_of(made)
    assert not os.path.exists(f"{made.data}/quarantine")


@pytest.mark.parametrize("is_local", [False, True])
def test_the_wal_is_healed_from_objects_too(made, is_local):
    """Most of what an old WAL has lies nowhere else on the disk."""
    before = logs(f"{made.data}/append"), logs(made.directory())
    paths = [path for _, path in segment.listing(f"{made.data}/append")]
    for number in (1, 2, 5):
        spoil(paths[number])
    os.unlink(paths[3])
    if is_local:
        spoil(paths[8])
        spoil(path_of(made))
    heal(made)
    assert (logs(f"{made.data}/append"), logs(made.directory())) == before and not damage_of(made)
    assert not os.path.exists(f"{made.data}/quarantine/log")


def test_a_damaged_wal_waits_for_a_store_that_is_away_and_counts_a_lost_object_as_no_copy(made):
    path = segment.listing(f"{made.data}/append")[1][1]
    spoil(path)
    damaged = logs(f"{made.data}/append")
    os.rename(made.store.root, f"{made.store.root}-away")
    assert heal(made)[os.path.relpath(path, made.data)].what.startswith("not healed: ")
    assert logs(f"{made.data}/append") == damaged
    os.rename(f"{made.store.root}-away", made.store.root)
    for offset in (40, 79):
        object_with(made, offset).unlink(missing_ok=True)
    [healed] = [each for each in repair(made.data, access=access(made)) if each.lost]
    assert healed.path == os.path.relpath(path, made.data) and not damage_of(made)


def test_holes_lie_after_the_end_of_the_rows_only(made):
    end = made.rows()[-1][1]
    number = next(at for at, first in enumerate(made.local()) if first > end) - 1
    lose_wal(made)
    first, path = segment.listing(made.directory())[number]
    Path(path).write_bytes(b"")
    heal(made)
    found = Path(path).read_bytes().splitlines(keepends=True)
    count = made.local()[number + 1] - first
    assert found[: end - first] == made.sent[first:end] and len(found) == count
    assert found.count(b"\n") < count - (end - first) or b"\n" in found


# --- objects and commits ---------------------------------------------------------------------------------------------


def swap(path):
    other = max(each for each in path.parent.iterdir() if each != path)
    spare = path.with_suffix(".spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


LIES = {
    "flipped": flip,
    "cut": cut,
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": os.unlink,
    "longer": lambda path: path.write_bytes(path.read_bytes() * 2),
    "swapped": swap,
    "of a stranger": lambda path: path.write_bytes(gzip.compress(b"".join(stored(lines(63), 1000)))),
}


def tree(root):
    """Every file below a directory, without locks and the cache."""
    paths = [path for path in Path(root).rglob("*") if path.is_file() and path.name != ".owner"]
    return {path: path.read_bytes() for path in paths if "tier/cache" not in str(path)}


def read_all(made):
    """The lines that the doors give, in order, and the offsets that they refuse as damaged."""
    url = f"file://{made.store.root}"
    found, refused, offset = [], [], 0
    with up(made.data, synced=COUNT, KMQ_TIER=url) as broker:
        broker.serve()
        while offset < COUNT:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{broker.port}/v1/logs/t/0/records?start={offset}", timeout=100
                ) as response:
                    found += response.read().splitlines(keepends=True)
                    offset = int(response.headers["KMQ-Next-Offset"])
            except urllib.error.HTTPError as err:
                answer = json.loads(err.read())
                assert (err.code, answer["code"]) == (500, "damaged"), answer
                row = rows.holding(rows.of(made.directory()).rows, offset)
                assert f"offset {row.base} to {row.next - 1}" in answer["message"]
                assert "run kmq tier verify --deep" in answer["message"], "the local log is whole"
                refused += range(row.base, row.next)
                offset = row.next
    return found, refused


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.sampled(3)
def test_of_a_damaged_object_those_offsets_alone_are_refused_and_named(made, lie):
    harmed = object_with(made, 100)
    LIES[lie](harmed)
    before = tree(made.data), tree(made.store.root)
    spans = [(row.base, row.next) for row in rows.of(made.directory()).rows]
    wrong = [spans[1], spans[-1]] if lie == "swapped" else [spans[1]]
    local = made.local()[0]
    found, refused = read_all(made)
    gone = [offset for begin, end in wrong for offset in range(begin, min(end, local))]
    assert refused == gone or lie == "swapped"
    assert found == [line for offset, line in enumerate(made.sent) if offset not in set(refused)]
    environment = {"KMQ_DATA": made.data, "KMQ_TIER": f"file://{made.store.root}"}
    done = CliRunner().invoke(app, ["tier", "verify", "--deep"], env=environment)
    named = [words.partition(": ")[0] for words in done.stdout.splitlines()[:-1]]
    assert done.exit_code == 1 and named == [f"t/0 offsets {begin} to {end - 1}" for begin, end in wrong]
    assert (tree(made.data), tree(made.store.root)) == before and not damage_of(made)


@pytest.mark.parametrize("lie", ["hole", "flipped", "cut"])
def test_after_damaged_commits_nothing_is_written_or_deleted_and_everything_is_read(made, lie):
    commits = sorted(Path(made.store.root).glob("*/commits/*"))
    {"hole": os.unlink, "flipped": flip, "cut": cut}[lie](commits[len(commits) // 2])
    before = tree(made.store.root)
    made.start()
    made.kill_copier()
    for _ in range(2):
        made.checkpoint()
        with pytest.raises(DamagedError):
            made.copier.turn()
        made.tick()
    made.stop()
    after = tree(made.store.root)
    assert {path: text for path, text in after.items() if "/probe/" not in str(path)} == before
    assert read_all(made) == (made.sent, [])
    environment = {"KMQ_DATA": made.data, "KMQ_TIER": f"file://{made.store.root}"}
    done = CliRunner().invoke(app, ["tier", "verify"], env=environment)
    assert isinstance(done.exception, DamagedError) and f"commit {len(commits) // 2 + 1}" in str(done.exception)


# --- the file `tier` -------------------------------------------------------------------------------------------------


def damage_tier(made):
    path = Path(rows.path_of(made.directory()))
    path.write_bytes(path.read_bytes().replace(b" add ", b" odd ", 1))


TIER_LOSSES = {
    "damaged": damage_tier,
    "lost": lambda made: os.unlink(rows.path_of(made.directory())),
    "partition": lambda made: shutil.rmtree(made.directory()),
    "topic": lambda made: shutil.rmtree(Path(made.directory()).parent),
}


def read_cold(made):
    """Every record of the partition by offset, with an empty cache."""
    shutil.rmtree(f"{made.data}/tier/cache", ignore_errors=True)
    return tiered.read_all(made)


@pytest.mark.parametrize("loss", TIER_LOSSES)
@pytest.mark.parametrize("wal", ["whole", "gone"])
@pytest.mark.sampled(4)
def test_a_lost_or_damaged_tier_is_a_refusal_until_its_rows_are_laid_out_again(made, loss, wal):
    first, rows_before = made.local()[0], made.rows()
    if wal == "gone":
        lose_wal(made)
    TIER_LOSSES[loss](made)
    made.start()
    try:
        partition = Partitions(made.data).open("t", 0)
        for offset in (3, first - 1):
            with pytest.raises(DamageError):
                partition.read(offset, 1)
        with pytest.raises(DamageError):
            partition.locate(Position("earliest", 0))
        assert made.local()[0] >= first
        assert partition.read(COUNT - 1, 1) == (COUNT - 1, made.sent[COUNT - 1])
        made.send(*lines(3, COUNT))
        assert partition.read(COUNT, 1) == (COUNT, made.sent[COUNT])
        made.kill_copier()
        for _ in range(3):
            made.turn()
        assert made.rows()[: len(rows_before)] == rows_before and made.begin() == 0
        assert read_cold(made) == dict(enumerate(made.sent))
    finally:
        made.stop()


@pytest.mark.parametrize("loss", ["damaged", "lost"])
def test_without_router_ckpt_nothing_before_the_segments_is_rebuilt(made, loss):
    first = made.local()[0]
    TIER_LOSSES[loss](made)
    os.unlink(f"{made.data}/router.ckpt")
    made.start()
    assert made.local()[0] == first
    with pytest.raises(DamageError):
        reader.partition(made.data, "t", 0).read(3, 1)
    made.kill_copier()
    for _ in range(3):
        made.turn()
    assert read_cold(made) == dict(enumerate(made.sent))
    made.stop()


def test_a_start_waits_for_what_only_the_commits_say_where_a_partition_goes_on(made):
    """Directory and router.ckpt are lost, and the WAL begins later: offsets would be given out again."""
    end = made.rows()[-1][1]
    lose_wal(made)
    os.unlink(f"{made.data}/router.ckpt")
    shutil.rmtree(made.directory())
    with pytest.raises(CorruptError, match="set KMQ_TIER and run kmq verify --repair"):
        made.start()
    made.wal.close()
    os.makedirs(made.directory(), exist_ok=True)
    assert heal(made)["topics/t/0/tier"].what == "written again, as the commits in KMQ_TIER have it"
    made.start()
    assert made.local() == [end] and made.begin() == 0
    assert read_cold(made) == dict(enumerate(made.sent))
    made.stop()


@pytest.mark.parametrize("loss", ["damaged", "lost"])
def test_a_repair_writes_a_tier_again_before_it_heals_a_block(made, loss):
    before, tier_before = logs(made.directory()), rows.of(made.directory()).text()
    lose_wal(made)
    TIER_LOSSES[loss](made)
    spoil(path_of(made))
    damaged = logs(made.directory())
    done = repair(made.data)  # which records lie in the store is not known: nothing is given up
    assert done and all(each.what.startswith("not healed: ") and "set" in each.what for each in done)
    assert logs(made.directory()) == damaged and not os.path.exists(f"{made.data}/quarantine")
    heal(made)
    assert logs(made.directory()) == before and rows.of(made.directory()).text() == tier_before
    assert not damage_of(made)


def test_a_repair_of_an_older_state_takes_no_row_of_what_came_later(made, tmp_path):
    """It goes on elsewhere, and its own records are nowhere else."""
    older = tmp_path / "older"
    shutil.copytree(made.data, older, symlinks=True)
    state = made.next_seq, [*made.sent]
    made.start()
    made.kill_copier()
    made.send(*lines(400, COUNT))
    made.turn()
    made.stop()
    assert made.state.logs["t/0", 1].end > COUNT + 200
    shutil.rmtree(made.data)
    shutil.move(older, made.data)
    made.next_seq, made.sent = state
    damage_tier(made)
    heal(made)
    assert made.rows()[-1][1] <= COUNT and made.begin() == 0
    made.start()
    made.send(*lines(400, 5000))
    made.tick()
    assert read_cold(made) == dict(enumerate(made.sent))
    made.stop()


def test_a_store_without_the_commits_of_before_says_nothing_of_rows(made, tmp_path):
    before = made.rows()
    damage_tier(made)
    os.rename(made.store.root, tmp_path / "away")
    os.mkdir(made.store.root)  # the volume is not mounted
    assert "it is another store" in heal(made)["topics/t/0/tier"].what
    os.rmdir(made.store.root)
    os.rename(tmp_path / "away", made.store.root)
    heal(made)
    assert made.rows() == before and made.read() == b"".join(made.sent)


@pytest.mark.parametrize("command", ["verify", "ls", "status", "claim --yes"])
def test_a_command_says_that_the_store_is_another_one(made, monkeypatch, command, tmp_path):
    monkeypatch.setenv("KMQ_DATA", made.data)
    monkeypatch.setenv("KMQ_TIER", f"file://{tmp_path}/empty")
    run = CliRunner().invoke(app, ["tier", *command.split()])
    assert isinstance(run.exception, DamagedError) and "it is another store" in str(run.exception)
    assert not os.path.exists(tmp_path / "empty")


@pytest.mark.parametrize("loss", ["damaged", "lost"])
def test_while_the_rows_are_not_known_no_record_of_the_wal_is_given_up(made, loss):
    path = segment.listing(f"{made.data}/append")[1][1]
    spoil(path)
    TIER_LOSSES[loss](made)
    damaged = logs(f"{made.data}/append")
    done = {each.path: each.what for each in repair(made.data)}
    words = {"damaged": "is damaged", "lost": "may be lost"}[loss]
    assert done[os.path.relpath(path, made.data)].startswith(f"not healed: topics/t/0/tier {words}, so which records")
    assert logs(f"{made.data}/append") == damaged and not os.path.exists(f"{made.data}/quarantine")
    heal(made)
    assert not damage_of(made)


def test_what_was_laid_out_before_the_file_was_lost_is_not_all_of_its_rows(made):
    found, text = made.rows(), Path(rows.path_of(made.directory())).read_text().splitlines(keepends=True)
    Path(f"{made.data}/topics/.tiered").mkdir(exist_ok=True)
    Path(f"{made.data}/topics/.tiered/t-0").write_text(text[0] + text[-1])
    damage_tier(made)
    made.start()
    made.tick()
    with pytest.raises(DamageError):
        reader.partition(made.data, "t", 0).read(3, 1)
    made.kill_copier()
    made.turn()
    assert made.rows()[: len(found)] == found and made.begin() == 0
    made.stop()


def test_a_start_in_rows_that_are_not_known_waits_for_them(made):
    damage_tier(made)
    made.start()
    made.queues.retention.begin_at([(made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0), 100)])
    made.tick()
    with pytest.raises(DamageError):
        reader.partition(made.data, "t", 0).read(200, 1)
    made.kill_copier()
    for _ in range(3):
        made.turn()
    assert made.begin() == 100 and list(read_cold(made)) == [*range(100, COUNT)]
    made.stop()


@pytest.mark.parametrize("loss", ["damaged", "lost"])
@pytest.mark.parametrize("way", ["laid out", "repaired"])
def test_what_a_start_inside_of_a_row_has_deleted_stays_deleted_though_tier_is_lost(made, loss, way):
    """The commits have the start. It was left out, and deleted records came back."""
    made.start()
    made.kill_copier()
    start = made.rows()[1][0] + 7
    made.queues.retention.begin_at([(made.queues.logs.log_of(made.queues.in_force.table[b"t"], 0), start)])
    for _ in range(2):
        made.turn()
    made.stop()
    TIER_LOSSES[loss](made)
    if way == "repaired":
        heal(made)
    made.start()
    made.kill_copier()
    for _ in range(3):
        made.turn()
    assert made.begin() == start and [*read_cold(made)] == [*range(start, COUNT)]
    made.stop()
