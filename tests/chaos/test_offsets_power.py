"""Power cuts while a gateway commits offsets: no acked commit is lost, and none goes back behind an acked one."""

import asyncio
import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from waiting import attempts

from chaos.loopfs import LoopFs, disk_of
from chaos.pod import PATIENCE_S, RINGS, Pod
from kmq.broker.stats import StatsPage
from kmq.config.settings import load
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.feed import Watermark
from kmq.gateway.groups.offsets import OffsetCommit, OffsetStore
from kmq.links import layout
from kmq.log import identity

MEMBERS = 8


def store_of(pod: Pod) -> OffsetStore:
    settings = load({name: str(value) for name, value in pod.settings.items()}, toml="")
    page = StatsPage(settings.instance, identity.read(settings.data, "id"), settings.data)
    return OffsetStore(settings, Watermark(page), FakeLogger())


async def loaded(pod: Pod) -> OffsetStore:
    store, tries = store_of(pod), attempts("the offsets", every_s=0)
    while not store.is_loaded:
        next(tries)
        with suppress(RequestRefused):
            await store.load()
    return store


def known(store: OffsetStore) -> dict[int, int]:
    """Member → the offset that its group has committed."""
    rows = [store.committed(f"g{member}").get(("orders", 0)) for member in range(MEMBERS)]
    return {member: row.offset for member, row in enumerate(rows) if row}


def cut(pod: Pod, disk: LoopFs) -> None:
    """Everything is gone at once but the disk."""
    disk.cut_power()
    for process in pod.processes.values():
        process.kill()
        process.wait()
    for ring in RINGS:
        layout.remove(pod.instance, ring)
    Path(f"/dev/shm/{pod.instance}.stats").unlink()
    disk.power_on()


async def commit_until_the_cut(pod: Pod, disk: LoopFs, asked: list[int], moment: int) -> list[int]:
    """Commit rising offsets; cut the power after `moment` acks. Returns the last acked offset of each member.

    `asked` has the last offset that each member has asked to commit.
    """
    store = await loaded(pod)
    acked, is_over, count = [0] * MEMBERS, asyncio.Event(), 0

    async def member(number: int) -> None:
        nonlocal count
        while not is_over.is_set():
            asked[number] += 1
            wanted = asked[number]
            try:
                await store.commit(f"g{number}", {("orders", 0): OffsetCommit(wanted)}, f"m{number}", 1)
            except RequestRefused:
                return
            if is_over.is_set():
                return  # an fdatasync that meets the cut may lie: power leaves no time to tell
            acked[number], count = wanted, count + 1
            if count >= moment:
                is_over.set()

    running = [asyncio.create_task(member(number)) for number in range(MEMBERS)]
    async with asyncio.timeout(PATIENCE_S):
        await is_over.wait()
    await asyncio.to_thread(cut, pod, disk)
    await store.close()
    await asyncio.gather(*running, return_exceptions=True)
    return acked


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [("ext4", 20), pytest.param("xfs", 20, marks=pytest.mark.soak)],
)
def test_no_acked_commit_is_lost_in_power_cuts(
    make_pod: Callable[..., Pod], tmp_path: Path, cleanup: ExitStack, rng: random.Random, kind: str, cuts: int
) -> None:
    disk = disk_of(kind, 256 << 20, tmp_path, cleanup)
    pod = make_pod(KMQ_DATA=disk.path / "data")
    pod.data = disk.path / "data"
    asked, promised = [0] * MEMBERS, [0] * MEMBERS
    for _ in range(cuts):
        pod.start()
        pod.wait_ready()
        acked = asyncio.run(commit_until_the_cut(pod, disk, asked, rng.randrange(20, 600)))
        promised = [max(pair) for pair in zip(promised, acked, strict=True)]
    pod.start()
    pod.wait_ready()

    async def look() -> dict[int, int]:
        store = await loaded(pod)
        found = known(store)
        await store.close()
        return found

    found = asyncio.run(look())
    for member in range(MEMBERS):
        assert promised[member] <= found.get(member, 0) <= asked[member]
    assert sum(promised) > 0
    pod.stop()
