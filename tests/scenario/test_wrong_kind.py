"""Something else lies where KMQ keeps a file, a link or a directory: it is made again, or the start ends at once with advice."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokers import Broker

from kmq.errors import EXIT_CONFIG, EXIT_CORRUPT

LOG = f"{0:020d}.log"
Damage = Callable[[Path], object]


def followed(name: str) -> Damage:
    """A backup that follows links has left a copy where the link was."""

    def damage(data: Path) -> None:
        content = (data / name).read_bytes()
        (data / name).unlink()
        (data / name).write_bytes(content)

    return damage


def directory(name: str) -> Damage:
    def damage(data: Path) -> None:
        (data / name).unlink(missing_ok=True)
        (data / name).mkdir()
        (data / name / "something").touch()

    return damage


def plain_file(name: str) -> Damage:
    def damage(data: Path) -> None:
        shutil.rmtree(data / name)
        (data / name).write_text("something")

    return damage


def text(name: str, content: str) -> Damage:
    return lambda data: (data / name).write_text(content)


def no_utf8(data: Path) -> None:
    os.mkdir(bytes(data / "topics") + b"/caf\xe9")


def link_to_itself(name: str) -> Damage:
    def damage(data: Path) -> None:
        (data / name).unlink()
        (data / name).symlink_to(data / name)

    return damage


REMADE = {
    "copy of a queue": followed("test.log"),
    "copy of the WAL": followed("append.log"),
    "directory for the link of a queue": directory("test.log"),
    "directory for the link of the WAL": directory("append.log"),
}
REFUSED = {
    "directory router.ckpt": (directory("router.ckpt"), "router.ckpt"),
    "directory producers.ckpt": (directory("producers.ckpt"), "producers.ckpt"),
    "directory dropped.log": (directory("dropped.log"), "dropped.log"),
    "directory append/.owner": (directory("append/.owner"), "append/.owner"),
    "directory topics/.owner": (directory("topics/.owner"), "topics/.owner"),
    "directory id": (directory("id"), "/id"),
    "directory topic.toml": (directory("topics/test/topic.toml"), "topics/test/topic.toml"),
    "directory segment": (directory(f"topics/test/0/{LOG}"), f"topics/test/0/{LOG}"),
    "file for a partition": (plain_file("topics/test/0"), "topics/test/0"),
    "id of 5,000 bytes": (text("id", "x" * 5000), "/id"),
    "topic not UTF-8": (no_utf8, "topics/caf\\xe9"),
    "topic with a newline": (lambda data: (data / "topics/a\nb").mkdir(), "topics/a\\nb"),
    "link to itself": (link_to_itself("router.ckpt"), "router.ckpt"),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a broker has left that was used and is down."""
    broker = Broker(tmp_path_factory.mktemp("used") / "broker")
    broker.gateway = False
    broker.up()
    broker.send_lines([b"test.probe|0|1|hello"])
    broker.wait_routed(1)
    broker.down()
    yield broker.data
    broker.close()


@pytest.fixture
def used(new_broker: Callable[[], Broker], left: Path) -> Broker:
    """Another one on a copy of its data."""
    broker = new_broker()
    broker.gateway = False
    shutil.copytree(left, broker.data, symlinks=True)
    return broker


@pytest.mark.parametrize("damage", REMADE.values(), ids=REMADE)
def test_links_are_made_again_and_what_lay_there_is_kept(used: Broker, damage: Damage) -> None:
    damage(used.data)
    used.up()
    used.send_lines([b"test.probe|0|2|again"])
    used.wait_routed(2)
    for link in ("test.log", "append.log"):
        assert (used.data / link).is_symlink() and (used.data / link).read_bytes().count(b"\n") == 2
    assert len(list((used.data / "quarantine").iterdir())) == 1 and "event=set_aside" in used.log()
    used.down()
    assert used.kmq("verify").returncode == 0


@pytest.mark.parametrize(("damage", "path"), REFUSED.values(), ids=REFUSED)
def test_a_start_that_cannot_work_ends_at_once_with_path_and_advice(used: Broker, damage: Damage, path: str) -> None:
    damage(used.data)
    done = used.kmq("up", "--no-gateway")
    assert done.returncode in (EXIT_CORRUPT, EXIT_CONFIG), done.stderr
    assert path in done.stderr.replace("\\\\", "\\")  # logfmt escapes them
    assert "move it away" in done.stderr or "kmq verify --repair" in done.stderr
    log = used.log() if (used.pipes / "kmq.log").exists() else done.stderr  # some of it is seen before there is a log
    assert "Traceback" not in log and "restart_in_s" not in log


@pytest.mark.parametrize("partitions", [1_000_000_000, 0])
def test_a_topic_with_an_impossible_number_of_partitions_has_those_on_disk(used: Broker, partitions: int) -> None:
    text("topics/test/topic.toml", f"partitions = {partitions}\nfrom_seq = 1\n")(used.data)
    used.up()
    assert (used.data / "topics/test/topic.toml").read_text() == "partitions = 1\nfrom_seq = 1\n"
    used.down()
    text("topics/test/topic.toml", f"partitions = {partitions}\nfrom_seq = 1\n")(used.data)
    (used.data / "router.ckpt").unlink()  # nobody else knows
    done = used.kmq("up", "--no-gateway")
    assert done.returncode == EXIT_CORRUPT and f"topic.toml: cannot be read: partitions = {partitions}:" in done.stderr
    assert used.kmq("verify", "--repair").returncode == 0
    used.up()


@pytest.mark.parametrize("case", ["topic not UTF-8", "topic with a newline"])
def test_a_repair_sets_aside_what_cannot_be_a_topic(used: Broker, case: str) -> None:
    damage, path = REFUSED[case]
    damage(used.data)
    found = used.kmq("verify")
    assert found.returncode != 0 and f"{path}: byte 0: is not a topic's name" in found.stdout
    assert used.kmq("verify", "--repair").returncode == 0
    assert len(list((used.data / "quarantine").iterdir())) == 1
    used.up()
    used.down()
