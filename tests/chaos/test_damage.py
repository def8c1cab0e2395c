"""G8: one damage anywhere on disk is found, never served, and healed to the last byte; then the broker goes on.

A damage is one flipped bit, a truncation or a zeroed 4 KiB page, at any position of any file. The directory was written by a
real broker in many segments, and left by an orderly stop or by SIGKILL. Stated limit: bytes of the last second that are
neither indexed nor routed; the directories here are older than that.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos.checker import Stream, check
from chaos.directories import AFTER, everything, findings, goes_on
from chaos.load import FifoLoad
from chaos.pod import Pod
from kmq.log import show, topics
from kmq.repair import heal

MESSAGES = 12_000
PAGE = 4096
SKIPPED = ".owner"  # who holds a lock, in words


Make = Callable[..., Pod]


class Original(NamedTuple):
    data: Path
    sent: list[Stream]
    files: dict[str, bytes]
    logs: dict[str, dict[int, bytes]]  # of each log, each record by its offset or seq


def filled(pod: Pod) -> list[Stream]:
    """The streams that a broker has taken, three topics of many segments, one of them in three partitions."""
    (pod.data / "topics" / "wide").mkdir(parents=True)
    (pod.data / "topics" / "wide" / "topic.toml").write_text("partitions = 3\n")
    load = FifoLoad(pod.pipes, "fifo", seed=1, rest_s=0.001)
    load.start()
    pod.start()
    pod.wait(lambda: load.count > MESSAGES, "all is sent")
    load.finish()
    pod.settle()
    return load.sent


@pytest.fixture(scope="module", params=["stopped", "killed"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Original]:
    pod = Pod(tmp_path_factory.mktemp(request.param), KMQ_SEGMENT_BYTES=256 << 10)
    try:
        sent = filled(pod)
        if request.param == "stopped":
            pod.stop()
        else:
            pod.wait(lambda: not findings(pod.data, notes=True), "the indexes speak of everything")
            pod.kill()
    finally:
        pod.close()
    logs = {name: everything(log) for name, log in show.logs(str(pod.data), "")}
    assert sum(map(len, logs.values())) == 2 * sum(stream.count for stream in sent)
    yield Original(pod.data, sent, files(pod.data), logs)


def files(data: Path) -> dict[str, bytes]:
    found = [path for path in data.rglob("*") if path.is_file() and not path.is_symlink()]
    named = {str(path.relative_to(data)): path for path in found if path.name != SKIPPED}
    return {name: path.read_bytes() for name, path in named.items() if not name.startswith("quarantine")}


def damage(text: bytes, rng: random.Random) -> tuple[str, bytes]:
    at = rng.randrange(len(text))
    kind = rng.choice(["bit", "cut", "page"])
    if kind == "bit":
        return kind, text[:at] + bytes([text[at] ^ 1 << rng.randrange(8)]) + text[at + 1 :]
    if kind == "cut":
        return kind, text[:at]
    page = at // PAGE * PAGE
    return kind, text[:page] + bytes(len(text[page : page + PAGE])) + text[page + PAGE :]


def in_force(text: bytes) -> dict[bytes, bytes]:
    """What an index says: the last line for each offset."""
    return {line.split(b"|")[0]: line for line in text.splitlines()}


def is_harmless(name: str, good: bytes, bad: bytes, data: Path) -> bool:
    """Whether a damage that was not found changes nothing that anybody reads."""
    if name.endswith(".idx"):  # behind, as after a kill, or in a line that counts no more
        return good.startswith(bad) or in_force(good) == in_force(bad)
    if name.endswith(".toml"):
        topic = name.split("/")[1]
        return f"partitions = {topics.load(str(data), topic)[0]}\n".encode() in good
    if name == "producers.ckpt":  # nobody in it: the byte after the crc ends nothing
        return good.strip() == bad.strip()
    return name == "id"  # another id: only rings have it too, and there are none


def damage_and_heal(original: Original, data: Path, seed: int, pod: Pod | None = None) -> str:
    """One round; what became of the damage. With a pod the broker goes on, half of the time before anybody repairs."""
    rng = random.Random(seed)
    shutil.copytree(original.data, data, symlinks=True)
    name = rng.choice(sorted(name for name, text in original.files.items() if text))
    kind, bad = damage(original.files[name], rng)
    if bad == original.files[name]:
        return "no change"
    (data / name).write_bytes(bad)
    where = f"seed {seed}: {kind} in {name}"

    for log_name, log in show.logs(str(data), ""):
        if log.directory.endswith(os.path.dirname(name)) or name.count("/") < 2:
            for number, line in everything(log).items():
                assert original.logs[log_name].get(number) == line, f"{where}: served {line!r} as {log_name} {number}"

    found = findings(data)
    if found:
        near = os.path.splitext(name)[0]
        assert any(os.path.splitext(each.path)[0] == near for each in found), f"{where}: {found}"
    else:
        assert is_harmless(name, original.files[name], bad, data), f"{where}: not found"

    sent = original.sent
    if pod is not None and rng.randrange(2) and goes_on(pod, sent):
        sent = [*sent, AFTER]
    done = heal.repair(str(data))
    if [each.path for each in findings(data)] == [
        "format"
    ]:  # a number: only its owner knows that no other version wrote it
        (data / "format").write_bytes(original.files["format"])
    assert not [each for each in done if each.lost], f"{where}: {done}"
    assert not findings(data), f"{where}: {findings(data)}"
    if pod is None:
        for each, now in files(data).items():
            text = original.files[each]
            same = now == text or (each.endswith(".idx") and in_force(now) == in_force(text))
            # Without a checkpoint nobody knows when a topic came into force; its first record says when at the latest.
            same |= (
                each.endswith("wide/topic.toml") and "router.ckpt" not in original.files and b"partitions = 3\n" in now
            )
            assert same or (each == name and (name == "id" or not found)), f"{where}: {each} is not as it was"
    elif sent is original.sent:
        assert goes_on(pod, sent), f"{where}: {pod.tail()}"
        sent = [*sent, AFTER]
    if pod is not None:
        report = check(data, sent)
        assert not report.counts, f"{where}: {report}"
    return f"{kind} healed" if found else f"{kind} harmless"


@pytest.mark.parametrize("seed", range(16))
def test_one_damage_is_found_never_served_and_healed(original: Original, tmp_path: Path, seed: int) -> None:
    damage_and_heal(original, tmp_path / "data", seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(1000, 1004))
def test_the_broker_goes_on_after_it(original: Original, make_pod: Make, seed: int) -> None:
    pod = make_pod(KMQ_SEGMENT_BYTES=256 << 10)
    damage_and_heal(original, pod.data, seed, pod)


@pytest.mark.soak
def test_soak_two_thousand_damages(original: Original, make_pod: Make, tmp_path: Path, rng: random.Random) -> None:
    count, outcomes, start = int(os.environ.get("DAMAGES", "1100")), Counter[str](), rng.randrange(1 << 32)
    for number in range(count):
        pod = make_pod(KMQ_SEGMENT_BYTES=256 << 10) if number % 25 == 0 else None
        data = pod.data if pod else tmp_path / "data"
        outcomes[damage_and_heal(original, data, start + number, pod)] += 1
        shutil.rmtree(data)
        if number % 50 == 49:
            print(f"\rdamages={number + 1} of {count}: {dict(outcomes)}", end="", flush=True)
    print()
    assert sum(outcomes.values()) == count
